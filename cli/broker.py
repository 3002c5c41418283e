"""``cubroker ls``, ``show``, ``clients``, ``devices``, ``topology``, ``story``, ``ping``, ``retire`` and ``drain``.

Each is a question or an order to a running broker, whose answer it prints as text or as JSON. ``ping`` opens no
session: ZeroMQ and the driver are imported by the commands that use them, so that a probe does not load them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cubroker.cli import format, options
from cubroker.client.transport import handshake
from cubroker.protocol.errors import CubrokerError, DeviceFailure, NotFound, Retired, TimedOut, Unavailable
from cubroker.protocol.fields import MAX_WAIT
from cubroker.protocol.layout import Layout, TensorIndex, TensorSpec
from cubroker.protocol.messages import ENDING, VMM, Describe, Description, DigestList
from cubroker.protocol.status import ClientInfo, DeviceInfo, PoolInfo, SharingInfo

if TYPE_CHECKING:
    from cubroker.client import Broker
    from cubroker.driver import Device, Driver
    from cubroker.driver.peer_access import Link

SHORT = len("GPU-01234567")
"""The fewest characters of a UUID that are shown."""

ANSWER = 30.0
"""Seconds that a broker has to describe a version."""

FEW = 6
"""Devices whose columns have a word in their titles; more have their index alone, so that 16 of them fit."""

LEGEND = (
    "A row's device reads and writes the memory of a column's: a number is the link's performance rank, 0 the fastest,",
    "* says that all atomic operations go over it, + that some do; no says that memory there is out of reach.",
)

PING_SECONDS = 5.0
"""Seconds that ``drain`` gives a broker to answer whether it lends."""

LOOK = 0.5
"""Seconds between two checks of the leases by ``drain``."""


# -- pools and versions --------------------------------------------------------------------------------


LS_SPARE = ("MODE", "TENSORS", "SHARED", "OWNER", "DEVICES", "LEASES", "STATE")
"""The columns of ``ls`` that a narrow terminal leaves out, in this order."""

POOL_ORDERS: dict[str, Callable[[PoolInfo], Any]] = {
    "name": lambda pool: 0,
    "size": lambda pool: -pool.nbytes,
    "memory": lambda pool: -pool.memory,
    "leases": lambda pool: -pool.leases,
    "tensors": lambda pool: -pool.tensors,
    "state": lambda pool: pool.state,
    "owner": lambda pool: format.user(pool.owner),
}
"""The keys that ``ls`` sorts by; of figures the largest comes first. Equal versions stay in the order of names."""


@click.command("ls")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, shell_complete=options.complete_pools)
@options.sort(POOL_ORDERS, "name")
@options.reverse
@options.as_json
@options.directory
def ls(directory: Path, patterns: tuple[str, ...], sort: str, reverse: bool, as_json: bool) -> None:
    """List every live version of every pool, or of those with a name, or NAME@VERSION, that matches a PATTERN.

    SIZE is what each device holds, or all of them together if the pool is sharded; DEVICES are the indexes that
    `cubroker devices` shows, or "gone": the broker does not serve it any more, and the pool was lost with it. SHARED is
    the memory of an update that an older version in the list has, too, on all devices: it is there once.
    A terminal that is too narrow gets fewer columns.
    """
    with options.connect(directory) as broker:
        everything, devices = broker.pools(), broker.devices()
    chosen = [pool for pool in everything if options.matches(patterns, pool.name, f"{pool.name}@{pool.version}")]
    pools = sorted(chosen, key=POOL_ORDERS[sort])
    pools = pools[::-1] if reverse else pools
    if as_json:
        format.document(pools)
    elif pools:
        indexes = {device.uuid: device.index for device in devices}
        columns: dict[str, Callable[[PoolInfo], str]] = {
            "~POOL": lambda pool: f"{pool.name}@{pool.version}",
            "STATE": lambda pool: pool.state,
            ">SIZE": lambda pool: format.size(pool.nbytes),
            ">TENSORS": lambda pool: str(pool.tensors),
            "DEVICES": lambda pool: format.places(indexes, pool.devices) + " sharded" * pool.sharded,
            ">LEASES": lambda pool: str(pool.leases),
            "OWNER": lambda pool: format.user(pool.owner),
            "MODE": lambda pool: f"{pool.mode:03o}",
        }
        if any(pool.shared for pool in pools):
            columns |= {">SHARED": lambda pool: format.size(pool.shared) if pool.shared else "none"}
        format.print_table(pools, columns, LS_SPARE)
    elif everything and patterns:
        format.say(f"No pool matches {_quoted(patterns)}.{_nearest(patterns, everything)}")
    else:
        format.say_sentence("No pools: nothing has been loaded yet, or everything is retired.")


def _quoted(patterns: Sequence[str]) -> str:
    return " or ".join(map(repr, patterns))


def _nearest(patterns: Sequence[str], pools: Sequence[PoolInfo]) -> str:
    names = dict.fromkeys(pool.name for pool in pools)
    near = [close for pattern in patterns for close in get_close_matches(pattern.strip("*?"), names)]
    return f" Did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


@click.command("show")
@click.argument("reference", metavar="NAME[@VERSION]", type=options.reference, shell_complete=options.complete_versions)
@options.as_json
@options.directory
def show(reference: options.Reference, directory: Path, as_json: bool) -> None:
    """Show one version, by default the current one, which processes hold it, and its tensors.

    PLACE is the allocation and the byte in it where a tensor begins; DEVICE, of a sharded version, the index that
    `cubroker devices` shows.
    """
    from cubroker.client.transport.requests import expect

    with options.connect(directory) as broker:
        asked = broker.requests.submit(Describe(reference.name, reference.version or 0))
        described = expect(asked.result(ANSWER), Description)
        info, layout, sharing = described.info, TensorIndex.decode(described.layout).layout, described.shared
        places = tuple(info.devices[index] for index in described.plan or ())
        devices, digests = broker.devices(), None
        if as_json and info.digest:
            with suppress(NotFound, Retired):  # it may have ended since it was described
                digests = broker.digests(info.name, info.version)
        clients = format.other_clients(broker.clients(), broker.session)
    (holders,) = format.holders([info], clients)
    if as_json:
        added = {"layout": _describe_layout(layout, places), "digests": _digests(digests)}
        held = [_describe_holder(client, info) for client in holders]
        format.document(format.plain(info) | added | {"shared_with": sharing, "holders": held})
        return
    for line in (*_heading(info, layout, sharing, devices), *_held_by(info, holders, time.time())):
        format.say_sentence(line)
    format.say("")
    columns: dict[str, Callable[[TensorSpec], str]] = {
        "~TENSOR": lambda tensor: tensor.name,
        "DTYPE": lambda tensor: tensor.dtype,
        "SHAPE": lambda tensor: "x".join(map(str, tensor.shape)) or "scalar",
        ">SIZE": lambda tensor: format.size(tensor.nbytes),
        ">PLACE": lambda tensor: f"{tensor.allocation}:{tensor.offset}",
    }
    if places:
        indexes = {device.uuid: device.index for device in devices}
        columns |= {">DEVICE": lambda tensor: format.place(indexes, places[tensor.allocation])}
    format.print_table(layout.tensors, columns, ("PLACE", "DEVICE", "DTYPE"))


def _describe_holder(client: ClientInfo, info: PoolInfo) -> dict[str, object]:
    since = [lease.held_since for lease in format.leases_on(info, [client])]
    process = {"session": client.session, "pid": client.pid, "uid": client.uid, "state": client.state}
    return process | {"process": format.plain(client.process), "leases": len(since), "held_since": since[0]}


def _held_by(info: PoolInfo, holders: Sequence[ClientInfo], now: float) -> Iterator[str]:
    """Yield a line for each process that holds a version, and one for those that this user may not see."""
    for client in holders:
        began = _describe_holder(client, info)["held_since"]
        since = f" for {format.since(now - began)}" if isinstance(began, float) else ""
        detached = ", detached" if client.state == "detached" else ""
        yield format.printable(f"held{since} by {format.client_label(client)}{detached}")
    if (unseen := info.leases - len(format.leases_on(info, holders))) > 0:
        yield f"held by processes of other users: {format.count(unseen, 'lease')}"


def _describe_layout(layout: Layout, places: Sequence[str]) -> dict[str, object]:
    """Return a layout for JSON; a replicated tensor's ``device`` is None."""
    tensors = [
        format.plain(tensor) | {"nbytes": tensor.nbytes, "device": places[tensor.allocation] if places else None}
        for tensor in layout.tensors
    ]
    return {"allocations": layout.allocations, "tensors": tensors}


