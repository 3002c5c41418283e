"""Verdicts on devices and on the machine: what works, and if not, why and what to do. They use facts and tables alone.

A check is a table of cases in order, and the first that applies is its finding. If no case explains a refusal of the
driver, :func:`means` says what the driver's own result means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cubroker.cli import format
from cubroker.cli.doctor.facts import (
    UNIT,
    BrokerFacts,
    DeviceFacts,
    DirectoryFacts,
    Facts,
    Finding,
    HostFacts,
    ListenerFacts,
    SettingsFacts,
    Trial,
    UnitFacts,
)
from cubroker.driver.host.virtual_memory import CHANNEL
from cubroker.protocol.messages import IPC, MULTICAST, VMM

Cases = Sequence[tuple[object, bool | None, str, str]]
"""Whether each case applies, and the finding if it does: whether it works, why, what to do."""

OLDEST = 12000
"""The oldest CUDA version of a driver that the bindings serve."""

FABRIC_SINCE = 12030
"""The CUDA version that first had fabric handles."""

PROHIBITED, EXCLUSIVE = 2, 3
"""Compute modes (CUcomputemode)."""

ENOUGH_DESCRIPTORS = 4096
ENOUGH_LOCKED = 64 << 20

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

UNTOUCHED = frozenset({OUT_OF_MEMORY, "CUDA_ERROR_SYSTEM_NOT_READY", "CUDA_ERROR_ILLEGAL_STATE"})
"""Refusals that have nothing to do with how the device is set up."""


def _first(cases: Cases) -> Finding | None:
    return next((Finding(works, why, do) for applies, works, why, do in cases if applies), None)


# -- what the driver's refusals mean ---------------------------------------------------------------

LOOK = "look at `nvidia-smi`, and for Xid messages in `dmesg`"
_MPS = "restart MPS: `echo quit | nvidia-cuda-mps-control`, then `nvidia-cuda-mps-control -d`"
_UNMAPPED = (
    "give containers their GPUs in the same way as the memory's owner has them (`--gpus all`, "
    "NVIDIA_VISIBLE_DEVICES=all); between GPUs, see that BAR1 is large and the IOMMU off; on host devices, raise "
    "`ulimit -v`"
)
_UPDATE = "install a newer NVIDIA driver: 525 is the first that will do, 580 serves CUDA 13"

REFUSALS = {
    OUT_OF_MEMORY: (
        "the device has no room for the trial: 2 MiB, and about 520 MB for each process that has a context",
        "free memory on the device (`nvidia-smi` shows who has it) and try again",
    ),
    "CUDA_ERROR_STUB_LIBRARY": (
        "the library that was found is the stub for linking, and no driver",
        "take the folder `stubs` of the CUDA toolkit out of LD_LIBRARY_PATH",
    ),
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER": ("the driver is too old for it", _UPDATE),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        "the device takes no more processes: it is in exclusive use, or was lost",
        "`nvidia-smi -q -d COMPUTE` tells the compute mode and `nvidia-smi` who uses the device",
    ),
    "CUDA_ERROR_INVALID_DEVICE": (
        "there is no GPU of such a number",
        "`nvidia-smi -L` lists them; numbers count from 0, among those in CUDA_VISIBLE_DEVICES",
    ),
    "CUDA_ERROR_DEVICE_NOT_LICENSED": (
        "the virtual GPU has no licence",
        "see the state of the NVIDIA vGPU licence with `nvidia-smi -q`",
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": (
        "the operating system refused the driver a system call or a device file",
        "see which device files in /dev/nvidia* this user may open, and what a seccomp profile or cgroup forbids",
    ),
    "CUDA_ERROR_MAP_FAILED": ("the driver could not map it, for which NVIDIA names no cause", _UNMAPPED),
    "CUDA_ERROR_TOO_MANY_PEERS": (
        "the device has as many peers as it can have: 8 on systems without NVSwitch, by NVIDIA's pages",
        "end programs that have access from it to other devices, or hide devices with CUDA_VISIBLE_DEVICES",
    ),
    "CUDA_ERROR_NOT_PERMITTED": (
        "this process may not do it",
        "see what the container, its device cgroup or a seccomp profile forbids",
    ),
    "CUDA_ERROR_NOT_SUPPORTED": (
        "this device, or this system, cannot do it (on WSL and on integrated GPUs some sharing is missing)",
        "use another kind of sharing",
    ),
    "CUDA_ERROR_ILLEGAL_STATE": (
        "the fabric manager is out of order, or lost a GPU",
        "restart it: `systemctl restart nvidia-fabricmanager`, with no program on the GPUs",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the system is not ready: as a rule the fabric manager of the NVSwitches does not run, or starts just now",
        "start it: `systemctl start nvidia-fabricmanager`, and see its state with `nvidia-smi -q -i 0`",
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda is of another version than the kernel module: one was updated, or a container brought its own",
        "reboot, or reload the kernel module; in a container use the host's libcuda",
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "the compatibility libcuda that was found does not serve this GPU",
        "take the folder `compat` of the CUDA toolkit out of LD_LIBRARY_PATH, or update the driver",
    ),
    "CUDA_ERROR_MPS_CONNECTION_FAILED": ("the MPS daemon cannot be reached", _MPS),
    "CUDA_ERROR_MPS_RPC_FAILURE": ("the MPS server did not answer", _MPS),
    "CUDA_ERROR_MPS_SERVER_NOT_READY": ("the MPS server is starting, or recovers from a fault", _MPS),
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED": (
        "the MPS server has as many clients as it can",
        "end some, or run this one without MPS",
    ),
    "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED": (
        "MPS has as many connections as the hardware takes",
        "end some clients, or lower CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    "CUDA_ERROR_UNKNOWN": (
        "the driver does not know what went wrong; often a device file is missing, or the system was asleep",
        "see that /dev/nvidia-uvm is there; `modprobe -r nvidia_uvm; modprobe nvidia_uvm` helps after sleep",
    ),
    "": ("the driver is too old: it has no such function", _UPDATE),
}
"""Why, and what to do, by the name of the result; an empty one stands for a function that the driver does not have."""

_UNANSWERED = {
    "silent": Finding(False, "the driver did not answer within {}", f"{LOOK}; a reboot may be needed"),
    "skipped": Finding(None, "not tried: the driver did not answer the trial before"),
    "died": Finding(False, "the process that tried it died ({})", LOOK),
    "differs": Finding(False, "another process read other bytes than were written", LOOK),
    "writable": Finding(False, "another process could write what it had mapped read-only", LOOK),
}


def means(trial: Trial) -> Finding:
    """Return the finding for a trial that did not work, from the trial alone."""
    if found := _UNANSWERED.get(trial.outcome):
        return replace(found, why=found.why.format(trial.detail))
    why, do = REFUSALS.get(trial.error, ("the driver refused", LOOK))
    who = f"the {trial.side}'s " if trial.side else ""
    said = f"{who}{trial.call}: {trial.error}" if trial.error else trial.detail
    return Finding(None if trial.error == OUT_OF_MEMORY else False, f"{why} ({said})", do)


# -- devices ---------------------------------------------------------------------------------------

_WORKS = {
    IPC: "a process opened another's 2 MiB by handle and read the same bytes",
    VMM: "a process mapped 2 MiB by descriptor, read what another wrote, and could not write",
    "fabric": "a process mapped 2 MiB by fabric handle, read what another wrote, and could not write",
    "events": "a process opened another's event by handle and waited for it",
}
"""The kinds that are tried, and what a trial that worked has shown."""

_MAPPED_BY = {VMM: "descriptor", "fabric": "fabric handle"}
"""The kinds whose memory a process maps read-only, and what it maps it by."""

_NOT_NEEDED = "nothing needs to be done: vmm pools use descriptors instead"
_INSTEAD = "nothing needs to be done: replication over peer copies takes its place"


def judge_device(device: DeviceFacts, facts: Facts) -> dict[str, Finding]:
    """Return a verdict on each kind of sharing, in the order of the report."""
    tried = {kind: _tried(kind, device, facts) for kind in _WORKS}
    return tried | {"peers": _peers(device), MULTICAST: _multicast(device)}


def usable(verdicts: Mapping[str, Finding]) -> bool:
    """Whether memory of the device can be shared in one way at least."""
    return bool(verdicts[IPC].works or verdicts[VMM].works)


def _tried(kind: str, device: DeviceFacts, facts: Facts) -> Finding:
    trial = device.trials[kind]
    if trial.outcome == "works":
        return Finding(True, _WORKS[kind])
    if trial.outcome == "writable" and kind in _MAPPED_BY:
        why = f"memory is shared by {_MAPPED_BY[kind]}, but what was mapped read-only could be written"
        return Finding(None, why, f"{LOOK}; use ipc")
    cases: Cases = ()
    if trial.outcome == "refused":
        if kind == VMM:
            cases = (*_no_vmm(device), *_mode(device, trial))
        elif kind != "fabric":
            cases = (*_mode(device, trial), *_no_ipc(device, trial))
        elif not trial.error:
            cases = _no_fabric(device, facts)
    return _first(cases) or means(trial)


def _mode(device: DeviceFacts, trial: Trial) -> Cases:
    """Return the cases in which the compute mode explains a refusal."""
    mode = None if trial.error in UNTOUCHED else device.compute_mode
    only_one = "one process at a time may use the device, so none can share"
    do = f"`nvidia-smi -i {device.uuid} -c DEFAULT`, as root"
    return (
        (mode == PROHIBITED, False, "the compute mode is Prohibited: no process may have a context on the device", do),
        (mode == EXCLUSIVE, False, f"the compute mode is Exclusive Process: {only_one}", do),
    )


def _no_ipc(device: DeviceFacts, trial: Trial) -> Cases:
    """Return the cases in which the device's own attributes explain that it refuses legacy handles."""
    no_reach = "handles reach no further than one GPU instance, if they work at all"
    no_ipc = "the device says that it has no IPC (CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)"
    no_addressing = "the device has no unified addressing, which handles require"
    switch = "use vmm, or switch MIG off: `nvidia-smi -mig 0`, as root"
    return (
        (device.mig and trial.error not in UNTOUCHED, False, f"the device is a MIG instance, and {no_reach}", switch),
        (device.unified == 0, False, no_addressing, "use another device"),
        (device.ipc == 0, False, no_ipc, "use vmm, without events between processes"),
    )


