"""Publishing from arrays: describe the sources, lay them out, and copy them into a draft.

Arrays on a GPU are copied from device to device, after all work that was submitted to their device before. Arrays in
host memory are copied like the bytes of a checkpoint, as if each array were a file. An array with several names, such
as a tied parameter, is stored once. Nothing is copied before the draft exists, and arrays with gaps are made contiguous
one by one, so that no second copy of a model is needed in addition to the draft.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Self, SupportsIndex

import msgspec

from cubroker.client.arrays import Array, Arrays, DeviceArray, HostArray, batches
from cubroker.client.delta import Change, Updated, differing, updated
from cubroker.client.devices import DeviceId, Placed, Plan, context, doing, find_plan, resolve_plan
from cubroker.client.digests import sealed
from cubroker.client.draft import Draft, describe
from cubroker.client.loading.checkpoint import StoredTensor
from cubroker.client.loading.copy import FileCopy
from cubroker.client.loading.read_plan import Target, hold_all, homes_of, target_of
from cubroker.client.memory.mapping import Spot
from cubroker.client.pool import Pool
from cubroker.client.session import ClientSession
from cubroker.client.transport.requests import Steps, beside, run, version_number
from cubroker.driver import Context, Driver, DriverError, Stream
from cubroker.driver.buffers import address
from cubroker.driver.kernels import Segment
from cubroker.protocol import messages
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import Layout, TensorSpec, form
from cubroker.protocol.status import PoolInfo

_Placed = tuple[str, TensorSpec, int]
"""An array by name, its place, and its bytes."""

_Ready = tuple[list[_Placed], list[Segment]]
"""Arrays without gaps on one device, which are copied into one allocation."""

_Near = tuple[DeviceArray, TensorSpec, int]
"""An array whose address is found only when it is copied from device to device."""


class Sources:
    """The arrays of a new version, by name."""

    def __init__(self, driver: Driver, arrays: Arrays) -> None:
        self._driver = driver
        self._arrays = arrays
        #: Arrays that are copied from their addresses, by context and allocation, and all others; see :meth:`prepare`.
        self._ready: dict[tuple[Context, int], _Ready] = {}
        self._rest: list[_Placed] = []

    @classmethod
    def of(cls, source: object, driver: Driver) -> Self:
        """Describe the arrays to be published; arguments and errors are those of :func:`~.draft.describe`."""
        return cls(driver, describe(source, driver))

    def placed(
        self, devices: Sequence[DeviceId] | None, plan: Plan | None
    ) -> tuple[Sequence[DeviceId] | None, dict[str, str] | None]:
        """Return the devices and the plan of the version, by UUID: by default each array stays on its device.

        Arrays in host memory go to the first of these devices, or to that of the arrays.

        Raises:
            Invalid: the plan does not fit the names.
            NotFound: no such device.
        """
        if plan is not None:
            return devices, resolve_plan(find_plan(self._driver, plan), self._arrays)
        homes = {
            name: array.context.device.uuid
            for name, array in self._arrays.items()
            if isinstance(array, DeviceArray) and array.context.device in self._driver.devices
        }
        several = tuple(dict.fromkeys(homes.values()))
        if devices is not None or not several:
            return devices, None
        if len(several) == 1:
            return several, None
        return several, {name: homes.get(name, several[0]) for name in self._arrays}

    def layout(self, plan: Mapping[str, str] | None, *, tie: bool = True) -> Layout:
        """Lay the arrays out.

        Args:
            plan: the device of each array, by UUID, if not all are on all devices.
            tie: whether an array with several names is stored once, on each device.

        Raises:
            Invalid: as :meth:`Layout.pack`.
        """
        firsts: dict[Hashable, str] = {}
        tied: dict[str, str] = {}
        for name, array in self._arrays.items():
            key = array.place, array.dtype, array.shape, None if plan is None else plan[name]
            first = firsts.setdefault(key, name) if tie and 0 not in array.shape else name
            if first != name:
                tied[name] = first
        tensors = tuple((name, array.dtype, array.shape) for name, array in self._arrays.items())
        groups = None if plan is None else tuple(plan[name] for name in self._arrays)
        return _packed(tensors, groups, tuple(tied.items()))

    def update(self, base: Pool, homes: Sequence[str], devices: Sequence[str]) -> tuple[Updated, Self]:
        """Compare the arrays with an earlier version, and lay out a version that shares its unchanged memory.

        Args:
            base: the earlier version, with all its tensors.
            homes: the device of each of its allocations, by UUID, if it is sharded.
            devices: its devices.

        Returns:
            The layout, and the sources of its new allocations.

        Raises:
            Invalid: a type is one that pools lack, a limit is exceeded, or the base was given back during the call.
            OutOfMemory, DeviceFailure: the driver refused.
        """
        with doing(f"comparing tensors with those of {base!r}"):
            arrays = differing(self._arrays, base)
        changes = {
            name: Change(*form(name, array.dtype, array.shape), array.place, _home(array, devices) if homes else None)
            for name, array in arrays.items()
        }
        laid_out = updated(base.layout, homes or (None,) * len(base.layout.allocations), changes)
        new = [spec.name for spec in laid_out.layout.tensors if laid_out.kept[spec.allocation] is None]
        stays = {name: base[name] for name in new if name not in arrays}
        described = describe(stays, self._driver) if stays else {}
        return laid_out, type(self)(self._driver, {name: arrays.get(name) or described[name] for name in new})

    def device(self, devices: Sequence[str]) -> str:
        """Return the first of these devices, by UUID, that an array is on; the first one if none is."""
        there = {array.context.device.uuid for array in self._arrays.values() if isinstance(array, DeviceArray)}
        return next((uuid for uuid in devices if uuid in there), devices[0])

    def prepare(self, layout: Layout) -> None:
        """Group the arrays by the allocations of a layout, and find their addresses, for :meth:`fill`; once.

        That needs no draft yet. The addresses of memory that the broker lends are found later: a hold on such memory
        keeps its pool from being switched, put to sleep or sealed, and a publication that waits for room must not do
        that.
        """
        specs = {spec.name: spec for spec in layout.tensors}
        filled: set[tuple[int, int]] = set()
        for name, array in self._arrays.items():
            spec = specs[name]
            place, nbytes = (spec.allocation, spec.offset), spec.nbytes
            if not nbytes or place in filled:
                continue
            filled.add(place)
            if isinstance(array, DeviceArray) and not (array.copies or array.lent):
                placed, segments = self._ready.setdefault((array.context, spec.allocation), ([], []))
                placed.append((name, spec, nbytes))
                segments.append((spec.offset, array.contiguous()[0], nbytes))
            else:
                self._rest.append((name, spec, nbytes))

    def drop(self) -> None:
        """Refer to no array any more: the traceback of an error may keep this object, and so the lease of a base."""
        self._arrays, self._ready, self._rest = {}, {}, []

    def fill(self, draft: Draft) -> None:
        """Copy the arrays to their places in a draft, on all its devices; every copy is done when this returns.

        Raises:
            Invalid: a source was given back during the call.
            Unavailable: threads have run out.
            OutOfMemory, DeviceFailure: the driver refused.
        """
        targets = [target_of(replica) for replica in draft.replicas if replica.allocations]
        if not targets:
            return
        ready: dict[tuple[Context, int], list[Segment]] = {}
        near: list[_Near] = []
        far: list[_Placed] = []
        for (home, allocation), (placed, segments) in self._ready.items():
            if self._reach(targets, home, allocation):
                ready[home, allocation] = segments
            else:
                far += placed
        for name, spec, nbytes in self._rest:
            array = self._arrays[name]
            if isinstance(array, DeviceArray) and self._reach(targets, array.context, spec.allocation, array.lent):
                near.append((array, spec, nbytes))
            else:
                far.append((name, spec, nbytes))
        files = [_ArrayFile(self._arrays[name], nbytes) for name, _, nbytes in far]
        stored = [
            (StoredTensor(name, spec.dtype, spec.shape, 0, nbytes, number), spec)
            for number, (name, spec, nbytes) in enumerate(far)
        ]
        besides = partial(_copy_on_devices, self._driver, ready, near) if ready or near else None
        first, sizes = targets[0].context, draft.layout.allocations
        asked = f"copying tensors into a draft of {draft.name!r}"
        with doing(asked), FileCopy("cubroker-publish", lambda: first, besides=besides) as copy:
            copy.plan(files, stored, sizes, homes_of(targets))
            copy.into(targets)

    def _reach(self, targets: Iterable[Target], home: Context, allocation: int, lent: bool = False) -> bool:
        """Whether every device that copies an array itself, not from another replica, can read it where it is."""
        return all(
            target.context is home
            or (not lent and self._driver.peers.can_access(target.context.device.index, home.device.index))
            for target in targets
            if not target.upstream and target.pointers[allocation] is not None
        )


class Publication(msgspec.Struct, eq=False):
    """A publication from its prepared sources to its seal, in parts, so that an event loop can await the draft."""

    session: ClientSession
    #: Opens a draft of the layout as the request says.
    drafted: Callable[[messages.Create, Layout], Steps[Draft]]
    body: messages.Create
    layout: Layout
    #: The arrays that are copied.
    sources: Sources
    #: As for :meth:`Draft.seal`.
    digest: bool
    #: See :attr:`Draft.shared_digests`.
    shared: Mapping[Spot, bytes] = {}
    #: Called before the seal; it may raise.
    check: Callable[[], None] | None = None
    #: The pool of an update's base, if it is closed at the end.
    base: Pool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        run(self.closing())

    def complete(self) -> int:
        """Publish, and wait for all of it; returns the version."""
        with self, run(beside(self.draft(), self.prepare)) as draft:
            return self.finish(draft)

    def prepare(self) -> None:
        """Do what needs no draft yet: make this process's contexts, and find the addresses of the arrays."""
        self.session.requests.flush()
        for device in self.body.devices:
            context(self.session.driver, device)
        self.sources.prepare(self.layout)

    def draft(self) -> Steps[Draft]:
        """Wait for the turn to write the pool, and for room; open the draft."""
        return self.drafted(self.body, self.layout)

    def finish(self, draft: Draft) -> int:
        """Fill a draft and seal it; returns the version."""
        draft.shared_digests = self.shared
        self.sources.fill(draft)
        if self.check:
            self.check()
        return draft.seal(digest=self.digest)

    def closing(self) -> Steps[None]:
        """Drop the arrays, and give the base back."""
        self.sources.drop()
        if self.base and not self.base.closed:
            self.base._memory().end()  # even if the traceback of an error refers to tensors of it
            if self.base.let_go():
                yield from self.base.confirming()


