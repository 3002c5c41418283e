"""How the tests' pools are shared where a test does not say so: those that use the fixture ``share`` run over all."""

from __future__ import annotations

import os
from inspect import unwrap

from cubroker.client import Broker
from cubroker.client.loading import loader
from cubroker.protocol.messages import AUTO

DEFAULT = AUTO
KINDS = ("ipc", "vmm")
VARIABLE = "CUBROKER_TESTS_SHARE"
"""Tells the programs that tests start."""


def by_default(share: str) -> None:
    """Have pools of this process, and of programs that it starts from now on, shared in that way by default."""
    os.environ[VARIABLE] = share
    for function in map(unwrap, (Broker.create, Broker.attach_or_create, loader.load)):
        assert function.__kwdefaults__
        function.__kwdefaults__["share"] = share
