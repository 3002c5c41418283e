"""load and verify: what they say, and what is left when they fail."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cubroker.cli import format
from cubroker.cli.load import EVERY, ProgressLines, progress
from cubroker.client import Broker, Draft
from cubroker.client.loading.loader import telling_waits
from cubroker.protocol import Layout
from tests import checkpoints
from tests.brokers import eventually, serving
from tests.stores import storing
from tests.unit.cli import terminal
from tests.unit.cli.processes import DEADLINE, run, started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "x.safetensors", checkpoints.filled(checkpoints.ODD_SHAPES))


def states(directory: Path) -> list[tuple[str, int, str]]:
    with Broker(directory) as broker:
        return [(pool.name, pool.version, pool.state) for pool in broker.pools()]


def test_a_load_says_what_it_published_and_how_fast(directory: Path, path: Path, name: str) -> None:
    for version in (1, 2):
        done = run("load", name, path, "--directory", directory)
        assert (done.returncode, done.stderr) == (0, f"loading {name}\n")
        assert done.stdout.startswith(f"{name}@{version}: 6 tensors, ")
        assert done.stdout.rstrip().endswith("/s)")
    assert states(directory) == [(name, 2, "current")]


def test_a_terminal_sees_the_same_line_in_the_end(directory: Path, path: Path, name: str) -> None:
    status, written = terminal.run("load", name, path, "--directory", directory)
    assert status == 0
    assert f"loading {name}" in written
    assert f"{name}@1: 6 tensors, " in written.splitlines()[-1]


def test_a_load_can_be_shared_by_descriptor(directory: Path, path: Path, name: str) -> None:
    assert run("load", name, path, "--share", "vmm", "--device", "0,1", "--directory", directory).returncode == 0
    with Broker(directory) as broker:
        assert [(pool.share, len(pool.devices)) for pool in broker.pools()] == [("vmm", 2)]
    assert run("verify", name, path, "--directory", directory).returncode == 0


@pytest.mark.slow
def test_a_load_that_names_no_share_kind_is_shared_by_descriptor_and_durable_where_there_is_a_store(
    directory: Path, path: Path, name: str
) -> None:
    def loaded(place: Path, *options: str) -> tuple[str, bool]:
        assert run("load", name, path, *options, "--directory", place).returncode == 0
        with Broker(place) as broker:
            return [(pool.share, pool.durable) for pool in broker.pools()][-1]

    assert loaded(directory) == ("vmm", False)
    assert loaded(directory, "--share", "ipc") == ("ipc", False)
    with storing() as broker:
        assert loaded(broker.directory) == ("vmm", True)
        assert loaded(broker.directory, "--no-durable") == ("vmm", False)
        assert loaded(broker.directory, "--share", "ipc") == ("ipc", False)


def test_a_durable_load_is_shared_by_descriptor_and_needs_a_store(directory: Path, path: Path, name: str) -> None:
    for share in ((), ("--share", "ipc")):
        done = run("load", name, path, "--durable", *share, "--directory", directory)
        assert (done.returncode, done.stdout) == (1, "")
        words = "use vmm or multicast" if share else "has no store"
        what = "memory that is shared as ipc" if share else "this broker"
        assert f"{name} is to be durable, and {what}" in done.stderr
        assert words in done.stderr


def test_the_shards_of_a_pool_are_compared_as_one_copy(directory: Path, tmp_path: Path) -> None:
    plan = {"embed": 0, "head": 1}
    layout = Layout.pack([("embed", "U8", (300,)), ("head", "U8", (5,))], groups=plan)
    with Broker(directory) as broker, broker.create("moe", layout, devices=(0, 1), plan=plan) as draft:
        draft.seal()
    tensors = {"embed": ("U8", (300,), bytes(300)), "head": ("U8", (5,), bytes(5))}
    done = run("verify", "moe", checkpoints.write(tmp_path / "moe.safetensors", tensors), "--directory", directory)
    assert (done.returncode, done.stdout) == (0, "moe@1: 2 tensors, 768 B, equal to the files\n")
    tensors["head"] = ("U8", (5,), bytes([0, 0, 7, 0, 0]))
    done = run("verify", "moe", checkpoints.write(tmp_path / "other.safetensors", tensors), "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "moe@1: tensor 'head' differs, first in byte 2 of its 5\n")


@pytest.mark.parametrize("command", ["load", "verify"])
def test_progress_is_one_line_of_a_narrow_terminal_whose_cursor_stays(
    directory: Path, path: Path, command: str, name: str
) -> None:
    assert run("load", name, path, "--directory", directory).returncode == 0
    status, written = terminal.run(command, name, path, "--directory", directory, columns=40)
    assert status == 0
    assert written.count("\x1b[1A") == 1  # one line up, to erase the bar in the end
    assert " 0 B/s" not in written, "a rate takes two moments"
    assert "\x1b[?25" not in written


def test_a_load_goes_to_the_devices_that_were_named_in_slabs_that_were_asked_for(
    directory: Path, path: Path, name: str
) -> None:
    with Broker(directory) as broker:
        second = broker.devices()[1].uuid
        assert run("load", name, path, "--device", second, "--slab", "4KiB", "--directory", directory).returncode == 0
        info, layout, _ = broker.describe(name)
    assert info.devices == (second,)
    assert len(layout.allocations) > 1


def test_load_verify_and_retire_print_one_document(directory: Path, path: Path, name: str, tmp_path: Path) -> None:
    def document(command: str, *arguments: str | Path, status: int = 0) -> dict[str, Any]:
        done = run(command, name, *arguments, "--json", "--directory", directory)
        assert done.returncode == status
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    loaded = document("load", path, "--device", "0,1")
    keys = ["schema", "name", "version", "nbytes", "tensors", "seconds", "copy_seconds", "loaded"]
    assert list(loaded) == keys
    assert (loaded["schema"], loaded["name"], loaded["version"], loaded["loaded"]) == (1, name, 1, True)
    assert document("load", path, "--if-absent")["loaded"] is False
    compared = document("verify", path)
    assert (compared["schema"], compared["name"], compared["version"], compared["digest"]) == (1, name, 1, None)
    assert [(each["index"], each["equal"], each["differences"]) for each in compared["devices"]] == [
        (0, True, []),
        (1, True, []),
    ]
    sizes = {"load": loaded["nbytes"]} | {f"verify {each['index']}": each["nbytes"] for each in compared["devices"]}
    with Broker(directory) as broker:
        assert sizes == dict.fromkeys(sizes, broker.pools()[0].nbytes)
    other = checkpoints.write(tmp_path / "other.safetensors", checkpoints.filled([("else", "U8", (5,))]))
    differing = document("verify", other, status=1)["devices"][0]
    assert differing["equal"] is False
    assert any("else" in line for line in differing["differences"])
    with Broker(directory) as broker, broker.attach(name, device=0):
        assert document("retire") == {"schema": 1, "name": name, "version": 1, "leases": 1}


def test_devices_have_the_names_of_frameworks_and_uuids(directory: Path, path: Path, name: str) -> None:
    with Broker(directory) as broker:
        first, second = (device.uuid for device in broker.devices())
    assert (
        run("load", name, path, "--device", f"cuda:0,{second[:12].lower()}", "--directory", directory).returncode == 0
    )
    with Broker(directory) as broker:
        assert [pool.devices for pool in broker.pools()] == [(first, second)]
    done = run("load", name, path, "--device", "0,cuda:0", "--directory", directory)
    assert (done.returncode, done.stderr) == (1, "cubroker: --device 0,cuda:0 names a device twice; give each once\n")
    done = run("load", name, path, "--device", "cuda", "--directory", directory)
    assert (done.returncode, "does not say which one; write cuda:N; the broker has 0 (" in done.stderr) == (1, True)


def test_a_load_spreads_tensors_by_a_plan(directory: Path, path: Path, tmp_path: Path, name: str) -> None:
    with Broker(directory) as broker:
        first, second = (device.uuid for device in broker.devices())
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"matrix": 1, "*": first}))
    assert run("load", name, path, "--plan", plan, "--directory", directory).returncode == 0
    with Broker(directory) as broker:
        (info,) = broker.pools()
        assert (info.sharded, set(info.devices)) == (True, {first, second})
        with broker.attach(name, device=1) as shard:
            assert list(shard) == ["matrix"]
    done = run("verify", name, path, "--directory", directory)
    assert (done.returncode, done.stdout.endswith("equal to the files\n")) == (0, True)
    plan.write_text(json.dumps({"*": 7}))
    done = run("load", name, path, "--plan", plan, "--directory", directory)
    assert (done.returncode, "the broker has no device '7'; it has 0 (cubroker" in done.stderr) == (1, True)


@pytest.mark.slow
def test_a_plan_that_is_none_is_wrong_usage(directory: Path, path: Path, tmp_path: Path, name: str) -> None:
    plan = tmp_path / "plan.json"
    done = run("load", name, path, "--plan", plan, "--directory", directory)
    reason = f"cannot read the plan {plan}: No such file or directory; check the path"
    assert (done.returncode, done.stderr) == (1, f"cubroker: {reason}\n")
    for text, says in (
        ("{", "Expecting"),
        ("\0", "Expecting"),
        ('{"*": 1.5}', "Expected"),
        ("{}", "length >= 1"),
        ('{"a": 0, "*": 1, "a": 1}', "'a' appears twice"),
    ):
        plan.write_text(text)
        done = run("load", name, path, "--plan", plan, "--directory", directory)
        assert (done.returncode, says in done.stderr) == (2, True), done.stderr
    plan.write_text('{"*": 1}')
    done = run("load", name, path, "--plan", plan, "--device", "0", "--directory", directory)
    assert (done.returncode, "leave --device out" in done.stderr) == (2, True), done.stderr
    assert states(directory) == []


def test_a_load_gives_a_pool_its_mode_and_the_next_one_keeps_it(directory: Path, path: Path, name: str) -> None:
    for version, options in ((1, ("--mode", "640")), (2, ()), (3, ("--mode", "0600"))):
        assert run("load", name, path, *options, "--directory", directory).returncode == 0
        with Broker(directory) as broker:
            assert broker.describe(name, version)[0].mode == (0o600 if version == 3 else 0o640)


def test_if_absent_loads_once(directory: Path, path: Path, name: str) -> None:
    arguments = ("load", name, path, "--if-absent", "--directory", directory)
    with started(*arguments) as first, started(*arguments) as second:
        said = [process.communicate(timeout=DEADLINE)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sorted("already there" in line for line in said) == [False, True]
    assert all(line.startswith(f"{name}@1: ") for line in said)
    assert states(directory) == [(name, 1, "current")]


@pytest.mark.slow
def test_verify_tells_equal_from_different(directory: Path, path: Path, tmp_path: Path, name: str) -> None:
    other = checkpoints.write(tmp_path / "other.safetensors", checkpoints.filled(checkpoints.ODD_SHAPES, seed=1))
    assert run("load", name, path, "--directory", directory).returncode == 0
    equal = run("verify", name, path, "--directory", directory)
    different = run("verify", f"{name}@1", other, "--directory", directory)
    assert equal.returncode == 0
    with Broker(directory) as broker:
        size = format.size(broker.pools()[0].nbytes)  # as load and ls say it, padding included
    assert equal.stdout == f"{name}@1: 6 tensors, {size}, equal to the files\n"
    assert different.returncode == 1
    assert "tensor 'matrix' differs" in different.stdout
    assert different.stderr.splitlines()[-1] == f"cubroker: {name}@1 is not what the files hold: 5 differences"


def test_verify_lists_ten_differences_and_counts_the_rest(directory: Path, tmp_path: Path, name: str) -> None:
    shapes = [(f"layer.{number}", "U8", (1,)) for number in range(13)]
    held, other = (
        checkpoints.write(tmp_path / f"{seed}.safetensors", checkpoints.filled(shapes, seed=seed)) for seed in (0, 1)
    )
    assert run("load", name, held, "--directory", directory).returncode == 0
    *listed, last = run("verify", name, other, "--directory", directory).stdout.splitlines()
    assert (len(listed), last) == (10, "and 3 more")


def test_verify_looks_at_the_copy_on_every_device(directory: Path, path: Path, name: str) -> None:
    assert run("load", name, path, "--device", "0,1", "--directory", directory).returncode == 0
    done = run("verify", name, path, "--directory", directory)
    assert done.stdout.endswith(", equal to the files, on 2 devices\n")
    assert done.stderr == f"comparing {name}@1 on device 0\ncomparing {name}@1 on device 1\n"


@pytest.mark.parametrize("damage", ["missing", "truncated", "folder"])
def test_a_wrong_file_is_one_line_and_leaves_nothing(directory: Path, path: Path, damage: str, name: str) -> None:
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "missing":
        path.unlink()
    given = path.parent if damage == "folder" else path
    if damage == "folder":
        path.rename(path.with_suffix(".bin"))
    done = run("load", name, given, "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "")
    started_line, reason = done.stderr.splitlines()
    assert started_line == f"loading {name}"
    assert reason.startswith("cubroker: ")
    assert str(given) in reason
    assert states(directory) == []


def test_another_writer_is_a_refusal_unless_waited_for(directory: Path, path: Path, name: str) -> None:
    layout = Layout.pack([("t", "U8", (1,))])
    with Broker(directory) as broker, broker.create(name, layout):
        at_once = run("load", name, path, "--directory", directory)
        in_time = run("load", name, path, "--wait", "0.1", "--directory", directory)
    assert (at_once.returncode, in_time.returncode) == (1, 1)
    assert run("load", name, path, "--directory", directory).returncode == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_an_interrupted_load_leaves_no_draft(tmp_path: Path, number: signal.Signals, status: int) -> None:
    big = tmp_path / "big.safetensors"
    size = 256 << 20
    big.write_bytes(checkpoints.encode({"t": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))
    with big.open("ab") as file:
        file.truncate(file.tell() + size)
    with serving("host:1@512MiB") as server, Broker(server.directory) as broker:

        def interrupted() -> bool:
            """Whether a load was stopped while it had a draft, and not too late; then it is interrupted."""
            with started("load", "x", big, "--directory", server.directory) as load:
                eventually(lambda: bool(broker.pools()), "the draft")
                load.send_signal(signal.SIGSTOP)
                in_time = broker.pools()[0].state == "draft"
                if in_time:
                    load.send_signal(number)
                load.send_signal(signal.SIGCONT)
                out, errors = load.communicate(timeout=DEADLINE)
            if in_time:
                assert (load.returncode, out) == (status, "")
                assert {line[:9] for line in errors.split("\n") if line.strip()} == {"loading x"}
            else:
                broker.retire("x")
            eventually(lambda: broker.pools() == (), "the draft to be discarded")
            return in_time

        eventually(interrupted, "a load to be interrupted")


def test_an_interrupted_wait_ends_quietly(directory: Path, path: Path, name: str) -> None:
    with Broker(directory) as broker, broker.create(name, Layout.pack([("t", "U8", (1,))])) as draft:
        assert isinstance(draft, Draft)
        with started("load", name, path, "--wait", "60", "--directory", directory) as load:
            assert load.stderr is not None
            assert load.stderr.readline() == f"loading {name}\n"
            load.send_signal(signal.SIGINT)
            out, errors = load.communicate(timeout=DEADLINE)
    assert (load.returncode, out, errors.strip()) == (130, "", "")


def test_plain_progress_speaks_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([0.0, 1.0, EVERY, EVERY + 1, 2 * EVERY, 3 * EVERY])
    lines = ProgressLines("loading llama", lambda: next(moments))
    for done in (1 << 30, 5 << 30, 6 << 30, 10 << 30, 12 << 30):
        lines(done, 12 << 30)
    assert capsys.readouterr().err.splitlines() == [
        "loading llama: 5.0 GiB of 12.0 GiB, 1.0 GiB/s, 7 s left",
        "loading llama: 10.0 GiB of 12.0 GiB, 1.0 GiB/s, 2 s left",
    ]


def test_what_a_load_waits_for_is_told(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cubroker.client.loading.loader.WAIT_TOLD", 0.01)
    layout = Layout.pack([("w", "U8", (4,))])
    with Broker(directory) as one, Broker(directory) as other, ThreadPoolExecutor() as pool:
        with one.create(name, layout), progress(f"loading {name}") as report, telling_waits(other, report.wait):
            waiting = pool.submit(lambda: other.create(name, layout, wait=DEADLINE).close())
            errors = ""

            def told() -> bool:
                nonlocal errors
                errors += capsys.readouterr().err
                return "waits" in errors

            eventually(told, "a line about the wait")
        waiting.result()
    begun = f"loading {name}"
    assert errors.splitlines()[:2] == [begun, f"{begun}: waits for its turn as the writer; see `cubroker top`"]


def test_without_a_terminal_the_beginning_is_a_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("loading llama") as report:
        report(1, 2)
    assert capsys.readouterr().err == "loading llama\n"
