from __future__ import annotations

import os

import pytest

from cubroker.protocol.wire import Digest
from cubroker.server.transport import requests
from cubroker.server.transport.requests import RecentLayouts


def test_a_layout_is_hashed_in_steps_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Digest] = []
    monkeypatch.setattr(requests, "Digest", lambda: made.append(Digest()) or made[-1])
    known, layout = RecentLayouts(), os.urandom(3 * requests.HASH_STEP + 1)
    assert len(list(known.steps(layout))) == 4
    assert list(known.steps(layout)) == []
    assert known.digest(layout) == Digest(layout).done()
    assert len(made) == 1


def remembered(known: RecentLayouts, layout: bytes) -> bool:
    """Whether a layout need not be hashed again, which is not done here."""
    return not any(True for _ in known.steps(layout))


def test_two_may_hash_one_layout_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = requests.HASH_STEP + 1
    monkeypatch.setattr(requests, "MAX_REMEMBERED", 2 * nbytes)
    known, layout = RecentLayouts(), os.urandom(nbytes)
    both = known.steps(layout), known.steps(layout)
    for _ in range(3):
        for steps in both:
            next(steps, None)
    assert known.digest(layout) == Digest(layout).done()
    known.digest(os.urandom(nbytes))
    assert remembered(known, layout), "it is counted twice"


def test_the_layouts_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_REMEMBERED", 1000)
    known, layouts = RecentLayouts(), [os.urandom(400) for _ in range(10)]
    assert [known.digest(layout) for layout in layouts] == [Digest(layout).done() for layout in layouts]
    assert [remembered(known, layout) for layout in layouts] == [False] * 8 + [True] * 2
    large = os.urandom(2000)
    assert known.digest(large) == Digest(large).done()
    assert remembered(known, large), "the last one is there for whoever asked"
    assert not any(remembered(known, layout) for layout in layouts)
