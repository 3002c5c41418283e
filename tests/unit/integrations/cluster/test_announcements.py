"""Drafts that a fetch of the own host announces: who may do so, who reads them, and what they hear."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cubroker.client import Broker, Draft, digests
from cubroker.integrations.cluster import announcements, exporter, messages
from cubroker.integrations.cluster.announcements import Announcements, DraftAnnouncement
from cubroker.integrations.cluster.connection import HungUp, OwnHost, PeerConnection, find_account, host_id
from cubroker.integrations.cluster.messages import (
    Announce,
    Available,
    DraftContent,
    ExportedVersion,
    Going,
    List,
    Offers,
    Open,
    PeerHello,
    Progress,
)
from cubroker.integrations.cluster.striping import UNIT
from cubroker.protocol import messages as protocol
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, OverQuota, Unavailable, Unsupported
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.namespaces import unshare
from tests.unit.integrations.cluster.hosts import (
    LAYOUT,
    Certificates,
    Serving,
    exporting,
    leases,
    nobody,
    publish,
)

SUMS = (bytes(16), bytes([1] * 16))
"""What a fetch says that the digests will be."""


pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture(scope="module", autouse=True)
def often() -> Iterator[None]:
    """A fetch looks often whether there is an exporter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(announcements, "AGAIN", 0.05)
        yield


@pytest.fixture
def serving(usual: Serving, directory: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Serving]:
    """An exporter that has no peer and no draft when a test begins, and none when it ends."""
    caplog.set_level(logging.INFO, logger="cubroker.integrations.cluster")
    usual.meter.__init__()  # type: ignore[misc]
    yield usual
    eventually(lambda: usual.meter.service.connections == usual.meter.service.drafts == 0, "connections to end")


class Fetching:
    """A draft, and what is said of it.

    Attributes:
        have: the runs that are there.
    """

    def __init__(self, broker: Broker, draft: Draft, **options: Any) -> None:
        self.draft = draft
        self.have = 0
        self.announcement = DraftAnnouncement(broker, draft, SUMS, lambda: self.have, **options)


@contextmanager
def fetching(directory: Path, name: str, mode: int = 0o644) -> Iterator[Fetching]:
    """Have a draft, and announce it."""
    with Broker(directory) as broker, broker.create(name, LAYOUT, mode=mode) as draft:
        found = Fetching(broker, draft, mode=mode)
        try:
            yield found
        finally:
            found.announcement.close()


def announced(serving: Serving, count: int = 1) -> None:
    eventually(lambda: serving.meter.service.drafts == count, "the announcement")


def offered(connection: PeerConnection) -> list[tuple[str, int, int | None]]:
    return [(each.name, each.version, each.there) for each in connection.ask(List(), Offers).offers]


@pytest.mark.slow
def test_a_draft_is_offered_and_its_readers_hear_what_is_there_until_it_is_published(
    serving: Serving, directory: Path, name: str
) -> None:
    with fetching(directory, name) as this, serving.connect() as connection:
        announced(serving)
        assert offered(connection) == [(name, 1, 0)]
        (offer,) = connection.ask(List(), Offers).offers
        assert offer.content == messages.content(LAYOUT.encode(), digests.DEFINITION, SUMS)
        assert not offer.current
        opened = connection.ask(Open(name, 1), ExportedVersion)
        assert (opened.layout, opened.runs, opened.piece) == (LAYOUT.encode(), b"", UNIT)
        assert tuple(place.digest for place in opened.places) == SUMS
        this.have = 0b10
        assert connection.hear(Available) == Available(b"\x02")
        assert offered(connection) == [(name, 1, LAYOUT.allocations[1])]
        this.have = 0  # it is read again
        assert connection.hear(Available) == Available(b"")
        this.draft.seal()
        this.announcement.close()
        assert connection.hear(Available) == Available(None)
        assert connection.ask(Progress(LAYOUT.nbytes), Going) == Going()
        assert offered(connection) == [(name, 1, None)]


