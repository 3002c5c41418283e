"""Running a broker: from a directory and a text that names devices to a process that serves, and back."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from cubroker.driver import Device, Driver, DriverError, load
from cubroker.protocol.directory import REQUEST_SOCKET
from cubroker.protocol.errors import DeviceFailure, Invalid
from cubroker.server import granting, heap, logs
from cubroker.server.assembly import Assembly
from cubroker.server.broker import Broker
from cubroker.server.config import Config, Current, Sources
from cubroker.server.devices import DeviceMemory
from cubroker.server.directory import DOOR, REQUESTS, Directory
from cubroker.server.estate import Estate, inherited, readable
from cubroker.server.gpu_figures import GpuFigures
from cubroker.server.granting import grant
from cubroker.server.greeting import Door
from cubroker.server.hiding import hide
from cubroker.server.ledger import Ledger
from cubroker.server.ledger.books import NOWHERE
from cubroker.server.ledger.entries import SESSION, Budget
from cubroker.server.ledger.events import Event
from cubroker.server.mapped_checks import MappedChecks
from cubroker.server.process_memory import Files
from cubroker.server.restore import restore
from cubroker.server.scribe import Scribe
from cubroker.server.service import Service
from cubroker.server.sight.observer import Sight
from cubroker.server.store.notify import places
from cubroker.server.store.store import JOURNAL, Store
from cubroker.server.supervisor import Supervisor

log = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT)
"""The signals that tell a broker to end, and the store with it if there is one; so does SIGHUP where there is no file
that could be read again."""

HANDING_OVER = signal.SIGUSR1
"""The signal that tells a broker to end, and to leave what the store has to the next one."""

OURS = (JOURNAL, DOOR, REQUESTS)
"""What the store has of every broker."""


def configure(file: Path | None, options: Mapping[str, str]) -> Current:
    """Return the configuration of a broker, which this process is to be and so hides.

    Args:
        file: the settings, if there is one.
        options: settings by key, which come before everything else.

    Raises:
        Wrong: it makes no sense.
        Invalid: nor does what a service manager says of its store.
    """
    hide()
    files = _raise_descriptors()
    return Current(Sources(file, options, os.environ, min(files, places(os.environ) or files)))


def serve(current: Current, ready: Callable[[], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status; SIGHUP reads the configuration again, if it is a file.

    It ends when nothing is held any more that would go with it, at a second signal, or after a time. SIGUSR1 is for
    where the next one goes on with what is stored: what lasts is not waited for then.

    Args:
        current: where to serve, which devices, and all the rest.
        ready: called once when clients are served and the service manager knows; it must not block.

    Raises:
        CubrokerError: it cannot start, or another broker serves there.
    """
    config = current.config
    logs.adjust(config.log.format, config.log.level)
    heap.give_back_freed_blocks()
    with ExitStack() as undo:
        estate = undo.enter_context(inherited(os.environ))
        _check_room(estate.store)
        place = Directory(config.directory, config.access, estate.listening, estate.own, lasting=estate.lasting)
        undo.enter_context(place)
        return asyncio.run(_serve(place, current, estate, ready))


def _check_room(store: Store | None) -> None:
    """Raise ``Invalid`` if a store has no room for what every broker has and a single session."""
    least = len(OURS) + SESSION
    if store is not None and store.limit < least:
        raise Invalid(
            f"the store takes {store.limit} descriptors, and a broker needs {least} at least, {len(OURS)} of its own"
            f" and {SESSION} for each session: raise FileDescriptorStoreMax= and CUBROKER_STORE of its unit, or"
            f" `cubroker keep --descriptors`"
        )


