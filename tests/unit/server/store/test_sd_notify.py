"""What the client's side of the notify protocol sends, byte by byte, and what it takes from its environment."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cubroker.protocol.errors import Invalid, Unavailable
from cubroker.server.keeper.keeper import same_by_comparison, same_file
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import Barrier, Manager, NotifySocket, inherit
from tests.brokers import PATIENCE
from tests.stores import fill
from tests.unit.server.keeper.harness import memory
from tests.unit.server.processes import all_closed, files


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[socket.socket]:
    """Where a service manager would listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        yield listening


@pytest.fixture
def manager(channel: socket.socket) -> Iterator[Manager]:
    found = Manager.from_environment({"NOTIFY_SOCKET": channel.getsockname()})
    assert found
    yield found
    found.close()


def arrived(channel: socket.socket) -> tuple[bytes, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(channel, 8192, 300)
    return data, descriptors


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (sd_notify.ready("2 pools"), b"READY=1\nSTATUS=2 pools"),
        (sd_notify.status("two\nlines \xe9"), "STATUS=two lines \xe9".encode()),
        (sd_notify.stopping(), b"STOPPING=1"),
        (sd_notify.stopping(1.5), b"STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000"),
        (sd_notify.WATCHDOG, b"WATCHDOG=1"),
        (sd_notify.removing("m1.0"), b"FDSTOREREMOVE=1\nFDNAME=m1.0"),
    ],
)
def test_each_message_is_what_systemd_documents(
    manager: Manager, channel: socket.socket, text: str, message: bytes
) -> None:
    manager.say(text)
    assert arrived(channel) == (message, [])
    assert manager.offer(text)
    assert arrived(channel) == (message, [])


def test_a_reload_says_when_it_began(manager: Manager, channel: socket.socket) -> None:
    before = time.monotonic_ns() // 1000
    manager.say(sd_notify.reloading())
    found = re.fullmatch(rb"RELOADING=1\nMONOTONIC_USEC=(\d+)", arrived(channel)[0])
    assert found
    assert before <= int(found[1]) <= time.monotonic_ns() // 1000


def test_descriptors_are_sent_with_their_name_and_whether_they_are_polled(
    manager: Manager, channel: socket.socket
) -> None:
    with memory(b"") as file:
        for poll, more in ((False, b"\nFDPOLL=0"), (True, b"")):
            manager.say(sd_notify.storing("m1.0", poll=poll), [file])
            data, descriptors = arrived(channel)
            assert data == b"FDSTORE=1\nFDNAME=m1.0" + more
            assert [same_file(file, one) for one in descriptors] == [True]
            close(descriptors)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 25, "\xe9", "a\n"])
def test_a_name_that_would_not_come_back_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="is no name to store under"):
        sd_notify.storing(name, poll=False)
    with pytest.raises(Invalid, match="is no name to store under"):
        sd_notify.removing(name)


def test_a_long_status_is_cut_between_characters(manager: Manager, channel: socket.socket) -> None:
    manager.say(sd_notify.ready("\xe9" * 3000))
    data, _ = arrived(channel)
    assert data.decode() == "READY=1\nSTATUS=" + "\xe9" * 1000
    manager.say(sd_notify.status("a\udcff"))
    assert arrived(channel) == (b"STATUS=a?", [])


def test_a_manager_that_takes_nothing_holds_nobody_up_for_ever(
    channel: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sd_notify, "PATIENCE", 0.01)
    manager = Manager(channel.getsockname())

    def flood() -> None:
        while True:
            manager.say(sd_notify.WATCHDOG)

    with pytest.raises(Unavailable, match=r"did not take WATCHDOG=1 within 0\.01 s"):
        flood()
    manager.close()


