"""``cubroker show``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from cubroker.cli import options, table, text
from cubroker.cli.connect import connect
from cubroker.protocol.infos import PoolInfo
from cubroker.protocol.layout import Layout, TensorSpec
from cubroker.protocol.messages import DigestList

COLUMNS = (
    table.Column("TENSOR", fold=True),
    table.Column("DTYPE"),
    table.Column("SHAPE"),
    table.Column("SIZE", right=True),
    table.Column("PLACE", right=True),
)
DEVICE = table.Column("DEVICE", right=True)


@click.command("show")
@click.argument("reference", metavar="NAME[@VERSION]", callback=options.reference)
@options.as_json
@options.directory
def command(reference: options.Reference, directory: Path, as_json: bool) -> None:
    """Show one version, by default the current one, and its tensors.

    PLACE is the allocation and the byte in it where a tensor begins; DEVICE, of a sharded version, the index that
    `cubroker devices` shows.
    """
    with connect(directory) as broker:
        info, layout, places = broker.describe(reference.name, reference.version)
        devices = broker.devices()
        digests = broker.digests(info.name, info.version) if info.digest else None
    if as_json:
        text.document(_document(info, layout, places) | {"digests": _digests(digests)})
        return
    for line in _heading(info, layout):
        text.say(line)
    text.say("")
    indexes = {device.uuid: device.index for device in devices}
    named = [[text.place(indexes, uuid) for uuid in _place(tensor, places)] for tensor in layout.tensors]
    rows = [(*_row(tensor), *on) for tensor, on in zip(layout.tensors, named, strict=True)]
    table.show((*COLUMNS, DEVICE) if places else COLUMNS, rows)


def _place(tensor: TensorSpec, places: Sequence[str]) -> Sequence[str]:
    """Return the device of a sharded version's tensor, in a list; an empty one if each device has the tensor."""
    return places[tensor.allocation : tensor.allocation + 1]


def _document(info: PoolInfo, layout: Layout, places: Sequence[str]) -> dict[str, object]:
    """Return what ``ls`` says of the version, with its layout added; tensors that each device has are on none alone."""
    tensors = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "allocation": tensor.allocation,
            "offset": tensor.offset,
            "device": next(iter(_place(tensor, places)), None),
        }
        for tensor in layout.tensors
    ]
    plain: dict[str, object] = msgspec.to_builtins(info)
    return plain | {"layout": {"allocations": list(layout.allocations), "tensors": tensors}}


def _digests(found: DigestList | None) -> dict[str, list[str | None]] | None:
    """Return the digest of each allocation, by device; None for those that are elsewhere, and if there are none."""
    if found is None or found.digests is None:
        return None
    rows = zip(found.devices, found.digests.replicas, strict=True)
    return {uuid: [digest.hex() or None for digest in row] for uuid, row in rows}


def _heading(info: PoolInfo, layout: Layout) -> list[str]:
    durable = ", durable" if info.durable else ""
    opened = f", opened by {info.opened_by}" if info.share == "vmm" and info.opened_by else ""
    shared = f"shared by {info.share}{opened}{_written(info)}"
    held = text.count(len(layout.allocations), "allocation")
    team = [f"written to all devices at once by {info.how}: {info.why}"] if info.how else []
    if info.state == "lost":
        team = [f"lost: {info.why}"]
    sealed = [f"sealed with digests by {info.digest}: see `cubroker verify --digest`"] if info.digest else []
    return [
        f"{info.name}@{info.version}: {info.state}, {text.count(info.leases, 'lease')}, owner {text.user(info.owner)}",
        f"mode {info.mode:03o}, group {text.group(info.group)}",
        f"{text.count(info.tensors, 'tensor')}, {text.size(info.nbytes)} in {held}, {shared}{durable}",
        *team,
        *sealed,
        *(f"{'sharded, in part ' if info.sharded else ''}on {uuid}" for uuid in info.devices),
    ]


def _written(info: PoolInfo) -> str:
    """Return what its readers can do to the version's bytes, unless that is nothing."""
    if info.writable:
        return ", writable by its readers"
    return "" if info.protected else ", not protected from writes by its readers"


def _row(tensor: TensorSpec) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return tensor.name, tensor.dtype, shape, text.size(tensor.nbytes), f"{tensor.allocation}:{tensor.offset}"
