"""What there is to know of this machine, or container, without a driver."""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cubroker.cli.doctor.facts import BrokerFacts, DirectoryFacts, HostFacts
from cubroker.client import Broker
from cubroker.driver import linux
from cubroker.protocol import directory as places
from cubroker.protocol.errors import CubrokerError, Invalid
from cubroker.protocol.system_errors import reason
from cubroker.server import sandbox
from cubroker.server.peers import outsider

ANSWER = 5.0
"""Seconds that a broker may take to answer."""

SO_PEERPIDFD = 77
"""Linux 6.5: the process at the other end (asm-generic/socket.h; Python does not name it)."""

FILES = ("nvidiactl", "nvidia-uvm")
"""The device files without which no process uses a GPU, beside one for each GPU."""

CHANNELS = "dev/nvidia-caps-imex-channels"

_ALL_USERS = "4294967295"
"""How many user ids there are outside of any namespace (user_namespaces(7))."""


def examine(directory: Path, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> HostFacts:
    """Look at the machine, and at the broker of ``directory``. Files are those under ``root``."""
    descriptors, locked = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostFacts(
        directory=examine_directory(directory),
        broker=examine_broker(directory),
        user=os.geteuid(),
        kernel=os.uname().release.partition("-")[0],
        module=_module(root),
        files={name: os.access(root / "dev" / name, os.R_OK | os.W_OK) for name in FILES if _there(root, name)},
        channels=any((root / CHANNELS).glob("channel*")),
        container=_container(root, environ),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        namespace=_namespace(root),
        descriptors=descriptors,
        locked=locked,
        memfd=_refusal(lambda: linux.memfd_create("cubroker-doctor", linux.MFD_CLOEXEC)),
        pidfd=_refusal(lambda: linux.pidfd_open(os.getpid())),
        peer_pidfd=_peer_pidfd(),
        unconfined=tuple(sandbox.obstacles()),
    )


def examine_broker(directory: Path) -> BrokerFacts:
    """Open a session with the broker of a directory, and end it."""
    try:
        with Broker(directory, timeout=ANSWER) as broker:
            count = len(broker.devices())
    except CubrokerError as error:
        there = os.path.lexists(directory / places.SESSION_SOCKET)
        return BrokerFacts(error.code if there or error.code != "unavailable" else "absent", error.message)
    return BrokerFacts("", f"a broker answers, with {count} device{'s' * (count != 1)}")


def examine_directory(path: Path) -> DirectoryFacts:
    """Look at where a broker serves, or would."""
    path = path.absolute()
    try:
        places.check(path)
        here = path.stat()
    except Invalid as error:
        return DirectoryFacts(path, invalid=error.message)
    except FileNotFoundError:
        return DirectoryFacts(path, state="absent", exposed=_exposed(path, os.geteuid()))
    except PermissionError:
        return DirectoryFacts(path, state="hidden")
    except NotADirectoryError:
        return DirectoryFacts(path, state="something else")
    if not stat.S_ISDIR(here.st_mode):
        return DirectoryFacts(path, state="something else")
    enter = os.access(path, os.X_OK, effective_ids=True)
    exposed = _exposed(path, here.st_uid)
    return DirectoryFacts(path, owner=here.st_uid, mode=stat.S_IMODE(here.st_mode), exposed=exposed, enter=enter)


def _exposed(path: Path, owner: int) -> str:
    return places.exposure(path, owner, outsider("uid"))


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _module(root: Path) -> str:
    """Return the version from a line like ``NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03 …``."""
    line = _text(root / "proc/driver/nvidia/version").partition("\n")[0]
    return next((word for word in line.split() if word[0].isdigit() and "." in word), "")


def _there(root: Path, name: str) -> bool:
    return (root / "dev" / name).exists()


def _container(root: Path, environ: Mapping[str, str]) -> str:
    """Return what kind of container leaves the traces that there are."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = _text(root / "proc/1/cgroup")
    if (root / ".dockerenv").exists() or "docker" in groups:
        return "docker"
    for trace, kind in (("kubepods", "kubernetes"), ("libpod", "podman"), ("containerd", "containerd"), ("lxc", "lxc")):
        if trace in groups:
            return kind
    return ""


def _namespace(root: Path) -> bool:
    words = _text(root / "proc/self/uid_map").split()
    return bool(words) and words != ["0", "0", _ALL_USERS]


def _refusal(opened: Callable[[], int]) -> str:
    """Return why a descriptor cannot be had, if it cannot."""
    try:
        os.close(opened())
    except OSError as error:
        return reason(error)
    return ""


def _peer_pidfd() -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return False
    return True
