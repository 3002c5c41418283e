"""What a tensor may be filled from: arrays of any library, by their dtype, shape and bits.

Libraries do not agree on one protocol. Buffers and DLPack as numpy reads it have no type for bfloat16 and float8, and
torch exports float8 over DLPack only in its newer versions. So numpy's arrays and torch's tensors are taken as they
are; everything else becomes one of numpy's arrays by the first protocol that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cubroker.client.elements import ELEMENTS, carrier
from cubroker.protocol.errors import Invalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAMES = {known: name for name, element in ELEMENTS.items() for known in (element.typestr, element.extension) if known}
"""The name of each dtype, by its typestr or by ml_dtypes' name of it."""


class Source(NamedTuple):
    """An array in host memory.

    Attributes:
        dtype: its element type, by its safetensors name; for a type that pools do not have, numpy's name.
        shape: its dimensions, in elements.
        bits: its elements as an array of integers, which may have gaps; bytes for types that are packed.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: NDArray[Any]

    def contiguous(self) -> memoryview:
        """Return ``bits`` without gaps, in the order of C; a copy if they are not so already."""
        import numpy as np

        return np.ascontiguousarray(self.bits).data


def describe(source: Any) -> Source:
    """Return the dtype, the shape and the elements of an array in host memory, of whatever library.

    Raises:
        Invalid: it has no dtype, is elsewhere, or its library refuses to hand it over.
    """
    if any((base.__module__, base.__name__) == ("torch", "Tensor") for base in type(source).__mro__):
        from cubroker.client import torch_dtypes

        try:
            return Source(*torch_dtypes.elements(source))
        except (BufferError, RuntimeError, TypeError) as error:
            raise _refuse(source, error) from error
    array = _as_numpy(source)
    name = _NAMES.get(array.dtype.str) or _NAMES.get(array.dtype.name)
    if name is None:
        return Source(str(array.dtype), array.shape, array)
    return Source(name, array.shape, array.view(carrier(name)))


def _refuse(source: object, why: object) -> Invalid:
    """Return the error for what cannot be taken as an array in host memory."""
    return Invalid(
        f"a tensor cannot be filled from this {type(source).__name__}: {why}; pass an array in host memory, or write"
        f" through torch.from_dlpack(tensor), which takes those of a GPU"
    )


def _as_numpy(source: Any) -> NDArray[Any]:
    import numpy as np

    if isinstance(source, np.ndarray | np.generic):
        return np.asarray(source)
    try:
        return np.asarray(memoryview(source))
    except TypeError:
        pass  # no buffer
    try:
        if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
            return np.asarray(source)
        if hasattr(source, "__dlpack__"):
            return np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _refuse(source, error) from error
    raise _refuse(source, "it has no dtype")
