"""Loading onto GPUs, through pinned rings."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.loading import copy
from cubroker.client.loading.loader import load
from cubroker.client.loading.read_plan import Target
from cubroker.client.loading.verify import verify
from cubroker.protocol.errors import Invalid, OverBudget
from tests import checkpoints
from tests.brokers import BrokerProcess
from tests.gpu.sharing import SHARES, gpu_broker


@functools.cache
def tensors() -> checkpoints.Tensors:
    """Return 170 MB of tensors; made once they are asked for, since most machines skip these tests."""
    return checkpoints.filled(
        (
            *checkpoints.EVERY_DTYPE,
            *checkpoints.ODD_SHAPES,
            *((f"layer.{n}.weight", "BF16", (1023, 2 * 1024 + n)) for n in range(40)),
            *((f"layer.{n}.bias", "F32", (n,)) for n in range(40)),
        )
    )


@pytest.fixture(scope="module")
def gpu() -> Iterator[tuple[BrokerProcess, Broker]]:
    with gpu_broker() as both:
        yield both


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("loader") / "model.safetensors", tensors())


@SHARES
@pytest.mark.parametrize("slab", [None, 16 << 20])
def test_every_byte_arrives_on_every_device(
    gpu: tuple[BrokerProcess, Broker], path: Path, slab: int | None, share: str
) -> None:
    _, broker = gpu
    devices = [device.uuid for device in broker.driver.devices]
    loaded = load(broker, "m", path, devices=devices, slab=slab, share=share)
    assert loaded.tensors == len(tensors())
    for device in devices:
        assert verify(broker, "m", path, device=device).differences == ()
        with broker.attach("m", device=device) as pool:
            assert {name: pool[name].tobytes() for name in ("long", "of.F4", "layer.7.bias")} == {
                name: tensors()[name][2] for name in ("long", "of.F4", "layer.7.bias")
            }


@SHARES
def test_a_plan_spreads_the_tensors_over_the_devices(gpu: tuple[BrokerProcess, Broker], path: Path, share: str) -> None:
    _, broker = gpu
    first, *_, last = (device.uuid for device in broker.driver.devices * 2)
    load(broker, "spread", path, plan={"layer.*": last, "*": first}, share=share)
    assert verify(broker, "spread", path).differences == ()
    with broker.attach("spread") as pool:
        assert pool["layer.7.weight"].memory_device.uuid == last
        assert pool["long"].memory_device.uuid == first


@SHARES
def test_gaps_between_tensors_are_zero(gpu: tuple[BrokerProcess, Broker], path: Path, share: str) -> None:
    _, broker = gpu
    load(broker, "m", path, share=share)
    with broker.attach("m") as pool:
        held = bytearray(pool.allocation_views[0].tobytes())
        for spec in pool.layout.tensors:
            held[spec.offset : spec.offset + spec.nbytes] = bytes(spec.nbytes)
    assert not any(held)


def test_a_different_file_is_told_from_the_pool(gpu: tuple[BrokerProcess, Broker], path: Path, tmp_path: Path) -> None:
    _, broker = gpu
    load(broker, "m", path)
    dtype, shape, data = tensors()["layer.39.weight"]
    changed = {**tensors(), "layer.39.weight": (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))}
    found = verify(broker, "m", checkpoints.write(tmp_path / "changed.safetensors", changed))
    assert found.differences == (f"tensor 'layer.39.weight' differs, first in byte {len(data) - 1} of its {len(data)}",)


@SHARES
def test_a_file_cut_short_while_it_is_read_leaves_no_draft(
    gpu: tuple[BrokerProcess, Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    _, broker = gpu
    path = checkpoints.write(tmp_path / "model.safetensors", tensors())
    devices = [device.uuid for device in broker.driver.devices]
    before = broker.pools()
    into = copy.FileCopy.into

    def cut(copying: copy.FileCopy, targets: Sequence[Target]) -> float:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - copy.CHUNK)
        return into(copying, targets)

    monkeypatch.setattr(copy.FileCopy, "into", cut)
    with pytest.raises(Invalid, match="it ended at byte"):
        load(broker, "cut", path, devices=devices, share=share)
    assert broker.pools() == before


@SHARES
def test_what_does_not_fit_is_over_budget_and_leaves_no_draft(
    gpu: tuple[BrokerProcess, Broker], tmp_path: Path, share: str
) -> None:
    _, broker = gpu
    size = broker.devices()[0].total
    path = tmp_path / "huge.safetensors"
    path.write_bytes(checkpoints.encode({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    before = broker.pools()
    with pytest.raises(OverBudget):
        load(broker, "huge", path, share=share)
    assert broker.pools() == before
