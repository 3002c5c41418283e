"""The :class:`cubroker.Broker` for asyncio: its methods are awaited, and nothing that waits blocks the loop.

::

    from cubroker.aio import Broker

    async with Broker() as broker, await broker.attach("llama", wait=60) as pool:
        ...

Every method does what the method of that name of the blocking class does, with the same arguments and errors: it runs
the same steps (:mod:`cubroker.client.transport.requests`). A blocking class that supports ``with`` or ``for`` has a
class here, of the same name and not to be confused with it, that supports ``async with`` or ``async for``. Only
``Follow`` has none: it supports these itself. The underlying session has its two threads, and a call that waits has no
thread of its own. Cancelling an ``await`` abandons the request: the broker stops waiting, and a lease that arrives
nevertheless is given back.

One object serves any number of tasks, and loops in several threads. Work with the devices that the session's threads do
not do runs in a thread of the loop: connecting, the first use of a device, and the digests of a check. Such a thread
continues when its ``await`` is cancelled, and its result is closed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from inspect import unwrap
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from cubroker.client import devices as local
from cubroker.client import draft, notices, pool, synchronization
from cubroker.client.broker import Broker as BlockingBroker
from cubroker.client.devices import DeviceId, Plan
from cubroker.client.fork_guard import Closeable
from cubroker.client.tensor import SharedTensor
from cubroker.client.transport.handshake import NotServing, Patience
from cubroker.client.transport.requests import Steps, run, run_in_loop, seconds
from cubroker.driver import Device, Driver
from cubroker.protocol import messages
from cubroker.protocol.errors import CubrokerError, Denied, Unavailable
from cubroker.protocol.layout import Layout, Tensors

if TYPE_CHECKING:  # imported at the first publication
    from cubroker.client.publish import Publication

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
B = TypeVar("B", bound=Closeable, covariant=True)

__all__ = ["Broker", "Draft", "Event", "NameLock", "Pool", "SharedEvent", "Watch"]


async def awaited(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run the steps of a method that :func:`~cubroker.client.transport.requests.blocking` made; return the result."""
    steps = cast("Callable[P, Steps[T]]", unwrap(method))
    return await run_in_loop(steps(*args, **kwargs))


def awaited_as(
    kind: Callable[[T], U], method: Callable[Concatenate[Any, P], T]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, U]]:
    """Return a coroutine method that runs the steps of ``method`` on the underlying object, ``blocking``.

    Its result is that of ``method``, wrapped in ``kind``, a class of this module.
    """

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> U:
        return kind(await awaited(method, self.blocking, *args, **kwargs))

    return call


