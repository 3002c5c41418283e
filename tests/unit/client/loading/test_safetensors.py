from __future__ import annotations

import json
import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from cubroker.client.loading import checkpoint as reading
from cubroker.client.loading.checkpoint import Checkpoint
from cubroker.protocol import CubrokerError
from cubroker.protocol.errors import Denied, Invalid, NotFound
from tests import checkpoints
from tests.unit.server.processes import files

ENTRY = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
SMALL = checkpoints.filled([("a", "U8", (4,)), ("b", "F32", (2, 3))])


def wrong(path: Path, content: bytes) -> str:
    """Write ``content``, open it, and return what the refusal says."""
    path.write_bytes(content)
    with pytest.raises(Invalid, match=str(path)) as caught:
        Checkpoint.open(path)
    return caught.value.message


def altered(**changes: Any) -> bytes:
    header = checkpoints.header_of(SMALL)
    for name, change in changes.items():
        header[name] = header.get(name, {}) | change
    return checkpoints.encode(header, bytes(28))


def alike(room: int, *starts: int) -> bytes:
    """Return a file of tensors of one form, 4 bytes each, that begin at these bytes of the data."""
    each = {"dtype": "U8", "shape": [4]}
    return checkpoints.encode(
        {f"t{start}": each | {"data_offsets": [start, start + 4]} for start in starts}, bytes(room)
    )


def test_every_dtype_and_odd_shapes_are_found_where_they_lie(tmp_path: Path) -> None:
    tensors = checkpoints.filled(checkpoints.EVERY_DTYPE + checkpoints.ODD_SHAPES)
    path = checkpoints.write(tmp_path / "m.safetensors", tensors, {"format": "pt"})
    raw = path.read_bytes()
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.nbytes == sum(len(data) for _, _, data in tensors.values())
        found = {e.name: (e.dtype, e.shape, raw[e.offset : e.offset + e.nbytes]) for e in checkpoint.entries}
    assert found == tensors


def test_safetensors_itself_agrees_that_the_files_of_these_tests_are_right(tmp_path: Path) -> None:
    tensors = checkpoints.filled(checkpoints.EVERY_DTYPE + checkpoints.ODD_SHAPES)
    path = checkpoints.write(tmp_path / "m.safetensors", tensors)
    theirs = {
        name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
        for name, t in safetensors.deserialize(path.read_bytes())
    }
    assert theirs == tensors


