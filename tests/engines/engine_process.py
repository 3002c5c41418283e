"""Real vLLM engines for tests: one process imports vLLM once, and has a child for each engine.

Reads jobs, one JSON document a line, and writes what came of each. ``python -m tests.engines.engine_process``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PROMPTS = ({"prompt_token_ids": [1, 2, 3, 4]}, {"prompt_token_ids": list(range(7, 60))})


def generated(llm: Any) -> list[list[Any]]:
    """What an engine says to the prompts: tokens, and the logprob of each, exactly."""
    from vllm import SamplingParams

    terms = SamplingParams(max_tokens=12, temperature=0, detokenize=False, logprobs=1)
    answers = llm.generate(list(PROMPTS), terms, use_tqdm=False)
    return [
        [list(out.token_ids), [next(iter(each.values())).logprob.hex() for each in out.logprobs]]
        for out in (answer.outputs[0] for answer in answers)
    ]


def placed(worker: Any) -> dict[str, Any]:
    """How many bytes of parameters lie in memory of the broker's, how many of these can be written, and of how many."""
    inside = writable = total = 0
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    regions = [(*(int(part, 16) for part in line[0].split("-")), line[1], line[-1]) for line in lines]
    for parameter in {id(each): each for each in worker.get_model().parameters()}.values():
        total += parameter.nbytes
        for first, last, mode, name in regions:
            if parameter.nbytes and first <= parameter.data_ptr() < last and "memfd" in name:
                inside += parameter.nbytes
                writable += parameter.nbytes * ("w" in mode)
    return {"inside": inside, "writable": writable, "total": total}


def described(worker: Any) -> dict[str, Any]:
    """All that a compiler may see of a model's tensors, in the order of their names."""
    from cubroker.integrations.runtime_pools import _found

    return {
        each.name: {
            "kind": [each.kind, each.persistent],
            "type": f"{type(each.tensor).__module__}.{type(each.tensor).__qualname__}",
            "dtype": str(each.tensor.dtype),
            "shape": list(each.tensor.shape),
            "strides": list(each.tensor.stride()),
            "offset": each.tensor.storage_offset(),
            "aligned": min(256, each.tensor.data_ptr() & -each.tensor.data_ptr()),
            "attributes": sorted(vars(each.tensor)) if each.kind == "parameter" else [],
            "requires_grad": each.tensor.requires_grad,
        }
        for each in _found(worker.get_model())
    }


def publish_changed(worker: Any) -> int:
    """Publish another version of the model's pool, with other numbers: as a trainer does."""
    import torch

    from cubroker.integrations import runtime_pools
    from cubroker.integrations.vllm import held

    model = worker.get_model()
    broker, pool = held(model)
    changed = {name: parameter.data for name, parameter in model.named_parameters() if "embed_tokens" in name}
    for name, data in changed.items():
        model.get_parameter(name).data = data.flip(0).contiguous()
    like, device = runtime_pools.read_manifest(pool), pool.devices[0].uuid
    version = runtime_pools.publish(broker, pool.name, model, like=like, device=device, share=pool.share)
    for name, data in changed.items():
        model.get_parameter(name).data = data
    assert all(torch.equal(model.get_parameter(name), data) for name, data in changed.items())
    return version


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, do what the job says, and return what came of it."""
    from vllm import LLM

    if "preload" in job:
        from cubroker.cli.main import run as command

        with redirect_stdout(StringIO()) as printed:
            status = command(["vllm", "preload", job["model"], *job["preload"]])
        return {"status": status, "printed": printed.getvalue()}
    if job["format"] == "auto":  # compute as engines on pools do: not on packed copies of the weights
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
    began = time.perf_counter()
    llm = LLM(
        model=job["model"],
        load_format=job["format"],
        model_loader_extra_config=job.get("extra", {}),
        skip_tokenizer_init=True,
        enforce_eager=not job.get("graphs", False),
        max_model_len=128,
        dtype="bfloat16",
        max_num_seqs=4,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        gpu_memory_utilization=job.get("utilization", 0.3),
    )
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {"seconds": seconds, "said": generated(llm), "placed": llm.collective_rpc(placed)[0]}
    if job.get("facts"):
        found["tensors"] = llm.collective_rpc(described)[0]
    if job.get("switch"):
        from cubroker.integrations.vllm import switch

        found["published"] = llm.collective_rpc(publish_changed)[0]
        found["still"] = generated(llm)
        found["version"] = llm.collective_rpc(switch)[0]
        found["after"] = generated(llm)
    return found


def main() -> None:
    """Serve jobs until the end of the input."""
    os.environ.update(ENVIRONMENT)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is not an answer
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401

    for line in sys.stdin:
        if not os.fork():
            code = 1
            try:
                reply = run(json.loads(line))
                code = 0
            except BaseException as error:  # noqa: BLE001
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(reply), file=replies, flush=True)
            os._exit(code)
        os.wait()


if __name__ == "__main__":
    main()
