"""Every argument of every public function: what is of a wrong type or out of range is refused in plain words."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pytest

from cubroker import aio
from cubroker.client import Broker, Draft, Follow, Pool, SharedEvent, SharedTensor, Watch
from cubroker.protocol import Layout
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound
from tests.brokers import BrokerProcess
from tests.unit.client.conftest import given_back

LAYOUT = Layout.pack([("x", "U8", (16,))])

NO_NUMBER = ["3", b"3", [3], {}, object(), float("nan")]
NO_TEXT = [3, 1.5, True, b"x", ["x"], {}, object()]
NO_FLAG = [2, "no", b"", 0.5, [], {}, object()]
NO_TIME = [-1, 10**30, True, np.array([1]), np.array([1, 2]), Decimal("nan"), *NO_NUMBER]
NO_DEVICE = [True, 1.5, b"0", "x", [0], {}, object()]

WRONG: dict[str, list[object]] = {
    "after": [-1, 10**30, 1.5, True, *NO_NUMBER],
    "buffer": [3, "x", None, [1], b"1"],
    "base": [-1, 1.5, True, b"probe", "another", [1], {}],
    "connect_timeout": [0, *NO_TIME],
    "device": NO_DEVICE,
    "devices": [3, True, b"\0", "0", [], [True], [None], [[0]], object()],
    "digest": NO_FLAG,
    "directory": [3, True, b"x", "", [], {}, object()],
    "durable": NO_FLAG,
    "in_place": NO_FLAG,
    "layout": [3, "x", b"x", [None], {"x": None}, {3: 3}, object()],
    "mode": [-1, 0o1000, 10**30, 1.5, True, *NO_NUMBER],
    "name": ["", "no name!", *NO_TEXT],
    "on": NO_FLAG,
    "over": NO_FLAG,
    "owner": ["no such user", b"0", -1, 1 << 32, 1.5, True, [True], [None], [[0]], {}, {0: 0}, object()],
    "peer": NO_FLAG,
    "plan": [3, "*", b"*", ["*"], {3: 0}, {"x": "y"}, {"x": [0]}, {"x": True}, {}, object()],
    "share": ["ipcc", "", *NO_TEXT],
    "source": [3, b"x", "x", [1], {}, {3: b"x"}, {"x": object()}, object()],
    "stream": [-1, 1 << 64, 1.5, "0", b"0", [0], {}, object()],
    "subject": [-1, 0, 10**30, 1.5, True, b"x", "no name!", ["x"], None],
    "switch": NO_FLAG,
    "timeout": NO_TIME,
    "unsealed": NO_FLAG,
    "version": [0, -1, 10**30, 1.5, True, *NO_NUMBER],
    "wait": NO_TIME,
    "writable": NO_FLAG,
}
"""Values that an argument of that name cannot have."""

NEEDED: dict[str, object] = {
    "name": "probe",
    "layout": LAYOUT,
    "source": {"x": bytes(16)},
    "subject": "probe",
    "buffer": b"",
}
"""What a function is given for the arguments that it needs."""

BESIDES: dict[tuple[str, str], dict[str, object]] = {
    ("attach", "peer"): {"device": 0},
    ("attach", "unsealed"): {"version": 1},
}
"""Other arguments without which these are not looked at."""

KINDS: dict[str, type] = {
    "Broker": Broker,
    "Draft": Draft,
    "Pool": Pool,
    "SharedTensor": SharedTensor,
    "SharedEvent": SharedEvent,
    "Watch": Watch,
    "Follow": Follow,
}

ELSEWHERE = {"broadcast", "multicast_pointer"}
"""Methods of multicast pools: their ``name`` is that of a tensor."""

INSIDE = {"attaching", "waking", "switching", "change", "tell", "fail"}
"""What other parts of the package call."""


class Case(NamedTuple):
    """An argument of a method of a class."""

    kind: str
    method: str
    argument: str


def cases() -> Iterator[Case]:
    """Every argument of every public method of the client."""
    yield from (Case("Broker", "__init__", argument) for argument in inspect.signature(Broker).parameters)
    for kind, found in KINDS.items():
        for method, function in vars(found).items():
            if callable(function) and not method.startswith("_") and method not in INSIDE | ELSEWHERE:
                _, *arguments = inspect.signature(function).parameters
                yield from (Case(kind, method, argument) for argument in arguments)


CASES = list(cases())


@pytest.fixture(scope="module")
def objects(lender: BrokerProcess) -> Iterator[dict[str, Any]]:
    """An object of each class, on pools that exist."""
    with Broker(lender.directory) as broker:
        broker.publish("probe", {"x": bytes(16)})
        broker.create("scratch", LAYOUT, writable=True).seal()
        draft, pool = broker.create("draft", LAYOUT), broker.attach("scratch")
        watch, follow = broker.watch("probe"), broker.follow("probe")
        found: dict[str, Any] = {
            "Broker": broker,
            "Draft": draft,
            "Pool": pool,
            "SharedTensor": pool["x"],
            "SharedEvent": pool.event("made"),
            "Watch": watch,
            "Follow": follow,
        }
        yield found
        found.clear()  # a tensor would keep its memory
    given_back(lender.directory)


def test_every_argument_of_every_public_function_is_in_the_table() -> None:
    assert {case.argument for case in CASES} == set(WRONG)


def call(case: Case, target: Any, value: object) -> object:
    """Call a function with a wrong value of one argument, and with what it needs besides."""
    function = target if case.method == "__init__" else getattr(target, case.method)
    parameters = inspect.signature(function).parameters.values()
    needed = {each.name: NEEDED[each.name] for each in parameters if each.default is each.empty}
    return function(**needed | BESIDES.get((case.method, case.argument), {}) | {case.argument: value})


def check(case: Case, error: CubrokerError) -> None:
    """Check that an error says what was passed and what to do, and nothing of messages and their encoding."""
    assert isinstance(error, Invalid) or case.argument in ("device", "devices", "plan")
    assert any(mark in error.message for mark in ("; ", ": "))
    assert not re.search("Envelope|Expected `|Encoding objects|cannot be sent|takes no|must be a", error.message)


@pytest.mark.parametrize("case", CASES, ids=".".join)
def test_a_wrong_argument_is_refused_in_plain_words(objects: dict[str, Any], case: Case) -> None:
    target = Broker if case.method == "__init__" else objects[case.kind]
    for value in WRONG[case.argument]:
        with pytest.raises((Invalid, NotFound)) as caught:
            call(case, target, value)
        check(case, caught.value)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.kind in aio.__all__ and hasattr(getattr(aio, case.kind), case.method)],
    ids=".".join,
)
def test_a_wrong_argument_is_refused_in_an_event_loop_as_well(
    objects: dict[str, Any], lender: BrokerProcess, case: Case
) -> None:
    async def begun(value: object) -> None:
        if case.method == "__init__":
            await call(case, aio.Broker, value).connect()  # type: ignore[attr-defined]
        async with aio.Broker(lender.directory) as broker:
            found = call(case, broker if case.kind == "Broker" else getattr(aio, case.kind)(objects[case.kind]), value)
            if inspect.isawaitable(found):
                await found

    for value in WRONG[case.argument]:
        with pytest.raises((Invalid, NotFound)) as caught:
            asyncio.run(begun(value))
        check(case, caught.value)
