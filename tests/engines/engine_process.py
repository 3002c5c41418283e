"""Real vLLM engines for tests: one process imports vLLM once, and has a child for each engine.

Reads jobs, one JSON document a line, and writes what came of each. ``python -m tests.engines.engine_process``.

A job has a ``model``, a load ``format``, its ``extra`` config, ``engine``: other arguments of ``LLM``, ``copies``: how
many engines at once, and ``do``: names of functions below, each of which is called with the engine and the job. The
reply has what they returned, by name; that of a job with copies is a list.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled, as would fp8 by DeepGEMM
    "VLLM_USE_DEEP_GEMM": "0",
}
ON_GPU = os.environ.get("CUBROKER_ENGINE_DEVICES", "").startswith("cuda")
PROMPTS = ({"prompt_token_ids": [1, 2, 3, 4]}, {"prompt_token_ids": list(range(7, 60))})
PATIENCE = 600.0
"""Seconds that engines of one job wait for each other."""

Job = dict[str, Any]


# -- what an engine is told to do --------------------------------------------------------------------------


def said(llm: Any, job: Job) -> list[list[Any]]:
    """What an engine says to the prompts: tokens, and the logprob of each, exactly."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    terms = SamplingParams(max_tokens=12, temperature=0, detokenize=False, logprobs=1)
    adapter = LoRARequest("adapter", 1, job["adapter"]) if "adapter" in job else None
    answers = llm.generate(list(PROMPTS), terms, use_tqdm=False, lora_request=adapter)
    return [
        [list(out.token_ids), [next(iter(each.values())).logprob.hex() for each in out.logprobs]]
        for out in (answer.outputs[0] for answer in answers)
    ]


still = after = again = woken = said


def placed(llm: Any, job: Job) -> list[dict[str, Any]]:
    """Of each rank: as :func:`places`."""
    found: list[dict[str, Any]] = llm.collective_rpc(places)
    return found


asleep = placed


def tensors(llm: Any, job: Job) -> Any:
    """As :func:`described`, of the first rank."""
    return llm.collective_rpc(described)[0]


def published(llm: Any, job: Job) -> Any:
    """Publish another version of the first rank's pool; returns its number."""
    return llm.collective_rpc(publish_changed)[0]


def switched(llm: Any, job: Job) -> Any:
    """Go to the current version of the pools; returns its number for each rank."""
    from cubroker.integrations.vllm import switch

    return llm.collective_rpc(switch)


def transferred(llm: Any, job: Job) -> None:
    """Update the weights as vLLM's own interface has it, with the job's ``update`` for a message.

    Torch has another default device meanwhile, as vLLM 0.24 has it. That one is told no version, and takes the model's
    tensors away first, for a checkpoint.
    """
    import torch

    told = ["two"] if signature(llm.finish_weight_update).parameters else []
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    with torch.device("meta"):
        llm.update_weights({"update_info": job["update"]})
    llm.finish_weight_update(*told)


def trained(llm: Any, job: Job) -> None:
    """Be a trainer of another model, ``job["trained"]``, and send its weights by vLLM's own interface for trainers.

    Releases without one have the methods that it calls, of which two have other arguments.
    """
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import factory

    from cubroker.integrations.vllm_live import ModuleSource, PoolTrainer, PoolTrainerInit

    class Client:
        """What vLLM's trainer engines talk to, without a network."""

        start_weight_update = llm.start_weight_update
        finish_weight_update = llm.finish_weight_update

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            llm.init_weight_transfer_engine({"init_info": init_info})

        def update_weights(self, update_info: dict[str, Any]) -> None:
            llm.update_weights({"update_info": update_info})

    model = AutoModelForCausalLM.from_pretrained(job["trained"], dtype="bfloat16")
    init = PoolTrainerInit(pool="policy", directory=job["extra"]["directory"], rank=0)
    made = getattr(factory, "WeightTransferTrainerFactory", PoolTrainer).trainer_init
    trainer = made(init, client=Client(), source=ModuleSource(model))
    for _ in range(2):
        trainer.send_weights()
    trainer.shutdown()


