from __future__ import annotations

import grp
import pwd
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from cubroker.server.config.load import ConfigSources, EffectiveConfig, InvalidConfig, line_numbers
from cubroker.server.config.schema import SETTINGS, Address, Config, Log, Metrics
from cubroker.server.ledger.policy import Limits, NameReservation, Policy, Quota
from cubroker.server.transport.unix_sockets import Access

USER, GROUP = pwd.getpwuid(0).pw_name, grp.getgrgid(0).gr_name  # whoever runs the tests may have no account
USUAL = Quota(
    sessions=250,
    leases=1_000_000,
    requests=65_536,
    watches=65_536,
    events=65_536,
    locks=65_536,
    layouts=1 << 30,
    descriptors=500,
)


def read(
    tmp_path: Path, text: str, options: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> EffectiveConfig:
    path = tmp_path / "cubroker.toml"
    path.write_text(text)
    return ConfigSources(path, options or {}, environment or {}, 1000).read()


def complaints(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        read(tmp_path, text)
    return caught.value.complaints


def test_an_empty_file_says_what_no_file_says(tmp_path: Path) -> None:
    nothing = ConfigSources(descriptors=1000).read()
    assert read(tmp_path, "") == nothing
    assert {value.origin for value in nothing.values.values()} == {"default"}
    assert nothing.config == Config(
        directory=nothing.config.directory,
        devices="cuda",
        budget="90%",
        access=Access(0o600, None),
        policy=Policy(quota=USUAL),
        limits=Limits(),
        log=Log("info", "auto"),
        metrics=Metrics(),
        drain=10.0,
        mapped_check=10.0,
    )
    least = ConfigSources(descriptors=1).read().config.policy.quota
    assert (least.sessions, least.descriptors) == (1, 2)


EVERYTHING = f"""
    directory = "/srv/cubroker"
    devices = "host:2"
    keep = 3
    mode = 0o660
    admins = [{USER!r}, 4711]
    [budget]
    default = "50%"
    0 = "1GiB"
    [sockets]
    group = {GROUP!r}
    [quota]
    memory = "2GiB"
    sessions = 10
    leases = "unlimited"
    requests = 0
    descriptors = 300
    mapped_beyond_leases = "64MiB"
    [quotas.4711]
    memory = "unlimited"
    watches = 7
    events = 8
    locks = 9
    layouts = 4096
    mapped_beyond_leases = 0
    [quotas.{USER}]
    sessions = "unlimited"
    [limits]
    leases = 1
    requests = 2
    watches = 3
    events = 4
    locks = 5
    mapped_check_seconds = 2.5
    [log]
    level = "debug"
    format = "json"
    [metrics]
    listen = "127.0.0.1:9464"
    mode = 0o640
    group = 0
    token_file = "/etc/cubroker/metrics.token"
    public = true
    [shutdown]
    drain_seconds = 2.5
"""


def test_everything_can_be_set(tmp_path: Path) -> None:
    quota = Quota(2 << 30, 10, None, 0, 65_536, 65_536, 65_536, 1 << 30, 300, 64 << 20)
    assert read(tmp_path, EVERYTHING).config == Config(
        directory=Path("/srv/cubroker"),
        devices="host:2",
        budget={"default": "50%", "0": "1GiB"},
        access=Access(0o660, 0),
        policy=Policy(
            keep=3,
            mode=0o660,
            admins=frozenset((0, 4711)),
            quota=quota,
            quotas={
                4711: Quota(None, 10, None, 0, 7, 8, 9, 4096, 300, 0),
                0: Quota(2 << 30, None, None, 0, 65_536, 65_536, 65_536, 1 << 30, 300, 64 << 20),
            },
        ),
        limits=Limits(1, 2, 3, 4, 5),
        log=Log("debug", "json"),
        metrics=Metrics(Address("127.0.0.1", 9464), Access(0o640, 0), Path("/etc/cubroker/metrics.token"), True),
        drain=2.5,
        mapped_check=2.5,
    )


def test_modes_are_octal_however_they_are_written(tmp_path: Path) -> None:
    for text in ("mode = 0o640", 'mode = "640"', 'mode = "0640"', 'mode = "0o640"'):
        assert read(tmp_path, text).config.policy.mode == 0o640
    assert read(tmp_path, "[sockets]\nmode = 0o666").config.access == Access(0o666, None)
    assert read(tmp_path, "[sockets]\ngroup = 7\nmode = 0o620").config.access == Access(0o620, 7)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("off", None),
        ("unix:/run/metrics", Path("/run/metrics")),
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("[::1]:9464", Address("::1", 9464)),
    ],
)
def test_metrics_are_served_on_a_loopback_port_or_a_socket(text: str, meant: object) -> None:
    options = {"metrics.listen": text, "metrics.token_file": "/token"}
    assert ConfigSources(options=options).read().config.metrics == Metrics(meant, token_file=Path("/token"))


