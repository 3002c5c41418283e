"""Loading: safetensors files into a new version of a pool, in parallel, all of it or nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cubroker.client.broker import Broker
from cubroker.client.checkpoint import Checkpoint, Paths
from cubroker.client.crew import Progress
from cubroker.client.devices import failure
from cubroker.client.draft import Draft
from cubroker.client.filling import fill
from cubroker.client.owners import Owner, uids
from cubroker.client.plans import DeviceId, Plan, spell_out
from cubroker.client.replica import Replica
from cubroker.client.rings import Target
from cubroker.driver import DriverError
from cubroker.protocol import Layout
from cubroker.protocol.messages import AUTO


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :func:`load` did.

    Attributes:
        name: the pool.
        version: the version that the files are in.
        nbytes: bytes of one device's copy, or of all shards, padding included.
        tensors: how many there are.
        seconds: from the call to the published version, everything included.
        copy_seconds: the part of it that read and copied; opening, allocating and pinning were done before.
        loaded: False if somebody else's version was there or came while this call waited (``if_absent``).
    """

    name: str
    version: int
    nbytes: int
    tensors: int
    seconds: float
    copy_seconds: float
    loaded: bool


def load(
    broker: Broker,
    name: str,
    paths: Paths,
    *,
    devices: Sequence[DeviceId] | None = None,
    plan: Plan | None = None,
    share: str = AUTO,
    if_absent: bool = False,
    slab: int | None = None,
    wait: float = 0.0,
    mode: int | None = None,
    durable: bool | None = None,
    owner: Owner | Sequence[Owner] | None = None,
    digest: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """Load a checkpoint into a new version of pool ``name`` and publish it.

    Args:
        broker: the session to work in.
        name: the pool; it is made if there is none.
        paths: what :meth:`Checkpoint.open` takes.
        devices: where the tensors shall be, once on each: ordinals of this process or UUIDs; by default those of the
            ``plan``, or the first one. The files are read once, into the first; from there the bytes go on from device
            to device, where one reaches the one before it.
        plan: for tensors by name, or by a pattern as shells have them for files (``layers.1.*``), the one device on
            which each lies: the pool is sharded, and each tensor read into its own device. A tensor's own name goes
            before patterns; of these the first one that matches counts. Every tensor has to be there.
        share: how the memory is shared, as :meth:`Broker.create` has it.
        if_absent: load only if the pool has no current version. Of many who ask this at once one loads while the
            others wait, up to ``wait`` seconds; if it fails or is killed, the next one takes over.
        slab: the most bytes of one allocation; by default there is one per device.
        wait: seconds to wait for room and for the turn to write.
        mode: who may attach and publish, as :meth:`Broker.create` has it.
        owner: whose version does if there is one (``if_absent``), besides this user's, root's and the broker's own
            user's; by default those of ``$CUBROKER_OWNER``. That of anybody else is ``Denied``.
        durable: whether the version stays when the broker is started again, as :meth:`Broker.create` has it.
        digest: whether the version is published with digests, as :meth:`Draft.seal` has it.
        progress: called by this thread, now and then, with bytes done and bytes in all.

    Raises:
        CubrokerError: of the files, as :meth:`Checkpoint.open` says, also if one is cut short or changed while it is
            read; of the plan, ``Invalid`` if it has no device for a tensor, or an entry that matches none; of the
            broker, as :meth:`Broker.create` says. Whatever is raised, nothing of the draft is left.
    """
    began = time.perf_counter()
    with Checkpoint.open(paths) as checkpoint:
        places = None if plan is None else spell_out(plan, (e.name for e in checkpoint.entries))
        layout = Layout.pack(((e.name, e.dtype, e.shape) for e in checkpoint.entries), slab=slab, groups=places)
        ask = partial(broker.attach_or_create, owner=_trusted(broker, owner)) if if_absent else broker.create
        with ask(
            name, layout, devices=devices, plan=places, share=share, wait=wait, mode=mode, durable=durable
        ) as pool:
            version, held, copying = pool.version, pool.layout, 0.0
            if loaded := isinstance(pool, Draft):
                copying = _fill(checkpoint, pool, progress)
                checkpoint.check_unchanged()
                version = pool.seal(digest=digest)
    return Loaded(name, version, held.nbytes, len(held.tensors), time.perf_counter() - began, copying, loaded)


def _trusted(broker: Broker, owner: Owner | Sequence[Owner] | None) -> tuple[int, ...]:
    """Return whose version does: that of root and of the broker's user, who may change every pool, and of ``owner``."""
    own = () if broker.uid is None else (broker.uid,)
    return (0, *own, *uids(owner))


def _fill(checkpoint: Checkpoint, draft: Draft, progress: Progress | None) -> float:
    targets = [_target(replica, len(draft.layout.allocations)) for replica in draft.replicas]
    try:
        return fill(checkpoint, draft.layout, targets, progress)
    except DriverError as error:
        raise failure(error, f"copying files into a draft of {draft.name!r}") from error


def _target(replica: Replica, allocations: int) -> Target:
    slabs = dict(zip(replica.allocations, replica.slabs, strict=True))
    pointers = tuple(slabs[number].pointer if number in slabs else None for number in range(allocations))
    return Target(replica.context, pointers, next(iter(slabs.values())).hold, replica.upstream)
