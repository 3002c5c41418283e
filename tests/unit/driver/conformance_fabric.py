"""What every driver does with fabric handles, where it has any and where not; to be imported beside ``conformance``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cubroker.driver import Context, Driver, Physical
from cubroker.driver.host.virtual_memory import CHANNEL
from tests.unit.driver.conformance_vmm import GRANULE, PIECE, failing, mapped, settled
from tests.unit.driver.other_process import OtherProcess


@pytest.fixture(params=["a channel", "no channel"])
def has_fabric(request: pytest.FixtureRequest, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a trial gives a fabric handle: on host devices both outcomes, on GPUs the one that the machine has."""
    if driver.host and request.param == "a channel":
        monkeypatch.setenv(CHANNEL, "0")
    elif driver.host:
        monkeypatch.delenv(CHANNEL, raising=False)
    elif request.param == "no channel":
        pytest.skip("whether there is a channel is up to the machine")
    found = trial(driver)
    assert not driver.host or found == (request.param == "a channel")
    return found


@pytest.fixture
def fabric(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with fabric handles, or none of the test."""
    if driver.host:
        monkeypatch.setenv(CHANNEL, "0")
    if not trial(driver):
        pytest.skip("there are no fabric handles here")


def trial(driver: Driver) -> bool:
    with lent(driver) as physical:
        return physical.export_fabric() is not None


@contextmanager
def lent(driver: Driver, nbytes: int = GRANULE) -> Iterator[Physical]:
    """New memory, with a fabric handle if there are any."""
    physical = driver.create(driver.devices[0].index, nbytes, fabric=True)
    try:
        yield physical
    finally:
        physical.release()


def handle_of(physical: Physical) -> bytes:
    handle = physical.export_fabric()
    assert handle is not None
    assert len(handle) == 64
    return handle


def test_memory_with_or_without_a_fabric_handle_has_a_descriptor(
    driver: Driver, context: Context, has_fabric: bool
) -> None:
    before = settled(driver, context)
    with lent(driver, PIECE) as physical:
        assert (physical.export_fabric() is not None) == has_fabric
        descriptor = physical.export()
        with mapped(context, descriptor, PIECE) as pointer, OtherProcess(driver.spec) as other_process:
            context.write(pointer, b"either way")
            assert (
                other_process.ask("read", other_process.attach(descriptor, PIECE, readonly=True), 10) == b"either way"
            )
        os.close(descriptor)
    assert context.memory() == before


def test_a_fabric_handle_is_refused_before_memory_is_created(
    driver: Driver, context: Context, has_fabric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    create = context.calls.cuMemCreate

    def noted(nbytes: int, *terms: object) -> object:
        sizes.append(nbytes)
        return create(nbytes, *terms)

    monkeypatch.setattr(context.calls, "cuMemCreate", noted)
    with lent(driver, PIECE):
        assert sizes == [GRANULE, PIECE], f"with fabric handles: {has_fabric}"


def test_memory_that_is_not_to_have_a_fabric_handle_has_none(driver: Driver, has_fabric: bool) -> None:
    physical = driver.create(driver.devices[0].index, GRANULE)
    assert physical.export_fabric() is None
    physical.release()


def test_sizes_are_refused_as_without_fabric_handles(driver: Driver, context: Context, has_fabric: bool) -> None:
    for nbytes in (0, GRANULE + 1, 2 * context.device.total):
        with failing("cuMemCreate", "CUDA_ERROR_INVALID_VALUE"):
            driver.create(context.device.index, nbytes, fabric=True)


@pytest.mark.usefixtures("fabric")
def test_bytes_are_shared_by_fabric_handle_and_readers_cannot_write(driver: Driver, context: Context) -> None:
    with lent(driver) as physical, OtherProcess(driver.spec) as other_process:
        handle = handle_of(physical)
        with context.reserve(GRANULE) as reservation:  # of the process that created it
            reservation.map(handle, readonly=False)
            context.write(reservation.pointer, b"from the owner")
            reader, writer = (
                other_process.ask("attach_fabric", handle, GRANULE, readonly) for readonly in (True, False)
            )
            assert other_process.ask("read", reader, 14) == b"from the owner"
            other_process.ask("write", writer, b"and back")
            assert context.read(reservation.pointer, 8) == b"and back"
            with failing("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE"):
                other_process.ask("write", reader, b"X")


@pytest.mark.usefixtures("fabric")
def test_a_mapping_by_fabric_handle_outlives_the_handle_and_its_owner(driver: Driver, context: Context) -> None:
    before = settled(driver, context)
    with context.reserve(PIECE) as reservation:
        with OtherProcess(driver.spec) as owner:
            reservation.map(owner.ask("lend_fabric", PIECE), readonly=False)
            context.write(reservation.pointer, b"still here")
            owner.kill()
        assert context.read(reservation.pointer, 10) == b"still here"
    assert context.memory() == before


@pytest.mark.usefixtures("fabric")
def test_a_handle_that_is_made_up_is_refused_and_nothing_is_mapped(context: Context) -> None:
    with context.reserve(GRANULE) as reservation:
        for handle in (bytes(64), os.urandom(64)):
            with failing("cuMemImportFromShareableHandle"):
                reservation.map(handle, readonly=True)
        with pytest.raises(ValueError, match="a fabric handle of 3 bytes; it has 64"):
            reservation.map(b"abc", readonly=True)
        assert not reservation.mapped
