"""Starts what ``cubroker keep`` keeps, and hands it the stored descriptors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from cubroker.protocol.system_errors import explain
from cubroker.server.store.notify import FIRST, VARIABLES
from cubroker.server.store.remarks import Remarks
from cubroker.server.store.signals import Signals

NOT_EXECUTABLE = 126
NOT_FOUND = 127
"""Exit statuses of a command that cannot be run, as a shell's."""


def start(
    command: Sequence[str], environ: Mapping[str, str], stored: Mapping[int, str], signals: Signals, remarks: Remarks
) -> int:
    """Start a command and return its pid, which is that of its process group too.

    Its parent's death is not its own: a broker whose keeper was killed goes on to serve; only what it stored is lost.
    This process has to have a single thread.

    Args:
        command: program and arguments; the program is looked for in ``PATH``.
        environ: variables of the protocol, without those that need the pid.
        stored: descriptors, each at least 3, and their names.
        signals: what this process handles, and the child must not.
        remarks: told of a command that cannot be run.

    Raises:
        OSError: there cannot be another process.
    """
    # What another manager told this process is not for the child.
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with signals.blocked():  # one that reaches the child before it is itself has to wait, not be lost
        pid = os.fork()
        if pid == 0:
            try:
                _become(command, {**inherited, **environ}, stored, signals)
            except FileNotFoundError:
                remarks.say(f"{command[0]} is not found; give its path, or a PATH that has it")
                os._exit(NOT_FOUND)
            except OSError as error:
                remarks.say(f"{command[0]} cannot be run: {explain(error, command[0])}")
            finally:
                os._exit(NOT_EXECUTABLE)
    return pid


def _become(command: Sequence[str], environ: dict[str, str], stored: Mapping[int, str], signals: Signals) -> None:
    os.setpgid(0, 0)  # what a terminal sends to its group comes once, through the keeper
    pid = str(os.getpid())
    if stored:
        names = ":".join(_place(stored))
        environ |= {"LISTEN_PID": pid, "LISTEN_FDS": str(len(stored)), "LISTEN_FDNAMES": names}
    if "WATCHDOG_USEC" in environ:
        environ["WATCHDOG_PID"] = pid
    signals.release()
    os.execvpe(command[0], tuple(command), environ)  # noqa: S606  to run what it is told is what it is for


def _place(stored: Mapping[int, str]) -> list[str]:
    """Give descriptors the numbers from 3 on, and return the names in that order.

    Those that have such a number keep it, and the others take what is left: no other number is needed for a while,
    and nothing that is still to be moved is written over.
    """
    numbers = range(FIRST, FIRST + len(stored))
    others = iter([descriptor for descriptor in stored if descriptor not in numbers])
    names = []
    for number in numbers:
        if number in stored:
            os.set_inheritable(number, True)
            names.append(stored[number])
        else:
            descriptor = next(others)
            os.dup2(descriptor, number)
            names.append(stored[descriptor])
    return names
