"""Look for a seed whose history fails, and tell about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from cubroker.protocol import messages as m
from cubroker.server.ledger import Impossible
from cubroker.server.ledger import events as e
from tests.fuzz.simulation.histories import OBSERVER, Action, Play, generate
from tests.fuzz.simulation.shrink import shrink

FINDINGS = (AssertionError, Impossible, LookupError, AttributeError, TypeError, ValueError, StopIteration)
OBSERVE_EVERY = 16


def attempt(history: Sequence[Action]) -> tuple[Play, Exception | None]:
    """Play a history to its end; return the game as far as it went, and what went wrong."""
    (_, world), *actions = history
    game = Play(*world)
    try:
        for number, action in enumerate(actions):
            game.do(action)
            if number % OBSERVE_EVERY == 0:
                game.observe()
        game.finish()
    except FINDINGS as error:
        return game, error
    return game, None


def explain(seed: int) -> str | None:
    """Play the history of a seed; return None, or the seed, a shrunk history and what went wrong in it."""
    history = generate(seed)
    if attempt(history)[1] is None:
        return None
    short = shrink(history, lambda part: attempt(part)[1] is not None)
    game, error = attempt(short)
    lines = [f"seed {seed}: {len(short)} of {len(history)} actions are enough: {short}"]
    lines += [f"  {event}" for event in game.events]
    lines.append(f"{type(error).__name__}: {error}")
    for name in ("a", "b", "c"):
        with suppress(*FINDINGS):  # of the same mistake
            for effect in game.pair.ledger.handle(e.RequestReceived(OBSERVER, 0, m.Tell(name, 0))):
                if isinstance(effect, e.Respond) and isinstance(effect.body, m.Story):
                    lines += [f"  story of {name}: {line.text}" for line in effect.body.lines]
    return "\n".join(lines)


def search(seeds: Iterable[int]) -> str | None:
    """Return the report of the first seed that fails, or None."""
    return next((report for seed in seeds if (report := explain(seed)) is not None), None)
