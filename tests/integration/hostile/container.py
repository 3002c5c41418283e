"""A client as in a rootless container: ``python -m tests.integration.hostile.container DIRECTORY UID GID [GROUP …]``,
by root.

It is a visitor (:mod:`tests.unit.server.visitor`) in user, pid, mount and network namespaces that the user has made.
There
it is root, with all capabilities and process 1; outside it is the user, and it can gain no privileges.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

from tests.unit.server import visitor

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38

libc = ctypes.CDLL(None, use_errno=True)


def check(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(uid: str, gid: str) -> None:
    """Have a child of this process be the first in namespaces of its own, and root there."""
    check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))  # else the maps belong to root: this process has changed its user
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def main() -> None:
    directory, uid, gid, *groups = sys.argv[1:]
    visitor.become(uid, gid, *groups)
    enter(uid, gid)
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    assert (os.getpid(), os.getuid()) == (1, 0)
    visitor.serve(directory)


if __name__ == "__main__":
    main()
