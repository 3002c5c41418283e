from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from cubroker.protocol.errors import Invalid
from cubroker.server import config
from cubroker.server.config import Access, Config
from cubroker.server.policy import Policy, Quota

EXAMPLE = Path(__file__).parents[2] / "deploy" / "cubroker.toml"
USER, GROUP = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
USUAL = Quota(
    sessions=250, leases=1_000_000, requests=65_536, watches=65_536, events=65_536, layouts=1 << 30, descriptors=500
)


def read(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "cubroker.toml"
    path.write_text(text)
    return config.read(path, 1000)


def test_an_empty_file_says_what_no_file_says(tmp_path: Path) -> None:
    assert read(tmp_path, "") == config.default(1000) == Config(policy=Policy(quota=USUAL))
    least = config.default(1).policy.quota
    assert (least.sessions, least.descriptors) == (1, 2)


def test_everything_can_be_set(tmp_path: Path) -> None:
    text = f"""
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
        [quotas.4711]
        memory = "unlimited"
        watches = 7
        events = 8
        layouts = 4096
        [quotas.{USER}]
        sessions = "unlimited"
    """
    quota = Quota(2 << 30, 10, None, 0, 65_536, 65_536, 1 << 30, 300)
    assert read(tmp_path, text) == Config(
        directory=Path("/srv/cubroker"),
        devices="host:2",
        budget={"default": "50%", "0": "1GiB"},
        access=Access(0o660, os.getgid()),
        policy=Policy(
            keep=3,
            mode=0o660,
            admins=frozenset((os.getuid(), 4711)),
            quota=quota,
            quotas={
                4711: Quota(None, 10, None, 0, 7, 8, 4096, 300),
                os.getuid(): Quota(2 << 30, None, None, 0, 65_536, 65_536, 1 << 30, 300),
            },
        ),
    )


def test_modes_are_octal_however_they_are_written(tmp_path: Path) -> None:
    for text in ("mode = 0o640", 'mode = "640"', 'mode = "0640"'):
        assert read(tmp_path, text).policy.mode == 0o640
    assert read(tmp_path, "[sockets]\nmode = 0o666").access == Access(0o666, None)
    assert read(tmp_path, "[sockets]\ngroup = 7\nmode = 0o620").access == Access(0o620, 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bugdet = 1", ("there is no setting bugdet; did you mean budget?",)),
        ("zzz = 1", ("there is no setting zzz; known are directory, devices, budget",)),
        ("[quota]\nsession = 1", ("there is no setting quota.session; did you mean sessions?",)),
        ("[quotas.root]\nmem = 1", ("there is no setting quotas.root.mem; did you mean memory?",)),
        ("[sockets]\nmood = 1", ("there is no setting sockets.mood; did you mean mode?",)),
        ("keep = '2'", ("keep is '2'; expected `int`, got `str`",)),
        ("keep = -1", ("keep is -1; it can be 0 to 1000",)),
        ("keep = true", ("keep is True; expected `int`",)),
        ("quota = 7", ("quota is 7; expected `object`",)),
        ("quotas = 7", ("quotas is 7; expected `object`",)),
        ("[quotas]\nroot = 7", ("quotas.root is 7; expected `object`",)),
        ("admins = ['root', 1.5]", ("admins[1] is 1.5; expected `int | str`",)),
        ("admins = ['no such user']", ("admins is 'no such user'; this system has no such user",)),
        ("admins = [-1]", ("admins is -1; write the name or the number of a user",)),
        ("mode = 640", ('mode is 640; write it in octal, as in 0o640 or "640", up to 0o777',)),
        ("mode = 'rw'", ("mode is 'rw'; write it in octal",)),
        ("[sockets]\nmode = 0o777", ("sockets.mode is 511; write it in octal", "up to 0o666")),
        ("[sockets]\ngroup = 'no such group'", ("sockets.group is 'no such group'; this system has no such group",)),
        ("[quota]\nmemory = 'much'", ("quota.memory is 'much'; write bytes, as in 4096",)),
        ("[quota]\nmemory = -5", ("quota.memory is -5; write 0 or more",)),
        ("[quota]\nsessions = 'many'", ("quota.sessions is 'many'; write 0 or more, or \"unlimited\"",)),
        ("[quota]\nleases = -1", ('quota.leases is -1; write 0 or more, or "unlimited"',)),
        ("[quotas.'no such user']", ("quotas.no such user is 'no such user'; this system has no such user",)),
        ("[quotas.0]\n[quotas.root]", ("quotas.root is user 0, who has a quota here already",)),
        ("directory = 'run'", ("directory is 'run'; write a path that begins with /",)),
        ("keep = ", ("is no TOML", "Invalid value")),
        ("[budget]\n0 = 5", ("budget.0 is 5; expected `str`",)),
        ("[quotas.root]\nleases = 1.5", ("quotas.root.leases is 1.5; expected `int | str",)),
    ],
)
def test_what_makes_no_sense_is_told_with_file_key_value_and_what_would(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(Invalid) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "cubroker.toml") in caught.value.message
    for word in words:
        assert word in caught.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"cannot read the configuration .*none\.toml: No such file"):
        config.read(tmp_path / "none.toml", 1000)
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(Invalid, match=r"binary\.toml is no TOML"):
        config.read(tmp_path / "binary.toml", 1000)


def test_the_example_that_is_shipped_can_be_read_and_shows_every_key() -> None:
    example = config.read(EXAMPLE, 1000)
    assert example.directory == Path("/run/cubroker")
    assert example.budget == {"default": "90%", "0": "60%"}
    assert example.policy.quota == Quota(200 << 30, 256, 100_000, 4096, 4096, 4096, 256 << 20, 1024)
    assert example.policy.quotas[0] == Quota(None, 256, 100_000, 4096, 4096, 4096, 256 << 20, 1024)
    words = EXAMPLE.read_text()
    for table in config.TABLES.values():
        for key in table.__struct_fields__:
            assert f"{key} = " in words or f"[{key}" in words, f"{key} is not in the example"


def test_every_key_is_documented() -> None:
    text = (EXAMPLE.parents[1] / "docs" / "configuration.md").read_text()
    for place, table in config.TABLES.items():
        for key in table.__struct_fields__:
            whole = f"sockets.{key}" if place == "sockets" else key
            assert f"`{whole}`" in text or f"`{whole}.…`" in text or f"`{whole}.NAME.…`" in text, whole
