from __future__ import annotations

import pytest

from cubroker.client import Broker, devices
from cubroker.driver import Driver, DriverError
from cubroker.protocol.errors import DeviceFailure, NotFound, OutOfMemory, Unavailable
from tests.brokers import eventually
from tests.client.conftest import leases, publish

SPEC = "host:2@4194304"


def test_brokers_of_one_kind_share_a_driver() -> None:
    assert devices.driver(SPEC) is devices.driver(SPEC)


def test_a_context_that_cannot_be_made_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = devices.driver(SPEC)

    def refuse(self: Driver, index: int) -> None:
        raise DriverError("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(Driver, "context", refuse)
    with pytest.raises(OutOfMemory, match=r"a context on .* \(HOST-.*\): cuDevicePrimaryCtxRetain failed"):
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