def test_a_socket_for_metrics_is_for_the_brokers_user_and_for_a_group_that_is_named() -> None:
    listen = {"metrics.listen": "unix:/run/metrics", "sockets.group": "7"}
    assert ConfigSources(options=listen).read().config.metrics.access == Access(0o600, None)
    assert ConfigSources(options=listen | {"metrics.group": "8"}).read().config.metrics.access == Access(0o660, 8)


def test_metrics_on_a_port_take_a_token_or_the_word_that_they_are_public(tmp_path: Path) -> None:
    listen = '[metrics]\nlisten = "127.0.0.1:9464"\n'
    (complaint,) = complaints(tmp_path, listen)
    said = "metrics.listen: every user of this host can read a port; name a file with a token in metrics.token_file"
    assert complaint.startswith(f"{tmp_path / 'cubroker.toml'}:2: {said}")
    assert "metrics.public" in complaint
    assert read(tmp_path, listen + "public = true").config.metrics == Metrics(Address("127.0.0.1", 9464), public=True)
    assert read(tmp_path, listen + 'token_file = "/token"').config.metrics.token_file == Path("/token")
    with pytest.raises(InvalidConfig, match=r"CUBROKER_METRICS_LISTEN: metrics\.listen: every user"):
        ConfigSources(environment={"CUBROKER_METRICS_LISTEN": "[::1]:9464"}).read()


def test_options_come_before_the_environment_that_before_the_file_and_that_before_the_default(tmp_path: Path) -> None:
    text = "keep = 1\nmode = 0o601\n[quota]\nmemory = 1\nleases = 1\n"
    environment = {"CUBROKER_KEEP": "2", "CUBROKER_QUOTA_MEMORY": "2KiB", "CUBROKER_MODE": "", "CUBROKER_PORT": "tcp:"}
    effective = read(tmp_path, text, {"keep": "3"}, environment)
    file = tmp_path / "cubroker.toml"
    found = {key: (effective.values[key].meant, effective.values[key].origin) for key in SETTINGS if "quota" in key}
    assert found["quota.memory"] == (2048, "$CUBROKER_QUOTA_MEMORY")
    assert found["quota.leases"] == (1, f"{file}:5")
    assert found["quota.watches"] == (65_536, "default")
    assert effective.values["keep"] == (3, 3, "--set keep")
    assert effective.values["mode"] == (0o601, 0o601, f"{file}:2")
    assert list(effective.values) == [key for key in SETTINGS if key not in UNSET]


UNSET = ("sockets.group", "metrics.group", "metrics.token_file")
"""Settings that stand for nothing where they are not set."""

TEXTS = {
    "directory": ("/srv", Path("/srv")),
    "devices": ("host:2", "host:2"),
    "budget": ("50%", "50%"),
    "keep": ("7", 7),
    "mode": ("640", 0o640),
    "admins": ("root, 4711", frozenset((0, 4711))),
    "trust_root": ("false", False),
    "names": (
        '{"llm/" = {users = [7], groups = ["root"]}}',
        {"llm/": NameReservation(frozenset((7,)), frozenset((0,)))},
    ),
    "sockets.mode": ("0o660", 0o660),
    "sockets.group": ("4711", 4711),
    "quota.memory": ("40GiB", 40 << 30),
    "quota.layouts": ("unlimited", None),
    "share": ("vmm", "vmm"),
    "log.level": ("error", "error"),
    "log.format": ("text", "text"),
    "metrics.listen": ("off", None),
    "metrics.mode": ("0o640", 0o640),
    "metrics.token_file": ("/token", Path("/token")),
    "metrics.public": ("true", True),
    "shutdown.drain_seconds": ("1.5", 1.5),
}


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_can_be_set_by_the_environment_and_by_an_option(key: str) -> None:
    text, meant = TEXTS.get(key, ("12", 12))
    variable = SETTINGS[key].variable
    assert ConfigSources(environment={variable: text}).read().values[key][1:] == (meant, f"${variable}")
    assert ConfigSources(options={key: text}).read().values[key].meant == meant