def _no_vmm(device: DeviceFacts) -> Cases:
    no_descriptors = "the device says that its memory has no descriptors, as on WSL"
    return (
        (device.virtual == 0, False, "the device has no virtual memory management", "use ipc"),
        (device.descriptors == 0, False, no_descriptors, "use ipc"),
    )


def _no_fabric(device: DeviceFacts, facts: Facts) -> Cases:
    """Return the reasons why the driver gives no fabric handles, which the results of its refusal do not tell."""
    unset = f"host devices have no fabric handles unless {CHANNEL} is set, for tests"
    older = "the driver is older than fabric handles, which came with CUDA 12.3 (driver 545)"
    no_channel = "the device could, but there is no IMEX channel in /dev/nvidia-caps-imex-channels"
    give = "give the container the channel: --device /dev/nvidia-caps-imex-channels/channel0"
    make = "have the driver make one: `options nvidia NVreg_CreateImexChannel0=1` in /etc/modprobe.d, and reload it"
    refused = "the device could and there is an IMEX channel, but the driver refused all the same"
    services = "see that this user may open the channel, and that nvidia-imex and the fabric manager run"
    return (
        (device.emulated, False, unset, _NOT_NEEDED),
        (0 < facts.driver.version < FABRIC_SINCE, False, older, _NOT_NEEDED),
        (device.mig, False, "a MIG instance has no fabric handles", _NOT_NEEDED),
        (not device.fabric, False, "the device has no fabric handles", _NOT_NEEDED),
        (not facts.host.channels, False, no_channel, f"{give if facts.host.container else make}; {_NOT_NEEDED}"),
        (True, False, refused, f"{services}; {_NOT_NEEDED}"),
    )


