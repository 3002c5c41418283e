"""Drafts that are sealed where they lie: with a layout of what was put there, and without being unmapped."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cubroker import aio
from cubroker.client import Broker, Draft, Pool, digests
from cubroker.protocol import Layout, TensorSpec
from cubroker.protocol.errors import Corrupted, DeviceFailure, Invalid, NotFound, Unsupported
from cubroker.protocol.messages import SealInPlace
from tests.brokers import PATIENCE, BrokerProcess, eventually, older
from tests.unit.client.conftest import LAYOUT, begun, leases, session_of
from tests.unit.client.scripts import start
from tests.unit.client.test_faults import regions

ROOM = Layout((), (1 << 20, 3 << 20))
"""Memory whose tensors are to be known later."""


def memory_of(draft: Draft) -> list[NDArray[np.uint8]]:
    """Each allocation as bytes that can be written."""
    return [view.numpy() for view in draft.allocation_views]


def arrays_in(draft: Draft) -> dict[str, NDArray[Any]]:
    """Two arrays in a draft's memory, and a second name of the first."""
    first, second = memory_of(draft)
    a = first[512 : 512 + 4 * 30].view(np.float32).reshape(5, 6)
    b = second[256 : 256 + 2 * 8].view(np.int16)
    a[...], b[...] = np.arange(30).reshape(5, 6), range(8)
    return {"a": a, "b": b, "again": a}


# -- another layout ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_in_a_draft_become_the_tensors_of_the_version(client: Broker, name: str, *, in_place: bool) -> None:
    with client.create(name, ROOM) as draft:
        arrays = arrays_in(draft)
        layout = draft.layout_of(arrays)
        if not in_place:
            del arrays
        assert draft.seal(layout=layout, in_place=in_place) == 1
        info, found, _ = client.describe(name)
        assert (info.tensors, found) == (3, layout)
        with client.attach(name) as pool:
            assert list(pool) == ["a", "b", "again"]
            assert pool["a"].numpy().tolist() == np.arange(30).reshape(5, 6).tolist()
            assert pool["b"].numpy().tolist() == [*range(8)]
            assert pool["again"].pointer == pool["a"].pointer
        if in_place:
            del arrays


def test_a_tensor_without_elements_may_lie_anywhere(client: Broker, name: str) -> None:
    with client.create(name, ROOM) as draft:
        layout = draft.layout_of({"none": np.zeros((0, 3), np.float32)})
        draft.seal(layout=layout)
    assert layout.tensors == (TensorSpec("none", "F32", (0, 3), 0, 0),)


def test_arrays_that_cannot_be_tensors_where_they_are_are_named(client: Broker, name: str) -> None:
    with client.create(name, ROOM) as draft:
        first, second = memory_of(draft)
        wrong: dict[str, Any] = {
            "outside": np.zeros(4),
            "gaps": first[:512:2],
            "crooked": second[8:16],
            "strange": first[:16].view("datetime64[s]"),
            "turned": first[: 4 * 30].view(np.float32).reshape(5, 6).T,
        }
        with pytest.raises(Invalid) as raised:
            draft.layout_of(wrong | {"good": first[:4]})
        for text in (
            "'outside' lies in other memory",
            "'gaps' has gaps",
            "'crooked' begins at byte 8 of allocation 1",
            "'strange' is of type datetime64[s]",
            "'turned' has gaps, or is not in C order",
        ):
            assert text in str(raised.value)
        assert "'good'" not in str(raised.value)
        with pytest.raises(Invalid, match="and 3 more; make them there"):
            draft.layout_of({f"x{number}": np.zeros(4) for number in range(11)})
        with pytest.raises(Invalid, match="'one' and 'two' overlap in allocation 0"):
            draft.layout_of({"one": first[:1024], "two": first[256:512]})
        with pytest.raises(Invalid, match="this int cannot be published"):
            draft.layout_of(7)
        del first, second, wrong, raised


