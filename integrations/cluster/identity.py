"""Who speaks: certificates of both sides, TLS 1.3 between them, and what the user may read whom a certificate names.

Every host and every user of a cluster has a certificate of one authority, which the cluster's operator keeps. A folder
has three files: ``ca.pem``, the authority's certificate; ``cert.pem`` and ``key.pem``, this one's own; and ``crl.pem``
if certificates have been revoked. ``cubroker certificates`` makes them; any authority that fills in the same fields
will do:

- A certificate for a user has the user's name as its common name, and is for TLS clients. An exporter looks the name up
  on its own host: the modes of pools hold for that account there.
- A certificate for a host has the names and addresses by which others reach it, and is for TLS servers. A fetching host
  checks that the exporter's has the name that it asked for.

Certificates are checked by OpenSSL: signature, time, purpose, name and revocation. Nothing is said before that.
"""

from __future__ import annotations

import os
import pwd
import ssl
import stat
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from cubroker.protocol.errors import Denied, Invalid, NotFound
from cubroker.protocol.status import PoolInfo

VARIABLE = "CUBROKER_CERTIFICATES"
FOLDER = Path("/etc/cubroker/cluster")
"""Where certificates are, if neither an argument nor the variable says so."""

CA, CERTIFICATE, KEY, REVOKED = "ca.pem", "cert.pem", "key.pem", "crl.pem"

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""What the kernel chose by chance when this host started."""

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
    """Return what an exporter accepts connections with: no certificate, no answer.

    Raises:
        NotFound: a file is missing.
        Denied: a file may not be read, or others may read the key.
        Invalid: a file is none of the kind.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, folder)
    context.num_tickets = 0  # each connection shows a certificate, which may have been revoked since the last
    return context


def asking_context(folder: Path) -> ssl.SSLContext:
    """Return what a fetching host connects with; raises as :func:`serving_context` does."""
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
    """Return which broker of which host this is, the same for all its clients; empty if none serves there."""
    try:
        found = directory.stat()
        boot = BOOT.read_bytes()
    except OSError:
        return b""
    return blake2b(b"%s %d %d" % (boot, found.st_dev, found.st_ino), digest_size=16).digest()


def named_user(certificate: Mapping[str, object]) -> str:
    """Return the common name in a certificate, as :meth:`ssl.SSLSocket.getpeercert` has it; empty if there is none."""
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
    except (KeyError, ValueError):  # which has a NUL
        raise Denied(f"the certificate names user {name!r}, whom the exporting host does not have") from None
    return Account(name, entry.pw_uid, frozenset(os.getgrouplist(name, entry.pw_gid)))


def can_read(reader: Account, pool: PoolInfo, coming: int | None = None) -> bool:
    """Whether a user may fetch a version: by the mode of its pool, as a process of this host might attach to it.

    Args:
        reader: the user.
        pool: the version.
        coming: the mode that the pool will have once the version is published, which has to allow it, too.
    """
    if reader.uid in (0, pool.owner):
        return True
    mode = pool.mode if coming is None else pool.mode & coming
    return bool(mode >> (3 if pool.group in reader.groups else 0) & READ)
