"""What the model says of a broker that lends nothing new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from tests.fuzz.simulation.records import Lease, Refusal, Session

if TYPE_CHECKING:
    from tests.fuzz.simulation.model import Model

BY_HAND, ENDING = "its operator wants everything to be given back", "it was told to end"


def check(model: Model, *, durable: bool) -> None:
    if refuses(model, durable=durable):
        raise Refusal("unavailable")


def refuses(model: Model, *, durable: bool) -> bool:
    if model.drained:
        return True
    return model.awaited is not None and (model.nothing_lasts or not durable)


def reason(model: Model) -> str:
    if model.awaited is not None and (model.drained or model.nothing_lasts):
        return ENDING
    return BY_HAND if model.drained else ""


def drain(model: Model, session: Session, body: m.Drain) -> m.Done:
    if not model.administers(session.uid, verified=session.verified):
        raise Refusal("denied")
    if model.awaited is not None and not body.on:
        raise Refusal("unavailable")
    before, model.drained = reason(model), body.on
    refuse_waiters(model)
    if reason(model) != before:
        for each in model.sessions:
            tell(model, each, reason(model))
    return m.Done()


def end(model: Model, event: e.ShutdownStarted) -> None:
    model.nothing_lasts = model.store is None or event.with_store
    model.awaited = [
        lease
        for lease in model.leases
        if lease.version.state != "lost" and (model.nothing_lasts or not lease.version.body.durable)
    ]
    refuse_waiters(model)
    for session in model.sessions:
        if model.nothing_lasts or any(lease.session is session for lease in model.awaited):
            tell(model, session, ENDING)
    model.out.drained = not model.awaited


def given_back(model: Model, lease: Lease) -> None:
    if model.awaited and lease in model.awaited:
        model.awaited.remove(lease)
        model.out.drained = not model.awaited


def refuse_waiters(model: Model) -> None:
    for request in list(model.requests):
        if isinstance(request.body, m.Attach | m.Lock) and refuses(model, durable=True):
            model.refuse(request, "unavailable")
        if isinstance(request.body, m.Create) and refuses(model, durable=bool(request.body.durable)):
            model.refuse(request, "unavailable")


def tell(model: Model, session: Session, why: str) -> None:
    if session.connected:
        model.out.notices.append((session.id, m.Draining(why)))