def _peers(device: DeviceFacts) -> Finding:
    if device.links.outcome != "works":
        return replace(means(device.links), works=None)
    near, far = (
        ", ".join(str(peer) for peer, access in device.peers.items() if access == reached) for reached in (True, False)
    )
    if not far:
        return Finding(True, f"reaches {near}") if near else Finding(None, "there is no other device here")
    if device.emulated:
        apart = "host devices of different groups"
    elif device.mig:
        apart = "a MIG instance has no peers"
    else:
        apart = "no NVLink, and PCIe does not connect them directly; `nvidia-smi topo -p2p r` and `-m` show the ways"
    reached = f"reaches {near}, but not {far}" if near else f"does not reach {far}"
    return Finding(bool(near), f"{reached}: {apart}", "load a replica on each device: `cubroker load --device`")


def _multicast(device: DeviceFacts) -> Finding:
    """Judge multicast by what the device and the settings say, since it is never tried."""
    if device.multicast is None:
        return Finding(False, "the driver is too old to support it", _INSTEAD)
    if device.obstacle is not None:
        change = "; to have it, change that setting" if device.multicast else ""
        return Finding(False, device.obstacle, _INSTEAD + change)
    if device.emulated:
        return Finding(True, "emulated in host memory")
    return Finding(None, "the device says that it supports it, and no setting forbids it; it is never tried")


