"""What the pools of these tests hold: bytes that follow from name and version, so that any reader can tell."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cubroker.client import Broker, Draft, Pool
from cubroker.protocol import Layout
from cubroker.protocol.errors import NotFound, Retired

NBYTES = 1 << 15
LAYOUT = Layout.pack([("first", "U8", (NBYTES,)), ("second", "U8", (NBYTES,))], slab=NBYTES)
"""Two tensors, each in an allocation of its own: there is a moment between opening one and the other."""

SHARES = ("ipc", "vmm")

PLAN = {"first": 0, "second": 1}
"""Where the tensors of a sharded pool are: its nth allocation is on its nth device."""


@dataclass(frozen=True)
class Form:
    """How a pool is shared and where it lies; if ``sharded``, by :data:`PLAN`; whether its readers may write it, and
    whether it outlives the broker."""

    share: str = "ipc"
    devices: tuple[int, ...] = (0,)
    sharded: bool = False
    writable: bool = False
    durable: bool = False

    def create(self, broker: Broker, name: str, wait: float = 0.0) -> Draft:
        """Open a draft of such a pool."""
        plan = PLAN if self.sharded else None
        return broker.create(
            name,
            LAYOUT,
            devices=self.devices,
            plan=plan,
            share=self.share,
            writable=self.writable,
            durable=self.durable,
            wait=wait,
        )

    def publish(self, broker: Broker, name: str) -> int:
        """Publish a version of such a pool, and return its number."""
        with self.create(broker, name) as draft:
            fill(draft)
            return draft.seal()


BOTH = (0, 1)
FORMS = tuple(
    Form(share, devices, sharded)
    for share in SHARES
    for devices, sharded in (((0,), False), (BOTH, False), (BOTH, True))
)
"""On one device, on both, and spread over both."""

TEAM = Form("multicast", BOTH, writable=True)
"""On both, and whoever has a lease stores to both at once."""


def content(pool: str, version: int, tensor: str) -> bytes:
    """Return what a tensor holds."""
    return hashlib.shake_128(f"{pool} {version} {tensor}".encode()).digest(NBYTES)


def fill(draft: Draft) -> None:
    """Check that the memory of a draft is clear, and fill it."""
    for replica in draft.replicas:
        for tensor in replica.values():
            assert not any(tensor.tobytes()), f"{tensor!r} is not clear"
            tensor.copy_from(content(draft.name, draft.version, tensor.name))


def check(pool: Pool) -> None:
    """Check every byte of a pool."""
    for tensor in pool.values():
        right = tensor.tobytes() == content(pool.name, pool.version, tensor.name)
        assert right, f"{tensor!r} does not hold what was written"


def nap(held: list[Pool]) -> None:
    """Have every pool that can sleep do so, and wake those whose versions are still there."""
    napping = [pool for pool in held if pool.share != "ipc"]
    for pool in napping:
        pool.sleep()
    for pool in napping:
        try:
            pool.wake()
        except (NotFound, Retired):
            held.remove(pool)
            pool.close()
        else:
            check(pool)
