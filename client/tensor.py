"""One tensor of a pool, and the protocols by which frameworks import it without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from cubroker.client.arrays import (
    DLPACK_CPU,
    DLPACK_CUDA,
    Array,
    ContextOf,
    DeviceArray,
    HostArray,
    export_capsule,
    lanes,
    source_of,
    torch_carrier,
)
from cubroker.client.devices import doing
from cubroker.client.fork_guard import NotPicklable
from cubroker.client.memory.mapping import DeviceMapping, LeasedMemory
from cubroker.driver import Context, Device
from cubroker.driver.device_names import label
from cubroker.protocol.errors import Invalid, Unsupported, needing
from cubroker.protocol.layout import BITS, ELEMENTS, LIBRARY_NAMES, TO_LITTLE_ENDIAN, carrier, nbytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import CapsuleType


class SharedTensor(NotPicklable):
    """A tensor in memory that the broker owns, C-contiguous.

    Tensors of a published pool keep its memory mapped while they live, and are read-only unless the pool is
    ``writable``. Tensors of a draft may be written. They end with it: drop arrays and capsules made from them before.
    """

    __slots__ = ("_address", "_dtype", "_lent", "_mapped", "_name", "_place", "_shape")

    def __init__(
        self, mapped: LeasedMemory, place: DeviceMapping, name: str, dtype: str, shape: tuple[int, ...], address: int
    ):
        self._name = name
        self._dtype = dtype
        self._shape = shape
        self._mapped = mapped
        self._place = place
        self._address = address
        self._lent: object = None

    def __repr__(self) -> str:
        return f"<SharedTensor {self.name!r} {self.dtype} {self.shape} of {self._mapped.label} on {label(self.device)}>"

    @property
    def name(self) -> str:
        """Its name in the pool."""
        return self._name

    @property
    def dtype(self) -> str:
        """Its element type, by its safetensors name."""
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, in elements."""
        return self._shape

    @property
    def nbytes(self) -> int:
        """Bytes that its elements take."""
        return nbytes(self.dtype, self.shape)

    @property
    def device(self) -> Device:
        """The device that uses the tensor."""
        return self._place.context.device

    @property
    def memory_device(self) -> Device:
        """The device in whose memory the tensor is: not ``device`` if that reaches it over peer access."""
        return self._place.memory

    @property
    def context(self) -> Context:
        """This process's context on ``device``."""
        return self._place.context

    @property
    def readonly(self) -> bool:
        """Whether this process may not write it: it was published, and its pool is not writable. See ``protected``."""
        return self._mapped.readonly

    @property
    def protected(self) -> bool:
        """Whether the device refuses writes by this process; if not, a ``readonly`` tensor can be overwritten.

        Tensors of ``ipc`` pools are not protected: frameworks that ignore ``readonly``, such as torch, can change the
        bytes that all readers see.
        """
        return self._mapped.protected

    @property
    def pointer(self) -> int:
        """Its address on the device; on host devices an address of this process. For a draft use :meth:`hold`.

        Raises:
            Invalid: the memory was given back.
        """
        self._mapped.check()
        return self._address

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Keep the memory mapped within a ``with`` block, even if the draft is closed; yields the address.

        Raises:
            Invalid: the memory was given back.
        """
        lent = self._mapped.lend(self.name, held=True)
        try:
            yield self._address
        finally:
            del lent  # a traceback may keep this frame for long

    def numpy(self) -> NDArray[Any]:
        """Return an array on the same memory; host devices only. Types that numpy lacks come from ml_dtypes.

        Raises:
            Unsupported: the tensor is on a GPU, numpy or ml_dtypes is missing or broken, or its elements are packed
                (F4, F6).
            Invalid: the memory was given back.
        """
        if not self._place.context.host:
            raise Unsupported(
                f"{self.name!r} is on {self.device.name}, and numpy works in host memory; take"
                f" torch.from_dlpack(tensor), which torch copies to the host with .cpu(), or use tobytes()"
            )
        element = ELEMENTS[self.dtype]
        if element.typestr:
            return self._array(element.typestr, self.shape)
        if BITS[self.dtype] % 8:
            raise Unsupported(f"numpy has no type for {self.dtype}, {self.name!r} has packed elements; use tobytes()")
        try:
            import ml_dtypes
        except ImportError as error:
            raise Unsupported(
                f"numpy has no type for {self.dtype}, that of {self.name!r}, and ml_dtypes, which has one, cannot be"
                f" imported ({error}); install ml_dtypes, or use tobytes()"
            ) from error
        return self._array(carrier(self.dtype), self.shape).view(getattr(ml_dtypes, LIBRARY_NAMES[self.dtype]))

    def tobytes(self) -> bytes:
        """Return a copy of its elements' bytes.

        Raises:
            DeviceFailure: the driver could not copy them.
            Invalid: the memory was given back.
        """
        with doing(f"reading tensor {self.name!r}"), self.hold() as address:
            return self._place.context.read(address, self.nbytes)

    def copy_from(self, source: object) -> None:
        """Fill it with the elements of an array of its own dtype and shape; in drafts and writable pools only.

        Args:
            source: a numpy array (with the types of ml_dtypes, too), a torch tensor, another :class:`SharedTensor`, a
                typed buffer (``memoryview``, ``array.array``), or an array of any library that has ``__array__`` or
                ``__dlpack__``; in host memory, or in that of ``device``. It may have any strides: a source with gaps is
                first made contiguous where it is. This waits for all work that was submitted to the device before.
                ``bytes`` are elements of U8; store elements of other types with :meth:`copy_from_bytes`.

        Raises:
            Invalid: the tensor is read-only; the source has another dtype or shape, or none, or lies on another GPU; or
                the memory was given back.
            DeviceFailure: the driver could not copy.
        """
        self._check_writable()
        given = described(source, self._own_context)
        if (given.dtype, given.shape) != (self.dtype, self.shape):
            todo = "; convert or reshape that, or store its bytes as they are with copy_from_bytes"
            if given.dtype.startswith(">"):
                todo = f", big-endian; convert that with {TO_LITTLE_ENDIAN}"
            raise Invalid(
                f"tensor {self.name!r} of {self._mapped.label} is {self.dtype} {self.shape}, and the"
                f" {type(source).__name__} to fill it from is {given.dtype} {given.shape}{todo}"
            )
        if isinstance(given, HostArray):
            self._fill(given.contiguous())
        elif isinstance(source, SharedTensor) and given.context is not self.context:  # mapped for its own device alone
            self._fill(source.tobytes())
        elif self.nbytes:
            self._copy(given)

    def copy_from_bytes(self, buffer: ReadableBuffer) -> None:
        """Fill it with raw bytes, ignoring the type of their buffer; in drafts and writable pools only.

        Args:
            buffer: a C-contiguous buffer of exactly ``nbytes`` bytes: the elements as they lie in memory.

        Raises:
            Invalid: the tensor is read-only, the buffer has another size or gaps, or the memory was given back.
            DeviceFailure: the driver could not copy.
        """
        self._check_writable()
        try:
            view = memoryview(buffer)
        except (TypeError, ValueError) as error:
            raise Invalid(
                f"tensor {self.name!r} cannot take bytes of a {type(buffer).__name__}: {error}; use copy_from for"
                f" arrays, or pass their bytes, as `array.view(numpy.uint8)` gives them"
            ) from None
        if view.nbytes != self.nbytes or not view.c_contiguous:
            gaps = "" if view.c_contiguous else ", with gaps"
            raise Invalid(f"tensor {self.name!r} takes {self.nbytes} contiguous bytes; these are {view.nbytes}{gaps}")
        self._fill(view)

    def __array__(self, dtype: DTypeLike | None = None, *, copy: bool | None = None) -> NDArray[Any]:
        """Return the array of :meth:`numpy`, or a copy of it if one is requested or needed.

        Raises:
            TypeError: :meth:`numpy` raises ``Unsupported``: the tensor is on a GPU, or numpy lacks the type.
            ValueError: ``copy`` is False, and ``dtype`` needs one.
            Invalid: the memory was given back.
        """
        try:
            array = self.numpy()
        except Unsupported as error:
            raise TypeError(error.message) from error
        import numpy as np

        return np.array(array, dtype=dtype, copy=copy)

    def __bool__(self) -> NoReturn:
        """Raise ``TypeError``: the truth of a framework's tensor is that of its one element, which is not read here."""
        raise TypeError(
            f"tensor {self.name!r} is neither true nor false; compare it with None, or look at the elements of numpy()"
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's type and ordinal of the device; the ordinal is this process's."""
        return (DLPACK_CPU, 0) if self._place.context.host else (DLPACK_CUDA, self.device.index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Export the tensor, as the array API's ``__dlpack__`` describes.

        The capsule tells a consumer that knows DLPack 1.0 whether it may write. Without numpy, torch makes the capsule
        in the form before 1.0, which does not. No stream has to wait: the bytes of a pool were complete before it was
        published. Later writes to a writable pool are ordered by its events.

        Raises:
            BufferError: a copy or another device was requested, or a row has an odd number of 4-bit elements.
            Unsupported: neither numpy nor torch is available to make the capsule.
            Invalid: the memory was given back.
        """
        device = self.__dlpack_device__()
        if copy:
            raise BufferError(f"tensor {self.name!r} is shared, not copied; copy what you make of it")
        if dl_device not in (None, device):
            raise BufferError(f"tensor {self.name!r} is on device {device} and cannot be exported to {dl_device}")
        if device[0] == DLPACK_CPU and stream is not None:
            raise BufferError(f"tensor {self.name!r} is in host memory, which has no stream {stream!r}")
        shape, pairs = self.shape, lanes(self.dtype)
        if pairs > 1:
            if not shape or shape[-1] % pairs:
                raise BufferError(f"tensor {self.name!r} has rows of an odd number of 4-bit elements; use tobytes()")
            shape = (*shape[:-1], shape[-1] // pairs)
        versioned = max_version is not None and max_version >= (1, 0)
        try:
            array: Any = self._array(carrier(self.dtype), shape, writable=True)
        except Unsupported:  # without numpy
            lent = self._mapped.lend(self.name)
            if (array := torch_carrier(self._address, shape, self.dtype, lent)) is None:
                raise
        return export_capsule(array, self.dtype, device, readonly=self.readonly, versioned=versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3 of Numba's interface; only on a GPU, and only for types that numpy has."""
        typestr = ELEMENTS[self.dtype].typestr
        if self._place.context.host or typestr is None:
            raise AttributeError(
                f"tensor {self.name!r} ({self.dtype} on {self.device.name}) has no __cuda_array_interface__; use DLPack"
            )
        if self._lent is None:
            self._lent = self._mapped.lend(self.name)  # consumers of the interface keep this tensor alive
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": typestr,
            "data": (self._address if self.nbytes else 0, self.readonly),
            "strides": None,
            "stream": None,
        }

    def _check_writable(self) -> None:
        if self.readonly:
            label = f"tensor {self.name!r} of {self._mapped.label}"
            raise Invalid(
                f"{label} is read-only: it was published, or another writer fills it; create a new version instead"
            )

    def _own_context(self, index: int) -> Context:
        if self._place.context.host or self.device.index != index:
            raise Invalid(
                f"tensor {self.name!r} of {self._mapped.label} is used by {label(self.device)}, and"
                f" the array to fill it from is on GPU {index}; copy the array to that device, or to the host"
            )
        return self._place.context

    def _lend(self) -> tuple[int, object]:
        lent = self._mapped.lend(self.name, held=True)
        return self._address, lent

    def _copy(self, source: DeviceArray) -> None:
        with doing(f"filling tensor {self.name!r}"), self.hold() as address:
            if source.copies:
                source.context.synchronize()  # the copy is made in this thread's stream, which waits for no other
            pointer, lent = source.contiguous()
            self._place.context.copy(address, pointer, self.nbytes, after=source.context)
            del lent  # a traceback may keep this frame for long

    def _fill(self, data: ReadableBuffer) -> None:
        with doing(f"filling tensor {self.name!r}"), self.hold() as address:
            self._place.context.write(address, data)

    def _array(self, typestr: str, shape: tuple[int, ...], *, writable: bool = False) -> NDArray[Any]:
        """Return an array on this memory, which stays mapped while the array's base lives."""
        with needing(f"an array on tensor {self.name!r}", "cubroker[numpy]"):
            import numpy as np
        lent = self._mapped.lend(self.name)
        lent.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": typestr,
            "data": (self._address, self.readonly and not writable),
        }
        return np.asarray(lent)


def described(array: object, context_of: ContextOf) -> Array:
    """Describe an array of any library, or a tensor of a pool, as a source of another tensor.

    Raises:
        Invalid: as :func:`~.arrays.source_of`; or the memory of the pool's tensor was given back.
    """
    if not isinstance(array, SharedTensor):
        return source_of(array, context_of)
    return DeviceArray(array.dtype, array.shape, array.context, array.pointer, array._lend, lent=True)


def stored_from(source: object, tensor: SharedTensor, held: ExitStack) -> int:
    """Return the address from which a tensor's device stores a source to all its replicas.

    Args:
        source: as :meth:`Pool.broadcast` takes it.
        tensor: the tensor; a source in host memory is copied to it first.
        held: keeps a source that is a tensor mapped.
    """
    if isinstance(source, int):
        return source
    if not isinstance(source, SharedTensor):
        tensor.copy_from(source)
        return tensor.pointer
    given, wanted = ((each.dtype, each.shape, each.memory_device) for each in (source, tensor))
    if given != wanted:
        raise Invalid(
            f"tensor {tensor.name!r} of {tensor._mapped.label} takes {tensor.dtype} {tensor.shape} from the memory of"
            f" device {tensor.memory_device.index}, and {source!r} lies in that of device {source.memory_device.index};"
            f" broadcast a tensor that has all three, or the address of raw bytes"
        )
    return held.enter_context(source.hold())
