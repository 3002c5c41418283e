"""Time from a trainer's tensors to a worker's on the same device, in milliseconds, in two ways that alternate.

- Publish and switch: the trainer publishes its tensors, and the worker, which follows the pool, switches to them.
- Buckets: how weights are handed over through torch's CUDA IPC today. Two buffers are exported once. The trainer copies
  tensors into one while the worker copies out of the other into its own parameters, and both tell each other.

The clock runs from the trainer's call until the worker reports that its tensors are new. On host devices torch's
tensors are in ordinary memory, and the buffers in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks import harness, model_weights
from benchmarks.harness import Child, run_alone, serving
from benchmarks.options import Plan
from benchmarks.report import Figure, median, ratio
from cubroker.client import Broker

if TYPE_CHECKING:
    import torch

POOL = "policy"
BUCKET = 512 << 20
"""Bytes of each of the two buffers, or of the largest tensor if that is more."""

ROUNDS = 10
WARM = 2

Bucket = list[tuple[str, int, tuple[int, ...]]]
"""Tensors that are handed over together: the name, the place in a buffer, and the shape of each."""


def measure(plan: Plan) -> list[Figure]:
    tensors = model_weights.tensors(plan.nbytes)
    what = f"{len(tensors)} tensors, {model_weights.total(tensors) / 1e9:.2f} GB"
    near, far = harness.processes.Pipe()
    with serving(plan.devices) as server:
        arguments = server.directory, plan.gpu, tensors
        with Child(take, far, *arguments) as worker, Child(train, near, *arguments) as trainer:
            worker.answer()
            times: list[tuple[float, float]] = trainer.answer()
    ours, theirs = ([each * 1e3 for each in row] for row in zip(*times[WARM:], strict=True))
    return [
        median("publish() to switched in a worker", ours, "ms", f"vmm, {what}"),
        median("torch IPC, two buckets: into a worker's parameters", theirs, "ms", what),
        ratio("torch IPC ÷ publish() to switched", theirs, ours, "of each pair"),
    ]


def buckets_of(tensors: model_weights.Tensors) -> list[Bucket]:
    """Divide the tensors, in order, into buckets; each tensor begins at a multiple of 256 bytes."""
    limit = bucket_bytes(tensors)
    buckets: list[Bucket] = [[]]
    place = 0
    for name, _, shape in tensors:
        nbytes = _padded(shape)
        if place + nbytes > limit:
            buckets.append([])
            place = 0
        buckets[-1].append((name, place, shape))
        place += nbytes
    return buckets


def bucket_bytes(tensors: model_weights.Tensors) -> int:
    """Return the bytes of one buffer."""
    return max(BUCKET, *(_padded(shape) for _, _, shape in tensors))


def _padded(shape: tuple[int, ...]) -> int:
    return -(-2 * prod(shape) // 256) * 256


def views(buffers: torch.Tensor, buckets: Iterable[Bucket]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each bucket, as views of the two buffers alternately."""
    import torch

    for number, bucket in enumerate(buckets):
        buffer = buffers[number % 2]
        yield {
            name: buffer[place : place + 2 * prod(shape)].view(torch.bfloat16).view(shape)
            for name, place, shape in bucket
        }


def train(
    connection: Connection, worker: Connection, directory: Path, gpu: bool, tensors: model_weights.Tensors
) -> None:
    """In the trainer: send the seconds of each way, in each round."""
    import torch
    import torch.multiprocessing  # registers its reductions, for the buffers to be sent

    where = "cuda" if gpu else "cpu"
    weight = {name: torch.zeros(shape, dtype=torch.bfloat16, device=where) for name, _, shape in tensors}
    buffers = torch.empty((2, bucket_bytes(tensors)), dtype=torch.uint8, device=where)
    with Broker(directory) as broker:
        broker.publish(POOL, weight, share="vmm")
        worker.send(buffers)
        filled = list(views(buffers, buckets_of(tensors)))
        times = []
        for number in range(1, 1 + WARM + ROUNDS):
            for tensor in weight.values():
                tensor.fill_(number)
            _finish(gpu)
            _hear(worker, "ready")
            began = perf_counter()
            broker.publish(POOL, weight, share="vmm", wait=60.0)
            _hear(worker, "switched")
            published = perf_counter() - began
            _hear(worker, "ready")
            began = perf_counter()
            _through_buckets(worker, weight, filled, gpu=gpu)
            times.append((published, perf_counter() - began))
        worker.send("end")
        _hear(worker, "end")  # the worker has the buffers until then
    connection.send(times)


def _through_buckets(
    worker: Connection, weight: dict[str, torch.Tensor], filled: list[dict[str, torch.Tensor]], *, gpu: bool
) -> None:
    """Copy into a buffer once the worker has copied the buffer's content before out."""
    for number, bucket in enumerate(filled):
        if number > 1:
            _hear(worker, number - 2)
        for name, view in bucket.items():
            view.copy_(weight[name])
        _finish(gpu)
        worker.send(number)
    for number in range(max(0, len(filled) - 2), len(filled)):
        _hear(worker, number)


def take(
    connection: Connection, trainer: Connection, directory: Path, gpu: bool, tensors: model_weights.Tensors
) -> None:
    """In the worker: take part in both ways, and check the tensors of both in each round."""
    import torch
    import torch.multiprocessing

    from cubroker.integrations.torch import state_dict

    where = "cuda" if gpu else "cpu"
    own = {name: torch.zeros(shape, dtype=torch.bfloat16, device=where) for name, _, shape in tensors}
    buffers = trainer.recv()
    full = list(views(buffers, buckets_of(tensors)))
    connection.send("there")
    with Broker(directory) as broker, broker.attach(POOL) as pool:
        shared = state_dict(pool)
        versions = pool.follow(switch=True)
        for number in range(1, 1 + WARM + ROUNDS):
            trainer.send("ready")
            next(versions)
            trainer.send("switched")
            _check(shared, number)
            trainer.send("ready")
            for turn, bucket in enumerate(full):
                _hear(trainer, turn)
                for name, view in bucket.items():
                    own[name].copy_(view)
                _finish(gpu)
                trainer.send(turn)
            _check(own, number)
        versions.close()
        shared.clear()
        _hear(trainer, "end")
    del full, buffers
    trainer.send("end")


def _check(tensors: dict[str, torch.Tensor], number: int) -> None:
    for name, tensor in tensors.items():
        if int(tensor.reshape(-1)[-1]) != number:
            raise RuntimeError(f"{name} is not that of round {number}")


def _finish(gpu: bool) -> None:
    if gpu:
        import torch

        torch.cuda.synchronize()


def _hear(connection: Connection, wanted: object) -> None:
    if not connection.poll(harness.PATIENCE):
        raise RuntimeError(f"the other process did not say {wanted!r} for {harness.PATIENCE:.0f} s")
    if (heard := connection.recv()) != wanted:
        raise RuntimeError(f"the other process said {heard!r}, and not {wanted!r}")


if __name__ == "__main__":
    run_alone(measure)
