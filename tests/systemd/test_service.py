"""The service under a systemd of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.brokers import eventually
from tests.checkpoints import filled, write
from tests.systemd.clients import Client
from tests.systemd.lab import Lab, release
from tests.systemd.service import EITHER, SERVICE, SETTINGS, SOCKETS, STANDING_BY, TEXT, Service

pytestmark = pytest.mark.slow


def test_a_service_that_has_started_serves_and_says_how_it_fares(service: Service) -> None:
    assert service.pools() == []
    assert service.lab.show(SERVICE, "StatusText").startswith("0 versions, ")
    service.says("serving")


def test_whoever_connects_before_the_broker_runs_starts_it(service: Service) -> None:
    service.stop()
    service.lab.systemctl("start", *SOCKETS)
    assert service.pid == 0
    assert service.pools() == []
    assert service.pid


CLIENTS = "cubroker-clients"
LOADER = "cubroker-loader"
ALICE, BOB = "2001", "2002"
"""Users with a group of the same number each."""


def as_user(lab: Lab, user: str, groups: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``cubroker`` as a user, in the user's own group and in ``groups``, if there are any."""
    identity = (f"--reuid={user}", f"--regid={user}", f"--groups={groups}" if groups else "--clear-groups")
    return lab.run("setpriv", *identity, "cubroker", "--directory", "/run/cubroker", *arguments, check=False)


def listed(lab: Lab, user: str, groups: str) -> list[str]:
    """Return the pools that ``cubroker ls`` shows to a user."""
    done = as_user(lab, user, groups, "ls", "--json")
    assert done.returncode == 0, done.stderr
    return [pool["name"] for pool in json.loads(done.stdout)]


@pytest.fixture
def model(lab: Lab, tmp_path: Path) -> str:
    """A checkpoint inside the lab that everybody may read."""
    path = write(tmp_path / "tiny.safetensors", filled([("weight", "F32", (16, 16))]))
    lab.run("install", "-D", "--mode=644", path, "/opt/models/readable.safetensors")
    return "/opt/models/readable.safetensors"


def test_members_of_the_clients_group_may_connect_and_others_may_not(service: Service) -> None:
    assert listed(service.lab, ALICE, CLIENTS) == []
    for groups in ("", "cubroker", LOADER):
        refused = as_user(service.lab, ALICE, groups, "ls")
        assert refused.returncode == 1, groups
        assert f"its socket is for the group {CLIENTS}" in refused.stderr


def test_a_640_pool_of_one_user_is_hidden_from_another_who_may_connect(service: Service, model: str) -> None:
    lab = service.lab
    loaded = as_user(lab, ALICE, CLIENTS, "load", "secret", model, "--share", "vmm", "--mode", "640")
    assert loaded.returncode == 0, loaded.stderr
    assert listed(lab, ALICE, CLIENTS) == ["secret"]
    assert listed(lab, BOB, CLIENTS) == []
    assert listed(lab, BOB, f"{CLIENTS},{ALICE}") == ["secret"], "of alice's group"
    for command in (["show", "secret"], ["verify", "secret", model], ["retire", "secret"]):
        refused = as_user(lab, BOB, CLIENTS, *command)
        assert (refused.returncode, refused.stdout) == (1, ""), command


def test_a_preloaded_pool_is_that_of_a_user_who_only_loads(service: Service, model: str) -> None:
    lab, unit = service.lab, "cubroker-load@hidden.service"
    lab.write("/etc/cubroker/load/hidden.conf", f"MODEL={model}\nOPTIONS=--share vmm --mode 640\n")
    lab.systemctl("start", unit)
    (pool,) = service.pools()
    assert (pool["name"], pool["owner"]) == ("hidden", int(lab.run("id", "-u", LOADER).stdout))
    assert listed(lab, BOB, CLIENTS) == []
    again = as_user(lab, LOADER, CLIENTS, "load", "hidden", model, "--share", "vmm")
    assert again.returncode == 0, again.stderr
    for command in (["retire", "hidden"], ["load", "hidden", model, "--share", "vmm"]):
        assert as_user(lab, BOB, CLIENTS, *command).returncode == 1, command
    assert as_user(lab, LOADER, CLIENTS, "drain").returncode == 1, "it is no administrator"
    assert as_user(lab, ALICE, CLIENTS, "load", "other", model, "--share", "vmm").returncode == 0
    assert as_user(lab, LOADER, CLIENTS, "retire", "other").returncode == 1, "and has no say in pools of others"
    lab.systemctl("stop", unit)


