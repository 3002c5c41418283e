"""Who keeps memory that was freed, by figures such as NVML was seen to give; and the library, with a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from cubroker.server.devices import mapped_memory
from cubroker.server.devices.mapped_memory import MappedChecks, Nvml, NvmlError, NvmlWatch
from cubroker.server.event_queue import EventQueue
from cubroker.server.ledger.events import AllocationId, ProcessMemory
from tests.unit.server.loops import run

GPU, OTHER = "GPU-0", "GPU-1"
MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 518 * MIB
ALICE, BOB = 4001, 4002
OURS = os.getpid()
NEVER = 86_400.0
"""Seconds to the next check."""


class Figures(Nvml):
    """What NVML would say, by device and process; a process that does not exist is 0."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[int, int]] = {GPU: {}, OTHER: {}}
        self.asked = 0

    def processes(self, uuid: str) -> dict[int, int]:
        self.asked += 1
        if uuid not in self.figures:
            raise NvmlError("nvmlDeviceGetHandleByUUID", 6)
        return dict(self.figures[uuid])


class Scene:
    def __init__(self) -> None:
        self.nvml = Figures()
        self.watch = NvmlWatch()
        self.watch.nvml = self.nvml
        self.mine = self.nvml.figures[GPU]
        self.mine[OURS] = CONTEXT
        self.numbers = count()

    def piece(self, ticket: int) -> AllocationId:
        """Another allocation of a ticket."""
        return AllocationId(ticket, next(self.numbers))

    def frees(self, ticket: int, nbytes: int, *keepers: int, device: str = GPU) -> None:
        """The broker frees a piece, which from then on counts for each of these processes."""
        freed = self.watch.freeing(device)
        for pid in keepers:
            self.nvml.figures[device][pid] = self.nvml.figures[device].get(pid, 0) + nbytes
        freed(self.piece(ticket), nbytes)

    def memory(self, pid: int = OURS) -> object:
        """What a process keeps, by ticket; None if nothing is known."""
        (found,) = self.watch.look({(pid, ALICE)}, ())
        assert (found.pid, found.uid) == (pid, ALICE)
        if found.memory is None:
            return None
        kept = Counter[int]()
        for allocation, nbytes in found.memory.items():
            kept[allocation.ticket] += nbytes
        return dict(kept)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which does nothing."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        yield process
        process.kill()


def test_a_process_whose_figure_rises_by_what_is_freed_keeps_it_until_that_falls_as_much(scene: Scene) -> None:
    assert scene.memory() is None, "nothing is seen, so nothing is known"
    scene.frees(7, GIB, OURS)
    assert scene.memory() == {7: GIB}
    scene.mine[OURS] += 3 * GIB  # of its own
    assert scene.memory() == {7: GIB}
    scene.mine[OURS] -= GIB // 2
    assert scene.memory() == {7: GIB}
    scene.mine[OURS] -= GIB // 2
    assert scene.memory() is None


def test_each_piece_is_let_go_of_by_itself(scene: Scene) -> None:
    for piece in (GIB, GIB, 2 * MIB):
        scene.frees(7, piece, OURS)
    scene.frees(8, GIB, OURS)
    assert scene.memory() == {7: 2 * GIB + 2 * MIB, 8: GIB}
    scene.mine[OURS] -= GIB
    assert scene.memory() == {7: GIB + 2 * MIB, 8: GIB}
    scene.mine[OURS] -= GIB + 2 * MIB
    assert scene.memory() == {8: GIB}


def test_the_library_is_asked_once_per_request_and_once_per_piece(scene: Scene) -> None:
    freed = scene.watch.freeing(GPU)
    for kept in (GIB, 0, GIB):
        scene.mine[OURS] += kept
        freed(scene.piece(7), GIB)
    assert scene.nvml.asked == 4
    assert scene.memory() == {7: 2 * GIB}


def test_the_library_is_asked_nothing_while_there_are_no_checks(scene: Scene) -> None:
    async def test() -> None:
        checks = MappedChecks(EventQueue(), scene.watch, 0)
        try:
            scene.frees(7, GIB, OURS)
            assert scene.nvml.asked == 0
            checks.adjust(NEVER)
            scene.frees(8, GIB, OURS)
            assert scene.nvml.asked == 2
            checks.adjust(0)
            scene.frees(9, GIB, OURS)
            assert scene.nvml.asked == 2
        finally:
            checks.stop()
            checks.close()

    run(test())
    assert scene.memory() == {8: GIB}