def _digests(found: DigestList | None) -> dict[str, list[str | None]] | None:
    """Return the digest of each allocation by device: None for an allocation elsewhere, and if there are no digests."""
    if found is None or found.digests is None:
        return None
    rows = zip(found.devices, found.digests.replicas, strict=True)
    return {uuid: [digest.hex() or None for digest in row] for uuid, row in rows}


def _heading(
    info: PoolInfo, layout: Layout, sharing: Sequence[SharingInfo], devices: Sequence[DeviceInfo]
) -> list[str]:
    from cubroker.driver.device_names import describe

    shared = f"shared by {info.share}"
    if info.share == VMM and info.opened_by:
        shared += f", opened by {info.opened_by}"
    if info.writable:
        shared += ", writable by its readers"
    elif not info.protected:
        shared += ", not protected from writes by its readers"
    if info.durable:
        shared += ", durable"
    held = format.count(len(layout.allocations), "allocation")
    leases = format.count(info.leases, "lease")
    known = {device.uuid: f"device {describe(device)}" for device in devices}
    lines = [
        f"{info.name}@{info.version}: {info.state}, {leases}, owner {format.user(info.owner)}",
        f"mode {info.mode:03o}, group {format.group(info.group)}",
        f"{format.count(info.tensors, 'tensor')}, {format.size(info.nbytes)} in {held}, {shared}",
    ]
    if sharing:
        versions = ", ".join(f"{each.version} ({format.size(each.nbytes)})" for each in sharing)
        lines.append(f"has {format.size(info.memory)} of device memory, in part shared with version {versions}")
    if info.state == "lost":
        lines.append(f"lost: {info.why}")
    elif info.how:
        lines.append(f"written to all devices at once by {info.how}: {info.why}")
    if info.digest:
        lines.append(f"sealed with digests by {info.digest}: see `cubroker verify --digest`")
    part = "sharded, in part " if info.sharded else ""
    return lines + [f"{part}on {known.get(uuid, f'device {uuid}, which is gone')}" for uuid in info.devices]


