"""``cubroker doctor`` on host devices, what becomes of trials that hang and die, and facts of made-up machines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cubroker.cli.doctor import command, facts
from cubroker.cli.doctor.command import DoctorReport, ask, trial_command
from cubroker.cli.doctor.facts import DirectoryFacts, Facts, Survey, Trial
from cubroker.driver import Driver, DriverError, Peers, load
from cubroker.driver.host.bindings import host_module
from cubroker.driver.host.virtual_memory import CHANNEL
from cubroker.protocol.errors import Denied
from cubroker.protocol.paths import SESSION_SOCKET
from cubroker.server import hardening
from cubroker.server.takeover import Directory
from tests.brokers import BrokerProcess, eventually
from tests.unit.cli import terminal
from tests.unit.cli.processes import DEADLINE, environment, holding, run, run_as_guest, started

KINDS = ["ipc", "vmm", "fabric", "events", "peers", "multicast"]


def verdicts(document: dict[str, Any]) -> dict[str, Any]:
    return {finding["name"]: finding for finding in document["host"]}


def telling(answer: str) -> list[str]:
    """Return the command line of a process that prints an answer."""
    return [sys.executable, "-I", "-S", "-c", f"print({answer!r})"]


WORKS = telling('{"outcome": "works"}')


def at_once(monkeypatch: pytest.MonkeyPatch, *real: str) -> None:
    """Have every trial work but for the ``real`` ones, which are made; the survey is made in this process."""

    def trial(task: str, *arguments: str) -> list[str]:
        if task in real:
            return trial_command(task, *arguments)
        return telling(msgspec.json.encode(facts.survey(*arguments)).decode()) if task == "survey" else WORKS

    monkeypatch.setattr(command, "trial_command", trial)


@pytest.mark.slow
def test_host_devices_share_by_handle_and_by_descriptor(broker: BrokerProcess) -> None:
    done = run("doctor", "--devices", "host:1@64MiB", "--json", "--directory", broker.directory)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert list(document) == ["schema", "devices", "host"]
    assert [device["index"] for device in document["devices"]] == [0]
    for device in document["devices"]:
        assert list(device) == ["index", "uuid", "name", "kinds"]
        assert device["uuid"].startswith("HOST-")
        assert list(device["kinds"]) == KINDS
        assert all(list(verdict) == ["works", "why", "do"] for verdict in device["kinds"].values())
        works = {kind: verdict["works"] for kind, verdict in device["kinds"].items()}
        assert works == {"ipc": True, "vmm": True, "fabric": False, "events": True, "peers": None, "multicast": False}
    assert verdicts(document)["driver"]["works"]
    finding = verdicts(document)["broker"]
    assert (finding["works"], finding["why"], finding["do"]) == (True, "a broker answers, with 2 devices", None)
    confinement = verdicts(document)["confinement"]
    assert (confinement["works"] is True) == (not hardening.obstacles())
    assert all(obstacle in confinement["why"] for obstacle in hardening.obstacles())


def test_every_device_has_its_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)
    report = DoctorReport(asyncio.run(command.gather("host:2@64MiB/1", tmp_path / "nobody")))
    assert [device.index for device, _ in report.devices] == [0, 1]
    assert all(list(found) == KINDS for _, found in report.devices)
    assert [found["peers"].works for _, found in report.devices] == [False, False]


@pytest.mark.slow
def test_a_machine_with_a_channel_has_fabric_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHANNEL, "0")
    at_once(monkeypatch, "fabric")
    (device,) = DoctorReport(asyncio.run(command.gather("host:1@64MiB", tmp_path / "nobody"))).document()["devices"]
    assert device["kinds"]["fabric"]["works"] is True
    assert "mapped 2 MiB by fabric handle" in device["kinds"]["fabric"]["why"]


def test_the_report_fits_a_terminal(tmp_path: Path) -> None:
    program = (
        "import sys; from cubroker.cli import main; from cubroker.cli.doctor import command, facts\n"
        f"made, works = facts.trial_command, {WORKS}\n"
        "command.trial_command = lambda task, *rest: made(task, *rest) if task == 'survey' else works\n"
        "sys.exit(main.main())"
    )
    arguments = ("doctor", "--devices", "host:2@64MiB/1", "--directory", tmp_path / "nobody")
    status, written = terminal.run(*arguments, command=[sys.executable, "-c", program])
    assert status == 0
    assert "device 0: cubroker host device 0, HOST-" in written
    assert "no broker serves" in written
    coloured = ["\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[0m"]
    assert all(code in written for code in coloured)
    for code in coloured:
        written = written.replace(code, "")
    assert max(len(line) for line in written.splitlines() if str(tmp_path) not in line) <= 80


@pytest.mark.slow
def test_a_broker_that_drains_is_a_note(broker: BrokerProcess) -> None:
    assert run("drain", "--directory", broker.directory).returncode == 0
    done = run("doctor", "--devices", "host:1@64MiB", "--directory", broker.directory)
    assert (done.returncode, done.stderr) == (0, "")
    expected = (
        "note  a broker answers, with 2 devices, and lends nothing new: its operator wants everything to be given back"
    )
    assert re.search(
        rf"  broker +{expected}\n +-> if it was drained by hand, `cubroker drain --off` has it", done.stdout
    )


@pytest.mark.slow
def test_a_broker_that_does_not_answer_in_the_time_it_has_is_told(broker: BrokerProcess) -> None:
    broker.process.send_signal(signal.SIGSTOP)
    try:
        given = ("--devices", "host:1@64MiB", "--json", "--directory", broker.directory)
        done = run("--timeout", "0.2", "doctor", *given)
    finally:
        broker.process.send_signal(signal.SIGCONT)
    finding = verdicts(json.loads(done.stdout))["broker"]
    assert finding["works"] is False
    assert "did not answer within 0.2 s" in finding["why"]
    assert finding["do"].endswith("cubroker --timeout SECONDS waits longer")


@pytest.mark.slow
def test_a_directory_that_is_not_taken_for_the_hosts_is_a_finding(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    host.chmod(0o777)
    (host / SESSION_SOCKET).touch()
    own = tmp_path / "host-guest" / "cubroker"
    assert run_as_guest(host, "ls").returncode == 1
    done = run_as_guest(host, "doctor", "--devices", "host:1@64MiB", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = verdicts(json.loads(done.stdout))
    assert found["directory"]["why"] == f"{own} is not there yet; `cubroker serve` makes it"
    verdict = found["host's broker"]
    assert verdict["works"] is False
    assert verdict["why"].startswith(f"no socket is in {own}, and {host} is not trusted as the host's: its group and ")
    assert verdict["do"].startswith("to use it anyway, name it by --directory, ")
    host.chmod(0o755)
    assert run_as_guest(host, "ls").returncode == 3


def test_ctrl_c_ends_it_and_its_trials(tmp_path: Path) -> None:
    marker = f"doctor-{os.getpid()}-interrupted"
    env = environment(CUBROKER_TEST_MARKER=marker)
    with started("doctor", "--devices", "host:8@64MiB", "--directory", tmp_path / "nobody", env=env) as process:
        eventually(lambda: len(holding(marker)) > 1, "trials to be under way")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 130
    eventually(lambda: not holding(marker), "its trials to end")


@pytest.mark.parametrize("spec", ["tpu:1", "host:0", "cuda:0,0"])
def test_a_spec_that_names_no_driver_is_wrong_usage(spec: str, tmp_path: Path) -> None:
    done = run("doctor", "--devices", spec, "--directory", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Invalid value for '--devices'" in done.stderr


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs of a machine that has any."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_so_and_tries_host_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)
    report = DoctorReport(asyncio.run(command.gather(None, tmp_path / "nobody")))
    assert report.usable
    assert [device.emulated for device, _ in report.devices] == [True, True]
    assert report.host["driver"].works is False
    assert "no GPU to lend" in report.host["driver"].why


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu")
def test_gpus_that_were_asked_for_and_are_not_there_are_a_failure(tmp_path: Path) -> None:
    report = DoctorReport(asyncio.run(command.gather("cuda", tmp_path / "nobody")))
    assert not report.usable
    assert report.devices == []
    assert report.host["driver"].works is False
    assert report.document()["devices"] == []


# -- trials that come to nothing -------------------------------------------------------------------

HANGS = "import signal; signal.pause()"


def test_a_driver_that_hangs_is_reported_and_its_process_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = f"doctor-{os.getpid()}-hangs"
    monkeypatch.setenv("CUBROKER_TEST_MARKER", marker)
    assert asyncio.run(ask([sys.executable, "-c", HANGS], 0.2, Trial)) == Trial("silent", detail="0.2 s")
    monkeypatch.delenv("CUBROKER_TEST_MARKER")
    eventually(lambda: not holding(marker), "the process to end")


@pytest.mark.slow
def test_a_worker_that_hangs_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = f"doctor-{os.getpid()}-worker"
    monkeypatch.setenv("CUBROKER_TEST_MARKER", marker)
    head = "import os, signal, sys; from cubroker.cli.doctor import facts;"
    tail = "facts.main(sys.argv[1], sys.argv[2], 'host:1@64MiB')"
    hanging = f"{head} facts.WORKERS['ipc-reader'] = lambda *_: signal.pause(); {tail}"
    line = f"lambda task, *_: [sys.executable, '-c', {hanging!r}, str(os.getpid()), task]"
    owner = f"{head} facts.trial_command = {line}; {tail}"
    command = [sys.executable, "-c", owner, str(os.getpid()), "ipc"]
    assert asyncio.run(ask(command, 3.0, Trial)) == Trial("silent", detail="3 s")
    monkeypatch.delenv("CUBROKER_TEST_MARKER")
    eventually(lambda: not holding(marker), "both processes to end")


def test_a_trial_whose_parent_has_gone_is_not_made() -> None:
    line = [sys.executable, "-m", "cubroker.cli.doctor.facts", "1000000000", "survey", "host:1@64MiB"]
    assert asyncio.run(ask(line, 60, Survey)) == Trial("died", detail="status 0: it said nothing")


def test_after_a_silent_trial_the_device_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line(*arguments: str) -> list[str]:
        return [sys.executable, "-c", HANGS] if arguments[0] == "ipc" else trial_command(*arguments)

    survey = asyncio.run(ask(trial_command("survey", "host:1@64MiB"), 60, Survey))
    assert isinstance(survey, Survey)
    monkeypatch.setattr(command, "trial_command", line)
    examined = asyncio.run(command.try_device(asyncio.Semaphore(1), "host:1@64MiB", survey.devices[0], 0.2))
    outcomes = {kind: trial.outcome for kind, trial in examined.trials.items()}
    assert outcomes == {"ipc": "silent", "vmm": "skipped", "fabric": "skipped", "events": "skipped"}


def test_a_driver_that_does_not_even_say_what_there_is_is_a_finding(tmp_path: Path) -> None:
    found = asyncio.run(command.gather("host:1@64MiB", tmp_path / "nobody", limit=0.001))
    assert found.driver.trial == Trial("silent", detail="0.001 s")
    report = DoctorReport(found)
    assert not report.usable
    assert "did not answer within 0.001 s" in report.host["driver"].why


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        (f"import os; os.kill(os.getpid(), {signal.SIGSEGV:d})", "SIGSEGV"),
        (f"import os; os.kill(os.getpid(), {signal.SIGRTMIN + 1:d})", f"signal {signal.SIGRTMIN + 1:d}"),
        ("raise SystemExit('no bindings')", "status 1: no bindings"),
        ("raise SystemExit(3)", "status 3: it said nothing"),
        ("print('no JSON')", "status 0: it said nothing"),
    ],
)
def test_a_trial_that_dies_says_of_what(program: str, detail: str) -> None:
    assert asyncio.run(ask([sys.executable, "-c", program], 60, Trial)) == Trial("died", detail=detail)


def test_what_libraries_print_first_does_no_harm() -> None:
    program = 'print("NVIDIA says hello"); print(\'{"outcome": "works"}\')'
    assert asyncio.run(ask([sys.executable, "-c", program], 60, Trial)) == Trial("works")


def test_refusals_of_either_side_are_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "host:1@2MiB"
    taken = facts.OWNERS["ipc"]

    def again(driver: Any, index: int) -> Trial:
        driver.context(index).allocate(facts.SIZE)
        return taken(driver, index)

    monkeypatch.setitem(facts.OWNERS, "ipc", again)
    trial = facts.attempt("ipc", spec, 0)
    assert (trial.outcome, trial.side, trial.call) == ("refused", "owner", "cuMemAlloc")
    assert trial.error == "CUDA_ERROR_OUT_OF_MEMORY"


def test_a_worker_that_is_refused_tells_its_owner() -> None:
    driver = load("host:1@64MiB")
    try:
        trial = facts.ask_worker("ipc-reader", driver, 0, facts.Shared(b"", handle=bytes(64)))
    finally:
        driver.close()
    assert (trial.outcome, trial.side, trial.call) == ("refused", "worker", "cuIpcOpenMemHandle")


def test_an_event_that_is_gone_is_not_taken_for_one_that_works() -> None:
    driver = load("host:1@64MiB")
    try:
        event = driver.context(0).event(shared=True)
        handle = event.export()
        event.close()
        trial = facts.ask_worker("event-waiter", driver, 0, facts.Shared(b"", handle=handle))
    finally:
        driver.close()
    assert (trial.outcome, trial.side, trial.call) == ("refused", "worker", "cuIpcOpenEventHandle")


def test_devices_are_asked_what_they_say_of_sharing() -> None:
    (device,) = facts.survey("host:1@64MiB").devices
    assert (device.unified, device.ipc, device.virtual, device.descriptors) == (1, 1, 1, 1)


@pytest.mark.slow
def test_bytes_that_differ_are_seen() -> None:
    driver = load("host:1@64MiB")
    try:
        context = driver.context(0)
        pointer = context.allocate(facts.SIZE)
        order = facts.Shared(b"seed", handle=context.export(pointer))
        assert facts.ask_worker("ipc-reader", driver, 0, order) == Trial("differs")
        physical = driver.create(0, facts.SIZE)
        descriptor = physical.export()
        try:
            order = facts.Shared(b"seed", descriptor=descriptor)
            assert facts.ask_worker("vmm-reader", driver, 0, order) == Trial("differs")
        finally:
            os.close(descriptor)
            physical.release()
        context.free(pointer)
    finally:
        driver.close()


class Spy:
    """A driver-shaped module that passes for real hardware and notes which functions are asked for."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return None if name == "emulated" else getattr(self._module, name)


