"""Peers, as a fetching host has them: which there are, their addresses, and a connection to one.

Peers are given one by one, or in a file, or by a name that has many addresses, as a headless service of Kubernetes has.
A connection is blocking, with a time limit for everything.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from cubroker.integrations.cluster import identity, messages
from cubroker.integrations.cluster.messages import M, Offers, PeerWelcome, Reply, Request
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, Unavailable

CONNECT = 10.0
"""Seconds that an exporter has to accept a connection, to show its certificate, and to answer."""

PEERS_VARIABLE = "CUBROKER_PEERS"
PEERS_FILE = identity.FOLDER / "peers.toml"
"""Where peers are, if neither an argument nor the variable says so: ``peers = ["gpu-1", "gpu-2:7411"]``."""

AT_ONCE = 32
"""Hosts that are asked at once."""


class PeerAddress(NamedTuple):
    """Where an exporter is."""

    #: The name or address that the user gave, which the exporter's certificate has to have.
    host: str
    port: int
    #: The address to connect to, of a name that has several; empty: whichever the name has.
    ip: str = ""

    def __str__(self) -> str:
        where = f"{self.host} ({self.ip})" if self.ip and self.ip != self.host else self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{where}:{self.port}"


def parse(text: str, *, least: int = 1) -> PeerAddress:
    """Return the address that ``HOST``, ``HOST:PORT`` or ``[ADDRESS]:PORT`` names; raises ``Invalid``.

    Args:
        text: what a user wrote.
        least: the lowest port; 0 for an address to listen at, where it stands for any that is free.
    """
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon or (":" in host and not host.startswith("[")):  # a bare address of version 6
        host, port = text, str(messages.PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not identity.can_be_host(host) or not port.isascii() or not port.isdecimal():
        raise Invalid(f"{text[:80]!r} names no exporter; write HOST, HOST:PORT or [ADDRESS]:PORT")
    if len(port) > 5 or not least <= int(port) < 1 << 16:
        raise Invalid(f"{text[:80]!r} has no port that there can be")
    return PeerAddress(host, int(port))


class HungUp(Unavailable):
    """The exporter has closed the connection."""


class OwnHost(Invalid):
    """The exporter is that of this host's own broker."""


class PeerConnection:
    """A connection to an exporter. Not safe for threads.

    Args:
        address: where it is.
        certificates: the folder with this side's.
        own: this side's broker, as :func:`~cubroker.integrations.cluster.identity.host` has it; empty: any will do.

    Raises:
        OwnHost: it exports from that broker.
        Unavailable: it cannot be reached, does not answer, or is no exporter.
        Denied: it has no certificate of its name by our authority, or does not take ours.
        CubrokerError: as :func:`~cubroker.integrations.cluster.identity.asking_context` says.
    """

    def __init__(self, address: PeerAddress, certificates: Path, own: bytes = b"") -> None:
        self.address = address
        context = identity.asking_context(certificates)
        try:
            welcome = self._greet(context)
        except HungUp:  # it may be on its way down: then it cannot be reached now
            try:
                welcome = self._greet(context)
            except HungUp:
                raise Denied(
                    f"{address} ended the connection when it had seen this host's certificate: that has expired, was"
                    " revoked, is of another authority or not for clients; its log says which"
                ) from None
        #: The user of the exporting host whose permissions we have there.
        self.user = welcome.user
        if own and welcome.host == own:
            self._socket.close()
            raise OwnHost(f"{address} is this host itself, which has nothing new for it; name another one")

    def _greet(self, context: ssl.SSLContext) -> PeerWelcome:
        """Connect and say hello.

        Raises:
            Ended: it hung up after the handshake. That is how an exporter says that it does not take our certificate.
        """
        self._socket = self._connect(context)
        try:
            return self.ask(messages.PeerHello(messages.VERSION), PeerWelcome)
        except BaseException:
            self._socket.close()
            raise

    def _connect(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        address = self.address
        try:
            plain = socket.create_connection((address.ip or address.host, address.port), CONNECT)
        except OSError as error:
            raise Unavailable(f"no exporter answers at {address}: {error.strerror or error}") from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return context.wrap_socket(plain, server_hostname=address.host)
        except (OSError, ssl.CertificateError) as error:
            plain.close()
            refused = _refused(address, error)
            if isinstance(refused, HungUp):  # it has not seen our certificate
                raise Unavailable(f"{refused.message}; is it an exporter, or one that is full?") from None
            raise refused from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, request: Request, kind: type[M], limit: float = CONNECT) -> M:
        """Send a request and return its answer.

        Args:
            request: what to ask.
            kind: what the answer is.
            limit: seconds that it may take.

        Raises:
            CubrokerError: the exporter refused.
            Unavailable: the connection is over, or the answer does not come.
            Denied: the exporter does not take our certificate, which it says late.
        """
        self.say(request)
        return self.hear(kind, limit)

    def say(self, request: Request) -> None:
        """Send a request; its answer is to be heard. Raises as :meth:`ask` does."""
        try:
            self._socket.settimeout(CONNECT)
            self._socket.sendall(messages.frame(request))
        except OSError as error:
            raise _refused(self.address, error) from None

    def hear(self, kind: type[M], limit: float = CONNECT) -> M:
        """Return what the exporter says next, within ``limit`` seconds; raises as :meth:`ask` does."""
        return messages.expect(self.hear_any(limit), kind)

    def hear_any(self, limit: float = CONNECT) -> Reply:
        """Return what the exporter says next, which may be a refusal; raises as :meth:`hear` does."""
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
        """Whether something is there to be heard."""
        return bool(self._socket.pending() or readable(self._socket))

    def close(self) -> None:
        """Close the connection; what waits for an answer in another thread gets an error."""
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


