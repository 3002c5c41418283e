"""A kept process from its start to its end, and what becomes of its keeper."""

from __future__ import annotations

import fcntl
import os
import random
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.server.keeper.child import FIRST_PAUSE
from tests.brokers import PATIENCE, eventually
from tests.namespaces import children
from tests.unit.cli.processes import COMMAND, run
from tests.unit.server.keeper.harness import KEEP, Keep, contents, memory, pupil
from tests.unit.server.processes import alive, descriptors

ENDING = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    with Keep(tmp_path, "--pause", "0") as process:
        yield process


def hasty(pause: float, *, first: float = FIRST_PAUSE) -> list[str]:
    """Return a keeper to which every run is a short one, however slow the machine."""
    script = f"""
import sys
from cubroker.server.keeper import child, keeper
child.STEADY, child.FIRST_PAUSE = float("inf"), {first}
sys.exit(keeper.keep(keeper.Terms(sys.argv[2:], 10, pause={pause})))
"""
    return [sys.executable, "-c", script]


@pytest.mark.slow
def test_a_process_that_was_never_ready_and_stored_nothing_is_not_started_again() -> None:
    done = run("keep", "--", "sh", "-c", "echo started; exit 7")
    assert done.returncode == 7
    assert done.stdout == "started\n"
    assert "gives up" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_command_that_is_not_there_or_no_program_ends_it_as_it_ends_a_shell(tmp_path: Path) -> None:
    done = run("keep", "nowhere", "--option")
    assert done.returncode == 127
    assert "nowhere is not found" in done.stderr
    (tmp_path / "text").write_text("")
    done = run("keep", str(tmp_path / "text"))
    assert done.returncode == 126
    assert "text cannot be run: Permission denied" in done.stderr


def test_what_stored_something_before_it_was_ready_is_started_again(keep: Keep) -> None:
    first = keep.next(ready=False)
    with memory(b"x") as file:
        first.store("x", file)
    first.exit(3)
    assert keep.next(ready=False).inherited == {"x": 1}
    assert "ended with status 3" in keep.says("starts again, with 1 descriptors")


@pytest.mark.slow
def test_what_was_ready_once_is_started_again_whatever_its_end(keep: Keep) -> None:
    keep.next().exit(0)
    keep.next(ready=False).exit(1)
    keep.next(ready=False).kill()
    keep.next()
    said = keep.says("was killed by SIGKILL")
    assert said.index("status 0") < said.index("status 1") < said.index("SIGKILL")


def test_a_command_that_is_away_for_a_while_is_tried_until_it_is_back(tmp_path: Path) -> None:
    program = tmp_path / "program"
    script = f"#!/bin/sh\nexec {shlex.join(pupil(tmp_path))}\n"
    program.write_text(script)
    program.chmod(0o755)
    with Keep(tmp_path, "--pause", "0.05", command=[program]) as keep:
        first = keep.next()
        with memory(b"kept") as file:
            first.store("m", file)
        program.unlink()
        first.kill()
        keep.says("program is not found(.|\n)*program is not found")
        program.with_name("new").write_text(script)
        program.with_name("new").chmod(0o755)
        program.with_name("new").rename(program)
        assert contents(keep.next().give("m")) == [b"kept"]


@pytest.mark.slow
def test_pauses_grow_while_runs_are_short(tmp_path: Path) -> None:
    with Keep(tmp_path, program=hasty(0.15)) as keep:
        for _ in range(5):
            keep.next().exit(0)
        keep.next()
        said = keep.says("(comes in 0.15 s(.|\n)*){2}")
        assert re.findall(r"comes in (\S+) s", said) == ["0.05", "0.10", "0.15", "0.15"]


