"""Fingerprints: two models never share one, and files are read once."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cubroker.integrations import fingerprint as fingerprints
from cubroker.integrations.fingerprint import CACHE, checkpoint, fingerprint
from cubroker.protocol.errors import Denied, Invalid, NotFound
from tests.unit.client.loading.test_safetensors import as_a_user_without_rights


def made(folder: Path, seed: int = 0) -> Path:
    """A checkpoint; all seeds have the same header, names, shapes and size."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    save_file({"weight": torch.randn(64, 64), "bias": torch.randn(64)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


def header(folder: Path) -> bytes:
    data = (folder / "model.safetensors").read_bytes()
    return data[: 8 + int.from_bytes(data[:8], "little")]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are read from now on, each with every part."""
    read: list[str] = []
    pread = os.pread

    def recorded(file: int, nbytes: int, begin: int) -> bytes:
        read.append(Path(f"/proc/self/fd/{file}").readlink().name)
        return pread(file, nbytes, begin)

    monkeypatch.setattr(os, "pread", recorded)
    return read


def test_two_fine_tunes_of_one_architecture_never_meet(tmp_path: Path) -> None:
    one, other = made(tmp_path / "one", 1), made(tmp_path / "other", 2)
    assert header(one) == header(other)
    assert (one / "model.safetensors").stat().st_size == (other / "model.safetensors").stat().st_size
    assert checkpoint(one) != checkpoint(other)
    one.rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", one, ignore=shutil.ignore_patterns(CACHE))
    assert checkpoint(one) == checkpoint(tmp_path / "elsewhere")


def test_whatever_says_more_of_the_weights_counts_and_other_files_do_not(tmp_path: Path) -> None:
    before = checkpoint(made(tmp_path / "model"))
    (tmp_path / "model" / "README.md").write_text("a model")
    (tmp_path / "model" / ".hidden.json").write_text("{}")
    assert checkpoint(tmp_path / "model") == before
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "rope_theta": 1e6}')
    assert checkpoint(tmp_path / "model") != before


def test_files_are_read_once_until_they_change(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "SETTLED", -1000.0)
    folder = made(tmp_path / "model")
    first = checkpoint(folder)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert checkpoint(folder) == first
    assert len(reads) == 2
    weights, kept = folder / "model.safetensors", (folder / "model.safetensors").stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)  # in place: the same inode and size
    os.utime(weights, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # and the same time of modification
    assert checkpoint(folder) != first
    assert reads[2:] == ["model.safetensors"]
    reads.clear()
    checkpoint(folder, keep=False)
    assert len(reads) == 2


def test_what_was_written_just_now_is_read_again(tmp_path: Path, reads: list[str]) -> None:
    folder = made(tmp_path / "model")
    assert checkpoint(folder) == checkpoint(folder)
    assert len(reads) == 4


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"model.safetensors": [1, 2]}', b'{"\xff": [1, 2, 3, 4, "a"]}'])
def test_a_cache_that_cannot_be_read_is_none(tmp_path: Path, data: bytes) -> None:
    folder = made(tmp_path / "model")
    expected = checkpoint(folder, keep=False)
    (folder / CACHE).write_bytes(data)
    assert checkpoint(folder) == expected


def test_a_file_whose_name_is_no_text_counts_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SETTLED", -1000.0)
    folder = made(tmp_path / "model")
    before = checkpoint(folder)
    (folder / os.fsdecode(b"\xff.safetensors")).write_bytes(b"weights")
    assert checkpoint(folder) == checkpoint(folder) != before


def test_a_folder_that_cannot_be_written_has_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "SETTLED", -1000.0)
    folder = made(tmp_path / "model")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert checkpoint(folder) == checkpoint(folder)
    assert not (folder / CACHE).exists()


def test_a_file_of_the_hubs_cache_is_known_by_its_name(tmp_path: Path, reads: list[str]) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    digests = []
    for letter in "ab":
        (blobs / (letter * 64)).write_bytes(b"weights")
        (snapshot / "model.safetensors").unlink(missing_ok=True)
        (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / (letter * 64))
        digests.append(checkpoint(snapshot))
    assert len(set(digests)) == 2
    assert not reads


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "model")
    once = threading.Lock()

    def changed(file: int, begin: int, size: int) -> bytes:
        if once.acquire(blocking=False):
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").write_bytes(b"other")
        return b""

    monkeypatch.setattr(fingerprints, "_chunk", changed)
    with pytest.raises(Invalid, match="changed while it was read"):
        checkpoint(folder)


def test_a_file_that_may_not_be_read_is_denied_by_name() -> None:
    with tempfile.TemporaryDirectory() as folder:  # in pytest's own, other users could not look
        Path(folder).chmod(0o755)
        (made(Path(folder)) / "model.safetensors").chmod(0)
        with (
            as_a_user_without_rights(),
            pytest.raises(Denied, match=r"model\.safetensors cannot be read: Permission denied; check the owner"),
        ):
            checkpoint(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no checkpoint in .*absent: No such file"):
        checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFound, match="no weights in"):
        checkpoint(tmp_path)


def test_a_fingerprint_is_of_facts_by_name() -> None:
    facts = {"checkpoint": "a", "tp": [0, 2], "config": {"layers": 2, "rope": None}}
    assert fingerprint(facts) == fingerprint(dict(reversed(facts.items())))
    for other in ({**facts, "tp": [1, 2]}, {**facts, "config": {"layers": 2}}, {**facts, "dtype": "bf16"}):
        assert fingerprint(other) != fingerprint(facts)
    assert len(fingerprint(facts)) == fingerprints.LENGTH


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (object(), "fact 'x' of a fingerprint is a object"),
        (torch.bfloat16, "is a dtype"),
        ({"a": [1, {2}]}, r"'x\.a\.1' of a fingerprint is a set"),
        ({1: 2}, "the key 1, which is no string"),
    ],
)
def test_a_fact_whose_text_may_lie_is_refused(fact: object, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        fingerprint({"x": fact})