def update(
    session: ClientSession,
    drafted: Callable[[messages.Create, Layout], Steps[Draft]],
    ask: Callable[..., messages.Create],
    sources: Sources,
    base: Pool,
    info: PoolInfo,
    homes: Sequence[str],
    known: messages.DigestList | None,
    *,
    close: bool,
) -> Publication:
    """Prepare a version that shares the memory of an earlier one as far as that has not changed.

    Args:
        session: in which it is published.
        drafted: as for :class:`Publication`.
        ask: makes the request of a layout, where it is placed, and a ``base``.
        sources: all arrays that may have changed.
        base: the earlier version, with all its tensors.
        info: the broker's information on it.
        homes: as for :meth:`Sources.update`.
        known: its digests, if the version is published with digests.
        close: whether the base is closed at the end.

    Raises:
        CubrokerError: as :meth:`Sources.update` and :func:`~.digests.sealed`.
    """
    lease = base.lease

    def check() -> None:  # not by a hold, which would refuse a switch while this waits for room
        if (base.lease, base.version) != (lease, info.version):
            raise Invalid(
                f"version {info.version} of {info.name!r} cannot be the base of an update: its pool fell asleep or"
                f" was switched during the update; give the version's number, or publish again"
            )

    laid_out, changed = sources.update(base, homes, info.devices)
    with ExitStack() as undo:
        undo.callback(changed.drop)
        layout, kept = laid_out.layout, laid_out.kept
        plan = tuple(map(info.devices.index, map(str, laid_out.groups))) if homes else None
        digests = sealed(repr(base), base.digest_ranges(), known) if known else {}
        shared = {
            (uuid, number): digests[old]
            for index, uuid in enumerate(info.devices)
            for number, old in enumerate(kept)
            if known and old is not None and (plan is None or plan[number] == index)
        }
        body = ask(layout, Placed(info.devices, plan), base=messages.Base(info.version, kept))
        ours = base if close else None
        found = Publication(session, drafted, body, layout, changed, bool(known), shared, check, ours)
        undo.pop_all()
    return found