# -- the driver ------------------------------------------------------------------------------------

_EMULATED = "`--devices host:2` serves devices in host memory instead"

_CONTAINERS = {
    "docker": "if the machine has any: `--gpus all`, with the NVIDIA Container Toolkit",
    "podman": "if the machine has any: `--device nvidia.com/gpu=all`, with the NVIDIA Container Toolkit",
    "kubernetes": "`nvidia.com/gpu` in the pod's limits, or runtimeClassName nvidia and NVIDIA_VISIBLE_DEVICES=all",
}


def _give(host: HostFacts) -> str:
    """Return how a container gets the GPUs and the driver's library."""
    return _CONTAINERS.get(host.container, "give it the host's /dev/nvidia* and its libcuda")


def _driver(facts: Facts) -> Finding:
    driver, host, trial = facts.driver, facts.host, facts.driver.trial
    serves = f"serves CUDA {driver.version // 1000}.{driver.version % 1000 // 10}"
    if trial.outcome == "works" and driver.version < OLDEST:
        why = f"the driver {serves}, which is too old"
        return Finding(False, why, "install driver 525 or newer, for CUDA 12.0 at least")
    if trial.outcome == "works" and facts.devices:
        if facts.devices[0].emulated:
            return Finding(True, f"{driver.spec}: emulated in host memory")
        return Finding(True, serves + (f", kernel module {host.module}" if host.module else ""))
    cases: Cases = ()
    if trial.outcome in ("works", "refused") and trial.error in ("CUDA_ERROR_NO_DEVICE", ""):
        if not driver.library:
            cases = _no_library(host)
        elif trial.outcome == "works" or trial.error:
            cases = _no_gpu(host)
    verdict = _first(cases) or means(trial)
    return Finding(False, f"no GPU to lend: {verdict.why}", f"{verdict.do}; {_EMULATED}")


def _no_library(host: HostFacts) -> Cases:
    module, install = f"the kernel module {host.module} is there", "install the driver's library of that version"
    return (
        (host.container, False, "this container has no libcuda", _give(host)),
        (host.module, False, f"{module}, but no libcuda", f"{install}, {host.module}"),
        (True, False, "no NVIDIA driver is installed", "install one if there is a GPU"),
    )


