"""Devices by the names that users give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cubroker.driver.context import Device
from cubroker.driver.device_names import UnknownDevice, describe, find, is_name, label

GPUS = [
    Device(2, "GPU-8d2f41c6-0000-0000-0000-000000000002", "NVIDIA H200", 1 << 30),
    Device(0, "GPU-8d2f9999-0000-0000-0000-000000000000", "NVIDIA H200", 1 << 30),
]
HOST = [Device(0, "HOST-4df821cd-3e31-42b5-def1-b1bd58aea751", "cubroker host device 0", 1 << 20)]
FIRST, SECOND = GPUS


@dataclass(frozen=True)
class TorchDevice:
    """What ``torch.device`` has."""

    type: str
    index: int | None = None


class Integer:
    """What numpy's integers have."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (2, FIRST),
        ("2", FIRST),
        (" 0 ", SECOND),
        ("cuda:2", FIRST),
        (TorchDevice("cuda", 0), SECOND),
        (Integer(), FIRST),
        (FIRST.uuid, FIRST),
        (FIRST.uuid.upper(), FIRST),
        ("GPU-8d2f4", FIRST),
        ("gpu-8D2F9", SECOND),
        (SECOND, SECOND),
        (FIRST.uuid.removeprefix("GPU-").upper(), FIRST),
    ],
)
def test_a_device_has_many_names(name: Any, expected: Device) -> None:
    assert find(name, GPUS, "this process sees") is expected


@pytest.mark.parametrize("name", ["cuda", TorchDevice("cuda")])
def test_cuda_alone_is_the_current_device_or_the_only_one(name: Any) -> None:
    assert find(name, GPUS, "this process sees", current=0) is SECOND
    assert find(name, GPUS[:1], "this process sees") is FIRST
    with pytest.raises(UnknownDevice, match="device 'cuda' does not say which one; write cuda:N; the broker has 2 "):
        find(name, GPUS, "the broker has")


def test_emulated_devices_are_numbered_like_real_ones_and_real_ones_are_none_of_theirs() -> None:
    for name in ("cuda:0", "host:0", TorchDevice("cuda", 0), "cuda", "host", "host-4d"):
        assert find(name, HOST, "this process sees") is HOST[0]
    for name in ("h", "HOST", "4df821cd"):
        with pytest.raises(UnknownDevice, match=f"sees no device '{name}'"):
            find(name, HOST, "this process sees")
    with pytest.raises(UnknownDevice, match="sees no device 'host:0'"):
        find("host:0", GPUS, "this process sees")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (1, "no device 1;"),
        (-2, "no device -2;"),
        ("", "no device '';"),
        ("cuda:1", "no device 'cuda:1';"),
        ("cuda:x", "no device 'cuda:x';"),
        ("٢", "no device '٢';"),
        ("8d2f4", "no device '8d2f4';"),
        ("g", "no device 'g';"),
        ("GPU", "no device 'GPU';"),
        (TorchDevice("cpu"), "no device 'cpu';"),
        (TorchDevice("xpu", 2), "no device 'xpu:2';"),
        (None, "no device 'None';"),
    ],
)
def test_another_name_is_answered_with_what_is_there(name: Any, asked: str) -> None:
    with pytest.raises(UnknownDevice) as refused:
        find(name, GPUS, "this process sees")
    there = f"it has 2 (NVIDIA H200, {FIRST.uuid}), 0 (NVIDIA H200, {SECOND.uuid})"
    assert str(refused.value) == f"this process sees {asked} {there}"
    with pytest.raises(UnknownDevice, match=r"it has none$"):
        find(name, [], "the broker has")


def test_the_beginning_of_two_uuids_names_both_of_them() -> None:
    with pytest.raises(UnknownDevice) as refused:
        find("GPU-8d2f", GPUS, "this process sees")
    assert str(refused.value) == (
        f"device 'GPU-8d2f' could be any of {describe(FIRST)}, {describe(SECOND)}; write more of the UUID"
    )


def test_a_uuid_goes_before_one_that_begins_with_it() -> None:
    short = Device(1, "GPU-8d2f", "short", 1)
    assert find("GPU-8d2f", [*GPUS, short], "this process sees") is short


def test_messages_have_index_and_name() -> None:
    assert label(FIRST) == "device 2 (NVIDIA H200)"


@pytest.mark.parametrize(
    "text", ["0", "cuda:1", "host:0", "GPU-8d2f", "gpu-8D2F4", "MIG-1", "HOST-", FIRST.uuid, FIRST.uuid[4:]]
)
def test_a_name_is_known_as_one_before_the_devices_are(text: str) -> None:
    assert is_name(text)


@pytest.mark.parametrize("text", ["", "cuda", "cuda:", "-1", "8d2f", "GPU-xyz", "0,1", "g", "H", "GPU", "٢"])
def test_what_is_no_name_is_that_of_no_device_by_the_same_rule(text: str) -> None:
    assert not is_name(text)
    if text != "cuda":  # which means the current one
        for devices in (HOST, GPUS[:1]):
            with pytest.raises(UnknownDevice):
                find(text, devices, "this process sees")
