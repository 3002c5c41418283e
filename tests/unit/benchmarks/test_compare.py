"""What is worse in one run of the benchmarks than in another."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.report import Figure, absent, median
from tests.brokers import PATIENCE

ROOT = Path(__file__).parents[3]

FAST, SLOW = [10.0, 11.0, 12.0], [7.0, 8.0, 9.0]


def run(*figures: Figure, **about: Any) -> dict[str, Any]:
    """Return a document of results."""
    results = {"load": [asdict(figure) for figure in figures]}
    return {"devices": "host:1", "nbytes": 1, "machine": {"cpus": 2}, "results": results, **about}


def rate(samples: Sequence[float]) -> Figure:
    return median("rate", samples, "GB/s")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (rate(FAST), rate(SLOW), True),
        (rate(SLOW), rate(FAST), False),
        (rate(FAST), rate([8.0, 9.0, 10.5]), False),  # they overlap
        (rate([10.0, 10.1, 10.2]), rate([9.7, 9.8, 9.9]), False),  # by 3 %
        (median("time", FAST, "ms"), median("time", SLOW, "ms"), False),
        (median("time", SLOW, "ms"), median("time", FAST, "ms"), True),
        (median("ratio", FAST, ""), median("ratio", SLOW, ""), False),  # which is better nobody says
        (median("ratio", FAST, ""), median("ratio", SLOW, "", better="more"), True),
        (median("ratio", FAST, ""), median("ratio", SLOW, "", better="less"), False),
        (Figure("alone", 10.0, "s"), Figure("alone", 12.0, "s"), False),
        (Figure("alone", 10.0, "s"), Figure("alone", 13.0, "s"), True),
        (rate(FAST), absent("rate", "it failed"), False),
        (absent("rate", "it failed"), rate(SLOW), False),
        (rate(FAST), median("another", SLOW, "GB/s"), False),
    ],
)
def test_a_figure_is_worse_when_its_samples_do_not_overlap(old: Figure, new: Figure, found: bool) -> None:
    lines = compare.worse(run(old)["results"], run(new)["results"])
    assert bool(lines) == found
    assert all(line.startswith(f"load: {new.what}: ") for line in lines)


def test_results_without_directions_can_be_compared() -> None:
    old = run(rate(FAST))
    del old["results"]["load"][0]["better"]
    assert compare.worse(old["results"], run(rate(SLOW))["results"]) == [
        "load: rate: 11 GB/s (10 to 12), and now 8 GB/s (7 to 9)"
    ]


def test_what_differs_beside_the_figures_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.report(run(rate(FAST)), run(rate(FAST), nbytes=2, machine={"cpus": 3})) == 0
    said = capsys.readouterr()
    assert said.out == "no figure is worse\n"
    assert said.err == "nbytes: 1 before, and 2 now\ncpus: 2 before, and 3 now\n"


def ended(*command: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", *command)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_worse_figure_is_the_status_of_a_comparison(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(run(rate(FAST))))
    new.write_text(json.dumps(run(rate(SLOW))))
    assert ended("benchmarks.compare", str(new), str(old)).returncode == 0
    worse = ended("benchmarks.compare", str(old), str(new))
    assert (worse.returncode, worse.stdout) == (1, "load: rate: 11 GB/s (10 to 12), and now 8 GB/s (7 to 9)\n")


def test_a_worse_figure_is_the_status_of_a_benchmark(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    impossible = median("create() of one allocation", [1e-9] * 3, "ms")
    old.write_text(json.dumps(run() | {"results": {"create": [asdict(impossible)]}}))
    options = ("--devices", "host:1@64MiB", "--size", "1MB", "--compare", str(old))
    worse = ended("benchmarks.create", *options)
    assert worse.returncode == 1, worse.stderr
    assert "create: create() of one allocation: 1e-09 ms (1e-09 to 1e-09), and now" in worse.stdout
