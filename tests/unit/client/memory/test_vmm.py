"""What is special about pools that are shared by descriptor."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
from functools import partial

import pytest

from cubroker.client import Broker
from cubroker.client.transport import fd_receiver
from cubroker.client.transport.fd_receiver import FdReceiver, due
from cubroker.driver import DriverError
from cubroker.protocol import CubrokerError, Layout
from cubroker.protocol.errors import DeviceFailure, Unavailable, Unsupported
from cubroker.protocol.messages import (
    DESCRIPTOR,
    Attach,
    Attached,
    Close,
    Created,
    Descriptors,
    Done,
    ListPools,
    ReplicaHandles,
)
from tests.brokers import BrokerProcess, eventually
from tests.unit.client.conftest import content, leases, publish, received, session_of
from tests.unit.client.scripts import run
from tests.unit.client.test_faults import SCARCE, regions
from tests.unit.server.processes import all_closed, files

pytestmark = pytest.mark.usefixtures("vmm")

MANY = Layout.pack([(f"t{number}", "U8", (300,)) for number in range(20)], slab=512)
"""Allocations for more than one notice."""


def test_memory_of_an_unknown_share_kind_is_refused_and_given_back(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name, MANY)
    before = files(os.getpid())
    with monkeypatch.context() as older:
        older.setattr(fd_receiver, "SHARES", ("ipc",))
        with pytest.raises(Unsupported, match=f"pool '{name}' is shared as 'vmm', and this client knows ipc"):
            client.attach(name)
    eventually(lambda: not leases(client, name), "the lease given back")
    all_closed(os.getpid(), before)
    client.attach(name).close()


def test_many_allocations_come_in_order_and_no_descriptor_stays(client: Broker, name: str) -> None:
    client.pools()  # its own connection is there now
    before = files(os.getpid())
    publish(client, name, MANY, devices=(1, 0))
    for device in (0, 1):
        with client.attach(name, device=device) as pool:
            assert (len(pool.allocation_views), pool.share) == (20, "vmm")
            assert pool.device == pool.memory_device == client.driver.devices[device]
            assert all(tensor.tobytes() == content(each, 300) for each, tensor in pool.items())
            assert session_of(client).receiver.empty()
    with client.create(name, Layout.pack([("a", "U8", (300,))])) as draft:
        assert draft["a"].tobytes() == bytes(300)
    all_closed(os.getpid(), before)


def test_what_a_reader_writes_is_refused_by_the_driver(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            pool.context.write(pool["weight"].pointer, bytes(128))
        assert pool["weight"].tobytes() == content("weight", 128)


def test_a_reader_that_writes_dies_alone(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        done = run(
            lender,
            """
            import ctypes
            with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
                ctypes.memset(pool["weight"].pointer, 1, 128)
            """,
            name,
        )
        assert done.returncode == -signal.SIGSEGV
        eventually(lambda: leases(client, name) == 1, "the end of its lease")
        assert pool["weight"].tobytes() == content("weight", 128)


def test_a_draft_can_be_written_at_its_address(client: Broker, name: str) -> None:
    with client.create(name, Layout.pack([("a", "U8", (4,))])) as draft:
        ctypes.memset(draft["a"].pointer, 7, 4)
        draft.seal()
    with client.attach(name) as pool:
        assert pool["a"].tobytes() == b"\7\7\7\7"


def test_descriptors_of_a_lease_that_nobody_maps_are_closed(client: Broker, name: str) -> None:
    publish(client, name, MANY)
    replies = [client.requests.submit(Attach(name, 0, None, 0.0)) for _ in range(5)]
    for future in replies:
        reply = future.result(60)
        assert isinstance(reply, Attached)
        client.requests.submit(Close(reply.lease)).result(60)
    eventually(lambda: session_of(client).receiver.empty(), "the descriptors to be closed")


def test_a_forked_child_closes_the_descriptors_that_wait(client: Broker, lender: BrokerProcess, name: str) -> None:
    done = run(
        lender,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        import socket
        from cubroker.client.transport.fd_receiver import FdReceiver
        from cubroker.protocol.messages import Descriptors
        from tests.unit.client.conftest import session_of
        broker = Broker(directory)
        inbox = session_of(broker).receiver  # where descriptors wait that no lease has asked for
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipe = os.pipe()
        socket.send_fds(theirs, [b"x"], [pipe[1]])
        os.close(pipe[1])
        data, (descriptor,) = inbox.receive(ours)
        inbox.put(Descriptors(10**6, 1), [descriptor])
        if (child := os.fork()) == 0:
            print(os.path.lexists(f"/proc/self/fd/{descriptor}"), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(os.path.lexists(f"/proc/self/fd/{descriptor}"), os.get_inheritable(descriptor))
        broker.close()
        print(os.read(pipe[0], 1) == b"")  # the last copy of the other end is closed
        for end in (ours, theirs):
            end.close()
        os.close(pipe[0])
        """,
    )
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["False", "True", "False", "True"])


