"""Refuses modules of another build of this package than the one that this process runs.

Many modules are imported at their first use, which may be weeks after the start. If the package was replaced on disk
meanwhile, as ``pip install --upgrade`` does, such a module is of the new build. It may lack a name that the modules in
memory import from it, or have another meaning of it, which no error would tell. So the import is refused, with an error
that says what to do. Every file of a package gets a new time when the package is replaced, so one file tells.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # type checkers take it for true
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class ImportGuard:
    """The first entry of ``sys.meta_path``, which finds no module itself.

    Args:
        package: the name of the package.
        file: a file of it.
    """

    def __init__(self, package: str, file: str) -> None:
        self._package = package
        self._file = file
        self._state = _state(file)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ``Unsupported`` if the package was replaced; ``ImportError`` if that has not been imported yet."""
        if not fullname.startswith(f"{self._package}.") or _state(self._file) == self._state:
            return
        errors = sys.modules.get(f"{self._package}.protocol.errors")
        raise getattr(errors, "Unsupported", ImportError)(
            f"cannot import {fullname}: the files in {self._file.rpartition('/')[0]} were replaced, as by an upgrade,"
            f" after this process had imported {self._package} from there; restart this process"
        )


def _state(file: str) -> tuple[int, int] | None:
    """Return the size and the time of a file; None if there is none, as in an archive.

    A link to the file, as package managers make for other environments, changes neither.
    """
    try:
        found = os.stat(file)  # noqa: PTH116
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
