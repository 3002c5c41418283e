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

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.cli import terminal
from tests.cli.processes import COMMAND, environment, run
from tests.server.configured import configured

LAYOUT = Layout.pack([("x", "U8", (5,))])


def test_once_says_what_there_is_without_colours(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as client:
        client.create("llama", LAYOUT).seal()
        with client.attach("llama"):
            done = run("top", "--once", "--directory", broker.directory)
            piped = run("top", "--directory", broker.directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    headline, *_ = done.stdout.splitlines()
    assert headline == "2 devices, 2.0 of 115.2 MiB, 1 version, 1 session, 0 waiting"
    assert done.stdout.splitlines()[-1].split() == ["llama@1", "current", "256", "B", "0", "1", str(os.getpid())]
    assert piped.stdout == done.stdout


def test_once_on_a_terminal_has_colours_and_fits(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as client:
        client.create("models/" + "x" * 90, LAYOUT).seal()
        status, written = terminal.run("top", "--once", "--directory", broker.directory)
    assert status == 0
    assert "\x1b[" in written
    assert "xxxx…" in written


def test_a_terminal_that_cannot_draw_over_a_picture_is_shown_one(broker: BrokerProcess) -> None:
    with Broker(broker.directory) as client:
        client.create("llama", LAYOUT).seal()
        status, written = terminal.run("top", "--directory", broker.directory, TERM="dumb")
    assert status == 0
    assert "llama@1" in written
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
    process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
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