def readable(connection: socket.socket) -> bool:
    """Whether something is there to be read, or the end; select(2) takes no descriptor past 1023."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _refused(address: PeerAddress, error: OSError | ssl.CertificateError) -> Unavailable | Denied:
    """Return an error of a connection in our words: whose certificate is at fault, if one is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Denied(f"{address} is not taken for an exporter of this cluster: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return HungUp(f"the connection to {address} is over: it was closed there")
    if isinstance(error, ssl.SSLError):
        reason = error.reason or str(error)
        if "ALERT" in reason or "CERTIFICATE" in reason:
            told = reason.lower().replace("_", " ").removeprefix("tlsv13 alert ").removeprefix("sslv3 alert ")
            return Denied(f"the exporter at {address} does not take this host's certificate: {told}")
        return Unavailable(f"{address} speaks no TLS that is understood here: {reason}; is it an exporter?")
    kind = HungUp if isinstance(error, ConnectionError) else Unavailable
    return kind(f"the connection to {address} is over: {error.strerror or error}")


# -- all of them ---------------------------------------------------------------------------------------


class PeersFile(Struct, frozen=True, forbid_unknown_fields=True):
    """What ``peers.toml`` says."""

    peers: tuple[str, ...]


class PeerAnswer(NamedTuple):
    """What a host said of itself."""

    address: PeerAddress
    #: What it offers; None: it did not say.
    offers: Offers | None
    #: Why not.
    error: CubrokerError | None


def known_peers(
    given: Sequence[str] = (), environ: Mapping[str, str] = os.environ, file: Path = PEERS_FILE
) -> tuple[str, ...]:
    """Return the peers that are given, else those of ``$CUBROKER_PEERS``, separated by commas, else those of the file.

    Raises:
        NotFound: none of them says any.
        Invalid: the file is no such file.
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
    """Return the addresses of hosts in their order; a name that has several stands for all of them.

    A name that cannot be looked up stays as it is: it may come to be known.

    Raises:
        Invalid: a name that no host can have.
    """
    found: dict[PeerAddress, None] = {}
    for address in map(parse, names):
        try:
            entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError:
            found[address] = None
            continue
        # Of a host that has addresses of both families the one is enough, and only one may be listened at.
        ips = dict.fromkeys(str(entry[4][0]) for entry in entries if entry[0] == entries[0][0])
        for ip in ips:
            found[address._replace(ip=ip if len(ips) > 1 else "")] = None
    return list(found)


def ask_peers(addresses: Sequence[PeerAddress], certificates: Path) -> list[PeerAnswer]:
    """Ask hosts what they have for the user that our certificate names, all at once."""

    def one(address: PeerAddress) -> PeerAnswer:
        try:
            with PeerConnection(address, certificates) as connection:
                return PeerAnswer(address, connection.ask(messages.List(), Offers), None)
        except CubrokerError as error:
            return PeerAnswer(address, None, error)

    if not addresses:
        raise Unavailable("there is no host to ask")
    with ThreadPoolExecutor(min(AT_ONCE, len(addresses)), "cubroker-peers") as pool:
        return list(pool.map(one, addresses))
