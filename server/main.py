"""The broker's process: configure it, build its parts, serve until a signal, and take everything down again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from cubroker.driver import Device, Driver, DriverError, load, prepare
from cubroker.protocol.errors import CubrokerError, DeviceFailure, Invalid
from cubroker.protocol.messages import GatewayChanged
from cubroker.protocol.paths import REQUEST_SOCKET
from cubroker.server import hardening, logs, monitoring
from cubroker.server.broker import Broker
from cubroker.server.config.load import ConfigSources, Current
from cubroker.server.config.schema import Config
from cubroker.server.devices.allocator import DeviceAllocator, MulticastBinder, device_budgets
from cubroker.server.devices.mapped_memory import FileWatch, MappedChecks, NvmlWatch
from cubroker.server.event_queue import EventQueue
from cubroker.server.ledger import Ledger
from cubroker.server.ledger.events import Reconfigured
from cubroker.server.ledger.records import SESSION_FDS, Budget
from cubroker.server.ledger.tables import NO_INDEX
from cubroker.server.monitoring.observer import BrokerGauges, LedgerObserver
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import SPEAKS, Standby
from cubroker.server.store.store import JOURNAL, AsyncNotifier, Store
from cubroker.server.takeover import DOOR, REQUESTS, Directory, InheritedFds, inherited, readable, restore
from cubroker.server.transport.admission import Listener
from cubroker.server.transport.gateway_process import GatewayProcess, gateway_code
from cubroker.server.transport.gateway_start import GatewayStart
from cubroker.server.transport.session import SessionLog

log = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT)
"""The signals that tell a broker to end, together with its store if there is one. SIGHUP does the same if there is no
configuration file to read again."""

HANDING_OVER = signal.SIGUSR1  #: The signal that tells a broker to end, and to leave the store to the next broker.
LAST_SECONDS = 60.0  #: Seconds that the end of a broker may take once it has waited for its leases.
STATUS_PERIOD = 10.0  #: Seconds within which a changed status is sent; the interval of a watchdog may be shorter.
OURS = (JOURNAL, DOOR, REQUESTS)  #: What every broker stores.


def configure(file: Path | None, options: Mapping[str, str]) -> Current:
    """Hide this process, which is about to be a broker, and return its configuration; ``options`` override the file.

    Raises:
        InvalidConfig: a setting is refused.
        Invalid: the service manager's variables for its store are no numbers.
    """
    hardening.hide()
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # a session takes two descriptors
    return Current(ConfigSources(file, options, os.environ, min(files, sd_notify.places(os.environ) or files)))


def stand_by(file: Path | None, options: Mapping[str, str]) -> Mapping[str, Sequence[int]] | None:
    """Wait until this process takes over, if ``cubroker keep`` started it in advance; return the stored descriptors.

    Before that it imports what a broker imports, and touches neither devices nor files of the broker. In any other
    process this function returns None immediately. Arguments are those of :func:`configure`, which is called next.

    Raises:
        SystemExit: this process is not needed any more.
    """
    waiting = Standby.of(os.environ)
    if waiting is None:
        return None
    hardening.hide()
    import_module("concurrent.futures.thread")
    # Failures are reported when this process takes over: their causes may be mended by then.
    with suppress(CubrokerError, ImportError, OSError, ValueError):
        config = ConfigSources(file, options, os.environ, resource.getrlimit(resource.RLIMIT_NOFILE)[1]).read().config
        prepare(config.devices)
        if config.metrics.listen is not None:
            monitoring.obstacle()
    return waiting.wait(gateway_code())


def serve(
    current: Current,
    ready: Callable[[], None] | None = None,
    handed: Mapping[str, Sequence[int]] | None = None,
    gateway: GatewayStart | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status; SIGHUP reads the configuration again, if it is a file.

    After the signal, the broker ends when no lease is left on memory that ends with it, at a second signal, or after
    the configured time. With SIGUSR1 the store stays for the next broker, so leases on durable memory do not count.

    Args:
        current: the configuration.
        ready: called once, when the broker serves clients and has told the service manager so; it must not block.
        handed: what :func:`stand_by` returned.
        gateway: the first gateway, if it was started in advance.

    Raises:
        CubrokerError: the broker cannot start, or another one serves in its directory.
    """
    config = current.config
    logs.adjust(config.log.format, config.log.level)
    hardening.return_freed_blocks()
    with ExitStack() as undo:
        fds = undo.enter_context(inherited(os.environ, handed))
        _check_room(fds.store)
        place = Directory(config.directory, config.access, fds.listening, fds.own, lasting=fds.lasting)
        undo.enter_context(place)
        return asyncio.run(_run(place, current, fds, ready, gateway))


