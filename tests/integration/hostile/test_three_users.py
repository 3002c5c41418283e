"""Three users and a container on one broker: each tries to pass every boundary that is drawn for it, end to end.

Alice owns pools, Bob is in her group, Carol may only connect, and the container is a user's own, who is root in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.brokers import DEVICES, PATIENCE, started
from tests.checkpoints import filled, write
from tests.integration.hostile import intruder
from tests.integration.hostile.hostile_peers import HOSTILITY
from tests.integration.hostile.tenants import (
    ALICE,
    BOB,
    BROKER,
    CAROL,
    CLIENTS,
    EVE,
    NEEDS,
    POD,
    KeptUnprivileged,
    become,
    containing,
    cubroker,
)
from tests.integration.hostile.test_working_directory import COMMAND, Hostile
from tests.unit.server.visitor import Visitor, visiting

pytestmark = NEEDS

SETTINGS = f"""
mode = 0o600
[sockets]
group = {CLIENTS}
[names]
"llm/" = {{ users = [{ALICE}] }}
"llm/open/" = {{ groups = [{BOB}] }}
[quotas.{CAROL}]
memory = "8MiB"
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[KeptUnprivileged]:
    with started(lambda directory: KeptUnprivileged(directory, SETTINGS)) as process:
        yield process


@pytest.fixture(scope="module")
def users(broker: KeptUnprivileged) -> Iterator[Mapping[str, Visitor]]:
    with ExitStack() as undo:
        yield {
            "alice": undo.enter_context(visiting(broker.directory, ALICE, ALICE, CLIENTS)),
            "bob": undo.enter_context(visiting(broker.directory, BOB, BOB, ALICE, CLIENTS)),
            "carol": undo.enter_context(visiting(broker.directory, CAROL, CAROL, CLIENTS)),
            "container": undo.enter_context(containing(broker.directory, POD, CLIENTS)),
        }


def outcome(answer: Any) -> str:
    """Return the code of a refusal, or what an answer that is none counts as."""
    return str(answer["code"]) if isinstance(answer, dict) and "code" in answer else "done"


# -- pools by owner, group and mode --------------------------------------------------------------------

OTHERS: Mapping[int, Mapping[str, str]] = {
    0o600: {"bob": "", "carol": "", "container": ""},
    0o640: {"bob": "r", "carol": "", "container": ""},
    0o660: {"bob": "rw", "carol": "", "container": ""},
    0o644: {"bob": "r", "carol": "r", "container": "r"},
    0o604: {"bob": "", "carol": "r", "container": "r"},
}
"""What each mode of a pool of Alice's lets the others do."""

READING: Mapping[str, Callable[[Visitor, str], Any]] = {
    "attach": lambda user, name: user("attach", name),
    "show": lambda user, name: user("describe", name),
    "watch": lambda user, name: user("watch", name),
    "hear of": lambda user, name: user("story", name),
    "wait for": lambda user, name: user("attach", name, 2, 0.01),
}
WRITING: Mapping[str, Callable[[Visitor, str], Any]] = {
    "publish": lambda user, name: user("publish", name),
    "retire": lambda user, name: user("retire", name),
}


def expected(what: str, *, allowed: bool) -> str:
    return "denied" if not allowed else "timeout" if what == "wait for" else "done"