def _no_gpu(host: HostFacts) -> Cases:
    hidden = host.visible is not None and host.visible.strip() in ("", "-1", "NoDevFiles")
    hides, unset = f"CUDA_VISIBLE_DEVICES={host.visible} hides every GPU", "unset it, or name GPUs in it"
    given = "nvidiactl" in host.files
    not_loaded = "the driver's kernel module is not loaded, or there is no GPU"
    see = "see `nvidia-smi -L`; one in MIG mode needs an instance (`nvidia-smi mig -cgi`); unset CUDA_VISIBLE_DEVICES"
    return (
        (hidden, False, hides, unset),
        (not given and host.container, False, "this container was given none", _give(host)),
        (not given, False, not_loaded, "`modprobe nvidia`; see `lspci -d 10de:`"),
        (True, False, "the driver knows of none", see),
    )


# -- the machine -----------------------------------------------------------------------------------


def judge_machine(facts: Facts) -> dict[str, Finding]:
    """Return a verdict on each thing that sharing needs, in the order of the report."""
    host = facts.host
    checks: dict[str, Cases] = {
        "device files": _device_files(host),
        "imex channel": (
            (host.channels, True, "there is an IMEX channel, for fabric handles", ""),
            (True, None, "no IMEX channel; only fabric handles need one", ""),
        ),
        "kernel": _kernel(host),
        "confinement": _confinement(host),
        "memfd": (
            (
                host.memfd,
                False,
                f"files in memory cannot be made (memfd_create: {host.memfd}): no host devices",
                "allow memfd_create in the seccomp profile, and see the sysctl vm.memfd_noexec",
            ),
            (True, True, "files in memory can be made, for host devices", ""),
        ),
        "descriptors": _descriptors(host),
        "locked memory": _locked_memory(host),
        "container": _container(host),
        "user namespace": (
            (
                host.namespace,
                None,
                "this is a user namespace: a broker in it cannot tell users of other namespaces apart",
                "run the broker outside of the namespace if owners, modes and quotas have to tell users apart",
            ),
            (True, True, "user ids are the machine's own", ""),
        ),
        "directory": _directory(host.directory),
        "broker": _broker(host.broker),
        "host's broker": ((host.doubt, False, *_split(host.doubt)),),
        **_service(host),
    }
    found = {name: _first(cases) for name, cases in checks.items()}
    return {"driver": _driver(facts)} | {name: finding for name, finding in found.items() if finding}


def _device_files(host: HostFacts) -> Cases:
    shut = " and ".join(f"/dev/{name}" for name, opens in host.files.items() if not opens)
    uvm = "there is no /dev/nvidia-uvm, without which no process can use a GPU"
    make = f"{_give(host)}; or add `--device /dev/nvidia-uvm`" if host.container else "`nvidia-modprobe -u -c 0`"
    see = "see their group and mode, NVreg_DeviceFileMode, and the container's device cgroup"
    return (
        ("nvidiactl" not in host.files, None, "no /dev/nvidiactl: there are no GPUs here", ""),
        ("nvidia-uvm" not in host.files, False, uvm, make),
        (shut, False, f"this user may not open {shut}", see),
        (True, True, "/dev/nvidiactl and /dev/nvidia-uvm are there", ""),
    )


def _kernel(host: HostFacts) -> Cases:
    """Whether the kernel tells which process connects, and when it ends."""
    unwatched = f"processes cannot be watched on Linux {host.kernel} (pidfd_open: {host.pidfd})"
    watch = "allow pidfd_open in the container's seccomp profile" if host.container else "use Linux 5.3 or newer"
    watches = f"Linux {host.kernel} watches processes, but does not say which one connects (SO_PEERPIDFD, since 6.5)"
    seen = "serve only those whose process ids the broker sees: containers need the broker's pid namespace (`--pid`)"
    return (
        (host.pidfd, False, unwatched, watch),
        (not host.peer_pidfd, None, watches, seen),
        (True, True, f"Linux {host.kernel} says which process connects, and when it ends", ""),
    )


