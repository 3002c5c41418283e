"""The broker's end of the socketpair to one gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Self, cast

from cubroker.server import batches

log = logging.getLogger(__name__)

HIGH_WATER = 4 << 20
"""Bytes of answers that the gateway has not taken, past which it is behind: no large answer should follow."""

MAX_READING = 32 << 20
"""Bytes of them past which no further request is read, nor handed over, until it is not behind any more."""

AT_ONCE = batches.MAX_MESSAGES
"""Requests that are handed over in one round of the loop, which takes some milliseconds then."""

MAX_UNSENT = 64 << 20
"""Bytes of them past which an answer is dropped. The broker keeps it, and the client asks again."""


class Link(asyncio.Protocol):
    """Reads batches of requests and writes batches of answers; stops reading while the gateway is far behind.

    Args:
        receive: takes the frames of requests that are there. They end early, after a whole request, where what it sends
            meanwhile is more than the gateway takes; the others come later.

    Attributes:
        listening: done once the gateway listens; cancelled if it never does.
        ended: done once this is of no use any more.
        question: a frame that is sent back at once to where it comes from, whatever else waits. No client knows it.
    """

    _transport: asyncio.Transport

    def __init__(self, receive: Callable[[Iterator[bytes]], None]) -> None:
        loop = asyncio.get_running_loop()
        self.listening: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.question = os.urandom(16)
        self._receive = receive
        self._batches = batches.Batches()
        self._frames: deque[bytes] = deque()
        self._behind = False
        self._sent = self._taken = 0  # bytes of answers
        self._full = False
        self._going_on = False

    @classmethod
    async def over(cls, end: socket.socket, receive: Callable[[Iterator[bytes]], None]) -> Self:
        """Return a link over ``end``, which belongs to it from now on."""
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(receive), sock=end)
        return link

    def send(self, frames: Sequence[batches.Part]) -> bool:
        """Send one batch, unless the gateway is gone or far behind: then it is not even encoded.

        Returns whether the gateway is behind now; nothing is sent to find that out. When it is not behind any more,
        ``receive`` is called, with nothing perhaps.
        """
        if frames and not self._transport.is_closing() and self._transport.get_write_buffer_size() < MAX_UNSENT:
            data = batches.encode(frames)
            self._sent += len(data)
            self._transport.write(data)
            if self._transport.get_write_buffer_size() > MAX_READING:
                self._full = True
                self._transport.pause_reading()
        return self._behind

    def waits(self) -> bool:
        """Whether the next step is the gateway's: to bring something, or, if it is behind, to take the first answers.

        An answer that it took since the last call was such a step.
        """
        before, self._taken = self._taken, self._sent - self._transport.get_write_buffer_size()
        if self._behind and self._taken != before:
            return False
        if self._full:
            return True
        unread = self._frames or self._transport.is_closing()
        return not unread and not _is_readable(self._transport.get_extra_info("socket"))

    def close(self) -> None:
        """Close at once; ``ended`` follows."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        """Hand over every batch that is whole, all as one: what they ask is written down, and answered, together."""
        try:
            whole = self._batches.feed(data)
        except ValueError as error:
            log.error("the gateway sent what is no batch (%s); it is started again", error)
            return self.close()
        if not all(whole) and not self.listening.done():
            self.listening.set_result(None)
        self._frames.extend(chain.from_iterable(map(self._send_back, whole)))
        if self._frames:
            self._hand_over()
        return None

    def _send_back(self, batch: list[bytes]) -> list[bytes]:
        """Send the questions of a batch back, and return the rest of it."""
        if self.question not in batch:
            return batch
        rest: list[bytes] = []
        for routing, frame in batches.pairs(batch):
            if frame == self.question:
                self.send((routing, frame))
            else:
                rest += (routing, frame)
        return rest

    def pause_writing(self) -> None:
        """Note that the gateway is behind."""
        self._behind = True

    def resume_writing(self) -> None:
        """Go on, once the transport is through with this."""
        self._behind = self._full = False
        self._go_on_soon()

    def _go_on_soon(self) -> None:
        if not self._going_on:
            self._going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        self._hand_over()

    def _hand_over(self) -> None:
        """Hand some frames over, and the others in the next rounds of the loop; read no more until there are none."""
        try:
            self._receive(self._there())
        except BaseException:
            self.close()
            raise
        if self._frames and not self._full:
            self._transport.pause_reading()
            self._go_on_soon()
        elif not self._full:
            self._transport.resume_reading()

    def _there(self) -> Iterator[bytes]:
        """Yield frames that are there, two by two, until the gateway is far behind."""
        frames = self._frames
        for _ in range(AT_ONCE):
            if not frames or self._full:
                return
            yield frames.popleft()
            yield frames.popleft()

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closed its end, or this side did."""
        self.listening.cancel()
        if not self.ended.done():
            self.ended.set_result(None)


def _is_readable(end: socket.socket) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))
