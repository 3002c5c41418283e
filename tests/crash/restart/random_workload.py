"""Workers that do anything with a broker that is killed all the time, and note how long each request took."""

from __future__ import annotations

import json
import logging
import random
import time
from contextlib import suppress
from threading import Event, Thread

from cubroker.client import Broker, Draft, Pool
from cubroker.client.transport.requests import Pending, Requests
from cubroker.protocol.errors import (
    CubrokerError,
    Exists,
    OverBudget,
    TimedOut,
)
from cubroker.protocol.messages import Attach, AwaitEvent, Create, Lock, OpenEvent, Reply, Request
from tests.brokers import eventually
from tests.crash.content import (
    BOTH,
    LAYOUT,
    NO_SWITCH,
    WAIT,
    Form,
    check,
    content,
    fill,
    follow_all,
    glance,
    nap,
    seal_in_place,
    update_any,
)
from tests.crash.restart.workloads import CHAIN, DURABLE, IPC, PASSING, SCRATCH, SHARDED, SPREAD, TEAM, losing
from tests.crash.worker_pool import Channel

NAMES = ("busy-0", "busy-1", "busy-2")
FORMS = (DURABLE, SPREAD, SHARDED, SCRATCH, TEAM, PASSING, IPC, CHAIN, CHAIN)
IN_PLACE = (CHAIN, SHARDED, IPC)

REFUSALS = (Exists, OverBudget, TimedOut)
"""What may come of doing anything at any time, whatever is lost."""

DEEDS = (
    *("attach", "attach", "attach", "close", "close", "nap", "switch", "create", "either", "retire", "event", "look"),
    *("update", "update", "in_place", "lock", "follow", "glance", "glance"),
)
MOST = 3
"""Pools that one of them holds at once."""

LONG = 0.005
"""Seconds of a request that is worth a note."""


class Log:
    """What this process asked since it told of it last.

    Attributes:
        asked, answered: requests.
        long: when requests that took long began and ended, if the broker had no reason to let them wait.
    """

    def __init__(self) -> None:
        self.asked = self.answered = 0
        self.long: list[tuple[float, float]] = []
        post = Requests.post

        def noting(requests: Requests, body: Request, pending: Pending) -> None:
            began, settle, times = time.monotonic(), pending.settle, [0]
            waits = isinstance(body, Attach | Create | OpenEvent | AwaitEvent | Lock) and body.wait > 0

            def settled(reply: Reply | CubrokerError) -> None:
                ended = time.monotonic()
                times[0] += 1
                assert times[0] == 1, f"{body} was answered twice"
                self.answered += 1
                if ended - began > LONG and not waits:
                    self.long.append((began, ended))
                settle(reply)

            pending.settle = settled
            self.asked += 1
            post(requests, body, pending)

        Requests.post = noting  # type: ignore[method-assign]

    def tell(self, held: list[Pool]) -> str:
        """Return what is held, and what there was to note, once everything is answered."""
        eventually(lambda: self.asked == self.answered, "the answers of what was asked")
        said = json.dumps(
            [[[pool.name, pool.version] for pool in held if not pool.asleep], self.asked, self.answered, self.long]
        )
        self.asked = self.answered = 0
        self.long.clear()
        return said


def work(line: Channel, directory: str, seed: int) -> None:
    """Do anything until a word comes: say what is held then, check it and go on; at ``end``, give it back and say how
    it went."""
    logging.disable(logging.WARNING)
    log, chance = Log(), random.Random(seed)
    broker, held = Broker(directory, timeout=WAIT), list[Pool]()
    line.say("there")
    while True:
        told, words = Event(), list[str]()
        Thread(target=lambda told=told, words=words: (words.append(line.hear()), told.set())).start()  # type: ignore[misc]
        while not told.is_set():
            with losing(*REFUSALS):
                _do_something(chance, broker, chance.choice(NAMES), held)
        for pool in held:
            if not pool.lost:
                check(pool)
        if words == ["end"]:
            break
        line.say(log.tell(held))
        line.hear()
    while held:
        held.pop().close()
    broker.close()
    line.say(log.tell(held))


def _do_something(chance: random.Random, broker: Broker, name: str, held: list[Pool]) -> None:
    wait = chance.choice([0.0, 0.0, 0.02, 0.5])
    deed = chance.choice(DEEDS)
    if deed == "close" or len(held) >= MOST:
        if held:
            pool = held.pop(chance.randrange(len(held)))
            if not pool.asleep and not pool.lost:
                check(pool)
            pool.close()
    elif deed == "attach":
        pool = broker.attach(name, device=chance.choice(BOTH), peer=True, wait=wait)
        held.append(pool)
        check(pool)
    elif deed == "nap":
        nap(held)
    elif deed == "switch":
        _switch(held)
    elif deed == "retire":
        if chance.random() < 0.2:
            broker.retire(name)
    elif deed == "event":
        _record(chance, held)
    elif deed == "look":
        broker.devices()
    elif deed == "update":
        update_any(chance, broker, held, wait)
    elif deed == "in_place":
        held.append(seal_in_place(broker, name, chance.choice(IN_PLACE), wait))
    elif deed == "lock":
        with broker.lock(name, timeout=wait):
            broker.devices()
    elif deed == "glance":
        glance(broker, name)
    elif deed == "follow":
        follow_all(broker, name, held, wait)
    else:
        _write(chance, _open(chance.choice(FORMS), broker, name, wait, either=deed == "either"))


def _switch(held: list[Pool]) -> None:
    """Switch every pool to its current version, where that can take the place of the pool's own."""
    for pool in held:
        if not pool.lost:
            with suppress(*NO_SWITCH):
                pool.switch()


def _record(chance: random.Random, held: list[Pool]) -> None:
    for pool in held:
        if pool.writable and not pool.asleep:
            with pool.event(f"event-{chance.randrange(4)}") as event:
                event.record()
            if pool.share == "multicast" and pool.device == pool.memory_device:
                pool.broadcast(content(pool.name, pool.version, "first"), "first")


def _open(form: Form, broker: Broker, name: str, wait: float, *, either: bool) -> Pool | Draft:
    if either:
        return broker.attach_or_create(name, LAYOUT, share="vmm", durable=True, wait=wait)
    return form.create(broker, name, wait)


def _write(chance: random.Random, pool: Pool | Draft) -> None:
    with pool:
        if not isinstance(pool, Draft):
            check(pool)
        elif chance.random() < 0.8:
            fill(pool)
            pool.seal()
