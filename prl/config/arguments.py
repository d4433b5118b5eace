"""Numbers on command lines, for argparse."""

from __future__ import annotations

import argparse
import math


def a_count(text: str) -> int:
    """At least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def a_count_or_0(text: str) -> int:
    """At least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def an_amount(text: str) -> float:
    """Above 0, and finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0")
    return value


def a_share(text: str) -> float:
    """Above 0, at most 1."""
    if (value := an_amount(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is above 1")
    return value
