"""The command ``cubroker``: its subcommands, and what becomes of their failures.

Each subcommand lies in a module of its own, imported when it is asked for, so that ``cubroker --help``
costs neither ZeroMQ nor CUDA.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import click

from cubroker.cli import options, signals, text
from cubroker.protocol.errors import CubrokerError, Unavailable

REFUSED = 1
NO_BROKER = 3
INTERRUPTED = 130

GREETING = 3.0
"""Seconds for the greeting: longer than a broker takes that is started again, on a machine that is not overloaded."""

COMMANDS = {
    "serve": "Own the memory of this host's devices and lend it.",
    "keep": "Run a broker, and start it again with what it stored.",
    "ping": "Ask whether the broker serves; for probes.",
    "load": "Publish safetensors files as the next version of a pool.",
    "ls": "List the pools.",
    "show": "Show one pool and its tensors.",
    "clients": "List the processes that use the broker.",
    "top": "Show devices, pools and who holds them, live.",
    "story": "Tell the last events of a pool or a session.",
    "devices": "List the devices and what is allocated on them.",
    "topology": "Show which devices reach each other's memory, and how well.",
    "verify": "Compare a pool, byte for byte, with files.",
    "retire": "Take a version out of service.",
    "drain": "Lend nothing new, and wait until everything is given back.",
    "config": "Check the settings of a broker, or show where each comes from.",
    "doctor": "Find out what works on this machine, and why not.",
    "demo": "See it work: load, attach, kill, publish, retire.",
}
"""What each subcommand does. It is ``command`` in the module of ``cubroker.cli`` that has its name."""

PACKAGES = {"doctor": "doctor.command"}
"""Subcommands of many modules, and which of these has ``command``."""

HANDLED_LATER = {
    "serve": frozenset({signal.SIGHUP, signal.SIGUSR1}),
    "keep": signals.HELD,
}
"""Signals that a subcommand unblocks itself, once it has handlers for them."""


class Commands(click.Group):
    """The group of all subcommands, which imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of a pool's life."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of that name; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"cubroker.cli.{PACKAGES.get(cmd_name, cmd_name)}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the command that runs; from then on it hears signals, and may have something to undo."""
        found = super().resolve_command(ctx, args)
        signals.raise_at_interrupt()
        signals.release(HANDLED_LATER.get(found[0] or "", frozenset()))
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cubroker")
@options.any_directory
@options.seconds("--timeout", "How long a broker may take to greet.", default=GREETING, least=0.001)
@click.pass_context
def commands(context: click.Context, directory: Path | None, timeout: float) -> None:
    """Lend GPU memory to the processes of this host: weights are loaded once and attached to in milliseconds."""
    context.obj = directory


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; a failure is one line on standard error."""
    try:
        return int(commands.main(list(arguments), prog_name="cubroker", standalone_mode=False) or 0)
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    except (CubrokerError, OSError) as error:
        text.complain(text.reason(error))
        return NO_BROKER if isinstance(error, Unavailable) else REFUSED


def _open_streams() -> None:
    """Let standard streams that the caller has closed lead nowhere: the next socket would take the number of one."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _flush() -> None:
    """Write what is left, or give it up: where the interpreter fails at that, it ends with a status of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    """Run the command line of this process, and exit; called by :mod:`cubroker.cli.entry`."""
    _open_streams()
    # A terminal that cannot show a character is no reason to fail.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status = run(sys.argv[1:])
        signals.end_at_interrupt()
    except KeyboardInterrupt:  # before the command, or after it
        status = INTERRUPTED
    _flush()
    sys.exit(status)
