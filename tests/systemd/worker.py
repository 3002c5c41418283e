"""What the clients of a broker under systemd do, each in a process inside the lab: ``python -m tests.systemd.worker``.

Each says ``ready`` and its process id, answers every line of standard input with one of its own, and ends with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from threading import Event, Thread

from cubroker.client import Broker
from tests.crash.consistency import settles
from tests.crash.content import Form, check

DIRECTORY = "/run/cubroker"
LONG = 0.05
"""Seconds of a turn that is worth mentioning."""

DURABLE = Form("vmm", durable=True)


def say(word: object) -> None:
    print(json.dumps(word), flush=True)


def publish(name: str, share: str = "") -> None:
    """Publish a version, durable unless it is shared otherwise, say its number, and end."""
    with Broker(DIRECTORY) as broker:
        say((Form(share) if share else DURABLE).publish(broker, name))


def hold(name: str) -> None:
    """Hold a lease; at every line, check every byte again."""
    with Broker(DIRECTORY) as broker, broker.attach(name, wait=60) as pool:
        check(pool)
        say(os.getpid())
        for _ in sys.stdin:
            check(pool)
            say([pool.name, pool.version])


def attaching(name: str) -> None:
    """Attach, check and close, over and over; at a line, stop, and tell how it went."""
    with Broker(DIRECTORY) as broker:
        say(os.getpid())

        def turn() -> None:
            with broker.attach(name) as pool:
                check(pool)

        _work(turn)


def publishing(name: str) -> None:
    """Publish version after version, over and over; at a line, stop, and tell how it went."""
    with Broker(DIRECTORY) as broker:
        say(os.getpid())
        versions: list[int] = []

        def turn() -> None:
            versions.append(DURABLE.publish(broker, name))

        _work(turn)
        assert versions == list(range(versions[0], versions[0] + len(versions))), versions


def observer(*pids: str) -> None:
    """At every line, tell in what the broker's tables go on contradicting each other, and the leases of every version.

    Besides this one, only ``pids`` should have sessions.
    """
    with Broker(DIRECTORY) as broker:
        say(os.getpid())
        for _ in sys.stdin:
            found: list[str] = []
            try:
                settles(broker, [*map(int, pids), os.getpid()])
            except AssertionError as error:
                found.append(str(error))
            say([found, {f"{pool.name}@{pool.version}": pool.leases for pool in broker.pools()}])


def _work(turn: Callable[[], None]) -> None:
    """Work until a line comes; then say how many turns there were, and when long ones began and ended."""
    told = Event()

    def listen() -> None:
        sys.stdin.readline()
        told.set()

    Thread(target=listen, daemon=True).start()
    turns, long = 0, []
    while not turns or not told.is_set():  # one turn at least, however busy the machine
        began = time.monotonic()
        turn()
        turns += 1
        if (ended := time.monotonic()) - began > LONG:
            long.append((began, ended))
    say([turns, long])
    sys.stdin.readline()  # the session stays until everything was looked at


ROLES = {each.__name__: each for each in (publish, hold, attaching, publishing, observer)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