def lists(user: Visitor, name: str) -> bool:
    return name in [pool["name"] for pool in user("pools")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", OTHERS, ids=oct)
def test_a_user_does_with_a_pool_what_its_mode_says_and_nothing_else(users: Mapping[str, Visitor], mode: int) -> None:
    alice = users["alice"]
    for number in range(HOSTILITY):
        name = f"shared-{mode}-{number}"
        assert alice("publish", name, mode) == 1
        for who, rights in OTHERS[mode].items():
            user, reads = users[who], "r" in rights
            for what, ask in READING.items():
                assert outcome(ask(user, name)) == expected(what, allowed=reads), (who, what)
            assert lists(user, name) == reads, who
            assert user.refused("publish", name, 0o666)[0] == "denied", f"{who} changes the mode"
        (pool,) = [each for each in alice("pools") if each["name"] == name]
        assert (pool["version"], pool["mode"], pool["owner"]) == (1, mode, ALICE)
        writers = [who for who, rights in OTHERS[mode].items() if "w" in rights]
        for who in (*(OTHERS[mode].keys() - writers), *writers):  # a pool that one of these retires is anybody's
            for what, ask in WRITING.items():
                assert outcome(ask(users[who], name)) == expected(what, allowed=who in writers), (who, what)
            if who not in writers:
                assert alice("attach", name) == [1, ALICE % 251]
        assert alice("publish", name, 0o600) > 1
        for who in OTHERS[mode]:
            assert outcome(users[who]("attach", name)) == "denied", f"{who} after the mode has changed"
        alice("retire", name)


@pytest.mark.parametrize("who", ["bob", "carol", "container"])
def test_a_private_pool_is_not_told_of(users: Mapping[str, Visitor], who: str) -> None:
    alice, user = users["alice"], users[who]
    assert alice("publish", "confidential", 0o600)
    assert "confidential" in json.dumps(alice("everything"))
    assert "confidential" not in json.dumps(user("everything"))
    assert "confidential" not in user.refused("attach", "confidentia")[1]
    for what, ask in {**READING, **WRITING}.items():
        message = ask(user, "confidential")["message"]
        assert str(ALICE) not in message, what
        assert "600" not in message, what
    alice("retire", "confidential")


@pytest.mark.slow
def test_the_commands_tell_a_stranger_no_more_and_do_no_more(
    broker: KeptUnprivileged, users: Mapping[str, Visitor]
) -> None:
    alice, model = users["alice"], checkpoint(broker)
    assert alice("publish", "kept", 0o640) == 1
    for command, *files in (["show"], ["verify", model], ["story"], ["retire"], ["load", model]):
        done = cubroker(broker.directory, CAROL, str(command), "kept", *files)
        assert (done.returncode, done.stdout) == (1, ""), command
        assert str(ALICE) not in done.stderr
    assert "kept" not in cubroker(broker.directory, CAROL, "ls", "--json").stdout
    assert cubroker(broker.directory, CAROL, "drain").returncode == 1
    assert cubroker(broker.directory, ALICE, "retire", "kept").returncode == 0
    assert "kept" not in cubroker(broker.directory, ALICE, "ls", "--json").stdout


def checkpoint(broker: KeptUnprivileged) -> Path:
    """Write a checkpoint that everybody may read."""
    path = write(broker.directory.with_name("model.safetensors"), filled([("x", "U8", (1 << 20,))]))
    path.chmod(0o644)
    return path


# -- names ---------------------------------------------------------------------------------------------


def test_a_reserved_name_is_published_by_those_alone_for_whom_it_is(users: Mapping[str, Visitor]) -> None:
    publishers = {"llm/base": "alice", "llm/open/draft": "bob"}
    for name, publisher in publishers.items():
        for who, user in users.items():
            if who != publisher:
                code, message = user.refused("publish", name, 0o666)
                assert code == "denied", (who, name)
                assert "reserved" in message
        assert users[publisher]("publish", name, 0o666) == 1
        for who, user in users.items():  # nor a version of what others may write
            if who != publisher:
                assert user.refused("publish", name)[0] == "denied", (who, name)
        users[publisher]("retire", name)


@pytest.mark.slow
def test_a_squatted_name_is_taken_by_nobody_who_says_whose_pool_it_expects(
    broker: KeptUnprivileged, users: Mapping[str, Visitor]
) -> None:
    alice, carol, model = users["alice"], users["carol"], checkpoint(broker)
    assert carol("publish", "minilm", 0o644) == 1
    assert alice("attach", "minilm") == [1, CAROL % 251], "which is the danger"
    assert alice("attach", "minilm", None, 0, CAROL) == [1, CAROL % 251]
    assert alice.refused("attach", "minilm", None, 0, BOB)[0] == "denied"
    alice("trust", str(BOB))
    assert alice.refused("attach", "minilm")[0] == "denied"
    alice("trust", "")
    load = ("load", "minilm", model, "--if-absent")
    done = cubroker(broker.directory, ALICE, *load)
    assert done.returncode == 1
    assert "--owner" in done.stderr
    done = cubroker(broker.directory, ALICE, *load, CUBROKER_OWNER=str(BOB))
    assert done.returncode == 1
    assert cubroker(broker.directory, ALICE, *load, "--owner", str(CAROL)).returncode == 0
    assert alice("attach", "minilm") == [1, CAROL % 251], "nothing was loaded"
    carol("retire", "minilm")
    assert cubroker(broker.directory, ALICE, *load).returncode == 0
    assert alice("attach", "minilm", None, 0, ALICE)[0] > 1
    alice("retire", "minilm")


# -- who connects, administers and uses up what --------------------------------------------------------


def test_who_is_not_of_the_clients_does_not_connect_whatever_other_group_it_is_in(broker: KeptUnprivileged) -> None:
    with (
        visiting(broker.directory, EVE, EVE, ALICE, BROKER) as eve,
        containing(broker.directory, POD) as container,
        visiting(broker.directory, EVE, EVE, CLIENTS) as member,
    ):
        for stranger in (eve, container):
            assert stranger.refused("hello")[0] == "denied"
        assert member("hello") > 0


def test_root_without_capabilities_and_root_of_a_container_administer_nothing(
    broker: KeptUnprivileged, users: Mapping[str, Visitor]
) -> None:
    assert users["alice"]("publish", "ruled", 0o600) == 1
    nothing = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", f"--groups={CLIENTS}")
    with visiting(broker.directory, 0, 0, before=nothing) as root, visiting(broker.directory, 0, 0) as real:
        for user in (root, users["container"], users["carol"], users["bob"]):
            assert user.refused("drain", True)[0] == "denied"
            assert user.refused("retire", "ruled")[0] == "denied"
            assert not lists(user, "ruled")
        assert lists(real, "ruled")
        assert outcome(real("retire", "ruled")) == "done"


# -- the processes of the broker, and its directory ----------------------------------------------------


@pytest.mark.parametrize("uid", [BROKER, ALICE, CAROL])
def test_no_process_opens_or_traces_keeper_broker_or_gateway(broker: KeptUnprivileged, uid: int) -> None:
    targets = [f"{name}={pid}" for name, pid in broker.processes.items()]
    assert len(targets) == 3
    command = [*become(uid), sys.executable, intruder.__file__, *targets]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
    reached = json.loads(done.stdout)
    assert reached.pop("its own child") == sorted(intruder.ATTACKS), "the intruder does not know its trade"
    assert reached == {"keeper": [], "broker": [], "gateway": []}


MEDDLER = """
import json, os, sys
from os.path import join
place, own, uid, *groups = sys.argv[1:]
os.setgroups([int(group) for group in groups])
os.setgid(int(uid))
os.setuid(int(uid))
attempts = {
    "puts a file there": lambda: os.close(os.open(join(place, "new"), os.O_CREAT | os.O_WRONLY)),
    "opens the lock": lambda: os.close(os.open(join(place, "lock"), os.O_RDONLY)),
    "writes into the lock": lambda: os.close(os.open(join(place, "lock"), os.O_WRONLY)),
    "gives the lock another name": lambda: os.link(join(place, "lock"), join(own, f"lock-{uid}-{os.getpid()}")),
    "opens the sockets to all": lambda: os.chmod(join(place, "session.sock"), 0o666),
    "moves a socket away": lambda: os.rename(join(place, "session.sock"), join(place, "old.sock")),
    "removes a socket": lambda: os.unlink(join(place, "broker.zmq")),
    "opens the directory to all": lambda: os.chmod(place, 0o777),
    "replaces the directory": lambda: os.rename(place, place + ".old"),
}
through = []
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        continue
    through.append(name)
print(json.dumps([through, list(attempts)]))
"""


def meddle(directory: Path, uid: int, own: Path) -> tuple[list[str], list[str]]:
    """Do as a user, who may connect, what would make that user the broker; return what could be done of how much."""
    command = [sys.executable, "-c", MEDDLER, *map(str, (directory, own, uid, CLIENTS))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    through, all_of_them = json.loads(done.stdout)
    return through, all_of_them


@pytest.fixture
def own() -> Iterator[Path]:
    """A folder of Carol's, with a directory that looks like a broker's."""
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        place = Path(folder, "run")
        place.mkdir()
        for each in (*(place / name for name in ("lock", "session.sock", "broker.zmq")), place, Path(folder)):
            if each.parent == place:
                each.touch()
            os.chown(each, CAROL, CAROL)
        yield Path(folder)


def test_nobody_who_may_connect_takes_the_brokers_place(
    broker: KeptUnprivileged, users: Mapping[str, Visitor], own: Path
) -> None:
    before = broker.processes
    through, everything = meddle(own / "run", CAROL, own)
    assert through == everything, "a user can do all of it in a directory of its own"
    for uid in (CAROL, ALICE):
        assert meddle(broker.directory, uid, own)[0] == []
    assert broker.processes == before
    assert users["carol"]("hello") > 0
    with visiting(broker.directory, ALICE, ALICE, CLIENTS) as another:
        assert another("hello") > 0


def test_a_directory_that_a_stranger_could_replace_is_served_by_no_broker(own: Path) -> None:
    command = [*become(BROKER), sys.executable, "-m", "cubroker.server", str(own / "run"), "--devices", DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert f"belongs to user {CAROL}" in done.stderr


# -- the directory where a command is run --------------------------------------------------------------


def test_a_command_in_a_strangers_directory_imports_nothing_from_there(broker: KeptUnprivileged) -> None:
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        place = Path(folder)
        place.chmod(0o777)
        hostile = Hostile(place)
        shutil.chown(hostile.directory, CAROL, CAROL)
        env = {**os.environ, "TRAP": str(hostile.sprung), "CUBROKER_DIR": str(broker.directory)}

        def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*become(ALICE, CLIENTS), *command],
                cwd=hostile.directory,
                env={name: value for name, value in env.items() if name != "PYTHONSAFEPATH"},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )

        done = run(COMMAND, "ls")
        assert done.returncode == 0, done.stderr
        assert not hostile.sprung.exists()
        assert run(sys.executable, "-m", "cubroker.cli", "ls").returncode
        assert hostile.sprung.exists(), "the directory is a trap"
