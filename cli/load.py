"""``cubroker load``."""

from __future__ import annotations

from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.cli.connect import connect
from cubroker.cli.progress import progress
from cubroker.client.loader import Loaded, load
from cubroker.protocol.bounds import MAX_WAIT
from cubroker.protocol.messages import AUTO


@click.command("load")
@click.argument("name", metavar="NAME", callback=options.pool_name)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=options.PATH)
@click.option(
    "--device",
    "chosen",
    metavar="0,1",
    callback=options.split_devices,
    help="Devices that get a copy each: indexes or UUIDs, as `cubroker devices` shows them.  [default: 0]",
)
@click.option(
    "--plan",
    type=options.PATH,
    metavar="FILE",
    callback=options.plan,
    help="Spread the tensors over devices instead: JSON, {tensor: device}; patterns, such as *, stand for the rest.",
)
@click.option(
    "--share",
    type=click.Choice([AUTO, "vmm", "ipc", "multicast"]),
    default=AUTO,
    show_default=True,
    help="How workers open the memory: vmm (by descriptor; read-only, able to sleep), ipc (by handle; its readers can"
    " write), multicast, or auto: vmm where the devices can, else ipc, unless the broker's settings say otherwise.",
)
@click.option(
    "--durable/--no-durable",
    default=None,
    help="Whether the pool stays when the broker is killed or restarted.  [default: where share and store allow it]",
)
@click.option("--if-absent", is_flag=True, help="Load only if the pool has no version; of many at once, one loads.")
@click.option("--slab", callback=options.size, metavar="SIZE", help="The most bytes of one allocation, such as 4GiB.")
@click.option(
    "--wait",
    type=options.Seconds(min=0, max=MAX_WAIT),
    metavar="SECONDS",
    help="How long to wait for room and for another writer.  [default: 0; with --if-absent, as long as it takes]",
)
@click.option(
    "--mode",
    callback=options.mode,
    metavar="MODE",
    help="Who may attach and publish, like a file's: 640. Who may attach to memory of a GPU can write it, too, if it"
    " means to.  [default: the broker's]",
)
@click.option(
    "--owner",
    "owners",
    multiple=True,
    metavar="USER",
    help="Whose version does with --if-absent, besides this user's, root's and the broker's."
    "  [default: $CUBROKER_OWNER]",
)
@click.option(
    "--digest",
    is_flag=True,
    help="Publish digests of the bytes with them, with which `cubroker verify --digest` finds later changes.",
)
@options.directory
def command(
    name: str,
    paths: tuple[Path, ...],
    chosen: tuple[str, ...] | None,
    plan: dict[str, str] | None,
    share: str,
    durable: bool | None,
    if_absent: bool,
    slab: int | None,
    wait: float | None,
    mode: int | None,
    owners: tuple[str, ...],
    digest: bool,
    directory: Path,
) -> None:
    """Publish safetensors files as the next version of pool NAME.

    PATH is a file, a folder with a checkpoint, or the index.json of a sharded one. A load that fails or is interrupted
    leaves nothing behind.
    """
    if owners and not if_absent:
        raise click.UsageError("--owner says whose version does with --if-absent; leave it out, or give both")
    if chosen and plan:
        raise click.UsageError("--plan says where each tensor goes; leave --device out")
    if wait is None:
        wait = MAX_WAIT if if_absent else 0.0
    with connect(directory) as broker, progress(f"loading {name}") as report:
        there = broker.devices()
        loaded = load(
            broker,
            name,
            paths,
            devices=None if plan else options.find_devices(chosen or ("0",), there),
            plan=plan and {tensor: options.find_device(device, there) for tensor, device in plan.items()},
            share=share,
            if_absent=if_absent,
            slab=slab,
            wait=wait,
            mode=mode,
            durable=durable,
            owner=owners or None,
            digest=digest,
            progress=report,
        )
    text.say(summary(loaded))


def summary(loaded: Loaded) -> str:
    """Say in one line what became of a load."""
    held = f"{text.count(loaded.tensors, 'tensor')}, {text.size(loaded.nbytes)}"
    if not loaded.loaded:
        return f"{loaded.name}@{loaded.version}: already there ({held}); nothing loaded"
    speed = text.rate(loaded.nbytes, loaded.seconds)
    return f"{loaded.name}@{loaded.version}: {held} in {text.duration(loaded.seconds)} ({speed})"
