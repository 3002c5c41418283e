"""Requests on their way through the gateway: small ones go first, and large ones wait for each other alone.

libzmq takes one message after the other from all clients in turn, whatever they weigh, and a layout of ten megabytes
is on its way to the broker for as long as thousands of other requests. So the gateway reads on while it forwards, and
sets large requests aside: they go in pieces, one after each batch of small ones, and clients take turns with theirs.
What a client has set aside is bounded; past that its request is dropped, and its client sends it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import zmq

from cubroker.server import batches

LARGE = 64 << 10
"""Bytes of a request that is set aside."""

MAX_ASIDE = 32 << 20
"""Bytes of requests that are set aside for one client."""

MAX_ALL_ASIDE = 256 << 20
"""Bytes of those of all clients together."""


Buffer = bytes | memoryview


class Intake:
    """Receives requests from a ROUTER, and puts them into batches."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._router = router
        self._small: list[bytes] = []  # routing ids and frames, as they travel
        self._room = batches.FULL
        self._large: dict[bytes, deque[zmq.Frame]] = {}  # by routing id, whose turn is next first
        self._aside = 0
        self._current: tuple[bytes, memoryview] | None = None  # the large one that is under way, and what is left of it
        self._piece_is_next = False

    def __bool__(self) -> bool:
        """Whether there is anything to forward."""
        return bool(self._small or self._large or self._current)

    @property
    def full(self) -> bool:
        """Whether the small requests that were received fill a batch."""
        return self._room <= 0 or len(self._small) >= 2 * batches.MAX_MESSAGES

    def receive(self) -> None:
        """Receive the requests that are there, up to as many as a batch has."""
        receive = self._router.recv
        for _ in range(batches.MAX_MESSAGES):
            if self.full:
                return
            try:
                routing = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = receive(copy=False)  # which says whether there is more, and sooner than the socket does
            if message.more:
                self._router.recv_multipart()  # requests have one frame: drop the rest and the whole
            elif len(message) > LARGE:
                self._set_aside(routing, message)
            else:
                frame = message.bytes
                self._small += (routing, frame)
                self._room -= len(frame)

    def batch(self) -> Sequence[Buffer]:
        """Return the next batch, which is empty if there is nothing: all small requests, or a piece of a large one."""
        if self._piece_is_next or not self._small:
            self._piece_is_next = False
            if self._current or self._large:
                return self._piece()
        self._piece_is_next = True
        batch, self._small, self._room = self._small, [], batches.FULL
        return batch

    def _set_aside(self, routing: bytes, message: zmq.Frame) -> None:
        line = self._large.get(routing, ())
        size = len(message)
        if sum(map(len, line)) + size <= MAX_ASIDE and self._aside + size <= MAX_ALL_ASIDE:
            self._large.setdefault(routing, deque()).append(message)  # as it is: copying it would take milliseconds
            self._aside += size

    def _piece(self) -> Sequence[Buffer]:
        routing, left = self._current or self._next_large()
        piece, left = left[: batches.PIECE], left[batches.PIECE :]
        self._current = (routing, left) if left else None
        return (routing, piece, batches.MORE if left else batches.LAST)

    def _next_large(self) -> tuple[bytes, memoryview]:
        routing = next(iter(self._large))
        line = self._large.pop(routing)
        frame = line.popleft()
        self._aside -= len(frame)
        if line:
            self._large[routing] = line
        return routing, frame.buffer