def test_a_header_with_padding_and_metadata_that_is_null_is_right(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    raw = json.dumps(checkpoints.header_of(SMALL) | {"__metadata__": None}).encode() + b"   "
    path.write_bytes(checkpoints.encode(raw, bytes(28)))
    with Checkpoint.open([path]) as checkpoint:
        assert [entry.name for entry in checkpoint.entries] == ["a", "b"]


def test_entries_come_in_the_order_of_their_bytes_whatever_the_headers_order(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = dict(reversed(checkpoints.header_of(SMALL).items()))
    path.write_bytes(checkpoints.encode(header, bytes(28)))
    with Checkpoint.open(path) as checkpoint:
        assert [entry.name for entry in checkpoint.entries] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "ends inside its header, after 0 bytes"),
        (b"\x02\0\0\0", "ends inside its header, after 4 bytes"),
        (checkpoints.encode({}, length=100_000_001), "100000000 is the most"),
        (checkpoints.encode({}, length=3), "claims 3 bytes, and the file has 10; it is truncated"),
        (checkpoints.encode(b"[]"), "does not begin with '{'"),
        (checkpoints.encode(b""), "does not begin with '{'"),
        (checkpoints.encode(b"{"), "its JSON cannot be used"),
        (checkpoints.encode(b'{"\xff":1}'), "its JSON cannot be used"),
        (checkpoints.encode(b'{"a":' + b"[" * 100_000), "its JSON cannot be used"),
        (checkpoints.encode(b'{"a":{"dtype":"U8","dtype":"I8"}}'), "'dtype' appears twice"),
        (checkpoints.encode(b'{"a":%s,"a":%s}' % (ENTRY, ENTRY), bytes(4)), "'a' appears twice"),
        (checkpoints.encode(b'{"a" : %s,"a":%s}' % (ENTRY, ENTRY), bytes(4)), "'a' appears twice"),
        (checkpoints.encode(b'{"a":%s,"dtype" :"I8"}}' % ENTRY[:-1], bytes(4)), "'dtype' appears twice"),
        (checkpoints.encode(b'{"a":%s,"dtype"\t:"I8"}}' % ENTRY[:-1], bytes(4)), "'dtype' appears twice"),
        (checkpoints.encode(b'{"a":%s,"dtype"\n:"I8"}}' % ENTRY[:-1], bytes(4)), "'dtype' appears twice"),
        (checkpoints.encode(b'{"a":%s,"\\u0061":%s}' % (ENTRY, ENTRY), bytes(4)), "'a' appears twice"),
        (checkpoints.encode(b'{"__metadata__":{"x":"y","x":"y"},"a":%s}' % ENTRY, bytes(4)), "'x' appears twice"),
        (checkpoints.encode(b'{"__metadata__":{"x":"y:z","x":"y"},"a":%s}' % ENTRY, bytes(4)), "'x' appears twice"),
        (checkpoints.encode(b'{"__metadata__":{},"a":%s,"__metadata__":{}}' % ENTRY, bytes(4)), "appears twice"),
        (checkpoints.encode(b'{"__metadata__":{"x":":::"},"a":%s,"a":%s}' % (ENTRY, ENTRY), bytes(4)), "'a' appears"),
        (checkpoints.encode({"a": 1}), "entry of the wrong form"),
        (checkpoints.encode({"__metadata__": {"a": 1}}), "entry of the wrong form"),
        (checkpoints.encode({"__metadata__": []}), "entry of the wrong form"),
        (alike(9, 0, 5), "tensor 't5' begins at byte 5 of the data and the one before it ends at 4: a hole"),
        (alike(7, 0, 3), "tensor 't3' begins at byte 3 of the data, inside the one before it, which ends at 4"),
        (alike(6, 0, 4), "tensor 't4' ends at byte 8 of the data, and the file has 6; it is truncated"),
        (altered(a={"shape": [-4]}), "entry of the wrong form"),
        (altered(a={"shape": [4.5]}), "entry of the wrong form"),
        (altered(a={"data_offsets": [0]}), "entry of the wrong form"),
        (altered(a={"data_offsets": [-1, 4]}), "entry of the wrong form"),
        (altered(a={"data_offsets": [0, 1 << 64]}), "entry of the wrong form"),
        (altered(a={"dtype": "F5"}), "tensor 'a': unknown dtype 'F5'"),
        (altered(a={"dtype": "F4", "shape": [1]}), "tensor 'a': a F4 tensor of shape (1,) takes 4 bits"),
        (altered(a={"shape": [5]}), "tensor 'a' is U8 [5], which takes 5 bytes, and its offsets span 4"),
        (altered(a={"shape": [1 << 62] * 9}), "its offsets span 4"),
        (altered(a={"shape": [1 << 62] * 300}), "entry of the wrong form: Expected `array` of length <= 32"),
        (altered(a={"data_offsets": [4, 0]}), "ends at byte 0 of the data, before it begins at 4"),
        (altered(b={"data_offsets": [3, 27]}), "begins at byte 3 of the data, inside the one before it"),
        (altered(b={"data_offsets": [8, 32]}), "a hole"),
        (altered()[:-1], "ends at byte 28 of the data, and the file has 27; it is truncated"),
        (altered() + b"x", "1 bytes follow its last tensor"),
        (checkpoints.encode({}), "there is no tensor in"),
    ],
)
def test_a_malformed_file_is_refused_with_what_is_wrong(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in wrong(tmp_path / "m.safetensors", content)


def test_what_this_parser_refuses_safetensors_refuses_too(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    content = checkpoints.encode(checkpoints.header_of(SMALL), bytes(28))
    for end in range(len(content)):
        path.write_bytes(content[:end])
        with pytest.raises(CubrokerError):
            Checkpoint.open(path)
        with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "np"):
            pass


def test_a_folder_stands_for_its_index_or_else_for_its_files(tmp_path: Path) -> None:
    shards = [checkpoints.filled([(f"t{n}", "U8", (n,))], n) for n in (1, 2)]
    index = checkpoints.write_sharded(tmp_path / "sharded", shards)
    checkpoints.write(tmp_path / "sharded" / "consolidated.safetensors", shards[0])
    plain = tmp_path / "plain"
    plain.mkdir()
    for number, shard in enumerate(shards):
        checkpoints.write(plain / f"{number}.safetensors", shard)
    for paths in (index, index.parent, str(plain), [plain / "0.safetensors", plain / "1.safetensors"]):
        with Checkpoint.open(paths) as checkpoint:
            assert [(entry.name, entry.file) for entry in checkpoint.entries] == [("t1", 0), ("t2", 1)]


def test_a_name_in_two_files_is_refused_and_both_are_named(tmp_path: Path) -> None:
    one, two = (checkpoints.write(tmp_path / f"{n}.safetensors", SMALL) for n in (1, 2))
    with pytest.raises(Invalid, match=rf"tensor 'a' is in {one} and again in {two}"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = checkpoints.write_sharded(tmp_path, [SMALL])
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(NotFound, match=rf"{index}: its shard 'model-00001-of-00001.safetensors' is not there"):
        Checkpoint.open(tmp_path)


def test_a_folder_without_an_index_has_all_shards_that_their_names_tell_of(tmp_path: Path) -> None:
    for number in (1, 3):
        tensors = checkpoints.filled([(f"t{number}", "U8", (number,))], number)
        checkpoints.write(tmp_path / f"model-{number:05}-of-00003.safetensors", tensors)
    checkpoints.write(tmp_path / "adapter.safetensors", checkpoints.filled([("adapter", "U8", (4,))]))
    with pytest.raises(NotFound, match=rf"{tmp_path}: it has 2 of 3 shards, and not model-00002-of-00003.safetensors"):
        Checkpoint.open(tmp_path)
    checkpoints.write(tmp_path / "model-00002-of-00003.safetensors", checkpoints.filled([("t2", "U8", (2,))]))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert [entry.name for entry in checkpoint.entries] == ["adapter", "t1", "t2", "t3"]


def test_hidden_files_of_a_folder_are_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "model.safetensors", SMALL)
    (tmp_path / "._model.safetensors").write_bytes(b"Mac OS X        ")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert [entry.name for entry in checkpoint.entries] == ["a", "b"]


@pytest.mark.parametrize(
    ("weight_map", "error", "says"),
    [
        ({"ghost": "model-00001-of-00001.safetensors"}, NotFound, "says that 'ghost' is in model-00001-of-00001"),
        ({"a": "../model.safetensors"}, Invalid, "does not lie in the index's own folder"),
        ({"a": "/etc/passwd"}, Invalid, "does not lie in the index's own folder"),
        ({"a": ""}, Invalid, "does not lie in the index's own folder"),
        ({"a": 1}, Invalid, "its JSON cannot be used"),
        ({}, Invalid, "there is no tensor in"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: Any, error: type[CubrokerError], says: str) -> None:
    index = checkpoints.write_sharded(tmp_path, [SMALL])
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(error) as caught:
        Checkpoint.open(index)
    assert says in caught.value.message
    assert str(index) in caught.value.message


def test_an_index_without_a_map_or_of_absurd_size_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(Invalid, match="weight_map"):
        Checkpoint.open(tmp_path)
    os.truncate(index, 100_000_001)
    with pytest.raises(Invalid, match="larger than 100000000 bytes"):
        Checkpoint.open(tmp_path)


class Named:
    """What os.fspath() takes for a path, although it may be none."""

    def __init__(self, name: Any) -> None:
        self._name = name

    def __fspath__(self) -> Any:
        return self._name


NO_PATHS = [3, None, b"model.safetensors", "", ["", "x"], [None], np.array("x"), Named(b"x"), Named("")]


@pytest.mark.parametrize("paths", NO_PATHS)
def test_what_is_no_path_is_refused_before_a_file_is_opened(paths: Any) -> None:
    with pytest.raises(Invalid, match="is no path of a checkpoint; pass a file, a folder or an index"):
        Checkpoint.open(paths)


def test_paths_that_hold_no_checkpoint_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    refusals: dict[str, tuple[type[CubrokerError], str]] = {
        "fifo": (Invalid, "no regular file"),
        "socket": (Invalid, "check the file"),
        "folder": (NotFound, "neither model.safetensors.index.json nor any"),
        "nothing": (NotFound, "there is no such file"),
        "nothing.json": (NotFound, "there is no such file"),
        "hf:org/model": (NotFound, "there is no such file"),
        "zero\0byte": (Invalid, r"zero\\x00byte' cannot name a file \(.*\); check the path"),
        "half a pair \ud800": (Invalid, r"half a pair \\ud800' cannot name a file \(.*\); check the path"),
    }
    for name, (error, says) in refusals.items():
        with pytest.raises(error, match=says):
            Checkpoint.open(tmp_path / name)
    with pytest.raises(Invalid, match="an empty list of paths"):
        Checkpoint.open([])


@contextmanager
def as_a_user_without_rights() -> Iterator[None]:
    """Give root's rights up for a while; other users have none to begin with."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_missing_rights_are_denied_with_the_path(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "m.safetensors", SMALL)
    path.chmod(0)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0)
    with as_a_user_without_rights():
        for secret in (path, folder):
            with pytest.raises(Denied, match=str(secret)):
                Checkpoint.open(secret)


def test_a_shard_that_may_not_be_read_is_not_called_missing() -> None:
    with tempfile.TemporaryDirectory() as folder:  # in pytest's own, other users could not look
        Path(folder).chmod(0o755)
        (Path(folder) / "shards").mkdir(mode=0)
        index = Path(folder) / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "shards/1.safetensors"}}))
        with as_a_user_without_rights(), pytest.raises(Denied, match=r"shards/1\.safetensors: Permission denied"):
            Checkpoint.open(folder)


def test_more_files_than_may_be_open_are_refused_with_the_limit_to_raise(tmp_path: Path) -> None:
    for number in range(100):
        checkpoints.write(tmp_path / f"{number}.safetensors", checkpoints.filled([(f"t{number}", "U8", (1,))]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(tmp_path, os.O_RDONLY)
    os.close(lowest)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 10, hard))
        with pytest.raises(Invalid, match=r"\.safetensors: Too many open files; raise the limit"):
            Checkpoint.open(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_refusal_leaves_no_file_open(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "1.safetensors", SMALL)
    (tmp_path / "2.safetensors").write_bytes(b"junk")
    before = files(os.getpid())
    with pytest.raises(Invalid):
        Checkpoint.open(tmp_path)
    assert files(os.getpid()) <= before


def test_a_file_that_shrinks_or_changes_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "m.safetensors", SMALL)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.check_unchanged()
        file, last = checkpoint.files[0], checkpoint.entries[-1]
        os.truncate(path, last.offset + 3)
        with pytest.raises(Invalid, match=f"ended at byte {last.offset + 3} while it was read"):
            file.read_into([memoryview(bytearray(last.nbytes))], last.offset)
        with pytest.raises(Invalid, match="changed while it was read"):
            checkpoint.check_unchanged()


def test_a_file_that_is_written_anew_while_its_header_is_checked_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = checkpoints.write(tmp_path / "m.safetensors", SMALL), reading.parse_header
    os.utime(path, ns=(1, 1))

    def checked(header: bytes, room: int) -> Any:
        path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"'))  # of the same size
        return check(header, room)

    monkeypatch.setattr(reading, "parse_header", checked)
    with Checkpoint.open(path) as checkpoint, pytest.raises(Invalid, match="changed while it was read"):
        checkpoint.check_unchanged()


def test_a_read_error_names_the_file(tmp_path: Path) -> None:
    path = checkpoints.write(tmp_path / "m.safetensors", SMALL)
    with Checkpoint.open(path) as checkpoint:
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, checkpoint.files[0].descriptor)
        os.close(folder)
        with pytest.raises(Invalid, match=rf"{path}: Is a directory"):
            checkpoint.files[0].read_into([memoryview(bytearray(1))], 0)
