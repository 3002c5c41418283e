"""The choice of the hosts for a fetch: which are asked and when, which open the version, and which are given up.

A host that is lost is asked again later, and is replaced by another one that has the same bytes: its layout and digests
are equal, while the number of the version may differ. A host that has only a part of the version is a source of that
part, as long as none of it had a wrong digest. :mod:`~cubroker.integrations.cluster.striping` decides how pieces are
shared among the sources. This module has the hosts behind the sources, each read by a
:class:`.source_thread.SourceReader`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple

from cubroker.client import digests
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import OwnHost, PeerAddress, resolve
from cubroker.integrations.cluster.messages import ExportedVersion, Offer, Open, Order
from cubroker.integrations.cluster.source_thread import Answered, Filling, Ready, Reported, SourceReader
from cubroker.integrations.cluster.striping import ASKED, USELESS, by_room, piece_size
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
"""Seconds to wait after the first answer for the answers of other hosts, to choose among them."""

GATHER_PARTS = 2.0
"""The same, if all hosts that have answered have only parts, whose version may never be published."""

LEAVE = 15.0
"""Seconds that the threads of sources have to end."""

SHOWN = 5
"""Hosts whose errors a message lists one by one."""

TELLING = (Corrupted, Denied, Invalid, Unsupported, OverQuota, NotFound)
"""Errors that tell more than others, those that tell most first."""


class Host:
    """A host that may be asked: when it may be, and the error for which it was given up."""

    def __init__(self, address: PeerAddress) -> None:
        self.address = address
        self.source: SourceReader | None = None
        self.error: CubrokerError | None = None
        #: As :attr:`.connection.PeerConnection.identity`, once it has answered.
        self.identity: object = None
        #: The version's number at this host, once it has opened it; and the numbers of versions with other bytes.
        self.version = 0
        self.others: set[int] = set()
        #: The numbers of versions that it has in part, and that this side could not read from it.
        self.refused: set[int] = set()
        #: Whether it may be read from only once it has the whole version.
        self.distrusted = False
        #: When it may be asked again; infinity: never.
        self.due = 0.0
        self._pause = AGAIN[0]

    def put_off(self, error: CubrokerError | None) -> None:
        """Record that it is not a source for now, and the reason; None: others were chosen."""
        self.source, self.error = None, error or self.error
        self.due = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, AGAIN[1])

    def exclude(self, error: CubrokerError) -> None:
        """Never ask it again."""
        self.source, self.error, self.due = None, error, inf

    def pick(self, name: str, offers: Sequence[Offer], content: bytes | None) -> Offer | None:
        """Return the version to open of those that it offers; None: it has none that is wanted.

        If ``content`` is None, the current version is wanted, or else the newest that it has in part.
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
    """The version that a host is to open."""

    #: 0: its current version.
    number: int
    #: The version's :func:`messages.content`, if it is known; and whether the host has only a part of the version.
    content: bytes | None = None
    partial: bool = False
    #: How many hosts read from the host now, and how many may read at the same time.
    readers: tuple[int, int] = (0, 0)


