"""Loading: safetensors files into a new version of a pool, all of it or nothing; and what a load waits for."""

from __future__ import annotations

import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

from cubroker.client.broker import Broker
from cubroker.client.devices import DeviceId, Plan, chosen, context, doing, find_plan, resolve_plan
from cubroker.client.digests import need
from cubroker.client.draft import Draft
from cubroker.client.loading.checkpoint import Checkpoint, Paths
from cubroker.client.loading.copy import FileCopy
from cubroker.client.loading.read_plan import target_of
from cubroker.client.loading.threads import Progress
from cubroker.client.pool import Pool
from cubroker.client.transport.requests import Owners, flag, uids
from cubroker.protocol import Layout
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import AUTO

WAIT_TOLD = 5.0
"""Seconds for which a wait is not told, and between two looks at what is waited for."""


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
    owner: Owners = None,
    digest: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """Load a checkpoint into a new version of pool ``name`` and publish it.

    Args:
        broker: the session to work in.
        name: the pool; it is created if it does not exist.
        paths: as :meth:`Checkpoint.open` takes them.
        devices: each gets all tensors; by default those of the ``plan``, or the first one. The files are read once,
            into the first; each further device copies from the device before it, if it can read that device's memory.
        plan: as for :meth:`Broker.publish`: the pool is sharded, and each tensor is read into its own device.
        share: how the memory is shared, as :meth:`Broker.create` has it.
        if_absent: load only if the pool has no current version. Of many callers one loads; if it fails, the next does.
        slab: the most bytes of one allocation; by default there is one per device.
        wait: seconds to wait for room, for the turn to write, and with ``if_absent`` for another caller's load.
        mode: who may attach and publish, as :meth:`Broker.create` has it.
        durable: whether the version outlives the broker, as :meth:`Broker.create` has it.
        owner: users whose existing version is accepted (``if_absent``), in addition to this user, root and the broker's
            own user; by default those of ``$CUBROKER_OWNER``. A version of any other user is ``Denied``.
        digest: whether the version is published with digests, as :meth:`Draft.seal` has it.
        progress: called by this thread, now and then, with bytes done and bytes in all.

    Raises:
        Invalid: the plan has no device for a tensor, or an entry that matches none or comes too late.
        Unsupported: with ``digest``: there is no numpy for host devices, or the broker is too old.
        CubrokerError: about the files, as :meth:`Checkpoint.open`, also if one is cut short or changed meanwhile; from
            the broker, as :meth:`Broker.create`. After any error nothing of the draft is left.
    """
    began = time.perf_counter()
    digest, if_absent = flag(digest, "digest"), flag(if_absent, "if_absent")
    if digest and not if_absent:  # with `if_absent` the pool may exist already, with digests
        need(broker._session, name)
    first = next(iter(chosen(devices, plan)), 0)  # `drafted` below refuses anything that is not a device
    with FileCopy("cubroker-load", lambda: context(broker.driver, first), progress=progress) as copy:
        if not if_absent:  # with `if_absent` another process may load, so that this one has nothing to make ready
            copy.begin()
        with Checkpoint.open(paths) as checkpoint:
            layout, places = _planned(broker, copy, checkpoint, plan, slab)
            terms = {"devices": devices, "plan": places, "share": share, "wait": wait, "mode": mode, "durable": durable}
            with drafted(broker, name, layout, owner, if_absent=if_absent, **terms) as pool:
                version, held, copying = pool.version, pool.layout, 0.0
                if loaded := isinstance(pool, Draft):
                    version, copying = _published(broker, copy, checkpoint, pool, digest=digest)
    return Loaded(name, version, held.nbytes, len(held.tensors), time.perf_counter() - began, copying, loaded)


def _planned(
    broker: Broker, copy: FileCopy, checkpoint: Checkpoint, plan: Plan | None, slab: int | None
) -> tuple[Layout, dict[str, str] | None]:
    """Plan the copy of a checkpoint's files; returns the layout of its tensors, and the device of each by a plan."""
    names = (entry.name for entry in checkpoint.entries)
    places = None if plan is None else resolve_plan(find_plan(broker.driver, plan), names)
    layout = Layout.pack(((e.name, e.dtype, e.shape) for e in checkpoint.entries), slab=slab, groups=places)
    homes = layout.spread(places) if places else ()
    copy.plan(checkpoint.files, zip(checkpoint.entries, layout.tensors, strict=True), layout.allocations, homes)
    return layout, places


def _published(
    broker: Broker, copy: FileCopy, checkpoint: Checkpoint, draft: Draft, *, digest: bool
) -> tuple[int, float]:
    """Copy a checkpoint's files into a draft, and seal it; returns the version, and the seconds of the copy."""
    if digest:
        need(broker._session, draft.name)
    with doing(f"copying files into a draft of {draft.name!r}"):
        seconds = copy.into([target_of(replica) for replica in draft.replicas])
    checkpoint.check_unchanged()
    return draft.seal(digest=digest), seconds


def drafted(broker: Broker, name: str, layout: Layout, owner: Owners, *, if_absent: bool, **terms: Any) -> Pool:
    """Return a draft; with ``if_absent`` the current version, if there is one, also if it is published during the wait.

    Args:
        broker: the session to work in.
        name: the pool.
        layout: of the draft.
        owner: users whose version is accepted, as for :func:`load`.
        if_absent: as for :func:`load`.
        terms: further arguments of :meth:`Broker.create`.

    Raises:
        CubrokerError: as :meth:`Broker.create`, and with ``if_absent`` as :meth:`Broker.attach_or_create`.
    """
    if if_absent:
        return broker.attach_or_create(name, layout, owner=trusted(broker, owner), **terms)
    return broker.create(name, layout, **terms)


def trusted(broker: Broker, owner: Owners) -> tuple[int, ...]:
    """Return the users whose version is accepted: root and the broker's user, who may change any, and ``owner``."""
    own = () if broker.uid is None else (broker.uid,)
    return (0, *own, *uids(owner))


@contextmanager
def telling_waits(broker: Broker, tell: Callable[[str], object]) -> Iterator[None]:
    """While the block runs, look every few seconds whether a request of this session waits, and tell for what.

    ``tell`` is called by another thread, at every look.
    """
    ended = Event()

    def watch() -> None:
        with suppress(CubrokerError):  # the block fails, too, and says why
            while not ended.wait(WAIT_TOLD):
                waiters = broker.look().waiters if broker.requests.waiting() else ()
                for waiter in waiters:
                    if waiter.session == broker.session and not ended.is_set():
                        tell(f"{waiter.awaits}; see `cubroker top`")

    with suppress(RuntimeError):  # there are no threads: the user is told less, and by the block, if it needs some
        start_new_thread(watch, ())
    try:
        yield
    finally:
        ended.set()
