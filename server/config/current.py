"""The configuration that is in force, and how another takes its place while the broker runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cubroker.protocol.errors import CubrokerError
from cubroker.server.config.settings import Config, Setting
from cubroker.server.config.sources import Effective, Sources, Value

log = logging.getLogger(__name__)


class Current:
    """What holds now; :meth:`reload` reads it again.

    Raises:
        Wrong: it makes no sense.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.effective = sources.read()

    @property
    def config(self) -> Config:
        """What all settings mean together."""
        return self.effective.config

    async def reload(self, apply: Callable[[Config], None]) -> None:
        """Read the configuration again, and have ``apply`` put in force what can change while the broker runs.

        If it makes no sense, or ``apply`` refuses it, nothing changes, and the log says why.
        """
        try:
            newer, adopted = await asyncio.to_thread(self._read)
            apply(adopted.config)
        except CubrokerError as error:
            log.error("the configuration cannot be read again, so nothing has changed: %s", error.message)
            return
        changes = list(self.effective.changes(newer))
        for setting, before, after in changes:
            _tell(setting, before, after)
        count = {0: "no change", 1: "1 setting differs"}.get(len(changes), f"{len(changes)} settings differ")
        log.info("the configuration was read again: %s", count)
        self.effective = adopted

    def _read(self) -> tuple[Effective, Effective]:
        """Return what the sources say, and what holds from now on; blocks while users are looked up for either."""
        newer = self.sources.read()
        return newer, self.effective.adopt(newer)


def _tell(setting: Setting, before: Value | None, after: Value | None) -> None:
    was, now = _shown(setting, before), _shown(setting, after)
    if setting.live:
        log.info("%s is now %s; it was %s", setting.key, now, was)
    else:
        log.warning("%s would be %s, which needs a restart; until then it stays %s", setting.key, now, was)


def _shown(setting: Setting, value: Value | None) -> str:
    return "not set" if value is None else f"{setting.kind.show(value.written)} ({value.origin})"
