"""The entry point of the command ``cubroker``: sets up signals before anything else is imported.

This module imports nothing except :mod:`cubroker.cli.signals`, which imports nothing except ``signal``. If a package of
the extra ``cli`` is missing, which the command line needs and a worker does not, one line says so.

``load`` needs CUDA, which starts while the command line, the client and the loader are imported.
"""

from __future__ import annotations

import os
import sys

from cubroker.cli import signals

EXTRA = {"click", "rich"}
"""The packages of the extra ``cli``."""

BROKERS = {"serve", "keep", "demo"}
"""Commands that start a broker, which has an extra of its own."""

VALUED = {"--directory", "--timeout"}
"""Options before the command that a value follows."""

HELP = {"-h", "--help"}


def main() -> None:
    """Run the command line, and exit with its status; the entry point of the console script."""
    signals.end_at_interrupt()
    signals.hold()
    loads = _command(sys.argv[1:]) == "load" and HELP.isdisjoint(sys.argv)
    if loads and None not in (sys.stdin, sys.stdout, sys.stderr):  # CUDA's files would get a closed stream's number
        from cubroker.driver import start_cuda

        start_cuda()
    try:
        from cubroker.cli.main import main as run

        status = run()
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.exit(f"cubroker: {_missing(error.name, sys.argv[1:])}")
    if loads:  # the kernel frees the rest, in 35 ms less than the interpreter and CUDA
        os._exit(status)
    sys.exit(status)


def _missing(package: str, arguments: list[str]) -> str:
    """Return the error of a command line that needs a missing package: it says what to install."""
    command = _command(arguments)
    extras = "server,cli" if command in BROKERS else "cli"
    asked = f"cubroker {command}".strip()
    return f"`{asked}` needs {package}, which is not installed: pip install 'cubroker[{extras}]'"


def _command(arguments: list[str]) -> str:
    """Return the command: the first word that is no option and no option's value; without one the first word of all."""
    words = iter(arguments)
    for word in words:
        if word in VALUED:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return "".join(arguments[:1])


if __name__ == "__main__":
    main()
