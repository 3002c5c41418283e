"""Certificates of a cluster (:mod:`~cubroker.integrations.cluster.connection`): made, revoked and read.

Keys that are made here are of the curve P-256. An authority's key signs and does nothing else; keep its folder on a
host that neither exports nor fetches.

This module needs the package ``cryptography``.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cubroker.integrations.cluster.connection import CA, CERTIFICATE, KEY, REVOKED, check_host, parse_ip
from cubroker.protocol.errors import Denied, Exists, Invalid, NotFound, Unsupported, reason

LOCK = "crl.lock"
"""The file in an authority's folder that is locked while the list of revoked certificates is changed."""

CURVE = ec.SECP256R1()

AUTHORITY_KEY = "ca-key.pem"
AUTHORITY_DAYS = 3650
DAYS = 365
"""How long certificates are valid by default."""

EARLY = timedelta(minutes=5)
"""Certificates are valid from this long before they are made: clocks of hosts differ."""


def make_authority(folder: Path, name: str = "cubroker cluster", days: int = AUTHORITY_DAYS) -> Path:
    """Make an authority: its certificate and its key, in a folder; returns the certificate's path.

    Raises:
        Exists: the folder has one.
    """
    if (folder / AUTHORITY_KEY).exists() or (folder / CA).exists():
        raise Exists(
            f"{folder} has an authority, and a new one would make all its certificates void; name another folder"
        )
    key = ec.generate_private_key(CURVE)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates and CRLs
    certificate = _begun(name, None, key, days).add_extension(usage, critical=True).sign(key, hashes.SHA256())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _write(
        (folder / AUTHORITY_KEY, _key_text(key), 0o600), (folder / CA, certificate.public_bytes(Encoding.PEM), 0o644)
    )


def issue(authority: Path, folder: Path, user: str, hosts: Sequence[str] = (), days: int = DAYS) -> Path:
    """Make a certificate and its key, and put them into a folder with the authority's certificate.

    Args:
        authority: the folder of :func:`make_authority`.
        folder: where the three files go.
        user: the account that the holder is on exporting hosts.
        hosts: names and addresses by which others reach the holder's host; without any it cannot export.
        days: how long the certificate is valid; it ends with the authority at the latest.

    Returns:
        the certificate's path.

    Raises:
        NotFound: there is no authority.
        Exists: the folder has a certificate, or another authority's, or an authority's key.
        Invalid: the authority cannot be read, or has ended, or no user or host can have such a name.
    """
    if not (0 < len(user.encode(errors="replace")) <= 64 and user.isprintable()):
        raise Invalid(f"{user[:80]!r} cannot be the user of a certificate; give the name of an account")
    signer, issuer = _authority(authority)
    if (end := issuer.not_valid_after_utc) < datetime.now(UTC):
        raise Invalid(f"the authority in {authority} expired on {end:%Y-%m-%d %H:%M} UTC; make another")
    if (folder / AUTHORITY_KEY).exists():
        raise Exists(f"{folder} has the key of an authority, which no host may get; name another folder")
    if (folder / KEY).exists() or (folder / CERTIFICATE).exists():
        raise Exists(f"{folder} has a certificate, which is not replaced; name another folder, or delete it first")
    if (folder / CA).exists() and (folder / CA).read_bytes() != issuer.public_bytes(Encoding.PEM):
        raise Exists(f"{folder} has the certificate of another authority; name another folder, or delete it first")
    key = ec.generate_private_key(CURVE)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = (
        _begun(user, issuer, key, days)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([*map(_reached, hosts)]), critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    common = [] if (folder / CA).exists() else [(folder / CA, issuer.public_bytes(Encoding.PEM), 0o644)]
    own = (folder / KEY, _key_text(key), 0o600), (folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM), 0o644)
    return _write(*common, *own)


