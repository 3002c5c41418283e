"""What is closed by one thread while another one uses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cubroker.client import Broker, checkpoint, loader
from cubroker.protocol.errors import Invalid
from tests import checkpoints
from tests.brokers import PATIENCE, eventually
from tests.client.conftest import LAYOUT


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_closing_a_broker_unmaps_nothing_under_the_threads_that_load(
    client: Broker, name: str, tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.write(tmp_path / "m.safetensors", checkpoints.filled([("x", "U8", (1 << 20,))]))
    reading, closed = threading.Event(), threading.Event()
    read_into = checkpoint.File.read_into

    def pausing(file: checkpoint.File, buffers: list[memoryview], offset: int) -> None:
        reading.set()
        assert closed.wait(PATIENCE)
        read_into(file, buffers, offset)  # EFAULT if the memory is gone by now

    monkeypatch.setattr(checkpoint.File, "read_into", pausing)
    with Broker(client.directory) as broker:
        loading = threads.submit(loader.load, broker, name, path, devices=(0, 1))
        assert reading.wait(PATIENCE)
        broker.close()
        assert [info.state for info in client.pools()] == ["draft"]
        closed.set()
        with pytest.raises(Invalid, match=f"draft of pool '{name}' version 1 is closed in this process"):
            loading.result(PATIENCE)
    eventually(lambda: not client.pools(), "the end of the draft")


def test_held_memory_outlives_its_draft(client: Broker, name: str) -> None:
    draft = client.create(name, LAYOUT)
    tensor = draft["weight"]
    with tensor.hold() as pointer:
        assert pointer == tensor.pointer
        with pytest.raises(Invalid, match="still in use: weight"):
            draft.seal()
        draft.close()
        assert tensor.tobytes() == bytes(128)
    del tensor
    eventually(lambda: not client.pools(), "the end of the draft")
