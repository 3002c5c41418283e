"""Stands for a package that an engine imports and does not need on a CPU: whatever is asked of it is a class.

A copy of this file is the package's ``__init__.py``. A program that computes with such a class fails soon.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.99.0"


class Anything(type):
    """A class that has every attribute: each is such a class, too."""

    def __getattr__(cls, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda *_, **__: None})


def anything(name: str) -> Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything(name, (), {"__init__": lambda *_, **__: None})


class Submodules(MetaPathFinder, Loader):
    """Finds every module below the package."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = anything


sys.meta_path.append(Submodules())
__getattr__ = anything
