"""Fetching versions of a pool from other hosts into the broker of this one: one version, or every new one.

A separate process does the work (:mod:`~cubroker.integrations.cluster.fetch_process`): the engine that moves the bytes
is native code, and a source that misbehaves can end the engine's process, but not the caller's.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cubroker.client.devices import DeviceId
from cubroker.client.transport.handshake import Silent
from cubroker.client.transport.requests import Owners, flag, seconds, uids, version_number
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import (
    OwnHost,
    PeerAddress,
    PeerConnection,
    asking_context,
    find_folder,
    host_id,
    resolve,
)
from cubroker.integrations.cluster.messages import PATIENCE, Fetched, Order, StatusLine
from cubroker.integrations.cluster.striping import WIDTH
from cubroker.integrations.cluster.transfer_engine import engine_command
from cubroker.protocol import fields
from cubroker.protocol.encoding import encode_json
from cubroker.protocol.errors import (
    CubrokerError,
    Denied,
    Invalid,
    NotFound,
    Unavailable,
    Unsupported,
    from_code,
    reason,
    signal_name,
)
from cubroker.protocol.fields import MAX_WAIT
from cubroker.protocol.messages import AUTO
from cubroker.protocol.paths import absolute, find_directory

MODULE = "cubroker.integrations.cluster.fetch_process"

REFUSALS = 3
"""Rounds in which every source refuses, after which a pool is no longer followed."""

PAUSES = (0.5, 30.0)
"""Seconds between two attempts to watch a pool at a host that is away: at first, and at most after doubling."""

T = TypeVar("T")

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes in all."""


def fetch(
    name: str,
    sources: Sequence[str],
    *,
    version: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    certificates: str | os.PathLike[str] | None = None,
    devices: Sequence[DeviceId] | None = None,
    share: str = AUTO,
    mode: int | None = None,
    durable: bool | None = None,
    if_absent: bool = False,
    owner: Owners = None,
    wait: float = 0.0,
    width: int = WIDTH,
    patience: float = PATIENCE,
    connect_timeout: float | None = None,
    progress: OnProgress | None = None,
    waiting: Callable[[str], object] | None = None,
) -> Fetched:
    """Fetch a version of a pool from other hosts, and publish it as the next version of the pool of that name here.

    The bytes are those of the source: a digest of every allocation is compared, and published with the version. If an
    exporter runs on this host, it passes on bytes that have arrived to other hosts during the fetch.

    Args:
        name: the pool, at the sources and here.
        sources: the hosts that may have it, or fetch it at the same time: ``HOST``, ``HOST:PORT``, or a name that has
            many addresses. This host itself is left out.
        version: which one, by its number at the first of these sources that has published it; by default the current
            one. Other sources are read from if they have the same bytes.
        directory: that of this host's broker; by default where clients find it.
        certificates: this host's folder of them; by default ``$CUBROKER_CERTIFICATES``, else ``/etc/cubroker/cluster``.
        devices: each gets a copy; by default the first one. Of a version that is sharded at the source, each gets all.
        share: how the memory is shared here, as for :meth:`cubroker.Broker.create`.
        mode: who may attach, as for ``create``.
        durable: whether the version outlives the broker, as for ``create``.
        if_absent: fetch only if there is no current version here. Of many callers one fetches; if that fails, the next.
        owner: whose version is enough with ``if_absent``, in addition to this user's, root's and the broker's.
        wait: seconds to wait for a source that has it and has room for a reader, for room here, and for other writers.
        width: the most sources to read from at the same time.
        patience: seconds that a source may deliver nothing, and that a fetch continues without any source.
        connect_timeout: seconds to wait for this host's broker to open the session, as for :class:`cubroker.Broker`.
        progress: called repeatedly, by this thread, with the bytes that are there and the bytes in all.
        waiting: called by this thread every few seconds of a wait, with what the fetch waits for.

    Raises:
        NotFound: no source has it, for the user that the certificate names.
        Denied: a side rejects the other's certificate, or this user may not publish it here.
        OverQuota: every source that has it has as many readers as it may.
        Corrupted: an allocation had another digest than at the sources, twice.
        Unavailable: no source can be reached, or all were lost; or the process of the transfer ended.
        Invalid: this host itself is the only source.
        Unsupported: the engine is not installed here (``cubroker[nixl]``), or the broker is too old to keep digests.
        CubrokerError: an error of the broker, as for :meth:`cubroker.Broker.create`. After any error no draft is left.
    """
    terms: dict[str, Any] = {"share": share, "mode": mode, "durable": durable, "width": width, "patience": patience}
    asked: dict[str, Any] = {"version": version, "if_absent": if_absent, "owner": owner, "wait": wait}
    order = _ordered(name, sources, directory, certificates, devices, connect_timeout=connect_timeout, **terms, **asked)
    return carry_out(order, progress, waiting)


