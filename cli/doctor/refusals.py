"""What the driver's refusals mean, and what to do about each, whatever was asked for."""

from __future__ import annotations

from cubroker.cli.doctor.facts import Trial, Verdict

LOOK = "look at `nvidia-smi`, and for Xid messages in `dmesg`"

_FABRIC_MANAGER = "start it: `systemctl start nvidia-fabricmanager`, and see its state with `nvidia-smi -q -i 0`"
_MPS = "restart MPS: `echo quit | nvidia-cuda-mps-control`, then `nvidia-cuda-mps-control -d`"
_UNMAPPED = (
    "give containers their GPUs in the same way as the memory's owner has them (`--gpus all`, "
    "NVIDIA_VISIBLE_DEVICES=all); between GPUs, see that BAR1 is large and the IOMMU off; on host devices, raise "
    "`ulimit -v`"
)
_UPDATE = "install a newer NVIDIA driver: 525 is the first that will do, 580 serves CUDA 13"

_MEANINGS: dict[str, tuple[bool | None, str, str]] = {
    "CUDA_ERROR_OUT_OF_MEMORY": (
        None,
        "the device has no room for the trial: 2 MiB, and about 520 MB for each process that has a context",
        "free memory on the device (`nvidia-smi` shows who has it) and try again",
    ),
    "CUDA_ERROR_STUB_LIBRARY": (
        False,
        "the library that was found is the stub for linking, and no driver",
        "take the folder `stubs` of the CUDA toolkit out of LD_LIBRARY_PATH",
    ),
    "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER": (False, "the driver is too old for it", _UPDATE),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": (
        False,
        "the device takes no more processes: it is in exclusive use, or was lost",
        "`nvidia-smi -q -d COMPUTE` tells the compute mode and `nvidia-smi` who uses the device",
    ),
    "CUDA_ERROR_INVALID_DEVICE": (
        False,
        "there is no GPU of such a number",
        "`nvidia-smi -L` lists them; numbers count from 0, among those in CUDA_VISIBLE_DEVICES",
    ),
    "CUDA_ERROR_DEVICE_NOT_LICENSED": (
        False,
        "the virtual GPU has no licence",
        "see the state of the NVIDIA vGPU licence with `nvidia-smi -q`",
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": (
        False,
        "the operating system refused the driver a system call or a device file",
        "see which device files in /dev/nvidia* this user may open, and what a seccomp profile or cgroup forbids",
    ),
    "CUDA_ERROR_MAP_FAILED": (
        False,
        "the driver could not map it, for which NVIDIA names no cause",
        _UNMAPPED,
    ),
    "CUDA_ERROR_TOO_MANY_PEERS": (
        False,
        "the device has as many peers as it can have: 8 on systems without NVSwitch, by NVIDIA's pages",
        "end programs that have access from it to other devices, or hide devices with CUDA_VISIBLE_DEVICES",
    ),
    "CUDA_ERROR_NOT_PERMITTED": (
        False,
        "this process may not do it",
        "see what the container, its device cgroup or a seccomp profile forbids",
    ),
    "CUDA_ERROR_NOT_SUPPORTED": (
        False,
        "this device, or this system, cannot do it (on WSL and on integrated GPUs some sharing is missing)",
        "use another kind of sharing",
    ),
    "CUDA_ERROR_ILLEGAL_STATE": (
        False,
        "the fabric manager is out of order, or lost a GPU",
        "restart it: `systemctl restart nvidia-fabricmanager`, with no program on the GPUs",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        False,
        "the system is not ready: as a rule the fabric manager of the NVSwitches does not run, or starts just now",
        _FABRIC_MANAGER,
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        False,
        "libcuda is of another version than the kernel module: one was updated, or a container brought its own",
        "reboot, or reload the kernel module; in a container use the host's libcuda",
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        False,
        "the compatibility libcuda that was found does not serve this GPU",
        "take the folder `compat` of the CUDA toolkit out of LD_LIBRARY_PATH, or update the driver",
    ),
    "CUDA_ERROR_MPS_CONNECTION_FAILED": (False, "the MPS daemon cannot be reached", _MPS),
    "CUDA_ERROR_MPS_RPC_FAILURE": (False, "the MPS server did not answer", _MPS),
    "CUDA_ERROR_MPS_SERVER_NOT_READY": (False, "the MPS server is starting, or recovers from a fault", _MPS),
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED": (
        False,
        "the MPS server has as many clients as it can",
        "end some, or run this one without MPS",
    ),
    "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED": (
        False,
        "MPS has as many connections as the hardware takes",
        "end some clients, or lower CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    "CUDA_ERROR_UNKNOWN": (
        False,
        "the driver does not know what went wrong; often a device file is missing, or the system was asleep",
        "see that /dev/nvidia-uvm is there; `modprobe -r nvidia_uvm; modprobe nvidia_uvm` helps after sleep",
    ),
    "": (False, "the driver is too old: it has no such function", _UPDATE),
}
"""By the name of the result; an empty one stands for a function that the driver does not have."""


def means(trial: Trial) -> Verdict:
    """Return what it means that a trial did not work."""
    match trial.outcome:
        case "silent":
            return Verdict(False, f"the driver did not answer within {trial.detail}", f"{LOOK}; a reboot may be needed")
        case "skipped":
            return Verdict(None, "not tried: the driver did not answer the trial before")
        case "died":
            return Verdict(False, f"the process that tried it died ({trial.detail})", LOOK)
        case "differs":
            return Verdict(False, "another process read other bytes than were written", LOOK)
    return _refused(trial)


def _refused(trial: Trial) -> Verdict:
    works, why, do = _MEANINGS.get(trial.error, (False, "the driver refused", LOOK))
    return Verdict(works, f"{why} ({said(trial)})", do)


def said(trial: Trial) -> str:
    """Return the driver's own words: who called what, and the result."""
    who = f"the {trial.side}'s " if trial.side else ""
    return f"{who}{trial.call}: {trial.error}" if trial.error else trial.detail
