"""The driver's functions, checked: each returns its values, or raises :class:`DriverError`.

``cuda.bindings.driver`` and the host driver answer ``(status,)`` or ``(status, value…)``. Every call of the driver
layer goes through :class:`Calls`, which returns the values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cubroker.driver import multicast_guard
from cubroker.driver.errors import DriverError

__all__ = ["Calls", "DriverError", "explained", "tolerated"]


@contextmanager
def explained(texts: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Replace the detail of a :class:`DriverError` by the text for its name, if there is one.

    Args:
        texts: texts by name of the error, or what makes them once there is an error.
    """
    try:
        yield
    except multicast_guard.MulticastOff:
        raise  # says which setting forbids the call
    except DriverError as error:
        # Mutate and re-raise: replacing the exception here would keep its frames alive until GC (3.12+).
        error.detail = (texts() if callable(texts) else texts).get(error.name, error.detail)
        error.args = (error.call, error.status, error.name, error.detail)  # pickle rebuilds the error from them
        raise


@contextmanager
def tolerated(*names: str) -> Iterator[None]:
    """Leave the block where the driver refuses with one of these results."""
    try:
        yield
    except DriverError as error:
        if error.name not in names:
            raise


class Calls:
    """The functions of a driver-shaped module, by their own names: ``calls.cuMemAlloc(nbytes)``.

    A function of one value returns it, one of several a tuple, one of none ``None``. On real hardware a multicast
    function is called only if :mod:`cubroker.driver.multicast_guard` allows it, each time.
    """

    def __init__(self, module: Any) -> None:
        #: The module itself, for its structs and enums.
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith(multicast_guard.PREFIX):
            checked = _guarded(name, self.module)
        else:
            checked = _checked(name, getattr(self.module, name), self.module.CUresult)
        setattr(self, name, checked)  # found without __getattr__ from now on
        return checked


def _checked(name: str, function: Callable[..., tuple[Any, ...]], results: Any) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        answer = function(*args)
        if answer[0]:  # CUDA_SUCCESS is 0
            raise DriverError(name, int(answer[0]), results(answer[0]).name, _shown(args))
        return answer[1] if len(answer) == 2 else answer[1:] or None

    return call


def _guarded(name: str, module: Any) -> Callable[..., Any]:
    """Ask the guard first: a function of real hardware is not even looked up before."""

    def call(*args: Any) -> Any:
        multicast_guard.check(module, name)
        return _checked(name, getattr(module, name), module.CUresult)(*args)

    return call


def _shown(args: tuple[Any, ...]) -> str:
    """Return the numbers that were passed. Structs stay out: a handle among them is a secret."""
    numbers = [str(arg) for arg in args if type(arg) is int]
    return f"asked with {', '.join(numbers)}" if numbers else ""
