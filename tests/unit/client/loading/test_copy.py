"""Copies of checkpoints into memory of host devices, and the threads that make them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread, get_ident

import pytest

from cubroker import driver
from cubroker.client.loading import copy, read_plan, threads
from cubroker.client.loading.checkpoint import Checkpoint, CheckpointFile
from cubroker.client.loading.copy import (
    DirectStaging,
    FileCopy,
    HostWriter,
    PinnedStaging,
)
from cubroker.client.loading.read_plan import Chunk, PeerCopies, Target, homes_of
from cubroker.client.loading.threads import Progress, Reads, SupervisedThread, WorkerThreads, drain
from cubroker.client.transport.requests import Future
from cubroker.driver import Context, DriverError, Stream
from cubroker.driver.buffers import address
from cubroker.driver.context import Pinned, PinnedHuge
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, Unavailable
from tests import checkpoints
from tests.brokers import PATIENCE, eventually
from tests.unit.driver.holdings import holdings
from tests.unit.driver.mapping_commands import in_child

TENSORS = checkpoints.VARIED


@dataclass
class Memory:
    """Memory of host devices for one layout, and what has come to be in it."""

    layout: Layout
    targets: list[Target]

    def images(self) -> list[list[bytes]]:
        return [
            [target.context.read(p, size) for p, size in zip(target.pointers, self.layout.allocations, strict=True)]
            for target in self.targets
        ]

    def expected(self, tensors: checkpoints.Tensors) -> list[bytes]:
        images = [bytearray(size) for size in self.layout.allocations]
        for spec in self.layout.tensors:
            images[spec.allocation][spec.offset : spec.offset + spec.nbytes] = tensors[spec.name][2]
        return [bytes(image) for image in images]


@pytest.fixture
def memory() -> Iterator[Callable[..., Memory]]:
    made = driver.load("host:4@64MiB")

    def lend(checkpoint: Checkpoint, slab: int | None = None, devices: int = 2) -> Memory:
        layout = Layout.pack(((e.name, e.dtype, e.shape) for e in checkpoint.entries), slab=slab)
        contexts = [made.context(index) for index in range(devices)]
        targets = [Target(context, tuple(map(context.allocate, layout.allocations))) for context in contexts]
        for target in targets:
            for pointer, size in zip(target.pointers, layout.allocations, strict=True):
                target.context.clear(pointer, size)
        return Memory(layout, targets)

    yield lend
    made.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "CHUNK", 10_000)
    monkeypatch.setattr(threads, "AIO_PART", 1000)
    monkeypatch.setattr(threads, "THREAD_PART", 3000)


@pytest.fixture
def python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read as with a C library whose requests look different."""
    monkeypatch.setattr(threads.posix_aio, "usable", False)


def copy_checkpoint(
    checkpoint: Checkpoint, layout: Layout, targets: Sequence[Target], progress: Progress | None = None
) -> float:
    tensors, first = zip(checkpoint.entries, layout.tensors, strict=True), targets[0].context
    with FileCopy("cubroker-load", lambda: first, progress=progress) as copying:
        copying.plan(checkpoint.files, tensors, layout.allocations, homes_of(targets))
        return copying.into(targets)


def direct(context: Context, rings: int, depth: int, make_reads: Callable[[], Reads]) -> DirectStaging:
    return DirectStaging(depth, make_reads)


def dirty(context: Context, rings: int, depth: int, make_reads: Callable[[], Reads]) -> PinnedStaging:
    """Pin memory that holds what somebody else might have left there."""

    def pin(context: Context, nbytes: int) -> Pinned:
        pinned = PinnedHuge(context, nbytes)
        pinned.view[:] = b"\xff" * pinned.nbytes
        return pinned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "pin_huge", pin)
        return PinnedStaging(context, rings, depth, make_reads)


@pytest.mark.parametrize("slab", [None, 65536])
@pytest.mark.parametrize("staging", [direct, dirty])
@pytest.mark.parametrize("reader", ["C", "Python"])
@pytest.mark.usefixtures("small_chunks")
def test_every_byte_reaches_every_device_and_gaps_are_zero(
    tmp_path: Path,
    memory: Callable[..., Memory],
    monkeypatch: pytest.MonkeyPatch,
    reader: str,
    staging: object,
    slab: int | None,
) -> None:
    monkeypatch.setattr(threads.posix_aio, "usable", reader == "C")
    monkeypatch.setattr(copy, "make_staging", staging)
    names = list(TENSORS)
    shards = [{name: TENSORS[name] for name in part} for part in (names[:20], names[20:200], names[200:])]
    with Checkpoint.open(checkpoints.write_sharded(tmp_path, shards)) as checkpoint:
        lent = memory(checkpoint, slab)
        copy_checkpoint(checkpoint, lent.layout, lent.targets)
        assert lent.images() == [lent.expected(TENSORS)] * 2


