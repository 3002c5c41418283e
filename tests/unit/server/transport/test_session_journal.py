"""What the shell writes down of sessions, and reads again."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import cast

import msgspec
import pytest

from cubroker.protocol import wire
from cubroker.protocol.errors import CorruptJournal
from cubroker.protocol.messages import Answer, Attached, Created, Done, Failed, Pools, ReplicaHandles, Sealed
from cubroker.server.transport import session_journal
from cubroker.server.transport.reply_cache import Admission, Frame, Receipts, ReplyCache
from cubroker.server.transport.session import SessionConnection
from cubroker.server.transport.session_journal import LASTING, Changes, LoggedSession, SessionLog, recall
from tests.faults import fail_nth

ATTACHED = Attached(7, "pool", 3, "vmm", b"layout", (ReplicaHandles("device", (b"descriptor",)),))


class Client:
    """Stands for a session, whose number, secret and answers are all that matters here."""

    def __init__(self, number: int, version: int = 1) -> None:
        self.number = number
        self.version = version
        self.secret = os.urandom(16)
        self.replies = ReplyCache()

    def ask(self, number: int, answer: Answer | None = None, oldest: int = 1, received: tuple[int, ...] = ()) -> None:
        assert self.replies.admit(number, oldest, b"id", 10, received) is Admission.NEW
        if answer:
            body = answer.body
            frame: Frame = answer if isinstance(body, Attached | Created) else wire.pack(answer)
            self.replies.settle(number, frame, lasting=type(body) in LASTING)

    @property
    def session(self) -> SessionConnection:
        return cast(SessionConnection, self)


class Book:
    """A journal in a dict."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def write(self, changes: Changes) -> None:
        for key, value in changes:
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value


def remembered_of(book: Book, session: int) -> LoggedSession:
    remembered, stray = recall(book.entries, [session])
    assert not stray
    return remembered[session]


def test_a_session_is_read_as_it_was_written() -> None:
    scribe, book, client = SessionLog(), Book(), Client(5)
    scribe.opened(client.session, welcomed=False)
    book.write(scribe.changes())
    assert not remembered_of(book, 5).welcomed
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, Sealed(2)))
    client.ask(2, Answer(2, ATTACHED))
    client.ask(3, Answer(3, Failed("exists", "it is there")))
    client.ask(4, Answer(4, Pools(())))
    client.ask(6)
    scribe.undelivered(5, 7)
    scribe.undelivered(5, 8)
    scribe.delivered(8)
    book.write(scribe.changes())
    assert scribe.changes() == []
    remembered = remembered_of(book, 5)
    assert (remembered.secret, remembered.version, remembered.welcomed) == (client.secret, 1, True)
    assert remembered.undelivered_fds == [7]
    answers = remembered.reply_cache({7: ATTACHED}.get)
    assert answers.lasting == {1, 2, 3}
    assert answers.admit(1, 1, b"id", 10) == wire.pack(Answer(1, Sealed(2)))
    assert answers.admit(2, 1, b"id", 10) == Answer(2, ATTACHED)
    assert answers.admit(3, 1, b"id", 10) == wire.pack(Answer(3, Failed("exists", "it is there")))
    assert [answers.admit(number, 1, b"id", 10) for number in (4, 6)] == [Admission.NEW] * 2  # to be worked out anew


def test_what_there_was_no_memory_to_encode_is_written_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(1, 100):
        scribe, book, client = SessionLog(), Book(), Client(5)
        scribe.opened(client.session, welcomed=True)
        scribe.asked(client.session)
        client.ask(1, Answer(1, Done()))
        client.ask(2, Answer(2, ATTACHED))
        with monkeypatch.context() as patch:
            calls = fail_nth(patch, session_journal, "_encode", at, MemoryError())
            with suppress(MemoryError):
                book.write(scribe.changes())
        book.write(scribe.changes())
        assert sorted(remembered_of(book, 5).replies) == [1, 2]
        assert scribe.changes() == []
        if calls() < at:
            break
    assert at > 3


@pytest.mark.parametrize(("version", "key"), [(1, b"s/5"), (3, b"s/5"), (4, b"k/5")])
def test_a_secret_that_is_not_what_requests_carry_has_another_key(version: int, key: bytes) -> None:
    """So that a broker that knows no other refuses the journal, and does not leave clients without an answer."""
    scribe, book, client = SessionLog(), Book(), Client(5, version)
    scribe.opened(client.session, welcomed=True)
    book.write(scribe.changes())
    assert list(book.entries) == [key]
    remembered = remembered_of(book, 5)
    assert (remembered.secret, remembered.version, remembered.no_secret) == (client.secret, version, False)
    scribe.closed(client.session)
    book.write(scribe.changes())
    assert not book.entries


