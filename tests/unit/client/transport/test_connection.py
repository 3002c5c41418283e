from __future__ import annotations

import os
import re
import resource
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from cubroker.client import Broker
from cubroker.client.transport import connection, handshake, requests
from cubroker.client.transport.connection import Shortage, Waker
from cubroker.client.transport.handshake import ATTEMPTS
from cubroker.client.transport.requests import RESEND, Future, Pending
from cubroker.protocol import wire
from cubroker.protocol.errors import Denied, Invalid, TimedOut, Unavailable, Unsupported
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    Attach,
    DeviceList,
    Done,
    Envelope,
    GatewayChanged,
    ListDevices,
    Pong,
    Refused,
    Reply,
    Welcome,
)
from cubroker.protocol.paths import SESSION_SOCKET, directory_of
from tests.accounts import group_name
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.unit.client import scripts
from tests.unit.client.conftest import LAYOUT, begun, content, impatient, leases, publish, session_of
from tests.unit.server.processes import files, gateway_of


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process from running for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_thread_is_woken_while_it_sleeps_and_not_while_it_is_awake() -> None:
    waker = Waker()
    with closing(waker):
        for _ in range(3):
            waker.set()
            assert select.select([waker.fd], [], [], 0)[0]
            waker.rise(woken=True)
            waker.set()
            assert not select.select([waker.fd], [], [], 0)[0], "it is awake, and looks before it sleeps"
            waker.rest()
    waker.set()


def test_nothing_is_left_lying_while_the_thread_sleeps_whenever_it_was_added() -> None:
    waker, added, taken, count = Waker(), deque[int](), list[int](), 20_000

    def take() -> None:
        while len(taken) < count:
            waker.rest()
            while added:
                taken.append(added.popleft())
            if len(taken) < count:
                waker.rise(woken=bool(select.select([waker.fd], [], [], PATIENCE)[0]))

    with closing(waker):
        thread = threading.Thread(target=take)
        thread.start()
        for number in range(count):
            added.append(number)
            waker.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert taken == list(range(count))


@pytest.mark.parametrize("late", [0.0, 0.2])
def test_requests_survive_the_gateway(monkeypatch: pytest.MonkeyPatch, late: float) -> None:
    """Also where libzmq has connected to the next one by itself before the notice of it is read."""

    def read_late(data: bytes) -> object:
        notice = requests.read_notice(data)
        if isinstance(notice, GatewayChanged):
            time.sleep(late)
        return notice

    monkeypatch.setattr(connection, "read_notice", read_late)
    for module in (connection, requests):
        monkeypatch.setattr(module, "RESEND", PATIENCE)  # so that what is lost stays lost
    with serving() as process, Broker(process.directory) as broker:
        reader = begun(lambda: broker.attach("later", wait=PATIENCE).close())
        eventually(broker.requests.waiting, "the request")
        for number in range(3):
            gateway = gateway_of(process.pid)
            os.kill(gateway, signal.SIGKILL)
            assert publish(broker, f"pool-{number}") == 1
        publish(broker, "later")
        reader.result(PATIENCE)
        assert [info.leases for info in broker.pools()] == [0] * 4


def test_requests_that_are_lost_are_sent_again_and_done_once(client: Broker, lender: BrokerProcess, name: str) -> None:
    client.pools()  # the connection to the gateway stands, so that requests leave for it
    with stopped(gateway_of(lender.pid)):
        begun = time.monotonic()
        futures = [Future[Reply]() for _ in range(3)]
        requests = [Pending(future.settle) for future in futures]
        for number, request in enumerate(requests):
            client.requests.post(_create(client, f"{name}-{number}"), request)
        eventually(lambda: _sent_again(client, requests, begun + RESEND), "requests to be sent again")
    drafts: list[Any] = [future.result(PATIENCE) for future in futures]
    assert len({draft.lease for draft in drafts}) == 3
    assert leases(client, f"{name}-0") == 1
    for draft in drafts:
        assert client.requests.submit(_close(draft.lease)).result(PATIENCE) == Done()


def test_a_request_is_not_sent_again_while_earlier_copies_wait_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.pack([(f"{number:0100}", "U8", (1,)) for number in range(500)])
    assert len(layout.encode()) * 2 > requests.LARGE > len(layout.encode())  # a socket takes a few copies
    copies, waiting = 0, deque[int](maxlen=10)

    def count(*args: Any) -> Envelope:
        nonlocal copies
        copies += 1
        return Envelope(*args)

    def rests(client: Broker) -> bool:
        """Whether a copy waits in the outbox for a while, and no other is made."""
        waiting.append(copies if client.requests.outbox else 0)
        return waiting.count(copies) == waiting.maxlen

    monkeypatch.setattr(requests, "Envelope", count)
    for module in (connection, requests):
        monkeypatch.setattr(module, "RESEND", 0.01)
    with serving() as process, Broker(process.directory) as broker:
        broker.pools()
        with stopped(process.pid), stopped(gateway_of(process.pid)):  # a broker would replace its gateway
            writer = begun(lambda: broker.create("large", layout).close())
            eventually(lambda: rests(broker) or copies > 100, "copies to wait")
            assert copies <= 100
        writer.result(PATIENCE)