def _check_room(store: Store | None) -> None:
    """Raise ``Invalid`` if a store has no room for what every broker stores and for a single session."""
    least = len(OURS) + SESSION_FDS
    if store is not None and store.limit < least:
        raise Invalid(
            f"the store takes {store.limit} descriptors, and a broker needs {least} at least, {len(OURS)} of its own"
            f" and {SESSION_FDS} for each session: raise FileDescriptorStoreMax= and CUBROKER_STORE of its unit, or"
            f" `cubroker keep --descriptors`"
        )


class Signals:
    """The received signals that end a broker, in order, and the one that has it read its configuration again.

    A stop signal that is ignored stays ignored: shells start background work like that, and so does nohup. One that is
    blocked is unblocked: the parent left it so by mistake, and nothing could stop the broker. SIGHUP ends the broker,
    too, unless it ``reloads`` the configuration.
    """

    def __init__(self, *, reloads: bool) -> None:
        loop = asyncio.get_running_loop()
        self.stops: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self.reload = asyncio.Event()
        if reloads:
            loop.add_signal_handler(signal.SIGHUP, self.reload.set)
        for number in (*ENDING, HANDING_OVER) if reloads else (*ENDING, HANDING_OVER, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.stops.put_nowait, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, HANDING_OVER, signal.SIGHUP))


class ServiceStatus:
    """The broker's reports to the service manager, sent from its event loop, so that they stop if the loop hangs.

    ``notifier`` is None without a service manager. ``standby`` says whether the next broker can stand by.
    """

    def __init__(self, notifier: AsyncNotifier | None, broker: Broker, *, standby: bool = False) -> None:
        self._notifier = notifier
        self._also = (f"{SPEAKS}=1",) if standby else ()
        self._broker = broker
        self._sent: str | None = ""  # the status; None: that the broker serves is to be sent, with its status
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """Report that the broker serves clients; from now on, also report its status."""
        if self._notifier:
            self._sent = None
            self._beat(self._notifier)

    def reloading(self) -> None:
        """Report that the broker reads its settings again; :meth:`ready` reports the end of that."""
        if self._notifier:
            self._notifier.say(sd_notify.reloading())

    def draining(self, seconds: float) -> None:
        """Report that the broker begins to end within ``seconds``, and its status until then."""
        if self._notifier:
            self._stopping = True
            self._sent = self._sent or ""
            self._notifier.say(sd_notify.stopping(seconds + LAST_SECONDS))
            self._beat(self._notifier)

    def stopping(self) -> None:
        """Report that the broker ends, and report nothing after that."""
        if self._timer:
            self._timer.cancel()
        if self._notifier and not self._stopping:
            self._notifier.say(sd_notify.stopping(LAST_SECONDS))

    def _beat(self, notifier: AsyncNotifier) -> None:
        if self._timer:
            self._timer.cancel()
        interval = notifier.manager.watchdog_interval
        # First, so that this sign of life is not the last one if the rest fails, say for want of memory.
        self._timer = asyncio.get_running_loop().call_later(
            min(interval or STATUS_PERIOD, STATUS_PERIOD), self._beat, notifier
        )
        if interval:
            notifier.say(sd_notify.WATCHDOG, "life")
        if (status := self._broker.status()) != self._sent:
            if self._sent is None:
                notifier.say(sd_notify.ready(status, *self._also))
            else:
                notifier.say(sd_notify.status(status), "status")
            self._sent = status  # last: without memory to say it, it is said at the next beat


