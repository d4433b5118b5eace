"""Faults for the processes of a run, from outside: Python imports this file at start where its folder is on PYTHONPATH.

FAULTS names a Python file with `PATCHES`: module -> function that gets the module once it is imported, in any process
of the tree, and may replace what it likes in it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


def load_patches(path):
    spec = importlib.util.spec_from_file_location("faults_of_this_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PATCHES


class Patching(importlib.abc.MetaPathFinder):
    """Finds the modules to patch as everybody else would, and patches them behind their own loader."""

    def __init__(self, patches):
        self.patches = patches

    def find_spec(self, name, path=None, target=None):
        patch = self.patches.pop(name, None)  # once, and so the search below does not come back here
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_patch(module):
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch
        return spec


if os.environ.get("FAULTS"):
    sys.meta_path.insert(0, Patching(load_patches(os.environ["FAULTS"])))
