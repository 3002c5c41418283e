from __future__ import annotations

from tests.unit.client.conftest import client, lender, minilm, name

__all__ = ["client", "lender", "minilm", "name"]
