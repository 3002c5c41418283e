"""GPU memory between containers: broker and worker in namespaces of their own, which have the directory in common."""

from __future__ import annotations

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import eventually
from tests.gpu.sharing import SHARES
from tests.namespaces import contained, unshare, visiting

ALL = ("--pid", "--ipc", "--net", "--mount", "--uts", "--cgroup")
CONTENT = 7
NBYTES = 4 << 20


@SHARES
@pytest.mark.parametrize("options", [(), ALL], ids=["host", "container"])
def test_a_worker_beside_the_brokers_container_reads_its_bytes_and_its_death_is_seen(
    share: str, options: tuple[str, ...]
) -> None:
    before = unshare("--fork", "--kill-child", *options) if options else ()
    with contained(*ALL, devices="cuda") as process, Broker(process.directory) as broker:
        with broker.create("llama", Layout.pack([("x", "U8", (NBYTES,))]), share=share) as draft:
            draft["x"].copy_from(bytes([CONTENT]) * NBYTES)
            draft.seal()
        with visiting(process.directory, "llama", before) as guest:
            assert guest.said == CONTENT
            assert broker.pools()[0].leases == 1
            guest.kill()
            eventually(lambda: broker.pools()[0].leases == 0, "the lease to end")
