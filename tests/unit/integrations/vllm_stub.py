"""As much of vLLM as ``vllm_live`` is imported with and derives from; tests/engines has real engines."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import pytest
import torch
from torch import nn

A, B = TypeVar("A"), TypeVar("B")


class Info:
    """A message's base."""


class WeightTransferEngine(Generic[A, B]):
    """Has the model, and makes messages of dictionaries."""

    update_info_cls: ClassVar[Any]

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def parse_update_info(self, told: dict[str, Any]) -> Any:
        return self.update_info_cls(**told)


@dataclass(kw_only=True)
class TrainerInit:
    """How a trainer begins."""

    rank: int

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class TrainerWeightTransferEngine(Generic[A]):
    """Has the trainer's source and client."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class Meta(NamedTuple):
    """What a source says of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Allocator:
    """Memory of vLLM's own, by tags; what fails has done half of it, and what is mapped stays so."""

    def __init__(self) -> None:
        self.broken = False
        self.mapped = {"weights", "kv_cache"}

    def sleep(self) -> None:
        self.mapped.discard("weights")
        self.fail()
        self.mapped.clear()

    def wake_up(self, tags: list[str] | None) -> None:
        wanted = {"weights", "kv_cache"} if tags is None else set(tags)
        self.mapped |= wanted & {"kv_cache"}
        self.fail()
        self.mapped |= wanted

    def fail(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA Error: out of memory")


class CuMemBackend:
    """Sets its state as vLLM's does."""

    allocator = Allocator()

    def __init__(self) -> None:
        self._state = "RUNNING"

    def state(self) -> str:
        return self._state

    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"
        self.allocator.sleep()

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        self.allocator.wake_up(tags)
        self._state = "RUNNING"


class Factory:
    """Takes each name once."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, name: str, *_: Any) -> None:
        if name in self.names:
            raise ValueError(f"{name} is registered")
        self.names.append(name)

    register_engine = register_backend = add


class Platform:
    """One on which vLLM can sleep."""

    @staticmethod
    def is_sleep_mode_available() -> bool:
        return True


def live(patch: pytest.MonkeyPatch, *, old: bool = False) -> Any:
    """Return ``vllm_live``, imported with this for vLLM; both are gone again when the patch is undone.

    An ``old`` one has no interface for trainers, and no backends of sleep mode, as vLLM 0.24.
    """
    parts: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"ModelConfig": object},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferInitInfo": Info,
            "WeightTransferUpdateInfo": Info,
            "WeightTransferEngine": WeightTransferEngine,
            "TrainerInitInfo": TrainerInit,
            "TrainerWeightTransferEngine": TrainerWeightTransferEngine,
        },
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": Factory(),
            "WeightTransferTrainerFactory": Factory(),
        },
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.device_allocator": {},
        "vllm.device_allocator.sleep_mode_backend": {
            "CuMemBackend": CuMemBackend,
            "SleepModeBackendFactory": Factory(),
        },
    }
    if old:
        for name in ("TrainerInitInfo", "TrainerWeightTransferEngine"):
            del parts["vllm.distributed.weight_transfer.base"][name]
        del parts["vllm.distributed.weight_transfer.factory"]["WeightTransferTrainerFactory"]
        del parts["vllm.device_allocator.sleep_mode_backend"]
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
        above, _, leaf = name.rpartition(".")
        if above:
            setattr(sys.modules[above], leaf, module)
    patch.setattr(CuMemBackend, "allocator", Allocator())
    name = "cubroker.integrations.vllm_live"
    patch.delitem(sys.modules, name, raising=False)
    module = import_module(name)
    patch.setitem(sys.modules, name, module)
    return module