def test_a_team_reads_the_640_pool_that_is_preloaded_with_its_group(service: Service, model: str) -> None:
    lab, unit = service.lab, "cubroker-load@team.service"
    lab.run("groupadd", "--force", "team")
    lab.write("/etc/cubroker/load/team.conf", f"MODEL={model}\nOPTIONS=--share vmm --mode 640\n")
    lab.write(f"/run/systemd/system/{unit}.d/test.conf", "[Service]\nGroup=team\n")
    lab.systemctl("daemon-reload")
    lab.systemctl("start", unit)
    assert listed(lab, ALICE, f"{CLIENTS},team") == ["team"]
    assert listed(lab, BOB, CLIENTS) == []
    lab.systemctl("stop", unit)


def test_the_brokers_user_can_put_nothing_where_systemd_makes_and_chowns_the_sockets(service: Service) -> None:
    lab = service.lab
    assert lab.run("stat", "--format=%U:%G %a", "/run/cubroker").stdout == "root:root 755\n"
    sockets = ("/run/cubroker/session.sock", "/run/cubroker/broker.zmq")
    assert lab.run("stat", "--format=%U:%G %a", *sockets).stdout == f"cubroker:{CLIENTS} 660\n" * 2
    broker = ("setpriv", "--reuid=cubroker", "--regid=cubroker", "--clear-groups")
    for command in (["ln", "--symbolic", "/etc/shadow", "/run/cubroker/link"], ["rm", "--force", *sockets]):
        refused = lab.run(*broker, *command, check=False)
        assert refused.returncode, command
        assert "Permission denied" in refused.stderr
    service.killed()  # and it needs no more than that
    assert service.pools() == []


def filters(lab: Lab, pid: int) -> int:
    """Return how many system call filters a process has."""
    status = lab.run("cat", f"/proc/{pid}/status").stdout
    return int(re.findall(r"^Seccomp_filters:\s*(\d+)$", status, re.MULTILINE)[0])


@EITHER
def test_the_gateway_confines_itself_within_the_filter_of_the_unit(service: Service) -> None:
    lab = service.lab
    assert service.pools() == []  # the gateway has answered
    (gateway,) = map(int, lab.run("pgrep", "--parent", str(service.pid)).stdout.split())
    assert filters(lab, gateway) == filters(lab, service.pid) + 1
    lab.run("journalctl", "--sync")
    started = lab.run("journalctl", "--no-pager", "--output=cat", f"_PID={service.pid}").stdout
    assert "serving on" in started
    assert "confined less than it could be" not in started


FORBIDDEN = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PIDFD_GETFD = 16, 438
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
word = ctypes.create_string_buffer(8)
piece = ctypes.byref(Piece(ctypes.addressof(word), 8))
attempts = {
    "process_vm_readv": lambda: libc.process_vm_readv(os.getpid(), piece, 1, piece, 1, 0),
    "process_vm_writev": lambda: libc.process_vm_writev(os.getpid(), piece, 1, piece, 1, 0),
    "ptrace": lambda: libc.ptrace(PTRACE_ATTACH, 2**22 - 1, None, None),
    "pidfd_getfd": lambda: libc.syscall(PIDFD_GETFD, -1, 0, 0),
}
for name, attempt in attempts.items():
    print(name, "was", errno.errorcode[ctypes.get_errno()] if attempt() < 0 else "allowed", flush=True)
