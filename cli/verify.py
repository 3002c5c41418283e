"""``cubroker verify``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.cli.connect import connect
from cubroker.cli.progress import progress
from cubroker.client import Broker
from cubroker.client.verify import Verified, verify
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.infos import PoolInfo

SHOWN = 10
"""Differences that are listed one by one."""


@click.command("verify")
@click.argument("reference", metavar="NAME[@VERSION]", callback=options.reference)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=options.PATH)
@options.directory
def command(reference: options.Reference, paths: tuple[Path, ...], directory: Path) -> None:
    """Compare a version, by default the current one, byte for byte with files, on every device that it is on.

    Any difference is exit status 1.
    """
    with connect(directory) as broker:
        info, *_ = broker.describe(*reference)
        # The shards of all devices are one copy.
        copies = [None] if info.sharded else list(info.devices)
        indexes = {device.uuid: device.index for device in broker.devices()}
        found = {uuid: _compare(broker, info, uuid, indexes, paths) for uuid in copies}
    title = f"{info.name}@{info.version}"
    differences = [f"{uuid or title}: {line}" for uuid, outcome in found.items() for line in outcome.differences]
    for line in differences[:SHOWN]:
        text.say(text.printable(line))
    if differences:
        raise CubrokerError(f"{title} is not what the files hold: {text.count(len(differences), 'difference')}")
    first = found[copies[0]]
    places = "" if len(found) == 1 else f", on {len(found)} devices"
    text.say(f"{title}: {text.count(first.tensors, 'tensor')}, {text.size(first.nbytes)}, equal to the files{places}")


def _compare(
    broker: Broker, info: PoolInfo, uuid: str | None, indexes: Mapping[str, int], paths: tuple[Path, ...]
) -> Verified:
    where = "" if uuid is None else f" on device {text.place(indexes, uuid)}"
    with progress(f"comparing {info.name}@{info.version}{where}") as report:
        return verify(broker, info.name, paths, version=info.version, device=uuid, progress=report)
