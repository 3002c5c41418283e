"""What a worker does with pools while somebody in its process captures a CUDA graph: none of it may end the capture.

``WORK`` runs on host devices here and on GPUs in ``tests/gpu/test_capture.py``. Each piece is called on the thread that
captures and on another one; it leaves no lease behind.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.loading.loader import load
from cubroker.client.loading.verify import verify
from cubroker.protocol.errors import Invalid
from tests import checkpoints
from tests.brokers import eventually
from tests.unit.client.conftest import LAYOUT, content, leases, publish
from tests.unit.driver.conformance_capture import HERE, capturing

Work = Callable[[Broker, str, str, Path], None]
"""Takes a Broker, the name of a published pool of ``LAYOUT``, its share kind and a file with the same tensors."""


def write(folder: Path) -> Path:
    """Write a file with the same tensors."""
    tensors = {each.name: (each.dtype, each.shape, content(each.name, each.nbytes)) for each in LAYOUT.tensors}
    return checkpoints.write(folder / "weights.safetensors", tensors)


def attach_and_close(broker: Broker, name: str, share: str, file: Path) -> None:
    with broker.attach(name) as pool:
        assert pool["weight"].tobytes() == content("weight", 128)


def collect(broker: Broker, name: str, share: str, file: Path) -> None:
    """A pool that nobody closes is given back by the collector."""
    pool = broker.attach(name)
    cycle: list[object] = [pool, pool["weight"]]
    cycle.append(cycle)
    lease = pool.lease
    del pool, cycle
    gc.collect()
    assert lease


def sleep_and_wake(broker: Broker, name: str, share: str, file: Path) -> None:
    if share == "ipc":
        return
    with broker.attach(name) as pool:
        pool.sleep()
        pool.wake()
        assert pool["weight"].tobytes() == content("weight", 128)


def publish_and_retire(broker: Broker, name: str, share: str, file: Path) -> None:
    publish(broker, f"{name}.next", share=share)
    broker.retire(f"{name}.next")


def publish_again(broker: Broker, name: str, share: str, file: Path) -> None:
    with broker.attach(name) as pool:
        broker.publish(f"{name}.again", {**pool, "host": memoryview(bytes(100))}, share=share)
    broker.retire(f"{name}.again")


def discard(broker: Broker, name: str, share: str, file: Path) -> None:
    broker.create(f"{name}.never", LAYOUT, share=share).close()


def load_and_verify(broker: Broker, name: str, share: str, file: Path) -> None:
    load(broker, f"{name}.loaded", [file], share=share)
    verify(broker, f"{name}.loaded", [file])
    broker.retire(f"{name}.loaded")


def record_and_wait(broker: Broker, name: str, share: str, file: Path) -> None:
    with broker.create(f"{name}.scratch", LAYOUT, share=share, writable=True) as draft:
        draft.seal()
    with broker.attach(f"{name}.scratch") as pool, pool.event("ready") as event, pool.context.stream() as stream:
        assert event.record(stream) == 1
        assert event.wait(stream, after=0) == 1
        assert event.wait(after=0) == 1
    broker.retire(f"{name}.scratch")


def seal_and_check(broker: Broker, name: str, share: str, file: Path) -> None:
    with broker.create(f"{name}.digested", LAYOUT, share=share) as draft:
        draft.seal(digest=True)
    with broker.attach(f"{name}.digested") as pool:
        pool.check()
    broker.retire(f"{name}.digested")


def refuse(broker: Broker, name: str, share: str, file: Path) -> None:
    """What is refused ends no capture either."""
    with broker.attach(name) as pool:
        try:
            pool["weight"].copy_from_bytes(b"")
        except Invalid:
            return
    raise AssertionError("a published tensor was written")


WORK: tuple[Work, ...] = (
    attach_and_close,
    collect,
    sleep_and_wake,
    publish_and_retire,
    publish_again,
    discard,
    load_and_verify,
    record_and_wait,
    seal_and_check,
    refuse,
)

Way = tuple[Work, Callable[[Callable[[], object]], object]]
"""A piece of work, and how it is called."""

WAYS = [
    pytest.param((work, make), id=f"{work.__name__}, {where}")
    for work in WORK
    for make, where in zip(HERE, ("same thread", "another thread"), strict=True)
]
"""Each piece of work in each :data:`Way`, for a test's parameter."""


def goes_on(broker: Broker, name: str, share: str, way: Way, folder: Path) -> None:
    """Do a piece of work in the middle of a capture of any kind, which then ends as it should."""
    work, make = way
    file = write(folder)
    publish(broker, name, share=share)
    context = broker.driver.context(broker.driver.devices[0].index)
    for mode in ("GLOBAL", "THREAD_LOCAL"):
        for stream in ("NON_BLOCKING", "DEFAULT"):
            with capturing(context, mode, stream) as capture:
                make(lambda: work(broker, name, share, file))
                eventually(lambda: leases(broker, name) == 0, "the end of its lease, during the capture")
                capture.finish()
