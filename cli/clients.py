"""``cubroker clients``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import msgspec

from cubroker.cli import options, table, text
from cubroker.cli.connect import connect
from cubroker.protocol.infos import ClientInfo

COLUMNS = (
    table.Column("SESSION", right=True),
    table.Column("PID", right=True),
    table.Column("USER"),
    table.Column("STATE"),
    table.Column("LEASES", fold=True),
)


@click.command("clients")
@options.as_json
@options.directory
def command(directory: Path, as_json: bool) -> None:
    """List this user's processes that use the broker, and what they hold; this command's own session is left out.

    Administrators of the broker see those of all users.
    A client is detached when its connection is gone and its process is not: it may still have memory mapped, so its
    leases stay until it ends.
    """
    with connect(directory) as broker:
        clients = [client for client in broker.clients() if client.session != broker.session]
    if as_json:
        text.document(msgspec.to_builtins(clients))
    elif clients:
        table.show(COLUMNS, [_row(client) for client in clients])
    else:
        text.say("No clients: nobody is attached, or no process of this user.")


def _row(client: ClientInfo) -> tuple[str, ...]:
    return str(client.session), str(client.pid), text.user(client.uid), client.state, held(client) or "none"


def held(client: ClientInfo) -> str:
    """Return what a client holds, in words; nothing if it holds nothing."""
    pools = Counter(f"{lease.pool}@{lease.version}" for lease in client.leases)
    return ", ".join(pool if times == 1 else f"{pool} ({times} times)" for pool, times in pools.items())
