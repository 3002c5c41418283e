"""Progress without a terminal: plain lines, not too many."""

from __future__ import annotations

import pytest

from cubroker.cli.progress import EVERY, Lines, progress


def test_plain_progress_speaks_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, 1.0, EVERY, EVERY + 1, 2 * EVERY, 3 * EVERY])
    lines = Lines("loading llama", lambda: next(moments))
    for done in (1 << 30, 5 << 30, 6 << 30, 10 << 30, 12 << 30):
        lines(done, 12 << 30)
    assert capsys.readouterr().err.splitlines() == [
        "loading llama: 5.0 GiB of 12.0 GiB, 1.0 GiB/s",
        "loading llama: 10.0 GiB of 12.0 GiB, 1.0 GiB/s",
    ]


def test_without_a_terminal_the_beginning_is_a_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("loading llama") as report:
        report(1, 2)
    assert capsys.readouterr().err == "loading llama\n"