"""


@pytest.mark.parametrize("unit", [SERVICE, "cubroker-load@spy.service"])
def test_nothing_of_a_unit_reads_or_writes_the_memory_of_another_process(
    service: Service, model: str, unit: str
) -> None:
    lab = service.lab
    lab.write("/opt/spy.py", FORBIDDEN)
    lab.write("/etc/cubroker/load/spy.conf", f"MODEL={model}\nOPTIONS=--share vmm\n")
    lab.write(f"/run/systemd/system/{unit}.d/spy.conf", "[Service]\nExecStartPre=/opt/python/bin/python3 /opt/spy.py\n")
    lab.systemctl("daemon-reload")
    try:
        lab.systemctl("restart", unit)
        for name in ("process_vm_readv", "process_vm_writev", "ptrace", "pidfd_getfd"):
            eventually(lambda name=name: f"{name} was EPERM" in lab.log(unit), f"{name} to be refused")
    finally:
        lab.run("rm", f"/run/systemd/system/{unit}.d/spy.conf")
        lab.systemctl("daemon-reload")


def test_a_broker_that_hangs_is_started_again_with_what_it_had(service: Service) -> None:
    service.configure("[Service]\nWatchdogSec=2\n")
    service.lab.systemctl("restart", SERVICE)
    service.publish("held")
    with Client(service.lab, "hold", "held") as holder:
        assert service.lab.show(SERVICE, "TimeoutAbortUSec") == "5s"  # as `cubroker keep` waits before it kills
        service.signal(signal.SIGSTOP)
        eventually(lambda: service.starts_again, "the watchdog to act")
        service.serves()
        assert holder.ask() == ["held", 1]
        (pool,) = service.pools()
        assert (pool["name"], pool["leases"]) == ("held", 1)
    service.says("Watchdog timeout")
    service.says("most recent call first")  # where it hung


def dies(service: Service) -> None:
    service.signal(signal.SIGKILL)


def hangs(service: Service) -> None:
    service.signal(signal.SIGSTOP)


def keeper_dies(service: Service) -> None:
    service.lab.run("kill", "-KILL", str(service.main))


def keeper_hangs(service: Service) -> None:
    service.lab.run("kill", "-STOP", str(service.main))


@STANDING_BY
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (dies, "was killed by SIGKILL"),
        (hangs, "gave no sign of life in time, and is aborted"),
        (keeper_dies, "Main process exited, code=killed, status=9/KILL"),
        (keeper_hangs, "Watchdog timeout"),
    ],
)
def test_a_broker_is_replaced_by_the_one_that_stands_by_and_a_keeper_by_systemd(
    service: Service, fails: Callable[[Service], None], said: str
) -> None:
    service.stand_by("--watchdog", "2")
    service.configure("[Service]\nWatchdogSec=2\n")
    service.lab.systemctl("restart", SERVICE)
    service.publish("held")
    with Client(service.lab, "hold", "held") as holder, Client(service.lab, "attaching", "held") as worker:
        service.stands_by()
        main, broker, restarts = service.main, service.pid, service.starts_again
        fails(service)
        service.replaces(broker)
        by_systemd = fails in (keeper_dies, keeper_hangs)
        assert (service.main != main, service.starts_again - restarts) == (by_systemd, by_systemd)
        assert holder.ask() == ["held", 1]
        turns, _ = worker.ask()
        assert turns
        (pool,) = service.pools()
        assert (pool["name"], pool["leases"]) == ("held", 1)
        service.says(said)
        if not by_systemd:
            service.says("which stood by, starts again")
        eventually(lambda: service.lab.show(SERVICE, "StatusText").startswith("1 version, "), "the broker's status")


@STANDING_BY
def test_a_broker_that_the_kernel_kills_for_want_of_memory_is_its_keepers_to_replace(service: Service) -> None:
    assert service.lab.show(SERVICE, "OOMPolicy") == "continue"


@contextmanager
def stopped(lab: Lab) -> Iterator[None]:
    """Have systemd do nothing for the length of a block, as if the machine were busy."""
    os.kill(int(lab.pid), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(int(lab.pid), signal.SIGCONT)


def has_ended(lab: Lab, pid: int) -> bool:
    """Whether a process has ended; it may not have been reaped."""
    stat = lab.run("cat", f"/proc/{pid}/stat", check=False).stdout
    return not stat or stat.rpartition(")")[2].split()[0] == "Z"


@EITHER
def test_systemd_reads_later_what_a_broker_said_before_it_was_killed(service: Service) -> None:
    service.publish("old")
    service.publish("held")
    with Client(service.lab, "hold", "held") as holder:
        if service.kept:
            service.stands_by()
        broker = service.pid
        with stopped(service.lab):
            assert service.publish("new") == 1
            service.cubroker("retire", "old")
            service.lab.run("kill", "-KILL", str(broker))
            eventually(lambda: has_ended(service.lab, broker), "the broker's end")
        service.replaces(broker)
        broker = service.pid
        service.lab.run("kill", "-KILL", str(service.main))
        service.replaces(broker)
        assert sorted(pool["name"] for pool in service.pools()) == ["held", "new"]
        assert holder.ask() == ["held", 1]
        stored = len({"ledger"}) + 2 + 2 * 2  # the holder's session, and two pools on two devices
        eventually(lambda: service.stored == stored, f"systemd to have {stored} descriptors")


@EITHER
def test_a_restart_keeps_pools_and_leases_and_workers_go_on(service: Service) -> None:
    service.publish("held")
    with Client(service.lab, "hold", "held") as holder, Client(service.lab, "attaching", "held") as worker:
        before, said = service.pid, service.lab.log(SERVICE).count("draining")
        service.lab.systemctl("restart", SERVICE)
        assert service.pid != before
        assert service.lab.log(SERVICE).count("draining") == said, "nothing of that goes with the broker"
        assert holder.ask() == ["held", 1]
        turns, _ = worker.ask()
        assert turns
        (pool,) = service.pools()
        assert (pool["name"], pool["leases"]) == ("held", 1)


def test_a_worker_that_died_while_no_broker_ran_is_found_out(service: Service) -> None:
    service.publish("held")
    with Client(service.lab, "hold", "held") as holder, Client(service.lab, "hold", "held"):
        service.configure("[Service]\nExecStartPre=/bin/sh -c 'while [ ! -e /run/go ]; do sleep 0.01; done'\n")
        service.signal(signal.SIGKILL)
        eventually(lambda: service.lab.show(SERVICE, "SubState") == "start-pre", "the broker to be away")
        service.lab.run("kill", "-KILL", str(holder.said))
        service.lab.run("touch", "/run/go")
        service.serves()
        eventually(lambda: [pool["leases"] for pool in service.pools()] == [1], "the lease to fall")
    service.lab.run("rm", "/run/go")


@EITHER
def test_stopped_and_started_it_has_what_systemd_keeps_and_workers_keep_their_memory(service: Service) -> None:
    service.publish("held")
    kept = service.lab.run("systemctl", "show", "--property=FileDescriptorStorePreserve", SERVICE).stdout
    if release() == 254:
        pytest.skip("systemd 254 starts no stopped socket while anything is stored")
    service.lab.run("systemctl", "enable", SERVICE)
    service.lab.write(SETTINGS, TEXT + "[shutdown]\ndrain_seconds = 0.1\n")
    service.lab.systemctl("reload", SERVICE)
    with Client(service.lab, "hold", "held") as holder:
        service.lab.systemctl("stop", SERVICE, *SOCKETS)
        service.says("draining; what is held: held@1")
        assert service.pid == 0
        service.start()
        assert [pool["name"] for pool in service.pools()] == (["held"] if "yes" in kept else [])
        assert holder.ask() == ["held", 1]


@EITHER
def test_a_reload_takes_new_settings_and_refuses_wrong_ones(service: Service) -> None:
    before = service.pid
    service.lab.write(SETTINGS, TEXT + "keep = 3\n")
    service.lab.systemctl("reload", SERVICE)
    service.says("keep is now 3")
    service.lab.write(SETTINGS, TEXT + "kepp = 3\n")
    assert service.lab.run("systemctl", "reload", SERVICE, check=False).returncode
    service.says("there is no setting kepp")
    assert service.pid == before
    assert service.pools() == []


def attempts(service: Service) -> list[float]:
    """Return when systemd has started the broker, in seconds since the host's boot."""
    service.lab.run("journalctl", "--sync")
    show = ("journalctl", "--no-pager", "--output=short-monotonic", "--unit", SERVICE, "--grep", "^Starting")
    return [float(found) for found in re.findall(r"^\[ *([0-9.]+)\]", service.lab.run(*show).stdout, re.MULTILINE)]


