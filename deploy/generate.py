"""Write what `make install` has of the command line: its page of the manual, and its completion for three shells.

Run it when a command, an option or a help text changes: ``.venv/bin/python deploy/generate.py``. A test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from cubroker.cli.main import commands

HERE = Path(__file__).parent
SHELLS = {"bash": "cubroker.bash", "zsh": "_cubroker", "fish": "cubroker.fish"}

EXIT_STATUS = (
    ("0", "Done."),
    ("1", "Refused; one line on standard error says why."),
    ("2", "Wrong usage."),
    ("3", "No broker serves there."),
    ("130", "Interrupted."),
)

VARIABLES = (
    ("CUBROKER_DIR", "Where the broker serves, unless --directory says so."),
    ("CUBROKER_CONFIG", "The file with the settings of serve, in TOML."),
    ("CUBROKER_OWNER", "Whose pools are taken, separated by commas."),
    ("NO_COLOR", "If it is set, there are no styles."),
)


def generated() -> dict[Path, str]:
    """Return the content of each file."""
    found = {HERE / "man" / "cubroker.1": "".join(f"{line}\n" for line in manual())}
    for shell, name in SHELLS.items():
        found[HERE / "completion" / name] = completion(shell)
    return found


def completion(shell: str) -> str:
    """Return what a shell sources to complete cubroker's commands; it asks cubroker for words."""
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(commands, {}, "cubroker", "_CUBROKER_COMPLETE")
    return f"{(made.source_template % made.source_vars()).strip()}\n"


def manual() -> Iterator[str]:
    """Yield the lines of the page, in the macros of man(7)."""
    yield '.\\" Written by deploy/generate.py.'
    yield '.TH CUBROKER 1 "" cubroker "User Commands"'
    yield ".SH NAME"
    yield "cubroker \\- lend GPU memory to the processes of a host"
    yield ".SH SYNOPSIS"
    yield ".B cubroker"
    yield "[OPTIONS] COMMAND [ARGUMENTS]"
    yield ".SH DESCRIPTION"
    yield from _prose(commands.help or "")
    yield ".SH OPTIONS"
    context = click.Context(commands, info_name="cubroker", **commands.context_settings)
    yield from _options(commands, context)
    yield ".SH COMMANDS"
    yield from _commands(commands, context)
    for title, entries in (("EXIT STATUS", EXIT_STATUS), ("ENVIRONMENT", VARIABLES)):
        yield f".SH {title}"
        for name, text in entries:
            yield from (".TP", f".B {_roff(name)}", _roff(text))


def _commands(group: click.Group, parent: click.Context) -> Iterator[str]:
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
        parameters = command.get_params(context)
        arguments = [each.make_metavar(context) for each in parameters if isinstance(each, click.Argument)]
        if isinstance(command, click.Group):
            yield from _commands(command, context)
            continue
        yield f'.SS "{_roff(" ".join([context.command_path, "[OPTIONS]", *arguments]))}"'
        yield from _prose(command.help or "")
        yield from _options(command, context, without="-h")


def _options(command: click.Command, context: click.Context, without: str = "") -> Iterator[str]:
    for parameter in command.get_params(context):
        if without in parameter.opts:
            continue
        record = parameter.get_help_record(context)
        if record is not None and not isinstance(parameter, click.Argument):
            names, text = record
            yield from (".TP", f".B {_roff(names)}", _roff(" ".join(text.split())))


def _prose(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield from (".PP", _roff(" ".join(paragraph.split())))


def _roff(text: str) -> str:
    """Escape what troff would take for a request, an escape or a hyphen to break at."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("\b", "")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main() -> None:
    """Write the files."""
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
