from __future__ import annotations

import os
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.loading import verify as verify_module
from cubroker.client.loading.loader import load
from cubroker.client.loading.verify import verify
from cubroker.driver import Context, DriverError
from cubroker.protocol.errors import DeviceFailure, Invalid, NotFound
from tests import checkpoints

TENSORS = checkpoints.filled((*checkpoints.EVERY_DTYPE, *checkpoints.ODD_SHAPES))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "CHUNK", 10_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "model.safetensors", TENSORS)


def test_a_pool_equals_the_files_that_it_was_loaded_from(client: Broker, path: Path, name: str) -> None:
    load(client, name, path, devices=[0, 1])
    seen: list[tuple[int, int]] = []
    found = verify(client, name, path, device=1, progress=lambda done, total: seen.append((done, total)))
    nbytes = sum(len(data) for _, _, data in TENSORS.values())
    assert (found.name, found.version, found.tensors, found.nbytes, found.differences) == (
        name, 1, len(TENSORS), nbytes, (),
    )  # fmt: skip
    assert seen[-1] == (nbytes, nbytes)
    assert seen == sorted(seen)


def test_every_kind_of_difference_is_named(client: Broker, path: Path, tmp_path: Path, name: str) -> None:
    load(client, name, path)
    changed = {tensor: content for tensor, content in TENSORS.items() if tensor != "odd"}
    for tensor, place in (("long", 123_456), ("matrix", 0), ("of.F4", 11)):
        dtype, shape, data = TENSORS[tensor]
        other = bytearray(data)
        other[place] ^= 1
        other[-1] ^= 1 if place != len(other) - 1 else 0
        changed[tensor] = (dtype, shape, bytes(other))
    changed["one"] = ("I8", (1,), b"1")
    changed["extra"] = ("U8", (1,), b"1")
    found = verify(client, name, checkpoints.write(tmp_path / "changed.safetensors", changed))
    assert set(found.differences) == {
        "tensor 'odd' is in the pool and not in the files",
        "tensor 'extra' is in the files and not in the pool",
        "tensor 'one' is I8 [1] in the files and U8 [1] in the pool",
        "tensor 'long' differs, first in byte 123456 of its 300001",
        "tensor 'matrix' differs, first in byte 0 of its 4290",
        "tensor 'of.F4' differs, first in byte 11 of its 12",
    }
    assert found.tensors == len(TENSORS) - 2


def test_differences_come_in_the_order_of_the_files_and_then_of_the_pool(
    client: Broker, path: Path, tmp_path: Path, name: str
) -> None:
    load(client, name, path)
    found = verify(client, name, checkpoints.write(tmp_path / "x.safetensors", checkpoints.filled([("x", "U8", (1,))])))
    with client.attach(name) as pool:
        missing = [f"tensor {tensor!r} is in the pool and not in the files" for tensor in pool]
    assert list(found.differences) == ["tensor 'x' is in the files and not in the pool", *missing]


def test_a_version_is_verified_by_its_number(client: Broker, path: Path, tmp_path: Path, name: str) -> None:
    other = checkpoints.write(tmp_path / "other.safetensors", checkpoints.filled([("x", "U8", (1,))]))
    load(client, name, path)
    with client.attach(name):
        load(client, name, other)
        assert verify(client, name, path, version=1).differences == ()
        assert verify(client, name, path).differences


def test_memory_that_only_the_device_can_reach_is_copied_back(
    client: Broker, path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load(client, name, path)
    with client.attach(name) as pool:
        context = pool.context
    monkeypatch.setattr(context, "host", False)
    assert verify(client, name, path).differences == ()
    monkeypatch.setattr(Context, "read_into", failing)
    with pytest.raises(DeviceFailure, match="reading pool"):
        verify(client, name, path)
    assert client.pools()[0].leases == 0


def failing(context: Context, pointer: int, buffer: object) -> None:
    raise DriverError("cuMemcpyDtoH", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


def test_what_cannot_be_compared_is_an_error_and_no_difference(client: Broker, path: Path, name: str) -> None:
    with pytest.raises(NotFound):
        verify(client, name, path)
    load(client, name, path)
    with pytest.raises(NotFound):
        verify(client, name, path.with_name("nothing"))
    with pytest.raises(Invalid, match="changed while it was read"):
        verify(client, name, path, progress=lambda done, total: os.utime(path, ns=(1, 1)))
    assert client.pools()[0].leases == 0
