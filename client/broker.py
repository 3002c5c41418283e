"""The way in: one connection to a broker, from which pools come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from cubroker.client import devices as local
from cubroker.client.draft import Draft
from cubroker.client.living import Living
from cubroker.client.loans import Loan
from cubroker.client.mapping import Mapped
from cubroker.client.owners import Owner, uids
from cubroker.client.plans import DeviceId, Placed, Plan, place
from cubroker.client.pool import Pool, seconds
from cubroker.client.processes import Scoped, Unsendable
from cubroker.client.replica import Index, decode
from cubroker.client.requests import Requests, expect
from cubroker.client.session import Session
from cubroker.client.watch import Watch
from cubroker.driver import Driver
from cubroker.protocol import names
from cubroker.protocol.bounds import MAX_WAIT
from cubroker.protocol.directory import default_directory
from cubroker.protocol.errors import Invalid, Unsupported
from cubroker.protocol.infos import ClientInfo, DeviceInfo, Line, PoolInfo
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    AUTO,
    CHOOSES,
    DIGESTS,
    FINDS,
    OWNED,
    Attach,
    Attached,
    Clients,
    Create,
    Created,
    Describe,
    Description,
    DeviceList,
    DigestList,
    Done,
    Drain,
    ListClients,
    ListDevices,
    ListDigests,
    ListPools,
    Look,
    Pools,
    Retire,
    Retirement,
    Story,
    Tell,
    View,
    Where,
)

P = TypeVar("P", bound=Pool)


class Broker(Unsendable, Scoped):
    """A session with the broker that serves ``directory``. Every method may be called from any thread.

    Besides what each method names, all may raise ``Unavailable`` (the broker is gone, or this object
    is closed), ``TimedOut`` (it did not answer) and ``Invalid`` (an argument that nothing can have, or a forked child).

    Args:
        directory: where the broker listens; by default ``$CUBROKER_DIR``, else this user's default.
        timeout: seconds that the broker may take to answer, beyond what a request itself may wait.
        connect_timeout: seconds that the broker may take to open the session; by default ``timeout``. A broker that is
            starting, or is being started again, answers when it serves.

    Raises:
        Unavailable: nobody serves there, no broker answers in time, or this process is short of descriptors, threads or
            memory.
        Denied: this user may not connect.
        OverQuota: this user has as many sessions as it may have.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 30.0,
        connect_timeout: float | None = None,
    ) -> None:
        greeting = timeout if connect_timeout is None else connect_timeout
        for limit in (timeout, greeting):
            if not 0 < limit <= MAX_WAIT:
                raise Invalid(f"a timeout of {limit} seconds; it can be more than 0, up to {MAX_WAIT:g}")
        place = Path(directory) if directory is not None else default_directory()
        self._session = Session(place, timeout, greeting)
        self._owner = self._session.owner
        self._pools: Living[Pool] = Living()
        self._guard = self._session.janitor.guard(self, self._session.leave)

    def __repr__(self) -> str:
        return f"<Broker on {self.directory}, session {self.session}>"

    @property
    def directory(self) -> Path:
        """Where the broker listens."""
        return self._session.directory

    @property
    def session(self) -> int:
        """The number that the broker gave this session."""
        return self._session.id

    @property
    def uid(self) -> int | None:
        """The user that the broker runs as; None if it is too old to say so."""
        return self._session.uid

    @property
    def requests(self) -> Requests:
        """The way of requests themselves, for those who want many under way: ``submit(body)`` returns a future."""
        return self._session.requests

    @property
    def driver(self) -> Driver:
        """This process's driver for the broker's devices.

        Raises:
            Unavailable: there is no such driver here.
        """
        return self._session.driver

    # -- pools -------------------------------------------------------------------------------------

    def attach(
        self,
        name: str,
        *,
        version: int | None = None,
        device: DeviceId | None = None,
        wait: float = 0.0,
        peer: bool = False,
        owner: Owner | Sequence[Owner] | None = None,
    ) -> Pool:
        """Lease a published version and map its memory: one round trip, one driver call per allocation.

        Args:
            name: the pool.
            version: which one; by default the current one.
            device: on which device; by default a replicated pool's only one. Of a sharded pool it gets what is on that
                device, and by default every tensor, each on its own device.
            wait: seconds to wait for its publication.
            peer: where ``device`` has nothing of the pool, whether it shall use the memory of another one that it
                reaches directly, over the fastest link there is. The tensors are ``device``'s then;
                ``pool.memory_device`` says where they lie.
            owner: whose pool it has to be, unless it is this user's own: a name or a number, or several; by default
                those of ``$CUBROKER_OWNER``, separated by commas, else anybody's. Names are looked up here, and numbers
                are those of the broker's user namespace.

        Raises:
            NotFound: no such pool, version or device.
            Retired: the version was retired.
            Denied: the pool's mode keeps this user from reading it, or it is not ``owner``'s.
            Unsupported: an owner is asked for, and the broker is too old to heed that.
            OverQuota: this session, or this user, holds as many leases as it may.
            TimedOut: it was not published in ``wait`` seconds.
            Invalid: the pool is on several devices and ``device`` does not say which; or ``peer`` without ``device``.
            OutOfMemory, DeviceFailure: the memory could not be mapped.
        """
        names.check(name)
        where = self._where(name, device, owner, peer=peer)
        body = Attach(name, _version(version), where.device, seconds(wait), where.peers, where.owners)
        loan, reply, mapped = self._session.borrow(body, Loan(self._session))
        return self._pool(loan, expect(reply, Attached), mapped, where.owners)

    def create(
        self,
        name: str,
        layout: Layout,
        *,
        devices: Sequence[DeviceId] | None = None,
        share: str = AUTO,
        wait: float = 0.0,
        mode: int | None = None,
        plan: Plan | None = None,
        writable: bool = False,
        durable: bool | None = None,
    ) -> Draft:
        """Open a draft of the pool's next version and map its memory.

        Args:
            name: the pool, new or not.
            layout: its tensors, from :meth:`Layout.pack` or another pool.
            devices: each gets a copy of every allocation, unless there is a ``plan``; by default those of the plan, or
                the first one.
            share: how the memory is shared: ``vmm``, which readers cannot write, ``ipc``, which they can,
                ``multicast``, for :meth:`Pool.broadcast`, or ``auto``: as the broker's setting ``share`` says, by
                default ``vmm`` where all ``devices`` can, else ``ipc``. The draft's ``share`` tells.
            wait: seconds to wait for other writers of the pool, and for room.
            mode: who may attach (read) and publish and retire (write), like a file's: ``0o640``. By default a pool
                keeps its mode, and a new one gets the broker's default. A process that may attach to ``ipc`` memory, or
                to that of a GPU, can write it if it means to.
            plan: for every tensor by name, which of ``devices`` it lies on, and no other: the pool is sharded. The
                layout must have tensors of different devices in different allocations, as those have that
                ``Layout.pack(..., groups=plan)`` makes.
            writable: whether those who attach to the version may write it, and make events on it
                (:meth:`Pool.event`): scratch memory, that processes hand over to each other.
            durable: whether the version outlives a broker that is killed or started again: for ``vmm`` and
                ``multicast``, where the broker has a store. By default it does where that is so and the store has room.

        Raises:
            Invalid: the plan does not fit the layout or the devices.
            NotFound: no such device.
            Exists: somebody else is writing a version of it.
            Denied: it is another user's, whose mode keeps this one from writing.
            OverBudget: there is no room on a device.
            OverQuota: this user has used up what it may have.
            TimedOut: none of it changed in ``wait`` seconds.
            Unsupported: no such share kind, or it cannot be durable.
            OutOfMemory, DeviceFailure: the memory could not be allocated or mapped.
        """
        placed = place(self.driver, layout, devices, plan)
        loan, reply, mapped = self._create(
            name, layout, placed, None, share, wait, mode, writable=writable, durable=durable
        )
        return self._draft(loan, expect(reply, Created), mapped, layout, writable=writable)

    def attach_or_create(
        self,
        name: str,
        layout: Layout,
        *,
        device: DeviceId | None = None,
        devices: Sequence[DeviceId] | None = None,
        share: str = AUTO,
        wait: float = 600.0,
        mode: int | None = None,
        plan: Plan | None = None,
        writable: bool = False,
        durable: bool | None = None,
        peer: bool = False,
        owner: Owner | Sequence[Owner] | None = None,
    ) -> Pool | Draft:
        """Attach to the current version, or become its writer: the first of many gets the draft, the rest wait for it.

        Should that writer fail, the next in line gets a draft.

        Args:
            name: the pool.
            layout: its tensors, should it have to be created.
            device: where to attach; by default the first of ``devices``, or with a ``plan`` each tensor's own device.
            devices: where to create; by default the devices of the ``plan``, or ``device``, or the first one.
            share: as for :meth:`create`, should it be created.
            wait: seconds to wait for the publication, or for the turn and room to create.
            mode: as for :meth:`create`, should it be created.
            plan: as for :meth:`create`, should it be created.
            writable: as for :meth:`create`, should it be created.
            durable: as for :meth:`create`, should it be created.
            peer: as for :meth:`attach`, should it be there.
            owner: as for :meth:`attach`, should it be there.

        Raises:
            CubrokerError: as :meth:`attach` and :meth:`create`.
        """
        if devices is None and plan is None and device is not None:
            devices = (device,)
        placed = place(self.driver, layout, devices, plan)
        if device is None and plan is None:
            device = placed.devices[0]
        where = self._where(name, device, owner, peer=peer)
        loan, reply, mapped = self._create(
            name, layout, placed, where, share, wait, mode, writable=writable, durable=durable
        )
        if isinstance(reply, Attached):
            return self._pool(loan, reply, mapped, where.owners)
        return self._draft(loan, reply, mapped, layout, writable=writable)

    def retire(self, name: str, version: int | None = None) -> Retirement:
        """Take a version out of service; by default the current one. Who holds it keeps it.

        Raises:
            NotFound: no such pool or version.
            Retired: the version was retired, or replaced, and is no more.
            Denied: it is another user's, whose mode keeps this one from writing.
        """
        names.check(name)
        return self._session.ask(Retire(name, _version(version)), Retirement)

    def watch(self, name: str, *, owner: Owner | Sequence[Owner] | None = None) -> Watch:
        """Return an iterator over the pool's current version (None without one), now and after every change; close it.

        Args:
            name: the pool.
            owner: whose pool counts, as for :meth:`attach`: while it is anybody else's, there is no version.

        Raises:
            Denied: the pool's mode keeps this user from reading it.
            Unsupported: an owner is asked for, and the broker is too old to heed that.
            OverQuota: this session, or this user, watches as many pools as it may.
        """
        names.check(name)
        return self._session.watch(name, self._owners("watch", name, owner, FINDS))

    # -- what there is -----------------------------------------------------------------------------

    def pools(self) -> tuple[PoolInfo, ...]:
        """Return every live version of every pool that this user may read, by name and version."""
        return self._session.ask(ListPools(), Pools).pools

    def clients(self) -> tuple[ClientInfo, ...]:
        """Return every session of this user, or of all users for administrators, in order of arrival."""
        return self._session.ask(ListClients(), Clients).clients

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Return every device of the broker, with what is free on it; the broker's ordinals."""
        return self._session.ask(ListDevices(), DeviceList).devices

    def describe(self, name: str, version: int | None = None) -> tuple[PoolInfo, Layout, tuple[str, ...]]:
        """Return what is known of a version, by default the current one, its layout, and where the allocations are.

        That is a device's UUID for each allocation of a sharded version, and nothing where all are on each device.

        Raises:
            NotFound: no such pool or version.
            Retired: the version was retired, or replaced, and is no more.
            Denied: the pool's mode keeps this user from reading it.
        """
        names.check(name)
        description = self._session.ask(Describe(name, _version(version)), Description)
        info, plan = description.info, description.plan or ()
        return info, decode(description.layout).layout, tuple(info.devices[index] for index in plan)

    def digests(self, name: str, version: int | None = None) -> DigestList:
        """Return what digests a version was sealed with, by default the current one; None among it if with none.

        Raises:
            NotFound, Retired, Denied: as :meth:`describe`.
            Unsupported: the broker is too old to keep digests.
        """
        names.check(name)
        if self._session.version < DIGESTS:
            raise Unsupported(f"the digests of {name!r}: the broker is too old to keep any; upgrade it")
        return self._session.ask(ListDigests(name, _version(version)), DigestList)

    def look(self) -> View:
        """Return devices, pools, sessions, memory and waiting requests as of one moment: what this user may see."""
        return self._session.ask(Look(), View)

    def story(self, subject: str | int) -> tuple[Line, ...]:
        """Return the last events of a pool, by name, or of a session, by number, the oldest first.

        Raises:
            NotFound: nothing is known of it (any more), or the session is another user's.
            Denied: the pool's mode keeps this user from reading it.
        """
        pool, session = (subject, 0) if isinstance(subject, str) else (None, subject)
        return self._session.ask(Tell(pool, session), Story).lines

    # -- draining ----------------------------------------------------------------------------------

    @property
    def draining(self) -> str:
        """Why the broker lends nothing new and wants back what it lent; nothing if that is not so."""
        self._owner.check()
        return self._session.recall.why

    def wait_draining(self, timeout: float | None = None, *, over: bool = False) -> bool:
        """Wait until the broker is :attr:`draining`, for as long as it takes or up to ``timeout`` seconds.

        Args:
            timeout: seconds to wait; by default without limit.
            over: wait until it lends again instead.

        Returns:
            Whether it came to that.
        """
        self._owner.check()
        self._session.check_open()
        return self._session.recall.wait(timeout, over=over)

    def drain(self, *, on: bool = True) -> None:
        """Have the broker lend nothing new, and tell all clients to give back what they hold; or lend again.

        It stays so until it is taken back, with a store beyond the end of the broker. What is held stays.

        Raises:
            Denied: this user neither runs the broker nor is root.
        """
        self._session.ask(Drain(on), Done)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all pools, discard all drafts, and end the session.

        Where tensors of a pool are still alive, the connection stays until the last of them is gone. A signal handler
        does better to raise an exception: while one runs, the call that it came into cannot go on.

        Raises:
            CubrokerError: as :meth:`Pool.close`, of the first pool that has something to tell; all are closed.
        """
        self._owner.check()
        self._session.closed = True
        try:
            for pool in [pool for pool in self._pools if pool.let_go()]:  # none waits for another
                pool.confirm()
        finally:
            self._session.end(self._guard)

    def _create(
        self,
        name: str,
        layout: Layout,
        placed: Placed,
        attach: Where | None,
        share: str,
        wait: float,
        mode: int | None,
        *,
        writable: bool,
        durable: bool | None,
    ) -> tuple[Loan, Attached | Created, Mapped]:
        names.check(name)
        layout.check()
        if self._session.version < CHOOSES:  # such a broker has to be told
            durable = bool(durable)
            share = ("vmm" if durable else "ipc") if share == AUTO else share
        head = name, layout.encode(), placed.devices, share, seconds(wait)
        body = Create(*head, attach, _mode(mode), placed.plan, writable, durable)
        return self._session.borrow(body, Loan(self._session, layout))

    def _where(self, name: str, device: DeviceId | None, owner: Owner | Sequence[Owner] | None, *, peer: bool) -> Where:
        """Say where to attach; this process has a context there then, and the lease need not wait for that."""
        if device is None:
            if peer:
                raise Invalid(f"attach to {name!r} with peer=True: say with `device` which device shall reach it")
            return Where(None, owners=self._owners("attach to", name, owner, OWNED))
        uuid, owners = local.context(self.driver, device).device.uuid, self._owners("attach to", name, owner, OWNED)
        return Where(uuid, local.reachable(self.driver, uuid) if peer else (), owners)

    def _owners(self, what: str, name: str, owner: Owner | Sequence[Owner] | None, since: int) -> tuple[int, ...]:
        owners = uids(owner)
        if owners and self._session.version < since:
            raise Unsupported(f"{what} {name!r} of a certain owner: the broker is too old to check it; upgrade it")
        return owners

    def _pool(self, loan: Loan, reply: Attached, mapped: Mapped, owners: tuple[int, ...]) -> Pool:
        return self._keep(Pool(loan, mapped, decode(reply.layout), reply.name, reply.version, owners))

    def _draft(self, loan: Loan, reply: Created, mapped: Mapped, layout: Layout, *, writable: bool) -> Draft:
        return self._keep(Draft(loan, mapped, Index(layout), reply.name, reply.version, scratch=writable))

    def _keep(self, pool: P) -> P:
        """Note a pool for :meth:`close`, which another thread may have called since it was asked for."""
        self._pools.add(pool)
        if self._session.closed:
            pool.close()
        self._session.check_open()
        return pool


def _version(version: int | None) -> int:
    if version is None:
        return 0
    if version < 1:
        raise Invalid(f"version {version}: versions count from 1; leave it out for the current one")
    return version


def _mode(mode: int | None) -> int | None:
    if mode is not None and not 0 <= mode <= 0o777:
        raise Invalid(f"a mode of 0o{mode:o}; it can be 0 to 0o777")
    return mode
