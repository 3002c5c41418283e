from __future__ import annotations

from tests.unit.client.conftest import client, lender, minilm

__all__ = ["client", "lender", "minilm"]