@pytest.fixture
def crowded() -> Iterator[None]:
    """This process has more descriptors than select(2) takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_processes_with_many_descriptors_pass_on_and_hear_what_is_there(
    serving: Serving, directory: Path, name: str, crowded: None
) -> None:
    with fetching(directory, name) as this, serving.connect() as connection:
        announced(serving)
        connection.ask(Open(name, 1), ExportedVersion)
        this.have = 0b10
        eventually(connection.pending, "what is there")
        assert connection.hear(Available) == Available(b"\x02")


def test_the_readers_of_a_draft_that_is_discarded_are_told_and_its_memory_goes_with_them(
    serving: Serving, directory: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving.connect() as connection:
        with fetching(directory, name):
            announced(serving)
            connection.ask(Open(name, 1), ExportedVersion)
            assert leases(directory) == 2
        with pytest.raises(Unavailable, match="has ended without publishing it"):
            connection.hear(Available)
        with pytest.raises(HungUp):
            connection.hear(Available)
    with serving.connect() as connection, pytest.raises(NotFound):
        connection.ask(Open(name, 1), ExportedVersion)


@pytest.mark.slow
def test_a_reader_that_leaves_before_it_has_heard_all_is_no_fault(
    serving: Serving, directory: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fetching(directory, name) as this:
        announced(serving)
        for have in (0b01, 0b10, 0b11):
            with serving.connect() as connection:
                connection.ask(Open(name, 1), ExportedVersion, 60.0)
                this.have = have
                eventually(connection.pending, "what is there")
            eventually(lambda: serving.meter.service.connections == 0, "its end")
    assert "is gone" not in caplog.text


@pytest.mark.slow
def test_a_peer_that_stays_keeps_no_draft_that_was_discarded(
    broker: BrokerProcess, certificates: Certificates, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "HANG_UP", 0.1)
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 600.0)
    with (
        exporting(broker.directory, certificates.host, silence=600.0) as serving,
        serving.connect() as connection,
    ):
        with fetching(broker.directory, name):
            announced(serving)
            connection.ask(Open(name, 1), ExportedVersion)
        eventually(lambda: leases(broker.directory) == serving.meter.service.readers == 0, "the lease to end")
        eventually(lambda: serving.meter.service.connections == 0, "the connection to end")


def test_a_peer_that_knows_nothing_of_parts_is_offered_none(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(directory, name)
    with fetching(directory, name):
        announced(serving)
        with monkeypatch.context() as patch:
            patch.setattr(messages, "PeerHello", lambda _: PeerHello(1))
            connection = serving.connect()
        with connection:
            assert offered(connection) == [(name, 1, None)]
            with pytest.raises(NotFound):
                connection.ask(Open(name, 2), ExportedVersion)


@pytest.mark.parametrize(("before", "mode"), [(None, 0o640), (0o644, 0o600), (0o600, 0o644)])
def test_a_draft_is_for_those_who_may_read_the_pool_before_and_after(
    serving: Serving, directory: Path, certificates: Certificates, name: str, before: int | None, mode: int
) -> None:
    if before is not None:
        publish(directory, name, mode=before)
    own = certificates.of(nobody())
    with fetching(directory, name, mode) as this, serving.connect(own) as connection:
        announced(serving)
        version = this.draft.version
        assert not any(number == version for _, number, _ in offered(connection))
        with pytest.raises(NotFound):
            connection.ask(Open(name, version), ExportedVersion)
        with serving.connect() as rights:
            assert (name, version, 0) in offered(rights)


@pytest.mark.slow
def test_a_draft_that_is_not_among_the_pools_is_not_offered(
    broker: BrokerProcess, certificates: Certificates, name: str
) -> None:
    with (
        exporting(broker.directory, certificates.host, pools=["x*"]) as serving,
        fetching(broker.directory, name),
        serving.connect() as connection,
    ):
        announced(serving)
        assert offered(connection) == []
        with pytest.raises(NotFound):
            connection.ask(Open(name, 1), ExportedVersion)


def test_a_fetch_tells_nobody_who_may_not_read_it(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = find_account(nobody())
    monkeypatch.setattr(announcements, "account_of", lambda _: stranger)
    with fetching(directory, name, 0o600):
        eventually(lambda: "while it is being fetched: the exporter of this host runs as" in caplog.text, "it")
    assert serving.meter.service.drafts == 0


@pytest.mark.slow
def test_an_announcement_of_another_user_s_draft_is_refused(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Broker(directory) as broker, broker.create(name, LAYOUT, mode=0o666) as draft:
        with monkeypatch.context() as patch:
            stranger = find_account(nobody())
            patch.setattr(announcements, "account_of", lambda _: stranger)
            with pytest.raises(Denied, match=f"{name}@1 is another user's"):
                told(directory, announcement(directory, name, draft.version)[0])
        told(directory, *announcement(directory, name, draft.version))


def announcement(directory: Path, name: str, version: int) -> tuple[Announce, DraftContent]:
    """What a fetch says at first of a draft."""
    return Announce(host_id(directory), name, version), DraftContent(digests.DEFINITION, SUMS, UNIT, b"")


@contextmanager
def connected(directory: Path) -> Iterator[socket.socket]:
    """Connect to the exporter as a fetch does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(announcements.name_of(directory))
        yield connection


