"""The error classes, their codes, and errors of the system in words."""

from __future__ import annotations

import errno
import io
import os
import pickle
from pathlib import Path

import pytest

from cubroker.protocol import CubrokerError, errors
from cubroker.protocol.errors import OF_FILES, OF_PROCESSES, about, explain, reason, remedy

CODES = [
    "not_found",
    "exists",
    "denied",
    "over_budget",
    "over_quota",
    "out_of_memory",
    "unsupported",
    "invalid",
    "retired",
    "timeout",
    "unavailable",
    "device",
    "corrupted",
    "internal",
]


def test_the_codes_are_those_that_users_were_promised() -> None:
    assert list(errors.ERRORS) == CODES


@pytest.mark.parametrize("code", CODES)
def test_a_code_that_travelled_becomes_its_class_again(code: str) -> None:
    error = errors.from_code(code, "why")
    assert (type(error), error.code, error.message, str(error)) == (errors.ERRORS[code], code, "why", "why")


def test_a_code_of_a_later_version_is_kept_in_the_text() -> None:
    error = errors.from_code("too_hot", "the device is too hot")
    assert type(error) is CubrokerError
    assert str(error) == "the device is too hot [too_hot]"


def test_every_error_is_a_cubroker_error_and_none_hides_another() -> None:
    for one in errors.ERRORS.values():
        assert one.__mro__[1] is CubrokerError


def test_a_failure_that_is_kept_is_raised_anew_without_its_traceback() -> None:
    with pytest.raises(errors.Retired) as caught:
        raise errors.Retired("llama@1")
    again = caught.value.anew()
    assert (type(again), again.message) == (errors.Retired, "llama@1")
    assert caught.value.__traceback__
    assert again.__traceback__ is None


def test_errors_survive_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(errors.NotFound("no pool 'x'")))
    assert type(error) is errors.NotFound
    assert error.message == "no pool 'x'"


def test_an_error_names_its_file_unless_the_sentence_has_named_it() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/run/x")
    assert reason(error) == "/run/x: No such file or directory"
    assert reason(error, "/run/x") == reason(error, Path("/run/x")) == "No such file or directory"
    assert reason(OSError(errno.EIO, "Input/output error", b"/run/\xff")) == "/run/\udcff: Input/output error"
    assert reason(OSError(errno.EBADF, "Bad file descriptor", 7)) == "Bad file descriptor"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (io.UnsupportedOperation("File or stream is not seekable."), "File or stream is not seekable."),
        (TimeoutError(), "TimeoutError"),
        (OSError(errno.EIO, None), "[Errno 5] None"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
    ],
)
def test_an_error_without_words_of_the_system_has_some(error: Exception, said: str) -> None:
    assert explain(error) == said


def test_no_file_is_to_be_removed_only_because_a_folder_was_to_be_there(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(FileExistsError) as there:
        file.mkdir()
    assert explain(there.value) == f"{file}: File exists; check the path"
    with pytest.raises(IsADirectoryError) as folder:
        tmp_path.read_bytes()
    assert explain(folder.value) == f"{tmp_path}: Is a directory; check the path"


@pytest.mark.parametrize("number", [*OF_PROCESSES, *OF_FILES])
def test_an_error_comes_with_what_to_do(number: int) -> None:
    error = OSError(number, os.strerror(number), "/run/x")
    assert explain(error) == f"/run/x: {os.strerror(number)}; {remedy(error)}"
    assert remedy(error)
    assert bool(remedy(OSError(number, os.strerror(number)))) == (number in OF_PROCESSES)


def test_an_error_of_a_descriptor_is_given_the_path(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space") as full:  # noqa: SIM117
        with about(tmp_path / "lock"):
            file.write(b"x")
    assert explain(full.value).startswith(f"{tmp_path / 'lock'}: No space left on device; free space")
    with pytest.raises(FileNotFoundError) as absent, about(tmp_path / "lock"):
        (tmp_path / "nothing").stat()
    assert reason(absent.value).startswith(f"{tmp_path / 'nothing'}: ")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), "numpy, which is not installed"),
        (ImportError("libx.so.1 is not there"), "a package that cannot be imported (libx.so.1 is not there)"),
    ],
)
def test_what_a_package_is_missing_for_is_said_with_how_to_install_it(error: ImportError, why: str) -> None:
    with pytest.raises(errors.Unsupported) as raised, errors.needing("a sum", "cubroker[numpy]"):
        raise error
    assert raised.value.message == f"a sum needs {why}: pip install 'cubroker[numpy]'"