def test_on_real_hardware_multicast_is_asked_about_and_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(host_module(2, 64 << 20, 2))
    monkeypatch.setattr(facts, "load", lambda spec: Driver(spy, spec, host=False))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    survey = facts.survey("cuda")
    assert {device.obstacle for device in survey.devices} == {"NCCL_NVLS_ENABLE=0 says no to multicast on this machine"}
    assert [(device.emulated, device.peers) for device in survey.devices] == [(False, {1: True}), (False, {0: True})]
    assert facts.attempt("fabric", "cuda", 0) == Trial("refused", "", "", "")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.setenv("CUBROKER_MULTICAST", "1")
    assert {(device.multicast, device.obstacle) for device in facts.survey("cuda").devices} == {(1, None)}
    assert {"cuDeviceGetAttribute", "cuMemCreate"} <= spy.asked
    assert not [name for name in spy.asked if name.startswith("cuMulticast")]


def test_links_that_the_driver_does_not_tell_of_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise DriverError("cuDeviceCanAccessPeer", 999, "CUDA_ERROR_UNKNOWN")

    monkeypatch.setattr(Peers, "can_access", refuse)
    survey = facts.survey("host:2@64MiB")
    assert [device.links.error for device in survey.devices] == ["CUDA_ERROR_UNKNOWN"] * 2
    assert survey.driver.trial == Trial("works")