class Parts(NamedTuple):
    """The parts of a running broker that its end and a new configuration need."""

    queue: EventQueue
    broker: Broker
    devices: tuple[Device, ...]
    checks: MappedChecks

    def reconfigure(self, config: Config) -> None:
        """Apply the settings that can change while the broker runs.

        Raises:
            Invalid: a budget does not fit its device, or its device is not served; nothing has changed.
        """
        budgets = {budget.uuid: budget.budget for budget in device_budgets(self.devices, config.budget)}
        self.queue.put(Reconfigured(config.policy, config.limits, budgets))
        self.checks.adjust(config.mapped_check)
        logs.adjust(config.log.format, config.log.level)


async def _run(
    place: Directory,
    current: Current,
    fds: InheritedFds,
    ready: Callable[[], None] | None,
    gateway: GatewayStart | None,
) -> int:
    """Start, serve until the first stop signal, and take everything down again. A signal may also end the start."""
    signals = Signals(reloads=current.sources.file is not None)
    async with AsyncExitStack() as undo:
        stop = asyncio.create_task(signals.stops.get())
        starting = asyncio.create_task(_start(undo, place, current.config, fds, gateway))
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            parts = starting.result()
            service = ServiceStatus(fds.notifier, parts.broker, standby=fds.standby)
            reloading = asyncio.create_task(_reload(current, signals, parts, service))
            undo.callback(reloading.cancel)
            service.ready()  # before any output: the service manager is told even if the log has no reader
            if ready:
                ready()
            log.info("serving on %s", place.path)
            await _end(parts.broker, service, current, signals, with_store=await stop is not HANDING_OVER)
        else:
            starting.cancel()
            await asyncio.wait((starting,))
        log.info("shutting down")
    return 0


async def _end(broker: Broker, service: ServiceStatus, current: Current, signals: Signals, *, with_store: bool) -> None:
    """Wait until no lease is left on memory that ends with the broker, for the configured time or until a stop signal.

    ``with_store`` says whether the store, if there is one, ends too.
    """
    if broker.holds(with_store=with_store) and (limit := current.config.drain):
        log.info("told to end: waiting up to %g s for leases to end; a second signal ends the wait", limit)
        broker.drain(with_store=with_store)
        service.draining(limit)
        waits = [asyncio.create_task(broker.drained()), asyncio.create_task(signals.stops.get())]
        await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
    service.stopping()


async def _reload(current: Current, signals: Signals, parts: Parts, service: ServiceStatus) -> None:
    """Read the configuration again at every SIGHUP."""
    while await signals.reload.wait():
        signals.reload.clear()
        try:
            try:
                service.reloading()
                await current.reload(parts.reconfigure)
            finally:
                service.ready()
        # A mistake in this must not end the broker either, and with it the memory of all clients.
        except Exception:
            log.exception("the broker failed at reading its configuration again")


async def _start(
    undo: AsyncExitStack, place: Directory, config: Config, fds: InheritedFds, begun: GatewayStart | None
) -> Parts:
    """Start all parts; ``undo`` takes down the parts that were started, even if a later one fails."""
    queue = EventQueue()
    gateway = GatewayProcess(place.requests, place.path / REQUEST_SOCKET, begun)
    undo.push_async_callback(gateway.stop)
    gateway.start()  # it starts while the driver loads
    parts = await _build(undo, queue, gateway, config, fds.store)
    await gateway.connect(queue)
    await asyncio.to_thread(fds.keep, place.fresh)
    if fds.store and fds.store.inherited:
        # Requests of the earlier broker's sessions may have been lost with its gateway.
        parts.broker.sessions.notify_all(GatewayChanged())
    listener = Listener(place.sessions, queue)
    undo.callback(listener.close)
    listener.open()
    return parts