def _confinement(host: HostFacts) -> Cases:
    """Whether the kernel can keep a gateway from the rest of the machine."""
    lacks = f"{' and '.join(host.unconfined)}; a broker serves without, and its unit alone confines the gateway"
    allow = (
        "allow landlock_create_ruleset, landlock_restrict_self and seccomp in the container's seccomp profile; "
        "the host's kernel has to have them as well"
    )
    boot = (
        "boot Linux 5.13 or newer, for x86_64 or aarch64, with CONFIG_SECCOMP_FILTER and "
        "CONFIG_SECURITY_LANDLOCK, and with landlock in its parameter `lsm=` (see /sys/kernel/security/lsm)"
    )
    confines = "Landlock and a system call filter keep the gateway from files, networks and processes"
    return (
        (host.unconfined, None, lacks, allow if host.container else boot),
        (True, True, confines, ""),
    )


def _descriptors(host: HostFacts) -> Cases:
    """Whether a broker can have as many files open as it needs."""
    soft, hard = ("any number of" if limit < 0 else str(limit) for limit in host.descriptors)
    few = f"a process may open {hard} files; a broker needs two for each session and one for each vmm allocation"
    how = "`--ulimit nofile=65536`" if host.container else "LimitNOFILE=65536, `ulimit -Hn 65536`"
    return (
        (0 <= host.descriptors[1] < ENOUGH_DESCRIPTORS, False, few, f"raise it: {how}"),
        (True, True, f"a process may open {soft} files, and a broker raises that to {hard}", ""),
    )


def _locked_memory(host: HostFacts) -> Cases:
    """Whether a process may lock as much memory as sharing by other means than cubroker may need."""
    locked = "any amount" if host.locked < 0 else format.size(host.locked)
    little = f"{locked} may be locked; what the GPU driver locks does not count, but RDMA and others may need more"
    how = "`--ulimit memlock=-1`" if host.container else "LimitMEMLOCK=infinity"
    return (
        (0 <= host.locked < ENOUGH_LOCKED, None, little, f"should they fail: {how}"),
        (True, True, f"{locked} may be locked", ""),
    )


def _container(host: HostFacts) -> Cases:
    """What has to be arranged if this is a container."""
    is_one = f"this is a container ({host.container}); memory is shared across containers on one host"
    mount = "mount the broker's directory into each, and give each the GPUs that it uses in the way the broker has them"
    return (
        (not host.container, True, "this is no container, as far as can be told", ""),
        (True, None, is_one, mount),
    )


def _broker(found: BrokerFacts) -> Cases:
    drained = f"{found.message}, and lends nothing new: {found.obstacle}"
    lend = "if it was drained by hand, `cubroker drain --off` has it lend again; if it was told to end, start another"
    return (
        (found.obstacle, None, drained, lend),
        (True, {"": True, "absent": None}.get(found.code, False), *_split(found.message)),
    )


def _directory(here: DirectoryFacts) -> Cases:
    unfit, remedy = _split(here.invalid or here.exposed)
    another = "choose another with --directory or $CUBROKER_DIR"
    ask = "ask for the group of the broker's sockets (its settings `sockets.group` and `sockets.mode`)"
    owner = format.user(here.owner)
    reason = f"{here.closed} cannot be written by this user"
    closed = f"{here.path} is not there yet, and `cubroker serve` cannot make it: {reason}"
    return (
        (unfit, False, unfit, remedy),
        (here.closed, None, closed, another),
        (here.state == "absent", None, f"{here.path} is not there yet; `cubroker serve` makes it", ""),
        (here.state == "something else", False, f"{here.path} is no directory", another),
        (here.state == "hidden", False, f"this user may not pass through a folder above {here.path}", another),
        (not here.enter, False, f"this user may not enter {here.path}, of {owner}", f"{ask}, or {another}"),
        (True, True, f"{here.path}, mode {here.mode:03o}, of {owner}", ""),
    )


