"""What the worker processes do. Each scene runs in a process of its own, which halts where its label says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TypeVar

from cubroker.client import Broker, Draft, Pool
from cubroker.protocol.errors import Exists, NotFound, OverBudget, Retired, TimedOut, Unavailable, Unsupported
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import AwaitEvent
from tests.brokers import eventually
from tests.crash.content import (
    BOTH,
    CHAINS,
    FORMS,
    LAYOUT,
    LINKS,
    NO_SWITCH,
    TEAM,
    TEAM_READ,
    WAIT,
    Form,
    check,
    check_anew,
    content,
    fill,
    follow_all,
    glance,
    nap,
    seal_in_place,
    update,
    update_any,
)
from tests.crash.kills import hooks
from tests.crash.worker_pool import Channel

IN_LINE = "in line"

SHARDED = ("read_shards", "switch_shards", "write_shards", "write_shards_in_place", "update_shards")
"""Scenes of pools that are spread over both devices."""

UPDATES = ("update_once", "update_shards", "await_update", "outlive_base", "leave_chain")
CHAINED = (*UPDATES, "switch_chain", "follow_chain")
"""Scenes of versions that share memory; those first in which the worker publishes one."""

LOCKS = ("lock", "await_lock")
"""Scenes of the lock of the pool's name."""

SCRATCH = ("produce", "consume")
"""Scenes of pools that readers may write, and tell each other of by events; the observer has made :data:`ANSWER`."""

FULL, ANSWER = "full", "answer"

