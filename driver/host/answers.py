"""How a host function answers like a binding: failures are raised inside, and become statuses here."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from cuda.bindings import driver as cuda

P = ParamSpec("P")
Result = cuda.CUresult


class Refusal(Exception):
    """The call ends with this ``CUresult``."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


class Answering(Protocol):
    """What answers: it knows whether it may be called at all."""

    def check_usable(self) -> None:
        """Raise ``Refusal`` before ``cuInit`` and in a forked child."""


A = TypeVar("A", bound=Answering)


def answers(
    values: int,
) -> Callable[[Callable[Concatenate[A, P], Any]], Callable[Concatenate[A, P], tuple[Any, ...]]]:
    """Make a method answer ``(status, value…)`` with so many values, each ``None`` on failure.

    ``MemoryError`` and the system's errors become the statuses that a GPU's driver gives for them.
    """

    def decorate(method: Callable[Concatenate[A, P], Any]) -> Callable[Concatenate[A, P], tuple[Any, ...]]:
        @functools.wraps(method)
        def answer(self: A, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
            try:
                self.check_usable()
                result = method(self, *args, **kwargs)
            except (Refusal, MemoryError, OSError) as error:
                return _status(error), *(None,) * values
            if values == 1:
                return Result.CUDA_SUCCESS, result
            return Result.CUDA_SUCCESS, *(result or ())

        return answer

    return decorate


def _status(error: Refusal | MemoryError | OSError) -> Any:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, TimeoutError):
        return Result.CUDA_ERROR_TIMEOUT
    if isinstance(error, MemoryError) or error.errno in (errno.ENOMEM, errno.ENOSPC):
        return Result.CUDA_ERROR_OUT_OF_MEMORY
    return Result.CUDA_ERROR_OPERATING_SYSTEM
