"""A published version that this process has attached to, and a version that it is filling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from threading import RLock

from cubroker.client import devices, digests, named_arrays
from cubroker.client.follow import Follow
from cubroker.client.fork_guard import Closeable, WeakRefs
from cubroker.client.ipc_events import Events, SharedEvent
from cubroker.client.memory.lease import LeaseHandle, LeaseRequest
from cubroker.client.memory.mapping import DeviceMapping, LeasedMemory, Spot
from cubroker.client.memory.multicast import MulticastMapping
from cubroker.client.replica import Replica, TensorIndex, difference
from cubroker.client.session import ClientSession
from cubroker.client.tensor import SharedTensor
from cubroker.client.transport.requests import Future, Steps, blocking, expect, run, seconds
from cubroker.driver import DriverError
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound, Retired, TimedOut, Unavailable, Unsupported
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    BY_DESCRIPTOR,
    DIGESTS,
    IN_PLACE,
    MULTICAST,
    VMM,
    Attach,
    DigestList,
    Digests,
    Done,
    ListDigests,
    Reply,
    Sealed,
    SealInPlace,
    SetLayout,
)


class Pool(Replica, Closeable):
    """The tensors of one version on one device, by name, and the lease that keeps them there.

    Not to be confused with :class:`cubroker.server.ledger.model.Pool`.

    Closing it makes it useless here at once. The memory stays mapped, and the lease held, until the
    last of its tensors, and of all arrays and framework tensors made from them, is gone.

    Attributes:
        name: the pool's name.
        share: how its memory is shared.
        writable: whether its tensors may be written here.
        protected: whether the device refuses what is written here by mistake: in ``vmm`` and ``multicast`` pools that
            are not ``writable``. Who writes to an ``ipc`` pool changes what all its readers read.
    """

    _sealed = True

    def __init__(
        self,
        lease: LeaseHandle,
        mapped: LeasedMemory,
        index: TensorIndex,
        name: str,
        owners: tuple[int, ...] = (),
    ) -> None:
        super().__init__(mapped, mapped.places, index)
        self.name = name
        self.share = mapped.share
        self.writable = not mapped.readonly
        self.protected = mapped.protected
        self._lease = lease
        self._session = lease.session
        self._events: Events | None = None
        self._owners = owners
        self._owner = lease.session.owner
        self._follows: WeakRefs[Follow] = WeakRefs()
        self._closing = RLock()  # a finalizer or a signal handler may close it in the middle
        self._waking = RLock()
        self._wanted = mapped.places[0].memory.uuid if len(mapped.places) == 1 else None

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ", asleep" if self.asleep else ""
        return f"<{type(self).__name__} {self.name!r} version {self.version}, {len(self)} tensors{state}>"

    @property
    def version(self) -> int:
        """The version, from 1 on; :meth:`switch` changes it."""
        return self._lease.version

    @property
    def how(self) -> str:
        """How :meth:`broadcast` gets bytes to all replicas of a multicast pool: ``multicast`` or ``copies``.

        It may be another after a restart of the broker, and is empty while that puts the replicas together again.
        """
        return self._lease.multicast.team.how if self._lease.multicast else ""

    @property
    def why(self) -> str:
        """Why so."""
        return self._lease.multicast.team.why if self._lease.multicast else ""

    @property
    def lost(self) -> str:
        """How the broker lost the memory, or this process its session; empty if neither happened.

        The broker loses what is not durable when it is killed, and without a store everything. What is mapped here
        stays mapped; whether its bytes stay is up to the driver. Close the pool, and attach again, which opens another
        session if this one is over (:meth:`Broker.reconnect`).
        """
        return self._session.losses.get((self.name, self.version), "") or self._session.lost

    @property
    def nbytes(self) -> int:
        """Bytes that this pool has mapped, padding included: a whole version's, or those of one shard."""
        return sum(self.layout.allocations[number] for number in self.allocations)

    @property
    def lease(self) -> int:
        """The number of its lease; 0 while it is asleep."""
        return self._lease.number

    def broadcast(self, source: object, name: str) -> None:
        """Store to a tensor on all devices at once; done everywhere when it returns.

        Nothing keeps holders from storing to the same tensor at the same time, or from reading it meanwhile. After a
        restart of the broker it waits until the replicas are bound together again.

        Args:
            source: of the tensor's dtype and shape: an array in host memory, of the kinds that
                :meth:`SharedTensor.copy_from` takes, or a :class:`SharedTensor` in the memory of this pool's device; or
                the address of as many raw bytes in such memory. Work that fills it is waited for, if it is this
                process's.
            name: the tensor's. To store raw bytes of the host, fill this pool's own with
                :meth:`SharedTensor.copy_from_bytes`, and pass that as the source.

        Raises:
            Unsupported: the pool is not shared as ``multicast``; or this process cannot reach all replicas.
            Invalid: it is published and not writable, its memory is another device's than the one that uses it here,
                the source does not fit, or the pool is closed.
            DeviceFailure: the driver refused; some replicas may have the bytes.
            TimedOut, Unavailable: the replicas were not bound together again; nothing was stored.
        """
        self._owner.check()
        with ExitStack() as held:
            outlet = held.enter_context(self._multicast().hold(self._memory, name))
            tensor, spec = self[name], self._index.tensors[name]
            try:
                address = self._source(source, tensor, held)
                outlet.store(address, spec.allocation, spec.offset, tensor.nbytes)
            except DriverError as error:
                raise devices.failure(error, f"storing {name!r} of {self._label} to all replicas") from error

    def multicast_pointer(self, name: str) -> int:
        """Return the address by which kernels of this pool's device store to a tensor on all devices at once.

        It takes ``multimem`` instructions and copies from device memory, is never to be read, and stays the same
        while the pool sleeps and wakes. After a restart of the broker, what is mapped there is replaced, between
        submitted work and later work, but not while a tensor of this pool is held (:meth:`SharedTensor.hold`).

        Raises:
            Unsupported: the pool is not shared as ``multicast``, or copies take the place of that, or this process has
                to do without.
            Invalid, TimedOut, Unavailable: as :meth:`broadcast`.
        """
        self._owner.check()
        multicast, spec = self._multicast(), self._index.tensors[name]
        return multicast.pointer(self._memory, spec.allocation, spec.offset)

    @blocking
    def check(self) -> Steps[None]:
        """Have the devices compare all bytes that this pool has mapped with the digest that they were sealed with.

        That finds what was changed since: by a process with a descriptor or handle of its own, or by faulty memory. It
        finds no writer that knows the digest and means to keep it (:mod:`cubroker.driver.digest`).

        Raises:
            Corrupted: they differ; it says on which device, in which allocation, and which tensors lie there.
            Unsupported: the version was sealed without a digest, or the broker is too old to keep one.
            Invalid: the pool is a draft, closed or asleep.
            NotFound, Retired, Denied: the version is not this user's to read any more.
            DeviceFailure: the driver refused.
        """
        self._owner.check()
        with ExitStack() as held:
            if not self._sealed:
                raise Invalid(f"{self._label} was not published, so nothing says what it should hold; seal it first")
            pieces = digests.spans(self)
            held.enter_context(self.allocation_views[0].hold())
            if self._session.version < DIGESTS:
                raise Unsupported(f"{self._label} cannot be checked: the broker is too old to keep digests; upgrade it")
            answer = yield from self._session.ask(ListDigests(self.name, self.version), DigestList)
            digests.check(self._label, self.layout, pieces, answer)

    @blocking
    def event(self, name: str, *, device: int | str | None = None) -> Steps[SharedEvent]:
        """Make an event, with which this process tells others when it has written what they wait to read.

        It ends with this pool's lease: when the pool is closed or falls asleep, or this process ends.

        Args:
            name: by which others open it, unique among the events of the version.
            device: whose work it will mark, if the pool is used by several devices here.

        Raises:
            Invalid: the pool is not writable, a draft, closed or asleep; or ``device`` does not say which.
            Exists: the version has an event of this name.
            OverQuota: this session, or this user, has as many events as it may.
            DeviceFailure: the driver refused.
        """
        self._owner.check()
        self._memory()
        return (yield from self._event_list().make(self, self._at(device), name))

    @blocking
    def open_event(self, name: str, *, wait: float = 0.0) -> Steps[SharedEvent]:
        """Open an event that another process made with its lease on the same version.

        Args:
            name: the event's.
            wait: seconds to wait for somebody to make it.

        Raises:
            NotFound: there is none; or this process does not see its device.
            TimedOut: no process made it in ``wait`` seconds.
            Invalid: the pool is not writable, a draft, closed or asleep.
            Unavailable: the pool was closed meanwhile.
            DeviceFailure: the driver refused: as it does in the process that made the event, which has it already.
        """
        self._owner.check()
        self._memory()
        return (yield from self._event_list().open(self, self._places, name, seconds(wait)))

    def follow(self, *, switch: bool = False, timeout: float | None = None) -> Follow:
        """Return an iterator, also an asynchronous one, over the versions that are newer than this pool's.

        That is the current version, if it is newer, and every later one. The iteration ends when the pool is closed.

        Args:
            switch: whether the pool is switched to each version (:meth:`switch`) before that is returned. It is done by
                the iteration, when it is asked for the next version, so that no other work uses the tensors meanwhile;
                where it fails, the iteration raises why and may go on, and tries again. In an event loop a thread does
                it. A pool that is asleep wakes.
            timeout: seconds to wait for a version, each time, before ``TimedOut`` is raised; by default without limit.

        Raises:
            Invalid: the pool is closed, or a draft is to be switched.
            Unsupported: the pool is shared as ``ipc`` and cannot be switched.
            Unavailable: this process is short of threads or memory. The iteration raises it when the pool's session is
                over, since versions of the next broker are no newer versions of this pool (:attr:`lost`).
        """
        self._owner.check()
        session, label = self._session, self._label

        def live(_: object) -> ClientSession:
            if session.lost:
                raise Unavailable(f"{label} is lost: {session.lost}; close it, and attach again")
            return session

        if switch:
            self._check_moves("be switched")
        first = self.version
        newer = (lambda version: version > first) if switch else (lambda version: version > self.version)
        follow = Follow(self.name, live, self._owners, timeout, newer, self.switch if switch else None)
        self._follows.add(follow)
        if self.closed:
            follow.close()
            raise Invalid(f"{label} is closed in this process; attach again")
        return follow

    @property
    def asleep(self) -> bool:
        """Whether :meth:`sleep` unmapped it."""
        mapped = self._mapped
        return mapped is not None and mapped.asleep

    @blocking
    def sleep(self) -> Steps[None]:
        """Unmap the memory and give the lease back, but keep the addresses for :meth:`wake`; not for ``ipc`` pools.

        Those of a ``multicast`` pool are the addresses of its tensors and of :meth:`multicast_pointer`.
        Work that was submitted to the devices is waited for. Arrays, framework tensors and captured CUDA graphs
        that use the addresses may stay, and must not be used meanwhile: on a host device that ends the process.
        Nothing keeps the version there: once it is retired or superseded, it can be gone. A pool that sleeps may sleep
        again, and be closed. Its events here are closed.

        Raises:
            Unsupported: the pool is shared as ``ipc``.
            Invalid: it is closed or a draft, or tensors are being copied or are held; it stays awake.
            DeviceFailure: not all of the memory could be unmapped; the lease stays.
            TimedOut: the memory is unmapped, but the broker has not yet confirmed that the lease is over.
        """
        self._owner.check()
        with self._closing:
            slept = self._fall_asleep()
            self._end_events("fell asleep")
        with suppress(Unavailable):  # a broker that is gone holds no leases
            yield from self._lease.confirm(slept)

    def wake(self, wait: float = 0.0) -> None:
        """Lease the same version again and map it where it was; a pool that is awake stays so.

        Args:
            wait: seconds that the broker may let the request wait.

        Raises:
            Retired, NotFound: the version is not there any more. As with every failure, the pool stays asleep.
            Unavailable: the replicas of a ``multicast`` pool are not stored to in the same way any more.
            Invalid: it is closed.
            CubrokerError: as :meth:`Broker.attach`.
        """
        self._owner.check()
        with self._waking:  # one thread asks for all
            run(self.waking(wait))

    def waking(self, wait: float) -> Steps[None]:
        """As :meth:`wake`, but two at once may both ask; what the later one is given goes back at once."""
        self._owner.check()
        if self.closed:
            raise Invalid(f"{self._label} is closed in this process; attach again")
        if not self.asleep:
            return
        body = Attach(self.name, self.version, self._wanted, seconds(wait), owners=self._owners)
        try:
            yield from self._lease.wake(body)
        except (NotFound, Retired) as error:
            raise type(error)(f"{self._label} cannot wake: {error.message}; close it, and attach again") from None

    def switch(self, version: int | None = None, wait: float = 0.0) -> int:
        """Map another version of the pool at the same addresses, in place of this one; returns the version's number.

        Arrays, framework tensors, captured CUDA graphs and other tensors of the pool stay, and show the bytes of the
        other version from then on. All of it is mapped, on all devices, or the version before stays as it was; so it is
        when the caller is interrupted. Work that was submitted to the devices is waited for, and no other work may use
        the tensors until this returns. The lease on the version before is given back afterwards; for a moment there are
        both. Events of that version are closed here. A pool that is asleep wakes on the other version.

        Args:
            version: which one; by default the current one. Nothing happens if the pool is awake and on it.
            wait: seconds to wait for its publication.

        Raises:
            Unsupported: the version has another layout, share kind or device, or is ``writable`` where this one is not;
                or the pool is shared as ``ipc``, or is a ``multicast`` pool that this process may broadcast to.
            Invalid: the pool is closed or a draft, or tensors are being copied or are held.
            NotFound, Retired, Denied, OverQuota, TimedOut: as :meth:`Broker.attach`.
            OutOfMemory, DeviceFailure: the driver refused. Should it refuse to map the version before again, too, the
                error says so, and the pool is asleep.
        """
        self._owner.check()
        request = self.switch_request()
        with self._waking:
            try:
                return run(self.switching(request, version, wait))
            except BaseException:
                run(request.settle())
                raise

    def switch_request(self) -> LeaseRequest:
        """Return a request for :meth:`switching`."""
        return self._lease.switch(self.layout)

    def switching(self, request: LeaseRequest, version: int | None, wait: float) -> Steps[int]:
        """As :meth:`switch`; the caller has the request settled where this raises or is given up."""
        self._owner.check()
        if version is not None and version < 1:
            raise Invalid(f"version {version}: versions count from 1; leave it out for the current one")
        self._check_moves("be switched")
        if version == self.version and not self.asleep:
            return version
        body = Attach(self.name, version or 0, self._wanted, seconds(wait), owners=self._owners)
        reply, _ = yield from request.ask(body)
        return reply.version

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or by the Broker."""
        return self._mapped is None

    @blocking
    def close(self) -> Steps[None]:
        """Give the memory back: now, or with the last tensor or array of it that still lives.

        Raises:
            DeviceFailure: the memory could not be unmapped yet. The lease stays until it is, which this process tries
                again in the background.
            TimedOut: the memory is unmapped, but the broker has not yet confirmed that the lease is over.
        """
        if self.let_go():
            yield from self.confirming()

    def let_go(self) -> bool:
        """Begin to close the pool, without waiting; returns whether :meth:`confirm` has something to wait for."""
        self._owner.check()
        with self._closing:
            closed = self.closed
            if not closed:
                for follow in self._follows:
                    follow.close()
                self._end_events("was closed")
                self._release()
        return not closed and self._lease.ending

    @blocking
    def confirm(self) -> Steps[None]:
        """Wait for what :meth:`let_go` began; raises as :meth:`close` does."""
        yield from self.confirming()

    def confirming(self) -> Steps[None]:
        """Return the steps of :meth:`confirm`."""
        with suppress(Unavailable):  # a broker that is gone holds no leases
            yield from self._lease.confirm()

    def _multicast(self) -> MulticastMapping:
        self._memory()
        if self._lease.multicast is None:
            raise Unsupported(
                f"{self._label} is shared as {self.share}; to broadcast, create it with share={MULTICAST!r}"
            )
        return self._lease.multicast

    def _source(self, source: object, tensor: SharedTensor, held: ExitStack) -> int:
        """Return where this device reads what is to be stored."""
        if isinstance(source, int):
            return source
        if not isinstance(source, SharedTensor):
            tensor.copy_from(source)
            return tensor.pointer
        given, wanted = ((each.dtype, each.shape, each.memory_device) for each in (source, tensor))
        if given != wanted:
            raise Invalid(
                f"tensor {tensor.name!r} of {self._label} takes {tensor.dtype} {tensor.shape} from the memory of device"
                f" {tensor.memory_device.index}, and {source!r} lies in that of device {source.memory_device.index};"
                f" broadcast a tensor that has all three, or the address of raw bytes"
            )
        return held.enter_context(source.hold())

    def _at(self, device: int | str | None) -> DeviceMapping:
        if device is None:
            return self._alone()
        found = devices.find(self._session.driver, device)
        for place in self._places:
            if place.context.device == found:
                return place
        raise Invalid(f"{self._label} is not used on device {device!r} here; see `devices`")

    def _end_events(self, why: str) -> None:
        if self._events:
            self._events.close(Unavailable(f"{self._label} {why} while it waited for an event"))

    def _event_list(self) -> Events:
        with self._closing:
            self._events = self._events or Events(self._session)
            self._lease.switched = self._events.close
        return self._events

    def _release(self) -> None:
        self._drop()

    def _check_moves(self, how: str) -> LeasedMemory:
        """Return the memory, which can leave its addresses; raises ``Unsupported`` or ``Invalid`` if not."""
        if self.share not in BY_DESCRIPTOR:
            raise Unsupported(f"{self._label} is shared as {self.share} and cannot {how}; create it with share={VMM!r}")
        mapped = self._mapped
        if mapped is None or not self._sealed:
            what = "is closed in this process; attach again" if mapped is None else f"cannot {how}; seal it first"
            raise Invalid(f"{self._label} {what}")
        return mapped

    def _fall_asleep(self) -> Future[Reply]:
        mapped = self._check_moves("sleep")
        if in_use := mapped.sleep():
            raise Invalid(f"{self._label} cannot sleep while tensors of it are copied or held: {', '.join(in_use[:8])}")
        return self._lease.sleep()


class Draft(Pool):
    """The tensors of an unpublished version, which may be written: those of its first device, as a mapping.

    Leaving it without :meth:`seal` discards it. Its tensors end with it, sealed or discarded; arrays
    and framework tensors made from them must be dropped before a seal, and delay a discard. A draft that is sealed in
    place goes on as a :class:`Pool` of the published version.

    Attributes:
        replicas: the tensors on each device, in the order in which the devices were given.
    """

    _sealed = False

    def __init__(
        self, lease: LeaseHandle, mapped: LeasedMemory, index: TensorIndex, name: str, *, scratch: bool = False
    ) -> None:
        super().__init__(lease, mapped, index, name)
        self._scratch = scratch
        #: Digests of what it shares with an earlier version, and has not mapped: by device and allocation.
        self.shared_digests: Mapping[Spot, bytes] = {}
        self._lay_out(mapped, index)

    @blocking
    def seal(self, *, layout: Layout | None = None, digest: bool = False, in_place: bool = False) -> Steps[int]:
        """Publish the memory, on all devices, as the pool's current version, whose number is returned.

        It is unmapped first. Sealed ``in_place`` it stays mapped: this object goes on as a pool of the version, and
        arrays and framework tensors made from the draft stay valid, at the same addresses. Nothing may write to them
        any more: the device refuses it, where readers are refused (``protected``), and on a host device a write ends
        the process. Work that was submitted to the devices is waited for.

        Args:
            layout: takes the place of the draft's, and has the same allocations: for tensors whose places were not
                known before, as from :meth:`layout_of`.
            digest: have each device compute a digest of what it holds, padding included, and publish these as well, so
                that :meth:`Pool.check` finds bytes that are changed later. It takes about as long as reading all once.
            in_place: keep the memory mapped and leased; for drafts on one device or with a plan, not for ``multicast``.

        Raises:
            Invalid: arrays or framework tensors of it are in use (``in_place``: are held); the layout is of other
                allocations; or it is published. The draft stays open.
            Unsupported: a digest of what its readers may write; the broker is too old for a digest, another layout or
                a seal in place; the draft is on several devices, or ``multicast``. The draft stays open.
            OverQuota: the layout is longer than this user's quota allows; the draft stays open.
            DeviceFailure, OutOfMemory: a digest could not be computed, or the access not be changed; the draft stays
                open.
            DeviceFailure: the memory could not be unmapped yet; the draft is not published, and discarded when it is.
            Unavailable, TimedOut: the broker is gone or silent; the draft may or may not be published.
        """
        self._owner.check()
        if self._sealed:
            raise Invalid(f"{self._label} is published already; create a new version instead")
        self._memory()
        compute = self._digesting() if digest else None
        if in_place:
            self._check_stays()
        yield from self._set_layout(layout or self.layout)
        if in_place:
            return (yield from self._seal_in_place(compute))
        lease = self._lease
        with self._closing:
            mapped, seal, why = self._memory(), lease.seal, object()
            if compute:
                self._session.check_confirms()
                seal = partial(lease.seal_digested, compute, partial(mapped.take_back, why))
            if in_use := mapped.end(seal, why):
                names = ", ".join(in_use[:8]) + (f" and {len(in_use) - 8} more" if len(in_use) > 8 else "")
                raise Invalid(f"{self._label} is still in use: {names}; drop the arrays made from it, then seal")
        if compute:
            yield from lease.digested()
        self._drop()
        return expect((yield from lease.confirm()), Sealed).version

    def layout_of(self, source: object) -> Layout:
        """Return a layout whose tensors are arrays that lie in this draft's memory already, for :meth:`seal`.

        Names of one array, as those of tied parameters are, become one tensor by several names.

        Args:
            source: a mapping of names to arrays of any library, or an object with ``state_dict()``; as for
                :meth:`Broker.publish`.

        Raises:
            Invalid: an array lies elsewhere, has gaps, or begins at no multiple of 256 bytes, by its name; two of them
                overlap; or as :meth:`Broker.publish`.
        """
        self._owner.check()
        self._memory()
        return named_arrays.layout_in(self, named_arrays.describe(source, self._session.driver), self._label)

    def _lay_out(self, mapped: LeasedMemory, index: TensorIndex) -> None:
        self._index = index
        self.replicas = tuple(Replica(mapped, (place,), index) for place in mapped.places)
        #: What the broker has; None while it is told another.
        self._told: Layout | None = index.layout

    def _set_layout(self, layout: Layout) -> Steps[None]:
        if layout == self._told:
            return
        if self._session.version < IN_PLACE:
            raise Unsupported(f"{self._label}: the broker is too old to take another layout at the seal; upgrade it")
        layout.check()
        if layout.allocations != self.layout.allocations:
            why = difference(Layout((), layout.allocations), Layout((), self.layout.allocations))
            raise Invalid(f"the layout to seal {self._label} with cannot be that of its memory: {why}")
        self._told = None
        yield from self._session.ask(SetLayout(self._lease.number, layout.encode()), Done)
        self._lay_out(self._memory(), TensorIndex(layout))

    def _check_stays(self) -> None:
        if self._session.version < IN_PLACE:
            raise Unsupported(f"{self._label}: the broker is too old to seal it in place; seal without, or upgrade it")
        shards = [number for replica in self.replicas for number in replica.allocations]
        if self.share == MULTICAST or len(set(shards)) < len(shards):
            raise Unsupported(
                f"{self._label} cannot be sealed in place: it is shared as {self.share}, with {len(self.replicas)}"
                f" replicas, of which a pool has one; seal it without, and attach to it"
            )

    def _seal_in_place(self, compute: Callable[[], Digests] | None) -> Steps[int]:
        mapped, lease, asked = self._memory(), self._lease, False
        mapped.begin_publication()
        try:
            if not self._scratch:
                yield from self._session.confirm(lease.protect(readonly=True), f"write access to {self._label}")
            body = SealInPlace(lease.number, compute() if compute else None)
            asked = True
            version = (yield from self._session.ask(body, Sealed)).version
        except BaseException as error:
            refused = isinstance(error, CubrokerError) and not isinstance(error, Unavailable | TimedOut)
            if refused or not asked:  # it is certainly not published
                writable = lease.protect(readonly=False)
                if refused:  # an interrupt does not wait
                    yield from self._session.confirm(writable, f"write access to {self._label}")
                mapped.end_publication(readonly=False)
            raise
        mapped.end_publication(f"pool {self.name!r} version {version}", readonly=not self._scratch)
        self.writable, self.protected, self._sealed = self._scratch, mapped.protected, True
        return version

    def _digesting(self) -> Callable[[], Digests]:
        """Return what computes the digests of the memory, and refers to none of it."""
        if self._scratch:
            raise Unsupported(
                f"{self._label} is writable by its readers, so a digest would not tell what it holds; seal it without"
            )
        if self._session.version < DIGESTS:
            raise Unsupported(f"{self._label}: the broker is too old to keep a digest; seal it without, or upgrade it")
        uuids = [replica.memory_device.uuid for replica in self.replicas]
        pieces = [span for replica in self.replicas for span in digests.spans(replica)]
        return partial(digests.sealing, self._label, uuids, pieces, self.layout, self.shared_digests)

    def _release(self) -> None:
        mapped = self._mapped
        if mapped and not self._sealed:
            mapped.end()
        self._drop()

    def _drop(self) -> None:
        super()._drop()
        for replica in self.replicas:
            replica._drop()
