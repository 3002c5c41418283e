"""A message of every kind."""

from __future__ import annotations

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.messages import (
    Announce,
    Available,
    CurrentVersion,
    DraftContent,
    ExportedAllocation,
    ExportedVersion,
    Going,
    List,
    Local,
    Offer,
    Offers,
    Open,
    PeerHello,
    PeerRefusal,
    PeerWelcome,
    Progress,
    Reply,
    Request,
    Serve,
    WatchPool,
)
from tests.unit.integrations.cluster.hosts import LAYOUT

REQUESTS: tuple[Request, ...] = (PeerHello(messages.VERSION), List(), Open("m", 3), WatchPool("m"), Progress(1 << 40))
REPLIES: tuple[Reply, ...] = (
    PeerWelcome(1, "root", bytes(16)),
    Offers((Offer("m", 3, 1024, 2, current=True), Offer("m", 4, 1024, 2, False, bytes(16), 512)), 1, 8),
    ExportedVersion(
        "m",
        3,
        LAYOUT.encode(),
        "algorithm",
        (ExportedAllocation(4096, 512, None, bytes(16)), ExportedAllocation(0, 1, 3, bytes(16))),
        b"x",
        slot=3,
        slots=8,
        runs=b"\x05",
        piece=1 << 20,
    ),
    Available(b"\x07"),
    Available(),
    CurrentVersion(0),
    Going(),
    PeerRefusal("not_found", "there is none"),
)
LOCALS: tuple[Local, ...] = (
    Announce(bytes(16), "m", 3, 0o640),
    DraftContent("algorithm", (bytes(16),), 1 << 20, b"\x05"),
    Available(b"\x07"),
    Serve("m", 3, "nixl", unsealed=True, digests=(bytes(16),)),
)
