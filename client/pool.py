"""The tensors of a version on devices of this process, by name, and the lease that keeps them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from threading import RLock
from typing import TYPE_CHECKING

from cubroker.client import devices
from cubroker.client.devices import DeviceId
from cubroker.client.fork_guard import Closeable, NotPicklable, WeakRefs
from cubroker.client.memory.lease import LeaseHandle, LeaseRequest
from cubroker.client.memory.mapping import AllocationHandle, DeviceMapping, LeasedMemory
from cubroker.client.session import ClientSession
from cubroker.client.tensor import SharedTensor, stored_from
from cubroker.client.transport.requests import Steps, blocking, flag, run, seconds, version_number
from cubroker.driver import Context, Device, DriverError, device_names
from cubroker.protocol import messages
from cubroker.protocol.errors import Invalid, NotFound, Retired, Unavailable, Unsupported
from cubroker.protocol.layout import Layout, TensorIndex, TensorSpec

if TYPE_CHECKING:  # at run time, modules that most readers do not need are imported at their first use
    from cubroker.client.digests import DigestRange
    from cubroker.client.follow import Follow
    from cubroker.client.memory.multicast import MulticastMapping
    from cubroker.client.synchronization import Events, SharedEvent


class UnknownTensor(KeyError):
    """A name that no tensor here has. The text adds a hint, which is searched for only when it is shown."""

    def __init__(self, name: str, index: TensorIndex | None = None, label: str = "") -> None:
        super().__init__(name)
        self._index = index
        self._label = label

    def __str__(self) -> str:
        from difflib import get_close_matches

        name, index = self.args[0], self._index
        hint = "iterate over the pool for their names"
        if index and any(tensor.name == name for tensor in index.layout.tensors):
            hint = "it is in the shard of another device; a pool that is attached without `device` has all shards"
        elif index and isinstance(name, str) and (near := get_close_matches(name, index.tensors)):
            hint = f"did you mean {' or '.join(map(repr, near))}?"
        return f"{self._label} has no tensor {name!r}; {hint}"


class Replica(NotPicklable, Mapping[str, SharedTensor]):
    """The tensors of one version on one device; of a sharded version, those on all of its devices.

    Tensors are made on access; indexing is cheap and gives a new object every time.

    Attributes:
        allocations: the indexes of those allocations of the layout that are mapped here.
    """

    __eq__ = object.__eq__  # each belongs to one lease, even if two have the same tensors
    __hash__ = object.__hash__

    def __init__(self, mapped: LeasedMemory, places: Sequence[DeviceMapping], index: TensorIndex) -> None:
        self._mapped: LeasedMemory | None = mapped
        self._last_label = mapped.label
        # The first place that has an allocation is used: in a draft of a replicated version all places have it.
        self._place = {
            number: place
            for place in reversed(places)
            for number, pointer in enumerate(place.pointers)
            if pointer is not None
        }
        self._places = tuple(place for place in places if place in self._place.values()) or tuple(places[:1])
        self.allocations = tuple(sorted(self._place))
        whole = len(self.allocations) == len(index.layout.allocations)
        self._index = index if whole else TensorIndex(index.layout, self._place)

    def __repr__(self) -> str:
        devices = " and ".join(str(device.index) for device in self.devices)
        return f"<Replica of {self._label} on device {devices}, {len(self)} tensors>"

    @property
    def layout(self) -> Layout:
        """The layout of the whole version, on this and other devices; can be passed to ``Broker.create``."""
        return self._index.layout

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that use these tensors: several for a sharded version."""
        return tuple(place.context.device for place in self._places)

    @property
    def device(self) -> Device:
        """The device that uses these tensors.

        Raises:
            Invalid: there are several; each tensor has its own.
        """
        return self.context.device

    @property
    def memory_device(self) -> Device:
        """The device in whose memory these tensors are: not ``device`` if that reaches them over peer access.

        Raises:
            Invalid: there are several; each tensor has its own.
        """
        return self._alone().memory

    @property
    def upstream(self) -> tuple[int, ...] | None:
        """Where ``device`` reads the allocations of a draft's replica before this one; None if it cannot."""
        return self._alone().upstream

    @property
    def context(self) -> Context:
        """This process's context on ``device``; raises ``Invalid`` as ``device`` does."""
        return self._alone().context

    @property
    def allocation_views(self) -> tuple[SharedTensor, ...]:
        """Each of ``allocations`` as one flat tensor of bytes (U8), in that order.

        Raises:
            Invalid: the memory was given back.
        """
        return tuple(
            self._tensor(f"allocation {number}", "U8", (self.layout.allocations[number],), number, 0)
            for number in self.allocations
        )

    def digest_ranges(self) -> list[DigestRange]:
        """Return the range of each of ``allocations`` for its digest; the ranges do not keep the memory mapped.

        Raises:
            Invalid: the memory was given back.
        """
        from cubroker.client.digests import DigestRange

        views = zip(self.allocations, self.allocation_views, strict=True)
        return [
            DigestRange((view.memory_device.uuid, number), view.context, view.memory_device, view.pointer, view.nbytes)
            for number, view in views
        ]

    def handles(self) -> tuple[AllocationHandle, ...]:
        """Return what opens each of :attr:`allocations` in another process of this host, in that order.

        Handles are for code that opens CUDA IPC handles itself, such as an inference server or a transfer library; a
        process that can use cubroker attaches instead. The opened memory is valid while this pool's lease is held, and
        is writable, as all ``ipc`` memory is. The broker does not know which processes have opened it: have it closed
        there before the lease ends or the version is retired. After the memory is freed, CUDA leaves undefined what the
        handle maps.

        Raises:
            Invalid: the memory was given back, or is asleep.
        """
        share = self._memory().share
        return tuple(
            AllocationHandle(
                number,
                share,
                self._place[number].memory,
                self.layout.allocations[number],
                self._place[number].handles[number],
            )
            for number in self.allocations
        )

    slabs = allocation_views  # the older name

    def __getitem__(self, name: str) -> SharedTensor:
        spec = self._spec(name)
        return self._tensor(name, spec.dtype, spec.shape, spec.allocation, spec.offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.tensors)

    def __len__(self) -> int:
        return len(self._index.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._index.tensors

    def _spec(self, name: str) -> TensorSpec:
        try:
            return self._index.tensors[name]
        except (KeyError, TypeError):  # the latter of a name that cannot be hashed
            raise UnknownTensor(name, self._index, self._label) from None

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...], allocation: int, offset: int) -> SharedTensor:
        place = self._place[allocation]
        pointer = place.pointers[allocation]
        assert pointer is not None
        return SharedTensor(self._memory(), place, name, dtype, shape, pointer + offset)

    @property
    def _label(self) -> str:
        """A name for messages, also once the memory was given back."""
        mapped = self._mapped
        return mapped.label if mapped else self._last_label

    def _alone(self) -> DeviceMapping:
        place, *others = self._places
        if others:
            devices = ", ".join(str(device.index) for device in self.devices)
            raise Invalid(f"{self._label} is spread over devices {devices}; ask each of its tensors, or see `devices`")
        return place

    def _drop(self) -> None:
        self._last_label = self._label
        self._mapped = None

    def _held(self) -> LeasedMemory:
        """Return the memory, which may be asleep; raises ``Invalid`` once this object is closed."""
        if (mapped := self._mapped) is None:
            raise Invalid(f"{self._label} is closed in this process; get another from a Broker")
        return mapped

    def _memory(self) -> LeasedMemory:
        mapped = self._held()
        mapped.check()
        return mapped


