"""Every explanation of what works on a device, what does not, and what a machine lacks, from made-up facts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from cubroker.cli.doctor import verdicts
from cubroker.cli.doctor.facts import (
    BrokerFacts,
    DeviceFacts,
    DirectoryFacts,
    DriverFacts,
    Facts,
    Finding,
    HostFacts,
    ListenerFacts,
    SettingsFacts,
    Trial,
    UnitFacts,
)

PATH = Path("/run/cubroker")
FILES = {"nvidiactl": True, "nvidia-uvm": True}
HOST = HostFacts(
    DirectoryFacts(PATH), BrokerFacts("", "a broker answers"), module="580.159.03", files=FILES, channels=True
)
BARE = replace(HOST, module="", files={})
DRIVER = DriverFacts("cuda", Trial("works"), 13000)
NO_DEVICE = DriverFacts("cuda", Trial("refused", "", "cuInit", "CUDA_ERROR_NO_DEVICE"))
NO_LIBRARY = replace(NO_DEVICE, library=False)
OTHER = DriverFacts("cuda", Trial("refused", "", "cuInit", "CUDA_ERROR_SYSTEM_NOT_READY"))
DIRECTORY = HOST.directory


def check(verdict: Finding, works: bool | None, why: str, do: str) -> None:
    assert verdict.works is works
    assert re.search(why, verdict.why), verdict
    assert re.search(do, verdict.do) if do else verdict.do == "", verdict


# -- devices ---------------------------------------------------------------------------------------

WORKS = Trial("works")
REFUSED = Trial("refused", "worker", "cuX", "CUDA_ERROR_INVALID_VALUE")
NO_FABRIC = Trial("refused")
GPU = DeviceFacts(0, "GPU-1", "NVIDIA H200", fabric=1, multicast=1)
MIG = replace(GPU, name="NVIDIA H200 MIG 1g.18gb")
EMULATED = replace(GPU, name="cubroker host device 0", emulated=True, fabric=0, multicast=0)
ALL_WORK = dict.fromkeys(("ipc", "vmm", "fabric", "events"), WORKS)


def judge(
    device: DeviceFacts = GPU, driver: DriverFacts = DRIVER, host: HostFacts = HOST, **trials: Trial
) -> dict[str, Finding]:
    examined = replace(device, trials=ALL_WORK | trials)
    return verdicts.judge_device(examined, Facts(driver, (examined,), host))


def judge_trial(kind: str, trial: Trial, device: DeviceFacts = GPU) -> Finding:
    examined = replace(device, trials=ALL_WORK | {kind: trial})
    return verdicts.judge_device(examined, Facts(DRIVER, (examined,), HOST))[kind]


@pytest.mark.parametrize("kind", ALL_WORK)
def test_what_was_seen_to_work_works(kind: str) -> None:
    verdict = judge()[kind]
    assert (verdict.works, verdict.do) == (True, "")
    assert verdict.why


@pytest.mark.parametrize("kind", ALL_WORK)
@pytest.mark.parametrize(
    ("trial", "works", "why", "do"),
    [
        (Trial("silent", detail="60 s"), False, "did not answer within 60 s", "dmesg"),
        (Trial("skipped"), None, "not tried", ""),
        (Trial("died", detail="SIGSEGV"), False, r"died \(SIGSEGV\)", "Xid"),
        (Trial("differs"), False, "other bytes than were written", "Xid"),
        (Trial("refused", "owner", "cuX", "CUDA_ERROR_OUT_OF_MEMORY"), None, "no room", "free memory"),
        (Trial("refused", "owner", "cuX", "CUDA_ERROR_SYSTEM_NOT_READY"), False, "fabric manager", "start it"),
        (Trial("refused", "worker", "cuX", "CUDA_ERROR_ASSERT"), False, "the worker's cuX: CUDA_ERROR_ASSERT", "Xid"),
    ],
    ids=lambda value: getattr(value, "outcome", None),
)
def test_a_trial_that_came_to_nothing_is_explained(
    kind: str, trial: Trial, works: bool | None, why: str, do: str
) -> None:
    check(judge_trial(kind, trial), works, why, do)


@pytest.mark.parametrize("error", verdicts.REFUSALS)
def test_every_refusal_that_has_a_meaning_says_what_to_do(error: str) -> None:
    assert not error or hasattr(cuda.CUresult, error)
    trial = Trial("refused", "owner", "cuX" * bool(error), error, 'Function "cuX" not found')
    verdict = verdicts.means(trial)
    assert verdict.works is (None if error == "CUDA_ERROR_OUT_OF_MEMORY" else False)
    assert verdict.why.endswith(f"(the owner's cuX: {error})" if error else '(Function "cuX" not found)')
    assert verdict.do


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
@pytest.mark.parametrize(("mode", "name"), [(2, "Prohibited"), (3, "Exclusive Process")])
def test_the_compute_mode_explains_a_refusal(kind: str, mode: int, name: str) -> None:
    device = replace(GPU, compute_mode=mode)
    check(judge_trial(kind, REFUSED, device), False, f"compute mode is {name}", "nvidia-smi -i GPU-1 -c DEFAULT")
    assert judge(device)[kind].works
    full = Trial("refused", "owner", "cuX", "CUDA_ERROR_OUT_OF_MEMORY")
    check(judge_trial(kind, full, device), None, "no room", "free memory")


def test_a_mig_instance_explains_a_refused_handle() -> None:
    found = judge(MIG, ipc=REFUSED)
    check(found["ipc"], False, "MIG instance", "vmm|-mig 0")
    assert verdicts.usable(found)
    check(judge(MIG, ipc=Trial("silent", detail="1 s"))["ipc"], False, "did not answer", "dmesg")


def test_memory_without_descriptors_is_told_by_the_device() -> None:
    check(judge(replace(GPU, descriptors=0), vmm=REFUSED)["vmm"], False, "has no descriptors", "use ipc")
    check(judge(EMULATED, vmm=REFUSED)["vmm"], False, "the driver refused", "dmesg")
    assert judge(replace(GPU, descriptors=0))["vmm"].works, "what was tried counts for more than what the device says"


def test_a_device_without_virtual_memory_management_says_so() -> None:
    check(judge(replace(GPU, virtual=0), vmm=REFUSED)["vmm"], False, "no virtual memory management", "use ipc")


@pytest.mark.parametrize("kind", ["ipc", "events"])
def test_a_device_without_ipc_says_so(kind: str) -> None:
    check(judge_trial(kind, REFUSED, replace(GPU, ipc=0)), False, "the device says .*IPC_EVENT_SUPPORTED", "use vmm")
    check(judge_trial(kind, REFUSED, replace(GPU, unified=0)), False, "no unified addressing", "another device")
    check(judge_trial(kind, REFUSED, replace(GPU, unified=None, ipc=None)), False, "the driver refused", "dmesg")
    assert judge(replace(GPU, ipc=0))[kind].works


@pytest.mark.parametrize(
    ("error", "why", "do"),
    [
        ("CUDA_ERROR_MAP_FAILED", "could not map it, for which NVIDIA names no cause", "same way as .*BAR1"),
        ("CUDA_ERROR_TOO_MANY_PEERS", "as many peers as it can have", "end programs"),
    ],
)
def test_an_open_that_could_not_be_mapped_is_explained(error: str, why: str, do: str) -> None:
    trial = Trial("refused", "worker", "cuIpcOpenMemHandle", error)
    check(judge_trial("ipc", trial), False, f"{why}.*the worker's cuIpcOpenMemHandle: {error}", do)


@pytest.mark.parametrize("kind", ["vmm", "fabric"])
def test_read_only_memory_that_could_be_written_is_told(kind: str) -> None:
    how = {"vmm": "descriptor", "fabric": "fabric handle"}[kind]
    check(judge_trial(kind, Trial("writable")), None, f"by {how}, but what .* read-only could be written", "use ipc")


@pytest.mark.parametrize("kind", ["ipc", "events"])
@pytest.mark.parametrize("error", ["", "CUDA_ERROR_UNKNOWN"])
def test_handles_that_are_never_read_only_are_not_told_to_be_shared_otherwise(kind: str, error: str) -> None:
    found = judge_trial(kind, Trial("writable", "worker", "cuX", error))
    check(found, False, "^another process could write what it had mapped read-only$", "^look at .*`dmesg`$")


@pytest.mark.parametrize(
    ("device", "driver", "host", "why", "do"),
    [
        (EMULATED, DRIVER, HOST, "host devices have no fabric", "descriptors instead"),
        (GPU, replace(DRIVER, version=12020), HOST, "older than fabric handles", "descriptors instead"),
        (MIG, DRIVER, HOST, "MIG", "descriptors instead"),
        (replace(GPU, fabric=0), DRIVER, HOST, "the device has no fabric handles", "descriptors instead"),
        (replace(GPU, fabric=None), DRIVER, HOST, "the device has no fabric handles", "descriptors instead"),
        (GPU, DRIVER, replace(HOST, channels=False), "no IMEX channel", "NVreg_CreateImexChannel0=1"),
        (
            GPU,
            DRIVER,
            replace(HOST, channels=False, container="docker"),
            "no IMEX channel",
            "--device /dev/nvidia-caps",
        ),
        (GPU, DRIVER, HOST, "refused all the same", "nvidia-imex and the fabric manager"),
    ],
    ids=["host", "old driver", "mig", "hardware", "unheard of", "no channel", "no channel in a container", "services"],
)
def test_missing_fabric_handles_are_explained(
    device: DeviceFacts, driver: DriverFacts, host: HostFacts, why: str, do: str
) -> None:
    check(judge(device, driver, host, fabric=NO_FABRIC)["fabric"], False, why, do)


@pytest.mark.parametrize(
    ("device", "works", "why", "do"),
    [
        (GPU, None, "no other device", ""),
        (replace(GPU, peers={1: True, 2: True}), True, "^reaches 1, 2$", ""),
        (replace(GPU, peers={1: True, 2: False}), True, "reaches 1, but not 2: no NVLink", "replica on each"),
        (replace(GPU, peers={1: False}), False, "does not reach 1: .*nvidia-smi topo", "replica on each"),
        (replace(MIG, peers={1: False}), False, "MIG instance has no peers", "replica on each"),
        (replace(EMULATED, peers={1: False}), False, "different groups", "replica on each"),
        (replace(GPU, links=Trial("refused", "", "cuX", "CUDA_ERROR_UNKNOWN")), None, "does not know", "nvidia-uvm"),
    ],
    ids=["alone", "all", "some", "none", "mig", "host", "refused"],
)
def test_what_a_device_reaches_is_told(device: DeviceFacts, works: bool | None, why: str, do: str) -> None:
    check(judge(device)["peers"], works, why, do)


@pytest.mark.parametrize(
    ("device", "works", "why", "do"),
    [
        (GPU, None, "no setting forbids it; it is never tried", ""),
        (replace(GPU, obstacle="X=0 says no"), False, "^X=0 says no$", "peer copies .*change that setting"),
        (replace(GPU, multicast=0, obstacle="device 0 has none"), False, "^device 0 has none$", "peer copies[^;]*$"),
        (replace(GPU, multicast=None), False, "too old", "peer copies"),
        (replace(EMULATED, multicast=1), True, "emulated", ""),
    ],
    ids=["supported", "switched off", "unsupported", "unheard of", "host"],
)
def test_multicast_is_told_by_the_device_and_the_settings_and_never_works_for_sure_on_a_gpu(
    device: DeviceFacts, works: bool | None, why: str, do: str
) -> None:
    check(judge(device)["multicast"], works, why, do)


def test_a_device_is_usable_if_its_memory_can_be_shared_in_one_way() -> None:
    assert verdicts.usable(judge(ipc=REFUSED))
    assert verdicts.usable(judge(vmm=REFUSED))
    assert not verdicts.usable(judge(ipc=REFUSED, vmm=Trial("writable")))


# -- the machine -----------------------------------------------------------------------------------


def judge_host(facts: HostFacts = HOST, driver: DriverFacts = DRIVER, *devices: DeviceFacts) -> dict[str, Finding]:
    return verdicts.judge_machine(Facts(driver, devices, facts))


def test_a_machine_that_lacks_nothing_is_told_so() -> None:
    found = judge_host(HOST, DRIVER, GPU)
    assert {name for name, verdict in found.items() if verdict.works is not True} == set()
    assert not any(verdict.do for verdict in found.values())
    assert found["driver"].why == "serves CUDA 13.0, kernel module 580.159.03"
    assert judge_host(BARE, DRIVER, GPU)["driver"].why == "serves CUDA 13.0"
    emulated = judge_host(BARE, replace(DRIVER, spec="host:1"), replace(GPU, emulated=True))["driver"]
    check(emulated, True, "host:1: emulated", "")


@pytest.mark.parametrize(
    ("facts", "driver", "why", "do"),
    [
        (HOST, replace(DRIVER, version=11080), "serves CUDA 11.8, which is too old", "525"),
        (BARE, NO_LIBRARY, "no NVIDIA driver is installed", "install"),
        (HOST, NO_LIBRARY, "kernel module 580.159.03 is there, but no libcuda", "of that version, 580.159.03"),
        (replace(BARE, container="docker"), NO_LIBRARY, "container has no libcuda", "--gpus all"),
        (replace(BARE, container="podman"), NO_DEVICE, "container was given none", "nvidia.com/gpu=all"),
        (replace(BARE, container="kubernetes"), NO_DEVICE, "container was given none", "runtimeClassName"),
        (replace(BARE, container="lxc"), NO_DEVICE, "container was given none", "/dev/nvidia"),
        (replace(HOST, visible=""), NO_DEVICE, "CUDA_VISIBLE_DEVICES= hides", "unset it"),
        (BARE, NO_DEVICE, "kernel module is not loaded", "modprobe nvidia"),
        (HOST, NO_DEVICE, "the driver knows of none", "MIG mode needs an instance"),
        (HOST, DRIVER, "the driver knows of none", "nvidia-smi -L"),
        (HOST, OTHER, "fabric manager", "systemctl start"),
        (HOST, replace(DRIVER, trial=Trial("refused", detail="no function")), "too old", "newer"),
        (HOST, replace(DRIVER, trial=Trial("silent", detail="60 s")), "did not answer within 60 s", "dmesg"),
        (HOST, replace(DRIVER, trial=Trial("died", detail="SIGBUS")), "SIGBUS", "dmesg"),
    ],
)
def test_a_missing_driver_is_explained(facts: HostFacts, driver: DriverFacts, why: str, do: str) -> None:
    verdict = judge_host(facts, driver)["driver"]
    check(verdict, False, why, do)
    assert driver.version == 11080 or verdict.do.endswith("`--devices host:2` serves devices in host memory instead")


UNIT = UnitFacts("system", said="2 versions", path="/lib/cubroker.service")
FAILED = replace(UNIT, state="failed", phase="failed", result="exit-code", status=1, restarts=5)
NO_BROKER = BrokerFacts("unavailable", "silent")

UNITS: list[tuple[UnitFacts, bool | None, str, str]] = [
    (UNIT, True, r"is active \(running\): 2 versions", ""),
    (FAILED, False, "has failed: exit-code, status 1, after 5 restarts", "`systemctl restart cubroker`"),
    (replace(FAILED, manager="user"), False, "has failed", "journalctl --user --unit .*`systemctl --user restart"),
    (replace(FAILED, state="activating", phase="auto-restart"), False, "started again, after 5 restarts", "mend it"),
    (replace(UNIT, state="inactive", phase="dead"), None, "does not run", "`systemctl start cubroker`"),
    (replace(UNIT, state="inactive", enabled=False), None, "does not run", "`systemctl enable --now cubroker`"),
    (replace(UNIT, state="activating", phase="start"), None, "is activating", "status cubroker"),
    (replace(UNIT, outdated=True), None, "its file was changed since", "daemon-reload"),
    (replace(UNIT, loaded="masked"), None, "is masked", "unmask"),
    (replace(UNIT, loaded="bad-setting", why="Unit has no ExecStart"), False, "no ExecStart", "systemd-analyze verify"),
]


def has(unit: UnitFacts) -> HostFacts:
    return replace(HOST, unit=unit)


def listens(state: Any, pid: int = 0, name: str = "", detail: str = "") -> HostFacts:
    return replace(HOST, broker=NO_BROKER, listener=ListenerFacts(state, pid, name, detail))


def settings(*facts: Any, **more: Any) -> HostFacts:
    return replace(HOST, settings=SettingsFacts(*facts, **more))


def test_of_a_service_that_is_not_there_nothing_is_said() -> None:
    assert judge_host(HOST, DRIVER, GPU).keys().isdisjoint({"service", "last error", "socket", "settings"})
    assert "socket" not in judge_host(replace(listens("listening"), broker=HOST.broker))
    assert "last error" not in judge_host(has(UNIT))


@pytest.mark.parametrize(
    ("name", "facts", "works", "why", "do"),
    [
        ("device files", BARE, None, "no GPUs here", ""),
        ("device files", replace(HOST, files={"nvidiactl": True}), False, "no /dev/nvidia-uvm", "nvidia-modprobe -u"),
        (
            *("device files", replace(HOST, files={"nvidiactl": True}, container="docker"), False),
            *("no /dev/nvidia-uvm", "--device /dev/nvidia-uvm"),
        ),
        ("device files", replace(HOST, files=FILES | {"nvidia-uvm": False}), False, "open /dev/nvidia-uvm$", "cgroup"),
        ("imex channel", replace(HOST, channels=False), None, "only fabric handles need one", ""),
        ("kernel", replace(HOST, pidfd="no", kernel="4.18.0"), False, "4.18.0 .*pidfd_open: no", "Linux 5.3"),
        ("kernel", replace(HOST, pidfd="no", container="docker"), False, "pidfd_open: no", "seccomp"),
        ("kernel", replace(HOST, peer_pidfd=False), None, "SO_PEERPIDFD", "pid namespace"),
        ("confinement", replace(HOST, unconfined=("no Landlock (x)",)), None, "^no Landlock .x.; a broker", "`lsm=`"),
        (
            *("confinement", replace(HOST, unconfined=("no filter", "no Landlock"), container="docker"), None),
            *("^no filter and no Landlock; a broker serves without", "landlock_restrict_self .* seccomp profile"),
        ),
        ("memfd", replace(HOST, memfd="no"), False, "memfd_create: no", "seccomp"),
        ("descriptors", replace(HOST, descriptors=(256, 1024)), False, "1024 files", "LimitNOFILE"),
        ("descriptors", replace(HOST, descriptors=(256, 1024), container="docker"), False, "1024", "--ulimit nofile"),
        ("descriptors", replace(HOST, descriptors=(-1, -1)), True, "any number", ""),
        ("locked memory", replace(HOST, locked=65536), None, "64.0 KiB", "LimitMEMLOCK"),
        ("locked memory", replace(HOST, locked=65536, container="podman"), None, "64.0 KiB", "--ulimit memlock"),
        ("locked memory", replace(HOST, locked=1 << 30), True, "1.0 GiB", ""),
        ("container", replace(HOST, container="lxc"), None, "lxc", "mount the broker's directory"),
        ("user namespace", replace(HOST, namespace=True), None, "in it cannot tell", "outside"),
        (
            "directory",
            replace(HOST, directory=replace(DIRECTORY, invalid="too long; shorten")),
            False,
            "long",
            "shorten",
        ),
        ("directory", replace(HOST, directory=replace(DIRECTORY, state="absent")), None, "serve` makes it", ""),
        (
            "directory",
            replace(HOST, directory=replace(DIRECTORY, state="absent", closed=Path("/run"))),
            None,
            "cannot make it: /run cannot be written by this user",
            "another",
        ),
        ("directory", replace(HOST, directory=replace(DIRECTORY, state="something else")), False, "no dir", "another"),
        ("directory", replace(HOST, directory=replace(DIRECTORY, state="hidden")), False, "pass through", "another"),
        ("directory", replace(HOST, directory=replace(DIRECTORY, exposed="all write; chmod")), False, "all", "chmod"),
        (
            "directory",
            replace(HOST, directory=replace(DIRECTORY, state="absent", exposed="all write; chmod")),
            False,
            "all write",
            "chmod",
        ),
        ("directory", replace(HOST, directory=replace(DIRECTORY, enter=False)), False, "may not enter", "group"),
        ("broker", replace(HOST, broker=BrokerFacts("absent", "none; start one")), None, "none", "start one"),
        ("broker", replace(HOST, broker=BrokerFacts("unavailable", "silent")), False, "silent", ""),
        (
            "broker",
            replace(HOST, broker=BrokerFacts("", "it answers", "it is told to end")),
            None,
            "it answers, and lends nothing new: it is told to end",
            "`cubroker drain --off`",
        ),
        *(("service", has(unit), *expected) for unit, *expected in UNITS),
        (
            "last error",
            has(replace(FAILED, error="cubroker: no")),
            False,
            "log says: cubroker: no",
            "journalctl --unit",
        ),
        ("last error", has(replace(UNIT, error="late")), None, "late", "-n 20"),
        ("socket", listens("listening", 1), False, "^the first process .*: they wait", "kill -CONT"),
        ("socket", listens("listening", 42, "python3"), False, r"^process 42 \(python3\) listens", "keeper"),
        ("socket", listens("listening", 42), False, "^process 42 listens", "keeper"),
        ("socket", listens("listening"), False, "^a process listens", "keeper"),
        ("socket", listens("deserted"), None, "an earlier broker left it", "start a broker"),
        ("socket", listens("unknown", detail="Permission denied"), None, "Permission denied", "as root"),
        ("settings", settings("a.toml", count=2), True, "^a.toml: 2 settings, nothing wrong", ""),
        ("settings", settings("a.toml", ("1", "2", "3", "4")), False, r"^1; 2; 3 \(and 1 more\)", "check a.toml"),
        ("settings", settings("a.toml", ("x",), readable=False), None, "may not read a.toml", "as root"),
    ],
)
def test_what_a_machine_lacks_is_explained(name: str, facts: HostFacts, works: bool | None, why: str, do: str) -> None:
    check(judge_host(facts, DRIVER, GPU)[name], works, why, do)
