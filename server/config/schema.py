"""Every setting of a broker: how its value is written, its default, and what all settings mean together.

:data:`SETTINGS` is the one declaration. Parsing of the file, the environment and options, the refusals and
``cubroker config`` follow from it; ``docs/configuration.md`` and ``deploy/cubroker.toml`` are held against it by tests.
A setting has a :class:`ValueKind`, which knows a value in three shapes: as *text* (environment, command line), as
*written* (a value of TOML), and what that *means* to the broker. :func:`build` combines the meanings to a
:class:`Config`.
"""

from __future__ import annotations

import grp
import json
import pwd
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, ValidationError, convert

from cubroker.driver.driver import parse_spec
from cubroker.protocol.errors import Invalid
from cubroker.protocol.messages import AUTO, IPC, VMM
from cubroker.server.config import DEFAULT_BUDGET, DEFAULT_DEVICES
from cubroker.server.ledger.memory import GRANULARITY
from cubroker.server.ledger.policy import MAX_KEEP, MODE, Limits, NameReservation, Policy, Quota
from cubroker.server.ledger.records import SESSION_FDS
from cubroker.server.transport.unix_sockets import Access

PREFIX = "CUBROKER_"
UNLIMITED = "unlimited"
OFF = "off"

OTHERS = "default"  #: The key of the budget of all devices that have none of their own.
PRIVATE, SHARED = 0o600, 0o660  #: The mode of the sockets: for the broker's own user (and root), and with a group.
LARGEST_DEVICE = 1 << 62  #: Bytes of the device that budgets are validated against; the real devices are not known yet.
LONGEST = 80  #: Characters of a value that a complaint shows at most.

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}IB": 1024**_power, _prefix: 1024**_power}

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", re.ASCII)
_SHARE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*%", re.ASCII)

Budgets = str | Mapping[str, str]  #: The budget of every device, or budgets by index or UUID, and ``default``.


class Address(NamedTuple):
    """A network address to listen on; port 0: one that the system chooses."""

    host: str
    port: int


def show(written: object) -> str:
    """Return a value as a TOML file has it."""
    if isinstance(written, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {show(value)}" for key, value in written.items()) + "}"
    if isinstance(written, list):
        return "[" + ", ".join(map(show, written)) + "]"
    if isinstance(written, str | bool):
        return json.dumps(written, ensure_ascii=False)
    return str(written)


@dataclass(frozen=True, slots=True)
class ValueKind:
    """One way to write a value."""

    #: What may be written, said in a refusal.
    advice: str
    #: The type of a written value, for ``msgspec.convert``.
    type: Any = str
    #: Returns what a value of that type means; raises ``ValueError``, with better advice if it has any.
    interpret: Callable[[Any], Any] = lambda value: value
    #: Returns the written value of a text from the environment or the command line; the text itself if it is invalid.
    parse: Callable[[str], object] = str
    #: Whether a written number is shown in octal.
    octal: bool = False

    def show(self, written: object) -> str:
        """Return a written value as people read it."""
        return f"0o{written:03o}" if self.octal and type(written) is int else show(written)

    def plain(self, written: object) -> object:
        """Return a written value for JSON, which has no octal numbers."""
        return self.show(written) if self.octal else written


Natural = Annotated[int, Meta(ge=0)]
Identity = Annotated[int, Meta(ge=0, lt=1 << 32)] | str
"""A user or a group, by number or name."""


def parse_number(text: str) -> int | str:
    """Return a whole number, or the text itself if it is not a number."""
    return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else text


def number(least: int, most: int) -> ValueKind:
    """Return the kind of whole numbers in a range."""
    bounds = Annotated[int, Meta(ge=least, le=most)]
    return ValueKind(f"write a whole number from {least} to {most}", bounds, parse=parse_number)


def choice(*names: str) -> ValueKind:
    """Return the kind that is one of these words."""
    return ValueKind(f"write {', '.join(map(show, names[:-1]))} or {show(names[-1])}", Literal.__getitem__(names))


