"""The page names the containers of processes as commands do (``tests/unit/cli/test_processes.py``)."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Page

from tests.unit.server.monitoring import scenes
from tests.unit.server.monitoring.test_page import visit
from tests.unit.server.monitoring.windows import watching

CASES = json.loads((Path(__file__).parents[3] / "containers.json").read_text())


def test_a_process_is_in_the_container_that_commands_name(page: Page) -> None:
    with watching(scenes.view(1, 0)) as pane:
        visit(page, pane)
        paths = [path for path, _ in CASES]
        found = page.evaluate("paths => paths.map(cgroup => container({process: {cgroup}}))", paths)
    assert found == ["" if name == "-" else name for _, name in CASES]
