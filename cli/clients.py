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


BEYOND = table.Column("BEYOND LEASES", right=True)
"""Shown once any client has memory without a lease: for most brokers there is nothing to tell."""


@click.command("clients")
@options.as_json
@options.directory
def command(directory: Path, as_json: bool) -> None:
    """List this user's processes that use the broker, and what they hold; this command's own session is left out.

    Administrators of the broker see those of all users.
    A client is detached when its connection is gone and its process is not: it may still have memory mapped, so its
    leases stay until it ends.

    Where a process has memory of the broker's mapped or open without a lease, BEYOND LEASES says how much. The broker
    cannot see that of every process: ? stands for what is unknown, null in --json.
    """
    with connect(directory) as broker:
        clients = [client for client in broker.clients() if client.session != broker.session]
    if as_json:
        text.document(msgspec.to_builtins(clients))
    elif clients:
        beyond = any(client.mapped_beyond_leases for client in clients)
        rows = [(*_row(client), *([_beyond(client)] if beyond else [])) for client in clients]
        table.show((*COLUMNS, BEYOND) if beyond else COLUMNS, rows)
    else:
        text.say("No clients: nobody is attached, or no process of this user.")


def _row(client: ClientInfo) -> tuple[str, ...]:
    return str(client.session), str(client.pid), text.user(client.uid), client.state, held(client) or "none"


def _beyond(client: ClientInfo) -> str:
    nbytes = client.mapped_beyond_leases
    return "?" if nbytes is None else text.size(nbytes)


def held(client: ClientInfo) -> str:
    """Return what a client holds, in words; nothing if it holds nothing."""
    pools = Counter(f"{lease.pool}@{lease.version}" for lease in client.leases)
    return ", ".join(pool if times == 1 else f"{pool} ({times} times)" for pool, times in pools.items())
