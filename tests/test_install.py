"""What is installed: a worker with the four packages that it requires, and with them alone; extras for the rest."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from tests import wheels
from tests.brokers import PATIENCE, BrokerProcess, started

OPTIONAL = {"numpy", "ml_dtypes", "torch", "click", "rich", "h11", "prometheus_client"}
"""What a worker does not have, as it would be imported."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheels.wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with cubroker and no extra."""
    return wheels.environment(tmp_path_factory.mktemp("bare") / "venv", wheel)


class BareBroker(BrokerProcess):
    """A broker that has what a worker has."""

    def __init__(self, directory: Path, python: Path, **variables: str) -> None:
        self._python = python
        self._env = clean(**variables)
        super().__init__(directory)

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        command = [str(self._python), *self.command()[1:]]
        return subprocess.Popen(command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def lender(bare: Path) -> Iterator[BrokerProcess]:
    with started(lambda directory: BareBroker(directory, bare / "python")) as broker:
        yield broker


def clean(**changes: str) -> Mapping[str, str]:
    """The environment without what would let other packages in, or start a broker or coverage elsewhere."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE", "CUBROKER"))
    }
    return kept | changes


def run(command: list[str | Path], **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=clean(**changes), capture_output=True, text=True, timeout=PATIENCE, check=False)


def worker(bare: Path, lender: BrokerProcess, script: str) -> str:
    done = run([bare / "python", "-c", script], CUBROKER_DIR=str(lender.directory))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_worker_requires_the_driver_zeromq_and_msgpack_and_an_extra_each_what_its_role_needs(wheel: Path) -> None:
    base = {"cuda-bindings", "msgpack", "msgspec", "pyzmq"}
    assert wheels.required(wheel) == base | {"cuda-pathfinder"}  # of cuda-bindings
    roles = {extra: wheels.required(wheel, [extra]) - wheels.required(wheel) for extra in ("server", "cli", "numpy")}
    assert roles["server"] == {"h11", "prometheus-client"}
    assert {"click", "rich"} < roles["cli"]
    assert roles["numpy"] == {"numpy"}
    assert wheels.required(wheel, ["all"]) == base.union({"cuda-pathfinder"}, *roles.values())


@pytest.mark.slow
@pytest.mark.skipif(not wheels.tracked(), reason="needs the git checkout of this tree")
def test_a_source_distribution_has_all_files_of_the_tree_but_what_the_forge_runs(tmp_path: Path) -> None:
    with tarfile.open(wheels.sdist(tmp_path)) as file:
        (top, *_), *_ = names = [Path(member.name).parts for member in file.getmembers() if member.isfile()]
        there = {"/".join(name[1:]) for name in names if name[0] == top}
    absent = {name for name in wheels.tracked() if name not in there}
    assert {name.partition("/")[0] for name in absent} <= {".ci", ".github", ".gitignore"}


ATTACH = """
import json, sys
from importlib.util import find_spec
from cubroker import Broker, Layout

here = [name for name in {optional} if find_spec(name)]
with Broker() as broker:
    with broker.create("plain", Layout.pack([("x", "I16", (2, 3))])) as draft:
        draft["x"].copy_from_bytes(bytes(range(12)))
        draft.seal()
with Broker() as broker, broker.attach("plain") as pool:
    found = pool["x"].tobytes().hex()
    loaded = {{name.partition(".")[0] for name in sys.modules}} - sys.stdlib_module_names
print(json.dumps([here, found, sorted(name for name in loaded if not name.startswith("_"))]))
"""


@pytest.mark.slow
def test_a_worker_attaches_with_nothing_else_installed_and_imports_no_package_that_it_does_not_use(
    bare: Path, lender: BrokerProcess
) -> None:
    here, found, loaded = json.loads(worker(bare, lender, ATTACH.format(optional=sorted(OPTIONAL))))
    assert here == []
    assert bytes.fromhex(found) == bytes(range(12))
    # The driver's structs are NVIDIA's, on host devices too. Cython's modules register themselves.
    assert {name for name in loaded if not name.startswith("cython")} == {"cubroker", "cuda", "msgspec", "zmq"}


PUBLISH = """
import array, json
from cubroker import Broker, CubrokerError

sources = {
    "floats": array.array("d", [1.5, -2.0]),
    "bytes": b"bytes",
    "grid": memoryview(bytes(range(6))).cast("B", (2, 3)),
    "flags": memoryview(bytes([1, 0])).cast("?"),
}
with Broker() as broker:
    version = broker.publish("arrays", sources)
    with broker.attach("arrays") as pool:
        found = {name: [pool[name].dtype, pool[name].shape, pool[name].tobytes().hex()] for name in pool}
    try:
        broker.publish("gaps", {"x": memoryview(bytes(8))[::2]})
    except CubrokerError as error:
        found["refused"] = error.message
print(json.dumps(found))
"""


@pytest.mark.slow
def test_buffers_are_published_without_numpy_and_only_those_with_gaps_need_it(
    bare: Path, lender: BrokerProcess
) -> None:
    found = json.loads(worker(bare, lender, PUBLISH))
    assert found.pop("refused") == (
        "cannot publish 'x': filling a tensor from this memoryview needs numpy, which is not installed:"
        " pip install 'cubroker[numpy]'"
    )
    assert found == {
        "floats": ["F64", [2], "000000000000f83f00000000000000c0"],
        "bytes": ["U8", [5], b"bytes".hex()],
        "grid": ["U8", [2, 3], "000102030405"],
        "flags": ["BOOL", [2], "0100"],
    }


MISSING = """
import json
from cubroker import Broker, CubrokerError, Layout

def said(call):
    try:
        call()
    except (CubrokerError, TypeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"

with Broker() as broker:
    broker.publish("plain", {"x": b"bytes"})
    with broker.attach("plain") as pool:
        x = pool["x"]
        calls = [x.numpy, x.__array__, x.__dlpack__]
        found = [said(call) for call in calls]
    with broker.create("digests", Layout.pack([("x", "U8", (4,))])) as draft:
        found.append(said(lambda: draft.seal(digest=True)))
found.append(said(lambda: __import__("cubroker.integrations.triton")))
print(json.dumps(found))
"""


def test_what_needs_numpy_says_so_and_how_it_is_installed(bare: Path, lender: BrokerProcess) -> None:
    kinds, texts = zip(*(line.split(": ", 1) for line in json.loads(worker(bare, lender, MISSING))), strict=True)
    assert kinds == ("Unsupported", "TypeError", "Unsupported", "Unsupported", "ImportError")
    assert texts[0] == ("an array on tensor 'x' needs numpy, which is not installed: pip install 'cubroker[numpy]'")
    assert "a digest on a host device, of draft of pool 'digests' version 1, needs numpy" in texts[3]
    for text in texts:
        assert "needs numpy" in text
        assert text.endswith("pip install 'cubroker[numpy]'")


@pytest.mark.parametrize(
    ("arguments", "asked", "extra"),
    [
        ([], "cubroker", "cli"),
        (["--version"], "cubroker --version", "cli"),
        (["ls", "--json"], "cubroker ls", "cli"),
        (["serve"], "cubroker serve", "server,cli"),
        (["--directory", "keep", "--timeout", "1", "serve", "demo"], "cubroker serve", "server,cli"),
        (["--directory=serve", "retire", "demo"], "cubroker retire", "cli"),
    ],
)
def test_a_command_says_which_extra_it_needs(bare: Path, arguments: list[str], asked: str, extra: str) -> None:
    done = run([bare / "cubroker", *arguments])
    assert done.returncode == 1
    assert done.stderr == (
        f"cubroker: `{asked}` needs click, which is not installed: pip install 'cubroker[{extra}]'\n"
    )


@pytest.mark.slow
def test_a_command_that_draws_says_so_where_only_click_is_there_for_some_other_program(
    wheel: Path, lender: BrokerProcess, tmp_path: Path
) -> None:
    programs = wheels.environment(tmp_path / "venv", wheel)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    wheels.link("click", packages)
    directory = str(lender.directory)
    assert run([programs / "cubroker", "devices"], CUBROKER_DIR=directory).returncode == 0
    done = run([programs / "cubroker", "top", "--once"], CUBROKER_DIR=directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cubroker: `cubroker top` needs rich, which is not installed: pip install 'cubroker[cli]'\n"


NO_METRICS = (
    "serving metrics, as metrics.listen says, needs h11, which is not installed: pip install 'cubroker[server]'"
)


@pytest.mark.slow
def test_a_broker_that_cannot_serve_metrics_says_what_to_install_and_lends_all_the_same(
    bare: Path, tmp_path: Path
) -> None:
    listen = f"unix:{tmp_path}/metrics.sock"
    start = partial(BareBroker, python=bare / "python", CUBROKER_METRICS_LISTEN=listen)
    with started(start) as broker:
        assert f" ERROR there are no metrics: {NO_METRICS}\n" in broker.log()
        worker(bare, broker, ATTACH.format(optional=[]))
        assert broker.stop() == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_check_of_settings_says_that_there_will_be_no_metrics(wheel: Path, tmp_path: Path) -> None:
    programs = wheels.environment(tmp_path / "venv", wheel, ["cli"])
    listen = f"unix:{tmp_path}/metrics.sock"
    done = run([programs / "cubroker", "config", "check"], CUBROKER_METRICS_LISTEN=listen)
    assert (done.returncode, done.stderr) == (0, f"cubroker: there will be no metrics: {NO_METRICS}\n")
    assert done.stdout == "no file: 1 setting, a broker serves, without metrics\n"
    done = run([programs / "cubroker", "config", "check"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "no file: 0 settings, nothing wrong\n", "")


@pytest.mark.slow
def test_a_command_for_an_engine_that_is_not_installed_says_what_to_install(wheel: Path, tmp_path: Path) -> None:
    programs = wheels.environment(tmp_path / "venv", wheel, ["cli"])
    done = run([programs / "cubroker", "vllm", "preload", "model"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "cubroker: cubroker.integrations.vllm needs vLLM (No module named 'torch'): pip install 'cubroker[vllm]'\n"
    )


@pytest.mark.slow
def test_the_demo_runs_without_a_framework_and_leaves_nothing(
    wheel: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    programs = wheels.environment(tmp_path_factory.mktemp("commands") / "venv", wheel, ["server", "cli"])
    done = run([programs / "cubroker", "demo"], TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo@1: 104 tensors, 86.6 MiB in " in done.stdout
    assert f"  {programs}/cubroker doctor " in done.stdout
    assert list(tmp_path.iterdir()) == []
