"""``cubroker topology``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from cubroker.cli import options, table, text
from cubroker.cli.connect import connect
from cubroker.driver import Device, Driver, DriverError
from cubroker.driver.peers import Link
from cubroker.protocol.errors import DeviceFailure, NotFound

LEGEND = (
    "A row's device reads and writes the memory of a column's: a number is the link's performance rank, 0 the fastest,",
    "* says that all atomic operations go over it, + that some do; no says that memory there is out of reach.",
)


@click.command("topology")
@options.as_json
@options.directory
def command(directory: Path, as_json: bool) -> None:
    """Show which of the broker's devices reach each other's memory directly, and how well.

    The devices are those that this process sees too; their indexes are its own. A worker on one device can attach to a
    pool on another that it reaches.
    """
    with connect(directory) as broker:
        known = {device.uuid for device in broker.devices()}
        driver = broker.driver
        devices = [device for device in driver.devices if device.uuid in known]
        if not devices:
            raise NotFound("this process sees none of the broker's devices; what does CUDA_VISIBLE_DEVICES say?")
        try:
            if as_json:
                text.document([_document(driver, devices, link) for link in _links(driver, devices)])
            else:
                _show(devices, _links(driver, devices))
        except DriverError as error:
            raise DeviceFailure(f"the links between devices: {error}") from error


def _links(driver: Driver, devices: Sequence[Device]) -> list[Link]:
    indexes = {device.index for device in devices}
    return [link for link in driver.peers.matrix() if {link.device, link.peer} <= indexes]


def _document(driver: Driver, devices: Sequence[Device], link: Link) -> dict[str, object]:
    uuids = {device.index: device.uuid for device in devices}
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


def _show(devices: Sequence[Device], links: Sequence[Link]) -> None:
    cells = {(link.device, link.peer): _cell(link) for link in links}
    columns = [table.Column("FROM"), *(table.Column(f"TO {device.index}", right=True) for device in devices)]
    rows = [
        (f"{one.index} {one.name}", *(cells.get((one.index, other.index), "-") for other in devices)) for one in devices
    ]
    table.show(columns, rows)
    text.say("")
    for line in LEGEND:
        text.say(line)


def _cell(link: Link) -> str:
    if not link.access:
        return "no"
    return f"{link.performance_rank}" + ("*" if link.native_atomics else "+" if link.only_partial_atomics else "")
