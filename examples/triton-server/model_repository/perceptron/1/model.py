"""A model of Triton's Python backend whose instances, a process each, compute on one copy of the weights, in a pool.

The server's Python needs cubroker and torch, and its environment needs $CUBROKER_DIR. Tensors are passed by DLPack,
since the backend (2.51) does not work with numpy 2.
"""

import json

import torch
import triton_python_backend_utils as backend
from torch.nn.functional import linear
from torch.utils.dlpack import from_dlpack

from cubroker import Broker
from cubroker.integrations.torch import state_dict


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Attach to the pool that the configuration names."""
        name = json.loads(args["model_config"])["parameters"]["pool"]["string_value"]
        device = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        with Broker() as broker, broker.attach(name, device=device, wait=60) as pool:
            self.weights = state_dict(pool)  # the tensors keep the memory and the lease

    def execute(self, requests: list) -> list:
        """Answer requests."""
        return [backend.InferenceResponse(output_tensors=[self.answer(request)]) for request in requests]

    @torch.inference_mode()
    def answer(self, request: object) -> object:
        """Return the response to one request."""
        x = from_dlpack(backend.get_input_tensor_by_name(request, "X").to_dlpack())
        hidden = linear(x.to(self.weights["up"].device), self.weights["up"]).relu()
        return backend.Tensor.from_dlpack("Y", linear(hidden, self.weights["down"]))

    def finalize(self) -> None:
        """Drop the weights, and with them the lease."""
        del self.weights
