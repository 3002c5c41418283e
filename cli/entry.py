"""Where the command ``cubroker`` begins: what Ctrl-C does until its modules are imported, and after its end.

Python raises KeyboardInterrupt between any two bytecodes. In the imports, a third of a second, and at the
interpreter's exit nothing catches it, so it would be a traceback of modules that no user knows. There the system's own
action is right: the process ends by SIGINT, as shells expect, and nothing needs to be undone. Once a command has been
imported it may have something to undo, so it gets a KeyboardInterrupt, which :mod:`cubroker.cli.main` turns into
status 130.

This module imports nothing but ``signal``, and :func:`main` decides about signals before it imports anything else.
What is to be decided about other signals before the imports belongs here too.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line, and exit with its status; the entry point of the console script."""
    end_at_interrupt()
    from cubroker.cli.main import main as run

    run()


def end_at_interrupt() -> None:
    """Have SIGINT end the process, unless it is ignored: shells start background work like that, and so does nohup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """Have SIGINT raise KeyboardInterrupt, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
