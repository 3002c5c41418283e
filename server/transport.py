"""The broker's end of the socketpair to one gateway."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Self, cast

from cubroker.server import batches
from cubroker.server.answers import Frame

log = logging.getLogger(__name__)

HIGH_WATER = 4 << 20
"""Bytes of answers that the gateway has not taken, past which no further request is read."""

MAX_UNSENT = 64 << 20
"""Bytes of them past which an answer is dropped. The broker keeps it, and the client asks again."""


class Link(asyncio.Protocol):
    """Reads batches of requests and writes batches of answers; stops reading while the gateway does not."""

    _transport: asyncio.Transport

    def __init__(self, receive: Callable[[list[bytes]], None]) -> None:
        loop = asyncio.get_running_loop()
        self.listening: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._receive = receive
        self._batches = batches.Batches()

    @classmethod
    async def over(cls, end: socket.socket, receive: Callable[[list[bytes]], None]) -> Self:
        """Return a link over ``end``, which belongs to it from now on."""
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(receive), sock=end)
        return link

    def send(self, frames: Sequence[Frame]) -> None:
        """Send one batch, unless the gateway is gone or far behind: then it is not even encoded."""
        if not self._transport.is_closing() and self._transport.get_write_buffer_size() < MAX_UNSENT:
            self._transport.write(batches.encode(frames))

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
        if frames := list(chain.from_iterable(whole)):
            self._receive(frames)
        return None

    def pause_writing(self) -> None:
        """Take no further request while the answers to the last ones are not taken."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The gateway closed its end, or this side did."""
        self.listening.cancel()
        if not self.ended.done():
            self.ended.set_result(None)
