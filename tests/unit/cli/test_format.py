"""How figures and clients read, and what happens when nobody reads them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

import pytest

from cubroker.cli import format
from cubroker.protocol.status import ClientInfo, LeaseInfo, ProcessInfo
from cubroker.server.transport.unix_sockets import read_process
from tests import checkpoints, forkserver
from tests.brokers import eventually
from tests.forkserver import CLI
from tests.unit.cli.processes import COMMAND, DEADLINE

ID = "3f2a9c5d1e07" + "ab" * 26
CONTAINERS = Path(__file__).parents[2] / "containers.json"
"""Paths of cgroups, and the containers that commands and the page name for them."""

OWN = ClientInfo(7, os.getpid(), os.getuid(), "connected", ())


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
    assert format.size(nbytes) == expected


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
    assert format.duration(seconds) == expected


def test_a_rate_is_bytes_in_a_second() -> None:
    assert format.rate(3 << 30, 2.0) == "1.5 GiB/s"
    assert format.rate(5, 0.0) == "at once"


def test_counts_agree_with_their_noun() -> None:
    assert [format.count(number, "lease") for number in (0, 1, 1200)] == ["0 leases", "1 lease", "1,200 leases"]


def test_users_have_names_and_strangers_numbers() -> None:
    assert format.user(0) == "root"
    assert format.user(3_999_999_999) == "3999999999"


def test_what_would_move_the_cursor_is_escaped() -> None:
    assert format.printable("w.\x1b[2Jx\ny") == r"w.\x1b[2Jx\ny"
    assert format.printable("größe") == "größe"


def test_a_reason_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    format.complain("first\n  second\x1b")
    assert capsys.readouterr().err == "cubroker: first second\\x1b\n"


def test_a_reader_that_went_away_ends_the_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "import click, sys; from cubroker.cli import format, main\n"
        "main.Commands.get_command = lambda *_: click.Command('ls', callback=lambda: format.say('a line'))\n"
        "sys.argv = ['cubroker', 'ls']; sys.exit(main.main())"
    )
    with io.FileIO(writer, "w") as broken:
        done = forkserver.run(["-c", program], preload=CLI, stdout=broken, stderr=subprocess.PIPE, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (format.BROKEN_PIPE, b"")


def closed(streams: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the standard streams closed that a shell's redirections name."""
    script = f'"$0" -m cubroker.cli "$@" {streams}'
    return subprocess.run(
        ["sh", "-c", script, sys.executable, *arguments], capture_output=True, text=True, timeout=DEADLINE, check=False
    )


@pytest.mark.parametrize("streams", ["2>&-", "<&- 2>&-"])
def test_a_command_works_with_standard_streams_closed(directory: Path, streams: str) -> None:
    done = closed(streams, "devices", "--directory", str(directory))
    assert (done.returncode, done.stderr) == (0, "")
    assert "HOST-" in done.stdout


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["devices", "ls --json", "ls --help"])
def test_output_that_is_closed_is_a_failure_in_one_line(directory: Path, command: str, streams: str) -> None:
    done = closed(streams, *command.split(), "--directory", str(directory))
    assert done.returncode == 1
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert [line.endswith("Bad file descriptor") for line in said] == ([True] if streams == ">&-" else [])


