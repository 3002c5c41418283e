"""What broker and clients say to each other: messages, wire format, layouts, errors. No sockets, no CUDA."""

from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.layout import Layout, TensorSpec

__all__ = ["CubrokerError", "Layout", "TensorSpec"]
