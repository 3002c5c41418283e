"""Memory that is mapped read-only on a GPU: a kernel that writes ends its own context, and harms nobody else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from cubroker.driver import Driver, load
from tests.gpu.offender import VALUE
from tests.unit.driver.conformance_vmm import GRANULE, lent, mapped
from tests.unit.driver.other_process import ROOT, OtherProcess


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = load("cuda")
    yield driver
    driver.close()


def offend(descriptor: int, access: str) -> list[str]:
    """Let a process map the memory and run a kernel that writes its first byte; return what it saw."""
    command = [sys.executable, "-m", "tests.gpu.offender", str(descriptor), str(GRANULE), access]
    done = subprocess.run(command, cwd=ROOT, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def test_a_kernel_that_writes_to_a_read_only_mapping_ends_its_own_context_alone(driver: Driver) -> None:
    context = driver.context(0)
    with (
        lent(driver) as descriptor,
        mapped(context, descriptor) as writer,
        mapped(context, descriptor, readonly=True) as reader,
        OtherProcess("cuda") as other_process,
    ):
        context.write(writer, b"\x11bytes")
        theirs = other_process.attach(descriptor, GRANULE, readonly=True)
        before, error = offend(descriptor, "readonly")
        assert before == "11"
        assert error in ("cuCtxSynchronize CUDA_ERROR_ILLEGAL_ADDRESS", "cuLaunchKernel CUDA_ERROR_ILLEGAL_ADDRESS")
        assert context.read(reader, 6) == other_process.ask("read", theirs, 6) == b"\x11bytes"
        context.write(writer, b"\x12")
        assert other_process.ask("read", theirs, 1) == b"\x12"
        assert offend(descriptor, "writable") == ["12", f"{VALUE:02x}"], "the kernel does write where it may"
        assert context.read(reader, 6) == other_process.ask("read", theirs, 6) == bytes([VALUE]) + b"bytes"
        other_process.ask("detach", theirs)
