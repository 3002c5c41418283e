"""A message of every kind."""

from __future__ import annotations

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.messages import (
    Current,
    Going,
    Hello,
    List,
    Offer,
    Offers,
    Open,
    Opened,
    Place,
    Progress,
    Refused,
    Reply,
    Request,
    Watch,
    Welcome,
)
from tests.unit.integrations.cluster.hosts import LAYOUT

REQUESTS: tuple[Request, ...] = (Hello(messages.VERSION), List(), Open("m", 3), Watch("m"), Progress(1 << 40))
REPLIES: tuple[Reply, ...] = (
    Welcome(1, "root"),
    Offers((Offer("m", 3, 1024, 2, current=True),), 1, 8),
    Opened("m", 3, LAYOUT.encode(), "algorithm", (Place(4096, 512, None, bytes(16)), Place(0, 1, 3, bytes(16))), b"x"),
    Current(0),
    Going(),
    Refused("not_found", "there is none"),
)
