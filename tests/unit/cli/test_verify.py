"""verify --digest, and what load and show have to do with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.driver.kernels import ALGORITHM
from tests import checkpoints
from tests.unit.cli.processes import run

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"a": ("U8", (MIB,), bytes(range(256)) * 4096), "b": ("F32", (), b"\1\2\3\4")}
    return checkpoints.write(tmp_path / "x.safetensors", tensors)


def loaded(directory: Path, name: str, path: Path, *options: str) -> None:
    done = run("load", name, path, *options, "--directory", directory)
    assert done.returncode == 0, done.stderr


def flip(directory: Path, name: str, device: int) -> None:
    """Change a byte of ``b`` on one device, as a process does that writes by a legacy handle."""
    with Broker(directory) as broker, broker.attach(name, device=device) as pool:
        pool.context.write(pool["b"].pointer, b"\0")


def checked(directory: Path, name: str) -> tuple[int, dict[str, Any]]:
    done = run("verify", name, "--digest", "--json", "--directory", directory)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_what_was_loaded_with_digests_is_checked_on_every_device(directory: Path, path: Path, name: str) -> None:
    loaded(directory, name, path, "--device", "0,1", "--digest")
    done = run("verify", name, "--digest", "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    for device, line in enumerate(done.stdout.splitlines()):
        assert line.startswith(f"{name}@1 on device {device}: 1.0 MiB in ")
        assert line.endswith("/s): as it was sealed")
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.slow
def test_a_device_whose_bytes_were_changed_is_told_and_status_1(directory: Path, path: Path, name: str) -> None:
    loaded(directory, name, path, "--device", "0,1", "--digest", "--share", "ipc")
    status, before = checked(directory, name)
    assert status == 0
    flip(directory, name, 1)
    done = run("verify", f"{name}@1", "--digest", "--directory", directory)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert first.endswith(": as it was sealed")
    assert f"{name}@1 on device 1: " in second
    assert (
        f"pool '{name}' version 1 does not hold what was sealed: allocation 0 on device 1 (cubroker host device 1)"
        in second
    )
    assert "with 'a', 'b', has the digest" in second
    assert done.stderr == f"cubroker: {name}@1 is not what was sealed, on 1 of 2 devices\n"
    status, after = checked(directory, name)
    assert status == 1
    assert [device["equal"] for device in before["devices"]] == [True, True]
    assert [device["equal"] for device in after["devices"]] == [True, False]
    assert (after["name"], after["version"], after["digest"]) == (name, 1, ALGORITHM)
    assert [device["index"] for device in after["devices"]] == [0, 1]
    assert after["devices"][0]["why"] is None
    assert "does not hold what was sealed" in after["devices"][1]["why"]
    assert all(device["nbytes"] >= MIB and device["seconds"] > 0 for device in after["devices"])


@pytest.mark.slow
def test_shards_are_checked_device_by_device(directory: Path, path: Path, tmp_path: Path, name: str) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"a": 0, "b": 1}')
    loaded(directory, name, path, "--plan", str(plan), "--digest")
    status, found = checked(directory, name)
    assert status == 0
    assert [device["nbytes"] for device in found["devices"]] == [MIB, 256]


@pytest.mark.slow
def test_a_version_without_digests_is_refused_with_what_to_do(directory: Path, path: Path, name: str) -> None:
    loaded(directory, name, path)
    done = run("verify", name, "--digest", "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert "sealed without a digest" in done.stderr
    assert "load with --digest" in done.stderr


@pytest.mark.slow
def test_show_tells_the_digests(directory: Path, path: Path, name: str) -> None:
    loaded(directory, name, path, "--device", "0,1", "--digest")
    told = run("show", name, "--directory", directory).stdout.splitlines()
    assert f"sealed with digests by {ALGORITHM}: see `cubroker verify --digest`" in told
    shown = json.loads(run("show", name, "--json", "--directory", directory).stdout)
    assert shown["digest"] == ALGORITHM
    with Broker(directory) as broker:
        digests = broker.digests(name).digests
    assert digests is not None
    assert shown["digests"] == {
        uuid: [digest.hex() for digest in row] for uuid, row in zip(shown["devices"], digests.replicas, strict=True)
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["x"], "say which files to compare with, or give --digest"),
        (["x", "y.safetensors", "--digest"], "leave one of them out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_wrong_usage(tmp_path: Path, arguments: list[str], reason: str) -> None:
    done = run("verify", *arguments, "--directory", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
