"""The drawing of a load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks import model_weights, timeline
from benchmarks.timeline import Span
from tests.brokers import PATIENCE

ROOT = Path(__file__).parents[3]


def test_spans_within_spans_have_rows_of_their_own() -> None:
    raw = [
        ("client", "main", "load", 10.0, 14.0),
        ("client", "main", "create", 10.0, 11.0),
        ("client", "main", "seal", 13.0, 14.0),
        ("broker", "device", "clear", 10.5, 12.0),
        ("broker", "device", "before", 8.0, 9.0),
        ("client", "main", "start", 9.0, 9.0),
    ]
    spans = timeline.placed(raw, 10.0, 14.0)
    assert spans[:2] == [Span("client main", "load", 0.0, 4.0), Span("client main", "create", 0.0, 1.0)]
    assert {name: [span.what for span in row] for name, row in timeline.lanes(spans).items()} == {
        "client main": ["load"],
        "client main >": ["create", "seal"],
        "broker device": ["clear"],
    }
    head, *rows = timeline.drawing(spans).splitlines()
    assert head.endswith("4000 ms|")
    columns = [row.partition("|")[2].rstrip("|") for row in rows]
    assert columns == ["a" * 100, "b" * 25 + "." * 50 + "d" * 25, "." * 12 + "c" * 38 + "." * 50]


@pytest.mark.parametrize(("loads", "over"), [(0, "one"), (2, "sharded")])
def test_a_load_is_drawn_from_exec_to_exit(tmp_path: Path, loads: int, over: str) -> None:
    command = [sys.executable, "-m", "benchmarks.timeline", "--devices", "host:2@64MiB", "--size", "1MB"]
    command += ["--loads", str(loads), "--over", over, "--output", str(tmp_path)]
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True, env=unmeasured
    )
    kinds = {"client: open files", "client: create", "broker: allocate", "client: map", "client: read", "client: seal"}
    kinds |= set() if loads else {"client: interpreter", "client: import cubroker", "client: connect"}
    assert all(f" {kind} " in ended.stdout for kind in kinds), ended.stdout
    assert "<title>seal: " in (tmp_path / "timeline.svg").read_text()


@pytest.mark.parametrize("loads", [0, 1])
def test_the_drawn_load_is_not_the_first_of_its_broker(loads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[float] = []

    def placed(raw: Iterable[tuple[str, str, str, float, float]], began: float, ended: float) -> list[Span]:
        del ended
        allocated.extend(last - began for who, _, what, _, last in raw if (who, what) == ("broker", "allocate"))
        return []

    monkeypatch.setattr(timeline, "placed", placed)
    monkeypatch.setenv("PYTHONPATH", "")  # which `take` sets
    with model_weights.in_memory(model_weights.tensors(1_000_000)) as path:
        timeline.take("host:1@64MiB", path, loads=loads)
    before, drawn = sorted(allocated)
    assert before < 0 < drawn
