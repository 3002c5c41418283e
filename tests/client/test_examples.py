"""The examples run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cubroker.client import Broker
from cubroker.client.loader import load
from tests import checkpoints
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.client.conftest import leases

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAPS = Path(__file__).parents[2] / "docs" / "traps.md"


def started(lender: BrokerProcess, example: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    environment = os.environ | {"CUBROKER_DIR": str(lender.directory)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def said(process: subprocess.Popen[str]) -> str:
    with process:
        out, _ = process.communicate(timeout=2 * PATIENCE)  # two processors may be busy, and torch is large
        assert process.returncode == 0
        return out


def test_arrays_are_written_by_one_process_and_read_by_another(lender: BrokerProcess, client: Broker) -> None:
    written = said(started(lender, "share_arrays.py", "write"))
    read = said(started(lender, "share_arrays.py", "read"))
    assert "primes [2, 3, 5, 7, 11]" in read
    assert written.split()[-1] == read.split()[-1]
    with client.attach("examples/arrays") as pool:
        assert f"{pool['noise'].numpy().sum(dtype=np.float32):.3f}" == read.split()[-1]


def test_torch_tensors_outlive_the_pool(lender: BrokerProcess, client: Broker, name: str, tmp_path: Path) -> None:
    tensors = checkpoints.filled(checkpoints.EVERY_DTYPE)
    load(client, name, checkpoints.write(tmp_path / "m.safetensors", tensors))
    assert f"{name}@1: {len(tensors)} tensors attached in" in said(started(lender, "torch_worker.py", name))


def test_scratch_memory_is_handed_over_and_back(lender: BrokerProcess, client: Broker) -> None:
    produces, consumes = started(lender, "hand_over.py", "produce"), started(lender, "hand_over.py", "consume")
    assert said(produces) == ""
    *rounds, end = said(consumes).splitlines()
    assert rounds == [f"generation {number}: mean {number}.0" for number in range(1, 6)]
    assert "event 'full' of examples/scratch@1 ended at generation 5: session" in end


def test_versions_are_followed_to_the_end(lender: BrokerProcess, client: Broker, name: str, tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "m.safetensors", checkpoints.filled([("x", "U8", (1,))]))
    follower = started(lender, "follow_versions.py", name)
    assert follower.stdout is not None
    assert follower.stdout.readline() == f"waiting for {name}\n"
    for version in (1, 2):
        load(client, name, path)
        assert follower.stdout.readline() == f"{name}@{version}: 1 tensors\n"
    client.retire(name)
    assert said(follower) == ""


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_without_arguments_says_how_to_run_it(example: str) -> None:
    command = [sys.executable, str(EXAMPLES / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert f"python examples/{example} " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_model_runs_on_weights_that_its_process_did_not_load(minilm: Path) -> None:
    with serving("host:1@256MiB") as broker, Broker(broker.directory) as client:
        load(client, "minilm", minilm)
        text = said(started(broker, "transformers_worker.py", "minilm", str(minilm), "weights are loaded once"))
        assert text.startswith("'weights are loaded once': [")
        eventually(lambda: leases(client, "minilm") == 0, "the end of the lease")


@pytest.mark.slow
def test_the_samples_of_the_traps_print_what_stands_below_them(
    lender: BrokerProcess, client: Broker, tmp_path: Path
) -> None:
    text = TRAPS.read_text()
    samples = re.findall(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(samples) == text.count("```python") == text.count("\n## ")
    for number, (sample, printed) in enumerate(samples):
        path = tmp_path / f"sample_{number}.py"
        path.write_text(sample)
        assert said(started(lender, str(path))) == printed
