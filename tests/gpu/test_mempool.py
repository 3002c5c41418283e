"""Models that torch builds in a draft's memory on a GPU: published without a copy, and read by another process."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.driver import DriverError, load
from cubroker.protocol.errors import Invalid, NotFound
from tests.brokers import BrokerProcess, eventually
from tests.gpu.sharing import gpu_broker, worker
from tests.gpu.worker import raw

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch was built without CUDA", allow_module_level=True)

from cubroker.integrations.torch import MemPool, OutOfRoom  # noqa: E402

MIB = 1 << 20
SIDE = 8192


@pytest.fixture
def gpu() -> Iterator[tuple[BrokerProcess, Broker]]:
    with gpu_broker() as pair:
        yield pair


@pytest.fixture
def broker(gpu: tuple[BrokerProcess, Broker]) -> Iterator[Broker]:
    yield gpu[1]
    gc.collect()
    torch.cuda.empty_cache()


class Net(torch.nn.Module):
    """Large and small tensors, a tied one, and buffers that are persistent and not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(SIDE, SIDE, bias=False, device="cuda")
        self.norm = torch.nn.LayerNorm(SIDE, device="cuda")
        self.head = torch.nn.Linear(SIDE, 100, device="cuda", dtype=torch.float32)
        self.tied = self.embed.weight
        self.register_buffer("steps", torch.tensor(7, device="cuda"))
        self.register_buffer("scales", torch.linspace(0, 1, SIDE, device="cuda"), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(torch.nn.functional.linear(x, self.tied) * self.scales)) + self.steps


