"""What a worker imports: the broker, pools and their tensors.

The bridges to frameworks have modules of their own (``cubroker.client.torch``, ``cubroker.client.transformers``),
and so have the loader and the check of pools against files (``cubroker.client.loader``, ``cubroker.client.verify``).
"""

from cubroker.client.broker import Broker
from cubroker.client.draft import Draft
from cubroker.client.events import SharedEvent
from cubroker.client.pool import Pool
from cubroker.client.replica import Replica
from cubroker.client.tensor import SharedTensor
from cubroker.client.watch import Watch

__all__ = ["Broker", "Draft", "Pool", "Replica", "SharedEvent", "SharedTensor", "Watch"]