def test_a_relative_directory_is_one_of_here() -> None:
    assert ConfigSources(environment={"CUBROKER_DIR": "run"}).read().config.directory == Path("run").absolute()
    assert ConfigSources(options={"directory": "run"}).read().config.directory == Path("run").absolute()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bugdet = 1", "1: there is no setting bugdet; did you mean budget?"),
        ("\nzzz = 1", "2: there is no setting zzz; known are directory, devices, budget, keep"),
        ("[quota]\nmemory = 1\nsession = 1", "3: there is no setting quota.session; did you mean sessions?"),
        ("[quota]\nkeep = 1", "2: there is no setting quota.keep; did you mean keep?"),
        ("memory = 1", "1: there is no setting memory; did you mean quota.memory?"),
        ("[quotas.root]\nmem = 1", "2: there is no setting quotas.root.mem; did you mean memory?"),
        ("[sockets]\nmood = 1", "2: there is no setting sockets.mood; did you mean mode?"),
        ("[metric]", "1: there is no setting metric; did you mean metrics?"),
        ("[log.level]\na = 1", '1: log.level is {"a" = 1}; write "debug", "info", "warning" or "error"'),
        ("keep = '2'", '1: keep is "2"; write a whole number from 0 to 1000'),
        ("keep = -1", "1: keep is -1; write a whole number from 0 to 1000"),
        ("keep = true", "1: keep is true; write a whole number"),
        ("keep = 1.0", "1: keep is 1.0; write a whole number"),
        ("quota = 7", "1: quota is 7; write a table, [quota]"),
        ("quotas = 7", "1: quotas is 7; write a table, [quotas]"),
        ("[quotas]\nroot = 7", "2: quotas.root is 7; write a table, [quotas.root]"),
        ("admins = 'root'", '1: admins is "root"; write a list of users'),
        ("admins = ['root', 1.5]", '1: admins is ["root", 1.5]; write a list of users'),
        ("admins = ['no such user']", '1: admins is ["no such user"]; this system has no user "no such user"'),
        (
            "names = {'a/' = {users = ['root', 'absent one']}}",
            '1: names is {"a/" = {"users" = ["root", "absent one"]}}; this system has no user "absent one"',
        ),
        ('admins = ["\\u0000"]', '1: admins is ["\\u0000"]; this system has no user "\\u0000"'),
        ("admins = [-1]", "1: admins is [-1]; write a list of users"),
        ("mode = 640", '1: mode is 0o1200; write it in octal, as in 0o640 or "640", up to 0o777'),
        ("mode = 'rw'", '1: mode is "rw"; write it in octal'),
        ("[sockets]\nmode = 0o777", "2: sockets.mode is 0o777; write it in octal"),
        ("[sockets]\ngroup = 'absent one'", '2: sockets.group is "absent one"; this system has no group "absent one"'),
        ("[quota]\nmemory = 'much'", '2: quota.memory is "much"; write bytes, as in 4096 or "40GiB", or "unlimited"'),
        ("[quota]\nmemory = -5", "2: quota.memory is -5; write bytes"),
        ("[quota]\nsessions = 'many'", '2: quota.sessions is "many"; write 0 or more, or "unlimited"'),
        ("[quotas.'absent one']\nleases = 1", '2: quotas.absent one.leases is 1; this system has no user "absent one"'),
        ("[quotas.99999999999]\nleases = 1", "2: quotas.99999999999.leases is 1; numbers of users are less than 42949"),
        ("[quotas.0]\nleases = 1\n[quotas.root]\nleases = 2", "4: quotas.root.leases: user 0 has a quota as 0 already"),
        ("directory = 'run'", '1: directory is "run"; write a path that begins with /'),
        ("directory = 1", "1: directory is 1; write a path that begins with /"),
        ("devices = 'host:0'", "1: devices is \"host:0\"; 'host:0' asks for 0 devices; it can be 1 to 64"),
        (
            "budget = 5",
            '1: budget is 5; write a share or a size, as in "90%" or "40GiB", or in a file a table of them by device',
        ),
        ("budget = '90'", '1: budget is "90"; write a share or a size, as in "90%" or "40GiB"'),
        ("budget = '101%'", '1: budget is "101%"; write a share or a size'),
        ("[budget]\n0 = 5", '1: budget is {"0" = 5}; write a share or a size'),
        ("[quotas.root]\nleases = 1.5", "2: quotas.root.leases is 1.5; write 0 or more"),
        ("[limits]\nleases = 0", "2: limits.leases is 0; write a whole number from 1 to 1048576"),
        ("[log]\nlevel = 'loud'", '2: log.level is "loud"; write "debug", "info", "warning" or "error"'),
        ("trust_root = 1", "1: trust_root is 1; write true or false"),
        ("names = 'x'", '1: names is "x"; write a table of users and groups by prefix'),
        ("[names]\n'' = {}", "1: names is {"),
        ("[names]\n'a' = 1", "1: names is {"),
        ("[names]\n'a' = {user = [1]}", "1: names is {"),
        ("[names]\n'a' = {groups = 1}", "1: names is {"),
        ("[metrics]\nlisten = '0.0.0.0:9464'", '2: metrics.listen is "0.0.0.0:9464"; write a loopback address'),
        ("[metrics]\nlisten = '127.0.0.1:66666'", '2: metrics.listen is "127.0.0.1:66666"; write a loopback address'),
        ("[metrics]\nlisten = '127.1.2.300:1'", '2: metrics.listen is "127.1.2.300:1"; write a loopback'),
        ("[metrics]\nlisten = '::1:1'", "2: metrics.listen is"),
        ("[metrics]\nlisten = 'unix:run'", "2: metrics.listen is"),
        ("[shutdown]\ndrain_seconds = nan", "2: shutdown.drain_seconds is nan; write seconds, from 0 to 86400"),
        (f"devices = '{'x' * 100}'", f'1: devices is "{"x" * 79}…; no driver'),
    ],
)
def test_what_makes_no_sense_is_told_with_file_line_key_value_and_what_would(
    tmp_path: Path, text: str, said: str
) -> None:
    (complaint,) = complaints(tmp_path, text)
    assert complaint.startswith(f"{tmp_path / 'cubroker.toml'}:{said}")


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cubroker.toml"
    path.write_text("keep = -1\nzzz = 1\n[quotas.'absent one']\nleases = 1\n[quotas.absent]\nleases = 2")
    with pytest.raises(InvalidConfig) as caught:
        ConfigSources(path, {"budget": "lots", "log.level": "x"}, {"CUBROKER_KEEP": "two"}).read()
    assert [complaint.partition(";")[0] for complaint in caught.value.complaints] == [
        f"{path}:1: keep is -1",
        f"{path}:2: there is no setting zzz",
        f"{path}:4: quotas.absent one.leases is 1",
        f"{path}:6: quotas.absent.leases is 2",
        '$CUBROKER_KEEP: keep is "two"',
        '--budget: budget is "lots"',
        '--set log.level: log.level is "x"',
    ]
    assert caught.value.message == caught.value.complaints[0] + " (and 6 more, which cubroker config check shows)"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"cannot read the configuration .*none\.toml: No such file"):
        ConfigSources(tmp_path / "none.toml").read()
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidConfig, match=r"binary\.toml is no TOML"):
        ConfigSources(tmp_path / "binary.toml").read()
    assert complaints(tmp_path, "\nkeep = ?\n")[0].endswith(
        "cubroker.toml is no TOML: Invalid value (at line 2, column 8)"
    )


