"""Whether the gateway still forwards: the broker asks it something, all the way that a client's request takes.

A gateway may hang and stay: stopped by a signal, or with libzmq stuck while its end of the pipe still answers. Nothing
ends then, so nothing is noticed, and no request of any client comes through. So the broker is a client of its own
gateway. It sends a question to the request socket; libzmq and the gateway bring that to the broker, whose :class:`Link`
sends it back at once; and it has to come out of the request socket again.

Nothing but that answer counts, and a gateway is not blamed for what others do:

* Time is counted in questions, one for each turn of the broker's own loop that is due. A broker that was stopped, or a
  machine that was suspended, has one turn when it goes on, however long that took.
* While the pipe has something that the broker has not read, the answer may wait for the broker. While the gateway is
  behind with answers and takes some, it works (:meth:`Link.waits`).
* A flood may keep the broker out of the request socket's backlog, as it does others. Until the broker is in there, a
  gateway has as long as for its start. The connection is kept from then on, and libzmq reads from each in turn.
* A question that cannot be asked, for want of descriptors or of the socket's file, is not counted.

The broker never loads libzmq, so what a DEALER says is written out here: ZMTP 3.0 (https://rfc.zeromq.org/spec/23/)
with the NULL mechanism. What comes back is not parsed: a question is random, so wherever it is found it is the answer.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from pathlib import Path

from cubroker.server.transport import Link

INTERVAL = 0.5
"""Seconds between two questions."""

UNANSWERED = 4
"""Questions in a row after which a gateway hangs."""

UNANSWERED_AT_START = 40
"""The same for one that does not listen yet: it starts an interpreter and loads libzmq first."""

ENOUGH = 4096
"""Bytes that are read at a time. The handshake has about 100, an answer 18."""

_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_COMMAND, _MESSAGE = 4, 0


async def silence(link: Link, path: Path) -> str:
    """Wait until a gateway has ended, and return an empty text; or until it hangs, and return what it left undone.

    Args:
        link: the pipe to the gateway.
        path: the request socket.
    """
    with closing(Probe(path, link.question)) as probe:
        unanswered, limit = 0, UNANSWERED_AT_START
        while unanswered < limit:
            asked = probe.ask()
            await asyncio.wait((link.ended,), timeout=INTERVAL)
            if link.ended.done():
                return ""
            if limit != UNANSWERED and probe.connected and link.listening.done():
                unanswered, limit = 0, UNANSWERED
            elif probe.answered():
                unanswered = 0
            elif link.waits() and asked:
                unanswered += 1
    return f"brought back none of {limit} questions in {limit * INTERVAL:g} s"


class Probe:
    """A client of the request socket that asks one question again and again, over another connection when one breaks.

    Args:
        path: the request socket.
        question: what is asked, less than 256 bytes; random.
    """

    def __init__(self, path: Path, question: bytes) -> None:
        self._path = path
        self._question = question
        self._channel: socket.socket | None = None
        self._ready = False
        self._heard = b""  # the end of what came since the last answer, or the greeting

    @property
    def connected(self) -> bool:
        """Whether there is a connection; the gateway may have to take it from the backlog yet."""
        return self._channel is not None

    def ask(self) -> bool:
        """Ask once more; False if that is impossible for reasons that are not the gateway's."""
        try:
            if self._channel is None:
                self._channel, self._ready, self._heard = self._dial(), False, b""
            elif self._ready:
                self._channel.send(_frame(_MESSAGE, self._question))
            elif len(self._heard) >= len(_GREETING):  # libzmq 4.3.5 hangs up on who does not wait for its greeting
                self._channel.send(_frame(_COMMAND, _READY) + _frame(_MESSAGE, self._question))
                self._ready = True
        except BlockingIOError:  # nobody takes connections from the backlog, or reads from this one
            return True
        except (BrokenPipeError, ConnectionResetError):  # the gateway hung up
            self.close()
            return True
        except OSError:
            self.close()
            return False
        return True

    def answered(self) -> bool:
        """Whether an answer has come since the last call."""
        if self._channel is None:
            return False
        try:
            data = self._channel.recv(ENOUGH)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            self.close()
        heard = self._heard + data
        found = self._question in heard
        self._heard = b"" if found else heard[-len(_GREETING) :]
        return found

    def close(self) -> None:
        """Close the connection."""
        if self._channel:
            self._channel.close()
            self._channel = None

    def _dial(self) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.setblocking(False)
            channel.connect(str(self._path))
            channel.send(_GREETING)
        except OSError:
            channel.close()
            raise
        return channel


def _frame(kind: int, body: bytes) -> bytes:
    return bytes((kind, len(body))) + body
