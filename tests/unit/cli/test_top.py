"""``cubroker top``: once, where scripts read it, and live on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from cubroker.cli.top import Frame, of, ranges, since, some_of
from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.messages import View
from cubroker.protocol.status import BlockInfo
from tests import forkserver
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.forkserver import CLI
from tests.unit.cli import terminal
from tests.unit.cli.processes import COMMAND, environment, run
from tests.unit.server.configured import configured
from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.scenes import GIB

LAYOUT = Layout.pack([("x", "U8", (5,))])


def test_once_says_what_there_is_without_colours(directory: Path, name: str) -> None:
    with Broker(directory) as client:
        client.create(name, LAYOUT).seal()
        with client.attach(name):
            done = run("top", "--once", "--directory", directory)
            piped = run("top", "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    headline, *_ = done.stdout.splitlines()
    assert headline == "2 devices, 2.0 of 115.2 MiB, 1 version, 1 session, 0 waiting"
    assert done.stdout.splitlines()[-1].split() == [f"{name}@1", "current", "256", "B", "0", "1", str(os.getpid())]
    assert piped.stdout == done.stdout


def test_once_on_a_terminal_has_colours_and_fits(directory: Path) -> None:
    with Broker(directory) as client:
        client.create("models/" + "x" * 90, LAYOUT).seal()
        status, written = terminal.run("top", "--once", "--directory", directory)
    assert status == 0
    assert "\x1b[" in written
    assert "xxxx…" in written


def test_a_terminal_that_cannot_draw_over_a_picture_is_shown_one(directory: Path, name: str) -> None:
    with Broker(directory) as client:
        client.create(name, LAYOUT).seal()
        status, written = terminal.run("top", "--directory", directory, TERM="dumb")
    assert status == 0
    assert f"{name}@1" in written
    assert "\x1b" not in written


def test_without_a_broker_there_is_nothing_to_show(tmp_path: Path) -> None:
    for options in ([], ["--once"]):
        done = run("top", *options, "--directory", tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
    status, written = terminal.run("top", "--directory", tmp_path)
    assert status == 3
    assert "no broker serves" in written


class Screen:
    """What a command writes to a terminal of its own, as it comes."""

    def __init__(self, descriptor: int) -> None:
        self.written = b""
        self._descriptor = descriptor
        self._thread = Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while more := os.read(self._descriptor, 1 << 16):
                self.written += more
        except OSError:  # EIO: the other side is closed
            return

    def close(self) -> None:
        self._thread.join()


@contextmanager
def watching(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [*COMMAND, "top", "--every", "0.2", "--directory", str(directory)]
    env = environment(TERM="xterm", PYTHONIOENCODING="utf-8")
    process = forkserver.start(command, preload=CLI, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = Screen(ours)
    with process:
        try:
            yield process, screen
        finally:
            process.kill()
            process.wait()
            screen.close()
            os.close(ours)


def test_live_it_shows_what_changes_and_ends_at_ctrl_c(broker: BrokerProcess) -> None:
    with watching(broker.directory) as (process, screen):
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        with Broker(broker.directory) as client:
            client.create("llama", LAYOUT).seal()
            eventually(lambda: b"llama@1" in screen.written, "the pool")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    assert b"Traceback" not in screen.written


def test_live_it_waits_for_a_broker_that_went_away(broker: BrokerProcess) -> None:
    with watching(broker.directory) as (process, screen):
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        broker.kill()
        eventually(lambda: b"as of " in screen.written, "the end of the broker")
        broker.start()
        with Broker(broker.directory) as client:
            client.create("llama", LAYOUT).seal()
            eventually(lambda: b"llama@1" in screen.written, "the pool of the next broker")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_live_it_waits_for_a_broker_that_refuses_it_for_a_while() -> None:
    with configured("") as broker, watching(broker.directory) as (process, screen):
        eventually(lambda: b"nothing has been loaded" in screen.written, "the first picture")
        broker.kill()
        broker.file.write_text("quota.sessions = 0")
        broker.start()
        eventually(lambda: b"sessions of a quota of 0" in screen.written, "the refusal")
        broker.reload("")
        eventually(lambda: "quota.sessions is now" in broker.log(), "the broker to let it in")
        with Broker(broker.directory) as client:
            client.create("llama", LAYOUT).seal()
            eventually(lambda: b"llama@1" in screen.written, "the pool")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def lines(view: View, width: int = 80, height: int | None = None, own: int = 0) -> list[str]:
    return [line.plain.rstrip() for line in Frame(width, height, False, own).lines(view, scenes.NOW)]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize(("devices", "pools"), [(1, 0), (1, 5), (2, 500), (8, 5), (9, 5), (16, 500)])
def test_a_picture_is_as_wide_as_the_terminal_and_no_wider(width: int, devices: int, pools: int) -> None:
    drawn = lines(scenes.view(devices, pools), width)
    assert max(map(len, drawn)) <= width
    assert len([line for line in drawn if "[" in line and "]" in line]) == (
        devices if devices <= 8 else -(-devices // 2)
    )


def test_sixteen_devices_and_five_hundred_pools_fit_a_screen() -> None:
    view = scenes.view(16, 500)
    drawn = lines(view, 80, 24)
    assert len(drawn) <= 24
    for index in range(16):
        assert any(line.startswith(f"{index:>2} [") or f"  {index:>2} [" in line for line in drawn)
    assert drawn[-1] == f"… and {500 - len([line for line in drawn if '@' in line]):,} more"
    assert lines(view)[-1] != drawn[-1]
    assert len([line for line in lines(view) if "@" in line]) == 500


def test_a_picture_says_everything_in_one_line_each() -> None:
    view = scenes.view(1, 5)
    drawn = lines(view)
    assert drawn[0] == "1 device, 54.6 of 126.0 GiB, 5 versions, 10 sessions (1 detached), 3 waiting"
    assert drawn[2] == " 0 NVIDIA H200      [███████████████~                    ····] 54.6 of 126.0 GiB"
    assert drawn[3] == "   █ current  ~ freeing  · outside the budget"
    assert drawn[6] == "create mixtral-8x22b: for room, 88.0 GiB, 5 min, process 40000 (root)"
    assert drawn[8] == "lock mixtral-8x22b: for its turn, 7 s, process 40021 (root)"
    assert drawn[10].split() == ["POOL", "STATE", "SIZE", "ON", "LEASES", "HELD", "BY"]
    largest = max(view.pools, key=lambda pool: pool.nbytes)
    assert drawn[11].split()[:2] == [f"{largest.name}@{largest.version}", "current"]


def test_whoever_looks_is_not_counted() -> None:
    view = scenes.view(1, 5)
    assert "9 sessions" in lines(view, own=view.clients[0].session)[0]


def test_pools_that_only_processes_of_others_hold_are_told_from_those_that_nobody_holds() -> None:
    view = msgspec.structs.replace(scenes.view(1, 5), clients=())
    held = {f"{pool.name}@{pool.version}": pool.leases for pool in view.pools}
    said = {line.split()[0]: line for line in lines(view) if "@" in line}
    assert said.keys() == held.keys()
    assert all(line.endswith("other users" if held[name] else "-") for name, line in said.items())


def test_nothing_is_said_in_a_sentence() -> None:
    assert lines(scenes.view(1, 0))[-1] == "No pools: nothing has been loaded yet, or everything is retired."


def test_whatever_is_there_has_a_part_of_the_bar_however_small() -> None:
    empty = scenes.view(1, 0)

    def bar(**states: int) -> str:
        uuid = empty.devices[0].uuid
        blocks = tuple(
            BlockInfo(uuid, "x", 1, state, "freeing" if state == "freeing" else "held", nbytes, 0)
            for state, nbytes in states.items()
        )
        line = lines(msgspec.structs.replace(empty, blocks=blocks))[2]
        return line[line.index("[") + 1 : line.index("]")]

    assert bar(current=1, draft=1, superseded=1, retired=1, freeing=1).startswith("█▒▓░~ ")
    assert len(bar(current=140 * GIB, draft=1)) == len(bar())


def test_terminals_without_these_characters_have_others() -> None:
    drawn = Frame(80, None, True, 0).lines(scenes.view(8, 5), scenes.NOW)
    assert all(line.plain.isascii() for line in drawn[2:11])


@pytest.mark.parametrize(("numbers", "words"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 5], "0-3,5"), ([0, 2, 4], "0,2,4")])
def test_runs_of_devices_are_ranges(numbers: list[int], words: str) -> None:
    assert ranges(numbers) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0 s"), (12.4, "12 s"), (300, "5 min"), (3 * 3600, "3 h"), (200_000, "2 d")]
)
def test_times_are_told_roughly(seconds: float, words: str) -> None:
    assert since(seconds) == words


def test_parts_are_told_in_the_unit_of_the_whole() -> None:
    assert of(54 * GIB, 126 * GIB) == "54.0 of 126.0 GiB"
    assert of(512, 126 * GIB) == "512 B of 126.0 GiB"


@pytest.mark.parametrize(
    ("width", "words"), [(20, "40000, 40013, 40026"), (16, "40000, 40013 +1"), (9, "40000 +2"), (5, "4000…"), (0, "…")]
)
def test_as_many_holders_are_named_as_fit(width: int, words: str) -> None:
    assert some_of(["40000", "40013", "40026"], width) == words
