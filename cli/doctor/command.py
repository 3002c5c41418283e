"""``cubroker doctor``: gathers facts of a machine, and reports what they mean, for people and as one JSON document.

It asks the driver, makes safe trials on each device, and looks at the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import textwrap
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import click

from cubroker.cli import format, options, serve
from cubroker.cli.doctor import verdicts
from cubroker.cli.doctor.facts import (
    UNIT,
    BrokerFacts,
    DeviceFacts,
    DirectoryFacts,
    DriverFacts,
    Facts,
    Finding,
    HostFacts,
    ListenerFacts,
    SettingsFacts,
    Survey,
    Trial,
    UnitFacts,
    read_answer,
    trial_command,
)
from cubroker.client import Broker
from cubroker.client.transport import handshake
from cubroker.driver import system_calls
from cubroker.protocol import paths as places
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, explain, reason
from cubroker.protocol.messages import IPC, VMM
from cubroker.protocol.paths import default_directory, find_directory
from cubroker.server import hardening
from cubroker.server.config.load import DEFAULT, ConfigSources, InvalidConfig
from cubroker.server.transport.unix_sockets import CREDENTIALS, SO_PEERPIDFD, overflow_id, read_process

_WORDS = {True: "works", False: "does not", None: "unknown"}
_NOTES = {True: "good", False: "bad", None: "note"}
_COLOURS = {True: "green", False: "red", None: "yellow"}

NARROWEST = 60
"""Characters that a report is wide, however narrow the terminal."""


@click.command("doctor")
@click.option(
    "--devices",
    metavar="SPEC",
    type=serve.value("devices"),
    help="cuda for all GPUs, cuda:0,1 for some, host:N for N emulated devices in host memory."
    "  [default: cuda, and host:2 where there is no GPU]",
)
@options.as_json
@options.given_directory
@click.pass_obj
def doctor(before: Path | None, devices: str | None, directory: Path | None, as_json: bool) -> int:
    """Find out what works here, and if something does not, why and what to do.

    For each device and kind of sharing a small trial is made, by processes that share 2 MiB, or an event; multicast is
    never tried.
    The machine, its limits and the broker's directory are looked at too. The exit status is 0 if memory can be shared
    in one way at least on every device, else 1.
    """
    place, doubt = _find(directory or before)
    facts = asyncio.run(gather(devices, place, patience=options.timeout(), doubt=doubt))
    report = DoctorReport(facts)
    if as_json:
        format.document(report.document())
    else:
        report.show()
    return 0 if report.usable else 1


def _find(named: Path | None) -> tuple[Path, str]:
    """Return the directory that a client uses if told ``named``; and why that is not the host's, if it is in doubt."""
    try:
        return named or find_directory(), ""
    except Denied as error:
        return default_directory(), error.message


class DoctorReport:
    """The verdicts on the facts of a machine.

    Attributes:
        devices: each device, and a verdict for each kind of sharing.
        host: a verdict on each thing that sharing needs.
    """

    def __init__(self, facts: Facts) -> None:
        self.devices = [(device, verdicts.judge_device(device, facts)) for device in facts.devices]
        self.host = verdicts.judge_machine(facts)

    @property
    def usable(self) -> bool:
        """Whether there is a device, and on each a kind of sharing that works."""
        return bool(self.devices) and all(verdicts.usable(found) for _, found in self.devices)

    def document(self) -> dict[str, object]:
        """Return the report as values of JSON."""
        return {
            "devices": [
                {
                    "index": device.index,
                    "uuid": device.uuid,
                    "name": device.name,
                    "kinds": {kind: asdict(verdict) for kind, verdict in found.items()},
                }
                for device, found in self.devices
            ],
            "host": [{"name": name, **asdict(verdict)} for name, verdict in self.host.items()],
        }

    def show(self) -> None:
        """Print the report for people, as wide as the terminal."""
        width = format.terminal_width()
        for device, found in self.devices:
            title = f"device {device.index}: {format.printable(device.name)}, {device.uuid}"
            format.say(click.style(title, bold=True))
            _section(found, _WORDS, width)
        format.say(click.style("this machine", bold=True))
        _section(self.host, _NOTES, width)


def _section(findings: Mapping[str, Finding], words: Mapping[bool | None, str], width: int | None) -> None:
    names, longest = max(map(len, findings)), max(map(len, words.values()))
    indent = " " * (2 + names + 2 + longest + 2)
    for name, verdict in findings.items():
        word = click.style(words[verdict.works].ljust(longest), fg=_COLOURS[verdict.works])
        first, *more = _lines(verdict, len(indent), width)
        format.say(f"  {name.ljust(names)}  {word}  {first}")
        for line in more:
            format.say(indent + line)