def say(connection: socket.socket, *said: messages.Local) -> None:
    """Say something to the exporter, and wait for its answer each time."""
    for message in said:
        connection.sendall(messages.frame(message))
        messages.expect(announcements._reply(connection), Going)


def told(directory: Path, *said: messages.Local) -> None:
    with connected(directory) as connection:
        say(connection, *said)


replace = msgspec.structs.replace

LIES: dict[str, Callable[[Announce, DraftContent], Sequence[messages.Local]]] = {
    "no announcement": lambda *_: [Available(b"")],
    "another broker": lambda first, _: [replace(first, host=host_id(Path("/")))],
    "no such version": lambda first, _: [replace(first, version=first.version + 1)],
    "a long name": lambda first, _: [replace(first, host=bytes(messages.MAX_ANNOUNCE))],
    "no content": lambda first, _: [first, Available(b"")],
    "too few digests": lambda first, then: [first, replace(then, digests=SUMS[:1])],
    "too many digests": lambda first, then: [first, replace(then, digests=SUMS * 100)],
    "other digests": lambda first, then: [first, replace(then, algorithm="md5")],
    "other runs": lambda first, then: [first, replace(then, piece=512)],
    "runs that there are not": lambda first, then: [first, replace(then, runs=b"\x04")],
}


@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_be_passed_on_is_refused(serving: Serving, directory: Path, name: str, lie: str) -> None:
    with Broker(directory) as broker, broker.create(name, LAYOUT) as draft:
        with pytest.raises((Invalid, NotFound)):
            told(directory, *LIES[lie](*announcement(directory, name, draft.version)))
        draft.seal()
    with pytest.raises(Invalid, match="is no draft that can be offered to other hosts"):
        told(directory, *announcement(directory, name, 1))


@pytest.mark.parametrize("runs", [b"\x04", bytes(2), bytes(messages.OVERHEAD)])
def test_runs_that_a_draft_has_not_end_its_announcement(
    serving: Serving, directory: Path, name: str, runs: bytes
) -> None:
    with (
        Broker(directory) as broker,
        broker.create(name, LAYOUT) as draft,
        connected(directory) as connection,
        serving.connect() as peer,
    ):
        say(connection, *announcement(directory, name, draft.version))
        connection.sendall(messages.frame(Available(b"\x03")))
        eventually(lambda: offered(peer) == [(name, 1, LAYOUT.nbytes)], "the runs")
        with pytest.raises(Invalid, match=r"names runs beyond the 2 of this version|1 to .* are accepted"):
            say(connection, Available(runs))
        eventually(lambda: offered(peer) == [], "its end")


def test_a_message_that_does_not_come_to_its_end_ends_an_announcement(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "LIMIT", 0.1)
    with Broker(directory) as broker, broker.create(name, LAYOUT) as draft:
        first, then = announcement(directory, name, draft.version)
        for begun in ([], [first], [first, then]):
            with connected(directory) as connection:
                say(connection, *begun)
                connection.sendall(messages.LENGTH.pack(8))
                assert connection.recv(1) == b""


def test_announcements_have_so_much_memory_together(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "MEMORY", 3 * messages.OVERHEAD)
    with Broker(directory) as broker, broker.create(name, LAYOUT) as draft, broker.create("other", LAYOUT) as other:
        with connected(directory) as connection:
            say(connection, announcement(directory, name, draft.version)[0])
            with pytest.raises(OverQuota, match="leave no room for"):
                told(directory, *announcement(directory, "other", other.version))
        eventually(lambda: serving.service._announcements._expected == {}, "its end")
        told(directory, *announcement(directory, "other", other.version))


