"""Bytes for driver calls: the addresses of Python buffers, handles and their structs, and sizes in units.

Also :func:`keep_first`, which makes objects on first use without a lock, here and for callers of this package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

K = TypeVar("K")
V = TypeVar("V")


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not less than ``nbytes``."""
    return -(-nbytes // unit) * unit


HANDLE_BYTES = 64  #: Bytes of a handle: legacy, of memory or an event (``CU_IPC_HANDLE_SIZE``), or fabric.


def handle_bytes(handle: Any) -> bytes:
    """Return the bytes of a handle, a struct of the bindings."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_of(struct: Any, data: bytes, what: str) -> Any:
    """Return a struct of the bindings with the bytes of a handle; raises ValueError if they are too many or few."""
    if len(data) != HANDLE_BYTES:
        raise ValueError(f"{what} of {len(data)} bytes; it has {HANDLE_BYTES}")
    ctypes.memmove(struct.getPtr(), data, HANDLE_BYTES)
    return struct


def keep_first(table: dict[K, V], key: K, make: Callable[[], V], discard: Callable[[V], None]) -> V:
    """Return ``table[key]``, made on first use, without a lock.

    A signal handler or a finalizer may run while this thread is making the object, and ask for the same one. A lock
    would then wait for its own thread forever. So several callers may make the object; the first result stays.

    Args:
        table: the objects; keys are hashed and compared in C, so that no Python code runs in between.
        key: of the object.
        make: makes the object.
        discard: undoes ``make``, for a result that came later.
    """
    kept = table.get(key)
    if kept is None:
        made = make()
        kept = table.setdefault(key, made)
        if kept is not made:
            discard(made)
    return kept


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def differ(one: int | ctypes.Array[Any], other: int | ctypes.Array[Any], nbytes: int) -> bool:
    """Whether host memory at two addresses, or of two buffers, differs."""
    return bool(_memcmp(one, other, nbytes))


class _PyBuffer(ctypes.Structure):
    """``Py_buffer`` of the stable ABI (C API, "Buffer Structure")."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    )


_SIMPLE, _WRITABLE = 0, 1  # PyBUF_*
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


@contextmanager
def address(buffer: ReadableBuffer, *, writable: bool = False) -> Iterator[tuple[int, int]]:
    """Pin ``buffer`` and yield its address and its length in bytes; works for read-only objects, and copies nothing.

    Raises:
        BufferError: it is not contiguous, or read-only where ``writable`` is asked for. Some objects, such as numpy's
            arrays, raise ValueError instead.
        TypeError: it has no buffer.
    """
    view = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(view), _WRITABLE if writable else _SIMPLE)
    try:
        yield view.buf or 0, view.len
    finally:
        _release_buffer(ctypes.byref(view))
