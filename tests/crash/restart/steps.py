"""A broker that is killed where a test says: it counts every step that something outside could tell from the next one.

A *step* is what the process does before and after it writes, sends, stores, allocates or frees. :func:`serve` runs in
a process of the worker_pool; the counter is shared with the test, which has SIGKILL come at the step that it chose.
Nothing in the product knows of this.

Labels: ``commit``, ``frame``, ``slot``, ``compact`` and ``give back`` of the journal; ``say X`` and ``said X`` around
each message to the store; ``do X`` and ``done X`` around each effect; ``answer`` and ``answered`` around each batch
of answers; ``send`` and ``sent``, also with ``descriptors``, around each packet on a session socket; ``batch`` before
one of requests is taken, and ``admit`` before a session is; ``device``, ``allocate``, ``allocated``, ``report`` and
``free`` on the threads of devices, ``assemble`` and ``assembled`` on that of multicast groups; ``gateway``, ``read
ledger``, ``restore``, ``take over``, ``adopt``, ``go on``, ``gone on``, ``door`` and ``ready`` while it starts.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from cubroker.server import __main__, main
from cubroker.server.broker import Broker
from cubroker.server.devices.allocator import (
    AdoptedAllocation,
    DeviceAllocator,
    IpcAllocation,
    MulticastBinder,
    VmmAllocation,
)
from cubroker.server.ledger import Ledger
from cubroker.server.main import ServiceStatus
from cubroker.server.store import store as store_module
from cubroker.server.store.sd_notify import NotifySocket
from cubroker.server.store.store import Journal
from cubroker.server.transport.admission import Listener, Sessions
from cubroker.server.transport.gateway_process import GatewayProcess
from cubroker.server.transport.requests import IncomingRequests
from cubroker.server.transport.session import SessionConnection
from tests.crash.worker_pool import Channel

NEVER = 0
SLACK = 4096
"""Bytes that are not worth a compaction here, so that there are many."""

_SHARED = struct.Struct("=qq")

Reach = Callable[[str], None]


class Counter:
    """How many steps there were since it was set, and at which one the broker is killed; shared through a file.

    Args:
        path: of the file, made if it is not there; the label of the last step goes beside it.
    """

    def __init__(self, path: Path) -> None:
        self.last = path.with_suffix(".label")
        self._lock = Lock()
        with path.open("a+b") as file:
            os.truncate(file.fileno(), _SHARED.size)
            self._shared = mmap.mmap(file.fileno(), _SHARED.size)

    def set(self, steps: int) -> None:
        """Kill the broker at this step from now on."""
        _SHARED.pack_into(self._shared, 0, steps, 0)

    @property
    def reached(self) -> int:
        """Steps since :meth:`set`."""
        return int(_SHARED.unpack_from(self._shared)[1])

    def pause(self) -> int:
        """Kill nobody, and return how many steps there were to the kill; none if it came."""
        steps, reached = _SHARED.unpack_from(self._shared)
        self.set(NEVER)
        return max(steps - reached, 0)

    def reach(self, label: str) -> None:
        """Count a step; called in the broker."""
        with self._lock:
            steps, reached = _SHARED.unpack_from(self._shared)
            _SHARED.pack_into(self._shared, 0, steps, reached + 1)
            if reached + 1 == steps:
                self.last.write_text(label)
                os.kill(os.getpid(), signal.SIGKILL)


def serve(line: Channel, directory: str, devices: str, budget: str, notify: str, room: int, counter: str) -> None:
    """Be a broker, with the descriptors that come on the line: the log, and what is stored."""
    with socket.socket(fileno=os.dup(line.fileno())) as connection:
        names, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 253)
    log, *stored = descriptors
    for number in (1, 2):
        os.dup2(log, number)
    labels = json.loads(names)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 1000) for each in stored]
    os.closerange(3, 1000)  # the line among them: the worker_pool kills this process when the test ends
    for number, descriptor in enumerate(high, start=3):
        os.dup2(descriptor, number)
        os.close(descriptor)
    count = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(stored)), "LISTEN_FDNAMES": ":".join(labels)}
    os.environ.update(NOTIFY_SOCKET=notify, FDSTORE=str(room), **count)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    install(Counter(Path(counter)).reach)
    sys.argv = ["broker", directory, "--devices", devices, "--budget", budget]
    os._exit(__main__.main())


def install(reach: Reach) -> None:
    """Have ``reach`` called at every step from now on."""
    store_module.SLACK = SLACK
    before(reach, Journal, "commit", "commit")
    after(reach, Journal, "_append", "frame")
    after(reach, Journal, "_switch", "slot")
    before(reach, Journal, "_compact", "compact")
    before(reach, Journal, "_give_back", "give back")
    around(reach, NotifySocket, "_transmit", lambda message, *_: (f"say {_field(message)}", f"said {_field(message)}"))
    around(reach, Broker, "_execute", lambda effect: (f"do {type(effect).__name__}", f"done {type(effect).__name__}"))
    around(reach, GatewayProcess, "send", lambda *_: ("answer", "answered"))
    around(reach, SessionConnection, "send", lambda *_: ("send", "sent"))
    around(reach, SessionConnection, "_send_descriptors", lambda *_: ("send descriptors", "sent descriptors"))
    before(reach, DeviceAllocator, "_execute", "device")
    before(reach, DeviceAllocator, "_piece", "allocate")
    after(reach, DeviceAllocator, "_piece", "allocated")
    after(reach, DeviceAllocator, "_obtain", "report")
    for kind in (IpcAllocation, VmmAllocation, AdoptedAllocation):
        before(reach, kind, "release", "free")
    around(reach, MulticastBinder, "_execute", lambda *_: ("assemble", "assembled"))
    before(reach, IncomingRequests, "decode", "batch")
    before(reach, Sessions, "open", "admit")
    before(reach, Sessions, "adopt", "take over")
    before(reach, DeviceAllocator, "adopt", "adopt")
    around(reach, Broker, "resume", lambda *_: ("go on", "gone on"))
    before(reach, Ledger, "restore", "read ledger")
    before(reach, GatewayProcess, "_spawn", "gateway")
    before(reach, Listener, "open", "door")
    before(reach, ServiceStatus, "ready", "ready")
    before(reach, main, "restore", "restore")


def _field(message: str) -> str:
    return message.partition("\n")[0].partition("=")[0]


def before(reach: Reach, owner: Any, name: str, label: str) -> None:
    """Reach ``label`` before every call."""
    around(reach, owner, name, lambda *_: (label, ""))


def after(reach: Reach, owner: Any, name: str, label: str) -> None:
    """Reach ``label`` after every call."""
    around(reach, owner, name, lambda *_: ("", label))


def around(reach: Reach, owner: Any, name: str, labels: Callable[..., tuple[str, str]]) -> None:
    """Reach what ``labels`` makes of the arguments, before and after every call."""
    call = getattr(owner, name)
    bound = isinstance(vars(owner)[name], classmethod) or not isinstance(owner, type)

    def stepping(*args: Any, **options: Any) -> Any:
        first, then = labels(*(args if bound else args[1:]))
        if first:
            reach(first)
        result = call(*args, **options)
        if then:
            reach(then)
        return result

    setattr(owner, name, staticmethod(stepping) if bound and isinstance(owner, type) else stepping)
