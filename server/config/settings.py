"""Every setting there is, and what all of them together mean: a :class:`Config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cubroker.protocol.messages import AUTO
from cubroker.server.config import kinds, values
from cubroker.server.config.kinds import Address
from cubroker.server.config.values import Kind
from cubroker.server.ledger.entries import IPC, SESSION, VMM, Limits
from cubroker.server.ledger.policy import MAX_KEEP, MODE, Policy, Quota

PREFIX = "CUBROKER_"
LEVELS = ("debug", "info", "warning", "error")
FORMS = ("auto", "text", "json", "journal")

Budgets = str | Mapping[str, str]
"""What the broker may use of its devices: of each, or by index or UUID, ``default`` being that of the others."""

DEFAULT_BUDGET = "90%"
OTHERS = "default"
"""What the budget of all other devices is called."""

PRIVATE, SHARED = 0o600, 0o660
"""The mode of the sockets: for the broker's own user (and root), and with a group."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may connect: the mode of the sockets, and the group that they belong to (None: the broker's own)."""

    mode: int = PRIVATE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """What is worth a line in the log, and what the lines look like."""

    level: str
    format: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where metrics and the page are served, and to whom.

    Attributes:
        listen: an address, the path of a Unix socket, or None: nowhere.
        access: who may connect to a Unix socket.
        token_file: has the token that readers show; None: there is none.
        public: whether readers without the token see what a stranger may.
    """

    listen: Address | Path | None = None
    access: Access = Access()
    token_file: Path | None = None
    public: bool = False


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set.

    Attributes:
        directory: where to serve.
        devices: which devices, in words.
        budget: what pools may take of them.
        access: who may connect.
        policy: what users may do and have.
        limits: what one session may have.
        log: the log.
        metrics: where metrics are served, and to whom.
        drain: seconds that a broker which ends waits for leases to end.
        mapped_check: seconds from one look at the memory of processes to the next; 0: there is none.
    """

    directory: Path
    devices: str
    budget: Budgets
    access: Access
    policy: Policy
    limits: Limits
    log: Log
    metrics: Metrics
    drain: float
    mapped_check: float


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        key: its name in the file; ``quota.memory`` is ``memory`` in the table ``quota``.
        kind: how its value is written.
        default: its value as a file would have it; None if that depends on other things.
        live: whether a broker that runs takes another value.
    """

    key: str
    kind: Kind
    default: object = None
    live: bool = True

    def plain(self, written: object) -> object:
        """Return a value for other programs: as a file would have it, but a mode in octal."""
        return written if self.kind.show is values.show else self.kind.show(written)

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        name = "dir" if self.key == "directory" else self.key
        return PREFIX + name.upper().replace(".", "_")


QUOTA: Mapping[str, tuple[Kind, object]] = {
    "memory": (values.BYTES, values.UNLIMITED),
    "sessions": (values.COUNT, None),
    "leases": (values.COUNT, 1_000_000),
    "requests": (values.COUNT, 65_536),
    "watches": (values.COUNT, 65_536),
    "events": (values.COUNT, 65_536),
    "layouts": (values.BYTES, "1GiB"),
    "descriptors": (values.COUNT, None),
    "mapped_beyond_leases": (values.BYTES, values.UNLIMITED),
}
"""What one user may have, by default; the rest depends on how many descriptors the broker may have open."""

SETTINGS: Mapping[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("directory", kinds.PATH, live=False),
        Setting("devices", kinds.DEVICES, "cuda", live=False),
        Setting("budget", kinds.BUDGET, DEFAULT_BUDGET),
        Setting("keep", values.number(0, MAX_KEEP), 0),
        Setting("mode", kinds.mode(0o777), MODE),
        Setting("share", values.choice(AUTO, IPC, VMM), AUTO),
        Setting("admins", kinds.USERS, []),
        Setting("trust_root", values.BOOLEAN, True),
        Setting("names", kinds.NAMES, {}),
        Setting("sockets.mode", kinds.mode(0o666), live=False),
        Setting("sockets.group", kinds.GROUP, live=False),
        *(Setting(f"quota.{name}", kind, default) for name, (kind, default) in QUOTA.items()),
        Setting("limits.leases", values.number(1, 1 << 20), 4096),
        Setting("limits.requests", values.number(1, 4096), 1024),
        Setting("limits.watches", values.number(1, 1 << 20), 1024),
        Setting("limits.events", values.number(1, 1 << 20), 1024),
        Setting("limits.mapped_check_seconds", values.SECONDS, 10),
        Setting("log.level", values.choice(*LEVELS), "info"),
        Setting("log.format", values.choice(*FORMS), "auto"),
        Setting("metrics.listen", kinds.LISTEN, kinds.OFF, live=False),
        Setting("metrics.mode", kinds.mode(0o666), live=False),
        Setting("metrics.group", kinds.GROUP, live=False),
        Setting("metrics.token_file", kinds.PATH, live=False),
        Setting("metrics.public", values.BOOLEAN, False, live=False),
        Setting("shutdown.drain_seconds", values.SECONDS, 10),
    )
}

