"""Pools that are unmapped for a while and come back at the same addresses."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.client import Broker, Pool
from cubroker.client.memory.lease import LeaseHandle
from cubroker.driver import DriverError
from cubroker.driver.context import PrimaryContext
from cubroker.driver.vmm import Reservation
from cubroker.protocol import CubrokerError, Layout
from cubroker.protocol.errors import DeviceFailure, Invalid, NotFound, OutOfMemory, Retired, TimedOut, Unsupported
from tests.brokers import BrokerProcess, eventually
from tests.faults import Plan
from tests.unit.client.conftest import LAYOUT, content, impatient, leases, publish
from tests.unit.client.scripts import run
from tests.unit.client.test_faults import PLAN, THREE, plan, regions
from tests.unit.client.test_threads import together

__all__ = ["plan"]

pytestmark = pytest.mark.usefixtures("vmm")


def test_a_pool_sleeps_without_memory_or_lease_and_wakes_where_it_was(client: Broker, name: str) -> None:
    publish(client, name)
    others = regions()
    with client.attach(name) as pool:
        array: Any = pool["weight"].numpy()
        where, lease, mapped = pool["weight"].pointer, pool.lease, regions() - others
        pool.sleep()
        assert (pool.asleep, pool.lease, leases(client, name)) == (True, 0, 0)
        assert "asleep" in repr(pool)
        assert mapped
        assert not regions() - others
        pool.sleep()
        pool.wake()
        assert (pool.asleep, leases(client, name)) == (False, 1)
        assert pool.lease not in (0, lease)
        assert pool["weight"].pointer == where == array.ctypes.data
        assert array.tobytes() == content("weight", 128)
        pool.wake()
        assert leases(client, name) == 1
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            pool.context.write(where, bytes(1))  # read-only as before
        del array


def test_what_sleeps_is_not_used_through_the_client(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        tensor = pool["weight"]
        pool.sleep()
        uses: list[Callable[[], object]] = [
            lambda: pool["bias"],
            lambda: pool.allocation_views,
            tensor.tobytes,
            tensor.numpy,
            tensor.__dlpack__,
            lambda: tensor.pointer,
        ]
        for use in uses:
            with pytest.raises(Invalid, match=f"pool '{name}' version 1 is asleep.*wake the pool"):
                use()
        pool.wake()
        assert tensor.tobytes() == content("weight", 128)


def test_an_old_view_of_what_sleeps_ends_its_process_and_no_other(lender: BrokerProcess, client: Broker) -> None:
    publish(client, "view")
    done = run(
        lender,
        """
        with Broker(directory) as broker, broker.attach("view") as pool:
            array = pool["weight"].numpy()
            pool.sleep()
            print("asleep", flush=True)
            array.sum()
        """,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "asleep\n")
    with client.attach("view") as pool:
        assert pool["weight"].tobytes() == content("weight", 128)


@pytest.mark.parametrize("view", [False, True])
def test_what_sleeps_can_be_closed(client: Broker, name: str, view: bool) -> None:
    publish(client, name)
    with Broker(client.directory) as other:
        session = other.session
        pool = other.attach(name)
        array: Any = pool["weight"].numpy() if view else None
        pool.sleep()
        pool.close()
        assert (pool.closed, pool.asleep) == (True, False)
        for use in (pool.sleep, pool.wake):
            with pytest.raises(Invalid, match="is closed in this process; get another"):
                use()
    if view:
        assert session in [info.session for info in client.clients()]
    del array
    eventually(lambda: session not in [info.session for info in client.clients()], "the end of the session")


@pytest.mark.parametrize("gone", [False, True])
def test_a_version_that_was_retired_does_not_wake(client: Broker, name: str, gone: bool) -> None:
    publish(client, name)
    keeper = client.attach(name)
    with client.attach(name) as pool:
        pool.sleep()
        client.retire(name)
        if gone:
            keeper.close()
            eventually(lambda: not client.pools(), "the end of the version")
        with pytest.raises((Retired, NotFound), match=r"cannot wake: .*switch\(\) the pool to another version"):
            pool.wake()
        assert pool.asleep
    keeper.close()


def test_a_newer_version_does_not_take_the_place_of_one_that_sleeps(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool, client.attach(name):
        pool.sleep()
        publish(client, name, Layout.pack([("weight", "F32", (4, 8))]))
        pool.wake()  # somebody holds the superseded version
        assert pool.version == 1
        assert pool["bias"].tobytes() == content("bias", 16)


def test_what_cannot_sleep_says_why(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft:
        with pytest.raises(Invalid, match=r"draft of pool .* cannot sleep; seal it first"):
            draft.sleep()
        draft.seal()
    with client.attach(name) as pool, pool["weight"].hold():
        with pytest.raises(Invalid, match="cannot sleep while tensors of it are copied or held: weight"):
            pool.sleep()
        assert not pool.asleep
    publish_ipc = f"{name}-ipc"
    with client.create(publish_ipc, LAYOUT, share="ipc") as draft:
        draft.seal()
    with client.attach(publish_ipc) as pool:
        with pytest.raises(Unsupported, match="is shared as ipc and cannot sleep; create it with share='vmm'"):
            pool.sleep()
        pool.wake()


def test_a_refusal_that_somebody_keeps_holds_no_tensor(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        tensor = pool["weight"]
        pool.sleep()
        with pytest.raises(Invalid, match="is asleep") as kept:
            tensor.tobytes()
        pool.wake()
        pool.sleep()
        assert kept.tb is not None
        assert pool.asleep


def test_threads_may_let_a_pool_sleep_wake_it_and_read_it(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        refused: list[str] = []

        def work(number: int) -> None:
            for turn in range(12):
                try:
                    if (number + turn) % 3 == 0:
                        pool.sleep()
                    elif (number + turn) % 3 == 1:
                        pool.wake()
                    else:
                        assert pool["weight"].tobytes() == content("weight", 128)
                except Invalid as error:
                    refused.append(error.message)

        together(6, work)
        assert all("is asleep" in each or "cannot sleep while tensors" in each for each in refused)
        pool.wake()
        assert pool["weight"].tobytes() == content("weight", 128)
        assert leases(client, name) == 1
    eventually(lambda: leases(client, name) == 0, "the end of the leases")


def test_closing_while_another_thread_wakes_leaves_nothing(client: Broker, name: str) -> None:
    publish(client, name)
    refused: list[str] = []
    for _ in range(10):
        pool = client.attach(name)
        pool.sleep()

        def wake(pool: Pool = pool) -> None:
            try:
                pool.wake()
            except Invalid as error:
                refused.append(error.message)

        thread = threading.Thread(target=wake)
        thread.start()
        pool.close()
        thread.join()
        del pool, wake
    assert all("closed" in each for each in refused)
    eventually(lambda: leases(client, name) == 0, "the end of the leases")


def test_who_gives_up_waking_loses_no_lease_and_may_try_again(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as other, Broker(broker.directory) as client:
        publish(client, "pool")
        with client.attach("pool") as pool:
            pool.sleep()
            broker.process.send_signal(signal.SIGSTOP)
            try:
                with impatient(client, 0.2), pytest.raises(TimedOut):
                    pool.wake()
            finally:
                broker.process.send_signal(signal.SIGCONT)
            assert pool.asleep
            eventually(lambda: leases(other, "pool") == 0 and not client.requests.waiting(), "the lease to go back")
            pool.wake()
            assert leases(other, "pool") == 1


@pytest.mark.parametrize("at", range(1, 11))
def test_memory_that_cannot_be_mapped_again_stays_asleep(client: Broker, name: str, plan: Plan, at: int) -> None:
    publish(client, name, THREE)
    with client.attach(name) as pool:
        pool.sleep()
        before = regions()
        calls = ("cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess")
        plan.arm(calls, at, int(cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY))
        if at <= 9:
            with pytest.raises(OutOfMemory, match="waking pool"):
                pool.wake()
            assert pool.asleep
            assert regions() <= before
            eventually(lambda: leases(client, name) == 0, "the lease to go back")
        pool.wake()
        plan.arm((), 0, 0)
        assert pool["b"].tobytes() == content("b", 2 << 20)


def test_memory_that_cannot_be_unmapped_keeps_its_lease(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name, THREE)
    with client.attach(name) as pool:
        vacate, done = Reservation.vacate, []

        def failing(reservation: Reservation) -> None:
            if done:
                raise DriverError("cuMemUnmap", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
            done.append(reservation)
            vacate(reservation)

        with monkeypatch.context() as patch:
            patch.setattr(Reservation, "vacate", failing)
            with pytest.raises(DeviceFailure, match="unmapping pool"):
                pool.sleep()
        assert (pool.asleep, leases(client, name)) == (True, 1)
        pool.wake()
        eventually(lambda: leases(client, name) == 1, "the first lease to go back")
        assert pool["a"].tobytes() == content("a", 2 << 20)


@pytest.mark.parametrize(
    "terms", [{"plan": PLAN}, {"share": "multicast", "devices": (0, 1), "writable": True}], ids=str
)
def test_submitted_work_is_waited_for_once_per_device_before_anything_is_unmapped(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch, terms: dict[str, Any]
) -> None:
    publish(client, name, THREE, **{"devices": (0, 1), **terms})
    done: list[tuple[str, int]] = []
    homes: dict[int, int] = {}
    synchronize, vacate, reserve = PrimaryContext.synchronize, Reservation.vacate, Reservation.__init__

    def reserving(reservation: Reservation, context: PrimaryContext, nbytes: int) -> None:
        reserve(reservation, context, nbytes)
        homes[reservation.pointer] = context.device.index

    def waiting(context: PrimaryContext) -> None:
        done.append(("waited", context.device.index))
        synchronize(context)

    def vacating(reservation: Reservation) -> None:
        done.append(("unmapped", homes[reservation.pointer]))
        vacate(reservation)

    monkeypatch.setattr(Reservation, "__init__", reserving)
    with client.attach(name, device=0 if "share" in terms else None) as pool:
        monkeypatch.setattr(PrimaryContext, "synchronize", waiting)
        monkeypatch.setattr(Reservation, "vacate", vacating)
        for end in (pool.sleep, pool.close):
            pool.wake()
            done.clear()
            end()
            unmapped = [device for what, device in done if what == "unmapped"]
            assert len(unmapped) >= 3
            assert sorted(done[: -len(unmapped)]) == [("waited", device) for device in sorted({*unmapped})]


def test_a_sleeping_pool_is_of_no_use_in_a_child(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    done = run(
        lender,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        broker = Broker(directory)
        pool = broker.attach(sys.argv[2])
        pool.sleep()
        if (child := os.fork()) == 0:
            for call in (pool.wake, pool.sleep, pool.close):
                try:
                    call()
                except Exception as error:
                    print("belongs to process" in str(error), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        pool.wake()
        print(len(pool["weight"].tobytes()))
        broker.close()
        """,
        name,
    )
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["True"] * 3 + ["128"])


def test_a_pool_that_sleeps_stays_asleep_when_the_broker_is_gone(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as client:
        publish(client, "pool")
        one, two = client.attach("pool"), client.attach("pool")
        one.sleep()
        broker.kill()
        two.sleep()
        for pool in (one, two):
            with pytest.raises(CubrokerError, match="is gone"):
                pool.wake()
            assert pool.asleep
            pool.close()


def test_a_sleep_that_was_interrupted_is_finished_by_the_next_one_or_undone_by_a_wake(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(lease: LeaseHandle) -> None:
        raise KeyboardInterrupt

    publish(client, name)
    with client.attach(name) as pool:
        for finish in (pool.wake, pool.sleep):
            lease = pool.lease
            with monkeypatch.context() as patch:
                patch.setattr(LeaseHandle, "sleep", interrupted)  # with the memory asleep, and the lease not yet
                with pytest.raises(KeyboardInterrupt):
                    pool.sleep()
            assert (pool.asleep, leases(client, name)) == (True, 1)
            finish()
            assert pool.lease in (0, lease)
            assert leases(client, name) == (not pool.asleep)
        pool.wake()
        assert pool["weight"].tobytes() == content("weight", 128)
