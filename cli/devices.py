"""``cubroker devices``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from cubroker.cli import options, table, text
from cubroker.cli.connect import connect
from cubroker.protocol.infos import DeviceInfo

COLUMNS = (
    table.Column("INDEX", right=True),
    table.Column("UUID"),
    table.Column("NAME", fold=True),
    table.Column("TOTAL", right=True),
    table.Column("BUDGET", right=True),
    table.Column("ALLOCATED", right=True),
    table.Column("PROMISED", right=True),
)

SHORT = len("GPU-01234567")


@click.command("devices")
@options.as_json
@options.directory
def command(directory: Path, as_json: bool) -> None:
    """List the broker's devices.

    BUDGET is what pools may take of TOTAL; PROMISED is granted and not allocated yet. A UUID is shown as far as it is
    unlike the others, which is as far as --device needs it.
    """
    with connect(directory) as broker:
        devices = broker.devices()
    if as_json:
        text.document(msgspec.to_builtins(devices))
    else:
        length = _distinct([device.uuid for device in devices])
        table.show(COLUMNS, [_row(device, length) for device in devices])


def _distinct(uuids: Sequence[str]) -> int:
    """Return how many characters tell every UUID from the others, and no fewer than a GPU's first group."""
    longest = max(map(len, uuids), default=0)
    return next((n for n in range(SHORT, longest) if len({uuid[:n] for uuid in uuids}) == len(uuids)), longest)


def _row(device: DeviceInfo, length: int) -> tuple[str, ...]:
    figures = (device.total, device.budget, device.allocated, device.promised)
    return str(device.index), device.uuid[:length], device.name, *map(text.size, figures)