async def _serve(place: Directory, current: Current, estate: Estate, ready: Callable[[], None] | None) -> int:
    again, enough = asyncio.Event(), asyncio.Event()
    stop = asyncio.create_task(_told_to_stop(again if current.sources.file else None, enough))
    async with AsyncExitStack() as undo:
        starting = asyncio.create_task(_start(undo, place, current.config, estate))
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            broker, apply = starting.result()
            service = Service(estate.outbox, broker.status)
            reloading = asyncio.create_task(_reload(current, again, apply, service))
            undo.callback(reloading.cancel)
            service.ready()  # before any words: the next broker depends on nobody who reads them
            log.info("serving on %s", place.path)
            if ready:
                ready()
            with_store = await stop
            if broker.holds(with_store=with_store) and (limit := current.config.drain):
                log.info("told to end: what is lent has %g s to come back, or until the next signal", limit)
                broker.drain(with_store=with_store)
                service.draining(limit)
                await broker.drained(limit, enough)
            service.stopping()
        else:
            starting.cancel()
            await asyncio.wait((starting,))
        log.info("shutting down")
    return 0


async def _told_to_stop(again: asyncio.Event | None, enough: asyncio.Event) -> bool:
    """Return at a signal to end; the next one sets ``enough``. SIGHUP is one, or, if there is ``again``, sets that.

    Returns whether the store ends, too, if there is one.

    A signal to end that is ignored stays so: shells start background work like that, and nohup. One that is blocked
    does not: whoever started this process left that by mistake, and nobody could stop it.
    """
    loop = asyncio.get_running_loop()
    told: asyncio.Future[signal.Signals] = loop.create_future()

    def end(number: signal.Signals) -> None:
        if told.done():
            enough.set()
        else:
            told.set_result(number)

    for number in (*ENDING, HANDING_OVER) if again else (*ENDING, HANDING_OVER, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
    if again:
        loop.add_signal_handler(signal.SIGHUP, again.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, HANDING_OVER, signal.SIGHUP))
    return await told is not HANDING_OVER


async def _reload(current: Current, again: asyncio.Event, apply: Callable[[Config], None], service: Service) -> None:
    """Read the configuration again whenever told so."""
    while await again.wait():
        again.clear()
        service.reloading()
        try:
            await current.reload(apply)
        # Nor may a mistake in this end the broker, and with it everybody's memory.
        except Exception:
            log.exception("the broker failed at reading its configuration again")
        service.ready()


async def _start(
    undo: AsyncExitStack, place: Directory, config: Config, estate: Estate
) -> tuple[Broker, Callable[[Config], None]]:
    """Start everything; ``undo`` takes it down again, however far this came. Return what takes new rules as well."""
    supervisor = Supervisor(place.requests, place.path / REQUEST_SOCKET)
    undo.push_async_callback(supervisor.stop)
    supervisor.start()  # it comes up while the driver does
    broker, devices, checks = await _assemble(undo, supervisor, config, estate.store)
    await supervisor.connect(broker.receive, broker.gateway_changed)
    await asyncio.to_thread(estate.keep, place.fresh)
    if estate.store and estate.store.inherited:
        broker.announce_gateway()  # to the sessions of the earlier broker, whose requests went with its gateway
    door = Door(place.sessions, broker.admit, lambda: supervisor.obstacle() or broker.draining)
    undo.callback(door.close)
    door.open()
    return broker, partial(granting.apply, devices, broker.handle, checks.adjust)


async def _assemble(
    undo: AsyncExitStack, supervisor: Supervisor, config: Config, store: Store | None
) -> tuple[Broker, tuple[Device, ...], MappedChecks]:
    """Return a broker, its devices, and what checks processes; ``undo`` says farewell, frees memory and closes all."""
    loop = asyncio.get_running_loop()
    driver = await asyncio.to_thread(_load, config.devices)
    memory: dict[str, DeviceMemory] = {}
    undo.callback(_close, driver, memory)
    with readable():
        items = dict(store.items()) if store else {}
        ledger, scribe = _ledger(driver, config, store, items), _scribe(store, items)

    def report(event: Event) -> None:
        loop.call_soon_threadsafe(broker.handle, event)

    if store:
        store.attend()
    watch = Files() if driver.host else GpuFigures()
    for device in (*driver.devices, *_absent(ledger)):
        memory[device.uuid] = DeviceMemory(driver, device, report, store, watch)
        undo.callback(memory[device.uuid].close)
    assembly = Assembly(driver, memory, report)
    undo.callback(assembly.close)
    sight = _watch(undo, config, ledger, store, scribe)
    checks = MappedChecks(watch, config.mapped_check)
    undo.callback(checks.close)
    broker = Broker(ledger, memory, assembly, driver, supervisor.send, sight, store, scribe, checks)
    undo.callback(broker.close, "the broker is shutting down")
    if store is None or scribe is None:
        log.warning("there is no store: if this broker dies, its pools and the record of leases go with it")
    else:
        with readable():
            restore(broker, ledger, memory, store, scribe, items)
    return broker, driver.devices, checks