def _lines(verdict: Finding, indent: int, width: int | None) -> Iterator[str]:
    """Yield why, and below it what to do."""
    for paragraph in (verdict.why, f"-> {verdict.do}" if verdict.do else ""):
        line = format.printable(" ".join(paragraph.split()))
        if width is not None:  # what is to be copied, a path or a command's option, stays in one piece
            room = max(width, NARROWEST) - indent
            yield from textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
        elif line:
            yield line


# -- gathering the facts -------------------------------------------------------------------------------

R = TypeVar("R")

GPUS = "cuda"
EMULATED = "host:2"

KINDS = (IPC, VMM, "fabric", "events")
"""The trials, in this order. Multicast is never tried: what the device and the settings say decides."""

LIMIT = 60.0
"""Seconds for each trial. The first process on a machine that keeps no driver state waits for the GPUs to start."""

AT_ONCE = 4
"""Devices that are tried at the same time. On each of them one trial runs at a time, as exclusive devices require."""

GRACE = 1.0
"""Seconds that a killed process may take to end; a process inside the kernel's driver may never end."""

ANSWER = 5.0
"""Seconds that a broker may take to answer once it has greeted."""

FILES = ("nvidiactl", "nvidia-uvm")
"""The device files without which no process can use a GPU, in addition to one for each GPU."""

CHANNELS = "dev/nvidia-caps-imex-channels"

_ALL_USERS = "4294967295"
"""How many user ids there are outside of any namespace (user_namespaces(7))."""


async def gather(
    spec: str | None, directory: Path, limit: float = LIMIT, *, patience: float = ANSWER, doubt: str = ""
) -> Facts:
    """Gather all facts.

    Args:
        spec: the devices; by default all GPUs, or two host devices if there are none.
        directory: where a broker serves, or would.
        limit: seconds that each trial may take.
        patience: seconds that this broker may take to greet.
        doubt: why the directory is not that of the host's broker, and what to do; empty if there is no doubt.
    """
    survey = await _survey(spec or GPUS, limit)
    driver, devices = survey.driver, survey.devices
    if spec is None and not devices:
        spec, devices = EMULATED, (await _survey(EMULATED, limit)).devices
    gate = asyncio.Semaphore(AT_ONCE)
    host, tried = await asyncio.gather(
        asyncio.to_thread(examine_machine, directory, patience=patience),
        asyncio.gather(*(try_device(gate, spec or GPUS, device, limit) for device in devices)),
    )
    return Facts(driver, tuple(tried), replace(host, doubt=doubt))


async def _survey(spec: str, limit: float) -> Survey:
    answer = await ask(trial_command("survey", spec), limit, Survey)
    return Survey(DriverFacts(spec, answer)) if isinstance(answer, Trial) else answer


async def try_device(gate: asyncio.Semaphore, spec: str, device: DeviceFacts, limit: float) -> DeviceFacts:
    """Make one trial after the other on a device, until one gets no answer."""
    trials: dict[str, Trial] = {}
    async with gate:
        for kind in KINDS:
            if any(trial.outcome == "silent" for trial in trials.values()):
                trials[kind] = Trial("skipped")
            else:
                trials[kind] = await ask(trial_command(kind, spec, str(device.index)), limit, Trial)
    return replace(device, trials=trials)