def base_version(name: str, base: object, directory: Path) -> int | None:
    """Return the number of the version that an update of the pool ``name`` has as its base; None for the current one.

    Args:
        name: the pool.
        base: the argument of the caller.
        directory: the directory of the broker that gets the update, which may use a pool's number for another version.

    Raises:
        Invalid: it is not a published version of the pool, or this broker may know another version by its number.
    """
    if isinstance(base, Pool) and base.name == name and base.sealed:
        there, why = base._session.directory, ""
        if base.lost:
            why = f"it is lost ({base.lost}), and its number may be another version's now; attach again"
        elif base.closed:
            why = "it is closed; attach again, or give its number"
        elif there != directory:
            why = f"it is of the broker on {there}, and the update goes to that on {directory}"
        if why:
            raise Invalid(f"{base!r} cannot be the base of an update: {why}")
        return base.version
    if isinstance(base, SupportsIndex) and not isinstance(base, bool):
        return version_number(base)
    if isinstance(base, str) and base == name:
        return None
    hint = "; of a pool for asyncio give its `blocking`" if isinstance(getattr(base, "blocking", None), Pool) else ""
    raise Invalid(
        f"the base of an update of {name!r} has to be a published version of that pool: give a Pool that is attached to"
        f" it, its number, or the pool's name, and not {base!r}{hint}"
    )


@lru_cache(maxsize=8)
def _packed(
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...],
    groups: tuple[str, ...] | None,
    tied: tuple[tuple[str, str], ...],
) -> Layout:
    """Do as :meth:`Layout.pack`; cache the last few layouts, since the same model is published again and again."""
    named = None if groups is None else {name: group for (name, _, _), group in zip(tensors, groups, strict=True)}
    return Layout.pack(tensors, groups=named, tied=dict(tied))


