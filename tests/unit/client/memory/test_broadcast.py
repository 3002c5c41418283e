"""Multicast pools on host devices: one store that goes to all replicas, by whichever way, and what deaths leave."""

from __future__ import annotations

import signal
import subprocess
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path
from unittest.mock import Mock

import pytest

from cubroker.client import Broker
from cubroker.client.memory import multicast
from cubroker.driver import Context, DriverError, MulticastOff, Window
from cubroker.driver.context import Kernel
from cubroker.protocol import Layout
from cubroker.protocol.errors import DeviceFailure, Invalid, OverBudget, Unsupported
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.faults import fail_nth
from tests.unit.client.conftest import leases
from tests.unit.client.scripts import start
from tests.unit.server.processes import all_closed, files

TENSORS = Layout.pack([("whole", "U8", (4096,)), ("odd", "U8", (1001,)), ("tiny", "U8", (5,)), ("none", "U8", (0,))])
WHOLE = Layout.pack([("whole", "U8", (4096,))])
NAMES = ("whole", "odd", "tiny", "none")
OPTIONS = "CUBROKER_HOST_MULTICAST"
REFUSALS = {
    "cuMulticastCreate=801": "have no multicast",
    "cuMulticastAddDevice=800": "may not use multicast",
    "cuMulticastBindMem=802": "not ready yet",
    "cuMulticastBindMem=401": "fabric manager is broken",
    "slots=0": "no multicast slots left",
}
WAYS = {"multicast": ("host:3@16MiB", ""), "copies": ("host:3@16MiB", "slots=0"), "islands": ("host:3@16MiB/1", "")}


