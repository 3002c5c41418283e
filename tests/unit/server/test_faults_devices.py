"""Driver and system calls that fail while a draft's memory is made: the request fails, and nothing is left of it."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

import pytest
from cuda.bindings import driver as cuda
from msgspec.structs import replace

from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    Close,
    Create,
    Created,
    Done,
    Failed,
    ListPools,
    Pools,
)
from tests.brokers import eventually
from tests.faults import FaultyBroker, faulty
from tests.unit.server.clients import RawClient, session
from tests.unit.server.processes import all_closed, files, gateway_of
from tests.unit.server.test_faults_descriptors import short_of

pytestmark = pytest.mark.usefixtures("looking_at_nobody")

MIB = 1 << 20
THREE = Layout.pack([(name, "U8", (2 * MIB,)) for name in "abc"], slab=2 * MIB)
"""Three allocations."""

ALLOCATING = ("cuCtxPushCurrent", "cuMemAlloc", "cuMemsetD8Async", "cuStreamSynchronize", "cuIpcGetMemHandle")
CREATING = ("cuMemCreate", "cuMemExportToShareableHandle")
SYSTEM_CALLS = ("memfd_create", "ftruncate", "fcntl", "mmap", "madvise")
"""Those that host memory is made with; without the last two if it is not mapped."""
MANY = 1000


@pytest.fixture(scope="module")
def broker() -> Iterator[FaultyBroker]:
    with faulty("host:2@64MiB") as process:
        with session(process.directory) as client:
            check(client, create(client))  # the first export opens the socket over which host memory is handed out
            eventually(lambda: not any(device.allocated for device in client.devices()), "its memory to be freed")
        yield process


def create(
    client: RawClient, name: str = "pool", share: str = "ipc", plan: tuple[int, ...] | None = None
) -> Created | Failed:
    devices = tuple(device.uuid for device in client.devices())
    reply = client.answer(client.send(Create(name, THREE.encode(), devices, share, 0.0, None, plan=plan)))
    assert isinstance(reply, Created | Failed)
    return reply


class Scene:
    """All that a request could leave behind, as it is before."""

    def __init__(self, broker: FaultyBroker, client: RawClient) -> None:
        self._client = client
        eventually(lambda: len(client.clients()) == 1, "earlier sessions to end")
        self._books = self._reported()
        self._files = {pid: files(pid) for pid in (broker.pid, gateway_of(broker.pid))}

    def returns(self) -> None:
        """Wait until nothing of a request is left."""
        eventually(lambda: self._reported() == self._books, f"{self._books}")
        for pid, before in self._files.items():
            all_closed(pid, before)

    def _reported(self) -> object:
        return self._client.devices(), self._client.ask(ListPools(), Pools), self._client.clients()


def check(client: RawClient, created: Created | Failed) -> None:
    """A draft is whole: it can be sealed, attached to and retired."""
    assert isinstance(created, Created), created
    assert [len(replica.handles) for replica in created.replicas] == [3, 3]
    client.ask(Close(created.lease), Done)


def fail_each(
    broker: FaultyBroker,
    names: Sequence[str],
    error: int,
    code: str,
    share: str = "ipc",
    plan: tuple[int, ...] | None = None,
) -> int:
    """Fail each call of a create in turn, in both devices' threads; return how many there were."""
    with session(broker.directory) as client:
        scene = Scene(broker, client)
        for number in range(1, MANY):
            broker.arm(names, number, error)
            refused = create(client, share=share, plan=plan)
            if broker.disarm() < number:
                check(client, refused)
                scene.returns()
                return number - 1
            assert isinstance(refused, Failed), number
            assert refused.code == code, refused
            scene.returns()
            check(client, create(client, share=share, plan=plan))
            scene.returns()
    raise AssertionError("there is no end of calls")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, "out_of_memory"),
        (cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, "device"),
    ],
)
def test_a_driver_call_that_fails_costs_one_request_and_nothing_else(
    broker: FaultyBroker, error: int, code: str
) -> None:
    # Each allocation on each device is at least allocated, cleared, waited for and exported.
    assert fail_each(broker, ALLOCATING, int(error), code) >= 2 * 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code"), [(errno.ENOMEM, "out_of_memory"), (errno.ENOSPC, "out_of_memory"), (errno.EMFILE, "device")]
)
def test_a_system_call_that_fails_costs_one_request_and_nothing_else(
    broker: FaultyBroker, error: int, code: str
) -> None:
    assert fail_each(broker, SYSTEM_CALLS, error, code) == 2 * 3 * len(SYSTEM_CALLS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "error", "code"),
    [
        (CREATING, int(cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY), "out_of_memory"),
        (CREATING, int(cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE), "device"),
        (SYSTEM_CALLS[:3], errno.EMFILE, "device"),
    ],
)
def test_a_call_that_fails_for_memory_without_addresses_costs_one_request_and_nothing_else(
    broker: FaultyBroker, names: Sequence[str], error: int, code: str
) -> None:
    assert fail_each(broker, names, error, code, "vmm") >= 2 * 3 * len(names)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "names", "calls"), [("ipc", ALLOCATING, 4), ("vmm", CREATING, 2)])
def test_a_call_that_fails_for_one_shard_costs_all_of_them_and_nothing_else(
    broker: FaultyBroker, share: str, names: Sequence[str], calls: int
) -> None:
    error = int(cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    assert fail_each(broker, names, error, "out_of_memory", share, (0, 1, 0)) >= 3 * calls


def test_memory_that_the_driver_does_not_take_back_stays_counted_and_is_nobodys(broker: FaultyBroker) -> None:
    with session(broker.directory) as client:
        eventually(lambda: len(client.clients()) == 1, "earlier sessions to end, and to close what they had")
        (first, second), pools = client.devices(), client.ask(ListPools(), Pools)
        one = Create("pool", THREE.encode(), (first.uuid,), "ipc", 0.0, None)
        with short_of(broker.pid, 2):  # for the third allocation there is no descriptor
            broker.arm(("cuMemFree",), 1, int(cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE))
            refused = client.ask(one, Failed)
            assert broker.disarm() == 2
        assert refused.code == "device"
        kept = replace(first, allocated=first.allocated + 2 * MIB)
        assert client.devices() == (kept, second)
        assert client.ask(ListPools(), Pools) == pools
        created = client.ask(one, Created)
        broker.arm(("cuMemFree",), 2, int(cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE))
        client.ask(Close(created.lease), Done)
        kept = replace(kept, allocated=kept.allocated + 2 * MIB)
        eventually(lambda: client.devices() == (kept, second), "the rest of the memory to be freed")
        assert broker.disarm() == 3
        greedy = Create("pool", Layout((), (first.budget,)).encode(), (first.uuid,), "ipc", 60.0, None)
        assert "(4 MiB of it lost: the driver did not take it back)" in client.ask(greedy, Failed).message
