"""What an event loop says to its service manager: in order, and without ever waiting for it to listen."""

from __future__ import annotations

import asyncio
import logging
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cubroker.protocol.errors import Unavailable
from cubroker.server.store import notify, words
from cubroker.server.store.datagrams import close_all
from cubroker.server.store.notify import Manager

log = logging.getLogger(__name__)

MOST = 256
"""Names under which descriptors may wait to be stored. It holds two duplicates or so for each."""

PAUSE = 0.05
"""Seconds between two attempts where the kernel tells nobody when there is room."""

Done = Callable[[Unavailable | None], None]
"""Told what became of a message: it was sent, or why not."""


@dataclass(slots=True)
class _Letter:
    text: str
    done: Done
    descriptors: Sequence[int] = ()  # its own, until it was sent
    timer: asyncio.TimerHandle | None = None


class Outbox:
    """Sends at once what the manager has room for, and keeps the rest until it has.

    Of signs of life and of statuses the newest waits, and descriptors wait a certain time; removals wait for ever, as
    what is not removed would fill the store. Threads that may wait say what they have to say by ``manager`` itself:
    the two keep no order with each other, so neither stores or removes what the other does.

    Args:
        manager: who is told; closed with this object.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self._letters: dict[object, _Letter] = {}
        self._storing = 0
        self._waits = False

    def say(self, text: str, kind: str = "") -> None:
        """Say something; of what waits of the same ``kind`` it takes the place. What cannot be said is logged."""
        if waiting := self._letters.get(kind):
            waiting.text = text
        else:
            self._post(kind or object(), _Letter(text, _complain))

    def store(self, name: str, descriptors: Sequence[int], done: Done) -> bool:
        """Have descriptors kept under a name that is used once, until they hang up; return whether that was said.

        Else ``done`` hears of it later, unless :meth:`remove` comes before.

        Raises:
            Unavailable: nobody takes messages, or very many wait.
            OSError: there are no descriptors left for it to wait with.
        """
        text = words.storing(name, poll=True)
        if not self._letters and self.manager.offer(text, descriptors):
            return True
        if self._storing >= MOST:
            raise Unavailable(f"{MOST} sessions wait for the service manager already, which hangs, or is flooded")
        duplicates = _duplicates(descriptors)
        timer = asyncio.get_running_loop().call_later(notify.PATIENCE, self._expire, name)
        self._wait_with(name, _Letter(text, done, duplicates, timer))
        self._storing += 1
        return False

    def remove(self, name: str) -> None:
        """Have what is kept under a name closed; nothing is said of what was not stored yet. Errors are logged."""
        if name in self._letters:
            self._take(name)
        else:
            self._post(object(), _Letter(words.removing(name), _complain))

    def close(self) -> None:
        """Forget what was not sent, and close the manager's socket."""
        for key in list(self._letters):
            self._take(key)
        self.manager.close()

    def _post(self, key: object, letter: _Letter) -> None:
        sent, failure = (False, None) if self._letters else self._try(letter)
        if sent:
            letter.done(failure)
        else:
            self._wait_with(key, letter)

    def _try(self, letter: _Letter) -> tuple[bool, Unavailable | None]:
        """Return whether a letter is dealt with, and why it cannot be sent at all."""
        try:
            return self.manager.offer(letter.text, letter.descriptors), None
        except Unavailable as error:
            return True, error

    def _wait_with(self, key: object, letter: _Letter) -> None:
        self._letters[key] = letter
        self._wait()

    def _wait(self) -> None:
        """Go on when there is room."""
        if not self._waits:
            self._waits = True
            if not self._watch():
                asyncio.get_running_loop().call_later(PAUSE, self._go_on)

    def _watch(self) -> bool:
        """Whether the loop hears of room: not of that for descriptors, while too many are under way."""
        try:
            if _is_writable(self.manager):
                return False
            asyncio.get_running_loop().add_writer(self.manager, self._go_on)
        except OSError as error:
            log.debug("this user may watch no more files: %s", error)
            return False
        return True

    def _go_on(self) -> None:
        asyncio.get_running_loop().remove_writer(self.manager)
        self._waits = False
        while self._letters:
            key, letter = next(iter(self._letters.items()))
            sent, failure = self._try(letter)
            if not sent:
                self._wait()
                break
            self._take(key)
            letter.done(failure)

    def _expire(self, name: str) -> None:
        letter = self._take(name)
        letter.done(self.manager.late(letter.text))

    def _take(self, key: object) -> _Letter:
        letter = self._letters.pop(key)
        close_all(letter.descriptors)
        if letter.timer:
            letter.timer.cancel()
            self._storing -= 1
        return letter


def _complain(error: Unavailable | None) -> None:
    if error:
        log.warning("%s", error.message)


def _duplicates(descriptors: Sequence[int]) -> list[int]:
    """Return duplicates of all descriptors, or of none."""
    made: list[int] = []
    try:
        made.extend(os.dup(descriptor) for descriptor in descriptors)
    except OSError:
        close_all(made)
        raise
    return made


def _is_writable(manager: Manager) -> bool:
    poll = select.poll()
    poll.register(manager, select.POLLOUT)
    return bool(poll.poll(0))
