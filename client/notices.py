"""What the broker says on the session socket, as far as this client knows it: a newer broker may say more."""

from __future__ import annotations

import logging
from typing import get_args

from msgspec import Struct

from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.messages import Notice

log = logging.getLogger(__name__)

KNOWN = frozenset(kind.__name__ for kind in get_args(Notice))


class _Kind(Struct, array_like=True):
    """How a notice of any kind begins."""

    name: str


wire.prepare(_Kind)


def read(data: bytes) -> Notice | None:
    """Return a notice; None, and a line in the log, if it is of a kind that this client does not know.

    Raises:
        Invalid: it is no notice, or none of the kind that it says.
    """
    try:
        notice: Notice = wire.unpack(data, Notice)
    except Invalid:
        name = wire.unpack(data, _Kind).name
        if name in KNOWN:
            raise
        log.warning("the broker says %.80r, which this version of cubroker does not know; it is skipped", name)
        return None
    return notice
