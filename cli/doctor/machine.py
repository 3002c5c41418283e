"""What this machine, or container, and the broker's directory are fit for: judged from facts alone."""

from __future__ import annotations

from collections.abc import Callable

from cubroker.cli import text
from cubroker.cli.doctor.facts import Facts, HostFacts, Verdict
from cubroker.cli.doctor.refusals import means

OLDEST = 12000
"""The oldest CUDA version of a driver that the bindings serve."""

ENOUGH_DESCRIPTORS = 4096
ENOUGH_LOCKED = 64 << 20

_EMULATED = "`--devices host:2` serves devices in host memory instead"


def judge(facts: Facts) -> dict[str, Verdict]:
    """Return a verdict on each thing that sharing needs, in the order of the report."""
    return {"driver": _driver(facts), **{name: rule(facts.host) for name, rule in _RULES.items()}}


# -- the driver ------------------------------------------------------------------------------------


def _driver(facts: Facts) -> Verdict:
    driver = facts.driver
    if driver.trial.outcome == "works" and driver.version < OLDEST:
        why = f"the driver serves CUDA {_cuda(driver.version)}, which is too old"
        return Verdict(False, why, "install driver 525 or newer, for CUDA 12.0 at least")
    if driver.trial.outcome == "works" and facts.devices:
        module = f", kernel module {facts.host.module}" if facts.host.module else ""
        if facts.devices[0].device.emulated:
            return Verdict(True, f"{driver.spec}: emulated in host memory")
        return Verdict(True, f"serves CUDA {_cuda(driver.version)}{module}")
    if driver.trial.error in ("CUDA_ERROR_NO_DEVICE", "") and driver.trial.outcome in ("works", "refused"):
        why, do = _no_device(facts)
        return Verdict(False, f"no GPU to lend: {why}", f"{do}; {_EMULATED}")
    verdict = means(driver.trial)
    return Verdict(False, f"no GPU to lend: {verdict.why}", f"{verdict.do}; {_EMULATED}")


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _no_device(facts: Facts) -> tuple[str, str]:
    """Return why there is no driver, or none that knows of a GPU."""
    host = facts.host
    if not facts.driver.library:
        return _no_library(host)
    if facts.driver.trial.outcome == "refused" and not facts.driver.trial.error:
        verdict = means(facts.driver.trial)
        return verdict.why, verdict.do
    if host.visible is not None and host.visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={host.visible} hides every GPU", "unset it, or name GPUs in it"
    if "nvidiactl" not in host.files:
        if host.container:
            return "this container was given none", _give(host)
        return "the driver's kernel module is not loaded, or there is no GPU", "`modprobe nvidia`; see `lspci -d 10de:`"
    return (
        "the driver knows of none",
        "see `nvidia-smi -L`; one in MIG mode needs an instance (`nvidia-smi mig -cgi`); unset CUDA_VISIBLE_DEVICES",
    )


def _no_library(host: HostFacts) -> tuple[str, str]:
    if host.container:
        return "this container has no libcuda", _give(host)
    if host.module:
        return (
            f"the kernel module {host.module} is there, but no libcuda",
            f"install the driver's library of that version, {host.module}",
        )
    return "no NVIDIA driver is installed", "install one if there is a GPU"


def _give(host: HostFacts) -> str:
    """Return how a container gets the GPUs and the driver's library."""
    return {
        "docker": "if the machine has any: `--gpus all`, with the NVIDIA Container Toolkit",
        "podman": "if the machine has any: `--device nvidia.com/gpu=all`, with the NVIDIA Container Toolkit",
        "kubernetes": "`nvidia.com/gpu` in the pod's limits, or runtimeClassName nvidia and NVIDIA_VISIBLE_DEVICES=all",
    }.get(host.container, "give it the host's /dev/nvidia* and its libcuda")


# -- device files ----------------------------------------------------------------------------------


def _files(host: HostFacts) -> Verdict:
    if "nvidiactl" not in host.files:
        return Verdict(None, "no /dev/nvidiactl: there are no GPUs here")
    if "nvidia-uvm" not in host.files:
        do = f"{_give(host)}; or add `--device /dev/nvidia-uvm`" if host.container else "`nvidia-modprobe -u -c 0`"
        return Verdict(False, "there is no /dev/nvidia-uvm, without which no process can use a GPU", do)
    if shut := [f"/dev/{name}" for name, opens in host.files.items() if not opens]:
        do = "see their group and mode, NVreg_DeviceFileMode, and the container's device cgroup"
        return Verdict(False, f"this user may not open {' and '.join(shut)}", do)
    return Verdict(True, "/dev/nvidiactl and /dev/nvidia-uvm are there")


def _channel(host: HostFacts) -> Verdict:
    if host.channels:
        return Verdict(True, "there is an IMEX channel, for fabric handles")
    return Verdict(None, "no IMEX channel; only fabric handles need one")


# -- the kernel, and limits ------------------------------------------------------------------------


