"""The driver's functions, checked: each returns its values, or raises :class:`DriverError`.

``cuda.bindings.driver`` answers ``(status,)``, ``(status, value)`` or ``(status, value, value…)``, and
so does the host driver. Everything above this module sees the values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class DriverError(Exception):
    """A driver call failed.

    Attributes:
        call: the function, ``"cuMemAlloc"``.
        status: its ``CUresult`` as a number.
        name: that number's name, ``"CUDA_ERROR_OUT_OF_MEMORY"``.
        detail: what it was asked for, or what to do about it; may be empty.
    """

    def __init__(self, call: str, status: int, name: str, detail: str = "") -> None:
        super().__init__(call, status, name, detail)
        self.call = call
        self.status = status
        self.name = name
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.call} failed with {self.name} ({self.status})" + (f": {self.detail}" if self.detail else "")

    @property
    def out_of_memory(self) -> bool:
        """Whether the device had no room."""
        return self.name == "CUDA_ERROR_OUT_OF_MEMORY"


@contextmanager
def explained(texts: Mapping[str, str]) -> Iterator[None]:
    """Give the detail of a :class:`DriverError` in the words that ``texts`` has for its name, if it has any."""
    try:
        yield
    except DriverError as error:
        if error.name not in texts:
            raise
        raise DriverError(error.call, error.status, error.name, texts[error.name]) from None


class Calls:
    """The functions of a driver-shaped module, by their own names: ``calls.cuMemAlloc(nbytes)``.

    A function of one value returns it, one of several a tuple, one of none ``None``.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        """The module itself, for its structs and enums."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        checked = _checked(name, getattr(self.module, name), self.module.CUresult)
        setattr(self, name, checked)  # found without __getattr__ from now on
        return checked


def _checked(name: str, function: Callable[..., tuple[Any, ...]], results: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        status, *values = function(*args)
        if status != results.CUDA_SUCCESS:
            raise DriverError(name, int(status), results(status).name, _shown(args))
        return values[0] if len(values) == 1 else tuple(values) or None

    return call


def _shown(args: tuple[Any, ...]) -> str:
    """The numbers that were passed. Structs stay out: they say nothing, and a handle is a secret."""
    numbers = [str(arg) for arg in args if type(arg) is int]
    return f"asked with {', '.join(numbers)}" if numbers else ""
