"""Pictures of the page are those of a real broker, with pools and holders."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.unit.server.monitoring.gallery import hang


@pytest.mark.slow
def test_pictures_are_made_of_a_real_broker(browser: Browser, tmp_path: Path) -> None:
    assert hang(browser, tmp_path, devices=[2], pools=[5], colours=["dark"], widths=[400]) == []
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == sorted(f"2x5-{step}dark-400.png" for step in ("", "search-", "plan-"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