@EITHER
def test_a_mistake_in_the_settings_is_named_within_seconds_tried_at_intervals_and_mended_by_a_restart(
    service: Service,
) -> None:
    service.publish("held")
    with Client(service.lab, "hold", "held") as holder:
        before = len(attempts(service))
        service.lab.write(SETTINGS, TEXT + "kepp = 3\n")
        assert service.lab.run("systemctl", "restart", SERVICE, check=False).returncode
        listed = service.lab.run("cubroker", "ls", check=False)
        assert (listed.returncode, listed.stdout) == (3, "")
        assert "did not answer within 3 s: its socket listens" in listed.stderr
        assert "see `systemctl status cubroker`, and check its settings with `cubroker config check" in listed.stderr
        checked = service.lab.run("cubroker", "config", "check", SETTINGS, check=False)
        assert checked.stderr.endswith("there is no setting kepp; did you mean keep?\n")
        assert "there is no setting kepp" in service.lab.run("systemctl", "status", SERVICE, check=False).stdout
        eventually(lambda: len(attempts(service)) >= before + 3, "systemd to try again")
        tried = attempts(service)[before:]
        assert min(later - earlier for earlier, later in pairwise(tried)) > 5
        assert service.lab.show(SOCKETS[0], "ActiveState") == "active", "whoever connects may wait for it"
        service.lab.write(SETTINGS, TEXT)
        service.lab.systemctl("restart", SERVICE)
        assert holder.ask() == ["held", 1]
        (pool,) = service.pools()
        assert (pool["name"], pool["leases"]) == ("held", 1)


