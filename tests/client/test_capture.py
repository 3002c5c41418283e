"""No pool ends a capture of a CUDA graph in its process, whatever is done with it; host devices imitate the rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cubroker.client import Broker
from tests.brokers import eventually
from tests.client import capturing
from tests.client.conftest import leases
from tests.driver.conformance_capture import HERE
from tests.driver.conformance_capture import capturing as capturing_a_stream


@pytest.mark.parametrize("work", capturing.WORK)
@pytest.mark.parametrize("make", HERE, ids=["same thread", "another thread"])
def test_a_capture_goes_on(
    client: Broker,
    name: str,
    share: str,
    tmp_path: Path,
    work: capturing.Work,
    make: Callable[[Callable[[], object]], object],
) -> None:
    file = capturing.write(tmp_path)
    capturing.publish(client, name, share)
    context = client.driver.context(client.driver.devices[0].index)
    for mode in ("GLOBAL", "THREAD_LOCAL"):
        for stream in ("NON_BLOCKING", "DEFAULT"):
            with capturing_a_stream(context, mode, stream) as capture:
                make(lambda: work(client, name, share, file))
                eventually(lambda: leases(client, name) == 0, "the end of its lease, during the capture")
                capture.finish()
