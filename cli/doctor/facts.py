"""What is found out about a machine, and what is made of it: plain data, which also travels between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Outcome = Literal["works", "refused", "differs", "writable", "silent", "died", "skipped"]


@dataclass(frozen=True)
class Trial:
    """What came of one trial, or of asking the driver at all.

    Attributes:
        outcome: ``refused`` by the driver; other bytes were read than written (``differs``); what is read-only could be
            written; no answer in time (``silent``); the process ``died``; not tried since an earlier one was silent
            (``skipped``).
        side: who met the refusal: the ``owner`` of the memory, as the broker is, or a ``worker``.
        call: the driver's function that refused.
        error: the name of its result; empty where the driver has no such function.
        detail: more in words.
    """

    outcome: Outcome
    side: str = ""
    call: str = ""
    error: str = ""
    detail: str = ""


@dataclass(frozen=True)
class DriverFacts:
    """How the driver that was asked for answered.

    Attributes:
        spec: what was asked for, ``"cuda:0,1"``.
        trial: works, or why not.
        version: the CUDA version it serves, 13000 for 13.0; 0 if unknown.
        library: whether the driver's library, libcuda, is there.
    """

    spec: str
    trial: Trial
    version: int = 0
    library: bool = True


@dataclass(frozen=True)
class DeviceFacts:
    """One device, as it describes itself; of attributes, None is one that nobody has heard of.

    Attributes:
        emulated: whether it is a host device.
        compute_mode: 0 default, 2 prohibited, 3 one process at a time.
        unified: whether it has unified addressing, which NVIDIA's pages require for handles of memory and events.
        ipc: whether it has IPC events, by which those pages have programs find out whether there is any IPC.
        virtual: whether it has virtual memory management.
        descriptors: whether memory can be exported as descriptors.
        fabric: whether the hardware has fabric handles, whatever the machine says.
        multicast: whether the device says that it can be in a multicast object.
        obstacle: why it can have no part in multicast all the same, in the driver package's words; None if nothing is.
        peers: of each other device that was asked for, whether its memory is in direct reach.
        links: works, or why the driver does not tell of links.
    """

    index: int
    uuid: str
    name: str
    emulated: bool = False
    compute_mode: int | None = 0
    unified: int | None = 1
    ipc: int | None = 1
    virtual: int | None = 1
    descriptors: int | None = 1
    fabric: int | None = 0
    multicast: int | None = 0
    obstacle: str | None = None
    peers: Mapping[int, bool] = field(default_factory=dict)
    links: Trial = Trial("works")

    @property
    def mig(self) -> bool:
        """Whether it is a slice of a GPU; the driver API tells by the name alone."""
        return " MIG " in self.name


@dataclass(frozen=True)
class Survey:
    """What a driver says when it is asked, with nothing tried yet."""

    driver: DriverFacts
    devices: tuple[DeviceFacts, ...] = ()


@dataclass(frozen=True)
class Examined:
    """One device and what came of the trials on it, by kind."""

    device: DeviceFacts
    trials: Mapping[str, Trial]


@dataclass(frozen=True)
class DirectoryFacts:
    """The directory where a broker serves, or would.

    Attributes:
        invalid: why no socket can be there whatever is done; empty if one can.
        state: what is there.
        owner: its user id.
        mode: its permissions.
        exposed: why no broker serves there, since another user could pose as it, and what to do; as `serve` says it.
        enter: whether this user may pass through.
    """

    path: Path
    invalid: str = ""
    state: Literal["directory", "absent", "something else", "hidden"] = "directory"
    owner: int = 0
    mode: int = 0o755
    exposed: str = ""
    enter: bool = True


@dataclass(frozen=True)
class BrokerFacts:
    """Whether a broker answers: ``code`` is empty, "absent", or that of the error; ``message`` says more."""

    code: str
    message: str


@dataclass(frozen=True)
class HostFacts:
    """The machine, or the container, that this process is in.

    Attributes:
        user: the user id of this process.
        kernel: ``"6.18.1"``.
        module: the version of the GPU driver's kernel module, ``"580.159.03"``; empty if none is loaded.
        files: the driver's device files that are there, by name, and whether this user may open each.
        channels: whether there is an IMEX channel.
        container: what kind of container this is; empty if none was recognised.
        visible: ``CUDA_VISIBLE_DEVICES``.
        namespace: whether user ids are those of a namespace.
        descriptors: the soft and the hard limit on open files; -1 is none.
        locked: the limit on locked memory in bytes; -1 is none.
        memfd: why files in memory cannot be made; empty if they can.
        pidfd: why processes cannot be watched; empty if they can.
        peer_pidfd: whether the kernel tells which process is at the other end of a socket.
        unconfined: what the kernel lacks for keeping a gateway from the rest of the machine, a clause each.
    """

    directory: DirectoryFacts
    broker: BrokerFacts
    user: int = 0
    kernel: str = "6.18.1"
    module: str = ""
    files: Mapping[str, bool] = field(default_factory=dict)
    channels: bool = False
    container: str = ""
    visible: str | None = None
    namespace: bool = False
    descriptors: tuple[int, int] = (1024, 524288)
    locked: int = -1
    memfd: str = ""
    pidfd: str = ""
    peer_pidfd: bool = True
    unconfined: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything that was found out. ``devices`` are host devices where nobody named any and there is no GPU."""

    driver: DriverFacts
    devices: tuple[Examined, ...]
    host: HostFacts


@dataclass(frozen=True)
class Verdict:
    """What is made of facts: works, does not, or cannot be told (None); why; and what to do about it."""

    works: bool | None
    why: str
    do: str = ""
