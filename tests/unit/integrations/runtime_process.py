"""A module that is post-processed as engines do it, and a process that obtains its runtime pool."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cubroker.client import Broker
from cubroker.client.pool import Pool
from cubroker.integrations import engine_loader, runtime_pools
from cubroker.integrations.engine_loader import Obtained

CONSUMED = ("fused.first", "fused.second")
"""What the module below has before its post-processing alone."""


class Weight(nn.Parameter):
    """An engine's own class of parameters."""


class Fused(nn.Module):
    """Loads two weights, and computes with the transpose of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16), requires_grad=False)
        self.second = nn.Parameter(torch.randn(16, 8, dtype=torch.bfloat16), requires_grad=False)
        self.weight = self._made(torch.empty(8, 24, dtype=torch.bfloat16))

    @staticmethod
    def loader() -> None:
        """Stand for an engine's weight loader."""

    def _made(self, data: torch.Tensor) -> Weight:
        weight = Weight(data, requires_grad=False)
        weight.output_dim = 0  # type: ignore[attr-defined]
        weight.loader = self.loader  # type: ignore[attr-defined]
        return weight

    def process(self) -> None:
        self.weight = self._made(torch.cat([self.first, self.second]).t().flip(0).t().contiguous().t())
        del self.first, self.second


class Runtime(nn.Module):
    """Has everything that engines leave behind: ties, views, gaps, other orders, buffers, attributes, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(8)
        self.fused = Fused()
        self.register_buffer("table", torch.randn(32, 64), persistent=False)
        self.register_buffer("view", self.table[4:8].t(), persistent=False)
        self.register_buffer("padded", torch.randn(8, 16 * 16)[:, :8])
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("bias", torch.randn(6))
        self.register_buffer("large", torch.randn(2048))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("absent", None)
        whole = torch.randn(1 << 16)
        self.near, self.far = whole[:4], whole[-2048:]
        self.ratio = torch.tensor([2.0, 3.0], dtype=torch.float64)

    def process(self) -> None:
        """Post-process what was loaded."""
        self.fused.process()
        self.padded = torch.randn(8, 16, device=self.padded.device)[:, :8]

    def calibrate(self) -> None:
        """Write as engines do while they start."""
        self.scale.fill_(1.5)
        self.large.mul_(1.0)
        self.view.add_(0.0)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.norm(self.embed(tokens)) * self.ratio.float().sum()
        fused = hidden.bfloat16() @ self.fused.weight
        return self.head(fused[:, :8].float()) + self.padded.sum() + self.far.sum()


def meta() -> Runtime:
    with torch.device("meta"):
        return Runtime()


def obtain(
    broker: Broker,
    name: str,
    load: Callable[[], nn.Module],
    publish: Callable[[nn.Module], object] | None = None,
    **terms: Any,
) -> Obtained:
    def attach(pool: Pool) -> nn.Module:
        model = runtime_pools.bind(meta(), pool, strict=False)
        runtime_pools.refuse_meta(model, pool)
        return model

    def usual(model: nn.Module) -> object:
        return runtime_pools.publish(broker, name, model, consumed=CONSUMED, share="vmm")

    return engine_loader.obtain(broker, name, load=load, publish=publish or usual, attach=attach, **terms)


def work(directory: str, name: str) -> None:
    """Obtain the pool; say what happens, and wait for a line before each step that others may want to interrupt."""
    torch.set_num_threads(1)

    def pause(what: str) -> None:
        print(what, flush=True)
        sys.stdin.readline()

    def load() -> nn.Module:
        pause("loading")
        torch.manual_seed(0)
        model = Runtime()
        model.process()
        return model

    with Broker(directory) as broker:

        def publish(model: nn.Module) -> object:
            with broker.create(name, [("half", "F32", (9,))], share="vmm"):
                pause("publishing")
            return runtime_pools.publish(broker, name, model, consumed=CONSUMED, share="vmm")

        got = obtain(broker, name, load, publish)
        total = sum(tensor.double().sum().item() for tensor in got.model.state_dict().values())
        print("loaded" if got.loaded else "bound", f"{total:.6f}", flush=True)
        sys.stdin.read()
