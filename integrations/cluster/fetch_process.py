"""The process that fetches one version: ``python -m cubroker.integrations.cluster.fetch_process``.

It is told what to fetch by a line of JSON, and says how far it is, and how it ended, in lines of JSON. It opens the
version at its sources, creates a draft, reads all of it with one thread and one engine per source, compares a digest of
every allocation with what the sources say, and seals. Killed at any moment it leaves nothing: the draft ends with it.

A source that is lost is replaced by another host that has the same bytes, or by itself once it is back. Two hosts have
the same version if layout and digests are the same, whatever its number is there.

Hosts that are still fetching the version themselves are sources, too, of what they have. The exporter of this host is
told what is here (:mod:`~cubroker.integrations.cluster.announcements`), for others to read. An allocation that comes
out wrong is read again from hosts that have published the version alone.

The main thread decides, and waits for events: a source has answered, opened, or is lost; an allocation is whole, or is
not what it should be. Each source has a thread, which alone uses its connection and its engine. One more thread
computes digests, of pieces as they come.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from threading import Thread
from typing import NamedTuple, NoReturn, TypeAlias

import msgspec

from cubroker.client import Broker, Draft, Pool, digests
from cubroker.client.devices import find
from cubroker.client.loading.copy import copy_between_devices, hold_all, target_of
from cubroker.client.loading.loader import trusted
from cubroker.integrations.cluster import engine, identity, messages, peers
from cubroker.integrations.cluster.announcements import DraftAnnouncement
from cubroker.integrations.cluster.connection import OwnHost, PeerAddress
from cubroker.integrations.cluster.filling import Filled, Filling, FillingFailed, Whole, Wrong
from cubroker.integrations.cluster.messages import ExportedVersion, Fetched, Offer, Open, Order, StatusLine
from cubroker.integrations.cluster.source_thread import Answered, Lost, Ready, Reported, SourceReader
from cubroker.integrations.cluster.sources import ASKED, USELESS, Candidate, by_room, piece_size
from cubroker.protocol.errors import (
    Corrupted,
    CubrokerError,
    Denied,
    Invalid,
    NotFound,
    OverQuota,
    Unavailable,
    Unsupported,
    from_code,
)
from cubroker.protocol.layout import Layout

AGAIN = (0.5, 8.0)
"""Seconds until a host that was lost is asked again: at first, and at most, after doubling."""

GATHER = 0.2
"""Seconds that the answers of other hosts are waited for after the first, to choose among them."""

GATHER_PARTS = 2.0
"""The same, where all of them have parts alone and so might be of a version that never comes to be."""

REPORT = 0.1
"""Seconds between two reports of progress."""

LEAVE = 15.0
"""Seconds that the threads have to end."""

STUCK = "a source's engine does not end; nothing was published"

SHOWN = 5
"""Hosts whose errors are told one by one."""


Happened: TypeAlias = Reported | Filled
"""An event of the main thread."""


# -- where it comes from -------------------------------------------------------------------------------


class Host:
    """A host that may be asked: when, and for what it was given up."""

    def __init__(self, address: PeerAddress) -> None:
        self.address = address
        self.source: SourceReader | None = None
        self.error: CubrokerError | None = None
        #: The version's number there, once it has opened it; and those of versions that have other bytes.
        self.version = 0
        self.others: set[int] = set()
        #: Those of versions of which it has a part, and did not let this side read that.
        self.refused: set[int] = set()
        #: Whether it may be read from only once it has the whole version.
        self.distrusted = False
        #: When it may be asked again; infinity: never. And whether it is this host itself.
        self.due = 0.0
        self.own = False
        self._pause = AGAIN[0]

    def put_off(self, error: CubrokerError | None) -> None:
        """Note that it is gone for now, and for what reason; None: others were chosen."""
        self.source, self.error = None, error or self.error
        self.due = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, AGAIN[1])

    def exclude(self, error: CubrokerError) -> None:
        """Never ask it again."""
        self.source, self.error, self.due = None, error, inf

    def leave_out(self) -> None:
        """Never ask it again: it is this host itself."""
        self.source, self.due, self.own = None, inf, True

    def pick(self, name: str, offers: Sequence[Offer], content: bytes | None) -> Offer | None:
        """Return the version to open of those that it offers; None: it has none that is wanted.

        Args:
            name: the pool.
            offers: what it has.
            content: what is wanted; None: the current version, or if it has none the newest of which it has a part.
        """
        known = [
            offer
            for offer in offers
            if offer.name == name
            and offer.version not in self.others
            and not (_partial(offer) and (self.distrusted or offer.version in self.refused))
        ]
        if content is None:
            found = [offer for offer in known if offer.current or _partial(offer)]
        else:
            found = [offer for offer in known if offer.content == content] or [
                offer for offer in known if offer.content is None and (offer.version == self.version or offer.current)
            ]
        return max(found, key=lambda offer: (not _partial(offer), offer.version), default=None)


class _Wanted(NamedTuple):
    """What a host shall open."""

    #: 0: its current version.
    number: int
    #: What it is, if that is known; and whether the host has a part of it alone.
    content: bytes | None = None
    partial: bool = False


class SourceChoice:
    """The hosts that may have a version, and those of them that bring it. All methods are the main thread's."""

    def __init__(self, order: Order, events: SimpleQueue[Happened]) -> None:
        self._order = order
        self._events = events
        self._chance = Random()  # noqa: S311  # which of equal hosts is asked
        self._hosts = [Host(address) for address in peers.resolve(order.peers)]
        if not order.version:  # else the first that has it says what it is
            self._chance.shuffle(self._hosts)  # or all hosts of a cluster would ask the same ones first
        self._started: list[SourceReader] = []
        #: The host of each, in their order.
        self._host_of: list[Host] = []
        #: This host's own broker, which is not read from.
        self.own = b""
        #: Hosts that have answered, and were told nothing yet, and what each shall open; when that is decided, or if
        #: all of them have parts alone, when then.
        self._candidates: dict[SourceReader, Candidate] = {}
        self._wanted: dict[SourceReader, _Wanted] = {}
        self._gathered = self._gathered_parts = 0.0
        #: Those that were told to open a version of which they have a part, with its number.
        self._parts: dict[SourceReader, int] = {}
        #: What the version is, and whether a source has opened it.
        self._content: bytes | None = None
        self._opened = False
        self._filling: Filling | None = None
        #: Those that were told to open it.
        self._engaged: set[SourceReader] = set()
        #: Those that have opened it, and have the same bytes as the first one.
        self._same: dict[int, SourceReader] = {}
        #: Those that bytes come from.
        self.reading: dict[int, SourceReader] = {}
        self.used: dict[str, None] = {}

    def ask(self, *, again: bool = True) -> None:
        """Ask hosts that may be asked now, as long as more sources are wanted: the one first that waits longest.

        Args:
            again: whether to ask those that were asked before.
        """
        now = time.monotonic()
        due = [host for host in self._askable() if host.due <= now and (again or not host.error)]
        due.sort(key=lambda host: host.due)
        for host in due[: self._room()]:
            host.source = SourceReader(
                len(self._started), host.address, Path(self._order.certificates), self._events.put, self.own
            )
            self._started.append(host.source)
            self._host_of.append(host)

    def _askable(self) -> list[Host]:
        """Return the hosts that can be asked: at first the leader alone, if there is one."""
        leading = self._content is None and self._order.leader
        return [
            host
            for host in self._hosts
            if host.source is None and host.due < inf and (not leading or str(host.address) == self._order.leader)
        ]

    def _room(self) -> int:
        """Return how many hosts more to ask."""
        asked = sum(host.source is not None for host in self._hosts) - len(self._engaged)
        wanted = self._order.width - len(self._engaged)
        return max(0, (wanted if self._engaged else ASKED) - asked)

    def next_due(self) -> float:
        """Seconds until something is to be done, if nothing happens."""
        times = [host.due for host in self._askable()] if self._room() else []
        if self._candidates:
            times.append(self._choosing)
        return max(0.0, min(times, default=inf) - time.monotonic())

    @property
    def hopeless(self) -> bool:
        """Whether no host can be asked any more, and none has been asked."""
        return not self._askable() and not self.asking

    @property
    def asking(self) -> bool:
        """Whether an answer may still come."""
        return any(host.source is not None for host in self._hosts)

    @property
    def bringing(self) -> bool:
        """Whether a source that is read from has brought anything; else one that always fails would do for ever."""
        return any(source.brought for source in self.reading.values())

    def answered(self, event: Answered) -> None:
        """Take a host's answer: it is a candidate if it has the pool."""
        host = self._host(event.source)
        if host is None:
            return
        wanted = self._find(host, event.offers.offers)
        if wanted is None:
            event.source.leave()
            none = NotFound(f"it has no {self._order.name} that this host may fetch")
            host.put_off(None if host.distrusted or host.refused else none)  # why that is so says more
            return
        self._wanted[event.source] = wanted
        if not self._candidates:
            now = time.monotonic()
            self._gathered, self._gathered_parts = now + GATHER, now + GATHER_PARTS
        self._candidates[event.source] = Candidate(str(event.source.number), event.offers.readers, event.offers.limit)

    def _find(self, host: Host, offers: Sequence[Offer]) -> _Wanted | None:
        """Return the version that a host shall open; None: it has none."""
        name, wanted = self._order.name, self._order.version
        if self._content is None and wanted:
            if self._order.leader:  # it says what the version is, also if it has no room for a reader
                self._content = next((o.content for o in offers if (o.name, o.version) == (name, wanted)), None)
            part = any(_partial(offer) for offer in offers if (offer.name, offer.version) == (name, wanted))
            has = any(offer.name == name for offer in offers) and not (part and wanted in host.refused)
            return _Wanted(wanted, partial=part) if has else None
        offer = host.pick(name, offers, self._content)
        if offer is None:
            return None
        number = 0 if offer.current and offer.content is None else offer.version
        return _Wanted(number, offer.content, partial=_partial(offer))

    @property
    def _undecided(self) -> bool:
        """Whether the current version of any host will do."""
        return self._content is None and not self._order.version

    @property
    def _choosing(self) -> float:
        """When the candidates are chosen among, if not all that were asked have answered before."""
        parts = self._undecided and all(each.partial for each in self._wanted.values())
        return self._gathered_parts if parts else self._gathered

    def _decided(self) -> list[SourceReader]:
        """Return the candidates that have what is wanted: as long as that is open, current versions before parts.

        Parts count then if they are of such a version; of parts alone, the first that is opened decides.
        """
        found = [*self._candidates]
        if self._undecided and not all(self._wanted[source].partial for source in found):
            current = {self._wanted[source].content for source in found if not self._wanted[source].partial} - {None}
            found = [each for each in found if not self._wanted[each].partial or self._wanted[each].content in current]
        return found

    def choose(self) -> None:
        """Have the best of the candidates open the version, once there was time for the others to answer."""
        waited = sum(host.source is not None for host in self._hosts) - len(self._engaged)
        if not self._candidates or (time.monotonic() < self._choosing and len(self._candidates) < waited):
            return
        room = max(0, self._order.width - len(self._engaged))
        decided = {str(source.number): source for source in self._decided()}
        roomy = by_room([self._candidates[source] for source in decided.values()], self._chance)
        chosen = [decided[each.peer] for each in roomy]
        if self._order.version and self._content is None:  # the number is that of the first that was given
            chosen, room = sorted(chosen, key=lambda source: source.number), min(1, room)
        for source in [*self._candidates]:
            host = self._host(source)
            assert host
            if source in chosen[:room]:
                self._engaged.add(source)
                wanted = self._wanted[source]
                if wanted.partial:
                    self._parts[source] = wanted.number
                source.open(Open(self._order.name, wanted.number))
            else:
                source.leave()
                full = source not in chosen and str(source.number) in decided
                host.put_off(OverQuota("as many hosts read from it as may") if full else None)
        self._candidates.clear()
        self._wanted.clear()

    def ready(self, event: Ready) -> bool:
        """Take a host that has opened the version; returns whether it is the first of all."""
        host = self._host(event.source)
        if host is None:
            return False
        opened, first = event.opened, not self._opened
        found = messages.content(opened.layout, opened.algorithm, (place.digest for place in opened.places))
        try:
            _check(opened)
        except Invalid as error:
            self._refused(event.source, host, error)
            return False
        if self._content not in (None, found):
            self._dismiss(event.source)
            host.others.add(opened.version)
            host.put_off(NotFound(f"its {self._order.name} has other bytes than the first source's"))
            return False
        self._content, self._opened, host.version = found, True, opened.version
        self._same[event.source.number] = event.source
        if self._filling:
            self._begin(event.source, self._filling)
        return first

    def _refused(self, source: SourceReader, host: Host, error: CubrokerError) -> None:
        """Do without what a host was to open: a part, or if it is none the host."""
        part = self._parts.get(source)
        self._dismiss(source)
        if part is None:
            host.exclude(error)
        else:
            host.refused.add(part)
            host.put_off(error)

    def _dismiss(self, source: SourceReader) -> None:
        """Have a source end, and do without it."""
        source.leave()
        self._parts.pop(source, None)
        self.reading.pop(source.number, None)
        self._candidates.pop(source, None)
        self._wanted.pop(source, None)
        self._same.pop(source.number, None)
        self._engaged.discard(source)

    def fill(self, filling: Filling) -> None:
        """Have all that have opened the version bring it."""
        self._filling = filling
        for source in self._same.values():
            self._begin(source, filling)

    def _begin(self, source: SourceReader, filling: Filling) -> None:
        self.reading[source.number] = source
        self.used[str(source.address)] = None
        source.read(filling)

    def lost(self, event: Lost) -> None:
        """Note that a host is gone: it may be asked again later, unless it will never do."""
        host = self._host(event.source)
        if host and isinstance(event.error, Denied | Invalid | Unsupported) and not isinstance(event.error, OwnHost):
            self._refused(event.source, host, event.error)
            return
        self._dismiss(event.source)
        if host is None:  # it was given up before
            return
        if isinstance(event.error, OwnHost):
            host.leave_out()
        else:
            host.put_off(event.error)

    def distrust(self, numbers: set[int], error: CubrokerError) -> bool:
        """Read from those of these sources that have a part only once they have all; returns whether there were any."""
        found = [number for number in numbers if not self._started[number].whole]
        for host in [self._host_of[number] for number in found]:
            host.distrusted = True
            if host.source and not host.source.whole:  # another one by now, perhaps
                self._dismiss(host.source)
                host.put_off(error)
        return bool(found)

    def drop(self, numbers: set[int], error: CubrokerError) -> bool:
        """Exclude sources, if others are left that have the whole version; returns whether there are."""
        if not any(source.whole for number, source in self._same.items() if number not in numbers):
            return False
        for number in numbers:
            host = self._host_of[number]
            if host.source is self._started[number]:
                self._dismiss(host.source)
                host.exclude(error)
        return True

    def leave_useless(self, filling: Filling) -> None:
        """Leave sources that long had nothing that is wanted, as far as there are other hosts to ask."""
        now = time.monotonic()
        others = sum(host.due <= now for host in self._askable())
        useless = [source for number, source in self.reading.items() if filling.useless(number) > USELESS]
        for source in useless[:others]:
            source.leave()
            self.lost(Lost(source, Unavailable(f"{source.address} has nothing yet that is not here")))

    @property
    def has_whole(self) -> bool:
        """Whether a source that is read from has the whole version."""
        return any(source.whole for source in self.reading.values())

    def give_up(self) -> None:
        """Do without sources that were told to read and are still not connected."""
        now, patience = time.monotonic(), self._order.patience
        for source in [*self.reading.values()]:
            if not source.writing and now - source.told > patience:
                source.leave()
                self.lost(Lost(source, Unavailable(f"{source.address} could not be read from within {patience:g} s")))

    def leave_late(self, filling: Filling) -> None:
        """Leave sources that still write what others have brought; return when none writes, as :meth:`end` does."""
        for number in filling.writing:
            source = self._started[number]
            self.lost(Lost(source, Unavailable(f"{source.address} was slower than others")))
        if not filling.wait(LEAVE):
            _end(STUCK)

    def end(self) -> None:
        """Have all threads end, and return when those have that write; end this process if one does not.

        An engine writes until it is closed, and memory must not be given back before.
        """
        if self._filling:
            self._filling.end_joining()
        for source in self._started:
            source.leave()
        deadline = time.monotonic() + LEAVE
        writing = [source for source in self._started if source.writing]
        if not all(source.join(max(0.0, deadline - time.monotonic())) or source.closed for source in writing):
            _end(STUCK)

    def why(self) -> CubrokerError:
        """Return the reason why there is no source, of the kind that tells most, with what each host says."""
        if self._hosts and all(host.own for host in self._hosts):
            own = ", ".join(str(host.address) for host in self._hosts)
            return Invalid(f"{self._order.name} cannot be fetched: {own} is this host itself; name others")
        errors = [(host.address, host.error) for host in self._hosts if host.error]
        for kind in (Corrupted, Denied, Invalid, Unsupported, OverQuota, NotFound, CubrokerError):
            errors.sort(key=lambda pair: not isinstance(pair[1], kind))
            if errors and isinstance(errors[0][1], kind):
                told = [
                    each.message if str(address) in each.message else f"{address}: {each.message}"
                    for address, each in errors[:SHOWN]
                ]
                more = len(errors) - len(told)
                told += [f"and {more} hosts more"] * (more > 0)
                return from_code(errors[0][1].code, f"{self._order.name} cannot be fetched: {'; '.join(told)}")
        return Unavailable(f"{self._order.name} cannot be fetched: no host is known")

    def _host(self, source: SourceReader) -> Host | None:
        """Return a source's host; None if it was given up."""
        return next((host for host in self._hosts if host.source is source), None)


