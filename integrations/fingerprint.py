"""Fingerprints: names of runtime pools that no two different models share.

What an engine computes with depends on the bytes of the checkpoint, the model's configuration, dtype, quantization, the
rank and its groups, the engine, its version and its kernels. A *fingerprint* is a digest of all of them. Two fine-tunes
of one architecture have equal headers, shapes and sizes, so the bytes count: :func:`checkpoint` digests them.

Reading a checkpoint takes as long as loading it. So digests of files are kept in their folder, in :data:`CACHE`. A
digest holds while the file's inode, size, mtime and ctime are the same: no program can write a file and keep its ctime.
A file in the cache of the Hugging Face hub is not read: its name is the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import msgspec
from msgspec import Struct

from cubroker.protocol.encoding import encode_json
from cubroker.protocol.errors import Denied, Invalid, NotFound, explain

CACHE = ".cubroker-digests.json"
"""The file, in a checkpoint's folder, with the digests of the files there."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files of a checkpoint that have weights."""

DESCRIPTIONS = ("*.json", "*.model", "*.py", "*.txt", "*.jinja")
"""Files of a checkpoint that say what the weights mean."""

CHUNK = 64 << 20
"""Bytes of a file that one thread digests at a time; the digest of a file is that of the digests of its chunks."""

THREADS = 8
"""Threads that digest chunks."""

SETTLED = 2.0
"""Seconds after a file's last change before its digest is kept: another change in the same tick leaves its times."""

LENGTH = 32
"""Hexadecimal digits of a fingerprint."""

_BLOB = re.compile(r"[0-9a-f]{64}")

Fact = object
"""A value of JSON: None, a truth value, a number, a string, or a list or mapping of such."""


class _Kept(Struct, frozen=True, array_like=True):
    """The digest of a file, and the state of the file when it was digested."""

    inode: int
    size: int
    modified: int
    changed: int
    digest: str


def fingerprint(facts: Mapping[str, Fact]) -> str:
    """Return a digest of facts, which are values of JSON; the order of their names does not matter.

    Raises:
        Invalid: a fact, which the message names, is not a value of JSON: different facts could have the same text.
    """
    for name, fact in facts.items():
        _check(name, fact)
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def label(prefix: str, model: str) -> str:
    """Return the prefix of the names of a model's pools, which a fingerprint follows."""
    stem = Path(model).name
    return f"{prefix}/{''.join(letter if letter.isascii() and letter.isalnum() else '-' for letter in stem)[:64]}/"


def _check(name: str, fact: Fact) -> None:
    match fact:
        case dict():
            for key, value in fact.items():
                if not isinstance(key, str):
                    raise Invalid(f"fact {name!r} of a fingerprint has the key {key!r}, which is no string")
                _check(f"{name}.{key}", value)
        case list() | tuple():
            for index, value in enumerate(fact):
                _check(f"{name}.{index}", value)
        case None | bool() | int() | float() | str():
            pass
        case _:
            raise Invalid(
                f"fact {name!r} of a fingerprint is a {type(fact).__name__}, and different values of this type can have"
                f" the same text; give a value of JSON"
            )


def checkpoint(folder: str | os.PathLike[str], *, keep: bool = True) -> str:
    """Return a digest of a checkpoint: of the names and bytes of its files that match WEIGHTS or DESCRIPTIONS.

    Equal checkpoints in different folders have equal digests. In the cache of the hub files are not read, so a
    checkpoint has another digest there than elsewhere. Files of other kinds, and hidden ones, do not count.

    Args:
        folder: the checkpoint's.
        keep: whether digests are looked up in :data:`CACHE`, and kept there if this user may write it.

    Raises:
        NotFound: there is no such folder, or no file with weights in it.
        Denied: this user may not read a file.
        Invalid: a file was changed while it was read, or cannot be read.
    """
    place = Path(folder)
    files = sorted(_files(place), key=lambda path: path.name)
    if not any(_is(path, WEIGHTS) for path in files):
        raise NotFound(f"no weights in {place}: there is no file {', '.join(WEIGHTS)}")
    kept = _read(place / CACHE) if keep else {}
    found: dict[str, _Kept] = {}
    with ThreadPoolExecutor(THREADS) as threads:
        for path in files:
            try:
                found[path.name] = _digest(path, kept.get(path.name), threads)
            except OSError as error:
                kind = Denied if isinstance(error, PermissionError) else Invalid
                raise kind(f"{path} cannot be read: {explain(error, path)}") from error
    if keep:
        now = time.time()
        settled = {name: each for name, each in found.items() if each.changed / 1e9 + SETTLED < now}
        if settled != kept:
            _write(place / CACHE, settled)
    return fingerprint({name: each.digest for name, each in found.items()})


def _files(folder: Path) -> Iterable[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    except OSError as error:
        raise NotFound(f"no checkpoint in {folder}: {error.strerror}") from None
    return [folder / name for name in names if _is(Path(name), (*WEIGHTS, *DESCRIPTIONS))]


def _is(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _digest(path: Path, kept: _Kept | None, threads: ThreadPoolExecutor) -> _Kept:
    """Return the digest of a file: the kept one, its name in the hub's cache, or a new digest of its bytes."""
    before = _state(path.stat())
    if kept is not None and kept == _Kept(*before, kept.digest):
        return kept
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and _BLOB.fullmatch(target.name):
        return _Kept(*before, f"sha256:{target.name}")
    with path.open("rb") as file:
        number, size = file.fileno(), before[1]
        chunks = threads.map(lambda begin: _chunk(number, begin, size), range(0, size, CHUNK))
        digest = hashlib.sha256(b"".join(chunks)).hexdigest()
    if _state(path.stat()) != before:
        raise Invalid(f"{path} was changed while it was read; ask again when it is complete")
    return _Kept(*before, f"chunks:{digest}")


def _chunk(file: int, begin: int, size: int) -> bytes:
    digest, end = hashlib.sha256(), min(begin + CHUNK, size)
    while begin < end:
        data = os.pread(file, min(1 << 20, end - begin), begin)
        if not data:
            break
        digest.update(data)
        begin += len(data)
    return digest.digest()


def _state(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _read(path: Path) -> dict[str, _Kept]:
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Kept])
    return {}


def _write(path: Path, digests: Mapping[str, _Kept]) -> None:
    """Replace the cache in one step; write none if this user may not, or if a file's name is not UTF-8."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError, UnicodeEncodeError):
        try:
            draft.write_bytes(encode_json(digests))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