def test_what_is_not_kept_or_is_of_another_size_counts_for_nobody(scene: Scene) -> None:
    scene.frees(7, GIB)
    freed = scene.watch.freeing(GPU)
    scene.mine[OURS] += 2 * MIB  # a small allocation of its own
    freed(scene.piece(8), GIB)
    scene.mine[OURS] -= 2 * MIB
    freed(scene.piece(8), GIB)
    assert scene.memory() is None


def test_a_process_that_ends_keeps_nothing_and_one_that_gets_its_number_is_another(
    scene: Scene, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.mine[other.pid] = CONTEXT
    scene.frees(7, GIB, other.pid, OURS)
    assert scene.memory(other.pid) == {7: GIB}
    other.kill()
    other.wait()
    assert scene.memory(other.pid) is None
    monkeypatch.setattr(mapped_memory, "started", lambda _: 1)
    scene.frees(8, GIB, OURS)
    assert scene.memory() == {8: GIB}
    monkeypatch.undo()
    assert scene.memory() is None
    scene.frees(9, GIB, other.pid)
    assert scene.memory(other.pid) is None


def test_processes_without_a_session_count_for_their_users(scene: Scene, other: subprocess.Popen[bytes]) -> None:
    scene.mine[other.pid] = CONTEXT
    scene.frees(7, GIB, other.pid)
    uid = os.geteuid()
    assert scene.watch.look({(OURS, BOB)}, {uid}) == [
        ProcessMemory(OURS, BOB, None),
        ProcessMemory(other.pid, uid, {AllocationId(7, 0): GIB}),
    ]
    assert scene.watch.look((), {BOB}) == []


def test_devices_are_told_apart_and_one_that_gives_no_figures_changes_nothing(scene: Scene) -> None:
    scene.nvml.figures[OTHER][OURS] = CONTEXT
    scene.frees(7, GIB, OURS)
    scene.frees(7, GIB, OURS, device=OTHER)
    assert scene.memory() == {7: 2 * GIB}
    del scene.nvml.figures[OTHER]
    scene.mine[OURS] -= GIB
    assert scene.memory() == {7: GIB}
    scene.watch.freeing(OTHER)(scene.piece(8), GIB)
    assert scene.memory() == {7: GIB}


def test_only_so_many_processes_are_remembered(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_memory, "MAX_KEEPERS", 1)
    scene.mine[os.getppid()] = CONTEXT
    scene.frees(7, GIB, OURS)
    scene.frees(8, GIB, os.getppid())
    assert scene.memory() is None
    assert scene.memory(os.getppid()) == {8: GIB}


def test_without_the_library_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Nvml:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(mapped_memory, "Nvml", load)
    watch = NvmlWatch()
    for _ in range(2):
        watch.freeing(GPU)(AllocationId(7, 0), GIB)
    assert watch.look({(OURS, ALICE)}, ()) == [ProcessMemory(OURS, ALICE, None)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


STAND_IN = """
#include <string.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } info;
int nvmlInit_v2(void) { return STATUS; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = "x"; return strcmp(uuid, "GPU-0") ? 6 : 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, info *rows) {
    unsigned room = *count;
    *count = 100;
    if (room < 100) return 7;
    for (unsigned i = 0; i < 100; i++) { rows[i].pid = 1000 + i; rows[i].used = i ? i * 1048576ull : -1ull; }
    return 0;
}
"""

ASK = """
import json, sys
from cubroker.server.devices.mapped_memory import Nvml, NvmlError
try:
    print(json.dumps(Nvml().processes(sys.argv[1])))
except NvmlError as error:
    print(json.dumps([*error.args]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "uuid", "said"),
    [
        (0, "GPU-0", {str(1000 + i): i * MIB for i in range(1, 100)}),
        (0, "GPU-9", ["nvmlDeviceGetHandleByUUID", 6]),
        (9, "GPU-0", ["nvmlInit_v2", 9]),
    ],
)
def test_figures_come_from_the_library(tmp_path: Path, status: int, uuid: str, said: object) -> None:
    source = tmp_path / "nvml.c"
    source.write_text(STAND_IN)
    build = ["cc", "-shared", "-fPIC", f"-DSTATUS={status}", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(build, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, uuid], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == said


@pytest.mark.slow
def test_a_driver_without_the_function_is_an_error_of_the_library(tmp_path: Path) -> None:
    source = tmp_path / "nvml.c"
    source.write_text("int nvmlInit_v2(void) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(source)], check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ASK, GPU], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["nvmlDeviceGetHandleByUUID", "this driver does not have it"]
