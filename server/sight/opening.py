"""Where operators look in: a loopback port, which all of the host reach, or a Unix socket with a mode."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from cubroker.protocol.system_errors import explain
from cubroker.server.config import Access
from cubroker.server.ledger import Ledger
from cubroker.server.sight.exposition import Exposition, Standing
from cubroker.server.sight.lookout import Lookout
from cubroker.server.sight.meters import Meters
from cubroker.server.sight.observer import Sight
from cubroker.server.sight.window import Window
from cubroker.server.unix_sockets import BoundSocket

log = logging.getLogger(__name__)

BACKLOG = 32
"""Connections that may wait to be accepted."""


def open_window(
    where: Path | tuple[str, int],
    access: Access,
    ledger: Ledger,
    sight: Sight,
    meters: Meters,
    standing: Callable[[], Standing] = Standing,
) -> Window | None:
    """Serve metrics and the page until the window is closed.

    Whoever passes a Unix socket sees everything, as far as ``access`` lets it pass; whoever reaches a port is unknown,
    and sees what a stranger to all pools may. None, and a line in the log, if nobody can listen there: a broker has
    better to do than to be looked at.
    """
    everything = isinstance(where, Path)
    try:
        listener, remove = _listen(where, access)
    except OSError as error:
        log.error("there are no metrics, since nobody can listen on %s: %s", where, explain(error, str(where)))
        return None
    loop = asyncio.get_running_loop()
    lookout = Lookout(loop, lambda: ledger.view(everything=everything), lambda: sight.revision)
    window = Window(listener, lookout, Exposition(meters.registry, standing), remove)
    log.info("metrics, and a page to look at, are on %s", _name(listener))
    return window


def _name(listener: socket.socket) -> str:
    address = listener.getsockname()
    if isinstance(address, str):
        return address
    host, port = address[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _listen(where: Path | tuple[str, int], access: Access) -> tuple[socket.socket, Callable[[], None]]:
    """Return a listening socket, and what to do before it is closed."""
    if not isinstance(where, Path):
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        return socket.create_server(where, family=family, backlog=BACKLOG), lambda: None
    bound = BoundSocket(where, socket.SOCK_STREAM, access, BACKLOG)
    return bound.listener, bound.remove
