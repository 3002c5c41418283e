"""Floods of dear requests, and how others fare beside them: ``python -m tests.integration.hostile.floods [KIND ...]``.

A flood is a process with several sessions, each of which sends as much as the broker takes, fetches no answer, and
acknowledges none. Beside it a client of the same user attaches and closes, and takes the time. Printed are the
latencies without and with the flood, and the memory and processor time of the broker, during it and after its end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

from cubroker.client import Broker
from cubroker.protocol import wire
from cubroker.protocol.layout import MAX_TENSORS, Layout, TensorSpec
from cubroker.protocol.messages import Attach, Create, Describe, ListPools, Look, Request
from tests import forkserver
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.unit.server.clients import ROOT, RawClient, session
from tests.unit.server.processes import gateway_of, resident

MIB = 1 << 20
SESSIONS = 8
POOLS = 1000
MARK = b"flood-00000000"
"""A name in the layouts that are sent: each gets another number, so that no two are the same."""

BIG = "big"
"""The pool with the largest layout that descriptions and attaches are asked of."""


# -- the flood, in a process of its own ----------------------------------------------------------------


def largest() -> bytes:
    """A layout of as many tensors as there may be, which takes about 9 MiB."""
    names = (f"{number:080d}" for number in range(1, MAX_TENSORS))
    return Layout.pack([(MARK.decode(), "U8", ()), *((name, "U8", (0,)) for name in names)]).encode()


def layouts() -> Iterator[Request]:
    """Creates that are checked and then refused, each with a layout of its own."""
    data, number = largest(), 0
    while True:
        number += 1
        marked = data.replace(MARK, b"%s%08d" % (MARK[:6], number))
        yield Create("flooded", marked, ("no-such-device",), "ipc", 0.0, None)


def each_time(body: Request) -> Callable[[], Iterator[Request]]:
    """The same request again and again."""

    def requests() -> Iterator[Request]:
        while True:
            yield body

    return requests


KINDS: dict[str, Callable[[], Iterator[Request]]] = {
    "layouts": layouts,
    "views": each_time(Look()),
    "lists": each_time(ListPools()),
    "descriptions": each_time(Describe(BIG, 0)),
    "attaches": each_time(Attach(BIG, 0, None, 0.0)),
}


def flood(directory: Path, kind: str) -> None:
    """Send until killed; says so once it has begun."""
    requests = KINDS[kind]()
    with ExitStack() as opened:
        clients = [opened.enter_context(session(directory)) for _ in range(SESSIONS)]
        poller = zmq.Poller()
        for client in clients:
            client.dealer.setsockopt(zmq.SNDHWM, 16)  # the rest would wait in this process alone
            poller.register(client.dealer, zmq.POLLOUT | zmq.POLLIN)
        ready = {client.dealer: client for client in clients}
        number = 0
        print("flooding", flush=True)
        while True:
            for dealer, events in poller.poll():
                if events & zmq.POLLIN:
                    dealer.recv()
                if events & zmq.POLLOUT:
                    number += 1
                    _send(ready[dealer], number, next(requests))


def _send(client: RawClient, number: int, body: Request) -> None:
    client.dealer.send(client.frame(number, 1, body), copy=False)


@contextmanager
def flooding(directory: Path, kind: str) -> Iterator[int]:
    """A flood for the length of a block, which kills it; the pid of its process."""
    command = [sys.executable, "-m", "tests.integration.hostile.floods", "--flood", str(directory), kind]
    preload = ("tests.integration.hostile.floods",)
    with forkserver.start(command, preload=preload, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "flooding\n"
            yield process.pid
        finally:
            process.kill()


# -- those beside it -----------------------------------------------------------------------------------


def furnish(directory: Path, pools: int) -> None:
    """Publish a small pool, one with a large layout, and have many others in the broker's lists."""
    with session(directory) as writer:
        writer.publish("small")
        writer.publish(BIG, wire.unpack(largest(), Layout))
    # Drafts end with their session, so those of the lists are published, and all are 256 bytes.
    with session(directory) as writer:
        for number in range(pools):
            writer.publish(f"listed-{number:04d}", Layout((TensorSpec("x", "U8", (1,), 0, 0),), (256,)))


def processor(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def settled(pid: int) -> None:
    """Wait until a process uses no processor time to speak of."""

    def rests() -> bool:
        before = processor(pid)
        time.sleep(0.5)
        return processor(pid) - before <= 0.02

    eventually(rests, f"process {pid} to come to rest")


class Latencies:
    """Seconds that each of many attaches took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def take(self, broker: Broker, until: float, pid: int) -> int:
        """Attach and close until a moment; return the most resident bytes of process ``pid`` meanwhile."""
        peak = 0
        while (began := time.monotonic()) < until:
            with broker.attach("small"):
                self.seconds.append(time.monotonic() - began)
            peak = max(peak, resident(pid))
            time.sleep(0.005)
        return peak

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        p50, p99 = (1000 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
        return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {1000 * ordered[-1]:.1f} ms of {len(ordered)}"


def measure(process: BrokerProcess, kind: str, rounds: int, seconds: float) -> None:
    """Print the figures of one kind of flood."""
    gateway = gateway_of(process.pid)
    with Broker(process.directory, timeout=PATIENCE) as broker:
        idle = Latencies()
        rest = idle.take(broker, time.monotonic() + seconds, process.pid)
        print(f"{kind}: before it {idle}; broker {rest / MIB:.0f} MiB, gateway {resident(gateway) / MIB:.0f}")
        beside = Latencies()
        for number in range(1, rounds + 1):
            with flooding(process.directory, kind):
                peak = beside.take(broker, time.monotonic() + seconds, process.pid)
                gateway = gateway_of(process.pid)
                print(f"  round {number}: broker {peak / MIB:.0f} MiB, gateway {resident(gateway) / MIB:.0f} MiB")
        print(f"  beside it {beside}")
        used = processor(process.pid)
        settled(process.pid)
        used = processor(process.pid) - used
        print(f"  after it: broker {resident(process.pid) / MIB:.0f} MiB, {used:.1f} s of processor", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure the kinds that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.integration.hostile.floods", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="all of them by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each round")
    options = parser.parse_args(arguments)
    for kind in options.kinds or KINDS:
        with serving("host:1@4GiB") as process:
            furnish(process.directory, POOLS)
            measure(process, kind, options.rounds, options.seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--flood"]:
        flood(Path(sys.argv[2]), sys.argv[3])
    else:
        main(sys.argv[1:])