@pytest.mark.parametrize("staging", [direct, dirty])
@pytest.mark.usefixtures("small_chunks", "python_reads")
def test_bytes_go_on_from_device_to_device_piece_by_piece(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, staging: object
) -> None:
    monkeypatch.setattr(copy, "make_staging", staging)
    monkeypatch.setattr(read_plan, "P2P_PIECE", 30_000)
    copies: list[int] = []
    done: list[str] = []
    copy_in_stream, read_into = Stream.copy, CheckpointFile.read_into

    def noting(stream: Stream, pointer: int, source: int, nbytes: int) -> None:
        copies.append(nbytes)
        done.append("passed on")
        copy_in_stream(stream, pointer, source, nbytes)

    def reading(file: CheckpointFile, buffers: list[memoryview], offset: int) -> None:
        read_into(file, buffers, offset)
        done.append("read")

    monkeypatch.setattr(Stream, "copy", noting)
    monkeypatch.setattr(CheckpointFile, "read_into", reading)
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint, 65536, devices=4)
        first, second, third, fourth = lent.targets
        second = dataclasses.replace(second, upstream=first.pointers)
        third = dataclasses.replace(third, upstream=second.pointers)  # and the fourth reads nobody's
        copy_checkpoint(checkpoint, lent.layout, [first, second, third, fourth])
        assert lent.images() == [lent.expected(TENSORS)] * 4
    assert sum(copies) == 2 * lent.layout.nbytes
    assert len(copies) == 2 * sum(-(-size // 30_000) for size in lent.layout.allocations)
    assert "read" in done[done.index("passed on") :], "the first piece goes on while others come"


@pytest.mark.usefixtures("small_chunks", "python_reads")
def test_nothing_is_passed_on_once_a_read_has_failed_and_the_others_are_over(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "P2P_PIECE", 10_000)
    over: list[str] = []
    numbers, failed = itertools.count(), threading.Event()
    leave, begin, read_into = PeerCopies.__exit__, PeerCopies.pass_on, CheckpointFile.read_into

    def leaving(copies: PeerCopies, *error: object) -> None:
        over.append("relay")
        leave(copies, *error)

    def passing_on(copies: PeerCopies, arrived: list[Chunk]) -> None:
        over.append("passed on")
        begin(copies, arrived)

    def reading(file: CheckpointFile, buffers: list[memoryview], offset: int) -> None:
        number = next(numbers)
        if number == 30:
            failed.set()
            raise Invalid("it became shorter")
        if number > 30:  # another thread's, which is still at it when that one has failed
            assert failed.wait(PATIENCE)
            threading.Event().wait(0.2)
        read_into(file, buffers, offset)
        over.append("read")

    monkeypatch.setattr(PeerCopies, "__exit__", leaving)
    monkeypatch.setattr(PeerCopies, "pass_on", passing_on)
    monkeypatch.setattr(CheckpointFile, "read_into", reading)
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint, devices=2)
        first, second = lent.targets
        second = dataclasses.replace(second, upstream=first.pointers)
        with pytest.raises(Invalid, match="it became shorter"):
            copy_checkpoint(checkpoint, lent.layout, [first, second])
    assert "passed on" in over
    assert over[-1] == "relay"
    assert over.count("relay") == 1


def shards(lent: Memory) -> list[Target]:
    """Return targets of which each has the allocation of its own number alone."""
    return [
        dataclasses.replace(
            target,
            pointers=tuple(pointer if number == home else None for number, pointer in enumerate(target.pointers)),
        )
        for home, target in enumerate(lent.targets)
    ]


@pytest.mark.parametrize("late", [0, 1])
def test_a_sharded_copy_is_over_with_its_last_device_and_takes_as_long(
    memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, late: int
) -> None:
    """The thread of one device comes to its first chunk when that of the other has had its own part for a while."""
    held, begun = 0.1, threading.Event()
    writers = itertools.count()
    make_writer = DirectStaging.writer

    def writer(staging: DirectStaging) -> HostWriter:
        if next(writers) == late:
            assert begun.wait(PATIENCE)
        return make_writer(staging)

    monkeypatch.setattr(DirectStaging, "writer", writer)
    tensors = checkpoints.filled([(f"layer.{number}", "U8", (5000,)) for number in range(2)])
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", tensors)) as checkpoint:
        lent = memory(checkpoint, slab=5000, devices=2)
        read_into = checkpoint.files[0].read_into

        class Slow:
            descriptor = None

            def read_into(self, buffers: list[memoryview], offset: int) -> None:
                if not begun.is_set():
                    threading.Event().wait(held)
                    begun.set()
                read_into(buffers, offset)

        stored = zip(checkpoint.entries, lent.layout.tensors, strict=True)
        targets = shards(lent)
        with FileCopy("cubroker-load", lambda: targets[0].context) as copying:
            copying.plan([Slow()], stored, lent.layout.allocations, homes_of(targets))
            assert copying.into(targets) >= held
        expected = lent.expected(tensors)
        assert [lent.images()[number][number] for number in range(2)] == expected


@pytest.mark.usefixtures("small_chunks")
def test_a_plan_that_cannot_be_made_leaves_nothing_pinned(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "make_staging", PinnedStaging)

    def no_memory(*_: object, **__: object) -> list[Chunk]:
        raise MemoryError

    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        held = holdings(monkeypatch, lent.targets[0].context.calls, ["cuMemHostRegister", "cuMemHostAlloc"])
        monkeypatch.setattr(copy, "read_plan", no_memory)
        with pytest.raises(MemoryError):
            copy_checkpoint(checkpoint, lent.layout, lent.targets)
        assert not any(held.values())


def test_a_copy_whose_memory_cannot_be_given_back_ends_nevertheless(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: DirectStaging) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(DirectStaging, "close", broken)
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_value))
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        copy_checkpoint(checkpoint, lent.layout, lent.targets)
        assert lent.images() == [lent.expected(TENSORS)] * 2
    eventually(lambda: [str(each) for each in failures] == ["broken"], "the failure to be told")


