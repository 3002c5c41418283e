"""Standard error that nobody reads, that is full, or that is not there: the broker serves on, and ends when told to."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol.errors import Unavailable
from cubroker.protocol.paths import MAX_PATH, SESSION_SOCKET
from cubroker.server import logs
from cubroker.server.logs import LogWriter
from cubroker.server.transport.gateway_process import GatewayProcess
from tests.brokers import DEVICES, PATIENCE, eventually
from tests.unit.server.clients import LAYOUT, connect, greet
from tests.unit.server.loops import Recorder, run
from tests.unit.server.processes import gateway_of

FULL = 64 << 10
"""Bytes that a pipe of these tests holds."""


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, FULL)
    try:
        yield read, write
    finally:
        for end in (read, write):
            try:
                os.close(end)
            except OSError:
                assert end == read


@contextmanager
def serving(stderr: int | None) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A broker that logs to ``stderr`` (None: to nothing, the descriptor is closed), and must end well."""
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        directory = Path(folder) / "run"
        command = [sys.executable, "-m", "cubroker.server", str(directory), "--devices", DEVICES]
        if stderr is None:
            command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *command]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr) as process:
            try:
                eventually(lambda: listens(directory), "the broker to listen")
                yield process, directory
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()


def listens(directory: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        return caller.connect_ex(str(directory / SESSION_SOCKET)) == 0


def use(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Have the broker log something, and its gateway go and come; both go on."""
    with connect(directory) as connection:
        greet(connection)
    with Broker(directory) as client:  # it asks again, where a request went with the gateway
        client.create("pool", LAYOUT).seal()
        gateway = gateway_of(process.pid)
        os.kill(gateway, signal.SIGABRT)
        with client.attach("pool") as pool:
            assert pool.version == 1
        eventually(lambda: gateway_of(process.pid) != gateway, "another gateway")


@pytest.mark.slow
def test_a_broker_whose_log_nobody_reads_any_more_goes_on() -> None:
    with pipe() as (read, write), serving(write) as broker:
        os.close(read)
        use(*broker)


@pytest.mark.slow
def test_a_broker_whose_log_is_never_read_goes_on() -> None:
    with pipe() as (read, write):
        os.write(write, bytes(FULL))
        with serving(write) as broker:
            use(*broker)
        assert os.read(read, 2 * FULL) == bytes(FULL)


@pytest.mark.slow
def test_a_broker_without_standard_error_goes_on() -> None:
    with serving(None) as broker:
        use(*broker)


def test_lines_that_cannot_be_written_are_counted_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FAREWELL", PATIENCE)  # the last ones are to be written before the pipe is closed
    with pipe() as (read, write):
        os.write(write, bytes(FULL))
        lines = LogWriter(write)
        for number in range(logs.MAX_LINES + 100):
            lines.say(f"line {number}")
        said = b""
        while b"lost" not in said:
            said += os.read(read, FULL)
        lines.close()
    first, lost, *_ = said.lstrip(b"\0").decode().splitlines()
    assert first == "line 0"
    # The first is on its way or still waits, so there is room for one more, or none.
    assert lost in {f"{number} lines of the log were lost here: they could not be written" for number in (99, 100)}


@contextmanager
def full_disk(path: Path, room: int, written: int, lost: int) -> Iterator[LogWriter]:
    """A log that wrote lines until a disk with room for so many bytes was full, and lost others; now there is room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("wb") as file:
        lines = LogWriter(file.fileno())
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # a write beyond it is cut off, or fails
        try:
            for number in range(written + lost):
                lines.say(f"line {number}")
            eventually(lambda: lines._unwritten == lost, "the lines to be lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        yield lines
        lines.close()


def test_a_line_that_a_full_disk_cuts_off_is_completed_and_lost_ones_are_counted(tmp_path: Path) -> None:
    with full_disk(path := tmp_path / "log", room=12, written=2, lost=2) as lines:
        assert path.read_bytes() == b"line 0\nline "
        lines.say("line 4")
    lost = "2 lines of the log were lost here: they could not be written"
    assert path.read_text().splitlines() == ["line 0", "line 1", lost, "line 4"]


@pytest.mark.parametrize("room", [12, 14])
def test_the_end_of_a_log_that_was_full_has_no_half_line_and_counts_what_is_lost(tmp_path: Path, room: int) -> None:
    with full_disk(path := tmp_path / "log", room=room, written=2, lost=1):
        pass
    lost = "1 line of the log was lost here: it could not be written"
    assert path.read_text().splitlines() == ["line 0", "line 1", lost]


def test_a_record_that_makes_no_text_harms_nobody() -> None:
    with pipe() as (read, write):
        lines = LogWriter(write)
        record = logging.LogRecord("name", logging.INFO, __file__, 1, "%d", ("no number",), None)
        raising, logging.raiseExceptions = logging.raiseExceptions, False
        try:
            lines.emit(record)
        finally:
            logging.raiseExceptions = raising
        lines.say("the next line, and a lone surrogate \ud800")
        lines.close()
        assert os.read(read, FULL) == b"the next line, and a lone surrogate \\ud800\n"


def test_what_a_gateway_says_as_it_fails_is_logged_and_told(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            gateway = GatewayProcess(listener, Path("/" + "x" * MAX_PATH))
            gateway.start()
            with pytest.raises(Unavailable, match=r"ended with status 1 \(.*ZMQError"):
                await gateway.connect(Recorder().queue)
            await gateway.stop()

    run(test())
    assert "the gateway said: Traceback" in caplog.text