def mode(most: int) -> ValueKind:
    """Return the kind of permission bits; a bit outside ``most`` is refused."""

    def bits(value: int | str) -> int:
        number = int(value, 8) if isinstance(value, str) else value
        if number & ~most:
            raise ValueError
        return number

    written = Natural | Annotated[str, Meta(pattern=r"^(0o?)?[0-7]{3}\Z")]
    return ValueKind(f'write it in octal, as in 0o640 or "640", up to 0o{most:03o}', written, bits, octal=True)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size: ``4096``, ``10GiB`` (or ``10G``), ``1.5GB``.

    Raises:
        Invalid: it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise Invalid(f"{text!r} is no size: write a number and B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_budget(text: str, total: int, device: str = "the device") -> int:
    """Return how many bytes of a device of ``total`` bytes a budget grants: a size, or a share such as ``90%``.

    ``device`` names the device in an error.

    Raises:
        Invalid: ``text`` is neither a size nor a share, or is less than an allocation takes or more than ``total``.
    """
    match = _SHARE.fullmatch(text.strip())
    budget = int(total * float(match[1]) / 100) if match else parse_bytes(text)
    if not GRANULARITY <= budget <= total:  # a smaller one lends nothing, as 90 in place of 90%
        most = f"{device} has {total}; write {GRANULARITY} to {total} bytes"
        raise Invalid(f"a budget of {text} is {budget} bytes, and {most}")
    return budget


def _bytes(value: int | str) -> int | None:
    if value == UNLIMITED:
        return None
    return parse_bytes(value) if isinstance(value, str) else value


def _look_up(what: str, found: Callable[[str], int], identity: int | str) -> int:
    try:
        return identity if isinstance(identity, int) else found(identity)
    except (KeyError, ValueError):  # a name with a zero byte is a ValueError
        raise ValueError(f"this system has no {what} {show(identity)}; write a name that it has, or a number") from None


def user(identity: int | str) -> int:
    """Return the uid of a user; raises ``ValueError`` if the system has no user of that name."""
    return _look_up("user", lambda name: pwd.getpwnam(name).pw_uid, identity)


def group(identity: int | str) -> int:
    """Return the gid of a group; raises as :func:`user`."""
    return _look_up("group", lambda name: grp.getgrnam(name).gr_gid, identity)


def _users(value: list[int | str]) -> frozenset[int]:
    return frozenset(map(user, value))


class _ReservationTable(Struct, forbid_unknown_fields=True):
    users: list[Identity] = []
    groups: list[Identity] = []


def _reservations(value: Mapping[str, _ReservationTable]) -> dict[str, NameReservation]:
    return {
        prefix: NameReservation(_users(table.users), frozenset(map(group, table.groups)))
        for prefix, table in value.items()
    }


def _parse_table(text: str) -> object:
    try:
        return tomllib.loads(f"it = {text}").get("it")
    except tomllib.TOMLDecodeError:
        return text


def _devices(value: str) -> str:
    parse_spec(value)
    return value


def _budget(value: str | dict[str, str]) -> Budgets:
    for each in [value] if isinstance(value, str) else value.values():
        parse_budget(each, LARGEST_DEVICE)
    return value


def _listen(value: str) -> Address | Path | None:
    if value == OFF:
        return None
    if value.startswith("unix:/"):
        return Path(value.removeprefix("unix:"))
    found = re.fullmatch(r"(\[?)([0-9A-Fa-f.:]+)(\]?):(\d{1,5})", value, re.ASCII)
    if found is None or not bool(found[1]) == bool(found[3]) == (":" in found[2]) or int(found[4]) > 65_535:
        raise ValueError
    try:
        if not ip_address(found[2]).is_loopback:
            raise ValueError
    except ValueError:
        raise ValueError from None  # the text of ip_address() would replace the advice
    return Address(found[2], int(found[4]))


COUNT = ValueKind('write 0 or more, or "unlimited"', Natural | Literal["unlimited"], _bytes, parse_number)
BYTES = ValueKind('write bytes, as in 4096 or "40GiB", or "unlimited"', Natural | str, _bytes, parse_number)
SECONDS = ValueKind(
    "write seconds, from 0 to 86400",
    Annotated[float, Meta(ge=0, le=86_400)],
    parse=lambda text: float(text) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII) else text,
)
BOOLEAN = ValueKind("write true or false", bool, parse=lambda text: {"true": True, "false": False}.get(text, text))
GROUP = ValueKind("write the name or the number of a group", Identity, group, parse_number)
USERS = ValueKind(
    'write a list of users, by name or number, as in ["root", 1000]',
    list[Identity],
    _users,
    lambda text: [parse_number(part.strip()) for part in text.split(",")],
)
NAMES = ValueKind(
    'write a table of users and groups by prefix, as in {"llm/" = {users = ["svc"], groups = ["ml"]}}',
    dict[Annotated[str, Meta(min_length=1)], _ReservationTable],
    _reservations,
    _parse_table,
)
PATH = ValueKind(
    "write a path that begins with /",
    Annotated[str, Meta(pattern="^/")],
    Path,
    lambda text: str(Path(text).absolute()),
)
DEVICES = ValueKind('write "cuda", "cuda:0,1", "cuda:GPU-8d2f41c6" or "host:2"', str, _devices)
BUDGET = ValueKind(
    'write a share or a size, as in "90%" or "40GiB", or in a file a table of them by device',
    str | dict[str, str],
    _budget,
)
LISTEN = ValueKind(
    'write a loopback address and a port, as in "127.0.0.1:9464", or "unix:/PATH", or "off"', str, _listen
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting."""

    #: Its name in the file; ``quota.memory`` is ``memory`` in the table ``quota``.
    key: str
    kind: ValueKind
    #: Its default as a file would write it; None if it depends on other things (:func:`derive`) or there is no default.
    default: object = None
    #: Whether its value can change while the broker runs.
    live: bool = True
    #: The user whose quota it is, if it is one user's; its value means a pair then: the uid, and the quota.
    holder: str | None = None

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        name = "dir" if self.key == "directory" else self.key
        return PREFIX + name.upper().replace(".", "_")

    def read(self, written: object) -> Any:
        """Return what a written value means; raises ``ValueError``, which names key, value and advice."""
        kind, advice = self.kind, self.kind.advice
        try:
            meant = kind.interpret(convert(written, kind.type))
            return meant if self.holder is None else (_uid(self.holder), meant)
        except (ValidationError, Invalid):
            pass
        except ValueError as error:
            advice = str(error) or advice
        raise ValueError(refusal(self.key, kind.show(written), advice))


def refusal(key: str, shown: str, advice: str) -> str:
    """Return the text that refuses a value."""
    return f"{key} is {shown if len(shown) <= LONGEST else f'{shown[:LONGEST]}…'}; {advice}"


QUOTA: Mapping[str, tuple[ValueKind, object]] = {
    "memory": (BYTES, UNLIMITED),
    "sessions": (COUNT, None),
    "leases": (COUNT, 1_000_000),
    "requests": (COUNT, 65_536),
    "watches": (COUNT, 65_536),
    "events": (COUNT, 65_536),
    "locks": (COUNT, 65_536),
    "layouts": (BYTES, "1GiB"),
    "descriptors": (COUNT, None),
    "mapped_beyond_leases": (BYTES, UNLIMITED),
}
"""Kind and default of each field of :class:`Quota`, which bounds what one user may have."""

LIMITS = {"leases": 1 << 20, "requests": 4096, "watches": 1 << 20, "events": 1 << 20, "locks": 1 << 20}
"""The highest value of each field of :class:`Limits`, which bounds what one session may have, and has the defaults."""

SETTINGS: Mapping[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("directory", PATH, live=False),
        Setting("devices", DEVICES, DEFAULT_DEVICES, live=False),
        Setting("budget", BUDGET, DEFAULT_BUDGET),
        Setting("keep", number(0, MAX_KEEP), 0),
        Setting("mode", mode(0o777), MODE),
        Setting("share", choice(AUTO, IPC, VMM), AUTO),
        Setting("admins", USERS, []),
        Setting("trust_root", BOOLEAN, True),
        Setting("names", NAMES, {}),
        Setting("sockets.mode", mode(0o666), live=False),
        Setting("sockets.group", GROUP, live=False),
        *(Setting(f"quota.{name}", kind, default) for name, (kind, default) in QUOTA.items()),
        *(Setting(f"limits.{name}", number(1, most), getattr(Limits(), name)) for name, most in LIMITS.items()),
        Setting("limits.mapped_check_seconds", SECONDS, 10),
        Setting("log.level", choice("debug", "info", "warning", "error"), "info"),
        Setting("log.format", choice("auto", "text", "json", "journal"), "auto"),
        Setting("metrics.listen", LISTEN, OFF, live=False),
        Setting("metrics.mode", mode(0o666), live=False),
        Setting("metrics.group", GROUP, live=False),
        Setting("metrics.token_file", PATH, live=False),
        Setting("metrics.public", BOOLEAN, False, live=False),
        Setting("shutdown.drain_seconds", SECONDS, 10),
    )
}

PERSONAL = "quotas"  #: The table that has one table of quotas for each user named in it, by name or number.

TABLES = {key.partition(".")[0] for key in SETTINGS if "." in key} | {PERSONAL}


def find(key: str) -> Setting | None:
    """Return the setting with a key, None if there is none."""
    if key in SETTINGS:
        return SETTINGS[key]
    table, _, rest = key.partition(".")
    name, _, field = rest.rpartition(".")
    return Setting(key, QUOTA[field][0], holder=name) if table == PERSONAL and name and field in QUOTA else None


def get(key: str) -> Setting:
    """Return the setting with a known key."""
    setting = find(key)
    assert setting is not None, key
    return setting


def nearest(key: str) -> str:
    """Return advice for an unknown key: the setting that may be meant."""
    place, _, name = key.rpartition(".")
    if place.startswith(f"{PERSONAL}."):
        known = list(QUOTA)
    else:
        here = (setting.rpartition(".") for setting in SETTINGS)
        known = [leaf for table, _, leaf in here if table == place] + ([] if place else sorted(TABLES))
    elsewhere = [setting for setting in SETTINGS if setting.rpartition(".")[2] == name]
    near = elsewhere[:1] or get_close_matches(name, known, 1) or get_close_matches(key, SETTINGS, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known or SETTINGS)}"


def derive(meant: Mapping[str, Any], descriptors: int) -> dict[str, object]:
    """Return the defaults that depend on other things, as a file would write them.

    ``meant`` has the meanings of the values that are set, by key. ``descriptors`` is the number of files that the
    broker may have open, or of places in its store if those are fewer; by default a user may take half of them.
    """
    most = max(SESSION_FDS, descriptors // 2)
    return {
        "sockets.mode": PRIVATE if meant.get("sockets.group") is None else SHARED,
        "metrics.mode": PRIVATE if meant.get("metrics.group") is None else SHARED,
        "quota.sessions": most // SESSION_FDS,
        "quota.descriptors": most,
    }


@dataclass(frozen=True, slots=True)
class Log:
    """The lowest level that is logged, and the format of the lines."""

    level: str
    format: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where metrics and the page are served, and to whom."""

    #: An address or the path of a Unix socket; None if they are not served.
    listen: Address | Path | None = None
    #: Who may connect to a Unix socket.
    access: Access = field(default_factory=Access)
    #: The file with the token that readers must send; None if there is no token.
    token_file: Path | None = None
    #: Whether readers without the token see what a stranger may.
    public: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a broker, as it uses them."""

    #: Where to serve.
    directory: Path
    #: Which devices, as :func:`cubroker.driver.load` names them.
    devices: str
    #: How much memory of each device pools may use.
    budget: Budgets
    #: Who may connect.
    access: Access
    #: What users may do and have.
    policy: Policy
    #: What one session may have.
    limits: Limits
    log: Log
    metrics: Metrics
    #: Seconds that the broker waits, at its shutdown, for leases to end.
    drain: float
    #: Seconds between two checks of the memory of client processes; 0 disables the checks.
    mapped_check: float


class Conflict(Exception):
    """A setting conflicts with others. The first argument is its key, the second the reason."""


EXPOSED = (
    "every user of this host can read a port; name a file with a token in metrics.token_file, or set metrics.public to"
    ' true to show them what strangers may know, or write "unix:/PATH"'
)


def build(meant: Mapping[str, Any]) -> Config:
    """Combine the meanings of all settings, by key; groups and ``metrics.token_file`` may be absent.

    Raises :class:`Conflict` if a user has two quotas, or if metrics are served on a port that nothing protects.
    """
    quota = Quota(**{name: meant[f"quota.{name}"] for name in QUOTA})
    metrics = Metrics(
        meant["metrics.listen"],
        Access(meant["metrics.mode"], meant.get("metrics.group")),
        meant.get("metrics.token_file"),
        meant["metrics.public"],
    )
    if isinstance(metrics.listen, Address) and metrics.token_file is None and not metrics.public:
        raise Conflict("metrics.listen", EXPOSED)
    return Config(
        directory=meant["directory"],
        devices=meant["devices"],
        budget=meant["budget"],
        access=Access(meant["sockets.mode"], meant.get("sockets.group")),
        policy=Policy(
            keep=meant["keep"],
            mode=meant["mode"],
            admins=meant["admins"],
            quota=quota,
            quotas=_personal_quotas(meant, quota),
            share=meant["share"],
            trust_root=meant["trust_root"],
            reserved=meant["names"],
        ),
        limits=Limits(**{name: meant[f"limits.{name}"] for name in LIMITS}),
        log=Log(meant["log.level"], meant["log.format"]),
        metrics=metrics,
        drain=meant["shutdown.drain_seconds"],
        mapped_check=meant["limits.mapped_check_seconds"],
    )


def _personal_quotas(meant: Mapping[str, Any], usual: Quota) -> dict[int, Quota]:
    """Return the quotas of single users, by uid; fields that are not set have the value in ``usual``."""
    given: dict[int, tuple[str, dict[str, Any]]] = {}
    for key, value in meant.items():
        table, _, rest = key.partition(".")
        if table == PERSONAL:
            name, _, field = rest.rpartition(".")
            uid, bound = value
            owner, quota = given.setdefault(uid, (name, {}))
            if owner != name:
                raise Conflict(key, f"user {uid} has a quota as {owner} already; leave one out")
            quota[field] = bound
    return {uid: replace(usual, **quota) for uid, (_, quota) in given.items()}


def _uid(name: str) -> int:
    if name.isdecimal() and int(name) >= 1 << 32:
        raise ValueError("numbers of users are less than 4294967296")
    return user(int(name) if name.isdecimal() else name)
