"""A process that commits to the journal it is given, says so after every commit, and goes on until it is killed.

``python journal_process.py DESCRIPTOR``: commit n has ``number`` n, and replaces or deletes other keys in a way that n
decides, so n determines the whole content: :func:`advance`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

from cubroker.server.store import store as store_module
from cubroker.server.store.store import Change, Journal

NUMBER = b"number"
KEYS = 8


def changes(number: int) -> list[Change]:
    """What commit ``number`` changes."""
    chance = random.Random(number)
    keys = chance.sample(range(KEYS), chance.randrange(KEYS))
    values = [None if chance.random() < 0.2 else chance.randbytes(chance.choice((0, 20, 900))) for _ in keys]
    return [(NUMBER, b"%d" % number), *zip((b"key %d" % key for key in keys), values, strict=True)]


def advance(content: dict[bytes, bytes], first: int, last: int) -> None:
    """Bring the content after commit ``first`` to that after commit ``last``."""
    for number in range(first + 1, last + 1):
        for key, value in changes(number):
            content.pop(key, None)
            if value is not None:
                content[key] = value


def numbers(kept: Journal) -> Iterator[int]:
    """Commit on and on; return the number of each commit once it is there."""
    number = int(dict(kept.items()).get(NUMBER, b"0"))
    while True:
        number += 1
        kept.commit(changes(number))
        yield number


if __name__ == "__main__":
    store_module.SLACK = store_module.CHUNK = 2048
    for done in numbers(Journal.open(int(sys.argv[1]))):
        os.write(1, b"%d\n" % done)
