"""What the broker's loop sees of its ledger: events before they are handled, and effects after."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import Done, Drain, Failed, Reply, Seal
from cubroker.server.ledger import Ledger
from cubroker.server.ledger.events import (
    Asked,
    Effect,
    Event,
    Forget,
    Gone,
    Joined,
    Lost,
    Measured,
    Reconfigured,
    Respond,
)
from cubroker.server.sight.notes import Notes, Question

if TYPE_CHECKING:
    from cubroker.server.sight.meters import Meters


log = logging.getLogger(__name__)

MISTAKE = "the broker failed at looking at what happens"


class Sight:
    """Watches a ledger, for the log and for metrics. All of it is called on the broker's loop.

    Args:
        ledger: the one that is watched.
        meters: what counts, if anybody is to read it.

    Attributes:
        revision: rises with everything that happens.
        beyond_leases: bytes that processes refer to beyond leases, by user of whom that is known; never changed, but
            replaced, so that any thread may read it.
    """

    def __init__(self, ledger: Ledger, meters: Meters | None = None) -> None:
        self.revision = 0
        self.beyond_leases: Mapping[int, int] = {}
        self._ledger = ledger
        self._meters = meters
        self._notes = Notes()
        self._excesses: Mapping[int, str] = {}
        self._asked: defaultdict[int, dict[int, Question]] = defaultdict(dict)

    def before(self, event: Event) -> None:
        """Note an event that the ledger is about to be told."""
        self.revision += 1
        try:
            self._before(event)
        # No request, and no end of a process, goes unheeded because it could not be looked at.
        except Exception:
            log.exception(MISTAKE)

    def after(self, event: Event, effects: Collection[Effect]) -> None:
        """Note what the ledger wants done about an event."""
        try:
            self._after(event, effects)
        except Exception:
            log.exception(MISTAKE)

    def turned_away(self, refusal: CubrokerError) -> None:
        """Note that somebody got no session."""
        if self._meters:
            self._meters.turned_away(refusal.code)

    def gateway_changed(self) -> None:
        """Note that another gateway listens."""
        if self._meters:
            self._meters.gateway_changed()

    # Nearly all that happens are requests and their answers: they come first, and nothing is matched, which costs more.
    def _before(self, event: Event) -> None:
        if isinstance(event, Asked):
            body = event.body
            leased = self._ledger.leased(event.session, body.lease) if isinstance(body, Seal) else ""
            self._asked[event.session][event.request] = Question(body, leased, time.monotonic())
        elif isinstance(event, Lost):
            if (who := self._ledger.holder(event.session)) is not None:
                self._notes.lost(who)
            self._asked.pop(event.session, None)  # what waits of it is not answered any more
        elif isinstance(event, Gone) and (who := self._ledger.holder(event.session)) is not None:
            self._notes.gone(who)

    def _after(self, event: Event, effects: Collection[Effect]) -> None:
        if isinstance(event, Asked):
            if isinstance(event.body, Drain):
                self._drained(event, event.body, effects)
        elif isinstance(event, Joined) and (who := self._ledger.holder(event.session)) is not None:
            self._notes.joined(who)
        elif isinstance(event, Measured | Reconfigured):
            self._measured()
        for effect in effects:
            if isinstance(effect, Respond):
                self._answered(effect.session, effect.request, effect.body)
            elif isinstance(effect, Forget):
                self._asked.pop(effect.session, None)

    def _measured(self) -> None:
        """Say once who has too much memory beyond leases, and once who has no longer."""
        before, self._excesses = self._excesses, self._ledger.excesses()
        for uid in self._excesses.keys() - before.keys():
            log.warning("user %d gets no leases: %s", uid, self._excesses[uid], extra={"uid": uid})
        for uid in before.keys() - self._excesses.keys():
            log.info(
                "user %d gets leases again: its processes have let go of memory beyond them, or its quota has changed",
                uid,
                extra={"uid": uid},
            )
        self.beyond_leases = self._ledger.beyond_leases()

    def _drained(self, event: Asked, body: Drain, effects: Collection[Effect]) -> None:
        who = self._ledger.holder(event.session)
        if who is not None and Respond(event.session, event.request, Done()) in effects:
            self._notes.drained(who, on=body.on)

    def _answered(self, session: int, request: int, answer: Reply) -> None:
        question = self._asked.get(session, {}).pop(request, None)
        if question is None:  # it was asked of an earlier broker
            return
        if self._meters:
            code = answer.code if isinstance(answer, Failed) else ""
            self._meters.answered(question.kind, time.monotonic() - question.since, code)
        if self._notes.want(answer) and (who := self._ledger.holder(session)) is not None:
            self._notes.answered(who, request, question, answer)
