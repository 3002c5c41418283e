"""Processes in words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cubroker.cli import client_format
from cubroker.protocol.status import ClientInfo, LeaseInfo, ProcessInfo
from cubroker.server.transport.unix_sockets import read_process
from tests.brokers import eventually

ID = "3f2a9c5d1e07" + "ab" * 26
CONTAINERS = Path(__file__).parents[2] / "containers.json"
"""Paths of cgroups, and the containers that commands and the page name for them."""

OWN = ClientInfo(7, os.getpid(), os.getuid(), "connected", ())


def client(cgroup: str | None) -> ClientInfo:
    return ClientInfo(1, 4711, 0, "connected", (), process=ProcessInfo("vllm", cgroup, 1000.0))


@pytest.mark.parametrize(("cgroup", "container"), json.loads(CONTAINERS.read_text()))
def test_a_container_has_the_name_that_its_runtime_shows(cgroup: str | None, container: str) -> None:
    assert client_format.container(client(cgroup).process) == container


def test_a_process_is_told_with_user_and_container() -> None:
    assert client_format.label(client(f"/docker/{ID}")) == "vllm 4711 (root, docker 3f2a9c5d1e07)"
    assert client_format.label(client(None)) == "vllm 4711 (root)"
    told = client_format.with_user(client(f"/docker/{ID}")), client_format.short(client(f"/docker/{ID}"))
    assert told == ("vllm 4711 (root)", "vllm 4711"), "where there is less room"
    assert client_format.label(ClientInfo(1, 4711, 0, "connected", ())) == "? 4711 (root)"


def test_ages_are_told_where_they_are_known() -> None:
    leases = LeaseInfo("a", 1, 1090.0), LeaseInfo("b", 1, 1060.0), LeaseInfo("c", 1)
    holder = ClientInfo(1, 4711, 0, "connected", leases, process=ProcessInfo("vllm", None, 1000.0))
    assert (client_format.age(holder, 1100.0), client_format.held(holder, 1100.0)) == ("100 s", "40 s")
    older = ClientInfo(1, 4711, 0, "connected", (LeaseInfo("a", 1),))
    assert (client_format.age(older, 1100.0), client_format.held(older, 1100.0)) == ("?", "?")
    assert client_format.held(OWN, 1100.0) == "-"


def test_processes_that_the_broker_could_not_see_are_looked_up_where_numbers_mean_the_same() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        hidden = ClientInfo(8, other.pid, os.getuid(), "connected", ())
        unseen = ClientInfo(9, 0, os.getuid(), "connected", ())
        eventually(lambda: (info := read_process(other.pid)) and info.name == "cat", "the program to begin")
        found = client_format.known([OWN, hidden, unseen, client("/x")], OWN.session)
        assert client_format.name(found[1]) == "cat"
        assert (found[2], found[3]) == (unseen, client("/x"))
        elsewhere = ClientInfo(7, os.getpid() + 1, os.getuid(), "connected", ())
        for own in ([elsewhere], []):
            assert client_format.known([*own, hidden], OWN.session) == [*own, hidden]
        other.communicate()
