from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.driver import Context, DriverError
from cubroker.driver.vmm import Reservation
from cubroker.protocol import Layout
from cubroker.protocol.errors import DeviceFailure, Invalid, NotFound, OutOfMemory, Unavailable
from tests.brokers import BrokerProcess, eventually
from tests.unit.client import scripts
from tests.unit.client.conftest import LAYOUT, content, leases, publish

pytestmark = pytest.mark.usefixtures("share")


def test_a_closed_pool_is_of_no_use_and_may_be_closed_again(client: Broker, name: str) -> None:
    publish(client, name)
    pool = client.attach(name)
    pool.close()
    pool.close()
    assert leases(client, name) == 0
    assert list(pool) == [tensor.name for tensor in LAYOUT.tensors]
    for use in (lambda: pool["weight"], lambda: pool.allocation_views):
        with pytest.raises(Invalid, match=f"pool {name!r} version 1 is closed in this process; get another"):
            use()


OPENS = """
    from cubroker.driver import load
    handle, offset = bytes.fromhex(sys.argv[2]), int(sys.argv[3])
    context = load(sys.argv[4]).context(1)
    pointer = context.open(handle)
    print(context.read(pointer + offset, 128).hex())
    context.write(pointer + offset, bytes(128))
    context.close(pointer)
"""


def test_a_handle_opens_an_allocation_in_a_process_without_a_lease(
    lender: BrokerProcess, client: Broker, name: str, share: str
) -> None:
    publish(client, name, devices=(1,), writable=True)
    with client.attach(name) as pool:
        (given,) = pool.handles()
        facts = (given.allocation, given.share, given.device, given.nbytes)
        assert facts == (0, share, pool.memory_device, LAYOUT.allocations[0])
        if share != "ipc":
            assert given.handle is None
        else:
            assert given.handle is not None
            assert repr(given.handle) not in repr(given)
            assert len(given.handle) == 64
            offset = next(tensor.offset for tensor in LAYOUT.tensors if tensor.name == "weight")
            done = scripts.run(lender, OPENS, given.handle.hex(), str(offset), lender.devices)
            assert done.stdout.strip() == content("weight", 128).hex(), done.stderr
            assert pool["weight"].tobytes() == bytes(128)
    with pytest.raises(Invalid, match="is closed in this process"):
        pool.handles()


def test_each_replica_and_each_shard_has_its_own_handles(client: Broker, name: str, share: str) -> None:
    with client.create(name, LAYOUT, devices=(0, 1)) as draft:
        opened = [each for replica in draft.replicas for each in replica.handles()]
        assert [each.device.index for each in opened] == [0, 1]
        assert len({each.handle for each in opened}) == (2 if share == "ipc" else 1)
        assert draft.handles() == draft.replicas[0].handles()
    layout = Layout.pack([("a", "U8", (8,)), ("b", "U8", (9,))], groups={"a": 0, "b": 1})
    with client.create(f"{name}/sharded", layout, plan={"a": 0, "b": 1}) as draft:
        draft.seal()
    with client.attach(f"{name}/sharded") as pool:
        found = [(each.allocation, each.device.index, each.nbytes) for each in pool.handles()]
        assert found == [(0, 0, layout.allocations[0]), (1, 1, layout.allocations[1])]


