"""Binding memory together: what refuses it, what undoes it, and that the thread goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cubroker.driver import Driver, Multicast, MulticastOff, checked_calls, load
from cubroker.server.devices.allocator import DeviceAllocator, MulticastBinder
from cubroker.server.ledger.events import (
    Allocate,
    Allocated,
    BindMulticast,
    Free,
    Freed,
    MulticastBound,
    MulticastUnbound,
    UnbindMulticast,
)
from cubroker.server.ledger.memory import GRANULARITY
from tests.unit.server.devices.outcomes import Outcomes
from tests.unit.server.processes import files

SIZES = (GRANULARITY, 2 * GRANULARITY)


class Bench:
    """Two host devices with memory of tickets 1 and 2, and a binder over them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.outcomes = Outcomes()
        self.memory = {device.uuid: DeviceAllocator(driver, device, self.outcomes) for device in driver.devices}
        self.binder = MulticastBinder(driver, self.memory, self.outcomes)
        self.members = tuple((device.uuid, 1 + device.index) for device in driver.devices)
        for uuid, ticket in self.members:
            self.memory[uuid].submit(Allocate(ticket, uuid, SIZES, "multicast"))
            allocated = self.outcomes.next()
            assert isinstance(allocated, Allocated)
            assert len(allocated.descriptors) == len(SIZES)

    def bind(self) -> MulticastBound:
        self.binder.submit(BindMulticast(3, SIZES, self.members))
        event = self.outcomes.next()
        assert isinstance(event, MulticastBound)
        return event

    def unbind(self) -> None:
        self.binder.submit(UnbindMulticast(3))
        assert self.outcomes.next() == MulticastUnbound(3)

    def free(self) -> None:
        for uuid, ticket in self.members:
            self.memory[uuid].submit(Free(ticket, uuid))
            assert self.outcomes.next() == Freed(ticket)

    def close(self) -> None:
        self.binder.close()
        for memory in self.memory.values():
            memory.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = files(os.getpid())
    with ExitStack() as undo:
        driver = load("host:2@16MiB")
        undo.callback(driver.close)
        bench = Bench(driver)
        undo.callback(bench.close)
        yield bench
    assert files(os.getpid()) <= before


def test_an_object_per_allocation_is_made_and_undone_before_the_memory(bench: Bench) -> None:
    for _ in range(2):
        made = bench.bind()
        assert (made.how, made.why) == ("multicast", "every device takes part")
        assert len(made.descriptors) == 2
        assert all(size >= wanted for size, wanted in zip(made.sizes, SIZES, strict=True))
        bench.unbind()
    bench.free()


def test_what_is_bound_is_unbound_when_the_broker_ends(bench: Bench) -> None:
    assert bench.bind().how == "multicast"


def test_a_group_in_use_stays_bound_when_the_broker_ends(bench: Bench) -> None:
    descriptors = bench.bind().descriptors
    bench.binder.leave(3)
    bench.binder.close()
    assert all(os.fstat(descriptor) for descriptor in descriptors)
    bench.binder._unbind(3)  # which the end of the process does elsewhere


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_refusal_half_way_leaves_nothing_bound_and_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    real, calls = Multicast.bind, 0

    def bind(self: Multicast, *args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise MulticastOff("cuMulticastBindMem", 800, "CUDA_ERROR_NOT_PERMITTED", "a setting says no")
        real(self, *args, **options)

    monkeypatch.setattr(Multicast, "bind", bind)
    before = files(os.getpid())
    refused = bench.bind()
    assert (refused.how, refused.sizes, refused.descriptors) == ("copies", (), ())
    assert refused.why == "cuMulticastBindMem was not called: a setting says no"
    assert files(os.getpid()) <= before
    bench.unbind()
    bench.free()


@pytest.mark.parametrize(
    "setting", ["NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "CUBROKER_MULTICAST=0"]
)
def test_a_setting_that_forbids_multicast_is_obeyed_before_any_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """As on real hardware, where the guard asks the environment; host devices need no leave."""
    name, _, value = setting.partition("=")
    monkeypatch.setenv(checked_calls.OWN_SETTING, "1")
    monkeypatch.setenv(name, value)
    real = SimpleNamespace(CUresult=SimpleNamespace(CUDA_ERROR_NOT_PERMITTED=_Code(800)))

    def obstacle(index: int) -> str | None:
        try:
            checked_calls.check_multicast(real, "cuMulticastCreate")
        except MulticastOff as error:
            return error.detail
        return None

    def never(*_: object) -> Multicast:
        raise AssertionError("a multicast call")

    monkeypatch.setattr(bench.driver, "multicast_obstacle", obstacle)
    monkeypatch.setattr(bench.driver, "multicast", never)
    refused = bench.bind()
    assert refused.how == "copies"
    assert f"{setting} says no to multicast" in refused.why


class _Code(int):
    name = "CUDA_ERROR_NOT_PERMITTED"


def test_the_thread_survives_unexpected_failures(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench.driver, "multicast", lambda *_: cast(Any, 1 // 0))
        assert bench.bind().why == "ZeroDivisionError('integer division or modulo by zero')"
    released = Multicast.release
    for error in (MulticastOff("cuMulticastUnbind", 800, "CUDA_ERROR_NOT_PERMITTED", "no"), ZeroDivisionError()):

        def release(self: Multicast, error: Exception = error) -> None:
            released(self)
            raise error

        assert bench.bind().how == "multicast"
        with monkeypatch.context() as patch:
            patch.setattr(Multicast, "release", release)
            bench.unbind()
    assert bench.bind().how == "multicast"