async def _build(
    undo: AsyncExitStack, queue: EventQueue, gateway: GatewayProcess, config: Config, store: Store | None
) -> Parts:
    """Return a broker, which has taken over from an earlier one if there was one; ``undo`` closes it and its parts."""
    driver = await asyncio.to_thread(_load, config.devices)
    memory: dict[str, DeviceAllocator] = {}
    undo.callback(_close, driver, memory)
    with readable():
        items = dict(store.journal.items()) if store else {}
        ledger = _ledger(driver, config, store, items)
        session_log = SessionLog(items if store.inherited else None) if store else None
    if store:
        store.attend()
    watch = FileWatch() if driver.host else NvmlWatch()
    absent = dict.fromkeys(held.device for held in ledger.held_memory() if not held.served)  # to free it
    for device in (*driver.devices, *(Device(NO_INDEX, uuid, "not served", 0) for uuid in absent)):
        memory[device.uuid] = DeviceAllocator(driver, device, queue, store, watch)
        undo.callback(memory[device.uuid].close)
    multicast = MulticastBinder(driver, memory, queue)
    undo.callback(multicast.close)
    observer = _observe(undo, config, ledger, store, session_log)
    checks = MappedChecks(queue, watch, config.mapped_check)
    undo.callback(checks.close)
    broker = Broker(queue, ledger, memory, multicast, driver, gateway, observer, checks, store, session_log)
    undo.callback(broker.close, "the broker is shutting down")
    if store is None or session_log is None:
        log.warning("there is no store: if this broker dies, its pools and the record of leases go with it")
    else:
        with readable():
            restore(broker, ledger, memory, store, session_log, items)
    return Parts(queue, broker, driver.devices, checks)


def _close(driver: Driver, memory: Mapping[str, DeviceAllocator]) -> None:
    """Close the driver, unless memory is in use.

    Memory would end with the driver's context, so in that case the context stays until the process ends.
    """
    if not any(each.leaves for each in memory.values()):
        driver.close()


def _observe(
    undo: AsyncExitStack, config: Config, ledger: Ledger, store: Store | None, session_log: SessionLog | None
) -> LedgerObserver:
    """Return the ledger's observer, and serve metrics if the configuration says so; ``undo`` ends that.

    If a package that metrics need is not installed, the log gets an error, and the broker serves without metrics.
    """
    if config.metrics.listen is None:
        return LedgerObserver(ledger)
    if why := monitoring.obstacle():
        log.error("there are no metrics: %s", why)
        return LedgerObserver(ledger)
    # Imported only if metrics are on: the import takes a twentieth of a second and 5 MiB.
    from cubroker.server.monitoring import http
    from cubroker.server.monitoring.metrics import BrokerCounters

    counters = BrokerCounters()
    gauges = BrokerGauges(session_log.restarts, len(OURS), store.limit) if store and session_log else None
    observer = LedgerObserver(ledger, counters, gauges)
    if (thread := http.start(config.metrics, observer, counters)) is not None:
        undo.push_async_callback(asyncio.to_thread, thread.close)
    return observer


def _ledger(driver: Driver, config: Config, store: Store | None, items: Mapping[bytes, bytes]) -> Ledger:
    """Return the ledger of the devices, restored from an earlier broker's if that left one."""
    budgets = [_probed(driver, budget) for budget in device_budgets(driver.devices, config.budget)]
    if store is None:
        return Ledger(budgets, os.geteuid(), config.limits, config.policy)
    room = store.limit - len(OURS)
    return Ledger.restore(budgets, os.geteuid(), config.limits, config.policy, items.items(), room)


def _probed(driver: Driver, budget: Budget) -> Budget:
    """Return a budget with what its device supports."""
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
