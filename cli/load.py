"""``cubroker load``, ``vllm preload`` and ``verify``, and their progress: a bar on a terminal, else lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic, perf_counter
from typing import Protocol

import click

from cubroker.cli import format, options
from cubroker.client import Broker
from cubroker.client.loading.loader import Loaded, load, telling_waits
from cubroker.client.loading.verify import verify
from cubroker.protocol.errors import Corrupted, CubrokerError, Unsupported
from cubroker.protocol.status import PoolInfo

EVERY = 5.0
"""Seconds between two plain lines of progress."""

SHOWN = 10
"""Differences that are listed one by one."""


@click.command("load")
@click.argument("name", metavar="NAME", type=options.pool_name, shell_complete=options.complete_pools)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=options.PATH)
@options.copies
@click.option(
    "--plan",
    metavar="FILE",
    type=options.plan,
    help="Spread the tensors over devices instead: JSON, {tensor: device}; patterns, such as *, stand for the rest.",
)
@options.share
@options.durable
@click.option("--if-absent", is_flag=True, help="Load only if the pool has no version; of many at once, one loads.")
@click.option("--slab", type=options.size, metavar="SIZE", help="The most bytes of one allocation, such as 4GiB.")
@options.wait("room and for another writer")
@options.pool_mode
@options.owners
@click.option(
    "--digest",
    is_flag=True,
    help="Publish digests of the bytes with them, with which `cubroker verify --digest` finds later changes.",
)
@options.as_json
@options.directory
def load_pool(
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
    as_json: bool,
) -> None:
    """Publish safetensors files as the next version of pool NAME.

    PATH is a file, a folder with a checkpoint, or the index.json of a sharded one. A load that fails or is interrupted
    leaves nothing behind.
    """
    wait = options.wait_of(wait, owners, if_absent=if_absent)
    if chosen and plan:
        raise click.UsageError("--plan says where each tensor goes; leave --device out")
    with options.connect(directory) as broker:
        there = broker.devices()
        devices = None if plan else options.find_devices(chosen or ("0",), there)
        placed = plan and {tensor: options.find_device(device, there) for tensor, device in plan.items()}
        with progress(f"loading {name}") as report, telling_waits(broker, report.wait):
            loaded = load(
                broker,
                name,
                paths,
                devices=devices,
                plan=placed,
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
    if as_json:
        format.document(asdict(loaded))
    else:
        format.say(summary(loaded, options.where()))


def summary(loaded: Loaded, where: str = "") -> str:
    """Return the result of a load in one line, with `` on DIRECTORY`` if the reader does not know the broker."""
    title = f"{loaded.name}@{loaded.version}{where}"
    held = f"{format.count(loaded.tensors, 'tensor')}, {format.size(loaded.nbytes)}"
    if not loaded.loaded:
        return f"{title}: already there ({held}); nothing loaded"
    speed = format.rate(loaded.nbytes, loaded.seconds)
    return f"{title}: {held} in {format.duration(loaded.seconds)} ({speed})"


@click.group("vllm")
def vllm() -> None:
    """Prepare runtime pools for engines of vLLM."""


@vllm.command("preload", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@click.argument("engine", metavar="[ENGINE ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@options.as_json
@options.directory
def preload(model: str, engine: tuple[str, ...], directory: Path, as_json: bool) -> None:
    """Load MODEL as `vllm serve MODEL` with these arguments does, publish what its ranks compute with, and exit.

    Engines with the same arguments then attach. Give all that decide what is loaded and how it is computed with: the
    parallel sizes, --dtype, --quantization, and --enforce-eager if engines have it.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is this command's
    try:
        from cubroker.integrations.vllm import preload as load
    except ImportError as error:
        raise Unsupported(str(error)) from error

    with options.connect(directory) as broker:
        prefix = load(model, engine, directory)
        pools = [pool for pool in broker.pools() if pool.name.startswith(prefix) and pool.state == "current"]
    if as_json:
        format.document(pools)
    for pool in pools if not as_json else ():
        format.say(f"{pool.name}@{pool.version}: {format.count(pool.tensors, 'tensor')}, {format.size(pool.nbytes)}")