def slept(llm: Any, job: Job) -> list[int]:
    """Have the worker's backend of sleep mode suspend it; returns the leases of each pool that there is.

    On a CPU, vLLM knows no ``enable_sleep_mode``, and its worker ignores ``llm.sleep``, so the backend is chosen and
    called here.
    """
    from cubroker.client import Broker
    from cubroker.integrations.vllm_live import sleep_by_pools

    def suspend(worker: Any) -> None:
        sleep_by_pools(worker.vllm_config.model_config)
        worker.sleep_mode_backend.suspend(job.get("level", 1))

    llm.collective_rpc(suspend)
    with Broker(job["extra"]["directory"]) as broker:
        return sorted(pool.leases for pool in broker.pools())


def resumed(llm: Any, job: Job) -> Any:
    """Wake the worker again; returns the version of its pool."""
    from cubroker.integrations.vllm import held

    def resume(worker: Any) -> int:
        worker.sleep_mode_backend.resume(["weights"])
        return held(worker.get_model()).pool.version

    return llm.collective_rpc(resume)[0]


def accounted(llm: Any, job: Job) -> Any:
    """Bytes that the loader tells vLLM lie outside of the engine, and those of its pool."""
    from vllm.model_executor.model_loader import get_model_loader

    from cubroker.integrations.vllm import held

    def ask(worker: Any) -> list[int]:
        loader = get_model_loader(worker.vllm_config.load_config)
        return [loader.get_external_weight_memory(worker.vllm_config), held(worker.get_model()).pool.nbytes]

    return llm.collective_rpc(ask)[0]


def modules(llm: Any, job: Job) -> int:
    """How many modules this process has, besides those that vLLM has hidden from the garbage collector."""
    import gc

    from torch import nn

    gc.collect()
    return sum(isinstance(each, nn.Module) for each in gc.get_objects())


left = modules


def waited(llm: Any, job: Job) -> None:
    """Open the job's named pipe, which waits for the test to open it, and read it to its end."""
    with open(job["pipe"]) as pipe:
        pipe.read()


def met(llm: Any, job: Job) -> None:
    """Wait for the other engines of the job to come this far."""
    job["barrier"].wait(PATIENCE)


# -- within a worker ---------------------------------------------------------------------------------------


def places(worker: Any) -> dict[str, Any]:
    """How many bytes of parameters lie in memory of the broker's, how many of these can be written, and of how many."""
    inside = writable = total = 0
    regions = pooled(worker) if ON_GPU else mapped()
    for parameter in {id(each): each for each in worker.get_model().parameters()}.values():
        total += parameter.nbytes
        for first, last, can_write in regions:
            if parameter.nbytes and first <= parameter.data_ptr() < last:
                inside += parameter.nbytes
                writable += parameter.nbytes * can_write
    return {"inside": inside, "writable": writable, "total": total}


def mapped() -> list[tuple[int, int, bool]]:
    """Memory of emulated devices in this process: its addresses, and whether it is mapped to be written."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    found = [(line[0].split("-"), "w" in line[1]) for line in lines if "memfd" in line[-1]]
    return [(int(first, 16), int(last, 16), can_write) for (first, last), can_write in found]


def pooled(worker: Any) -> list[tuple[int, int, bool]]:
    """Memory of the engine's pool on a GPU; only that of ``vmm`` is mapped read-only there."""
    from cubroker.integrations.vllm import held
    from cubroker.protocol.errors import Invalid

    try:
        pool = held(worker.get_model()).pool
    except Invalid:  # a plain engine
        return []
    return [(tensor.pointer, tensor.pointer + tensor.nbytes, pool.share != "vmm") for tensor in pool.values()]


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
    mine = held(model)
    changed = {name: parameter.data for name, parameter in model.named_parameters() if "embed_tokens" in name}
    for name, data in changed.items():
        model.get_parameter(name).data = data.flip(0).contiguous()
    like, device = mine.manifest, mine.pool.devices[0].uuid
    version = runtime_pools.publish(mine.broker, mine.pool.name, model, like=like, device=device, share=mine.pool.share)
    for name, data in changed.items():
        model.get_parameter(name).data = data
    assert all(torch.equal(model.get_parameter(name), data) for name, data in changed.items())
    return version


