"""The next run of a kept process, which stands by: when there is one, what it gets, and what ends it."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from cubroker.server.store.sd_notify import OUTDATED, SPEAKS, Standby
from tests.brokers import PATIENCE, eventually
from tests.namespaces import children, unshare
from tests.unit.cli.processes import environment, run
from tests.unit.server.keeper.harness import Keep, Pupil, contents, memory
from tests.unit.server.processes import alive, descriptors, gateway_of


def eager(answer: float, settled: float) -> list[str]:
    """Return a keeper that has the next run stand by at once, and waits so many seconds for its answer."""
    script = f"""
import sys
from cubroker.server.keeper import child, keeper
child.SETTLED, keeper.ANSWER = {settled}, {answer}
sys.exit(keeper.keep(keeper.Terms(sys.argv[2:], pause=0.0)))
"""
    return [sys.executable, "-c", script]


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept processes are killed, and what is measured of them is lost."""
    for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
        monkeypatch.delenv(name)


def command(directory: Path, *modules: str) -> list[str]:
    """Return the command of a kept process, which imports modules of its own when it stands by."""
    return [sys.executable, "-m", "tests.unit.server.keeper.kept_process", str(directory / "test"), *modules]


def kept(tmp_path: Path, *modules: str, answer: float = 60.0, settled: float = 0.0) -> Keep:
    """Return a keeper of such a process."""
    return Keep(tmp_path, program=eager(answer, settled), command=command(tmp_path, *modules))


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    with kept(tmp_path) as process:
        yield process


def serves(run: Pupil, *also: str) -> Pupil:
    """Have a run say that it is ready, and whether another can stand by."""
    assert run.say("ready", "", *[f"{SPEAKS}=1"] * bool(run.hello["offered"]), *also) is None
    return run


def standing_by(keep: Keep, which: int = 1) -> int:
    """Wait until so many processes have stood by, one after the other; return the pid of the last."""
    said = keep.says(f"(process [0-9]+ stands by(.|\n)*){{{which}}}")
    return int(re.findall("process ([0-9]+) stands by", said)[which - 1])


def test_the_next_run_stands_by_and_gets_what_is_stored(keep: Keep) -> None:
    first = serves(keep.next(ready=False))
    waiting = standing_by(keep)
    with memory(b"kept") as file:
        first.store("m", file)
    first.barrier()
    first.kill()
    second = keep.next(ready=False)
    assert second.pid == second.hello["group"] == waiting
    assert contents(second.give("m")) == [b"kept"]
    assert not second.hello["inheritable"]
    keep.says(f"process {waiting}, which stood by, starts again, with 1 descriptors")
    serves(second)
    third = standing_by(keep, 2)
    second.exit(0)
    assert keep.next(ready=False).pid == third


def test_more_than_one_message_carries_is_handed_over(keep: Keep) -> None:
    first = serves(keep.next(ready=False))
    waiting = standing_by(keep)
    for number in range(300):
        with memory(b"") as file:
            first.store(f"m{number}", file)
    with memory(b"one") as one, memory(b"two") as two:
        first.store("both", one, two)
    first.barrier()
    first.kill()
    second = keep.next(ready=False)
    assert second.pid == waiting
    assert second.inherited == {**{f"m{number}": 1 for number in range(300)}, "both": 2}


def test_it_stands_by_where_more_is_stored_than_select_can_wait_for(keep: Keep) -> None:
    first = keep.next(ready=False)
    for number in range(0, 1100, 100):
        with ExitStack() as files:
            first.store(f"m{number}", *(files.enter_context(memory(b"")) for _ in range(100)))
    serves(first)
    waiting = standing_by(keep)
    first.kill()
    second = keep.next(ready=False)
    assert second.pid == waiting
    assert sum(second.inherited.values()) == 1100


def test_a_command_that_does_not_know_of_it_is_never_started_in_advance(keep: Keep) -> None:
    first = keep.next()
    first.barrier()
    first.say("reloading")
    first.say("ready", "")
    first.barrier()
    assert "KEEPER_STANDBY" not in str(first.hello["variables"])
    assert children(keep.process.pid) == [first.pid]


