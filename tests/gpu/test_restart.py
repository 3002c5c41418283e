"""Brokers that are killed over durable GPU memory: the next one has it, with every byte, and frees it at last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.errors import CubrokerError
from tests import checkpoints
from tests.brokers import PATIENCE, eventually
from tests.gpu.sharing import worker
from tests.stores import StoredBroker, storing

TENSORS = checkpoints.filled((*checkpoints.EVERY_DTYPE, *checkpoints.ODD_SHAPES))
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in TENSORS.items()}
LAYOUT = Layout.pack(((name, dtype, shape) for name, (dtype, shape, _) in TENSORS.items()), slab=1 << 16)
KILLS = 3
GIB = 1 << 30
SLACK = 64 << 20
"""Bytes by which a device's free memory moves without anything of ours."""


@pytest.fixture
def kept() -> Iterator[tuple[StoredBroker, Broker]]:
    with storing("cuda") as process, Broker(process.directory, timeout=PATIENCE) as broker:
        yield process, broker
        for info in broker.pools():
            broker.retire(info.name, info.version)
        eventually(lambda: not any(d.allocated or d.promised for d in broker.devices()), "all memory to be free")
        process.settled()
        assert not [name for name in process.fdstore.stored if name.startswith("m")]


def publish(broker: Broker, share: str = "vmm", *, durable: bool = True) -> None:
    with broker.create("m", LAYOUT, share=share, durable=durable) as draft:
        for name, (_, _, data) in TENSORS.items():
            draft[name].copy_from_bytes(data)
        draft.seal()


def test_workers_of_before_and_after_read_the_same_bytes(kept: tuple[StoredBroker, Broker]) -> None:
    process, broker = kept
    publish(broker)
    with worker(process, "torch", "m") as holder:
        assert holder.answer() == DIGESTS
        for _ in range(KILLS):
            process.restart()
            assert holder.ask("digest") == DIGESTS
            with worker(process, "torch", "m") as fresh:
                assert fresh.answer() == DIGESTS
            eventually(lambda: [info.leases for info in broker.pools()] == [1], "the fresh worker's lease to fall")


def test_bytes_that_nobody_has_mapped_are_there_when_the_next_broker_comes(kept: tuple[StoredBroker, Broker]) -> None:
    process, broker = kept
    publish(broker)
    process.kill()
    process.start()
    with worker(process, "digest", "m") as fresh:
        assert fresh.answer() == DIGESTS


def test_memory_that_is_retired_after_a_restart_is_back_on_the_device(kept: tuple[StoredBroker, Broker]) -> None:
    process, broker = kept
    context = broker.driver.context(0)
    before, _ = context.memory()
    with broker.create("large", Layout.pack([("x", "U8", (2 * GIB,))]), share="vmm", durable=True) as draft:
        draft.seal()
    process.restart()
    assert abs(before - context.memory()[0] - 2 * GIB) < SLACK
    broker.retire("large")
    eventually(lambda: context.memory()[0] > before - SLACK, "the device to have its memory back")


@pytest.mark.parametrize("share", ["ipc", "vmm"])
def test_what_is_not_durable_is_lost_and_its_holder_is_told(kept: tuple[StoredBroker, Broker], share: str) -> None:
    process, broker = kept
    publish(broker, share, durable=False)
    with broker.attach("m") as pool:
        process.restart()
        eventually(lambda: pool.lost, "the holder to be told")
        with pytest.raises(CubrokerError, match="lost"):
            broker.attach("m")
        publish(broker)
        with broker.attach("m") as next_one:
            assert {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in next_one.items()} == DIGESTS
