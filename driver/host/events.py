"""Events of host devices: always reached, since every call does its work before it returns.

What processes share of an event is that it exists. Its maker keeps a pipe open for writing, and those who opened
its handle hold the reading end, which hangs up once the event was destroyed or its maker is gone. Using it is
undefined on GPUs then; here it is refused.
"""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import select
import stat
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host import descriptors, sharing
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.heap import SECRET_BYTES
from cubroker.driver.host.state import State

_DISABLE_TIMING = 2
_INTERPROCESS = 4


@dataclass(eq=False)
class _Event:
    """``fds``: the pipe's ends, both of an event that was exported, the reading one of an event that was opened."""

    device: int
    shareable: bool = False
    opened: bool = False
    fds: tuple[int, ...] = ()
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)

    def exists(self) -> bool:
        if not self.opened:
            return True
        poll = select.poll()
        poll.register(self.fds[0], 0)  # a hang-up is always reported
        return not poll.poll(0)

    def export(self) -> None:
        if not self.fds:
            with descriptors.books() as ours:
                self.fds = os.pipe()
                ours.update(self.fds)

    def close(self) -> None:
        descriptors.close(*self.fds)
        self.fds = ()


class Events(State):
    """Numbers that stand for events; one that is unknown, or whose maker has ended it, is refused."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self.numbers = itertools.count(1)
        self._events: dict[int, _Event] = {}

    @answers(1)
    def cuEventCreate(self, Flags: int) -> Any:
        device = self.current()
        shareable = bool(Flags & _INTERPROCESS)
        if shareable and not Flags & _DISABLE_TIMING:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return self._enter(_Event(device, shareable))

    @answers(0)
    def cuEventQuery(self, hEvent: Any) -> None:
        self.captures.check_unsafe()
        self.check_event(hEvent)

    @answers(0)
    def cuEventSynchronize(self, hEvent: Any) -> None:
        self.captures.check_unsafe()
        self.check_event(hEvent)

    @answers(0)
    def cuEventDestroy(self, hEvent: Any) -> None:
        with self.lock:
            if int(hEvent) not in self._events:
                raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
            self._end(int(hEvent))

    @answers(1)
    def cuIpcGetEventHandle(self, event: Any) -> Any:
        with self.lock:
            known = self._events.get(int(event))
            if known is None or not known.shareable:
                raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
            self.owner = self.owner or sharing.Owner()
            known.export()
            raw = self.owner.offer(known.secret, sharing.Offer(known.fds[0], known.device))
        handle = cuda.CUipcEventHandle()
        ctypes.memmove(handle.getPtr(), raw, len(raw))
        return handle

    @answers(1)
    def cuIpcOpenEventHandle(self, handle: Any) -> Any:
        device = self.current()
        raw = ctypes.string_at(handle.getPtr(), sharing.HANDLE_BYTES)
        with self.lock:
            if self.owner and self.owner.owns(raw):
                raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        try:
            offer = sharing.fetch(raw)
        except LookupError:
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE) from None
        event = _Event(device, opened=True, fds=(offer.fd,))
        try:
            self._check_offer(device, offer)
        except Refusal:
            event.close()
            raise
        return self._enter(event)

    def check_event(self, event: Any) -> bool:
        """Raise ``Refusal`` unless it is an event that may be used; return whether processes can share it."""
        with self.lock:
            known = self._events.get(int(event))
            if known is None or not known.exists():
                raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
            return known.shareable or known.opened

    def destroy(self, device: int) -> None:
        """End the events of a context too."""
        super().destroy(device)
        for number in [number for number, event in self._events.items() if event.device == device]:
            self._end(number)

    def _check_offer(self, device: int, offer: sharing.Offer) -> None:
        if not stat.S_ISFIFO(os.fstat(offer.fd).st_mode):  # a handle of memory
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
        if not self.reaches(device, offer.device):
            raise Refusal(Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)

    def _enter(self, event: _Event) -> Any:
        number = next(self.numbers)
        with self.lock:
            self._events[number] = event
        return cuda.CUevent(number)

    def _end(self, number: int) -> None:
        event = self._events.pop(number)
        if self.owner:
            self.owner.withdraw(event.secret)
        event.close()
