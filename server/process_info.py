"""What /proc tells of a client's process: its name, its cgroup, and when it began.

The command line is not read. It may hold secrets, and reading it takes a lock that a process can keep for as long as it
likes (``mmap_lock``), which would stop a broker. The files here take none that a process can keep.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from cubroker.protocol.fields import LATEST
from cubroker.protocol.status import MAX_CGROUP, MAX_PROCESS_NAME, ProcessInfo

STARTED = 19
"""The place of the start time in /proc/PID/stat, after the name (proc_pid_stat(5) counts 22 from 1)."""

UNIFIED, SYSTEMD = "", "name=systemd"
"""The controllers of the hierarchies that name a container or a unit: cgroup v2, and systemd's own in v1."""


def read(pid: int) -> ProcessInfo | None:
    """Return what /proc tells of a process, with control characters escaped; None if this user may not see it there.

    The name is what the process calls itself. Nothing ensures that the number is still that of the same process.
    """
    folder = Path("/proc") / str(pid)
    try:
        name = (folder / "comm").read_text(errors="replace").rstrip("\n")
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        cgroups = (folder / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    if len(fields) <= STARTED:
        return None
    return ProcessInfo(_printable(name)[:MAX_PROCESS_NAME], _cgroup(cgroups), _since_1970(int(fields[STARTED])))


def read_by_pidfd(pidfd: int) -> ProcessInfo | None:
    """As :func:`read`, of the process that a pidfd refers to and of no other; None, too, if it has ended."""
    try:
        before, info, after = _number(pidfd), read(_number(pidfd)), _number(pidfd)
    except OSError:  # no /proc, or one of another pid namespace
        return None
    return info if before == after > 0 else None


def _number(pidfd: int) -> int:
    """Return the number that a pidfd's process has in this /proc; -1 once it has ended, 0 if it has none there."""
    found = re.search(r"^Pid:\s*(-?\d+)$", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE)
    return int(found[1]) if found else -1


def _cgroup(text: str) -> str | None:
    """Return the path of the hierarchy that tells most; None if the process is in the root of all."""
    lines = [line.split(":", 2) for line in text.splitlines()]
    paths = {controllers: path for _, controllers, path in lines if path != "/"}
    path = paths.get(UNIFIED) or paths.get(SYSTEMD) or next(iter(paths.values()), "")
    return _printable(path)[-MAX_CGROUP:] or None  # its end names the container


def _since_1970(ticks: int) -> float:
    """Return when a process began: ``ticks`` of the clock after the machine. A host's clock may show anything."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return min(max(0.0, round(time.time() - age, 2)), LATEST)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
