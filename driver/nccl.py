"""What NCCL's variables say: the environment's, and those in its configuration files.

By its documentation NCCL takes them from the environment, from the file that ``NCCL_CONF_FILE`` names, else from
``~/.nccl.conf``, and from ``/etc/nccl.conf``, and the first that has a variable wins; NCCL before 2.23 reads the user's
file in any case. A line is ``NAME=VALUE``, or a comment that begins with ``#``.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from string import whitespace

SYSTEM = Path("/etc/nccl.conf")


def allows(value: str) -> bool:
    """Whether NCCL takes a value for true: an integer in any of C's notations that is not 0.

    What is no number at all it takes for 0: so it does "08", no octal.
    """
    return (
        re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", value) is not None
        and re.search("[1-9a-fA-F]", value) is not None
    )


def configured(variable: str, environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield each value that a variable has in NCCL's files, with the file; what cannot be read has none."""
    for file in _files(environment):
        with suppress(OSError):
            for line in file.read_bytes().decode(errors="backslashreplace").split("\n"):
                name, equals, value = line.partition("=")
                if equals and name.strip(whitespace) == variable:
                    yield value.strip(whitespace), file


def _files(environment: Mapping[str, str]) -> Iterator[Path]:
    if named := environment.get("NCCL_CONF_FILE"):
        yield Path(named)
    with suppress(KeyError):  # an unknown user, as in a container
        yield Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"
    yield SYSTEM
