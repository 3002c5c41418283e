"""Which texts name a driver, and which driver they name."""

from __future__ import annotations

import os
import pickle
from typing import Any

import cuda.bindings.driver
import pytest

from cubroker.driver import Context, Driver, DriverError, load
from cubroker.driver.host.bindings import HostModule

MIB = 1 << 20


@pytest.mark.parametrize(
    ("spec", "full", "sizes"),
    [
        ("host:1@2097152", "host:1@2097152", [2 * MIB]),
        ("host:2@64MiB", "host:2@67108864", [64 * MIB] * 2),
        ("host:1@3000KiB", "host:1@2097152", [2 * MIB]),
        ("host:1@1TiB", "host:1@1099511627776", [1 << 40]),
        ("host:4@2MiB/2", "host:4@2097152/2", [2 * MIB] * 4),
        ("host:2@2MiB/2", "host:2@2097152", [2 * MIB] * 2),
    ],
)
def test_a_spec_sets_the_number_and_the_size_of_host_devices(spec: str, full: str, sizes: list[int]) -> None:
    driver = load(spec)
    assert driver.host
    assert driver.spec == full
    assert [device.total for device in driver.devices] == sizes
    assert [device.index for device in driver.devices] == list(range(len(sizes)))
    assert load(full).devices == driver.devices


def test_host_devices_share_half_of_the_memory_unless_told_otherwise() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    together = sum(device.total for device in load("host:3").devices)
    assert memory // 2 - 3 * 2 * MIB - 3 <= together <= memory // 2


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("", "no driver ''; write cuda, cuda:0,1, cuda:GPU-8d2f41c6, host:2, host:2@64MiB or host:4@64MiB/2"),
        ("metal", "no driver 'metal'"),
        ("cuda:", "no driver 'cuda:'"),
        ("cuda:1,", "no driver 'cuda:1,'"),
        ("cuda:0 ", "no driver 'cuda:0 '"),
        ("cuda:1,1", "names a device twice"),
        ("cuda:1,cuda:1", "names a device twice"),
        ("cuda:GPU-8d2g", "no driver 'cuda:GPU-8d2g'"),
        ("host", "no driver 'host'"),
        ("host:2@64MB", "no driver 'host:2@64MB'"),
        ("host:٢", "no driver 'host:٢'"),
        ("host:0", "asks for 0 devices; it can be 1 to 64"),
        ("host:65", "asks for 65 devices"),
        ("host:1@1MiB", "gives a device 1048576 bytes; it needs 2097152 at least"),
        ("host:1@64", "gives a device 64 bytes; it needs 2097152 at least, and .*, as in host:1@64MiB"),
        ("host:4/5", "makes groups of 5 devices; they can be of 1 to 4"),
        ("host:4/0", "makes groups of 0 devices"),
        ("host:4/", "no driver 'host:4/'"),
        ("host:1@128TiB", "less than 140737488355328"),
    ],
)
def test_any_other_text_is_refused(spec: str, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace("?", r"\?")):
        load(spec)


class NoLibrary:
    """The bindings on a machine without libcuda."""

    CUresult = cuda.bindings.driver.CUresult

    def cuInit(self, Flags: int) -> tuple[Any]:  # noqa: N803
        raise RuntimeError('"cuda" is an NVIDIA driver library')


def test_without_libcuda_the_error_offers_host_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.bindings, "driver", NoLibrary())
    with pytest.raises(DriverError, match=r"cuInit failed with CUDA_ERROR_NO_DEVICE .* 'host:1' emulates a device"):
        load("cuda")


def test_cuda_devices_keep_the_ordinals_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = HostModule(3, 2 * MIB)
    monkeypatch.setattr(cuda.bindings, "driver", bindings)
    assert [device.index for device in load("cuda").devices] == [0, 1, 2]
    driver = load("cuda:2,0")
    assert driver.spec == "cuda"
    assert not driver.host
    assert [device.index for device in driver.devices] == [2, 0]
    assert all(device.uuid.startswith("GPU-") for device in driver.devices)
    assert driver.context(2).device.index == 2
    with pytest.raises(ValueError, match="no device 1; the devices are 2, 0"):
        driver.context(1)
    with pytest.raises(DriverError, match=r"CUDA_ERROR_INVALID_DEVICE .*: this process sees no device '3'; it has 0 "):
        load("cuda:3")
    driver.close()


def test_cuda_devices_may_be_named_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.bindings, "driver", HostModule(3, 2 * MIB))
    first, second, third = load("cuda").devices
    short = third.uuid[:10]
    for spec in (f"cuda:{short},0", f"{short},cuda:0", f"cuda:2,{first.uuid}", "2,0"):
        assert load(spec).devices == (third, first)
    with pytest.raises(ValueError, match="names a device twice"):
        load(f"cuda:1,{second.uuid}")


class BrokenDevice(HostModule):
    """A driver with a device that answers no question, as a GPU that has fallen off the bus."""

    def __init__(self, count: int, broken: int) -> None:
        super().__init__(count, 2 * MIB)
        self._broken = broken

    def cuDeviceGet(self, ordinal: int) -> Any:
        if ordinal == self._broken:
            return cuda.bindings.driver.CUresult.CUDA_ERROR_UNKNOWN, None
        return super().cuDeviceGet(ordinal)


def test_a_device_that_fails_stops_only_who_asks_for_it_or_looks_for_a_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.bindings, "driver", HostModule(3, 2 * MIB))
    first, _, third = load("cuda").devices
    monkeypatch.setattr(cuda.bindings, "driver", BrokenDevice(3, 1))
    assert load("cuda:2,0").devices == (third, first)
    assert load("2,cuda:0").devices == (third, first)
    for spec in ("cuda", "cuda:1", "cuda:0,1", third.uuid, f"cuda:0,{third.uuid}"):
        with pytest.raises(DriverError, match="cuDeviceGet failed with CUDA_ERROR_UNKNOWN"):
            load(spec)


def test_a_driver_error_travels_between_processes() -> None:
    error = DriverError("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", "asked with 7")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2): asked with 7"
    assert again.out_of_memory


def test_of_contexts_that_are_made_within_each_other_the_first_to_be_ready_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a signal handler makes one that comes into the making of another."""
    module = HostModule(1, 6 * MIB, 1)
    driver, within = Driver(module, "host:1@6MiB", host=True), list[Context]()
    retain, first = module.cuDevicePrimaryCtxRetain, iter([True])

    def retains(device: object) -> object:
        if next(first, False):
            within.append(driver.context(0))
        return retain(device)

    monkeypatch.setattr(module, "cuDevicePrimaryCtxRetain", retains)
    assert [driver.context(0)] == within
    assert module.retained == [1]
    driver.close()
    assert module.retained == [0]