# -- the whole -----------------------------------------------------------------------------------------


def _check(opened: ExportedVersion) -> None:
    """Raise ``Invalid`` unless what a source says of a version fits together."""
    layout = Layout.decode(opened.layout)
    if tuple(place.nbytes for place in opened.places) != layout.allocations:
        raise Invalid("the source says of a version what does not fit together; it is not of this project, or damaged")
    if opened.algorithm != digests.DEFINITION:
        raise Invalid(f"the source has digests by {opened.algorithm}, and this build has {digests.DEFINITION}; upgrade")
    if opened.runs is not None and opened.piece != piece_size(layout.nbytes):
        raise Invalid(f"the source passes on runs of {opened.piece} bytes, and this build takes others; upgrade one")


def _partial(offer: Offer) -> bool:
    return offer.there is not None


class Fetch:
    """One fetch, from the order to the published version."""

    def __init__(self, order: Order, report: Callable[[int, int], None]) -> None:
        self._order = order
        self._report = report
        self._events: SimpleQueue[Happened] = SimpleQueue()
        self._began = time.monotonic()
        self._sources = SourceChoice(order, self._events)

    def run(self) -> Fetched:
        """Do what is ordered; arguments and errors are those of :func:`~cubroker.integrations.cluster.fetch.fetch`."""
        order = self._order
        with ExitStack() as undo:
            broker = undo.enter_context(Broker(order.directory))
            self._sources.own = identity.host(broker.directory)
            order = msgspec.structs.replace(order, devices=_uuids(broker, order))
            if order.if_absent:  # those that wait for their turn hold nothing at the sources
                undo.enter_context(broker.lock(order.name, timeout=order.wait))
                if (there := _present(broker, order)) is not None:
                    return self._there(undo.enter_context(there))
            engine.load()  # or say at once that it is not installed
            undo.callback(self._sources.end)
            opened = self._open()
            layout = Layout.decode(opened.layout)
            if order.if_changed and (there := _same(broker, order, opened)) is not None:
                return self._there(undo.enter_context(there))
            left = max(0.0, self._began + order.wait - time.monotonic())
            pool = undo.enter_context(_drafted(broker, order, layout, left))
            if not isinstance(pool, Draft):
                return self._there(pool)
            began = time.monotonic()
            with hold_all([target_of(replica) for replica in pool.replicas]):
                from_parts = self._fill(broker, pool, opened, undo)
            seconds = time.monotonic() - began
            uuids = [replica.memory_device.uuid for replica in pool.replicas]
            version = pool.seal(digest=digests.of_replicas(uuids, [place.digest for place in opened.places]))
            return Fetched(
                name=order.name,
                version=version,
                nbytes=layout.nbytes,
                tensors=len(layout.tensors),
                seconds=time.monotonic() - self._began,
                read_seconds=seconds,
                sources=tuple(self._sources.used),
                fetched=True,
                from_parts=from_parts,
            )

    def _there(self, pool: Pool) -> Fetched:
        layout, seconds = pool.layout, time.monotonic() - self._began
        return Fetched(pool.name, pool.version, layout.nbytes, len(layout.tensors), seconds, 0.0, (), fetched=False)

    def _open(self) -> ExportedVersion:
        """Return what the first source that has the version says of it."""
        deadline = self._began + self._order.wait
        while True:
            self._sources.ask(again=time.monotonic() < deadline)
            event = self._event(min(self._sources.next_due(), max(0.0, deadline - time.monotonic()) or REPORT))
            if isinstance(event, Ready) and self._sources.ready(event):
                return event.opened
            if not self._sources.asking and (time.monotonic() >= deadline or self._sources.hopeless):
                raise self._sources.why()

    def _fill(self, broker: Broker, draft: Draft, opened: ExportedVersion, undo: ExitStack) -> int:
        """Fill a draft from all sources, and check it; returns how many bytes came from hosts that had a part.

        Other hosts are told what is there until ``undo`` is closed.
        """
        filling = Filling(draft, opened, self._order.patience, self._events.put)
        sums = [place.digest for place in opened.places]
        piece = piece_size(draft.layout.nbytes)
        mode = self._order.mode
        announcement = DraftAnnouncement(broker, draft.name, draft.version, sums, piece, lambda: filling.have, mode)
        undo.callback(announcement.close)
        try:
            self._sources.fill(filling)
            self._complete(filling)
        finally:
            self._sources.end()  # before anything is unmapped
            filling.close()
        targets = [target_of(replica) for replica in draft.replicas]
        copy_between_devices(targets, [place.nbytes for place in opened.places])
        return filling.from_parts

    def _complete(self, filling: Filling) -> None:
        """Return when every allocation is there and has its digest, and no source writes any more."""
        whole: set[tuple[int, int]] = set()
        wrong: set[tuple[int, int]] = set()
        while True:
            self._bring(filling, whole, wrong)
            self._sources.leave_late(filling)
            if not (overwritten := filling.overwritten()):
                break
            whole.difference_update(overwritten)
            for each in overwritten:
                self._read_again(each, filling, wrong)
        self._report(*filling.progress)

    def _bring(self, filling: Filling, whole: set[tuple[int, int]], wrong: set[tuple[int, int]]) -> None:
        """Return when every allocation is there and was once found to have its digest."""
        alive = moved = time.monotonic()
        before = 0
        while len(whole) < filling.allocations:
            self._report(*filling.progress)
            self._sources.give_up()
            self._sources.leave_useless(filling)
            self._sources.ask()
            event = self._event(min(REPORT, self._sources.next_due()))
            match event:
                case Ready():
                    self._sources.ready(event)
                case Whole():
                    whole.add((event.replica, event.allocation))
                case Wrong():
                    self._read_again(event, filling, wrong)
            now = time.monotonic()
            alive = now if self._sources.bringing else alive
            late = now - alive > self._order.patience or self._sources.hopeless
            if late and not self._sources.reading:
                raise self._sources.why()
            done, total = filling.progress
            if done != before or done == total or self._sources.has_whole:  # such a source is given up by itself
                before, moved = done, now
            if now - moved > self._order.patience:
                raise Unavailable(
                    f"{self._order.name} cannot be fetched: no host that is left has all of it, and nothing more has"
                    f" come from their parts for {self._order.patience:g} s; {done} of {total} bytes are here"
                )

    def _read_again(self, found: Wrong, filling: Filling, wrong: set[tuple[int, int]]) -> None:
        """Have an allocation brought again that is not what it should be, by other sources if there are any.

        Raises:
            Corrupted: it came wrong twice from hosts that have the whole version, and there is no other one.
        """
        replica, allocation = found
        error = Corrupted(f"allocation {allocation} of {self._order.name} came with other bytes than it has")
        wrote = filling.again(found)
        if self._sources.distrust(wrote, error) or self._sources.drop(wrote, error):
            return
        if (replica, allocation) in wrong:
            raise Corrupted(
                f"{error.message}, twice, and no other host has them: what is on the way changes them,"
                f" or the source's memory; check it there with `cubroker verify --digest`"
            )
        wrong.add((replica, allocation))

    def _event(self, limit: float) -> Happened | None:
        """Wait up to ``limit`` seconds for an event, and do what every phase does with it."""
        try:
            event = self._events.get(timeout=min(limit, 3600.0))
        except Empty:
            event = None
        match event:
            case Answered():
                self._sources.answered(event)
            case Lost():
                self._sources.lost(event)
            case FillingFailed(error):
                raise error
        self._sources.choose()
        return event


