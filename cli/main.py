"""The command ``cubroker``: the table of its subcommands, and the exit status of each failure.

A subcommand's module is imported when the subcommand runs, so that ``cubroker --help`` loads neither ZeroMQ nor CUDA.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import click

from cubroker.cli import format, options, signals
from cubroker.protocol.errors import CubrokerError, Unavailable

INTERRUPTED = 130

GREETING = 3.0
"""Seconds that a broker has to greet: longer than a restart takes on a machine that is not overloaded."""


COMMANDS = {
    "serve": ("serve:serve", "Own the memory of this host's devices and lend it."),
    "keep": ("keep:keep", "Run a broker, and start it again with what it stored."),
    "ping": ("broker:ping", "Ask whether the broker serves; for probes."),
    "load": ("load:load_pool", "Publish safetensors files as the next version of a pool."),
    "ls": ("broker:ls", "List the pools."),
    "show": ("broker:show", "Show one pool and its tensors."),
    "clients": ("broker:clients", "List the processes that use the broker."),
    "top": ("top:top", "Show devices, pools and who holds them, live."),
    "story": ("broker:story", "Tell the last events of a pool or a session."),
    "devices": ("broker:devices", "List the devices and what is allocated on them."),
    "topology": ("broker:topology", "Show which devices reach each other's memory, and how well."),
    "vllm": ("load:vllm", "Prepare runtime pools for engines of vLLM."),
    "verify": ("load:verify_pool", "Compare a pool, byte for byte, with files."),
    "retire": ("broker:retire", "Take a version out of service."),
    "drain": ("broker:drain", "Lend nothing new, and wait until everything is given back."),
    "export": ("cluster:export", "Let other hosts fetch pools of this one."),
    "fetch": ("cluster:fetch_pool", "Publish a pool of another host here."),
    "peers": ("cluster:show_peers", "Show which hosts export, and what each of them has."),
    "certificates": ("cluster:certificates", "Make the certificates that hosts know each other by."),
    "config": ("serve:config", "Check the settings of a broker, or show where each comes from."),
    "doctor": ("doctor.command:doctor", "Find out what works on this machine, and why not."),
    "demo": ("demo:demo", "See it work: load, attach, kill, publish, retire."),
}
"""Every subcommand in the order of the help: ``module:attribute`` in :mod:`cubroker.cli`, and its line there."""

OTHER_WORDS = {
    **dict.fromkeys(("delete", "remove", "rm", "unload"), "did you mean retire?"),
    **dict.fromkeys(("list", "pools", "status"), "did you mean ls?"),
    **dict.fromkeys(("ps", "who", "workers"), "did you mean clients?"),
    **dict.fromkeys(("run", "start"), "did you mean serve?"),
    **dict.fromkeys(("end", "kill", "stop"), "a broker ends with Ctrl-C or SIGTERM; drain empties it before"),
    "help": "cubroker --help lists those that there are",
    "version": "did you mean --version?",
}
"""Hints for words that are commands of other programs, and resemble none here that does the same."""

HANDLED_LATER = {"serve": frozenset({signal.SIGHUP, signal.SIGUSR1}), "keep": signals.HELD}
"""Signals that a subcommand unblocks itself, once it has handlers for them."""


class Commands(click.Group):
    """The group of all subcommands, which imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of that name; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(f"cubroker.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command's name."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            where = "options of a command follow its name, as in `cubroker ls --json`"
            raise click.UsageError(f"No such option {error.option_name!r}; {where}", ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the command that runs; from then on signals reach it, and it may have something to undo."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command {args[0]!r}; {_hint(args[0])}")
        found = super().resolve_command(ctx, args)
        signals.raise_at_interrupt()
        signals.release(HANDLED_LATER.get(found[0] or "", frozenset()))
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _hint(word: str) -> str:
    """Return what to give in place of a word that is no command."""
    if word in OTHER_WORDS:
        return OTHER_WORDS[word]
    near = get_close_matches(word, COMMANDS, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else OTHER_WORDS["help"]


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cubroker")
@options.group_directory
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
        format.complain(format.reason(error))
        return options.NO_BROKER if isinstance(error, Unavailable) else options.REFUSED


def _open_streams() -> None:
    """Open /dev/null as each standard stream that the caller has closed: else the next socket would get its number.

    Nothing can be written to standard output then. A command whose output is lost fails, as it does on a full disk.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _flush() -> None:
    """Flush the streams, or drop what is left: a failure in the interpreter's own flush would change the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> int:
    """Run the command line of this process, and return its exit status; called by :mod:`cubroker.cli.__main__`."""
    _open_streams()
    # A terminal that cannot show a character is no reason to fail.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status = run(sys.argv[1:])
        signals.end_at_interrupt()
    except KeyboardInterrupt:  # before the command, or after it
        status = INTERRUPTED
    _flush()
    return status
