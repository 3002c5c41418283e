"""The protocol between broker and clients: messages, wire format, layouts, errors, names and limits.

Every folder may import it. It imports nothing of ours, no sockets, no event loop and no CUDA.
"""

from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.layout import Layout, TensorSpec

__all__ = ["CubrokerError", "Layout", "TensorSpec"]