def test_a_driver_that_lacks_a_function_is_told() -> None:
    trial = facts.refusal(RuntimeError('Function "cuMemCreate" not found'), "owner")
    assert (trial.outcome, trial.error, trial.detail) == ("refused", "", 'Function "cuMemCreate" not found')
    assert facts.refusal(DriverError("cuX", 1, "CUDA_ERROR_INVALID_VALUE")).error == "CUDA_ERROR_INVALID_VALUE"


def test_devices_without_one_way_to_share_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)
    found = asyncio.run(command.gather("host:1@64MiB", tmp_path / "nobody"))
    assert DoctorReport(found).usable
    (examined,) = found.devices
    refused = Trial("refused", "owner", "cuX", "CUDA_ERROR_NOT_SUPPORTED")
    worse = replace(examined, trials=dict.fromkeys(examined.trials, refused))
    assert not DoctorReport(Facts(found.driver, (worse,), found.host)).usable


# -- the machine -----------------------------------------------------------------------------------


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
    found = command.examine_machine(tmp_path / "nobody", tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (found.module, found.container, found.visible, found.namespace) == ("580.159.03", "kubernetes", "0", True)
    assert (found.files, found.channels) == ({"nvidiactl": True}, True)
    assert found.directory == DirectoryFacts(tmp_path / "nobody", state="absent")
    assert found.broker.code == "absent"
    assert found.descriptors[1] == -1 or 0 < found.descriptors[0] <= found.descriptors[1]
    assert re.fullmatch(r"\d+\.\d+.*", found.kernel)
    assert (found.memfd, found.pidfd) == ("", "")


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
    found = command.examine_machine(tmp_path / "nobody", tmp_path, environ)
    assert (found.container, found.module, found.namespace) == (kind, "", False)


def test_a_directory_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    tmp_path.chmod(0o710)
    assert command.examine_directory(tmp_path) == DirectoryFacts(tmp_path, owner=os.getuid(), mode=0o710)
    assert command.examine_directory(file).state == "something else"
    assert command.examine_directory(file / "below").state == "something else"
    assert command.examine_directory(tmp_path / "below").state == "absent"
    assert "longer than" in command.examine_directory(tmp_path / ("x" * 200)).invalid


@pytest.mark.parametrize("below", ["", "run", "deep/run"])
def test_a_directory_that_serve_refuses_is_refused_by_the_doctor_in_the_same_words(tmp_path: Path, below: str) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared" / below
    shared.mkdir()
    shared.chmod(0o777)
    for _ in ("not there yet", "there"):
        found = command.examine_directory(path)
        with pytest.raises(Denied) as refused, Directory(path):
            pass
        assert found.exposed == refused.value.message
        path.mkdir(parents=True, exist_ok=True)


def test_a_folder_that_hides_the_directory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "stat", refuse)  # root, as tests may run, passes everywhere
    assert command.examine_directory(tmp_path).state == "hidden"


