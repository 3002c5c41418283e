"""The bridge to torch: the tensors of a pool as torch's, and models that are built in a draft's memory.

*Reading* (:func:`state_dict`). There is one DLPack import per allocation. Each tensor has a storage of its own, a slice
of its allocation's storage, since torch saves, pickles, copies and sends whole storages. The names of one tensor share
a storage, as those of tied parameters do. Slicing a storage and setting an empty tensor on the slice are two calls into
C; a DLPack import per tensor costs several times as much.

*Building* (:class:`MemPool`). Inside ``with pool.use():`` torch's caching allocator allocates its segments in a draft,
through two functions of ours. They are made by ctypes, live as long as the process, and serve all pools: :class:`Room`
tracks what is free in a draft. Torch calls them in the middle of an allocation, while it holds its own lock. So no
exception leaves them (errors are kept, and raised at the end of the block), signals wait until the call has returned,
and the garbage collector is off during the call, since it could free tensors. Torch frees a segment when no tensor is
left in it, maybe long after the seal; until then the segment keeps the memory mapped.

Building was tried with torch 2.11 (GPU) and 2.14 (the parts that need no GPU). It uses public functions of torch except
for ``torch._C._cuda_customAllocator``: ``CUDAPluggableAllocator``, the public class that calls this function, accepts
functions from a library file alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from cubroker.client.arrays import torch_dtypes
from cubroker.client.fork_guard import Closeable, NotPicklable
from cubroker.client.pool import Pool
from cubroker.protocol.errors import Invalid, OutOfMemory, Unsupported
from cubroker.protocol.layout import BITS, Layout, TensorSpec, round_up
from cubroker.protocol.layout import nbytes as size_of
from cubroker.protocol.messages import AUTO

if TYPE_CHECKING:
    from cubroker.client.broker import Broker
    from cubroker.client.draft import Draft

try:
    import torch
    from torch import nn
    from torch.utils.dlpack import from_dlpack

    DTYPES = torch_dtypes()
except ImportError as error:
    raise ImportError(f"cubroker.integrations.torch needs PyTorch ({error}): pip install 'cubroker[torch]'") from error

__all__ = ["MemPool", "OutOfRoom", "state_dict"]

SEGMENT = 2 << 20
"""Bytes. Torch asks for multiples of this."""

BLOCK = 512
"""Bytes. Torch gives a tensor a multiple of this."""

SMALL, MEDIUM = 1 << 20, 10 << 20
"""Bytes of the largest tensor that torch puts into a 2 MiB segment, and of the smallest that gets a segment alone."""

SHARED = 20 << 20
"""Bytes of a segment for tensors in between."""

AGAIN = 0.001
"""Seconds after which a signal that arrived in the middle of a call from torch is sent again."""

_AT_ONCE = [0] * 64
"""Sizes of the empty tensors that one split makes."""

MAX_NAMED = 8
"""How many allocations an error message names at most."""


# -- reading -------------------------------------------------------------------------------------------


def _refuse(*_: object) -> NoReturn:
    raise TypeError(
        "a tensor of a pool cannot be moved to memory that torch shares, nor be sent to another process; open a Broker"
        " there, and attach by name, or send tensor.clone()"
    )


_REFUSED = {"_share_fd_cpu_": _refuse, "_share_filename_cpu_": _refuse, "_share_cuda_": _refuse}
"""The methods that torch calls on a storage to share it with another process.

