"""Stop some of many clients: ``python -m tests.crash.soak stopped_clients --clients 100 --stopped 10 --seconds 60``.

The others go on attaching and closing, with the same latency as before; nothing of the stopped is reclaimed; and when
they are continued they have their leases and the right bytes, and finish what they were at: one was filling a
draft, one waited for a publication, and some were stopped in the middle of a message or of a mapping.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import get_ident

from cubroker.client import Broker
from tests.brokers import eventually, serving
from tests.crash.consistency import settles
from tests.crash.content import LAYOUT, check, content, fill
from tests.crash.kills import hooks
from tests.crash.worker_pool import Channel, Worker, WorkerPool

HERE = "tests.crash.soak.stopped_clients"
STEADY, HELD, DRAFTED, AWAITED = "steady", "held", "drafted", "awaited"
"""Pools: one that the steady attach to, one that all hold, one that is being filled, one that is waited for."""

HOLDING = ("received Attach", "opening 1", "opening 2", "reading", "unmapping 1", "unmapping 2", "sending Close")
MIDDLES = ("sending Attach", "sent Attach", *HOLDING, "sent Close", "received Close")
"""Where those stop by themselves that stop in the middle of something; they have a lease at those that are HOLDING."""


# -- the clients, in processes of their own ---------------------------------------------------------


def attend(line: Channel, directory: str, pause: float) -> None:
    """Hold a version, and attach to another and close it now and then; answer what the test asks in between."""
    seconds: list[float] = []
    chance = random.Random(os.getpid())
    with Broker(directory) as broker:
        held = broker.attach(HELD)
        line.say("ready")
        while True:
            if not select.select([line], [], [], chance.uniform(0, 2 * pause))[0]:
                seconds.append(_attach_and_close(broker))
                continue
            match line.hear():
                case "report":
                    line.say(json.dumps(seconds))
                    seconds.clear()
                case "switch":
                    again = broker.attach(HELD)
                    held.close()
                    held = again
                    check(held)
                    line.say(f"version {held.version}")
                case "check":
                    check(held)
                    line.say(f"version {held.version}")


def _attach_and_close(broker: Broker) -> float:
    began = time.monotonic()
    pool = broker.attach(STEADY)
    attached = time.monotonic()
    check(pool)
    read = time.monotonic()
    pool.close()
    return time.monotonic() - read + attached - began


def write(line: Channel, directory: str) -> None:
    """Fill half of a draft, and the rest when told to."""
    with Broker(directory) as broker, broker.create(DRAFTED, LAYOUT) as draft:
        draft["first"].copy_from(content(DRAFTED, draft.version, "first"))
        line.say("ready")
        line.hear()
        draft["second"].copy_from(content(DRAFTED, draft.version, "second"))
        line.say(f"sealed {draft.seal()}")


def wait(line: Channel, directory: str) -> None:
    """Wait for a publication."""
    with Broker(directory) as broker:
        line.say("ready")
        with broker.attach(AWAITED, wait=3600) as pool:
            check(pool)
            line.say("right")
            line.hear()


def stop_in_the_middle(line: Channel, directory: str, label: str) -> None:
    """Attach, read and close, and stop once, by itself, at ``label``."""

    def reach(here: str) -> None:
        nonlocal label
        if here == label:
            label = ""
            line.say("stopping")
            signal.pthread_kill(get_ident(), signal.SIGSTOP)  # this thread does not get any further

    hooks.install(reach)
    with Broker(directory) as broker, broker.attach(STEADY) as pool:
        check(pool)
    line.say("finished")


# -- the test ---------------------------------------------------------------------------------------


class Figures:
    """Seconds of attach and close together, of the clients that are never stopped, without and with stopped ones."""

    def __init__(self, without: list[float], with_stopped: list[float]) -> None:
        self.without = without
        self.with_stopped = with_stopped

    def __str__(self) -> str:
        return f"attach and close: {_tell(self.without)} with all at work; {_tell(self.with_stopped)} with some stopped"


def stops(clients: int, stopped: int, seconds: float, pause: float) -> Figures:
    """Have ``clients`` clients at work for ``seconds``, and again with ``stopped`` of them stopped."""
    with (
        serving("host:1@64MiB") as process,
        WorkerPool(HERE) as worker_pool,
        Broker(process.directory) as observer,
        ExitStack() as stack,
    ):
        directory = str(process.directory)

        def start(function: str, *args: str | float) -> Worker:
            return stack.enter_context(worker_pool.worker(f"{HERE}:{function}", directory, *args))

        publish(observer, STEADY)
        publish(observer, HELD)
        crowd = [start("attend", pause) for _ in range(clients)]
        writer, waiter = start("write"), start("wait")
        for worker in (*crowd, writer, waiter):
            worker.expect("ready")
        frozen, steady = crowd[:stopped], crowd[stopped:]
        without = work(steady, seconds)
        middles = [start("stop_in_the_middle", label) for label in MIDDLES]
        for worker in middles:
            worker.expect("stopping")
        asleep = [*frozen, writer, waiter]
        for worker in asleep:
            worker.signal(signal.SIGSTOP)
        for worker in (*asleep, *middles):
            eventually(partial(_is_stopped, worker.pid), "the process to stop")
        move_on(observer, steady)
        before = held(observer, [*asleep, *middles])
        with_stopped = work(steady, seconds)
        assert held(observer, [*asleep, *middles]) == before, "something of the stopped was reclaimed"
        assert before[:stopped] == [("connected", [(HELD, 1)])] * stopped, before
        halfway = dict(zip(MIDDLES, held(observer, middles, but=""), strict=True))
        assert all(halfway[label] == ("connected", [(STEADY, 1)]) for label in HOLDING), halfway
        for worker in (*asleep, *middles):
            worker.signal(signal.SIGCONT)
        carry_on(frozen, writer, waiter, middles)
        for worker in (writer, waiter, *middles):
            worker.wait()
        settles(observer, [os.getpid(), *(worker.pid for worker in crowd)])
        assert [pool.version for pool in observer.pools() if pool.name == HELD] == [2], "version 1 is still there"
        return Figures(without, with_stopped)


def publish(broker: Broker, name: str) -> None:
    """Publish a version, which is opened and unmapped by handle: workers stop at these points."""
    with broker.create(name, LAYOUT, share="ipc") as draft:
        fill(draft)
        draft.seal()


def work(steady: list[Worker], seconds: float) -> list[float]:
    """Let the steady work for a while, and return how long each attach and close took."""
    report(steady)
    select.select([], [], [], seconds)  # the time itself is what is asked for
    taken = report(steady)
    # However short the while: everybody goes on.
    for worker, own in zip(steady, taken, strict=True):
        while not own:
            own += report([worker])[0]
    return [second for own in taken for second in own]


def report(steady: list[Worker]) -> list[list[float]]:
    """Return what each has measured since the last time."""
    for worker in steady:
        worker.tell("report")
    return [json.loads(worker.hear()) for worker in steady]


def move_on(observer: Broker, steady: list[Worker]) -> None:
    """Publish what is held and what is awaited; the steady take the new version, the stopped keep the old one."""
    publish(observer, HELD)
    publish(observer, AWAITED)
    for worker in steady:
        worker.tell("switch")
    for worker in steady:
        worker.expect("version 2")


def held(observer: Broker, workers: list[Worker], but: str = STEADY) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return the state and the leases of each session, but for those on the pool that they attach to and close."""
    sessions = {client.pid: client for client in observer.clients()}
    return [
        (
            sessions[worker.pid].state,
            [(lease.pool, lease.version) for lease in sessions[worker.pid].leases if lease.pool != but],
        )
        for worker in workers
    ]


