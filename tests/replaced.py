"""A copy of the installed package that a test replaces on disk, as an upgrade in place does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import cubroker

HERE = Path(cubroker.__file__).parent


class PackageCopy:
    """The package in a folder of its own, and the environment in which a Python imports it from there."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cubroker"
        shutil.copytree(HERE, self.root, ignore=shutil.ignore_patterns("__pycache__"))
        self.environ = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def replace(self, *without: str) -> None:
        """Write every file anew, as pip does, but for some that the next release has no more."""
        shutil.rmtree(self.root)
        shutil.copytree(HERE, self.root, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
        for name in without:
            (self.root / name).unlink()