@click.command("retire")
@click.argument("reference", metavar="NAME[@VERSION]", type=options.reference, shell_complete=options.complete_versions)
@options.as_json
@options.directory
def retire(reference: options.Reference, directory: Path, as_json: bool) -> None:
    """Take a version, by default the current one, out of service.

    No process can attach to it any more. Its holders keep it, and its memory is freed with the last lease.
    """
    with options.connect(directory) as broker:
        retirement = broker.retire(reference.name, reference.version)
    if as_json:
        format.document({"name": reference.name, "version": retirement.version, "leases": retirement.leases})
        return
    fate = f"with the last of {format.count(retirement.leases, 'lease')}" if retirement.leases else "now"
    title = f"{reference.name}@{retirement.version}{options.where()}"
    format.say(f"{title} is retired; its memory is freed {fate}.")


# -- clients, and the last events of a pool or a session -----------------------------------------------


@click.command("clients")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, shell_complete=options.complete_pools)
@options.sort(format.CLIENT_ORDERS, "session")
@options.reverse
@options.as_json
@options.directory
def clients(directory: Path, patterns: tuple[str, ...], sort: str, reverse: bool, as_json: bool) -> None:
    """List this user's processes that use the broker, and what they hold; this command's own session is left out.

    With a PATTERN they are those that hold a pool of such a name. Administrators of the broker see those of all users.
    A client is detached when its connection is gone and its process is not: it may still have memory mapped, so its
    leases stay until it ends.

    PROCESS is what the process calls itself, CONTAINER its container or the unit that it runs in, AGE how long it has
    run, and HELD how long it has held the oldest of its leases. ? stands for what is unknown, null in --json.

    Where a process has memory of the broker's mapped or open without a lease, BEYOND LEASES says how much. The broker
    cannot see that of every process. A terminal that is too narrow gets fewer columns.
    """
    with options.connect(directory) as broker:
        everything = format.other_clients(broker.clients(), broker.session)
    chosen = sorted((client for client in everything if _holds(client, patterns)), key=format.CLIENT_ORDERS[sort])
    chosen = chosen[::-1] if reverse else chosen
    if as_json:
        format.document(chosen)
    elif chosen:
        columns = format.client_columns(chosen, time.time())
        format.print_table(chosen, columns, format.CLIENT_SPARE)
    elif everything:
        format.say(f"No client holds a pool that matches {_quoted(patterns)}.")
    else:
        format.say_sentence("No clients: no process is attached, or none of this user.")


def _holds(client: ClientInfo, patterns: Sequence[str]) -> bool:
    names = [name for lease in client.leases for name in (lease.pool, f"{lease.pool}@{lease.version}")]
    return options.matches(patterns, *names, *client.locks)


def _subject(value: str) -> str | int:
    """Return the number of a session, or the name of a pool without its version, or fail as wrong usage."""
    return int(value) if re.fullmatch(r"[0-9]{1,15}", value, re.ASCII) else options.reference(value).name


