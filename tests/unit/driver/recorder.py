"""A pytest plugin that writes down which driver functions each test calls, in the test's own process."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cubroker.driver import checked_calls

FILE = "--record-calls"

_called: defaultdict[str, set[str]] = defaultdict(set)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(FILE, type=Path, help="write the functions that each test calls to this file, as JSON")


@pytest.fixture(autouse=True)
def _recording(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, names = checked_calls._checked, _called[request.node.nodeid]

    def recorded(name: str, function: Callable[..., Any], results: Any) -> Callable[..., Any]:
        call = checked(name, function, results)

        def recording(*args: Any) -> Any:
            names.add(name)
            return call(*args)

        return recording

    monkeypatch.setattr(checked_calls, "_checked", recorded)


def pytest_sessionfinish(session: pytest.Session) -> None:
    found = {test: sorted(names) for test, names in _called.items()}
    session.config.getoption(FILE).write_text(json.dumps(found))