def test_of_a_command_that_a_script_starts_none_stands_by(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\necho prepared >> {tmp_path}/prepared\nexec {shlex.join(command(tmp_path))}\n")
    script.chmod(0o755)
    with Keep(tmp_path, program=eager(60.0, 0.0), command=[script]) as keep:
        first = serves(keep.next(ready=False), "X_STANDBY=1")  # as builds said that did not know of scripts
        first.barrier()
        first.barrier()
        assert children(keep.process.pid) == [first.pid]
        assert (tmp_path / "prepared").read_text() == "prepared\n"
        first.kill()
        keep.next()
        assert "stood by" not in keep.said()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv to be less")
def test_a_broker_stands_by_where_proc_hides_it_from_the_keeper(tmp_path: Path) -> None:
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    less = ["setpriv", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
    before = [*unshare("--mount"), "sh", "-c", mount, "sh", *less]
    serve = [sys.executable, "-m", "cubroker.server", tmp_path / "run", "--devices", "host:1@64MiB"]
    with Keep(tmp_path, before=before, program=eager(60.0, 0.0), command=serve) as keep:
        standing_by(keep)


def test_a_broker_stands_by_with_a_gateway_that_serves_as_soon_as_the_broker_does(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "cubroker.server", tmp_path / "run", "--devices", "host:1@64MiB"]
    with Keep(tmp_path, program=eager(60.0, 0.0), command=serve) as keep:
        waiting = standing_by(keep)
        gateway = gateway_of(waiting)
        (first,) = {*children(keep.process.pid)} - {waiting}
        os.kill(first, signal.SIGKILL)
        keep.says(f"process {waiting} is ready")
        assert gateway_of(waiting) == gateway
        other = standing_by(keep, 2)
        gateway = gateway_of(other)
        os.kill(other, signal.SIGKILL)
        eventually(lambda: not alive(gateway), "the end of the gateway of a process that stood by")


def test_one_that_is_killed_while_it_stands_by_is_replaced(keep: Keep) -> None:
    first = serves(keep.next(ready=False))
    waiting = standing_by(keep)
    before = descriptors(keep.process.pid)
    os.kill(waiting, signal.SIGKILL)
    other = standing_by(keep, 2)
    assert f"process {waiting}, which stood by, was killed by SIGKILL" in keep.said()
    assert descriptors(keep.process.pid) == before
    first.kill()
    assert keep.next(ready=False).pid == other


def test_where_none_stands_by_yet_the_next_run_is_started_as_ever(tmp_path: Path) -> None:
    with kept(tmp_path, settled=3600.0) as keep:
        first = serves(keep.next(ready=False))
        first.kill()
        keep.next()
        assert "stood by" not in keep.said()


def test_one_that_hangs_is_ended_and_the_next_run_is_started(tmp_path: Path) -> None:
    with kept(tmp_path, answer=0.1) as keep:
        first = serves(keep.next(ready=False))
        waiting = standing_by(keep)
        with memory(b"kept") as file:
            first.store("m", file)
        first.barrier()
        os.kill(waiting, signal.SIGSTOP)
        first.kill()
        second = keep.next(ready=False)
        assert second.pid != waiting
        assert not alive(waiting)
        assert contents(second.give("m")) == [b"kept"]
        keep.says(f"process {waiting} is not ready after 0.1 s, and is aborted")


def test_one_that_has_taken_over_has_as_long_for_its_start_as_any(tmp_path: Path) -> None:
    with kept(tmp_path, answer=0.1) as keep:
        first = serves(keep.next(ready=False))
        waiting = standing_by(keep)
        first.kill()
        second = keep.next(ready=False)
        assert second.pid == waiting
        second.barrier()
        with pytest.raises(AssertionError, match="the keeper ended, or starts nothing"):
            _none_follows(keep)
        serves(second)


def _none_follows(keep: Keep) -> None:
    """Fail as :meth:`Keep.next` does when nothing is started for longer than an answer may take."""
    ready, _, _ = select.select([keep.listener], [], [], 0.5)
    assert ready, "the keeper ended, or starts nothing"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_the_keeper_is_told_to_end(keep: Keep, number: signal.Signals) -> None:
    first = serves(keep.next(ready=False))
    waiting = standing_by(keep)
    first.expect(number)
    assert keep.end(number) == 100 + number
    eventually(lambda: not alive(waiting), "the one that stood by to end")


def test_it_ends_with_a_keeper_that_is_killed(keep: Keep) -> None:
    first = serves(keep.next(ready=False))
    waiting = standing_by(keep)
    keep.process.kill()
    keep.process.wait()
    eventually(lambda: not alive(waiting), "the one that stood by to end")
    assert "cannot be told" in str(first.say("status", "alive"))


def test_it_ends_quietly_with_a_keeper_that_has_not_read_that_it_waits() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, ThreadPoolExecutor(1) as threads:
        waits = threads.submit(Standby(theirs.detach()).wait)
        assert select.select([ours], [], [], PATIENCE)[0]
        ours.close()
        with pytest.raises(SystemExit) as ended:
            waits.result(PATIENCE)
    assert ended.value.code == 0


def _install(tmp_path: Path, name: str, what: str) -> None:
    """Put a version of a module there, as installers do: another file, which may be older than what it replaces."""
    module = tmp_path / "lib" / f"{name}.py"
    module.parent.mkdir(exist_ok=True)
    module.with_suffix(".new").write_text(f'"""{what}"""\n')
    os.utime(module.with_suffix(".new"), (1, 1))
    module.with_suffix(".new").rename(module)


def test_code_that_was_replaced_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    _install(tmp_path, "own_code", "before")
    with kept(tmp_path, "own_code") as keep:
        first = serves(keep.next(ready=False))
        waiting = standing_by(keep)
        with memory(b"kept") as file:
            first.store("m", file)
        first.barrier()
        _install(tmp_path, "own_code", "after!")
        first.kill()
        second = keep.next(ready=False)
        assert second.pid != waiting
        assert contents(second.give("m")) == [b"kept"]
        keep.says(f"process {waiting} ended with status {OUTDATED}(.|\n)*starts again, with 1 descriptors")
        serves(second)
        other = standing_by(keep, 2)
        second.kill()
        assert keep.next(ready=False).pid == other


def test_a_gateway_whose_library_was_replaced_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path(zmq.__file__).parent
    own = tmp_path / "lib" / "zmq"
    own.mkdir(parents=True)
    for each in library.iterdir():
        if each.name != "__pycache__":
            (own / each.name).symlink_to(each)
    monkeypatch.setenv("PYTHONPATH", str(own.parent))
    serve = [sys.executable, "-m", "cubroker.server", tmp_path / "run", "--devices", "host:1@64MiB"]
    with Keep(tmp_path, program=eager(60.0, 0.0), command=serve) as keep:
        waiting = standing_by(keep)
        (first,) = {*children(keep.process.pid)} - {waiting}
        shutil.copy(library / "__init__.py", own / "new")
        (own / "new").rename(own / "__init__.py")
        os.kill(first, signal.SIGKILL)
        keep.says(f"process {waiting} ended with status {OUTDATED}(.|\n)*is ready")


def test_one_that_cannot_be_imported_is_tried_again_after_pauses_that_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    _install(tmp_path, "own_code", "broken")
    (tmp_path / "lib" / "own_code.py").write_text("raise SystemExit(3)\n")
    with kept(tmp_path, "own_code") as keep:
        first = serves(keep.next(ready=False))
        keep.says("(which stood by, ended with status 3(.|\n)*){3}")
        _install(tmp_path, "own_code", "mended")
        standing_by(keep)
        first.barrier()


def test_a_variable_that_no_keeper_has_set_is_refused(tmp_path: Path) -> None:
    serve = ["serve", "--devices", "host:1@64MiB", "--directory", str(tmp_path / "run")]
    for value, why in (("text", "no process but `cubroker keep` may set it"), ("2", "socket")):
        done = run(*serve, env=environment(KEEPER_STANDBY=value))
        assert done.returncode == 1
        assert why in done.stderr
        assert "Traceback" not in done.stderr