@click.command("story")
@click.argument("subject", metavar="NAME|SESSION", type=_subject, shell_complete=options.complete_pools)
@options.as_json
@options.directory
def story(subject: str | int, directory: Path, as_json: bool) -> None:
    """Tell the last events of a pool, or of the session that a number names, in the order in which they happened.

    Those of a pool are of all its versions: NAME@VERSION is the same as NAME. What has ended is told of for a while. A
    number is that of a session, although a pool could be named by one.
    """
    with options.connect(directory) as broker:
        lines = broker.story(subject)
    if as_json:
        format.document(lines)
        return
    for line in lines:
        when = datetime.fromtimestamp(line.time).astimezone()  # the local time zone
        format.say(f"{when:%Y-%m-%d %H:%M:%S}  {format.printable(line.text)}")


# -- devices -------------------------------------------------------------------------------------------


@click.command("devices")
@options.as_json
@options.directory
def devices(directory: Path, as_json: bool) -> None:
    """List the broker's devices.

    BUDGET is what pools may take of TOTAL; PROMISED is granted and not allocated yet. A UUID is shown as far as it is
    unlike the others, which is as far as --device needs it.
    """
    with options.connect(directory) as broker:
        devices = broker.devices()
    if as_json:
        format.document(devices)
    else:
        length = _distinct([device.uuid for device in devices])
        columns: dict[str, Callable[[DeviceInfo], str]] = {
            ">INDEX": lambda device: str(device.index),
            "UUID": lambda device: device.uuid[:length],
            "~NAME": lambda device: device.name,
            ">TOTAL": lambda device: format.size(device.total),
            ">BUDGET": lambda device: format.size(device.budget),
            ">ALLOCATED": lambda device: format.size(device.allocated),
            ">PROMISED": lambda device: format.size(device.promised),
        }
        format.print_table(devices, columns, ("PROMISED", "TOTAL", "UUID", "NAME"))


def _distinct(uuids: Sequence[str]) -> int:
    """Return how many characters tell every UUID from the others, at least a GPU's first group."""
    longest = max(map(len, uuids), default=0)
    return next((n for n in range(SHORT, longest) if len({uuid[:n] for uuid in uuids}) == len(uuids)), longest)


@click.command("topology")
@options.as_json
@options.directory
def topology(directory: Path, as_json: bool) -> None:
    """Show which of the broker's devices reach each other's memory directly, and how well.

    The devices are those that this process sees too; their indexes are its own. A worker on one device can attach to a
    pool on another that it reaches.
    """
    from cubroker.driver import DriverError

    with options.connect(directory) as broker:
        known = {device.uuid for device in broker.devices()}
        driver = broker.driver
        devices = [device for device in driver.devices if device.uuid in known]
        if not devices:
            raise NotFound("this process sees none of the broker's devices; what does CUDA_VISIBLE_DEVICES say?")
        uuids = {device.index: device.uuid for device in devices}
        try:
            links = [link for link in driver.peers.matrix() if {link.device, link.peer} <= uuids.keys()]
            if as_json:
                format.document([_describe_link(driver, uuids, link) for link in links])
            else:
                _print_links(devices, links)
        except DriverError as error:
            raise DeviceFailure(f"the links between devices: {error}") from error


def _describe_link(driver: Driver, uuids: Mapping[int, str], link: Link) -> dict[str, object]:
    atomics = driver.peers.atomics(link.device, link.peer)
    told: dict[str, Any] = format.plain(link)
    ends = {"from": uuids[told.pop("device")], "to": uuids[told.pop("peer")]}
    return {**ends, **told, "atomics": {operation: sorted(forms) for operation, forms in atomics.items()}}


def _print_links(devices: Sequence[Device], links: Sequence[Link]) -> None:
    """Print a row and a column for each device; without names if the terminal is too narrow for them."""
    cells = {(link.device, link.peer): _cell(link) for link in links}
    few = len(devices) <= FEW
    title = "FROM" if few else "FROM, TO"
    columns: dict[str, Callable[[Device], str]] = {
        f">TO {device.index}" if few else f">{device.index}": lambda one, to=device.index: cells.get(  # type: ignore[misc]
            (one.index, to), "-"
        )
        for device in devices
    }
    names: dict[str, Callable[[Device], str]] = {title: lambda one: f"{one.index} {one.name}"}
    numbers: dict[str, Callable[[Device], str]] = {f">{title}": lambda one: str(one.index)}
    format.print_table(devices, (names if format.fits(devices, names | columns) else numbers) | columns)
    format.say("")
    for line in LEGEND if format.terminal_width() is None else [" ".join(LEGEND)]:
        format.say_sentence(line)