def test_a_process_without_room_for_descriptors_is_told_so_and_keeps_no_lease(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    publish(client, name, MANY)
    done = run(
        lender,
        SCARCE
        + """
with Broker(directory) as broker:
    broker.attach(sys.argv[2]).close()
    print(json.dumps([left(free, lambda: broker.attach(sys.argv[2])) for free in (0, 1, 15, 16, 19, 64)]))
    print(broker.pools()[0].leases, [len(numbers()), threading.active_count()])
""",
        name,
    )
    assert done.returncode == 0, done.stderr
    attempts, rest = done.stdout.splitlines()
    told = json.loads(attempts)
    assert [code for code, _, _ in told] == [DeviceFailure.code] * 5 + [""], told
    shortage = f"no room for the {len(MANY.allocations)} descriptors"
    assert all(shortage in message and "ulimit -n" in message for _, message, _ in told[:5])
    leased, _, counts = rest.partition(" ")
    assert leased == "0"
    assert all(after == json.loads(counts) for _, _, after in told)


def test_attaching_twice_maps_twice_and_closing_unmaps(client: Broker, name: str) -> None:
    publish(client, name)
    before = regions()
    one, two = client.attach(name), client.attach(name)
    assert one["weight"].pointer != two["weight"].pointer
    one.close()
    assert two["weight"].tobytes() == content("weight", 128)
    two.close()
    gc.collect()
    assert regions() <= before


def test_descriptors_may_come_before_the_answer_or_after_it_and_in_parts(client: Broker) -> None:
    inbox = FdReceiver()
    came: list[object] = []

    made = partial(received, inbox)
    early, late, more, whole, never, wrong = made(2), made(1), made(1), made(2), made(1), made(1)
    again, stale = made(2), made(3)
    inbox.put(Descriptors(1, 2), early)
    inbox.expect(1, 3, came.append)
    assert came == []
    inbox.put(Descriptors(1, 2), again)  # from a broker that was started again
    inbox.put(Descriptors(1, 1, 2), late)
    assert came == [(*early, *late)]
    inbox.expect(2, 1, came.append)
    inbox.put(Descriptors(2, 1), more)
    assert came[1:] == [tuple(more)]
    reply = Created(3, "x", 1, "vmm", (ReplicaHandles("d", (DESCRIPTOR, b"")), ReplicaHandles("e", (b"", DESCRIPTOR))))
    assert due(reply) == 2
    inbox.settled(ListPools(), reply)  # nobody wants them
    inbox.put(Descriptors(3, 2), [*never, *wrong])
    inbox.put(Descriptors(7, 2), whole)
    inbox.expect(7, 2, came.append)
    ours = Created(7, "x", 1, "vmm", reply.replicas)
    inbox.settled(ListPools(), ours)  # they were there before it, and are with who wants them
    assert came.pop() == tuple(whole)
    inbox.put(Descriptors(7, 1), stale[:1])
    inbox.settled(Close(7), Done())
    inbox.put(Descriptors(7, 1), stale[1:2])  # was there to be read when the lease ended
    inbox.drained()
    inbox.put(Descriptors(7, 1), stale[2:])  # could only be another lease
    inbox.expect(7, 1, came.append)
    assert came.pop() == tuple(stale[2:])
    inbox.expect(4, 2, came.append)
    inbox.put(Descriptors(4, 1), lost := made(1))
    inbox.put(Descriptors(5, 1), lost[:0])  # the kernel had none to give
    inbox.expect(5, 1, came.append)
    inbox.put(Descriptors(6, 1), unclaimed := made(1))
    inbox.fail(Unavailable("it is over"))
    assert [type(each) for each in came[2:]] == [DeviceFailure, Unavailable]
    assert all(isinstance(each, CubrokerError) for each in came[2:])
    assert not [
        each
        for each in (*never, *wrong, *lost, *unclaimed, *again, *stale[:2])
        if os.path.lexists(f"/proc/self/fd/{each}")
    ]
    inbox.close([*early, *late, *more, *whole, *stale[2:]])
    assert inbox.empty()
