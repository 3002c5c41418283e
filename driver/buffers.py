"""The address of the bytes in any Python object that has a buffer, read-only ones too."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _View(ctypes.Structure):
    """``Py_buffer`` of the stable ABI (PEP 688 and C API, "Buffer Structure")."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0
_WRITABLE = 1
_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_View),)
_release.restype = None


@contextmanager
def address(buffer: ReadableBuffer, *, writable: bool = False) -> Iterator[tuple[int, int]]:
    """Hold ``buffer`` still and yield its address and its length in bytes; nothing is copied.

    Raises:
        BufferError: it is not contiguous, or read-only where ``writable`` is asked for. Some objects,
            numpy's arrays among them, raise ValueError instead.
        TypeError: it has no buffer.
    """
    view = _View()
    _get(buffer, ctypes.byref(view), _WRITABLE if writable else _SIMPLE)
    try:
        yield view.buf or 0, view.len
    finally:
        _release(ctypes.byref(view))
