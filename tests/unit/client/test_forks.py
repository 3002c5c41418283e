from __future__ import annotations

import os
import signal

import pytest

from cubroker.client import Broker
from tests.brokers import BrokerProcess, eventually
from tests.unit.client.conftest import leases, publish
from tests.unit.client.scripts import run

pytestmark = pytest.mark.usefixtures("share")

FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork with threads; that is what is tested

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(pid, 0)

def refused(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, "belongs to process" in str(error))
    else:
        print("nothing was raised")

name = sys.argv[2]
"""


def forking(lender: BrokerProcess, name: str, program: str) -> list[str]:
    """Run a program that forks, which must end well and without a warning; return the lines that it printed."""
    done = run(lender, FORK + program, name)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_forked_child_gets_an_error_from_every_call(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    said = forking(
        lender,
        name,
        """
broker = Broker(directory)
pool = broker.attach(name)
tensor = pool["weight"]
draft = broker.create("fork", pool.layout)
watch = broker.watch(name)
calls = [
    lambda: broker.attach(name), lambda: broker.create("x", pool.layout), broker.pools, broker.clients,
    broker.devices, lambda: broker.describe(name), lambda: broker.retire(name), lambda: broker.watch(name),
    broker.close, lambda: broker.driver, pool.close, lambda: pool["weight"], tensor.numpy, tensor.tobytes,
    lambda: tensor.pointer, lambda: tensor.__dlpack__(), draft.seal, draft.close, lambda: next(watch), watch.close,
]
forked(lambda: [refused(call) for call in calls])
draft["weight"].copy_from_bytes(bytes(128))
draft.seal()
print(len(calls), sorted(info.name for info in broker.pools()), pool["weight"].tobytes() == tensor.tobytes())
broker.retire("fork")
broker.close()
""",
    )
    *refusals, last = said
    assert refusals == ["Invalid True"] * 20
    assert last == f"20 ['fork', '{name}'] True"


def test_nothing_that_a_child_drops_or_leaves_reaches_the_broker(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    publish(client, name)
    said = forking(
        lender,
        name,
        """
import gc
held = {"broker": Broker(directory)}
held["pool"] = held["broker"].attach(name)
held["watch"] = held["broker"].watch(name)
held["array"] = held["pool"]["weight"].numpy()

def drop():
    with held["broker"], held["pool"], held["watch"]:  # as a child does that leaves its parent's blocks
        pass
    held.clear()
    gc.collect()
    print("dropped")

forked(drop)
pid = os.fork()
if pid == 0:
    sys.exit()  # with everything open, and the exit hooks run
print(os.waitpid(pid, 0)[1])
print([info.leases for info in held["broker"].pools() if info.name == name], held["array"].shape)
held["pool"].close()
del held["array"]
held["broker"].close()
""",
    )
    assert said == ["dropped", "0", "[1] (4, 8)"]


def test_a_child_of_an_event_loop_leaves_its_parent_s_blocks(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    said = forking(
        lender,
        name,
        """
import asyncio
from cubroker import aio

async def main():
    async with aio.Broker(directory) as broker, await broker.attach(name) as pool, await broker.watch(name) as watch:
        async with await broker.lock(name) as lock:
            pid = os.fork()
            if pid == 0:  # without the end of its loop, which shares the parent's epoll
                async with broker, pool, watch, lock:
                    pass
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            print([info.leases for info in await broker.pools() if info.name == name], lock.lost, await watch.next())

asyncio.run(main())
""",
    )
    assert said == ["7", "[1]  1"]


def test_a_child_may_open_a_broker_of_its_own(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    said = forking(
        lender,
        name,
        """
with Broker(directory) as broker:
    def work():
        with Broker(directory) as own, own.attach(name) as pool:
            print(len(pool["weight"].tobytes()), own.session != broker.session)

    forked(work)
    with broker.attach(name) as pool:
        def late():
            with Broker(directory) as own:
                print(len(own.pools()))
                try:
                    own.attach(name)
                except Exception as error:
                    print(type(error).__name__, str(error).rpartition(";")[2])

        forked(late)
        print(len(pool["weight"].tobytes()))
""",
    )
    assert said == [
        "128 True",
        "1",
        "Unavailable  it was forked from one that uses them: start it by spawn or forkserver",
        "128",
    ]


def test_a_parent_that_dies_is_noticed_though_its_child_lives(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    done = run(
        lender,
        FORK
        + """
broker = Broker(directory)
pool = broker.attach(sys.argv[2])
if os.fork() == 0:
    os.closerange(0, 3)
    signal.pause()
    os._exit(0)
child = int(open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()[0])
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        name,
    )
    child = int(done.stdout)
    try:
        eventually(lambda: leases(client, name) == 0, "the end of the lease")
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_session_ends_though_a_child_was_forked_while_it_began(client: Broker, lender: BrokerProcess) -> None:
    done = run(
        lender,
        FORK
        + """
from tests.brokers import eventually
made, (reading, writing) = [], os.pipe()
thread = threading.Thread(target=lambda: made.append(Broker(directory)))
os.kill(int(sys.argv[2]), signal.SIGSTOP)
try:
    before = len(os.listdir("/proc/self/fd"))
    thread.start()
    eventually(lambda: len(os.listdir("/proc/self/fd")) > before, "the thread to connect")
    if os.fork() == 0:  # until the parent closes the pipe, or ends
        os.close(writing)
        os._exit(len(os.read(reading, 1)))
finally:
    os.kill(int(sys.argv[2]), signal.SIGCONT)
thread.join()
(broker,) = made
broker.close()
with Broker(directory) as other:
    eventually(lambda: broker.session not in [info.session for info in other.clients()], "the end of the session")
os.close(writing)
print(os.wait()[1])
""",
        str(lender.pid),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_open_brokers_of_their_own(
    client: Broker, lender: BrokerProcess, name: str, method: str
) -> None:
    publish(client, name)
    done = run(
        lender,
        """
        import multiprocessing, warnings
        from tests.unit.client.workers import total
        warnings.simplefilter("ignore", DeprecationWarning)
        with Broker(directory) as broker:
            context = multiprocessing.get_context(sys.argv[3])
            with context.Pool(2) as workers:
                found = workers.starmap(total, [(directory, sys.argv[2])] * 3)
                workers.close()
                workers.join()
            with broker.attach(sys.argv[2]) as pool:
                print(found == [sum(pool["weight"].tobytes())] * 3)
        """,
        name,
        method,
        measured=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")
    eventually(lambda: leases(client, name) == 0, "the end of the leases")
