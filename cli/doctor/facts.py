"""Facts about a machine, and the findings drawn from them: plain data, which also travels between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

NAME = "cubroker"
UNIT = f"{NAME}.service"
"""The unit with which systemd runs a broker."""

Outcome = Literal["works", "refused", "differs", "writable", "silent", "died", "skipped"]


@dataclass(frozen=True)
class Trial:
    """The outcome of one trial, or of a question to the driver."""

    #: ``refused`` by the driver; other bytes were read than written (``differs``); read-only memory was ``writable``;
    #: no answer in time (``silent``); the process ``died``; not tried since an earlier one was silent (``skipped``).
    outcome: Outcome
    #: Which process was refused: the ``owner`` of the memory, as the broker is, or a ``worker``.
    side: str = ""
    #: The driver's function that refused.
    call: str = ""
    #: The name of its result; empty if the driver has no such function.
    error: str = ""
    #: Details, in words.
    detail: str = ""


@dataclass(frozen=True)
class DriverFacts:
    """The driver's answer to the survey."""

    #: What was asked for, ``"cuda:0,1"``.
    spec: str
    #: Works, or why not.
    trial: Trial
    #: The CUDA version it serves, 13000 for 13.0; 0 if unknown.
    version: int = 0
    #: Whether the driver's library, libcuda, is there.
    library: bool = True


@dataclass(frozen=True)
class DeviceFacts:
    """One device as it describes itself; None is an attribute that the driver does not know."""

    index: int
    uuid: str
    name: str
    #: Whether it is a host device.
    emulated: bool = False
    #: 0 default, 2 prohibited, 3 one process at a time.
    compute_mode: int | None = 0
    #: Whether it has unified addressing, which NVIDIA's pages require for handles of memory and events.
    unified: int | None = 1
    #: Whether it has IPC events, which those pages have programs ask to find out whether there is any IPC.
    ipc: int | None = 1
    #: Whether it has virtual memory management.
    virtual: int | None = 1
    #: Whether memory can be exported as descriptors.
    descriptors: int | None = 1
    #: Whether the hardware has fabric handles; the machine may refuse them.
    fabric: int | None = 0
    #: Whether the device says that it can be in a multicast object.
    multicast: int | None = 0
    #: Why it cannot be in one nevertheless, in the driver package's words; None if nothing prevents it.
    obstacle: str | None = None
    #: For each other device that was asked for: whether its memory is in direct reach.
    peers: Mapping[int, bool] = field(default_factory=dict)
    #: Works, or why the driver does not report links.
    links: Trial = Trial("works")

    @property
    def mig(self) -> bool:
        """Whether it is a slice of a GPU; in the driver API only the name tells."""
        return " MIG " in self.name


@dataclass(frozen=True)
class Survey:
    """The driver and its devices, before any trial."""

    driver: DriverFacts
    devices: tuple[DeviceFacts, ...] = ()


@dataclass(frozen=True)
class Examined:
    """One device, and the outcome of each trial on it by kind."""

    device: DeviceFacts
    trials: Mapping[str, Trial]


@dataclass(frozen=True)
class DirectoryFacts:
    """The directory where a broker serves, or would."""

    path: Path
    #: Why no socket can ever be there; empty if one can.
    invalid: str = ""
    #: What is there.
    state: Literal["directory", "absent", "something else", "hidden"] = "directory"
    #: Its user id.
    owner: int = 0
    #: Its permissions.
    mode: int = 0o755
    #: Why no broker serves there, since another user could pose as it, and what to do; as `serve` says it.
    exposed: str = ""
    #: Whether this user may pass through.
    enter: bool = True


@dataclass(frozen=True)
class BrokerFacts:
    """Whether a broker answers: ``code`` is empty, "absent", or that of the error; ``message`` says more."""

    code: str
    message: str
    #: Why it lends nothing new; empty if it lends.
    obstacle: str = ""
    #: Whether a broker answers although it opens no session, as when a quota is used up.
    refuses: bool = False


