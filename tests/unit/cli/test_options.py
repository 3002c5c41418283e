"""Names, versions, sizes and devices as they are typed."""

from __future__ import annotations

import click
import pytest

from cubroker.cli import options
from cubroker.cli.options import Reference, find_devices
from cubroker.protocol.errors import Invalid, NotFound
from cubroker.protocol.status import DeviceInfo

DEVICES = [DeviceInfo(index, uuid, "GPU", 0, 0, 0, 0) for index, uuid in ((0, "GPU-aa11"), (1, "GPU-aa22"))]


@pytest.mark.parametrize(
    ("given", "expected"), [("llama", Reference("llama", None)), ("a/b.c@12", Reference("a/b.c", 12))]
)
def test_a_version_follows_an_at_sign(given: str, expected: Reference) -> None:
    assert options.reference(given) == expected


@pytest.mark.parametrize("given", ["", "@1", "llama@", "llama@0", "llama@x", "llama@1@2", "llama@²", "-x", "a b"])
def test_what_is_no_reference_is_wrong_usage(given: str) -> None:
    with pytest.raises(click.BadParameter):
        options.reference(given)


def test_sizes_have_units() -> None:
    assert options.size("2MiB") == 2 << 20
    with pytest.raises(click.BadParameter, match="is no size"):
        options.size("much")


def test_devices_are_a_list_without_gaps_or_repetitions() -> None:
    assert options.device_list("0, GPU-aa22") == ("0", "GPU-aa22")
    for wrong in ("", "0,", "0,0"):
        with pytest.raises(click.BadParameter):
            options.device_list(wrong)


def test_devices_are_found_by_index_uuid_and_beginning_of_a_uuid() -> None:
    assert find_devices(["1", "GPU-aa11"], DEVICES) == ["GPU-aa22", "GPU-aa11"]
    assert find_devices(["GPU-aa2"], DEVICES) == ["GPU-aa22"]
    assert find_devices(["cuda:1", "gpu-AA1"], DEVICES) == ["GPU-aa22", "GPU-aa11"]


@pytest.mark.parametrize("choice", ["2", "GPU-bb", "GPU-aa"])
def test_an_unknown_or_ambiguous_device_is_refused_with_the_known_ones(choice: str) -> None:
    with pytest.raises(NotFound, match=r"0 \(GPU, GPU-aa11\), 1 \(GPU, GPU-aa22\)"):
        find_devices([choice], DEVICES)


def test_one_device_under_two_names_is_refused() -> None:
    with pytest.raises(Invalid, match="twice"):
        find_devices(["0", "GPU-aa11"], DEVICES)