def test_a_layout_of_other_memory_leaves_the_draft_open(client: Broker, name: str) -> None:
    with client.create(name, ROOM) as draft:
        with pytest.raises(Invalid, match="its allocation 1 has 1048576 bytes, and not 3145728"):
            draft.seal(layout=Layout((), (1 << 20, 1 << 20)))
        with pytest.raises(Invalid, match="starts at byte 3"):
            draft.seal(layout=Layout((TensorSpec("a", "U8", (1,), 0, 3),), ROOM.allocations))
        good = Layout((TensorSpec("a", "U8", (1,), 0, 0),), ROOM.allocations)
        assert draft.seal(layout=good) == 1
    with client.attach(name) as pool:
        assert list(pool) == ["a"]


def test_a_layout_that_is_refused_can_be_followed_by_another(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft:
        other = Layout(LAYOUT.tensors[:2], LAYOUT.allocations)
        array = draft["weight"].numpy()
        with pytest.raises(Invalid, match="in use: weight"):
            draft.seal(layout=other)
        assert list(draft) == list(draft.replicas[0]) == ["weight", "bias"]
        del array
        assert draft.seal(layout=LAYOUT) == 1
    with client.attach(name) as pool:
        assert pool.layout == LAYOUT


def test_a_long_layout_reaches_the_broker_and_every_reader(client: Broker, name: str) -> None:
    many = tuple(TensorSpec(f"layers.{number}.weight", "U8", (4,), 1, 256 * number) for number in range(5000))
    layout = Layout(many, ROOM.allocations)
    assert len(layout.encode()) > 100_000
    with client.create(name, ROOM) as draft:
        draft.seal(layout=layout, in_place=True)
        with client.attach(name) as pool:
            assert pool.layout == draft.layout == layout


def test_every_replica_has_the_other_layout(client: Broker, name: str) -> None:
    tensors = tuple(TensorSpec(f"t{number}", "U8", (4,), 0, 256 * number) for number in range(3))
    with client.create(name, Layout((), (1 << 20,)), devices=(0, 1)) as draft:
        for replica in draft.replicas:
            replica.allocation_views[0].copy_from_bytes(bytes(range(256)) * 4096)
        draft.seal(layout=Layout(tensors, (1 << 20,)), digest=True)
    for device in (0, 1):
        with client.attach(name, device=device) as pool:
            assert [tensor.tobytes() for tensor in pool.values()] == [bytes(range(4))] * 3
            pool.check()


# -- in place ------------------------------------------------------------------------------------------


def test_what_was_made_from_the_draft_stays_and_is_read_only(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm") as draft:
        draft["weight"].copy_from(np.arange(32, dtype=np.float32).reshape(4, 8))
        array: Any = draft["weight"].numpy()
        pointer, lease, before = draft["weight"].pointer, draft.lease, regions().total()
        assert draft.seal(in_place=True) == 1
        assert not draft.closed
        assert (draft["weight"].pointer, draft.lease, draft.version) == (pointer, lease, 1)
        assert array.tolist() == draft["weight"].numpy().tolist() == np.arange(32).reshape(4, 8).tolist()
        assert (draft.writable, draft.protected, draft["weight"].readonly) == (False, True, True)
        assert regions().total() == before
        with pytest.raises(Invalid, match="was published, or another writer fills it; create a new version"):
            draft["weight"].copy_from_bytes(bytes(128))
        with pytest.raises(Invalid, match="is published already"):
            draft.seal()
        assert leases(client, name) == 1
        with client.attach(name) as pool:
            assert pool["weight"].numpy().tolist() == array.tolist()
        draft.close()
        assert array[3, 7] == 31  # its memory is mapped as long as it lives
        assert leases(client, name) == 1
        del array
    eventually(lambda: not leases(client, name), "the lease to go back with the last array")


WRITES = """
import sys
from cubroker.client import Broker

with Broker(sys.argv[1]) as broker, broker.create("w", [("a", "U8", (8,))], share="vmm") as draft:
    array = draft["a"].numpy()
    array[0] = 1
    draft.seal(in_place=True)
    print(int(array[0]), flush=True)
    array[0] = 2
    print("written", flush=True)
"""


@pytest.mark.slow
def test_a_write_after_the_seal_ends_the_process_on_a_host_device(lender: BrokerProcess, client: Broker) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(lender.directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "1\n"), done.stderr
    with client.attach("w") as pool:
        assert pool["a"].numpy()[0] == 1
    client.retire("w")


def test_an_ipc_draft_that_is_sealed_in_place_is_as_open_to_writes_as_any(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="ipc") as draft:
        array: Any = draft["weight"].numpy()
        draft.seal(in_place=True)
        assert (draft.writable, draft.protected) == (False, False)
        with pytest.raises(Invalid, match="was published"):
            draft["weight"].copy_from_bytes(bytes(128))
        array[0, 0] = 5
        with client.attach(name) as pool:
            assert pool["weight"].numpy()[0, 0] == 5
        del array


def test_a_pool_that_was_sealed_in_place_does_what_pools_do(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm") as draft:
        draft["scale"].copy_from(np.float32(1))
        array: Any = draft["scale"].numpy()
        assert (draft.sealed, repr(draft)) == (False, f"<Draft {name!r} version 1, 4 tensors>")
        draft.seal(in_place=True, digest=True)
        assert (draft.sealed, repr(draft)) == (True, f"<Pool {name!r} version 1, 4 tensors>")
        draft.check()
        draft.sleep()
        assert draft.asleep
        draft.wake()
        assert array == 1
        with client.create(name, LAYOUT, share="vmm") as second:
            second["scale"].copy_from(np.float32(2))
            second.seal()
        assert draft.switch() == draft.version == 2
        assert array == 2
        with pytest.raises(Unsupported, match="sealed without a digest"):
            draft.check()
        assert client.publish(name, {"scale": np.float32(3)}, base=draft) == 3  # a base as any other
        del array
        with client.attach(name, version=3) as third:
            assert third["scale"].numpy() == 3


def test_shards_are_sealed_in_place(client: Broker, name: str) -> None:
    layout = Layout.pack([("a", "U8", (4,)), ("b", "U8", (4,))], groups={"a": 0, "b": 1})
    with client.create(name, layout, plan={"a": 0, "b": 1}, share="vmm") as draft:
        draft["b"].copy_from_bytes(b"here")
        draft.seal(in_place=True)
        with client.attach(name, device=1) as pool:
            assert pool["b"].tobytes() == draft["b"].tobytes() == b"here"
        draft.sleep()
        draft.wake()
        assert draft["b"].tobytes() == b"here"


def test_what_is_writable_stays_so(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm", writable=True) as draft:
        draft.seal(in_place=True)
        draft["scale"].copy_from(np.float32(3))
        with client.attach(name) as pool:
            assert pool["scale"].numpy() == 3
        with draft.event("done") as event:
            event.record()


@pytest.mark.parametrize(
    "terms", [{"devices": (0, 1)}, {"share": "multicast"}, {"share": "multicast", "devices": (0, 1)}]
)
def test_what_a_pool_has_only_a_part_of_is_not_sealed_in_place(client: Broker, name: str, terms: Any) -> None:
    with client.create(name, LAYOUT, **terms) as draft:
        with pytest.raises(Unsupported, match="cannot be sealed in place"):
            draft.seal(in_place=True)
        assert draft.seal() == 1


def test_a_draft_is_not_sealed_while_tensors_are_held(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm") as draft:
        with draft["bias"].hold(), pytest.raises(Invalid, match="copied or held: bias"):
            draft.seal(in_place=True)
        draft["scale"].copy_from(np.float32(4))
        draft.seal(in_place=True)
        assert draft["scale"].numpy() == 4


def test_a_refused_seal_leaves_the_draft_writable(client: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with client.create(name, LAYOUT, share="vmm") as draft:
        session = session_of(client)
        ask = session.ask

        def refused(body: Any, kind: Any) -> Any:
            return ask(SealInPlace(1 << 40) if isinstance(body, SealInPlace) else body, kind)

        monkeypatch.setattr(session, "ask", refused)
        with pytest.raises(NotFound):
            draft.seal(in_place=True)
        monkeypatch.undo()
        draft["scale"].copy_from(np.float32(4))
        array: Any = draft["scale"].numpy()
        array[...] = 5
        draft.seal(in_place=True)
        assert array == 5
        del array


def test_an_access_that_cannot_be_set_leaves_the_draft_writable(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cubroker.driver import DriverError
    from cubroker.driver.vmm import Reservation

    layout = Layout.pack([("a", "U8", (4,)), ("b", "U8", (4,))], slab=256)
    protect, calls = Reservation.protect, []

    def refused(self: Reservation, *, readonly: bool) -> None:
        calls.append(readonly)
        if len(calls) == 2:
            raise DriverError("cuMemSetAccess", 1, "CUDA_ERROR_INVALID_VALUE", "no")
        protect(self, readonly=readonly)

    with client.create(name, layout, share="vmm") as draft:
        monkeypatch.setattr(Reservation, "protect", refused)
        with pytest.raises(DeviceFailure, match="setting the access"):
            draft.seal(in_place=True)
        monkeypatch.undo()
        for tensor in draft.values():
            tensor.copy_from_bytes(b"1234")
        assert draft.seal(in_place=True) == 1
        assert calls[:3] == [True, True, False]


def test_bytes_that_change_after_a_seal_with_a_digest_are_found(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="ipc") as draft:
        array: Any = draft["weight"].numpy()
        draft.seal(in_place=True, digest=True)
        draft.check()
        array[0, 0] = 5
        with pytest.raises(Corrupted, match="'weight'"):
            draft.check()
        del array


def test_memory_stays_mapped_for_its_digest_when_the_draft_is_closed_meanwhile(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = digests.compute

    def closing_first(*args: Any, **options: Any) -> dict[Any, bytes]:
        begun(draft.close).result(PATIENCE)
        return compute(*args, **options)

    monkeypatch.setattr(digests, "compute", closing_first)
    draft = client.create(name, LAYOUT)
    with suppress(NotFound):  # if the close was faster; but no DeviceFailure, which would end the context on a GPU
        draft.seal(in_place=True, digest=True)
    assert draft.closed
    eventually(lambda: not any(info.leases for info in client.pools()), "the lease to end")


def test_a_lease_that_stayed_ends_with_its_process(lender: BrokerProcess, client: Broker, name: str) -> None:
    script = f"""
        broker = Broker(directory)
        draft = broker.create({name!r}, [("a", "U8", (4,))])
        draft["a"].copy_from_bytes(b"1234")
        draft.seal(in_place=True)
        print(flush=True)
        sys.stdin.read()
    """
    with start(lender, script) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert leases(client, name) == 1
        worker.kill()
    eventually(lambda: not leases(client, name), "the end of its lease")
    with client.attach(name) as pool:
        assert pool["a"].tobytes() == b"1234"


def test_readers_that_wait_get_what_was_sealed_in_place(client: Broker, name: str) -> None:
    with client.create(name, ROOM) as draft:
        arrays = arrays_in(draft)
        waiting = begun(lambda: client.attach(name, wait=60))
        eventually(lambda: client.look().waiters, "the attach to wait")
        draft.seal(layout=draft.layout_of(arrays), in_place=True)
        with waiting.result() as pool:
            assert isinstance(pool, Pool)
            assert set(pool) == {"a", "b", "again"}
        del arrays


def test_asyncio_seals_in_place_and_with_another_layout(lender: BrokerProcess, name: str) -> None:
    async def seal(broker: aio.Broker, *, in_place: bool) -> None:
        async with await broker.create(name, ROOM) as draft:
            layout = draft.blocking.layout_of(arrays_in(draft.blocking))
            await draft.seal(layout=layout, in_place=in_place)
        async with await broker.attach(name) as pool:
            assert pool["b"].numpy().tolist() == [*range(8)]

    async def main() -> None:
        async with aio.Broker(lender.directory) as broker:
            for in_place in (True, False):
                await seal(broker, in_place=in_place)
            await broker.retire(name)

    asyncio.run(main())


# -- other brokers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old() -> Iterator[Broker]:
    """A Broker on a broker that knows no other layouts."""
    with older(4) as process, Broker(process.directory) as broker:
        yield broker


def test_a_broker_that_is_too_old_is_asked_nothing_of_it(old: Broker) -> None:
    with old.create("a", ROOM) as draft:
        with pytest.raises(Unsupported, match="too old to take another layout"):
            draft.seal(layout=Layout((TensorSpec("a", "U8", (1,), 0, 0),), ROOM.allocations))
        with pytest.raises(Unsupported, match="too old to seal it in place"):
            draft.seal(in_place=True)
        assert draft.seal(layout=ROOM) == 1
