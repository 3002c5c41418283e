"""The broker as a service: its unit, the last error in its log, its socket, and its settings.

It runs the commands of systemd and of the journal, with a time limit; if they are not installed, it reports nothing.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cubroker.cli import format
from cubroker.cli.doctor.facts import BrokerFacts, ListenerFacts, ServiceFacts, SettingsFacts, UnitFacts
from cubroker.protocol import paths as places
from cubroker.protocol.errors import explain
from cubroker.server.config.load import DEFAULT, ConfigSources, InvalidConfig
from cubroker.server.transport.peer_credentials import read_process
from cubroker.server.transport.unix_sockets import CREDENTIALS

NAME = "cubroker"
UNIT = f"{NAME}.service"

MANAGERS = {"system": (), "user": ("--user",)}
"""The managers that may have the unit, and the option that chooses one."""

PROPERTIES = (
    *("LoadState", "LoadError", "ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts", "StatusText"),
    *("UnitFileState", "NeedDaemonReload", "ExecStart", "Environment", "FragmentPath"),
)

PATIENCE = 5.0
"""Seconds that systemd, or the journal, may take."""

RECENT = 200
"""Lines of the log that are looked through, the newest ones."""

ERROR = 3
"""The syslog level of errors; a smaller one is worse."""

FILE = "/etc/cubroker/cubroker.toml"
"""Where `make install` puts the settings."""


def examine(directory: Path, environ: Mapping[str, str] = os.environ) -> ServiceFacts:
    """Look at the unit, its log, the socket in ``directory``, and the settings that a broker would have."""
    unit = next(filter(None, map(examine_unit, MANAGERS)), None)
    return ServiceFacts(unit, examine_listener(directory), examine_settings(unit, environ))


def examine_unit(manager: str) -> UnitFacts | None:
    """Ask a manager of systemd for the broker's unit; None if it has no such unit, or does not run."""
    words = f"--property={','.join(PROPERTIES)}"
    answer = _ask("systemctl", *MANAGERS[manager], "show", UNIT, words)
    told = dict(line.split("=", 1) for line in answer.splitlines() if "=" in line)
    if told.get("LoadState", "not-found") == "not-found":
        return None
    log = _ask("journalctl", *MANAGERS[manager], "--unit", UNIT, "-b", "-n", str(RECENT), "-o", "json", "--no-pager")
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
    """Return the last line about an error of a log, as ``journalctl -o json`` prints it; empty if there is none."""
    found = ""
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        message = entry.get("MESSAGE") if isinstance(entry, dict) else None
        if isinstance(message, str) and _is_error(message, str(entry.get("PRIORITY", ""))):
            found = message.strip()
    return found


def _is_error(message: str, priority: str) -> bool:
    if re.search(r" (ERROR|CRITICAL) ", message) or (priority.isdecimal() and int(priority) <= ERROR):
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
    named = (unit.file if unit else "") or environ.get("CUBROKER_CONFIG", "") or FILE
    path = Path(named)
    absent = _is_absent(path)
    if named == FILE and absent and not (unit and unit.file):
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


def _ask(program: str, *arguments: str) -> str:
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


# -- judging -------------------------------------------------------------------------------------------

Cases = tuple[tuple[object, bool | None, str, str], ...]

SHOWN = 3
"""Complaints about the settings that are shown."""


def cases(service: ServiceFacts, broker: BrokerFacts) -> dict[str, Cases]:
    """Return what can be wrong with a service, by check, for :func:`verdicts.judge_machine`."""
    checks: dict[str, Cases] = {}
    if service.unit is not None:
        checks["service"] = _unit(service.unit)
        error = service.unit.error
        bad = False if service.unit.state != "active" else None
        checks["last error"] = ((error, bad, f"the service's log says: {error}", f"`{_journal(service.unit)}`"),)
    if broker.code:
        checks["socket"] = _listener(service)
    if service.settings is not None:
        checks["settings"] = _settings(service.settings)
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


def _listener(service: ServiceFacts) -> Cases:
    found = service.listener
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