T = TypeVar("T")


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

    def wait(self, broker: Broker, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; say when its request waits at the broker."""
        results: list[T] = []
        thread = Thread(target=lambda: results.append(call()))
        thread.start()
        eventually(lambda: results or broker.session in [each.session for each in broker.look().waiters], "the wait")
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
    _switch(stage, Form(stage.share).publish)


def switch_shards(stage: Steps) -> None:
    _switch(stage, Form(stage.share, BOTH, sharded=True).publish)


def switch_team(stage: Steps) -> None:
    _switch(stage, TEAM_READ.publish)


def switch_chain(stage: Steps) -> None:
    _switch(stage, _update_second)


def refuse_switch(stage: Steps) -> None:
    with stage.broker() as broker, broker.attach(stage.name) as pool:
        Form(stage.share).publish(broker, stage.name)
        try:
            pool.switch()
        except Unsupported:
            stage.reach("refused")
        assert pool.version == 1
        check(pool)
        stage.reach("holding")
    stage.reach("closed")


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


def write_shards_in_place(stage: Steps) -> None:
    with stage.broker() as broker, Form(stage.share, BOTH, sharded=True).create(broker, stage.name) as draft:
        fill(draft)
        draft.seal(in_place=True)
        stage.reach("sealed")
        check(draft)
        stage.reach("holding")


def update_once(stage: Steps) -> None:
    with stage.broker() as broker:
        update(broker, stage.name, ["second"], stage.name)
        stage.reach("updated")


def update_shards(stage: Steps) -> None:
    update_once(stage)


def await_update(stage: Steps) -> None:
    """Stand in line with an update while its base is retired."""
    with stage.broker() as broker:
        with stage.prologue():
            base = broker.attach(stage.name)
        stage.wait(broker, lambda: update(broker, stage.name, ["second"], base, WAIT))
        stage.reach("updated")
        check(base)


def outlive_base(stage: Steps) -> None:
    """Give up the last lease on a base that is retired, when the draft has what it shares with it."""
    with stage.broker() as broker:
        with stage.prologue():
            base = broker.attach(stage.name)
            broker.retire(stage.name)
        update(broker, stage.name, ["second"], base, meanwhile=base.close)
        stage.reach("updated")
        with broker.attach(stage.name) as pool:
            check(pool)


def leave_chain(stage: Steps) -> None:
    """Hold a chain of versions, as the observer does, publish an update of the first, and close them from the first to
    the last."""
    with stage.broker() as broker:
        with stage.prologue():
            held = [broker.attach(stage.name, version=number) for number in range(1, LINKS + 1)]
        update(broker, stage.name, ["first"], held[0])
        stage.reach("updated")
        while held:
            left = held.pop(0)
            left.close()
            for pool in held:
                check_anew(broker, pool)
            stage.reach(f"left {left.version}")


def discard(stage: Steps) -> None:
    with stage.broker() as broker:
        with Form(stage.share).create(broker, stage.name) as draft:
            fill(draft)
        stage.reach("discarded")


def read_draft(stage: Steps) -> None:
    """Attach to what another process writes, and read it when that is sealed."""
    with stage.broker() as broker:
        with broker.attach(stage.name, version=1, unsealed=True) as pool:
            stage.line.say(IN_LINE)
            eventually(
                lambda: "current" in {each.state for each in broker.pools() if each.name == stage.name}, "the seal"
            )
            check(pool)
            stage.reach("holding")
        stage.reach("closed")


def outlive_draft(stage: Steps) -> None:
    """Read what was written by a draft that is given up, and then is held by its reader's lease alone."""
    with stage.broker() as broker:
        with stage.prologue():
            draft = Form(stage.share).create(broker, stage.name)
            fill(draft)
        with broker.attach(stage.name, version=draft.version, unsealed=True) as pool:
            stage.reach("holding")
            draft.close()
            stage.reach("discarded")
            check(pool)
        stage.reach("closed")


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


def follow(stage: Steps) -> None:
    with stage.broker() as broker:
        with broker.follow(stage.name, timeout=WAIT) as versions:
            assert next(versions) == 1
            stage.reach("following")
            Form(stage.share).publish(broker, stage.name)
            assert next(versions) == 2
            stage.reach("followed")
        stage.reach("left")


def follow_chain(stage: Steps) -> None:
    _follow_switching(stage, _update_second)


def follow_team(stage: Steps) -> None:
    _follow_switching(stage, TEAM_READ.publish)


def lock(stage: Steps) -> None:
    with stage.broker() as broker:
        with broker.lock(stage.name):
            stage.reach("locked")
        stage.reach("unlocked")


def await_lock(stage: Steps) -> None:
    with stage.broker() as broker, stage.wait(broker, lambda: broker.lock(stage.name, timeout=WAIT)):
        stage.reach("locked")


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
        switch_team,
        switch_chain,
        refuse_switch,
        write,
        write_shards,
        write_in_place,
        write_shards_in_place,
        update_once,
        update_shards,
        await_update,
        outlive_base,
        leave_chain,
        discard,
        read_draft,
        outlive_draft,
        await_publication,
        await_turn,
        await_room,
        await_either,
        give_up,
        watch,
        follow,
        follow_chain,
        follow_team,
        lock,
        await_lock,
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


def _switch(stage: Steps, publish: Callable[[Broker, str], int]) -> None:
    with stage.broker() as broker:
        with stage.prologue():
            pool = broker.attach(stage.name, device=None if stage.share == "vmm" else 0)
            publish(broker, stage.name)
        pool.switch()
        stage.reach("switched")
        check(pool)


def _follow_switching(stage: Steps, publish: Callable[[Broker, str], int]) -> None:
    with stage.broker() as broker, broker.attach(stage.name, device=0) as pool:
        with pool.follow(switch=True, timeout=WAIT) as versions:
            with stage.prologue():
                publish(broker, stage.name)
            assert next(versions) == pool.version == 2
            stage.reach("followed")
            check(pool)
        stage.reach("holding")


def _update_second(broker: Broker, name: str) -> int:
    return update(broker, name, ["second"], name)


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


def succeed_with_update(line: Channel, directory: str, name: str, *_: object) -> None:
    """As :func:`succeed`, with an update of the version that is current now."""
    stage = Steps(line, directory, name, "", "")
    with Broker(directory) as broker, broker.attach(name) as base:
        version = stage.wait(broker, lambda: update(broker, name, ["first"], base, WAIT))
        with broker.attach(name, version=version) as pool:
            check(pool)
        check(base)
        line.say(f"sealed {version}")


def succeed_with_lock(line: Channel, directory: str, name: str, share: str, *_: object) -> None:
    """Wait for the lock of the name, then publish, and say the version."""
    stage = Steps(line, directory, name, share, "")
    with Broker(directory) as broker, stage.wait(broker, lambda: broker.lock(name, timeout=WAIT)):
        line.say(f"sealed {Form(share).publish(broker, name)}")


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

IN_PLACE = (*CHAINS, Form("vmm", BOTH, sharded=True))

REFUSALS = (Exists, NotFound, OverBudget, Retired, TimedOut)
"""What may come of doing anything at any time."""

DEEDS = (
    *("attach", "attach", "attach", "close", "close", "nap", "switch", "create", "create", "either", "retire"),
    *("update", "update", "in_place", "lock", "follow", "glance", "glance"),
)

MOST = 3
"""Pools that one of them holds at once."""


def do_anything(line: Channel, directory: str, names: str, seed: int) -> None:
    """Attach, read, close, create, write, seal, update, discard, wait, sleep, wake, switch, lock, follow and retire,
    without end."""
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
    elif deed == "update":
        update_any(chance, broker, held, wait)
    elif deed == "in_place":
        held.append(seal_in_place(broker, name, chance.choice(IN_PLACE), wait))
    elif deed == "lock":
        with broker.lock(name, timeout=wait):
            check(held[-1]) if held else broker.devices()
    elif deed == "glance":
        glance(broker, name)
    elif deed == "follow":
        follow_all(broker, name, held, wait)
    else:
        form = chance.choice((*FORMS, *CHAINS, TEAM))
        either = deed == "either"
        _write(chance, _either(broker, name, form.share, wait) if either else form.create(broker, name, wait))


def _switch_all(held: list[Pool]) -> None:
    """Switch every pool to its current version, where that can take the place of the pool's own."""
    for pool in held:
        with suppress(*NO_SWITCH):
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
