"""One tensor of a pool, and the ways in which frameworks take it over without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from cubroker.client import devices, dlpack, sources
from cubroker.client.elements import ELEMENTS, carrier
from cubroker.client.mapping import Mapped, Place
from cubroker.client.processes import Unsendable
from cubroker.client.sources import Source
from cubroker.driver import Context, Device, DriverError
from cubroker.protocol import dtypes
from cubroker.protocol.errors import Invalid, Unsupported

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import DTypeLike, NDArray
    from typing_extensions import CapsuleType


class SharedTensor(Unsendable):
    """A tensor in memory that the broker owns, C-contiguous.

    Tensors of a published pool keep its memory mapped while they live, and are read-only unless it is ``writable``.
    Those of a draft may be written; they end with it, so that what is made from them (arrays, capsules) must be
    dropped before.

    Attributes:
        name: its name in the pool.
        dtype: its element type, by its safetensors name.
        shape: its dimensions, in elements.
    """

    __slots__ = ("_address", "_lent", "_mapped", "_place", "dtype", "name", "shape")

    def __init__(self, mapped: Mapped, place: Place, name: str, dtype: str, shape: tuple[int, ...], address: int):
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self._mapped = mapped
        self._place = place
        self._address = address
        self._lent: object = None

    def __repr__(self) -> str:
        return f"<SharedTensor {self.name!r} {self.dtype} {self.shape} of {self._mapped.label} on {self.device.uuid}>"

    @property
    def nbytes(self) -> int:
        """Bytes that its elements take."""
        return dtypes.nbytes(self.dtype, self.shape)

    @property
    def device(self) -> Device:
        """The device that uses it."""
        return self._place.context.device

    @property
    def memory_device(self) -> Device:
        """The device in whose memory it is: another than ``device`` if it is reached as a peer's."""
        return self._place.memory

    @property
    def context(self) -> Context:
        """This process's context on ``device``."""
        return self._place.context

    @property
    def readonly(self) -> bool:
        """Whether it may not be written here: it was published, and not in a writable pool. See ``protected``."""
        return self._mapped.readonly

    @property
    def protected(self) -> bool:
        """Whether the device refuses writes by this process. What is ``readonly`` alone can be written by mistake.

        That is so in ``ipc`` pools: frameworks that ignore ``readonly``, as torch does, change what all readers read.
        """
        return self._mapped.protected

    @property
    def pointer(self) -> int:
        """Its address on the device; on host devices an address of this process. See :meth:`hold` for a draft's.

        Raises:
            Invalid: the memory was given back.
        """
        self._mapped.check()
        return self._address

    @contextmanager
    def hold(self) -> Iterator[int]:
        """Keep the memory mapped within a ``with`` block, whoever closes the draft meanwhile; yields the address.

        Raises:
            Invalid: the memory was given back.
        """
        lent = self._mapped.lend(self.name, held=True)
        try:
            yield self._address
        finally:
            del lent  # a traceback may keep this frame for long

    def numpy(self) -> NDArray[Any]:
        """Return it as an array on the same memory; host devices only. Types that numpy lacks come from ml_dtypes.

        Raises:
            Unsupported: it is on a GPU, ml_dtypes is missing or broken, or its elements are packed (F4, F6).
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
        if not element.extension:
            raise Unsupported(f"numpy has no type for {self.dtype}, {self.name!r} has packed elements; use tobytes()")
        try:
            import ml_dtypes
        except ImportError as error:
            raise Unsupported(
                f"numpy has no type for {self.dtype}, that of {self.name!r}, and ml_dtypes, which has one, cannot be"
                f" imported ({error}); install ml_dtypes, or use tobytes()"
            ) from error
        return self._array(carrier(self.dtype), self.shape).view(getattr(ml_dtypes, element.extension))

    def tobytes(self) -> bytes:
        """Return a copy of its elements' bytes.

        Raises:
            DeviceFailure: the driver could not copy them.
            Invalid: the memory was given back.
        """
        try:
            with self.hold() as address:
                return self._place.context.read(address, self.nbytes)
        except DriverError as error:
            raise devices.failure(error, f"reading tensor {self.name!r}") from error

    def copy_from(self, source: object) -> None:
        """Fill it with the elements of an array of its own dtype and shape; in drafts and writable pools only.

        Args:
            source: a numpy array (of ml_dtypes' types, too), a torch tensor, another :class:`SharedTensor`, a buffer
                that says what its elements are (``memoryview``, ``array.array``), or an array of any library that has
                ``__array__`` or ``__dlpack__``; in host memory, or a :class:`SharedTensor` anywhere. Any strides: a
                source with gaps is copied together in host memory first. ``bytes`` are elements of U8; see
                :meth:`copy_from_bytes` for those of other types.

        Raises:
            Invalid: it is read-only, the source has another dtype or shape, or none, or is in a GPU's memory, or the
                memory was given back.
            DeviceFailure: the driver could not copy.
        """
        self._check_writable()
        given = source._source() if isinstance(source, SharedTensor) else sources.describe(source)
        if (given.dtype, given.shape) != (self.dtype, self.shape):
            raise Invalid(
                f"tensor {self.name!r} of {self._mapped.label} is {self.dtype} {self.shape}, and the"
                f" {type(source).__name__} to fill it from is {given.dtype} {given.shape}; convert or reshape that,"
                f" or store its bytes as they are with copy_from_bytes"
            )
        self._fill(given.contiguous())

    def copy_from_bytes(self, buffer: ReadableBuffer) -> None:
        """Fill it with raw bytes, whatever type their buffer says they have; in drafts and writable pools only.

        Args:
            buffer: a C-contiguous buffer of exactly ``nbytes`` bytes, as the elements lie in memory.

        Raises:
            Invalid: it is read-only, the buffer has another size or gaps, or the memory was given back.
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
        """Return it as numpy's functions take it: :meth:`numpy`'s array, or a copy if one is asked for or needed.

        Raises:
            TypeError: as :meth:`numpy` raises ``Unsupported``: it is on a GPU, or numpy has no type for its elements.
            ValueError: ``copy`` is False, and ``dtype`` another than its own.
            Invalid: the memory was given back.
        """
        import numpy as np

        try:
            array = self.numpy()
        except Unsupported as error:
            raise TypeError(error.message) from error
        return np.array(array, dtype=dtype, copy=copy)

    def __bool__(self) -> NoReturn:
        """Raise ``TypeError``: frameworks' tensors have a truth only as their one element's, which this cannot read."""
        raise TypeError(
            f"tensor {self.name!r} is neither true nor false; compare it with None, or look at the elements of numpy()"
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's type and ordinal of the device; the ordinal is this process's."""
        return (dlpack.CPU, 0) if self._place.context.host else (dlpack.CUDA, self.device.index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Hand the tensor over, as the array API's ``__dlpack__`` describes.

        A consumer that knows DLPack 1.0 is told whether it may write. No stream has to wait: what a pool holds
        was complete before it was published. What is written to a writable pool later, its events tell.

        Raises:
            BufferError: a copy or another device was asked for, or an odd number of 4-bit elements in a row.
            Invalid: the memory was given back.
        """
        device = self.__dlpack_device__()
        if copy:
            raise BufferError(f"tensor {self.name!r} is shared, not copied; copy what you make of it")
        if dl_device not in (None, device):
            raise BufferError(f"tensor {self.name!r} is on device {device} and cannot be exported to {dl_device}")
        if device[0] == dlpack.CPU and stream is not None:
            raise BufferError(f"tensor {self.name!r} is in host memory, which has no stream {stream!r}")
        shape, pairs = self.shape, dlpack.lanes(self.dtype)
        if pairs > 1:
            if not shape or shape[-1] % pairs:
                raise BufferError(f"tensor {self.name!r} has rows of an odd number of 4-bit elements; use tobytes()")
            shape = (*shape[:-1], shape[-1] // pairs)
        versioned = max_version is not None and max_version >= (1, 0)
        array = self._array(carrier(self.dtype), shape, writable=True)
        return dlpack.export(array, self.dtype, device, readonly=self.readonly, versioned=versioned)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Version 3 of Numba's interface; only on a GPU, and only for types that numpy has."""
        typestr = ELEMENTS[self.dtype].typestr
        if self._place.context.host or typestr is None:
            raise AttributeError(f"tensor {self.name!r} ({self.dtype} on {self.device.name}) has none; use DLPack")
        if self._lent is None:
            self._lent = self._mapped.lend(self.name)  # whoever uses the address keeps this object, says the interface
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
            raise Invalid(f"tensor {self.name!r} of {self._mapped.label} was published; create a new version instead")

    def _source(self) -> Source:
        """Describe it as what another tensor is filled from; on a GPU its bytes come through host memory."""
        import numpy as np

        return Source(self.dtype, self.shape, np.frombuffer(self.tobytes(), np.uint8))

    def _fill(self, data: ReadableBuffer) -> None:
        try:
            with self.hold() as address:
                self._place.context.write(address, data)
        except DriverError as error:
            raise devices.failure(error, f"filling tensor {self.name!r}") from error

    def _array(self, typestr: str, shape: tuple[int, ...], *, writable: bool = False) -> NDArray[Any]:
        """Make an array of any type on this memory, which stays mapped for as long as the array's base lives."""
        import numpy as np

        lent = self._mapped.lend(self.name)
        lent.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": typestr,
            "data": (self._address, self.readonly and not writable),
        }
        return np.asarray(lent)
