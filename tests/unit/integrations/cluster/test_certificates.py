"""Certificates: how they are made, revoked and read."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cubroker.protocol.errors import Denied, Exists, Invalid, NotFound, Unsupported
from tests.brokers import eventually
from tests.unit.integrations.cluster.hosts import Certificates, private_key

x509 = pytest.importorskip("cryptography.x509")

from cubroker.integrations.cluster.certificates import describe, issue, make_authority, read, revoke  # noqa: E402


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return make_authority(tmp_path / "authority").parent


def modes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_authority_is_a_certificate_and_a_key_that_others_cannot_read(tmp_path: Path) -> None:
    path = make_authority(tmp_path / "a" / "b", "my cluster", days=10)
    assert path == tmp_path / "a" / "b" / "ca.pem"
    assert modes(path.parent) == {"ca.pem": 0o644, "ca-key.pem": 0o600}
    assert path.parent.stat().st_mode & 0o777 == 0o700
    found = read(path)
    constraints = found.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 0)
    assert timedelta(days=9) < found.not_valid_after_utc - datetime.now(UTC) <= timedelta(days=10)


def test_an_authority_is_not_replaced(authority: Path) -> None:
    before = contents(authority)
    with pytest.raises(Exists, match="has an authority, and a new one would make all its certificates void"):
        make_authority(authority)
    assert contents(authority) == before
    (authority / "ca-key.pem").unlink()
    with pytest.raises(Exists):
        make_authority(authority)


def purposes(path: Path) -> set[str]:
    usage = read(path).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    return {each._name for each in usage}


def test_a_certificate_of_a_host_is_for_both_sides_and_one_of_a_user_is_not(authority: Path, tmp_path: Path) -> None:
    host = issue(authority, tmp_path / "host", "root", ["gpu-1", "10.0.0.1", "::1"])
    user = issue(authority, tmp_path / "user", "alice", days=2)
    assert host == tmp_path / "host" / "cert.pem"
    assert modes(host.parent) == {"ca.pem": 0o644, "cert.pem": 0o644, "key.pem": 0o600}
    assert host.with_name("ca.pem").read_bytes() == (authority / "ca.pem").read_bytes()
    assert purposes(host) == {"clientAuth", "serverAuth"}
    assert purposes(user) == {"clientAuth"}
    named = describe(host.parent)
    assert (named.user, named.hosts) == ("root", ("gpu-1", "10.0.0.1", "::1"))
    named = describe(user)
    assert (named.user, named.hosts) == ("alice", ())
    assert timedelta(days=1) < named.until - datetime.now(UTC) <= timedelta(days=2)


@pytest.mark.parametrize("user", ["", "a\nb", "a\0b", "\x1b[31m", "x" * 65, "ü" * 33, "\ud800"])
def test_a_name_that_no_account_has_is_invalid(authority: Path, tmp_path: Path, user: str) -> None:
    with pytest.raises(Invalid, match="cannot be the user of a certificate"):
        issue(authority, tmp_path / "new", user)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "host",
    [
        *("", "gpu-1:7411", "gpu 1", "gpu/1", "münchen", "[::1]", "a" * 64, "a..b", "a\0b"),
        *("1.2.3", "10.0.0.256", "10.0.0.1.", "10.0.0.01", "7", "10.0.0.1:7411", "::1::"),
    ],
)
def test_a_name_that_no_host_has_is_invalid(authority: Path, tmp_path: Path, host: str) -> None:
    with pytest.raises(Invalid, match="is no name or address of a host"):
        issue(authority, tmp_path / "new", "root", ["gpu-1", host])
    assert not (tmp_path / "new").exists()


def test_a_certificate_is_not_replaced(authority: Path, tmp_path: Path) -> None:
    folder = issue(authority, tmp_path / "host", "root").parent
    before = contents(folder)
    for name in ("cert.pem", "key.pem"):
        with pytest.raises(Exists, match="has a certificate, which is not replaced"):
            issue(authority, folder, "root")
        assert contents(folder) == before
        (folder / name).unlink()
        before.pop(name)
    issue(authority, folder, "root")  # it has the authority's still
    assert {*contents(folder)} == {"ca.pem", "cert.pem", "key.pem"}


def test_the_certificate_of_another_authority_is_not_replaced(authority: Path, tmp_path: Path) -> None:
    folder = issue(make_authority(tmp_path / "other").parent, tmp_path / "host", "root").parent
    (folder / "cert.pem").unlink()
    (folder / "key.pem").unlink()
    before = contents(folder)
    with pytest.raises(Exists, match="has the certificate of another authority"):
        issue(authority, folder, "root")
    assert contents(folder) == before


def test_a_certificate_is_not_put_beside_the_key_of_an_authority(authority: Path, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other").parent
    (tmp_path / "link").symlink_to(authority)
    for folder in (authority, other, tmp_path / "link", authority / ".." / authority.name):
        before = contents(folder)
        with pytest.raises(Exists, match=r"has the key of an authority, which no host may get; name another folder"):
            issue(authority, folder, "root")
        assert contents(folder) == before


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "brief", days=2).parent
    path = issue(authority, tmp_path / "host", "root", days=365)
    assert describe(path).until == describe(authority / "ca.pem").until
    assert describe(issue(authority, tmp_path / "other", "root", days=1)).until < describe(path).until
    ended = make_authority(tmp_path / "ended", days=-0.001).parent  # type: ignore[arg-type]
    with pytest.raises(Invalid, match=r"the authority in .*/ended expired on .* UTC; make another"):
        issue(ended, tmp_path / "late", "root")
    assert not (tmp_path / "late").exists()


def test_the_key_of_another_authority_signs_nothing(authority: Path, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other").parent
    (authority / "ca.pem").write_bytes((other / "ca.pem").read_bytes())
    with pytest.raises(Invalid, match=r"ca-key\.pem is not the key of ca\.pem"):
        issue(authority, tmp_path / "host", "root")
    assert not (tmp_path / "host").exists()


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem"])
def test_without_an_authority_nothing_is_made(authority: Path, tmp_path: Path, name: str) -> None:
    (authority / name).unlink()
    with pytest.raises(NotFound, match="has no authority; make one with `cubroker certificates authority`"):
        issue(authority, tmp_path / "new", "root")
    with pytest.raises(NotFound, match="has no authority"):
        revoke(authority, tmp_path)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem"])
def test_a_damaged_authority_is_named(authority: Path, tmp_path: Path, name: str) -> None:
    (authority / name).write_text("damaged")
    with pytest.raises(Invalid, match=re.escape(f"the authority in {authority} cannot be read")):
        issue(authority, tmp_path / "new", "root")


def test_a_key_of_an_authority_with_a_password_is_named(authority: Path, tmp_path: Path) -> None:
    (authority / "ca-key.pem").write_bytes(private_key(b"secret"))
    with pytest.raises(Invalid, match="has a password"):
        issue(authority, tmp_path / "new", "root")


@contextmanager
def files_of(nbytes: int) -> Iterator[None]:
    """No file of this process becomes larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_leaves_nothing_in_the_way(authority: Path, tmp_path: Path) -> None:
    with files_of(300):  # there is room for a key, and not for a certificate
        for make in (make_authority, partial(issue, authority, user="root")):
            with pytest.raises(OSError, match="File too large"):
                make(tmp_path / "new")
            assert not [*(tmp_path / "new").iterdir()]
    make_authority(tmp_path / "new")
    issue(tmp_path / "new", tmp_path / "user", "root")


