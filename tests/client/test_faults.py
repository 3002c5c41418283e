"""Descriptors, threads and driver calls that fail in a client: a clear error, and nothing is left of the try."""

from __future__ import annotations

import json
import operator
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from cuda.bindings import driver as cuda

from cubroker.client import Broker, devices
from cubroker.driver import Driver
from cubroker.driver.host import host_module
from cubroker.protocol import CubrokerError, Layout, wire
from cubroker.protocol.directory import SESSION_SOCKET
from cubroker.protocol.errors import DeviceFailure, OutOfMemory, Unavailable
from cubroker.protocol.messages import Refused
from tests.brokers import BrokerProcess, eventually
from tests.client.conftest import leases, publish
from tests.client.scripts import run
from tests.faults import FaultyModule, Plan, fail_nth
from tests.server.processes import descriptors

MIB = 1 << 20
THREE = Layout.pack([(name, "U8", (2 * MIB,)) for name in "abc"], slab=2 * MIB)
"""Three allocations."""

OPENING = (
    "cuCtxPushCurrent",
    "cuIpcOpenMemHandle",
    *("cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"),
)
MANY = 1000

SCARCE = """
import json, resource
from contextlib import contextmanager
from cubroker.protocol import CubrokerError

def numbers():
    # The descriptor that the list itself is read with is gone by the time of the second look.
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}

@contextmanager
def short(free):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unused = sorted(set(range(soft)) - numbers())
    resource.setrlimit(resource.RLIMIT_NOFILE, (unused[free], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def settle(before):
    import time
    deadline = time.monotonic() + 60
    while (len(numbers()), threading.active_count()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return [len(numbers()), threading.active_count()]

def left(free, action):
    # What comes of an action with so few descriptors left, and how many descriptors and threads there are afterwards.
    before = len(numbers()), threading.active_count()
    try:
        with short(free):
            thing = action()
    except CubrokerError as error:
        return [error.code, str(error), settle(before)]
    thing.close()
    return ["", "", settle(before)]
"""

CONNECT = """
Broker(directory).close()  # whatever is made once per process is there
before = [len(numbers()), threading.active_count()]
print(json.dumps([before, [left(free, lambda: Broker(directory)) for free in range(20)]]))
"""

ATTACH = """
with Broker(directory) as broker:
    broker.driver
    broker.attach("pool").close()
    before = [len(numbers()), threading.active_count()]
    print(json.dumps([before, [left(free, lambda: broker.attach("pool")) for free in range(4)]]))
    print(len(broker.pools()[0:]), broker.pools()[0].leases)
"""


def test_a_broker_cannot_be_opened_without_descriptors_and_none_is_lost(lender: BrokerProcess) -> None:
    ended = run(lender, SCARCE + CONNECT)
    assert ended.returncode == 0, ended.stderr  # libzmq has aborted where it got some descriptors and not all
    before, results = json.loads(ended.stdout)
    assert all(after == before for _, _, after in results), results
    codes = [code for code, _, _ in results]
    enough = codes.index("")
    assert codes == ["unavailable"] * enough + [""] * (20 - enough)
    assert 8 < enough < 16
    assert all("Too many open files" in message for _, message, _ in results[:enough]), results


def test_a_pool_cannot_be_opened_without_descriptors_and_its_lease_goes_back(
    lender: BrokerProcess, client: Broker
) -> None:
    publish(client, "pool")
    ended = run(lender, SCARCE + ATTACH)
    assert ended.returncode == 0, ended.stderr
    results, leased = ended.stdout.splitlines()
    before, attempts = json.loads(results)
    assert all(after == before for _, _, after in attempts), attempts
    # A socket to ask with, and the descriptor that is asked for.
    assert [code for code, _, _ in attempts] == ["device", "device", "", ""], attempts
    assert all("CUDA_ERROR_OPERATING_SYSTEM" in message for _, message, _ in attempts[:2]), attempts
    assert leased == "1 0"


# -- threads and sockets ---------------------------------------------------------------------------


