"""``cubroker top``: devices as bars, waiting requests, and pools with the processes that hold them."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cubroker.cli import format, options, processes
from cubroker.cli.keys import BACKSPACE, DOWN, END, ENTER, ESCAPE, HOME, PAGE_DOWN, PAGE_UP, UP, Keys
from cubroker.client import Broker
from cubroker.client.transport.requests import expect
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import Look, View
from cubroker.protocol.status import BlockInfo, ClientInfo, DeviceInfo, PoolInfo

NARROWEST = 40
"""Columns that a picture has at least, however narrow the terminal."""

LEAST_BY = 16
"""Columns that the names of holders have at least."""

_WIDTHS = {"STATE": 10, ">SIZE": 9, "ON": 3, ">LEASES": 6, ">HELD": 6}
"""Columns of the parts of a row, at least: what changes from look to look should not move the rest."""

NAMED, ROOMY = 60, 120
"""Columns from which on devices are named, and from which on with more of their names."""

KEYS_WAIT = 0.05
"""Seconds that an answer, or a key, is waited for while the other may come."""

SLOW = 2.0
"""Seconds after which the picture says that the broker does not answer."""

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
"""Devices that have a line each; more share one by two, where the terminal is wide enough."""

WAITERS = 5
"""Waiting requests that are shown; the first of them are of most use."""


POOLS, CLIENTS = "pools", "clients"

POOL_ORDERS: Mapping[str, Callable[[PoolInfo], Any]] = {
    "size": lambda pool: -pool.nbytes * len(pool.devices),
    "name": lambda pool: 0,
    "leases": lambda pool: -pool.leases,
    "state": lambda pool: [*BAR].index(pool.state) if pool.state in BAR else len(BAR),
}
"""By what pools are sorted; what is equal stays in the order of names."""

ORDERS: Mapping[str, Sequence[str]] = {POOLS: [*POOL_ORDERS], CLIENTS: ["held", "age", "leases", "process", "pid"]}
"""The orders of each list, of which the first one is the default."""

HELP = "q quit  arrows, PgUp, PgDn  s sort  r reverse  / filter  d device  c clients"


@dataclass(slots=True)
class Choice:
    """What is shown of a view, and how; keys change it."""

    #: Which list: :data:`POOLS` or :data:`CLIENTS`.
    listed: str = POOLS
    #: By what each list is sorted.
    order: dict[str, str] = field(default_factory=lambda: {listed: orders[0] for listed, orders in ORDERS.items()})
    reverse: bool = False
    #: A pattern, or a part of a name.
    filter: str = ""
    #: Whether the filter is being typed.
    typing: bool = False
    #: The index of the device whose pools and holders are shown; None: all.
    device: int | None = None
    #: Rows that are scrolled past.
    offset: int = 0
    #: Rows of the list, and those of them that the screen had room for, when it was drawn last.
    rows: int = 0
    page: int = 1

    def press(self, key: str, devices: Sequence[int]) -> bool:
        """Change what is shown by a key; return whether to go on.

        Args:
            key: as :class:`Keys` has it.
            devices: the indexes that there are.
        """
        if self.typing:
            self._type(key)
        elif key == "q":
            return False
        elif key in _MOVES:
            self.offset += _MOVES[key](self)
        elif key == "c":
            self.listed, self.offset = (CLIENTS if self.listed == POOLS else POOLS), 0
        elif key == "s":
            orders = ORDERS[self.listed]
            self.order[self.listed] = orders[(orders.index(self.order[self.listed]) + 1) % len(orders)]
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "d":
            each = [None, *devices]
            self.device = each[(each.index(self.device) + 1) % len(each)] if self.device in each else None
            self.offset = 0
        elif key == "/":
            self.typing, self.filter, self.offset = True, "", 0
        elif key == ESCAPE:
            self.filter, self.device, self.offset = "", None, 0
        return True

    def _type(self, key: str) -> None:
        if key in (ENTER, ESCAPE):
            self.typing, self.filter = False, "" if key == ESCAPE else self.filter
        elif key == BACKSPACE:
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key
        self.offset = 0

    def window(self, rows: int, page: int) -> slice:
        """Return which of so many rows are shown on a page of so many."""
        self.rows, self.page = rows, max(1, page)
        self.offset = max(0, min(self.offset, rows - self.page))
        return slice(self.offset, self.offset + self.page)

    def matches(self, *names: str) -> bool:
        """Whether one of these names passes the filter."""
        wanted = self.filter.lower()
        if not any(c in wanted for c in "*?["):
            wanted = f"*{wanted}*"
        return any(fnmatchcase(name.lower(), wanted) for name in names)


_MOVES: Mapping[str, Callable[[Choice], int]] = {
    UP: lambda choice: -1,
    DOWN: lambda choice: 1,
    PAGE_UP: lambda choice: -choice.page,
    PAGE_DOWN: lambda choice: choice.page,
    HOME: lambda choice: -choice.rows,
    END: lambda choice: choice.rows,
}


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
@options.sort(POOL_ORDERS, "size")
@options.reverse
@click.option("--filter", "wanted", default="", metavar="PATTERN", help="Only pools and processes of such names.")
@click.option("--device", "device", metavar="DEVICE", type=options.device, help="Only what is on this device.")
@options.as_json
@options.directory
def top(
    directory: Path,
    once: bool,
    every: float,
    sort: str,
    reverse: bool,
    wanted: str,
    device: str | None,
    as_json: bool,
) -> None:
    """Show the devices as bars, who waits, and which processes hold which pools; live, until q or Ctrl-C.

    A bar stands for all memory of a device. ON are indexes of devices, HELD is how long the oldest lease is held, and
    BY are processes; those that are detached have lost their connection and live. Of pools, those that take most come
    first.

    Keys: arrows, PgUp, PgDn, Home and End scroll; s sorts in another way, and r the other way round; / takes a part of
    a name, or a pattern, up to Enter; d shows the next device alone; Escape takes both back; c lists processes in place
    of pools; q ends it.

    --json prints one document, as of one moment.
    """
    choice = Choice(reverse=reverse, filter=wanted)
    choice.order[POOLS] = sort
    console = Console(highlight=False, soft_wrap=True)
    live = not (once or as_json or not console.is_terminal or console.is_dumb_terminal)
    with options.connect(directory) as broker:  # none at all is a mistake in the command
        if device is not None:
            known = {each.uuid: each.index for each in broker.devices()}
            choice.device = known[options.find_device(device, broker.devices())]
        if not live:
            _show_once(console, broker, choice, as_json=as_json)
            return
    try:
        Screen(console, directory, every, choice).follow()
    except KeyboardInterrupt:  # the usual way to end it
        return


def _show_once(console: Console, broker: Broker, choice: Choice, *, as_json: bool) -> None:
    view, now = _told(broker.look(), broker.session), time.time()
    frame = Frame(_width(), None, _is_plain(console), broker.session, choice)
    if as_json:
        parts: dict[str, object] = {name: getattr(view, name) for name in view.__struct_fields__}
        chosen = {"pools": frame.pools(view), "clients": frame.clients(view)}
        format.document({"time": now} | parts | chosen)
        return
    for line in frame.lines(view, now):
        with console.capture() as captured:  # its colours, if standard output shows them
            console.print(line, end="")
        format.say(captured.get())


def _told(view: View, session: int) -> View:
    return msgspec.structs.replace(view, clients=tuple(processes.known(view.clients, session)))


def _width() -> int:
    return max(NARROWEST, shutil.get_terminal_size().columns)


def _is_plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


class Screen:
    """A picture on the terminal that follows the broker and the keys.

    Args:
        console: the terminal.
        directory: where the broker serves.
        every: seconds between two looks.
        choice: what is shown.
    """

    def __init__(self, console: Console, directory: Path, every: float, choice: Choice) -> None:
        self._console = console
        self._directory = directory
        self._every = every
        self._choice = choice
        self._view: View | None = None
        self._own = 0
        self._why = ""  # why the view is not fresh
        self._seen = ""  # when it was

    def follow(self) -> None:
        """Show what there is until q; a broker that went away, hangs or refuses may serve again."""
        with Keys() as keys, Live(console=self._console, screen=True, auto_refresh=False) as live:
            self._draw(live)
            while True:
                try:
                    with options.connect(self._directory) as broker:
                        self._own = broker.session
                        while self._look(broker, keys, live) and self._pause(keys, live):
                            pass
                        return
                except CubrokerError as error:
                    self._stale(error.message)
                    self._draw(live)
                    if not self._pause(keys, live):
                        return

    def _look(self, broker: Broker, keys: Keys, live: Live) -> bool:
        """Show what there is now; keys work while the broker does not answer. Return whether to go on."""
        asked, began = broker.requests.submit(Look()), time.monotonic()
        while not asked.wait(KEYS_WAIT):
            if not self._press(keys.wait(KEYS_WAIT), live):
                return False
            if not self._why and time.monotonic() - began > max(SLOW, self._every):
                self._stale("the broker does not answer")
                self._draw(live)
        self._view, self._why = _told(expect(asked.result(), View), self._own), ""
        self._draw(live)
        return True

    def _stale(self, why: str) -> None:
        self._seen, self._why = time.strftime("%H:%M:%S"), why

    def _pause(self, keys: Keys, live: Live) -> bool:
        """Do what keys say until it is time to look again; return whether to go on."""
        end = time.monotonic() + self._every
        while (left := end - time.monotonic()) > 0:
            if not self._press(keys.wait(left), live):
                return False
        return True

    def _press(self, keys: Sequence[str], live: Live) -> bool:
        devices = [device.index for device in self._view.devices] if self._view else []
        going = all(self._choice.press(key, devices) for key in keys)
        self._draw(live)
        return going

    def _draw(self, live: Live) -> None:
        width, height = _width(), self._console.height
        stale = f"as of {self._seen}: {format.printable(self._why)}"
        if self._view is None:
            shown = [Text(stale if self._why else "looking for the broker")]
        else:
            frame = Frame(width, height, _is_plain(self._console), self._own, self._choice)
            shown = frame.lines(self._view, time.time())
            if self._why:
                shown[0] = Text(stale, "bold red")
                shown[0].truncate(width, overflow="ellipsis")
        live.update(Group(*shown), refresh=True)


@dataclass(frozen=True, slots=True)
class Frame:
    """Draws views for a terminal.

    Args:
        width: columns, at least :data:`NARROWEST`.
        height: lines, or None for as many as it takes.
        plain: whether bars are made of ASCII.
        own: the session that looks, which is left out.
        choice: what is shown; drawing notes there how much of it there was.
    """

    width: int
    height: int | None
    plain: bool
    own: int
    choice: Choice = field(default_factory=Choice)

    def lines(self, view: View, now: float) -> list[Text]:
        """Return the lines of a view, at a time in seconds since 1970."""
        top = [self._headline(view), Text(), *self._devices(view), self._legend(view), Text()]
        top += self._waiting(view, now)
        if self.height is not None and len(top) > self.height // 2:
            top = top[: max(1, self.height // 2)]
        room = None if self.height is None else max(1, self.height - len(top) - 2)
        rows = self._pools(view, room, now) if self.choice.listed == POOLS else self._clients(view, room, now)
        return [*top, *rows, *([] if self.height is None else [self._status()])]

    def pools(self, view: View) -> list[PoolInfo]:
        """Return the versions that are chosen, in their order."""
        uuids = {device.uuid for device in view.devices if device.index == self.choice.device}
        found = [
            pool
            for pool in view.pools
            if self.choice.matches(pool.name, f"{pool.name}@{pool.version}")
            and (self.choice.device is None or not uuids.isdisjoint(pool.devices))
        ]
        found.sort(key=lambda pool: (pool.name, -pool.version))
        found.sort(key=POOL_ORDERS[self.choice.order[POOLS]])
        return found[::-1] if self.choice.reverse else found

    def clients(self, view: View) -> list[ClientInfo]:
        """Return the processes that are chosen, in their order; of a device, those that hold a pool there."""
        uuids = {device.uuid for device in view.devices if device.index == self.choice.device}
        there = {(pool.name, pool.version) for pool in view.pools if not uuids.isdisjoint(pool.devices)}
        found = [
            client
            for client in view.clients
            if client.session != self.own
            and self.choice.matches(
                processes.name(client), format.user(client.uid), str(client.pid), *(each.pool for each in client.leases)
            )
            and (self.choice.device is None or any((each.pool, each.version) in there for each in client.leases))
        ]
        found.sort(key=processes.ORDERS[self.choice.order[CLIENTS]])
        return found[::-1] if self.choice.reverse else found

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
        columns = 1 if len(view.devices) <= FEW or self.width < NAMED else 2
        width = (self.width - 2 * (columns - 1)) // columns
        rows = ceil(len(view.devices) / columns)
        figures = [of(device.allocated + device.promised, device.budget) for device in view.devices]
        longest = max(map(len, figures), default=0)
        drawn = [
            self._device(device, view.blocks, width, figure.rjust(longest), named=columns == 1 and self.width >= NAMED)
            for device, figure in zip(view.devices, figures, strict=True)
        ]
        for row in range(rows):
            yield Text("  ").join(drawn[row::rows])

    def _device(
        self, device: DeviceInfo, blocks: Iterable[BlockInfo], width: int, figures: str, *, named: bool
    ) -> Text:
        wide = 16 if self.width < ROOMY else 24
        label = f"{device.index:>2} " + (f"{shorten(format.printable(device.name), wide):{wide}} " if named else "")
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

    def _waiting(self, view: View, now: float) -> Iterator[Text]:
        if not (waiters := view.waiters):
            return
        known = {client.session: client for client in view.clients if client.process}
        yield Text("WAITING", "bold")
        for waiter in sorted(waiters, key=lambda waiter: waiter.since)[:WAITERS]:
            pool = format.printable(waiter.pool) or "a private pool"
            takes = f", {format.size(waiter.nbytes)}" if waiter.nbytes else ""
            who = f"process {waiter.pid} ({format.user(waiter.uid)})"
            if client := known.get(waiter.session):
                who = format.printable(processes.label(client))
            waits = format.printable(waiter.awaits) or "something"
            yield self._cut(
                Text(f"{waiter.what} {pool}: for {waits}{takes}, {format.since(now - waiter.since)}, {who}")
            )
        if len(waiters) > WAITERS:
            yield Text(f"… and {len(waiters) - WAITERS:,} more", "dim")
        yield Text()

    def _pools(self, view: View, room: int | None, now: float) -> Iterator[Text]:
        pools = self.pools(view)
        shown = pools[self.choice.window(len(pools), len(pools) if room is None else room)]
        if not pools:
            nothing = "No pools: nothing has been loaded yet, or everything is retired."
            yield self._cut(Text("No pool is like that; Escape shows all." if view.pools else nothing))
            return
        indexes = {device.uuid: device.index for device in view.devices}
        held = processes.holders([client for client in view.clients if client.session != self.own])
        cells: dict[str, list[str]] = {
            "STATE": [pool.state for pool in shown],
            ">SIZE": [format.size(pool.nbytes) for pool in shown],
            "ON": [
                ranges(sorted(indexes[uuid] for uuid in pool.devices if uuid in indexes)) or "gone" for pool in shown
            ],
            ">LEASES": [str(pool.leases) for pool in shown],
            ">HELD": [_since(held.get((pool.name, pool.version), ()), pool, now) for pool in shown],
        }
        names = [f"{format.printable(pool.name)}@{pool.version}" for pool in shown]
        least = min(max(map(len, names)), max(18, self.width // 3))
        widths = {title: max(_WIDTHS[title], *map(len, column)) for title, column in cells.items()}
        for title in (">HELD", "ON", "STATE", ">LEASES"):
            if least + sum(widths.values()) + len(widths) + LEAST_BY <= self.width:
                break
            del widths[title]
        wide = min(max(map(len, names)), self.width - sum(widths.values()) - len(widths) - LEAST_BY)
        header = self._row(
            ["POOL".ljust(wide), *(_aligned(title.lstrip(">"), title, widths) for title in widths)], "BY"
        )
        header.stylize("bold")
        yield header
        for row, (pool, name) in enumerate(zip(shown, names, strict=True)):
            mine = [shorten(name, wide).ljust(wide), *(_aligned(cells[title][row], title, widths) for title in widths)]
            line = self._row(
                mine, self._holders(held.get((pool.name, pool.version), ()), pool, len(" ".join(mine)) + 1)
            )
            if "STATE" in widths:
                line.stylize(BAR.get(pool.state, ("",))[0], wide + 1, wide + 1 + widths["STATE"])
            yield line

    def _holders(self, holders: Sequence[ClientInfo], pool: PoolInfo, taken: int) -> str:
        """Return who holds a version: with users and containers if there is room, else as many as fit."""
        if not holders:
            return "other users" if pool.leases else "-"
        room = self.width - taken
        for words in (processes.label, _short):
            said = [words(client) + " (detached)" * (client.state == "detached") for client in holders]
            if len(line := format.printable(", ".join(said))) <= room:
                return line
        return some_of(said, room)

    def _clients(self, view: View, room: int | None, now: float) -> Iterator[Text]:
        clients = self.clients(view)
        shown = clients[self.choice.window(len(clients), len(clients) if room is None else room)]
        if not clients:
            yield self._cut(Text("No client is like that, or none of this user."))
            return
        columns = {title: cell for title, cell in processes.columns(shown, now).items() if not title.startswith("~")}
        cells = [[cell(client) for cell in columns.values()] for client in shown]
        limit = max(20, self.width - max(LEAST_BY, self.width // 4))
        header, *rows = format.render_table([*columns], cells, limit, processes.SPARE)
        wide = max(map(len, (header, *rows))) + 1
        title = self._row([header.ljust(wide)], "LEASES")
        title.stylize("bold")
        yield title
        for row, client in zip(rows, shown, strict=True):
            leases = format.printable(format.leases(client)).split(", ") if client.leases else ["none"]
            yield self._row([row.ljust(wide)], some_of(leases, self.width - wide - 1))

    def _row(self, cells: Sequence[str], last: str) -> Text:
        return self._cut(Text(" ".join([*cells, last])))

    def _status(self) -> Text:
        """Return the last line: which rows these are, and the keys."""
        choice = self.choice
        if choice.typing:
            return self._cut(Text(f"filter: {format.printable(choice.filter)}_", "bold"))
        last = min(choice.rows, choice.offset + choice.page)
        shown = f"{choice.offset + 1}-{last} of " if choice.rows else ""
        parts = [f"{shown}{choice.rows:,} {choice.listed}"]
        parts.append(f"by {choice.order[choice.listed]}" + (", reversed" if choice.reverse else ""))
        parts += [f"filter {format.printable(choice.filter)}"] if choice.filter else []
        parts += [f"device {choice.device}"] if choice.device is not None else []
        return self._cut(Text.assemble((", ".join(parts), "bold"), (f"   {HELP}", "dim")))

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


def _short(client: ClientInfo) -> str:
    return f"{processes.name(client)} {client.pid}"


def _since(holders: Sequence[ClientInfo], pool: PoolInfo, now: float) -> str:
    """Return for how long the oldest known lease on a version is held."""
    began = [
        lease.held_since
        for client in holders
        for lease in client.leases
        if (lease.pool, lease.version) == (pool.name, pool.version) and lease.held_since is not None
    ]
    return format.since(now - min(began)) if began else "?" if pool.leases else "-"


def _aligned(cell: str, title: str, widths: Mapping[str, int]) -> str:
    return cell.rjust(widths[title]) if title.startswith(">") else cell.ljust(widths[title])


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as ``0-3,5``."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in run)
        runs.append(f"{first}-{rest[-1]}" if rest else str(first))
    return ",".join(runs)


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
