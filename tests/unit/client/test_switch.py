"""Pools that are switched to another version at the same addresses, whole or not at all."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from cubroker.client import Broker, Pool
from cubroker.client.transport.requests import Pending
from cubroker.driver import DriverError
from cubroker.driver.vmm import Reservation
from cubroker.protocol import Layout
from cubroker.protocol.errors import (
    CubrokerError,
    DeviceFailure,
    Invalid,
    NotFound,
    OutOfMemory,
    OverQuota,
    Retired,
    TimedOut,
    Unavailable,
    Unsupported,
)
from cubroker.protocol.messages import Close, Request
from tests.brokers import BrokerProcess, eventually
from tests.faults import Plan
from tests.unit.client.conftest import begun, impatient, leases
from tests.unit.client.scripts import start
from tests.unit.client.test_faults import PLAN, THREE, plan, regions
from tests.unit.client.test_threads import together
from tests.unit.server.configured import configured
from tests.unit.server.processes import all_closed, files

__all__ = ["plan"]

pytestmark = pytest.mark.usefixtures("vmm")

NBYTES = 2 << 20
SPREAD = Layout.pack([(name, "U8", (NBYTES,)) for name in "abc"], groups=PLAN, slab=NBYTES)
STEPS = ("cuMemRetainAllocationHandle", "cuMemHostRegister", "cuMemUnmap", "cuMemMap", "cuMemSetAccess")
IMPORT = "cuMemImportFromShareableHandle"


def put(client: Broker, name: str, value: int, layout: Layout = THREE, *, digest: bool = False, **terms: Any) -> int:
    """Publish a version all of whose bytes are one value."""
    with client.create(name, layout, **terms) as draft:
        for replica in draft.replicas:
            for tensor in replica.values():
                tensor.copy_from_bytes(bytes([value]) * tensor.nbytes)
        return draft.seal(digest=digest)


def values(data: Any) -> set[int]:
    """The values of all bytes. numpy finds them: a set of the elements takes a fifth of a second for one tensor."""
    return set(np.unique(np.frombuffer(data, np.uint8)).tolist())


def shown(pool: Pool) -> set[int]:
    """The values of all bytes of a pool."""
    return {byte for tensor in pool.values() for byte in values(tensor.tobytes())}


def held(client: Broker, name: str) -> dict[int, int]:
    """How many leases there are on each live version."""
    return {pool.version: pool.leases for pool in client.pools() if pool.name == name}


def closed(client: Broker, patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of each lease that is given back from now on."""
    numbers: list[int] = []
    post = client.requests.post

    def posting(body: Request, pending: Pending) -> None:
        if isinstance(body, Close):
            numbers.append(body.lease)
        post(body, pending)

    patch.setattr(client.requests, "post", posting)
    return numbers


def stays(client: Broker, pool: Pool, version: int, lease: int) -> None:
    """Check that a pool is on the version as before, and has no lease on any other."""
    assert (pool.version, pool.lease, pool.asleep, shown(pool)) == (version, lease, False, {version})
    eventually(lambda: leases(client, pool.name) == 1, "all other leases to go back")


# -- what a switch does --------------------------------------------------------------------------------


