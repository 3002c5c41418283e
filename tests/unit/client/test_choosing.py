"""What the broker chooses where a create leaves it open: how a pool is shared, and whether it is durable."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.errors import DeviceFailure, Unsupported
from tests.brokers import BrokerProcess, eventually, older, program
from tests.stores import storing
from tests.unit.client.conftest import LAYOUT, content, leases, publish
from tests.unit.client.scripts import run

WITHOUT_VMM = """
import sys
from cuda.bindings import driver as cuda
from cubroker.driver.host.bindings import HostModule
from cubroker.server.__main__ import main

create = HostModule.cuMemCreate

def refuse(self, size, prop, flags):
    if prop.location.id == 1:
        return cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
    return create(self, size, prop, flags)

HostModule.cuMemCreate = refuse
sys.exit(main())
"""
"""A broker whose second device has no memory that descriptors open."""

WRITES = """
import ctypes
with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
    assert pool["weight"].readonly and not pool.writable
    print(pool.protected, pool["weight"].protected, flush=True)
    ctypes.c_float.from_address(pool["weight"].pointer).value = 123.
"""
"""A reader that writes as frameworks do that ignore ``readonly``."""


@pytest.fixture(scope="module")
def half() -> Iterator[Broker]:
    """A Broker whose second device has no memory that descriptors open."""
    with program(WITHOUT_VMM) as process, Broker(process.directory) as broker:
        assert "device 1 cannot share memory as vmm: cuMemCreate failed with CUDA_ERROR_NOT_SUPPORTED" in process.log()
        assert "device 0 cannot" not in process.log()
        yield broker


def chosen(broker: Broker, name: str, **asked: object) -> tuple[str, bool]:
    """The share kind of a new version, as its draft says and the broker, and whether it is durable."""
    with broker.create(name, LAYOUT, **asked) as draft:  # type: ignore[arg-type]
        (info,) = [info for info in broker.pools() if info.name == name]
        assert draft.share == info.share
        return info.share, info.durable


@pytest.mark.parametrize(
    ("devices", "share", "expected"),
    [((0,), "auto", "vmm"), ((1,), "auto", "ipc"), ((0, 1), "auto", "ipc"), ((0,), "ipc", "ipc")],
)
def test_a_pool_is_vmm_where_all_its_devices_can_be_else_ipc(
    half: Broker, name: str, devices: tuple[int, ...], share: str, expected: str
) -> None:
    assert chosen(half, name, devices=devices, share=share) == (expected, False)
    draft = half.attach_or_create(name, LAYOUT, device=devices[0], devices=devices, share=share)
    with draft:
        assert draft.share == expected


def test_what_was_asked_for_by_name_is_refused_where_it_cannot_be(half: Broker, name: str) -> None:
    with pytest.raises(DeviceFailure, match=r"cannot be shared by descriptor \(vmm\)"):
        half.create(name, LAYOUT, devices=(1,), share="vmm")
    with pytest.raises(Unsupported, match="no store"):
        half.create(name, LAYOUT, devices=(0,), durable=True)


def test_readers_of_what_was_chosen_are_told_how_it_is_shared(half: Broker, name: str) -> None:
    for device, share in ((0, "vmm"), (1, "ipc")):
        publish(half, f"{name}-{share}", devices=(device,))
        with half.attach(f"{name}-{share}") as pool:
            assert (pool.share, pool.protected) == (share, share == "vmm")
    told = {info.name: info.protected for info in half.pools()}
    assert (told[f"{name}-vmm"], told[f"{name}-ipc"]) == (True, False)


def test_a_reader_of_a_pool_that_named_no_share_kind_cannot_write_it(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        done = run(lender, WRITES, name)
        assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "True True\n"), done.stderr
        eventually(lambda: leases(client, name) == 1, "the end of its lease")
        assert pool["weight"].tobytes() == content("weight", 128)


def test_a_reader_of_an_ipc_pool_can_write_it_and_is_told_so(client: Broker, lender: BrokerProcess, name: str) -> None:
    with client.create(name, LAYOUT, share="ipc") as draft:
        draft.seal()
    with client.attach(name) as pool:
        assert pool["weight"].tobytes() == bytes(128)
        done = run(lender, WRITES, name)
        assert (done.returncode, done.stdout) == (0, "False False\n"), done.stderr
        assert pool["weight"].numpy().flat[0] == 123.0


def test_those_who_may_write_are_not_kept_from_it(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, writable=True) as draft:
        assert (draft.share, draft.protected, draft["weight"].protected) == ("vmm", False, False)
        draft.seal()
    with client.attach(name) as pool:
        assert (pool.writable, pool.protected) == (True, False)
        assert [info.protected for info in client.pools()] == [False]


def test_a_setting_says_what_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBROKER_SHARE", "ipc")
    with storing() as process, Broker(process.directory) as broker:
        assert chosen(broker, name) == ("ipc", False)
        assert chosen(broker, name, share="vmm") == ("vmm", True)
        assert chosen(broker, name, durable=True) == ("vmm", True)  # nothing else can be


def test_pools_are_durable_where_share_kind_and_store_allow_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for quota in ("DESCRIPTORS", "SESSIONS"):  # which are those of half the store
        monkeypatch.setenv(f"CUBROKER_QUOTA_{quota}", "1000")
    many = Layout.pack([(f"t{number}", "U8", (256,)) for number in range(11)], slab=256)
    with storing(room=20) as process, Broker(process.directory) as broker:
        assert chosen(broker, name) == ("vmm", True)
        assert chosen(broker, name, share="multicast") == ("multicast", True)
        assert chosen(broker, name, share="ipc") == ("ipc", False)
        assert chosen(broker, name, durable=False) == ("vmm", False)
        with pytest.raises(Unsupported, match="shared as ipc ends with the broker"):
            broker.create(name, LAYOUT, share="ipc", durable=True)
        with broker.create(name, many) as draft:  # more than half of the store
            assert [info.durable for info in broker.pools()] == [False]
            assert draft.share == "vmm"
        with broker.create(name, many, durable=True):
            assert [info.durable for info in broker.pools()] == [True]
        eventually(lambda: not any(device.allocated for device in broker.devices()), "its memory to leave the store")
        publish(broker, name)
        with broker.attach(name) as pool:
            process.restart()
            assert pool["weight"].tobytes() == content("weight", 128)
            assert (pool.lost, [(info.state, info.durable) for info in broker.pools()]) == ("", [("current", True)])


def test_a_broker_of_the_first_version_of_the_protocol_is_told_what_it_cannot_choose(name: str) -> None:
    with older(1) as process, Broker(process.directory) as broker:
        assert chosen(broker, name) == ("ipc", False)
        assert chosen(broker, name, share="vmm") == ("vmm", False)
        with pytest.raises(Unsupported, match=f"{name} is to be durable, and this broker has no store"):
            broker.create(name, LAYOUT, durable=True)
