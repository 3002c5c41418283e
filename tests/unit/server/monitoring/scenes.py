"""Views to look at: as many devices and pools as asked for, in every state, the same each time."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from cubroker.protocol.messages import View
from cubroker.protocol.status import (
    HIDDEN_ID,
    BlockInfo,
    ClientInfo,
    DeviceInfo,
    LeaseInfo,
    PoolInfo,
    ProcessInfo,
    WaiterInfo,
)

GIB = 1 << 30
NAMES = (
    "llama-3.3-70b",
    "qwen3-32b",
    "whisper-large-v3",
    "bge-m3",
    "flux.1-dev",
    "mixtral-8x22b",
    "deepseek/r1-distill",
)
NOW = 1_763_779_200.0


def free_port() -> int:
    """Return a port of this host on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def view(devices: int, pools: int) -> View:
    """Return a view of so many devices, each of 141 GB, and pools."""
    chance = random.Random(devices * 1000 + pools)
    uuids = [f"GPU-{number:08x}-5a7c-4d1e-9b2f-{number:012x}" for number in range(devices)]
    room = dict.fromkeys(uuids, 126 * GIB * 3 // 4)
    blocks, infos = [], []
    for number in range(pools):
        name = NAMES[number % len(NAMES)] + ("" if number < len(NAMES) else f"-{number // len(NAMES)}")
        state = "current" if number < 3 else chance.choice(("current",) * 6 + ("draft", "superseded", "retired"))
        share = 126 * GIB * devices // max(pools, 4) // 2
        nbytes = max(2 << 20, int(min(share, 48 * GIB) * chance.uniform(0.2, 1.4)) >> 21 << 21)
        places = [uuid for uuid in chance.sample(uuids, min(devices, chance.choice((1, 1, 2)))) if room[uuid] >= nbytes]
        owner = chance.choice((0, 1000, 1001))
        for uuid in places:
            room[uuid] -= nbytes
            blocks.append(BlockInfo(uuid, name, 1 + number % 3, state, "held", nbytes, owner))
        if places:
            infos.append(pool(name, 1 + number % 3, state, nbytes, tuple(places), owner))
    if pools:
        blocks.append(BlockInfo(uuids[0], "", 0, "current", "held", 3 * GIB, HIDDEN_ID))
        blocks.append(BlockInfo(uuids[0], infos[0].name, 9, "retired", "freeing", 2 * GIB, 1000))
    clients = _clients(infos, chance)
    held = Counter((lease.pool, lease.version) for client in clients for lease in client.leases)
    infos = [msgspec.structs.replace(info, leases=held[info.name, info.version]) for info in infos]
    seen = tuple(_device(index, uuid, blocks) for index, uuid in enumerate(uuids))
    return View(seen, tuple(infos), clients, tuple(blocks), _waiters(infos))


def freed(blocks: Iterable[BlockInfo], retired: Collection[str]) -> int:
    """Return the bytes that are free when the versions ``retired`` have ended, by the meaning of blocks alone."""
    total = 0
    for block in blocks:
        parts = {each.versions: each.nbytes for each in block.shared}
        parts[(block.version,)] = block.nbytes - sum(parts.values())
        total += sum(
            n for having, n in parts.items() if having and all(f"{block.pool}@{each}" in retired for each in having)
        )
    return total


def pool(name: str, version: int, state: str, nbytes: int, devices: tuple[str, ...], owner: int) -> PoolInfo:
    fields = dict.fromkeys(PoolInfo.__struct_fields__, "") | {
        "name": name,
        "version": version,
        "state": state,
        "nbytes": nbytes,
        "tensors": 723,
        "share": "vmm",
        "devices": devices,
        "durable": True,
        "leases": 0,
        "owner": owner,
        "group": 100,
        "mode": 0o644,
        "sharded": False,
        "writable": False,
        "memory": nbytes * len(devices),
        "shared": 0,
        "published": None if state == "draft" else NOW - 3600.0 * version * len(name) - nbytes / GIB,
    }
    return PoolInfo(**fields)  # type: ignore[arg-type]


def _clients(pools: list[PoolInfo], chance: random.Random) -> tuple[ClientInfo, ...]:
    number = min(60, 2 * len(pools))
    states = ["detached" if index % 17 == 5 else "connected" for index in range(number)]
    all_leases = [LeaseInfo(pool.name, pool.version, NOW - 240.0 / (1 + index)) for index, pool in enumerate(pools)]
    leases = [tuple(chance.sample(all_leases, min(len(pools), 3))) for _ in states]
    return tuple(
        ClientInfo(
            7 + index, 40_000 + 13 * index, (0, 1000, 1001)[index % 3], state, leases[index], process=_process(index)
        )
        for index, state in enumerate(states)
    )


def _process(index: int) -> ProcessInfo:
    cgroup = (f"/system.slice/docker-{index:064x}.scope", "/system.slice/vllm.service", None)[index % 3]
    return ProcessInfo(("vllm", "trainer", "python3")[index % 3], cgroup, NOW - 7200.0 * index)


def _waiters(pools: list[PoolInfo]) -> tuple[WaiterInfo, ...]:
    if not pools:
        return ()
    return (
        WaiterInfo(7, 40_000, 0, 12, "create", "mixtral-8x22b", "room", 88 * GIB, NOW - 300),
        WaiterInfo(8, 40_013, 1000, 3, "attach", "mixtral-8x22b", "version 4", 0, NOW - 12),
        WaiterInfo(9, 40_026, 1001, 4, "lock", "mixtral-8x22b", "its turn", 0, NOW - 7),
    )


def _device(index: int, uuid: str, blocks: list[BlockInfo]) -> DeviceInfo:
    allocated = sum(block.nbytes for block in blocks if block.device == uuid)
    return DeviceInfo(index, uuid, "NVIDIA H200", 141 * GIB, 126 * GIB, allocated, 0)