@pytest.mark.usefixtures("small_chunks")
def test_progress_rises_to_the_whole_and_comes_from_the_calling_thread(
    tmp_path: Path, memory: Callable[..., Memory]
) -> None:
    seen: list[tuple[int, int, int]] = []
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        seconds = copy_checkpoint(
            checkpoint, lent.layout, lent.targets, lambda done, total: seen.append((done, total, threading.get_ident()))
        )
    assert seconds > 0
    assert seen == sorted(seen)
    assert seen[-1][:2] == (checkpoint.nbytes, checkpoint.nbytes)
    assert {thread for _, _, thread in seen} == {threading.get_ident()}


@pytest.mark.parametrize("staging", [direct, dirty])
@pytest.mark.usefixtures("small_chunks")
def test_a_file_that_ends_early_stops_all_threads(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, staging: object
) -> None:
    monkeypatch.setattr(copy, "make_staging", staging)
    path = checkpoints.write(tmp_path / "m.safetensors", TENSORS)
    with Checkpoint.open(path) as checkpoint:
        lent = memory(checkpoint)
        os.truncate(path, checkpoint.entries[-1].offset - 1000)
        with pytest.raises(Invalid, match=f"cannot read {path}: it ended at byte"):
            copy_checkpoint(checkpoint, lent.layout, lent.targets)
    eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("cubroker-load")], "the end")


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"])
@pytest.mark.usefixtures("small_chunks")
def test_a_ring_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(copy, "make_staging", PinnedStaging)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        calls, tries = lent.targets[0].context.calls, iter(range(100))
        held = holdings(monkeypatch, calls, ["cuMemHostRegister", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate"])
        made = getattr(calls, call)

        def refused(*args: object) -> object:
            if call == "cuMemHostAlloc" or next(tries):
                raise DriverError(call, 2, "CUDA_ERROR_OUT_OF_MEMORY")
            return made(*args)

        monkeypatch.setattr(calls, call, refused)
        if call == "cuMemHostAlloc":
            monkeypatch.setattr(calls, "cuMemHostRegister", refused, raising=False)
        with pytest.raises(DriverError, match=call):
            copy_checkpoint(checkpoint, lent.layout, lent.targets)
        assert not any(held.values())


@pytest.mark.parametrize("parts", [(1, 1), (9, 1), (1, 9), (8, 1, 1, 1)], ids=str)
def test_a_sharded_copy_enters_the_context_of_each_device_once_and_not_with_each_chunk(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, parts: tuple[int, ...]
) -> None:
    monkeypatch.setattr(copy, "make_staging", dirty)
    monkeypatch.setattr(copy, "CHUNK", 1024)
    size = 400 * 1024 // sum(parts)
    tensors = checkpoints.filled([(f"layer.{number}", "U8", (part * size,)) for number, part in enumerate(parts)])
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", tensors)) as checkpoint:
        lent = memory(checkpoint, slab=1024, devices=len(parts))
        targets = shards(lent)
        calls = targets[0].context.calls
        pushed, push = itertools.count(), calls.cuCtxPushCurrent

        def noting(context: object) -> None:
            next(pushed)
            push(context)

        monkeypatch.setattr(calls, "cuCtxPushCurrent", noting)
        copy_checkpoint(checkpoint, lent.layout, targets)
        assert next(pushed) < 80, "for 400 chunks"
        expected, images = lent.expected(tensors), lent.images()
        assert [images[number][number] for number in range(len(parts))] == expected


@pytest.mark.parametrize("staging", [direct, dirty])
@pytest.mark.usefixtures("small_chunks")
def test_files_are_read_where_descriptors_have_run_out_and_none_is_left_open(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, staging: object
) -> None:
    monkeypatch.setattr(copy, "make_staging", staging)
    names = list(TENSORS)
    parts = [{name: TENSORS[name] for name in names[start::5]} for start in range(5)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Checkpoint.open(checkpoints.write_sharded(tmp_path, parts)) as checkpoint:
        lent = memory(checkpoint)
        before = sorted(Path("/proc/self/fd").iterdir())
        for spare in (0, 1, 70, 200):  # of which 64 are left to the rest of the process
            for target in lent.targets:
                for pointer, nbytes in zip(target.pointers, lent.layout.allocations, strict=True):
                    target.context.clear(pointer, nbytes)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + spare, limits[1]))
            try:
                copy_checkpoint(checkpoint, lent.layout, lent.targets)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert lent.images() == [lent.expected(TENSORS)] * 2
            assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.usefixtures("small_chunks")
def test_what_the_c_library_does_not_take_is_read_by_python(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it has no memory for requests: some are taken, and the others read nothing."""
    posix_aio, submit, taken = threads.posix_aio, threads.posix_aio.submit, list[int]()

    def some(mode: int, requests: object, count: int, event: None) -> int:
        taken.append(count // 2)
        submit(mode, requests, count // 2, event)
        return -1

    monkeypatch.setattr(posix_aio, "submit", some)
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        copy_checkpoint(checkpoint, lent.layout, lent.targets)
        assert lent.images() == [lent.expected(TENSORS)] * 2
    assert sum(taken) > 100


def test_a_forked_child_reads_with_threads_of_its_own(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the C library have not come along, and it would wait for them."""
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        copy_checkpoint(checkpoint, lent.layout, lent.targets)

        def again() -> str:
            own = bytearray(lent.layout.nbytes)
            with address(own, writable=True) as (pointer, _):
                starts = itertools.accumulate(lent.layout.allocations, initial=pointer)
                target = dataclasses.replace(lent.targets[0], pointers=tuple(starts)[:-1])
                copy_checkpoint(checkpoint, lent.layout, [target])
            return str(bytes(own) == b"".join(lent.expected(TENSORS)))

        assert in_child(again) == "True"


@pytest.mark.usefixtures("small_chunks")
def test_memory_that_cannot_be_registered_is_allocated(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "make_staging", PinnedStaging)
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        calls, allocated = lent.targets[0].context.calls, list[int]()
        held = holdings(monkeypatch, calls, ["cuMemHostAlloc"])
        allocate = calls.cuMemHostAlloc

        def refuse(*_: object) -> None:
            raise DriverError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY")

        def noting(nbytes: int, flags: int) -> int:
            allocated.append(nbytes)
            return int(allocate(nbytes, flags))

        monkeypatch.setattr(calls, "cuMemHostRegister", refuse, raising=False)
        monkeypatch.setattr(calls, "cuMemHostAlloc", noting)
        copy_checkpoint(checkpoint, lent.layout, lent.targets)
        assert lent.images() == [lent.expected(TENSORS)] * 2
        assert len(allocated) == 1
        assert not held["cuMemHostAlloc"]


def test_a_copy_makes_ready_before_its_targets_are_there_and_unpins_when_it_ends(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "make_staging", PinnedStaging)
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        first = lent.targets[0].context
        pinned = holdings(monkeypatch, first.calls, ["cuMemHostRegister"])["cuMemHostRegister"]
        stored = list(zip(checkpoint.entries, lent.layout.tensors, strict=True))
        for filled in (True, False):
            with FileCopy("cubroker-load", lambda: first) as copying:
                copying.begin()
                copying.plan(checkpoint.files, stored, lent.layout.allocations)
                eventually(lambda: pinned, "the memory to be pinned")
                assert in_child(lambda: str(copying.end())) == "None", "a forked child leaves the block as well"
                if filled:
                    assert copying.into(lent.targets) > 0
                    assert lent.images() == [lent.expected(TENSORS)] * 2
            assert not pinned
        with FileCopy("cubroker-load", lambda: first):
            pass  # was never begun
        with FileCopy("cubroker-load", lambda: first) as copying:
            copying.begin()  # and never planned


class Work:
    """Work that goes on until it is told to end."""

    def __init__(self) -> None:
        self.begun = Event()
        self.leave = Event()
        self.done = False

    def __call__(self) -> int:
        self.begun.set()
        assert self.leave.wait(PATIENCE)
        self.done = True
        return get_ident()


class Supervised(SupervisedThread[int]):
    def __init__(self, call: Callable[[], int], stop: Callable[[], object]) -> None:
        super().__init__("worker")
        self._call, self._stop = call, stop

    def work(self) -> int:
        return self._call()

    def stop(self) -> None:
        self._stop()


def supervised(
    call: Callable[[], int], stop: Callable[[], object] = lambda: None, report: Callable[[], None] | None = None
) -> int:
    thread = Supervised(call, stop)
    try:
        thread.begin()
        return thread.result(report)
    finally:
        thread.end()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, TimeoutError])