def test_the_children_of_a_command_have_all_standard_streams() -> None:
    child = "import os; assert all(os.fstat(number) for number in range(3))"
    program = (
        "import subprocess, sys; from cubroker.cli import main\n"
        f"main._open_streams(); sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    script = ["sh", "-c", '"$0" -c "$1" <&- >&-', sys.executable, program]
    done = subprocess.run(script, stderr=subprocess.PIPE, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("lost", ["nobody reads it", "the disk is full"])
def test_remarks_that_cannot_be_written_change_nothing(directory: Path, tmp_path: Path, name: str, lost: str) -> None:
    path = checkpoints.write(tmp_path / "x.safetensors", checkpoints.filled([("x", "U8", (5,))]))
    load = ["load", name, str(path), "--directory", str(directory)]
    for words, status in ((load, 0), (["ls", "--directory", str(tmp_path / "nowhere")], 3), (["load"], 2)):
        if lost == "nobody reads it":
            reader, writer = os.pipe()
            os.close(reader)
        else:
            writer = os.open("/dev/full", os.O_WRONLY)
        with io.FileIO(writer, "w") as broken:
            done = forkserver.run(
                [*COMMAND[1:], *words], preload=CLI, stdout=subprocess.PIPE, stderr=broken, text=True, timeout=DEADLINE
            )
        assert done.returncode == status
        assert done.stdout.startswith(f"{name}@1:") if words is load else done.stdout == ""


def test_output_that_cannot_be_written_is_a_failure_in_one_line(directory: Path) -> None:
    command = [*COMMAND[1:], "devices", "--directory", str(directory)]
    with Path("/dev/full").open("w") as full:
        done = forkserver.run(command, preload=CLI, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (1, "cubroker: cannot write the output: No space left on device\n")


@pytest.mark.parametrize(
    ("numbers", "words"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 5], "0-3,5"), ([0, 1], "0,1"), ([0, 2, 4], "0,2,4")]
)
def test_runs_of_devices_are_ranges(numbers: list[int], words: str) -> None:
    assert format.ranges(numbers) == words


def test_parts_are_told_in_the_unit_of_the_whole() -> None:
    assert format.part(54 * (1 << 30), 126 * (1 << 30)) == "54.0 of 126.0 GiB"
    assert format.part(512, 126 * (1 << 30)) == "512 B of 126.0 GiB"


@pytest.mark.parametrize(
    ("width", "words"), [(20, "40000, 40013, 40026"), (16, "40000, 40013 +1"), (9, "40000 +2"), (5, "4000…"), (0, "…")]
)
def test_as_many_holders_are_named_as_fit(width: int, words: str) -> None:
    assert format.some_of(["40000", "40013", "40026"], width) == words


POOLS = ("~POOL", ">SIZE", "OWNER")


def render_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *limit: int, **terms: object) -> Iterator[str]:
    """Render a table whose rows are their cells."""
    columns = {title: itemgetter(number) for number, title in enumerate(titles)}
    return format.render_table(rows, columns, *limit, **terms)  # type: ignore[arg-type]


def test_columns_are_aligned_and_lines_end_where_their_text_does() -> None:
    rows = [("llama@2", "14.9 GiB", "root"), ("bert@1", "9 B", "a-long-name")]
    assert list(render_table(POOLS, rows)) == [
        "POOL         SIZE  OWNER",
        "llama@2  14.9 GiB  root",
        "bert@1        9 B  a-long-name",
    ]


def test_a_narrow_terminal_folds_one_column_and_loses_nothing() -> None:
    name = "models/" + "abcdefghij" * 5
    lines = list(render_table(POOLS, [(name, "14.9 GiB", "root")], limit=50))
    assert max(map(len, lines)) <= 50
    assert lines[1].endswith("14.9 GiB  root")
    assert "".join(line.split()[0] for line in lines[1:]) == name


def test_nothing_is_folded_where_there_is_room_or_no_terminal() -> None:
    name = "n" * 200
    for limit in (None, 300):
        assert list(render_table(POOLS, [(name, "9 B", "root")], limit))[1] == f"{name}   9 B  root"


def test_a_column_keeps_a_readable_width_in_the_narrowest_terminal() -> None:
    lines = list(render_table(POOLS, [("n" * 40, "9 B", "root")], limit=5))
    assert [len(line.split()[0]) for line in lines[1:]] == [16, 16, 8]


def test_a_cell_cannot_break_the_table() -> None:
    lines = list(render_table(POOLS, [("evil\nname\x1b[0m", "9 B", "root")]))
    assert len(lines) == 2
    assert lines[1].startswith(r"evil\nname\x1b[0m")


def test_an_empty_cell_keeps_its_place() -> None:
    assert list(render_table(POOLS, [("", "9 B", "root")]))[1] == "       9 B  root"


def test_columns_that_can_be_spared_go_before_one_is_folded() -> None:
    rows = [("llama-3.3-70b@2", "14.9 GiB", "root")]
    lines = list(render_table(POOLS, rows, limit=26, spare=("OWNER",)))
    assert lines == ["POOL                 SIZE", "llama-3.3-70b@2  14.9 GiB"]
    assert next(render_table(POOLS, rows, limit=36, spare=("OWNER",))).endswith("OWNER")


def test_a_long_name_is_shown_by_both_its_ends() -> None:
    assert format.squeeze("llama-3.3-70b@2", 15) == "llama-3.3-70b@2"
    assert format.squeeze("llama-3.3-70b@12", 11) == "llama…0b@12"
    assert [format.squeeze("llama", width) for width in (0, 1, 2)] == ["…", "…", "l…"]


def test_parts_go_whole_the_first_of_the_spare_ones_first() -> None:
    parts = ["8 devices", "3 versions", "0 waiting"]
    assert format.fitting(parts, 32, (1, 0)) == "8 devices, 3 versions, 0 waiting"
    assert format.fitting(parts, 31, (1, 0)) == "8 devices, 0 waiting"
    assert format.fitting(parts, 10, (1, 0)) == "0 waiting"
    assert format.fitting(parts, 5, (1, 0)) == "0 wa…"


