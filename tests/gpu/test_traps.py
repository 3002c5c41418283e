"""The sample of docs/traps.md about CUDA graphs, which needs a GPU, prints what stands below it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import PATIENCE
from tests.gpu.sharing import gpu_broker
from tests.unit.examples.test_examples import needs_gpu, traps

pytest.importorskip("torch")


def test_a_graph_follows_a_switch_and_fails_after_the_pool_is_closed(tmp_path: Path) -> None:
    fills, *others = traps()
    with gpu_broker() as (_, broker):
        environment = os.environ | {"CUBROKER_DIR": str(broker.directory)}
        for sample, printed in (fills, *filter(needs_gpu, others)):
            path = tmp_path / "sample.py"
            path.write_text(sample)
            command = [sys.executable, str(path)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
            assert done.stdout == printed
