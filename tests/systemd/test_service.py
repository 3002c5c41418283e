"""The service under a systemd of its own."""

from __future__ import annotations

import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.brokers import eventually
from tests.checkpoints import filled, write
from tests.systemd.clients import Client
from tests.systemd.lab import release
from tests.systemd.service import SERVICE, SETTINGS, SOCKETS, TEXT, Service

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


def test_members_of_the_group_may_connect_and_others_may_not(service: Service) -> None:
    reach = ("cubroker", "--directory", "/run/cubroker", "ls", "--json")
    nobody = ("setpriv", "--reuid=65534", "--clear-groups")
    assert service.lab.run(*nobody, "--regid=cubroker", *reach).stdout.strip() == "[]"
    refused = service.lab.run(*nobody, "--regid=65534", *reach, check=False)
    assert refused.returncode
    assert "may not" in refused.stderr or "denied" in refused.stderr.lower(), refused.stderr


def test_a_broker_that_hangs_is_started_again_with_what_it_had(service: Service) -> None:
    service.configure("[Service]\nWatchdogSec=2\n")
    service.lab.systemctl("restart", SERVICE)
    service.publish("held")
    with Client(service.lab, "hold", "held") as holder:
        service.signal(signal.SIGSTOP)
        eventually(lambda: service.starts_again, "the watchdog to act")
        service.serves()
        assert holder.ask() == ["held", 1]
        (pool,) = service.pools()
        assert (pool["name"], pool["leases"]) == ("held", 1)
    service.says("Watchdog timeout")
    service.says("most recent call first")  # where it hung


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
    service.lab.write(SETTINGS, TEXT + '[metrics]\nlisten = "127.0.0.1:9464"\n')
    service.lab.systemctl("restart", SERVICE)
    read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
    assert "cubroker_sessions" in service.lab.run("/opt/python/bin/python3", "-c", read).stdout
    with Client(service.lab, "publish", "ipc", "ipc") as publisher:
        assert publisher.said == 1


def test_metrics_on_a_unix_socket_are_for_the_group_that_the_settings_name(service: Service) -> None:
    service.configure("[Service]\nSupplementaryGroups=users\n")
    listen = "[metrics]\nlisten = 'unix:/run/cubroker/sight'\n"
    service.lab.write(SETTINGS, TEXT + "[sockets]\ngroup = 'users'\n" + listen)
    service.lab.systemctl("restart", SERVICE)
    assert service.lab.run("stat", "--format=%G %a", "/run/cubroker/sight").stdout == "users 660\n"


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
