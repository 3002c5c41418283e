"""What works on one device, and if not, why and what to do: judged from facts alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cubroker.cli.doctor.facts import DriverFacts, Examined, Facts, HostFacts, Trial, Verdict
from cubroker.cli.doctor.refusals import LOOK, means
from cubroker.driver.host.fabric import CHANNEL

SHARES = ("ipc", "vmm")
"""The kinds of which one has to work for the device to be of use."""

PROHIBITED, EXCLUSIVE = 2, 3
"""Compute modes (CUcomputemode)."""

FABRIC_SINCE = 12030
"""The CUDA version that first had fabric handles."""

_UNTOUCHED = frozenset({"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_SYSTEM_NOT_READY", "CUDA_ERROR_ILLEGAL_STATE"})
"""Refusals that have nothing to do with how the device is set up."""


@dataclass(frozen=True)
class _Case:
    examined: Examined
    driver: DriverFacts
    host: HostFacts


def judge(examined: Examined, facts: Facts) -> dict[str, Verdict]:
    """Return a verdict for each kind, in the order of the report."""
    case = _Case(examined, facts.driver, facts.host)
    return {kind: rule(case) for kind, rule in _RULES.items()}


def usable(verdicts: dict[str, Verdict]) -> bool:
    """Whether memory of the device can be shared in one way at least."""
    return any(verdicts[kind].works for kind in SHARES)


def _ipc(case: _Case) -> Verdict:
    trial = case.examined.trials["ipc"]
    if trial.outcome == "works":
        return Verdict(True, "a process opened another's 2 MiB by handle and read the same bytes")
    return _mode(case, trial) or _slice(case, trial) or _no_ipc(case, trial) or means(trial)


def _events(case: _Case) -> Verdict:
    trial = case.examined.trials["events"]
    if trial.outcome == "works":
        return Verdict(True, "a process opened another's event by handle and waited for it")
    return _mode(case, trial) or _slice(case, trial) or _no_ipc(case, trial) or means(trial)


def _no_ipc(case: _Case, trial: Trial) -> Verdict | None:
    """Return how the device itself explains that it refuses legacy handles, if it does."""
    device = case.examined.device
    if trial.outcome != "refused":
        return None
    if device.unified == 0:
        return Verdict(False, "the device has no unified addressing, which handles require", "use another device")
    if device.ipc == 0:
        why = "the device says that it has no IPC (CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED)"
        return Verdict(False, why, "use vmm, without events between processes")
    return None


def _vmm(case: _Case) -> Verdict:
    trial = case.examined.trials["vmm"]
    if trial.outcome == "works":
        return Verdict(True, "a process mapped 2 MiB by descriptor, read what another wrote, and could not write")
    if trial.outcome == "writable":
        return _writable("descriptor")
    if trial.outcome == "refused" and case.examined.device.virtual == 0:
        return Verdict(False, "the device has no virtual memory management", "use ipc")
    if trial.outcome == "refused" and case.examined.device.descriptors == 0:
        return Verdict(False, "the device says that its memory has no descriptors, as on WSL", "use ipc")
    return _mode(case, trial) or means(trial)


def _writable(kind: str) -> Verdict:
    why = f"memory is shared by {kind}, but what was mapped read-only could be written"
    return Verdict(None, why, f"{LOOK}; use ipc")


def _mode(case: _Case, trial: Trial) -> Verdict | None:
    """Return how the compute mode explains a refusal, if it does."""
    device = case.examined.device
    if trial.outcome != "refused" or trial.error in _UNTOUCHED:
        return None
    if device.compute_mode == PROHIBITED:
        why = "the compute mode is Prohibited: no process may have a context on the device"
    elif device.compute_mode == EXCLUSIVE:
        why = "the compute mode is Exclusive Process: one process at a time may use the device, so none can share"
    else:
        return None
    return Verdict(False, why, f"`nvidia-smi -i {device.uuid} -c DEFAULT`, as root")


def _slice(case: _Case, trial: Trial) -> Verdict | None:
    if trial.outcome == "refused" and trial.error not in _UNTOUCHED and case.examined.device.mig:
        return Verdict(
            False,
            "the device is a MIG instance, and handles reach no further than one GPU instance, if they work at all",
            "use vmm, or switch MIG off: `nvidia-smi -mig 0`, as root",
        )
    return None


# -- fabric handles --------------------------------------------------------------------------------

_NOT_NEEDED = "nothing needs to be done: vmm pools use descriptors instead"


def _fabric(case: _Case) -> Verdict:
    trial = case.examined.trials["fabric"]
    if trial.outcome == "works":
        return Verdict(True, "a process mapped 2 MiB by fabric handle, read what another wrote, and could not write")
    if trial.outcome == "writable":
        return _writable("fabric handle")
    if trial.outcome != "refused" or trial.error:
        return means(trial)
    why, do = _no_fabric(case)
    return Verdict(False, why, do)


def _no_fabric(case: _Case) -> tuple[str, str]:
    """Return why the driver gives no fabric handles, which it refuses with results that do not tell."""
    device = case.examined.device
    if device.emulated:
        return f"host devices have no fabric handles unless {CHANNEL} is set, for tests", _NOT_NEEDED
    if 0 < case.driver.version < FABRIC_SINCE:
        return "the driver is older than fabric handles, which came with CUDA 12.3 (driver 545)", _NOT_NEEDED
    if device.mig:
        return "a MIG instance has no fabric handles", _NOT_NEEDED
    if not device.fabric:
        return "the device has no fabric handles", _NOT_NEEDED
    if not case.host.channels:
        return "the device could, but there is no IMEX channel in /dev/nvidia-caps-imex-channels", _channel(case.host)
    return (
        "the device could and there is an IMEX channel, but the driver refused all the same",
        f"see that this user may open the channel, and that nvidia-imex and the fabric manager run; {_NOT_NEEDED}",
    )


def _channel(host: HostFacts) -> str:
    if host.container:
        return f"give the container the channel: --device /dev/nvidia-caps-imex-channels/channel0; {_NOT_NEEDED}"
    return (
        "have the driver make one: `options nvidia NVreg_CreateImexChannel0=1` in /etc/modprobe.d, and reload it; "
        f"{_NOT_NEEDED}"
    )


# -- peers and multicast ---------------------------------------------------------------------------


def _peers(case: _Case) -> Verdict:
    device = case.examined.device
    if device.links.outcome != "works":
        return replace(means(device.links), works=None)
    near = [str(peer) for peer, access in device.peers.items() if access]
    far = [str(peer) for peer, access in device.peers.items() if not access]
    if not far:
        return Verdict(True, f"reaches {', '.join(near)}") if near else Verdict(None, "there is no other device here")
    reached = f"reaches {', '.join(near)}, but not {', '.join(far)}" if near else f"does not reach {', '.join(far)}"
    return Verdict(bool(near), f"{reached}: {_apart(case)}", "load a replica on each device: `cubroker load --device`")


def _apart(case: _Case) -> str:
    device = case.examined.device
    if device.emulated:
        return "host devices of different groups"
    if device.mig:
        return "a MIG instance has no peers"
    return "no NVLink, and PCIe does not connect them directly; `nvidia-smi topo -p2p r` and `-m` show the ways"


_INSTEAD = "nothing needs to be done: replication over peer copies takes its place"


def _multicast(case: _Case) -> Verdict:
    """Judge by what the device and the settings say: it is never tried."""
    device = case.examined.device
    if device.multicast is None:
        return Verdict(False, "the driver is too old to have heard of it", _INSTEAD)
    if device.obstacle is not None:
        change = "; to have it, change that setting" if device.multicast else ""
        return Verdict(False, device.obstacle, _INSTEAD + change)
    if device.emulated:
        return Verdict(True, "emulated in host memory")
    return Verdict(None, "the device says that it supports it, and no setting forbids it; it is never tried")


_RULES: dict[str, Callable[[_Case], Verdict]] = {
    "ipc": _ipc,
    "vmm": _vmm,
    "fabric": _fabric,
    "events": _events,
    "peers": _peers,
    "multicast": _multicast,
}
