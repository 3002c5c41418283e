"""What stands in for real hardware where multicast is tested: on the real thing no such test ever runs."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

SETTINGS = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "CUBROKER_MULTICAST")
YES = {"CUBROKER_MULTICAST": "1"}


class StandIn:
    """Real hardware as far as anybody can tell. It only writes down what was looked up and called."""

    def __init__(self) -> None:
        self.touched: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(cuda, name)  # structs and enums, and none of the rest
        self.touched.append(name)

        def answer(*args: Any) -> tuple[Any, int]:
            self.touched.append(f"{name}()")
            return cuda.CUresult.CUDA_SUCCESS, 7

        return answer
