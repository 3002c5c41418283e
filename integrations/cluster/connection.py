"""Connections to other hosts: their addresses, TLS with certificates on both sides, and what the user in one may read.

Every host and every user of a cluster has a certificate of one authority, which the cluster's operator keeps. A folder
has three files: ``ca.pem``, the authority's certificate; ``cert.pem`` and ``key.pem``, the holder's own; and
``crl.pem`` if certificates have been revoked. ``cubroker certificates`` makes them
(:mod:`~cubroker.integrations.cluster.certificates`). Any other authority can make them if it fills in the same fields:

- A certificate for a user has the user's name as its common name, and is for TLS clients. An exporter looks the name up
  on its own host: the modes of pools hold for that account there.
- A certificate for a host has the names and addresses by which others reach it, and is for TLS servers. A fetching host
  checks that the exporter's has the name that it asked for.

OpenSSL checks certificates: signature, time, purpose, name and revocation. No message is sent before that.

A fetching host knows its peers from a list, a file, or a name that has many addresses, such as a headless service of
Kubernetes. Its connection to one is blocking, with a time limit for everything.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import select
import socket
import ssl
import stat
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.messages import M, Offers, PeerWelcome, Reply, Request
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, Unavailable
from cubroker.protocol.status import PoolInfo

CONNECT = 10.0
"""Seconds that an exporter has to accept a connection, to show its certificate, and to answer."""

FOLDER_VARIABLE = "CUBROKER_CERTIFICATES"
FOLDER = Path("/etc/cubroker/cluster")
"""The folder with the certificates, if neither an argument nor the variable names one."""

CA, CERTIFICATE, KEY, REVOKED = "ca.pem", "cert.pem", "key.pem", "crl.pem"

PEERS_VARIABLE = "CUBROKER_PEERS"
PEERS_FILE = FOLDER / "peers.toml"
"""The file with the peers, if neither an argument nor the variable names any: ``peers = ["gpu-1", "gpu-2:7411"]``."""

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The random id that the kernel chose when this host started."""

AT_ONCE = 32
"""Hosts that are asked at the same time."""

_NUMBERS = r"(?i:(0x[0-9a-f]+|[0-9]*)(\.(0x[0-9a-f]+|[0-9]*))*)"
"""Texts that are an IPv4 address or none, and no name."""

_READ = 4
"""The bit of a mode that lets a class of users attach."""


# -- addresses of hosts --------------------------------------------------------------------------------


class PeerAddress(NamedTuple):
    """Where an exporter is."""

    #: The name or address that the user gave, which the exporter's certificate has to contain.
    host: str
    port: int
    #: The addresses to connect to, one after the other; empty: all of the name.
    ips: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.host} ({', '.join(self.ips)})" if self.ips not in ((), (self.host,)) else self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{where}:{self.port}"

    def with_ips(self, other: PeerAddress) -> PeerAddress:
        """Return this host with its own addresses and those of another one that has turned out to be the same."""
        return self._replace(ips=tuple(dict.fromkeys(self.ips + other.ips)))