def test_interrupts_of_the_wait_are_told_when_the_work_is_over(
    monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    work, stopped, waits, wait = Work(), Event(), iter(range(10)), Future.wait

    def interrupted(future: Future[None], timeout: float | None = None) -> bool:
        match next(waits):
            case 0:
                assert work.begun.wait(PATIENCE)
                raise interrupt
            case 1 | 2:
                assert stopped.is_set()
                raise interrupt
            case _:
                work.leave.set()
                return wait(future, timeout)

    monkeypatch.setattr(Future, "wait", interrupted)
    with pytest.raises(interrupt):
        supervised(work, stopped.set)
    assert work.done


def test_a_report_that_fails_stops_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    monkeypatch.setattr(threads, "REPORT_SECONDS", 0.001)

    def report() -> None:
        assert work.begun.wait(PATIENCE)
        raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        supervised(work, work.leave.set, report)
    assert work.done


def test_work_whose_thread_comes_after_the_interrupt_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    work, late, start = Work(), SimpleQueue[Thread](), Thread.start

    def interrupted(future: Future[None], timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Thread, "start", lambda thread: late.put(thread))
    monkeypatch.setattr(Future, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        supervised(work)
    thread = late.get(timeout=PATIENCE)
    start(thread)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not work.begun.is_set()


def test_the_caller_gets_the_value_and_the_error_of_another_thread() -> None:
    work = Work()
    work.leave.set()
    assert supervised(work) != get_ident()
    with pytest.raises(ZeroDivisionError):
        supervised(lambda: 1 // 0)


def none_left(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("starts", ["_thread", "threading", "executor"])
def test_a_copy_for_which_threads_have_run_out_is_unavailable_and_names_the_limit(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, starts: str
) -> None:
    path, start = checkpoints.write(tmp_path / "m.safetensors", TENSORS), Thread.start
    if starts == "_thread":
        monkeypatch.setattr(threads, "start_new_thread", none_left)
    elif starts == "threading":
        monkeypatch.setattr(Thread, "start", none_left)
    else:
        monkeypatch.setattr(Thread, "start", lambda thread: none_left() if "_" in thread.name else start(thread))
    with Checkpoint.open(path) as checkpoint:
        lent = memory(checkpoint)
        with pytest.raises(Unavailable, match=r"cubroker-load has no threads .*can't start new thread; RLIMIT_NPROC"):
            copy_checkpoint(checkpoint, lent.layout, lent.targets)


def test_threads_that_run_out_leave_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Thread, "start", none_left)
    todo = deque([1])
    with WorkerThreads(2, "worker", todo.clear) as pool, pytest.raises(Unavailable):
        pool.submit(int)
    assert not todo


def test_what_fails_leaves_nothing_to_do() -> None:
    todo, did = deque([1, 0, 2]), list[int]()
    with pytest.raises(ZeroDivisionError):
        drain(todo, lambda number: did.append(1 // number))
    assert did == [1]
    assert not todo
