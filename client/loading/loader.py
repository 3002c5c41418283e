"""Loading: safetensors files into a new version of a pool, in parallel, all of it or nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cubroker.client.broker import Broker, Owner, uids
from cubroker.client.devices import DeviceId, Plan, context, doing, find_plan, resolve_plan
from cubroker.client.digests import need
from cubroker.client.draft import Draft
from cubroker.client.loading.checkpoint import Checkpoint, Paths
from cubroker.client.loading.copy import FileCopy
from cubroker.client.loading.targets import target_of
from cubroker.client.loading.threads import Progress
from cubroker.protocol import Layout
from cubroker.protocol.messages import AUTO


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :func:`load` did."""

    #: the pool
    name: str
    #: the version that the files are in
    version: int
    #: bytes of one device's copy, or of all shards, padding included
    nbytes: int
    #: how many tensors it has
    tensors: int
    #: from the call to the published version, everything included
    seconds: float
    #: the part of it from when the memory was allocated and the buffers pinned until all was copied; files were read
    #: into the buffers before
    copy_seconds: float
    #: False if another session's version existed or was published while this call waited (``if_absent``)
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
        name: the pool; it is created if it does not exist.
        paths: as :meth:`Checkpoint.open` takes them.
        devices: the devices, each of which gets all tensors: ordinals of this process or UUIDs; by default those of the
            ``plan``, or the first one. The files are read once, into the first; each further device copies from the
            device before it, if it can read that device's memory.
        plan: a dict from names of tensors, or shell patterns of names (``layers.1.*``), to the one device of each: the
            pool is sharded, and each tensor is read into its own device. A tensor's own name precedes patterns; if
            several patterns match, the first one counts. Every tensor needs an entry.
        share: how the memory is shared, as :meth:`Broker.create` has it.
        if_absent: load only if the pool has no current version. Of many callers one loads while the others wait, up to
            ``wait`` seconds; if it fails or is killed, the next one takes over.
        slab: the most bytes of one allocation; by default there is one per device.
        wait: seconds to wait for room and for the turn to write.
        mode: who may attach and publish, as :meth:`Broker.create` has it.
        durable: whether the version stays when the broker is started again, as :meth:`Broker.create` has it.
        owner: users whose existing version is accepted (``if_absent``), in addition to this user, root and the broker's
            own user; by default those of ``$CUBROKER_OWNER``. A version of any other user is ``Denied``.
        digest: whether the version is published with digests, as :meth:`Draft.seal` has it.
        progress: called by this thread, now and then, with bytes done and bytes in all.

    Raises:
        CubrokerError: about the files, as :meth:`Checkpoint.open` says, also if one is cut short or changed while it is
            read; about the plan, ``Invalid`` if it has no device for a tensor, or an entry that matches none or comes
            too late; from the broker, as :meth:`Broker.create` says; about ``digest``, ``Unsupported`` without numpy on
            host devices, or if the broker is too old. After an error nothing of the draft is left.
    """
    began = time.perf_counter()
    if digest and not if_absent:  # with `if_absent` the pool may exist already, with digests
        need(broker._session, name)
    first = next(iter(devices or (plan or {}).values()), 0)  # `ask` below refuses anything that is not a device
    with FileCopy("cubroker-load", lambda: context(broker.driver, first), progress=progress) as copy:
        if not if_absent:  # with `if_absent` another process may load, so that this one has nothing to make ready
            copy.begin()
        with Checkpoint.open(paths) as checkpoint:
            names = (entry.name for entry in checkpoint.entries)
            places = None if plan is None else resolve_plan(find_plan(broker.driver, plan), names)
            layout = Layout.pack(((e.name, e.dtype, e.shape) for e in checkpoint.entries), slab=slab, groups=places)
            homes = layout.spread(places) if places else ()
            stored = zip(checkpoint.entries, layout.tensors, strict=True)
            copy.plan(checkpoint.files, stored, layout.allocations, homes)
            ask = partial(broker.attach_or_create, owner=trusted(broker, owner)) if if_absent else broker.create
            with ask(
                name, layout, devices=devices, plan=places, share=share, wait=wait, mode=mode, durable=durable
            ) as pool:
                version, held, copying = pool.version, pool.layout, 0.0
                if loaded := isinstance(pool, Draft):
                    if digest:
                        need(broker._session, name)
                    with doing(f"copying files into a draft of {name!r}"):
                        copying = copy.into([target_of(replica) for replica in pool.replicas])
                    checkpoint.check_unchanged()
                    version = pool.seal(digest=digest)
    return Loaded(name, version, held.nbytes, len(held.tensors), time.perf_counter() - began, copying, loaded)


def trusted(broker: Broker, owner: Owner | Sequence[Owner] | None) -> tuple[int, ...]:
    """Return the users whose version is accepted: root and the broker's user, who may change any, and ``owner``."""
    own = () if broker.uid is None else (broker.uid,)
    return (0, *own, *uids(owner))
