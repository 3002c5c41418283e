"""Real vLLM engines on runtime pools, on emulated devices.

They run under ``$CUBROKER_VLLM_PYTHON``, by default the interpreter of the tests, and are skipped where that has no
vLLM. An engine takes seconds, and the import of vLLM up to a minute, so one process imports it for all engines.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cubroker
from cubroker.client import Broker
from cubroker.integrations.fingerprint import checkpoint
from tests.brokers import BrokerProcess, serving

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("CUBROKER_VLLM_PYTHON", sys.executable)

FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
pytestmark = [
    pytest.mark.skipif(subprocess.run([PYTHON, "-c", FIND], check=False).returncode != 0, reason="there is no vLLM"),
    pytest.mark.timeout(1800),
]

Said = dict[str, Any]


class Engines:
    """Starts engines, one after the other."""

    def __init__(self, folder: Path) -> None:
        with (ROOT / "pyproject.toml").open("rb") as file:
            plugins = tomllib.load(file)["project"]["entry-points"]["vllm.general_plugins"]
        metadata = folder / "cubroker-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cubroker\nVersion: 0\n")
        lines = [f"{name} = {value}\n" for name, value in plugins.items()]
        (metadata / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *lines]))
        path = os.pathsep.join(map(str, (folder, Path(cubroker.__file__).parents[1], ROOT)))
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.engines.engine_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": ""},
        )

    def run(self, model: Path, format: str = "cubroker", **job: Any) -> Said:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"model": str(model), "format": format, **job}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(self._log.read())
        reply: Said = json.loads(line)
        return reply

    def close(self) -> None:
        self._process.communicate("")
        self._log.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def lender() -> Iterator[BrokerProcess]:
    with serving("host:2@256MiB") as process:
        yield process


def made(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        vocab_size=512,
        intermediate_size=512,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def hollowed(model: Path, folder: Path) -> Path:
    """A copy whose weights are a header and zeros."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    header = data[: 8 + int.from_bytes(data[:8], "little")]
    weights.write_bytes(header + bytes(len(data) - len(header)))
    return folder


def names(lender: BrokerProcess) -> list[tuple[str, int]]:
    with Broker(lender.directory) as broker:
        return [(pool.name, pool.version) for pool in broker.pools() if pool.state == "current"]


def test_engines_on_a_pool_say_what_a_plain_engine_says_and_read_no_weights(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    """The second engine's checkpoint has no weights; then the running engine goes to a second version."""
    model = made(tmp_path / "model", 0)
    hollow = hollowed(model, tmp_path / "hollow" / "model")
    extra = {"directory": str(lender.directory), "checkpoint": checkpoint(model)}
    plain = engines.run(model, "auto", facts=True)
    first = engines.run(model, extra=extra, facts=True)
    ((pool, version),) = names(lender)
    assert version == 1
    second = engines.run(hollow, extra=extra, facts=True, switch=True)
    assert "error" not in {**plain, **first, **second}, second
    assert first["said"] == plain["said"]
    assert second["said"] == plain["said"]
    for engine in (first, second):
        assert engine["placed"] == {
            "inside": plain["placed"]["total"],
            "writable": 0,
            "total": plain["placed"]["total"],
        }
        assert list(engine["tensors"]) == list(plain["tensors"])
        for name, facts in engine["tensors"].items():  # a compiler tells none of them from the plain engine's
            assert {**facts, "aligned": 0} == {**plain["tensors"][name], "aligned": 0}, name
    assert (second["published"], second["version"]) == (2, 2)
    assert second["still"] == plain["said"]
    assert second["after"] != plain["said"]
    assert names(lender) == [(pool, 2)]


def test_a_model_that_was_preloaded_is_only_attached_to(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    model = made(tmp_path / "preloaded", 3)
    terms = ["--skip-tokenizer-init", "--max-model-len", "128", "--dtype", "bfloat16", "--enforce-eager"]
    extra = {"checkpoint": "third"}
    done = engines.run(
        model,
        preload=[
            *("--json", "--directory", str(lender.directory), *terms, "--max-num-seqs", "4"),
            *("--distributed-executor-backend", "uni", "--model-loader-extra-config", json.dumps(extra)),
        ],
    )
    assert done.get("status") == 0, done
    assert [pool["tensors"] > 20 for pool in json.loads(done["printed"])] == [True]
    before = names(lender)
    hollow = hollowed(model, tmp_path / "hollow" / "preloaded")
    attached = engines.run(hollow, extra={**extra, "directory": str(lender.directory)})
    assert attached["said"] == engines.run(model, "auto")["said"]
    assert names(lender) == before


def test_two_fine_tunes_never_meet_and_an_engine_without_a_broker_falls_back_only_if_told(
    engines: Engines, lender: BrokerProcess, tmp_path: Path
) -> None:
    one, other = made(tmp_path / "model", 1), made(tmp_path / "other" / "model", 2)
    before = set(names(lender))
    extra = {"directory": str(lender.directory)}
    said = [engines.run(model, extra=extra).get("said") for model in (one, other, one)]
    assert None not in said
    assert said[0] == said[2] != said[1]
    assert len(set(names(lender)) - before) == 2
    absent = {"directory": str(tmp_path / "absent")}
    assert "no broker serves" in engines.run(one, extra=absent)["error"]
    assert engines.run(one, extra={**absent, "fallback": True})["said"] == said[0]
    assert "has no other" in engines.run(one, extra={"other": 1})["error"]
