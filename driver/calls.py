"""The driver's functions, checked: each returns its values, or raises :class:`DriverError`.

``cuda.bindings.driver`` answers ``(status,)``, ``(status, value)`` or ``(status, value, value…)``, and
so does the host driver. Everything above this module sees the values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cubroker.driver import guard
from cubroker.driver.errors import DriverError

__all__ = ["Calls", "DriverError", "explained"]


@contextmanager
def explained(texts: Mapping[str, str]) -> Iterator[None]:
    """Give the detail of a :class:`DriverError` in the words that ``texts`` has for its name, if it has any."""
    try:
        yield
    except guard.MulticastOff:
        raise  # it has words of its own
    except DriverError as error:
        # The same error: from Python 3.12 on, one that another takes the place of in here stays, with all its callers'
        # variables, until the collector comes.
        error.detail = texts.get(error.name, error.detail)
        error.args = (error.call, error.status, error.name, error.detail)  # which is what a pickled one is made of
        raise


class Calls:
    """The functions of a driver-shaped module, by their own names: ``calls.cuMemAlloc(nbytes)``.

    A function of one value returns it, one of several a tuple, one of none ``None``. Multicast functions of real
    hardware are not called unless :mod:`cubroker.driver.guard` lets them, each time.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        """The module itself, for its structs and enums."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith(guard.PREFIX):
            checked = _guarded(name, self.module)
        else:
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


def _guarded(name: str, module: Any) -> Callable[..., Any]:
    """The guard comes first: of real hardware the function is not even looked up before."""

    def call(*args: Any) -> Any:
        guard.check(module, name)
        return _checked(name, getattr(module, name), module.CUresult)(*args)

    return call


def _shown(args: tuple[Any, ...]) -> str:
    """The numbers that were passed. Structs stay out: they say nothing, and a handle is a secret."""
    numbers = [str(arg) for arg in args if type(arg) is int]
    return f"asked with {', '.join(numbers)}" if numbers else ""
