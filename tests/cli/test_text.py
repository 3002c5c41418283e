"""How figures read, and what happens when nobody reads them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cubroker.cli import text
from tests import checkpoints
from tests.brokers import BrokerProcess
from tests.cli.processes import COMMAND, DEADLINE


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (90_869_248, "86.7 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (150 << 30, "150.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_read_in_powers_of_1024(nbytes: int, expected: str) -> None:
    assert text.size(nbytes) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.000842, "0.842 ms"),
        (0.0052, "5.20 ms"),
        (0.0341, "34.1 ms"),
        (1.271, "1.27 s"),
        (45.34, "45.3 s"),
        (312, "312 s"),
    ],
)
def test_durations_have_about_three_digits(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


def test_a_rate_is_bytes_in_a_second() -> None:
    assert text.rate(3 << 30, 2.0) == "1.5 GiB/s"
    assert text.rate(5, 0.0) == "at once"


def test_counts_agree_with_their_noun() -> None:
    assert [text.count(number, "lease") for number in (0, 1, 1200)] == ["0 leases", "1 lease", "1,200 leases"]


def test_users_have_names_and_strangers_numbers() -> None:
    assert text.user(0) == "root"
    assert text.user(3_999_999_999) == "3999999999"


def test_what_would_move_the_cursor_is_escaped() -> None:
    assert text.printable("w.\x1b[2Jx\ny") == r"w.\x1b[2Jx\ny"
    assert text.printable("größe") == "größe"


def test_a_reason_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text.complain("first\n  second\x1b")
    assert capsys.readouterr().err == "cubroker: first second\\x1b\n"


def test_a_reader_that_went_away_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "import click, sys; from cubroker.cli import main, text\n"
        "main.Commands.get_command = lambda *_: click.Command('ls', callback=lambda: text.say('a line'))\n"
        "sys.argv = ['cubroker', 'ls']; main.main()"
    )
    with io.FileIO(writer, "w") as broken:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=broken, stderr=subprocess.PIPE, timeout=DEADLINE, check=False
        )
    assert (done.returncode, done.stderr) == (text.BROKEN_PIPE, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_standard_streams_closed(broker: BrokerProcess, closed: str) -> None:
    script = f'"$0" -m cubroker.cli "$@" {closed}'
    arguments = [sys.executable, "devices", "--directory", str(broker.directory)]
    done = subprocess.run(
        ["sh", "-c", script, *arguments], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("HOST-" in done.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("lost", ["nobody reads it", "the disk is full"])
def test_remarks_that_cannot_be_written_change_nothing(broker: BrokerProcess, tmp_path: Path, lost: str) -> None:
    path = checkpoints.write(tmp_path / "x.safetensors", checkpoints.filled([("x", "U8", (5,))]))
    load = ["load", "x", str(path), "--directory", str(broker.directory)]
    for words, status in ((load, 0), (["ls", "--directory", str(tmp_path / "nowhere")], 3), (["load"], 2)):
        if lost == "nobody reads it":
            reader, writer = os.pipe()
            os.close(reader)
        else:
            writer = os.open("/dev/full", os.O_WRONLY)
        with io.FileIO(writer, "w") as broken:
            done = subprocess.run(
                [*COMMAND, *words], stdout=subprocess.PIPE, stderr=broken, text=True, timeout=DEADLINE, check=False
            )
        assert (done.returncode, done.stdout[:4]) == (status, "x@1:" if words is load else "")


def test_output_that_cannot_be_written_is_a_failure_in_one_line(broker: BrokerProcess) -> None:
    command = [*COMMAND, "devices", "--directory", broker.directory]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stderr) == (1, "cubroker: cannot write the output: No space left on device\n")
