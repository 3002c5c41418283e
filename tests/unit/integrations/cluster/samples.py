"""A message of every kind."""

from __future__ import annotations

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.messages import (
    CurrentVersion,
    ExportedAllocation,
    ExportedVersion,
    Going,
    List,
    Offer,
    Offers,
    Open,
    PeerHello,
    PeerRefusal,
    PeerWelcome,
    Progress,
    Reply,
    Request,
    WatchPool,
)
from tests.unit.integrations.cluster.hosts import LAYOUT

REQUESTS: tuple[Request, ...] = (PeerHello(messages.VERSION), List(), Open("m", 3), WatchPool("m"), Progress(1 << 40))
REPLIES: tuple[Reply, ...] = (
    PeerWelcome(1, "root"),
    Offers((Offer("m", 3, 1024, 2, current=True),), 1, 8),
    ExportedVersion(
        "m",
        3,
        LAYOUT.encode(),
        "algorithm",
        (ExportedAllocation(4096, 512, None, bytes(16)), ExportedAllocation(0, 1, 3, bytes(16))),
        b"x",
    ),
    CurrentVersion(0),
    Going(),
    PeerRefusal("not_found", "there is none"),
)