def _absent(ledger: Ledger) -> Iterable[Device]:
    """Return devices that are not served any more, and on which the ledger has memory: it is only to be freed."""
    uuids = dict.fromkeys(held.device for held in ledger.memory() if not held.served)
    return (Device(NOWHERE, uuid, "not served", 0) for uuid in uuids)


def _close(driver: Driver, memory: Mapping[str, DeviceMemory]) -> None:
    """Close the driver, unless memory is in use: that would go with its context, and so goes with the process."""
    if not any(each.leaves for each in memory.values()):
        driver.close()


def _watch(undo: AsyncExitStack, config: Config, ledger: Ledger, store: Store | None, scribe: Scribe | None) -> Sight:
    """Return what watches the ledger, and show it where the configuration says; ``undo`` ends that."""
    if config.metrics.listen is None:
        return Sight(ledger)
    # What serves is imported where it is wanted alone: it takes a twentieth of a second and 5 MiB.
    from cubroker.server.sight.exposition import Standing
    from cubroker.server.sight.meters import Meters
    from cubroker.server.sight.opening import open_window

    def standing() -> Standing:
        if store is None or scribe is None:
            return Standing(beyond_leases=sight.beyond_leases)
        return Standing(scribe.restarts, ledger.stored + len(OURS), store.limit, sight.beyond_leases)

    meters = Meters()
    sight = Sight(ledger, meters)
    if (window := open_window(config.metrics, ledger, sight, meters, standing)) is not None:
        undo.push_async_callback(asyncio.to_thread, window.close)
    return sight


def _scribe(store: Store | None, items: Mapping[bytes, bytes]) -> Scribe | None:
    """Return what writes for a store, if there is one."""
    if store is None:
        return None
    scribe = Scribe()
    if store.inherited:
        scribe.took_over(items)
    return scribe


def _ledger(driver: Driver, config: Config, store: Store | None, items: Mapping[bytes, bytes]) -> Ledger:
    """Return a ledger over the devices: an earlier broker's, if it left one."""
    budgets = [_probed(driver, budget) for budget in grant(driver.devices, config.budget)]
    if store is None:
        return Ledger(budgets, os.geteuid(), config.limits, config.policy)
    room = store.limit - len(OURS)
    return Ledger.restore(budgets, os.geteuid(), config.limits, config.policy, items.items(), room)


def _probed(driver: Driver, budget: Budget) -> Budget:
    """Return a budget that says what its device can do."""
    obstacle = driver.vmm_obstacle(budget.index)
    if obstacle:
        log.warning(
            "device %d cannot share memory as vmm: %s; a pool on it that names no share kind is ipc, which its readers"
            " can write",
            budget.index,
            obstacle,
        )
    return replace(budget, descriptors=int(driver.host), vmm=obstacle is None)  # an emulated allocation is a file


def _load(devices: str) -> Driver:
    try:
        return load(devices)
    except ValueError as error:
        raise Invalid(f"cannot use devices {devices!r}: {error}") from None
    except DriverError as error:
        raise DeviceFailure(f"cannot use devices {devices!r}: {error}") from None


def _raise_descriptors() -> int:
    """Allow as many open files as the system does, and return how many: a session takes two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