def test_what_a_process_says_of_itself_is_told(keep: Keep) -> None:
    first = keep.next()
    first.say("reloading")
    keep.says(f"process {first.pid} reads its settings again")
    first.say("ready", "two pools\x1b")
    first.say("stopping")
    keep.says("is ready(.|\n)*is ready(.|\n)*is about to end")
    first.exit(5)
    keep.says(r"ended with status 5 \(it last said: two pools\?\)")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"READY=1\nFDNAME=\xff", "not UTF-8"),
        (b"READY=1\0", "is no NAME=value"),
        (b"READY", "'READY' is no NAME=value"),
        (b"=", "'=' is no NAME=value"),
        (b"STATUS=" + b"x" * 5000, "truncated"),
        (b"STATUS=x", "without FDSTORE=1"),
        (b"FDSTOREREMOVE=1\nFDSTORE=1", "without FDSTORE=1"),
        (b"BARRIER=1\nREADY=1", "must be the only field"),
    ],
)
def test_a_malformed_message_is_dropped_and_its_descriptors_are_closed(keep: Keep, data: bytes, reason: str) -> None:
    first = keep.next()
    first.barrier()
    before = descriptors(keep.process.pid)
    with memory(b"") as file:
        first.raw(data, file, file)
    first.barrier()
    assert descriptors(keep.process.pid) == before
    keep.says(f"a message of process {first.pid} is dropped: .*{reason}")


def test_a_message_may_be_empty_or_repeat_itself_or_say_what_is_not_known(keep: Keep) -> None:
    first = keep.next()
    with memory(b"") as file:
        first.raw(b"FDSTORE=1\nFDNAME=one\nFDNAME=two\nFDPOLL=0\nFDPOLL=1\nNEWER=1\n", file)
    first.raw(b"")
    first.raw(b"FDSTORE=1")
    first.raw(b"FDSTOREREMOVE=1")
    for usec in (b"-1", b"9" * 4000, b"9" * 18, b"1.5", b"\xd9\xa3", b""):
        first.raw(b"WATCHDOG_USEC=" + usec)
    first.raw(b"WATCHDOG=1\nMAINPID=1\nERRNO=5\nEXTEND_TIMEOUT_USEC=1")
    first.barrier()
    assert keep.again(first).inherited == {"one": 1}
    keep.says("FDSTOREREMOVE=1 came without FDNAME")


@pytest.mark.slow
def test_no_message_ends_it(keep: Keep) -> None:
    chance = random.Random(7)
    names = b"FDSTORE FDSTOREREMOVE FDNAME FDPOLL READY STATUS WATCHDOG_USEC BARRIER RELOADING"
    words = (names + b" = =1 =0 \n \n : \0 \xff x").split(b" ")
    first = keep.next()
    with memory(b"") as file:
        first.store("kept", file)
        for _ in range(400):
            data = b"".join(chance.choices(words, k=chance.randrange(12)))
            first.raw(data, *[file] * chance.randrange(3))
            first.raw(bytes(chance.randrange(256) for _ in range(20)))
    assert keep.again(first).inherited["kept"] == 1
    keep.says("will not be reported before the next start")


def test_nobody_but_the_process_has_a_say(keep: Keep, tmp_path: Path) -> None:
    first = keep.next()
    (path,) = tmp_path.glob("cubroker-keep-*/notify")
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with memory(b"") as file, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(str(path))
        socket.send_fds(channel, [b"FDSTORE=1\nFDNAME=evil"], [file])
    keep.says(f"a message of process {os.getpid()} is dropped: only the kept process may send messages")
    assert keep.again(first).inherited == {}


@pytest.mark.slow
def test_a_hung_process_is_aborted_and_finds_again_what_it_stored(tmp_path: Path) -> None:
    with Keep(tmp_path, "--watchdog", "0.5") as keep:
        first = keep.next(ready=False)
        assert first.hello["watchdog"] == 0.25
        assert first.hello["variables"]["WATCHDOG_PID"] == str(first.pid)
        with memory(b"weights") as file:
            first.store("m", file)
        first.hang()
        assert contents(keep.next(ready=False).give("m")) == [b"weights"]
        said = keep.says("was killed by SIGABRT")
        assert said.index("gave no sign of life in time, and is aborted") < said.index("SIGABRT")


def test_a_process_is_watched_unless_it_is_not_to_be(tmp_path: Path, keep: Keep) -> None:
    assert keep.next().hello["watchdog"] is None
    other = tmp_path / "other"
    other.mkdir()
    with Keep(other, program=(*COMMAND, "keep")) as watching:
        assert watching.next(ready=False).hello["watchdog"] == 10.0


@pytest.mark.slow
def test_a_process_may_ask_to_be_watched_and_to_be_ended(keep: Keep) -> None:
    first = keep.next()
    first.last(b"WATCHDOG_USEC=200000")  # a keeper that is late by a tenth of it gives it that time again
    second = keep.next()
    keep.says(f"process {first.pid} was killed by SIGABRT")
    second.last(b"WATCHDOG=trigger")
    keep.next()
    keep.says(f"process {second.pid} was killed by SIGABRT")