def _create(client: Broker, name: str) -> Any:
    from cubroker.protocol.messages import Create

    return Create(name, LAYOUT.encode(), (client.driver.devices[0].uuid,), "ipc", 0.0, None)


def _close(lease: int) -> Any:
    from cubroker.protocol.messages import Close

    return Close(lease)


def _sent_again(client: Broker, requests: list[Pending], since: float) -> bool:
    return not client.requests.outbox and all(each.due - each.pause > since for each in requests)


@pytest.mark.slow
def test_one_long_wait_keeps_nobody_from_asking(client: Broker, lender: BrokerProcess) -> None:
    waiting = client.requests.submit(Attach("not-yet-published", 0, None, 3600.0))
    for _ in range(12):  # more than the broker keeps answers for
        asked = [client.requests.submit(ListDevices()) for _ in range(500)]
        assert all(isinstance(one.result(PATIENCE), DeviceList) for one in asked)
    assert not waiting.done()


def test_a_broker_that_dies_ends_what_waits_and_what_comes_later() -> None:
    with serving() as process, Broker(process.directory) as broker:
        publish(broker, "pool")
        pool = broker.attach("pool")
        waiting = begun(lambda: broker.attach("never", wait=3600))
        eventually(broker.requests.waiting, "the request")
        process.kill()
        error = waiting.exception(PATIENCE)
        assert isinstance(error, Unavailable)
        assert "is gone" in str(error)
        with pytest.raises(Unavailable, match="is gone"):
            broker.pools()
        assert pool["weight"].tobytes() == content("weight", 128)
        pool.close()
    with pytest.raises(Unavailable, match="no broker serves"):
        Broker(process.directory)


def test_a_broker_that_shuts_down_says_so() -> None:
    with serving() as process, Broker(process.directory) as broker:
        waiting = begun(lambda: broker.attach("never", wait=3600))
        eventually(broker.requests.waiting, "the request")
        process.stop()
        error = waiting.exception(PATIENCE)
        assert isinstance(error, Unavailable)
        assert "is gone: " in str(error)


def test_a_broker_that_is_stuck_runs_into_the_time_limit_and_no_lease_is_lost() -> None:
    with serving() as process, Broker(process.directory) as other, Broker(process.directory) as broker:
        publish(other, "pool")
        with impatient(broker, 0.2), stopped(process.pid):
            with pytest.raises(TimedOut, match=r"did not answer the request Attach within 0\.2 s"):
                broker.attach("pool")
            with pytest.raises(TimedOut, match=r"did not answer the request ListPools within 0\.2 s"):
                broker.pools()
            with pytest.raises(TimedOut, match=r"did not answer the request Create within 0\.3 s"):
                broker.create("draft", LAYOUT, wait=0.1)
            with pytest.raises(TimedOut, match="request Watch"):
                broker.watch("pool")
            for limit in (0.1, 1e-9):
                with pytest.raises(Unavailable, match=rf"did not answer within {limit:g} s: its socket listens"):
                    Broker(process.directory, timeout=limit)
        eventually(lambda: not session_of(broker).held and not broker.requests.waiting(), "all answers")
        assert [(info.name, info.leases) for info in other.pools()] == [("pool", 0)]


def test_a_close_is_confirmed_in_time_or_reported() -> None:
    with serving() as process, Broker(process.directory) as broker:
        publish(broker, "pool")
        pool = broker.attach("pool")
        with impatient(broker, 0.2), stopped(process.pid), pytest.raises(TimedOut, match="the end of lease"):
            pool.close()
        eventually(lambda: leases(broker, "pool") == 0, "the end of the lease")


def test_nothing_is_left_open_behind_a_broker(lender: BrokerProcess) -> None:
    Broker(lender.directory).close()
    before, threads = files(os.getpid()), set(threading.enumerate())
    for _ in range(5):
        with Broker(lender.directory) as broker:
            broker.pools()
    assert files(os.getpid()) <= before
    assert set(threading.enumerate()) <= threads


# -- brokers that are not what they should be ------------------------------------------------------


