"""Descriptors, threads and driver calls that fail in a client: a clear error, and nothing is left of the try."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from cuda.bindings import driver as cuda

from cubroker.client import Broker, devices
from cubroker.driver import Driver, vmm
from cubroker.driver.host.bindings import host_module
from cubroker.driver.host.devices import PEERS
from cubroker.protocol import CubrokerError, Layout, wire
from cubroker.protocol.errors import DeviceFailure, OutOfMemory, Unavailable
from cubroker.protocol.layout import TensorIndex
from cubroker.protocol.messages import Refused
from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from tests import faults
from tests.brokers import BrokerProcess, eventually, serving
from tests.faults import FaultyModule, Plan, fail_nth
from tests.unit.client.conftest import content, leases, publish
from tests.unit.client.scripts import run
from tests.unit.server.processes import all_closed, files

MIB = 1 << 20
THREE = Layout.pack([(name, "U8", (2 * MIB,)) for name in "abc"], slab=2 * MIB)
"""Three allocations."""

OPENING = (
    "cuCtxPushCurrent",
    "cuIpcOpenMemHandle",
    *("cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"),
    *("cuDeviceCanAccessPeer", "cuDeviceGetP2PAttribute"),
)
UNMAPPING = ("cuMemHostRegister", "cuMemUnmap")
PLAN = {"a": 0, "b": 1, "c": 0}
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
    publish(client, "pool", share="ipc")
    ended = run(lender, SCARCE + ATTACH)
    assert ended.returncode == 0, ended.stderr
    results, leased = ended.stdout.splitlines()
    before, attempts = json.loads(results)
    assert all(after == before for _, _, after in attempts), attempts
    # A socket to ask with, and the descriptor that is asked for.
    assert [code for code, _, _ in attempts] == ["device", "device", "", ""], attempts
    assert all("CUDA_ERROR_OPERATING_SYSTEM" in message for _, message, _ in attempts[:2]), attempts
    assert leased == "1 0"


BOUNDED = """
import json, resource, time
from pathlib import Path
from cubroker.protocol import CubrokerError

def left():
    return sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

kind, value = sys.argv[2:]
before = left()
if kind == "threads":
    resource.setrlimit(resource.RLIMIT_NPROC, (int(value), int(value)))
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)  # one without another process; root has no such limit
else:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(value)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with Broker(directory) as broker:
        broker.devices()
except CubrokerError as error:
    code, message = error.code, str(error)
else:
    code, message = "", ""
resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
deadline = time.monotonic() + 60
while left() != before and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps([code, message, left() == before]))
"""


def bounded(broker: BrokerProcess, kind: str, value: int) -> tuple[str, str]:
    """Open a broker in a process that may have so many threads, or so many bytes more; return code and message."""
    user = 50_000 + os.getpid() % 10_000
    ended = run(broker, BOUNDED.replace("USER", str(user)), kind, str(value), measured=False)
    assert ended.returncode == 0, (kind, value, ended.stderr)  # libzmq has aborted where it got a thread and not two
    code, message, as_before = json.loads(ended.stdout)
    assert as_before, (kind, value, message)
    return code, message


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a user without other processes takes root")
def test_a_broker_cannot_be_opened_without_threads_for_libzmq_and_the_limit_is_named() -> None:
    with serving() as broker:
        broker.directory.parent.chmod(0o755)
        broker.directory.chmod(0o755)
        for socket_file in (SESSION_SOCKET, REQUEST_SOCKET):
            (broker.directory / socket_file).chmod(0o666)
        results = [bounded(broker, "threads", number) for number in range(1, 6)]
    needed = [code for code, _ in results].index("")
    assert [code for code, _ in results] == ["unavailable"] * needed + [""] * (5 - needed)
    assert needed == 4, "the main thread, two of the session's, and two of libzmq's"
    for number, (_, message) in enumerate(results[:needed], start=1):
        assert f"RLIMIT_NPROC (ulimit -u) is {number}, for all threads of the user" in message


@pytest.mark.slow
def test_a_broker_cannot_be_opened_without_addresses_for_libzmq_and_the_limit_is_named(lender: BrokerProcess) -> None:
    # malloc takes 64 MiB for a new thread where it can: with more room there may be less left.
    results = [bounded(lender, "addresses", size * MIB) for size in (0, 8, 18, 28, 150)]
    refused = [message for code, message in results if code == "unavailable"]
    assert {code for code, _ in results} <= {"", "unavailable"}
    assert len(refused) >= 3
    assert all("RLIMIT_AS (ulimit -v) is " in message for message in refused), refused
    assert bounded(lender, "addresses", 1024 * MIB) == ("", "")


# -- threads and sockets ---------------------------------------------------------------------------


@contextmanager
def unchanged() -> Iterator[None]:
    """What this process opens and which threads it starts is closed again and ends."""
    before, threads = files(os.getpid()), set(threading.enumerate())
    yield
    all_closed(os.getpid(), before)
    eventually(lambda: set(threading.enumerate()) <= threads, f"no threads but {threads}")


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
    monkeypatch.setattr(devices, "driver", lambda _: driver)
    monkeypatch.setattr(devices, "in_call", lambda _: driver.in_call())
    yield plan
    plan.arm((), 0, 0)
    driver.close()


def regions() -> Counter[str]:
    """Which pieces of host memory this process has mapped, by number; compare as answers of :func:`files`."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:cubroker-" in line)
    return Counter(number for _, _, _, _, number, *_ in lines)


