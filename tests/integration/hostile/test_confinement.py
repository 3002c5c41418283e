"""Processes of the broker's own user, and code that runs in its gateway, reach for what the broker holds."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.server import hardening
from tests.brokers import PATIENCE, BrokerProcess, started
from tests.integration.hostile import intruder
from tests.integration.hostile.test_keep import child
from tests.unit.server.processes import gateway_of

BARE = ("setpriv", "--bounding-set=-all") if os.geteuid() == 0 else ()
"""What takes all capabilities from the command behind it: root is a user like any other then."""


class BareBroker(BrokerProcess):
    """A broker without capabilities, under a ``cubroker keep`` that has none either."""

    def command(self) -> list[str]:
        return [*BARE, sys.executable, "-m", "cubroker.cli", "keep", "--", *super().command()]


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, int]]:
    """A keeper, its broker and that one's gateway, by what they are."""

    with started(BareBroker) as keeper:
        broker = child(keeper.pid)
        yield {"keeper": keeper.pid, "broker": broker, "gateway": gateway_of(broker)}


def intrude(*arguments: str) -> dict[str, list[str]]:
    """Run an intruder of the broker's user, and return what it could do, by the name of each target."""
    command = [*BARE, sys.executable, intruder.__file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_a_process_of_the_same_user_opens_reads_and_traces_none_of_a_brokers(processes: dict[str, int]) -> None:
    reached = intrude(*(f"{name}={pid}" for name, pid in processes.items()))
    assert reached.pop("its own child") == sorted(intruder.ATTACKS), "the intruder does not know its trade"
    assert reached == {"keeper": [], "broker": [], "gateway": []}


def test_a_broker_and_its_gateway_leave_no_core_dump_and_the_gateway_gains_no_rights(processes: dict[str, int]) -> None:
    for pid in processes.values():
        assert resource.prlimit(pid, resource.RLIMIT_CORE)[0] == 0
    assert "NoNewPrivs:\t1\n" in Path(f"/proc/{processes['gateway']}/status").read_text()


@pytest.mark.skipif(bool(hardening.obstacles()), reason="; ".join(hardening.obstacles()))
@pytest.mark.parametrize("in_advance", [False, True])
def test_code_that_runs_in_a_gateway_reaches_neither_its_broker_nor_a_file_nor_a_network(
    processes: dict[str, int], tmp_path: Path, in_advance: bool
) -> None:
    assert intrude_as_gateway(processes["broker"], tmp_path / "requests", in_advance=in_advance) == []


@pytest.mark.skipif(bool(hardening.obstacles()), reason="; ".join(hardening.obstacles()))
@pytest.mark.parametrize(("without", "denied"), [("restrict_files", None), ("filter_calls", intruder.FILES)])
def test_either_part_of_the_confinement_alone_keeps_a_gateway_from_files(
    processes: dict[str, int], tmp_path: Path, without: str, denied: set[str] | None
) -> None:
    through = intrude_as_gateway(processes["broker"], tmp_path / "requests", without=without)
    assert denied.isdisjoint(through) if denied else through == []


def intrude_as_gateway(broker: int, path: Path, *, in_advance: bool = False, without: str = "") -> list[str]:
    """Run an intruder that is a gateway of the broker, and return what it could do."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        given: tuple[Path, ...] = ()
        if in_advance:
            inherited: tuple[int, ...] = (theirs.fileno(),)
            socket.send_fds(ours, [os.fsencode(path)], [listener.fileno()])
        else:
            inherited, given = (theirs.fileno(), listener.fileno()), (path,)
        command = [*BARE, sys.executable, intruder.__file__, *map(str, (broker, *inherited, *given))]
        env = os.environ | {"INTRUDER_WITHOUT": without}
        done = subprocess.run(
            command, env=env, stdout=subprocess.PIPE, pass_fds=inherited, timeout=PATIENCE, check=True
        )
    return list(json.loads(done.stdout))
