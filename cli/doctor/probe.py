"""Gathers the facts: asks the driver, tries what is safe on each device, looks at the machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cubroker.cli.doctor.children import ask, command
from cubroker.cli.doctor.facts import DeviceFacts, DriverFacts, Examined, Facts, Survey, Trial
from cubroker.cli.doctor.host import examine

GPUS = "cuda"
EMULATED = "host:2"

KINDS = ("ipc", "vmm", "fabric", "events")
"""What is tried, in this order. Of multicast the device and the settings are asked, and it is never tried."""

LIMIT = 60.0
"""Seconds for each trial. The first process on a machine that keeps no driver state waits for the GPUs to start."""

AT_ONCE = 4
"""Devices that are tried at the same time; on each of them one trial runs at a time, as an exclusive one needs."""


async def gather(spec: str | None, directory: Path, limit: float = LIMIT) -> Facts:
    """Find everything out.

    Args:
        spec: the devices; by default all GPUs, and two host devices where no driver answers.
        directory: where a broker serves, or would.
        limit: seconds that each trial may take.
    """
    survey = await _survey(spec or GPUS, limit)
    driver, devices = survey.driver, survey.devices
    if spec is None and not devices:
        spec, devices = EMULATED, (await _survey(EMULATED, limit)).devices
    gate = asyncio.Semaphore(AT_ONCE)
    host, examined = await asyncio.gather(
        asyncio.to_thread(examine, directory),
        asyncio.gather(*(_examine(gate, spec or GPUS, device, limit) for device in devices)),
    )
    return Facts(driver, tuple(examined), host)


async def _survey(spec: str, limit: float) -> Survey:
    answer = await ask(command("survey", spec), limit, Survey)
    return Survey(DriverFacts(spec, answer)) if isinstance(answer, Trial) else answer


async def _examine(gate: asyncio.Semaphore, spec: str, device: DeviceFacts, limit: float) -> Examined:
    trials: dict[str, Trial] = {}
    async with gate:
        for kind in KINDS:
            if any(trial.outcome == "silent" for trial in trials.values()):
                trials[kind] = Trial("skipped")
            else:
                trials[kind] = await ask(command(kind, spec, str(device.index)), limit, Trial)
    return Examined(device, trials)
