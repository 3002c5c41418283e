"""``cubroker top``: devices as bars, waiting requests, and pools with the processes that hold them."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cubroker.cli import format, options
from cubroker.client import Broker
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import View
from cubroker.protocol.status import BlockInfo, DeviceInfo, WaiterInfo

NARROWEST = 60
"""Columns that a picture has at least, however narrow the terminal."""

BAR = {
    "current": ("bright_blue", "█", "#"),
    "draft": ("yellow", "▒", "+"),
    "superseded": ("cyan", "▓", "="),
    "retired": ("magenta", "░", "-"),
    "lost": ("red", "?", "?"),
    "freeing": ("dim", "~", "~"),
}
"""The parts of a bar, in order: the colour, the character, and the one for terminals that have only ASCII."""

BEYOND = ("dim", "·", ".")
"""The part of a bar outside the budget."""

FEW = 8
"""Devices that have a line each; more share one by two."""

WAITERS = 5
"""Waiting requests that are shown; the first of them are of most use."""


@click.command("top")
@click.option("--once", is_flag=True, help="Show it once, all pools of it, and end; also where there is no terminal.")
@click.option(
    "--every",
    type=options.Seconds(0.2, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@options.directory
def top(directory: Path, once: bool, every: float) -> None:
    """Show the devices as bars, who waits, and which processes hold which pools; live, until Ctrl-C.

    A bar stands for all memory of a device. ON are indexes of devices, HELD BY are processes; those that are detached
    have lost their connection and live. Of pools, those that take most come first.
    """
    console = Console(highlight=False, soft_wrap=True)
    if once or not console.is_terminal or console.is_dumb_terminal:
        with options.connect(directory) as broker:
            for line in _look(console, broker, None):
                with console.capture() as captured:  # its colours, if standard output shows them
                    console.print(line, end="")
                format.say(captured.get())
        return
    try:
        _follow(console, directory, every)
    except KeyboardInterrupt:  # the usual way to end it
        return


def _follow(console: Console, directory: Path, every: float) -> None:
    """Show what there is until interrupted; a broker that went away, hangs or refuses may serve again."""
    shown = [Text("looking for the broker")]
    with options.connect(directory):  # none at all is a mistake in the command
        pass
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                with options.connect(directory) as broker:
                    while True:
                        shown = _look(console, broker, console.height)
                        live.update(Group(*shown), refresh=True)
                        time.sleep(every)
            except CubrokerError as error:
                gone = Text(f"as of {time.strftime('%H:%M:%S')}: {format.printable(error.message)}", "bold red")
                live.update(Group(gone, *shown[1:]), refresh=True)
                time.sleep(every)


def _look(console: Console, broker: Broker, height: int | None) -> list[Text]:
    plain = not console.encoding.lower().startswith("utf")
    width = max(NARROWEST, shutil.get_terminal_size().columns)
    return Frame(width, height, plain, broker.session).lines(broker.look(), time.time())


@dataclass(frozen=True, slots=True)
class Frame:
    """Draws views for a terminal.

    Args:
        width: columns, at least 60.
        height: lines, or None for as many as it takes.
        plain: whether bars are made of ASCII.
        own: the session that looks, which is left out.
    """

    width: int
    height: int | None
    plain: bool
    own: int

    def lines(self, view: View, now: float) -> list[Text]:
        """Return the lines of a view, at a time in seconds since 1970."""
        top = [self._headline(view), Text(), *self._devices(view), self._legend(view), Text()]
        top += self._waiting(view.waiters, now)
        return [*top, *self._pools(view, None if self.height is None else self.height - len(top))]

    def _headline(self, view: View) -> Text:
        clients = [client for client in view.clients if client.session != self.own]
        detached = sum(client.state == "detached" for client in clients)
        used = sum(device.allocated + device.promised for device in view.devices)
        parts = (
            format.count(len(view.devices), "device"),
            of(used, sum(device.budget for device in view.devices)),
            format.count(len(view.pools), "version"),
            format.count(len(clients), "session") + (f" ({detached} detached)" if detached else ""),
            f"{len(view.waiters)} waiting",
        )
        return self._cut(Text(", ".join(parts), "bold"))

    def _devices(self, view: View) -> Iterator[Text]:
        columns = 1 if len(view.devices) <= FEW else 2
        width = (self.width - 2 * (columns - 1)) // columns
        rows = ceil(len(view.devices) / columns)
        figures = [of(device.allocated + device.promised, device.budget) for device in view.devices]
        longest = max(map(len, figures), default=0)
        drawn = [
            self._device(device, view.blocks, width, figure.rjust(longest), named=columns == 1)
            for device, figure in zip(view.devices, figures, strict=True)
        ]
        for row in range(rows):
            yield Text("  ").join(drawn[row::rows])

    def _device(
        self, device: DeviceInfo, blocks: Iterable[BlockInfo], width: int, figures: str, *, named: bool
    ) -> Text:
        label = f"{device.index:>2} " + (f"{shorten(format.printable(device.name), 16):16} " if named else "")
        room = width - len(label) - len(figures) - 3
        mine = Counter[str]()
        for block in blocks:
            if block.device == device.uuid:
                mine[state(block)] += block.nbytes
        return Text.assemble(label, "[", *self._bar(device, mine, room), "]", f" {figures}")

    def _bar(self, device: DeviceInfo, nbytes: Mapping[str, int], width: int) -> Iterator[tuple[str, str]]:
        """Yield the parts of a bar that stands for all bytes of a device; each kind of memory has a column at least."""
        budget, done = max(1, round(width * min(1.0, device.budget / device.total))), 0
        for name, (colour, *marks) in BAR.items():
            if nbytes.get(name):
                columns = min(max(1, round(width * nbytes[name] / device.total)), max(0, width - done))
                yield marks[self.plain] * columns, colour
                done += columns
        colour, *marks = BEYOND
        yield " " * max(0, budget - done), ""
        yield marks[self.plain] * (width - max(budget, done)), colour

    def _legend(self, view: View) -> Text:
        there = {state(block) for block in view.blocks}
        shown = [(f"{marks[self.plain]} {name}  ", colour) for name, (colour, *marks) in BAR.items() if name in there]
        colour, *marks = BEYOND
        return self._cut(Text.assemble("   ", *shown, (f"{marks[self.plain]} outside the budget", colour)))

    def _waiting(self, waiters: Sequence[WaiterInfo], now: float) -> Iterator[Text]:
        if not waiters:
            return
        yield Text("WAITING", "bold")
        for waiter in sorted(waiters, key=lambda waiter: waiter.since)[:WAITERS]:
            pool = format.printable(waiter.pool) or "a private pool"
            takes = f", {format.size(waiter.nbytes)}" if waiter.nbytes else ""
            who = f"process {waiter.pid} ({format.user(waiter.uid)})"
            waits = format.printable(waiter.awaits) or "something"
            yield self._cut(Text(f"{waiter.what} {pool}: for {waits}{takes}, {since(now - waiter.since)}, {who}"))
        if len(waiters) > WAITERS:
            yield Text(f"… and {len(waiters) - WAITERS:,} more", "dim")
        yield Text()

    def _pools(self, view: View, height: int | None) -> Iterator[Text]:
        if not view.pools:
            yield self._cut(Text("No pools: nothing has been loaded yet, or everything is retired."))
            return
        pools = sorted(view.pools, key=lambda pool: (-pool.nbytes * len(pool.devices), pool.name, -pool.version))
        shown = pools if height is None else pools[: max(1, height - 2)]
        indexes, held = {device.uuid: device.index for device in view.devices}, holders(view)
        names = [f"{format.printable(pool.name)}@{pool.version}" for pool in shown]
        wide = min(max(18, self.width - 54), max(map(len, names)))
        header = self._row(wide, ("POOL", "STATE", "SIZE", "ON", "LEASES"), ["HELD BY"], "")
        header.stylize("bold")
        yield header
        for pool, name in zip(shown, names, strict=True):
            on = ranges(sorted(indexes[uuid] for uuid in pool.devices if uuid in indexes)) or "gone"
            cells = (name, pool.state, format.size(pool.nbytes), on, str(pool.leases))
            by = held.get((pool.name, pool.version), ["other users" if pool.leases else "-"])
            yield self._row(wide, cells, by, BAR.get(pool.state, ("",))[0])
        if len(pools) > len(shown):
            yield Text(f"… and {len(pools) - len(shown):,} more", "dim")

    def _row(self, wide: int, cells: tuple[str, ...], by: Sequence[str], style: str) -> Text:
        name, now, size, on, leases = cells
        row = f"{shorten(name, wide):{wide}} {now:10} {size:>9} {shorten(on, 6):6} {leases:>6} "
        line = Text(row + some_of(by, self.width - len(row)))
        line.stylize(style, wide + 1, wide + 11)
        return self._cut(line)

    def _cut(self, line: Text) -> Text:
        line.truncate(self.width, overflow="ellipsis")
        return line


def state(block: BlockInfo) -> str:
    """Return the state of a version, or ``freeing`` for memory without a use."""
    return block.state if block.stage in ("promised", "held") else "freeing"


def of(some: int, whole: int) -> str:
    """Return a part of bytes and the whole: ``54.6 of 126.0 GiB``, ``512 B of 1.0 GiB``."""
    (one, unit), (other, same) = format.size(some).split(), format.size(whole).split()
    return f"{one} of {other} {same}" if unit == same else f"{one} {unit} of {other} {same}"


def holders(view: View) -> dict[tuple[str, int], list[str]]:
    """Return which processes hold each version, in the order in which they came."""
    found: dict[tuple[str, int], dict[str, None]] = {}
    for client in view.clients:
        who = f"{client.pid}" + (" (detached)" if client.state == "detached" else "")
        for lease in client.leases:
            found.setdefault((lease.pool, lease.version), {})[who] = None
    return {key: [*names] for key, names in found.items()}


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as ``0-3,5``."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in run)
        runs.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ",".join(runs)


def since(seconds: float) -> str:
    """Return how long something has lasted, roughly: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    for unit, length, last in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < last:
            return f"{max(0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def some_of(words: Sequence[str], width: int) -> str:
    """Return as many words as fit, and how many there are besides: ``40000, 40013 +4``."""
    for number in range(len(words), 0, -1):
        rest = f" +{len(words) - number}" if number < len(words) else ""
        line = ", ".join(words[:number]) + rest
        if len(line) <= width:
            return line
    return shorten(line, width)


def shorten(value: str, width: int) -> str:
    """Return a text that fits, its end replaced if it has to be."""
    return value if len(value) <= width else value[: max(0, width - 1)] + "…"