@click.command("verify")
@click.argument("reference", metavar="NAME[@VERSION]", type=options.reference, shell_complete=options.complete_versions)
@click.argument("paths", metavar="[PATH...]", nargs=-1, type=options.PATH)
@click.option("--digest", is_flag=True, help="Compare with the digests that it was sealed with, instead of with files.")
@options.as_json
@options.directory
def verify_pool(
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
    with options.connect(directory) as broker:
        info, *_ = broker.describe(*reference)
        indexes = {device.uuid: device.index for device in broker.devices()}
        if digest:
            _digests(broker, info, indexes, as_json=as_json)
        else:
            _files(broker, info, indexes, paths, as_json=as_json)


def _digests(broker: Broker, info: PoolInfo, indexes: Mapping[str, int], *, as_json: bool) -> None:
    title, lines, devices = f"{info.name}@{info.version}", [], []
    for uuid in info.devices:
        with broker.attach(info.name, version=info.version, device=uuid) as pool:
            began, why = perf_counter(), None
            try:
                pool.check()
            except Corrupted as error:
                why = error.message
            seconds, nbytes = perf_counter() - began, pool.nbytes
        checked = {"index": indexes.get(uuid), "uuid": uuid, "nbytes": nbytes, "seconds": seconds}
        devices.append({**checked, "why": why, "equal": why is None})
        took = f"{format.size(nbytes)} in {format.duration(seconds)} ({format.rate(nbytes, seconds)})"
        outcome = "as it was sealed" if why is None else format.printable(why)
        lines.append(f"{title} on device {format.place(indexes, uuid)}: {took}: {outcome}")
    if as_json:
        format.document({"name": info.name, "version": info.version, "digest": info.digest, "devices": devices})
    for line in lines if not as_json else ():
        format.say(line)
    if differing := sum(not each["equal"] for each in devices):
        raise Corrupted(f"{title} is not what was sealed, on {differing} of {format.count(len(devices), 'device')}")


def _files(
    broker: Broker, info: PoolInfo, indexes: Mapping[str, int], paths: tuple[Path, ...], *, as_json: bool
) -> None:
    title, differences, devices = f"{info.name}@{info.version}", list[str](), []
    for uuid in [None] if info.sharded else info.devices:  # the shards of all devices are one copy
        device = "" if uuid is None else f"device {format.place(indexes, uuid)}"
        with progress(f"comparing {title}{f' on {device}' if device else ''}") as report:
            found = verify(broker, info.name, paths, version=info.version, device=uuid, progress=report)
        differences += [f"{device or title}: {line}" for line in found.differences]
        where = {"index": None if uuid is None else indexes.get(uuid), "uuid": uuid}
        held = {"nbytes": info.nbytes, "tensors": found.tensors}
        devices.append({**where, **held, "differences": found.differences, "equal": not found.differences})
    if as_json:
        format.document({"name": info.name, "version": info.version, "digest": None, "devices": devices})
    for line in differences[:SHOWN] if not as_json else ():
        format.say(format.printable(line))
    if (more := len(differences) - SHOWN) > 0 and not as_json:
        format.say(f"and {more} more")
    if differences:
        raise CubrokerError(f"{title} is not what the files hold: {format.count(len(differences), 'difference')}")
    if not as_json:
        places = "" if len(devices) == 1 else f", on {len(devices)} devices"
        size = f"{format.count(info.tensors, 'tensor')}, {format.size(info.nbytes)}"
        format.say(f"{title}: {size}, equal to the files{places}")


# -- progress --------------------------------------------------------------------------------------


class Display(Protocol):
    """The progress of a transfer, shown to the user. Any thread may call these."""

    def __call__(self, done: int, total: int) -> None:
        """Show the bytes done and the bytes in all."""

    def wait(self, reason: str) -> None:
        """Show what the transfer waits for."""


@contextmanager
def progress(title: str) -> Iterator[Display]:
    """Show the progress of ``title`` on standard error until the block ends."""
    if sys.stderr.isatty():
        with _bar(title) as report:
            yield report
    else:
        format.note(title)
        yield ProgressLines(title)


class ProgressLines:
    """A line every few seconds, with the rate since the beginning."""

    def __init__(self, title: str, clock: Callable[[], float] = monotonic) -> None:
        self._title = title
        self._clock = clock
        self._start = self._said = clock()
        self._reason = ""

    def __call__(self, done: int, total: int) -> None:
        """Print a line if the last was long enough ago and the transfer is not done."""
        now = self._clock()
        if now - self._said >= EVERY and done < total:
            self._said = now
            took = now - self._start
            left = f", {format.since(took * (total - done) / done)} left" if done else ""
            format.note(f"{self._title}: {format.size(done)} of {format.size(total)}, {format.rate(done, took)}{left}")

    def wait(self, reason: str) -> None:
        """Print a line if the reason is another one than before."""
        if reason != self._reason:
            self._reason = reason
            format.note(f"{self._title}: waits for {format.printable(reason)}")


@contextmanager
def _bar(title: str) -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class CursorShown(Console):
        def show_cursor(self, show: bool = True) -> bool:  # never hidden: a killed process could not show it again
            return False

    class Figures(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:  # the transfer has not begun, and may wait
                return Text(task.fields["reason"])
            done = f"{format.size(task.completed)} of {format.size(task.total)}"
            if not task.speed:  # before there are two moments to compare
                return Text(done)
            left = "" if task.time_remaining is None else f"  {format.since(task.time_remaining)} left"
            return Text(f"{done}  {format.size(task.speed)}/s{left}")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), Figures(Column(no_wrap=True)))
    with Progress(*columns, console=CursorShown(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, reason="")

        class Bar:
            def __call__(self, done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)

            def wait(self, reason: str) -> None:
                bar.update(task, reason=f"waits for {format.printable(reason)}")

        yield Bar()
