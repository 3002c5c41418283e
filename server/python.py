"""The one way in which cubroker starts Python processes of its own.

``python -m`` and ``python -c`` put the current directory before the standard library on the path of imports: a file
``json.py`` in there would run with the rights of the user who happens to stand in that directory. ``-P`` leaves it out.
The linter refuses ``sys.executable`` and ``multiprocessing`` (which starts ``python -c``) everywhere else.
"""

from __future__ import annotations

import sys


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module as a process with this interpreter, wherever it is started."""
    return [sys.executable, "-P", "-m", module, *arguments]  # noqa: TID251
