"""What a new version is made of: arrays by name, and where in a draft's memory they lie, if they lie there already."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

from cubroker.client.arrays import DeviceArray, HostArray
from cubroker.client.devices import context
from cubroker.client.pool import Replica
from cubroker.client.tensor import described
from cubroker.driver import Context, Driver
from cubroker.protocol.dtypes import BITS
from cubroker.protocol.errors import Invalid, Unsupported
from cubroker.protocol.layout import ALIGNMENT, Layout, TensorSpec

MAX_NAMED = 8
"""Tensors that a message names."""

Arrays = Mapping[str, HostArray | DeviceArray]
"""Arrays by name."""


def describe(source: object, driver: Driver) -> dict[str, HostArray | DeviceArray]:
    """Describe what is to be published.

    Args:
        source: a mapping of names to arrays, or an object with ``state_dict()``, such as a model.
        driver: this process's driver of the broker's devices.

    Raises:
        Invalid: it is neither, or empty; or something in it is no array that can be read here.
        Unsupported: an array can be read by numpy alone, which is not installed.
    """
    if not isinstance(source, Mapping) and callable(state_dict := getattr(source, "state_dict", None)):
        source = state_dict()
    if not isinstance(source, Mapping):
        raise Invalid(
            f"this {type(source).__name__} cannot be published: pass a mapping of names to arrays, or an object"
            f" that has state_dict(), such as a torch.nn.Module"
        )
    if not source:
        raise Invalid("there is nothing to publish: the mapping, or the state_dict, has no tensor")
    arrays: dict[str, HostArray | DeviceArray] = {}
    context_of = cache(partial(_context, driver))
    for name, array in source.items():
        if not isinstance(name, str):
            raise Invalid(f"{name!r} is no name of a tensor, which has to be a str")
        try:
            arrays[name] = described(array, context_of)
        except (Invalid, Unsupported) as error:
            raise type(error)(f"cannot publish {name!r}: {error.message}") from error
    return arrays


def _context(driver: Driver, ordinal: int) -> Context:
    if driver.host:
        raise Invalid(
            f"it is on GPU {ordinal}, and the broker's devices are emulated in host memory; copy it to the host first"
        )
    return context(driver, ordinal)


def layout_in(memory: Replica, arrays: Arrays, label: str) -> Layout:
    """Return a layout of the same allocations, whose tensors are arrays that lie in them.

    Args:
        memory: the tensors of a draft, on one device or all shards.
        arrays: the arrays.
        label: the draft's, for messages.

    Raises:
        Invalid: an array cannot be a tensor where it is, by its name; or two overlap.
    """
    specs, elsewhere = find(memory, arrays)
    if elsewhere:
        named = "; ".join(f"{name!r} {why}" for name, why in list(elsewhere.items())[:MAX_NAMED])
        more = f"; and {len(elsewhere) - MAX_NAMED} more" if len(elsewhere) > MAX_NAMED else ""
        raise Invalid(f"not all tensors lie in {label}: {named}{more}; make them there, or copy them into it")
    layout = Layout(tuple(specs[name] for name in arrays), memory.layout.allocations)
    layout.check()
    return layout


def find(memory: Replica, arrays: Arrays) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the places of the arrays that can be tensors where they are, and of the others why they cannot."""
    views = zip(memory.allocations, memory.allocation_views, strict=True)
    places = [(view.pointer, view.nbytes, number) for number, view in views]
    specs: dict[str, TensorSpec] = {}
    elsewhere: dict[str, str] = {}
    for name, array in arrays.items():
        spec = _placed(name, array, places)
        if isinstance(spec, str):
            elsewhere[name] = spec
        else:
            specs[name] = spec
    return specs, elsewhere


def _placed(name: str, array: HostArray | DeviceArray, places: list[tuple[int, int, int]]) -> TensorSpec | str:
    if array.dtype not in BITS:
        return f"is of type {array.dtype}, which pools lack"
    if 0 in array.shape:
        return TensorSpec(name, array.dtype, array.shape, 0, 0)
    pointer = array.pointer
    if pointer is None:
        return "has gaps, or another order than C's"
    for start, nbytes, number in places:
        offset = pointer - start
        if not 0 <= offset < nbytes:
            continue
        spec = TensorSpec(name, array.dtype, array.shape, number, offset)
        if offset + spec.nbytes > nbytes:
            return f"ends {offset + spec.nbytes - nbytes} bytes behind allocation {number}"
        if offset % ALIGNMENT:
            return f"begins at byte {offset} of allocation {number}, no multiple of {ALIGNMENT}"
        return spec
    return "lies in other memory"