def _cell(link: Link) -> str:
    if not link.access:
        return "no"
    return f"{link.performance_rank}" + ("*" if link.native_atomics else "+" if link.only_partial_atomics else "")


# -- the broker itself ---------------------------------------------------------------------------------


@click.command("ping")
@click.option("--live", is_flag=True, help="Succeed also while it lends nothing new, or is being started again.")
@options.seconds("--timeout", "How long it may take to answer.", default=5.0, least=0.001)
@options.as_json
@options.directory
def ping(directory: Path, live: bool, timeout: float, as_json: bool) -> int:
    """Ask the broker whether it serves, without a session; status 3 if there is none, 1 if it lends nothing new.

    For probes: without --live that of readiness. With it that of liveness, which fails only where no process holds the
    broker's socket any more, so that a probe does not end a keeper which starts the broker again.
    """
    began = time.perf_counter()
    seconds = None
    try:
        obstacle = handshake.ping(directory, timeout)
        seconds = time.perf_counter() - began
    except handshake.Silent as error:
        if not live:
            raise
        obstacle = error.message
    if as_json:
        format.document({"ready": not obstacle, "seconds": seconds, "obstacle": obstacle or None})
    elif seconds is None:
        format.say(f"{directory} is held for the broker: {obstacle}")
    elif obstacle:
        took = format.duration(seconds)
        format.say(f"The broker on {directory} answers in {took}, and lends nothing new: {obstacle}")
    else:
        format.say(f"The broker on {directory} answers in {format.duration(seconds)}.")
    return options.REFUSED if obstacle and not live else 0


@click.command("drain")
@click.option(
    "--wait",
    type=options.Seconds(min=0, max=MAX_WAIT),
    metavar="SECONDS",
    help="How long to wait at most.  [default: as long as it takes]",
)
@click.option("--off", is_flag=True, help="Lend again.")
@options.directory
def drain(directory: Path, wait: float | None, off: bool) -> None:
    """Have the broker lend nothing new, tell its clients to give back what they hold, and wait until they have.

    The status is 1 if something is still held when the time is up. The broker goes on draining after this command,
    until --off or its end; with a store the next broker goes on like that. For administrators: root, the user who runs
    the broker, and those in its setting admins.
    """
    if off and wait is not None:
        raise click.UsageError("--off ends the draining and waits for nothing: leave out --wait")
    with options.connect(directory) as broker:
        broker.drain(on=not off)
        if off:
            format.say(f"The broker{options.where()} lends again.")
            return
        if where := options.where():  # before the wait, which may be long
            format.note(f"the broker{where} lends nothing new")
        _wait_until_free(broker, inf if wait is None else wait)
        until = _until(broker)
    format.say(f"Nothing is held any more. The broker lends nothing {until}")


def _wait_until_free(broker: Broker, seconds: float) -> None:
    """Return when no other client has a lease, and print until then who holds what."""
    deadline = time.monotonic() + seconds
    told: dict[str, str] = {}
    while True:
        holders = _holders(broker)
        for who in told.keys() - holders.keys():
            format.say(f"{who}: holds nothing any more")
        for who, what in holders.items():
            if told.get(who) != what:
                format.say(f"{who}: holds {what}")
        told = holders
        if not told:
            return
        left = deadline - time.monotonic()
        if left <= 0:
            who = format.count(len(told), "client")
            reason = f"{who} still held something after {seconds:g} s; the broker still lends nothing new,"
            raise TimedOut(f"{reason} {_until(broker)}")
        broker.wait_draining(min(LOOK, left), over=bool(broker.draining))
        if broker.draining:
            continue
        # The notice of draining may still be on its way, or draining ended before this process read it: ask.
        with suppress(Unavailable):  # during a restart there is no broker for a moment
            if not handshake.ping(broker.directory, PING_SECONDS):
                raise CubrokerError("another process has had the broker lend again, so there is nothing to wait for")


def _until(broker: Broker) -> str:
    """Say until when a broker that drains lends nothing: `drain --off` is refused by one that was told to end."""
    broker.wait_draining(LOOK)  # the notice may still be on its way
    again = "until: cubroker drain --off"
    if broker.draining == ENDING:
        return f"until another one takes its place: {ENDING}. With its store, that one lends nothing either, {again}"
    return again


def _holders(broker: Broker) -> dict[str, str]:
    """Return the other clients with leases, and what each holds."""
    return {
        f"session {client.session}, {format.client_label(client)}": format.leases(client)
        for client in format.other_clients(broker.clients(), broker.session)
        if client.leases
    }
