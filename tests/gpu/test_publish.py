"""Publishing torch's tensors on a GPU: their bytes arrive, whatever stream, strides and type they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.driver import Context, Stream
from tests.gpu.sharing import gpu_broker

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch was built without CUDA", allow_module_level=True)


@pytest.fixture
def broker() -> Iterator[Broker]:
    with gpu_broker() as (_, broker):
        yield broker


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("share", ["ipc", "vmm"])
def test_a_model_on_a_gpu_is_published_without_the_host(
    broker: Broker, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cubroker.integrations.torch import state_dict

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(512, 256, device="cuda", dtype=torch.bfloat16))
    model.tied = model.weight
    model.turned = torch.nn.Parameter(torch.randn(300, 200, device="cuda").t())
    model.register_buffer("small", torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn))
    model.register_buffer("steps", torch.tensor(7, device="cuda"))
    for method in ("copy_in", "copy_out"):
        monkeypatch.setattr(Stream, method, lambda *_: pytest.fail("bytes went through host memory"))
    assert broker.publish("m", model, share=share) == 1
    monkeypatch.undo()
    with broker.attach("m") as pool:
        state = state_dict(pool)
        for name, tensor in model.state_dict().items():
            assert state[name].shape == tensor.shape
            assert raw(state[name]).equal(raw(tensor)), name
        assert state["tied"].data_ptr() == state["weight"].data_ptr()
        del state


def test_many_tensors_beside_each_other_and_beside_the_alignment_arrive(broker: Broker) -> None:
    numbers = torch.arange(1 << 22, device="cuda", dtype=torch.int32)
    flat = numbers.view(torch.uint8)
    sizes = [*range(1, 400), 1 << 16, 999_999, 5 << 20]
    views = dict(zip(map(str, sizes), flat[3:].split([*sizes, flat.numel() - 3 - sum(sizes)]), strict=False))
    halves = numbers.view(torch.int16)[1:]
    broker.publish("m", {**views, "halves": halves, "numbers": numbers})
    with broker.attach("m") as pool:
        for name, tensor in (*views.items(), ("halves", halves), ("numbers", numbers)):
            assert torch.from_dlpack(pool[name]).equal(tensor), name


def test_work_of_any_stream_is_done_before_its_tensor_is_copied(broker: Broker) -> None:
    stream = torch.cuda.Stream()
    weight = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 30)
        weight.fill_(1)
    broker.publish("m", {"weight": weight})  # on the default stream
    with broker.attach("m") as pool:
        assert torch.from_dlpack(pool["weight"]).min().item() == 1


def test_an_array_of_dlpack_on_a_gpu_is_published(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exports:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.__dlpack_device__ = tensor.__dlpack_device__
            self.__dlpack__ = tensor.__dlpack__
            self.contiguous = tensor.contiguous

    values = torch.randn(30, 20, device="cuda")
    monkeypatch.setattr(Context, "read_into", lambda *_: pytest.fail("bytes went through host memory"))
    broker.publish("m", {"plain": Exports(values), "turned": Exports(values.t())})
    monkeypatch.undo()
    with broker.attach("m") as pool:
        assert torch.equal(torch.from_dlpack(pool["plain"]), values)
        assert torch.equal(torch.from_dlpack(pool["turned"]), values.t())