def _uuids(broker: Broker, order: Order) -> tuple[str, ...]:
    """Return the devices; by default the broker's first one, which may be another than this process's."""
    if order.devices is None:
        return (broker.devices()[0].uuid,)
    return tuple(find(broker.driver, device).uuid for device in order.devices)


def _present(broker: Broker, order: Order) -> Pool | None:
    """Return the current version, if there is one, of a user that will do."""
    try:
        assert order.devices
        return broker.attach(order.name, device=order.devices[0], owner=trusted(broker, order.owners))
    except NotFound:
        return None


def _same(broker: Broker, order: Order, opened: ExportedVersion) -> Pool | None:
    """Return the current version if it has the bytes that a source has, on all devices that are to get it."""
    name = order.name
    try:
        info, layout, _ = broker.describe(name)
        answer = broker.digests(name, info.version)
    except NotFound:
        return None
    if layout.encode() != opened.layout or answer.digests is None or info.sharded:
        return None
    if not set(order.devices or ()) <= set(info.devices):
        return None
    if answer.digests.replicas[0] != tuple(place.digest for place in opened.places):
        return None
    return broker.attach(name, version=info.version, device=info.devices[0])


def _drafted(broker: Broker, order: Order, layout: Layout, wait: float) -> Pool:
    """Return a draft, or with ``if_absent`` what another writer has published meanwhile."""
    owners = trusted(broker, order.owners)
    ask = partial(broker.attach_or_create, owner=owners) if order.if_absent else broker.create
    return ask(
        order.name,
        layout,
        devices=order.devices,
        share=order.share,
        wait=wait,
        mode=order.mode,
        durable=order.durable,
    )