def as_awaited(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Do as :func:`awaited_as`, and return the method's result as it is."""
    return awaited_as(lambda result: result, method)


def as_it_is(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls ``method`` on the underlying object, which waits for nothing."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.blocking, *args, **kwargs)

    return call


def shown(name: str) -> Any:
    """Return a property for the attribute of that name of the underlying object."""
    return property(attrgetter(f"blocking.{name}"), doc=f"See the attribute {name} of the blocking class.")


def typed_as(
    method: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Return a decorator that gives a method of ``**options`` the parameters of ``method``."""

    def typed(made: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        return cast("Callable[Concatenate[Any, P], T]", wraps(method, assigned=())(made))

    return typed


class Below(Generic[B]):
    """A wrapper of an object whose methods block; the end of ``async with`` closes that object.

    Attributes:
        blocking: the underlying object, for code that takes one.
    """

    def __init__(self, below: B) -> None:
        self.blocking = below

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.blocking._owner.here():  # as for `with`: a forked child has nothing to close
            await self.close()

    def __repr__(self) -> str:
        return repr(self.blocking)

    async def close(self) -> None:
        """Close the underlying object. Once begun, the close completes, even if this is cancelled."""
        raise NotImplementedError


class NameLock(Below[synchronization.NameLock]):
    """The lock of a pool's name; see :class:`cubroker.client.NameLock`."""

    name: str = shown("name")
    closed: bool = shown("closed")
    lost: str = shown("lost")
    close = as_awaited(synchronization.NameLock.close)


class SharedEvent(Below[synchronization.SharedEvent]):
    """A place in a stream of the process that made it; see :class:`cubroker.client.SharedEvent`."""

    name: str = shown("name")
    device: Device = shown("device")
    mine: bool = shown("mine")
    closed: bool = shown("closed")
    record = as_awaited(synchronization.SharedEvent.record)
    wait = as_awaited(synchronization.SharedEvent.wait)
    close = as_awaited(synchronization.SharedEvent.close)


Event = SharedEvent
"""The old name, which works for one more version."""


class Watch(Below[notices.Watch], AsyncIterator[int | None]):
    """The current version of a pool, now and after every change, for ``async for``: :class:`cubroker.client.Watch`."""

    async def __anext__(self) -> int | None:
        return await self.next()

    async def next(self, timeout: float | None = None) -> int | None:
        """See :meth:`cubroker.client.Watch.next`; at its end it raises ``StopAsyncIteration``."""
        try:
            return await run_in_loop(self.blocking.change(timeout))
        except notices.WatchClosed:
            raise StopAsyncIteration from None

    async def close(self) -> None:
        """Stop watching; iterations end."""
        self.blocking.close()


class Pool(Below[pool.Pool], Mapping[str, SharedTensor]):
    """The tensors of one version, by name; see :class:`cubroker.Pool`.

    ``blocking`` is for code that takes a pool: ``state_dict(pool.blocking)``. It has all that this class lacks.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __getitem__(self, name: str) -> SharedTensor:
        return self.blocking[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.blocking)

    def __len__(self) -> int:
        return len(self.blocking)

    def __contains__(self, name: object) -> bool:
        return name in self.blocking

    name: str = shown("name")
    version: int = shown("version")
    share: str = shown("share")
    layout: Layout = shown("layout")
    devices: tuple[Device, ...] = shown("devices")
    lost: str = shown("lost")
    asleep: bool = shown("asleep")
    closed: bool = shown("closed")
    handles = as_it_is(pool.Pool.handles)
    follow = as_it_is(pool.Pool.follow)
    sleep = as_awaited(pool.Pool.sleep)

    async def wake(self, wait: float = 0.0) -> None:
        """See :meth:`cubroker.Pool.wake`. If two tasks wake it together, each gets a lease, and one is given back."""
        await run_in_loop(self.blocking.waking(wait))

    async def switch(self, version: int | None = None, wait: float = 0.0) -> int:
        """See :meth:`cubroker.Pool.switch`. If it is cancelled, it ends when all of one version is mapped."""
        request = self.blocking.switch_request()
        try:
            return await run_in_loop(self.blocking.switching(request, version, wait))
        except BaseException:
            while True:
                with suppress(asyncio.CancelledError):  # cancelled again: the caller must not use the memory yet
                    await run_in_loop(request.settle())
                    break
            raise

    async def broadcast(self, source: object, name: str) -> None:
        """See :meth:`cubroker.Pool.broadcast`. A thread of the loop stores; it is not cancelled."""
        await asyncio.to_thread(self.blocking.broadcast, source, name)

    event = awaited_as(SharedEvent, pool.Pool.event)
    open_event = awaited_as(SharedEvent, pool.Pool.open_event)

    async def check(self) -> None:
        """See :meth:`cubroker.Pool.check`. The digests are computed in a thread of the loop."""
        await asyncio.to_thread(self.blocking.check)

    close = as_awaited(pool.Pool.close)


class Draft(Pool):
    """The tensors of an unpublished version; see :class:`cubroker.Draft`. ``async with`` discards it if not sealed."""

    blocking: draft.Draft

    replicas: tuple[pool.Replica, ...] = shown("replicas")

    async def seal(
        self, *, layout: Layout | None = None, digest: bool | messages.Digests = False, in_place: bool = False
    ) -> int:
        """See :meth:`cubroker.Draft.seal`. Once begun, the seal completes, even if this is cancelled.

        With another ``layout`` the seal begins when the broker has that layout: if this is cancelled before, the draft
        stays open. A seal ``in_place`` is made in a thread of the loop.
        """
        if in_place:
            return await asyncio.to_thread(self.blocking.seal, layout=layout, digest=digest, in_place=in_place)
        return await awaited(draft.Draft.seal, self.blocking, layout=layout, digest=digest, in_place=in_place)


class Broker:
    """A session with the broker that serves ``directory``, for asyncio; see :class:`cubroker.Broker`.

    It begins with ``async with``, or with :meth:`connect`.

    Args:
        directory: as for :class:`cubroker.Broker`.
        timeout: as for :class:`cubroker.Broker`.
        connect_timeout: as for :class:`cubroker.Broker`. A cancelled connect leaves its thread for this long at most.
        wait: as for :class:`cubroker.Broker`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 30.0,
        connect_timeout: float | None = None,
        wait: float = 0.0,
    ) -> None:
        self._wait = seconds(wait)
        self._connect = partial(BlockingBroker, directory, timeout=timeout, connect_timeout=connect_timeout)
        self._broker: BlockingBroker | None = None
        #: UUIDs of devices whose contexts were made, each with the session: the next broker may have others.
        self._used: set[tuple[int, str]] = set()

    async def connect(self) -> Self:
        """Open the session and load the driver, if not connected yet; raises as :class:`cubroker.Broker` does."""
        if self._broker is None:
            # In one step: the error of a cancelled task keeps this frame, and would keep the session.
            connected = await _until_served(lambda: _with_driver(self._connect()), self._wait)
            if self._broker is None:  # else another task was faster
                self._broker = connected
        return self

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        if self._broker and self._broker._owner.here():
            await self.close()

    def __repr__(self) -> str:
        return repr(self._broker) if self._broker else "<Broker that is not connected>"

    @property
    def blocking(self) -> BlockingBroker:
        """The underlying Broker, for code that takes one and runs in a thread; it has the same session and pools.

        Raises:
            Unavailable: this Broker is not connected yet.
        """
        if self._broker is None:
            raise Unavailable("this Broker is not connected yet; use `async with`, or await connect()")
        return self._broker

    directory: Path = shown("directory")
    session: int = shown("session")
    uid: int | None = shown("uid")
    driver: Driver = shown("driver")
    draining: str = shown("draining")
    lends_drafts: bool = shown("lends_drafts")
    lost: str = shown("lost")

    async def reconnect(self, wait: float = 0.0) -> None:
        """See :meth:`cubroker.Broker.reconnect`. Each attempt is made in a thread of the loop."""
        await _until_served(self.blocking.reconnect, seconds(wait))
        await asyncio.to_thread(_with_driver, self.blocking)

    # -- pools -------------------------------------------------------------------------------------

    @typed_as(BlockingBroker.attach)
    async def attach(self, name: str, **options: Any) -> Pool:
        """See :meth:`cubroker.Broker.attach`."""
        device = options.get("device")
        devices = () if device is None else (local.lasting(self.driver, device),)
        uuids = await self._use(devices)
        while options.get("version") is None and self.lost:
            await self.reconnect()
            uuids = await self._use(devices)  # takes time, in which the session may be lost again
        options["device"] = uuids[0] if uuids else None
        return Pool(await run_in_loop(self.blocking.attaching(name, **options)))

    @typed_as(BlockingBroker.create)
    async def create(self, name: str, layout: Layout | Tensors, **options: Any) -> Draft:
        """See :meth:`cubroker.Broker.create`."""
        options = _by_uuid(self.driver, options)
        await self._use(local.chosen(options.get("devices"), options.get("plan")))
        return Draft(await awaited(BlockingBroker.create, self.blocking, name, layout, **options))

    @typed_as(BlockingBroker.attach_or_create)
    async def attach_or_create(self, name: str, layout: Layout | Tensors, **options: Any) -> Pool | Draft:
        """See :meth:`cubroker.Broker.attach_or_create`."""
        options = _by_uuid(self.driver, options)
        device, devices, plan = map(options.get, ("device", "devices", "plan"))
        await self._use(local.chosen(devices, plan) if device is None else (device, *local.chosen(devices, plan or {})))
        found = await awaited(BlockingBroker.attach_or_create, self.blocking, name, layout, **options)
        return Draft(found) if isinstance(found, draft.Draft) else Pool(found)

    async def publish(
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
        base: Pool | pool.Pool | int | str | None = None,
    ) -> int:
        """See :meth:`cubroker.Broker.publish`. Threads of the loop read and copy the arrays.

        If this is cancelled while it waits for its turn or for room, the broker stops waiting. If it is cancelled
        later, the thread continues, and the version may be published.
        """
        prepare = partial(
            _prepared,
            self.blocking,
            name,
            source,
            **_by_uuid(self.driver, {"devices": devices, "plan": plan}),
            share=share,
            mode=mode,
            durable=durable,
            wait=wait,
            digest=digest,
            base=base.blocking if isinstance(base, Pool) else base,
        )
        publication = await asyncio.to_thread(prepare)
        opened: draft.Draft | None = None
        begun: list[draft.Draft] = []
        try:
            opened = await run_in_loop(publication.draft())  # in no thread: the loop has few, and this may wait long
            return await asyncio.to_thread(_finish, publication, opened, begun)
        finally:
            if not begun:
                if opened:
                    opened.let_go()
                await run_in_loop(publication.closing())
            del opened, publication, begun  # the error of a cancelled task keeps this frame

    retire = as_awaited(BlockingBroker.retire)

    watch = awaited_as(Watch, BlockingBroker.watch)
    follow = as_it_is(BlockingBroker.follow)
    lock = awaited_as(NameLock, BlockingBroker.lock)
    wait_ended = as_awaited(BlockingBroker.wait_ended)

    # -- what there is -----------------------------------------------------------------------------

    pools = as_awaited(BlockingBroker.pools)
    clients = as_awaited(BlockingBroker.clients)
    devices = as_awaited(BlockingBroker.devices)
    describe = as_awaited(BlockingBroker.describe)
    digests = as_awaited(BlockingBroker.digests)
    look = as_awaited(BlockingBroker.look)
    story = as_awaited(BlockingBroker.story)

    # -- draining, and the end ---------------------------------------------------------------------

    wait_draining = as_awaited(BlockingBroker.wait_draining)
    drain = as_awaited(BlockingBroker.drain)

    async def close(self) -> None:
        """See :meth:`cubroker.Broker.close`. Calls that other tasks await raise ``Unavailable``.

        A Broker that is not connected has nothing to close.
        """
        if self._broker:
            await awaited(BlockingBroker.close, self._broker)

    async def _use(self, devices: Sequence[DeviceId]) -> tuple[str, ...]:
        """Have contexts on devices made in a thread, and return their UUIDs; a GPU's first use takes long."""
        uuids = tuple(local.find(self.driver, device).uuid for device in devices)
        for uuid in uuids:
            use = self.session, uuid
            if use not in self._used:
                await asyncio.to_thread(local.context, self.driver, uuid)
                self._used.add(use)
        return uuids


def _with_driver(broker: BlockingBroker) -> BlockingBroker:
    """Load the driver of a Broker, and return that; an error is ignored here, and raised when a device is used."""
    with suppress(CubrokerError):
        _ = broker.driver
    return broker


def _prepared(broker: BlockingBroker, name: str, source: object, **options: Any) -> Publication:
    """Prepare a publication up to its draft."""
    publication = broker._publication(name, source, **options)
    try:
        publication.prepare()
    except BaseException:
        run(publication.closing())
        raise
    return publication


def _finish(publication: Publication, opened: draft.Draft, begun: list[draft.Draft]) -> int:
    """Fill and seal the draft of a publication; note first that this was begun, since nothing else closes them then."""
    begun.append(opened)
    with publication, opened:
        return publication.finish(opened)


def _by_uuid(driver: Driver, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with devices by UUID: the current device depends on the thread, and may change later."""
    named = dict(options)
    device, devices, plan = map(options.get, ("device", "devices", "plan"))
    if device is not None:
        named["device"] = local.find(driver, device).uuid
    if devices is not None:
        named["devices"] = tuple(local.find(driver, each).uuid for each in local.chosen(devices, None))
    if plan is not None:
        named["plan"] = local.find_plan(driver, plan)
    return named


async def _until_served(attempt: Callable[[], T], wait: float) -> T:
    """Do as :func:`cubroker.client.transport.handshake.until_served`, with each attempt in a thread of the loop."""
    patience = Patience(wait)
    while True:
        try:
            return await asyncio.to_thread(attempt)
        except (NotServing, Denied) as error:
            pause = patience.pause(error)
        await asyncio.sleep(pause)
