"""What the README shows can be done as it stands there, and prints what stands there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forkserver
from tests.accounts import user_name
from tests.brokers import eventually
from tests.systemd.documented_session import Step, difference, steps
from tests.unit.cli.processes import environment, run_as_guest, started

README = (Path(__file__).parents[3] / "README.md").read_text()
DIRECTORY = "/run/cubroker"
"""Where the broker of the page serves."""


class Page:
    """The commands of the page, given one after the other in a folder of their own, to a broker that they find."""

    def __init__(self, folder: Path, directory: Path) -> None:
        self.steps = [step for step in steps(README) if step.command.startswith("cubroker ")]
        self._left = iter(self.steps)
        self._folder = folder
        self._directory = directory
        self.env = environment(CUBROKER_DIR=str(directory))  # of those who are to serve there

    def run(self, *commands: str) -> None:
        """Give the next commands, which have to be these, and check what they print."""
        for command in commands:
            step = self.next(command)
            done = run_as_guest(self._directory, *_words(step), folder=self._folder)
            assert not done.returncode, done.stderr
            self.check(step, done.stdout.splitlines())  # progress is not left on a terminal

    def next(self, command: str) -> Step:
        """Return the next step, which has to be this command."""
        step = next(self._left)
        assert _words(step)[0] == command
        return step

    @property
    def done(self) -> bool:
        """Whether no command is left."""
        return next(self._left, None) is None

    def check(self, step: Step, printed: list[str]) -> None:
        """Compare what was printed with the page, but for what differs from host to host."""
        expected = [line.replace("root", user_name()).replace(DIRECTORY, str(self._directory)) for line in step.printed]
        wrong = difference([_plain(line) for line in expected], [_plain(line) for line in printed])
        assert not wrong, f"{step.command}\n{wrong}"


def _words(step: Step) -> list[str]:
    return step.command.partition("#")[0].split()[1:]


def _plain(line: str) -> str:
    client = re.fullmatch(r" *\d+ +\d+ +\S+ +(\S+) .* (connected) .* (\S+)", line)
    return " ".join(client.groups()) if client else re.sub(r"\d+\.\d [GT]iB(?!/s)", "MEMORY", line)


@pytest.fixture
def page() -> Iterator[Page]:
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        yield Page(Path(folder), Path(folder, "run"))


@pytest.mark.slow
def test_the_commands_and_the_worker_of_the_readme_work_and_print_what_stands_there(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, follower = re.findall(r"^```python\n(.*?)```", README, re.MULTILINE | re.DOTALL)[:2]
    monkeypatch.setenv("CUBROKER_DIR", page.env["CUBROKER_DIR"])
    page.run("demo")
    serve = page.next("serve")
    with started(*_words(serve), env=page.env) as broker:
        assert broker.stdout is not None
        assert broker.stderr is not None
        log = [broker.stderr.readline().rstrip("\n") for _ in serve.printed[1:]]
        page.check(serve, [*log[:-1], broker.stdout.readline().rstrip("\n"), log[-1]])
        page.run("load", "ls", "devices", "verify")
        shown: list[str] = []
        given = {
            "input": lambda words: [page.run("clients"), shown.append(words)],
            "print": lambda it: shown.append(repr(it)),
        }
        exec(compile(worker, "README.md", "exec"), {"__name__": "__main__", **given})
        assert "```\n" + "\n".join(shown) + "\n```\n" in README
        with forkserver.Forked(["-c", follower], env=page.env, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            seen = [following.stdout.readline()]
            page.run("demo", "load")
            seen.append(following.stdout.readline())
            page.run("retire")
            following.kill()
        assert f"```\n{''.join(seen)}```\n" in README
        assert page.done
        broker.terminate()
        eventually(lambda: broker.poll() is not None, "the broker to end")
