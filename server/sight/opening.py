"""Where operators look in: a loopback port, which all of the host reach, or a Unix socket with a mode."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from cubroker.server.config import Access
from cubroker.server.ledger import Ledger
from cubroker.server.sight.exposition import Exposition, Standing
from cubroker.server.sight.lookout import Lookout
from cubroker.server.sight.meters import Meters
from cubroker.server.sight.observer import Sight
from cubroker.server.sight.window import Window

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
        listener = _listen(where, access)
    except OSError as error:
        log.error("there are no metrics, since nobody can listen on %s: %s", where, error)
        return None
    loop = asyncio.get_running_loop()
    lookout = Lookout(loop, lambda: ledger.view(everything=everything), lambda: sight.revision)
    window = Window(listener, lookout, Exposition(meters.registry, standing))
    log.info("metrics, and a page to look at, are on %s", _name(listener))
    return window


def _name(listener: socket.socket) -> str:
    address = listener.getsockname()
    if isinstance(address, str):
        return address
    host, port = address[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _listen(where: Path | tuple[str, int], access: Access) -> socket.socket:
    if not isinstance(where, Path):
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        return socket.create_server(where, family=family, backlog=BACKLOG)
    _sweep(where)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(where))
        if access.group is not None:
            os.chown(where, -1, access.group, follow_symlinks=False)
        where.chmod(access.mode)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _sweep(path: Path) -> None:
    """Remove the socket of one that is gone; what else is there stays, and keeps us from listening there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
        try:
            caller.connect(os.fspath(path))
        except ConnectionRefusedError:
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        except OSError:
            return
