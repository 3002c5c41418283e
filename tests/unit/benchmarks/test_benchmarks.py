"""The benchmarks, at sizes that say nothing about speed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks import harness, model_weights, options, peer_loaders, report
from benchmarks.__main__ import ALL
from tests import sampling
from tests.brokers import PATIENCE

ROOT = Path(__file__).parents[3]


def test_the_weights_are_723_tensors_of_about_the_size_asked_for(tmp_path: Path) -> None:
    tensors = model_weights.tensors(16 * 10**6)
    assert len(tensors) == 723
    assert model_weights.total(tensors) == pytest.approx(16 * 10**6, rel=0.2)
    model_weights.write_file(tmp_path / "model.safetensors", tensors)
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert [(name, "BF16", tuple(file.get_slice(name).get_shape())) for name, _, _ in tensors] == tensors


def test_a_checkpoint_is_cut_into_files_of_about_the_same_size() -> None:
    tensors = model_weights.tensors(64 * 10**6)
    for count in (1, 2, 20, 100, 723):
        cut = model_weights.parts(tensors, count)
        assert [tensor for part in cut for tensor in part] == tensors
        assert len(cut) == count
        assert all(cut)
    sizes = [model_weights.total(part) for part in model_weights.parts(tensors, 20)]
    assert max(sizes) < 2 * min(sizes)


def test_sizes_are_read_as_people_write_them() -> None:
    assert [options.parse("x", ["--size", text]).nbytes for text in ("8GB", "1.5 kB", "7")] == [8 * 10**9, 1500, 7]
    assert options.parse("x", ["--devices", "host:2"]).nbytes == options.HOST_BYTES
    assert options.parse("x", []).nbytes == options.GPU_BYTES


def test_a_median_says_how_far_its_samples_lie_apart() -> None:
    figure = report.median("x", [3.0, 1.0, 1000.0], "ms", "warm")
    assert (figure.value, figure.note, figure.samples) == (3.0, "warm; 3 times, 1 to 1,000", (1.0, 3.0, 1000.0))


def test_devices_that_reach_each_other_are_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.neighbours(options.parse("x", ["--devices", "host:1"])) is None
    assert options.neighbours(options.parse("x", ["--devices", "host:2/1"])) is None
    assert capsys.readouterr().err.count("has no two devices that reach each other") == 2
    near, far = options.neighbours(options.parse("x", ["--devices", "host:4/2"])) or ("", "")
    assert [uuid.rpartition("-")[2] for uuid in (near, far)] != ["", ""]
    assert near != far


def test_a_loader_that_is_missing_or_fails_gives_a_row_that_says_so(
    tmp_path: Path, workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders = (
        peer_loaders.Loader("missing", "no_such_package", peer_loaders.by_safetensors),
        peer_loaders.Loader("failing", "json", peer_loaders.by_safetensors),
    )
    monkeypatch.setattr(peer_loaders, "LOADERS", loaders)
    figures = dict(peer_loaders.measure_each([tmp_path / "none.safetensors"], 1, "x"))
    assert figures["missing"] == report.absent("missing", "no_such_package is not installed")
    assert figures["failing"].value is None
    assert figures["failing"].note.startswith("failed: ")
    text = report.table("x", {}, options.parse("x", []), {"load": list(figures.values())})
    assert "| load | missing | - | no_such_package is not installed |" in text


@pytest.mark.parametrize("room", range(8, 32))
def test_names_of_packages_are_in_one_piece_where_lines_are_wrapped(room: int) -> None:
    packages = {"x" * (120 - len("- packages:  1, ") - room): 1, "runai-model-streamer": "0.17.1"}
    text = report.table("x", {"packages": packages}, options.parse("x", []), {})
    assert max(map(len, text.splitlines())) <= 120
    assert "runai-model-streamer" in text


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    """Children of benchmarks are forked from a process that has imported torch, and are not measured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch", "cubroker.integrations.torch", "cubroker.driver.host.bindings"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "processes", context)
        for name in os.environ:
            if name.startswith("COVERAGE"):
                patch.delenv(name)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", sampling.daily(sorted(set(ALL) - {"requests"}), 1))  # which takes long at any size
def test_a_benchmark_runs_alone_and_writes_its_results(
    name: str, tmp_path: Path, workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--devices", "host:2@256MiB", "--size", "16MB", "--rounds", "2", "--label", "A-test!", "--output"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, str(tmp_path)])
    harness.run_alone(import_module(f"benchmarks.{name}").measure)
    check(name, tmp_path)


def test_a_benchmark_that_is_interrupted_writes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(plan: options.Plan) -> Iterator[report.Figure]:
        yield report.Figure("first", 1.0, "ms")
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["short.py", "--devices", "host:1", "--label", "here", "--output", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        harness.run_alone(measure)
    document = json.loads((tmp_path / "here.json").read_text())
    assert [(figure["what"], figure["value"]) for figure in document["results"]["short"]] == [("first", 1.0)]
    stolen = f"- CPU time that the host gave to other machines: {document['stolen_cpu_seconds']} s"
    assert stolen in (tmp_path / "here.md").read_text().splitlines()


@pytest.mark.slow
def test_a_benchmark_is_a_program(tmp_path: Path) -> None:
    options = ["--devices", "host:2@64MiB", "--size", "1MB", "--rounds", "1", "--label", "A-test!", "--output"]
    command = [sys.executable, "-m", "benchmarks.driver_calls", *options, str(tmp_path)]
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE, env=unmeasured)
    check("driver_calls", tmp_path)


@pytest.mark.parametrize("program", sorted(set(ALL) - {"driver_calls"}))
def test_every_benchmark_ends_as_a_program_does(program: str) -> None:
    text = (ROOT / "benchmarks" / f"{program}.py").read_text()
    assert text.endswith('\n\nif __name__ == "__main__":\n    run_alone(measure)\n')


def check(name: str, folder: Path) -> None:
    """Check that a benchmark's figures stand in both files."""
    figures = json.loads((folder / "a-test.json").read_text())["results"][name]
    assert figures
    text = (folder / "a-test.md").read_text()
    assert all(f"| {name} | {figure['what']} |" in text for figure in figures)