def used() -> int:
    """Bytes of the GPU that are in use, by any process."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def digests(model: Any) -> dict[str, str]:
    return {name: hashlib.sha256(raw(tensor)).hexdigest() for name, tensor in model.state_dict().items()}


def told(pool: MemPool) -> str:
    """What torch and the room say, for a test that fails."""
    return f"torch {torch.__version__}; {pool!r}; {torch.cuda.memory_snapshot()}"


def room(pool: MemPool) -> range:
    """The addresses of a draft in which torch allocates."""
    (view,) = pool.pool.allocation_views
    return range(view.pointer, view.pointer + view.nbytes)


@torch.no_grad()
@pytest.mark.parametrize("share", ["vmm", "ipc"])
def test_a_model_is_published_where_it_was_built(gpu: tuple[BrokerProcess, Broker], broker: Broker, share: str) -> None:
    process, _ = gpu
    x = torch.randn(8, SIDE, device="cuda")
    with torch.device("meta"):
        meta = torch.nn.ModuleList([torch.nn.Linear(SIDE, SIDE, bias=False), torch.nn.Linear(SIDE, 100)])
    Net()(x)  # kernels are loaded, and cuBLAS has its workspaces
    gc.collect()
    torch.cuda.empty_cache()
    with MemPool(broker, "m", MemPool.size_of(meta) + 64 * MIB, share=share) as pool:
        before = used()
        with pool.use():
            model = Net().eval().requires_grad_(False)
        assert pool.left < len(room(pool)) - SIDE * SIDE * 4, told(pool)
        pointers = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
        assert all(each in room(pool) for each in pointers.values())
        made, sums, grown = model(x), digests(model), used() - before
        assert pool.seal(model) == 1, told(pool)
        assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == pointers
        assert torch.equal(model(x), made), "the model computes something else after the seal"
        assert used() - before - grown < 64 * MIB, f"{used() - before - grown} bytes more are held: twice?"
        assert grown < SIDE * SIDE * 4, (
            f"{grown} bytes beside the draft were taken to build the model: not in the draft"
        )
        assert [(info.state, info.tensors, info.leases) for info in broker.pools()] == [("current", 7, 1)]
        assert pool.pool["tied"].pointer == pool.pool["embed.weight"].pointer
        with worker(process, "torch", "m") as other:
            assert other.answer() == sums
        with pytest.raises(Invalid, match="takes no more tensors"), pool.use():
            pass
        del model, made
    gc.collect()
    broker.retire("m")
    eventually(lambda: not broker.pools(), f"torch to give the memory back, {told(pool)}")


@torch.no_grad()
def test_what_is_made_past_the_room_is_refused_and_the_pool_goes_on(broker: Broker) -> None:
    with MemPool(broker, "m", 64 * MIB) as pool:
        with pool.use():
            first = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
            with pytest.raises(torch.OutOfMemoryError):
                torch.ones(100 * MIB, dtype=torch.uint8, device="cuda")
        message = r"asked for 209715200 bytes .* are 33554432 free; make it with nbytes=243269632 or more"
        with pytest.raises(OutOfRoom, match=message) as raised, pool.use():
            torch.ones(200 * MIB, dtype=torch.uint8, device="cuda")
        assert isinstance(raised.value, torch.OutOfMemoryError)
        outside = torch.ones(100 * MIB, dtype=torch.uint8, device="cuda")  # torch itself has room
        with pool.use():
            second = torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")
        assert pool.seal({"first": first, "second": second}) == 1, told(pool)
        with broker.attach("m") as reader:
            assert torch.from_dlpack(reader["second"]).sum().item() == 16 * MIB
        del first, second, outside, raised


@torch.no_grad()
def test_a_tensor_that_was_made_outside_is_named_or_copied(broker: Broker) -> None:
    with MemPool(broker, "m", 64 * MIB) as pool:
        outside = torch.nn.Linear(100, 30, device="cuda")
        with pool.use():
            inside = torch.nn.Linear(100, 30, device="cuda")
            turned = torch.randn(30, 20, device="cuda").t()
        model = torch.nn.ModuleDict({"inside": inside, "outside": outside})
        model.register_buffer("turned", turned)
        del turned
        with pytest.raises(Invalid, match=r"'turned' has gaps.*'outside\.weight' lies in other memory") as raised:
            pool.seal(model)
        assert "inside" not in str(raised.value)
        del raised  # its traceback has frames that know the tensor with gaps
        sums, before = digests(model), inside.weight.data_ptr()
        assert pool.seal(model, copy=True) == 1, told(pool)
        assert digests(model) == sums
        assert inside.weight.data_ptr() == before
        assert pool.pool["outside.weight"].pointer == outside.weight.data_ptr()
        with broker.attach("m") as reader:
            assert torch.equal(torch.from_dlpack(reader["turned"]), model.turned)
        del model, inside, outside


@torch.no_grad()
def test_what_else_lives_in_the_pool_keeps_it_from_being_sealed(broker: Broker) -> None:
    with MemPool(broker, "m", 64 * MIB) as pool:
        with pool.use():
            weight = torch.randn(1000, 1000, device="cuda")
            cache = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
            weight @ weight  # cuBLAS takes its workspace here
        with pytest.raises(Invalid, match=f"1 allocations of torch.*no tensor.*{3 * MIB} bytes"):
            pool.seal({"weight": weight})
        del cache
        assert pool.seal({"weight": weight}) == 1, told(pool)
        assert torch.equal(weight @ weight, weight @ weight)
        torch.cuda.synchronize()
        del weight


@torch.no_grad()
def test_a_captured_graph_goes_on_after_the_seal(broker: Broker) -> None:
    with MemPool(broker, "m", 64 * MIB) as pool:
        with pool.use():
            weight = torch.randn(1000, 1000, device="cuda")
        x, y = torch.randn(8, 1000, device="cuda"), torch.zeros(8, 1000, device="cuda")
        torch.mm(x, weight, out=y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mm(x, weight, out=y)
        graph.replay()
        made = y.clone()
        pool.seal({"weight": weight})
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, made)
        del weight, graph


def test_a_pool_that_is_not_sealed_is_discarded_with_its_last_tensor(broker: Broker) -> None:
    pool = MemPool(broker, "m", 64 * MIB)
    with pool.use():
        weight = torch.ones(1000, device="cuda")
    pool.close()
    pool.close()
    assert weight.sum().item() == 1000
    assert [info.state for info in broker.pools()] == ["draft"]
    with pytest.raises(Invalid, match="is closed"):
        pool.seal({"weight": weight})
    del weight, pool
    gc.collect()
    torch.cuda.empty_cache()
    eventually(lambda: not broker.pools(), "the draft to be discarded")
    with pytest.raises(NotFound):
        broker.attach("m")


def test_segments_that_are_freed_inside_are_used_again(broker: Broker) -> None:
    with MemPool(broker, "m", 64 * MIB) as pool:
        for _ in range(8):
            with pool.use():
                torch.ones(40 * MIB, dtype=torch.uint8, device="cuda")
        assert pool.left == 24 * MIB, told(pool)


def test_only_the_thread_and_the_device_of_the_block_allocate_there(broker: Broker) -> None:
    from threading import Thread

    found: list[int] = []
    with MemPool(broker, "m", 64 * MIB) as pool:
        with pool.use():
            thread = Thread(target=lambda: found.append(torch.ones(1000, device="cuda").data_ptr()))
            thread.start()
            thread.join()
            with pytest.raises(Invalid, match="in use in this thread already"), pool.use():
                pass
            with pytest.raises(Invalid, match="sealed inside of use"):
                pool.seal({})
        assert pool.left == len(room(pool)), told(pool)
        assert found[0] not in room(pool)


def test_what_a_small_model_takes_is_what_was_foretold(broker: Broker) -> None:
    def build(device: str) -> Any:
        return torch.nn.ModuleList(
            [torch.nn.Linear(side, side, device=device) for side in (10, 500, 700, 1500, 2000, 3000)]
        )

    nbytes = MemPool.size_of(build("meta"))
    with MemPool(broker, "m", nbytes) as pool:
        with pool.use():
            model = build("cuda")
        assert pool.left == 0, told(pool)
        del model


def test_a_write_after_the_seal_is_refused_by_the_driver(broker: Broker) -> None:
    context = load("cuda").context(torch.cuda.current_device())
    with MemPool(broker, "m", 64 * MIB, share="vmm") as pool:
        with pool.use():
            weight = torch.ones(1000, device="cuda")
        context.write(weight.data_ptr(), bytes(4))
        pool.seal({"weight": weight})
        assert pool.pool.protected
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            context.write(weight.data_ptr(), bytes(4))
        assert weight.sum().item() == 999
        del weight