def test_what_a_broker_that_runs_takes_of_a_newer_configuration(tmp_path: Path) -> None:
    older, newer = read(tmp_path, "keep = 1\ndevices = 'host:1'"), read(tmp_path, "[sockets]\ngroup = 7\n")
    adopted = older.adopt(newer)
    assert adopted.config.policy.keep == 0
    assert adopted.config.devices == "host:1"
    assert adopted.config.access == Access(0o600, None)
    assert [setting.key for setting, _, _ in older.changes(newer)] == [
        "devices",
        "keep",
        "sockets.mode",
        "sockets.group",
    ]


TEXT = '''# a comment

a = 1
b.c = "x # y"
d = [
    1,  # one
    2,
]
e = """
a = 2
[no]
"""

[f] # a header
g = { h = 1, i = { j = 2 } }

[f."k.l"]
m = 1
[n.o]
'''


def test_every_key_and_table_has_the_line_where_it_begins() -> None:
    assert tomllib.loads(TEXT)
    assert line_numbers(TEXT) == {
        ("a",): 3,
        ("b",): 4,
        ("b", "c"): 4,
        ("d",): 5,
        ("e",): 9,
        ("f",): 14,
        ("f", "g"): 15,
        ("f", "g", "h"): 15,
        ("f", "g", "i"): 15,
        ("f", "g", "i", "j"): 15,
        ("f", "k.l"): 17,
        ("f", "k.l", "m"): 18,
        ("n",): 19,
        ("n", "o"): 19,
    }
