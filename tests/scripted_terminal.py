"""`python scripted_terminal.py KIND POINT`: what `python -m prl.KIND POINT` is, with tiny roles."""

import functools
import sys

import runtime_roles

import prl.runtime.launch
from prl.runtime.by_hand import run_role

if __name__ == "__main__":
    prl.runtime.launch.run = functools.partial(prl.runtime.launch.run, entries=runtime_roles.ENTRIES)
    run_role(sys.argv.pop(1))