class SourceChoice:
    """The hosts that may have a version, and those that it is read from. Only the main thread calls its methods."""

    def __init__(self, order: Order, report: Callable[[Reported], object]) -> None:
        self._order = order
        self._report = report
        self._chance = Random()  # noqa: S311  # which of equal hosts is asked
        self._hosts = [Host(address) for address in resolve(order.peers)]
        if not order.version:  # a version's number is that of the first host that has it: then the order matters
            self._chance.shuffle(self._hosts)  # otherwise all hosts of a cluster would ask the same ones first
        #: All sources that were started, each with its host.
        self._started: dict[SourceReader, Host] = {}
        #: The id of this host's own broker, which is not read from.
        self.own = b""
        #: Sources that have answered and were told nothing yet, and what each is to open; when the first has answered.
        self._candidates: dict[SourceReader, _Wanted] = {}
        self._gathering = 0.0
        #: The version's :func:`messages.content`, once it is known, and whether a source has opened the version.
        self._content: bytes | None = None
        self._opened = False
        self._filling: Filling | None = None
        #: Sources that were told to open the version, and its number at those that have only a part of it.
        self._engaged: dict[SourceReader, int | None] = {}
        #: Sources that have opened it, and have the same bytes as the first one. Once there is a draft, they deliver.
        self.reading: set[SourceReader] = set()
        self._used: dict[Host, None] = {}

    def ask(self, *, again: bool = True) -> None:
        """Ask hosts that may be asked now, as many as are wanted; those that have waited longest come first.

        Hosts that have failed are asked only ``again``.
        """
        now = time.monotonic()
        due = [host for host in self._askable() if host.due <= now and (again or not host.error)]
        due.sort(key=lambda host: host.due)
        for host in due[: self._room()]:
            host.source = SourceReader(host.address, Path(self._order.certificates), self._report, self.own)
            self._started[host.source] = host

    @property
    def _by_number(self) -> bool:
        """Whether the number is all that is known of the version: other hosts give it to other bytes."""
        return self._content is None and bool(self._order.version)

    def _askable(self) -> list[Host]:
        """Return the hosts that can be asked: one at a time, as long as one of them has to define the version."""
        free = [host for host in self._hosts if host.source is None and host.due < inf]
        if not self._by_number:
            return free
        if self._order.leader:
            return [host for host in free if str(host.address) == self._order.leader]
        if self.asking:
            return []
        # The first one that has it: also if it has no room for a reader yet.
        first = next((host for host in free if host.error is None or isinstance(host.error, OverQuota)), None)
        return [first] if first else sorted(free, key=lambda host: host.due)[:1]

    @property
    def untried(self) -> bool:
        """Whether no host has defined the version of the wanted number, and one that may do so was not asked yet."""
        return self._by_number and any(host.error is None for host in self._askable())

    def _room(self) -> int:
        """Return how many more hosts to ask."""
        asked = sum(host.source is not None for host in self._hosts) - len(self._engaged)
        wanted = self._order.width - len(self._engaged)
        return max(0, (wanted if self._engaged else ASKED) - asked)

    def next_due(self) -> float:
        """Return the seconds until the next action is due if no event arrives."""
        times = [host.due for host in self._askable()] if self._room() else []
        if self._candidates:
            times.append(self._choosing)
        return max(0.0, min(times, default=inf) - time.monotonic())

    @property
    def hopeless(self) -> bool:
        """Whether no host can be asked any more, and no answer is awaited."""
        return not self._askable() and not self.asking

    @property
    def asking(self) -> bool:
        """Whether an answer may still arrive."""
        return any(host.source is not None for host in self._hosts)

    @property
    def used(self) -> tuple[str, ...]:
        """The addresses of the hosts that were told to deliver."""
        return tuple(str(host.address) for host in self._used)

    @property
    def bringing(self) -> bool:
        """Whether a source that is read from has delivered a piece; one that always fails keeps no fetch alive."""
        return any(source.brought for source in self.reading)

    def answered(self, event: Answered) -> None:
        """Handle a host's answer: the host is a candidate if it has the pool."""
        host = self._host(event.source)
        if host is None:
            return
        offers, known = event.offers, self._known(host, event.source)
        wanted = self._find(known, offers.offers)
        if wanted is None:
            event.source.leave()
            # If there was an earlier error, it says more.
            host.put_off(None if known.distrusted or known.refused else self._lacks(offers.offers))
            return
        known.identity = event.source.identity
        if known is not host and not self._join(known, host):
            return
        if not self._candidates:
            self._gathering = time.monotonic()
        self._candidates[event.source] = wanted._replace(readers=(offers.readers, offers.limit))

    def _known(self, host: Host, source: SourceReader) -> Host:
        """Return the host that has answered at another address with the same identity; else the host itself."""
        same = (each for each in self._hosts if source.identity and each.identity == source.identity)
        return next(same, host)

    def _join(self, known: Host, host: Host) -> bool:
        """Count a known host once that has answered at one more address; returns whether it is a candidate there."""
        self._hosts.remove(host)
        known.address = host.address.with_ips(known.address)
        source, host.source = host.source, None
        assert source
        if known.source or known.due == inf:
            source.leave()
            return False
        known.source = source
        self._started[source] = known
        return True

    def _find(self, host: Host, offers: Sequence[Offer]) -> _Wanted | None:
        """Return the version that a host is to open; None: it has none."""
        name, wanted = self._order.name, self._order.version
        if self._by_number:  # this host defines the content of the version, even if it has no room for a reader
            found = next((offer for offer in offers if (offer.name, offer.version) == (name, wanted)), None)
            if found and _partial(found):
                return None
            self._content = found.content if found else None
            return _Wanted(wanted) if any(offer.name == name for offer in offers) else None
        offer = host.pick(name, offers, self._content)
        if offer is None:
            return None
        number = 0 if offer.current and offer.content is None else offer.version
        return _Wanted(number, offer.content, partial=_partial(offer))

    def _lacks(self, offers: Sequence[Offer]) -> NotFound:
        """Return why a host with these offers has no version to open."""
        name, wanted = self._order.name, self._order.version
        if self._by_number and any((offer.name, offer.version) == (name, wanted) for offer in offers):
            return NotFound(f"it has only a part of {name}@{wanted}, and may never publish that")
        return NotFound(f"it has no {name} that this host may fetch")

    @property
    def _undecided(self) -> bool:
        """Whether the current version of any host is accepted."""
        return self._content is None and not self._order.version

    @property
    def _choosing(self) -> float:
        """When to choose among the candidates, unless all hosts that were asked answer before."""
        parts = self._undecided and all(each.partial for each in self._candidates.values())
        return self._gathering + (GATHER_PARTS if parts else GATHER)

    def _decided(self) -> dict[SourceReader, _Wanted]:
        """Return the candidates that have the wanted version; while it is undecided, current versions before parts.

        Parts then count only if they are of a current version. If there are only parts, the first that is opened
        decides.
        """
        found = self._candidates
        if self._undecided and not all(each.partial for each in found.values()):
            current = {each.content for each in found.values() if not each.partial} - {None}
            return {source: each for source, each in found.items() if not each.partial or each.content in current}
        return found

    def choose(self) -> None:
        """Have the best of the candidates open the version, once the other hosts had time to answer."""
        waited = sum(host.source is not None for host in self._hosts) - len(self._engaged)
        if not self._candidates or (time.monotonic() < self._choosing and len(self._candidates) < waited):
            return
        room = max(0, self._order.width - len(self._engaged))
        decided = self._decided()
        chosen = by_room({source: each.readers for source, each in decided.items()}, self._chance)
        for source, wanted in self._candidates.items():
            host = self._host(source)
            assert host
            if source in chosen[:room]:
                self._engaged[source] = wanted.number if wanted.partial else None
                source.open(Open(self._order.name, wanted.number))
            else:
                source.leave()
                full = source not in chosen and source in decided
                host.put_off(OverQuota("it has as many readers as it allows") if full else None)
        self._candidates.clear()

    def ready(self, event: Ready) -> bool:
        """Handle a host that has opened the version; returns whether it is the first one."""
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
            host.put_off(NotFound(f"its {self._order.name} differs from that of the first source"))
            return False
        self._content, self._opened, host.version = found, True, opened.version
        self.reading.add(event.source)
        if self._filling:
            self._begin(event.source, self._filling)
        return first

    def _refused(self, source: SourceReader, host: Host, error: CubrokerError) -> None:
        """Give up the part that a host was to open; if it was not a part, give up the host."""
        part = self._engaged.get(source)
        self._dismiss(source)
        if source.identity is None:
            host.identity = None  # only its addresses are known to be unusable; at another one it may still answer
        if part is None:
            host.exclude(error)
        else:
            host.refused.add(part)
            host.put_off(error)

    def _dismiss(self, source: SourceReader) -> None:
        """End a source, and remove it."""
        source.leave()
        self.reading.discard(source)
        self._candidates.pop(source, None)
        self._engaged.pop(source, None)

    def fill(self, filling: Filling) -> None:
        """Have all sources that have opened the version deliver it."""
        self._filling = filling
        for source in self.reading:
            self._begin(source, filling)

    def _begin(self, source: SourceReader, filling: Filling) -> None:
        self._used[self._started[source]] = None
        source.read(filling)

    def lost(self, source: SourceReader, error: CubrokerError) -> None:
        """End a source: its host may be asked again later, unless the error is permanent."""
        host = self._host(source)
        if host and isinstance(error, Denied | Invalid | Unsupported):
            self._refused(source, host, error)
            return
        self._dismiss(source)
        if host:  # else the source was given up before
            host.put_off(error)

    def distrust(self, sources: set[SourceReader], error: CubrokerError) -> bool:
        """Stop reading from those of these sources that have only a part, until they have all; returns if any had."""
        found = [source for source in sources if not source.whole]
        for host in [self._started[source] for source in found]:
            host.distrusted = True
            if host.source and not host.source.whole:  # it may be another source of that host by now
                self._dismiss(host.source)
                host.put_off(error)
        return bool(found)

    def drop(self, sources: set[SourceReader], error: CubrokerError) -> bool:
        """Exclude sources, if others that have the whole version are left; returns whether there are such."""
        if not any(source.whole for source in self.reading - sources):
            return False
        for source in sources:
            if host := self._host(source):
                self._dismiss(source)
                host.exclude(error)
        return True

    def leave_useless(self, filling: Filling) -> None:
        """Give up sources that had no wanted piece for ``USELESS`` seconds, at most one for each other host to ask."""
        now = time.monotonic()
        others = sum(host.due <= now for host in self._askable())
        with filling.lock:
            useless = [source for source in self.reading if filling.striping.useless(source, now) > USELESS]
        for source in useless[:others]:
            self.lost(source, Unavailable(f"{source.address} has nothing yet that this host lacks"))

    @property
    def has_whole(self) -> bool:
        """Whether a source that is read from has the whole version."""
        return any(source.whole for source in self.reading)

    def give_up(self) -> None:
        """Give up sources that were told to read and are not connected within ``patience`` seconds."""
        now, patience = time.monotonic(), self._order.patience
        for source in [*self.reading]:
            if not source.writing and now - source.told > patience:
                self.lost(source, Unavailable(f"{source.address} could not be read from within {patience:g} s"))

    def leave_late(self, filling: Filling) -> bool:
        """Give up sources that still write pieces that others have delivered; returns whether all writes have ended."""
        with filling.lock:
            for source in filling.striping.writing:
                self.lost(source, Unavailable(f"{source.address} was slower than others"))
            return filling.lock.wait_for(lambda: not filling.striping.writing, LEAVE)

    def end(self) -> bool:
        """Have all threads end, and return when those that write have ended; False if one has not.

        An engine writes until it is closed, and memory must not be given back before that.
        """
        if self._filling:
            self._filling.end_joining()
        for source in self._started:
            source.leave()
        deadline = time.monotonic() + LEAVE
        writing = [source for source in self._started if source.writing]
        return all(source.join(max(0.0, deadline - time.monotonic())) or source.closed for source in writing)

    def why(self) -> CubrokerError:
        """Return the error that says why there is no source."""
        code, text = self._reason()
        return from_code(code, f"{self._order.name} cannot be fetched: {text}")

    @property
    def awaits(self) -> str:
        """What a fetch waits for that has no source yet."""
        if self._engaged:
            return f"{', '.join(str(source.address) for source in self._engaged)} to open the version"
        return f"a host to fetch from: {self._reason()[1]}"

    def _reason(self) -> tuple[str, str]:
        """Return why there is no source: the code of the error that tells most, and each host's text."""
        others = [host for host in self._hosts if not isinstance(host.error, OwnHost)]
        if self._hosts and not others:
            own = ", ".join(str(host.address) for host in self._hosts)
            return Invalid.code, f"{own} is this host itself; name others"
        errors = [(host.address, host.error) for host in others if host.error]
        errors = errors or [(host.address, Unavailable("no answer yet")) for host in others if host.source]
        if not errors:
            return Unavailable.code, "no host is known"
        errors.sort(key=lambda pair: [not isinstance(pair[1], kind) for kind in TELLING])
        told = [
            each.message if str(address) in each.message else f"{address}: {each.message}"
            for address, each in errors[:SHOWN]
        ]
        if more := len(errors) - len(told):
            told.append(f"and {more} more")
        return errors[0][1].code, "; ".join(told)

    def _host(self, source: SourceReader) -> Host | None:
        """Return a source's host; None if it was given up."""
        host = self._started[source]
        return host if host.source is source else None


def _check(opened: ExportedVersion) -> None:
    """Raise ``Invalid`` unless a source's description of a version is consistent."""
    layout = Layout.decode(opened.layout)
    if tuple(place.nbytes for place in opened.places) != layout.allocations:
        raise Invalid(
            "the source's description of the version is inconsistent; it is not a cubroker exporter, or is damaged"
        )
    if opened.algorithm != digests.DEFINITION:
        raise Invalid(f"the source has digests by {opened.algorithm}, and this build has {digests.DEFINITION}; upgrade")
    if opened.runs is not None and opened.piece != piece_size(layout.nbytes):
        size = piece_size(layout.nbytes)
        raise Invalid(
            f"the source offers pieces of {opened.piece} bytes, and this build reads pieces of {size}; upgrade the"
            f" older one"
        )


def _partial(offer: Offer) -> bool:
    return offer.there is not None