@pytest.fixture(scope="module", params=WAYS)
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A broker whose devices are bound together, or are not, or do not even reach each other."""
    devices, options = WAYS[request.param]
    with ExitStack() as undo:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OPTIONS, options)  # for this broker, and none that a test starts beside it
            broker = undo.enter_context(serving(devices))
        yield broker.directory


@pytest.fixture
def client(place: Path) -> Iterator[Broker]:
    """A Broker; afterwards it has nothing there, and nobody read through a multicast address."""
    with Broker(place) as broker:
        yield broker
        for pool in broker.pools():
            broker.retire(pool.name, pool.version)
        eventually(lambda: not any(device.allocated for device in broker.devices()), "the memory to be freed")
        assert broker.driver.context(0).calls.module.violations == 0


def text(name: str, salt: int = 0) -> bytes:
    nbytes = {"whole": 4096, "odd": 1001, "tiny": 5, "none": 0}[name]
    return bytes((salt + len(name) * index) % 251 for index in range(nbytes))


def make(client: Broker, *, writable: bool = True) -> None:
    with client.create("x", TENSORS, devices=(0, 1, 2), share="multicast", writable=writable) as draft:
        for name in NAMES:
            draft.broadcast(text(name), name)
            assert [replica[name].tobytes() for replica in draft.replicas] == [text(name)] * 3
        draft.seal()


def heard(client: Broker, name: str) -> list[bytes]:
    """What each device has of a tensor."""
    found = []
    for device in (0, 1, 2):
        with client.attach("x", device=device) as pool:
            found.append(pool[name].tobytes())
    return found


@pytest.mark.slow
def test_what_a_draft_and_its_readers_broadcast_is_in_all_replicas(client: Broker) -> None:
    make(client)
    for device in (0, 1, 2):
        with client.attach("x", device=device) as pool:
            assert pool.devices == (client.driver.devices[device],)
            for name in NAMES:
                pool.broadcast(text(name, device + 1), name)
                assert heard(client, name) == [text(name, device + 1)] * 3


def test_bytes_of_the_own_device_are_broadcast_from_a_tensor_and_from_an_address(client: Broker) -> None:
    make(client)
    context = client.driver.context(1)
    memory = context.allocate(8192)
    try:
        with client.attach("x", device=1) as pool, client.attach("x", device=2) as other:
            pool["odd"].copy_from(text("odd", 9))
            assert other["odd"].tobytes() == text("odd")
            pool.broadcast(pool["odd"], "odd")
            assert heard(client, "odd") == [text("odd", 9)] * 3
            for offset in (0, 3):  # as aligned as the tensor, or not
                context.write(memory + offset, text("whole", offset + 1))
                pool.broadcast(memory + offset, "whole")
                assert heard(client, "whole") == [text("whole", offset + 1)] * 3
            with pytest.raises(Invalid, match=r"from the memory of device 1, .* lies in that of device 2"):
                pool.broadcast(other["odd"], "odd")
            with pytest.raises(Invalid, match=r"takes U8 \(1001,\) .*'tiny' U8 \(5,\)"):
                pool.broadcast(pool["tiny"], "odd")
            with pytest.raises(Invalid, match=r"is U8 \(1001,\), and the bytes to fill it from is U8 \(7,\)"):
                pool.broadcast(b"too few", "odd")
            with pytest.raises(Invalid, match=r"is U8 \(1001,\), and the array to fill it from is I8 \(1001,\)"):
                pool.broadcast(array("b", bytes(1001)), "odd")
            with pytest.raises(KeyError):
                pool.broadcast(b"", "no such tensor")
            assert heard(client, "odd") == [text("odd", 9)] * 3
    finally:
        context.free(memory)


def test_who_may_not_write_gets_its_own_replica_alone(client: Broker) -> None:
    make(client, writable=False)
    with client.attach("x", device=1) as pool:
        assert pool.how == client.pools()[0].how
        assert pool["odd"].tobytes() == text("odd")
        with pytest.raises(Invalid, match="create it with writable=True"):
            pool.broadcast(text("odd", 1), "odd")


def test_how_it_is_done_is_told_and_why(client: Broker, place: Path, request: pytest.FixtureRequest) -> None:
    way = request.node.callspec.params["place"]
    reasons = {"multicast": "every device takes part", "copies": "no multicast slots left", "islands": "no multicast"}
    with client.create("x", TENSORS, devices=(2, 0), share="multicast") as draft:
        (info,) = client.pools()
        assert (draft.how, draft.why) == (info.how, info.why)
        assert info.how == ("multicast" if way == "multicast" else "copies")
        assert reasons[way] in info.why
    with client.create("y", TENSORS, devices=(1,), share="multicast", writable=True) as draft:
        assert (draft.how, draft.why) == ("copies", "it is on one device, so there is nothing to bind together")
        draft.broadcast(text("odd"), "odd")
        assert draft["odd"].tobytes() == text("odd")
    with client.create("z", TENSORS) as draft:
        assert (draft.how, draft.why) == ("", "")
        with pytest.raises(Unsupported, match="create it with share='multicast'"):
            draft.broadcast(text("odd"), "odd")
    with pytest.raises(Invalid, match="is to be sharded and multicast"):
        client.create("s", TENSORS, share="multicast", plan=dict.fromkeys(NAMES, 0))
    with pytest.raises(OverBudget):
        client.create("s", Layout.pack([("a", "U8", (64 << 20,))]), devices=(0, 1), share="multicast")


@pytest.mark.parametrize("refusal", REFUSALS)
def test_copies_take_the_place_of_multicast_that_is_refused(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, refusal)
    with serving("host:3@16MiB") as process, Broker(process.directory) as client:
        before = files(process.pid)
        make(client)
        (info,) = client.pools()
        assert info.how == "copies"
        assert REFUSALS[refusal] in info.why
        with client.attach("x", device=2) as pool:
            pool.broadcast(text("odd", 1), "odd")
            assert heard(client, "odd") == [text("odd", 1)] * 3
        client.retire("x")
        all_closed(process.pid, before)


def test_who_is_out_of_reach_of_a_device_attaches_and_cannot_broadcast(
    client: Broker, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A worker that sees its own device alone is at no disadvantage with multicast, and cannot make copies."""
    make(client)
    monkeypatch.setattr(client.driver, "devices", client.driver.devices[1:])
    with client.attach("x", device=1) as pool:
        if pool.how == "multicast":
            pool.broadcast(text("odd", 1), "odd")
        else:
            with pytest.raises(Unsupported, match=r"cannot store to all replicas of .*: this process sees no"):
                pool.broadcast(text("odd", 1), "odd")
    monkeypatch.undo()
    assert heard(client, "odd")[1:] == [text("odd", request.node.callspec.params["place"] == "multicast")] * 2