def test_a_link_to_nothing_is_no_place_that_serve_could_make(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nothing")
    assert command.examine_directory(tmp_path / "link").state == "something else"
    assert command.examine_directory(tmp_path / "link" / "run").state == "something else"


def test_a_folder_in_which_serve_cannot_make_the_directory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.examine_directory(tmp_path / "deep" / "run").closed is None

    def access(path: Path, mode: int, *, effective_ids: bool = False) -> bool:  # as of a read-only file system
        return path != tmp_path or not (mode & os.W_OK and mode & os.X_OK and effective_ids)

    monkeypatch.setattr(os, "access", access)  # root may write elsewhere
    assert command.examine_directory(tmp_path / "deep" / "run").closed == tmp_path


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_a_call_that_is_forbidden_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, name, refuse)
    found = command.examine_machine(tmp_path / "nobody")
    assert getattr(found, name.split("_", maxsplit=1)[0]) == "Operation not permitted"


def test_a_kernel_that_does_not_say_who_connects_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SO_PEERPIDFD", 4711)
    assert not command.examine_machine(tmp_path / "nobody").peer_pidfd


def test_a_kernel_that_cannot_confine_a_gateway_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(hardening, "_landlock_version", refuse)
    found = command.examine_machine(tmp_path / "nobody")
    assert "the kernel has no Landlock (Operation not supported)" in found.unconfined
    assert list(found.unconfined) == hardening.obstacles()


def test_a_socket_that_a_dead_broker_left_is_no_absent_broker(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "session.sock"))
    assert command.examine_broker(tmp_path).code == "unavailable"
