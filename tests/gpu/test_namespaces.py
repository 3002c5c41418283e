"""GPU memory between containers: broker and worker in namespaces of their own, which have the directory in common."""

from __future__ import annotations

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import eventually
from tests.gpu.sharing import SHARES
from tests.namespaces import contained, unshare, visiting

ALL = ("--pid", "--mount-proc", "--ipc", "--net", "--mount", "--uts", "--cgroup")
"""Without a /proc of its pid namespace cuInit fails with 304; a container has one."""

CONTENT = 7
NBYTES = 4 << 20


SECOND = ("sh", "-c", '"$@"; exit', "sh")
"""Runs a command as the second process of a pid namespace, of which a broker by itself is the first."""


def publish(broker: Broker, share: str) -> None:
    with broker.create("llama", Layout.pack([("x", "U8", (NBYTES,))]), share=share) as draft:
        draft["x"].copy_from(bytes([CONTENT]) * NBYTES)
        draft.seal()


@SHARES
@pytest.mark.parametrize("apart", [False, True], ids=["host", "container"])
def test_a_worker_beside_the_brokers_container_reads_its_bytes_and_its_death_is_seen(share: str, apart: bool) -> None:
    before = [*unshare("--fork", "--kill-child", *ALL), *SECOND] if apart else []
    with contained(*ALL, devices="cuda") as process, Broker(process.directory) as broker:
        publish(broker, share)
        with visiting(process.directory, "llama", before) as guest:
            assert guest.said == CONTENT
            assert broker.pools()[0].leases == 1
            guest.kill()
            eventually(lambda: broker.pools()[0].leases == 0, "the lease to end")


def test_ipc_memory_of_a_process_with_the_same_number_elsewhere_is_refused_and_vmm_is_not() -> None:
    before = unshare("--fork", "--kill-child", *ALL)
    with contained(*ALL, devices="cuda") as process, Broker(process.directory) as broker:
        publish(broker, "ipc")
        with visiting(process.directory, "llama", before) as guest:
            assert guest.said[0] == "device"
            assert "CUDA_ERROR_INVALID_CONTEXT" in guest.said[1]
        publish(broker, "vmm")
        with visiting(process.directory, "llama", before) as guest:
            assert guest.said == CONTENT