On the CPU torch copies the storage to memory that it can share and replaces it with the copy: the tensor, and every
parameter on it, would leave the pool unnoticed. Torch keeps a storage's Python object, and with it these attributes,
while the storage lives.
"""


def state_dict(pool: Pool) -> dict[str, torch.Tensor]:
    """Return every tensor of ``pool`` as a view of the shared memory, in the pool's order.

    Torch packs two elements of a four-bit dtype into one, so the last dimension is half as long. A tensor whose dtype
    torch lacks is returned as ``uint8``: with its own shape if an element is one byte, else one-dimensional.

    The tensors keep the memory mapped, and the lease with it, until the last of them is gone, even if ``pool`` is
    closed. Do not write to them: all processes see the same bytes. Each has a storage of exactly its bytes, so it can
    be saved, pickled and copied; moving it to another process raises ``TypeError``. Tensors whose names are tied in the
    pool share a storage.

    Raises:
        Invalid: the pool is closed.
    """
    slabs = {
        number: _Slab(from_dlpack(view)) for number, view in zip(pool.allocations, pool.allocation_views, strict=True)
    }
    state: dict[str, torch.Tensor] = {}
    for number, specs in groupby(pool.layout.tensors, attrgetter("allocation")):
        if number in slabs:  # else it is the shard of another device
            state.update(slabs[number].tensors(specs))
    return state


class _Slab:
    """One allocation as a torch tensor; it makes the pool's tensors by setting empty tensors on slices of its storage.

    Making an empty tensor costs nearly as much as all the rest. Splitting one into parts without elements makes many in
    one call. The unsafe split does not make them views, so each has its own version counter, as autograd needs it.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._storage = whole.untyped_storage()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._empty: dict[torch.dtype, list[torch.Tensor]] = {}

    def tensors(self, specs: Iterable[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of the allocation by name; those that begin at the same byte are on the same storage."""
        storages, form = self._storages, cache(_form)
        # The base class's method: UntypedStorage's asks for the device each time, which takes most of a slice's time.
        part = super(torch.UntypedStorage, self._storage).__getitem__
        for spec in specs:
            offset = spec.offset
            dtype, shape, nbytes = form(spec.dtype, spec.shape)
            if not nbytes:  # it shares nothing, and torch.save must not find it at its neighbour's address
                yield spec.name, self._whole.new_empty(shape, dtype=dtype)
                continue
            storage = storages.get(offset)
            if storage is None:
                storage = storages[offset] = part(slice(offset, offset + nbytes))  # type: ignore[no-untyped-call]
                storage.__dict__.update(_REFUSED)
            tensor = (self._empty.get(dtype) or self._more(dtype)).pop()
            tensor.set_(storage, 0, shape)  # type: ignore[call-overload]  # the strides may be left out
            yield spec.name, tensor

    def _more(self, dtype: torch.dtype) -> list[torch.Tensor]:
        empty = self._empty[dtype] = list(
            torch.unsafe_split_with_sizes(self._whole.new_empty(0, dtype=dtype), _AT_ONCE)
        )
        return empty


def _form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return a tensor's dtype and shape in torch, and its size in bytes."""
    nbytes = size_of(dtype, shape)
    if dtype == "F4" and dtype in DTYPES and shape and shape[-1] % 2 == 0:
        return DTYPES[dtype], (*shape[:-1], shape[-1] // 2), nbytes
    if BITS[dtype] % 8:
        return torch.uint8, (nbytes,), nbytes
    return DTYPES.get(dtype, torch.uint8), shape, nbytes


# -- building ------------------------------------------------------------------------------------------


class OutOfRoom(OutOfMemory, torch.cuda.OutOfMemoryError):
    """A :class:`MemPool` has no room for what torch asked for."""


# -- the room in a draft ---------------------------------------------------------------------------------


class Room:
    """A range of addresses from which pieces are allocated, first fit, and freed in any order.

    Args:
        start: the first address.
        nbytes: the size of the range.
        keeper: the object that keeps the memory mapped; dropped once the room is closed and no piece is taken.
    """

    def __init__(self, start: int, nbytes: int, keeper: object = None) -> None:
        self.nbytes = nbytes
        #: Bytes of the last request that was refused; 0 if none was.
        self.refused = 0
        #: The exception in a call from torch, to be raised at the end of the block.
        self.error: BaseException | None = None
        self._keeper = keeper
        self._free = [(start, nbytes)]  # by address; no two touch
        self._taken: dict[int, int] = {}
        self._closed = False

    @property
    def left(self) -> int:
        """Bytes that are free, in one piece or several."""
        return sum(nbytes for _, nbytes in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        return max((nbytes for _, nbytes in self._free), default=0)

    def take(self, nbytes: int) -> int | None:
        """Allocate a piece; return its address, a multiple of 512 bytes after the start, or None if none is free."""
        nbytes = round_up(max(nbytes, 1), BLOCK)
        assert not self._closed
        for index, (pointer, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[index : index + 1] = [(pointer + nbytes, size - nbytes)] * (size > nbytes)
                self._taken[pointer] = nbytes
                return pointer
        self.refused = nbytes
        return None

    def close(self) -> None:
        """Keep the memory mapped only as long as a piece is taken."""
        self._closed = True
        if not self._taken:
            self._keeper = None

    def give_back(self, pointer: int) -> None:
        """Free a piece; raises ``KeyError`` if it is not taken."""
        nbytes = self._taken.pop(pointer)
        index = bisect_left(self._free, (pointer, 0))
        if index < len(self._free) and self._free[index][0] == pointer + nbytes:
            nbytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == pointer:
            index -= 1
            pointer, before = self._free.pop(index)
            nbytes += before
        insort(self._free, (pointer, nbytes))
        if self._closed:
            self.close()


# -- what torch calls ------------------------------------------------------------------------------------

_TAKE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_GIVE_BACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class _Active(threading.local):
    """The room that this thread's segments come from."""

    room: Room | None = None


_active = _Active()

_segments: dict[int, Room] = {}
"""The room of every segment that torch has, by the segment's address; this reference keeps the room's memory mapped."""


def _take(nbytes: int, _device: int, _stream: int | None) -> int | None:
    """Allocate a segment for torch; None (a null pointer) if there is no room. Only threads in ``use()`` get here."""
    room = _active.room
    collects = gc.isenabled()
    try:
        gc.disable()
        pointer = room.take(nbytes) if room else None
        if room and pointer is not None:
            _segments[pointer] = room
    except BaseException as error:  # noqa: BLE001  # none may leave a call from C
        if room:
            room.error = error
        return None
    finally:
        if collects:
            gc.enable()
    return pointer


def _give_back(pointer: int | None, _nbytes: int, _device: int, _stream: int | None) -> None:
    """Free a segment that torch gives back, in any thread."""
    collects = gc.isenabled()
    try:
        gc.disable()
        room = _segments.pop(pointer or 0, None)
        if room and pointer:
            room.give_back(pointer)
    finally:
        if collects:
            gc.enable()


_calls = _TAKE(_take), _GIVE_BACK(_give_back)
_IN_CALLS = frozenset((_take.__code__, _give_back.__code__))


@cache
def _allocator() -> Any:
    """Return torch's allocator that calls the two functions; one for the process, since segments refer to it."""
    take, give_back = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in _calls)
    return torch._C._cuda_customAllocator(take, give_back)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Keep signal handlers, within a ``with`` block, from running in the middle of a call from torch.

    Python runs handlers in the main thread alone, so this does nothing in others. A handler can run before the first
    line of a function, where nothing can catch what it raises. A signal that arrives during such a call is sent again
    after :data:`AGAIN` seconds, since nothing reports the end of a call from C.
    """
    wrapped: dict[int, tuple[Any, Any]] = {}

    def wrap(handler: Any) -> Any:
        def handle(signum: int, frame: FrameType | None) -> None:
            caller = frame
            while caller and caller.f_code not in _IN_CALLS:
                caller = caller.f_back
            if caller:
                threading.Timer(AGAIN, os.kill, (os.getpid(), signum)).start()
            else:
                handler(signum, frame)

        return handle

    if threading.current_thread() is threading.main_thread():
        for number in map(int, signal.valid_signals()):
            if callable(handler := signal.getsignal(number)):
                wrapped[number] = handler, wrap(handler)
    try:
        for number, (_, ours) in wrapped.items():
            signal.signal(number, ours)
        yield
    finally:
        for number, (handler, ours) in wrapped.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, handler)


# -- the pool --------------------------------------------------------------------------------------------


class MemPool(Closeable, NotPicklable):
    """A draft in whose memory torch allocates on a GPU, to be published as a version without a copy.

    ::

        with MemPool(broker, "policy", MemPool.size_of(meta_model)) as pool:
            with pool.use():
                model = build()
            version = pool.seal(model)
            serve(model)  # on the same addresses, read-only; other processes attach

    Closing it without a seal discards the draft. The memory stays mapped, and the lease held, until torch has freed the
    last segment. If no tensor is left when this object is closed, torch does that then; if tensors outlive this object,
    at the next ``empty_cache()`` after they are gone.

    Args:
        broker: the session.
        name: the pool's.
        nbytes: the room, in bytes; see :meth:`size_of`. Unused room stays allocated with the version.
        device: the GPU, as torch names it; by default torch's current one.
        share: as for :meth:`Broker.create`; an ``ipc`` version stays writable here.
        wait: as for :meth:`Broker.create`.
        mode: as for :meth:`Broker.create`.
        durable: as for :meth:`Broker.create`.

    Attributes:
        pool: the draft; after the seal it is a :class:`Pool` of the version.

    Raises:
        Unsupported: the broker's devices are emulated in host memory, where torch has no hook; or ``share`` is
            ``multicast``.
        CubrokerError: as :meth:`Broker.create`.
    """

    def __init__(
        self,
        broker: Broker,
        name: str,
        nbytes: int,
        *,
        device: torch.device | int | str | None = None,
        share: str = AUTO,
        wait: float = 0.0,
        mode: int | None = None,
        durable: bool | None = None,
    ) -> None:
        _check_torch(broker, name)
        if nbytes <= 0:
            raise Invalid(f"a MemPool of {nbytes} bytes for {name!r}; it needs room, see MemPool.size_of(model)")
        index = torch.device("cuda" if device is None else device).index if not isinstance(device, int) else device
        self._device = torch.cuda.current_device() if index is None else index
        layout = Layout((), (round_up(nbytes, SEGMENT),))
        self.pool: Draft = broker.create(
            name, layout, devices=(self._device,), share=share, wait=wait, mode=mode, durable=durable
        )
        self._owner = self.pool._owner
        self._driver = broker.driver
        self._torch: torch.cuda.MemPool | None = None
        self._room = Room(0, 0)
        #: Threads that allocate here now.
        self._users: set[int] = set()
        try:
            (view,) = self.pool.allocation_views
            self._room = Room(view.pointer, view.nbytes, from_dlpack(view))
            with torch.cuda.device(self._device):
                self._torch = torch.cuda.MemPool(_allocator())
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<MemPool of {self.pool!r}, {self._room.left} of {self._room.nbytes} bytes free>"

    @property
    def left(self) -> int:
        """Bytes of the room that torch has not allocated as segments; torch divides each segment itself."""
        return self._room.left

    @contextmanager
    def use(self) -> Iterator[None]:
        """Have torch allocate this thread's memory on the device in the draft, within a ``with`` block.

        Torch does not use memory that it cached before the block, and reuses memory that is freed within it. Memory
        that libraries allocate for themselves is in the draft as well: build the model inside, and run it outside.

        Raises:
            OutOfRoom: torch ran out of room in the draft; the message says how much would be needed.
            Invalid: the pool is sealed or closed, or this thread uses one already.
        """
        if self._torch is None or self.pool.sealed or self.pool.closed:
            raise Invalid(f"{self.pool!r} takes no more tensors: it is sealed or closed; make another MemPool")
        if _active.room is not None:
            raise Invalid("a MemPool is in use in this thread already; leave its block first")
        self._warm_up()
        room, room.refused, room.error = self._room, 0, None
        _active.room = room
        self._users.add(threading.get_ident())
        try:
            with _signals_wait(), torch.cuda.use_mem_pool(self._torch, self._device):
                yield
        except torch.cuda.OutOfMemoryError as error:
            if not room.refused:
                raise
            raise OutOfRoom(self._shortage()) from error
        finally:
            _active.room = None
            self._users.discard(threading.get_ident())
            if room.error is not None:
                raise room.error

    def seal(self, source: nn.Module | Mapping[str, torch.Tensor], *, digest: bool = False, copy: bool = False) -> int:
        """Publish tensors that were made in :meth:`use`, without moving them; returns the version.

        The tensors stay as they are, and nothing may write to them any more: a kernel that does ends this process's
        CUDA context. The call waits for all work that was submitted to the device.

        Args:
            source: a model, or a mapping of names to tensors.
            digest: as for :meth:`Draft.seal`.
            copy: whether to copy tensors that cannot be published where they are (made outside, with gaps, or not at a
                multiple of 256 bytes) into the room that is left, and to set their ``data`` to the copies.

        Raises:
            Invalid: a tensor, which the message names, is not in the draft; or the draft has a live allocation that is
                not published, and nothing could write to that any more. The draft stays open.
            OutOfRoom: the room is too small for the copies.
            CubrokerError: as :meth:`Draft.seal`.
        """
        if self._torch is None:
            raise Invalid(f"{self.pool!r} is closed; make another MemPool")
        if self._users:
            raise Invalid(
                f"{self.pool!r} cannot be sealed inside of use(): torch would go on allocating there; leave it"
            )
        tensors = source.state_dict(keep_vars=True) if isinstance(source, nn.Module) else dict(source)
        if copy:
            self._copy(tensors)
        layout = self.pool.layout_of(tensors)
        others = list(source.buffers()) if isinstance(source, nn.Module) else []
        self._check_alone([*tensors.values(), *others])
        return self.pool.seal(layout=layout, digest=digest, in_place=True)

    def close(self) -> None:
        """Let torch free the memory as soon as no tensor is left in it; without a seal, discard the draft."""
        self._torch = None
        self._room.close()
        self.pool.close()

    @staticmethod
    def size_of(source: nn.Module | Mapping[str, torch.Tensor]) -> int:
        """Return how many bytes of room torch needs for these tensors alone, if they are made one after the other.

        They may be on the meta device. Buffers that are not persistent count. Add the room for temporary tensors: a
        tensor that is converted after it was made is there twice during the conversion.
        """
        tensors = [*source.parameters(), *source.buffers()] if isinstance(source, nn.Module) else [*source.values()]
        return segments(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _warm_up(self) -> None:
        """Have cuBLAS allocate its workspaces of this thread and stream, which torch keeps, outside of the draft."""
        with torch.no_grad():
            one = torch.zeros(16, 16, device=torch.device("cuda", self._device))
            torch.addmm(one[0], one, torch.mm(one, one))

    def _shortage(self) -> str:
        room = self._room
        pieces = "" if room.largest == room.left else f", {room.largest} of them in one piece"
        return (
            f"torch asked for {room.refused} bytes in the MemPool for {self.pool.name!r}, and of its {room.nbytes} are"
            f" {room.left} free{pieces}; make it with nbytes={room.nbytes + room.refused - room.largest} or more"
        )

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that cannot be published where they are into the draft; the copies become their ``data``."""
        from cubroker.client.draft import describe, find_in

        _, elsewhere = find_in(self.pool, describe(tensors, self._driver))
        device, done = torch.device("cuda", self._device), set[int]()
        with self.use(), torch.no_grad():
            for name in elsewhere:
                tensor = tensors[name]
                if id(tensor) not in done:
                    done.add(id(tensor))
                    made = torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)
                    tensor.data = made.copy_(tensor)

    def _check_alone(self, tensors: list[torch.Tensor]) -> None:
        """Raise ``Invalid`` if the pool has a live allocation that is not the storage of one of these tensors."""
        # A view keeps its base alive, even after a copy has replaced its data. Nothing else needs the base's memory.
        whole = [*tensors, *(tensor._base for tensor in tensors if tensor._base is not None)]
        known = {tensor.untyped_storage().data_ptr() for tensor in whole}
        strays = self._strays(known)
        if strays:
            gc.collect()
            strays = self._strays(known)
        if strays:
            named = ", ".join(f"{nbytes} bytes at {pointer:#x}" for pointer, nbytes in strays[:MAX_NAMED])
            raise Invalid(
                f"{self.pool!r} cannot be sealed: {len(strays)} allocations of torch in it belong to no tensor"
                f" that is published ({named}), and would become read-only; publish them, delete them, or make them"
                f" outside of use(), and call libraries such as cuBLAS once before use()"
            )

    def _strays(self, known: set[int]) -> list[tuple[int, int]]:
        """Return the address and the size in bytes of each allocation whose address is not in ``known``."""
        assert self._torch is not None
        found: list[tuple[int, int]] = []
        for segment in self._torch.snapshot():  # type: ignore[no-untyped-call]
            pointer = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and pointer not in known:
                    found.append((pointer, block["size"]))
                pointer += block["size"]
        return found


def _check_torch(broker: Broker, name: str) -> None:
    """Raise ``Unsupported`` if torch cannot allocate in a pool of this broker."""
    if broker.driver.host:
        raise Unsupported(
            f"a MemPool for {name!r} needs a GPU: torch lets no one else allocate its memory on the CPU, where the"
            f" broker's devices are emulated; put arrays into a draft's allocation_views, and seal it with"
            f" layout_of them"
        )
    if not hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool"):
        raise Unsupported(
            f"a MemPool for {name!r} needs a torch in which one thread can have a memory pool, later than"
            f" {torch.__version__}; upgrade it"
        )


def segments(sizes: Any) -> int:
    """Return the bytes of the segments that torch makes for tensors of these sizes, as its allocator divides them."""
    total = 0
    free: dict[bool, list[int]] = {False: [], True: []}  # by whether the segments are small; sorted
    for nbytes in sizes:
        if not nbytes:
            continue
        size = round_up(nbytes, BLOCK)
        small = size <= SMALL
        pieces = free[small]
        index = bisect_left(pieces, size)
        if index < len(pieces):
            whole = pieces.pop(index)
        else:
            whole = SEGMENT if small else SHARED if size < MEDIUM else round_up(size, SEGMENT)
            total += whole
        if whole - size >= BLOCK if small else whole - size > SMALL:
            insort(pieces, whole - size)
    return total