def _split(message: str) -> tuple[str, str]:
    """Split the text of one of our errors: what is wrong, and after the semicolon what to do."""
    why, _, do = message.partition("; ")
    return why, do


# -- the service -----------------------------------------------------------------------------------

SHOWN = 3
"""Complaints about the settings that are shown."""


def _service(host: HostFacts) -> dict[str, Cases]:
    """Return what can be wrong with a service, by check."""
    checks: dict[str, Cases] = {}
    if host.unit is not None:
        checks["service"] = _unit(host.unit)
        error = host.unit.error
        bad = False if host.unit.state != "active" else None
        checks["last error"] = ((error, bad, f"the service's log says: {error}", f"`{_journal(host.unit)}`"),)
    if host.broker.code and not host.broker.refuses:
        checks["socket"] = _listener(host.listener)
    if host.settings is not None:
        checks["settings"] = _settings(host.settings)
    return checks


def _unit(unit: UnitFacts) -> Cases:
    control = "systemctl" + " --user" * (unit.manager == "user")
    restarts = f", after {format.count(unit.restarts, 'restart')}" if unit.restarts else ""
    failed = f"{UNIT} has failed: {unit.result or 'unknown'}, status {unit.status}{restarts}"
    look = f"`{_journal(unit)}` says why; mend it, then `{control} restart cubroker`"
    again = f"{UNIT} ends and is started again{restarts}: {unit.result}, status {unit.status}"
    start = f"`{control} start cubroker`" if unit.enabled else f"`{control} enable --now cubroker`"
    broken = f"{UNIT} cannot be loaded ({unit.loaded}): {unit.why or unit.path}"
    runs = f"{UNIT} is {unit.state} ({unit.phase})" + (f": {unit.said}" if unit.said else "")
    verify = f"`systemd-analyze verify {unit.path or UNIT}` says what is wrong with it"
    unmask = f"`{control} unmask cubroker` if it is meant to run"
    reload = f"`{control} daemon-reload`, then `{control} restart cubroker`"
    return (
        (unit.loaded == "masked", None, f"{UNIT} is masked, so it cannot be started", unmask),
        (unit.loaded != "loaded", False, broken, verify),
        (unit.state == "failed", False, failed, look),
        (unit.phase == "auto-restart", False, again, look),
        (unit.state == "inactive", None, f"{UNIT} does not run{restarts}", start),
        (unit.outdated, None, f"{runs}; its file was changed since", reload),
        (unit.state == "active", True, runs, ""),
        (True, None, runs, f"`{control} status cubroker`"),
    )


def _journal(unit: UnitFacts) -> str:
    return "journalctl" + " --user" * (unit.manager == "user") + " --unit cubroker -b -n 20"


def _listener(found: ListenerFacts) -> Cases:
    who = f"process {found.pid} ({found.name})" if found.name else f"process {found.pid}" if found.pid else "a process"
    if found.pid == 1:
        who = "the first process (systemd, by a socket unit, or a keeper)"
    waits = f"{who} listens for clients, and no broker answers: they wait"
    see = "see its service or its keeper, and its log; a broker that is stopped goes on by `kill -CONT`"
    deserted = "a socket is there on which no process listens: an earlier broker left it"
    unknown = f"the socket cannot be looked at: {found.detail}"
    return (
        (found.state == "listening", False, waits, see),
        (found.state == "deserted", None, deserted, "start a broker, which replaces it"),
        (found.state == "unknown", None, unknown, "ask as the user who runs the broker, or as root"),
    )


def _settings(found: SettingsFacts) -> Cases:
    shown = "; ".join(found.complaints[:SHOWN])
    more = f" (and {len(found.complaints) - SHOWN} more)" if len(found.complaints) > SHOWN else ""
    fine = f"{found.file}: {format.count(found.count, 'setting')}, nothing wrong"
    return (
        (not found.readable, None, f"this user may not read {found.file}", "ask as root"),
        (found.complaints, False, f"{shown}{more}", f"`cubroker config check {found.file}`"),
        (True, True, fine, ""),
    )