def follow(
    name: str,
    sources: Sequence[str],
    *,
    directory: str | os.PathLike[str] | None = None,
    certificates: str | os.PathLike[str] | None = None,
    devices: Sequence[DeviceId] | None = None,
    share: str = AUTO,
    mode: int | None = None,
    durable: bool | None = None,
    width: int = WIDTH,
    patience: float = PATIENCE,
    connect_timeout: float | None = None,
    progress: OnProgress | None = None,
    failed: Callable[[CubrokerError], None] | None = None,
) -> Iterator[Fetched]:
    """Fetch every new version of a pool as it is published at a source, without end; yields what was fetched.

    If versions are published faster than they can be fetched, only the last of them is fetched. If a source cannot be
    reached, another one is followed, and the first is tried again. Arguments are those of :func:`fetch`; ``failed`` is
    called with every temporary error: a source cannot be reached, or there is no room for the moment.

    Raises:
        Denied: a side rejects the other's certificate, or this user may not publish here.
        CubrokerError: any other error that is not temporary.
    """
    terms: dict[str, Any] = {"share": share, "mode": mode, "durable": durable, "width": width, "patience": patience}
    asked: dict[str, Any] = {"connect_timeout": connect_timeout, "if_changed": True, "wait": PAUSES[1]}
    order = _ordered(name, sources, directory, certificates, devices, **terms, **asked)
    if not order.peers:
        raise Unavailable(f"{name} cannot be followed: no host is known")
    return _following(order, progress, failed or (lambda _: None))


def _following(order: Order, progress: OnProgress | None, failed: Callable[[CubrokerError], None]) -> Iterator[Fetched]:
    pause, refusals, own = PAUSES[0], 0, set[PeerAddress]()
    while True:
        refused: list[CubrokerError] = []
        addresses = [address for address in resolve(order.peers) if address not in own]
        for address in addresses:
            try:
                for version in _versions(address, order, last=len(addresses) == 1):
                    fetched = carry_out(msgspec.structs.replace(order, version=version, leader=str(address)), progress)
                    pause, refusals = PAUSES[0], 0
                    if fetched.fetched:
                        yield fetched
            except Unsupported:
                raise
            except OwnHost:
                own.add(address)
                if own >= {*addresses}:
                    raise
            except CubrokerError as error:
                failed(error)
                if isinstance(error, Denied | Invalid):
                    refused.append(error)
        refusals = refusals + 1 if refused and len(refused) == len({*addresses} - own) else 0
        if refusals == REFUSALS:
            raise refused[0]
        time.sleep(pause)
        pause = min(2 * pause, PAUSES[1])


def _versions(address: PeerAddress, order: Order, *, last: bool) -> Iterator[int]:
    """Yield the number of a host's current version, and of each that becomes the current one.

    Of the versions that are published between two yields, only the last is yielded.

    Raises:
        NotFound: the host has no current version. If the host is the ``last`` one, wait for a version instead.
        OwnHost: it is this host itself.
    """
    name, own = order.name, host_id(Path(order.directory) if order.directory else find_directory())
    with PeerConnection(address, Path(order.certificates), own) as connection:
        current, seen = connection.ask(messages.WatchPool(name), messages.CurrentVersion), 0
        while last or current.version:
            while connection.pending():
                current = connection.hear(messages.CurrentVersion)
            if current.version not in (0, seen):  # the exporter repeats it every `WATCH_BEAT` seconds
                seen = current.version
                yield seen
            else:
                current = connection.hear(messages.CurrentVersion, 3 * messages.WATCH_BEAT)
    raise NotFound(f"{address} has no {name} that this host may fetch")