def test_metrics_on_a_port_and_ipc_pools_on_host_devices_take_the_drop_in_for_the_network(service: Service) -> None:
    drop_in = "/usr/local/share/doc/cubroker/network.conf"
    service.configure(service.lab.run("cat", drop_in).stdout)
    token = "0123456789abcdef"
    service.lab.write("/etc/cubroker/token", token)
    service.lab.run("chown", "cubroker", "/etc/cubroker/token")
    service.lab.run("chmod", "600", "/etc/cubroker/token")
    metrics = '[metrics]\nlisten = "127.0.0.1:9464"\ntoken_file = "/etc/cubroker/token"\n'
    service.lab.write(SETTINGS, TEXT + metrics)
    service.lab.systemctl("restart", SERVICE)
    asked = f"r.Request('http://127.0.0.1:9464/metrics', headers={{'Authorization': 'Bearer {token}'}})"
    read = f"import urllib.request as r; print(r.urlopen({asked}).read().decode())"
    assert "cubroker_sessions" in service.lab.run("/opt/python/bin/python3", "-c", read).stdout
    with Client(service.lab, "publish", "ipc", "ipc") as publisher:
        assert publisher.said == 1


def test_metrics_on_a_unix_socket_are_for_the_group_that_the_settings_name(service: Service) -> None:
    service.configure("[Service]\nSupplementaryGroups=users\n")
    listen = "[metrics]\nlisten = 'unix:/run/cubroker/metrics/http.sock'\ngroup = 'users'\n"
    service.lab.write(SETTINGS, TEXT + listen)
    service.lab.systemctl("restart", SERVICE)
    assert service.lab.run("stat", "--format=%G %a", "/run/cubroker/metrics/http.sock").stdout == "users 660\n"


def test_a_pool_is_loaded_at_boot_tried_again_until_it_can_be_and_there_when_its_unit_is_done(
    service: Service, tmp_path: Path
) -> None:
    unit = "cubroker-load@tiny.service"
    service.lab.write("/etc/cubroker/load/tiny.conf", "MODEL=/opt/models/tiny.safetensors\nOPTIONS=--no-durable\n")
    service.lab.write(f"/run/systemd/system/{unit}.d/test.conf", "[Service]\nRestartSec=100ms\n")
    service.lab.systemctl("daemon-reload")
    service.lab.systemctl("enable", unit)
    service.lab.systemctl("start", "--no-block", unit)
    eventually(lambda: service.lab.show(unit, "NRestarts") != "0", "the load to be tried again")
    assert service.pools() == []
    model = write(tmp_path / "tiny.safetensors", filled([("weight", "F32", (16, 16))]))
    service.lab.run("install", "-D", model, "/opt/models/tiny.safetensors")
    eventually(lambda: service.lab.show(unit, "ActiveState") == "active", "the load to be done")
    assert [pool["state"] for pool in service.pools()] == ["current"]
    service.killed()  # with a pool that is not durable
    eventually(lambda: [pool["state"] for pool in service.pools()] == ["current"], "the pool to be loaded again")
    service.lab.systemctl("disable", "--now", unit)
