"""``cubroker show``."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from cubroker.cli import options, table, text
from cubroker.client import Broker
from cubroker.protocol.layout import Layout, TensorSpec
from cubroker.protocol.messages import PoolInfo

COLUMNS = (
    table.Column("TENSOR", fold=True),
    table.Column("DTYPE"),
    table.Column("SHAPE"),
    table.Column("SIZE", right=True),
    table.Column("PLACE", right=True),
)


@click.command("show")
@click.argument("reference", metavar="NAME[@VERSION]", callback=options.reference)
@options.as_json
@options.directory
def command(reference: options.Reference, directory: Path, as_json: bool) -> None:
    """Show one version, by default the current one, and its tensors.

    PLACE is the allocation and the byte in it where a tensor begins.
    """
    with Broker(directory) as broker:
        info, layout = broker.describe(reference.name, reference.version)
    if as_json:
        text.document(_document(info, layout))
        return
    for line in _heading(info, layout):
        text.say(line)
    text.say("")
    table.show(COLUMNS, [_row(tensor) for tensor in layout.tensors])


def _document(info: PoolInfo, layout: Layout) -> dict[str, object]:
    """Return what ``ls`` says of the version, with its layout added."""
    tensors = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "allocation": tensor.allocation,
            "offset": tensor.offset,
        }
        for tensor in layout.tensors
    ]
    plain: dict[str, object] = msgspec.to_builtins(info)
    return plain | {"layout": {"allocations": list(layout.allocations), "tensors": tensors}}


def _heading(info: PoolInfo, layout: Layout) -> list[str]:
    durable = ", durable" if info.durable else ""
    opened = f", opened by {info.opened_by}" if info.share == "vmm" and info.opened_by else ""
    shared = f"shared by {info.share}{opened}{', writable by its readers' if info.writable else ''}"
    held = text.count(len(layout.allocations), "allocation")
    team = [f"written to all devices at once by {info.how}: {info.why}"] if info.how else []
    if info.state == "lost":
        team = [f"lost: {info.why}"]
    return [
        f"{info.name}@{info.version}: {info.state}, {text.count(info.leases, 'lease')}, owner {text.user(info.owner)}",
        f"mode {info.mode:03o}, group {text.group(info.group)}",
        f"{text.count(info.tensors, 'tensor')}, {text.size(info.nbytes)} in {held}, {shared}{durable}",
        *team,
        *(f"{'sharded, in part ' if info.sharded else ''}on {uuid}" for uuid in info.devices),
    ]


def _row(tensor: TensorSpec) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return tensor.name, tensor.dtype, shape, text.size(tensor.nbytes), f"{tensor.allocation}:{tensor.offset}"
