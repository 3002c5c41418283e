from __future__ import annotations

import pytest

from cubroker.server import denials
from cubroker.server.denials import BURST, REFILL, Denials
from cubroker.server.peers import Peer


def peer(uid: int) -> Peer:
    return Peer(4711, uid, uid, -1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_refusal_is_one_line_that_says_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    Denials().log(peer(1001), "user 1001 may not attach to a")
    assert caplog.messages == ["process 4711 (user 1001) was refused: user 1001 may not attach to a"]


def test_a_user_that_is_refused_all_the_time_has_few_lines_and_others_have_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = Denials(clock)
    for _ in range(1000):
        log.log(peer(1001), "no")
    assert len(caplog.messages) == BURST
    log.log(peer(1002), "no")
    assert len(caplog.messages) == BURST + 1
    clock.now += REFILL
    log.log(peer(1001), "no")
    log.log(peer(1001), "no")
    assert caplog.messages[BURST + 1 :] == [
        f"process 4711 (user 1001) was refused: no ({1000 - BURST} more refusals of this user are not in the log)"
    ]
    clock.now += 1000 * REFILL
    for _ in range(1000):
        log.log(peer(1001), "no")
    assert len(caplog.messages) == 2 * BURST + 2


def test_only_so_many_users_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denials, "MAX_USERS", 3)
    log = Denials()
    for uid in range(10):
        log.log(peer(uid), "no")
    assert len(log._allowance._accounts) == 3