@pytest.mark.slow
def test_refused_announcements_write_so_many_lines_a_minute(
    broker: BrokerProcess, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with exporting(broker.directory, certificates.host):
        for _ in range(exporter.LINES + 10):
            with pytest.raises(Invalid):
                told(broker.directory, Available(b""))
    assert 0 < caplog.text.count("is not offered to other hosts while it is being fetched") <= exporter.LINES


def test_an_ipc_draft_is_passed_on_by_its_writer_s_exporter_or_root_s(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To others the broker does not lend it: its readers could write it."""
    with Broker(directory) as broker, broker.create(name, LAYOUT, share="ipc") as draft:
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            with pytest.raises(Unsupported, match=f"{name}@1 is `ipc`, and is offered once it is published"):
                told(directory, *announcement(directory, name, draft.version))
        told(directory, *announcement(directory, name, draft.version))


def test_a_broker_that_lends_no_drafts_has_none_passed_on(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "UNSEALED", 1 << 30)
    with fetching(directory, name) as this, serving.connect() as connection:
        eventually(lambda: not this.announcement._thread.is_alive(), "its end: the answer would be the same")
        with pytest.raises(Unsupported, match="the broker is too old to lend drafts"):
            told(directory, *announcement(directory, name, 1))
        assert offered(connection) == []
        this.draft.seal()
        assert offered(connection) == [(name, 1, None)]


def test_a_version_of_a_broker_that_does_not_tell_when_it_was_published_is_not_gone(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = Broker.describe

    def described(self: Broker, *arguments: Any) -> Any:
        info, *rest = describe(self, *arguments)
        return msgspec.structs.replace(info, published=None), *rest

    monkeypatch.setattr(Broker, "describe", described)
    with fetching(directory, name) as this, serving.connect() as connection:
        announced(serving)
        connection.ask(Open(name, 1), ExportedVersion)
        this.draft.seal()
        this.announcement.close()
        assert connection.hear(Available) == Available(None)


def test_an_announcement_that_is_refused_for_now_is_made_again(
    serving: Serving, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, errors = Announcements._check, [Unavailable("the broker restarts"), OverQuota("there is no room")]

    def later(self: Announcements, *arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return check(self, *arguments)

    monkeypatch.setattr(Announcements, "_check", later)
    with fetching(directory, name):
        announced(serving)
    assert errors == []


def test_a_draft_is_announced_once(serving: Serving, directory: Path, name: str) -> None:
    with fetching(directory, name):
        announced(serving)
        with pytest.raises(Unavailable, match="another connection has announced it"):
            told(directory, *announcement(directory, name, 1))
    publish(directory, name)


@pytest.mark.slow
def test_a_fetch_finds_an_exporter_that_comes_later_or_comes_again(
    broker: BrokerProcess, certificates: Certificates, name: str
) -> None:
    with fetching(broker.directory, name):
        for _ in range(2):
            with exporting(broker.directory, certificates.host) as serving:
                announced(serving)


def test_the_second_exporter_of_a_broker_offers_what_is_published(
    serving: Serving, directory: Path, certificates: Certificates, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(directory, name)
    with exporting(directory, certificates.host) as second, fetching(directory, name), second.connect() as connection:
        assert "are offered only once they are published: Address already in use" in caplog.text
        announced(serving)
        assert offered(connection) == [(name, 1, None)]


def test_a_host_knows_itself(serving: Serving, directory: Path, certificates: Certificates, tmp_path: Path) -> None:
    own = host_id(directory)
    with pytest.raises(OwnHost, match="is this host itself"):
        PeerConnection(serving.address, certificates.host, own)
    PeerConnection(serving.address, certificates.host, host_id(tmp_path)).close()
    assert host_id(tmp_path / "none") == b""


@pytest.mark.slow
def test_an_exporter_that_hangs_keeps_no_fetch(
    broker: BrokerProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "LEAVE", 0.05)
    monkeypatch.setattr(announcements, "LIMIT", 60.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(announcements.name_of(broker.directory))
        silent.listen()
        with fetching(broker.directory, name) as this:
            accepted, _ = silent.accept()
            this.draft.seal()
        with accepted:
            assert this.announcement._thread.is_alive(), "the fetch goes on, though no answer has come"
        this.announcement._thread.join(PATIENCE)


ELSEWHERE = """
mount --bind "$1" "$2" && exec "$3" -P -c "
import sys
from pathlib import Path
from cubroker.integrations.cluster.announcements import name_of
print(name_of(Path(sys.argv[1])).hex())
" "$2"
"""
"""Prints where an exporter listens, of a directory that has another path too, as in a container."""


def test_an_exporter_is_found_where_the_directory_of_its_broker_has_another_path(
    directory: Path, tmp_path: Path
) -> None:
    script = ("sh", "-c", ELSEWHERE, "sh", directory, tmp_path, sys.executable)
    done = subprocess.run([*unshare("--user", "--map-root-user", "--mount"), *script], capture_output=True, check=True)
    assert bytes.fromhex(done.stdout.decode()) == announcements.name_of(directory)
    assert announcements.name_of(tmp_path) != announcements.name_of(directory)
    with pytest.raises(FileNotFoundError):
        announcements.name_of(tmp_path / "none")


def test_garbage_ends_a_connection(serving: Serving, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(announcements.name_of(directory))
        connection.sendall(messages.LENGTH.pack(messages.MAX_ANNOUNCE + 1))
        with pytest.raises(CubrokerError):
            messages.expect(announcements._reply(connection), Going)
