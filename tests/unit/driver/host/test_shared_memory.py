"""How host devices share memory when owners stop, die, fork or are lied to."""

from __future__ import annotations

import array
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cubroker.driver import Context, Driver, DriverError
from cubroker.driver.host import shared_memory
from cubroker.driver.host.shared_memory import close
from tests import forkserver
from tests.brokers import PATIENCE
from tests.unit.driver.conftest import SPEC
from tests.unit.driver.other_process import PRELOAD, OtherProcess
from tests.unit.server.processes import all_closed, files

MIB = 1 << 20
BLOCK = 2 * MIB


@pytest.fixture
def owner() -> Iterator[OtherProcess]:
    """A process whose memory this one opens; it may be ended or stopped."""
    with OtherProcess(SPEC) as owner:
        yield owner


def offer(owner: OtherProcess, text: bytes = b"") -> bytes:
    """Let a process allocate a block and return its handle."""
    pointer = owner.ask("allocate", BLOCK)
    owner.ask("write", pointer, text)
    handle = owner.ask("export", pointer)
    assert isinstance(handle, bytes)
    return handle


def address_of(handle: bytes) -> bytes:
    return b"\0cubroker-host-" + handle[:16].hex().encode()


def shared_resident() -> int:
    """Bytes of shared memory that this process has touched and that still exist."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem")


@contextmanager
def short_of_addresses(process: int, left: int) -> Iterator[None]:
    """Leave a process so many bytes of address space, as ``ulimit -v`` would."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[0])
    before = resource.prlimit(process, resource.RLIMIT_AS)
    resource.prlimit(process, resource.RLIMIT_AS, (pages * resource.getpagesize() + left, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_AS, before)


def test_memory_for_which_there_are_no_addresses_is_not_mapped(context: Context, owner: OtherProcess) -> None:
    pointer = context.allocate(64 * MIB)
    handle = context.export(pointer)
    owner.ask("uuids")  # it has loaded everything
    text = (
        r"cuIpcOpenMemHandle failed with CUDA_ERROR_MAP_FAILED \(205\): this process has no addresses left .*: "
        r"raise its limit on address space \(`ulimit -v`\)"
    )
    with short_of_addresses(owner.pid, 32 * MIB), pytest.raises(DriverError, match=text):
        owner.ask("open", handle)
    owner.ask("close", owner.ask("open", handle))
    context.free(pointer)


def test_a_small_allocation_exposes_its_whole_block(context: Context, other_process: OtherProcess) -> None:
    first, second = context.allocate(100), context.allocate(100)
    assert second - first == 512
    context.write(first, b"first")
    context.write(second, b"second")
    pointer = other_process.ask("open", context.export(second))
    assert other_process.ask("read", pointer, 6) == b"second"
    assert other_process.ask("read", pointer - 512, 5) == b"first"
    other_process.ask("close", pointer)
    context.free(first)
    context.free(second)


def test_a_gap_between_small_allocations_is_used_again(context: Context) -> None:
    before = context.memory()
    pointers = [context.allocate(MIB // 2) for _ in range(4)]
    assert context.memory()[0] == before[0] - BLOCK
    context.free(pointers[1])
    assert context.allocate(MIB // 2) == pointers[1]
    further = context.allocate(1)
    assert context.memory()[0] == before[0] - 2 * BLOCK
    for pointer in (*pointers, further):
        context.free(pointer)
    assert context.memory() == before


def test_freed_memory_stays_readable_until_it_is_closed(context: Context, other_process: OtherProcess) -> None:
    pointer = context.allocate(BLOCK)
    context.write(pointer, b"kept")
    theirs = other_process.ask("open", context.export(pointer))
    context.free(pointer)
    assert other_process.ask("read", theirs, 4) == b"kept"
    other_process.ask("close", theirs)


def test_pages_and_descriptors_go_back_to_the_system(context: Context, owner: OtherProcess) -> None:
    resident = shared_resident()
    before = files(os.getpid())
    pointer = context.allocate(64 * MIB)
    context.write(pointer, b"x" * (64 * MIB))
    assert shared_resident() - resident > 60 * MIB  # an earlier test's may have gone meanwhile
    context.clear(pointer, 64 * MIB)
    assert shared_resident() - resident < MIB
    context.free(pointer)
    theirs = context.open(offer(owner, b"y" * BLOCK))
    assert context.read(theirs, BLOCK) == b"y" * BLOCK
    context.close(theirs)
    assert shared_resident() - resident < MIB
    assert files(os.getpid()) <= before


def test_a_device_is_full_when_its_size_is_used_up(context: Context) -> None:
    pointer = context.allocate(context.device.total - BLOCK)
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        context.allocate(BLOCK + 1)
    last = context.allocate(BLOCK)
    assert context.memory() == (0, context.device.total)
    context.free(pointer)
    context.free(last)


def test_a_handle_of_another_device_opens_in_either_context(driver: Driver, other_process: OtherProcess) -> None:
    second = driver.context(1)
    pointer = second.allocate(BLOCK)
    second.write(pointer, b"on the second device")
    handle = second.export(pointer)
    theirs = [other_process.ask("open", handle, device=device) for device in (0, 1)]
    assert theirs[0] != theirs[1]
    for device, their in enumerate(theirs):
        assert other_process.ask("read", their, 20, device=device) == b"on the second device"
        other_process.ask("close", their, device=device)
    second.free(pointer)


def test_a_handle_ends_with_its_owner(context: Context, owner: OtherProcess) -> None:
    handle = offer(owner)
    owner.kill()
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        context.open(handle)


def test_closing_the_driver_frees_what_was_in_it(driver: Driver, owner: OtherProcess) -> None:
    before, threads = files(os.getpid()), set(threading.enumerate())
    context = driver.context(0)
    pointer = context.allocate(BLOCK)
    handle = context.export(pointer)
    context.open(offer(owner))
    assert len(set(threading.enumerate()) - threads) == 1
    driver.close()
    assert set(threading.enumerate()) <= threads
    assert files(os.getpid()) <= before
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT"):
        context.read(pointer, 1)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        owner.ask("open", handle)


def test_a_stopped_owner_is_given_up(context: Context, owner: OtherProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PATIENCE", 0.2)
    handle = offer(owner, b"awake")
    owner.stop()
    with pytest.raises(DriverError, match="cuIpcOpenMemHandle failed with CUDA_ERROR_TIMEOUT"):
        context.open(handle)
    owner.go_on()
    monkeypatch.undo()
    pointer = context.open(handle)
    assert context.read(pointer, 5) == b"awake"
    context.close(pointer)


def test_a_process_that_was_stopped_while_it_asked_asks_again(
    context: Context, owner: OtherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which it was stopped is no time that the owner had."""
    handle, ask, now = offer(owner, b"awake"), shared_memory._ask, time.monotonic

    def stopped(asker: socket.socket, secret: bytes) -> tuple[int, int]:
        monkeypatch.setattr(shared_memory, "_ask", ask)
        monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * shared_memory.PATIENCE)
        raise TimeoutError

    monkeypatch.setattr(shared_memory, "_ask", stopped)
    pointer = context.open(handle)
    assert context.read(pointer, 5) == b"awake"
    context.close(pointer)


def test_waiting_for_one_owner_delays_no_other(
    context: Context, owner: OtherProcess, other_process: OtherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "PATIENCE", PATIENCE)
    handle, other = offer(owner, b"late"), offer(other_process, b"prompt")
    owner.stop()
    opened: list[int] = []
    waiting = threading.Thread(target=lambda: opened.append(context.open(handle)))
    waiting.start()
    pointer = context.open(other)
    assert context.read(pointer, 6) == b"prompt"
    context.close(pointer)
    assert not opened
    owner.go_on()
    waiting.join()
    assert context.read(opened[0], 4) == b"late"
    context.close(opened[0])


def test_an_owner_that_dies_while_it_is_asked_is_noticed(
    context: Context, owner: OtherProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_AGAIN", 0.05)
    handle = offer(owner)
    owner.stop()
    errors: list[str] = []

    def wait() -> None:
        try:
            context.open(handle)
        except DriverError as error:
            errors.append(error.name)

    waiting = threading.Thread(target=wait)
    waiting.start()
    owner.kill()
    waiting.join()
    assert errors == ["CUDA_ERROR_INVALID_VALUE"]


def test_garbage_and_silence_stall_nobody(context: Context, owner: OtherProcess) -> None:
    handle = offer(owner, b"served")
    before = files(owner.pid)
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nameless, _named() as silent:
        for peer in (nameless, silent):
            peer.connect(address_of(handle))
            for garbage in (b"", b"x", bytes(16), b"y" * 5000, handle[16:32]):
                for _ in range(20):
                    peer.send(garbage)
            socket.send_fds(peer, [bytes(16)], [reading] * 50)
        pointer = context.open(handle)  # while the silent one's answers are waiting for it
        assert context.read(pointer, 6) == b"served"
        context.close(pointer)
    os.close(reading)
    os.close(writing)
    all_closed(owner.pid, before)  # its own of what was sent last, too


def _named() -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    peer.bind("")
    return peer


@pytest.mark.parametrize(
    ("sealed", "answer", "copies", "name"),
    [
        (False, shared_memory._ANSWER.pack(0, 0), 1, "CUDA_ERROR_OPERATING_SYSTEM"),
        (True, shared_memory._ANSWER.pack(BLOCK, 0), 1, "CUDA_ERROR_INVALID_VALUE"),
        (True, b"short", 1, "CUDA_ERROR_INVALID_VALUE"),
        (True, shared_memory._ANSWER.pack(0, 0), 2, "CUDA_ERROR_OPERATING_SYSTEM"),
    ],
    ids=["memory that could shrink", "an offset outside", "half an answer", "two descriptors"],
)
def test_an_impostor_cannot_make_us_map_what_would_fault_nor_keep_what_it_sends(
    context: Context, sealed: bool, answer: bytes, copies: int, name: str
) -> None:
    before = files(os.getpid())
    handle = os.urandom(64)  # an address that no test beside this one takes
    fd = shared_memory.create(BLOCK) if sealed else os.memfd_create("unsealed")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as impostor:
        impostor.bind(address_of(handle))

        def serve() -> None:
            _, asker = impostor.recvfrom(64)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * copies))
            impostor.sendmsg([answer], [rights], 0, asker)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(DriverError, match=name):
            context.open(handle)
        thread.join()
    close(fd)
    assert files(os.getpid()) <= before


class Collecting:
    """A server's socket; the collector calls a finalizer on the server's thread before a descriptor is sent."""

    def __init__(self, real: socket.socket, finalizer: Callable[[], None]) -> None:
        self._real = real
        self._finalizer = finalizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def sendmsg(self, *args: Any) -> int:
        self._finalizer()
        return self._real.sendmsg(*args)


def fetched(handle: bytes) -> bool:
    """Whether a handle brings a descriptor, which is closed."""
    try:
        close(shared_memory.fetch(handle).fd)
    except LookupError:
        return False
    return True


@pytest.mark.parametrize("whose", ["its own", "another"])
def test_a_finalizer_on_the_servers_thread_may_call_the_driver(whose: str) -> None:
    driver_lock, inside = threading.RLock(), threading.Event()
    server = shared_memory.HandleServer()
    fd = shared_memory.create(BLOCK)
    handle = server.share(shared_memory.SharedFd(fd, 0))

    def end() -> None:
        """What a call does that frees the last memory that is shared."""
        with driver_lock:
            if whose == "another":
                assert inside.wait(PATIENCE)
            assert not server.withdraw(handle)
            server.stop()

    def call() -> None:
        inside.set()
        if whose == "its own":
            end()
        with driver_lock:
            pass

    ending = threading.Thread(target=end, daemon=True)
    with driver_lock:  # which the other thread takes first
        server._socket = Collecting(server._socket, call)  # type: ignore[assignment]
        asking = threading.Thread(target=fetched, args=(handle,), daemon=True)
        asking.start()
        if whose == "another":
            ending.start()
        else:
            assert inside.wait(PATIENCE)
    for thread in (asking, *([ending] if whose == "another" else []), server._thread):
        thread.join(PATIENCE / 4)
        assert not thread.is_alive()
    assert not fetched(handle)
    close(fd)


def test_a_handle_that_is_withdrawn_while_it_is_asked_for_brings_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    server = shared_memory.HandleServer()
    fd = shared_memory.create(BLOCK)
    handle, keeper = (server.share(shared_memory.SharedFd(fd, 0)) for _ in range(2))
    duplicate = shared_memory.duplicate

    def withdrawing(fd: int) -> int:
        server.withdraw(handle)
        return duplicate(fd)

    assert fetched(handle)
    monkeypatch.setattr(shared_memory, "duplicate", withdrawing)
    assert not fetched(handle)
    assert fetched(keeper)
    server.stop()
    shared_memory.join_stopped()
    close(fd)


def test_a_forked_child_is_refused_and_harms_nothing(context: Context, owner: OtherProcess) -> None:
    handle = offer(owner, b"whole")
    pointer = context.allocate(BLOCK)
    assert owner.ask("fork_and_open", context.export(pointer)) == "CUDA_ERROR_NOT_INITIALIZED"
    theirs = context.open(handle)
    assert context.read(theirs, 5) == b"whole"
    context.close(theirs)
    context.free(pointer)


FORKING_TWICE = """
import os, sys, warnings
from cubroker.driver import load
warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork with threads; that is what is tested
driver = load(sys.argv[1])
context = driver.context(0)
context.export(context.allocate(2 << 20))
physical = driver.create(0, 2 << 20)
team = driver.multicast((0, 1), 2 << 20)
window = context.window(team.nbytes)
window.map(team.export())
if os.fork() == 0:
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
    if os.fork() == 0:
        for file in files:
            os.fstat(file)
        print("all open", flush=True)
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_the_child_of_a_forked_child_keeps_the_files_that_its_parent_opened() -> None:
    done = forkserver.run(["-c", FORKING_TWICE, SPEC], preload=PRELOAD, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all open\n", "")


FORKING = """
import os, sys
from cubroker.driver import load
context = load(sys.argv[1]).context(0)
pointer = context.allocate(2 << 20)
print(context.export(pointer).hex(), flush=True)
sys.stdin.readline()
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.readline()
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_does_not_stand_in_for_a_dead_owner(context: Context) -> None:
    """Whoever is refused at once is told so with another word than one who waited."""
    with forkserver.Forked(
        ["-c", FORKING, SPEC], preload=PRELOAD, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        handle = bytes.fromhex(process.stdout.readline().decode())
        pointer = context.open(handle)
        context.close(pointer)
        process.stdin.write(b"fork\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"forked\n"
        process.wait()
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            context.open(handle)
        process.stdin.close()  # which ends the child
