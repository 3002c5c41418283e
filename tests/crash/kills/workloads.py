"""What the worker processes do. Each scene runs in a process of its own, which halts where its label says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from cubroker.client import Broker, Draft, Pool
from cubroker.protocol.errors import Exists, Invalid, NotFound, OverBudget, Retired, TimedOut, Unavailable, Unsupported
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import AwaitEvent
from tests.brokers import eventually
from tests.crash.content import BOTH, FORMS, LAYOUT, TEAM, Form, check, content, fill, nap
from tests.crash.kills import hooks
from tests.crash.worker_pool import Channel

WAIT = 3600.0
"""Seconds: longer than any test."""

IN_LINE = "in line"

SHARDED = ("read_shards", "switch_shards", "write_shards")
"""Scenes of pools that are spread over both devices."""

SCRATCH = ("produce", "consume")
"""Scenes of pools that readers may write, and tell each other of by events; the observer has made :data:`ANSWER`."""

FULL, ANSWER = "full", "answer"


class Steps:
    """Where a scene is played: the broker, the name and the share kind of its pool, and the label at which it halts."""

    def __init__(self, line: Channel, directory: str, name: str, share: str, label: str) -> None:
        self.line = line
        self.name = name
        self.share = share
        self._label = label
        self._directory = directory

    def broker(self) -> Broker:
        return Broker(self._directory)

    @contextmanager
    def prologue(self) -> Iterator[None]:
        """Play a part in which it does not halt."""
        self._label, label = "", self._label
        yield
        self._label = label

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


def play(line: Channel, directory: str, scene: str, name: str, share: str, label: str) -> None:
    """Play a scene with a client that halts at ``label``."""
    stage = Steps(line, directory, name, share, label)
    hooks.install(stage.reach)
    SCENES[scene](stage)
    line.say(f"the scene {scene!r} has no {label!r}")


def read(stage: Steps) -> None:
    with stage.broker() as broker:
        with broker.attach(stage.name, device=0) as pool:
            check(pool)
            stage.reach("holding")
        stage.reach("closed")
    stage.reach("left")


def read_peer(stage: Steps) -> None:
    with stage.broker() as broker:
        with broker.attach(stage.name, device=1, peer=True) as pool:
            assert (pool.device.index, pool.memory_device.index) == (1, 0)
            check(pool)
            stage.reach("holding")
        stage.reach("closed")


def read_shards(stage: Steps) -> None:
    with stage.broker() as broker:
        with broker.attach(stage.name) as pool:
            check(pool)
            stage.reach("holding")
        stage.reach("closed")


def sleep(stage: Steps) -> None:
    with stage.broker() as broker, broker.attach(stage.name, device=0) as pool:
        check(pool)
        stage.reach("sleeping")
        pool.sleep()
        stage.reach("asleep")


def wake(stage: Steps) -> None:
    with stage.broker() as broker:
        with stage.prologue():
            pool = broker.attach(stage.name, device=0)
            pool.sleep()
        pool.wake()
        stage.reach("awake")
        check(pool)


def switch(stage: Steps) -> None:
    _switch(stage, Form(stage.share))


def switch_shards(stage: Steps) -> None:
    _switch(stage, Form(stage.share, BOTH, sharded=True))


def write(stage: Steps) -> None:
    with stage.broker() as broker, Form(stage.share, BOTH).create(broker, stage.name) as draft:
        _publish(stage, draft)


def write_shards(stage: Steps) -> None:
    with stage.broker() as broker, Form(stage.share, BOTH, sharded=True).create(broker, stage.name) as draft:
        _publish(stage, draft)


def write_in_place(stage: Steps) -> None:
    with stage.broker() as broker, Form(stage.share).create(broker, stage.name) as draft:
        layout = draft.layout
        with stage.prologue():  # its tensors are told at the end
            fill(draft)
        draft.seal(layout=Layout(layout.tensors[::-1], layout.allocations), in_place=True)
        stage.reach("sealed")
        check(draft)
        stage.reach("holding")


def discard(stage: Steps) -> None:
    with stage.broker() as broker:
        with Form(stage.share).create(broker, stage.name) as draft:
            fill(draft)
        stage.reach("discarded")


def await_publication(stage: Steps) -> None:
    with stage.broker() as broker, stage.wait(broker, lambda: broker.attach(stage.name, wait=WAIT)) as pool:
        check(pool)
        stage.reach("holding")


def await_turn(stage: Steps) -> None:
    with stage.broker() as broker:
        _finish(stage, stage.wait(broker, lambda: Form(stage.share).create(broker, stage.name, WAIT)))


def await_room(stage: Steps) -> None:
    with stage.broker() as broker:
        _finish(stage, stage.wait(broker, lambda: Form(stage.share, (1,)).create(broker, stage.name, WAIT)))


def await_either(stage: Steps) -> None:
    with stage.broker() as broker:
        _finish(stage, stage.wait(broker, lambda: _either(broker, stage.name, stage.share, WAIT)))


def give_up(stage: Steps) -> None:
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


def watch(stage: Steps) -> None:
    with stage.broker() as broker, broker.watch(stage.name) as versions:
        next(versions)
        stage.reach("watching")


def retire(stage: Steps) -> None:
    with stage.broker() as broker, broker.attach(stage.name, device=0) as pool:
        broker.retire(stage.name)
        check(pool)
        stage.reach("holding")


def produce(stage: Steps) -> None:
    with stage.broker() as broker, broker.attach(stage.name, device=0) as pool:
        with pool.event(FULL) as full:
            pool["first"].copy_from(content(pool.name, pool.version, "first"))
            full.record()
            stage.reach("recorded")
        stage.reach("dropped")


def consume(stage: Steps) -> None:
    with stage.broker() as broker, broker.attach(stage.name, device=0) as pool, pool.open_event(ANSWER) as answer:
        answer.wait()
        check(pool)
        broker.requests.submit(AwaitEvent(pool.lease, answer._number, 1, WAIT))
        broker.devices()  # requests are taken in order: the broker has the one before
        stage.reach("waiting")


def broadcast(stage: Steps) -> None:
    with stage.broker() as broker:
        with broker.attach(stage.name, device=0) as pool:
            _broadcast(stage, pool)
        stage.reach("closed")


def write_team(stage: Steps) -> None:
    with stage.broker() as broker, TEAM.create(broker, stage.name) as draft:
        _broadcast(stage, draft)
        draft.seal()
        stage.reach("sealed")


SCENES: dict[str, Callable[[Steps], None]] = {
    scene.__name__: scene
    for scene in (
        read,
        read_peer,
        read_shards,
        sleep,
        wake,
        switch,
        switch_shards,
        write,
        write_shards,
        write_in_place,
        discard,
        await_publication,
        await_turn,
        await_room,
        await_either,
        give_up,
        watch,
        retire,
        produce,
        consume,
        broadcast,
        write_team,
    )
}


def _finish(stage: Steps, pool: Pool | Draft) -> None:
    with pool:
        if isinstance(pool, Draft):
            _publish(stage, pool)
        else:
            check(pool)
            stage.reach("holding")


def _broadcast(stage: Steps, pool: Pool) -> None:
    stage.reach("broadcasting")
    for name in pool:
        pool.broadcast(content(pool.name, pool.version, name), name)
    stage.reach("broadcast")
    check(pool)


def _switch(stage: Steps, form: Form) -> None:
    with stage.broker() as broker:
        with stage.prologue():
            pool = broker.attach(stage.name)
            form.publish(broker, stage.name)
        pool.switch()
        stage.reach("switched")
        check(pool)


def _publish(stage: Steps, draft: Draft) -> None:
    fill(draft)
    stage.reach("written")
    draft.seal()
    stage.reach("sealed")


# -- those who live ---------------------------------------------------------------------------------


def keep_reading(line: Channel, directory: str, name: str) -> None:
    """Hold a version; whenever a word comes, check it, also through another lease, and after a nap if it can sleep."""
    with Broker(directory) as broker, broker.attach(name) as pool:
        while True:
            check(pool)
            with broker.attach(name, version=pool.version) as again:
                check(again)
            if pool.share != "ipc":
                pool.sleep()
                pool.wake()
                check(pool)
            line.say("right")
            line.hear()


def succeed(line: Channel, directory: str, name: str, share: str, device: int, sharded: bool) -> None:
    """Wait for the turn and for room, then publish, read it back, and say the version."""
    stage = Steps(line, directory, name, share, "")
    form = Form(share, BOTH if sharded else (device,), sharded)
    with Broker(directory) as broker:
        draft = stage.wait(broker, lambda: form.create(broker, name, WAIT))
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

DEEDS = ("attach", "attach", "attach", "close", "close", "nap", "switch", "create", "create", "either", "retire")

MOST = 3
"""Pools that one of them holds at once."""


def do_anything(line: Channel, directory: str, names: str, seed: int) -> None:
    """Attach, read, close, create, write, seal, discard, wait, sleep, wake, switch and retire, without end."""
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
    deed = chance.choice(DEEDS)
    if deed == "close" or len(held) >= MOST:
        if held:
            pool = held.pop(chance.randrange(len(held)))
            check(pool)
            pool.close()
    elif deed == "attach":
        held.append(broker.attach(name, device=chance.choice(BOTH), peer=True, wait=wait))
        check(held[-1])
    elif deed == "nap":
        nap(held)
    elif deed == "switch":
        _switch_all(held)
    elif deed == "retire":
        if chance.random() < 0.2:
            broker.retire(name)
    else:
        form = chance.choice((*FORMS, TEAM))
        either = deed == "either"
        _write(chance, _either(broker, name, form.share, wait) if either else form.create(broker, name, wait))


def _switch_all(held: list[Pool]) -> None:
    """Switch every pool to its current version, where that can take the place of the pool's own."""
    for pool in held:
        with suppress(NotFound, Retired, Unsupported, Invalid):
            pool.switch()
        check(pool)


def _either(broker: Broker, name: str, share: str, wait: float) -> Pool | Draft:
    return broker.attach_or_create(name, LAYOUT, share=share, wait=wait)


def _write(chance: random.Random, pool: Pool | Draft) -> None:
    with pool:
        if not isinstance(pool, Draft):
            check(pool)
        elif chance.random() < 0.8:
            fill(pool)
            pool.seal()
