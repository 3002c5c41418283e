"""Facts about a machine and the findings drawn from them, and the process that tries out the facts of its devices.

The types are plain data, which also travels between processes. All that touches a driver runs in a child process, which
may be killed: ``python -m cubroker.cli.doctor.facts PARENT TASK SPEC [DEVICE]`` is the survey of the devices, or one
trial, and prints the outcome as JSON. In a trial of sharing it owns the memory, and starts the workers that open it,
since only another process can. It shares 2 MiB, and frees them. There is no trial of multicast, ever.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from cubroker.driver import Context, Device, Driver, DriverError, load
from cubroker.driver.buffers import round_up
from cubroker.protocol.encoding import encode, encode_json
from cubroker.protocol.errors import signal_name
from cubroker.protocol.messages import IPC, VMM
from cubroker.server.hardening import PR_SET_PDEATHSIG, prctl, python_command

R = TypeVar("R")

NAME = "cubroker"
UNIT = f"{NAME}.service"
"""The unit with which systemd runs a broker."""

SIZE = 2 << 20
"""Bytes that a trial shares."""

DRIVER_LIBRARY = "libcuda.so.1"

Outcome = Literal["works", "refused", "differs", "writable", "silent", "died", "skipped"]


# -- the driver and its devices ------------------------------------------------------------------------


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
    #: The outcome of each trial by kind; none in a survey.
    trials: Mapping[str, Trial] = field(default_factory=dict)

    @property
    def mig(self) -> bool:
        """Whether it is a slice of a GPU; in the driver API only the name tells."""
        return " MIG " in self.name


@dataclass(frozen=True)
class Survey:
    """The driver and its devices, before any trial."""

    driver: DriverFacts
    devices: tuple[DeviceFacts, ...] = ()


# -- the machine ---------------------------------------------------------------------------------------


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
    #: If it is absent, the folder in which this user would have to make it and may not; None if it may.
    closed: Path | None = None


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
    #: The broker's unit; None: systemd has none, or does not run.
    unit: UnitFacts | None = None
    listener: ListenerFacts = ListenerFacts()
    #: The settings that a broker would have; None: there is no file.
    settings: SettingsFacts | None = None
    #: Why clients do not take the host's broker, and what to do; empty if they do, or if there is none.
    doubt: str = ""


# -- all facts, and the findings -----------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """All facts. ``devices`` are host devices if none were named and there is no GPU."""

    driver: DriverFacts
    devices: tuple[DeviceFacts, ...]
    host: HostFacts


@dataclass(frozen=True)
class Finding:
    """A judgement of facts: works, does not work, or unknown (None); why; and what to do about it."""

    works: bool | None
    why: str
    do: str = ""


# -- the process of a survey or a trial ----------------------------------------------------------------


def main(parent: str, task: str, spec: str, index: str = "0") -> None:
    """Run one task until it ends, or until its parent, the process that started it, ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return  # the parent ended before `prctl` was called
    result = survey(spec) if task == "survey" else attempt(task, spec, int(index))
    sys.stdout.write(encode_json(result).decode() + "\n")


def trial_command(*arguments: str) -> list[str]:
    """Return the command line of a trial, which ends with this process if not before."""
    return python_command("cubroker.cli.doctor.facts", str(os.getpid()), *arguments)


def read_answer(status: int, out: bytes, errors: bytes, kind: type[R]) -> R | Trial:
    """Return what a process printed last, or a trial that ``died``; libraries may print lines before."""
    lines = out.splitlines()
    if status == 0 and lines:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(lines[-1], type=kind)
    if status < 0:
        return Trial("died", detail=signal_name(-status))
    said = errors.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
    return Trial("died", detail=f"status {status}: {last}")


# -- the survey ----------------------------------------------------------------------------------------


def survey(spec: str) -> Survey:
    """Ask the driver about itself and its devices; nothing is allocated, and no context made."""
    try:
        with closing(load(spec)) as driver:
            devices = tuple(_describe(driver, device) for device in driver.devices)
            return Survey(DriverFacts(spec, Trial("works"), driver.version), devices)
    except (DriverError, RuntimeError) as error:
        library = True
        try:
            ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            library = False
        return Survey(DriverFacts(spec, refusal(error), library=library))


