"""The window through which operators look: a thread that serves metrics, the page, and what the page shows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import platform
import pwd
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from importlib.resources import files
from threading import Thread

import msgspec

from cubroker.protocol.infos import NOBODY
from cubroker.protocol.messages import View
from cubroker.server.sight.exposition import CONTENT_TYPE, Exposition
from cubroker.server.sight.http import Admit, Reply, Route, Service
from cubroker.server.sight.lookout import Lookout

log = logging.getLogger(__name__)

PERIOD = 1.0
"""Seconds between two pictures, at least: more are of no use to eyes."""

PULSE = 10
"""Periods after which a reader that there is nothing new for hears that there is not, and a dead one is found."""


class Window:
    """Serves on a listening socket, on a thread of its own, until it is closed.

    Args:
        listener: the socket; closed with the window.
        admit: says what each reader gets, of a :class:`Showing` perhaps.
        remove: removes the file of the socket, if it has one.
    """

    def __init__(self, listener: socket.socket, admit: Admit, remove: Callable[[], None] = lambda: None) -> None:
        self._listener = listener
        self._admit = admit
        self._remove = remove
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = Thread(target=self._run, name="sight")
        self._thread.start()

    def close(self) -> None:
        """Serve no more. It takes a moment, in which the broker's loop has to be free."""
        self._remove()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        service = Service(self._admit)
        server = await asyncio.start_server(service.accept, sock=self._listener)
        async with server:
            await self._stop.wait()
            await service.close()


class Showing:
    """What one kind of reader is shown.

    Args:
        lookout: gets views, of what these readers may see.
        exposition: writes metrics of them.

    Attributes:
        routes: the metrics, the page, and what the page shows, by path.
    """

    def __init__(self, lookout: Lookout, exposition: Exposition) -> None:
        self._lookout = lookout
        self._exposition = exposition
        self._encoded: tuple[View | None, bytes] = (None, b"")
        page, policy = page_and_policy()
        self._page = Reply("text/html; charset=utf-8", page, headers=(("Content-Security-Policy", policy),))
        self.routes: Mapping[str, Route] = {
            "/": self._show,
            "/metrics": self._expose,
            "/view": self._tell,
            "/events": self._follow,
        }

    async def _show(self) -> Reply:
        return self._page

    async def _expose(self) -> Reply:
        return Reply(CONTENT_TYPE, self._exposition.text((await self._lookout.view()).view))

    async def _tell(self) -> Reply:
        return Reply("application/json", self._picture((await self._lookout.view()).view))

    async def _follow(self) -> Reply:
        return Reply("text/event-stream", self._pictures())

    def _picture(self, view: View) -> bytes:
        if self._encoded[0] is not view:
            self._encoded = (view, encode(view))
        return self._encoded[1]

    async def _pictures(self) -> AsyncIterator[bytes]:
        """Yield a picture now, and whenever there is something new to see."""
        shown, quiet = -1, 0
        while True:
            # What was seen for somebody else may be older than the news: then it is looked again.
            seen = await self._lookout.view() if self._lookout.revision() != shown else None
            if seen and seen.revision != shown:
                shown, quiet = seen.revision, 0
                yield b"data: " + self._picture(seen.view) + b"\n\n"
            elif quiet == PULSE:
                quiet = 0
                yield b": nothing new\n\n"
            quiet += 1
            await asyncio.sleep(PERIOD)  # a pace, not a wait: what is new meanwhile comes in one picture


def encode(view: View) -> bytes:
    """Return what the page shows of a view, as one line of JSON."""
    users = {client.uid for client in view.clients} | {block.owner for block in view.blocks}
    users |= {pool.owner for pool in view.pools}
    return msgspec.json.encode(
        {
            "time": time.time(),
            "host": platform.node(),
            "users": {str(uid): user(uid) for uid in sorted(users)},
            "devices": view.devices,
            "pools": view.pools,
            "clients": view.clients,
            "blocks": view.blocks,
            "waiters": view.waiters,
        }
    )


@cache
def user(uid: int) -> str:
    """Return the name of a user, or the number where there is none."""
    if uid == NOBODY:
        return "other users"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def page_and_policy() -> tuple[bytes, str]:
    """Return the page, and the policy that lets it run and show what is in it, and nothing else."""
    page = files(__package__).joinpath("page.html").read_bytes()
    hashes = {tag: _hash(re.search(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)) for tag in (b"style", b"script")}
    return page, (
        f"default-src 'none'; style-src {hashes[b'style']}; script-src {hashes[b'script']}; connect-src 'self';"
        f" img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(found: re.Match[bytes] | None) -> str:
    assert found
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}'"
