"""A broker's directory whose files are removed, replaced or another's, and a host whose clock shows anything."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol.fields import LATEST
from cubroker.protocol.layout import Layout
from tests import forkserver
from tests.brokers import DEVICES, PATIENCE, BrokerProcess, eventually, started
from tests.forkserver import SERVER
from tests.integration.hostile.hostile_peers import HOSTILITY, Witness
from tests.stores import StoredBroker, storing
from tests.unit.server.clients import session


def refused(directory: Path) -> str:
    """Start a broker that does not come up, and return what it says."""
    command = ["-m", "cubroker.server", str(directory), "--devices", DEVICES]
    done = forkserver.run(command, preload=SERVER, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


# -- two brokers in one directory --------------------------------------------------------------------


@pytest.mark.slow
def test_a_broker_whose_lock_was_removed_is_found_by_the_next_one(broker: BrokerProcess, witness: Witness) -> None:
    for _ in range(HOSTILITY):
        (broker.directory / "lock").unlink()
        said = refused(broker.directory)
        assert f"another broker (process {broker.pid}) listens on {broker.directory}/session.sock" in said
        witness.check()


@pytest.mark.slow
def test_of_brokers_that_start_while_the_lock_is_removed_one_serves(tmp_path: Path) -> None:
    for number in range(HOSTILITY):
        race(tmp_path / f"run{number}", [tmp_path / f"{number}-{each}.log" for each in range(4)])


def race(directory: Path, logs: Sequence[Path]) -> None:
    """Start as many brokers as there are logs at once, and see that one of them serves."""
    command = [sys.executable, "-m", "cubroker.server", str(directory), "--devices", "host:1@16MiB", "--drain", "0"]
    with ExitStack() as undo:
        processes = []
        for log in logs:
            file = undo.enter_context(log.open("wb"))
            processes.append(
                forkserver.start(command, preload=SERVER, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
            )
            undo.callback(processes[-1].wait, PATIENCE)
            undo.callback(processes[-1].kill)

        def contenders() -> list[Path]:
            (directory / "lock").unlink(missing_ok=True)
            return [log for log, process in zip(logs, processes, strict=True) if process.poll() is None]

        eventually(lambda: len(contenders()) <= 1, "all brokers but one to give way")
        (log,) = contenders()
        eventually(lambda: b"serving on" in log.read_bytes(), "the last one to serve")
        with session(directory) as client:
            assert client.devices()


def remove_all(directory: Path) -> None:
    for entry in directory.iterdir():
        entry.unlink()


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def move_away(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", [remove_all, remove_directory, move_away])
def test_a_broker_leaves_what_another_one_has_made_in_its_place(
    sabotage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(BrokerProcess) as first:
        monkeypatch.setenv("CUBROKER_METRICS_LISTEN", f"unix:{first.directory}/metrics")
        first.stop()
        first.start()
        sabotage(first.directory)
        second = BrokerProcess(first.directory)
        try:
            assert first.stop() == 0
            with session(first.directory) as client, socket.socket(socket.AF_UNIX) as viewer:
                assert client.devices()
                viewer.connect(str(first.directory / "metrics"))
            moved = first.directory.with_name("moved")
            assert not moved.exists() or {entry.name for entry in moved.iterdir()} == {"lock"}
        finally:
            second.stop()
        assert {entry.name for entry in first.directory.iterdir()} == {"lock"}


@pytest.fixture
def kept() -> Iterator[StoredBroker]:
    with storing() as broker:
        yield broker


@pytest.mark.slow
def test_no_broker_takes_the_place_of_one_that_is_being_started_again(kept: StoredBroker) -> None:
    kept.kill()
    (kept.directory / "lock").unlink()
    said = refused(kept.directory)
    assert f"listens on {kept.directory}/session.sock; use that one, stop it and the systemd units or" in said
    kept.start()
    with session(kept.directory) as client:
        assert client.devices()


@pytest.mark.slow
def test_a_broker_that_is_started_again_finds_a_socket_in_place_of_its_own_and_makes_another(
    kept: StoredBroker,
) -> None:
    kept.kill()
    path = kept.directory / "session.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:
        impostor.bind(str(path))
    kept.start()
    with session(kept.directory) as client:
        assert client.devices()


# -- what is another's -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_lock_that_is_another_file_as_well_is_left_as_it_is(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / "lock").hardlink_to(precious)
    assert f"{tmp_path / 'lock'} has 2 hard links" in refused(tmp_path)
    assert precious.read_text() == "data"


@pytest.mark.slow
def test_a_directory_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared" / "run"
    shared.mkdir()
    shared.chmod(0o777)
    said = refused(path)
    assert f"may write in {shared} (mode 0777), and so could replace {path} and pose as the broker" in said
    assert not path.exists()


# -- clocks ------------------------------------------------------------------------------------------


class Timeless(BrokerProcess):
    """A broker on a host whose clock shows the same moment all the time."""

    def __init__(self, directory: Path, now: float) -> None:
        self._now = now
        super().__init__(directory)

    def command(self) -> list[str]:
        main = f"import sys, time; time.time = lambda: {self._now!r}; from cubroker.server.__main__ import main"
        return [sys.executable, "-c", f"{main}; sys.exit(main())", *super().command()[3:]]


@pytest.mark.slow
@pytest.mark.parametrize(("now", "told"), [(-86_400.5, 0.0), (1e12, LATEST)])
def test_whatever_the_clock_shows_sessions_last_and_stories_are_told(now: float, told: float) -> None:
    with started(lambda directory: Timeless(directory, now)) as process, Broker(process.directory) as broker:
        with broker.create("pool", Layout.pack([("x", "U8", (64,))])) as draft:
            draft.seal()
        with broker.attach("pool"):
            assert {line.time for line in broker.story("pool")} == {told}
        assert broker.look().pools
        assert "Traceback" not in process.log()