def _describe(driver: Driver, device: Device) -> DeviceFacts:
    peers, links = {}, Trial("works")
    try:
        for other in driver.devices:
            if other is not device:
                peers[other.index] = driver.peers.can_access(device.index, other.index)
    except DriverError as error:
        links = refusal(error)
    multicast = driver.attribute(device.index, "MULTICAST_SUPPORTED")
    return DeviceFacts(
        device.index,
        device.uuid,
        device.name,
        emulated=driver.host,
        compute_mode=driver.attribute(device.index, "COMPUTE_MODE"),
        unified=driver.attribute(device.index, "UNIFIED_ADDRESSING"),
        ipc=driver.attribute(device.index, "IPC_EVENT_SUPPORTED"),
        virtual=driver.attribute(device.index, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        descriptors=driver.attribute(device.index, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
        fabric=driver.attribute(device.index, "HANDLE_TYPE_FABRIC_SUPPORTED"),
        multicast=multicast,
        obstacle=None if multicast is None else driver.multicast_obstacle(device.index),
        peers=peers,
        links=links,
    )


# -- trials --------------------------------------------------------------------------------------------


class Shared(msgspec.Struct):
    """What a worker reads from its standard input: a handle is a secret, and arguments are visible to others."""

    seed: bytes
    size: int = SIZE
    handle: bytes = b""
    descriptor: int = -1


def attempt(task: str, spec: str, index: int) -> Trial:
    """Run an owner's or a worker's part in this process."""
    side = "owner" if task in OWNERS else "worker"
    try:
        with closing(load(spec)) as driver:
            if task in OWNERS:
                return OWNERS[task](driver, index)
            order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Shared)
            return WORKERS[task](driver.context(index), order)
    except (DriverError, RuntimeError) as error:
        return refusal(error, side)


def refusal(error: DriverError | RuntimeError, side: str = "") -> Trial:
    """Return a refusal as an outcome; the bindings raise a RuntimeError if the driver has no such function."""
    if isinstance(error, DriverError):
        return Trial("refused", side, error.call, error.name, error.detail)
    return Trial("refused", side, detail=str(error))


def ask_worker(task: str, driver: Driver, index: int, order: Shared) -> Trial:
    """Have another process do a worker's part; it ends with this process."""
    done = subprocess.run(  # noqa: S603
        trial_command(task, driver.spec, str(index)),
        input=encode(order),
        capture_output=True,
        pass_fds=[] if order.descriptor < 0 else [order.descriptor],
        check=False,
    )
    return read_answer(done.returncode, done.stdout, done.stderr, Trial)


def _pattern(seed: bytes, size: int) -> bytes:
    return hashlib.shake_128(seed).digest(size)


# -- trials: the owner of the memory -------------------------------------------------------------------


def _ipc(driver: Driver, index: int) -> Trial:
    """Share an allocation by its handle."""
    context, seed = driver.context(index), secrets.token_bytes()
    pointer = context.allocate(SIZE)
    context.write(pointer, _pattern(seed, SIZE))
    trial = ask_worker("ipc-reader", driver, index, Shared(seed, handle=context.export(pointer)))
    context.free(pointer)
    return trial


def _vmm(driver: Driver, index: int) -> Trial:
    """Share memory by descriptor as a broker does, without a context."""
    physical = driver.create(index, round_up(SIZE, driver.granularity(index)))
    descriptor = physical.export()
    trial = _lent(driver, index, Shared(secrets.token_bytes(), physical.nbytes, descriptor=descriptor))
    os.close(descriptor)
    physical.release()
    return trial


def _fabric(driver: Driver, index: int) -> Trial:
    """Share memory by fabric handle, if the driver gives one."""
    physical = driver.create(index, round_up(SIZE, driver.granularity(index)), fabric=True)
    handle = physical.export_fabric()
    trial = Trial("refused")
    if handle is not None:
        trial = _lent(driver, index, Shared(secrets.token_bytes(), physical.nbytes, handle))
    physical.release()
    return trial


def _events(driver: Driver, index: int) -> Trial:
    """Share an event that was recorded."""
    context = driver.context(index)
    with context.event(shared=True) as event, context.stream() as stream:
        stream.record(event)
        return ask_worker("event-waiter", driver, index, Shared(b"", handle=event.export()))


def _lent(driver: Driver, index: int, order: Shared) -> Trial:
    """Have a writer fill memory without an address, and then a reader read it."""
    trial = ask_worker("vmm-writer", driver, index, order)
    return ask_worker("vmm-reader", driver, index, order) if trial.outcome == "works" else trial


# -- trials: its workers -------------------------------------------------------------------------------


def _ipc_reader(context: Context, order: Shared) -> Trial:
    pointer = context.open(order.handle)
    same = context.read(pointer, order.size) == _pattern(order.seed, order.size)
    context.close(pointer)
    return Trial("works" if same else "differs")


def _vmm_writer(context: Context, order: Shared) -> Trial:
    with context.reserve(order.size) as memory:
        memory.map(order.handle or order.descriptor, readonly=False)
        context.write(memory.pointer, _pattern(order.seed, order.size))
    return Trial("works")


def _vmm_reader(context: Context, order: Shared) -> Trial:
    with context.reserve(order.size) as memory:
        memory.map(order.handle or order.descriptor, readonly=True)
        if context.read(memory.pointer, order.size) != _pattern(order.seed, order.size):
            return Trial("differs")
        try:
            context.write(memory.pointer, b"written")
        except DriverError:
            return Trial("works")
    return Trial("writable")


def _event_waiter(context: Context, order: Shared) -> Trial:
    with context.open_event(order.handle) as event, context.stream() as stream:
        stream.wait(event)
        stream.synchronize()
        event.wait()
    return Trial("works")


OWNERS: dict[str, Callable[[Driver, int], Trial]] = {IPC: _ipc, VMM: _vmm, "fabric": _fabric, "events": _events}
WORKERS: dict[str, Callable[[Context, Shared], Trial]] = {
    "ipc-reader": _ipc_reader,
    "vmm-writer": _vmm_writer,
    "vmm-reader": _vmm_reader,
    "event-waiter": _event_waiter,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
