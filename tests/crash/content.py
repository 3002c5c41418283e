"""What the pools of these tests hold: bytes that follow from name and version, so that any reader can tell.

A tensor that a version shares with an older one has the bytes of the version that wrote it. The tensor
:data:`ORIGINS`, which every version writes, says for each tensor which one that was.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from cubroker.client import Broker, Draft, Pool
from cubroker.client.arrays import Arrays, HostArray
from cubroker.client.delta import Updated
from cubroker.client.publish import Sources
from cubroker.driver import Driver
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, NotFound, Retired, TimedOut, Unsupported
from cubroker.protocol.messages import AUTO

WAIT = 600.0
"""Seconds: longer than any test."""

NBYTES = 1 << 15
LAYOUT = Layout.pack([("first", "U8", (NBYTES,)), ("second", "U8", (NBYTES,))], slab=NBYTES)
"""Two tensors, each in an allocation of its own: there is a moment between opening one and the other."""

ORIGINS = "origins"
TENSORS = ("first", "second", ORIGINS)
CHAIN = Layout.pack(
    [*((spec.name, spec.dtype, spec.shape) for spec in LAYOUT.tensors), (ORIGINS, "I64", (len(TENSORS),))], slab=NBYTES
)
"""The same, of versions that share what they do not change, and the versions that wrote them; three allocations."""

SHARES = ("ipc", "vmm")

PLAN = {"first": 0, "second": 1, ORIGINS: 0}
"""Where the tensors, each an allocation, of a sharded pool are."""


@dataclass(frozen=True)
class Form:
    """How a pool is shared and where it lies; if ``sharded``, by :data:`PLAN`; whether its readers may write it,
    whether it outlives the broker, and whether it can be the base of a ``chain`` of updates."""

    share: str = "ipc"
    devices: tuple[int, ...] = (0,)
    sharded: bool = False
    writable: bool = False
    durable: bool = False
    chain: bool = False

    def create(self, broker: Broker, name: str, wait: float = 0.0) -> Draft:
        """Open a draft of such a pool."""
        layout = CHAIN if self.chain else LAYOUT
        plan = {spec.name: PLAN[spec.name] for spec in layout.tensors} if self.sharded else None
        return broker.create(
            name,
            layout,
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
CHAINS = tuple(Form(share, chain=True) for share in SHARES)
FORMS = tuple(
    Form(share, devices, sharded)
    for share in SHARES
    for devices, sharded in (((0,), False), (BOTH, False), (BOTH, True))
)
"""On one device, on both, and spread over both."""

TEAM = Form("multicast", BOTH, writable=True)
"""On both, and whoever has a lease stores to both at once."""

TEAM_READ = Form("multicast", BOTH)
"""On both, and only the writer stores to both at once."""

LINKS = 5
"""Versions of a chain, each an update of the one before."""


NO_SWITCH = (NotFound, Retired, Unsupported, Invalid)
"""Why a version may be unable to take the place of another one."""


def content(pool: str, version: int, tensor: str) -> bytes:
    """Return what a tensor holds."""
    return hashlib.shake_128(f"{pool} {version} {tensor}".encode()).digest(NBYTES)


def fill(draft: Draft) -> None:
    """Check that the memory of a draft is clear, and fill it."""
    origins = dict.fromkeys(TENSORS, draft.version)
    for replica in draft.replicas:
        for tensor in replica.values():
            assert not any(tensor.tobytes()), f"{tensor!r} is not clear"
            tensor.copy_from_bytes(_bytes(draft, tensor.name, origins))


def check(pool: Pool) -> None:
    """Check every byte of a pool."""
    origins = _origins(pool)
    for tensor in pool.values():
        right = tensor.tobytes() == _bytes(pool, tensor.name, origins)
        assert right, f"{tensor!r} does not hold what was written by the versions {origins}"


def _origins(pool: Pool) -> dict[str, int]:
    """Return which version wrote each tensor of a pool, by what it says itself."""
    if ORIGINS not in pool:
        return dict.fromkeys(TENSORS, pool.version)
    written = np.frombuffer(pool[ORIGINS].tobytes(), np.int64).tolist()
    return dict(zip(TENSORS, written, strict=True)) | {ORIGINS: pool.version}


def _bytes(pool: Pool, tensor: str, origins: dict[str, int]) -> bytes:
    if tensor == ORIGINS:
        return np.array(list(origins.values()), np.int64).tobytes()
    return content(pool.name, origins[tensor], tensor)


# -- updates -------------------------------------------------------------------------------------------


def update(
    broker: Broker,
    name: str,
    tensors: Collection[str],
    base: Pool | int | str,
    wait: float = 0.0,
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Publish a version of a chain that writes these tensors, as :meth:`Broker.publish` does with a base.

    Args:
        broker: of the session.
        name: the pool's.
        tensors: what is written; all else is shared with the base.
        base: as for :meth:`Broker.publish`.
        wait: as for :meth:`Broker.publish`.
        meanwhile: called when the draft is there, and nothing in it.
    """
    empty = {tensor: np.full(NBYTES, 255, np.uint8) for tensor in tensors}
    sources = _Late.of({**empty, ORIGINS: np.full(len(TENSORS), -1)}, broker.driver)
    sources.meanwhile = meanwhile
    ask = partial(broker._creation, name, share=AUTO, wait=wait, mode=None, durable=None)
    return broker._update(name, sources, base, ask, digest=False).complete()


