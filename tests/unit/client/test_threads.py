from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cubroker.client import Broker
from cubroker.protocol.errors import Exists, NotFound, Retired, TimedOut
from cubroker.protocol.messages import Attach, Attached, Close, Done
from tests.brokers import PATIENCE, BrokerProcess
from tests.unit.client.conftest import content, publish
from tests.unit.client.scripts import run

pytestmark = pytest.mark.usefixtures("share")


def together(count: int, work: Callable[[int], object]) -> None:
    """Run ``work(number)`` in ``count`` threads and raise what any of them raised."""
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))


def test_threads_share_a_broker(client: Broker, name: str) -> None:
    publish(client, name, devices=(0, 1))

    def work(number: int) -> None:
        for _ in range(10):
            with client.attach(name, device=number % 2) as pool:
                assert pool["weight"].tobytes() == content("weight", 128)
                array = pool["bias"].numpy()
            assert array.tobytes() == content("bias", 16)
            assert name in [info.name for info in client.pools()]

    together(8, work)


def test_threads_publish_read_and_retire_one_pool(client: Broker, name: str) -> None:
    publish(client, name)

    def work(number: int) -> None:
        chance = random.Random(number)
        for _ in range(8):
            try:
                if chance.random() < 0.3:
                    publish(client, name)
                elif chance.random() < 0.2:
                    client.retire(name)
                else:
                    with client.attach(name, wait=chance.choice([0, 0.05])) as pool:
                        assert pool["weight"].tobytes() == content("weight", 128)
            except (Exists, NotFound, Retired, TimedOut):
                pass  # what another thread did may stand in the way, and in no other way

    together(6, work)


def test_requests_may_be_pipelined(client: Broker, name: str) -> None:
    publish(client, name)
    attached = [client.requests.submit(Attach(name, 0, None, 0.0)) for _ in range(200)]
    leases = set()
    for future in attached:
        reply = future.result(60)
        assert isinstance(reply, Attached)
        leases.add(reply.lease)
    assert len(leases) == 200
    closed = [client.requests.submit(Close(lease)) for lease in leases]
    assert {type(future.result(60)) for future in closed} == {Done}


@pytest.mark.slow
def test_threads_may_open_brokers_as_the_first_thing_that_a_process_does(lender: BrokerProcess) -> None:
    program = """
    import faulthandler
    faulthandler.enable()

    def first():
        together.wait()
        with Broker(directory) as broker:
            seen.append(len(broker.devices()))

    together, seen = threading.Barrier(8), []
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(seen)
    """
    for _ in range(5):
        done = run(lender, program)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{[2] * 8}\n", "")


def test_nothing_is_left_to_be_built_for_the_first_answer_of_a_kind(lender: BrokerProcess) -> None:
    program = """
    import os, sys
    import msgspec

    def counted(*shape):
        built.append(shape)
        return decoder(*shape)

    built, decoder, msgspec.msgpack.Decoder = [], msgspec.msgpack.Decoder, counted
    from cubroker.client import Broker
    from cubroker.protocol import Layout, messages, wire
    from tests.unit.client import shares

    shares.by_default(os.environ.get(shares.VARIABLE, shares.DEFAULT))
    wire.prepare(messages.Request)  # which no client reads
    assert built.pop() == (messages.Request,)
    del built[:]
    with Broker(sys.argv[1]) as broker:
        with broker.watch("first") as changes, broker.create("first", Layout.pack([("a", "U8", (4,))])) as draft:
            draft["a"].copy_from_bytes(bytes(4))
            draft.seal()
            next(changes)
        with broker.attach("first") as pool:
            pool["a"].tobytes()
        broker.pools(), broker.clients(), broker.devices(), broker.retire("first")
    print(built)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(lender.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
