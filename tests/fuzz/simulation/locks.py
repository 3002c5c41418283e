"""What the model says of locks of names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cubroker.protocol import messages as m
from tests.fuzz.simulation import draining
from tests.fuzz.simulation.records import Lock, Refusal, Request, Session

if TYPE_CHECKING:
    from tests.fuzz.simulation.model import Model


def lock(model: Model, session: Session, number: int, body: m.Lock) -> None:
    model.name(body.name)
    draining.check(model, durable=True)
    check(model, session, body.name)
    if not any(held.name == body.name for held in model.locks):
        return give(model, session, number, body.name)
    if not body.wait:
        raise Refusal("timeout")
    return model.admit(Request(session, number, body, "lock"))


def unlock(model: Model, session: Session, number: int) -> m.Done:
    for held in model.locks:
        if held.session is session and held.id == number:
            release(model, held)
            return m.Done()
    raise Refusal("not_found")


def release(model: Model, held: Lock) -> None:
    model.locks.remove(held)
    for request in list(model.requests):
        if request.waits == "lock" and isinstance(request.body, m.Lock) and request.body.name == held.name:
            try:
                check(model, request.session, held.name)
            except Refusal as refusal:
                model.refuse(request, refusal.code)
            else:
                model.leave(request)
                return give(model, request.session, request.id, held.name)
    return None


def check(model: Model, session: Session, name: str) -> None:
    if not model.may_publish(session, name):
        raise Refusal("denied")
    model.permit("w", session, name)
    users = [held for held in model.locks if held.session.uid == session.uid]
    if sum(held.session is session for held in users) >= model.limits.locks:
        raise Refusal("over_quota")
    if model.full(len(users), model.quota(session.uid).locks):
        raise Refusal("over_quota")


def give(model: Model, session: Session, number: int, name: str) -> None:
    held = model.out.locks[session.id, number] = Lock(session, name)
    model.locks.append(held)
    model.out.answers[session.id, number] = m.Locked(0)
