"""``cubroker verify``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import click

from cubroker.cli import options, text
from cubroker.cli.connect import connect
from cubroker.cli.progress import progress
from cubroker.client import Broker
from cubroker.client.verify import Verified, verify
from cubroker.protocol.errors import Corrupted, CubrokerError
from cubroker.protocol.infos import PoolInfo

SHOWN = 10
"""Differences that are listed one by one."""


@click.command("verify")
@click.argument("reference", metavar="NAME[@VERSION]", callback=options.reference)
@click.argument("paths", metavar="[PATH...]", nargs=-1, type=options.PATH)
@click.option("--digest", is_flag=True, help="Compare with the digests that it was sealed with, instead of with files.")
@options.as_json
@options.directory
def command(
    reference: options.Reference, paths: tuple[Path, ...], directory: Path, *, digest: bool, as_json: bool
) -> None:
    """Compare a version, by default the current one, byte for byte with files, on every device that it is on.

    With --digest each device computes a digest of all that it holds, and no file is read. Digests are not
    cryptographic: a writer that knows them can keep them. Any difference is exit status 1.
    """
    if digest and paths:
        raise click.UsageError("--digest compares with what was sealed, and PATH with files: leave one of them out")
    if not digest and not paths:
        raise click.UsageError("Missing argument 'PATH...': say which files to compare with, or give --digest")
    if as_json and not digest:
        raise click.UsageError("--json tells what --digest finds; leave it out, or give both")
    with connect(directory) as broker:
        info, *_ = broker.describe(*reference)
        indexes = {device.uuid: device.index for device in broker.devices()}
        if digest:
            _digests(broker, info, indexes, as_json=as_json)
        else:
            _files(broker, info, indexes, paths)


class _Checked(NamedTuple):
    """What came of one device's check; ``why`` says how it differs from what was sealed, if it does."""

    nbytes: int
    seconds: float
    why: str | None


def _digests(broker: Broker, info: PoolInfo, indexes: Mapping[str, int], *, as_json: bool) -> None:
    found = {uuid: _check(broker, info, uuid) for uuid in info.devices}
    title = f"{info.name}@{info.version}"
    if as_json:
        devices = [
            {"index": indexes.get(uuid), "uuid": uuid, **each._asdict(), "equal": each.why is None}
            for uuid, each in found.items()
        ]
        text.document({"name": info.name, "version": info.version, "digest": info.digest, "devices": devices})
    else:
        for uuid, each in found.items():
            took = f"{text.size(each.nbytes)} in {text.duration(each.seconds)} ({text.rate(each.nbytes, each.seconds)})"
            outcome = "as it was sealed" if each.why is None else text.printable(each.why)
            text.say(f"{title} on device {text.place(indexes, uuid)}: {took}: {outcome}")
    if differing := sum(each.why is not None for each in found.values()):
        raise Corrupted(f"{title} is not what was sealed, on {differing} of {text.count(len(found), 'device')}")


def _check(broker: Broker, info: PoolInfo, uuid: str) -> _Checked:
    with broker.attach(info.name, version=info.version, device=uuid) as pool:
        began = perf_counter()
        try:
            pool.check()
            why = None
        except Corrupted as error:
            why = error.message
        return _Checked(pool.nbytes, perf_counter() - began, why)


def _files(broker: Broker, info: PoolInfo, indexes: Mapping[str, int], paths: tuple[Path, ...]) -> None:
    # The shards of all devices are one copy.
    copies = [None] if info.sharded else list(info.devices)
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
