"""Requests per second that the broker answers, compared with a bare ZeroMQ echo.

Four client processes each keep a number of requests in flight. Requests to the broker are pairs of attach and close,
which the ledger decides; each request counts as one. The echo is a ROUTER that decodes as many bytes and sends them
back. A broker with a store journals every lease before it answers. All servers alternate, with the same clients.
"""

from __future__ import annotations

import tempfile
from collections import deque
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

import msgpack
import zmq

from benchmarks.harness import Child, one_allocation, questions, run_alone, serving
from benchmarks.options import Plan
from benchmarks.report import Figure, median, ratio
from cubroker.client import Broker
from cubroker.protocol.messages import Attach, Attached, Close

POOL = "small"
CLIENTS = 4
ROUNDS = 5
SECONDS = 1.5
KINDS = ("broker", "store", "echo")
"""The servers: a broker, one with a store, and the echo."""

WINDOW = 64
"""How many requests one client keeps in flight."""

BODY = [bytes(16), 1, 1, ["Attach", POOL, 0, None, 0.0]]
"""The echo's request, as large as an attach."""


def measure(plan: Plan) -> list[Figure]:
    with ExitStack() as undo:
        servers = [undo.enter_context(serving(plan.devices, kept=kept)) for kept in (False, True)]
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="cubroker-bench-"))
        address = f"ipc://{folder}/echo"
        undo.enter_context(Child(echo, address)).answer()
        for server in servers:
            broker = undo.enter_context(Broker(server.directory))
            with broker.create(POOL, one_allocation(1), share="ipc") as draft:
                draft.seal()
        directories = tuple(server.directory for server in servers)
        clients = [undo.enter_context(Child(ask, directories, address)) for _ in range(CLIENTS)]
        for client in clients:
            client.answer()
        rates = [tuple(_rate(clients, kind) for kind in KINDS) for _ in range(1 + ROUNDS)][1:]
    ours, kept, bare = zip(*rates, strict=True)
    note = f"{CLIENTS} clients, {WINDOW} each on their way"
    return [
        median("attach and close through the broker", ours, "requests/s", note),
        median("the same through a broker with a store", kept, "requests/s", note),
        median("bare ROUTER echo, msgpack both ways", bare, "requests/s", note),
        ratio("broker ÷ echo", ours, bare, "of each three rounds"),
        ratio("broker with a store ÷ without", kept, ours, "of each three rounds"),
    ]


def _rate(clients: list[Child], kind: str) -> float:
    """Have all clients send requests for ``SECONDS``; return the answers per second."""
    for client in clients:
        client.tell(kind)
    answered: list[int] = [client.answer() for client in clients]
    return sum(answered) / SECONDS


def ask(connection: Connection, directories: tuple[Path, Path], address: str) -> None:
    """In a client: for each kind asked for, send requests for ``SECONDS``, and send the number of answers."""
    with ExitStack() as undo:
        brokers = {kind: undo.enter_context(Broker(each)) for kind, each in zip(KINDS, directories, strict=False)}
        context = undo.enter_context(zmq.Context())
        dealer = undo.enter_context(context.socket(zmq.DEALER))
        dealer.connect(address)
        for broker in brokers.values():
            broker.pools()
        connection.send("ready")
        for (kind,) in questions(connection):
            connection.send(_ask_the_broker(brokers[kind]) if kind in brokers else _ask_the_echo(dealer))


def _ask_the_broker(broker: Broker) -> int:
    submit, attach = broker.requests.submit, Attach(POOL, 0, None, 0.0)
    end = monotonic() + SECONDS
    under_way = deque(submit(attach) for _ in range(WINDOW))
    answered = 0
    while monotonic() < end:
        reply = under_way.popleft().result()
        under_way.append(submit(Close(reply.lease) if isinstance(reply, Attached) else attach))
        answered += 1
    for future in under_way:
        if isinstance(reply := future.result(), Attached):
            submit(Close(reply.lease)).result()
    return answered


def _ask_the_echo(dealer: zmq.Socket[bytes]) -> int:
    end = monotonic() + SECONDS
    for _ in range(WINDOW):
        dealer.send(msgpack.packb(BODY))
    answered = 0
    while monotonic() < end:
        msgpack.unpackb(dealer.recv())
        dealer.send(msgpack.packb(BODY))
        answered += 1
    for _ in range(WINDOW):
        dealer.recv()
    return answered


def echo(connection: Connection, address: str) -> None:
    """In a child: decode every request, encode it and send it back, until the parent ends."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        connection.send("ready")
        poller = zmq.Poller()
        poller.register(connection.fileno(), zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        while connection.fileno() not in dict(poller.poll()):
            while True:
                try:
                    routing, data = router.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                router.send_multipart((routing, msgpack.packb(msgpack.unpackb(data))))


if __name__ == "__main__":
    run_alone(measure)
