"""Where operators look in: a loopback port, which all of the host reach, or a Unix socket with a mode.

A port shows everything to who has the token. Without a token whoever passes a Unix socket sees everything.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from cubroker.protocol.errors import Invalid
from cubroker.protocol.system_errors import explain
from cubroker.server.config import Access, Metrics
from cubroker.server.ledger import Ledger
from cubroker.server.sight.exposition import Exposition, Standing
from cubroker.server.sight.lookout import Lookout
from cubroker.server.sight.meters import Meters
from cubroker.server.sight.observer import Sight
from cubroker.server.sight.tokens import TokenCheck, read
from cubroker.server.sight.window import Showing, Window
from cubroker.server.unix_sockets import BoundSocket

log = logging.getLogger(__name__)

BACKLOG = 32
"""Connections that may wait to be accepted."""


def open_window(
    metrics: Metrics,
    ledger: Ledger,
    sight: Sight,
    meters: Meters,
    standing: Callable[[], Standing] = Standing,
) -> Window | None:
    """Serve metrics and the page, where ``metrics`` says, until the window is closed.

    Who shows the token of ``metrics.token_file`` sees everything; without one, so does whoever passes a Unix socket.
    Others see what a stranger to all pools may, if ``metrics.public`` says so, and else nothing. None, and a line in
    the log, if nobody can listen there or the token cannot be read: a broker has better to do than to be looked at.
    """
    where = metrics.listen
    assert where is not None

    def showing(*, everything: bool) -> Showing:
        lookout = Lookout(loop, lambda: ledger.view(everything=everything), lambda: sight.revision)
        return Showing(lookout, Exposition(meters.registry, standing, everything=everything))

    try:
        token = None if metrics.token_file is None else read(metrics.token_file)
        listener, remove = _listen(where, metrics.access)
    except OSError as error:
        log.error("there are no metrics, since nobody can listen on %s: %s", where, explain(error, str(where)))
        return None
    except Invalid as error:
        log.error("there are no metrics: %s", error.message)
        return None
    loop = asyncio.get_running_loop()
    everything = showing(everything=True).routes
    otherwise = everything if isinstance(where, Path) and token is None else None
    if otherwise is None and metrics.public:
        otherwise = showing(everything=False).routes
    window = Window(listener, TokenCheck(token, everything, otherwise).admit, remove)
    log.info("metrics, and a page to look at, are on %s, %s", _name(listener), _readers(metrics))
    return window


def _readers(metrics: Metrics) -> str:
    """Say in words who sees them."""
    bearers = "for who has the token" if metrics.token_file is not None else ""
    if isinstance(metrics.listen, Path):
        passing = f"for whom mode {metrics.access.mode:03o} lets pass"
        return f"{passing} and {bearers}" if bearers else passing
    strangers = "as far as strangers may know for everybody" if metrics.public else ""
    return " and ".join(filter(None, (bearers, strangers)))


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
