"""The identities of hosts and users: their certificates for TLS 1.3, and what the user in a certificate may read.

Every host and every user of a cluster has a certificate of one authority, which the cluster's operator keeps. A folder
has three files: ``ca.pem``, the authority's certificate; ``cert.pem`` and ``key.pem``, the holder's own; and
``crl.pem`` if certificates have been revoked. ``cubroker certificates`` makes them
(:mod:`~cubroker.integrations.cluster.certificates`). Any other authority can make them if it fills in the same fields:

- A certificate for a user has the user's name as its common name, and is for TLS clients. An exporter looks the name up
  on its own host: the modes of pools hold for that account there.
- A certificate for a host has the names and addresses by which others reach it, and is for TLS servers. A fetching host
  checks that the exporter's has the name that it asked for.

OpenSSL checks certificates: signature, time, purpose, name and revocation. No message is sent before that.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import ssl
import stat
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from cubroker.protocol.errors import Denied, Invalid, NotFound
from cubroker.protocol.status import PoolInfo

VARIABLE = "CUBROKER_CERTIFICATES"
FOLDER = Path("/etc/cubroker/cluster")
"""The folder with the certificates, if neither an argument nor the variable names one."""

CA, CERTIFICATE, KEY, REVOKED = "ca.pem", "cert.pem", "key.pem", "crl.pem"
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""The random id that the kernel chose when this host started."""

_NUMBERS = r"(?i:(0x[0-9a-f]+|[0-9]*)(\.(0x[0-9a-f]+|[0-9]*))*)"
"""Texts that are an IPv4 address or none, and no name."""

READ = 4
"""The bit of a mode that lets a class of users attach."""


class Account(NamedTuple):
    """A user of this host."""

    name: str
    uid: int
    #: All of its groups, by number.
    groups: frozenset[int]


def find_folder(folder: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder with the certificates: the one that is given, else the variable's, else the host's."""
    return Path(folder or environ.get(VARIABLE) or FOLDER)


def serving_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS context of an exporter, which requires a certificate of every client.

    Raises:
        NotFound: a file is missing.
        Denied: a file may not be read, or others may read the key.
        Invalid: a file has other content.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder)
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
    return _context(ssl.PROTOCOL_TLS_CLIENT, folder)


def _context(protocol: int, folder: Path) -> ssl.SSLContext:
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


def host(directory: Path) -> bytes:
    """Return an id of a broker and its host, the same for all its clients; empty if there is no such directory."""
    try:
        found = directory.stat()
        boot = BOOT.read_bytes()
    except OSError:
        return b""
    return blake2b(b"%s %d %d" % (boot, found.st_dev, found.st_ino), digest_size=16).digest()


def named_user(certificate: Mapping[str, object]) -> str:
    """Return the common name in the result of :meth:`ssl.SSLSocket.getpeercert`; empty unless there is exactly one."""
    subject = certificate.get("subject", ())
    assert isinstance(subject, tuple)
    names = [str(value) for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def account(name: str) -> Account:
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

    Args:
        reader: the user.
        pool: the version.
        coming: the mode that the pool will have once the version is published, which has to allow it, too.
    """
    if reader.uid in (0, pool.owner):
        return True
    mode = pool.mode if coming is None else pool.mode & coming
    return bool(mode >> (3 if pool.group in reader.groups else 0) & READ)


def can_be_host(host: str) -> bool:
    """Whether the system's functions accept a text as a name or an address, and do not reject the argument itself.

    False also for an address that the user did not mean: these functions read ``1.2.3`` as ``1.2.0.3``.
    """
    try:
        read = host.encode("idna").decode()  # as these functions do, so that other digits become ASCII ones
    except UnicodeError:  # a part is empty, or too long
        return False
    known = bool(read) and host.isprintable() and not any(c in " /[]" for c in host)
    return known and (address(host) is not None or not re.fullmatch(_NUMBERS, read))


def check_host(host: str) -> None:
    """Raise ``Invalid`` unless a certificate can be for a host of this name or address."""
    if address(host) is None and (not host.isascii() or ":" in host or not can_be_host(host)):
        raise Invalid(f"{host[:80]!r} is no name or address of a host: write it as gpu-1 or 10.0.0.1, without a port")


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is named by; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