@pytest.mark.slow
def test_a_process_that_is_never_ready_is_aborted() -> None:
    done = run("keep", "--start-timeout", "0.2", "--", "sleep", "1000")
    assert done.returncode == 128 + signal.SIGABRT
    assert "is not ready after 0.2 s, and is aborted" in done.stderr
    assert "gives up" in done.stderr.splitlines()[-1]


def test_a_process_that_does_not_end_is_killed_and_the_last_line_says_what_was_left(tmp_path: Path) -> None:
    with Keep(tmp_path, "--stop-timeout", "0.3") as keep:
        first = keep.next()
        first.ignore(signal.SIGTERM)
        first.say("status", "two pools")
        with memory(b"") as file, memory(b"") as other:
            first.store("m1.0", file)
            first.store("s7", other)
        assert keep.end() == 128 + signal.SIGKILL
        *_, killed, ended, left = keep.said().splitlines()
        assert killed == f"cubroker keep: process {first.pid} does not end, and is killed"
        assert "was killed by SIGKILL (it last said: two pools)" in ended
        assert "did not shut down cleanly: what it lent was not given back" in left
        assert "2 stored descriptors are dropped: m1.0, s7" in left


@pytest.mark.slow
def test_a_process_that_not_even_sigkill_ends_holds_up_no_end(tmp_path: Path) -> None:
    harmless = """
import os, signal, sys
from cubroker.server.keeper import child, keeper
child.UNKILLABLE, kill = 0.2, os.kill
os.kill = lambda pid, number: number == signal.SIGKILL or kill(pid, number)
sys.exit(keeper.keep(keeper.Terms(sys.argv[2:], 10, child.TimeLimits(stop=0.2))))
"""
    with Keep(tmp_path, program=[sys.executable, "-c", harmless]) as keep:
        first = keep.next()
        first.ignore(signal.SIGTERM)
        first.say("status", "two pools")
        keep.process.terminate()
        assert keep.process.wait(PATIENCE) == 128 + signal.SIGKILL
        assert alive(first.pid)
        said = keep.says(r"did not shut down cleanly and is still there \(it last said: two pools\)")
        assert "is still there 0.2 s after SIGKILL: it hangs in the kernel" in said


def test_a_stopped_process_is_continued_so_that_it_can_end(keep: Keep) -> None:
    first = keep.next()
    first.expect(signal.SIGTERM)
    first.stop()
    assert keep.end() == 100 + signal.SIGTERM


@pytest.mark.parametrize("number", ENDING)
def test_it_ends_as_the_process_does_when_told_to(keep: Keep, tmp_path: Path, number: signal.Signals) -> None:
    first = keep.next()
    first.expect(number)
    assert keep.end(number) == 100 + number
    assert f"{number.name}: waits for the end of the process" in keep.said()
    assert [entry.name for entry in tmp_path.iterdir()] == ["test"]


def test_a_process_that_dies_of_the_signal_is_reported_as_a_shell_does(keep: Keep) -> None:
    keep.next()
    assert keep.end() == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_other_signals_are_for_the_process_alone(keep: Keep, number: signal.Signals) -> None:
    first = keep.next()
    first.expect(number)
    keep.process.send_signal(number)
    first.ended()
    keep.next()
    keep.says(f"process {first.pid} ended with status {100 + number}")


def test_a_signal_that_does_not_ask_for_the_end_waits_until_the_process_is_ready(keep: Keep) -> None:
    first = keep.next(ready=False)
    first.expect(signal.SIGUSR1)
    keep.process.send_signal(signal.SIGUSR1)
    first.barrier()  # behind which the keeper has seen the signal
    first.last(b"READY=1")
    first.ended()
    keep.says(f"process {first.pid} ended with status {100 + signal.SIGUSR1}")


def importing(number: signal.Signals, keep: Keep) -> None:
    """Send a signal to a keeper under ``-X importtime`` at each import of its, from the first one of click's on."""
    keep.says(r"import time:.* click\.")
    sent = 0
    while "process" not in keep.said().rpartition("import time:")[2]:
        if keep.said().count("import time:") > sent:
            sent = keep.said().count("import time:")
            keep.process.send_signal(number)
        if not keep.read():
            return