# -- revoking --------------------------------------------------------------------------------------


def revoked(path: Path) -> dict[int, Any]:
    return {each.serial_number: each for each in x509.load_pem_x509_crl(path.read_bytes())}


def test_revoking_adds_to_the_list(authority: Path, tmp_path: Path) -> None:
    first, second = (issue(authority, tmp_path / name, "root") for name in ("first", "second"))
    path = revoke(authority, first)
    assert path == authority / "crl.pem"
    assert modes(authority)["crl.pem"] == 0o644
    before = revoked(path)
    assert {*before} == {read(first).serial_number}
    revoke(authority, second.parent)
    revoke(authority, first)
    after = revoked(path)
    assert {*after} == {read(first).serial_number, read(second).serial_number}
    (serial,) = before
    assert after[serial].revocation_date_utc == before[serial].revocation_date_utc
    assert {*modes(authority)} == {"ca.pem", "ca-key.pem", "crl.pem", "crl.lock"}
    assert modes(authority)["crl.lock"] == 0o600


def test_what_is_revoked_at_the_same_time_is_revoked(authority: Path, tmp_path: Path) -> None:
    paths = [issue(authority, tmp_path / str(number), "root") for number in range(16)]
    with ThreadPoolExecutor(len(paths)) as pool:
        (path,) = set(pool.map(partial(revoke, authority), paths))
    assert len(revoked(path)) == len(paths)