def test_devices_that_are_gone_are_told_once() -> None:
    indexes = {"a": 0, "b": 1, "c": 2}
    assert format.places(indexes, ["c", "a", "b"]) == "0-2"
    assert format.places(indexes, ["x", "b", "y"]) == "1,gone"
    assert format.places(indexes, ["x"]) == "gone"


def test_a_name_is_folded_where_a_part_of_it_ends() -> None:
    (_, *lines) = render_table(("~POOL",), [("deepseek/r1-distill-qwen-14b@2",)], limit=29)
    assert lines == ["deepseek/r1-distill-qwen-14b", "@2"]
    (_, *lines) = render_table(("~POOL",), [("deepseek/r1-distill-qwen-14b@2",)], limit=20)
    assert lines == ["deepseek/r1-distill-", "qwen-14b@2"]


def test_a_list_is_folded_before_a_column_goes() -> None:
    row = ("container 3f2a9c5d1e07", "llama-3.3-70b@1, bert@2, whisper-large@3")
    lines = list(render_table(("CONTAINER", "~LEASES"), [row], limit=40, spare=("CONTAINER",)))
    assert lines[0].split() == ["CONTAINER", "LEASES"]
    assert [line[24:] for line in lines[1:]] == ["llama-3.3-70b@1,", "bert@2,", "whisper-large@3"]


def test_a_list_is_folded_between_its_elements() -> None:
    lines = list(render_table(("~LEASES",), [("llama@1, bert@2, whisper@3",)], limit=18))
    assert lines == ["LEASES", "llama@1, bert@2,", "whisper@3"]
    at_the_edge = list(render_table(("~LEASES",), [("llama-3.3-70b-a@1, bert@2",)], limit=18))
    assert at_the_edge == ["LEASES", "llama-3.3-70b-a@1,", "bert@2"], "the comma is the last that fits"


def test_documents_have_a_version_and_no_empty_texts(capsys: pytest.CaptureFixture[str]) -> None:
    format.document({"why": "", "pools": ["a", ""], "leases": 0})
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "why": None, "pools": ["a", None], "leases": 0}
    format.document([LeaseInfo("", 1)])
    assert json.loads(capsys.readouterr().out) == [{"schema": 1, "pool": None, "version": 1, "held_since": None}]


# -- clients -------------------------------------------------------------------------------------------


def client(cgroup: str | None) -> ClientInfo:
    return ClientInfo(1, 4711, 0, "connected", (), process=ProcessInfo("vllm", cgroup, 1000.0))


@pytest.mark.parametrize(("cgroup", "container"), json.loads(CONTAINERS.read_text()))
def test_a_container_has_the_name_that_its_runtime_shows(cgroup: str | None, container: str) -> None:
    assert format.container(client(cgroup).process) == container


def test_a_process_is_told_with_user_and_container() -> None:
    assert format.client_label(client(f"/docker/{ID}")) == "vllm 4711 (root, docker 3f2a9c5d1e07)"
    assert format.client_label(client(None)) == "vllm 4711 (root)"
    told = format.client_with_user(client(f"/docker/{ID}")), format.client_short(client(f"/docker/{ID}"))
    assert told == ("vllm 4711 (root)", "vllm 4711"), "where there is less room"
    assert format.client_label(ClientInfo(1, 4711, 0, "connected", ())) == "? 4711 (root)"


def test_ages_are_told_where_they_are_known() -> None:
    leases = LeaseInfo("a", 1, 1090.0), LeaseInfo("b", 1, 1060.0), LeaseInfo("c", 1)
    holder = ClientInfo(1, 4711, 0, "connected", leases, process=ProcessInfo("vllm", None, 1000.0))
    assert (format.client_age(holder, 1100.0), format.held_for(holder.leases, len(holder.leases), 1100.0)) == (
        "100 s",
        "40 s",
    )
    older = ClientInfo(1, 4711, 0, "connected", (LeaseInfo("a", 1),))
    assert (format.client_age(older, 1100.0), format.held_for(older.leases, len(older.leases), 1100.0)) == ("?", "?")
    assert format.held_for((), 0, 1100.0) == "-"


def test_processes_that_the_broker_could_not_see_are_looked_up_where_numbers_mean_the_same() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        hidden = ClientInfo(8, other.pid, os.getuid(), "connected", ())
        unseen = ClientInfo(9, 0, os.getuid(), "connected", ())
        eventually(lambda: (info := read_process(other.pid)) and info.name == "cat", "the program to begin")
        found = format.other_clients([OWN, hidden, unseen, client("/x")], OWN.session)
        assert format.client_name(found[0]) == "cat"
        assert found[1:] == [unseen, client("/x")]
        elsewhere = ClientInfo(7, os.getpid() + 1, os.getuid(), "connected", ())
        for own in ([elsewhere], []):
            assert format.other_clients([*own, hidden], OWN.session) == [hidden]
        other.communicate()
