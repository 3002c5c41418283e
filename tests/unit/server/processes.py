"""What the kernel says of a broker's processes."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.brokers import eventually


def gateway_of(broker: int) -> int:
    """Return the pid of a broker's gateway; waits until there is one."""
    found: list[int] = []

    def look() -> list[int]:
        found[:] = gateways(broker)
        return found

    eventually(look, "a gateway")
    (gateway,) = found
    return gateway


def gateways(broker: int) -> list[int]:
    """Return the pids of a broker's gateways."""
    children = Path(f"/proc/{broker}/task/{broker}/children")
    return [
        int(child) for child in children.read_text().split() if b"cubroker.server.transport.gateway" in _command(child)
    ]


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> list[Path]:
    """Return the entries of what a process has open; the test is skipped if that is a broker's, and this user's own.

    What it reads in /proc for a moment is left out: a broker looks at processes now and then.
    """
    try:
        return [entry for entry in Path(f"/proc/{pid}/fd").iterdir() if not _is_of_proc(entry)]
    except PermissionError:
        pytest.skip("a broker shows what it has open to root alone: run this test as root")


def _is_of_proc(entry: Path) -> bool:
    try:
        return entry.readlink().is_relative_to("/proc")
    except FileNotFoundError:  # it is closed by now, and whoever asks finds that out as well
        return False


def descriptors(pid: int) -> int:
    """Return how many files a process has open."""
    return len(open_files(pid))


def files(pid: int) -> Counter[str]:
    """Return what a process has open: memory, sockets and pipes by their numbers, everything else by its kind.

    What is in a later answer and not in an earlier one was opened in between. Their sizes alone say less: what an
    earlier test of the same process leaves may be closed at any moment. libzmq connects in a thread of its own: a
    client's connection is there for certain once the client has asked something.
    """
    found: Counter[str] = Counter()
    for entry in open_files(pid):
        with suppress(FileNotFoundError):  # closed by now, as is that with which the list was read
            found[f"{entry.readlink()} {entry.stat().st_ino}"] += 1
    return found


def all_closed(pid: int, before: Counter[str]) -> None:
    """Wait until a process has nothing open that it did not have ``before``, an answer of :func:`files`."""
    try:
        eventually(lambda: files(pid) <= before, f"process {pid} to close what it opened")
    except AssertionError as error:
        error.add_note(f"still open: {files(pid) - before}")
        raise


def maps(pid: int) -> str:
    """Return the files that a process has mapped, its extension modules among them."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        pytest.skip("a broker shows what it has mapped to root alone: run this test as root")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False
