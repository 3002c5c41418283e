"""What a Python may not name that was built against an older C library, by its own names and without them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from cubroker.driver import system_calls
from tests.brokers import PATIENCE
from tests.unit.driver.conformance import mapped
from tests.unit.driver.mapping_commands import in_child


@pytest.fixture(params=["named", "not named"], autouse=True)
def python(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "not named":
            patch.delattr(os, "memfd_create")
            patch.delattr(os, "pidfd_open")
        yield


def test_a_file_in_memory_can_be_made_and_sealed() -> None:
    descriptor = system_calls.memfd_create("test", system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING)
    try:
        assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("/memfd:test")
        assert not os.get_inheritable(descriptor)
        seals = system_calls.F_SEAL_SHRINK | system_calls.F_SEAL_GROW | system_calls.F_SEAL_SEAL
        fcntl.fcntl(descriptor, system_calls.F_ADD_SEALS, seals)
        assert fcntl.fcntl(descriptor, system_calls.F_GET_SEALS) == seals
    finally:
        os.close(descriptor)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        system_calls.memfd_create("test", 1 << 31)


def test_a_process_can_be_watched_that_is_there() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        descriptor = system_calls.pidfd_open(child.pid)
        try:
            assert not os.get_inheritable(descriptor)
            assert not select.select([descriptor], [], [], 0)[0]
            child.communicate()
            assert select.select([descriptor], [], [])[0]
        finally:
            os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        system_calls.pidfd_open(child.pid)


def test_the_numbers_are_those_that_other_pythons_name() -> None:
    names = [name for name in vars(system_calls) if name.startswith("F_")]
    assert [getattr(system_calls, name) for name in names] == [getattr(fcntl, name) for name in names]
    assert (system_calls.MFD_CLOEXEC, system_calls.MFD_ALLOW_SEALING) == (os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING)


def test_huge_pages_stay_until_no_thread_writes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interrupt of the thread that pins them: the others would write to memory that is not there."""
    begun, closed = Event(), Event()

    def write(*_: int) -> None:
        begun.set()
        assert closed.wait(PATIENCE)

    monkeypatch.setattr(system_calls.ctypes, "memset", write)
    pages = system_calls.HugePages(2 * system_calls.HUGE_PAGE)
    monkeypatch.setattr(pages, "_huge", True)  # whatever this kernel was built with
    thread = Thread(target=pages.populate, args=(0, pages.nbytes))
    thread.start()
    assert begun.wait(PATIENCE)
    pages.close()
    assert mapped(pages.pointer)
    closed.set()
    thread.join()
    assert not mapped(pages.pointer)
    begun.clear()
    pages.populate(0, pages.nbytes)
    assert not begun.is_set()


@pytest.mark.parametrize("limited", [False, True])
def test_the_kernel_has_room_for_more_descriptors_as_far_as_the_limit_allows(limited: bool) -> None:
    def size() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"^FDSize:\s*(\d+)", status, re.MULTILINE)[0])

    def grow() -> str:
        before = size()
        if limited:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, before))
        opened = len([*Path("/proc/self/fd").iterdir()])
        system_calls.make_room(before)
        return f"{size() > before} {len([*Path('/proc/self/fd').iterdir()]) - opened}"

    assert in_child(grow) == f"{not limited} 0"