@pytest.mark.parametrize(
    "error", [*(OSError(each, "not now") for each in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)), MemoryError()]
)
def test_what_there_is_no_memory_for_now_is_said_later(
    manager: Manager, channel: socket.socket, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    transmit, refusals = NotifySocket._transmit, [error, error]

    def scarce(end: NotifySocket, message: str, descriptors: Sequence[int], flags: int = 0) -> None:
        if refusals:
            raise refusals.pop()
        transmit(end, message, descriptors, flags)

    monkeypatch.setattr(NotifySocket, "_transmit", scarce)
    assert not manager.offer(sd_notify.WATCHDOG)
    manager.say(sd_notify.WATCHDOG)
    assert arrived(channel) == (sd_notify.WATCHDOG.encode(), [])


def test_a_manager_that_is_gone_is_an_error_that_says_so(manager: Manager, channel: socket.socket) -> None:
    channel.close()
    with pytest.raises(Unavailable, match="cannot be told STOPPING=1: Connection refused"):
        manager.say(sd_notify.stopping())


def test_one_that_listens_anew_is_found(manager: Manager, channel: socket.socket) -> None:
    address = channel.getsockname()
    manager.say(sd_notify.WATCHDOG)
    channel.close()
    with pytest.raises(Unavailable, match="cannot be told WATCHDOG=1: Connection refused"):
        manager.offer(sd_notify.WATCHDOG)
    Path(address).unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anew:
        anew.bind(address)
        for say in (manager.say, manager.offer):
            say(sd_notify.WATCHDOG)
            assert arrived(anew) == (b"WATCHDOG=1", [])


def test_an_abstract_address_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("")
        manager = Manager("@" + channel.getsockname()[1:].decode())
        manager.say(sd_notify.WATCHDOG)
        assert arrived(channel) == (b"WATCHDOG=1", [])
        manager.close()


def test_more_descriptors_than_may_be_under_way_wait_until_some_have_arrived(channel: socket.socket) -> None:
    script = f"""
import os, resource, sys
from cubroker.server.store import sd_notify
os.chmod({channel.getsockname()!r}, 0o777)
resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))
if os.geteuid() == 0:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
sd_notify.PATIENCE = {PATIENCE}
manager = sd_notify.Manager({channel.getsockname()!r})
file = os.memfd_create("m")
for _ in range(5):
    manager.say(sd_notify.storing("m", poll=False), [file] * 5)
    print("sent", flush=True)
"""
    Path(channel.getsockname()).parent.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        for _ in range(3):
            assert process.stdout.readline() == b"sent\n"
        assert not select.select([process.stdout], [], [], 0.05)[0]  # the kernel's limit is what it waits for
        for _ in range(5):
            close(arrived(channel)[1])
        assert process.stdout.read() == b"sent\n" * 2
    assert process.returncode == 0


def test_without_a_manager_there_is_none() -> None:
    assert Manager.from_environment({}) is None
    assert Manager.from_environment({"NOTIFY_SOCKET": ""}) is None


@pytest.mark.parametrize(
    ("variables", "interval"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_a_watchdog_is_fed_twice_in_its_time_if_it_is_ours(variables: dict[str, str], interval: float | None) -> None:
    manager = Manager.from_environment({"NOTIFY_SOCKET": "/x", **variables})
    assert manager
    assert manager.watchdog_interval == interval
    manager.close()


@pytest.mark.parametrize(
    ("variables", "limit"),
    [({}, None), ({"FDSTORE": "7", "CUBROKER_STORE": "9"}, 7), ({"CUBROKER_STORE": "9"}, 9), ({"FDSTORE": ""}, None)],
)
def test_the_limit_of_the_store_is_what_systemd_says_else_what_the_unit_says(
    variables: dict[str, str], limit: int | None
) -> None:
    manager = Manager.from_environment({"NOTIFY_SOCKET": "/x", **variables})
    assert manager
    assert manager.limit == limit
    manager.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("NOTIFY_SOCKET", value) for value in ("vsock:2:1", "relative", "@")),
        ("KEEPER_NOTIFY_SOCKET", "relative"),
        *(("FDSTORE", value) for value in ("-1", "many", "1" * 30)),
        ("CUBROKER_STORE", "1.5"),
        ("WATCHDOG_USEC", "soon"),
    ],
)
def test_a_variable_that_makes_no_sense_is_refused_by_name(name: str, value: str) -> None:
    before = files(os.getpid())
    with pytest.raises(Invalid, match=f"{name} is '{value}'"):
        Manager.from_environment({"NOTIFY_SOCKET": "/x", name: value})
    all_closed(os.getpid(), before)


