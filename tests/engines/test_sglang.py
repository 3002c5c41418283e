"""Real SGLang engines on runtime pools, on emulated devices.

They run under ``$CUBROKER_SGLANG_PYTHON``, by default the interpreter of the tests, and are skipped where that has no
SGLang. Packages with kernels for GPUs, which SGLang imports and does not use on a CPU, are stood for by stubs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import cubroker
from cubroker.client import Broker
from cubroker.integrations.fingerprint import checkpoint
from tests.brokers import BrokerProcess, serving
from tests.engines import interpreters
from tests.engines.test_triton import shared
from tests.engines.test_vllm import hollowed, made

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("CUBROKER_SGLANG_PYTHON", sys.executable)

pytestmark = [
    pytest.mark.skipif(interpreters.package(PYTHON, "sglang") is None, reason="there is no SGLang"),
    pytest.mark.timeout(1800),
]


def environment(site: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (site, Path(cubroker.__file__).parents[1], ROOT)))
    return os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": ""}


SHARED = Path("/dev/shm")


class Engine:
    """One engine, a process of its own and its children."""

    def __init__(self, site: Path, log: Path, model: Path, load_format: str = "cubroker", **extra: Any) -> None:
        self._log = log.open("w+")
        self.process = subprocess.Popen(
            [PYTHON, "-m", "tests.engines.sglang_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(site),
            start_new_session=True,
        )
        arguments = {"model_path": str(model), "load_format": load_format}
        self._send({**arguments, "model_loader_extra_config": json.dumps(extra)})

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def answer(self) -> Any:
        """What came of a job, or of the start."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise AssertionError(self.log())
        return json.loads(line)

    def run(self, **job: Any) -> Any:
        self._send(job)
        return self.answer()

    def workers(self) -> list[int]:
        """Its processes that have memory of the broker's."""
        pids = [self.process.pid]
        for pid in pids:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        return [pid for pid in pids if "/memfd:cubroker-device" in Path(f"/proc/{pid}/maps").read_text()]

    def close(self) -> None:
        try:
            self.process.communicate("", timeout=120)
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()

    def _send(self, job: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)


Start = Callable[..., Engine]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages: the plugin of this tree, and stubs."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        plugins = tomllib.load(file)["project"]["entry-points"]["sglang.srt.plugins"]
    site = tmp_path / "site"
    metadata = site / "cubroker-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cubroker\nVersion: 0\n")
    lines = [f"{name} = {value}\n" for name, value in plugins.items()]
    (metadata / "entry_points.txt").write_text("".join(["[sglang.srt.plugins]\n", *lines]))
    for package in ("sgl_kernel", "torchvision"):
        (site / package).mkdir()
        shutil.copy(Path(__file__).with_name("stub_package.py"), site / package / "__init__.py")
    return site


