"""The files of an identity, whom a certificate names, what that user may read."""

from __future__ import annotations

import os
import pwd
import ssl
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cubroker.integrations.cluster import identity
from cubroker.integrations.cluster.identity import (
    Account,
    can_read,
    find_folder,
    named_user,
)
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound
from tests.unit.integrations.cluster.hosts import Certificates, private_key
from tests.unit.protocol.samples import INFO

making = pytest.importorskip("cubroker.integrations.cluster.certificates")


@pytest.fixture
def folder(certificates: Certificates, tmp_path: Path) -> Path:
    """A folder with a certificate that a test may damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in certificates.host.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        (copy / file.name).chmod(0o600)
    return copy


def test_the_folder_is_what_is_given_else_the_variable_s_else_the_host_s() -> None:
    variable = {"CUBROKER_CERTIFICATES": "/variable"}
    assert find_folder("/given", variable) == Path("/given")
    assert find_folder(None, variable) == find_folder("", variable) == Path("/variable")
    assert find_folder(None, {}) == find_folder(None, {"CUBROKER_CERTIFICATES": ""}) == identity.FOLDER


def test_both_sides_ask_for_a_certificate_and_for_tls_1_3(folder: Path) -> None:
    for context in (identity.serving_context(folder), identity.asking_context(folder)):
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert not context.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
    assert identity.asking_context(folder).check_hostname


def test_a_list_of_revoked_ones_is_heeded_if_there_is_one(
    certificates: Certificates, folder: Path, tmp_path: Path
) -> None:
    lost = making.issue(certificates.authority, tmp_path / "lost", "root")
    making.revoke(certificates.authority, lost).rename(folder / "crl.pem")
    assert identity.asking_context(folder).verify_flags & ssl.VERIFY_CRL_CHECK_LEAF


def unlink(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(text)


def mode(bits: int) -> Callable[[Path], object]:
    return lambda folder: (folder / "key.pem").chmod(bits)


def replace(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return make


def key(password: bytes = b"") -> Callable[[Path], object]:
    return lambda folder: (folder / "key.pem").write_bytes(private_key(password))


@pytest.mark.parametrize(
    ("damage", "error", "why"),
    [
        (unlink("ca.pem"), NotFound, r"there is no .*/ca\.pem; `cubroker certificates` makes them, and --certificates"),
        (unlink("cert.pem"), NotFound, r"there is no .*/cert\.pem"),
        (unlink("key.pem"), NotFound, r"there is no .*/key\.pem"),
        (write("ca.pem", b""), Invalid, "the certificates in .* cannot be used: .*; make them again"),
        (write("ca.pem", b"\xff\0"), Invalid, "cannot be used"),
        (
            write("cert.pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            Invalid,
            "cannot be used",
        ),
        (write("cert.pem", b"none"), Invalid, "cannot be used"),
        (write("key.pem", b"none"), Invalid, "cannot be used"),
        (write("crl.pem", b"none"), Invalid, "cannot be used"),
        (key(), Invalid, "cannot be used: KEY_VALUES_MISMATCH"),
        (key(b"secret"), Invalid, "the key has a password, which a service cannot be asked for"),
        (mode(0o640), Denied, r"others than its owner may use .*/key\.pem \(mode 0640\); chmod 600 it"),
        (mode(0o604), Denied, r"\(mode 0604\)"),
        (mode(0o610), Denied, r"\(mode 0610\)"),
        (replace("ca.pem"), Invalid, r"/ca\.pem cannot be read: Is a directory"),
        (replace("crl.pem"), Invalid, r"/crl\.pem cannot be read: Is a directory"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    folder: Path, damage: Callable[[Path], object], error: type[CubrokerError], why: str
) -> None:
    damage(folder)
    for context in (identity.serving_context, identity.asking_context):
        with pytest.raises(error, match=why) as caught:
            context(folder)
        assert str(folder) in caught.value.message or "password" in caught.value.message


def test_a_key_that_its_owner_alone_may_use_will_do(folder: Path) -> None:
    for bits in (0o400, 0o600, 0o700):
        (folder / "key.pem").chmod(bits)
        identity.asking_context(folder)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="cannot be read: Not a directory"):
        identity.asking_context(tmp_path / "file")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_files_that_this_user_may_not_read(folder: Path, tmp_path: Path) -> None:
    for each in (tmp_path, folder):
        each.chmod(0o755)
    (folder / "crl.pem").write_text("")
    for name in ("key.pem", "cert.pem", "crl.pem"):
        for file in folder.iterdir():
            file.chmod(0o000 if file.name == name else 0o644)
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            with pytest.raises(Denied, match=f"this user may not read {folder}/{name}"):
                identity.asking_context(folder)
        finally:
            os.seteuid(0)


# -- whom a certificate names ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "user"),
    [
        (((("commonName", "alice"),),), "alice"),
        (((("countryName", "DE"),), (("commonName", "alice"),)), "alice"),
        (((("countryName", "DE"),),), ""),
        (((("commonName", "alice"),), (("commonName", "root"),)), ""),
        (((("commonName", "alice"), ("commonName", "root")),), ""),
        ((), ""),
    ],
)
def test_a_certificate_names_one_user(subject: object, user: str) -> None:
    assert named_user({"subject": subject}) == user


def test_a_certificate_without_a_subject_names_nobody() -> None:
    assert named_user({}) == ""


def test_an_account_is_one_of_this_host_with_all_of_its_groups() -> None:
    found = identity.account("root")
    assert (found.name, found.uid) == ("root", 0)
    assert pwd.getpwnam("root").pw_gid in found.groups
    for name in ("no-such-user", "", "a\0b", "x" * 5000):
        with pytest.raises(Denied, match="whom the exporting host does not have"):
            identity.account(name)


# -- what it may read ------------------------------------------------------------------------------

ROOT = Account("root", 0, frozenset({0}))
OWNER = Account("owner", 1000, frozenset({1000}))
MEMBER = Account("member", 1001, frozenset({1001, 50}))
OTHER = Account("other", 1002, frozenset({1002}))


@pytest.mark.parametrize(
    ("mode", "readers"),
    [
        (0o600, {ROOT, OWNER}),
        (0o640, {ROOT, OWNER, MEMBER}),
        (0o644, {ROOT, OWNER, MEMBER, OTHER}),
        (0o604, {ROOT, OWNER, OTHER}),  # of the classes one counts
        (0o000, {ROOT, OWNER}),
        (0o622, {ROOT, OWNER}),
        (0o611, {ROOT, OWNER}),
        (0o666, {ROOT, OWNER, MEMBER, OTHER}),
    ],
    ids=lambda value: f"{value:o}" if isinstance(value, int) else "",
)
def test_the_mode_of_a_pool_says_who_may_fetch_it(mode: int, readers: set[Account]) -> None:
    pool = msgspec.structs.replace(INFO, owner=1000, group=50, mode=mode)
    assert {each for each in (ROOT, OWNER, MEMBER, OTHER) if can_read(each, pool)} == readers
