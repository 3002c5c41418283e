"""How a command reaches the broker: within seconds, since somebody waits for it at a terminal."""

from __future__ import annotations

from pathlib import Path

import click

from cubroker.client import Broker
from cubroker.client.hello import Silent


def connect(directory: Path) -> Broker:
    """Open a session with the broker that serves ``directory``, which has ``--timeout`` seconds to greet.

    Raises:
        Unavailable: no broker serves there, or none answers in time.
        Denied: this user may not connect.
        OverQuota: this user has as many sessions as it may have.
    """
    limit: float = click.get_current_context().find_root().params["timeout"]
    try:
        return Broker(directory, connect_timeout=limit)
    except Silent as error:
        raise Silent(f"{error.message}; cubroker --timeout SECONDS waits longer") from None
