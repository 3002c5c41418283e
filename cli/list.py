"""``cubroker ls``, ``show``, ``clients``, ``devices`` and ``topology``: the broker's state as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import click
import msgspec

from cubroker.cli import format, options
from cubroker.client.transport.requests import expect
from cubroker.driver import Device, Driver, DriverError
from cubroker.driver.peer_access import Link
from cubroker.protocol.errors import DeviceFailure, NotFound
from cubroker.protocol.layout import Layout, TensorSpec
from cubroker.protocol.messages import VMM, Describe, Description, DigestList
from cubroker.protocol.status import ClientInfo, DeviceInfo, PoolInfo, SharingInfo

Row = TypeVar("Row")
Columns: TypeAlias = dict[str, Callable[[Row], str]]
"""The cell of a row under each title, as :func:`format.print_table` takes them."""

SHORT = len("GPU-01234567")
"""Characters that a UUID is shown with at least."""

LEGEND = (
    "A row's device reads and writes the memory of a column's: a number is the link's performance rank, 0 the fastest,",
    "* says that all atomic operations go over it, + that some do; no says that memory there is out of reach.",
)


@click.command("ls")
@options.as_json
@options.directory
def ls(directory: Path, as_json: bool) -> None:
    """List every live version of every pool.

    SIZE is what each device holds, or all of them together if the pool is sharded; DEVICES are the indexes that
    `cubroker devices` shows, or "gone": the broker does not serve it any more, and the pool was lost with it. SHARED is
    the memory of an update that an older version in the list has, too, on all devices: it is there once.
    """
    with options.connect(directory) as broker:
        pools, devices = broker.pools(), broker.devices()
    if as_json:
        format.document(pools)
    elif pools:
        indexes = {device.uuid: device.index for device in devices}
        columns: Columns[PoolInfo] = {
            "~POOL": lambda pool: f"{pool.name}@{pool.version}",
            "STATE": lambda pool: pool.state,
            ">SIZE": lambda pool: format.size(pool.nbytes),
            ">TENSORS": lambda pool: str(pool.tensors),
            "DEVICES": lambda pool: (
                ",".join(format.place(indexes, uuid) for uuid in pool.devices) + " sharded" * pool.sharded
            ),
            ">LEASES": lambda pool: str(pool.leases),
            "OWNER": lambda pool: format.user(pool.owner),
            "MODE": lambda pool: f"{pool.mode:03o}",
        }
        if any(pool.shared for pool in pools):
            columns |= {">SHARED": lambda pool: format.size(pool.shared) if pool.shared else "none"}
        format.print_table(pools, columns)
    else:
        format.say("No pools: nothing has been loaded yet, or everything is retired.")


@click.command("show")
@click.argument("reference", metavar="NAME[@VERSION]", type=options.reference)
@options.as_json
@options.directory
def show(reference: options.Reference, directory: Path, as_json: bool) -> None:
    """Show one version, by default the current one, and its tensors.

    PLACE is the allocation and the byte in it where a tensor begins; DEVICE, of a sharded version, the index that
    `cubroker devices` shows.
    """
    with options.connect(directory) as broker:
        info, layout, places = broker.describe(reference.name, reference.version)
        sharing = expect(broker.requests.submit(Describe(info.name, info.version)).result(), Description).shared
        devices = broker.devices()
        digests = broker.digests(info.name, info.version) if info.digest else None
    if as_json:
        added = {"layout": _describe_layout(layout, places), "digests": _digests(digests)}
        format.document(msgspec.to_builtins(info) | added | {"shared_with": msgspec.to_builtins(sharing)})
        return
    for line in _heading(info, layout, sharing):
        format.say(line)
    format.say("")
    columns: Columns[TensorSpec] = {
        "~TENSOR": lambda tensor: tensor.name,
        "DTYPE": lambda tensor: tensor.dtype,
        "SHAPE": lambda tensor: "x".join(map(str, tensor.shape)) or "scalar",
        ">SIZE": lambda tensor: format.size(tensor.nbytes),
        ">PLACE": lambda tensor: f"{tensor.allocation}:{tensor.offset}",
    }
    if places:
        indexes = {device.uuid: device.index for device in devices}
        columns |= {">DEVICE": lambda tensor: format.place(indexes, places[tensor.allocation])}
    format.print_table(layout.tensors, columns)


def _describe_layout(layout: Layout, places: Sequence[str]) -> dict[str, object]:
    """Return a layout for JSON; a replicated tensor's ``device`` is None."""
    tensors = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "nbytes": tensor.nbytes,
            "allocation": tensor.allocation,
            "offset": tensor.offset,
            "device": places[tensor.allocation] if places else None,
        }
        for tensor in layout.tensors
    ]
    return {"allocations": layout.allocations, "tensors": tensors}


