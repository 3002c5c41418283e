"""SIGHUP: a broker reads its file again, and those whom it serves notice no more than what changed."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import Attach, Close, Create, Created, Done, Failed, Refused
from cubroker.server import main
from cubroker.server.broker import Broker
from cubroker.server.config.load import ConfigSources, Current
from cubroker.server.main import ServiceStatus
from tests.brokers import eventually
from tests.unit.server.clients import RawClient, connect, greet, session
from tests.unit.server.configured import Configured, configured

TWO_MIB = Layout.pack([("a", "U8", (2 << 20,))])


def create(client: RawClient, name: str, wait: float = 0.0) -> Create:
    return Create(name, TWO_MIB.encode(), (client.devices()[0].uuid,), "ipc", wait, None)


def budgets(client: RawClient) -> list[int]:
    return [device.budget for device in client.devices()]


def test_a_budget_shrinks_under_what_is_allocated_and_grows_again() -> None:
    with configured("budget = '4MiB'") as broker, session(broker.directory) as client:
        client.publish("a")
        client.publish("b")
        lease = client.attach("a").lease
        broker.reload("budget = '2MiB'")
        eventually(lambda: budgets(client) == [2 << 20, 2 << 20], "the new budget")
        assert client.devices()[0].allocated == 4 << 20
        assert client.attach("b").version == 1
        assert client.ask(create(client, "c"), Failed).code == "over_budget"
        waiting = client.send(create(client, "c", wait=60.0))
        client.devices()
        broker.reload("budget = '6MiB'")
        assert isinstance(client.answer(waiting), Created)
        client.ask(Close(lease), Done)


def test_a_quota_that_shrinks_ends_no_session_and_admits_none() -> None:
    with configured("") as broker, session(broker.directory) as one, session(broker.directory) as two:
        broker.reload("[quota]\nsessions = 1\nleases = 0\n[limits]\nwatches = 1")
        eventually(lambda: "quota.sessions is now 1" in broker.log(), "the new quota")
        with connect(broker.directory) as third:
            refused = greet(third)
        assert isinstance(refused, Refused)
        assert "has 2 sessions of a quota of 1" in refused.message
        assert one.devices()
        assert two.ask(Attach("a", 0, None, 0.0), Failed).code == "not_found"
        said = f"limits.watches is now 1 ({broker.file}:5); it was 1024 (default)"
        eventually(lambda: said in broker.log(), "the new limit")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keep = 5\nbudget = '2MiB", "is no TOML"),
        ("budget = '2MiB'\nkep = 1", ":2: there is no setting kep; did you mean keep?"),
        ("keep = 5\nbudget = '65MiB'", "and device 0 (cubroker host device 0) has 67108864"),
        ("budget = { 0 = '3MiB', 1 = '65MiB' }", "and device 1 (cubroker host device 1) has 67108864"),
        ("keep = 5\nbudget = { 7 = '2MiB', default = '2MiB' }", "a budget for device '7', which is not served"),
    ],
)
def test_a_file_that_makes_no_sense_changes_nothing_and_the_log_says_so(text: str, said: str) -> None:
    with configured("budget = '4MiB'") as broker, session(broker.directory) as client:
        broker.reload(text)
        eventually(lambda: "nothing has changed" in broker.log(), "a line in the log")
        (line,) = (line for line in broker.log().splitlines() if "nothing has changed" in line)
        assert "ERROR" in line
        assert said in line
        assert "budget 3 MiB" not in broker.log()
        assert budgets(client) == [4 << 20, 4 << 20]
        broker.reload("budget = '2MiB'\nkeep = 1")
        eventually(lambda: budgets(client) == [2 << 20, 2 << 20], "the new budget")
        changed = f"keep is now 1 ({broker.file}:2); it was 0 (default)"
        eventually(lambda: changed in broker.log(), "a line of what has changed")


def test_a_file_that_is_gone_changes_nothing() -> None:
    with configured("budget = '4MiB'") as broker, session(broker.directory) as client:
        text = broker.file.read_text()
        broker.file.unlink()
        broker.process.send_signal(signal.SIGHUP)
        eventually(lambda: f"cannot read the configuration {broker.file}" in broker.log(), "a line in the log")
        assert budgets(client) == [4 << 20, 4 << 20]
        broker.reload(text)
        eventually(lambda: "was read again: no change" in broker.log(), "another line in the log")
        broker.reload(f"{text}\nkeep = 1")
        eventually(lambda: "was read again: 1 setting differs" in broker.log(), "a third line in the log")


def test_what_needs_a_restart_is_said_and_stays() -> None:
    with configured("") as broker, session(broker.directory) as client:
        broker.reload("devices = 'host:1'\nkeep = 2\n[sockets]\nmode = 0o666")
        eventually(lambda: "was read again: 2 settings differ" in broker.log(), "what differs")
        said = f"WARNING sockets.mode would be 0o666 ({broker.file}:4), which needs a restart"
        assert f"{said}; until then it stays 0o600 (default)" in broker.log()
        assert "devices would be" not in broker.log()  # an option says what they are
        assert stat.S_IMODE((broker.directory / "session.sock").stat().st_mode) == 0o600
        assert len(client.devices()) == 2
        broker.reload("keep = 2\n[sockets]\nmode = 0o666")
        eventually(lambda: broker.log().count("needs a restart") == 2, "the same again")


def test_the_log_says_more_or_less_from_then_on() -> None:
    with configured("[log]\nlevel = 'error'") as broker:
        assert "INFO" not in broker.log()
        broker.reload("[log]\nlevel = 'debug'\nformat = 'json'")
        eventually(lambda: '"message": "log.level is now' in broker.log(), "lines of the new form")
        with session(broker.directory):
            eventually(lambda: f"(pid {os.getpid()}, " in broker.log(), "a line about a session")


class InBackground(Configured):
    """A broker that was started with SIGHUP ignored, as by ``nohup``."""

    def command(self) -> list[str]:
        ignore = "import os, signal, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-c", ignore, *super().command()]


@pytest.mark.slow
def test_a_broker_that_was_started_in_the_background_reads_its_file_again_too() -> None:
    with configured("", InBackground) as broker, session(broker.directory) as client:
        broker.reload("budget = '2MiB'")
        eventually(lambda: budgets(client) == [2 << 20, 2 << 20], "the new budget")


def test_users_are_looked_up_beside_the_loop_where_that_may_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cubroker.toml"
    file.write_text("admins = ['root']\n[quotas.root]\nsessions = 7")
    current, lookups = Current(ConfigSources(file)), list[int]()

    def look_up(name: str) -> pwd.struct_passwd:
        lookups.append(threading.get_ident())
        return pwd.getpwuid(0)

    monkeypatch.setattr(pwd, "getpwnam", look_up)
    asyncio.run(current.reload(lambda config: None))
    assert lookups
    assert threading.get_ident() not in lookups


@pytest.mark.parametrize("where", ["reloading", "reconfigure", "ready"])
def test_a_mistake_of_the_brokers_own_is_in_the_log_and_the_next_time_may_go_well(
    caplog: pytest.LogCaptureFixture, where: str
) -> None:
    outcomes = {where: [MemoryError()]}
    done = asyncio.Event()
    again = asyncio.Event()
    told: list[str] = []

    def try_it(step: str) -> None:
        told.append(step)
        for outcome in outcomes.pop(step, ()):
            again.set()
            raise outcome
        if step == "ready" and not outcomes and not again.is_set():
            done.set()

    class Service(ServiceStatus):
        def reloading(self) -> None:
            try_it("reloading")

        def ready(self) -> None:
            try_it("ready")

    async def reload() -> None:
        again.set()
        signals = cast(main.Signals, SimpleNamespace(reload=again))
        parts = cast(main.Parts, SimpleNamespace(reconfigure=lambda _: try_it("reconfigure")))
        service = Service(None, cast(Broker, None))
        reloading = asyncio.create_task(main._reload(Current(ConfigSources()), signals, parts, service))
        await asyncio.wait((reloading, asyncio.ensure_future(done.wait())), return_when=asyncio.FIRST_COMPLETED)
        assert done.is_set(), "the next signal is not waited for"
        reloading.cancel()

    asyncio.run(reload())
    assert "the broker failed at reading its configuration again" in caplog.text
    assert told[-3:] == ["reloading", "reconfigure", "ready"]
    assert told.count("ready") == told.count("reloading"), "the service manager waits for the end of each reload"