class Pool(Replica, Closeable):
    """The tensors of one version on one device, by name, and the lease that keeps them there.

    Not to be confused with :class:`cubroker.server.ledger.records.Pool`.

    Once closed, the object cannot be used any more. The memory stays mapped, and the lease held, until the
    last of its tensors, and of all arrays and framework tensors made from them, is gone.

    Attributes:
        name: the pool's name.
        share: how its memory is shared.
        sealed: False for a :class:`Draft` until its seal, else True, also for a pool that was attached to ``unsealed``.
        writable: whether its tensors may be written here.
        protected: whether the device refuses accidental writes by this process: so for ``vmm`` and ``multicast`` pools
            that are not ``writable``. A write to an ``ipc`` pool changes the bytes that all its readers see.
    """

    sealed = True

    def __init__(
        self,
        lease: LeaseHandle,
        mapped: LeasedMemory,
        index: TensorIndex,
        name: str,
        owners: tuple[int, ...] = (),
        *,
        unsealed: bool = False,
    ) -> None:
        super().__init__(mapped, mapped.places, index)
        self.name = name
        self.share = mapped.share
        self.writable = not mapped.readonly
        self.protected = mapped.protected
        #: The Broker, kept alive: its session ends with it, and this pool could then neither switch nor wake.
        self.opener: object = None
        self._lease = lease
        self._session = lease.session
        self._events: Events | None = None
        self._owners = owners
        self._unsealed = unsealed
        self._owner = lease.session.owner
        self._follows: WeakRefs[Follow] = WeakRefs()
        self._closing = RLock()  # a finalizer or a signal handler may close it in the middle
        self._waking = RLock()
        self._wanted = mapped.places[0].memory.uuid if len(mapped.places) == 1 else None

    def __repr__(self) -> str:
        kind = "Pool" if self.sealed else "Draft"
        state = ", closed" if self.closed else ", lost" if self.lost else ", asleep" if self.asleep else ""
        return f"<{kind} {self.name!r} version {self.version}, {len(self)} tensors{state}>"

    @property
    def version(self) -> int:
        """The version, from 1 on; :meth:`switch` changes it."""
        return self._lease.version

    @property
    def how(self) -> str:
        """How :meth:`broadcast` gets bytes to all replicas of a multicast pool: ``multicast`` or ``copies``.

        It may change with a restart of the broker, and is empty while the broker binds the replicas together again.
        """
        return self._lease.multicast.team.how if self._lease.multicast else ""

    @property
    def why(self) -> str:
        """Why the broker has chosen :attr:`how`."""
        return self._lease.multicast.team.why if self._lease.multicast else ""

    @property
    def lost(self) -> str:
        """How the broker lost the memory, or this process its session; empty if neither happened.

        A broker that is killed loses versions that are not durable, and without a store all versions. Memory that is
        mapped here stays mapped; whether its bytes stay depends on the driver. Close the pool, and attach again, which
        opens another session if this one is over (:meth:`Broker.reconnect`).
        """
        return self._session.losses.get((self.name, self.version), "") or self._session.lost

    @property
    def nbytes(self) -> int:
        """Bytes that this pool has mapped, padding included: of a whole version, or of one shard."""
        return sum(self.layout.allocations[number] for number in self.allocations)

    @property
    def lease(self) -> int:
        """The number of its lease; 0 while it is asleep."""
        return self._lease.number

    def broadcast(self, source: object, name: str) -> None:
        """Store to a tensor in all replicas; done on every device when it returns.

        Nothing keeps holders from storing to the same tensor at the same time, or from reading it during the store.
        After a restart of the broker, this waits until the replicas are bound together again.

        Args:
            source: of the tensor's dtype and shape: an array in host memory, of the kinds that
                :meth:`SharedTensor.copy_from` takes, or a :class:`SharedTensor` in the memory of this pool's device; or
                the address of as many raw bytes in such memory. This waits for work of this process that fills the
                source.
            name: the tensor's name. To store raw bytes of the host, fill this pool's own tensor with
                :meth:`SharedTensor.copy_from_bytes`, and pass that tensor as the source.

        Raises:
            Unsupported: the pool is not shared as ``multicast``; or this process cannot reach all replicas.
            Invalid: the pool is published and not writable; its memory is on another device than the one that uses it
                here; the source does not fit; or the pool is closed.
            DeviceFailure: the driver refused; some replicas may have the bytes.
            KeyError: the pool has no such tensor.
            TimedOut, Unavailable: the replicas were not bound together again; nothing was stored.
        """
        self._owner.check()
        with ExitStack() as held:
            outlet = held.enter_context(self._multicast().hold(self._memory, name))
            tensor, spec = self[name], self._index.tensors[name]
            try:
                address = stored_from(source, tensor, held)
                outlet.store(address, spec.allocation, spec.offset, tensor.nbytes)
            except DriverError as error:
                raise devices.failure(error, f"storing {name!r} of {self._label} to all replicas") from error

    def multicast_pointer(self, name: str) -> int:
        """Return the address through which kernels of this pool's device store to a tensor in all replicas.

        The address is for ``multimem`` instructions and copies from device memory, must never be read, and stays the
        same while the pool sleeps and wakes. After a restart of the broker, the memory that is mapped there is
        replaced, between submitted work and later work, but not while a tensor of this pool is held
        (:meth:`SharedTensor.hold`).

        Raises:
            Unsupported: the pool is not shared as ``multicast``, or is written by copies, or this process cannot use
                multicast.
            Invalid, KeyError, TimedOut, Unavailable: as :meth:`broadcast`.
        """
        self._owner.check()
        multicast, spec = self._multicast(), self._spec(name)
        return multicast.pointer(self._memory, spec.allocation, spec.offset)

    @blocking
    def check(self) -> Steps[None]:
        """Have the devices compare all bytes that this pool has mapped with the digests that they were sealed with.

        That finds later changes: by a process with a descriptor or handle of its own, or by faulty memory. It does not
        find the writes of a process that knows the digest and preserves it (:data:`cubroker.driver.kernels.ALGORITHM`).

        Raises:
            Corrupted: they differ; the text says on which device, in which allocation, and which tensors lie there.
            Unsupported: the version was sealed without a digest, or the broker is too old to keep one.
            Invalid: the pool is a draft, closed or asleep.
            NotFound, Retired, Denied: this user may not read the version any more, or it is gone.
            DeviceFailure: the driver refused.
        """
        self._owner.check()
        with ExitStack() as held:
            if not self.sealed:
                raise Invalid(f"{self._label} was not published, so there is no digest to compare with; seal it first")
            pieces = self.digest_ranges()
            held.enter_context(self.allocation_views[0].hold())
            self._session.require(messages.DIGESTS, f"a check of {self._label}", "keep digests")
            answer = yield from self._session.ask(messages.ListDigests(self.name, self.version), messages.DigestList)
            from cubroker.client import digests

            digests.check(self._label, self.layout, pieces, answer)

    @blocking
    def event(self, name: str, *, device: DeviceId | None = None) -> Steps[SharedEvent]:
        """Make an event, with which this process tells others that it has written what they wait to read.

        The event ends with this pool's lease: when the pool is closed or falls asleep, or this process ends.

        Args:
            name: the name by which others open it, unique among the events of the version.
            device: the device whose work it will mark, if several devices use the pool here.

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
            name: the event's name.
            wait: seconds to wait for another process to make it.

        Raises:
            NotFound: there is no such event; or this process does not see its device.
            TimedOut: no process made it within ``wait`` seconds.
            Invalid: the pool is not writable, a draft, closed or asleep.
            Unavailable: the pool was closed during the wait.
            DeviceFailure: the driver refused, as it does in the process that made the event, which has it already.
        """
        self._owner.check()
        self._memory()
        return (yield from self._event_list().open(self, self._places, name, seconds(wait)))

    def follow(self, *, switch: bool = False, timeout: float | None = None) -> Follow:
        """Return an iterator, also an asynchronous one, over the versions that are newer than this pool's.

        That is the current version, if it is newer, and every later one. The iteration ends when the pool is closed.

        Args:
            switch: whether the pool is switched to each version (:meth:`switch`) before the version is returned. The
                iteration switches when it is asked for the next version, so that no other work uses the tensors at that
                time. If a switch fails, the iteration raises the error; the next step tries again. In an event loop a
                thread switches. A pool that is asleep wakes.
            timeout: seconds to wait for a version, each time, before ``TimedOut`` is raised; by default without limit.

        Raises:
            Invalid: the pool is closed, or a draft is to be switched.
            Unsupported: the pool is shared as ``ipc`` and cannot be switched.
            Unavailable: this process is short of threads or memory. The iteration raises it when the pool's session is
                over, since versions of the next broker are no newer versions of this pool (:attr:`lost`).
        """
        from cubroker.client.follow import Follow

        self._owner.check()
        session = self._session

        def live(_: object) -> ClientSession:
            if session.lost:
                raise Unavailable(f"{self._label} is lost: {session.lost}; close it, and attach again")
            return session

        if switch := flag(switch, "switch"):
            self._check_moves("be switched")
        first = self.version
        newer = (lambda version: version > first) if switch else (lambda version: version > self.version)
        follow = Follow(self.name, live, self._owners, timeout, newer, self.switch if switch else None)
        self._follows.add(follow)
        if self.closed:
            follow.close()
            self._held()
        return follow

    @property
    def asleep(self) -> bool:
        """Whether :meth:`sleep` unmapped it."""
        mapped = self._mapped
        return mapped is not None and mapped.asleep

    @blocking
    def sleep(self) -> Steps[None]:
        """Unmap the memory and give the lease back, but keep the addresses for :meth:`wake`; not for ``ipc`` pools.

        A ``multicast`` pool keeps the addresses of its tensors and of :meth:`multicast_pointer`.
        This waits for work that was submitted to the devices. Arrays, framework tensors and captured CUDA graphs
        that use the addresses may stay, and must not be used during the sleep: on a host device that ends the process.
        Nothing keeps the version alive: once it is retired or superseded, it can be gone. A pool that sleeps may sleep
        again, and be closed. Its events here are closed.

        Raises:
            Unsupported: the pool is shared as ``ipc``.
            Invalid: the pool is closed or a draft, or tensors are being copied or are held; it stays awake.
            DeviceFailure: not all of the memory could be unmapped; the lease stays.
            TimedOut: the memory is unmapped, but the broker has not yet confirmed that the lease is over.
        """
        self._owner.check()
        with self._closing:
            mapped = self._check_moves("sleep")
            if held := mapped.sleep():
                raise Invalid(f"{self._label} cannot sleep while tensors of it are copied or held: {held}")
            slept = self._lease.sleep()
            self._end_events("fell asleep")
        with suppress(Unavailable):  # a broker that is gone holds no leases
            yield from self._lease.confirm(slept)

    def wake(self, wait: float = 0.0) -> None:
        """Lease the same version again and map it where it was; a pool that is awake stays so.

        Args:
            wait: seconds that the broker may let the request wait.

        Raises:
            Retired, NotFound: the version does not exist any more. As with every failure, the pool stays asleep.
            Unavailable: the replicas of a ``multicast`` pool are not stored to in the same way any more.
            Invalid: the pool is closed.
            CubrokerError: as :meth:`Broker.attach`.
        """
        self._owner.check()
        with self._waking:  # one thread sends the request for all
            run(self.waking(wait))

    def waking(self, wait: float) -> Steps[None]:
        """Do as :meth:`wake`, but let two callers request a lease each; the later one is given back immediately."""
        self._owner.check()
        body = self._attach(self.version, wait)
        if not self._held().asleep:
            return
        try:
            yield from LeaseRequest(self._lease).ask(body)
        except (NotFound, Retired) as error:
            hint = "switch() the pool to another version, or close it and attach again"
            raise type(error)(f"{self._label} cannot wake: {error.message}; {hint}") from None

    def switch(self, version: int | None = None, wait: float = 0.0) -> int:
        """Map another version of the pool at the same addresses, in place of this one; returns the version's number.

        Arrays, framework tensors, captured CUDA graphs and other tensors of the pool stay valid, and show the bytes of
        the other version from then on. Either the whole version is mapped, on all devices, or the version before stays
        mapped as it was, also if the caller is interrupted. This waits for work that was submitted to the devices; no
        other work may use the tensors until it returns. Then the lease on the version before is given back; for a
        moment the pool has both leases. Events of the version before are closed here. A pool that is asleep wakes on
        the other version.

        Args:
            version: the version's number; by default the current version. If the pool is awake and on it, this does
                nothing.
            wait: seconds to wait for its publication.

        Raises:
            Unsupported: the version has another layout, share kind or device; or just one of the two versions is
                ``writable``; or the pool is shared as ``ipc``, or is ``multicast`` and this process may broadcast.
            Invalid: the pool is closed or a draft, or tensors are being copied or are held.
            NotFound, Retired, Denied, OverQuota, TimedOut: as :meth:`Broker.attach`.
            OutOfMemory, DeviceFailure: the driver refused. If it also refuses to map the version before again, the
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
        return LeaseRequest(self._lease, self.layout)

    def switching(self, request: LeaseRequest, version: int | None, wait: float) -> Steps[int]:
        """Do as :meth:`switch`; if this raises or is abandoned, the caller has to settle the request."""
        self._owner.check()
        body = self._attach(version_number(version), wait)
        self._check_moves("be switched")
        if body.version == self.version and not self.asleep:
            return self.version
        reply, _ = yield from request.ask(body)
        return reply.version

    def _attach(self, version: int, wait: float) -> messages.Attach:
        """Return the request for a lease on a version (0: the current one), in place of this one."""
        unsealed = self._unsealed and version == self.version
        return messages.Attach(self.name, version, self._wanted, seconds(wait), owners=self._owners, unsealed=unsealed)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or by the Broker."""
        return self._mapped is None

    @blocking
    def close(self) -> Steps[None]:
        """Give the memory back: now, or with the last tensor or array of it that still lives.

        Raises:
            DeviceFailure: the memory could not be unmapped yet. This process tries again in the background, and keeps
                the lease until it succeeds.
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

    def confirming(self) -> Steps[None]:
        """Wait for what :meth:`let_go` began; raises as :meth:`close` does."""
        with suppress(Unavailable):  # a broker that is gone holds no leases
            yield from self._lease.confirm()

    confirm = blocking(confirming)

    def _multicast(self) -> MulticastMapping:
        self._memory()
        if self._lease.multicast is None:
            raise Unsupported(
                f"{self._label} is shared as {self.share}; to broadcast, create it with share={messages.MULTICAST!r}"
            )
        return self._lease.multicast

    def _at(self, device: DeviceId | None) -> DeviceMapping:
        if device is None:
            return self._alone()
        found = devices.find(self._session.driver, device)
        for place in self._places:
            if place.context.device == found:
                return place
        raise Invalid(f"{self._label} is not used on {device_names.label(found)} here; see `devices`")

    def _end_events(self, why: str) -> None:
        if self._events:
            self._events.close(Unavailable(f"{self._label} {why} while it waited for an event"))

    def _event_list(self) -> Events:
        from cubroker.client.synchronization import Events

        with self._closing:
            self._events = self._events or Events(self._session)
            self._lease.switched = self._events.close
        return self._events

    def _release(self) -> None:
        self._drop()

    def _drop(self) -> None:
        super()._drop()
        self.opener = None

    def _check_moves(self, how: str) -> LeasedMemory:
        """Return the memory; raises ``Unsupported`` or ``Invalid`` if its addresses cannot be unmapped and mapped."""
        if self.share not in messages.BY_DESCRIPTOR:
            raise Unsupported(
                f"{self._label} is shared as {self.share} and cannot {how}; create it with share={messages.VMM!r}"
            )
        mapped = self._held()
        if not self.sealed:
            raise Invalid(f"{self._label} cannot {how}; seal it first")
        return mapped