def _digests(found: DigestList | None) -> dict[str, list[str | None]] | None:
    """Return the digest of each allocation by device: None for an allocation elsewhere, and if there are no digests."""
    if found is None or found.digests is None:
        return None
    rows = zip(found.devices, found.digests.replicas, strict=True)
    return {uuid: [digest.hex() or None for digest in row] for uuid, row in rows}


def _heading(info: PoolInfo, layout: Layout, sharing: Sequence[SharingInfo]) -> list[str]:
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
    return lines + [f"{'sharded, in part ' if info.sharded else ''}on {uuid}" for uuid in info.devices]


@click.command("clients")
@options.as_json
@options.directory
def clients(directory: Path, as_json: bool) -> None:
    """List this user's processes that use the broker, and what they hold; this command's own session is left out.

    Administrators of the broker see those of all users.
    A client is detached when its connection is gone and its process is not: it may still have memory mapped, so its
    leases stay until it ends.

    Where a process has memory of the broker's mapped or open without a lease, BEYOND LEASES says how much. The broker
    cannot see that of every process: ? stands for what is unknown, null in --json.
    """
    with options.connect(directory) as broker:
        clients = [client for client in broker.clients() if client.session != broker.session]
    if as_json:
        format.document(clients)
    elif clients:
        columns: Columns[ClientInfo] = {
            ">SESSION": lambda client: str(client.session),
            ">PID": lambda client: str(client.pid),
            "USER": lambda client: format.user(client.uid),
            "STATE": lambda client: client.state,
            "~LEASES": lambda client: format.leases(client) or "none",
        }
        if any(client.locks for client in clients):
            columns |= {"~LOCKS": lambda client: ", ".join(client.locks) or "none"}
        if any(client.mapped_beyond_leases for client in clients):
            columns |= {">BEYOND LEASES": _beyond}
        format.print_table(clients, columns)
    else:
        format.say("No clients: no process is attached, or none of this user.")


def _beyond(client: ClientInfo) -> str:
    nbytes = client.mapped_beyond_leases
    return "?" if nbytes is None else format.size(nbytes)


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
        columns: Columns[DeviceInfo] = {
            ">INDEX": lambda device: str(device.index),
            "UUID": lambda device: device.uuid[:length],
            "~NAME": lambda device: device.name,
            ">TOTAL": lambda device: format.size(device.total),
            ">BUDGET": lambda device: format.size(device.budget),
            ">ALLOCATED": lambda device: format.size(device.allocated),
            ">PROMISED": lambda device: format.size(device.promised),
        }
        format.print_table(devices, columns)


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
    return {
        "from": uuids[link.device],
        "to": uuids[link.peer],
        "access": link.access,
        "performance_rank": link.performance_rank,
        "native_atomics": link.native_atomics,
        "array_access": link.array_access,
        "only_partial_atomics": link.only_partial_atomics,
        "atomics": {operation: sorted(forms) for operation, forms in atomics.items()},
    }


def _print_links(devices: Sequence[Device], links: Sequence[Link]) -> None:
    cells = {(link.device, link.peer): _cell(link) for link in links}
    columns: dict[str, Callable[[Device], str]] = {"FROM": lambda one: f"{one.index} {one.name}"}
    for device in devices:
        columns[f">TO {device.index}"] = lambda one, to=device.index: cells.get((one.index, to), "-")  # type: ignore[misc]
    format.print_table(devices, columns)
    format.say("")
    for line in LEGEND:
        format.say(line)


def _cell(link: Link) -> str:
    if not link.access:
        return "no"
    return f"{link.performance_rank}" + ("*" if link.native_atomics else "+" if link.only_partial_atomics else "")