class Pair:
    """A keeper and the service manager above it, both played by the test, and a process that has them as its manager.

    Attributes:
        near: where the keeper would listen.
        above: where its own manager would.
    """

    def __init__(self, directory: Path) -> None:
        self.near, self.above = (self._listen(directory / name) for name in ("near", "above"))
        named = {"NOTIFY_SOCKET": self.near.getsockname(), "KEEPER_NOTIFY_SOCKET": self.above.getsockname()}
        manager = Manager.from_environment(named)
        assert manager
        self.manager = manager

    @property
    def has_room(self) -> bool:
        """Whether the manager reports that there is room, to those who wait for it."""
        return bool(select.select([], [self.manager], [], 0)[1])

    def read(self, channel: socket.socket) -> list[tuple[bytes, int]]:
        """Take all messages that are there, with the number of their descriptors, but for what has filled the queue."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data, descriptors = arrived(channel)
                close(descriptors)
                found.append((data, len(descriptors)))
        return [each for each in found if each[0] != b"NOISE=1"]

    def close(self) -> None:
        for each in (self.manager, self.near, self.above):
            each.close()

    def _listen(self, path: Path) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        channel.bind(str(path))
        channel.setblocking(False)
        return channel


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    both = Pair(tmp_path)
    yield both
    both.close()


@pytest.mark.parametrize(
    ("text", "above"),
    [
        (sd_notify.ready("2 pools", f"{sd_notify.SPEAKS}=1"), b"READY=1\nSTATUS=2 pools"),
        (sd_notify.status("3 pools"), b"STATUS=3 pools"),
        (sd_notify.stopping(1.5), b"EXTEND_TIMEOUT_USEC=1500000"),
        (sd_notify.stopping(), b""),
        (sd_notify.WATCHDOG, b""),
        (sd_notify.storing("m1.0", poll=False), b"FDSTORE=1\nFDNAME=m1.0\nFDPOLL=0"),
        (sd_notify.removing("m1.0"), b"FDSTOREREMOVE=1\nFDNAME=m1.0"),
    ],
)
def test_the_manager_above_a_keeper_gets_all_but_what_concerns_the_process_alone(
    pair: Pair, text: str, above: bytes
) -> None:
    with memory(b"") as file:
        descriptors = [file] if "FDSTORE=" in text else []
        for send in (pair.manager.offer, pair.manager.say):
            send(text, descriptors)
            assert pair.read(pair.near) == [(text.encode(), len(descriptors))]
            assert pair.read(pair.above) == [(above, len(descriptors))] * bool(above)


@pytest.mark.parametrize("full", ["near", "above"])
@pytest.mark.parametrize(
    ("text", "first"), [(sd_notify.storing("m1.0", poll=False), "near"), (sd_notify.removing("m1.0"), "above")]
)
def test_the_manager_above_has_nothing_that_the_keeper_lacks_when_one_of_them_takes_nothing(
    pair: Pair, text: str, first: str, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sd_notify, "PATIENCE", 0.01)
    without, other = (pair.near, pair.above) if full == "near" else (pair.above, pair.near)
    before = [] if first == full else [(text.encode(), 0)]
    fill(Path(without.getsockname()))
    assert not pair.manager.offer(text)
    assert pair.read(other) == before
    assert not pair.has_room
    late = re.escape(f"the service manager at {without.getsockname()} did not take {text.splitlines()[0]}")
    assert re.match(late, pair.manager.late(text).message)
    fresh = Manager(pair.near.getsockname(), above=pair.above.getsockname())  # whose limits are those of now
    with pytest.raises(Unavailable, match=late):
        fresh.say(text)
    fresh.close()
    assert pair.read(other) == before
    assert pair.read(without) == []
    assert pair.has_room
    assert pair.manager.offer(text)
    assert pair.read(pair.near) == pair.read(pair.above) == [(text.encode(), 0)]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended"])
@pytest.mark.parametrize("text", [sd_notify.storing("m1.0", poll=False), sd_notify.removing("m1.0")])
def test_once_the_keeper_is_gone_the_manager_above_is_told_alone(pair: Pair, text: str, killed: bool) -> None:
    pair.manager.say(text)
    pair.read(pair.above)
    address = Path(pair.near.getsockname())
    pair.near.close()
    if not killed:
        address.unlink()
    for send in (pair.manager.offer, pair.manager.say):
        send(text)
        assert pair.read(pair.above) == [(text.encode(), 0)]
        send(sd_notify.WATCHDOG)  # which was for the keeper alone
    fill(Path(pair.above.getsockname()))
    assert not pair.manager.offer(text)
    pair.above.close()
    for send in (pair.manager.offer, pair.manager.say):
        with pytest.raises(Unavailable, match=r"above cannot be told FDSTORE.*Connection refused"):
            send(text)


def test_a_barrier_for_which_there_is_no_room_leaves_nothing_open(manager: Manager) -> None:
    with select.epoll() as epoll:
        before = files(os.getpid())
    with pytest.raises(ValueError, match="closed"):
        Barrier(manager, epoll)
    all_closed(os.getpid(), before)


def test_both_sockets_are_closed(tmp_path: Path) -> None:
    before = files(os.getpid())
    Pair(tmp_path).close()
    all_closed(os.getpid(), before)


def test_descriptors_of_another_process_are_left_alone_and_their_variables_are_taken_away() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:c", "LISTEN_PIDFDID": "5", "HOME": "/"}
    assert inherit(environ) == {}
    assert environ == {"HOME": "/"}
    assert inherit({"LISTEN_FDS": "1"}) == {}
    assert inherit({"LISTEN_PID": str(os.getpid())}) == {}
    assert inherit({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0", "LISTEN_FDNAMES": ""}) == {}


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "one"}, "has 1 names for the 2 descriptors"),
        ({"LISTEN_FDS": "x"}, "LISTEN_FDS is 'x'"),
        ({"LISTEN_FDS": "1000000"}, "'unknown' of LISTEN_FDNAMES, cannot be used: Bad file descriptor"),
    ],
)
def test_descriptors_that_are_not_what_is_said_are_refused(variables: dict[str, str], reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        inherit({"LISTEN_PID": str(os.getpid()), **variables})


@pytest.mark.parametrize("same", [same_file, same_by_comparison])
def test_one_open_file_is_told_from_one_that_is_opened_twice(same: Callable[[int, int], bool]) -> None:
    with memory(b"") as file:
        duplicate, another = os.dup(file), os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        assert same(file, duplicate)
        assert not same(file, another)
        close([duplicate, another])


def test_where_the_kernel_cannot_be_asked_no_two_files_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert not same_by_comparison(0, 0)