async def ask(line: Sequence[str], limit: float, kind: type[R]) -> R | Trial:
    """Run a command line and return the ``kind`` that it prints, or a trial that says why it printed none in time."""
    process = await asyncio.create_subprocess_exec(*line, stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(limit):
            out, errors = await process.communicate()
    except TimeoutError:
        return Trial("silent", detail=f"{limit:g} s")
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    await process.wait()
    assert process.returncode is not None
    return read_answer(process.returncode, out, errors, kind)


def examine_machine(
    directory: Path, root: Path = Path("/"), environ: Mapping[str, str] = os.environ, *, patience: float = ANSWER
) -> HostFacts:
    """Look at the machine, and at the broker of ``directory``. Files are those under ``root``."""
    # A line like ``NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03 …``.
    version = _text(root / "proc/driver/nvidia/version").partition("\n")[0]
    users = _text(root / "proc/self/uid_map").split()
    descriptors, locked = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unit = next(filter(None, map(examine_unit, MANAGERS)), None)
    return HostFacts(
        directory=examine_directory(directory),
        broker=examine_broker(directory, patience),
        user=os.geteuid(),
        kernel=os.uname().release.partition("-")[0],
        module=next((word for word in version.split() if word[0].isdigit() and "." in word), ""),
        files={
            name: os.access(root / "dev" / name, os.R_OK | os.W_OK) for name in FILES if (root / "dev" / name).exists()
        },
        channels=any((root / CHANNELS).glob("channel*")),
        container=_find_container(root, environ),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        namespace=bool(users) and users != ["0", "0", _ALL_USERS],
        descriptors=descriptors,
        locked=locked,
        memfd=_refusal(lambda: system_calls.memfd_create("cubroker-doctor", system_calls.MFD_CLOEXEC)),
        pidfd=_refusal(lambda: system_calls.pidfd_open(os.getpid())),
        peer_pidfd=_peer_pidfd(),
        unconfined=tuple(hardening.obstacles()),
        unit=unit,
        listener=examine_listener(directory),
        settings=examine_settings(unit, environ),
    )


def examine_broker(directory: Path, patience: float = ANSWER) -> BrokerFacts:
    """Open a session with the broker of a directory, end it, and ask whether the broker lends.

    A broker may answer although it opens no session. One that was silent is not waited for once more.
    """
    try:
        with options.hinting_at_timeout(), Broker(directory, connect_timeout=patience, timeout=ANSWER) as broker:
            count = len(broker.devices())
            obstacle = handshake.ping(directory, patience)
    except CubrokerError as error:
        there = os.path.lexists(directory / places.SESSION_SOCKET)
        code = error.code if there or error.code != "unavailable" else "absent"
        refuses = False
        if not isinstance(error, handshake.Silent):
            with suppress(CubrokerError):
                handshake.ping(directory, patience)
                refuses = True
        return BrokerFacts(code, error.message, refuses=refuses)
    return BrokerFacts("", f"a broker answers, with {format.count(count, 'device')}", obstacle)


def examine_directory(path: Path) -> DirectoryFacts:
    """Look at the directory where a broker serves, or would."""
    path = path.absolute()
    try:
        places.check(path)
        here = path.stat()
    except Invalid as error:
        return DirectoryFacts(path, invalid=error.message)
    except FileNotFoundError:
        above = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
        if not above.exists():  # a symbolic link to nothing, in which no folder can be made
            return DirectoryFacts(path, state="something else")
        closed = None if os.access(above, os.W_OK | os.X_OK, effective_ids=True) else above
        return DirectoryFacts(path, state="absent", exposed=_exposed(path, os.geteuid()), closed=closed)
    except PermissionError:
        return DirectoryFacts(path, state="hidden")
    except NotADirectoryError:
        return DirectoryFacts(path, state="something else")
    if not stat.S_ISDIR(here.st_mode):
        return DirectoryFacts(path, state="something else")
    enter = os.access(path, os.X_OK, effective_ids=True)
    exposed = _exposed(path, here.st_uid)
    return DirectoryFacts(path, owner=here.st_uid, mode=stat.S_IMODE(here.st_mode), exposed=exposed, enter=enter)


def _exposed(path: Path, owner: int) -> str:
    return places.exposure(path, owner, overflow_id("uid"))


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _find_container(root: Path, environ: Mapping[str, str]) -> str:
    """Return the kind of container that the traces on this machine are of; empty if there are none."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = _text(root / "proc/1/cgroup")
    if (root / ".dockerenv").exists() or "docker" in groups:
        return "docker"
    for trace, kind in (("kubepods", "kubernetes"), ("libpod", "podman"), ("containerd", "containerd"), ("lxc", "lxc")):
        if trace in groups:
            return kind
    return ""


def _refusal(opened: Callable[[], int]) -> str:
    """Return why a descriptor cannot be opened; empty if it can."""
    try:
        os.close(opened())
    except OSError as error:
        return reason(error)
    return ""


def _peer_pidfd() -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return not _refusal(lambda: ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))


# -- the service: commands of systemd and of the journal, a listening socket, a file of settings -------

MANAGERS = {"system": (), "user": ("--user",)}
"""The managers that may have the unit, and the option that chooses one."""

PROPERTIES = (
    *("LoadState", "LoadError", "ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts", "StatusText"),
    *("UnitFileState", "NeedDaemonReload", "ExecStart", "Environment", "FragmentPath"),
)

PATIENCE = 5.0
"""Seconds that a command of systemd, or of the journal, may take."""

LOG_LINES = 200
"""Lines of the log that are looked through, the newest ones."""

SYSLOG_ERROR = 3
"""The syslog level of errors; a smaller one is worse."""

SETTINGS_FILE = "/etc/cubroker/cubroker.toml"
"""Where `make install` puts the settings."""


def examine_unit(manager: str) -> UnitFacts | None:
    """Ask a manager of systemd for the broker's unit; None if it has no such unit, or does not run."""
    words = f"--property={','.join(PROPERTIES)}"
    answer = _output("systemctl", *MANAGERS[manager], "show", UNIT, words)
    told = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    if told.get("LoadState", "not-found") == "not-found":
        return None
    log = _output(
        "journalctl", *MANAGERS[manager], "--unit", UNIT, "-b", "-n", str(LOG_LINES), "-o", "json", "--no-pager"
    )
    return UnitFacts(
        manager=manager,
        loaded=told["LoadState"],
        why=told.get("LoadError", "").strip('"'),
        state=told.get("ActiveState", ""),
        phase=told.get("SubState", ""),
        result=told.get("Result", ""),
        status=_number(told.get("ExecMainStatus", "")),
        restarts=_number(told.get("NRestarts", "")),
        said=told.get("StatusText", ""),
        enabled=told.get("UnitFileState") in ("enabled", "enabled-runtime"),
        outdated=told.get("NeedDaemonReload") == "yes",
        file=_settings_file(told),
        path=told.get("FragmentPath", ""),
        error=last_error(log),
    )


def last_error(log: str) -> str:
    """Return the last line about an error of a log, as ``journalctl -o json`` prints it; empty if there is none.

    That a job failed is systemd's last line about a start, and says no reason: an earlier line that does comes first.
    """
    found = failed = ""
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message = entry.get("MESSAGE") if isinstance(entry, dict) else None
        if isinstance(message, str) and _is_error(message, str(entry.get("PRIORITY", ""))):
            if "JOB_RESULT" in entry:
                failed = message.strip()
            else:
                found = message.strip()
    return found or failed


def _is_error(message: str, priority: str) -> bool:
    if re.search(r" (ERROR|CRITICAL) ", message) or (priority.isdecimal() and int(priority) <= SYSLOG_ERROR):
        return True
    return message.startswith("cubroker: ") and not message.startswith("cubroker: serving ")


def examine_listener(directory: Path) -> ListenerFacts:
    """Find out whether a process listens where clients connect, and which."""
    path = directory / places.SESSION_SOCKET
    if not os.path.lexists(path):
        return ListenerFacts("absent")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.setblocking(False)
        try:
            asking.connect(os.fspath(path))
            # For a listening socket these are the credentials of the process that called listen(2) (unix(7)).
            raw = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        except BlockingIOError:  # the backlog is full
            return ListenerFacts("listening")
        except ConnectionRefusedError:
            return ListenerFacts("deserted")
        except OSError as error:
            return ListenerFacts("unknown", detail=explain(error))
    pid, _, _ = CREDENTIALS.unpack(raw)
    info = read_process(pid) if pid else None
    return ListenerFacts("listening", pid, info.name if info else "")


def examine_settings(unit: UnitFacts | None, environ: Mapping[str, str]) -> SettingsFacts | None:
    """Read the settings of the unit's file, of ``$CUBROKER_CONFIG``, or of the usual one; None: there is no file."""
    named = (unit.file if unit else "") or environ.get("CUBROKER_CONFIG", "") or SETTINGS_FILE
    path = Path(named)
    absent = _is_absent(path)
    if named == SETTINGS_FILE and absent and not (unit and unit.file):
        return None
    own = {} if unit and unit.file else dict(environ)  # the unit has an environment of its own
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        effective = ConfigSources(path, {}, own, descriptors).read()
    except InvalidConfig as error:
        readable = absent or os.access(path, os.R_OK, effective_ids=True)
        return SettingsFacts(named, tuple(error.complaints), readable=readable)
    return SettingsFacts(named, count=sum(value.origin != DEFAULT for value in effective.values.values()))


def _is_absent(path: Path) -> bool:
    """Whether there is no such file; False if this user may not search the folder."""
    try:
        path.stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return False


def _settings_file(told: Mapping[str, str]) -> str:
    """Return the file that a unit's command, or its environment, names."""
    command = re.search(r"argv\[\]=(.*?) ;", told.get("ExecStart", ""))
    option = re.search(r"--config[ =](\S+)", command[1]) if command else None
    variable = re.search(r"(?:^|\s)\"?CUBROKER_CONFIG=([^\s\"]+)", told.get("Environment", ""))
    return option[1] if option else variable[1] if variable else ""


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _output(program: str, *arguments: str) -> str:
    """Return what a command prints; nothing if it is not installed, fails, or takes too long."""
    if not (path := shutil.which(program)):
        return ""
    try:
        done = subprocess.run(  # noqa: S603
            [path, *arguments], capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