def revoke(authority: Path, certificate: Path) -> Path:
    """Add a certificate to the list of those that are revoked, and return the list's path.

    The list, ``crl.pem`` in the authority's folder, takes effect on hosts that have a copy next to their certificates.

    Args:
        authority: the folder of :func:`make_authority`.
        certificate: its file, or its folder.

    Raises:
        NotFound: there is no authority, or no certificate.
        Invalid: the certificate is not one of that authority, or is the authority's own.
        Unsupported: the folder's filesystem has no locks.
    """
    signer, issuer = _authority(authority)
    found = read(certificate)
    try:
        found.verify_directly_issued_by(issuer)  # names prove nothing: most authorities have the same one
    except (ValueError, TypeError, InvalidSignature):
        raise Invalid(f"{certificate} is of another authority than {authority}, which cannot revoke it") from None
    if found.public_key() == issuer.public_key():
        raise Invalid(
            f"{certificate} is the authority's own certificate, which no list revokes; make another authority, and"
            f" replace all its certificates and {CA} on every host"
        )
    now, path = datetime.now(UTC), authority / REVOKED
    entries = {found.serial_number: now}
    with _alone(authority):
        if path.exists():
            try:
                revoked = x509.load_pem_x509_crl(path.read_bytes())
            except ValueError:
                raise Invalid(f"{path} is no list of revoked certificates, and is not replaced") from None
            entries |= {each.serial_number: each.revocation_date_utc for each in revoked}
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(issuer.subject)
            .last_update(now)
            .next_update(now + timedelta(days=AUTHORITY_DAYS))
        )
        for serial, when in entries.items():
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
            builder = builder.add_revoked_certificate(entry)
        partial = path.with_suffix(".new")
        partial.unlink(missing_ok=True)
        _write((partial, builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM), 0o644)).replace(path)
    return path


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, after waiting for it: of two calls that change the list, one would undo the other's.

    The lock is on a regular file that is open for writing, the only kind of lock that NFS passes on to its server. So
    on a shared folder it excludes calls of other hosts as well, unless a host has mounted the folder with ``nolock`` or
    ``local_lock``.

    If root creates the file, it gives the file to the owner of the folder, who may be the next to revoke. It does not
    do so with an existing file, since a link there could refer to any file.

    Raises:
        Denied: the file is a symbolic link, or belongs to another user.
        Unsupported: the filesystem has no locks.
    """
    path, owner = folder / LOCK, folder.stat()
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        else:
            with suppress(PermissionError):
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES):
            raise
        why = f"{path} cannot be locked: {reason(error)}; remove it, it has no content, and revoke again"
        raise Denied(why) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise Unsupported(
                f"{path} cannot be locked: {reason(error)}; copy {folder} to a filesystem that has locks, and revoke"
                f" there"
            ) from error
        yield
    finally:
        os.close(descriptor)


class Named(NamedTuple):
    """The content of a certificate."""

    user: str
    #: Names and addresses of the holder's host.
    hosts: tuple[str, ...]
    #: When the certificate expires.
    until: datetime
    #: Whether it is an authority's, whose name ``user`` is.
    authority: bool


def describe(certificate: Path) -> Named:
    """Return the content of a certificate, given its file or the folder that has it; raises as :func:`revoke` does."""
    found = read(certificate)
    users = [str(each.value) for each in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    extensions = {type(each.value): each.value for each in found.extensions}
    names = extensions.get(x509.SubjectAlternativeName, ())
    basic = extensions.get(x509.BasicConstraints)
    return Named(
        user=", ".join(users),
        hosts=tuple(str(each.value) for each in names),
        until=found.not_valid_after_utc,
        authority=basic is not None and basic.ca,
    )


def read(certificate: Path) -> Any:
    """Return a certificate from its file, or from the folder that has it; raises ``NotFound`` or ``Invalid``."""
    path = certificate / CERTIFICATE if certificate.is_dir() else certificate
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no certificate at {path}") from None
    except ValueError:
        raise Invalid(f"{path} is no certificate in PEM") from None


def _authority(folder: Path) -> tuple[Any, Any]:
    try:
        signer = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
        issuer = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{folder} has no authority; make one with `cubroker certificates authority`") from None
    except (ValueError, TypeError):  # TypeError: the key has a password
        raise Invalid(
            f"the authority in {folder} cannot be read: {AUTHORITY_KEY} or {CA} is damaged, or has a password"
        ) from None
    if signer.public_key() != issuer.public_key():
        raise Invalid(
            f"the authority in {folder} cannot sign: {AUTHORITY_KEY} is not the key of {CA}; find the right one"
        )
    return signer, issuer


def _begun(subject: str, issuer: Any, key: Any, days: int) -> Any:
    """Return what every certificate has; ``issuer`` is the authority's, None for its own."""

    def named(name: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.now(UTC)
    by, until = named(subject), now + timedelta(days=days)
    if issuer:
        by, until = issuer.subject, min(until, issuer.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=not issuer, path_length=None if issuer else 0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _reached(host: str) -> Any:
    check_host(host)
    found = parse_ip(host)
    return x509.DNSName(host) if found is None else x509.IPAddress(found)


def _key_text(key: Any) -> bytes:
    text: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return text


def _write(*files: tuple[Path, bytes, int]) -> Path:
    """Create files, with their modes from the start: all of them, or none; returns the last path."""
    with ExitStack() as undo:
        for path, text, mode in files:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                undo.callback(path.unlink)
                file.write(text)
        undo.pop_all()
    return path
