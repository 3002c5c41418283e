"""The identities of hosts and users: their certificates for TLS 1.3, and what the user in a certificate may read.

Every host and every user of a cluster has a certificate of one authority, which the cluster's operator keeps. A folder
has three files: ``ca.pem``, the authority's certificate; ``cert.pem`` and ``key.pem``, the holder's own; and
``crl.pem`` if certificates have been revoked. ``cubroker certificates`` makes them (:func:`make_authority`,
:func:`issue`). Any other authority can make them if it fills in the same fields:

- A certificate for a user has the user's name as its common name, and is for TLS clients. An exporter looks the name up
  on its own host: the modes of pools hold for that account there.
- A certificate for a host has the names and addresses by which others reach it, and is for TLS servers. A fetching host
  checks that the exporter's has the name that it asked for.

OpenSSL checks certificates: signature, time, purpose, name and revocation. No message is sent before that.

Keys that are made here are of the curve P-256. An authority's key signs and does nothing else; keep its folder on a
host that neither exports nor fetches.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import pwd
import re
import ssl
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from cubroker.protocol.errors import Denied, Exists, Invalid, NotFound, Unsupported, needing, reason
from cubroker.protocol.status import PoolInfo

VARIABLE = "CUBROKER_CERTIFICATES"
FOLDER = Path("/etc/cubroker/cluster")
"""The folder with the certificates, if neither an argument nor the variable names one."""

CA, CERTIFICATE, KEY, REVOKED = "ca.pem", "cert.pem", "key.pem", "crl.pem"
LOCK = "crl.lock"
"""The file in an authority's folder that is locked while the list of revoked certificates is changed."""

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


# -- making certificates -------------------------------------------------------------------------------

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
        Unsupported: the package ``cryptography`` is not installed.
    """
    with needing("making certificates", "cubroker[nixl]"):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
    if (folder / AUTHORITY_KEY).exists() or (folder / CA).exists():
        raise Exists(
            f"{folder} has an authority, and a new one would make all its certificates void; name another folder"
        )
    key = _new_key()
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates and CRLs
    certificate = (
        _begun(name, None, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _write((folder / AUTHORITY_KEY, _key_text(key), 0o600), (folder / CA, _text(certificate), 0o644))


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
        Unsupported: the package ``cryptography`` is not installed.
    """
    with needing("making certificates", "cubroker[nixl]"):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID
    if not (0 < len(user.encode(errors="replace")) <= 64 and user.isprintable()):
        raise Invalid(f"{user[:80]!r} cannot be the user of a certificate; give the name of an account")
    signer, issuer = _authority(authority)
    if (end := issuer.not_valid_after_utc) < datetime.now(UTC):
        raise Invalid(f"the authority in {authority} expired on {end:%Y-%m-%d %H:%M} UTC; make another")
    if (folder / AUTHORITY_KEY).exists():
        raise Exists(f"{folder} has the key of an authority, which no host may get; name another folder")
    if (folder / KEY).exists() or (folder / CERTIFICATE).exists():
        raise Exists(f"{folder} has a certificate, which is not replaced; name another folder, or delete it first")
    if (folder / CA).exists() and (folder / CA).read_bytes() != _text(issuer):
        raise Exists(f"{folder} has the certificate of another authority; name another folder, or delete it first")
    key = _new_key()
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = (
        _begun(user, issuer, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([*map(_reached, hosts)]), critical=False)
    certificate = builder.sign(signer, hashes.SHA256())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    common = [] if (folder / CA).exists() else [(folder / CA, _text(issuer), 0o644)]
    own = (folder / KEY, _key_text(key), 0o600), (folder / CERTIFICATE, _text(certificate), 0o644)
    return _write(*common, *own)


def revoke(authority: Path, certificate: Path) -> Path:
    """Add a certificate to the list of those that are revoked, and return the list's path.

    The list, ``crl.pem`` in the authority's folder, takes effect on hosts that have a copy next to their certificates.

    Args:
        authority: the folder of :func:`make_authority`.
        certificate: the file with the certificate, or its folder.

    Raises:
        NotFound: there is no authority, or no certificate.
        Invalid: the certificate is not one of that authority, or is the authority's own.
        Unsupported: the package ``cryptography`` is not installed, or the folder's filesystem has no locks.
    """
    with needing("revoking certificates", "cubroker[nixl]"):
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
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
        text: bytes = _text(builder.sign(signer, hashes.SHA256()))
        partial = path.with_suffix(".new")
        partial.unlink(missing_ok=True)
        _write((partial, text, 0o644)).replace(path)
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
    with needing("reading certificates", "cubroker[nixl]"):
        from cryptography import x509
        from cryptography.x509.oid import NameOID
    found = read(certificate)
    users = [str(each.value) for each in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = []
    try:
        authority = bool(found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        authority = False
    return Named(", ".join(users), tuple(str(each.value) for each in names), found.not_valid_after_utc, authority)


def read(certificate: Path) -> Any:
    """Return a certificate from its file, or from the folder that has it; raises ``NotFound`` or ``Invalid``."""
    from cryptography import x509

    path = certificate / CERTIFICATE if certificate.is_dir() else certificate
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no certificate at {path}") from None
    except ValueError:
        raise Invalid(f"{path} is no certificate in PEM") from None


def _authority(folder: Path) -> tuple[Any, Any]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        signer = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
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
    from cryptography import x509
    from cryptography.x509.oid import NameOID

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
    )


def can_be_host(host: str) -> bool:
    """Whether the system's functions accept a text as a name or an address, and do not reject the argument itself.

    False also for an address that the user did not mean: these functions read ``1.2.3`` as ``1.2.0.3``.
    """
    try:
        read = host.encode("idna").decode()  # as these functions do, so that other digits become ASCII ones
    except UnicodeError:  # a part is empty, or too long
        return False
    known = bool(read) and host.isprintable() and not any(c in " /[]" for c in host)
    return known and (_address(host) is not None or not re.fullmatch(_NUMBERS, read))


def check_host(host: str) -> None:
    """Raise ``Invalid`` unless a certificate can be for a host of this name or address."""
    if _address(host) is None and (not host.isascii() or ":" in host or not can_be_host(host)):
        raise Invalid(f"{host[:80]!r} is no name or address of a host: write it as gpu-1 or 10.0.0.1, without a port")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _reached(host: str) -> Any:
    from cryptography import x509

    check_host(host)
    address = _address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_text(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    plain = serialization.NoEncryption()
    text: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return text


def _text(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    text: bytes = certificate.public_bytes(serialization.Encoding.PEM)
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
