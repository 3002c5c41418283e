"""Arrays of any library as sources of tensors: their type, their shape, and where their elements are.

Libraries do not agree on one protocol. Buffers and DLPack as numpy reads it have no type for bfloat16 and float8, and
torch exports float8 over DLPack only in its newer versions. So numpy's arrays and torch's tensors are taken as they
are; every other source is asked by the first protocol that it has. Torch is imported only if an array is torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec

from cubroker.client import dlpack
from cubroker.driver import Context
from cubroker.protocol import dtypes
from cubroker.protocol.dtypes import NAMES, carrier
from cubroker.protocol.errors import Invalid

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

ContextOf = Callable[[int], Context]
"""Returns this process's context on the GPU with an ordinal; raises ``Invalid`` or ``NotFound`` if it has none."""


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array in host memory."""

    #: its element type, by its safetensors name; for a type that pools do not have, its library's name
    dtype: str
    #: its dimensions, in elements
    shape: tuple[int, ...]
    #: its elements as an array of integers, which may have gaps; bytes for types that are packed
    bits: NDArray[Any]

    @property
    def place(self) -> Hashable:
        """Where the elements are: the same for two names of one tensor."""
        return self.bits.__array_interface__["data"][0], self.bits.strides

    @property
    def pointer(self) -> int | None:
        """Where the elements begin; None if they have gaps, or another order than C's."""
        found: int = self.bits.__array_interface__["data"][0]
        return found if self.bits.flags.c_contiguous else None

    def contiguous(self) -> memoryview:
        """Return ``bits`` without gaps, in the order of C; a copy if they have gaps or another order."""
        import numpy as np

        return np.ascontiguousarray(self.bits).data


class DeviceArray(msgspec.Struct, frozen=True):
    """An array in the memory of a device. A struct, since a model has many: a dataclass takes three times as long."""

    #: its element type, as that of a :class:`HostArray`
    dtype: str
    #: its dimensions, in elements
    shape: tuple[int, ...]
    #: this process's context on the device that has made it
    context: Context
    #: where the elements are: the same for two names of one tensor
    place: Hashable
    #: returns the address of the elements, without gaps and in the order of C, and what keeps them there
    contiguous: Callable[[], tuple[int, object]]
    #: whether ``contiguous`` makes a copy, which work of the device is
    copies: bool = False
    #: whether it is memory that the broker lends, which is mapped for the context's device alone
    lent: bool = False

    @property
    def pointer(self) -> int | None:
        """Where the elements begin; None if they have gaps, or another order than C's."""
        return None if self.copies else self.contiguous()[0]


