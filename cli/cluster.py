"""``cubroker export``, ``fetch``, ``peers`` and ``certificates``: pools from host to host.

The packages that move bytes and make certificates are in the extra ``nixl``; if one is missing, the commands say so.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from cubroker.cli import format, options
from cubroker.cli.load import progress
from cubroker.client.transport.handshake import NotServing
from cubroker.integrations.cluster import connection, exporter, transfer_engine
from cubroker.integrations.cluster.connection import PeerAddress, PeerAnswer
from cubroker.integrations.cluster.fetch import fetch, follow
from cubroker.integrations.cluster.messages import PATIENCE, PORT, Fetched, Offer
from cubroker.integrations.cluster.striping import WIDTH
from cubroker.protocol.errors import CubrokerError, Invalid, needing
from cubroker.server import logs
from cubroker.server.store import sd_notify

EVERYWHERE = "0.0.0.0"  # noqa: S104  # behind certificates of both sides


@options.typed
def _metrics_address(value: str) -> PeerAddress:
    address = connection.parse(value, least=0)
    if value in (address.host, f"[{address.host}]"):
        raise Invalid(f"{value!r} has no port, as 127.0.0.1:9412 has")
    return address


@options.typed
def _hosts(value: str) -> tuple[str, ...]:
    """Split hosts at the commas."""
    hosts = tuple(part.strip() for part in value.split(",") if part.strip())
    if not hosts:
        raise Invalid(f"{value!r} names no host, as gpu-1,gpu-2:7411 does")
    for host in hosts:
        connection.parse(host)
    return hosts


@options.typed
def _certified(value: str) -> str:
    connection.check_host(value)
    return value


certificates_folder = click.option(
    "--certificates",
    type=options.PATH,
    metavar="DIR",
    help=f"The folder with ca.pem, cert.pem and key.pem.  [default: $CUBROKER_CERTIFICATES, else {connection.FOLDER}]",
)
from_hosts = click.option(
    "--from",
    "hosts",
    type=_hosts,
    metavar="HOST[:PORT],...",
    help="Hosts that may have it; a name with several addresses stands for all of them."
    f"  [default: $CUBROKER_PEERS, else {connection.PEERS_FILE}]",
)
metrics = click.option(
    "--metrics",
    type=_metrics_address,
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus at this address, such as 127.0.0.1:9412.",
)


# -- export --------------------------------------------------------------------------------------------


@click.command("export")
@click.argument("patterns", metavar="[NAME...]", nargs=-1, shell_complete=options.complete_pools)
@click.option(
    "--listen",
    type=options.typed(partial(connection.parse, least=0)),
    default=f"{EVERYWHERE}:{PORT}",
    show_default=True,
    metavar="HOST[:PORT]",
    help="The address to listen at; port 0: any that is free.",
)
@click.option(
    "--readers",
    type=options.Integer(min=1, max=exporter.CONNECTIONS),
    default=exporter.READERS,
    show_default=True,
    help="How many hosts may read at once. Each takes a process, and on GPUs a context, about 0.5 GiB.",
)
@certificates_folder
@metrics
@options.directory
def export(
    patterns: tuple[str, ...],
    listen: PeerAddress,
    readers: int,
    certificates: Path | None,
    metrics: PeerAddress | None,
    directory: Path,
) -> None:
    """Let other hosts fetch pools of this one, until SIGTERM or Ctrl-C; SIGHUP has certificates read again.

    NAME is a pool's, or a pattern such as 'qwen*'; without any, all that this user may attach to. A host needs a
    certificate of the cluster's authority, and gets the pools that the user may attach to whom it names.
    """
    with logs.to_standard_error() as complain, options.reported(lambda why: complain(f"cubroker: {why}"), NotServing):
        transfer_engine.need()
        meter = _ExportMetrics(metrics) if metrics else None
        rules = exporter.Rules(pools=patterns or ("*",), readers=readers)
        connect = partial(options.connect, limit=options.timeout())
        service = exporter.Exporter(directory, connection.find_folder(certificates), rules, meter, connect)
        with logs.to_standard_output() as say:
            asyncio.run(_serve(service, listen, say))


async def _serve(service: exporter.Exporter, listen: PeerAddress, say: Any) -> None:
    loop, ended, notify = asyncio.get_running_loop(), asyncio.Event(), _notifier()

    def reload() -> None:
        notify(sd_notify.reloading())
        try:
            service.reload()
        except CubrokerError as error:
            exporter.log.error("the certificates stay as they were: %s", error.message)
        else:
            exporter.log.info("the certificates were read again")
        notify(sd_notify.ready("exporting"))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    async with service.serving(listen.host, listen.port) as (host, port):
        where = str(PeerAddress(host, port))
        say(f"cubroker: exporting at {where}")
        notify(sd_notify.ready(f"exporting at {where}"))
        await ended.wait()
        notify(sd_notify.stopping())


def _notifier() -> Callable[[str], object]:
    """Return the function that sends messages to systemd, if that has started this process."""
    manager = sd_notify.Manager.from_environment(os.environ)
    return manager.say if manager else lambda _: None


# -- fetch ---------------------------------------------------------------------------------------------


@click.command("fetch")
@click.argument("reference", metavar="NAME[@VERSION]", type=options.reference, shell_complete=options.complete_pools)
@from_hosts
@options.copies
@options.share
@options.durable
@click.option("--if-absent", is_flag=True, help="Fetch only if the pool has no version; of many at once, one fetches.")
@click.option("--follow", "following", is_flag=True, help="Fetch every new version as it is published, without end.")
@options.wait("a host that has it, for room, and for another writer")
@options.pool_mode
@options.owners
@click.option(
    "--width",
    type=options.Integer(min=1, max=32),
    default=WIDTH,
    show_default=True,
    help="How many hosts to read from at once, at most.",
)
@options.seconds(
    "--patience",
    "How long a host may deliver nothing, and how long a fetch that has begun may be without any host.",
    default=PATIENCE,
    least=0.1,
)
@certificates_folder
@metrics
@options.as_json
@options.directory
def fetch_pool(
    reference: options.Reference,
    hosts: tuple[str, ...] | None,
    chosen: tuple[str, ...] | None,
    share: str,
    durable: bool | None,
    if_absent: bool,
    following: bool,
    wait: float | None,
    mode: int | None,
    owners: tuple[str, ...],
    width: int,
    patience: float,
    certificates: Path | None,
    metrics: PeerAddress | None,
    as_json: bool,
    directory: Path,
) -> None:
    """Publish a pool of another host, by default its current version, as the next version of pool NAME here.

    Bytes come from every host that has that version, memory to memory, and are compared with digests of the source. A
    fetch that fails or is interrupted leaves nothing behind.
    """
    if following and (if_absent or reference.version or wait is not None):
        raise click.UsageError("--follow fetches current versions for ever: leave out @VERSION, --if-absent and --wait")
    limit = options.wait_of(wait, owners, if_absent=if_absent)
    if metrics and not following:
        raise click.UsageError("--metrics works only with --follow: give both, or leave it out")
    devices = None
    if chosen:
        with options.connect(directory) as broker:
            devices = options.find_devices(chosen, broker.devices())  # indexes are the broker's, not this process's
    common: dict[str, Any] = {
        "directory": directory,
        "certificates": certificates,
        "devices": devices,
        "share": share,
        "mode": mode,
        "durable": durable,
        "width": width,
        "patience": patience,
        "connect_timeout": options.timeout(),
    }
    sources = connection.known_peers(hosts or ())
    if following:
        _follow(reference.name, sources, common, metrics, as_json=as_json)
        return
    with progress(f"fetching {reference.name}") as report, options.hinting_at_timeout():
        fetched = fetch(
            reference.name,
            sources,
            version=reference.version,
            if_absent=if_absent,
            owner=owners or None,
            wait=limit,
            progress=report,
            waiting=report.wait,
            **common,
        )
    _tell(fetched, as_json=as_json)


def _follow(
    name: str, sources: Sequence[str], common: dict[str, Any], address: PeerAddress | None, *, as_json: bool
) -> None:
    meter = _FetchMetrics(address) if address else None

    def failed(error: CubrokerError) -> None:
        format.note(f"cubroker: {format.reason(error)}; trying again")
        if meter:
            meter.failed(error)

    if os.getpid() == 1:  # the first process of a container, for which the signal has no default action
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    notify = _notifier()
    notify(sd_notify.ready(f"following {name}"))
    for fetched in follow(name, sources, failed=failed, **common):
        if meter:
            meter.fetched(fetched)
        notify(sd_notify.status(f"{fetched.name}@{fetched.version}, from {', '.join(fetched.sources)}"))
        try:
            _tell(fetched, as_json=as_json)
        except CubrokerError as error:  # a service does not end because its output is lost
            format.complain(format.reason(error))


def _tell(fetched: Fetched, *, as_json: bool) -> None:
    if as_json:
        format.document(fetched)
    else:
        format.say(summary(fetched, options.where()))


def summary(fetched: Fetched, where: str = "") -> str:
    """Return what a fetch did in one line, with `` on DIRECTORY`` if the reader does not know the broker."""
    title = f"{fetched.name}@{fetched.version}{where}"
    held = f"{format.count(fetched.tensors, 'tensor')}, {format.size(fetched.nbytes)}"
    if not fetched.fetched:
        return f"{title}: already there ({held}); nothing fetched"
    speed = format.rate(fetched.nbytes, fetched.read_seconds)
    sources = ", ".join(format.printable(each) for each in fetched.sources)
    return f"{title}: {held} in {format.duration(fetched.seconds)} ({speed}) from {sources}"


# -- peers ---------------------------------------------------------------------------------------------


@click.command("peers")
@click.argument("patterns", metavar="[NAME...]", nargs=-1)
@from_hosts
@certificates_folder
@options.as_json
def show_peers(
    patterns: tuple[str, ...], hosts: tuple[str, ...] | None, certificates: Path | None, as_json: bool
) -> None:
    """Show which hosts export, and the pools that each of them has for this user.

    NAME is a pool's, or a pattern such as 'qwen*'. The status is 1 if a host does not answer.
    """
    peers = connection.resolve(connection.known_peers(hosts or ()))
    answers = connection.ask_peers(peers, connection.find_folder(certificates))
    shown = [(answer, _matching(answer, patterns)) for answer in answers]
    if as_json:
        format.document([_plain(*each) for each in shown])
    elif rows := [(answer, offer) for answer, offers in shown if answer.offers for offer in offers or (None,)]:
        format.print_table(
            rows,
            {
                "HOST": lambda row: format.printable(str(row[0].address)),
                "POOL": lambda row: format.printable(f"{row[1].name}@{row[1].version}") if row[1] else "none",
                "STATE": lambda row: _state(row[1]) if row[1] else "",
                ">SIZE": lambda row: format.size(row[1].nbytes) if row[1] else "",
                ">TENSORS": lambda row: str(row[1].tensors) if row[1] else "",
                ">READERS": lambda row: f"{row[0].offers.readers} of {row[0].offers.limit}" if row[0].offers else "",
            },
            spare=("TENSORS", "READERS", "STATE"),
        )
    if silent := [answer for answer in answers if answer.error]:
        told = "; ".join(answer.error.message for answer in silent if answer.error)
        raise CubrokerError(told)


def _state(offer: Offer) -> str:
    if offer.there is not None:
        return f"{min(offer.there, offer.nbytes) / max(1, offer.nbytes):.0%} there"
    return "current" if offer.current else "superseded"


def _matching(answer: PeerAnswer, patterns: Sequence[str]) -> list[Offer]:
    return [each for each in answer.offers.offers if options.matches(patterns, each.name)] if answer.offers else []


def _plain(answer: PeerAnswer, shown: Sequence[Offer]) -> dict[str, object]:
    offers = answer.offers
    pools = [format.plain(each) | {"content": each.content.hex() if each.content else None} for each in shown]
    return {
        "host": answer.address.host,
        "address": next(iter(answer.address.ips), None),
        "addresses": answer.address.ips,
        "port": answer.address.port,
        "error": answer.error.message if answer.error else None,
        "readers": offers.readers if offers else None,
        "limit": offers.limit if offers else None,
        "pools": pools if offers else None,
    }


# -- certificates --------------------------------------------------------------------------------------


@click.group("certificates")
def certificates() -> None:
    """Make the certificates that hosts of a cluster know each other by."""


_authority = click.option(
    "--authority",
    type=options.PATH,
    required=True,
    metavar="DIR",
    help="The folder that `cubroker certificates authority` made.",
)
_days = options.Integer(min=1, max=36500)


@contextmanager
def _handling(what: str) -> Iterator[ModuleType]:
    """Yield the module that makes certificates; raise an error that names the file if this user may not use it."""
    with needing(f"{what} certificates", "cubroker[nixl]"):
        from cubroker.integrations.cluster import certificates as found
    try:
        yield found
    except PermissionError as error:
        raise CubrokerError(f"this user may not write or read {error.filename}; name another folder") from None


@certificates.command("authority")
@click.argument("folder", metavar="DIR", type=options.PATH)
@click.option("--days", type=_days, default=3650, show_default=True, help="How long it is valid.")
def make_authority(folder: Path, days: int) -> None:
    """Make the authority of a cluster, once.

    DIR gets its key, which signs every certificate: keep it on a host that is safe.
    """
    with _handling("making") as made:
        path = made.make_authority(folder, days=days)
    format.say(f"{path}: the authority; keep {folder} safe, and give no host its ca-key.pem")


@certificates.command("issue")
@click.argument("folder", metavar="DIR", type=options.PATH)
@_authority
@click.option("--user", required=True, help="The account that the holder is on hosts that export.")
@click.option(
    "--host",
    "hosts",
    type=_certified,
    multiple=True,
    metavar="HOST",
    help="A name or address by which others reach the holder's host; may be given several times. Without it the"
    " certificate is for fetching alone.",
)
@click.option("--days", type=_days, default=365, show_default=True, help="How long it is valid.")
def issue(folder: Path, authority: Path, user: str, hosts: tuple[str, ...], days: int) -> None:
    """Make a certificate for a host or a user.

    DIR gets it, its key and the authority's certificate.
    """
    with _handling("making") as made:
        path = made.issue(authority, folder, user, hosts, days)
    what = f"exports as {', '.join(hosts)}, and fetches" if hosts else "fetches"
    format.say(f"{path}: {what} as user {user}; copy {folder} to its host, readable by its owner alone")


@certificates.command("revoke")
@click.argument("certificate", metavar="CERTIFICATE", type=options.PATH)
@_authority
def revoke(certificate: Path, authority: Path) -> None:
    """Add a certificate to the revoked ones.

    CERTIFICATE is its file, or the folder that has it. The list is the authority's crl.pem.
    """
    with _handling("revoking") as made:
        path = made.revoke(authority, certificate)
    format.say(f"{path}: copy it to every host, beside its ca.pem, and `systemctl reload cubroker-export` there")


@certificates.command("show")
@click.argument("certificate", metavar="CERTIFICATE", type=options.PATH)
@options.as_json
def show_certificate(certificate: Path, as_json: bool) -> None:
    """Show whom a certificate names.

    CERTIFICATE is its file, or the folder that has it. It is also said until when it is valid.
    """
    with _handling("reading") as made:
        found = made.describe(certificate)
    if as_json:
        format.document({**found._asdict(), "until": found.until.isoformat()})
        return
    hosts = f"exports as {', '.join(found.hosts)}" if found.hosts else "fetches, and does not export"
    who = f"authority {found.user}" if found.authority else f"user {found.user}, {hosts}"
    format.say(format.printable(f"{who}, valid until {found.until:%Y-%m-%d %H:%M} UTC"))


# -- metrics -------------------------------------------------------------------------------------------

BUCKETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Seconds, upper ends."""