def _watching(host: HostFacts) -> Verdict:
    if host.pidfd:
        do = "allow pidfd_open in the container's seccomp profile" if host.container else "use Linux 5.3 or newer"
        return Verdict(False, f"processes cannot be watched on Linux {host.kernel} (pidfd_open: {host.pidfd})", do)
    if not host.peer_pidfd:
        return Verdict(
            None,
            f"Linux {host.kernel} watches processes, but does not say which one connects (SO_PEERPIDFD, since 6.5)",
            "serve only those whose process ids the broker sees: containers need the broker's pid namespace (`--pid`)",
        )
    return Verdict(True, f"Linux {host.kernel} says which process connects, and when it ends")


def _confinement(host: HostFacts) -> Verdict:
    if not host.unconfined:
        return Verdict(True, "Landlock and a system call filter keep the gateway from files, networks and processes")
    why = f"{' and '.join(host.unconfined)}; a broker serves without, and its unit alone confines the gateway"
    if host.container:
        do = "allow landlock_create_ruleset, landlock_restrict_self and seccomp in the container's seccomp profile"
        return Verdict(None, why, f"{do}; the host's kernel has to have them as well")
    do = "boot Linux 5.13 or newer, for x86_64 or aarch64, with CONFIG_SECCOMP_FILTER and CONFIG_SECURITY_LANDLOCK"
    return Verdict(None, why, f"{do}, and with landlock in its parameter `lsm=` (see /sys/kernel/security/lsm)")


def _files_in_memory(host: HostFacts) -> Verdict:
    if host.memfd:
        do = "allow memfd_create in the seccomp profile, and see the sysctl vm.memfd_noexec"
        return Verdict(False, f"files in memory cannot be made (memfd_create: {host.memfd}): no host devices", do)
    return Verdict(True, "files in memory can be made, for host devices")


def _descriptors(host: HostFacts) -> Verdict:
    soft, hard = host.descriptors
    if 0 <= hard < ENOUGH_DESCRIPTORS:
        return Verdict(
            False,
            f"a process may open {hard} files; a broker needs two for each session and one for each vmm allocation",
            "raise it: " + ("`--ulimit nofile=65536`" if host.container else "LimitNOFILE=65536, `ulimit -Hn 65536`"),
        )
    return Verdict(True, f"a process may open {_limit(soft)} files, and a broker raises that to {_limit(hard)}")


def _limit(number: int) -> str:
    return "any number of" if number < 0 else str(number)


def _locked(host: HostFacts) -> Verdict:
    if 0 <= host.locked < ENOUGH_LOCKED:
        return Verdict(
            None,
            f"{text.size(host.locked)} may be locked; the GPU driver does not count, but RDMA and others may need more",
            "should they fail: `--ulimit memlock=-1`" if host.container else "should they fail: LimitMEMLOCK=infinity",
        )
    return Verdict(True, f"{'any amount' if host.locked < 0 else text.size(host.locked)} may be locked")


def _container(host: HostFacts) -> Verdict:
    if not host.container:
        return Verdict(True, "this is no container, as far as can be told")
    why = f"this is a container ({host.container}); memory is shared across containers on one host"
    do = "mount the broker's directory into each, and give each the GPUs that it uses in the way the broker has them"
    return Verdict(None, why, do)


def _namespace(host: HostFacts) -> Verdict:
    if host.namespace:
        return Verdict(
            None,
            "user ids are those of a namespace: users of others are one and the same to a broker here",
            "run the broker outside of it if its owners, modes and quotas are to tell users apart",
        )
    return Verdict(True, "user ids are the machine's own")


# -- the broker ------------------------------------------------------------------------------------


def _directory(host: HostFacts) -> Verdict:
    here = host.directory
    another = "choose another with --directory or $CUBROKER_DIR"
    if here.invalid:
        return _split(False, here.invalid)
    if here.exposed:
        return _split(False, here.exposed)
    match here.state:
        case "absent":
            return Verdict(None, f"{here.path} is not there yet; `cubroker serve` makes it")
        case "something else":
            return Verdict(False, f"{here.path} is no directory", another)
        case "hidden":
            return Verdict(False, f"this user may not pass through a folder above {here.path}", another)
    return _permissions(host, another)


def _permissions(host: HostFacts, another: str) -> Verdict:
    here = host.directory
    if here.enter:
        return Verdict(True, f"{here.path}, mode {here.mode:03o}, of {text.user(here.owner)}")
    do = "ask for the group of the broker's sockets (its settings `sockets.group` and `sockets.mode`)"
    return Verdict(False, f"this user may not enter {here.path}, of {text.user(here.owner)}", f"{do}, or {another}")


def _broker(host: HostFacts) -> Verdict:
    works = {"": True, "absent": None}.get(host.broker.code, False)
    return _split(works, host.broker.message)


def _split(works: bool | None, message: str) -> Verdict:
    """Split what our own errors say: what stood in the way, and after the semicolon what to do."""
    why, _, do = message.partition("; ")
    return Verdict(works, why, do)


_RULES: dict[str, Callable[[HostFacts], Verdict]] = {
    "device files": _files,
    "imex channel": _channel,
    "kernel": _watching,
    "confinement": _confinement,
    "memfd": _files_in_memory,
    "descriptors": _descriptors,
    "locked memory": _locked,
    "container": _container,
    "user namespace": _namespace,
    "directory": _directory,
    "broker": _broker,
}
