"""Pictures of the page: real brokers on emulated devices, with pools and holders, seen by a real Chromium.

``python -m tests.unit.server.monitoring.gallery OUT`` writes a PNG for each number of devices and pools, light and
dark, wide and 400 pixels narrow; where there are pools also of a search (``search``), and of the plan for the last of
the first four devices, with a pool chosen (``plan``). Pools are as large as on GPUs and take no memory, since nothing
is written to them. A broker has just begun, so the page is shown times that lie :data:`STRETCH` times as long ago.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from cubroker import Layout
from cubroker.client import Broker
from tests import forkserver
from tests.brokers import PATIENCE, BrokerProcess, serving
from tests.unit.server.monitoring.scenes import free_port

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The program that shows the page; None: there is none."""

GIB = 1 << 30
TOKEN = "a-token-of-tests-only"
STRETCH = 20_000.0
NAMES = (
    "llama-3.3-70b-instruct",
    "qwen3-32b",
    "whisper-large-v3",
    "bge-m3",
    "flux.1-dev",
    "deepseek/r1-distill-qwen-14b",
)
WORKERS = ("vllm", "sglang", "trainer", "python3", "embedder", "tritonserver")
HOLDER = """
import sys
from cubroker.client import Broker
with open("/proc/self/comm", "w") as file:
    file.write(sys.argv[2])
with Broker(sys.argv[1]) as broker:
    held = [broker.attach(name, device=int(device)) for name, device in (each.split("@") for each in sys.argv[3:])]
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def launched() -> Iterator[Browser]:
    """Start a Chromium, and end it."""
    with sync_playwright() as playwright:
        # As root Chromium has no sandbox of its own; it is shown nothing but what these tests serve.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=1000 * PATIENCE)
        yield browser
        browser.close()


@contextmanager
def scene(devices: int, pools: int) -> Iterator[BrokerProcess]:
    """Start a broker on devices of 141 GiB with as many pools, some superseded and kept, some held by processes."""
    chance = random.Random(devices * 1000 + pools)
    with serving(f"host:{devices}@141GiB") as broker, ExitStack() as holders:
        with Broker(broker.directory) as client:
            names = list(fill(client, devices, pools, chance))
        for number in range(min(12, pools)):
            held = chance.sample(names[: max(3, len(names) // 3)], min(3, len(names)))
            arguments = [str(broker.directory), WORKERS[number % len(WORKERS)], *held]
            child = forkserver.Forked(
                ["-c", HOLDER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            holders.callback(child.communicate)
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
        yield broker


def fill(client: Broker, devices: int, pools: int, chance: random.Random) -> Iterator[str]:
    """Publish as many pools, and yield names to attach to, each with a device: ``NAME@DEVICE``."""
    share = 52 * GIB * devices // max(pools, 4)
    room = dict.fromkeys(range(devices), 120 * GIB)
    for number in range(pools):
        name = NAMES[number % len(NAMES)] + ("" if number < len(NAMES) else f"-{number // len(NAMES)}")
        places = chance.sample(range(devices), min(devices, chance.choice((1, 1, 1, 2))))
        kept = number % 4 == 3
        least = min(room[place] for place in places) // 4
        nbytes = max(1 << 20, min(least, int(share * min(40.0, 0.4 * chance.paretovariate(1.0)))))
        for _ in range(1 + kept):
            client.create(name, Layout.pack([("w", "U8", (nbytes,))]), devices=places).seal()
            for place in places:
                room[place] -= nbytes
        yield f"{name}@{places[0]}"


OLDER = """
class Older extends EventSource {
  set onmessage(listener) {
    super.onmessage = event => {
      const view = JSON.parse(event.data), age = moment => moment && view.time - STRETCH * (view.time - moment);
      for (const pool of view.pools) pool.published = age(pool.published);
      for (const client of view.clients) {
        if (client.process) client.process.started = age(client.process.started);
        for (const lease of client.leases) lease.held_since = age(lease.held_since);
      }
      listener({ data: JSON.stringify(view) });
    };
  }
}
EventSource = Older;
""".replace("STRETCH", str(STRETCH))
"""Has the page take everything as older than it is."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="the folder for the pictures")
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--pools", type=int, nargs="*", default=[0, 5, 200])
    parser.add_argument("--colours", nargs="*", default=["light", "dark"])
    parser.add_argument("--widths", type=int, nargs="*", default=[1280, 400])
    with launched() as browser:
        if wrong := hang(browser, **vars(parser.parse_args())):
            sys.exit("\n".join(wrong))


def hang(
    browser: Browser,
    out: Path,
    devices: Sequence[int],
    pools: Sequence[int],
    colours: Sequence[str],
    widths: Sequence[int],
) -> list[str]:
    """Write all pictures, and return what is wrong with them."""
    wrong: list[str] = []
    port = free_port()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder, pytest.MonkeyPatch.context() as patch:
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        patch.setenv("CUBROKER_METRICS_LISTEN", f"127.0.0.1:{port}")
        patch.setenv("CUBROKER_METRICS_TOKEN_FILE", str(token))
        patch.setenv("CUBROKER_KEEP", "1")
        for number, many in itertools.product(devices, pools):
            with scene(number, many):
                wrong += pictures(browser, port, out, f"{number}x{many}", itertools.product(colours, widths))
    return wrong


def pictures(browser: Browser, port: int, out: Path, name: str, kinds: Iterable[tuple[str, int]]) -> list[str]:
    """Write pictures of what is served, in these colours and widths, and return what is wrong with them."""
    wrong: list[str] = []
    for colours, width in kinds:
        page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme=colours,  # type: ignore[arg-type]
            http_credentials={"username": "any", "password": TOKEN},
        )
        page.add_init_script(OLDER)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        visit(page, f"http://127.0.0.1:{port}/")
        steps: list[tuple[str, Callable[[Page], None]]] = [("", lambda page: None)]
        if page.locator(".block").count():
            steps += [("search-", search), ("plan-", choose)]
        for step, act in steps:
            act(page)
            path = out / f"{name}-{step}{colours}-{width}.png"
            page.screenshot(path=path, full_page=True)
            print(path)
            if (broad := page.evaluate("document.documentElement.scrollWidth")) > width:
                wrong.append(f"{path} is {broad} pixels wide")
        page.close()
    return wrong


def visit(page: Page, url: str) -> None:
    """Open the page, and return when it shows what there is."""
    page.set_default_timeout(1000 * PATIENCE)
    page.goto(url)
    expect(page.locator("#pulse")).to_have_text("live", timeout=1000 * PATIENCE)


def search(page: Page) -> None:
    page.locator("#filter").fill("*bge-m3*@?")


def choose(page: Page) -> None:
    page.locator("#filter").fill("")
    page.locator("#room").fill("100 GiB")
    last = page.locator("#target option").nth(min(3, page.locator("#target option").count() - 1)).get_attribute("value")
    page.locator("#target").select_option(last)
    page.locator(f'.card[data-device="{last}"] li button').first.click()


if __name__ == "__main__":
    main()
