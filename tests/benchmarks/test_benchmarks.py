"""The benchmarks, at sizes that say nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks import plan, report, weights
from tests.brokers import PATIENCE

ROOT = Path(__file__).parents[2]


def test_the_weights_are_723_tensors_of_about_the_size_asked_for(tmp_path: Path) -> None:
    tensors = weights.tensors(16 * 10**6)
    assert len(tensors) == 723
    assert weights.total(tensors) == pytest.approx(16 * 10**6, rel=0.2)
    weights.write_file(tmp_path / "model.safetensors", tensors)
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert [(name, "BF16", tuple(file.get_slice(name).get_shape())) for name, _, _ in tensors] == tensors


def test_sizes_are_read_as_people_write_them() -> None:
    assert [plan.parse("x", ["--size", text]).nbytes for text in ("8GB", "1.5 kB", "7")] == [8 * 10**9, 1500, 7]
    assert plan.parse("x", ["--devices", "host:2"]).nbytes == plan.HOST_BYTES
    assert plan.parse("x", []).nbytes == plan.GPU_BYTES


def test_a_median_says_how_far_its_samples_lie_apart() -> None:
    figure = report.median("x", [3.0, 1.0, 1000.0], "ms", "warm")
    assert (figure.value, figure.note, figure.samples) == (3.0, "warm; 3 times, 1 to 1,000", (1.0, 3.0, 1000.0))


def test_devices_that_reach_each_other_are_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.neighbours(plan.parse("x", ["--devices", "host:1"])) is None
    assert plan.neighbours(plan.parse("x", ["--devices", "host:2/1"])) is None
    assert capsys.readouterr().err.count("has no two devices that reach each other") == 2
    near, far = plan.neighbours(plan.parse("x", ["--devices", "host:4/2"])) or ("", "")
    assert [uuid.rpartition("-")[2] for uuid in (near, far)] != ["", ""]
    assert near != far


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["attach", "load", "create", "memory", "sleep", "digest", "peers", "replicate", "restart", "driver_calls"]
)
def test_a_benchmark_runs_alone_and_writes_its_results(name: str, tmp_path: Path) -> None:
    options = [
        "--devices",
        "host:2@256MiB",
        "--size",
        "16MB",
        "--rounds",
        "2",
        "--output",
        str(tmp_path),
        "--label",
        "A test!",
    ]
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], cwd=ROOT, check=True, timeout=2 * PATIENCE)
    figures = json.loads((tmp_path / "a-test.json").read_text())["results"][name]
    assert figures
    text = (tmp_path / "a-test.md").read_text()
    assert all(f"| {name} | {figure['what']} |" in text for figure in figures)