IMPORTING = [sys.executable, "-X", "importtime", *KEEP[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_comes_while_it_is_imported_ends_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with Keep(tmp_path, program=IMPORTING) as keep:
        importing(number, keep)
        first = keep.next(ready=False)
        assert not first.hello["blocked"]
        first.ignore(number)  # one may have come after the start, which then waits for this
        first.say("ready", "")
        keep.says("is ready")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_told_to_end_while_it_is_imported_it_ends_before_it_starts_anything(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Keep(tmp_path, program=IMPORTING) as keep:
        importing(number, keep)
        assert keep.status() == 0
        assert keep.said().splitlines()[-1] == f"cubroker keep: {number.name}: ends"
        assert "Traceback" not in keep.said()


LATE = """
import os, signal, sys
from cubroker.cli.__main__ import main
class Late:
    # Comes when the interpreter has handed all signals back to the system, and takes its modules apart.
    def __del__(self, kill=os.kill, pid=os.getpid(), write=os.write):
        kill(pid, NUMBER)
        write(2, b"at its end\\n")
late = Late()
sys.argv[:1] = ["cubroker", "keep", "--watchdog", "0"]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [*ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_comes_while_it_ends_changes_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with Keep(tmp_path, program=[sys.executable, "-c", LATE.replace("NUMBER", str(int(number)))]) as keep:
        first = keep.next()
        first.expect(signal.SIGTERM)
        assert keep.end() == 100 + signal.SIGTERM
        assert keep.said().splitlines()[-1] == "at its end"


def test_between_two_runs_it_ends_at_once_with_the_status_of_the_last(tmp_path: Path) -> None:
    with Keep(tmp_path, program=hasty(1000.0, first=1000.0)) as keep:
        keep.next().exit(4)
        keep.next().exit(9)
        keep.says("the next start comes in 1000.00 s")
        keep.process.send_signal(signal.SIGHUP)
        assert keep.end() == 9
        assert "SIGTERM: ends" in keep.said()


def test_a_terminal_interrupts_the_process_once(keep: Keep) -> None:
    assert keep.next().hello["group"] != os.getpgid(keep.process.pid)


def test_what_the_process_left_running_ends_with_it(keep: Keep) -> None:
    first = keep.next()
    left = int(first.leave("sh", "-c", "echo $$; exec sleep 1000"))
    assert alive(left)
    keep.again(first)
    eventually(lambda: not alive(left), "the leftover to be killed")


def test_the_process_outlives_a_keeper_that_is_killed(keep: Keep) -> None:
    first = keep.next()
    keep.process.kill()
    keep.process.wait()
    assert "cannot be told STATUS=alive" in str(first.say("status", "alive"))


def masks(states: str) -> list[int]:
    """Return masks of signals, without the two that glibc has for itself and ignores in what posix_spawn() starts."""
    return [int(mask, 16) & ~(3 << 31) for mask in states.split()[1::2]]


@pytest.mark.slow
def test_a_process_has_signals_as_its_keeper_got_them(tmp_path: Path) -> None:
    states = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]
    alone = subprocess.run(states, capture_output=True, text=True, check=True)
    assert masks(run("keep", "--", *states).stdout) == masks(alone.stdout)
    with Keep(tmp_path, before=["nohup"]) as keep:
        assert signal.SIGHUP in keep.next().hello["ignored"]


@pytest.mark.slow
def test_a_log_that_nobody_reads_holds_nothing_up(tmp_path: Path) -> None:
    with Keep(tmp_path, "--pause", "0") as keep:
        assert keep.process.stderr
        fcntl.fcntl(keep.process.stderr, fcntl.F_SETPIPE_SZ, 1 << 14)
        first = keep.next()
        for _ in range(5):
            for _ in range(100):
                first.raw(b"x" * 900)
            first = keep.again(first)
        with memory(b"") as file:
            first.store("m", file)
        first = keep.again(first)
        assert first.inherited == {"m": 1}
        first.barrier()  # all that there is to say was said, or lost
        keep.says("is ready")  # which takes all that waits
        first = keep.again(first)
        assert re.search(r"lines lost before this one: \d+", keep.says("lines lost"))
        keep.process.stderr.close()
        keep.process.stderr = None
        assert keep.again(first).inherited == {"m": 1}


def test_no_descriptor_left_costs_what_was_sent_then_and_nothing_else(keep: Keep) -> None:
    first = keep.next()
    first.barrier()
    before = resource.prlimit(keep.process.pid, resource.RLIMIT_NOFILE)
    with memory(b"") as file:
        first.store("before", file)
        first.barrier()
        resource.prlimit(keep.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        first.store("lost", file, poll=True)
        keep.says("this process has no descriptor left")
        resource.prlimit(keep.process.pid, resource.RLIMIT_NOFILE, before)
    with memory(b"") as file:
        first.store("after", file)
    assert keep.again(first).inherited == {"before": 1, "after": 1}


@pytest.mark.slow
def test_without_memory_or_room_for_a_process_it_tries_again(tmp_path: Path) -> None:
    failing = """
import os, sys
from cubroker.server.keeper import keeper
failures = {}
def often(function, number, error):
    def call(*arguments):
        failures[number] = failures.get(number, 0) + 1
        if failures[number] in (2, 3):
            raise error
        return function(*arguments)
    return call
os.fork = often(os.fork, 1, BlockingIOError(11, "no more processes"))
os.waitpid = often(os.waitpid, 2, MemoryError("none left"))
sys.exit(keeper.keep(keeper.Terms(sys.argv[2:], 10, pause=0)))
"""
    with Keep(tmp_path, program=[sys.executable, "-c", failing]) as keep:
        first = keep.next()
        with memory(b"x") as file:
            first.store("x", file)
        second = keep.again(first)
        assert second.inherited == {"x": 1}
        assert keep.again(second).inherited == {"x": 1}
        said = keep.says("none left")
        assert said.count("cannot start another process: no more processes") == 2
        assert said.count("cannot continue at the moment: none left") == 2


def test_where_no_process_can_be_it_says_so(tmp_path: Path) -> None:
    failing = """
import os, sys
from cubroker.server.keeper import keeper
def fork():
    raise BlockingIOError(11, "no more processes")
os.fork = fork
sys.exit(keeper.keep(keeper.Terms(sys.argv[2:], 10, pause=0)))
"""
    with Keep(tmp_path, program=[sys.executable, "-c", failing]) as keep:
        assert keep.status() == 126
        assert "cannot start another process: no more processes" in keep.said()


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], check=False, stderr=subprocess.DEVNULL).returncode != 0,
    reason="needs to make pid namespaces",
)
def test_as_the_first_process_it_reaps_orphans_and_obeys_signals(tmp_path: Path) -> None:
    with Keep(tmp_path, "--pause", "0", before=["unshare", "--pid", "--fork", "--kill-child"]) as keep:
        first = keep.next()
        assert first.hello["pid"] == 2
        (init,) = children(keep.process.pid)
        for _ in range(20):
            first.leave("sh", "-c", "true & true & echo started")
        eventually(lambda: children(init) == [first.pid], "the orphans to be reaped")
        second = keep.again(first)
        assert second.hello["pid"] == second.hello["group"]
        eventually(lambda: children(init) == [second.pid], "what the first run left to be reaped")
        second.expect(signal.SIGTERM)
        os.kill(init, signal.SIGTERM)
        assert keep.status() == 100 + signal.SIGTERM


@pytest.mark.slow
def test_a_limit_of_open_files_bounds_what_can_be_kept(tmp_path: Path) -> None:
    with Keep(tmp_path, before=["prlimit", "--nofile=256:3024"]) as keep:
        first = keep.next()
        assert first.hello["limit"] == 1000
        assert resource.prlimit(first.pid, resource.RLIMIT_NOFILE) == (3024, 3024)
    done = run("keep", "--descriptors", "5243", "--", "true")
    assert done.returncode == 1
    assert "at most 5242" in done.stderr
    done = run("keep", "--descriptors", "1000000000", "--", "true")
    assert done.returncode == 1
    assert "takes a limit of 2000001024 open files" in done.stderr
    assert re.search(r"or keep at most [1-9]\d* with --descriptors", done.stderr)
    few = subprocess.run(["prlimit", "--nofile=64:64", *COMMAND, "keep", "true"], capture_output=True, text=True)
    assert few.returncode == 1
    assert few.stderr.endswith("raise that (ulimit -Hn, LimitNOFILE=)\n"), "not even one fits"


def test_without_a_place_for_its_socket_it_says_what_it_needs(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    done = run("keep", "--", "true", env={**os.environ, "TMPDIR": str(deep)})
    assert done.returncode == 1
    assert "TMPDIR has to name a directory with a short path" in done.stderr
    assert not list(deep.iterdir())
