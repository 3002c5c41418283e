"""Many clients at once: ``python -m tests.crash.soak load --clients 1000 --leases 100 --workers 64``.

All clients connect at the same moment, in a few processes; they attach, until together they hold ``clients`` times
``leases`` leases; then the workers, a process each, attach at the same moment, map and read. At the end half of the
clients give their leases back and the other half are killed. No request may fail.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import zmq

from cubroker.client import Broker
from cubroker.protocol import wire
from cubroker.protocol.messages import (
    VERSIONS,
    Attach,
    Attached,
    Close,
    Done,
    Envelope,
    Greeting,
    Hello,
    Request,
    Welcome,
)
from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from cubroker.protocol.wire import authentication
from tests.brokers import eventually, serving
from tests.crash.content import LAYOUT, check, fill
from tests.crash.worker_pool import Channel, Worker, WorkerPool
from tests.unit.server.processes import all_closed, files, resident

HERE = "tests.crash.soak.load"
POOL = "pool"
PIPELINE = 10
"""Requests that a client of the crowd has under way at once."""

HELLO = wire.pack(Hello("cubroker", VERSIONS))


# -- the crowd: many light clients in a process -----------------------------------------------------


class Light:
    """A session, and nothing mapped."""

    def __init__(self, directory: str) -> None:
        self._began = time.monotonic()
        self._directory = Path(directory)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(self._directory / SESSION_SOCKET))
        self._connection.send(HELLO)
        self._last = 0
        self.leases: list[int] = []

    def welcome(self) -> float:
        """Wait to be let in; returns the seconds since it was asked for."""
        welcome = wire.unpack(self._connection.recv(1 << 16), Greeting)
        assert isinstance(welcome, Welcome), welcome
        self._authentication = authentication(welcome.version, welcome.session, welcome.secret)
        return time.monotonic() - self._began

    def dial(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.connect(f"ipc://{self._directory / REQUEST_SOCKET}")

    def ask(self, bodies: Sequence[Request]) -> None:
        """Send requests, without waiting for their answers."""
        self._began = time.monotonic()
        oldest = self._last + 1
        for body in bodies:
            self._last += 1
            envelope = Envelope(self._authentication.secret, self._last, oldest, body)
            self._dealer.send(self._authentication.request(envelope))

    def answer(self, kind: type[Attached | Done]) -> float:
        """Take the next answer; returns the seconds since the requests were sent."""
        answer = self._authentication.read(self._dealer.recv())
        assert answer
        body = answer.body
        assert isinstance(body, kind), body
        if isinstance(body, Attached):
            self.leases.append(body.lease)
        return time.monotonic() - self._began


def crowd(line: Channel, directory: str, count: int) -> None:
    """Many clients, which do together what they are told; each time their seconds are the answer."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count)
    line.say("ready")
    assert line.hear() == "connect"
    clients = [Light(directory) for _ in range(count)]
    line.say(json.dumps([client.welcome() for client in clients]))
    for client in clients:
        client.dial(context)
    while True:
        if line.hear() == "attach":
            seconds = _together(clients, lambda _: [Attach(POOL, 0, None, 0.0)] * PIPELINE, Attached)
        else:
            seconds = _together(clients, lambda client: [Close(lease) for lease in client.leases[-PIPELINE:]], Done)
            for client in clients:
                del client.leases[-PIPELINE:]
        line.say(json.dumps(seconds))


def _together(
    clients: Sequence[Light], bodies: Callable[[Light], list[Request]], kind: type[Attached | Done]
) -> list[float]:
    for client in clients:
        client.ask(bodies(client))
    return [round(client.answer(kind), 6) for client in clients for _ in range(PIPELINE)]


# -- workers: a process each ------------------------------------------------------------------------


def work(line: Channel, directory: str) -> None:
    """Open a Broker, attach, read every byte and close, all when told to."""
    line.say("ready")
    line.hear()
    began = time.monotonic()
    with Broker(directory, timeout=120) as broker:
        opened = time.monotonic()
        with broker.attach(POOL) as pool:
            attached = time.monotonic()
            check(pool)
            line.say(json.dumps([opened - began, attached - opened]))
            line.hear()


# -- the test ---------------------------------------------------------------------------------------


def percentiles(what: str, seconds: Sequence[float]) -> str:
    """Return one line: how many, and how long in milliseconds."""
    ordered = sorted(seconds)
    marks = ", ".join(
        f"p{mark} {1000 * ordered[min(len(ordered) * mark // 100, len(ordered) - 1)]:.1f}" for mark in (50, 95, 99)
    )
    return f"{what:44} {len(ordered):7}: {marks}, longest {1000 * ordered[-1]:.1f} ms"


