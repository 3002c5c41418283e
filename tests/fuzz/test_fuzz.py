from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cubroker.protocol.errors import Invalid
from tests import sampling
from tests.fuzz.mutate import Finding, hunt
from tests.fuzz.protocol_targets import TARGETS
from tests.fuzz.target import CRASHES, Target, attempt_measured

INPUTS = 600
"""Of each target, others every day."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_does_harm(name: str) -> None:
    finding = hunt(TARGETS[name], INPUTS, seed=sampling.SEED)
    assert finding is None, f"{finding.error}\n{finding.data!r}"


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_in_order_is_taken(name: str) -> None:
    target = TARGETS[name]
    taken = 0
    for data in target.seeds:
        try:
            target.run(data)
        except Invalid:
            continue
        taken += 1
    assert taken


@pytest.mark.parametrize("path", sorted(CRASHES.glob("*.bin")), ids=lambda path: path.stem)
def test_what_once_did_harm_does_none_now(path: Path) -> None:
    attempt_measured(TARGETS[path.stem.rpartition("-")[0]], path.read_bytes())


def test_harm_is_found_and_found_again() -> None:
    def fragile(data: bytes) -> None:
        if data[:1] == b"b":
            raise IndexError("fell over")
        raise Invalid("as it should")

    target = Target("fragile", fragile, (b"a",))
    finding = hunt(target, 10_000, seed=1)
    assert isinstance(finding, Finding)
    assert finding.data[:1] == b"b"
    assert finding.error == "IndexError: fell over"
    assert hunt(target, 10_000, seed=1) == finding


def test_an_input_that_takes_much_memory_is_found() -> None:
    target = Target("greedy", lambda data: bytes(8 << 20), (b"a",))
    finding = hunt(target, 1, seed=1)
    assert finding is not None
    assert finding.error.startswith("Greedy: 8")


@pytest.mark.slow
def test_the_long_form_leaves_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--engine", "plain", "--jobs", "2", "--inputs", "50", "checkpoint"]
    environment = os.environ | {"CUBROKER_FUZZ_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:9]) == (0, "50 inputs"), done.stderr
    assert not [*tmp_path.iterdir()]
