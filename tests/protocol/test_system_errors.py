"""What the system refused, in words."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from cubroker.protocol.system_errors import OF_FILES, OF_PROCESSES, about, explain, reason, remedy


def test_an_error_names_its_file_unless_the_sentence_has_named_it() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/run/x")
    assert reason(error) == explain(error) == "/run/x: No such file or directory"
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