@contextmanager
def impostor(directory: Path, *answers: bytes) -> Iterator[socket.socket]:
    """Listen where a broker would; send ``answers`` to whoever connects first, or nothing to all. Yields it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SESSION_SOCKET))
        listener.listen(1)

        def serve() -> None:
            for _ in range(1 if answers else ATTEMPTS):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    for answer in answers:
                        connection.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener
        thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("answer", "error", "complaint"),
    [
        (wire.pack(Refused("unsupported", "versions differ")), Unsupported, "versions differ"),
        (wire.pack(Pong(1, "")), Invalid, "answered the greeting as if it were a ping"),
        (b"", Unavailable, "without an answer"),
        (b"nonsense", Invalid, "cannot be read"),
    ],
)
def test_a_greeting_that_fails_is_explained(
    tmp_path: Path, answer: bytes, error: type[Exception], complaint: str
) -> None:
    answers = (answer,) if answer else ()
    with impostor(tmp_path, *answers), pytest.raises(error, match=complaint):
        Broker(tmp_path)


def test_nonsense_on_the_session_socket_ends_the_session(tmp_path: Path) -> None:
    welcome = wire.pack(Welcome(1, 1, bytes(16), "host:1@4194304"))
    complaint = "sent a message that cannot be read"
    with (
        impostor(tmp_path, welcome, b"nonsense"),
        Broker(tmp_path) as broker,
        pytest.raises(Unavailable, match=complaint),
    ):
        broker.requests.submit(_close(1)).result(PATIENCE)


def test_a_driver_that_this_process_lacks_is_named(tmp_path: Path) -> None:
    welcome = wire.pack(Welcome(1, 1, bytes(16), "abacus"))
    complaint = r"cannot open the broker's devices \(abacus\)"
    with impostor(tmp_path, welcome), Broker(tmp_path) as broker, pytest.raises(Unavailable, match=complaint):
        print(broker.driver)


def test_a_path_that_no_socket_can_have_is_invalid(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="choose a shorter directory"):
        Broker(tmp_path / ("x" * 100))


def test_a_socket_that_this_user_may_not_use_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(socket.socket):
        def connect(self, address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Forbidden)
    with pytest.raises(Denied, match=r"may not connect .* Permission denied; .*sockets.mode"):
        Broker(tmp_path)
    (tmp_path / SESSION_SOCKET).touch(0o660)
    (tmp_path / SESSION_SOCKET).chmod(0o660)
    with pytest.raises(Denied, match=rf"for the group {re.escape(group_name())}: join .*usermod -aG"):
        Broker(tmp_path)


def test_who_looks_for_a_broker_in_the_wrong_place_hears_of_the_one_of_the_system_or_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "SYSTEM", tmp_path)
    with pytest.raises(
        Unavailable, match=f"start one with: cubroker serve --directory {tmp_path / 'elsewhere'} .without a GPU: --dev"
    ):
        Broker(tmp_path / "elsewhere")
    (tmp_path / SESSION_SOCKET).touch()
    with pytest.raises(Unavailable, match=rf"a socket is on {tmp_path}: name that"):
        Broker(tmp_path / "elsewhere")


def test_a_directory_that_somebody_else_made_in_this_users_name_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = os.getuid() + 54_321
    theirs = directory_of(elsewhere)
    theirs.mkdir()
    try:
        monkeypatch.setattr(os, "getuid", lambda: elsewhere)
        with pytest.raises(Denied, match=r"belongs to user \d+, not to you"):
            Broker(theirs)
    finally:
        theirs.rmdir()


def test_an_unknown_trouble_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / SESSION_SOCKET).symlink_to(SESSION_SOCKET)
    with pytest.raises(Unavailable, match="symbolic links"):
        Broker(tmp_path)


def test_without_descriptors_for_zeromq_the_session_fails_whole(
    lender: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(os.getpid())

    def refuse(*args: object) -> None:
        raise zmq.ZMQError(24)

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "socket", refuse)
        with pytest.raises(Unavailable, match="no connection for requests"):
            Broker(lender.directory)
    assert files(os.getpid()) <= before


def test_a_session_without_a_free_descriptor_goes_on_with_the_next_gateway_when_it_has_some() -> None:
    program = """
        import resource
        lowest = os.dup(0)
        os.close(lowest)
        with Broker(directory) as broker:
            before = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
            print("short", flush=True)
            broker.wait_draining()
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            print([pool.name for pool in broker.pools()], flush=True)
    """
    with serving() as process, Broker(process.directory) as broker:
        publish(broker, "kept")
        with scripts.start(process, program) as worker:
            assert worker.stdout
            assert worker.stdout.readline() == "short\n"
            os.kill(gateway_of(process.pid), signal.SIGKILL)
            broker.drain()  # which comes by the next gateway
            out, err = worker.communicate(timeout=PATIENCE)
        assert (out, err, worker.returncode) == ("['kept']\n", "", 0)


# -- headroom for libzmq -------------------------------------------------------------------------------


def tasks() -> set[str]:
    """The threads of this process, those included that the kernel has not released yet."""
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def test_threads_of_a_trial_count_no_more_when_it_is_over() -> None:
    before, opened = tasks(), files(os.getpid())
    for _ in range(50):
        connection._check_headroom()
        assert tasks() <= before
    assert files(os.getpid()) <= opened


def test_a_thread_that_never_runs_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "THREAD_PATIENCE", 0.01)
    monkeypatch.setattr(threading.Thread, "run", lambda self: None)
    with pytest.raises(Shortage, match="2 more threads have no memory to run in"):
        connection._try_threads()


def test_the_limits_that_are_set_are_named_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ones = {resource.RLIMIT_AS: 200 << 20, resource.RLIMIT_STACK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (set_ones.get(kind, resource.RLIM_INFINITY),) * 2)
    assert connection.memory_limits() == "RLIMIT_AS (ulimit -v) is 200 MiB: raise that"
    assert "RLIMIT_NPROC (ulimit -u) sets no limit; pids.max" in connection.thread_limits()
    set_ones.clear()
    assert connection.memory_limits() == "the system has no more"
    connection._check_headroom()