@contextmanager
def unchanged() -> Iterator[None]:
    """Descriptors and threads of this process come back to what they were."""

    def counts() -> tuple[int, int]:
        return descriptors(os.getpid()), threading.active_count()

    before = counts()
    yield
    # There may be fewer, where a session before this was still about to end.
    eventually(lambda: all(map(operator.le, counts(), before)), f"{before} descriptors and threads")


@pytest.mark.parametrize(
    ("thing", "name", "at", "error"),
    [
        (threading.Thread, "start", 1, RuntimeError("can't start new thread")),
        (threading.Thread, "start", 2, RuntimeError("can't start new thread")),
        (os, "eventfd", 1, OSError(24, "Too many open files")),
        (zmq.Context, "socket", 1, zmq.ZMQError(24)),
    ],
)
def test_a_session_that_cannot_begin_leaves_nothing(
    client: Broker, monkeypatch: pytest.MonkeyPatch, thing: object, name: str, at: int, error: Exception
) -> None:
    client.pools()  # its own connection is there now
    with unchanged():
        with monkeypatch.context() as broken:
            fail_nth(broken, thing, name, at, error)
            with pytest.raises(Unavailable, match=r"no connection for requests to the broker on .*(thread|open files)"):
                Broker(client.directory)
        with Broker(client.directory) as other:
            other.pools()
    eventually(lambda: len(client.clients()) == 1, "the broker to forget the sessions")


@pytest.mark.parametrize("greeted", [False, True])
def test_a_refusal_is_heard_whether_it_comes_before_the_greeting_or_after(tmp_path: Path, greeted: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / SESSION_SOCKET))
        listener.listen()

        def turn_away() -> None:
            connection, _ = listener.accept()
            with connection:
                if greeted:
                    connection.recv(1, socket.MSG_PEEK)  # it stays unread, which breaks the line
                connection.send(wire.pack(Refused("over_quota", "no more sessions")))

        bouncer = threading.Thread(target=turn_away)
        bouncer.start()
        try:
            with pytest.raises(CubrokerError, match="no more sessions"):
                Broker(tmp_path)
        finally:
            bouncer.join()


# -- driver calls ----------------------------------------------------------------------------------


@pytest.fixture
def plan(client: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    """What is to fail of this process's driver, which is the host driver otherwise."""
    plan = Plan()
    first = client.driver.devices[0]
    count = len(client.driver.devices)
    module = FaultyModule(host_module(count, first.total, count), plan)
    driver = Driver(module, client.driver.spec, host=True)
    monkeypatch.setitem(devices._drivers, driver.spec, driver)
    yield plan
    plan.arm((), 0, 0)
    driver.close()


def regions() -> int:
    """How many pieces of host memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:cubroker-")


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize(
    ("action", "status", "error"),
    [
        ("attach", cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, OutOfMemory),
        ("create", cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, DeviceFailure),
    ],
)
def test_memory_that_cannot_be_opened_whole_is_closed_and_its_lease_given_back(
    client: Broker, name: str, plan: Plan, action: str, status: int, error: type[CubrokerError]
) -> None:
    publish(client, name, THREE)
    act: Callable[[], Any] = (
        (lambda: client.attach(name)) if action == "attach" else (lambda: client.create(name, THREE, devices=(0, 1)))
    )
    versions = client.pools()
    before = regions(), client.devices(), descriptors(os.getpid())

    def there() -> tuple[object, ...]:
        return regions(), client.devices(), descriptors(os.getpid())

    for number in range(1, MANY):
        plan.arm(OPENING, number, int(status))
        try:
            whole = act()
        except error:
            assert plan.arm((), 0, 0) >= number
        else:
            failed = plan.arm((), 0, 0) >= number
            whole.close()
            # A device can do without a way to read another one's memory, and without nothing else.
            assert not failed or whole.replicas[1].upstream is None
            if not failed:
                break
        eventually(lambda: client.pools() == versions, f"{versions}")
        eventually(lambda: there() == before, f"{before}")
        act().close()
        eventually(lambda: there() == before, f"{before}")
    assert number > 2 * 3
    assert leases(client, name) == 0