PERSONAL = "quotas"
"""The table of the tables of single users, by name or number."""

TABLES = {key.partition(".")[0] for key in SETTINGS if "." in key} | {PERSONAL}


class Unfit(Exception):
    """The setting with a key, the first argument, does not go with the others; the second says why."""


EXPOSED = (
    "every user of this host can read a port; name a file with a token in metrics.token_file, or set metrics.public to"
    ' true to show them what strangers may know, or write "unix:/PATH"'
)


def find(key: str) -> Setting | None:
    """Return the setting with a key, None if there is none."""
    if key in SETTINGS:
        return SETTINGS[key]
    table, _, rest = key.partition(".")
    name, _, field = rest.rpartition(".")
    return Setting(key, QUOTA[field][0]) if table == PERSONAL and name and field in QUOTA else None


def get(key: str) -> Setting:
    """Return the setting with a key that there is."""
    setting = find(key)
    assert setting is not None, key
    return setting


def nearest(key: str) -> str:
    """Say which setting may be meant by a key that there is not."""
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
    """Return the defaults that depend on other things, as a file would have them.

    Args:
        meant: what is set.
        descriptors: files that the broker may have open, or its store keeps, if those are fewer; by default a user may
            take half of them.
    """
    most = max(SESSION, descriptors // 2)
    return {
        "sockets.mode": PRIVATE if meant.get("sockets.group") is None else SHARED,
        "metrics.mode": PRIVATE if meant.get("metrics.group") is None else SHARED,
        "quota.sessions": most // SESSION,
        "quota.descriptors": most,
    }


def config(meant: Mapping[str, Any]) -> Config:
    """Return what settings mean together, of which all but groups and ``metrics.token_file`` are there.

    Raises:
        Unfit: a quota of nobody, or a second one of somebody; metrics on a port, and no word of who may read them.
    """
    usual = Quota(**{name: meant[f"quota.{name}"] for name in QUOTA})
    return Config(
        directory=meant["directory"],
        devices=meant["devices"],
        budget=meant["budget"],
        access=Access(meant["sockets.mode"], meant.get("sockets.group")),
        policy=Policy(
            keep=meant["keep"],
            mode=meant["mode"],
            admins=meant["admins"],
            quota=usual,
            quotas=_personal(meant, usual),
            share=meant["share"],
            trust_root=meant["trust_root"],
            reserved=meant["names"],
        ),
        limits=Limits(*(meant[f"limits.{name}"] for name in ("leases", "requests", "watches", "events"))),
        log=Log(meant["log.level"], meant["log.format"]),
        metrics=_metrics(meant),
        drain=meant["shutdown.drain_seconds"],
        mapped_check=meant["limits.mapped_check_seconds"],
    )


def _metrics(meant: Mapping[str, Any]) -> Metrics:
    access = Access(meant["metrics.mode"], meant.get("metrics.group"))
    metrics = Metrics(meant["metrics.listen"], access, meant.get("metrics.token_file"), meant["metrics.public"])
    if isinstance(metrics.listen, Address) and metrics.token_file is None and not metrics.public:
        raise Unfit("metrics.listen", EXPOSED)
    return metrics


def _personal(meant: Mapping[str, Any], usual: Quota) -> dict[int, Quota]:
    """Return the quotas of single users, by uid; what they leave out is as usual."""
    given: dict[int, tuple[str, dict[str, Any]]] = {}
    for key, value in meant.items():
        table, _, rest = key.partition(".")
        if table == PERSONAL:
            name, _, field = rest.rpartition(".")
            uid = _uid(key, name)
            owner, quota = given.setdefault(uid, (name, {}))
            if owner != name:
                raise Unfit(key, f"user {uid} has a quota as {owner} already; leave one out")
            quota[field] = value
    return {uid: replace(usual, **quota) for uid, (_, quota) in given.items()}


def _uid(key: str, name: str) -> int:
    try:
        return kinds.user(int(name) if name.isdecimal() else name)
    except ValueError as error:
        raise Unfit(key, str(error) or "there are no such numbers of users") from None