def test_what_was_received_is_not_kept_and_not_done_again() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    for number in (1, 2, 3):
        scribe.asked(client.session)
        client.ask(number, Answer(number, Done()))
        book.write(scribe.changes())
    scribe.asked(client.session)
    client.ask(4, oldest=2, received=(3,))
    book.write(scribe.changes())
    remembered = remembered_of(book, 1)
    assert sorted(remembered.replies) == [2]
    assert remembered.receipts == Receipts(2, 0, (3, 4))
    answers = remembered.reply_cache(lambda lease: None)
    assert answers.receipts == remembered.receipts
    assert [answers.admit(number, 2, b"id", 10) for number in (1, 3)] == [Admission.STALE] * 2


def test_the_answer_of_a_lease_that_is_over_is_forgotten() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, ATTACHED))
    book.write(scribe.changes())
    again, scribe = Client(1), SessionLog()
    again.replies = remembered_of(book, 1).reply_cache(lambda lease: None)
    assert not again.replies.lasting
    scribe.asked(again.session)
    book.write(scribe.changes())
    assert sorted(book.entries) == [b"r/1", b"s/1"]


@pytest.mark.parametrize("restarted", [False, True])
def test_nothing_is_left_of_a_session_that_ends_with_answers_that_are_not_kept_any_more(restarted: bool) -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, ATTACHED))
    book.write(scribe.changes())
    if restarted:
        client.replies = remembered_of(book, 1).reply_cache(lambda lease: None)
    else:
        scribe.asked(client.session)
        client.ask(2, Answer(2, Done()), oldest=2)
    scribe.closed(client.session)
    book.write(scribe.changes())
    assert not book.entries


def test_nothing_is_left_of_a_session_that_is_over() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, Done()))
    book.write(scribe.changes())
    assert sorted(book.entries) == [b"a/1/1", b"r/1", b"s/1"]
    scribe.asked(client.session)
    scribe.closed(client.session)
    book.write(scribe.changes())
    assert not book.entries


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        (b"s/1", b"\xc1", "an invalid"),
        (b"r/2", msgspec.msgpack.encode([0, 0]), "an invalid"),
        (b"a/1/1", msgspec.msgpack.encode("text"), "an invalid"),
        (b"d/1", msgspec.msgpack.encode("9"), "an invalid"),
        (b"x/1", b"", "x/1, and this build does not know"),
        (b"s/1/2", b"", "s/1/2, and this build does not know"),
        (b"a/1", b"", "a/1, and this build does not know"),
        (b"r/-1", b"", "does not know"),
        (b"\xff", b"", "does not know"),
    ],
)
def test_what_nobody_can_have_written_is_refused(key: bytes, value: bytes, complaint: str) -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    book.write([*scribe.changes(), (b"l/format", b"the ledger's"), (key, value)])
    with pytest.raises(CorruptJournal, match=complaint):
        recall(book.entries, [1])


def test_what_belongs_to_no_session_is_named_and_struck_out() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    for session in (client.session, Client(2).session):
        scribe.opened(session, welcomed=True)
    scribe.undelivered(3, 8)
    book.write(
        [*scribe.changes(), (b"r/2", msgspec.msgpack.encode([0, 0, []])), (b"a/3/1", msgspec.msgpack.encode([b"", 0]))]
    )
    remembered, stray = recall(book.entries, [1])
    assert sorted(remembered) == [1]
    assert sorted(stray) == [b"a/3/1", b"d/8", b"r/2", b"s/2"]
    scribe.forget(stray)
    book.write(scribe.changes())
    assert sorted(book.entries) == [b"s/1"]


def test_a_session_whose_secret_is_not_written_down_is_mute_and_nothing_else_is_believed_of_it() -> None:
    book = Book()
    book.write([(b"r/1", msgspec.msgpack.encode([4, 0, []])), (b"d/8", msgspec.msgpack.encode(1))])
    remembered, stray = recall(book.entries, [1, 2])
    assert [remembered[number].no_secret for number in (1, 2)] == [True, True]
    assert remembered[1].undelivered_fds == []
    assert sorted(stray) == [b"d/8", b"r/1"]


def test_listings_are_not_written_down() -> None:
    """Refusals are: what was cancelled must not wait again because the answer to its cancel is known."""
    assert [type(body) in LASTING for body in (Done(), ATTACHED, Pools(()), Failed("denied", "no"))] == [
        True,
        True,
        False,
        True,
    ]


def test_every_broker_that_goes_on_is_counted() -> None:
    book = Book()
    for restarts in (1, 2, 3):
        scribe = SessionLog(book.entries)
        assert scribe.restarts == restarts
        book.write(scribe.changes())
    assert SessionLog().restarts == 0
    with pytest.raises(CorruptJournal):
        SessionLog({b"n": b"\xc1"})