class _Late(Sources):
    """Arrays that get their bytes, which follow from the version, once there is a draft of it."""

    def __init__(self, driver: Driver, arrays: Arrays) -> None:
        super().__init__(driver, arrays)
        self.origins: dict[str, int] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def update(self, base: Pool, homes: Sequence[str], devices: Sequence[str]) -> tuple[Updated, Self]:
        laid_out, changed = super().update(base, homes, devices)
        changed.origins, changed.meanwhile = _origins(base), self.meanwhile
        return laid_out, changed

    def fill(self, draft: Draft) -> None:
        self.meanwhile()
        origins = self.origins | dict.fromkeys(self._arrays, draft.version)
        for tensor, array in self._arrays.items():
            assert isinstance(array, HostArray)
            array.contiguous().cast("B")[:] = _bytes(draft, tensor, origins)
        super().fill(draft)


# -- using them ----------------------------------------------------------------------------------------


def forge(broker: Broker, name: str) -> list[Pool]:
    """Make a chain of updates of a current version; return all versions, attached to, the oldest first."""
    held = [broker.attach(name)]
    while len(held) < LINKS:
        update(broker, name, ["second"] if len(held) % 2 else ["first"], held[-1], WAIT)
        held.append(broker.attach(name))
    return held


def check_anew(broker: Broker, pool: Pool) -> None:
    """Check every byte of the version that a pool is on, as somebody sees it who attaches to it now."""
    homes = {tensor.memory_device.index for tensor in pool.values()}
    with broker.attach(pool.name, version=pool.version, device=homes.pop() if len(homes) == 1 else None) as again:
        check(again)


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


def glance(broker: Broker, name: str) -> None:
    """Attach to a draft of a pool, if there is one, and look at every byte, whatever is written by now."""
    for info in broker.pools():
        if (info.name, info.state) == (name, "draft"):
            device = None if info.sharded else info.devices[-1]
            with (
                suppress(NotFound, Retired, Unsupported, Invalid),
                broker.attach(name, version=info.version, device=device, unsealed=True) as pool,
            ):
                assert all(len(tensor.tobytes()) == tensor.nbytes for tensor in pool.values())


def update_any(chance: random.Random, broker: Broker, held: list[Pool], wait: float) -> None:
    """Publish an update of a version that is held, if there is one that can be its base and is not sharded."""
    there = [pool for pool in held if not pool.lost and not pool.asleep]
    fit = [pool for pool in there if pool.share in SHARES and not pool.writable]
    whole = [pool for pool in fit if len(pool.allocations) == len(pool.layout.allocations)]
    bases = [pool for pool in whole if len({tensor.memory_device for tensor in pool.values()}) == 1]
    if bases:
        base = chance.choice(bases)
        update(broker, base.name, chance.choice(((), ("first",), ("second",), ("first", "second"))), base, wait)


def seal_in_place(broker: Broker, name: str, form: Form, wait: float) -> Pool:
    """Publish a version, and keep it."""
    draft = form.create(broker, name, wait)
    try:
        fill(draft)
        draft.seal(in_place=True)
    except BaseException:
        draft.close()
        raise
    check(draft)
    return draft


def follow_all(broker: Broker, name: str, held: list[Pool], wait: float) -> None:
    """Follow a pool, and have every pool follow its own, where a newer version can take the place of the pool's."""
    with broker.follow(name, timeout=wait) as versions, suppress(TimedOut):
        next(versions)
    for pool in held:
        if pool.share != "ipc" and not pool.lost:
            with pool.follow(switch=True, timeout=wait) as newer, suppress(TimedOut, *NO_SWITCH):
                next(newer)
            check(pool)
