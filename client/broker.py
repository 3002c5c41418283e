"""The public entry point: one connection to a broker, which attaches to pools and creates them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

from cubroker.client import devices as local
from cubroker.client.devices import DeviceId, Placed, Plan, place
from cubroker.client.fork_guard import WeakRefs
from cubroker.client.memory.lease import acquire
from cubroker.client.notices import Watch
from cubroker.client.pool import Pool
from cubroker.client.session import Reconnecting
from cubroker.client.transport.requests import (
    Owners,
    Steps,
    beside,
    blocking,
    expect,
    file_mode,
    flag,
    seconds,
    session_number,
    share_kind,
    time_limit,
    uids,
    version_number,
)
from cubroker.protocol import fields, messages
from cubroker.protocol.errors import Invalid, Retired
from cubroker.protocol.layout import Layout, TensorIndex, Tensors
from cubroker.protocol.status import ClientInfo, DeviceInfo, Line, PoolInfo

if TYPE_CHECKING:  # at run time, modules that most readers do not need are imported at their first use
    from cubroker.client.draft import Draft
    from cubroker.client.follow import Follow
    from cubroker.client.publish import Publication, Sources
    from cubroker.client.synchronization import NameLock

H = TypeVar("H", bound="Pool | NameLock")


class Broker(Reconnecting):
    """A session with the broker that serves ``directory``. Every method may be called from any thread.

    Not to be confused with :class:`cubroker.server.broker.Broker`.

    In addition to what each method names, all may raise ``Unavailable`` (the broker is gone, or this object is closed),
    ``TimedOut`` (the broker did not answer) and ``Invalid`` (an argument is out of range, or this is a forked child).

    Args:
        directory: where the broker listens; by default ``$CUBROKER_DIR``, else this user's own directory if a socket is
            there, whether or not its broker serves, else the host's, ``/run/cubroker``, if a socket is there. The log
            (INFO) says which one was found.
        timeout: seconds that the broker may take to answer, beyond what a request itself may wait.
        connect_timeout: seconds that the broker may take to open the session; by default ``timeout``. A broker that is
            starting, or is being started again, answers when it serves.
        wait: seconds to wait for a broker, if none serves yet.

    Raises:
        Invalid: the directory is empty, or a timeout is 0 or too long.
        Unavailable: no broker serves there or answers in time, or this process is short of descriptors, threads or
            memory.
        TimedOut: no broker served within ``wait`` seconds.
        Denied: this user may not connect.
        OverQuota: this user has as many sessions as it may have.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 30.0,
        connect_timeout: float | None = None,
        wait: float = 0.0,
    ) -> None:
        self._held: WeakRefs[Pool | NameLock] = WeakRefs()
        self._follows: WeakRefs[Follow] = WeakRefs()
        super().__init__(directory, timeout, connect_timeout, wait)

    def __repr__(self) -> str:
        state = ", closed" if self._closed.done() else ", lost" if self.lost else ""
        return f"<Broker on {self.directory}, session {self.session}{state}>"

    # -- pools -------------------------------------------------------------------------------------

    @blocking
    def attach(
        self,
        name: str,
        *,
        version: int | None = None,
        device: DeviceId | None = None,
        wait: float = 0.0,
        peer: bool = False,
        owner: Owners = None,
        unsealed: bool = False,
    ) -> Steps[Pool]:
        """Lease a published version and map its memory: one round trip, one driver call per allocation.

        If the session is :attr:`lost`, this opens another first, as :meth:`reconnect` without a wait does; but not if a
        ``version`` is named, since the next broker may have given its number to other tensors.

        Args:
            name: the pool.
            version: the version's number; by default the current version.
            device: the device to attach on; by default the only device of a replicated pool. Of a sharded pool, this
                maps the tensors on that device, and by default every tensor, each on its own device.
            wait: seconds to wait for its publication.
            peer: whether ``device``, if it has nothing of the pool, may use the memory of another device that it
                reaches directly; the one with the fastest link is chosen. The tensors then belong to ``device``, and
                ``pool.memory_device`` is the device that has the memory.
            owner: the users one of whom has to own the pool, unless this user does: a name or a number, or several; by
                default those of ``$CUBROKER_OWNER``, separated by commas, else any user. Names are looked up here;
                numbers are those of the broker's user namespace.
            unsealed: whether ``version``, which has to be named, may be a draft that its writer has not sealed yet, or
                that is still being allocated (``wait``). It is read-only here, holds what the writer has written so
                far, and has its present layout. When the draft is sealed, the lease becomes one on the version. If it
                never is, the lease keeps the memory as one on a retired version does, and the number is not used again.

        Raises:
            NotFound: no such pool, version or device.
            Retired: the version was retired, its writer gave it up, or it was superseded and has ended.
            Denied: the pool's mode keeps this user from reading it, or will after the seal; or it is not ``owner``'s.
            Unsupported: an owner or a draft is requested, and the broker is too old for that; or the draft will be
                writable by its readers; or it is another user's ``ipc`` draft, which readers could write.
            OverQuota: this session, or this user, holds as many leases as it may.
            TimedOut: the version was not published within ``wait`` seconds.
            Invalid: the pool is on several devices and ``device`` does not say which; or ``peer`` without ``device``,
                or ``unsealed`` without ``version``.
            OutOfMemory, DeviceFailure: the memory could not be mapped.
        """
        if version is None and self.lost:
            self.reconnect()
        return self.attaching(
            name, version=version, device=device, wait=wait, peer=peer, owner=owner, unsealed=unsealed
        )

    def attaching(
        self,
        name: str,
        *,
        version: int | None = None,
        device: DeviceId | None = None,
        wait: float = 0.0,
        peer: bool = False,
        owner: Owners = None,
        unsealed: bool = False,
    ) -> Steps[Pool]:
        """Do as :meth:`attach`, but open no session: raise ``Unavailable`` if this one is lost."""
        name = fields.check_pool_name(name)
        if unsealed := flag(unsealed, "unsealed"):
            if version is None:
                raise Invalid(f"attach to {name!r} with unsealed=True: name the draft by its number with `version`")
            self._session.require(messages.UNSEALED, f"attach to a draft of {name!r}", "lend it", "wait for its seal")
        where = self._where(name, device, owner, peer=peer)
        body = messages.Attach(
            name, version_number(version), where.device, seconds(wait), where.peers, where.owners, unsealed
        )
        lease, reply, mapped = yield from acquire(self._session, body)
        reply = expect(reply, messages.Attached)
        index = TensorIndex.decode(reply.layout)
        pool = Pool(lease, mapped, index, reply.name, where.owners, unsealed=unsealed)
        return (yield from self._keep(pool))

    @blocking
    def create(
        self,
        name: str,
        layout: Layout | Tensors,
        *,
        devices: Sequence[DeviceId] | None = None,
        share: str = messages.AUTO,
        wait: float = 0.0,
        mode: int | None = None,
        plan: Plan | None = None,
        writable: bool = False,
        durable: bool | None = None,
    ) -> Steps[Draft]:
        """Open a draft of the pool's next version and map its memory.

        Args:
            name: the pool, new or not.
            layout: its tensors, from :meth:`Layout.pack` or another pool; or what :meth:`Layout.pack` takes.
            devices: the devices, each of which gets a copy of every allocation, unless there is a ``plan``; by default
                those of the plan, or the first one.
            share: how the memory is shared: ``vmm``, which readers cannot write, ``ipc``, which they can,
                ``multicast``, for :meth:`Pool.broadcast`, or ``auto``: as the broker's setting ``share`` says, by
                default ``vmm`` if all ``devices`` support it, else ``ipc``. The draft's ``share`` is the kind in use.
            wait: seconds to wait for other writers of the pool, and for room.
            mode: who may attach (read), and who may publish and retire (write), like a file's: ``0o640``. By default a
                pool keeps its mode, and a new one gets the broker's default. A process that may attach to ``ipc``
                memory, or to that of a GPU, can write it if it means to.
            plan: as for :meth:`publish`, on ``devices``. A :class:`Layout` must have tensors of different devices in
                different allocations, as ``Layout.pack(..., groups=...)`` makes them.
            writable: whether those who attach to the version may write it, and make events on it
                (:meth:`Pool.event`): scratch memory that processes hand over to each other.
            durable: whether the version outlives a broker that is killed or started again. That needs ``vmm`` or
                ``multicast``, and a broker with a store. By default it does if that is so and the store has room.

        Raises:
            Invalid: the plan does not fit the layout or the devices.
            NotFound: no such device.
            Exists: a version of the pool is being written.
            Denied: the pool is another user's, whose mode keeps this one from writing.
            OverBudget: there is no room on a device.
            OverQuota: this user has used up its quota.
            TimedOut: other writers, or the lack of room, still stood in the way after ``wait`` seconds.
            Unsupported: a device does not support the share kind, or that cannot be durable.
            OutOfMemory, DeviceFailure: the memory could not be allocated or mapped.
        """
        layout, placed = local.lay_out(self.driver, layout, devices, plan)
        body = self._creation(name, layout, placed, share, wait, mode, durable, writable=writable)
        return self._drafted(body, layout)

    @blocking
    def attach_or_create(
        self,
        name: str,
        layout: Layout | Tensors,
        *,
        device: DeviceId | None = None,
        devices: Sequence[DeviceId] | None = None,
        share: str = messages.AUTO,
        wait: float = 600.0,
        mode: int | None = None,
        plan: Plan | None = None,
        writable: bool = False,
        durable: bool | None = None,
        peer: bool = False,
        owner: Owners = None,
    ) -> Steps[Pool | Draft]:
        """Attach to the current version, or become its writer: the first of many gets the draft, the rest wait for it.

        If that writer fails, the next in line gets a draft.

        Args:
            name: the pool.
            layout: its tensors, if it has to be created.
            device: where to attach; by default the first of ``devices``, or with a ``plan`` each tensor's own device.
            devices: where to create; by default the devices of the ``plan``, or ``device``, or the first one.
            wait: seconds to wait for the publication, or for the turn and room to create.
            share: as for :meth:`create`, if it has to be created.
            mode: as for :meth:`create`, if it has to be created.
            plan: as for :meth:`create`, if it has to be created.
            writable: as for :meth:`create`, if it has to be created.
            durable: as for :meth:`create`, if it has to be created.
            peer: as for :meth:`attach`, if the pool has a current version.
            owner: as for :meth:`attach`, if the pool has a current version.

        Raises:
            CubrokerError: as :meth:`attach` and :meth:`create`.
        """
        if devices is None and plan is None and device is not None:
            devices = (device,)
        layout, placed = local.lay_out(self.driver, layout, devices, plan)
        if device is None and plan is None:
            device = placed.devices[0]
        where = self._where(name, device, owner, peer=peer)
        body = self._creation(name, layout, placed, share, wait, mode, durable, writable=writable, attach=where)
        return self._create(body, layout)

    def publish(
        self,
        name: str,
        source: object,
        *,
        devices: Sequence[DeviceId] | None = None,
        share: str = messages.AUTO,
        mode: int | None = None,
        durable: bool | None = None,
        plan: Plan | None = None,
        wait: float = 0.0,
        digest: bool = False,
        base: Pool | int | str | None = None,
    ) -> int:
        """Copy arrays into a new version of a pool and publish it; returns the version.

        Arrays on a GPU are copied from device to device, after all work that was submitted to that GPU before, in any
        stream. Arrays with gaps or other strides are first made contiguous by their own library, on their own device.
        Arrays of the same memory, type, shape and strides, such as tied parameters, are stored once under all names;
        with a broker of an older release, once for each name. If this raises, nothing is left of the version, unless
        its seal had begun: then it may be published.

        Args:
            name: the pool, new or not.
            source: a mapping of names to arrays, or an object with ``state_dict()``, such as a ``torch.nn.Module``.
                Arrays are torch's, numpy's, a :class:`Pool`'s, or of any library with ``__dlpack__`` or ``__array__``.
            devices: each gets a copy; by default the arrays stay on their devices: on one, or as a sharded pool on
                several. Arrays in host memory go to the first of these.
            share: as for :meth:`create`.
            mode: as for :meth:`create`.
            durable: as for :meth:`create`.
            plan: the device of each tensor, by names or shell patterns of names (``layers.1.*``): the pool is sharded.
                Every tensor needs an entry. Names precede patterns, and of several patterns the first one counts.
            wait: as for :meth:`create`.
            digest: as for :meth:`Draft.seal`.
            base: an earlier version of the same pool, whose memory the new version shares as far as it has not changed:
                a pool that is attached to that version, the version's number, or the pool's name for the current
                version. Tensors that ``source`` lacks stay as in the base, as do devices, plan, share and durability.

        Raises:
            Unsupported: the base is ``multicast`` or writable by its readers, or has another share kind or durability
                than ``share`` and ``durable`` say; or the broker is too old to share memory.
            Invalid: there are no tensors; an array, which the text names, cannot be read here (sparse, quantized, on
                the meta device, of a type that pools lack); the pool that is the base falls asleep or is switched
                during the call; or as :meth:`create`.
            CubrokerError: as :meth:`create` and :meth:`Draft.seal`.
        """
        terms = {"share": share, "wait": wait, "mode": mode, "durable": durable}
        return self._publication(name, source, devices=devices, plan=plan, digest=digest, base=base, **terms).complete()

    def _publication(
        self,
        name: str,
        source: object,
        *,
        devices: Sequence[DeviceId] | None,
        plan: Plan | None,
        digest: bool,
        base: Pool | int | str | None,
        **terms: Any,
    ) -> Publication:
        """Do what :meth:`publish` does before there is a draft; the caller makes the rest of it, and closes it.

        ``terms``: those of :meth:`_creation` that the caller of :meth:`publish` chooses.
        """
        name = fields.check_pool_name(name)
        from cubroker.client import digests, publish  # which import modules that readers do not need

        if digest := flag(digest, "digest"):
            digests.need(self._session, name)
        sources = publish.Sources.of(source, self.driver)
        ask: Callable[..., messages.Create] = partial(self._creation, name, **terms)
        if base is not None:
            if devices is not None or plan is not None:
                raise Invalid(f"an update of {name!r} is on the devices of its base; leave devices and plan out")
            return self._update(name, sources, base, ask, digest=digest)
        devices, places = sources.placed(devices, plan)
        layout = sources.layout(places, tie=self._session.version >= messages.TIES)
        body = ask(layout, place(self.driver, layout, devices, places))
        return publish.Publication(self._session, self._drafted, body, layout, sources, digest)

    @blocking
    def retire(self, name: str, version: int | None = None) -> Steps[messages.Retirement]:
        """Take a version out of service, by default the current one; return its number, and how many leases it has.

        Their holders keep the version.

        Raises:
            NotFound: no such pool or version.
            Retired: the version was retired or superseded, and exists no more.
            Denied: the pool is another user's, whose mode keeps this one from writing.
        """
        name = fields.check_pool_name(name)
        return self._session.ask(messages.Retire(name, version_number(version)), messages.Retirement)

    @blocking
    def watch(self, name: str, *, owner: Owners = None, timeout: float | None = None) -> Steps[Watch]:
        """Return an iterator over the pool's current version (None without one), now and after every change; close it.

        Args:
            name: the pool.
            owner: whose pool counts, as for :meth:`attach`: while it is another user's, there is no version.
            timeout: seconds to wait for a change, each time, before ``TimedOut`` is raised; by default without limit.

        Raises:
            Denied: the pool's mode keeps this user from reading it.
            Unsupported: an owner is given, and the broker is too old to check it.
            OverQuota: this session, or this user, watches as many pools as it may.
        """
        name = fields.check_pool_name(name)
        time_limit(timeout)
        watch = yield from self._session.watch(name, self._owners("watch", name, owner, messages.FINDS), timeout)
        watch.opener = self
        return watch

    @blocking
    def wait_ended(self, name: str, version: int | None = None, timeout: float | None = None) -> Steps[bool]:
        """Wait until a version has ended: it is superseded or retired, and its last lease was given back.

        A superseded version that the broker's setting ``keep`` keeps has not ended. The leases of this session count.

        Args:
            name: the pool.
            version: the version's number; by default all versions that are neither current nor a draft.
            timeout: seconds to wait; by default without limit. 0: do not wait.

        Returns:
            Whether the version has ended.

        Raises:
            NotFound: there has been no such version.
            Denied: the pool's mode keeps this user from reading it.
            Unsupported: the broker is too old to report that.
            OverQuota: this session, or this user, watches as many pools as it may.
        """
        return self._session.wait_ended(fields.check_pool_name(name), version_number(version), time_limit(timeout))

    def follow(self, name: str, *, owner: Owners = None, timeout: float | None = None) -> Follow:
        """Return an iterator, also an asynchronous one, over the pool's current version, now and after every change.

        The iterator outlives brokers: if this session is :attr:`lost`, it reopens this ``Broker`` when a broker serves
        again (:meth:`reconnect`). This method does not wait; the iteration raises the errors that come later.

        Args:
            name: the pool.
            owner: whose pool counts, as for :meth:`attach`: while it is another user's, there is no version.
            timeout: seconds to wait for a version, each time, before ``TimedOut`` is raised; by default without limit.

        Raises:
            Unsupported: an owner is given, and the broker is too old to check it.
            Unavailable: this process is short of threads or memory, or this object is closed.
        """
        from cubroker.client.follow import Follow

        self._owner.check()
        name = fields.check_pool_name(name)
        self._check_open()
        owners = self._owners("follow", name, owner, messages.FINDS)
        follow = Follow(name, lambda pause: self._live(inf, pause), owners, timeout)
        self._follows.add(follow)
        if self._closed.done():
            follow.close()
        return follow

    @blocking
    def lock(self, name: str, *, timeout: float = 600.0) -> Steps[NameLock]:
        """Take the lock of a pool's name, which one session holds at a time, in the order of their requests.

        ::

            with broker.lock("llama"):
                ...                    # attach if the pool exists; else load, and publish

        It is for work that begins before :meth:`create` can, such as loading a model whose layout is known only
        afterwards. The lock is advisory: it keeps no process from publishing. It ends with ``with``, with
        :meth:`NameLock.close`, with this Broker, and with this process, however that ends; a lost connection does not
        end it. It is not reentrant: a second request of its holder waits for the first.

        Args:
            name: the pool, which need not exist.
            timeout: seconds to wait for the lock; 0: do not wait.

        Raises:
            TimedOut: another holder still had the lock after ``timeout`` seconds.
            Denied: this user may not publish that pool.
            OverQuota: this session, or this user, has as many locks as it may.
            Unsupported: the broker is too old to have locks.
        """
        name = fields.check_pool_name(name, "a lock")
        self._session.require(messages.LOCKS, f"the lock of {name!r}", "have locks")
        from cubroker.client.synchronization import obtain_lock

        return (yield from self._keep((yield from obtain_lock(self._session, name, seconds(timeout, "timeout")))))

    # -- what there is -----------------------------------------------------------------------------

    @blocking
    def pools(self) -> Steps[tuple[PoolInfo, ...]]:
        """Return every live version of every pool that this user may read, by name and version."""
        return (yield from self._session.ask(messages.ListPools(), messages.Pools)).pools

    @blocking
    def clients(self) -> Steps[tuple[ClientInfo, ...]]:
        """Return every session of this user, or of all users for administrators, in order of arrival."""
        return (yield from self._session.ask(messages.ListClients(), messages.Clients)).clients

    @blocking
    def devices(self) -> Steps[tuple[DeviceInfo, ...]]:
        """Return every device of the broker, with its budget and how much is in use; ordinals are the broker's."""
        return (yield from self._session.ask(messages.ListDevices(), messages.DeviceList)).devices

    @blocking
    def describe(self, name: str, version: int | None = None) -> Steps[tuple[PoolInfo, Layout, tuple[str, ...]]]:
        """Return the broker's information on a version, by default the current one, its layout, and its placement.

        The placement is the UUID of the device of each allocation of a sharded version, and empty for a replicated one.

        Raises:
            NotFound: no such pool or version.
            Retired: the version was retired or superseded, and exists no more.
            Denied: the pool's mode keeps this user from reading it.
        """
        name = fields.check_pool_name(name)
        found = yield from self._session.ask(messages.Describe(name, version_number(version)), messages.Description)
        info, plan = found.info, found.plan or ()
        return info, TensorIndex.decode(found.layout).layout, tuple(info.devices[index] for index in plan)

    @blocking
    def digests(self, name: str, version: int | None = None) -> Steps[messages.DigestList]:
        """Return the digests that a version was sealed with, by default the current one; ``digests`` is None if none.

        Raises:
            NotFound, Retired, Denied: as :meth:`describe`.
            Unsupported: the broker is too old to keep digests.
        """
        name = fields.check_pool_name(name)
        self._session.require(messages.DIGESTS, f"the digests of {name!r}", "keep any")
        return self._session.ask(messages.ListDigests(name, version_number(version)), messages.DigestList)

    @blocking
    def look(self) -> Steps[messages.View]:
        """Return the devices, pools, sessions, memory and waiting requests that this user may see, at one moment."""
        return self._session.ask(messages.Look(), messages.View)

    @blocking
    def story(self, subject: str | int) -> Steps[tuple[Line, ...]]:
        """Return the last events of a pool, by name, or of a session, by number, the oldest first.

        Raises:
            NotFound: the broker has no events of it (any more), or the session is another user's.
            Denied: the pool's mode keeps this user from reading it.
        """
        if isinstance(subject, SupportsIndex):
            body = messages.Tell(None, session_number(subject))
        else:
            body = messages.Tell(fields.check_pool_name(subject), 0)
        return (yield from self._session.ask(body, messages.Story)).lines

    # -- the broker itself -------------------------------------------------------------------------

    @property
    def lends_drafts(self) -> bool:
        """Whether the broker is new enough to lend drafts to readers (:meth:`attach` with ``unsealed``)."""
        self._owner.check()
        return self._session.version >= messages.UNSEALED

    @property
    def draining(self) -> str:
        """Why the broker is draining: it lends nothing new, and asks for what it lent; empty if it is not."""
        self._owner.check()
        return self._session.drain_state.why

    @blocking
    def wait_draining(self, timeout: float | None = None, *, over: bool = False) -> Steps[bool]:
        """Wait until the broker is :attr:`draining`, without limit or up to ``timeout`` seconds.

        Args:
            timeout: seconds to wait; by default without limit.
            over: wait until it lends again instead.

        Returns:
            Whether it drains, or with ``over`` lends again.
        """
        self._owner.check()
        self._session.check_open()
        return self._session.drain_state.wait(timeout, over=flag(over, "over"))

    @blocking
    def drain(self, *, on: bool = True) -> Steps[None]:
        """Have the broker lend nothing new, and tell all clients to give back what they hold; or lend again.

        It drains until it is told to lend again, with a store even if the broker is restarted. Leases stay valid.

        Raises:
            Denied: this user does not administer the broker: it neither runs the broker, nor is root, nor is in its
                setting ``admins``.
        """
        yield from self._session.ask(messages.Drain(flag(on, "on")), messages.Done)

    # -- the end -----------------------------------------------------------------------------------

    @blocking
    def close(self) -> Steps[None]:
        """Close all pools, discard all drafts, give back all locks, end all :meth:`follow`, and end the session.

        If tensors of a pool are still alive, the connection stays until the last of them is gone. A signal handler
        should raise an exception instead: while it runs, the call that it interrupted cannot continue.

        Raises:
            CubrokerError: as :meth:`Pool.close`, for the first pool that fails; all are closed nevertheless.
        """
        self._owner.check()
        self._closed.set(None)
        session, guard = self._opened
        session.closed = True
        for follow in self._follows:
            follow.close()
        try:
            held = sorted(self._held, key=lambda each: not isinstance(each, Pool))  # locks go back last
            for each in [each for each in held if each.let_go()]:  # none waits for another
                yield from each.confirming()
        finally:
            session.cleanup.put(guard)
        yield from session.left()

    def _creation(
        self,
        name: str,
        layout: Layout,
        placed: Placed,
        share: str,
        wait: float,
        mode: int | None,
        durable: bool | None,
        *,
        writable: bool = False,
        attach: messages.Where | None = None,
        base: messages.Base | None = None,
    ) -> messages.Create:
        """Return the request for a draft; or, with ``attach``, for the current version if there is one."""
        name = fields.check_pool_name(name)
        share, mode, writable = share_kind(share), file_mode(mode), flag(writable, "writable")
        durable = None if durable is None else flag(durable, "durable")
        if self._session.version < messages.CHOOSES:  # an older broker cannot choose
            durable = bool(durable)
            share = (messages.VMM if durable else messages.IPC) if share == messages.AUTO else share
        head = name, layout.encode(), placed.devices, share, seconds(wait)
        return messages.Create(*head, attach, mode, placed.plan, writable, durable, base)

    def _create(self, body: messages.Create, layout: Layout) -> Steps[Pool | Draft]:
        lease, reply, mapped = yield from beside(
            acquire(self._session, body, layout),  # the broker allocates while this process makes its contexts
            lambda: [local.context(self.driver, device) for device in body.devices],
        )
        if body.attach and isinstance(reply, messages.Attached):
            pool = Pool(lease, mapped, TensorIndex.decode(reply.layout), reply.name, body.attach.owners)
            return (yield from self._keep(pool))
        from cubroker.client.draft import Draft

        created = expect(reply, messages.Created)
        draft = Draft(lease, mapped, TensorIndex(layout), created.name, scratch=body.writable)
        return (yield from self._keep(draft))

    def _drafted(self, body: messages.Create, layout: Layout) -> Steps[Draft]:
        from cubroker.client.draft import Draft

        draft = yield from self._create(body, layout)
        assert isinstance(draft, Draft)
        return draft

    def _update(
        self, name: str, sources: Sources, base: Pool | int | str, ask: Callable[..., messages.Create], *, digest: bool
    ) -> Publication:
        """Prepare a version that shares unchanged memory with another one; ``ask`` is :meth:`_creation`."""
        self._session.require(messages.UPDATES, f"an update of {name!r}", "share memory", "publish all tensors")
        from cubroker.client.publish import update

        with ExitStack() as undo:
            pool, info, homes = self._base(name, base, sources, undo)
            known = self.digests(name, info.version) if digest else None
            found = update(self._session, self._drafted, ask, sources, pool, info, homes, known, close=pool is not base)
            undo.pop_all()
            return found

    def _base(
        self, name: str, base: Pool | int | str, sources: Sources, undo: ExitStack
    ) -> tuple[Pool, PoolInfo, tuple[str, ...]]:
        """Return a pool with all tensors of an update's base, the base's information, and where its allocations are."""
        from cubroker.client.publish import base_version

        version = base_version(name, base, self.directory)
        while True:
            info, layout, homes = self.describe(name, version)
            if isinstance(base, Pool) and base._session is self._session and len(base) == len(layout.tensors):
                return base, info, homes
            device = sources.device(info.devices) if len(info.devices) > 1 and not homes else None
            try:
                pool = undo.enter_context(self.attach(name, version=info.version, device=device))
            except Retired:
                if version is not None:
                    raise  # else another version has become the current one: attach to that
            else:
                undo.callback(pool._memory().end)  # even if the traceback of an error refers to tensors of it
                return pool, info, homes

    def _keep(self, held: H) -> Steps[H]:
        """Note a pool or a lock for :meth:`close`; close it if another thread has called that since the request."""
        self._held.add(held)
        held.opener = self
        if self._closed.done() and held.let_go():
            yield from held.confirming()
        self._check_open()
        return held

    def _where(self, name: str, device: DeviceId | None, owner: Owners, *, peer: bool) -> messages.Where:
        """Return where to attach; make this process's context there, so that the lease need not wait for it."""
        if flag(peer, "peer") and device is None:
            raise Invalid(f"attach to {name!r} with peer=True: name the device that is to reach it with `device`")
        uuid = None if device is None else local.context(self.driver, device).device.uuid
        owners = self._owners("attach to", name, owner, messages.OWNED)
        return messages.Where(uuid, local.reachable(self.driver, uuid) if uuid and peer else (), owners)

    def _owners(self, what: str, name: str, owner: Owners, since: int) -> tuple[int, ...]:
        if owners := uids(owner):
            self._session.require(since, f"{what} {name!r} of a certain owner", "check it")
        return owners