ACTIONS: dict[str, Callable[[Broker, str], Any]] = {
    "attach": lambda client, name: client.attach(name),
    "reach a peer": lambda client, name: client.attach(name, device=1, peer=True),
    "create": lambda client, name: client.create(name, THREE, devices=(0, 1)),
    "create shards": lambda client, name: client.create(name, THREE, devices=(0, 1), plan=PLAN),
}


@pytest.mark.slow
@pytest.mark.usefixtures("share")
@pytest.mark.parametrize(
    ("action", "status", "error"),
    [
        ("attach", cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, OutOfMemory),
        ("reach a peer", cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, DeviceFailure),
        ("create", cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, DeviceFailure),
        ("create shards", cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, OutOfMemory),
    ],
)
def test_memory_that_cannot_be_opened_whole_is_closed_and_its_lease_given_back(
    client: Broker, name: str, plan: Plan, action: str, status: int, error: type[CubrokerError]
) -> None:
    publish(client, name, THREE)
    fail_each(client, plan, OPENING, int(status), error, lambda: ACTIONS[action](client, name))
    assert leases(client, name) == 0


@pytest.mark.parametrize(
    ("action", "thing", "function"),
    [("attach", TensorIndex, "decode"), ("wake", vmm, "_import"), ("switch", vmm, "_import")],
)
def test_a_process_without_memory_to_map_memory_with_fails_one_request_and_goes_on(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch, action: str, thing: object, function: str
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    publish(client, name, share="vmm")
    with client.attach(name) as pool:
        publish(client, name, share="vmm")
        if action == "wake":
            pool.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(thing, function, fail)
            with pytest.raises(OutOfMemory, match=f"no memory left to open pool {name!r} version 2"):
                client.attach(name) if action == "attach" else pool.switch(2)
        eventually(lambda: leases(client, name) == (action != "wake"), "the lease to be given back")
        assert (pool.asleep, pool.version) == (action == "wake", 1)
        pool.switch(2)
        assert pool["weight"].tobytes() == content("weight", 128)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["attach", "create"])
def test_a_system_call_that_fails_while_memory_is_mapped_costs_one_request_and_nothing_else(
    client: Broker, name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch, share: str, action: str
) -> None:
    publish(client, name, THREE)
    faults.fail_system_calls(monkeypatch, plan)
    error = DeviceFailure if share == "ipc" else OutOfMemory  # CUDA_ERROR_MAP_FAILED
    fail_each(client, plan, ("mmap", "mprotect"), errno.ENOMEM, error, lambda: ACTIONS[action](client, name))
    eventually(lambda: leases(client, name) == 0, "the end of leases whose memory could not be unmapped at once")


def test_a_pool_on_one_device_too_many_is_refused_with_what_to_do(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.create(name, THREE, devices=(1,), share="ipc") as draft:
        draft.seal()
    monkeypatch.setenv(PEERS, "0")
    text = r"CUDA_ERROR_TOO_MANY_PEERS \(711\): device 0 has as many peers as it can have.*attach where the memory is"
    with pytest.raises(DeviceFailure, match=text):
        client.attach(name, device=0, peer=True)
    eventually(lambda: leases(client, name) == 0, "the lease to be given back")
    client.attach(name, device=1).close()


def fail_each(
    client: Broker, plan: Plan, names: Sequence[str], status: int, error: type[CubrokerError], act: Callable[[], Any]
) -> None:
    """Fail each call on the way to a lease's memory in turn; nothing is left of the try, and the next one succeeds."""

    def reported() -> tuple[object, ...]:
        return client.pools(), client.devices()

    def returns() -> None:
        eventually(lambda: reported() == books, f"{books} after call {number}")
        eventually(lambda: regions() <= mapped, f"no mapping but {mapped} after call {number}")
        all_closed(os.getpid(), before)

    books = reported()
    act().close()  # whatever is opened once per process is open
    eventually(lambda: reported() == books, f"{books}")
    before, mapped = files(os.getpid()), regions()
    for number in range(1, MANY):
        plan.arm(names, number, status)
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
        returns()
        act().close()
        returns()
    assert number > 3


def test_memory_that_cannot_fall_asleep_whole_keeps_its_lease_and_can_be_woken_or_sleep_later(
    client: Broker, name: str, plan: Plan
) -> None:
    with client.create(name, THREE, share="vmm") as draft:
        draft.seal()
    others = regions()
    with client.attach(name) as pool:
        mapped, pointer = regions() - others, pool["a"].pointer
        for number in range(1, 1 + 3 + 1):  # one wait, and three allocations
            for again in (pool.wake, pool.sleep):
                plan.arm(UNMAPPING, number, int(cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE))
                with pytest.raises(DeviceFailure, match="unmapping pool"):
                    pool.sleep()
                plan.arm((), 0, 0)
                assert (pool.asleep, leases(client, name)) == (True, 1)
                again()
                assert pool.asleep is (again == pool.sleep)
                eventually(lambda: leases(client, name) == (not pool.asleep), "one lease, or none")
                pool.wake()
                assert (regions() - others, pool["a"].pointer) == (mapped, pointer)
        plan.arm(UNMAPPING, number + 1, int(cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE))
        pool.sleep()
        assert plan.arm((), 0, 0) == number
        pool.wake()
    assert leases(client, name) == 0
