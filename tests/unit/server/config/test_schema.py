"""What is said of settings, in the example that is shipped and in docs/, is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cubroker.protocol.errors import Invalid
from cubroker.server.config.load import ConfigSources
from cubroker.server.config.schema import PERSONAL, QUOTA, SETTINGS, Setting, parse_budget, parse_bytes
from cubroker.server.ledger.policy import Quota

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "deploy" / "cubroker.toml"
PAGE = (ROOT / "docs" / "configuration.md").read_text()
SHIPPED = {"mode": 0o600}
"""What the example sets: several users may connect where it is used."""

SETTING_OR_TABLE = re.compile(r"^#(?=\w+ = |\[)", re.MULTILINE)


def test_the_example_as_it_is_shipped_makes_pools_their_owners_and_changes_nothing_else() -> None:
    shipped, usual = ConfigSources(EXAMPLE).read(), ConfigSources().read()
    differing = [key for key in shipped.values if shipped.values[key] != usual.values.get(key)]
    assert {key: shipped.values[key].meant for key in differing} == SHIPPED
    assert usual.config.policy.mode == 0o644
    assert shipped.config.policy.mode == 0o600


def test_the_example_has_every_setting_with_its_default_where_that_does_not_depend(tmp_path: Path) -> None:
    path = tmp_path / "cubroker.toml"
    path.write_text(SETTING_OR_TABLE.sub("", EXAMPLE.read_text()))
    shown, usual = ConfigSources(path).read(), ConfigSources().read()
    for key, setting in SETTINGS.items():
        assert shown.values[key].origin.startswith(f"{path}:"), key
        if setting.default is not None:
            assert shown.values[key].meant == SHIPPED.get(key, usual.values[key].meant), key
    assert {key.rpartition(".")[2] for key in shown.values if key.startswith(f"{PERSONAL}.root.")} == QUOTA.keys()
    assert shown.config.policy.quotas == {0: Quota()}


def test_the_example_says_what_needs_a_restart_and_which_defaults_depend() -> None:
    comments: dict[str, str] = {}
    table, said = "", ""
    for line in EXAMPLE.read_text().splitlines():
        if header := re.fullmatch(r"#?\[(.*)\]", line):
            table, said = f"{header[1]}.", ""
        elif setting := re.fullmatch(r"#?(\w+) = .*", line):
            comments[table + setting[1]] = said
        else:
            said = f"{said} {line}" if line else ""
    for key, setting in SETTINGS.items():
        assert ("(restart)" in comments[key]) == (not setting.live), key
        assert ("Depends: " in comments[key]) == (setting.default is None), key


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.key)
def test_every_setting_has_a_row_with_its_variable_its_default_and_when_it_changes(setting: Setting) -> None:
    rows = re.findall(rf"^\| `{re.escape(setting.key)}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 1, "one row"
    default, variable, live, *_ = rows[0].split(" | ")
    assert variable == f"`{setting.variable}`"
    assert live == ("yes" if setting.live else "restart")
    if setting.default is not None:
        assert default == f"`{setting.kind.show(setting.default)}`"


def test_the_examples_for_metrics_are_configurations(tmp_path: Path) -> None:
    path = tmp_path / "cubroker.toml"
    examples = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(), re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        path.write_text(example)
        assert ConfigSources(path).read().config.metrics.listen is not None


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("10B", 10),
        ("10GiB", 10 << 30),
        ("10G", 10 << 30),
        ("2 tib", 2 << 40),
        ("1.5MB", 1_500_000),
        ("3kb", 3000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


LONG = [
    pytest.param("9" * 400 + ".0GB", id="a float has no room for it"),
    pytest.param("9" * 5000, id="nor has an int"),
]


@pytest.mark.parametrize("text", ["", "GiB", "-1", "10 parsecs", "1e9", "90%", "1.GiB", *LONG])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(Invalid, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "budget"), [("90%", 9_000_000), ("22.5 %", 2_250_000), ("100%", 10_000_000), ("5000000", 5_000_000)]
)
def test_a_budget_is_a_size_or_a_share(text: str, budget: int) -> None:
    assert parse_budget(text, 10_000_000) == budget


@pytest.mark.parametrize("text", ["0", "0%", "0.00001%", "20%", "101%", "10000001", "1GiB", "90", "2097151"])
def test_a_budget_lies_within_its_device_and_holds_an_allocation(text: str) -> None:
    with pytest.raises(Invalid, match="the device has 10000000; write 2097152 to 10000000 bytes"):
        parse_budget(text, 10_000_000)


def test_a_share_beyond_all_numbers_is_none() -> None:
    with pytest.raises(Invalid, match="is no size"):
        parse_budget("9" * 400 + "%", 1000)
