"""Hosts that only the machine itself reaches."""

from __future__ import annotations

from urllib.parse import urlsplit

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def on_loopback(urls: tuple[str, ...]) -> list[str]:
    """Those of `urls` that only this machine reaches."""
    return [url for url in urls if urlsplit(url).hostname in LOOPBACK_HOSTS]