def _serve_metrics(address: PeerAddress) -> None:
    """Serve the figures of this process until it ends, by the library's own server.

    Raises:
        CubrokerError: the address cannot be listened at.
        Unsupported: prometheus-client is not installed.
    """
    with needing("metrics", "cubroker[server]"):
        from prometheus_client import start_http_server
    try:
        start_http_server(address.port, address.host)
    except OSError as error:
        raise CubrokerError(f"metrics at {address}: {error.strerror or error}; name another --metrics") from None


class _ExportMetrics(exporter.Meter):
    def __init__(self, address: PeerAddress) -> None:
        _serve_metrics(address)
        from prometheus_client import Counter, Gauge

        self._connections = Gauge("cubroker_export_connections", "Peers that are connected.")
        self._readers = Gauge("cubroker_export_readers", "Peers that read a version.")
        self._drafts = Gauge("cubroker_export_drafts", "Versions that are offered while they are being fetched.")
        self._bytes = Counter("cubroker_export_read_bytes", "Bytes that peers say they have read.", ["pool"])
        self._versions = Counter("cubroker_export_versions", "Versions that peers have read whole.", ["pool"])
        self._refusals = Counter("cubroker_export_refusals", "Requests that were refused.", ["code"])

    def watch(self, service: exporter.Exporter) -> None:
        self._connections.set_function(lambda: service.connections)
        self._readers.set_function(lambda: service.readers)
        self._drafts.set_function(lambda: service.drafts)

    def read(self, pool: str, nbytes: int) -> None:
        self._bytes.labels(pool).inc(nbytes)

    def took(self, pool: str) -> None:
        self._versions.labels(pool).inc()

    def refused(self, code: str) -> None:
        self._refusals.labels(code).inc()


