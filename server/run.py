"""Running a broker: from a directory and a text that names devices to a process that serves, and back."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from cubroker.driver import Device, Driver, DriverError, load
from cubroker.protocol.directory import REQUEST_SOCKET
from cubroker.protocol.errors import DeviceFailure, Invalid
from cubroker.server import config as configuration
from cubroker.server.assembly import Assembly
from cubroker.server.broker import Broker
from cubroker.server.config import Budgets, Config
from cubroker.server.devices import DeviceMemory
from cubroker.server.directory import Directory
from cubroker.server.events import Event
from cubroker.server.greeting import Door
from cubroker.server.ledger import Budget, Ledger
from cubroker.server.quantities import parse_budget
from cubroker.server.supervisor import Supervisor

log = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that tell a broker to end."""


def configure(path: Path | None, *, devices: str | None = None, budget: str | None = None) -> Config:
    """Return the configuration of a file, or what holds without one; what is given here comes before the file.

    Raises:
        Invalid: the file cannot be read, or says what makes no sense.
    """
    descriptors = _raise_descriptors()
    config = configuration.default(descriptors) if path is None else configuration.read(path, descriptors)
    return replace(config, devices=devices or config.devices, budget=budget or config.budget)


def serve(
    directory: Path,
    devices: str,
    budget: Budgets | None = None,
    ready: Callable[[], None] | None = None,
    config: Config | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and return the exit status.

    Args:
        directory: where to serve; made if it is not there.
        devices: ``cuda``, ``cuda:0,1``, ``host:2`` or ``host:2@64MiB``.
        budget: what the broker may use of each device: ``10GiB``, or a share; by default as ``config`` says.
        ready: called once when clients are served.
        config: who may connect and what users may do and have; its directory and devices do not count.

    Raises:
        CubrokerError: it cannot start, or another broker serves there.
    """
    config = config or configure(None)
    config = replace(config, devices=devices, budget=budget or config.budget)
    with Directory(directory, config.access) as place:
        return asyncio.run(_serve(place, config, ready))


async def _serve(place: Directory, config: Config, ready: Callable[[], None] | None) -> int:
    stop = asyncio.create_task(_told_to_stop())
    async with AsyncExitStack() as undo:
        starting = asyncio.create_task(_start(undo, place, config))
        await asyncio.wait((starting, stop), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            log.info("serving on %s", place.path)
            if ready:
                ready()
            await stop
        else:
            starting.cancel()
            await asyncio.wait((starting,))
        log.info("shutting down")
    return 0


async def _told_to_stop() -> None:
    """Return at a signal to end. One that is ignored stays so: shells start background work like that, and nohup.

    One that is blocked does not: whoever started this process left that by mistake, and nobody could stop it.
    """
    told = asyncio.Event()
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, told.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    await told.wait()


async def _start(undo: AsyncExitStack, place: Directory, config: Config) -> None:
    """Start everything; ``undo`` takes it down again, however far this came."""
    supervisor = Supervisor(place.requests, place.path / REQUEST_SOCKET)
    undo.push_async_callback(supervisor.stop)
    supervisor.start()  # it comes up while the driver does
    broker = await _assemble(undo, supervisor, config)
    await supervisor.connect(broker.receive, broker.announce_gateway)
    door = Door(place.sessions, broker.admit)
    undo.callback(door.close)
    door.open()


async def _assemble(undo: AsyncExitStack, supervisor: Supervisor, config: Config) -> Broker:
    """Return a broker over the devices; ``undo`` says farewell, frees their memory and closes them."""
    loop = asyncio.get_running_loop()
    driver = await asyncio.to_thread(_load, config.devices)
    undo.callback(driver.close)
    each = int(driver.host)  # an emulated allocation is a file
    budgets = [replace(budget, descriptors=each) for budget in _grant(driver.devices, config.budget)]
    memory: dict[str, DeviceMemory] = {}
    ledger = Ledger(budgets, os.geteuid(), policy=config.policy)

    def report(event: Event) -> None:
        loop.call_soon_threadsafe(broker.handle, event)

    for device in driver.devices:
        memory[device.uuid] = DeviceMemory(driver, device, report)
        undo.callback(memory[device.uuid].close)
    assembly = Assembly(driver, memory, report)
    undo.callback(assembly.close)
    broker = Broker(ledger, memory, assembly, driver.spec, supervisor.send)
    log.warning("there is no store: if this broker dies, its pools and the record of leases go with it")
    undo.callback(broker.close, "the broker is shutting down")
    return broker


def _load(devices: str) -> Driver:
    try:
        return load(devices)
    except ValueError as error:
        raise Invalid(f"cannot use devices {devices!r}: {error}") from None
    except DriverError as error:
        raise DeviceFailure(f"cannot use devices {devices!r}: {error}") from None


def _grant(devices: Sequence[Device], budgets: Budgets) -> list[Budget]:
    """Return the budget of every device; raises ``Invalid`` for one that there is not."""
    if not isinstance(budgets, Mapping):
        return [_grant_one(device, budgets) for device in devices]
    known = {configuration.OTHERS, *(name for device in devices for name in _names(device))}
    for name in budgets:
        if name not in known:
            there = ", ".join(" or ".join(_names(device)) for device in devices)
            raise Invalid(f"a budget for device {name!r}, which is not served; there are {there}, and default")
    usual = budgets.get(configuration.OTHERS, configuration.DEFAULT_BUDGET)
    return [_grant_one(device, next((budgets[n] for n in _names(device) if n in budgets), usual)) for device in devices]


def _names(device: Device) -> tuple[str, str]:
    """What a device may be called in the configuration."""
    return device.uuid, str(device.index)


def _grant_one(device: Device, budget: str) -> Budget:
    granted = parse_budget(budget, device.total)
    log.info(
        "device %d: %s, %s, budget %d MiB of %d MiB",
        device.index,
        device.name,
        device.uuid,
        granted >> 20,
        device.total >> 20,
    )
    return Budget(device.index, device.uuid, device.name, device.total, granted)


def _raise_descriptors() -> int:
    """Allow as many open files as the system does, and return how many: a session takes two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
