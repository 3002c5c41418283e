"""Pools that are switched in place: CUDA graphs that were captured before compute with the other version after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.integrations.torch import state_dict
from cubroker.protocol import Layout
from tests.gpu.sharing import gpu_broker

torch = pytest.importorskip("torch")

SIDE = 1024
LAYOUT = Layout.pack([(name, "F32", (SIDE, SIDE)) for name in ("a", "b")], slab=SIDE * SIDE * 4)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with gpu_broker() as (_, broker):
        yield broker


def put(broker: Broker, value: float) -> int:
    """Publish a version whose elements are all ``value``."""
    with broker.create("m", LAYOUT, share="vmm") as draft:
        for tensor in draft.values():
            tensor.copy_from(torch.full((SIDE, SIDE), value))
        return draft.seal()


def test_a_captured_graph_computes_with_the_version_that_is_mapped(broker: Broker) -> None:
    put(broker, 1.0)
    with broker.attach("m") as pool:
        weights = state_dict(pool)
        x, y = torch.ones(SIDE, SIDE, device="cuda"), torch.zeros(SIDE, SIDE, device="cuda")
        torch.mm(x, weights["a"])  # what cuBLAS allocates with its first use, it must not allocate in the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(x, weights["a"], out=y)
            y.add_(weights["b"])
        for value in (1.0, 2.0, 3.0):
            if value > 1:
                assert pool.switch(put(broker, value)) == pool.version
            graph.replay()
            torch.cuda.synchronize()
            assert torch.all(y == SIDE * value + value)
        del weights
    broker.retire("m")


def test_a_switch_waits_for_the_work_that_reads_the_version_before(broker: Broker) -> None:
    put(broker, 1.0)
    with broker.attach("m") as pool:
        tensor, copy = state_dict(pool)["a"], torch.zeros(SIDE, SIDE, device="cuda")
        put(broker, 2.0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            copy.copy_(tensor)
        pool.switch()
        assert stream.query(), "the version before was unmapped before the work was done"
        assert torch.all(copy == 1)
        assert torch.all(tensor == 2)
        del tensor
    broker.retire("m")


def test_a_capture_goes_on_while_another_thread_switches(broker: Broker) -> None:
    put(broker, 1.0)
    with broker.attach("m") as pool:
        version = put(broker, 2.0)
        y = torch.zeros(SIDE, SIDE, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.add_(1)
            pool.switch()  # on the session's own thread
            y.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.all(y == 2)
        assert pool.version == version
    broker.retire("m")
