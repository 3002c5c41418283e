"""Every explanation of what a machine lacks, from made-up facts; and the facts, from made-up machines."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from cubroker.cli.doctor import host, machine
from cubroker.cli.doctor.facts import (
    BrokerFacts,
    DeviceFacts,
    DirectoryFacts,
    DriverFacts,
    Examined,
    Facts,
    HostFacts,
    Trial,
    Verdict,
)
from cubroker.protocol.errors import Denied
from cubroker.server import sandbox
from cubroker.server.directory import Directory

PATH = Path("/run/cubroker")
FILES = {"nvidiactl": True, "nvidia-uvm": True}
HOST = HostFacts(
    DirectoryFacts(PATH), BrokerFacts("", "a broker answers"), module="580.159.03", files=FILES, channels=True
)
BARE = replace(HOST, module="", files={})
GPU = DeviceFacts(0, "GPU-1", "NVIDIA H200")
DRIVER = DriverFacts("cuda", Trial("works"), 13000)
NO_DEVICE = DriverFacts("cuda", Trial("refused", "", "cuInit", "CUDA_ERROR_NO_DEVICE"))
NO_LIBRARY = replace(NO_DEVICE, library=False)
OTHER = DriverFacts("cuda", Trial("refused", "", "cuInit", "CUDA_ERROR_SYSTEM_NOT_READY"))


def judge(facts: HostFacts = HOST, driver: DriverFacts = DRIVER, *devices: DeviceFacts) -> dict[str, Verdict]:
    return machine.judge(Facts(driver, tuple(Examined(device, {}) for device in devices), facts))


def check(verdict: Verdict, works: bool | None, why: str, do: str) -> None:
    assert verdict.works is works
    assert re.search(why, verdict.why), verdict
    assert re.search(do, verdict.do) if do else verdict.do == "", verdict


def test_a_machine_that_lacks_nothing_is_told_so() -> None:
    verdicts = judge(HOST, DRIVER, GPU)
    assert {name for name, verdict in verdicts.items() if verdict.works is not True} == set()
    assert not any(verdict.do for verdict in verdicts.values())
    assert verdicts["driver"].why == "serves CUDA 13.0, kernel module 580.159.03"
    assert judge(BARE, DRIVER, GPU)["driver"].why == "serves CUDA 13.0"
    emulated = judge(BARE, replace(DRIVER, spec="host:1"), replace(GPU, emulated=True))["driver"]
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
    verdict = judge(facts, driver)["driver"]
    check(verdict, False, why, do)
    assert driver.version == 11080 or verdict.do.endswith("`--devices host:2` serves devices in host memory instead")


DIRECTORY = HOST.directory


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
        ("user namespace", replace(HOST, namespace=True), None, "one and the same", "outside"),
        (
            "directory",
            replace(HOST, directory=replace(DIRECTORY, invalid="too long; shorten")),
            False,
            "long",
            "shorten",
        ),
        ("directory", replace(HOST, directory=replace(DIRECTORY, state="absent")), None, "serve` makes it", ""),
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
    ],
)
def test_what_a_machine_lacks_is_explained(name: str, facts: HostFacts, works: bool | None, why: str, do: str) -> None:
    check(judge(facts, DRIVER, GPU)[name], works, why, do)


# -- facts -----------------------------------------------------------------------------------------


def test_a_machine_is_looked_at(tmp_path: Path) -> None:
    files = {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release\n",
        "proc/self/uid_map": "         0     100000      65536\n",
        "proc/1/cgroup": "0::/kubepods/besteffort/pod1\n",
        "dev/nvidiactl": "",
        "dev/nvidia-caps-imex-channels/channel0": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    facts = host.examine(tmp_path / "nobody", tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (facts.module, facts.container, facts.visible, facts.namespace) == ("580.159.03", "kubernetes", "0", True)
    assert (facts.files, facts.channels) == ({"nvidiactl": True}, True)
    assert facts.directory == DirectoryFacts(tmp_path / "nobody", state="absent")
    assert facts.broker.code == "absent"
    assert facts.descriptors[1] == -1 or 0 < facts.descriptors[0] <= facts.descriptors[1]
    assert re.fullmatch(r"\d+\.\d+.*", facts.kernel)
    assert (facts.memfd, facts.pidfd) == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "environ", "kind"),
    [
        ("nothing", "", {}, ""),
        (".dockerenv", "", {}, "docker"),
        ("run/.containerenv", "", {}, "podman"),
        ("proc/1/cgroup", "1:name=systemd:/docker/0123", {}, "docker"),
        ("proc/1/cgroup", "0::/machine.slice/libpod-0123.scope", {}, "podman"),
        ("proc/1/cgroup", "0::/init.scope", {}, ""),
        ("nothing", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ],
)
def test_a_container_is_known_by_its_traces(
    tmp_path: Path, name: str, content: str, environ: dict[str, str], kind: str
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    facts = host.examine(tmp_path / "nobody", tmp_path, environ)
    assert (facts.container, facts.module, facts.namespace) == (kind, "", False)


def test_a_directory_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    tmp_path.chmod(0o710)
    assert host.examine_directory(tmp_path) == DirectoryFacts(tmp_path, owner=os.getuid(), mode=0o710)
    assert host.examine_directory(file).state == "something else"
    assert host.examine_directory(file / "below").state == "something else"
    assert host.examine_directory(tmp_path / "below").state == "absent"
    assert "longer than" in host.examine_directory(tmp_path / ("x" * 200)).invalid


@pytest.mark.parametrize("below", ["", "run", "deep/run"])
def test_a_directory_that_serve_refuses_is_refused_by_the_doctor_in_the_same_words(tmp_path: Path, below: str) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared" / below
    shared.mkdir()
    shared.chmod(0o777)
    for _ in ("not there yet", "there"):
        facts = host.examine_directory(path)
        with pytest.raises(Denied) as refused, Directory(path):
            pass
        assert facts.exposed == refused.value.message
        path.mkdir(parents=True, exist_ok=True)


def test_a_folder_that_hides_the_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "stat", refuse)  # root, as tests may run, passes everywhere
    assert host.examine_directory(tmp_path).state == "hidden"


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_a_call_that_is_forbidden_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, name, refuse)
    facts = host.examine(tmp_path / "nobody")
    assert getattr(facts, name.split("_", maxsplit=1)[0]) == "Operation not permitted"


def test_a_kernel_that_does_not_say_who_connects_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SO_PEERPIDFD", 4711)
    assert not host.examine(tmp_path / "nobody").peer_pidfd


def test_a_kernel_that_cannot_confine_a_gateway_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(sandbox, "_landlock_version", refuse)
    facts = host.examine(tmp_path / "nobody")
    assert "the kernel has no Landlock (Operation not supported)" in facts.unconfined
    assert list(facts.unconfined) == sandbox.obstacles()


def test_a_socket_that_a_dead_broker_left_is_no_absent_broker(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "session.sock"))
    assert host.examine_broker(tmp_path).code == "unavailable"
