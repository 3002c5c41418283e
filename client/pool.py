"""A published version, attached to by this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import RLock

from cubroker.client import devices, digests
from cubroker.client.broadcast import Copies, Refused, Unbound, Windows
from cubroker.client.events import Events, SharedEvent
from cubroker.client.futures import Future
from cubroker.client.loans import Loan
from cubroker.client.mapping import Mapped, Place
from cubroker.client.processes import Scoped
from cubroker.client.replica import Index, Replica
from cubroker.client.tensor import SharedTensor
from cubroker.client.waking import Waking
from cubroker.driver import DriverError
from cubroker.protocol.bounds import MAX_WAIT
from cubroker.protocol.errors import Invalid, NotFound, Retired, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import DIGESTS, Attach, DigestList, ListDigests, Reply


class Pool(Replica, Scoped):
    """The tensors of one version on one device, by name, and the lease that keeps them there.

    Closing it makes it useless here at once. The memory stays mapped, and the lease held, until the
    last of its tensors, and of whatever arrays and framework tensors were made from them, is gone.

    Attributes:
        name: the pool's name.
        version: the version, from 1 on.
        share: how its memory is shared.
        writable: whether its tensors may be written here.
        protected: whether the device refuses what is written here by mistake: in ``vmm`` and ``multicast`` pools that
            are not ``writable``. Who writes to an ``ipc`` pool changes what all its readers read.
    """

    _sealed = True

    def __init__(
        self, loan: Loan, mapped: Mapped, index: Index, name: str, version: int, owners: tuple[int, ...] = ()
    ) -> None:
        super().__init__(mapped, mapped.places, index)
        self.name = name
        self.version = version
        self.share = mapped.share
        self.writable = not mapped.readonly
        self.protected = mapped.protected
        self._events = Events(loan.session)
        self._loan = loan
        self._owners = owners
        self._owner = loan.owner
        self._closing = RLock()  # a finalizer or a signal handler may close it in the middle
        self._waking = RLock()
        self._wanted = mapped.places[0].memory.uuid if len(mapped.places) == 1 else None

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ", asleep" if self.asleep else ""
        return f"<{type(self).__name__} {self.name!r} version {self.version}, {len(self)} tensors{state}>"

    @property
    def how(self) -> str:
        """How :meth:`broadcast` gets bytes to all replicas of a multicast pool: ``multicast`` or ``copies``.

        It may be another after a restart of the broker, and is empty while that puts the replicas together again.
        """
        return self._loan.how[0]

    @property
    def why(self) -> str:
        """Why so."""
        return self._loan.how[1]

    @property
    def lost(self) -> str:
        """How the broker lost the memory, empty if it did not: it was killed, and the pool was not durable.

        What is mapped here stays mapped; whether its bytes stay is up to the driver. Close the pool, and attach again.
        """
        return self._loan.session.losses.why(self.name, self.version)

    @property
    def nbytes(self) -> int:
        """Bytes that this pool has mapped, padding included: a whole version's, or those of one shard."""
        return sum(self.layout.allocations[number] for number in self.allocations)

    @property
    def lease(self) -> int:
        """The number of its lease; 0 while it is asleep."""
        return self._loan.lease

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
            outlet, tensor, home = held.enter_context(self._hold(name))
            spec = self._index.tensors[name]
            try:
                address = self._source(source, tensor, home, held)
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
        outlet, spec = self._outlet(), self._index.tensors[name]
        if isinstance(outlet, Copies):
            raise Unsupported(f"{self._label} is written by copies: {self.why}; use broadcast, which does either")
        return outlet.pointer(spec.allocation, spec.offset)

    def check(self) -> None:
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
            pieces = digests.spans(self)
            held.enter_context(self.slabs[0].hold())
            if self._loan.session.version < DIGESTS:
                raise Unsupported(f"{self._label} cannot be checked: the broker is too old to keep digests; upgrade it")
            answer = self._loan.session.ask(ListDigests(self.name, self.version), DigestList)
            wanted = digests.expected(self._label, answer)
            try:
                found = digests.compute(pieces)
            except DriverError as error:
                raise devices.failure(error, f"computing the digest of {self._label}") from error
            digests.compare(self._label, self.layout, found, wanted)

    def event(self, name: str, *, device: int | str | None = None) -> SharedEvent:
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
        self._check_awake()
        return self._events.make(self, self._at(device), name)

    def open_event(self, name: str, *, wait: float = 0.0) -> SharedEvent:
        """Open an event that another process made with its lease on the same version.

        Args:
            name: the event's.
            wait: seconds to wait for somebody to make it.

        Raises:
            NotFound: there is none; or this process does not see its device.
            TimedOut: nobody made it in ``wait`` seconds.
            Invalid: the pool is not writable, a draft, closed or asleep.
            Unavailable: the pool was closed meanwhile.
            DeviceFailure: the driver refused: as it does in the process that made the event, which has it already.
        """
        self._check_awake()
        return self._events.open(self, self._places, name, seconds(wait))

    @property
    def asleep(self) -> bool:
        """Whether :meth:`sleep` unmapped it."""
        mapped = self._mapped
        return mapped is not None and mapped.asleep

    def sleep(self) -> None:
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
            self._loan.confirm(slept)

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
        with self._waking:
            if self.closed:
                raise Invalid(f"{self._label} is closed in this process; attach again")
            if self.asleep:
                self._wake(Attach(self.name, self.version, self._wanted, seconds(wait), owners=self._owners))

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or by the Broker."""
        return self._mapped is None

    def close(self) -> None:
        """Give the memory back: now, or with the last tensor or array of it that still lives.

        Raises:
            DeviceFailure: the memory could not be unmapped yet. The lease stays until it is, which this process tries
                again in the background.
            TimedOut: the memory is unmapped, but the broker has not yet confirmed that the lease is over.
        """
        if self.let_go():
            self.confirm()

    def let_go(self) -> bool:
        """Begin to close the pool, without waiting; returns whether :meth:`confirm` has something to wait for."""
        self._owner.check()
        with self._closing:
            closed = self.closed
            if not closed:
                self._end_events("was closed")
                self._release()
        return not closed and self._loan.ending

    def confirm(self) -> None:
        """Wait for what :meth:`let_go` began; raises as :meth:`close` does."""
        with suppress(Unavailable):  # a broker that is gone holds no leases
            self._loan.confirm()

    @contextmanager
    def _hold(self, name: str) -> Iterator[tuple[Windows | Copies, SharedTensor, int]]:
        """Keep a tensor mapped, and the way to all its replicas, within a ``with`` block."""
        while True:
            outlet, tensor = self._outlet(), self[name]
            mapped = self._memory()
            lent = mapped.lend(name, held=True, storing=True)
            try:
                if mapped.outlet is outlet:  # what it uses stays mapped from now on
                    yield outlet, tensor, tensor.pointer
                    return
            finally:
                del lent, mapped  # a traceback may keep this frame for long

    def _outlet(self) -> Windows | Copies:
        while isinstance(outlet := self._found(), Unbound):
            if self.lost:
                raise Unavailable(f"{self._label} is lost: {self.lost}; close it, and attach to the next version")
            session = self._loan.session
            session.check_may_wait()
            if not outlet.over.wait(session.timeout):
                raise TimedOut(
                    f"the replicas of {self._label} were not bound together again within {session.timeout:g} s of a"
                    f" restart of the broker; try again, or see its log"
                )
            outlet.over.result()
        return outlet

    def _found(self) -> Windows | Copies | Unbound:
        mapped = self._memory()
        if self.share != "multicast":
            raise Unsupported(
                f"{self._label} is shared as {self.share}; to broadcast, create it with share='multicast'"
            )
        if mapped.readonly:
            raise Invalid(f"{self._label} was published; create it with writable=True for its readers to broadcast")
        if mapped.outlet is None:
            raise Invalid(f"{self._label} has no replica on device {self.device.index}; attach on one of its devices")
        if isinstance(mapped.outlet, Refused):
            raise Unsupported(f"this process cannot store to all replicas of {self._label}: {mapped.outlet.why}")
        return mapped.outlet

    def _source(self, source: object, tensor: SharedTensor, home: int, held: ExitStack) -> int:
        """Return where this device reads what is to be stored; ``home`` is the tensor in its own replica."""
        if isinstance(source, int):
            return source
        if not isinstance(source, SharedTensor):
            tensor.copy_from(source)
            return home
        given, wanted = ((each.dtype, each.shape, each.memory_device) for each in (source, tensor))
        if given != wanted:
            raise Invalid(
                f"tensor {tensor.name!r} of {self._label} takes {tensor.dtype} {tensor.shape} from the memory of device"
                f" {tensor.memory_device.index}, and {source!r} lies in that of device {source.memory_device.index};"
                f" broadcast a tensor that has all three, or the address of raw bytes"
            )
        return held.enter_context(source.hold())

    def _check_awake(self) -> None:
        self._owner.check()
        self._memory()

    def _at(self, device: int | str | None) -> Place:
        if device is None:
            return self._alone()
        found = devices.find(self._loan.session.driver, device)
        for place in self._places:
            if place.context.device == found:
                return place
        raise Invalid(f"{self._label} is not used on device {device!r} here; see `devices`")

    def _end_events(self, why: str) -> None:
        self._events.close(Unavailable(f"{self._label} {why} while it waited for an event"))

    def _release(self) -> None:
        self._drop()

    def _fall_asleep(self) -> Future[Reply]:
        if self.share == "ipc":
            raise Unsupported(f"{self._label} is shared as {self.share} and cannot sleep; create it with share='vmm'")
        mapped = self._mapped
        if mapped is None or not self._sealed:
            what = "is closed in this process; attach again" if mapped is None else "cannot sleep; seal it first"
            raise Invalid(f"{self._label} {what}")
        if in_use := mapped.sleep():
            raise Invalid(f"{self._label} cannot sleep while tensors of it are copied or held: {', '.join(in_use[:8])}")
        return self._loan.sleep()

    def _wake(self, body: Attach) -> None:
        try:
            Waking(self._loan).wake(body)
        except (NotFound, Retired) as error:
            raise type(error)(f"{self._label} cannot wake: {error.message}; close it, and attach again") from None


def seconds(wait: float) -> float:
    """Return a wait as requests have it; raises ``Invalid`` if it is none."""
    if not 0 <= wait <= MAX_WAIT:
        raise Invalid(f"a wait of {wait} seconds; it can be 0 to {MAX_WAIT:g}")
    return float(wait)
