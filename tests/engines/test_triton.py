"""A real tritonserver on emulated devices: instances of a model on one copy of its weights, and registered regions.

It is that of the nvidia-pytriton under ``$CUBROKER_TRITON_PYTHON``, by default the interpreter of the tests, which also
has torch and what cubroker needs; they are skipped where there is none. ``$CUBROKER_ENGINE_DEVICES`` may be ``cuda:0``:
regions are then memory of that GPU.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest

import cubroker
from cubroker.client import Broker
from cubroker.integrations import triton
from cubroker.protocol.errors import Invalid, TimedOut
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.engines import interpreters

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "triton-server"
PYTHON = os.environ.get("CUBROKER_TRITON_PYTHON", sys.executable)

DEVICES = os.environ.get("CUBROKER_ENGINE_DEVICES", "host:2@256MiB")
ON_GPU = DEVICES.startswith("cuda")

TRITON = interpreters.package(PYTHON, "pytriton")
pytestmark = [pytest.mark.skipif(TRITON is None, reason="there is no tritonserver"), pytest.mark.timeout(600)]

PLACES = """
import json, sys, sysconfig
print(json.dumps((sys.path[1:], sysconfig.get_config_var("LIBDIR"), "%d.%d" % sys.version_info[:2])))
"""
"""Says where the interpreter finds modules and libraries, and its version."""

WIDTH, BATCH = 512, 16
LAYOUT = [("pad", "U8", (3,)), ("X", "F32", (BATCH, WIDTH)), ("Y", "F32", (BATCH, WIDTH)), ("Z", "F64", (BATCH, WIDTH))]


class Server:
    """One tritonserver with the model of the example."""

    def __init__(self, folder: Path, directory: Path) -> None:
        assert TRITON is not None
        there = TRITON / "tritonserver"
        said = subprocess.run([PYTHON, "-c", PLACES], check=True, stdout=subprocess.PIPE).stdout
        path, libraries, version = json.loads(said)
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        for part in (
            *(there / "backends" / "python").glob("*.*"),
            *(there / "python_backend_stubs" / version).iterdir(),
        ):
            (backend / part.name).symlink_to(part)
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "here.pth").write_text("\n".join([str(Path(cubroker.__file__).parents[1]), *path]))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [
                *(there / "bin" / "tritonserver", f"--model-repository={EXAMPLE / 'model_repository'}"),
                *(f"--backend-directory={folder / 'backends'}", "--disable-auto-complete-config"),
                *("--http-address=127.0.0.1", f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false"),
            ],
            stdout=self._log,
            stderr=self._log,
            env=os.environ  # the stub finds its packages by the python3 that comes first
            | {"PATH": f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}", "CUBROKER_DIR": str(directory)}
            | {"LD_LIBRARY_PATH": f"{TRITON.parent}/nvidia_pytriton.libs{os.pathsep}{libraries}"},
        )

    def ready(self) -> bool:
        if self.process.poll() is not None:
            self._log.seek(0)
            raise AssertionError(self._log.read())
        try:
            with urlopen(f"{self.url}/v2/health/ready") as reply:
                return bool(reply.status == 200)
        except URLError:
            return False

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{self.url}/v2/{path}", data)) as reply:
            return json.load(reply)

    def regions(self) -> list[str]:
        return [each["name"] for kind in (triton.SYSTEM, triton.CUDA) for each in self.call(f"{kind}/status")]

    def instances(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        found = [int(pid) for file in children for pid in file.read_text().split()]
        return [pid for pid in found if b"stub" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stopped(self) -> bool:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return {thread.read_text().rpartition(")")[2].split()[0] for thread in threads} == {"T"}

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self._log.close()


@pytest.fixture(scope="module")
def lender() -> Iterator[BrokerProcess]:
    with serving(DEVICES) as process:
        yield process


@pytest.fixture(scope="module")
def server(lender: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    assert "published" not in run(lender, "publish")
    server = Server(tmp_path_factory.mktemp("triton"), lender.directory)
    try:
        eventually(server.ready, "the server to be ready")
        yield server
    finally:
        server.close()


def run(lender: BrokerProcess, *arguments: str) -> str:
    """Run the example's client, and return what it prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLE / "client.py", *arguments],
        env=os.environ | {"CUBROKER_DIR": str(lender.directory)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return done.stdout


@contextmanager
def scratch(broker: Broker, **terms: Any) -> Iterator[cubroker.Pool]:
    """A scratch pool, which is retired at the end."""
    with broker.create("io", LAYOUT, **{"writable": True, "share": "ipc", **terms}) as draft:
        version = draft.seal()
    with broker.attach("io", version=version) as pool:
        yield pool
    broker.retire("io", version)


def leases(broker: Broker) -> int:
    """How many leases there are on scratch pools."""
    return sum(info.leases for info in broker.pools() if info.name == "io")


def shared(pid: int) -> dict[str, int]:
    """Bytes of emulated devices' memory in a process: Rss, and Pss, its part of them."""
    found = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, rest = line.partition(":")
        if " " in key:
            inside = "/memfd:cubroker-" in line
        elif inside and key in found:
            found[key] += int(rest.split()[0]) * 1024
    return found


def test_instances_share_one_copy_of_the_weights(server: Server, lender: BrokerProcess) -> None:
    with Broker(lender.directory) as broker:
        (info,) = (pool for pool in broker.pools() if pool.name == "examples/perceptron")
        pids = server.instances()
        assert info.leases == len(pids) == 2
    said = [run(lender, "infer", server.url)]
    while not ON_GPU and min(shared(pid)["Rss"] for pid in pids) < info.nbytes:  # until both have touched all of it
        said.append(run(lender, "infer", server.url))
        assert len(said) < 20
    assert all("Y is FP32 (16, 512), 32768 bytes in cubroker-" in each for each in said)
    assert len({each.splitlines()[-1] for each in said}) == 1
    for pid in pids * (not ON_GPU):
        found = shared(pid)
        assert found["Pss"] == pytest.approx(found["Rss"] / 2, rel=0.01), found
    assert server.regions() == []


def test_answers_through_regions_equal_those_in_requests(server: Server, lender: BrokerProcess) -> None:
    """The rows come through the pool, where they begin in the middle of an allocation, and as text in a request."""
    x = np.random.default_rng(5).standard_normal((BATCH, WIDTH), np.float32)
    told = {"name": "X", "shape": [BATCH, WIDTH], "datatype": "FP32", "data": x.ravel().tolist()}
    plain = server.call("models/perceptron/infer", {"inputs": [told]})["outputs"][0]["data"]
    with ExitStack() as stack:
        broker = stack.enter_context(Broker(lender.directory))
        pool = stack.enter_context(scratch(broker))
        with triton.register(pool, server.url) as regions:
            assert server.regions() == list(regions.names)
            assert len(regions.names) == 1
            assert len(server.call(f"{triton.CUDA if ON_GPU else triton.SYSTEM}/status")) == 1
            assert not (triton.FOLDER / regions.names[0]).exists()
            pool["X"].copy_from(x)
            answers = regions.infer("perceptron", {"X": "X"}, {"Y": "Y"})
            assert answers == {"Y": ("FP32", (BATCH, WIDTH))}
            assert pool["Y"].tobytes() == np.array(plain, np.float32).tobytes()
            before = pool["X"].tobytes()
            for wrong, error in (("absent", "unknown model"), ("perceptron", "FP64")):
                with pytest.raises(Invalid, match=error):
                    regions.infer(wrong, {"X": "X"}, {"Y": "Z"})
            assert (pool["X"].tobytes(), pool["pad"].tobytes()) == (before, bytes(3))
        assert server.regions() == []
        with pytest.raises(Invalid, match="register it again"):
            regions.infer("perceptron", {"X": "X"}, {"Y": "Y"})


def test_a_with_block_that_fails_and_a_pool_that_is_closed_first_leave_nothing_registered(
    server: Server, lender: BrokerProcess
) -> None:
    with Broker(lender.directory) as broker, scratch(broker) as pool:
        with pytest.raises(ZeroDivisionError), triton.register(pool, server.url):
            _ = 1 / 0
        assert server.regions() == []
        regions = triton.register(pool, server.url)
        pool.close()
        assert leases(broker) == 1
        regions.close()
        assert server.regions() == []
        eventually(lambda: not leases(broker), "the lease's end")


KILLED = """
import os, sys
from cubroker.client import Broker
from cubroker.integrations import triton
broker = Broker(sys.argv[1])
pool = broker.attach("io")
regions = triton.register(pool, sys.argv[2])
print(*regions.names, flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_its_regions_until_the_next_one_registers(server: Server, lender: BrokerProcess) -> None:
    with Broker(lender.directory) as broker, scratch(broker) as pool:
        command = [sys.executable, "-c", KILLED, str(lender.directory), server.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            (name,) = client.stdout.readline().split()
            assert triton.sweep(server.url) == ()
            client.send_signal(signal.SIGKILL)
        eventually(lambda: leases(broker) == 1, "the lease's end")
        assert server.regions() == [name]  # which the broker does not see
        with triton.register(pool, server.url) as regions:
            assert server.regions() == list(regions.names) != [name]
            assert triton.sweep(server.url) == ()


def test_a_server_that_stops_answering_is_told_and_asked_again(server: Server, lender: BrokerProcess) -> None:
    with Broker(lender.directory) as broker, scratch(broker) as pool:
        regions = triton.register(pool, server.url, timeout=0.5)
        server.process.send_signal(signal.SIGSTOP)
        eventually(server.stopped, "all its threads to stop")
        try:
            with pytest.raises(TimedOut, match=f"not answered.*{regions.names[0]} may still be registered"):
                regions.close()
            with pytest.raises(KeyError) as raised, regions:
                raise KeyError
            assert "may still be registered" in raised.value.__notes__[0]
        finally:
            server.process.send_signal(signal.SIGCONT)
        regions.close()
        assert server.regions() == []


def test_pools_that_are_not_sealed_and_writable_are_refused(server: Server, lender: BrokerProcess) -> None:
    with Broker(lender.directory) as broker:
        with scratch(broker, writable=False) as pool, pytest.raises(Invalid, match="create it writable"):
            triton.register(pool, server.url)
        with broker.create("io", LAYOUT, writable=True) as draft, pytest.raises(Invalid, match="is a draft"):
            triton.register(draft, server.url)


@pytest.mark.skipif(ON_GPU, reason="memory of a GPU has no file")
def test_a_server_refuses_what_it_cannot_open(
    server: Server, lender: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Broker(lender.directory) as broker, scratch(broker) as pool:
        monkeypatch.setattr(triton, "FOLDER", tmp_path)  # where the server does not look
        with pytest.raises(Invalid, match="Unable to open shared memory region"):
            triton.register(pool, server.url)
