"""The process that has a version registered, with an engine that moves nothing: it starts much sooner than NIXL does.

If the file exists that ``$FAILS`` names, it fails instead, and has one letter less in that file for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cubroker.integrations.cluster import source_process, transfer_engine
from cubroker.integrations.cluster.transfer_engine import MemoryRegion


class Still:
    """An engine that nobody reads with."""

    def register(self, regions: Sequence[MemoryRegion]) -> bytes:
        return b"metadata"


if __name__ == "__main__":
    fails = Path(os.environ.get("FAILS", "/nonexistent"))
    if fails.exists() and (left := fails.read_text()):
        shorter = fails.with_name(f"{fails.name}-{os.getpid()}")
        shorter.write_text(left[1:])
        shorter.replace(fails)  # at once: another process may read it
        sys.exit(3)
    source_process.load = lambda: None
    transfer_engine.TransferEngine = Still  # type: ignore[assignment, misc]
    source_process.main(*sys.argv[1:])
