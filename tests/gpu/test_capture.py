"""Pools beside the capture of a CUDA graph, as engines do it for seconds at their start: neither disturbs the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.gpu.sharing import SHARES, gpu_broker
from tests.unit.client import capturing
from tests.unit.client.conftest import publish

torch = pytest.importorskip("torch")

NBYTES = 1 << 30


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with gpu_broker() as (_, broker):
        yield broker


@SHARES
@pytest.mark.parametrize("way", capturing.WAYS)
def test_a_capture_goes_on(broker: Broker, share: str, tmp_path: Path, way: capturing.Way) -> None:
    capturing.goes_on(broker, "m", share, way, tmp_path)
    broker.retire("m")


@SHARES
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_graph_that_was_captured_beside_all_of_it_computes_what_it_should(
    broker: Broker, share: str, mode: str, tmp_path: Path
) -> None:
    file = capturing.write(tmp_path)
    publish(broker, "m", share=share)
    x = torch.ones(1024, 1024, device="cuda")
    y = torch.zeros_like(x)
    torch.mm(x, x)  # what cuBLAS allocates with its first use, it must not allocate in the capture
    torch.cuda.synchronize()
    done, errors = threading.Event(), list[BaseException]()

    def disturb() -> None:
        try:
            for _ in range(3):
                for work in capturing.WORK:
                    work(broker, "m", share, file)
        except BaseException as error:  # noqa: BLE001  whatever it is, the test reports it
            errors.append(error)
        finally:
            done.set()

    graph = torch.cuda.CUDAGraph()
    thread = threading.Thread(target=disturb)
    pieces = 0
    with torch.cuda.graph(graph, capture_error_mode=mode):
        thread.start()
        while not done.is_set() and pieces < 20_000:
            y.add_(x)
            pieces += 1
            done.wait(0.001)
        done.wait()
    thread.join()
    assert not errors, errors
    graph.replay()
    torch.cuda.synchronize()
    assert torch.all(y == pieces)
    broker.retire("m")


@SHARES
def test_giving_memory_back_waits_for_the_work_that_reads_it(broker: Broker, share: str) -> None:
    """Work in a stream that the pool was not told of; without waiting it would fault, or read other memory."""
    layout = Layout.pack([("x", "U8", (NBYTES,))])
    with broker.create("m", layout, share=share) as draft:
        draft.seal()
    copy = torch.full((NBYTES,), 7, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(3):
        pool = broker.attach("m")
        pointer = pool["x"].pointer
        with pool.context.stream() as ours:
            for _ in range(200):
                ours.copy(copy.data_ptr(), pointer, NBYTES)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
            pool.close()
            assert stream.query(), "the pool was given back before the work was done"
    assert not torch.any(copy)
    broker.retire("m")