@pytest.fixture
def start(site: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines, which are ended after the test."""
    started, before = list[Engine](), set(SHARED.iterdir())

    def engine(*arguments: Any, **extra: Any) -> Engine:
        started.append(Engine(site, tmp_path / f"log-{len(started)}", *arguments, **extra))
        return started[-1]

    yield engine
    for each in started:
        each.close()
    for path in set(SHARED.iterdir()) - before:  # which SGLang's processes leave, as they are killed at its end
        if path.name.startswith(("sem.mp-", "sglang_loads_")) and not in_use(path):
            path.unlink(missing_ok=True)


def in_use(path: Path) -> bool:
    """Whether a process has a file mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(path) in maps.read_text():
                return True
    return False


@pytest.fixture(scope="module")
def lender() -> Iterator[BrokerProcess]:
    with serving("host:2@256MiB") as process:
        yield process


def publish_changed(broker: Broker, name: str) -> int:
    """Publish another version of a runtime pool, with other numbers: as a trainer does."""
    with broker.attach(name) as pool:
        arrays = {key: torch.from_dlpack(tensor).clone() for key, tensor in pool.items()}
    arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"].flip(0).contiguous()
    return broker.publish(name, arrays)


def test_engines_on_a_pool_say_what_a_plain_engine_says_and_go_to_another_version(
    start: Start, lender: BrokerProcess, tmp_path: Path
) -> None:
    """The second engine's checkpoint has no weights, and both have one copy of them, which they only read."""
    model = made(tmp_path / "model", 0)
    hollow = hollowed(model, tmp_path / "hollow" / "model")
    extra = {"directory": str(lender.directory), "checkpoint": checkpoint(model)}
    plain, first = start(model, "auto"), start(model, **extra)
    assert (plain.answer(), first.answer()) == ("started", "started")
    expected = plain.run()
    plain.close()
    second = start(hollow, **extra)
    assert second.answer() == "started"
    assert first.run() == second.run() == expected
    assert "cubroker: published sglang/model/" in first.log()
    assert "cubroker: attached to sglang/model/" in second.log()
    with Broker(lender.directory) as broker:
        (info,) = broker.pools()
        assert info.leases == 2
        for engine in (first, second):
            (worker,) = engine.workers()
            found = shared(worker)
            assert found["Rss"] > 0.9 * info.nbytes
            assert found["Pss"] == pytest.approx(found["Rss"] / 2, rel=0.01)
            lines = [
                line for line in Path(f"/proc/{worker}/maps").read_text().splitlines() if "cubroker-device" in line
            ]
            assert lines
            assert all(" r--s " in line for line in lines)

        weight = {"tensor": "model.norm.weight", "shape": [256]}
        for refused in ({"update": str(tmp_path)}, {"update": f"{hollow}@x"}, weight):
            done, words = second.run(**refused)
            assert not done
            assert "which is read-only: publish another version" in words
        assert publish_changed(broker, info.name) == 2
        assert second.run() == expected
        assert second.run(update=str(hollow)) == [True, f"The model has {info.name}@2."]
        assert second.run() != expected
        assert first.run() == expected
        assert second.run(update=f"{hollow}@1") == [True, f"The model has {info.name}@1."]
        assert second.run() == expected
        done, words = second.run(update=f"{hollow}@9")
        assert not done
        assert second.run() == expected


REFUSED = """
import json
from torch import nn
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from cubroker.integrations.sglang import _check
from cubroker.protocol.errors import Unsupported

def said(method, **attributes):
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    for model in models:
        made = object.__new__(method)
        if isinstance(made, nn.Module):
            nn.Module.__init__(made)
        model[0].quant_method = made
    vars(models[0][0]).update(attributes)
    try:
        _check(*models)
    except Unsupported as error:
        return error.message

print(json.dumps([
    said(UnquantizedLinearMethod),
    said(Fp8LinearMethod),
    said(UnquantizedFusedMoEMethod),
    said(UnquantizedLinearMethod, use_intel_amx_backend=True),
]))
"""


def test_modules_that_a_pool_cannot_describe_are_refused_by_name(site: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-c", REFUSED],
        env=environment(site) | {"SGLANG_USE_CPU_ENGINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    plain, quantized, mixture, packed = json.loads(done.stdout.splitlines()[-1])
    assert plain is None
    assert "0 is computed by Fp8LinearMethod" in quantized
    assert "0 is computed by UnquantizedFusedMoEMethod" in mixture
    assert "0 has set use_intel_amx_backend while it was loaded" in packed


def test_an_engine_without_a_broker_falls_back_only_if_told(start: Start, tmp_path: Path) -> None:
    model = made(tmp_path / "model", 1)
    absent = {"directory": str(tmp_path / "absent")}
    refused, falls = start(model, **absent), start(model, **absent, fallback=True)
    assert falls.answer() == "started"
    assert "no pool is used; the engine's own loader loads the model: no broker serves" in falls.log()
    with pytest.raises(AssertionError, match="no broker serves"):
        refused.answer()