def test_a_tensor_keeps_the_memory_and_the_lease(client: Broker, name: str) -> None:
    publish(client, name)
    pool = client.attach(name)
    tensor = pool["weight"]
    pool.close()
    assert tensor.tobytes() == content("weight", 128)
    assert leases(client, name) == 1
    del tensor
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_an_array_keeps_the_memory_whatever_is_made_of_it(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        row: Any = pool["weight"].numpy()[1:, ::2].T[0]
        bits = pool["bias"].numpy().view("u2")
    assert leases(client, name) == 1
    assert row[0].tobytes() == content("weight", 128)[32:36]
    del row
    assert leases(client, name) == 1
    assert bits.tobytes() == content("bias", 16)
    del bits
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_the_connection_stays_until_the_last_array_is_gone(client: Broker, name: str) -> None:
    publish(client, name)
    with Broker(client.directory) as other:
        array = other.attach(name)["weight"].numpy()
        number = other.session

    def state() -> list[str]:
        return [info.state for info in client.clients() if info.session == number]

    assert state() == ["connected"]
    assert array.tobytes() == content("weight", 128)
    del array
    eventually(lambda: not state(), "the end of the session")


def test_a_pool_that_is_dropped_gives_its_lease_back(client: Broker, name: str) -> None:
    publish(client, name)
    assert client.attach(name).version == 1
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_a_call_that_fails_keeps_nothing_of_its_caller(client: Broker, name: str) -> None:
    publish(client, name)

    def work() -> None:
        pool = client.attach(name)
        array = pool["weight"].numpy()
        for call in (lambda: client.attach("never"), lambda: client.retire("never")):
            with suppress(NotFound):
                call()
        with Broker(client.directory) as other:
            watch = other.watch(name)
        with suppress(Unavailable):
            next(watch)
        assert array.shape == (4, 8)

    gc.disable()  # which would find what refers to itself, some day
    try:
        work()
        eventually(lambda: leases(client, name) == 0, "the end of the lease")
    finally:
        gc.enable()


def test_many_threads_may_close_one_pool(client: Broker, name: str) -> None:
    publish(client, name)
    pool = client.attach(name)
    threads = [threading.Thread(target=pool.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert leases(client, name) == 0


@pytest.mark.parametrize("share", ["ipc"], indirect=True)
def test_memory_that_cannot_be_opened_leaves_nothing_open(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name, devices=(0,))
    opened: list[int] = []
    closed: list[int] = []
    original = Context.open, Context.close

    def open_(context: Context, handle: bytes) -> int:
        if opened:
            raise DriverError("cuIpcOpenMemHandle", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        opened.append(original[0](context, handle))
        return opened[-1]

    def close(context: Context, pointer: int) -> None:
        closed.append(pointer)
        original[1](context, pointer)

    monkeypatch.setattr(Context, "open", open_)
    monkeypatch.setattr(Context, "close", close)
    with pytest.raises(OutOfMemory, match=rf"opening draft of pool '{name}' version 2: cuIpcOpenMemHandle failed"):
        client.create(name, LAYOUT, devices=(0, 1))
    eventually(lambda: len([info for info in client.pools() if info.name == name]) == 1, "the end of the draft")
    assert opened == closed
    assert leases(client, name) == 0


@contextmanager
def stuck(share: str) -> Iterator[list[None]]:
    """Have the driver refuse to unmap; yields a list that gets longer with each refusal."""
    kind: Any = Context if share == "ipc" else Reservation
    refusals: list[None] = []

    def close(*args: Any) -> None:
        refusals.append(None)
        raise DriverError("cuMemUnmap", 999, "CUDA_ERROR_UNKNOWN", "played")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "close", close)
        yield refusals


def test_memory_that_cannot_be_unmapped_stays_on_loan_until_it_can(
    client: Broker, name: str, share: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(client, name)
    pool = client.attach(name)
    with stuck(share) as refusals:
        with pytest.raises(DeviceFailure, match="unmapping the memory of lease"):
            pool.close()
        eventually(lambda: len(refusals) > 2, "two more attempts")
        assert leases(client, name) == 1
    eventually(lambda: leases(client, name) == 0, "the end of the lease")
    assert caplog.text.count("tries again until it succeeds") == 1


def test_a_draft_that_cannot_be_unmapped_is_not_published_but_discarded(client: Broker, name: str, share: str) -> None:
    draft = client.create(name, LAYOUT)
    with stuck(share), pytest.raises(DeviceFailure, match="unmapping the memory of lease"):
        draft.seal()
    eventually(lambda: not [info for info in client.pools() if info.name == name], "the end of the draft")


def test_a_broker_that_is_closed_still_gives_back_what_could_not_be_unmapped(
    client: Broker, name: str, share: str
) -> None:
    publish(client, name)
    with stuck(share) as refusals:
        other = Broker(client.directory)
        pool = other.attach(name)
        with pytest.raises(DeviceFailure, match="unmapping the memory of lease"):
            other.close()
        eventually(lambda: len(refusals) > 1, "another attempt")
        assert leases(client, name) == 1
        assert pool.closed
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_a_tensor_that_is_not_there_is_answered_with_the_nearest(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        with pytest.raises(KeyError) as unknown:
            pool["wieght"]
        assert str(unknown.value) == f"pool {name!r} version 1 has no tensor 'wieght'; did you mean 'weight'?"
        assert unknown.value.args == ("wieght",)
        with pytest.raises(KeyError, match="version 1 has no tensor 'zzzzzz'; iterate over the pool"):
            pool["zzzzzz"]
        assert "wieght" not in pool
        assert pool.get("wieght") is None
        del unknown