class _FetchMetrics:
    """The metrics of a command that follows a pool."""

    def __init__(self, address: PeerAddress) -> None:
        _serve_metrics(address)
        from prometheus_client import Counter, Gauge, Histogram

        self._bytes = Counter("cubroker_fetch_bytes", "Bytes of versions that were fetched.", ["pool"])
        self._parts = Counter(
            "cubroker_fetch_part_bytes",
            "Bytes of versions that came from hosts that were still fetching themselves.",
            ["pool"],
        )
        self._seconds = Histogram(
            "cubroker_fetch_seconds", "Seconds that the fetch of a version took.", ["pool"], buckets=BUCKETS
        )
        self._version = Gauge(
            "cubroker_fetch_version", "The last version that was fetched, by its number here.", ["pool"]
        )
        self._failures = Counter("cubroker_fetch_failures", "Failed attempts to fetch, which were repeated.", ["code"])

    def fetched(self, result: Fetched) -> None:
        """Count a version that was fetched."""
        self._bytes.labels(result.name).inc(result.nbytes)
        self._parts.labels(result.name).inc(result.from_parts)
        self._seconds.labels(result.name).observe(result.seconds)
        self._version.labels(result.name).set(result.version)

    def failed(self, error: CubrokerError) -> None:
        """Count an attempt that failed."""
        self._failures.labels(error.code).inc()
