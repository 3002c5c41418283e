"""``cubroker ls``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from cubroker.cli import options, table, text
from cubroker.cli.connect import connect
from cubroker.protocol.infos import PoolInfo

COLUMNS = (
    table.Column("POOL", fold=True),
    table.Column("STATE"),
    table.Column("SIZE", right=True),
    table.Column("TENSORS", right=True),
    table.Column("DEVICES"),
    table.Column("LEASES", right=True),
    table.Column("OWNER"),
    table.Column("MODE"),
)


@click.command("ls")
@options.as_json
@options.directory
def command(directory: Path, as_json: bool) -> None:
    """List every live version of every pool.

    SIZE is what each device holds, or all of them together if the pool is sharded; DEVICES are the indexes that
    `cubroker devices` shows, or "gone": the broker does not serve it any more, and the pool was lost with it.
    """
    with connect(directory) as broker:
        pools, devices = broker.pools(), broker.devices()
    if as_json:
        text.document(msgspec.to_builtins(pools))
    elif pools:
        indexes = {device.uuid: device.index for device in devices}
        table.show(COLUMNS, [_row(pool, indexes) for pool in pools])
    else:
        text.say("No pools: nothing has been loaded yet, or everything is retired.")


def _row(pool: PoolInfo, indexes: Mapping[str, int]) -> tuple[str, ...]:
    return (
        f"{pool.name}@{pool.version}",
        pool.state,
        text.size(pool.nbytes),
        str(pool.tensors),
        ",".join(text.place(indexes, uuid) for uuid in pool.devices) + (" sharded" if pool.sharded else ""),
        str(pool.leases),
        text.user(pool.owner),
        f"{pool.mode:03o}",
    )