def open_for_writing(path: Path) -> int:
    """Return how many descriptors of this process may write to a file."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a descriptor of the listing itself
            flags = int(Path(f"/proc/self/fdinfo/{link.name}").read_text().partition("flags:")[2].split()[0], 8)
            count += link.readlink() == path and flags & os.O_ACCMODE == os.O_RDWR
    return count


def test_calls_on_a_shared_folder_exclude_each_other_by_a_lock_that_nfs_passes_on(
    authority: Path, tmp_path: Path
) -> None:
    """That of a regular file, open for writing; one of the folder itself is known to its own host alone."""
    certificate, lock = issue(authority, tmp_path / "lost", "root"), authority / "crl.lock"
    lock.touch()
    with ThreadPoolExecutor(1) as pool:
        with lock.open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            call = pool.submit(revoke, authority, certificate)
            eventually(lambda: call.done() or open_for_writing(lock), "the call to come to the lock")
            assert not call.done()
            assert not (authority / "crl.pem").exists()
        assert len(revoked(call.result())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users need root")
def test_the_owner_of_a_folder_may_revoke_after_root(authority: Path, tmp_path: Path) -> None:
    os.chown(authority, 1234, 1234)
    revoke(authority, issue(authority, tmp_path / "lost", "root"))
    assert (authority / "crl.lock").stat().st_uid == 1234


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users need root")
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_root_gives_no_file_away_to_which_there_is_a_link_in_place_of_the_lock(
    authority: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    (other := tmp_path / "other").write_bytes(b"secret")
    os.chown(authority, 1234, 1234)
    link(authority / "crl.lock", other)
    with suppress(Denied):
        revoke(authority, issue(authority, tmp_path / "lost", "root"))
    assert (other.read_bytes(), other.stat().st_uid) == (b"secret", os.geteuid())


def test_a_symbolic_link_in_place_of_the_lock_is_refused(authority: Path, tmp_path: Path) -> None:
    (authority / "crl.lock").symlink_to(tmp_path / "other")
    with pytest.raises(Denied, match=r"crl\.lock cannot be locked: .*; remove it, it has no content, and revoke again"):
        revoke(authority, issue(authority, tmp_path / "lost", "root"))
    assert not (tmp_path / "other").exists()


def test_a_folder_without_locks_is_an_error(authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    certificate = issue(authority, tmp_path / "lost", "root")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(Unsupported, match=r"crl\.lock cannot be locked: No locks available; copy .* to a filesystem"):
        revoke(authority, certificate)
    assert not (authority / "crl.pem").exists()


def test_an_authority_revokes_only_what_is_its_own(authority: Path, tmp_path: Path) -> None:
    """Not what another one of the same name has issued: the user would believe it to be revoked."""
    other = make_authority(tmp_path / "other").parent
    foreign = issue(other, tmp_path / "foreign", "root")
    renamed = issue(make_authority(tmp_path / "renamed", "other name").parent, tmp_path / "third", "root")
    for certificate in (foreign, renamed):
        with pytest.raises(Invalid, match="is of another authority than"):
            revoke(authority, certificate)
    assert not (authority / "crl.pem").exists()


def test_an_authority_does_not_revoke_itself(authority: Path) -> None:
    """Lists are asked about those who speak, and an authority does not: it would go on being believed."""
    with pytest.raises(Invalid, match=r"ca\.pem is the authority's own .*; make another authority, and replace all"):
        revoke(authority, authority / "ca.pem")
    assert not (authority / "crl.pem").exists()


def test_a_damaged_list_is_not_replaced(authority: Path, tmp_path: Path) -> None:
    certificate = issue(authority, tmp_path / "lost", "root")
    (authority / "crl.pem").write_text("damaged")
    with pytest.raises(Invalid, match=r"crl\.pem is no list of revoked certificates, and is not replaced"):
        revoke(authority, certificate)
    assert (authority / "crl.pem").read_text() == "damaged"


# -- reading ---------------------------------------------------------------------------------------


def test_what_is_no_certificate_is_named(authority: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("none")
    for absent in (tmp_path / "none", tmp_path, tmp_path / "text" / "cert.pem"):
        with pytest.raises(NotFound, match="there is no certificate at"):
            describe(absent)
        with pytest.raises(NotFound, match="there is no certificate at"):
            revoke(authority, absent)
    with pytest.raises(Invalid, match="text is no certificate in PEM"):
        describe(tmp_path / "text")
    with pytest.raises(Invalid, match=r"ca-key\.pem is no certificate in PEM"):
        describe(authority / "ca-key.pem")


def test_an_expired_certificate_says_when(certificates: Certificates) -> None:
    assert describe(certificates.of("root", days=-0.001)).until < datetime.now(UTC)