def carry_on(frozen: list[Worker], writer: Worker, waiter: Worker, middles: list[Worker]) -> None:
    """Have those that were stopped show that they have what they had, and finish."""
    for worker in frozen:
        worker.tell("check")
        worker.expect("version 1")
        worker.tell("switch")
        worker.expect("version 2")
    writer.tell("go on")
    writer.expect("sealed 1")
    waiter.expect("right")
    waiter.tell("go on")
    for worker in middles:
        worker.expect("finished")


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _tell(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    shares = (f"p{share:g} {1e3 * ordered[int(len(ordered) * share / 100)]:.2f} ms" for share in (50, 99))
    return f"{', '.join(shares)}, most {1e3 * ordered[-1]:.1f} ms of {len(ordered)}"


def main(argv: Sequence[str]) -> int:
    """Return 0; what is found ends it with a traceback."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak stopped_clients", description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--stopped", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long they are stopped")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two attaches of a client, on average")
    options = parser.parse_args(argv)
    figures = stops(options.clients, options.stopped, options.seconds, options.pause)
    print(f"{options.stopped} of {options.clients} clients, a writer, a waiter and {len(MIDDLES)} in the middle of")
    print(f"something, stopped for {options.seconds:g} s: nothing reclaimed, all carried on")
    print(figures)
    return 0