# -- the process ---------------------------------------------------------------------------------------

_out = sys.stdout.buffer


def _say(told: StatusLine) -> None:
    _out.write(msgspec.json.encode(told) + b"\n")
    _out.flush()


@contextmanager
def _own_output() -> Iterator[None]:
    """Keep standard output for our lines: libraries that print there print to standard error instead."""
    global _out
    with os.fdopen(os.dup(1), "wb") as stream:
        os.dup2(2, 1)
        _out = stream
        yield


def _end(why: str) -> NoReturn:
    """End this process at once, and say why: the interpreter's own end would unmap what an engine may still write."""
    _say(StatusLine(error=(Unavailable.code, why)))
    os._exit(1)


def _end_with_caller() -> None:
    """End when standard input does: the process that ordered this is gone, and its draft goes with this one."""
    while os.read(0, 1):  # by its number: a thread that waits in a buffered stream would stop the interpreter's end
        pass
    os._exit(1)


def main() -> None:
    """Do what a line of standard input orders, and say how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets it, too, and ends this process
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    Thread(target=_end_with_caller, name="cubroker-caller", daemon=True).start()
    with _own_output():
        said = 0.0

        def report(done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            if now - said >= REPORT or done == total:
                said = now
                _say(StatusLine(progress=(done, total)))

        status = 1
        try:
            fetched = Fetch(order, report).run()
            _say(StatusLine(fetched=fetched))
            status = 0
        except CubrokerError as error:
            _say(StatusLine(error=(error.code, error.message)))
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)  # at once: a thread may wait for a host that is away, or an engine write


if __name__ == "__main__":
    main()
