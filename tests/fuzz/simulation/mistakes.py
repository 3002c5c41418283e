"""A ledger that fails over one event, half-way through: what a later one makes of the record that it goes on to write.

The failure may come before any line of the ledger that handling the event runs. What it left half-done is recorded,
as the broker does that survives it; other events may follow. Then the broker is started again.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

import msgspec

from cubroker.protocol import messages as m
from cubroker.server import ledger as package
from cubroker.server.ledger import Ledger
from cubroker.server.ledger import events as e
from cubroker.server.ledger.entries import StateEntry
from cubroker.server.ledger.states import VersionState
from tests.fuzz.simulation.histories import OBSERVER, Action, Play, generate
from tests.fuzz.simulation.search import FINDINGS

SOURCES = str(Path(package.__file__).parent)
ENOUGH = 1 << 40


class Mistake(Exception):
    """What none of the ledger's own code raises."""


class Interruption:
    """Raises :class:`Mistake` before the nth line of the ledger that is run within it; counts them."""

    def __init__(self, line: int = ENOUGH) -> None:
        self.lines = 0
        self._line = line

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return self._step if frame.f_code.co_filename.startswith(SOURCES) else None

    def _step(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                raise Mistake(f"before line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}")
        return self._step


class Survivor:
    """A ledger of a broker that goes on after mistakes, and what it recorded."""

    def __init__(self, game: Play) -> None:
        self.ledger = game.pair.ledger
        self.kept = game.pair.kept
        self.mistakes: list[str] = []

    def handle(self, event: e.LedgerEvent, interruption: Interruption | None = None) -> list[e.Effect]:
        effects: list[e.Effect] = []
        try:
            with interruption or Interruption():
                effects = self.ledger.handle(event)
        except (Mistake, *FINDINGS) as error:
            self.mistakes.append(repr(error))
        for key, value in self.ledger.changes():
            self.kept.pop(key, None)
            if value is not None:
                self.kept[key] = value
        return effects


def attempt(seed: int) -> None:
    """Play the history of a seed, and try what becomes of mistakes at some of its events."""
    (_, (tight, policy, _)), *actions = generate(seed)
    chance = random.Random(seed)
    game = Play(tight, policy, 1)
    for action in actions:
        if chance.random() < 0.06:
            _fail(copy.deepcopy(game), action, chance)
        game.do(action)


def _fail(game: Play, action: Action, chance: random.Random) -> None:
    """Have the ledger make a mistake over the first event of an action."""
    events = _events(copy.deepcopy(game), action)
    if not events:
        return
    trial = Survivor(copy.deepcopy(game))
    counted = Interruption()
    trial.handle(events[0], counted)
    before, survivor = dict(game.pair.kept), Survivor(game)
    survivor.handle(events[0], Interruption(chance.randint(1, counted.lines)))
    whole = _untouched(before, survivor.kept)
    sessions = [session.id for session in game.pair.model.sessions if session.id != OBSERVER]
    more = [*events[1:], *map(e.ProcessExited, sessions)] if chance.random() < 0.5 else []
    for event in more:
        whole.clear()
        survivor.handle(event, Interruption(chance.randint(1, 300)))
    try:
        _restart(game, survivor, whole)
    except Exception as error:
        error.add_note(f"{action}: {events[0]}: {survivor.mistakes}")
        raise


def _events(game: Play, action: Action) -> list[Any]:
    told: list[Any] = []
    vars(game.pair)["handle"] = told.append
    if action[0] != "restart":
        game.do(action)
    return told


def _untouched(before: dict[bytes, bytes], after: dict[bytes, bytes]) -> set[str]:
    """Return the names of which the record says what it said before."""
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    if any(key.startswith((b"l/lease/", b"l/session/", b"l/event/")) for key in changed):
        return set()
    names = {key.split(b"/", 3)[3] for key in before if key.startswith(b"l/name/")}
    return {name.decode() for name in names if not any(key.endswith(b"/" + name) for key in changed)}


def _restart(game: Play, survivor: Survivor, whole: set[str]) -> None:
    """Start another ledger with the record; it holds together, and comes to an end in order."""
    model = game.pair.model
    states = _states(survivor.kept)
    assert model.store is not None
    rules = model.limits, model.policy
    ledger = Ledger.restore(model.devices, model.uid, *rules, survivor.kept.items(), model.store)
    ledger.check()
    for joined in ledger.sessions():
        if not joined.connected:
            ledger.handle(e.ConnectionLost(joined.id))
    ledger.handle(e.Resumed())
    ledger.check()
    after, named = _states(ledger.snapshot()), " ".join(ledger.findings)
    for key, state in states.items():
        assert key[0] not in whole or after[key] == state, "a pool that had no part in it is not as it was"
    for (name, number), state in after.items():
        assert (
            state is not VersionState.LOST
            or states.get((name, number)) is VersionState.LOST
            or f"{name}@{number} is lost" in named
        )
    _finish(ledger)


def _states(items: Mapping[bytes, bytes]) -> dict[tuple[str, int], VersionState]:
    """The state of every version in a record."""
    states = {tuple(key.decode().split("/")[2:]): value for key, value in items.items() if key.startswith(b"l/state/")}
    return {
        (name, int(number)): msgspec.msgpack.decode(value, type=StateEntry).state
        for (number, name), value in states.items()
    }


def _finish(ledger: Ledger) -> None:
    """End every session and report every free; then nothing is left."""
    todo: list[e.LedgerEvent] = [e.ProcessExited(each.id) for each in ledger.sessions() if each.id != OBSERVER]
    todo += [e.RequestReceived(OBSERVER, 1 << 20, m.Retire(*version)) for version in _states(ledger.snapshot())]
    while todo:
        for effect in ledger.handle(todo.pop(0)):
            match effect:
                case e.BindMulticast(group):
                    todo.append(e.MulticastBound(group, "copies", ""))
                case e.UnbindMulticast(group):
                    todo.append(e.MulticastUnbound(group))
                case e.Free(ticket, _, numbers):
                    todo.append(e.Freed(ticket, numbers))
        ledger.check()
    assert not ledger.held_memory()
    assert not _states(ledger.snapshot())
