"""What the kernel says of a broker's processes."""

from __future__ import annotations

import os
from pathlib import Path

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
    return [int(child) for child in children.read_text().split() if b"cubroker.server.gateway" in _command(child)]


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    """Return how many files a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def maps(pid: int) -> str:
    """Return the files that a process has mapped, its extension modules among them."""
    return Path(f"/proc/{pid}/maps").read_text()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
