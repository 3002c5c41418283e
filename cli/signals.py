"""What signals do to a command before its modules are imported, while it works, and after its end.

Python raises KeyboardInterrupt between any two bytecodes. During the imports, a third of a second, and at the
interpreter's exit nothing catches it: the user would see a traceback of unknown modules. Nothing needs to be undone
there, so SIGINT keeps the system's default action and ends the process, as shells expect. An imported command may have
something to undo: it gets a KeyboardInterrupt, which :mod:`cubroker.cli.main` turns into status 130.

Other signals are blocked until the command has been imported. By default SIGUSR1 and SIGHUP would end a process that
uses them for something else, and the first process of a container would never get SIGTERM. ``keep`` and ``serve`` leave
some of them blocked until they have handlers. A signal that arrives during the interpreter's start, before
:func:`cubroker.cli.__main__.main` runs, has its default effect.
"""

from __future__ import annotations

import signal

HELD = frozenset({signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that wait until the command has been imported."""

_inherited: set[int] | None = None


def end_at_interrupt() -> None:
    """Have SIGINT end the process, unless it is ignored, as in work that shells and nohup start in the background."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_interrupt() -> None:
    """Have SIGINT raise KeyboardInterrupt, unless it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def hold() -> None:
    """Block :data:`HELD`."""
    global _inherited
    _inherited = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


def release(still_held: frozenset[signal.Signals]) -> None:
    """Unblock the signals that :func:`hold` has blocked, except ``still_held``; without a hold do nothing."""
    if _inherited is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _inherited | still_held)


def inherited_mask() -> set[int]:
    """Return the signals that were blocked when this process began; the same are to be blocked in its children."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()) if _inherited is None else _inherited
