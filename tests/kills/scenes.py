"""What the worker processes do. Each scene runs in a process of its own, which halts where its label says."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

from cubroker.client import Broker, Draft, Pool
from cubroker.protocol.errors import Exists, NotFound, OverBudget, Retired, TimedOut, Unavailable
from tests.brokers import eventually
from tests.kills import hooks
from tests.kills.content import LAYOUT, check, fill
from tests.kills.nursery import Line

WAIT = 3600.0
"""Seconds: longer than any test."""

IN_LINE = "in line"


class Stage:
    """Where a scene is played: the broker, the name of its pool, and the label at which it halts."""

    def __init__(self, line: Line, directory: str, name: str, label: str) -> None:
        self.line = line
        self.name = name
        self._label = label
        self._directory = directory

    def broker(self) -> Broker:
        return Broker(self._directory)

    def reach(self, label: str) -> None:
        """Say so and halt this thread if this is the label; the process is then killed from outside."""
        if label == self._label:
            self.line.say(label)
            Event().wait()

    def wait(self, broker: Broker, call: Callable[[], Pool | Draft]) -> Pool | Draft:
        """Return what ``call`` returns; say when its request has reached the broker."""
        results: list[Pool | Draft] = []
        thread = Thread(target=lambda: results.append(call()))
        thread.start()
        eventually(lambda: broker.requests.waiting() or results, "the request to be under way")
        broker.devices()  # requests are taken in order: the broker has the one before
        self.line.say(IN_LINE)
        thread.join()
        return results.pop()


def play(line: Line, directory: str, scene: str, name: str, label: str) -> None:
    """Play a scene with a client that halts at ``label``."""
    stage = Stage(line, directory, name, label)
    hooks.install(stage.reach)
    SCENES[scene](stage)
    line.say(f"the scene {scene!r} has no {label!r}")


def read(stage: Stage) -> None:
    with stage.broker() as broker:
        with broker.attach(stage.name, device=0) as pool:
            check(pool)
            stage.reach("holding")
        stage.reach("closed")
    stage.reach("left")


def write(stage: Stage) -> None:
    with stage.broker() as broker, broker.create(stage.name, LAYOUT, devices=(0, 1)) as draft:
        _publish(stage, draft)


def discard(stage: Stage) -> None:
    with stage.broker() as broker:
        with broker.create(stage.name, LAYOUT) as draft:
            fill(draft)
        stage.reach("discarded")


def await_publication(stage: Stage) -> None:
    with stage.broker() as broker, stage.wait(broker, lambda: broker.attach(stage.name, wait=WAIT)) as pool:
        check(pool)
        stage.reach("holding")


def await_turn(stage: Stage) -> None:
    with stage.broker() as broker:
        _finish(stage, stage.wait(broker, lambda: broker.create(stage.name, LAYOUT, wait=WAIT)))


def await_room(stage: Stage) -> None:
    with stage.broker() as broker:
        _finish(stage, stage.wait(broker, lambda: broker.create(stage.name, LAYOUT, devices=(1,), wait=WAIT)))


def await_either(stage: Stage) -> None:
    with stage.broker() as broker:
        _finish(stage, stage.wait(broker, lambda: broker.attach_or_create(stage.name, LAYOUT, wait=WAIT)))


def give_up(stage: Stage) -> None:
    broker = stage.broker()

    def wait() -> None:
        with suppress(Unavailable):  # the Broker is closed meanwhile
            broker.attach(stage.name, wait=WAIT)

    Thread(target=wait).start()
    eventually(broker.requests.waiting, "the request to be under way")
    broker.devices()
    stage.line.say(IN_LINE)
    broker.close()
    Event().wait()  # the connection's thread may not have got there yet


def watch(stage: Stage) -> None:
    with stage.broker() as broker, broker.watch(stage.name) as versions:
        next(versions)
        stage.reach("watching")


def retire(stage: Stage) -> None:
    with stage.broker() as broker, broker.attach(stage.name, device=0) as pool:
        broker.retire(stage.name)
        check(pool)
        stage.reach("holding")


SCENES: dict[str, Callable[[Stage], None]] = {
    scene.__name__: scene
    for scene in (
        read,
        write,
        discard,
        await_publication,
        await_turn,
        await_room,
        await_either,
        give_up,
        watch,
        retire,
    )
}


def _finish(stage: Stage, pool: Pool | Draft) -> None:
    with pool:
        if isinstance(pool, Draft):
            _publish(stage, pool)
        else:
            check(pool)
            stage.reach("holding")


def _publish(stage: Stage, draft: Draft) -> None:
    fill(draft)
    stage.reach("written")
    draft.seal()
    stage.reach("sealed")


# -- those who live ---------------------------------------------------------------------------------


def keep_reading(line: Line, directory: str, name: str) -> None:
    """Hold a version; whenever a word comes, check it, and once more through another lease."""
    with Broker(directory) as broker, broker.attach(name) as pool:
        while True:
            check(pool)
            with broker.attach(name, version=pool.version) as again:
                check(again)
            line.say("right")
            line.hear()


def succeed(line: Line, directory: str, name: str, device: int) -> None:
    """Wait for the turn and for room, then publish, read it back, and say the version."""
    stage = Stage(line, directory, name, "")
    with Broker(directory) as broker:
        draft = stage.wait(broker, lambda: broker.create(name, LAYOUT, devices=(device,), wait=WAIT))
        assert isinstance(draft, Draft)
        with draft:
            fill(draft)
            version = draft.seal()
        with broker.attach(name, version=version) as pool:
            check(pool)
        line.say(f"sealed {version}")


# -- those who do anything --------------------------------------------------------------------------

REFUSALS = (Exists, NotFound, OverBudget, Retired, TimedOut)
"""What may come of doing anything at any time."""

MOST = 3
"""Pools that one of them holds at once."""


def do_anything(line: Line, directory: str, names: str, seed: int) -> None:
    """Attach, read, close, create, write, seal, discard, wait and retire, without end."""
    chance = random.Random(seed)
    with Broker(directory) as broker:
        held: list[Pool] = []
        while True:
            name = chance.choice(names.split())
            try:
                _do_something(chance, broker, name, held)
            except REFUSALS:
                continue


def _do_something(chance: random.Random, broker: Broker, name: str, held: list[Pool]) -> None:
    wait = chance.choice([0.0, 0.0, 0.02, 0.5])
    deed = chance.choice(["attach", "attach", "attach", "close", "close", "create", "either", "retire"])
    if deed == "close" or len(held) >= MOST:
        if held:
            pool = held.pop(chance.randrange(len(held)))
            check(pool)
            pool.close()
    elif deed == "attach":
        held.append(broker.attach(name, wait=wait))
        check(held[-1])
    elif deed == "retire":
        if chance.random() < 0.2:
            broker.retire(name)
    else:
        _write(chance, broker.create(name, LAYOUT, wait=wait) if deed == "create" else _either(broker, name, wait))


def _either(broker: Broker, name: str, wait: float) -> Pool | Draft:
    return broker.attach_or_create(name, LAYOUT, wait=wait)


def _write(chance: random.Random, pool: Pool | Draft) -> None:
    with pool:
        if not isinstance(pool, Draft):
            check(pool)
        elif chance.random() < 0.8:
            fill(pool)
            pool.seal()
