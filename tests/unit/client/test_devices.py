from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from cubroker.client import Broker, Pool, devices
from cubroker.driver import Driver, DriverError
from cubroker.protocol.errors import DeviceFailure, NotFound, OutOfMemory, Unavailable
from tests.brokers import eventually
from tests.unit.client.conftest import LAYOUT, content, leases, publish

SPEC = "host:2@4194304"


def test_brokers_of_one_kind_share_a_driver() -> None:
    assert devices.driver(SPEC) is devices.driver(SPEC)


def test_a_context_that_cannot_be_made_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = devices.driver(SPEC)

    def refuse(self: Driver, index: int) -> None:
        raise DriverError("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(Driver, "context", refuse)
    with pytest.raises(OutOfMemory, match=r"a context on device 1 \(.*\): cuDevicePrimaryCtxRetain failed"):
        devices.context(driver, 1)


def test_failures_keep_what_they_know() -> None:
    known = NotFound("no such device")
    assert devices.failure(known, "asking") is known
    other = devices.failure(ValueError("a handle of 3 bytes"), "opening")
    assert type(other) is DeviceFailure
    assert str(other) == "opening: a handle of 3 bytes"


def test_a_pool_on_a_device_that_this_process_does_not_see_is_not_attached(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name, devices=(1,))
    with monkeypatch.context() as patch:
        patch.setattr(client.driver, "devices", client.driver.devices[:1])
        with pytest.raises(NotFound, match="this process sees no device 'HOST-"):
            client.attach(name)
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_a_driver_that_cannot_be_loaded_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"cannot open the broker's devices \(abacus\)"):
        devices.driver("abacus")


@contextmanager
def second_context(driver: Driver, device: int) -> Iterator[None]:
    """Have this thread work in a context of its own, beside the primary one of the device."""
    calls = driver.context(device).calls
    own = calls.cuCtxCreate(None, 0, calls.cuDeviceGet(device))
    try:
        yield
    finally:
        calls.cuCtxDestroy(own)


def test_a_thread_in_a_second_context_of_a_device_gets_no_memory_there_that_it_could_not_use(
    client: Broker, name: str
) -> None:
    publish(client, name, devices=(0, 1), share="ipc")
    refused = pytest.raises(DeviceFailure, match=r"opening .*this thread works in another context of device 0 than its")
    requests: list[Callable[[], Pool]] = [
        lambda: client.attach(name, device=0),
        lambda: client.create(f"{name}-new", LAYOUT, devices=(1, 0), share="ipc"),
        lambda: client.attach_or_create(name, LAYOUT, device=0),
    ]
    with second_context(client.driver, 0):
        for ask in requests:
            with refused:
                ask()
        with client.attach(name, device=1) as pool:
            assert pool["weight"].tobytes() == content("weight", 128)
    assert [info.name for info in client.pools()] == [name]
    assert leases(client, name) == 0
    with client.attach(name, device=0), second_context(client.driver, 1):
        client.attach(name, device=0).close()


def test_a_driver_that_does_not_tell_where_a_thread_works_is_a_failure(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name)
    with monkeypatch.context() as patch:
        patch.setattr(
            Driver, "current_context", Mock(side_effect=DriverError("cuCtxGetCurrent", 719, "CUDA_ERROR_LAUNCH_FAILED"))
        )
        with pytest.raises(DeviceFailure, match="in which context this thread works: cuCtxGetCurrent failed"):
            client.attach(name)
    client.attach(name).close()