# -- jobs --------------------------------------------------------------------------------------------------


def stop_half_way(job: Job) -> None:
    """Have the one engine that makes the file ``job["once"]`` say its process, and stop, with a draft that is full."""
    from cubroker.client.draft import Draft

    seal = Draft.seal

    def sealed(draft: Draft, **terms: Any) -> int:
        try:
            os.close(os.open(job["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return seal(draft, **terms)
        job["say"]({"pid": os.getpid()})
        while True:
            signal.pause()

    Draft.seal = sealed  # type: ignore[method-assign, assignment]


def run(job: Job) -> dict[str, Any]:
    """Start an engine, do what the job says, and return what came of it."""
    from vllm import LLM

    if "preload" in job:
        from cubroker.cli.main import run as command

        with TemporaryFile("w+") as printed, redirect_stdout(printed):  # a file, whose descriptor vLLM asks for
            status = command(["vllm", "preload", job["model"], *job["preload"]])
            printed.seek(0)
            return {"status": status, "printed": printed.read()}
    if job["format"] == "auto":  # compute as engines on pools do: not on packed copies of the weights
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
    if "once" in job:
        stop_half_way(job)
    terms = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "dtype": "bfloat16",
        "max_num_seqs": 4,
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.1 if ON_GPU else 0.3,
        **({"kv_cache_memory_bytes": 1 << 26} if ON_GPU else {}),  # nothing is measured while others start
        **job.get("engine", {}),
    }
    began = time.perf_counter()
    llm = LLM(model=job["model"], load_format=job["format"], model_loader_extra_config=job.get("extra", {}), **terms)
    found: dict[str, Any] = {"seconds": time.perf_counter() - began}
    for name in job.get("do", ["said"]):
        step: Callable[[Any, Job], Any] = globals()[name]
        found[name] = step(llm, job)
    if terms["distributed_executor_backend"] == "mp":
        end_workers(llm)
    return found


def end_workers(llm: Any) -> None:
    """End the processes of an engine, and remove the shared memory by which they spoke, as vLLM does not."""

    def named(worker: Any) -> str:
        return os.environ["VLLM_DIST_IDENT"]

    names = set(llm.collective_rpc(named))
    llm.llm_engine.engine_core.shutdown()
    for name in names:
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink()


def child(job: Job, say: Callable[[dict[str, Any]], None]) -> int:
    """Fork a process that runs a job; returns its number."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        reply = run({**job, "say": say})
        code = 0
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    say(reply)
    os._exit(code)


def main() -> None:
    """Serve jobs until the end of the input."""
    os.environ.update(ENVIRONMENT)
    replies = os.dup(1)
    os.dup2(2, 1)  # what engines print is not an answer
    import vllm
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401

    turn = get_context("fork").Lock()

    def say(reply: dict[str, Any]) -> None:
        with turn, os.fdopen(os.dup(replies), "w") as file:
            print(json.dumps(reply), file=file)

    for line in sys.stdin:
        job = json.loads(line)
        copies = job.get("copies", 1)
        job["barrier"] = get_context("fork").Barrier(copies)
        running = {child({**job, "copy": copy}, say) for copy in range(copies)}
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if os.WIFSIGNALED(status):
                say({"error": f"killed by signal {os.WTERMSIG(status)}"})


if __name__ == "__main__":
    main()