def source_of(array: Any, context_of: ContextOf) -> HostArray | DeviceArray:
    """Describe an array. Work that makes its elements may still run; it is of this thread's current stream, or before.

    Raises:
        Invalid: it has no dtype, lies in another memory, or its library refuses to hand it over.
    """
    try:
        if _is_torch(array):
            return _from_torch(array, context_of)
        if _is_dlpack_alone(array) or _is_on_gpu(array):
            return _from_dlpack(array, context_of)
        found = _as_numpy(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(array, error) from error
    return _host(found)


def _host(found: NDArray[Any]) -> HostArray:
    name = found.dtype.name
    if name not in NAMES or found.dtype.byteorder == ">":
        return HostArray(str(found.dtype), found.shape, found)
    return HostArray(NAMES[name], found.shape, found.view(carrier(NAMES[name])))


# -- torch ---------------------------------------------------------------------------------------------


@cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtype of every dtype that the installed torch has."""
    import torch

    return {dtype: getattr(torch, name) for name, dtype in NAMES.items() if hasattr(torch, name)}


@cache
def torch_names() -> dict[torch.dtype, str]:
    """Return the same the other way round."""
    return {known: dtype for dtype, known in torch_dtypes().items()}


def _is_torch(array: object) -> bool:
    torch = sys.modules.get("torch")  # else nothing is torch's
    return isinstance(array, getattr(torch, "Tensor", ()))


def _from_torch(tensor: torch.Tensor, context_of: ContextOf) -> HostArray | DeviceArray:
    """Describe a tensor that is dense, and has memory."""
    import torch

    if tensor.is_nested:
        raise BufferError("it is nested")
    if tensor.is_quantized:
        raise BufferError("it is quantized")
    if tensor.layout is not torch.strided:
        raise BufferError(f"it is sparse ({tensor.layout})")
    if not (on_gpu := tensor.is_cuda) and not tensor.is_cpu:  # to ask `device.type` takes ten times as long
        raise BufferError(f"it is on {tensor.device}")
    dtype = torch_names().get(tensor.dtype) or str(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    pointer = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise BufferError("it has no memory of its own; pass the tensors that it is made of")
    if not on_gpu:
        plain = tensor.detach().resolve_conj().resolve_neg()
        if dtype not in dtypes.BITS:
            return HostArray(dtype, shape, plain.numpy())
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return HostArray(dtype, shape, plain.view(integers[tensor.dtype.itemsize]).numpy())
    lazy = tensor.is_conj(), tensor.is_neg()
    context = context_of(tensor.get_device())
    if tensor.is_contiguous() and not any(lazy):
        return DeviceArray(dtype, shape, context, pointer, lambda: (pointer, tensor))

    def contiguous() -> tuple[int, object]:
        made = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return made.data_ptr(), made

    return DeviceArray(dtype, shape, context, (pointer, tensor.stride(), lazy), contiguous, copies=True)


# -- DLPack --------------------------------------------------------------------------------------------


def _is_dlpack_alone(array: Any) -> bool:
    """Whether numpy can take an array by no other protocol; it lacks types that DLPack has."""
    others = ("__array__", "__array_interface__", "__buffer__")
    return hasattr(array, "__dlpack__") and not any(hasattr(array, each) for each in others)


def _is_on_gpu(array: Any) -> bool:
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in dlpack.ON_GPU


def _from_dlpack(array: Any, context_of: ContextOf) -> HostArray | DeviceArray:
    """Describe an array of a library that has DLPack.

    The library has a stream of ours wait for the work that makes the elements, as the array API's ``__dlpack__`` says.
    """
    kind, ordinal = map(int, array.__dlpack_device__())
    context = context_of(ordinal) if kind in dlpack.ON_GPU else None
    if context is None and kind not in dlpack.ON_HOST:
        raise BufferError(f"DLPack says that it is on a device of type {kind}")
    found = dlpack.borrow(array, context.copies().handle if context else None)
    if context is None:
        return HostArray(found.dtype, found.shape, found.bits())
    place = found.pointer, found.strides
    if found.contiguous:
        return DeviceArray(found.dtype, found.shape, context, place, lambda: (found.pointer, found))
    contiguous = partial(_packed, array, context, found)
    return DeviceArray(found.dtype, found.shape, context, place, contiguous, copies=True)


def _packed(array: Any, context: Context, borrowed: object) -> tuple[int, object]:
    """Have a library make an array without gaps, on its own device. What was ``borrowed`` is kept until then."""
    make = getattr(array, "contiguous", None)
    made = make() if make else array.copy(order="C")
    found = dlpack.borrow(made, context.copies().handle)
    return found.pointer, (found, made)


# -- numpy and buffers ---------------------------------------------------------------------------------


def _as_numpy(array: Any) -> NDArray[Any]:
    import numpy as np

    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array)
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        pass  # no buffer
    if hasattr(array, "__array__") or hasattr(array, "__array_interface__"):
        return np.asarray(array)
    raise TypeError("it has no dtype")


def _refusal(source: object, why: object) -> Invalid:
    return Invalid(
        f"a tensor cannot be filled from this {type(source).__name__}: {why}; pass an array in host memory, or in that"
        f" of a device of this broker"
    )
