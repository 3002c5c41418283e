"""What a Python may not name that was built against an older C library, by its own names and without them."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.driver import linux


@pytest.fixture(params=["named", "not named"], autouse=True)
def python(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "not named":
            patch.delattr(os, "memfd_create")
            patch.delattr(os, "pidfd_open")
        yield


def test_a_file_in_memory_can_be_made_and_sealed() -> None:
    descriptor = linux.memfd_create("test", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
    try:
        assert str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("/memfd:test")
        assert not os.get_inheritable(descriptor)
        seals = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL
        fcntl.fcntl(descriptor, linux.F_ADD_SEALS, seals)
        assert fcntl.fcntl(descriptor, linux.F_GET_SEALS) == seals
    finally:
        os.close(descriptor)
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        linux.memfd_create("test", 1 << 31)


def test_a_process_can_be_watched_that_is_there() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        descriptor = linux.pidfd_open(child.pid)
        try:
            assert not os.get_inheritable(descriptor)
            assert not select.select([descriptor], [], [], 0)[0]
            child.communicate()
            assert select.select([descriptor], [], [])[0]
        finally:
            os.close(descriptor)
    with pytest.raises(ProcessLookupError):
        linux.pidfd_open(child.pid)


def test_the_numbers_are_those_that_other_pythons_name() -> None:
    names = [name for name in vars(linux) if name.startswith("F_")]
    assert [getattr(linux, name) for name in names] == [getattr(fcntl, name) for name in names]
    assert (linux.MFD_CLOEXEC, linux.MFD_ALLOW_SEALING) == (os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING)