def parse(text: str, *, least: int = 1) -> PeerAddress:
    """Return the address that ``HOST``, ``HOST:PORT`` or ``[ADDRESS]:PORT`` names; raises ``Invalid``.

    The lowest port is ``least``: 0 for an address to listen at, where port 0 means any free port.
    """
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon or (":" in host and not host.startswith("[")):  # a bare IPv6 address
        host, port = text, str(messages.PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not can_be_host(host) or not port.isascii() or not port.isdecimal():
        raise Invalid(f"{text[:80]!r} names no exporter; write HOST, HOST:PORT or [ADDRESS]:PORT")
    if len(port) > 5 or not least <= int(port) < 1 << 16:
        raise Invalid(f"{text[:80]!r} has an invalid port; ports are {least} to 65535")
    return PeerAddress(host, int(port))


def can_be_host(host: str) -> bool:
    """Whether the system's functions accept a text as a name or an address, and do not reject the argument itself.

    False also for an address that the user did not mean: these functions read ``1.2.3`` as ``1.2.0.3``.
    """
    try:
        read = host.encode("idna").decode()  # as these functions do, so that other digits become ASCII ones
    except UnicodeError:  # a part is empty, or too long
        return False
    known = bool(read) and host.isprintable() and not any(c in " /[]" for c in host)
    return known and (parse_ip(host) is not None or not re.fullmatch(_NUMBERS, read))


def check_host(host: str) -> None:
    """Raise ``Invalid`` unless a certificate can be for a host of this name or address."""
    if parse_ip(host) is None and (not host.isascii() or ":" in host or not can_be_host(host)):
        raise Invalid(f"{host[:80]!r} is no name or address of a host: write it as gpu-1 or 10.0.0.1, without a port")


def parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is named by; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def host_id(directory: Path) -> bytes:
    """Return an id of a broker and its host, the same for all its clients; empty if there is no such directory."""
    try:
        found = directory.stat()
        boot = BOOT.read_bytes()
    except OSError:
        return b""
    return blake2b(b"%s %d %d" % (boot, found.st_dev, found.st_ino), digest_size=16).digest()


# -- certificates and TLS ------------------------------------------------------------------------------


def find_folder(folder: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder with the certificates: the one that is given, else the variable's, else the host's."""
    return Path(folder or environ.get(FOLDER_VARIABLE) or FOLDER)


def serving_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS context of an exporter, which requires a certificate of every client.

    Raises:
        NotFound: a file is missing.
        Denied: a file may not be read, or others may read the key.
        Invalid: a file has other content.
    """
    context = _tls_context(ssl.PROTOCOL_TLS_SERVER, folder)
    context.num_tickets = 0  # each connection shows a certificate, which may have been revoked since the last
    return context


def check_serving(context: ssl.SSLContext, folder: Path) -> None:
    """Check the certificate of a :func:`serving_context` as every connecting host does.

    The name by which hosts connect is not checked: it is not known here.

    Raises:
        Invalid: hosts with the same authority and list would refuse it: it is expired, not yet valid, revoked, of
            another authority, not for servers or of a key that TLS has no use for; or the list is not of the authority.
    """
    asking, incoming, outgoing = asking_context(folder), ssl.MemoryBIO(), ssl.MemoryBIO()
    asking.check_hostname = False
    own = context.wrap_bio(incoming, outgoing, server_side=True)
    peer = asking.wrap_bio(outgoing, incoming)
    try:
        for side in (peer, own, peer):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", None) or error.reason or error
        raise Invalid(
            f"hosts with {CA} and {REVOKED} of that folder refuse an exporter that has {folder / CERTIFICATE}: {why};"
            f" issue another certificate with `cubroker certificates issue --host`, or put the right {CA} and {REVOKED}"
            " there"
        ) from None


def asking_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS context of a fetching host; raises as :func:`serving_context` does."""
    return _tls_context(ssl.PROTOCOL_TLS_CLIENT, folder)


def _tls_context(protocol: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    _check_files(folder)
    try:
        context.load_verify_locations(folder / CA)
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password=_no_password)
        if (folder / REVOKED).exists():
            context.load_verify_locations(folder / REVOKED)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except ssl.SSLError as error:
        raise Invalid(
            f"the certificates in {folder} cannot be used: {error.reason or error}; make them again"
        ) from None
    return context


def _check_files(folder: Path) -> None:
    make = "`cubroker certificates` makes them, and --certificates or $CUBROKER_CERTIFICATES names another folder"
    for name in (CA, CERTIFICATE, KEY, REVOKED):
        try:
            with (folder / name).open("rb"):
                pass
        except FileNotFoundError:
            if name != REVOKED:
                raise NotFound(f"there is no {folder / name}; {make}") from None
        except PermissionError:
            raise Denied(f"this user may not read {folder / name}; {make}") from None
        except OSError as error:
            raise Invalid(f"{folder / name} cannot be read: {error.strerror}; {make}") from None
    mode = stat.S_IMODE((folder / KEY).stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Denied(f"others than its owner may use {folder / KEY} (mode {mode:04o}); chmod 600 it, or make a new one")


def _no_password() -> str:
    """Keep OpenSSL from asking at the terminal."""
    raise Invalid("the key has a password, which a service cannot be asked for; store it without")


# -- users, and what they may read ---------------------------------------------------------------------


class Account(NamedTuple):
    """A user of this host."""

    name: str
    uid: int
    #: All of its groups, by number.
    groups: frozenset[int]


def named_user(certificate: Mapping[str, object]) -> str:
    """Return the common name in the result of :meth:`ssl.SSLSocket.getpeercert`; empty unless there is exactly one."""
    subject = certificate.get("subject", ())
    assert isinstance(subject, tuple)
    names = [str(value) for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def find_account(name: str) -> Account:
    """Return the user of this host that a certificate names.

    Raises:
        Denied: this host has no such user.
    """
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError):  # ValueError: the name has a NUL
        raise Denied(f"the certificate names user {name!r}, whom the exporting host does not have") from None
    return Account(name, entry.pw_uid, frozenset(os.getgrouplist(name, entry.pw_gid)))


def can_read(reader: Account, pool: PoolInfo, coming: int | None = None) -> bool:
    """Whether a user may fetch a version: by the mode of its pool, as for a process of this host that attaches to it.

    If the pool gets the mode ``coming`` once the version is published, that has to allow it, too.
    """
    if reader.uid in (0, pool.owner):
        return True
    mode = pool.mode if coming is None else pool.mode & coming
    return bool(mode >> (3 if pool.group in reader.groups else 0) & _READ)


# -- a connection --------------------------------------------------------------------------------------


class HungUp(Unavailable):
    """The exporter has closed the connection."""


class OwnHost(Invalid):
    """The exporter is that of this host's own broker."""


class PeerConnection:
    """A connection to an exporter. Not safe for threads.

    Args:
        certificates: the folder with this side's certificates.
        own: the id of this side's broker (:func:`host_id`); empty: not checked.

    Raises:
        OwnHost: the exporter serves from that broker.
        Unavailable: the address cannot be reached, does not answer, or is no exporter.
        Denied: the exporter has no certificate of its name from our authority, or rejects ours.
        CubrokerError: as :func:`asking_context`.
    """

    def __init__(self, address: PeerAddress, certificates: Path, own: bytes = b"") -> None:
        self.address = address
        context = asking_context(certificates)
        try:
            welcome = self._greet(context)
        except HungUp:  # the exporter may have been shutting down: then it cannot be reached now
            try:
                welcome = self._greet(context)
            except HungUp:
                raise Denied(
                    f"{address} closed the connection after receiving this host's certificate: the certificate has"
                    " expired, was revoked, is of another authority or not for clients; the exporter's log says which"
                ) from None
        #: The user of the exporting host whose permissions we have there.
        self.user = welcome.user
        #: Equal at all addresses of a name that are the same host: what it says of its broker, and the certificate,
        #: without which another host could say so. None: it says nothing of its broker.
        self.identity = (
            (*address[:2], welcome.host, self._socket.getpeercert(binary_form=True)) if welcome.host else None
        )
        if own and welcome.host == own:
            self._socket.close()
            raise OwnHost(f"{address} is this host itself, which has nothing new for it; name another one")

    def _greet(self, context: ssl.SSLContext) -> PeerWelcome:
        """Connect and say hello.

        Raises:
            HungUp: the exporter closed the connection after the handshake, as it does to reject our certificate.
        """
        self._socket = self._connect(context)
        try:
            return self.ask(messages.PeerHello(messages.VERSION), PeerWelcome)
        except BaseException:
            self._socket.close()
            raise

    def _connect(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Connect to the first address of the host, in its order, at which an exporter shows its certificate."""
        address, deadline = self.address, time.monotonic() + CONNECT
        try:
            ips = address.ips or _look_up(address)
        except OSError as error:
            raise Unavailable(f"no exporter answers at {address}: {error.strerror or error}") from None
        failures: list[Unavailable | Denied] = []
        for ip in ips:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                tried = address._replace(ips=(ip,)) if len(ips) > 1 else address
                return _encrypted(tried, ip, context, left / (len(ips) - len(failures)))
            except (Unavailable, Denied) as error:
                failures.append(error)
        told = "; ".join(each.message for each in failures)
        if len(failures) < len(ips) or not all(isinstance(each, Denied) for each in failures):
            raise Unavailable(told)  # another service at some of the addresses says nothing of the others
        raise Denied(told if len(ips) == 1 else f"{address} has no address left: {told}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: Request, kind: type[M], limit: float = CONNECT) -> M:
        """Send a request and return its answer, which may take ``limit`` seconds.

        Raises:
            CubrokerError: the exporter refused.
            Unavailable: the connection is over, or no answer arrives.
            Denied: the exporter rejects our certificate, which it reports only after the handshake.
        """
        self.say(request)
        return self.hear(kind, limit)

    def say(self, request: Request) -> None:
        """Send a request, whose answer :meth:`hear` returns. Raises as :meth:`ask` does."""
        try:
            self._socket.settimeout(CONNECT)
            self._socket.sendall(messages.frame(request))
        except OSError as error:
            raise _refused(self.address, error) from None

    def hear(self, kind: type[M], limit: float = CONNECT) -> M:
        """Return the exporter's next message, received within ``limit`` seconds; raises as :meth:`ask` does."""
        return messages.expect(self.hear_any(limit), kind)

    def hear_any(self, limit: float = CONNECT) -> Reply:
        """Return the exporter's next message, which may be a refusal; raises as :meth:`hear` does."""
        deadline = time.monotonic() + limit
        try:
            head = self._exactly(messages.LENGTH.size, deadline)
            body = self._exactly(messages.length(head, messages.MAX_REPLY), deadline)
        except TimeoutError:
            raise Unavailable(f"the exporter at {self.address} did not answer within {limit:g} s") from None
        except OSError as error:
            raise _refused(self.address, error) from None
        return messages.reply(body)

    def pending(self) -> bool:
        """Whether a part of a message, or the end of the connection, can be read."""
        return bool(self._socket.pending() or readable(self._socket))

    def close(self) -> None:
        """Close the connection; another thread that waits for an answer gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            got = self._socket.recv_into(view[done:])
            if not got:
                raise ConnectionResetError("it was closed there")
            done += got
        return bytes(data)


def _encrypted(address: PeerAddress, ip: str, context: ssl.SSLContext, limit: float) -> ssl.SSLSocket:
    """Connect to one address of an exporter, which may take ``limit`` seconds for each step."""
    try:
        plain = socket.create_connection((ip, address.port), limit)
    except OSError as error:
        raise Unavailable(f"no exporter answers at {address}: {error.strerror or error}") from None
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return context.wrap_socket(plain, server_hostname=address.host)
    except (OSError, ssl.CertificateError) as error:
        plain.close()
        refused = _refused(address, error)
        if isinstance(refused, HungUp):  # the exporter has not seen our certificate
            raise Unavailable(f"{refused.message}; is it an exporter, or one that is full?") from None
        raise refused from None


def readable(connection: socket.socket) -> bool:
    """Whether data, or the end of the connection, can be read; select(2) accepts no descriptor above 1023."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _refused(address: PeerAddress, error: OSError | ssl.CertificateError) -> Unavailable | Denied:
    """Convert an error of a connection to one of ours, which says whose certificate is at fault, if one is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Denied(f"{address} is not trusted as an exporter of this cluster: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return HungUp(f"the connection to {address} is over: it was closed there")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        if "ALERT" in reason or "CERTIFICATE" in reason:
            told = reason.lower().replace("_", " ").removeprefix("tlsv13 alert ").removeprefix("sslv3 alert ")
            return Denied(f"the exporter at {address} rejects this host's certificate: {told}")
        return Unavailable(f"{address} does not speak TLS as an exporter does: {reason}; is it an exporter?")
    kind = HungUp if isinstance(error, ConnectionError) else Unavailable
    return kind(f"the connection to {address} is over: {error.strerror or error}")


# -- all peers -----------------------------------------------------------------------------------------


class PeersFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``peers.toml``."""

    peers: tuple[str, ...]


class PeerAnswer(NamedTuple):
    """A host's answer to the question what it offers."""

    address: PeerAddress
    #: None if the host did not answer.
    offers: Offers | None
    #: Why it did not; None if it did.
    error: CubrokerError | None


def known_peers(
    given: Sequence[str] = (), environ: Mapping[str, str] = os.environ, file: Path = PEERS_FILE
) -> tuple[str, ...]:
    """Return the peers that are given, else those of ``$CUBROKER_PEERS``, separated by commas, else those of the file.

    Raises:
        NotFound: none of these names a peer.
        Invalid: the file cannot be read, or has other content.
    """
    if given:
        return tuple(given)
    if named := [part.strip() for part in environ.get(PEERS_VARIABLE, "").split(",") if part.strip()]:
        return tuple(named)
    try:
        if found := msgspec.convert(tomllib.loads(file.read_text()), PeersFile).peers:
            return found
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"{file} cannot be read for peers: {error}") from None
    raise NotFound(f"no peers are known: name them by --from or ${PEERS_VARIABLE}, or in {file}")


def resolve(names: Iterable[str]) -> list[PeerAddress]:
    """Return the addresses of hosts in their order; a name that has several addresses yields all of them.

    A name that has one address of each family is one host, which a connection reaches at either. If a name has more,
    :attr:`PeerConnection.identity` tells which of them are the same host. A name that cannot be looked up stays as it
    is: a later lookup may find it.

    Raises:
        Invalid: no host can have such a name.
    """
    found: dict[PeerAddress, None] = {}
    for address in map(parse, names):
        try:
            ips = _look_up(address)
        except OSError:
            ips = ()
        several = len(ips) > len({":" in ip for ip in ips})
        found |= dict.fromkeys(address._replace(ips=(ip,)) for ip in ips) if several else {address: None}
    return list(found)


def _look_up(address: PeerAddress) -> tuple[str, ...]:
    """Return the addresses that a host's name has; raises ``OSError``."""
    entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


def ask_peers(addresses: Sequence[PeerAddress], certificates: Path) -> list[PeerAnswer]:
    """Ask all hosts at the same time what they offer to the user that our certificate names.

    Of a host that answers with the same versions at several addresses one answer is returned, with these addresses.
    """

    def one(address: PeerAddress) -> tuple[object, PeerAnswer]:
        try:
            with PeerConnection(address, certificates) as connection:
                offers = connection.ask(messages.List(), Offers)
        except CubrokerError as error:
            return address, PeerAnswer(address, None, error)
        versions = tuple((offer.name, offer.version) for offer in offers.offers)
        return (connection.identity or address, versions), PeerAnswer(address, offers, None)

    if not addresses:
        raise Unavailable("there is no host to ask")
    with ThreadPoolExecutor(min(AT_ONCE, len(addresses)), "cubroker-peers") as pool:
        found: dict[object, PeerAnswer] = {}
        for host, answer in pool.map(one, addresses):
            same = found.get(host)
            found[host] = same._replace(address=same.address.with_ips(answer.address)) if same else answer
    return list(found.values())