def test_a_worker_whose_environment_says_no_attaches_and_a_draft_makes_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def window(context: Context, nbytes: int) -> Window:
        raise MulticastOff("cuMemMap", 800, "CUDA_ERROR_NOT_PERMITTED", "NCCL_NVLS_ENABLE=0 says no")

    with serving("host:3@16MiB") as process, Broker(process.directory) as client:
        monkeypatch.setattr(Context, "window", window)
        make(client)
        (info,) = client.pools()
        assert info.how == "multicast"
        with client.attach("x", device=0) as pool:
            with pytest.raises(Unsupported, match="NCCL_NVLS_ENABLE=0 says no"):
                pool.broadcast(text("odd", 1), "odd")
            assert pool["odd"].tobytes() == text("odd")
        failing = DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN")
        monkeypatch.setattr(Context, "window", Mock(side_effect=failing))
        with pytest.raises(DeviceFailure, match="CUDA_ERROR_UNKNOWN"):
            client.attach("x", device=0)
        eventually(lambda: client.pools()[0].leases == 0, "the lease to be given back")


def test_a_device_that_reaches_a_replica_as_a_peer_is_no_member() -> None:
    with serving("host:3@16MiB") as process, Broker(process.directory) as client:
        with client.create("x", WHOLE, devices=(0, 1), share="multicast", writable=True) as draft:
            draft.seal()
        with client.attach("x", device=2, peer=True) as pool:
            assert pool.how == "multicast"
            with pytest.raises(Invalid, match="has no replica on device 2"):
                pool.broadcast(text("whole"), "whole")


# -- what dies -----------------------------------------------------------------------------------------

HOLDER = """
layout = Layout.pack([("whole", "U8", (4096,))])
broker = Broker(directory)
if sys.argv[2] == "writer":
    held = broker.create("x", layout, devices=(0, 1), share="multicast", writable=True)
else:
    held = broker.attach("x", device=int(sys.argv[2]))
held.broadcast(os.urandom(4096), "whole")
print(held.how, flush=True)
sys.stdin.read()
"""


def hold(process: BrokerProcess, *who: str) -> list[subprocess.Popen[str]]:
    """Start holders that have stored to all replicas, each by its own lease."""
    holders = [start(process, HOLDER, each, measured=False) for each in who]
    for holder in holders:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "multicast\n", holder.communicate(timeout=PATIENCE)
    return holders


def kill(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=PATIENCE)


@pytest.mark.slow
def test_nothing_is_left_of_holders_that_are_killed_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, "slots=2")
    with serving("host:2@16MiB") as process, Broker(process.directory) as client:
        before = files(process.pid)
        for order in permutations((0, 1, 2)):
            with client.create("x", WHOLE, devices=(0, 1), share="multicast", writable=True) as draft:
                assert draft.how == "multicast"  # the slots are there again
                version = draft.seal()
            holders = hold(process, "0", "1", "writer")
            try:
                client.retire("x", version)
                for number in order:
                    kill(holders[number])
            finally:
                for holder in holders:
                    kill(holder)
            eventually(lambda: not any(device.allocated for device in client.devices()), "the memory to be freed")
            all_closed(process.pid, before)
        assert "Traceback" not in process.log()


def test_who_outlives_the_others_goes_on_storing_to_all() -> None:
    with serving("host:2@16MiB") as process, Broker(process.directory) as client:
        with client.create("x", WHOLE, devices=(0, 1), share="multicast", writable=True) as draft:
            draft.seal()
        with client.attach("x", device=0) as first, client.attach("x", device=1) as second:
            kill(*hold(process, "1"))
            client.retire("x")
            first.broadcast(text("whole", 3), "whole")
            assert second["whole"].tobytes() == text("whole", 3)
            process.kill()
            second.broadcast(text("whole", 4), "whole")
            assert first["whole"].tobytes() == text("whole", 4)


def test_a_lease_is_given_back_although_the_kernel_that_stored_cannot_be_unloaded(
    client: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(client)
    with client.attach("x", device=0) as pool:
        pool.broadcast(text("whole", 3), "whole")
        fail_nth(monkeypatch, Kernel, "close", 1, DriverError("cuModuleUnload", 999, "CUDA_ERROR_UNKNOWN"))
    assert not leases(client, "x")


def test_a_store_that_the_driver_refuses_is_told(client: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    make(client)
    complaint = r"storing 'odd' of pool 'x' version \d+ to all replicas"
    with client.attach("x", device=0) as pool, pytest.raises(DeviceFailure, match=complaint):
        pool.broadcast(1, "odd")
    assert heard(client, "odd") == [text("odd")] * 3
    monkeypatch.setattr(multicast, "STAGE", 1000)  # in several steps
    with client.attach("x", device=0) as pool:
        pool.broadcast(text("whole", 7), "whole")
    assert heard(client, "whole") == [text("whole", 7)] * 3
