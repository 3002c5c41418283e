"""Scratch pools on a GPU: what one process copies asynchronously, another copies out behind its event."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.driver import Context, Stream
from cubroker.protocol import Layout
from cubroker.protocol.errors import TimedOut, Unavailable
from tests.brokers import PATIENCE, BrokerProcess
from tests.gpu.sharing import SHARES, gpu_broker

NBYTES = 64 << 20
"""A copy of so much takes over a millisecond: who did not wait for it would see it half done."""

ROUNDS = 100
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu() -> Iterator[tuple[BrokerProcess, Broker]]:
    with gpu_broker() as both:
        yield both


def produce(directory: str, name: str) -> None:
    """Fill the pool once per line of input, by a copy that is still under way when it is told; print generations."""
    with Broker(directory) as broker, broker.attach(name) as pool, pool.event("full") as full:
        empty = pool.open_event("empty", wait=PATIENCE)
        context = pool.context
        print("made", flush=True)
        with context.stream() as stream, context.pin(2 * NBYTES) as pinned:
            for line in sys.stdin:
                value = int(line)
                half = value % 2 * NBYTES  # the copy before this one may still read the other half
                pinned.view[half : half + NBYTES] = bytes([value % 251]) * NBYTES
                if value > 1:
                    empty.wait(stream, after=value - 2)
                stream.copy_in(pool["x"].pointer, pinned.pointer + half, NBYTES)
                print(full.record(stream), flush=True)


@contextmanager
def producing(broker: BrokerProcess, name: str) -> Iterator[subprocess.Popen[str]]:
    program = "import sys; from tests.gpu.test_events import produce; produce(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(broker.directory), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], value: int) -> None:
    assert process.stdin is not None
    print(value, file=process.stdin, flush=True)


def scratch(broker: Broker, name: str, share: str) -> None:
    with broker.create(name, Layout.pack([("x", "U8", (NBYTES,))]), share=share, writable=True) as draft:
        draft.seal()


def copied(context: Context, stream: Stream, source: int, target: int) -> bytes:
    """Copy within the device behind whatever the stream waits for, and read the first and last bytes of the copy."""
    stream.copy(target, source, NBYTES)
    stream.synchronize()
    return context.read(target, 1) + context.read(target + NBYTES - 1, 1)


@SHARES
def test_bytes_are_right_over_many_generations(gpu: tuple[BrokerProcess, Broker], share: str) -> None:
    process, broker = gpu
    scratch(broker, "scratch", share)
    with (
        broker.attach("scratch") as pool,
        pool.event("empty") as empty,
        producing(process, "scratch") as producer,
        pool.open_event("full", wait=PATIENCE) as full,
        pool.context.stream() as stream,
    ):
        assert heard(producer) == "made"
        target = pool.context.allocate(NBYTES)
        for value in range(1, ROUNDS + 1):
            tell(producer, value)
            assert full.wait(stream, timeout=PATIENCE) == value
            assert copied(pool.context, stream, pool["x"].pointer, target) == bytes([value % 251]) * 2
            assert empty.record(stream) == value
            assert heard(producer) == str(value)
        whole = pool.context.read(target, NBYTES)
        assert whole == bytes([ROUNDS % 251]) * NBYTES
        assert full.wait(after=0) == ROUNDS
        pool.context.free(target)
    broker.retire("scratch")


@SHARES
def test_a_killed_producer_wakes_its_consumer_and_a_stopped_one_does_not(
    gpu: tuple[BrokerProcess, Broker], share: str
) -> None:
    process, broker = gpu
    scratch(broker, "scratch", share)
    with (
        broker.attach("scratch") as pool,
        pool.event("empty"),
        producing(process, "scratch") as producer,
        pool.open_event("full", wait=PATIENCE) as full,
    ):
        assert heard(producer) == "made"
        tell(producer, 1)
        assert full.wait(timeout=PATIENCE) == 1
        assert heard(producer) == "1"
        os.kill(producer.pid, signal.SIGSTOP)
        with pytest.raises(TimedOut, match="is at generation 1"):
            full.wait(timeout=0.5)
        producer.kill()
        with pytest.raises(Unavailable, match=rf"ended at generation 1: session \d+ \(pid {producer.pid}.* has ended"):
            full.wait(timeout=PATIENCE)
        assert pool.context.read(pool["x"].pointer, 1) == b"\1", "what was done stays, in memory that the broker owns"
    broker.retire("scratch")


ASKED = """
import json, sys, time
from tests.gpu.test_events import NBYTES
from cubroker.client import Broker
from cubroker.driver import Context
opened, once = [], Context.open_event
Context.open_event = lambda self, handle: opened.append(once(self, handle)) or opened[-1]
with Broker(sys.argv[1]) as broker, broker.attach(sys.argv[2]) as pool, pool.open_event("full", wait=60) as full:
    full.wait(timeout=60)
    print("waited", flush=True)
    sys.stdin.readline()
    def outcome(use):
        try:
            return repr(use())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    (event,) = opened
    with pool.context.stream() as stream:
        found = {"query": outcome(event.done), "stream": outcome(lambda: event.hold(stream.handle))}
        found["stream runs"] = outcome(stream.synchronize)
    print(json.dumps(found), flush=True)
"""


def test_what_the_driver_does_with_an_event_whose_maker_is_dead_is_written_down(
    gpu: tuple[BrokerProcess, Broker], record_property: Callable[[str, object], None]
) -> None:
    """Nothing of it is promised; what is found here goes into the report, and must not hang a process that can end."""
    process, broker = gpu
    scratch(broker, "scratch", "ipc")
    with broker.attach("scratch") as pool, pool.event("empty"), producing(process, "scratch") as producer:
        assert heard(producer) == "made"
        command = [sys.executable, "-c", ASKED, str(process.directory), "scratch"]
        asked = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            tell(producer, 1)
            assert heard(producer) == "1"
            assert heard(asked) == "waited"
            producer.kill()
            producer.wait(PATIENCE)
            out, _ = asked.communicate("go on\n", timeout=PATIENCE)
        finally:
            asked.kill()
            asked.communicate(timeout=PATIENCE)
        for use, outcome in json.loads(out.splitlines()[-1]).items():
            record_property(use, outcome)
            print(f"{use}: {outcome}")
    broker.retire("scratch")
