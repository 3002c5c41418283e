"""What a process has taken from its driver and not given back, by the calls that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cubroker.driver.checked_calls import Calls

GIVEN_BACK_BY = {
    "cuMemHostAlloc": "cuMemFreeHost",
    "cuMemHostRegister": "cuMemHostUnregister",
    "cuStreamCreate": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuModuleLoadData": "cuModuleUnload",
}
"""The call that gives back what another has brought."""


def holdings(patch: pytest.MonkeyPatch, calls: Calls, kinds: Sequence[str]) -> dict[str, set[int]]:
    """Return what is taken by calls of these kinds from now on, and not yet given back: addresses and handles."""
    held: dict[str, set[int]] = {kind: set() for kind in kinds}
    for kind in kinds:
        patch.setattr(calls, kind, _taking(getattr(calls, kind), held[kind], kind), raising=False)
        back = GIVEN_BACK_BY[kind]
        patch.setattr(calls, back, _giving_back(getattr(calls, back), held[kind]), raising=False)
    return held


def _taking(call: Callable[..., Any], held: set[int], kind: str) -> Callable[..., Any]:
    def taking(*args: Any) -> Any:
        made = call(*args)
        held.add(int(args[0] if kind == "cuMemHostRegister" else made))
        return made

    return taking


def _giving_back(call: Callable[..., Any], held: set[int]) -> Callable[..., Any]:
    def giving_back(thing: Any) -> Any:
        answer = call(thing)
        held.discard(int(thing))
        return answer

    return giving_back