@dataclass(frozen=True)
class UnitFacts:
    """The broker's unit, as systemd reports it; a text is empty if systemd does not report it."""

    #: ``system`` or ``user``.
    manager: str
    #: ``loaded``, ``masked``, ``bad-setting`` or ``error``.
    loaded: str = "loaded"
    #: Why it could not be loaded.
    why: str = ""
    #: ``active``, ``activating``, ``failed`` or ``inactive``.
    state: str = "active"
    #: More exactly: ``running``, ``auto-restart``.
    phase: str = "running"
    #: How it ended: ``success``, ``exit-code``, ``watchdog``.
    result: str = "success"
    #: The exit status.
    status: int = 0
    restarts: int = 0
    #: What the broker says of itself.
    said: str = ""
    #: Whether it is started at boot.
    enabled: bool = True
    #: Whether its file is newer than what systemd has read.
    outdated: bool = False
    #: The file with the broker's settings.
    file: str = ""
    #: The unit's own file.
    path: str = ""
    #: The last error in its log since boot.
    error: str = ""


@dataclass(frozen=True)
class ListenerFacts:
    """The socket where clients connect."""

    #: ``deserted``: the socket is there, and no process has it.
    state: Literal["absent", "listening", "deserted", "unknown"] = "absent"
    #: The process that listens; 0 if it cannot be seen here.
    pid: int = 0
    name: str = ""
    #: Why it is unknown.
    detail: str = ""


@dataclass(frozen=True)
class SettingsFacts:
    """A file with settings of a broker."""

    file: str
    #: A line for each mistake.
    complaints: tuple[str, ...] = ()
    #: Settings that it has.
    count: int = 0
    #: Whether this user may read it.
    readable: bool = True


@dataclass(frozen=True)
class ServiceFacts:
    """The broker as a service; None stands for what does not exist."""

    unit: UnitFacts | None = None
    listener: ListenerFacts = ListenerFacts()
    settings: SettingsFacts | None = None


@dataclass(frozen=True)
class HostFacts:
    """The machine, or the container, that this process is in."""

    directory: DirectoryFacts
    broker: BrokerFacts
    #: The user id of this process.
    user: int = 0
    #: ``"6.18.1"``.
    kernel: str = "6.18.1"
    #: The version of the GPU driver's kernel module, ``"580.159.03"``; empty if none is loaded.
    module: str = ""
    #: The driver's device files that are there, by name, and whether this user may open each.
    files: Mapping[str, bool] = field(default_factory=dict)
    #: Whether there is an IMEX channel.
    channels: bool = False
    #: What kind of container this is; empty if none was recognised.
    container: str = ""
    #: ``CUDA_VISIBLE_DEVICES``.
    visible: str | None = None
    #: Whether user ids are those of a namespace.
    namespace: bool = False
    #: The soft and the hard limit on open files; -1 is none.
    descriptors: tuple[int, int] = (1024, 524288)
    #: The limit on locked memory in bytes; -1 is none.
    locked: int = -1
    #: Why files in memory cannot be made; empty if they can.
    memfd: str = ""
    #: Why processes cannot be watched; empty if they can.
    pidfd: str = ""
    #: Whether the kernel tells which process is at the other end of a socket.
    peer_pidfd: bool = True
    #: What the kernel lacks for keeping a gateway from the rest of the machine, a clause each.
    unconfined: tuple[str, ...] = ()
    #: The broker's unit, socket and settings.
    service: ServiceFacts = ServiceFacts()
    #: Why clients do not take the host's broker, and what to do; empty if they do, or if there is none.
    doubt: str = ""


@dataclass(frozen=True)
class Facts:
    """All facts. ``devices`` are host devices if none were named and there is no GPU."""

    driver: DriverFacts
    devices: tuple[Examined, ...]
    host: HostFacts


@dataclass(frozen=True)
class Finding:
    """A judgement of facts: works, does not work, or unknown (None); why; and what to do about it."""

    works: bool | None
    why: str
    do: str = ""
