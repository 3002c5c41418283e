"""The examples, and the samples in docs/traps.md and of publishing, run as they are written.

Those that need torch run in this process, which has imported it already; the others in processes of their own.
"""

from __future__ import annotations

import gc
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from cubroker.client import Broker
from cubroker.client.loading.loader import load
from tests import checkpoints
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.unit.client.conftest import leases

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
TRAPS = ROOT / "docs" / "traps.md"
WEIGHTS = ROOT / "docs" / "live-weights.md"


Trap = tuple[str, str]
"""A sample and what it prints."""


def traps() -> list[Trap]:
    """The samples of the page, in its order."""
    return re.findall(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```$", TRAPS.read_text(), re.MULTILINE | re.DOTALL)


def needs_gpu(trap: Trap) -> bool:
    """Whether a sample is run by tests/gpu alone."""
    return "torch.cuda" in trap[0]


def served(trap: Trap) -> bool:
    """Whether a sample is the application of a server, and its output that of a client."""
    return trap[1].startswith("$ ")


def start(lender: BrokerProcess, example: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    environment = os.environ | {"CUBROKER_DIR": str(lender.directory)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def output(process: subprocess.Popen[str], status: int = 0) -> str:
    with process:
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == status
        return out


class Here:
    """Runs scripts in this process, as ``python SCRIPT ARGUMENTS`` would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd
        for name in os.environ:
            if name.startswith("COVERAGE"):  # a script's own processes import torch, slowly if measured
                monkeypatch.delenv(name)

    def run(self, broker: BrokerProcess | None, script: Path, *arguments: str) -> str:
        """Return what a script prints."""
        self._monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        if broker:
            self._monkeypatch.setenv("CUBROKER_DIR", str(broker.directory))
        self._capfd.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                runpy.run_path(str(script), run_name="__main__")
            finally:
                gc.unfreeze()  # what a script has frozen
        return self._capfd.readouterr().out


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capfd)


def test_no_folder_of_the_examples_is_imported_in_place_of_a_package() -> None:
    # `python examples/FILE` puts examples/ first in sys.path; there torch takes a folder `triton` for the package.
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert not {name for name in folders - {"__pycache__"} if name.isidentifier()}


@pytest.mark.slow
def test_arrays_are_written_by_one_process_and_read_by_another(lender: BrokerProcess, client: Broker) -> None:
    written = output(start(lender, "share_arrays.py", "write"))
    read = output(start(lender, "share_arrays.py", "read"))
    assert "primes [2, 3, 5, 7, 11]" in read
    assert written.split()[-1] == read.split()[-1]
    with client.attach("examples/arrays") as pool:
        assert f"{pool['noise'].numpy().sum(dtype=np.float32):.3f}" == read.split()[-1]


@pytest.mark.slow
def test_scratch_memory_is_handed_over_and_back(lender: BrokerProcess, client: Broker) -> None:
    produces, consumes = start(lender, "hand_over.py", "produce"), start(lender, "hand_over.py", "consume")
    assert output(produces) == ""
    *rounds, end = output(consumes).splitlines()
    assert rounds == [f"generation {number}: mean {number}.0" for number in range(1, 6)]
    assert re.search("event .full. of examples/scratch@[0-9]+ ended at generation 5: session", end)


@pytest.mark.slow
def test_the_pool_of_a_producer_that_was_killed_does_not_keep_a_consumer(lender: BrokerProcess, client: Broker) -> None:
    pool = "examples/scratch"
    killed = start(lender, "hand_over.py", "produce")
    eventually(
        lambda: any(each.state == "current" and each.leases for each in client.pools()), "the producer to attach"
    )
    version = client.describe(pool)[0].version
    killed.kill()
    assert output(killed, -signal.SIGKILL) == ""
    eventually(lambda: leases(client, pool) == 0, "the end of its lease")
    consumes = start(lender, "hand_over.py", "consume")
    eventually(lambda: leases(client, pool) == 1, "the consumer to attach")
    assert output(start(lender, "hand_over.py", "produce")) == ""
    stale, *rounds, end = output(consumes).splitlines()
    assert stale == f"{pool}@{version} has no producer"
    assert rounds == [f"generation {number}: mean {number}.0" for number in range(1, 6)]
    assert f"event 'full' of {pool}@{version + 1} ended at generation 5: session" in end


@pytest.mark.slow
def test_versions_are_followed_to_the_end(lender: BrokerProcess, client: Broker, name: str, tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "m.safetensors", checkpoints.filled([("x", "U8", (1,))]))
    follower = start(lender, "follow_versions.py", name)
    assert follower.stdout is not None
    assert follower.stdout.readline() == f"waiting for {name}\n"
    for version in (1, 2):
        load(client, name, path)
        assert follower.stdout.readline() == f"{name}@{version}: 1 tensors\n"
    client.retire(name)
    assert output(follower) == ""


def test_torch_tensors_outlive_the_pool(
    lender: BrokerProcess, client: Broker, name: str, tmp_path: Path, here: Here
) -> None:
    tensors = checkpoints.filled(checkpoints.EVERY_DTYPE)
    load(client, name, checkpoints.write(tmp_path / "m.safetensors", tensors))
    printed = here.run(lender, EXAMPLES / "torch_worker.py", name)
    assert f"{name}@1: {len(tensors)} tensors attached in" in printed


@pytest.mark.slow
def test_a_model_runs_on_the_weights_of_a_pool(minilm: Path, here: Here) -> None:
    with serving("host:1@256MiB") as broker, Broker(broker.directory) as client:
        load(client, "minilm", minilm)
        script = EXAMPLES / "transformers_worker.py"
        text = here.run(broker, script, "minilm", str(minilm), "weights are loaded once")
        assert text.startswith("'weights are loaded once': [")
        eventually(lambda: leases(client, "minilm") == 0, "the end of the lease")


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_without_arguments_says_how_to_run_it(example: str, here: Here) -> None:
    with pytest.raises(SystemExit, match=f"python examples/{example} "):
        here.run(None, EXAMPLES / example)


def test_every_trap_has_a_sample_and_its_output() -> None:
    text = TRAPS.read_text()
    assert len(traps()) == text.count("```python") == text.count("\n## ")
    assert sum(map(needs_gpu, traps())) == sum(map(served, traps())) == 1


@pytest.mark.slow
def test_the_samples_of_the_traps_print_what_stands_below_them(
    lender: BrokerProcess, client: Broker, tmp_path: Path, here: Here
) -> None:
    for number, (sample, printed) in enumerate(trap for trap in traps() if not needs_gpu(trap) and not served(trap)):
        path = tmp_path / f"sample_{number}.py"
        path.write_text(sample)
        assert here.run(lender, path) == printed


@pytest.mark.slow
def test_workers_of_a_server_that_forks_attach_with_their_first_request(
    lender: BrokerProcess, client: Broker, tmp_path: Path
) -> None:
    pytest.importorskip("gunicorn", reason="there is no gunicorn")
    client.publish("traps", {"norm.weight": np.ones(64, np.float32)})
    (sample, session), *_ = filter(served, traps())
    start, ask, *answer = session.splitlines()
    (tmp_path / "app.py").write_text(sample)
    arguments = shlex.split(start.removeprefix("$ gunicorn ").removesuffix(" &"))
    environment = os.environ | {"CUBROKER_DIR": str(lender.directory), "HOME": str(tmp_path)}
    server = subprocess.Popen([sys.executable, "-m", "gunicorn", *arguments], cwd=tmp_path, env=environment)
    try:
        eventually((tmp_path / "app.sock").exists, "gunicorn to listen")
        assert ask == "$ curl --silent --unix-socket app.sock http://localhost/"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(str(tmp_path / "app.sock"))
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with connection.makefile() as reply:
                assert reply.read().partition("\n\n")[2].splitlines() == answer
    finally:
        server.terminate()
        server.wait(PATIENCE)
    eventually(lambda: leases(client, "traps") == 0, "the end of the worker's lease")


def test_the_samples_of_publishing_publish(lender: BrokerProcess, client: Broker, tmp_path: Path, here: Here) -> None:
    (section,) = re.findall(r"^## Publish\n(.*?)^## ", WEIGHTS.read_text(), re.MULTILINE | re.DOTALL)
    first, *others = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    path = tmp_path / "sample.py"
    path.write_text(first)
    assert here.run(lender, path) == "1\n"
    with client.attach("policy") as pool:
        assert {name: (each.dtype, each.shape) for name, each in pool.items()} == {
            "weight": ("BF16", (4096, 4096)),
            "bias": ("BF16", (4096,)),
        }
    for number, sample in enumerate(others):
        if client.pools():
            client.retire("policy")  # the next one has no room beside it
        eventually(lambda: not any(device.allocated for device in client.devices()), "its memory to be freed")
        path = tmp_path / f"other_{number}.py"
        path.write_text(sample)
        here.run(lender, path)