class Load:
    """A broker, a pool, and those who want it."""

    def __init__(self, stack: ExitStack, clients: int, processes: int, workers: int) -> None:
        worker_pool = stack.enter_context(WorkerPool(HERE))
        self.process = stack.enter_context(serving())
        self.broker = stack.enter_context(Broker(self.process.directory, timeout=120))
        with self.broker.create(POOL, LAYOUT, share="ipc") as draft:
            fill(draft)
            draft.seal()
        directory = str(self.process.directory)
        self.files = files(self.process.pid)
        shares = [len(range(number, clients, processes)) for number in range(processes)]
        self.crowds = [stack.enter_context(worker_pool.worker(f"{HERE}:crowd", directory, share)) for share in shares]
        self.workers = [stack.enter_context(worker_pool.worker(f"{HERE}:work", directory)) for _ in range(workers)]
        for worker in (*self.crowds, *self.workers):
            worker.expect("ready")

    def leases(self) -> int:
        return sum(pool.leases for pool in self.broker.pools())

    def ask(self, what: str, crowds: Sequence[Worker]) -> list[float]:
        """Have crowds do something at the same moment; returns the seconds of every request."""
        for one in crowds:
            one.tell(what)
        return [seconds for one in crowds for seconds in json.loads(one.hear())]


def load(clients: int, leases: int, workers: int, processes: int, say: Callable[[str], None]) -> None:
    """Put a broker under load; ``leases`` of every client, in multiples of PIPELINE."""
    with ExitStack() as stack:
        scene = Load(stack, clients, processes, workers)
        before, rounds = resident(scene.process.pid), leases // PIPELINE
        say(percentiles("connect and be welcomed, all at once", scene.ask("connect", scene.crowds)))
        attaching = [seconds for _ in range(rounds) for seconds in scene.ask("attach", scene.crowds)]
        say(percentiles(f"attach, {PIPELINE} under way for every client", attaching))
        assert scene.leases() == clients * rounds * PIPELINE
        say(f"{scene.leases()} leases of {clients} clients: the broker has grown by {_grown(scene, before)}")
        began = time.monotonic()
        assert sum(len(client.leases) for client in scene.broker.clients()) == scene.leases()
        say(percentiles("list of all clients and leases", [time.monotonic() - began]))
        _attend(scene, say)
        _end(scene, rounds, say)


def _attend(scene: Load, say: Callable[[str], None]) -> None:
    """All workers at the same moment."""
    held = scene.leases()
    for worker in scene.workers:
        worker.tell("go")
    seconds = [json.loads(worker.hear()) for worker in scene.workers]
    say(percentiles("open a Broker, all workers at once", [opening for opening, _ in seconds]))
    say(percentiles("attach and map, all workers at once", [attaching for _, attaching in seconds]))
    assert scene.leases() == held + len(scene.workers)
    for worker in scene.workers:
        worker.tell("leave")
        worker.wait()
    eventually(lambda: scene.leases() == held, "the workers' leases to end")


def _end(scene: Load, rounds: int, say: Callable[[str], None]) -> None:
    """Half of the crowds give back what they have; the rest are killed."""
    polite, killed = scene.crowds[::2], scene.crowds[1::2]
    closing = [seconds for _ in range(rounds) for seconds in scene.ask("close", polite)]
    say(percentiles(f"close, {PIPELINE} under way for every client", closing))
    left, began = scene.leases(), time.monotonic()
    for one in killed:
        one.kill()
    eventually(lambda: scene.leases() == 0, "the leases of the killed to fall")
    say(f"{left} leases of killed processes have fallen in {1000 * (time.monotonic() - began):.0f} ms")
    for one in polite:
        one.kill()
    eventually(lambda: len(scene.broker.clients()) == 1, "the sessions to end")
    all_closed(scene.process.pid, scene.files)


def _grown(scene: Load, before: int) -> str:
    return f"{(resident(scene.process.pid) - before) / (1 << 20):.0f} MiB"


def main(arguments: Sequence[str]) -> int:
    """Return 0; a request that fails fails an assertion."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak load", description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--leases", type=int, default=100, help=f"of each client, in multiples of {PIPELINE}")
    parser.add_argument("--workers", type=int, default=64, help="processes that attach at the same moment")
    parser.add_argument("--processes", type=int, default=8, help="that the clients are in")
    options = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load(options.clients, options.leases, options.workers, options.processes, lambda line: print(line, flush=True))
    return 0