def _ordered(
    name: str,
    sources: Sequence[str],
    directory: str | os.PathLike[str] | None,
    certificates: str | os.PathLike[str] | None,
    devices: Sequence[DeviceId] | None,
    *,
    durable: bool | None,
    wait: float,
    version: int | None = None,
    if_absent: bool = False,
    owner: Owners = (),
    **terms: Any,
) -> Order:
    """Make an order from a caller's arguments; raises ``Invalid`` for arguments that no order can have."""
    order = Order(
        name=fields.check_pool_name(name),
        version=version_number(version),
        durable=None if durable is None else flag(durable, "durable"),
        if_absent=flag(if_absent, "if_absent"),
        owners=uids(owner),
        wait=seconds(wait),
        peers=_listed("sources", sources),
        certificates=os.fspath(find_folder(certificates)),
        directory=None if directory is None else os.fspath(absolute(directory)),
        devices=_devices(devices),
        **terms,
    )
    try:
        msgspec.convert(msgspec.to_builtins(order), Order)  # the process's own error would be less clear
        encode_json(order)
    except UnicodeEncodeError as error:
        raise Invalid(f"{error.object!r} is not UTF-8, as all of an order has to be; choose another name") from None
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise Invalid(f"an argument of this fetch is of another type: {error}") from None
    if order.width < 1:
        raise Invalid(f"width is {order.width}, and at least 1 source is read from")
    for what, limit in (("patience", order.patience), ("connect_timeout", order.connect_timeout)):
        if limit is not None and not 0 < limit <= MAX_WAIT:
            raise Invalid(f"{what} is {limit:g} s; it has to be more than 0, up to {MAX_WAIT:g}")
    asking_context(Path(order.certificates))  # to raise once if it is unusable, not for each source
    return order


def _listed(what: str, given: Sequence[T]) -> tuple[T, ...]:
    """Return the elements of a list; raises ``Invalid`` if a single element was given instead of a list."""
    if isinstance(given, str | bytes | int):  # the letters of a name are no names
        raise Invalid(f"{what} is {given!r}, and no list; pass [{given!r}]")
    return tuple(given)


def _devices(given: Sequence[DeviceId] | None) -> tuple[str | int, ...] | None:
    """Return devices as values of JSON; raises ``Invalid`` if the list is empty."""
    if given is None:
        return None
    if not (devices := _listed("devices", given)):
        raise Invalid("devices is empty; name at least one, or leave it out for the first one")
    return tuple(each if isinstance(each, int) else str(each) for each in devices)


def carry_out(
    order: Order, progress: OnProgress | None = None, waiting: Callable[[str], object] | None = None
) -> Fetched:
    """Start a process that carries out an order, and return its result; raises as :func:`fetch` does."""
    command, ordered = engine_command(MODULE), encode_json(order) + b"\n"
    try:
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)  # noqa: S603
    except OSError as error:  # too few processes, descriptors or memory, as a rule
        why = reason(error, command[0])
        raise Unavailable(f"the process that fetches {order.name} cannot be started: {why}") from None
    with started as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(ordered)
                process.stdin.flush()
            for line in process.stdout:
                told = _read(line)
                if told.progress and progress:
                    progress(*told.progress)
                if told.awaits and waiting:
                    waiting(told.awaits)
                if told.error:
                    raise Silent(told.error[1]) if told.silent else from_code(*told.error)
                if told.fetched:
                    return told.fetched
            raise Unavailable(
                f"the process that fetched {order.name} {_end(process.wait())}; `cubroker ls` says whether it is there"
            )
        finally:
            process.kill()  # its draft ends with it


def _read(line: bytes) -> StatusLine:
    try:
        return msgspec.json.decode(line, type=StatusLine)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the process of the transfer sent a line that cannot be decoded: {error}") from None


def _end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}; its log says why"
    return f"was ended by {signal_name(-status)}: the engine failed, or was killed"
