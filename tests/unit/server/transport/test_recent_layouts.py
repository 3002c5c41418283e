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


def test_two_may_hash_one_layout_at_a_time() -> None:
    known, layout = RecentLayouts(), os.urandom(requests.HASH_STEP + 1)
    both = known.steps(layout), known.steps(layout)
    for _ in range(3):
        for steps in both:
            next(steps, None)
    assert known.digest(layout) == Digest(layout).done()
    assert known._nbytes == len(layout)


def test_the_layouts_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_REMEMBERED", 1000)
    known, layouts = RecentLayouts(), [os.urandom(400) for _ in range(10)]
    assert [known.digest(layout) for layout in layouts] == [Digest(layout).done() for layout in layouts]
    assert list(known._known) == layouts[-2:]
    large = os.urandom(2000)
    assert known.digest(large) == Digest(large).done()
    assert list(known._known) == [large], "the last one is there for whoever asked"
