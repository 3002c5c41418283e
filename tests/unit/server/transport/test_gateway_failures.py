from __future__ import annotations

import ctypes
import itertools
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
import zmq

from cubroker.client.transport.handshake import ping
from cubroker.protocol import wire
from cubroker.protocol.messages import Attach, Close, Done, Failed, GatewayChanged, ListDevices
from cubroker.protocol.paths import REQUEST_SOCKET
from cubroker.server.transport import gateway, gateway_process
from cubroker.server.transport.gateway_process import GATEWAY
from tests.brokers import BrokerProcess, eventually, started
from tests.replaced import PackageCopy
from tests.unit.server.clients import HELLO_OF_3, RawClient, session
from tests.unit.server.processes import alive, all_closed, descriptors, files, gateway_of

PTRACE_ATTACH = 16
WALL = 0x40000000  # threads, too


@contextmanager
def stranger(broker: BrokerProcess, kind: int = zmq.DEALER) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket without a session."""
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(f"ipc://{broker.directory / REQUEST_SOCKET}")
        yield peer


@contextmanager
def halted(pid: int, name: str) -> Iterator[None]:
    """For a block, one thread of a process does not run, and the others do. At its end the process is killed."""
    (thread,) = (int(each.name) for each in Path(f"/proc/{pid}/task").iterdir() if _name(each) == name)
    libc, stopped = ctypes.CDLL(None, use_errno=True), Future[int]()

    def trace() -> None:
        if libc.ptrace(PTRACE_ATTACH, thread, None, None):
            return stopped.set_result(ctypes.get_errno())
        os.waitpid(thread, WALL)
        stopped.set_result(0)
        os.waitpid(thread, WALL)  # its end, before which that of the process is not told
        return None

    tracer = Thread(target=trace)
    tracer.start()
    try:
        if failure := stopped.result():
            pytest.skip(f"this user may trace no process: {os.strerror(failure)}")
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        tracer.join()


def _name(task: Path) -> str:
    return (task / "comm").read_text().strip()


def test_requests_survive_the_death_of_the_gateway(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    first = gateway_of(broker.pid)
    waiting = client.send(Attach("later", 0, None, 60.0))
    client.devices()
    os.kill(first, signal.SIGKILL)
    client.redial()
    second = gateway_of(broker.pid)
    assert second != first
    client.send(Attach("later", 0, None, 60.0), waiting)
    with session(broker.directory) as writer:
        writer.publish("later")
    assert client.answer(waiting)


@pytest.mark.slow
def test_nothing_is_lost_or_done_twice_when_the_gateway_dies(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    attach, count = Attach("pool", 0, None, 0.0), 1000
    numbers = [client.send(attach) for _ in range(count)]
    received = [client.receive() for _ in range(count // 10)]
    os.kill(gateway_of(broker.pid), signal.SIGKILL)
    client.redial()
    for number in numbers:
        client.send(attach, number)
    answers = {answer.id: answer for answer in received}
    while len(answers) < count:
        answer = client.receive()
        assert answers.setdefault(answer.id, answer) == answer
    (known,) = client.clients()
    assert len(known.leases) == count


def test_a_gateway_that_runs_out_of_descriptors_harms_no_session(broker: BrokerProcess, client: RawClient) -> None:
    pid = gateway_of(broker.pid)
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 2, hard))
    with zmq.Context() as context, ExitStack() as flood:
        for _ in range(10):
            peer = flood.enter_context(context.socket(zmq.DEALER))
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(f"ipc://{broker.directory / REQUEST_SOCKET}")
            peer.send(b"junk")
        client.redial()
    assert client.devices()
    eventually(lambda: "was aborted by libzmq" in broker.log(), "the reason")
    assert re.search(r"look at LimitNPROC=, .* \(.*Too many open files.*\); another one starts in", broker.log())


def test_a_lease_counted_before_the_gateway_died_is_not_counted_again(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    attach = Attach("pool", 0, None, 0.0)
    number = client.send(attach)
    before = client.answer(number)
    os.kill(gateway_of(broker.pid), signal.SIGKILL)
    client.redial()
    client.send(attach, number)
    assert client.answer(number) == before
    (known,) = client.clients()
    assert len(known.leases) == 1


@pytest.mark.slow
def test_a_gateway_that_is_stopped_is_replaced_and_what_was_asked_is_answered(
    broker: BrokerProcess, client: RawClient
) -> None:
    stopped = gateway_of(broker.pid)
    os.kill(stopped, signal.SIGSTOP)
    number = client.send(ListDevices())
    client.redial()
    client.send(ListDevices(), number)
    assert client.answer(number)
    assert not alive(stopped)
    assert f"process {stopped} answered none of 4 probes in 2 s, so it was killed" in broker.log()


@pytest.mark.slow
def test_a_gateway_is_replaced_if_libzmq_is_stuck_and_its_own_loop_is_not(
    broker: BrokerProcess, client: RawClient
) -> None:
    stuck = gateway_of(broker.pid)
    with halted(stuck, "ZMQbg/IO/0"):
        number = client.send(ListDevices())
        client.redial()
    client.send(ListDevices(), number)
    assert client.answer(number)


def test_a_gateway_that_is_stopped_does_not_outlive_its_broker(broker: BrokerProcess) -> None:
    stopped = gateway_of(broker.pid)
    os.kill(stopped, signal.SIGSTOP)
    broker.kill()
    eventually(lambda: not alive(stopped), "the end of the gateway")


@pytest.mark.slow
def test_a_broker_that_was_stopped_for_long_keeps_its_gateway(broker: BrokerProcess, client: RawClient) -> None:
    pid = gateway_of(broker.pid)
    os.kill(broker.pid, signal.SIGSTOP)
    time.sleep(2 * gateway_process.UNANSWERED * gateway_process.INTERVAL)
    os.kill(broker.pid, signal.SIGCONT)
    time.sleep(2 * gateway_process.INTERVAL)
    assert client.devices()
    assert gateway_of(broker.pid) == pid


def test_gateways_that_die_one_after_the_other_are_replaced(broker: BrokerProcess, client: RawClient) -> None:
    def replaced() -> bool:
        os.kill(gateway_of(broker.pid), signal.SIGKILL)
        client.redial()
        return "another one starts in 0.10 s" in broker.log()

    eventually(replaced, "a delay, once several have lived for a moment only")
    assert client.devices()


@pytest.mark.slow
def test_a_broker_stops_while_it_waits_to_start_a_gateway(broker: BrokerProcess, client: RawClient) -> None:
    for deaths in itertools.count(1):
        os.kill(gateway_of(broker.pid), signal.SIGKILL)
        eventually(lambda: broker.log().count("another one starts in ") == deaths, "its end")  # noqa: B023
        if "another one starts in 0.80 s" in broker.log():
            break
        assert client.notice() == GatewayChanged()
    assert broker.stop() == 0


def test_a_broker_says_what_to_do_when_an_upgrade_has_left_no_gateway_for_it(tmp_path: Path) -> None:
    package = PackageCopy(tmp_path)

    class Copied(BrokerProcess):
        def spawn(self, log: int) -> subprocess.Popen[bytes]:
            return subprocess.Popen(self.command(), env=package.environ, stdout=log, stderr=log)

    told = "cubroker was replaced on disk after this broker had started, as by an upgrade: restart the broker"
    with started(Copied) as broker:
        package.replace("server/transport/gateway.py")
        os.kill(gateway_of(broker.pid), signal.SIGKILL)
        eventually(lambda: f"No module named {GATEWAY}); {told}; another one starts in" in broker.log(), "the reason")
        assert ping(broker.directory, 60) == f"its gateway is being started again; {told}"


def test_a_gateway_leaves_signals_to_the_broker(broker: BrokerProcess, client: RawClient) -> None:
    pid = gateway_of(broker.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(pid, number)
    assert client.devices()
    assert gateway_of(broker.pid) == pid


def test_a_gateway_has_limits_of_its_own(broker: BrokerProcess) -> None:
    pid = gateway_of(broker.pid)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] <= gateway.MAX_DESCRIPTORS
    assert resource.prlimit(pid, resource.RLIMIT_DATA)[0] <= gateway.MAX_MEMORY


def test_junk_harms_nobody(broker: BrokerProcess, client: RawClient) -> None:
    with stranger(broker) as peer:
        for junk in (b"", b"\xc1", b"\x00" * 100_000, wire.pack([1, 2, 3]), os.urandom(1000)):
            peer.send(junk)
        peer.send_multipart([b""] * 1000)
        peer.send_multipart([b"", client.welcome.secret, b"x" * 1000])
        assert client.devices()
        assert not peer.poll(0)


def test_a_message_past_the_limit_ends_its_connection_alone(broker: BrokerProcess, client: RawClient) -> None:
    pid = gateway_of(broker.pid)
    with stranger(broker) as peer:
        monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        with monitor:
            peer.send(bytes(wire.MAX_MESSAGE + 1))
            assert monitor.poll(60_000)
            peer.disable_monitor()
    assert client.devices()
    assert gateway_of(broker.pid) == pid


@pytest.mark.slow
def test_a_client_that_does_not_read_costs_nobody_else_a_reply(broker: BrokerProcess, client: RawClient) -> None:
    with session(broker.directory) as deaf:
        # Far more replies than its pipe and its kernel buffer hold, all but the first of them sent again.
        for _ in range(20_000):
            deaf.send(ListDevices(), 1)
        for _ in range(10):
            assert client.devices()
        assert len(client.clients()) == 2


def test_clients_come_and_go_without_a_trace(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    pid = gateway_of(broker.pid)
    before = files(broker.pid)
    for _ in range(20):
        with session(broker.directory) as passing:
            lease = passing.attach("pool").lease
            passing.ask(Close(lease), Done)
    eventually(lambda: len(client.clients()) == 1, "the sessions to end")
    all_closed(broker.pid, before)
    assert alive(pid)


def test_a_squatted_routing_id_fails_its_squatter_alone(broker: BrokerProcess, client: RawClient) -> None:
    with stranger(broker) as one, zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.setsockopt(zmq.LINGER, 0)
        other.setsockopt(zmq.ROUTING_ID, b"mine")
        one.setsockopt(zmq.ROUTING_ID, b"mine")
        one.connect(f"ipc://{broker.directory / REQUEST_SOCKET}")
        other.connect(f"ipc://{broker.directory / REQUEST_SOCKET}")
        for peer in (one, other):
            peer.send(b"hello")
        for _ in range(10):
            assert client.devices()


def test_the_limits_hold_where_the_system_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[int, tuple[int, int]] = {}
    monkeypatch.setattr(gateway, "prctl", lambda option, value: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, value: chosen.update({kind: value}))
    gateway.limit()
    assert chosen[resource.RLIMIT_DATA] == (gateway.MAX_MEMORY, resource.RLIM_INFINITY)
    assert chosen[resource.RLIMIT_NOFILE] == (gateway.MAX_DESCRIPTORS, resource.RLIM_INFINITY)


def test_a_request_with_an_unknown_secret_is_denied(broker: BrokerProcess, client: RawClient) -> None:
    with session(broker.directory, HELLO_OF_3) as other:
        other.secret = bytes(16)
        refused = other.ask(ListDevices(), Failed)
    assert refused.code == "denied"
