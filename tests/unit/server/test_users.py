"""Real processes of several users, over real sockets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cubroker.driver.driver import load
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import Attach, Close, Done, Failed, Refused
from tests.brokers import eventually
from tests.unit.server.clients import ROOT, connect, greet, session
from tests.unit.server.configured import configured
from tests.unit.server.processes import descriptors
from tests.unit.server.visitor import visiting

ALICE, BOB, EVE = 4001, 4002, 4003
STAFF = 5000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as other users")


@pytest.mark.slow
@needs_root
def test_a_pool_is_for_whom_its_mode_says() -> None:
    text = f'mode = 0o640\nadmins = [{EVE}]\n[sockets]\nmode = 0o666\n[log]\nformat = "json"'
    with (
        configured(text) as broker,
        visiting(broker.directory, ALICE, STAFF) as alice,
        visiting(broker.directory, BOB, BOB, STAFF) as mate,
        visiting(broker.directory, BOB, BOB) as stranger,
        visiting(broker.directory, EVE, EVE) as admin,
    ):
        assert alice("publish", "llama") == 1
        for user in (alice, mate, admin):
            assert user("attach", "llama") == [1, ALICE % 251]
            (pool,) = user("pools")
            assert (pool["owner"], pool["group"], pool["mode"]) == (ALICE, STAFF, 0o640)
        assert stranger("pools") == []
        code, message = stranger.refused("attach", "llama")
        assert code == "denied"
        assert f"user {BOB} may not attach to llama" in message
        assert mate.refused("publish", "llama")[0] == "denied"
        assert mate.refused("retire", "llama")[0] == "denied"
        assert alice("publish", "llama", 0o660) == 2
        assert mate("publish", "llama") == 3
        assert admin("retire", "llama") == ["Retirement", 3, 0]
        denied = '"code": "denied"'
        eventually(lambda: broker.log().count(denied) == 3, "three lines in the log")
        told = [json.loads(line) for line in broker.log().splitlines() if denied in line]
        assert f"(user {BOB}) was refused: user {BOB} may not attach to llama" in told[0]["message"]
        assert [(line["level"], line["uid"], line["pool"]) for line in told] == [("warning", BOB, "llama")] * 3
        assert all(line["session"] and line["request"] for line in told)


@needs_root
def test_a_pool_is_its_owners_alone_with_the_settings_that_are_shipped() -> None:
    text = (ROOT / "deploy" / "cubroker.toml").read_text().replace("#mode = 0o600", "mode = 0o666")
    with (
        configured(text) as broker,
        visiting(broker.directory, ALICE, STAFF) as alice,
        visiting(broker.directory, BOB, STAFF) as mate,
    ):
        assert alice("publish", "llama") == 1
        assert alice("attach", "llama") == [1, ALICE % 251]
        assert mate.refused("attach", "llama")[0] == "denied"
        assert mate("pools") == []
        assert alice("publish", "shared", 0o644) == 1
        assert mate("attach", "shared") == [1, ALICE % 251]


@pytest.mark.slow
@needs_root
def test_who_is_refused_all_the_time_does_not_fill_the_log() -> None:
    with (
        configured("mode = 0o600\n[sockets]\nmode = 0o666") as broker,
        visiting(broker.directory, ALICE, ALICE) as alice,
        visiting(broker.directory, BOB, BOB) as bob,
    ):
        alice("publish", "llama")
        for _ in range(200):
            assert bob.refused("attach", "llama")[0] == "denied"
        broker.stop()
        assert 0 < broker.log().count("may not attach") < 100


@needs_root
def test_a_user_that_uses_up_its_quota_leaves_that_of_others_untouched() -> None:
    text = f"keep = 1\n[sockets]\nmode = 0o666\n[quota]\nmemory = '4MiB'\nsessions = 1\n[quotas.{EVE}]\nmemory = 0"
    with (
        configured(text) as broker,
        visiting(broker.directory, ALICE, ALICE) as alice,
        visiting(broker.directory, ALICE, ALICE) as again,
        visiting(broker.directory, BOB, BOB) as bob,
        visiting(broker.directory, EVE, EVE) as eve,
    ):
        assert [alice("publish", name) for name in ("a", "a")] == [1, 2]
        assert alice("attach", "a", 1) == [1, ALICE % 251]
        code, message = alice.refused("publish", "b")
        assert code == "over_quota"
        assert "a@1 2 MiB (superseded)" in message
        code, message = again.refused("hello")
        assert code == "over_quota"
        assert f"user {ALICE} has 1 session of a quota of 1" in message
        assert bob("publish", "b") == 1
        code, message = eve.refused("publish", "c")
        assert code == "over_quota"
        assert f"c needs 2 MiB on all devices together, and the quota of user {EVE} is 0 bytes" in message


@needs_root
def test_only_the_group_of_the_sockets_may_connect() -> None:
    with (
        configured(f"[sockets]\ngroup = {STAFF}") as broker,
        visiting(broker.directory, ALICE, STAFF) as alice,
        visiting(broker.directory, BOB, BOB, STAFF) as bob,
        visiting(broker.directory, EVE, EVE) as eve,
    ):
        assert alice("publish", "a") == 1
        assert bob("attach", "a") == [1, ALICE % 251]
        assert eve.refused("hello")[0] == "denied"


def test_a_session_too_many_is_refused_and_there_is_room_when_one_ends() -> None:
    with configured("[quota]\nsessions = 2") as broker, session(broker.directory) as first:
        with session(broker.directory):
            with connect(broker.directory) as third:
                refused = greet(third)
            assert isinstance(refused, Refused)
            assert refused.code == "over_quota"
            assert "has 2 sessions of a quota of 2" in refused.message
            eventually(lambda: "has 2 sessions of a quota of 2" in broker.log(), "a line in the log")
        eventually(lambda: len(first.clients()) == 1, "the second session to end")
        with session(broker.directory) as third_again:
            assert len(third_again.clients()) == 2


@pytest.mark.parametrize(("share", "each"), [("ipc", 1), ("vmm", 2)])
def test_descriptors_are_a_quota_of_their_own(share: str, each: int) -> None:
    three = Layout.pack([(name, "U8", (2 << 20,)) for name in "abc"], slab=2 << 20)
    quota = 3 + 3 * each
    with configured(f"[quota]\ndescriptors = {quota}") as broker, session(broker.directory) as client:
        before = descriptors(broker.pid)
        lease = client.create("pool", three, share=share).lease
        taken = descriptors(broker.pid) - before
        assert 3 * each <= taken <= 3 * each + 1  # and one for all, over which host memory is handed out
        with connect(broker.directory) as another:
            refused = greet(another)
        assert isinstance(refused, Refused)
        assert refused.code == "over_quota"
        who = f"(1 session, 1 of process {os.getpid()}; memory, pool@1 {3 * each} (draft))"
        said = f"has {quota - 1} of a quota of {quota} {who}"
        assert said in refused.message
        client.ask(Close(lease), Done)
        eventually(lambda: client.devices()[0].allocated == 0, "the memory to be freed")
        with session(broker.directory) as another_again:
            assert another_again.devices()


def test_leases_of_several_sessions_count_together() -> None:
    with (
        configured("[quota]\nleases = 1") as broker,
        session(broker.directory) as one,
        session(broker.directory) as two,
    ):
        one.publish("a")
        one.attach("a")
        assert two.ask(Attach("a", 0, None, 0.0), Failed).code == "over_quota"


@pytest.mark.parametrize("name", ["1", "cuda:1", "{uuid:.13}"])
def test_budgets_may_differ_from_device_to_device(name: str) -> None:
    name = name.format(uuid=load("host:2").devices[1].uuid)
    with configured(f"[budget]\ndefault = '50%'\n'{name}' = '2MiB'") as broker, session(broker.directory) as client:
        assert [device.budget for device in client.devices()] == [32 << 20, 2 << 20]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[budget]\n7 = '2MiB'",
            "a budget for device '7', which is not served: this broker has no device '7'; it has 0 (",
        ),
        ("[budget]\n0 = '2MiB'\n'cuda:0' = '4MiB'", "are both for device 0 (cubroker host device 0)"),
        ("kep = 1", "there is no setting kep; did you mean keep?"),
    ],
)
def test_a_broker_does_not_start_with_a_configuration_that_makes_no_sense(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cubroker.toml"
    file.write_text(text)
    command = [sys.executable, "-m", "cubroker.server", tmp_path / "run", "--devices", "host:1", "--config", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr
