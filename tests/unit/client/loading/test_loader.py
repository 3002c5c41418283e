from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cubroker.client import Broker, Draft
from cubroker.client.loading import copy as copying
from cubroker.client.loading import threads
from cubroker.client.loading.checkpoint import CheckpointFile
from cubroker.client.loading.copy import FileCopy, PinnedStaging, make_staging
from cubroker.client.loading.loader import load
from cubroker.client.loading.read_plan import Chunk, Target
from cubroker.driver import DriverError, Stream
from cubroker.protocol import CubrokerError, Layout
from cubroker.protocol.errors import DeviceFailure, Exists, Invalid, NotFound, OverBudget
from tests import checkpoints, forkserver
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.unit.client.scripts import run
from tests.unit.driver.holdings import holdings

TENSORS = checkpoints.filled((*checkpoints.EVERY_DTYPE, *checkpoints.ODD_SHAPES, ("large", "F32", (700, 1001))))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "model.safetensors", TENSORS)


def contents(client: Broker, name: str, device: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with client.attach(name, device=device) as pool:
        return {name: (tensor.dtype, tensor.shape, tensor.tobytes()) for name, tensor in pool.items()}


def test_a_loaded_pool_holds_what_the_file_holds_on_every_device(client: Broker, path: Path, name: str) -> None:
    loaded = load(client, name, path, devices=[0, 1])
    assert (loaded.name, loaded.version, loaded.tensors, loaded.loaded) == (name, 1, len(TENSORS), True)
    assert loaded.seconds > loaded.copy_seconds > 0
    (info,) = client.pools()
    assert (info.state, info.nbytes, len(info.devices), info.leases) == ("current", loaded.nbytes, 2, 0)
    assert contents(client, name, 0) == contents(client, name, 1) == TENSORS


@pytest.mark.usefixtures("share")
def test_a_gpus_way_of_loading_goes_from_device_to_device(
    client: Broker, path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: set[int] = set()
    copy = Stream.copy

    def noting(stream: Stream, pointer: int, source: int, nbytes: int) -> None:
        sources.add(source)
        copy(stream, pointer, source, nbytes)

    monkeypatch.setattr(copying, "make_staging", PinnedStaging)
    monkeypatch.setattr(Stream, "copy", noting)
    load(client, name, path, devices=[1, 0])
    assert sources
    assert contents(client, name, 0) == contents(client, name, 1) == TENSORS


@pytest.mark.usefixtures("share")
def test_devices_that_do_not_reach_each_other_are_each_loaded_from_the_host(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "make_staging", PinnedStaging)
    with serving("host:3@16MiB/2") as broker, Broker(broker.directory) as client:
        with client.create("draft", Layout.pack([("a", "U8", (1,))]), devices=(0, 1, 2)) as draft:
            assert [bool(replica.upstream) for replica in draft.replicas] == [False, True, False]
        load(client, "three", path, devices=[0, 1, 2])
        assert all(contents(client, "three", device) == TENSORS for device in range(3))


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize("staging", [make_staging, PinnedStaging])
def test_a_plan_spreads_the_tensors_and_each_is_read_once_into_its_own_device(
    client: Broker, path: Path, name: str, monkeypatch: pytest.MonkeyPatch, staging: object
) -> None:
    read: list[int] = []
    start = threads.AioReads.start

    def noting(reads: threads.AioReads, file: CheckpointFile, chunk: Chunk, pointer: int) -> Any:
        read.append(chunk.nbytes)
        return start(reads, file, chunk, pointer)

    monkeypatch.setattr(threads.AioReads, "start", noting)
    monkeypatch.setattr(Stream, "copy", None)  # nothing goes from device to device
    monkeypatch.setattr(copying, "make_staging", staging)
    names = list(TENSORS)
    plan = {"large": 1, names[0]: client.driver.devices[1].uuid, names[1]: "cuda:1", "*": 0}
    for attempt in range(2):
        loaded = load(client, name, path, plan=plan, if_absent=True, slab=1 << 20)
        assert (loaded.loaded, loaded.tensors) == (attempt == 0, len(TENSORS))
    assert sum(read) == sum(len(content) for _, _, content in TENSORS.values())
    with client.attach(name) as pool:
        where = {each: tensor.memory_device.index for each, tensor in pool.items()}
        assert where == {**dict.fromkeys(TENSORS, 0), "large": 1, names[0]: 1, names[1]: 1}
        tensors = [(spec.name, spec.dtype, spec.shape) for spec in pool.layout.tensors]
        assert pool.layout == Layout.pack(tensors, slab=1 << 20, groups=where)
        assert {each: tensor.tobytes() for each, tensor in pool.items()} == {each: t[2] for each, t in TENSORS.items()}
        assert loaded.nbytes == pool.nbytes


def test_a_plan_that_does_not_fit_leaves_no_draft(client: Broker, path: Path, name: str) -> None:
    attempts: list[tuple[type[CubrokerError], str, dict[str, Any]]] = [
        (Invalid, "no device for tensor", {"plan": {"large": 0}}),
        (Invalid, "matches none", {"plan": {"*": 0, "larger*": 1}}),
        (NotFound, "sees no device 7", {"plan": {"*": 7}}),
        (Invalid, "which `devices` does not name", {"plan": {"*": 1}, "devices": [0]}),
        (Invalid, "'[*]' is no plan", {"plan": "*"}),
        (Invalid, "1 is no list of devices", {"devices": 1}),
        (Invalid, "sharded and multicast", {"plan": {"*": 1}, "share": "multicast"}),
    ]
    for error, says, options in attempts:
        with pytest.raises(error, match=says):
            load(client, name, path, **options)
        assert client.pools() == ()


def test_loading_again_publishes_a_next_version_in_slabs_of_the_asked_size(
    client: Broker, path: Path, name: str
) -> None:
    load(client, name, path)
    assert load(client, name, path, slab=1 << 16).version == 2
    with client.attach(name) as pool:
        assert len(pool.allocation_views) > 2
    assert contents(client, name, 0) == TENSORS


def test_if_absent_leaves_a_pool_alone_that_is_there(client: Broker, path: Path, tmp_path: Path, name: str) -> None:
    load(client, name, path)
    other = checkpoints.write(tmp_path / "other.safetensors", checkpoints.filled([("x", "U8", (1,))]))
    found = load(client, name, other, if_absent=True)
    assert (found.version, found.tensors, found.loaded, found.copy_seconds) == (1, len(TENSORS), False, 0)
    (info,) = client.pools()
    assert info.leases == 0


def test_a_checkpoint_of_empty_tensors_can_be_loaded(client: Broker, tmp_path: Path, name: str) -> None:
    tensors = checkpoints.filled([("none", "F32", (0, 3)), ("nothing", "F4", (0,))])
    load(client, name, checkpoints.write(tmp_path / "m.safetensors", tensors))
    assert contents(client, name, 0) == tensors


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def fail(path: Path) -> None:
    raise DriverError("cuMemcpyHtoDAsync", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


def interrupt(path: Path) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("accident", "error", "says"),
    [
        (shrink, Invalid, "it ended at byte"),
        (touch, Invalid, "it was changed while it was read"),
        (fail, DeviceFailure, "copying files into a draft"),
        (interrupt, KeyboardInterrupt, "^$"),
    ],
)
def test_an_accident_while_copying_leaves_no_draft(
    client: Broker,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accident: Callable[[Path], None],
    error: type[BaseException],
    says: str,
    name: str,
) -> None:
    into = FileCopy.into

    def accidental(copy: FileCopy, targets: Sequence[Target]) -> float:
        assert [info.state for info in client.pools()] == ["draft"]
        accident(path)
        return into(copy, targets)

    monkeypatch.setattr(FileCopy, "into", accidental)
    with pytest.raises(error, match=says):
        load(client, name, path)
    assert client.pools() == ()


def test_a_progress_that_fails_leaves_no_draft(client: Broker, path: Path, name: str) -> None:
    def progress(done: int, total: int) -> None:
        raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        load(client, name, path, progress=progress)
    assert client.pools() == ()


def test_what_cannot_be_loaded_leaves_no_draft_and_no_memory_pinned(
    client: Broker, path: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "make_staging", PinnedStaging)
    held = holdings(monkeypatch, client.driver.context(0).calls, ["cuMemHostRegister", "cuMemHostAlloc"])
    large = tmp_path / "large.safetensors"
    size = 65 << 20
    large.write_bytes(checkpoints.encode({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))
    os.truncate(large, large.stat().st_size + size)
    attempts: list[tuple[type[CubrokerError], Path, dict[str, Any]]] = [
        (OverBudget, large, {}),
        (NotFound, tmp_path / "nothing", {}),
        (NotFound, path, {"devices": [7]}),
        (Invalid, path, {"slab": 1}),
    ]
    for error, what, options in attempts:
        with pytest.raises(error):
            load(client, name, what, **options)
        assert client.pools() == ()
        assert not any(held.values())
    with pytest.raises(Invalid):
        load(client, "no name", path)


def test_a_pool_that_somebody_else_writes_is_not_loaded(
    lender: BrokerProcess, client: Broker, path: Path, name: str
) -> None:
    layout = Layout.pack([("x", "U8", (1,))])
    with Broker(lender.directory) as other, other.create(name, layout) as draft:
        assert isinstance(draft, Draft)
        with pytest.raises(Exists):
            load(client, name, path)


class Process:
    """A ``tests.unit.client.loading.load_process``."""

    def __init__(self, lender: BrokerProcess, name: str, path: Path, how: str) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.unit.client.loading.load_process",
            str(lender.directory),
            name,
            str(path),
            how,
        ]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        # One that is held may be interrupted, which coverage's lock does not bear.
        self.process = forkserver.start(command, measured=how != "hold", cwd=forkserver.ROOT, **streams)
        assert self.line() == "asking"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def result(self) -> Any:
        line = self.line()  # not from communicate(), which does not see what readline() has buffered
        assert self.process.wait(PATIENCE) == 0, line
        return json.loads(line)


@pytest.fixture
def start(lender: BrokerProcess, path: Path, name: str) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def one(how: str) -> Process:
        started.append(Process(lender, name, path, how))
        return started[-1]

    yield one
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.slow
def test_of_many_loaders_at_once_one_loads(client: Broker, start: Callable[[str], Process], name: str) -> None:
    results = [process.result() for process in [start("if-absent") for _ in range(5)]]
    assert sorted(result["loaded"] for result in results) == [False] * 4 + [True]
    assert {result["version"] for result in results} == {1}
    assert [(info.version, info.state) for info in client.pools()] == [(1, "current")]
    assert contents(client, name, 0) == TENSORS


def test_the_c_library_reads_with_few_threads_where_there_are_few_cores(
    lender: BrokerProcess, client: Broker, tmp_path: Path, name: str
) -> None:
    path = checkpoints.write(tmp_path / "large.safetensors", {"large": ("U8", (40 << 20,), bytes(40 << 20))})
    done = run(
        lender,
        """
        from cubroker.client.loading.threads import posix_aio
        from cubroker.client.loading.loader import load

        def others():
            return len(os.listdir("/proc/self/task")) - threading.active_count()

        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        with Broker(directory) as broker:
            before = others()
            load(broker, *sys.argv[2:])
            count = others() - before  # those that read stay for a second
            print(count if posix_aio.used else "it did not read")
        """,
        name,
        str(path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) <= threads.MIN_AIO_THREADS


def test_when_the_loader_is_killed_one_that_waits_takes_over(
    client: Broker, start: Callable[[str], Process], name: str
) -> None:
    first = start("hold")
    assert first.line() == "copying"
    others = [start("if-absent") for _ in range(2)]
    first.process.kill()
    results = [process.result() for process in others]
    assert sorted(result["loaded"] for result in results) == [False, True]
    assert contents(client, name, 0) == TENSORS
    eventually(lambda: len(client.pools()) == 1, "the dead loader's draft to go")


def test_an_interrupted_loader_discards_its_draft_before_it_ends(start: Callable[[str], Process]) -> None:
    process = start("hold")
    assert process.line() == "copying"
    process.process.send_signal(signal.SIGINT)
    assert process.result() == {"interrupted": 0}
