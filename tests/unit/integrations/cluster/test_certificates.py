"""Making certificates: their files, what is in them, and what is not made or replaced."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cubroker.integrations.cluster import certificates as making
from cubroker.integrations.cluster.certificates import describe, issue, make_authority, revoke
from cubroker.protocol.errors import Exists, Invalid, NotFound
from tests.unit.integrations.cluster.hosts import Certificates

x509 = pytest.importorskip("cryptography.x509")


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
    found = making.read(path)
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
    usage = making.read(path).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
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


@pytest.mark.parametrize("host", ["", "gpu-1:7411", "gpu 1", "gpu/1", "münchen", "[::1]", "a" * 64, "a..b", "a\0b"])
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
    from cryptography.hazmat.primitives import serialization

    encoding, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    text = making._new_key().private_bytes(encoding, kind, serialization.BestAvailableEncryption(b"secret"))
    (authority / "ca-key.pem").write_bytes(text)
    with pytest.raises(Invalid, match="has a password"):
        issue(authority, tmp_path / "new", "root")


# -- revoking --------------------------------------------------------------------------------------


def revoked(path: Path) -> dict[int, Any]:
    return {each.serial_number: each for each in x509.load_pem_x509_crl(path.read_bytes())}


def test_revoking_adds_to_the_list(authority: Path, tmp_path: Path) -> None:
    first, second = (issue(authority, tmp_path / name, "root") for name in ("first", "second"))
    path = revoke(authority, first)
    assert path == authority / "crl.pem"
    assert modes(authority)["crl.pem"] == 0o644
    before = revoked(path)
    assert {*before} == {making.read(first).serial_number}
    revoke(authority, second.parent)
    revoke(authority, first)
    after = revoked(path)
    assert {*after} == {making.read(first).serial_number, making.read(second).serial_number}
    (serial,) = before
    assert after[serial].revocation_date_utc == before[serial].revocation_date_utc
    assert {*modes(authority)} == {"ca.pem", "ca-key.pem", "crl.pem"}


def test_an_authority_revokes_only_what_is_its_own(authority: Path, tmp_path: Path) -> None:
    """Not what another one of the same name has issued: the user would believe it to be revoked."""
    other = make_authority(tmp_path / "other").parent
    foreign = issue(other, tmp_path / "foreign", "root")
    renamed = issue(make_authority(tmp_path / "renamed", "other name").parent, tmp_path / "third", "root")
    for certificate in (foreign, renamed):
        with pytest.raises(Invalid, match="is of another authority than"):
            revoke(authority, certificate)
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