def test_what_was_made_before_shows_the_other_version_after(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        array: Any = pool["b"].numpy()
        tensor, where, lease = pool["c"], {each: pool[each].pointer for each in pool}, pool.lease
        before = regions().total()
        put(client, name, 2)
        assert values(array) == {1}
        assert pool.switch() == pool.version == 2
        assert (values(array), values(tensor.tobytes()), shown(pool)) == ({2}, {2}, {2})
        assert {each: pool[each].pointer for each in pool} == where
        assert pool.lease not in (0, lease)
        assert held(client, name) == {2: 1}
        assert "version 2" in repr(pool)
        assert "version 2" in repr(tensor)
        assert regions().total() == before
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            pool.context.write(pool["a"].pointer, bytes(1))  # read-only as before
        del array


def test_torch_tensors_that_were_made_before_show_the_other_version_after(client: Broker, name: str) -> None:
    pytest.importorskip("torch")
    from cubroker.integrations.torch import state_dict

    put(client, name, 1)
    with client.attach(name) as pool:
        tensor = state_dict(pool)["b"]
        put(client, name, 2)
        pool.switch()
        assert tensor.unique().tolist() == [2]
        del tensor


def test_a_version_can_be_chosen_and_gone_back_to(client: Broker, name: str) -> None:
    for value in (1, 2, 3):
        put(client, name, value)
        if value == 1:
            keeper = client.attach(name)
    with client.attach(name, version=1) as pool:
        assert pool.switch(3) == 3
        assert shown(pool) == {3}
        assert pool.switch(1) == 1
        assert shown(pool) == {1}
        assert held(client, name) == {1: 2, 3: 0}
    keeper.close()


def test_nothing_happens_to_a_pool_that_is_on_the_version(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool, pool["a"].hold():
        lease = pool.lease
        assert pool.switch(1) == pool.switch() == 1
        stays(client, pool, 1, lease)


def test_a_switch_waits_for_the_publication(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        lease = pool.lease
        with pytest.raises(TimedOut):
            pool.switch(2, wait=0.05)
        stays(client, pool, 1, lease)
        switched = begun(lambda: pool.switch(2, wait=60))
        with Broker(client.directory) as other:
            put(other, name, 2)
        assert switched.result() == 2
        assert shown(pool) == {2}


def test_a_pool_that_is_asleep_wakes_on_the_other_version(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        array: Any = pool["a"].numpy()
        pool.sleep()
        put(client, name, 2)
        with pytest.raises((Retired, NotFound)):
            pool.wake()
        with pytest.raises(NotFound):
            pool.switch(7)
        assert (pool.asleep, pool.version) == (True, 1)
        assert pool.switch() == 2
        assert (pool.asleep, values(array), held(client, name)) == (False, {2}, {2: 1})
        pool.sleep()
        assert pool.switch(2) == 2
        assert (pool.asleep, values(array), held(client, name)) == (False, {2}, {2: 1})
        del array


@pytest.mark.slow
def test_all_shards_are_switched_or_one(client: Broker, name: str) -> None:
    put(client, name, 1, SPREAD, plan=PLAN)
    with client.attach(name) as pool, client.attach(name, device=1) as shard:
        arrays: list[Any] = [each[name].numpy() for each in (pool, shard) for name in each]
        # The same plan on the same devices, which are named in another order.
        put(client, name, 2, SPREAD, plan=PLAN, devices=(1, 0))
        assert (pool.switch(), shard.switch(2)) == (2, 2)
        assert all(values(array) == {2} for array in arrays)
        assert held(client, name) == {2: 2}
        del arrays


def test_what_is_reached_on_a_peer_is_switched_there(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name, device=1, peer=True) as pool:
        where = pool["a"].pointer
        put(client, name, 2, devices=(0, 1))
        assert pool.switch() == 2
        assert (pool.device.index, pool.memory_device.index, pool["a"].pointer) == (1, 0, where)
        assert shown(pool) == {2}


def test_a_writable_pool_is_switched_and_its_events_end(client: Broker, name: str) -> None:
    put(client, name, 1, writable=True)
    with client.attach(name) as pool:
        event = pool.event("ready")
        opening = begun(lambda: pool.open_event("other", wait=60))
        put(client, name, 2, writable=True)
        pool.switch()
        assert event.closed
        with pytest.raises(Invalid, match=r"of pool .* version 1 is closed in this process"):
            event.record()
        with pytest.raises((Unavailable, NotFound)):
            opening.result()
        pool["a"].copy_from_bytes(bytes([7]) * NBYTES)
        with client.attach(name) as reader:
            assert values(reader["a"].tobytes()) == {7}
        with pool.event("ready") as again:
            assert again.record() == 1


def test_a_check_compares_with_the_digests_of_the_version_that_is_mapped(client: Broker, name: str) -> None:
    put(client, name, 1, digest=True)
    with client.attach(name) as pool:
        put(client, name, 2, digest=True)
        pool.check()
        pool.switch()
        pool.check()
        put(client, name, 3)
        pool.switch()
        with pytest.raises(Unsupported, match="version 3 cannot be checked: it was sealed without a digest"):
            pool.check()


def test_a_multicast_pool_that_is_only_read_is_switched(client: Broker, name: str) -> None:
    terms: dict[str, Any] = {"share": "multicast", "devices": (0, 1)}
    put(client, name, 1, **terms)
    with client.attach(name, device=1) as pool:
        array: Any = pool["a"].numpy()
        put(client, name, 2, **terms)
        assert pool.switch() == 2
        assert (values(array), shown(pool), held(client, name)) == ({2}, {2}, {2: 1})
        pool.sleep()
        put(client, name, 3, **terms)
        assert pool.switch() == 3
        assert values(array) == {3}
        del array


def test_every_process_switches_for_itself(lender: BrokerProcess, client: Broker, name: str) -> None:
    put(client, name, 1)
    program = """
        with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
            array = pool["b"].numpy()
            print(set(array.tolist()), flush=True)
            for line in sys.stdin:
                pool.switch(int(line))
                print(set(array.tolist()), flush=True)
            del array
    """
    with start(lender, program, name) as first, start(lender, program, name) as second:

        def ask(process: Any, version: str = "") -> str:
            if version:
                process.stdin.write(version + "\n")
                process.stdin.flush()
            return str(process.stdout.readline().strip())

        assert (ask(first), ask(second)) == ("{1}", "{1}")
        put(client, name, 2)
        assert ask(first, "2") == "{2}"
        eventually(lambda: held(client, name) == {1: 1, 2: 1}, "the first lease on version 1 to end")
        assert ask(second, "2") == "{2}"
        eventually(lambda: held(client, name) == {2: 2}, "the leases on version 1 to end")
        for process in (first, second):
            assert process.stdin
            process.stdin.close()
            assert process.wait() == 0


@pytest.mark.slow
def test_the_page_shows_a_loop_that_works(
    lender: BrokerProcess, client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBROKER_DIR", str(lender.directory))
    page = Path(__file__).parents[3] / "docs" / "live-weights.md"
    sample = re.search(r"^## Switch\n.*?^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert sample
    program: dict[str, Any] = {}
    exec(sample[1].replace("policy", name), program)
    put(client, name, 1)
    seen: list[set[int]] = []

    def step(weights: dict[str, Any]) -> bool:
        seen.append({value for array in weights.values() for value in values(array)})
        if len(seen) < 3:
            put(client, name, len(seen) + 1)
        return len(seen) < 3

    program["serve"](step)
    assert seen == [{1}, {2}, {3}]


def test_submitted_work_is_waited_for_once_per_device(client: Broker, name: str, plan: Plan) -> None:
    put(client, name, 1, SPREAD, plan=PLAN)
    with client.attach(name) as pool:
        put(client, name, 2, SPREAD, plan=PLAN)
        plan.arm(("cuMemHostRegister",), 0, 0)
        pool.switch()
        assert plan.arm((), 0, 0) == 2


def test_nothing_is_left_open_and_the_version_before_is_freed(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        opened = files(os.getpid())
        for value in (2, 3, 4):
            put(client, name, value)
            pool.switch()
        all_closed(os.getpid(), opened)
        eventually(lambda: sum(device.allocated for device in client.devices()) == 3 * NBYTES, "their memory to go")
        (session,) = [info for info in client.clients() if info.session == client.session]
        assert [(lease.pool, lease.version) for lease in session.leases] == [(name, 4)]


# -- what cannot be switched ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout.pack([(each, "I8", (NBYTES,)) for each in "abc"], slab=NBYTES), r"tensor 'a' \(I8 .*'a' \(U8 .* here"),
        (Layout.pack([(each, "U8", (NBYTES,)) for each in "ab"], slab=NBYTES), "it has 2 tensors, and not 3"),
        (Layout.pack([(each, "U8", (NBYTES,)) for each in "abc"]), r"tensor 'b' \(.* of allocation 0\) is 'b' .* here"),
        (
            Layout(THREE.tensors, (*THREE.allocations[:2], 2 * NBYTES)),
            "allocation 2 has 4194304 bytes, and not 2097152",
        ),
        (Layout(THREE.tensors, (*THREE.allocations, NBYTES)), "allocation 3 has 2097152 bytes, and not 0"),
    ],
    ids=["dtype", "tensors", "places", "sizes", "allocations"],
)
def test_another_layout_is_refused_and_the_version_stays(client: Broker, name: str, layout: Layout, why: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        lease = pool.lease
        put(client, name, 2, layout)
        text = f"version 2 cannot take the place of pool '{name}' version 1: .*{why}; close the pool, and attach"
        with pytest.raises(Unsupported, match=text):
            pool.switch()
        stays(client, pool, 1, lease)


def test_another_share_kind_or_permission_or_place_is_refused(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        lease = pool.lease
        others: tuple[tuple[dict[str, Any], str], ...] = (
            ({"share": "multicast"}, "shared as multicast, and not as vmm"),
            ({"writable": True}, "its readers may write it"),
            ({"devices": (0, 1), "plan": PLAN, "layout": SPREAD}, "its allocation 1 lies not on device"),
        )
        for terms, why in others:
            put(client, name, 1, **{"layout": THREE, **terms})
            with pytest.raises(Unsupported, match=why):
                pool.switch()
            stays(client, pool, 1, lease)
        put(client, name, 5, devices=(1,))
        with pytest.raises(NotFound, match="is not on the broker's device 0 "):
            pool.switch()
        stays(client, pool, 1, lease)


def test_a_version_with_less_on_the_device_is_refused(client: Broker, name: str) -> None:
    put(client, name, 1, SPREAD)
    with client.attach(name) as pool:
        lease = pool.lease
        put(client, name, 2, SPREAD, plan=PLAN)
        with pytest.raises(Unsupported, match="its allocation 1 lies not on device"):
            pool.switch()
        stays(client, pool, 1, lease)
        with client.attach(name, device=0) as shard:
            put(client, name, 3, SPREAD)
            with pytest.raises(Unsupported, match="its allocation 1 lies also on device"):
                shard.switch()


def test_what_is_not_leased_for_reading_is_refused(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.create(name, THREE) as draft, pytest.raises(Invalid, match="cannot be switched; seal it first"):
        draft.switch()
    with client.attach(name) as pool:
        for version in (0, -1):
            with pytest.raises(Invalid, match="no whole number from 1"):
                pool.switch(version)
        with pytest.raises(Invalid, match="a wait of -1"):
            pool.switch(2, wait=-1)
    with pytest.raises(Invalid, match="is closed in this process; get another"):
        pool.switch()
    put(client, f"{name}-ipc", 1, share="ipc")
    refusal = pytest.raises(Unsupported, match="shared as ipc and cannot be switched; create it with share='vmm'")
    with client.attach(f"{name}-ipc") as pool, refusal:
        pool.switch()


def test_a_multicast_pool_that_is_stored_to_is_refused(client: Broker, name: str) -> None:
    terms: dict[str, Any] = {"share": "multicast", "devices": (0, 1), "writable": True}
    put(client, name, 1, **terms)
    with client.attach(name, device=0) as pool:
        lease = pool.lease
        put(client, name, 2, **terms)
        with pytest.raises(Unsupported, match="can be broadcast to, and so cannot be switched"):
            pool.switch()
        stays(client, pool, 1, lease)


def test_tensors_that_are_held_are_refused(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        put(client, name, 2)
        with pool["b"].hold():
            lease = pool.lease
            with pytest.raises(Invalid, match="cannot be switched while tensors of it are copied or held: b"):
                pool.switch()
            stays(client, pool, 1, lease)
        assert pool.switch() == 2


def test_a_refusal_that_somebody_keeps_holds_no_memory(client: Broker, name: str) -> None:
    put(client, name, 1)
    pool = client.attach(name)
    put(client, name, 2, Layout.pack([("a", "U8", (3,))]))
    with pytest.raises(Unsupported) as kept:
        pool.switch()
    pool.close()
    assert kept.tb is not None
    assert leases(client, name) == 0


def test_a_lease_more_is_needed_for_a_moment() -> None:
    with configured("[quota]\nleases = 2") as broker, Broker(broker.directory) as client:
        put(client, "pool", 1)
        with client.attach("pool") as pool:
            put(client, "pool", 2)
            lease = pool.lease
            with client.attach("pool"), pytest.raises(OverQuota):
                pool.switch()
            stays(client, pool, 1, lease)
            assert pool.switch() == 2


# -- what fails on the way -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 15))
def test_a_call_that_fails_leaves_the_version_before_whole(client: Broker, name: str, plan: Plan, at: int) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        array: Any = pool["b"].numpy()
        lease, before, opened = pool.lease, regions(), files(os.getpid())
        put(client, name, 2)
        plan.arm((IMPORT, *STEPS), at, int(cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY))
        with pytest.raises(OutOfMemory, match=f"switching to pool '{name}' version 2: "):
            pool.switch()
        stays(client, pool, 1, lease)
        assert values(array) == {1}
        assert regions() == before
        all_closed(os.getpid(), opened)
        assert pool.switch() == 2
        assert values(array) == {2}
        del array


@pytest.mark.parametrize("finish", ["wake", "switch", "close"])
def test_where_not_even_the_way_back_works_the_pool_is_asleep(
    client: Broker, name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch, finish: str
) -> None:
    put(client, name, 1)
    with client.attach(name) as pool, client.attach(name):
        before = regions()
        put(client, name, 2)
        fill, done = Reservation.fill, list[Reservation]()

        def failing(reservation: Reservation, *args: Any, **options: Any) -> None:
            if len(done) >= 2:
                raise DriverError("cuMemMap", 2, "CUDA_ERROR_OUT_OF_MEMORY")
            done.append(reservation)
            fill(reservation, *args, **options)

        lease, numbers = pool.lease, closed(client, monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(Reservation, "fill", failing)
            with pytest.raises(
                DeviceFailure, match=r"version 2: cuMemMap failed .* version 1 could not be mapped .* asleep"
            ):
                pool.switch()
        assert (pool.asleep, pool.version, pool.lease) == (True, 1, 0)
        assert (before - regions()).total() == 3
        eventually(lambda: leases(client, name) == 1, "both leases to go back")
        assert len(numbers) == len({*numbers, lease}) == 2  # each of them once
        if finish == "wake":
            pool.wake()
            assert shown(pool) == {1}
        elif finish == "switch":
            assert pool.switch() == 2
            assert shown(pool) == {2}


@pytest.mark.parametrize("finish", ["wake", "switch", "sleep", "close"])
def test_memory_of_either_version_that_stays_mapped_keeps_its_lease(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch, finish: str
) -> None:
    put(client, name, 1)
    with client.attach(name) as pool, client.attach(name, version=1):
        before = regions()
        put(client, name, 2)
        vacate, done = Reservation.vacate, list[Reservation]()

        def failing(reservation: Reservation) -> None:
            if len(done) >= 2:
                raise DriverError("cuMemUnmap", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
            done.append(reservation)
            vacate(reservation)

        with monkeypatch.context() as patch:
            patch.setattr(Reservation, "vacate", failing)
            with pytest.raises(DeviceFailure, match="asleep"):
                pool.switch()
            assert (pool.asleep, pool.version) == (True, 1)
            assert held(client, name) == {1: 2, 2: 1}
            with pytest.raises(DeviceFailure, match=r"waking|unmapping"):
                pool.wake() if finish == "wake" else pool.sleep()
            eventually(lambda: held(client, name) == {1: 2, 2: 1}, "what waking leased to go back")
        if finish == "wake":
            pool.wake()
            assert (shown(pool), pool.version) == ({1}, 1)
        elif finish == "switch":
            assert pool.switch() == 2
            assert shown(pool) == {2}
        elif finish == "sleep":
            pool.sleep()
        pool.close()
        eventually(lambda: leases(client, name) == 1, "both leases to go back")
        gc.collect()
        assert regions() <= before


def test_a_pool_that_could_not_fall_asleep_whole_is_switched(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        array: Any = pool["a"].numpy()
        put(client, name, 2)
        vacate, done = Reservation.vacate, list[Reservation]()

        def failing(reservation: Reservation) -> None:
            if done:
                raise DriverError("cuMemUnmap", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
            done.append(reservation)
            vacate(reservation)

        with monkeypatch.context() as patch:
            patch.setattr(Reservation, "vacate", failing)
            with pytest.raises(DeviceFailure, match="unmapping pool"):
                pool.sleep()
            with pytest.raises(DeviceFailure, match="switching to pool"):
                pool.switch()
        assert (pool.asleep, pool.version) == (True, 1)
        assert pool.switch() == 2
        assert (values(array), shown(pool), held(client, name)) == ({2}, {2}, {2: 1})
        del array


def test_who_gives_up_switching_has_the_version_before(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as other, Broker(broker.directory) as client:
        put(client, "pool", 1)
        with client.attach("pool") as pool:
            lease = pool.lease
            put(client, "pool", 2)
            broker.process.send_signal(signal.SIGSTOP)
            try:
                with impatient(client, 0.2), pytest.raises(TimedOut):
                    pool.switch()
            finally:
                broker.process.send_signal(signal.SIGCONT)
            eventually(lambda: not client.requests.waiting(), "the lease to go back")
            stays(other, pool, 1, lease)
            assert pool.switch() == 2


def test_who_is_interrupted_meanwhile_has_one_version_whole(lender: BrokerProcess, client: Broker, name: str) -> None:
    put(client, name, 1)
    program = """
        from cubroker.driver.vmm import Reservation
        fill, done = Reservation.fill, []

        def filling(reservation, *args, **options):
            fill(reservation, *args, **options)
            done.append(reservation)
            if len(done) == 2:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
            arrays = [pool[name].numpy() for name in pool]
            print("ready", flush=True)
            sys.stdin.readline()
            Reservation.fill = filling
            try:
                pool.switch()
            except KeyboardInterrupt:
                print("interrupted", end=" ")
            print(pool.version, [set(array.tolist()) for array in arrays])
            del arrays
    """
    with start(lender, program, name, measured=False) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        put(client, name, 2)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "interrupted 2 [{2}, {2}, {2}]\n"
        assert process.wait() == 0


def test_a_pool_stays_as_it_is_when_the_broker_is_gone(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as client:
        put(client, "pool", 1)
        pool = client.attach("pool")
        put(client, "pool", 2)
        broker.kill()
        with pytest.raises(CubrokerError, match="is gone"):
            pool.switch()
        assert (pool.version, shown(pool)) == (1, {1})
        pool.close()


# -- threads -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_may_switch_a_pool_let_it_sleep_wake_it_and_read_it(client: Broker, name: str) -> None:
    keepers = []
    for value in (1, 2):
        put(client, name, value)
        keepers.append(client.attach(name))
    with client.attach(name) as pool:
        refused: list[str] = []

        def work(number: int) -> None:
            for turn in range(12):
                try:
                    match (number + turn) % 5:
                        case 0:
                            pool.sleep()
                        case 1:
                            pool.wake()
                        case 2 | 3:
                            version = turn % 2 + 1
                            assert pool.switch(version) == version
                        case _:
                            assert values(pool["b"].tobytes()) in ({1}, {2})
                except Invalid as error:
                    refused.append(error.message)

        together(6, work)
        reasons = ("is asleep", "while tensors of it are copied or held", "is being switched", "while tensors")
        assert all(any(reason in each for reason in reasons) for each in refused), refused
        pool.wake()
        assert shown(pool) == {pool.version}
        eventually(lambda: leases(client, name) == 3, "the leases in between to go back")
    for keeper in keepers:
        keeper.close()


def test_closing_while_another_thread_switches_leaves_nothing(client: Broker, name: str) -> None:
    put(client, name, 1)
    refused: list[str] = []
    for turn in range(8):
        pool = client.attach(name)
        put(client, name, turn + 2)

        def switch(pool: Pool = pool) -> None:
            try:
                pool.switch()
            except Invalid as error:
                refused.append(error.message)

        thread = threading.Thread(target=switch)
        thread.start()
        pool.close()
        thread.join()
        del pool, switch
    assert all("closed" in each for each in refused)
    eventually(lambda: leases(client, name) == 0, "the end of the leases")
