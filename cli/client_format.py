"""Clients as text: the columns of ``cubroker clients`` and ``top``, and each process's name, container and age."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import msgspec

from cubroker.cli import format
from cubroker.protocol.status import ClientInfo, ProcessInfo
from cubroker.server.transport.unix_sockets import read_process

RUNTIMES = {"docker": "docker", "libpod": "podman", "crio": "cri-o", "containerd": "containerd", "lxc": "lxc"}
"""The runtime of a container, by a part of its cgroup's path."""

SHORT_ID = 12
"""Characters of a container's id, as its runtime's commands show it."""

_CONTAINER = re.compile(r"(?:^|[^0-9a-f])([0-9a-f]{32}|[0-9a-f]{64})(?![0-9a-f])")


def known(clients: Sequence[ClientInfo], session: int) -> list[ClientInfo]:
    """Return the clients; look up here the processes that the broker could not look at.

    A broker whose /proc hides other users (``ProtectProc=``) knows only the PIDs of their processes. A PID is looked up
    here if this process's own ``session`` has the same PID on both sides. A process that has a session has not ended.
    """
    own = next((client for client in clients if client.session == session), None)
    if own is None or own.pid != os.getpid():
        return list(clients)
    return [
        client
        if client.process
        else msgspec.structs.replace(client, process=read_process(client.pid) if client.pid else None)
        for client in clients
    ]


def name(client: ClientInfo) -> str:
    """Return what the process calls itself, or ``?``."""
    return (client.process and client.process.name) or "?"


def container(process: ProcessInfo | None) -> str:
    """Return the container or the unit of a process: ``docker 3f2a9c…``, ``vllm.service``; ``-`` if it has none."""
    if process is None:
        return "?"
    if process.cgroup is None:
        return "-"
    if found := _CONTAINER.findall(process.cgroup):
        runtime = next((known for mark, known in RUNTIMES.items() if mark in process.cgroup), "container")
        return f"{runtime} {found[-1][:SHORT_ID]}"
    return process.cgroup.rstrip("/").rpartition("/")[2] or "-"


def age(client: ClientInfo, now: float) -> str:
    """Return how long the process has run, or ``?``."""
    return format.since(now - client.process.started) if client.process else "?"


def held_since(client: ClientInfo) -> float | None:
    """Return when the oldest lease of a client began, in seconds since 1970; None: it has none, or that is unknown."""
    return min((lease.held_since for lease in client.leases if lease.held_since is not None), default=None)


def held(client: ClientInfo, now: float) -> str:
    """Return for how long a client has held its oldest lease."""
    began = held_since(client)
    return format.since(now - began) if began is not None else "?" if client.leases else "-"


def leases(client: ClientInfo) -> str:
    """Return the versions that a client holds, in words; nothing if it holds nothing."""
    pools = Counter(f"{lease.pool}@{lease.version}" for lease in client.leases)
    return ", ".join(pool if times == 1 else f"{pool} ({times} times)" for pool, times in pools.items())


def holders(clients: Sequence[ClientInfo]) -> Mapping[tuple[str, int], list[ClientInfo]]:
    """Return the clients that hold each version, in the order of ``clients``."""
    found: dict[tuple[str, int], dict[int, ClientInfo]] = {}
    for client in clients:
        for lease in client.leases:
            found.setdefault((lease.pool, lease.version), {})[client.session] = client
    return {version: [*those.values()] for version, those in found.items()}


def short(client: ClientInfo) -> str:
    """Return a process in two words: ``vllm 4711``."""
    return f"{name(client)} {client.pid}"


def with_user(client: ClientInfo) -> str:
    """Return a process and its user: ``vllm 4711 (alice)``."""
    return f"{short(client)} ({format.user(client.uid)})"


def label(client: ClientInfo) -> str:
    """Return a process in words: ``vllm 4711 (alice, docker 3f2a9c5d1e07)``."""
    where = container(client.process)
    return f"{short(client)} ({format.user(client.uid)}{'' if where in '-?' else f', {where}'})"


# -- tables --------------------------------------------------------------------------------------------

SPARE = ("SESSION", "CONTAINER", "AGE", "LOCKS", "STATE", "HELD", "USER", "BEYOND LEASES")
"""The columns that a narrow terminal leaves out, in this order."""

ORDERS: dict[str, Callable[[ClientInfo], Any]] = {
    "session": lambda client: client.session,
    "pid": lambda client: client.pid,
    "process": name,
    "user": lambda client: format.user(client.uid),
    "container": lambda client: container(client.process),
    "age": lambda client: client.process.started if client.process else inf,
    "held": lambda client: inf if (began := held_since(client)) is None else began,
    "leases": lambda client: -len(client.leases),
}
"""The keys that clients are sorted by: the oldest, and those with most leases, come first."""


def columns(clients: Sequence[ClientInfo], now: float) -> dict[str, Callable[[ClientInfo], str]]:
    """Return the columns of a table of clients; locks, and memory beyond leases, have one if any client has some."""
    found: dict[str, Callable[[ClientInfo], str]] = {
        ">SESSION": lambda client: str(client.session),
        ">PID": lambda client: str(client.pid),
        "PROCESS": name,
        "USER": lambda client: format.user(client.uid),
        "CONTAINER": lambda client: container(client.process),
        ">AGE": lambda client: age(client, now),
        "STATE": lambda client: client.state,
        ">HELD": lambda client: held(client, now),
        "~LEASES": lambda client: leases(client) or "none",
    }
    if any(client.locks for client in clients):
        found |= {"~LOCKS": lambda client: ", ".join(client.locks) or "none"}
    if any(client.mapped_beyond_leases for client in clients):
        found |= {">BEYOND LEASES": _beyond}
    return found


def _beyond(client: ClientInfo) -> str:
    nbytes = client.mapped_beyond_leases
    return "?" if nbytes is None else format.size(nbytes)