def _home(array: Array, devices: Sequence[str]) -> str:
    """Return the device for an array that the base lacks: its own, if that is one of ``devices``, else the first."""
    uuid = array.context.device.uuid if isinstance(array, DeviceArray) else ""
    return uuid if uuid in devices else devices[0]


def _copy_on_devices(
    driver: Driver,
    ready: Mapping[tuple[Context, int], Sequence[Segment]],
    near: Sequence[_Near],
    targets: Sequence[Target],
) -> None:
    """Copy arrays to their places on all targets, from device to device.

    Args:
        driver: the driver of all devices.
        ready: arrays without gaps, by their context and the allocation that they are copied into.
        near: arrays that have to be made contiguous, or that the broker lends.
        targets: the memory that they are copied to.
    """
    kept: list[object] = []
    with ExitStack() as undo:
        undo.enter_context(hold_all(targets))
        sources = {home for home, _ in ready}.union(array.context for array, _, _ in near)
        _enable_peers(driver, undo, targets, sources)
        undo.callback(kept.clear)  # when the streams are finished
        streams = [undo.enter_context(target.context.stream()) for target in targets]
        for source in sources:
            source.synchronize()
        for (home, allocation), segments in ready.items():
            for target, stream in zip(targets, streams, strict=True):
                _start(target, stream, home, allocation, segments)
        for batch in batches(near, lambda each: each[2] * each[0].copies):
            pieces: dict[tuple[Context, int], list[Segment]] = {}
            for array, spec, nbytes in batch:
                pointer, keeper = array.contiguous()
                kept.append(keeper)
                pieces.setdefault((array.context, spec.allocation), []).append((spec.offset, pointer, nbytes))
                del keeper  # a traceback may keep this frame for long
            for source in {array.context for array, _, _ in batch}:
                source.synchronize()
            for target, stream in zip(targets, streams, strict=True):
                for (home, allocation), found in pieces.items():
                    _start(target, stream, home, allocation, found)
            if batch[-1] is not near[-1]:
                for stream in streams:
                    stream.synchronize()
                kept.clear()


def _start(target: Target, stream: Stream, home: Context, allocation: int, segments: Sequence[Segment]) -> None:
    """Enqueue the copies of segments to places in an allocation, if a target has that allocation.

    A kernel copies segments on the target's own device. Memory on another device may be accessible to copies but not to
    kernels, and a fault of a kernel would ruin the context.
    """
    start = target.pointers[allocation]
    if start is None:
        return
    with target.context.current():
        if home is target.context:
            target.context.copy_batch(stream, segments, start)
        else:
            for offset, pointer, nbytes in segments:
                stream.copy(start + offset, pointer, nbytes)


def _enable_peers(driver: Driver, undo: ExitStack, targets: Sequence[Target], sources: Iterable[Context]) -> None:
    """Give devices direct access to the memory of others; without it the driver copies through host memory."""
    for target in targets:
        for source in sources:
            peer = source.device.index
            if source is not target.context and driver.peers.can_access(target.context.device.index, peer):
                with suppress(DriverError):  # the device can have no more peers
                    driver.peers.enable(target.context, peer)
                    undo.callback(driver.peers.disable, target.context, peer)


class _ArrayFile:
    """An array that threads read like a file. The first read makes a copy without gaps, and the last one drops it."""

    descriptor = None

    def __init__(self, array: Array, nbytes: int) -> None:
        self._array = array
        self._left = nbytes
        self._lock = Lock()
        self._read: Callable[[int, memoryview], None] | None = None

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill ``buffers``, in order, with the bytes from ``offset`` on."""
        with self._lock:
            read = self._read = self._read or _reader(self._array)
        for buffer in buffers:
            read(offset, buffer)
            offset += len(buffer)
        with self._lock:
            self._left -= sum(map(len, buffers))
            if not self._left:
                self._read = None


def _reader(array: Array) -> Callable[[int, memoryview], None]:
    """Return a function that copies an array's bytes, from an offset on, to a buffer in host memory."""
    if isinstance(array, HostArray):
        data = array.contiguous().cast("B")

        def read(offset: int, buffer: memoryview) -> None:
            with address(data[offset:]) as (source, _), address(buffer, writable=True) as (target, nbytes):
                ctypes.memmove(target, source, nbytes)

        return read
    if array.copies:
        array.context.synchronize()  # the copy is made in a stream of this thread, which waits for no other
    pointer, keeper = array.contiguous()
    array.context.synchronize()

    def fetch(offset: int, buffer: memoryview, keeper: object = keeper) -> None:
        array.context.read_into(pointer + offset, buffer)

    return fetch
