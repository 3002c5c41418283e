"""The picture of ``cubroker top``: devices as bars, requests that wait, and pools or processes, for any terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

from rich.text import Text

from cubroker.cli import format
from cubroker.protocol.messages import View
from cubroker.protocol.status import BlockInfo, ClientInfo, DeviceInfo, PoolInfo

NARROWEST = 40
"""Columns that a picture has at least, however narrow the terminal."""

LEAST_BY = 16
"""Columns that the names of holders have at least, or a third of the terminal if that is less."""

_WIDTHS = {"STATE": 10, ">SIZE": 9, "ON": 3, ">LEASES": 6, ">HELD": 6}
"""The least widths of the parts of a row, so that values that change do not move the rest."""

SPARE = (">LEASES", "ON", "STATE", ">HELD")
"""The columns that a narrow terminal leaves out, in this order; the holders of a pool show how many they are, too."""

LEAST_BAR, LEAST_FIGURED, LEAST_NAMED = 5, 10, 20
"""The least width of a bar: at all, next to bytes instead of a percentage, and next to the name of a device."""

PAIRED = 60
"""The width from which on many devices share lines in pairs, even if the terminal is high enough for a line each."""

ROOMY, LOW = 120, 12
"""The width from which on the keys share a line with the status; a narrower terminal shows them from this height on."""

BAR = {
    "current": ("bright_blue", "█", "#"),
    "draft": ("yellow", "▒", "+"),
    "superseded": ("cyan", "▓", "="),
    "retired": ("magenta", "░", "-"),
    "lost": ("red", "?", "?"),
    "freeing": ("dim", "~", "~"),
    "outside the budget": ("dim", "·", "."),
}
"""The parts of a bar, in order: the colour, the character, and the one for terminals that have only ASCII."""

FEW = 8
"""As many devices have a line each; more share lines in pairs, if the terminal is wide enough."""

WAITERS = 5
"""Waiting requests that are shown: those that have waited longest."""

POOLS, CLIENTS = "pools", "clients"

POOL_ORDERS: Mapping[str, Callable[[PoolInfo], Any]] = {
    "size": lambda pool: -pool.nbytes,
    "name": lambda pool: 0,
    "leases": lambda pool: -pool.leases,
    "state": lambda pool: [*BAR].index(pool.state) if pool.state in BAR else len(BAR),
}
"""The keys that pools are sorted by; equal ones stay in the order of names."""

ORDERS: Mapping[str, Sequence[str]] = {POOLS: [*POOL_ORDERS], CLIENTS: ["held", "age", "leases", "process", "pid"]}
"""The orders of each list, of which the first one is the default."""

HELP = ("q quit", "arrows, PgUp, PgDn", "s sort", "r reverse", "/ filter", "d device")
SPARE_HELP = (1, 3, 6)
"""The indexes of the keys that a narrow terminal leaves out, in this order; the last is the key of the other list."""


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
        """Handle a key, which may change what is shown; return whether to continue.

        Args:
            key: a character, or the name of a key in :data:`cubroker.cli.top.NAMED`.
            devices: the indexes of all devices.
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
        elif key == "escape":
            self.filter, self.device, self.offset = "", None, 0
        return True

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.typing, self.filter = False, "" if key == "escape" else self.filter
        elif key == "backspace":
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter += key
        self.offset = 0

    def window(self, rows: int, page: int) -> slice:
        """Return which of ``rows`` rows are shown on a page of ``page`` rows."""
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
    "up": lambda choice: -1,
    "down": lambda choice: 1,
    "page up": lambda choice: -choice.page,
    "page down": lambda choice: choice.page,
    "home": lambda choice: -choice.rows,
    "end": lambda choice: choice.rows,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """Draws views for a terminal.

    Args:
        width: columns, at least :data:`NARROWEST`.
        height: lines, or None for as many as are needed.
        plain: whether bars are made of ASCII.
        choice: what is shown; drawing stores in it how many rows there were.
    """

    width: int
    height: int | None
    plain: bool
    choice: Choice = field(default_factory=Choice)

    def lines(self, view: View, now: float) -> list[Text]:
        """Return the lines of a view at ``now``, in seconds since 1970; with a height, exactly as many lines."""
        top, below = self._top(view, now), self._below
        room = None if self.height is None else max(1, self.height - len(top) - 1 - below)
        rows = [*(self._pools(view, room, now) if self.choice.listed == POOLS else self._clients(view, room, now))]
        if self.height is None:
            return [*top, *rows]
        empty = [Text()] * (self.height - len(top) - len(rows) - below)
        return [*top, *rows, *empty, *self._status()]

    @property
    def _below(self) -> int:
        """How many lines are under the list: the status, and the keys if they have a line of their own."""
        return 0 if self.height is None else 2 if self.width < ROOMY and self.height >= LOW else 1

    def _top(self, view: View, now: float) -> list[Text]:
        """Return what is above the list, in the roomiest way that leaves half of the screen to the list."""
        arrangements = self._arrangements(view, now)
        if self.height is None:
            return next(arrangements)
        limit = max(1, self.height // 2)
        for found in arrangements:
            if len(found) <= limit:
                return found
        return [*found[: limit - 1], Text("… the terminal is too low for the rest", "dim")][:limit]

    def _arrangements(self, view: View, now: float) -> Iterator[list[Text]]:
        """Yield the part above the list with ever fewer lines: without gaps, without legend, more devices in a line."""
        head, legend, waiting = self._headline(view), self._legend(view), [*self._waiting(view, now)]
        first = 1 if len(view.devices) <= FEW or self.width < PAIRED else 2
        for columns in range(first, max(first, (self.width + 2) // 9) + 1):
            devices = [*self._devices(view, columns)]
            yield [head, Text(), *devices, legend, Text(), *waiting, *([Text()] if waiting else [])]
            yield [head, *devices, legend, *waiting]
            yield [head, *devices, *waiting]

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
        """Return the processes that are chosen, in their order; if a device is, those that hold a pool there."""
        uuids = {device.uuid for device in view.devices if device.index == self.choice.device}
        there = {(pool.name, pool.version) for pool in view.pools if not uuids.isdisjoint(pool.devices)}
        found = [
            client
            for client in view.clients
            if self.choice.matches(
                format.client_name(client),
                format.user(client.uid),
                str(client.pid),
                *(each.pool for each in client.leases),
            )
            and (self.choice.device is None or any((each.pool, each.version) in there for each in client.leases))
        ]
        found.sort(key=format.CLIENT_ORDERS[self.choice.order[CLIENTS]])
        return found[::-1] if self.choice.reverse else found

    def _headline(self, view: View) -> Text:
        detached = sum(client.state == "detached" for client in view.clients)
        used = sum(device.allocated + device.promised for device in view.devices)
        parts = (
            format.count(len(view.devices), "device"),
            format.part(used, sum(device.budget for device in view.devices)),
            format.count(len(view.pools), "version"),
            format.count(len(view.clients), "session") + (f" ({detached} detached)" if detached else ""),
            f"{len(view.waiters)} waiting",
        )
        return Text(format.fitting(parts, self.width, (3, 2, 0)), "bold")

    def _devices(self, view: View, columns: int) -> Iterator[Text]:
        """Yield the devices in ``columns`` columns, in each of which the indexes rise downwards."""
        width = (self.width - 2 * (columns - 1)) // columns
        used = [(device.allocated + device.promised, device.budget) for device in view.devices]
        figures = [format.part(*each) for each in used]
        longest = max(map(len, figures), default=0)
        if width - len(" 0 [] ") - longest < LEAST_FIGURED:
            figures, longest = [f"{some / max(1, budget):.0%}" for some, budget in used], len("100%")
        names = [format.printable(device.name) for device in view.devices]
        wide = max(map(len, names), default=0)
        if columns > 1 or width - len(" 0  [] ") - wide - longest < LEAST_NAMED:
            names, wide = [""] * len(names), 0
        drawn = [
            self._device(device, view.blocks, width, f"{name:{wide}} " if wide else "", figure.rjust(longest))
            for device, name, figure in zip(view.devices, names, figures, strict=True)
        ]
        rows = ceil(len(view.devices) / columns)
        for row in range(rows):
            yield Text("  ").join(drawn[row::rows])

    def _device(self, device: DeviceInfo, blocks: Iterable[BlockInfo], width: int, name: str, figures: str) -> Text:
        mark = "bold reverse" if device.index == self.choice.device else ""
        label = (f"{device.index:>2}", mark), f" {name}"
        room = width - len(" 0 [] ") - len(name) - len(figures)
        if room < LEAST_BAR:
            return Text.assemble(*label, figures.ljust(width - len(" 0 ") - len(name)))
        mine = Counter[str]()
        for block in blocks:
            if block.device == device.uuid:
                mine[state(block)] += block.nbytes
        return Text.assemble(*label, "[", *self._bar(device, mine, room), "]", f" {figures}")

    def _bar(self, device: DeviceInfo, nbytes: Mapping[str, int], width: int) -> Iterator[tuple[str, str]]:
        """Yield the parts of a bar that stands for all bytes of a device; each kind of memory has a column at least."""
        budget, done = max(1, round(width * min(1.0, device.budget / device.total))), 0
        for name, (colour, *marks) in BAR.items():
            if nbytes.get(name):
                columns = min(max(1, round(width * nbytes[name] / device.total)), max(0, width - done))
                yield marks[self.plain] * columns, colour
                done += columns
        yield " " * max(0, budget - done), ""
        colour, *marks = BAR["outside the budget"]
        yield marks[self.plain] * (width - max(budget, done)), colour

    def _legend(self, view: View) -> Text:
        there = {"outside the budget", *(state(block) for block in view.blocks)}
        shown = [(f"{marks[self.plain]} {name}", colour) for name, (colour, *marks) in BAR.items() if name in there]
        indent = "   " if self.width >= PAIRED else ""
        while len(indent) + sum(len(words) + 2 for words, _ in shown) > self.width:
            shown.pop()
        return Text.assemble(indent, *(piece for words in shown for piece in (words, "  ")))

    def _waiting(self, view: View, now: float) -> Iterator[Text]:
        if not (waiters := view.waiters):
            return
        known = {client.session: client for client in view.clients if client.process}
        yield Text("WAITING", "bold")
        for waiter in sorted(waiters, key=lambda waiter: waiter.since)[:WAITERS]:
            pool = format.printable(waiter.pool) or "a private pool"
            takes = f", {format.size(waiter.nbytes)}" if waiter.nbytes else ""
            waits = format.printable(waiter.awaits) or "something"
            what = f"{waiter.what} {pool}: for {waits}{takes}, {format.since(now - waiter.since)}"
            user = format.user(waiter.uid)
            who = [f"process {waiter.pid} ({user})", f"process {waiter.pid}", user]
            if client := known.get(waiter.session):
                who = [format.printable(words(client)) for words in _WORDS]
            lines = [*(f"{what}, {each}" for each in who), what]
            yield self._cut(Text(next((line for line in lines if len(line) <= self.width), what)))
        if len(waiters) > WAITERS:
            yield Text(f"… and {len(waiters) - WAITERS:,} more", "dim")

    def _pools(self, view: View, room: int | None, now: float) -> Iterator[Text]:
        pools = self.pools(view)
        window = self.choice.window(len(pools), len(pools) if room is None else room)
        if not pools:
            nothing = "No pools: nothing has been loaded yet, or everything is retired."
            yield from self._sentence(f"No pool matches{self._escape}." if view.pools else nothing)
            return
        names = [f"{format.printable(pool.name)}@{pool.version}" for pool in pools]
        holders = format.holders(pools, view.clients)
        cells = self._cells(view, pools, holders, now)
        widths = self._widths(names, cells)
        wide = min(max(map(len, names)), self.width - sum(widths.values()) - len(widths) - 1 - self._least_by)
        header = self._row(
            ["POOL".ljust(wide), *(format.align(title.lstrip(">"), title, widths[title]) for title in widths)], "BY"
        )
        header.stylize("bold")
        yield header
        for row in range(*window.indices(len(pools))):
            pool = pools[row]
            mine = [format.squeeze(names[row], wide).ljust(wide)]
            mine += [format.align(cells[title][row], title, widths[title]) for title in widths]
            line = self._row(mine, self._holders(holders[row], pool, len(" ".join(mine)) + 1))
            told = (wide + 1, wide + 1 + widths["STATE"]) if "STATE" in widths else (0, wide)
            line.stylize(BAR.get(pool.state, ("",))[0], *told)
            yield line

    def _cells(
        self, view: View, pools: Sequence[PoolInfo], holders: Sequence[Sequence[ClientInfo]], now: float
    ) -> Mapping[str, list[str]]:
        """Return the columns between names and holders, of all rows, so that scrolling changes no width."""
        indexes = {device.uuid: device.index for device in view.devices}
        return {
            "STATE": [pool.state for pool in pools],
            ">SIZE": [format.size(pool.nbytes) for pool in pools],
            "ON": [format.places(indexes, pool.devices) for pool in pools],
            ">LEASES": [str(pool.leases) for pool in pools],
            ">HELD": [
                format.held_for(format.leases_on(pool, clients), pool.leases, now)
                for pool, clients in zip(pools, holders, strict=True)
            ],
        }

    def _widths(self, names: Sequence[str], cells: Mapping[str, list[str]]) -> Mapping[str, int]:
        """Return the columns for which there is room, and their widths; the sort column is left out last.

        One name, or about a tenth of many, may be longer than their column, so that it takes no columns from all rows.
        """
        *_, longest = lengths = sorted(map(len, names))
        usual = lengths[(len(names) - 1) * 9 // 10]
        least = min(longest, max(18, min(usual, self.width // 2)))
        widths = {title: max(_WIDTHS[title], *map(len, column)) for title, column in cells.items()}
        for title in sorted(SPARE, key=lambda title: title.lstrip(">").lower() == self.choice.order[POOLS]):
            if least + sum(widths.values()) + len(widths) + 1 + self._least_by <= self.width:
                break
            del widths[title]
        return widths

    @property
    def _least_by(self) -> int:
        return min(LEAST_BY, self.width // 3)

    def _holders(self, holders: Sequence[ClientInfo], pool: PoolInfo, taken: int) -> str:
        """Return who holds a version: with users and containers if there is room, else as many as fit."""
        if not holders:
            return "other users" if pool.leases else "-"
        room = self.width - taken
        detached = [" (detached)" * (client.state == "detached") for client in holders]
        said = [
            [format.printable(words(client) + note) for client, note in zip(holders, detached, strict=True)]
            for words in _WORDS
        ]
        whole = next((", ".join(each) for each in said if len(", ".join(each)) <= room), None)
        # One process with its user says more than a few processes without.
        some = (format.some_of(each, room) for each in said[1:] if len(each[0]) + len(f" +{len(holders) - 1}") <= room)
        return whole or next(some, format.some_of(said[-1], room))

    @property
    def _escape(self) -> str:
        """The hint how to show all, if there are keys."""
        return "" if self.height is None else "; Escape shows all"

    def _clients(self, view: View, room: int | None, now: float) -> Iterator[Text]:
        clients = self.clients(view)
        shown = clients[self.choice.window(len(clients), len(clients) if room is None else room)]
        if not clients:
            none = "No process is attached, or none of this user."
            yield from self._sentence(f"No process matches{self._escape}." if view.clients else none)
            return
        everything = format.client_columns(clients, now)
        columns = {title: cell for title, cell in everything.items() if not title.startswith("~")}
        limit = max(20, self.width - max(LEAST_BY, self.width // 4))
        header, *rows = format.render_table(shown, columns, limit, format.CLIENT_SPARE)
        wide = max(map(len, (header, *rows))) + 1
        title = self._row([header.ljust(wide)], "LEASES")
        title.stylize("bold")
        yield title
        for row, client in zip(rows, shown, strict=True):
            leases = format.printable(format.leases(client)).split(", ") if client.leases else ["none"]
            room = self.width - wide - 1
            rest = f" +{len(leases) - 1}" if len(leases) > 1 else ""
            first = format.squeeze(leases[0], room - len(rest))
            yield self._row([row.ljust(wide)], format.some_of([first, *leases[1:]], room))

    def _sentence(self, words: str) -> Iterator[Text]:
        yield from map(Text, textwrap.wrap(words, self.width))

    def _row(self, cells: Sequence[str], last: str) -> Text:
        return self._cut(Text(" ".join([*cells, last])))

    def _status(self) -> list[Text]:
        """Return the last lines: which rows these are, and the keys."""
        told, keys = self._told(), self._keys()
        if self._below > 1:
            return [Text(told, "bold"), Text(keys, "dim")]
        return [self._cut(Text.assemble((told, "bold"), (f"   {keys}" if self.width >= ROOMY else "", "dim")))]

    def _told(self) -> str:
        choice = self.choice
        if choice.typing:
            room = self.width - len("filter: _")  # for the end, which is being typed
            return f"filter: {format.printable(choice.filter)[-room:]}_"
        last = min(choice.rows, choice.offset + choice.page)
        shown = f"{choice.offset + 1}-{last} of " if choice.rows else ""
        parts = [shown + format.count(choice.rows, choice.listed.removesuffix("s"))]
        parts.append(f"by {choice.order[choice.listed]}" + (", reversed" if choice.reverse else ""))
        parts += [f"filter {format.printable(choice.filter)}"] if choice.filter else []
        parts += [f"device {choice.device}"] if choice.device is not None else []
        return format.fitting(parts, self.width, (1,))

    def _keys(self) -> str:
        if self.choice.typing:
            return "Enter keeps it  Escape takes it back"
        parts = [*HELP, f"c {CLIENTS if self.choice.listed == POOLS else POOLS}"]
        room = self.width - (len(self._told()) + 3 if self._below == 1 else 0)
        return format.fitting(parts, room, SPARE_HELP, gap="  ")

    def _cut(self, line: Text) -> Text:
        line.truncate(self.width, overflow="ellipsis")
        return line


def state(block: BlockInfo) -> str:
    """Return the state of a version, or ``freeing`` for memory without a use."""
    return block.state if block.stage in ("promised", "held") else "freeing"


_WORDS: Sequence[Callable[[ClientInfo], str]] = (format.client_label, format.client_with_user, format.client_short)
"""A process in ever fewer words."""
