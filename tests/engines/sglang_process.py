"""One real SGLang engine for tests: ``python -m tests.engines.sglang_process``.

Reads jobs, one JSON document a line, and writes what came of each. The first has the engine's arguments.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "log_level": "info",
}
PROMPTS = ([1, 2, 3, 4], list(range(7, 60)))


def said(engine: Any) -> list[Any]:
    """What an engine says to the prompts: tokens, and the logprob of each, exactly."""
    terms = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answers = engine.generate(input_ids=list(PROMPTS), sampling_params=terms, return_logprob=True)
    return [
        [answer["output_ids"], [each[0].hex() for each in answer["meta_info"]["output_token_logprobs"]]]
        for answer in answers
    ]


def run(engine: Any, job: dict[str, Any]) -> Any:
    if "update" in job:
        return engine.update_weights_from_disk(job["update"])[:2]
    if "tensor" in job:
        import torch

        engine.begin_weight_update()
        answer = engine.update_weights_from_tensor([(job["tensor"], torch.zeros(job["shape"], dtype=torch.bfloat16))])
        engine.end_weight_update()
        return answer[:2]
    return said(engine)


def main() -> None:
    """Serve jobs until the end of the input."""
    os.environ.update(ENVIRONMENT)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is not an answer
    import sglang

    engine = sglang.Engine(**ARGUMENTS, **json.loads(sys.stdin.readline()))
    print(json.dumps("started"), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line))), file=replies, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
