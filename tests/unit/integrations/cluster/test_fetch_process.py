"""One fetch from exporters that do well, lie or fail: in this process, from memory of this process."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cubroker.client import Broker, digests
from cubroker.client.loading import loader
from cubroker.client.pool import Replica
from cubroker.client.transport import handshake
from cubroker.integrations.cluster import connection, fetch_process, messages, source_choice, source_thread
from cubroker.integrations.cluster.connection import host_id
from cubroker.integrations.cluster.fetch_process import Fetch
from cubroker.integrations.cluster.messages import (
    Available,
    ExportedAllocation,
    ExportedVersion,
    Fetched,
    List,
    Offer,
    Offers,
    Open,
    Order,
    PeerRefusal,
    PeerWelcome,
    Progress,
    frame,
    to_runs,
)
from cubroker.integrations.cluster.transfer_engine import MemoryRegion
from cubroker.protocol import Layout
from cubroker.protocol.errors import (
    Corrupted,
    CubrokerError,
    Denied,
    Invalid,
    NotFound,
    OverBudget,
    OverQuota,
    Unavailable,
    Unsupported,
)
from cubroker.protocol.messages import DIGESTS
from tests.brokers import eventually
from tests.unit.integrations.cluster.hosts import HOST, LAYOUT, Certificates, content, publish
from tests.unit.integrations.cluster.liar import Liar, lying

MIB = 1 << 20


class LocalEngine:
    """Reads this process's own memory. What its tests change are its functions."""

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        return b"metadata"

    def connect(self, metadata: bytes) -> None:
        if metadata != b"metadata":
            raise Unavailable("connecting to the source failed: no metadata")

    def read(self, local: MemoryRegion, remote: MemoryRegion) -> Any:
        if remote.pointer < 4096:
            raise Unavailable("reading from the source failed: no such memory")
        ctypes.memmove(local.pointer, remote.pointer, local.nbytes)
        return self

    def done(self) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are read by :class:`LocalEngine`, and lost ones are asked again soon."""
    monkeypatch.setattr(source_thread, "open_engine", lambda _: LocalEngine())
    monkeypatch.setattr(fetch_process.transfer_engine, "load", lambda: None)
    monkeypatch.setattr(source_choice, "AGAIN", (0.02, 0.1))


MEMORY: list[ctypes.Array[ctypes.c_char]] = []
"""What versions are read from, for as long as tests run."""


def version(of: Layout = LAYOUT, seed: int = 1, **changes: Any) -> ExportedVersion:
    """A version in memory of this process: each allocation is full of one byte."""
    places = []
    for number, nbytes in enumerate(of.allocations):
        data = bytes([seed]) * nbytes
        MEMORY.append(ctypes.create_string_buffer(data, nbytes))
        found = digests.PartialDigest()
        found.add(data, 0)
        pointer = ctypes.addressof(MEMORY[-1])
        places.append(ExportedAllocation(pointer, nbytes, None, found.finish(nbytes)))
        assert number < 9
    whole = ExportedVersion("m", 1, of.encode(), digests.DEFINITION, tuple(places), b"metadata")
    return msgspec.structs.replace(whole, **changes)


def lied(opened: ExportedVersion, number: int = 0, **changes: Any) -> ExportedVersion:
    """A version with one place changed."""
    places = [*opened.places]
    places[number] = msgspec.structs.replace(places[number], **changes)
    return msgspec.structs.replace(opened, places=tuple(places))


class Hosts:
    """Exporters that say what a test wants, and fetches from all of them."""

    def __init__(self, certificates: Certificates, directory: Path, name: str, undo: ExitStack) -> None:
        self._folder = certificates.host
        self._directory = directory
        self.name = name
        self._undo = undo
        self.all: list[Liar] = []
        self.reports: list[tuple[int, int]] = []
        #: Called with what a fetch waits for.
        self.told: Callable[[str], object] = lambda _: None
        self.fetching: Fetch

    def host(self, opened: object, pause: float = 0.0, at: tuple[str, int] = (HOST, 0), **answers: object) -> Liar:
        """Start a host that has a version; its readers are few."""
        liar = self._undo.enter_context(lying(self._folder, pause=pause, at=at))
        liar.opens(opened, self.name)
        liar.answers |= answers
        self.all.append(liar)
        return liar

    def fetch(self, **order: Any) -> Fetched:
        peers = order.pop("peers", None) or tuple(str(each.address) for each in self.all)
        options = {"name": self.name, "directory": str(self._directory), "patience": 5.0} | order
        this = Order(peers=peers, certificates=str(self._folder), **options)
        self.fetching = Fetch(this, lambda *progress: self.reports.append(progress), self.told)
        return self.fetching.run()

    def held(self) -> bytes:
        with Broker(self._directory) as broker, broker.attach(self.name, device=0) as pool:
            pool.check()
            return pool["a"].tobytes() + pool["b"].tobytes()


@pytest.fixture
def hosts(certificates: Certificates, directory: Path, name: str) -> Iterator[Hosts]:
    with ExitStack() as undo:
        found = Hosts(certificates, directory, name, undo)
        yield found
        with Broker(directory) as broker:
            states = {pool.state for pool in broker.pools()}
            assert "draft" not in states


def nothing(directory: Path) -> bool:
    """Whether a broker has no version at all, nor memory for one."""
    with Broker(directory) as broker:
        eventually(lambda: not any(device.allocated for device in broker.devices()), "memory to be free")
        return not broker.pools()


# -- what goes right -------------------------------------------------------------------------------


def test_a_version_is_published_with_the_source_s_bytes_and_digests(hosts: Hosts, directory: Path, name: str) -> None:
    opened = version()
    liar = hosts.host(opened)
    done = hosts.fetch(mode=0o640)
    assert hosts.held() == content()
    assert (done.name, done.version, done.nbytes, done.tensors) == (name, 1, LAYOUT.nbytes, 2)
    assert (done.sources, done.fetched) == ((str(liar.address),), True)
    assert 0 < done.read_seconds < done.seconds
    assert hosts.reports[-1] == (LAYOUT.nbytes, LAYOUT.nbytes)
    assert sorted(hosts.reports) == hosts.reports
    with Broker(directory) as broker:
        info, layout, _ = broker.describe(name)
        sealed = broker.digests(name).digests
    assert (layout, info.mode) == (LAYOUT, 0o640)
    assert sealed is not None
    assert sealed.replicas[0] == tuple(place.digest for place in opened.places)


def test_every_device_gets_a_copy(hosts: Hosts, directory: Path, name: str) -> None:
    hosts.host(version(seed=3))
    hosts.fetch(devices=(0, 1))
    with Broker(directory) as broker:
        for device in (0, 1):
            with broker.attach(name, device=device) as pool:
                pool.check()
                assert pool["b"].tobytes() == bytes([3]) * 400


def test_a_version_is_opened_by_its_number_at_the_first_source(hosts: Hosts) -> None:
    liar = hosts.host(version())
    hosts.fetch(version=7)
    assert [each.version for each in liar.heard if isinstance(each, Open)] == [7]


def full(hosts: Hosts, opened: ExportedVersion, found: bytes | None) -> dict[str, object]:
    """The answers of a host that has a version, and no room for a reader."""
    return {"List": Offers((Offer(hosts.name, 7, LAYOUT.nbytes, 2, True, found),), 8, 8), "Open": opened}


def test_the_number_of_a_version_that_may_never_be_published_defines_nothing(hosts: Hosts) -> None:
    first, last = coming(hosts, version(PARTS, 9), 0xFF), hosts.host(version(PARTS, 5))
    done = hosts.fetch(version=1)
    assert (done.sources, first.asked(Open)) == ((str(last.address),), 0)
    assert hosts.held() == bytes([5]) * 8 * MIB


def test_a_number_that_only_a_coming_version_has_is_waited_for(hosts: Hosts) -> None:
    opened = version(PARTS, 5)
    liar = coming(hosts, opened, 0xFF)
    with pytest.raises(NotFound, match=f"{liar.address}: it has only a part of {hosts.name}@1, and may never publish"):
        hosts.fetch(version=1)
    timer = threading.Timer(0.2, lambda: liar.opens(opened, hosts.name, 1))
    timer.start()
    assert hosts.fetch(version=1, wait=30.0).sources == (str(liar.address),)
    timer.join()


@pytest.mark.parametrize("late", ["List", "Open"])
def test_a_number_is_that_of_the_first_source_also_if_that_is_slower_than_others(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    monkeypatch.setattr(loader, "WAIT_TOLD", 0.5)
    first, waits = hosts.host(version()), threading.Event()
    hosts.host(version(seed=9))
    answer = first.answers[late]
    first.answers[late] = lambda _, send: (waits.wait(), send(frame(answer)))
    hosts.told = lambda _: waits.set()
    try:
        assert hosts.fetch(version=7).sources == (str(first.address),)
    finally:
        waits.set()
    assert hosts.held() == content()


@pytest.mark.parametrize("known", [True, False])
def test_a_number_is_that_of_the_first_source_also_if_that_is_full(hosts: Hosts, known: bool) -> None:
    right = version()
    first = hosts.host(right)
    hosts.host(version(seed=9))
    first.answers |= full(hosts, right, of(right) if known else None)
    with pytest.raises(OverQuota, match=f"{first.address}: it has as many readers as it allows"):
        hosts.fetch(version=7)
    third = hosts.host(right)
    third.answers["List"] = Offers((Offer(hosts.name, 3, 1, 1, True, of(right)),), 0, 8)
    if known:
        assert hosts.fetch(version=7, wait=30.0).sources == (str(third.address),)
    else:
        timer = threading.Timer(0.2, lambda: first.opens(right, hosts.name, 7))
        timer.start()
        assert str(first.address) in hosts.fetch(version=7, wait=30.0).sources
        timer.join()
    assert hosts.held() == content()


def test_a_number_is_that_of_the_next_source_if_the_first_has_none(hosts: Hosts) -> None:
    hosts.host(None, PeerHello=PeerRefusal("denied", "not you"))
    hosts.host(None, List=Offers((), 0, 8))
    hosts.host(PeerRefusal("not_found", "it is gone"))
    last = hosts.host(version())
    with socket.create_server((HOST, 0)) as server:
        nobody = f"{HOST}:{server.getsockname()[1]}"
    assert hosts.fetch(version=7, peers=(nobody, *(str(each.address) for each in hosts.all))).sources == (
        str(last.address),
    )


def test_a_current_version_will_do_if_absent_and_none_is_asked(hosts: Hosts, directory: Path, name: str) -> None:
    liar = hosts.host(version())
    publish(directory, name, seed=9)
    done = hosts.fetch(if_absent=True)
    assert (done.fetched, done.version, done.nbytes, done.tensors, done.sources) == (False, 1, LAYOUT.nbytes, 2, ())
    assert liar.heard == []
    with Broker(directory) as broker:
        broker.retire(name, 1)
    assert hosts.fetch(if_absent=True).fetched


def test_if_absent_a_retired_version_that_is_still_held_will_not_do(hosts: Hosts, directory: Path, name: str) -> None:
    hosts.host(version())
    publish(directory, name)
    for options in ({"if_absent": True}, {"if_changed": True}):
        with Broker(directory) as broker, broker.attach(name, device=0) as held:
            broker.retire(name, held.version)
            assert hosts.fetch(**options).version == held.version + 1


def test_if_changed_only_other_bytes_are_fetched(hosts: Hosts, directory: Path, name: str) -> None:
    liar = hosts.host(version())
    assert hosts.fetch(if_changed=True).fetched
    again = hosts.fetch(if_changed=True)
    assert (again.fetched, again.version) == (False, 1)
    liar.opens(version(seed=2), name, 2)
    assert hosts.fetch(if_changed=True).version == 2
    assert hosts.held() == content(2)
    liar.opens(version(Layout.pack([("a", "U8", (300,)), ("b", "U8", (400,))]), 2), name, 3)
    assert hosts.fetch(if_changed=True).version == 3  # another layout
    publish(directory, name, 2)
    assert hosts.fetch(if_changed=True).version == 5  # what is here has no digest


@pytest.mark.parametrize("changed", [False, True])
def test_a_broker_that_keeps_no_digests_is_refused_before_a_source_is_asked(
    hosts: Hosts, directory: Path, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    liar = hosts.host(version())
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "VERSIONS", tuple(range(1, DIGESTS)))
        with pytest.raises(Unsupported, match="the broker is too old to keep a digest; upgrade it"):
            hosts.fetch(if_changed=changed)
    assert (liar.heard, hosts.reports) == ([], [])
    assert nothing(directory)


def test_sources_bring_it_together(hosts: Hosts) -> None:
    layout = Layout.pack([("a", "U8", (3 * MIB,)), ("b", "U8", (5 * MIB,))])
    for _ in range(3):
        hosts.host(version(layout, 5))
    done = hosts.fetch(width=2)
    assert len(done.sources) == 2
    assert hosts.held() == bytes([5]) * 8 * MIB


# -- what lies -------------------------------------------------------------------------------------


def short(opened: ExportedVersion) -> ExportedVersion:
    return msgspec.structs.replace(opened, places=opened.places[:-1])


LIES: dict[str, tuple[Callable[[], ExportedVersion], type[CubrokerError], str]] = {
    "too few places": (lambda: short(version()), Invalid, "description of the version is inconsistent"),
    "a place of another size": (
        lambda: lied(version(), nbytes=513),
        Invalid,
        "description of the version is inconsistent",
    ),
    "digests by another name": (lambda: version(algorithm="md5"), Invalid, "has digests by md5, and this build has"),
    "no layout": (lambda: version(layout=b"\xc1"), Invalid, "cannot be fetched: .*"),
    "an empty layout": (lambda: version(layout=b""), Invalid, "cannot be fetched: .*"),
    "a random layout": (lambda: version(layout=bytes(range(256)) * 99), Invalid, "cannot be fetched: .*"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_fit_together_is_an_error_and_leaves_nothing(hosts: Hosts, directory: Path, lie: str) -> None:
    opened, error, why = LIES[lie]
    liar = hosts.host(opened())
    with pytest.raises(error, match=why) as caught:
        hosts.fetch()
    assert str(liar.address) in caught.value.message
    assert nothing(directory)


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_lies_is_passed_over_for_one_that_does_not(hosts: Hosts, lie: str) -> None:
    hosts.host(LIES[lie][0]())
    honest = hosts.host(version(), 0.2)  # comes later
    assert hosts.fetch(wait=30.0).sources == (str(honest.address),)
    assert hosts.held() == content()


def test_a_version_that_no_device_has_room_for(hosts: Hosts, directory: Path) -> None:
    """There is none of its bytes: the place says so."""
    huge = Layout.pack([("x", "U8", (1 << 47,))])
    opened = msgspec.structs.replace(
        version(), layout=huge.encode(), places=(ExportedAllocation(4096, 1 << 47, None, bytes(16)),)
    )
    hosts.host(opened)
    with pytest.raises(OverBudget):
        hosts.fetch()
    assert nothing(directory)


@pytest.mark.parametrize(
    ("opened", "why"),
    [
        (lambda: version(metadata=b"garbage"), "connecting to the source failed: no metadata"),
        (lambda: lied(version(), pointer=0), "reading from the source failed: no such memory"),
    ],
    ids=["garbage in place of metadata", "memory that there is not"],
)
def test_a_source_that_cannot_be_read_is_given_up(
    hosts: Hosts, directory: Path, opened: Callable[[], ExportedVersion], why: str
) -> None:
    """Though it can be connected to, again and again."""
    liar = hosts.host(opened())
    with pytest.raises(Unavailable, match=why):
        hosts.fetch(patience=0.5)
    assert liar.asked(Open) > 1
    assert nothing(directory)


def test_a_source_that_cannot_be_read_is_replaced(hosts: Hosts) -> None:
    hosts.host(version(metadata=b"garbage"))
    honest = hosts.host(version(), 0.2)
    assert str(honest.address) in hosts.fetch(wait=30.0).sources
    assert hosts.held() == content()


OTHERS = {
    "other bytes": lambda: version(seed=9),
    "another layout": lambda: version(Layout.pack([("z", "U8", (9,))]), 9),
    "more allocations": lambda: version(Layout.pack([(each, "U8", (512,)) for each in "abcd"], slab=512), 9),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_source_with_other_bytes_is_not_read_even_if_it_is_ready_before_the_draft(
    hosts: Hosts, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = hosts.host(version())

    def later(_: object, send: Callable[[bytes], None]) -> None:
        eventually(lambda: hosts.fetching._sources.reading, "the other one to be first")
        send(frame(OTHERS[other]()))

    hosts.host(later)
    drafted = fetch_process._drafted

    def late(*arguments: Any) -> Any:
        started = hosts.fetching._sources._started
        eventually(lambda: [bool(each.opened) for each in [*started]] == [True, True], "both to be open")
        return drafted(*arguments)

    monkeypatch.setattr(fetch_process, "_drafted", late)
    assert hosts.fetch().sources == (str(honest.address),)
    assert hosts.held() == content()


def test_bytes_that_are_not_what_was_said_are_found(hosts: Hosts, directory: Path) -> None:
    hosts.host(lied(version(), digest=bytes(16)))
    with pytest.raises(Corrupted, match=r"allocation 0 of .* arrived with a wrong digest, twice"):
        hosts.fetch()
    assert nothing(directory)


def test_whoever_brings_wrong_bytes_is_left_out(hosts: Hosts) -> None:
    right = version()
    wrong = lied(lied(right, pointer=version(seed=9).places[0].pointer), 1, pointer=version(seed=9).places[1].pointer)
    hosts.host(wrong)
    hosts.host(right)
    hosts.fetch(wait=30.0)
    assert hosts.held() == content()


# -- parts -----------------------------------------------------------------------------------------

PARTS = Layout.pack([("a", "U8", (3 * MIB,)), ("b", "U8", (5 * MIB,))])
"""Eight runs."""


def partial(opened: ExportedVersion, runs: int) -> ExportedVersion:
    """A version of which a host has these runs."""
    return msgspec.structs.replace(opened, runs=to_runs(runs), piece=MIB)


def coming(hosts: Hosts, opened: ExportedVersion, runs: int, *later: Available, pause: float = 0.0) -> Liar:
    """Start a host that has so much of a version, and says more later."""
    first = partial(opened, runs)

    def open_it(_: object, send: Callable[[bytes], None]) -> None:
        send(b"".join(frame(each) for each in (first, *later)))

    liar = hosts.host(None, pause)
    offer = Offer(hosts.name, 1, PARTS.nbytes, 2, False, of(opened), there=runs.bit_count() * MIB)
    liar.answers |= {"List": Offers((offer,), 0, 8), "Open": open_it}
    return liar


def of(opened: ExportedVersion) -> bytes:
    return messages.content(opened.layout, opened.algorithm, [place.digest for place in opened.places])


def test_what_hosts_have_together_is_the_version(hosts: Hosts) -> None:
    opened = version(PARTS, 5)
    coming(hosts, opened, 0b00001111)
    coming(hosts, opened, 0b00000001, Available(to_runs(0b11000000)), Available(to_runs(0b11110000)))
    done = hosts.fetch()
    assert (len(done.sources), done.from_parts) == (2, PARTS.nbytes)
    assert hosts.held() == bytes([5]) * 8 * MIB


@pytest.mark.parametrize("reach", [True, False], ids=["that reads the one before it", "from the hosts"])
def test_parts_fill_every_device(
    hosts: Hosts, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch, reach: bool
) -> None:
    if not reach:
        monkeypatch.setattr(Replica, "upstream", None)
    opened = version(PARTS, 5)
    coming(hosts, opened, 0b00001111)
    coming(hosts, opened, 0b00000001, Available(to_runs(0b11110000)))
    done = hosts.fetch(devices=(0, 1))
    assert (done.from_parts, hosts.reports[-1][1]) == (PARTS.nbytes, PARTS.nbytes * (1 if reach else 2))
    with Broker(directory) as broker:
        for device in (0, 1):
            with broker.attach(name, device=device) as pool:
                pool.check()
                assert pool["a"].tobytes() + pool["b"].tobytes() == bytes([5]) * 8 * MIB


def test_a_host_that_publishes_meanwhile_has_all_of_it(hosts: Hosts) -> None:
    coming(hosts, version(PARTS, 5), 0, Available())
    done = hosts.fetch()
    assert (done.fetched, done.from_parts) == (True, 0)


def test_parts_that_come_no_further_are_an_error(hosts: Hosts, directory: Path) -> None:
    coming(hosts, version(PARTS, 5), 0b0111)
    with pytest.raises(
        Unavailable, match=f"no remaining host has the whole version.*{3 * MIB} of {PARTS.nbytes} bytes"
    ):
        hosts.fetch(patience=0.5)
    assert nothing(directory)


def test_a_part_that_is_wrong_is_read_from_a_host_that_has_all(hosts: Hosts, directory: Path) -> None:
    right, wrong = version(PARTS, 5), version(PARTS, 6)
    lies = msgspec.structs.replace(right, places=tuple(map(_moved, right.places, wrong.places)))
    liar = coming(hosts, lies, 0b11111111)
    with pytest.raises(Corrupted, match="arrived with a wrong digest"):
        hosts.fetch(patience=0.5)
    assert nothing(directory)
    opens = liar.asked(Open)
    honest = hosts.host(right, 0.3)
    done = hosts.fetch(wait=30.0, patience=20.0)
    assert (str(honest.address) in done.sources, done.from_parts) == (True, 0)
    assert hosts.held() == bytes([5]) * 8 * MIB
    assert liar.asked(Open) <= opens + 1


def test_a_host_that_says_too_often_what_it_has_is_passed_over(hosts: Hosts) -> None:
    opened = version(PARTS, 5)
    refused = threading.Event()

    def flood(_: object, send: Callable[[bytes], None]) -> None:
        send(frame(partial(opened, 0)))
        try:
            while True:  # until the connection ends
                send(frame(Available(b"")) * 1000)
        finally:
            refused.set()

    def later(_: object, send: Callable[[bytes], None]) -> None:
        assert refused.wait(60.0)
        send(frame(opened))

    coming(hosts, opened, 0).answers["Open"] = flood
    honest = hosts.host(later)
    honest.answers["List"] = Offers((Offer(hosts.name, 1, PARTS.nbytes, 2, False, of(opened), there=0),), 0, 8)
    done = hosts.fetch(wait=30.0, patience=20.0)
    assert str(honest.address) in done.sources
    assert hosts.held() == bytes([5]) * 8 * MIB
    assert isinstance(hosts.fetching._sources._hosts[0].error or hosts.fetching._sources._hosts[1].error, Invalid)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_a_host_that_has_more_runs_than_there_are_is_passed_over(hosts: Hosts, later: bool) -> None:
    opened = version(PARTS, 5)
    coming(hosts, opened, 0b1 if later else 1 << 8, *[Available(b"\x00\x01")] * later)
    with pytest.raises(Invalid, match="names runs beyond the 8 of this version"):
        hosts.fetch(patience=0.5)


class LateEngine(LocalEngine):
    """Reads of some memory land when the engine is closed."""

    late: tuple[ExportedAllocation, ...] = ()
    #: Whether one is under way.
    begun = False

    def __init__(self) -> None:
        self._reads: list[tuple[MemoryRegion, MemoryRegion]] = []

    def read(self, local: MemoryRegion, remote: MemoryRegion) -> Any:
        if not any(each.pointer <= remote.pointer < each.pointer + each.nbytes for each in self.late):
            return super().read(local, remote)
        self._reads.append((local, remote))
        LateEngine.begun = True
        return Unfinished()

    def close(self) -> None:
        for local, remote in self._reads:
            super().read(local, remote)
        self._reads.clear()


class Unfinished:
    """A read that does not end by itself."""

    def done(self) -> bool:
        return False


@pytest.mark.parametrize("has_all", [False, True], ids=["a host with a part", "a host that has published it"])
def test_what_lands_late_and_is_wrong_is_read_again(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, has_all: bool
) -> None:
    right, wrong = version(PARTS, 5), version(PARTS, 6)
    lies = msgspec.structs.replace(right, places=tuple(map(_moved, right.places, wrong.places)))
    monkeypatch.setattr(LateEngine, "late", lies.places)
    monkeypatch.setattr(LateEngine, "begun", False)
    monkeypatch.setattr(source_thread, "open_engine", lambda _: LateEngine())
    if has_all:
        hosts.host(lies)
    else:
        coming(hosts, lies, 0b1)

    def later(_: object, send: Callable[[bytes], None]) -> None:
        eventually(lambda: LateEngine.begun, "the late one to begin")
        send(frame(right))

    honest = hosts.host(later)
    done = hosts.fetch(wait=30.0, patience=20.0)
    assert str(honest.address) in done.sources
    assert hosts.held() == bytes([5]) * 8 * MIB


def _moved(right: ExportedAllocation, wrong: ExportedAllocation) -> ExportedAllocation:
    return msgspec.structs.replace(right, pointer=wrong.pointer)


def test_a_host_that_has_nothing_new_is_left_for_another(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_choice, "USELESS", 0.1)
    monkeypatch.setattr(source_choice, "GATHER_PARTS", 0.1)
    monkeypatch.setattr(source_choice, "AGAIN", (0.5, 60.0))  # it is asked again later and later
    opened = version(PARTS, 5)
    coming(hosts, opened, 0b1)
    hosts.host(opened, 0.2)
    assert len(hosts.fetch(width=1, patience=20.0).sources) == 2
    assert hosts.held() == bytes([5]) * 8 * MIB


def both(hosts: Hosts, current: ExportedVersion, part: ExportedVersion) -> Liar:
    """Start a host that has a current version, 1, and a part of 2."""
    liar = coming(hosts, part, 0b1)
    offers = (
        Offer(hosts.name, 1, PARTS.nbytes, 2, True, of(current)),
        Offer(hosts.name, 2, PARTS.nbytes, 2, False, of(part), there=MIB),
    )

    def open_it(liar: Liar, send: Callable[[bytes], None]) -> None:
        request = liar.heard[-1]
        assert isinstance(request, Open)
        send(frame(partial(msgspec.structs.replace(part, version=2), 1) if request.version == 2 else current))

    liar.answers |= {"List": Offers(offers, 0, 8), "Open": open_it}
    return liar


def opens(liar: Liar) -> list[int]:
    """The versions that a host was to open."""
    return [each.version for each in liar.heard if isinstance(each, Open)]


def test_a_current_version_is_taken_before_one_that_is_still_coming(hosts: Hosts) -> None:
    current, part = version(PARTS, 5), version(PARTS, 6)
    alone, liar = coming(hosts, part, 0b1), both(hosts, current, part)
    liar.answers["PeerHello"] = lambda _, send: (
        eventually(lambda: alone.asked(List), "the other one"),
        send(frame(PeerWelcome(2, "root"))),
    )
    assert hosts.fetch(patience=1.0).sources == (str(liar.address),)
    assert hosts.held() == bytes([5]) * 8 * MIB
    assert (opens(alone), opens(liar)) == ([], [1])


def test_a_part_of_a_current_version_is_read_though_who_has_it_is_full(hosts: Hosts) -> None:
    current = version(PARTS, 5)
    full = hosts.host(current, List=Offers((Offer(hosts.name, 1, PARTS.nbytes, 2, True, of(current)),), 8, 8))
    part, other = coming(hosts, current, 0b11111111), coming(hosts, version(PARTS, 6), 0b11111111)
    assert hosts.fetch().sources == (str(part.address),)
    assert opens(full) == opens(other) == []


def test_a_part_that_a_host_refuses_is_not_asked_for_again_and_the_host_is(hosts: Hosts, name: str) -> None:
    opened = version(PARTS, 5)
    liar = coming(hosts, opened, 0b1)

    def refuse(liar: Liar, send: Callable[[bytes], None]) -> None:
        send(frame(PeerRefusal("unsupported", "the broker is too old")))
        published = Offer(name, 1, PARTS.nbytes, 2, True, of(opened))
        liar.answers |= {"Open": opened, "List": Offers((published,), 0, 8)}

    liar.answers["Open"] = PeerRefusal("unsupported", "the broker is too old")
    with pytest.raises(Unsupported, match="the broker is too old"):
        hosts.fetch()
    liar.answers["Open"] = refuse
    assert hosts.fetch(wait=30.0).sources == (str(liar.address),)
    assert hosts.held() == bytes([5]) * 8 * MIB


def test_a_host_that_cuts_it_otherwise_is_passed_over(hosts: Hosts) -> None:
    opened = version(PARTS, 5)
    liar = coming(hosts, opened, 0b1)
    liar.answers["Open"] = msgspec.structs.replace(partial(opened, 1), piece=2 * MIB)
    with pytest.raises(Invalid, match=f"offers pieces of {2 * MIB} bytes"):
        hosts.fetch()


def test_a_host_that_has_another_version_is_not_opened(hosts: Hosts) -> None:
    right, other = version(), version(seed=9)
    first = hosts.host(right)
    first.answers["List"] = Offers((Offer(hosts.name, 1, 1, 1, True, of(right)),), 8, 8)  # it has no room at first
    second, third = hosts.host(other), hosts.host(right)
    second.answers["List"] = Offers((Offer(hosts.name, 1, 1, 1, True, of(other)),), 0, 8)
    third.answers["List"] = Offers(
        (Offer(hosts.name, 3, 1, 1, True, of(other)), Offer(hosts.name, 2, 1, 1, False, of(right))), 0, 8
    )
    done = hosts.fetch(version=1, leader=str(first.address), wait=30.0)
    assert done.sources == (str(third.address),)
    assert [each.version for each in third.heard if isinstance(each, Open)] == [2]
    assert second.asked(Open) == first.asked(Open) == 0


def test_this_host_itself_is_left_out(hosts: Hosts, directory: Path) -> None:
    own = hosts.host(version(seed=9), PeerHello=PeerWelcome(2, "root", host_id(directory)))
    with pytest.raises(Invalid, match=f"cannot be fetched: {own.address} is this host itself; name others"):
        hosts.fetch(wait=60.0)
    honest = hosts.host(version())
    assert hosts.fetch().sources == (str(honest.address),)
    assert own.asked(Open) == 0


def test_a_source_hears_of_this_side_while_memory_is_registered(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_thread, "BEAT", 0.02)
    liar = hosts.host(version())

    def register(*_: object) -> bytes:
        eventually(lambda: liar.asked(Progress) > 3, "words to the source")
        return b""

    monkeypatch.setattr(LocalEngine, "register", register)
    assert hosts.fetch(patience=5.0).fetched


# -- a host at several addresses -------------------------------------------------------------------


def at(hosts: Hosts, ip: str, opened: object, identity: bytes, **answers: object) -> Liar:
    """Start an exporter of a host at this address, at the port of the first one."""
    answers = {"PeerHello": PeerWelcome(2, "root", identity), **answers}
    if not hosts.all:
        return hosts.host(opened, **answers)
    return hosts.host(opened, at=(ip, hosts.all[0].address.port), **answers)


ONE, TWO = b"1" * 16, b"2" * 16
"""The ids of two brokers."""


def test_each_host_of_a_name_counts_once_though_it_answers_at_several_addresses(
    hosts: Hosts, localhost: list[str]
) -> None:
    localhost += [HOST, "127.0.0.2", "127.0.0.3", "::1"]
    opened = version(PARTS, 5)
    first, again, second, too = (
        at(hosts, ip, opened, each) for ip, each in zip(localhost, (ONE, ONE, TWO, TWO), strict=True)
    )
    done = hosts.fetch(peers=(f"localhost:{first.address.port}",))
    assert first.asked(Open) + again.asked(Open) == second.asked(Open) + too.asked(Open) == 1
    assert len(done.sources) == 2
    assert all(each.count(", ") == 1 for each in done.sources)
    assert hosts.held() == bytes([5]) * 8 * MIB


def test_a_host_that_is_lost_at_one_address_is_read_from_at_another(
    hosts: Hosts, localhost: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    localhost += [HOST, "127.0.0.2", "::1"]
    opened = version(PARTS, 5)
    both = [at(hosts, ip, opened, ONE) for ip in localhost[:2]]
    at(hosts, "::1", None, TWO, List=Offers((), 0, 8))
    read = LocalEngine.read

    def lost_once(self: LocalEngine, local: MemoryRegion, remote: MemoryRegion) -> Any:
        monkeypatch.setattr(LocalEngine, "read", read)
        (opener,) = (each for each in both if each.asked(Open))
        opener.close()
        raise Unavailable("reading from the source failed")

    monkeypatch.setattr(LocalEngine, "read", lost_once)
    done = hosts.fetch(peers=(f"localhost:{both[0].address.port}",), patience=20.0)
    assert [each.asked(Open) for each in both] == [1, 1]
    assert len(done.sources) == 1
    assert hosts.held() == bytes([5]) * 8 * MIB


def test_a_host_that_is_lost_before_it_answers_at_another_address_goes_on_there(
    hosts: Hosts, localhost: list[str]
) -> None:
    localhost += [HOST, "127.0.0.2", "::1"]
    opened, lost = version(PARTS, 5), threading.Event()

    def lose(*_: object) -> None:
        lost.set()
        raise ConnectionResetError

    first = at(hosts, HOST, None, ONE)
    first.opens(lose, hosts.name)
    offers = Offers((Offer(hosts.name, 1, 1, 1, True),), 0, 8)
    second = at(hosts, "127.0.0.2", opened, ONE)
    second.answers["List"] = lambda _, send: (
        lost.wait(),
        eventually(
            lambda: any(isinstance(each.error, Unavailable) for each in hosts.fetching._sources._hosts), "the loss"
        ),
        send(frame(offers)),
    )
    at(hosts, "::1", None, TWO, List=Offers((), 0, 8))
    done = hosts.fetch(peers=(f"localhost:{first.address.port}",))
    assert (first.asked(Open), second.asked(Open), len(done.sources)) == (1, 1, 1)
    assert hosts.held() == bytes([5]) * 8 * MIB


def test_a_host_that_has_refused_this_one_is_not_asked_at_another_address(hosts: Hosts, localhost: list[str]) -> None:
    localhost += [HOST, "127.0.0.2", "::1"]
    offers = Offers((Offer(hosts.name, 1, 1, 1, True),), 0, 8)

    def after(what: str, done: Callable[[list[Any]], bool]) -> Callable[..., None]:
        def answer(_: object, send: Callable[[bytes], None]) -> None:
            eventually(lambda: done(hosts.fetching._sources._hosts), what)
            send(frame(offers))

        return answer

    first = at(hosts, HOST, version(), ONE, Open=PeerRefusal("denied", "not you"))
    second = at(hosts, "127.0.0.2", version(), ONE)
    second.answers["List"] = after("the refusal", lambda known: any(isinstance(each.error, Denied) for each in known))
    third = at(hosts, "::1", version(), TWO)
    third.answers["List"] = after("the answer at the other address", lambda known: len(known) == 2)
    assert hosts.fetch(peers=(f"localhost:{first.address.port}",)).fetched
    assert [each.asked(Open) for each in (first, second, third)] == [1, 0, 1]
    assert hosts.held() == content()


def test_another_service_at_the_known_address_of_a_host_excludes_no_other_address(
    hosts: Hosts, localhost: list[str], tmp_path: Path
) -> None:
    localhost += [HOST, "127.0.0.2", "::1"]
    offers = Offers((Offer(hosts.name, 1, 1, 1, True),), 0, 8)

    def replaced(liar: Liar, _: object) -> None:
        liar.certificate(Certificates(tmp_path).host)
        raise ConnectionResetError

    def after(_: object, send: Callable[[bytes], None]) -> None:
        excluded = any(isinstance(each.error, Denied) for each in hosts.fetching._sources._hosts)
        send(frame(offers if excluded else Offers((), 0, 8)))

    first = at(hosts, HOST, None, ONE)
    first.opens(replaced, hosts.name)
    second = at(hosts, "127.0.0.2", version(), ONE)
    second.answers["List"] = after
    at(hosts, "::1", None, TWO, List=Offers((), 0, 8))
    assert hosts.fetch(peers=(f"localhost:{first.address.port}",), wait=30.0).fetched
    assert [each.asked(Open) for each in (first, second)] == [1, 1]
    assert hosts.held() == content()


def test_another_service_at_one_address_excludes_no_host_whose_exporter_is_away(
    hosts: Hosts, localhost: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    localhost += [HOST, "::1"]
    monkeypatch.setattr(loader, "WAIT_TOLD", 0.2)
    with lying(Certificates(tmp_path).host) as other:
        there = ("::1", other.address.port)

        def back(_: str) -> None:
            if not hosts.all:
                hosts.host(version(), at=there)

        hosts.told = back
        assert hosts.fetch(peers=(f"localhost:{there[1]}",), wait=30.0).fetched
    assert hosts.held() == content()


# -- what fails ------------------------------------------------------------------------------------


def test_a_source_that_brings_nothing_is_given_up(
    hosts: Hosts, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "done", lambda _: False)
    hosts.host(version())
    with pytest.raises(Unavailable, match=r"has delivered nothing for 0\.3 s"):
        hosts.fetch(patience=0.3)
    assert nothing(directory)


def test_a_source_that_does_not_come_to_be_connected_is_given_up(
    hosts: Hosts, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(LocalEngine, "connect", lambda *_: over.wait(60.0))
    hosts.host(version())
    try:
        with pytest.raises(Unavailable, match=r"could not be read from within 0\.3 s"):
            hosts.fetch(patience=0.3)
        assert nothing(directory)
    finally:
        over.set()


def test_a_fault_of_a_thread_is_an_error(hosts: Hosts, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LocalEngine, "read", fail)
    hosts.host(version())
    with pytest.raises(Unavailable, match="a thread of the transfer failed; its log says why"):
        hosts.fetch(patience=0.3)
    assert nothing(directory)


def test_a_source_says_how_far_it_is_now_and_then(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_thread, "BEAT", 0.02)
    liar = hosts.host(version())
    monkeypatch.setattr(LocalEngine, "done", lambda _: liar.asked(Progress) > 3)
    hosts.fetch()
    eventually(lambda: liar.heard[-1] == Progress(LAYOUT.nbytes), "the last word")


def test_while_a_version_waits_for_room_its_source_is_told_that_this_side_lives(
    hosts: Hosts, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_thread, "BEAT", 0.02)
    liar = hosts.host(version())
    drafted = fetch_process._drafted

    def late(*arguments: Any) -> Any:
        eventually(lambda: liar.asked(Progress) > 2, "words to the source")
        return drafted(*arguments)

    monkeypatch.setattr(fetch_process, "_drafted", late)
    assert hosts.fetch().fetched


def test_a_host_that_has_not_the_pool_is_passed_over(hosts: Hosts, name: str) -> None:
    hosts.host(version(), List=Offers((Offer("other", 1, 1, 1, True),), 0, 8))
    hosts.host(version(), Open=PeerRefusal("not_found", "it is gone"))
    with pytest.raises(NotFound, match=f"{name} cannot be fetched: ") as caught:
        hosts.fetch()
    assert f"{hosts.all[0].address}: it has no {name} that this host may fetch" in caught.value.message
    assert f"{hosts.all[1].address}: it is gone" in caught.value.message
    hosts.host(version())
    assert hosts.fetch().fetched


def test_a_host_that_is_full_is_passed_over_and_asked_again(hosts: Hosts, name: str) -> None:
    liar = hosts.host(version(), List=Offers((Offer(name, 1, 1, 1, True),), 8, 8))
    with pytest.raises(OverQuota, match="it has as many readers as it allows"):
        hosts.fetch()
    assert liar.asked(Open) == 0
    timer = threading.Timer(0.2, lambda: liar.opens(version(), name))
    timer.start()
    assert hosts.fetch(wait=60.0).fetched
    timer.join()


def test_what_a_fetch_without_a_source_waits_for_is_told(
    hosts: Hosts, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "WAIT_TOLD", 0.01)
    told: list[str] = []
    answers, opens = threading.Event(), threading.Event()

    def late(event: threading.Event, answer: Any) -> Callable[..., None]:
        def later(_: Liar, send: Callable[[bytes], None]) -> None:
            event.wait()
            send(frame(answer))

        return later

    host = hosts.host(None, List=late(answers, Offers((), 0, 8)))
    steps = [answers.set, lambda: host.opens(late(opens, version()), name), opens.set]

    def tell(reason: str) -> None:
        if reason not in told and "cubroker top" not in reason:  # that is a wait at the broker, by another thread
            told.append(reason)
            steps[len(told) - 1]()

    hosts.told = tell
    try:
        assert hosts.fetch(wait=60.0).fetched
    finally:
        answers.set()
        opens.set()
    assert told == [
        f"a host to fetch from: {host.address}: no answer yet",
        f"a host to fetch from: {host.address}: it has no {name} that this host may fetch",
        f"{host.address} to open the version",
    ]


def test_a_host_that_refuses_this_one_is_not_asked_again(hosts: Hosts) -> None:
    liar = hosts.host(version(), PeerHello=PeerRefusal("denied", "not you"))
    with pytest.raises(Denied, match=r"cannot be fetched: .*: not you"):
        hosts.fetch(wait=60.0)
    assert len(liar.heard) == 1


def test_the_reason_that_tells_most_is_the_error(hosts: Hosts, name: str) -> None:
    hosts.host(version(), Open=PeerRefusal("not_found", "it is gone"))
    hosts.host(version(), PeerHello=PeerRefusal("denied", "not you"))
    with socket.create_server((HOST, 0)) as server:
        nobody = f"{HOST}:{server.getsockname()[1]}"
    with pytest.raises(Denied) as caught:
        hosts.fetch(peers=(*(str(each.address) for each in hosts.all), nobody))
    for why in ("it is gone", "not you", f"no exporter answers at {nobody}"):
        assert why in caught.value.message
    with pytest.raises(Unavailable, match="no exporter answers"):
        hosts.fetch(peers=(nobody,))


def test_without_a_host_there_is_nothing_to_fetch_from(hosts: Hosts, name: str) -> None:
    with pytest.raises(Unavailable, match=f"{name} cannot be fetched: no host is known"):
        hosts.fetch()
    with pytest.raises(Invalid, match="names no exporter"):
        hosts.fetch(peers=("a b",))


def test_of_many_hosts_that_do_not_answer_each_is_asked_once_and_none_is_left_out(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT", 0.15)
    liar = hosts.host(version())
    with socket.create_server(("", 0), backlog=100) as silent:  # accepts, and says nothing
        port = silent.getsockname()[1]
        peers = tuple(f"127.0.1.{number}:{port}" for number in range(1, 31))
        with pytest.raises(Unavailable, match="and 25 more"):
            hosts.fetch(peers=peers)
        assert hosts.fetch(peers=(*peers, str(liar.address)), wait=60.0).fetched


def test_a_host_that_is_lost_may_bring_the_rest_when_it_is_back(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.pack([("a", "U8", (3 * MIB,)), ("b", "U8", (5 * MIB,))])
    liar = hosts.host(version(layout, 4))
    read, count = LocalEngine.read, iter(range(1000))

    def failing(self: LocalEngine, local: MemoryRegion, remote: MemoryRegion) -> Any:
        if next(count) % 5 == 4:
            raise Unavailable("reading from the source failed")
        return read(self, local, remote)

    monkeypatch.setattr(LocalEngine, "read", failing)
    assert hosts.fetch(patience=1.0).fetched
    assert liar.asked(Open) > 1
    assert hosts.held() == bytes([4]) * 8 * MIB
