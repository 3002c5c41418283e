"""config: what is set, where, and whether it makes sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import environment, run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cubroker.toml"


def test_a_file_that_makes_sense_is_status_0(file: Path) -> None:
    file.write_text("keep = 2\n[quota]\nleases = 5\n")
    done = run("config", "check", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: 2 settings, nothing wrong\n", "")
    assert run("config", "check").stdout == "no file: 0 settings, nothing wrong\n"


def test_everything_that_is_wrong_is_a_line_and_status_1(file: Path) -> None:
    file.write_text("keep = 2000\nbugdet = 1\n")
    done = run("config", "check", file, env=environment(CUBROKER_MODE="x", CUBROKER_LOG_LEVEL="loud"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"cubroker: {file}:1: keep is 2000; write a whole number from 0 to 1000",
        f"cubroker: {file}:2: there is no setting bugdet; did you mean budget?",
        'cubroker: $CUBROKER_MODE: mode is "x"; write it in octal, as in 0o640 or "640", up to 0o777',
        'cubroker: $CUBROKER_LOG_LEVEL: log.level is "loud"; write "debug", "info", "warning" or "error"',
    ]
    shown = run("config", "show", file, env=environment(CUBROKER_LOG_LEVEL="loud"))
    assert (shown.returncode, shown.stdout) == (1, "")
    assert len(shown.stderr.splitlines()) == 1
    assert "(and 2 more, which cubroker config check shows)" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "kep=1"], "there is no setting kep; did you mean keep?"),
        (["--set", "keep"], "keep has no value; write --set keep=VALUE"),
        (["--devices", "tpu:1"], "no driver 'tpu:1'"),
    ],
)
def test_an_option_that_there_is_not_is_wrong_usage(arguments: list[str], said: str) -> None:
    for command in (["config", "check"], ["config", "show"], ["serve"]):
        done = run(*command, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


def test_the_value_of_every_setting_is_shown_with_where_it_comes_from(file: Path) -> None:
    file.write_text('mode = 0o640\nadmins = ["root"]\nkeep = 1\n[quotas.root]\nmemory = "1GiB"\n')
    names = environment(CUBROKER_CONFIG=str(file), CUBROKER_KEEP="2", CUBROKER_DIR="/srv/a", CUBROKER_LOG_LEVEL="debug")
    options = ("--directory", "/srv/b", "--budget", "50%", "--set", "log.level=error")
    header, *lines = run("config", "show", *options, env=names).stdout.splitlines()
    assert header.split() == ["KEY", "VALUE", "FROM"]
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert rows["directory"].split() == ['"/srv/b"', "--directory"]
    assert rows["devices"].split() == ['"cuda"', "default"]
    assert rows["budget"].split() == ['"50%"', "--budget"]
    assert rows["keep"].split() == ["2", "$CUBROKER_KEEP"]
    assert rows["mode"].split() == ["0o640", f"{file}:1"]
    assert rows["admins"].split() == ['["root"]', f"{file}:2"]
    assert rows["log.level"].split() == ['"error"', "--set", "log.level"]
    assert rows["quotas.root.memory"].split() == ['"1GiB"', f"{file}:5"]
    found = json.loads(run("config", "show", "--json", *options, env=names).stdout)
    assert [record["key"] for record in found] == list(rows)
    assert found[1] == {"key": "devices", "value": "cuda", "from": "default", "live": False}
    assert found[4] == {"key": "mode", "value": "0o640", "from": f"{file}:1", "live": True}


def test_a_broker_has_the_settings_that_are_shown(file: Path) -> None:
    done = run("serve", env=environment(CUBROKER_CONFIG=str(file)))
    assert done.returncode == 1
    assert f"cannot read the configuration {file}" in done.stderr
