"""ls, show, clients, devices, topology and retire: JSON key by key, tables line by line."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cubroker.cli import main
from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.messages import Close, Done
from cubroker.server.transport.unix_sockets import read_process
from tests import checkpoints
from tests.accounts import group_name, user_name
from tests.brokers import PATIENCE, eventually, serving
from tests.unit.cli import terminal
from tests.unit.cli.processes import environment, run
from tests.unit.server.clients import session

POOL_KEYS = [
    "schema",
    *("name", "version", "state", "nbytes", "tensors", "share", "devices", "durable", "leases", "owner"),
    *("group", "mode", "sharded", "writable", "how", "why", "opened_by", "protected", "digest"),
    *("memory", "shared", "published"),
]
USER, GROUP = user_name(), group_name()


@pytest.fixture
def llama(directory: Path, tmp_path: Path, name: str) -> str:
    """A pool of two tensors, 512 bytes, on both devices."""
    tensors = checkpoints.filled([("norm.weight", "BF16", (4, 8)), ("step", "I64", ())])
    path = checkpoints.write(tmp_path / "llama.safetensors", tensors)
    assert run("load", name, path, "--device", "0,1", "--directory", directory).returncode == 0
    return name


def document(directory: Path, *arguments: str) -> Any:
    done = run(*arguments, "--json", "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def lines(directory: Path, *arguments: str) -> list[str]:
    done = run(*arguments, "--directory", directory)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture
def zoo(directory: Path) -> Iterator[Broker]:
    """Pools qwen-large (two leases), qwen-small and llama, of 3, 1 and 2 MiB."""
    with Broker(directory) as broker:
        for name, size in (("qwen-large", 3), ("qwen-small", 1), ("llama", 2)):
            broker.create(name, Layout.pack([("x", "U8", (size << 20,))])).seal()
        with broker.attach("qwen-large"), broker.attach("qwen-large"):
            yield broker


def shown(directory: Path, *arguments: str) -> list[str]:
    return [line.split()[0] for line in lines(directory, "ls", *arguments)[1:]]


@pytest.mark.slow
@pytest.mark.usefixtures("zoo")
def test_ls_takes_patterns_and_sorts(directory: Path) -> None:
    assert shown(directory) == ["llama@1", "qwen-large@1", "qwen-small@1"]
    assert shown(directory, "qwen*") == ["qwen-large@1", "qwen-small@1"]
    assert shown(directory, "*-small", "llama@1") == ["llama@1", "qwen-small@1"]
    assert shown(directory, "--sort", "size") == ["qwen-large@1", "llama@1", "qwen-small@1"]
    assert shown(directory, "--sort", "size", "-r") == ["qwen-small@1", "llama@1", "qwen-large@1"]
    assert shown(directory, "--sort", "leases")[0] == "qwen-large@1"
    assert [pool["name"] for pool in document(directory, "ls", "qwen*", "--sort", "size")] == [
        "qwen-large",
        "qwen-small",
    ]
    assert lines(directory, "ls", "qwen-smal") == [
        "No pool matches 'qwen-smal'. Did you mean qwen-small or qwen-large?"
    ]
    assert lines(directory, "ls", "", "x*") == ["No pool matches '' or 'x*'."]
    assert document(directory, "ls", "nothing*") == []


@pytest.mark.slow
@pytest.mark.usefixtures("zoo")
def test_clients_are_chosen_by_what_they_hold(directory: Path) -> None:
    with Broker(directory) as other, other.attach("llama"):
        held = [client["leases"][0]["pool"] for client in document(directory, "clients", "--sort", "held")]
        assert held == ["qwen-large", "llama"]
        (client,) = document(directory, "clients", "llam?")
        assert client["session"] == other.session
        assert lines(directory, "clients", "x*") == ["No client holds a pool that matches 'x*'."]
        held = [client["leases"][0]["pool"] for client in document(directory, "clients", "--sort", "leases", "-r")]
        assert held == ["llama", "qwen-large"]


def test_show_says_which_processes_hold_a_version(directory: Path, zoo: Broker) -> None:
    process = read_process(os.getpid())
    assert process is not None
    (line,) = (line for line in lines(directory, "show", "qwen-large") if line.startswith("held"))
    assert re.fullmatch(rf"held for \d+ s by {process.name} {os.getpid()} \({USER}(, .+)?\)", line)
    (holder,) = document(directory, "show", "qwen-large")["holders"]
    assert (holder["session"], holder["pid"], holder["leases"]) == (zoo.session, os.getpid(), 2)
    assert holder["process"]["name"] == process.name


@pytest.mark.slow
@pytest.mark.usefixtures("zoo")
def test_columns_go_whole_where_a_terminal_is_narrow(directory: Path) -> None:
    for command, columns, titles in (
        ("ls", 200, "POOL STATE SIZE TENSORS DEVICES LEASES OWNER MODE"),
        ("ls", 60, "POOL STATE SIZE DEVICES LEASES OWNER"),
        ("ls", 40, "POOL STATE SIZE"),
        ("ls", 20, "POOL"),
        ("clients", 200, "SESSION PID PROCESS USER CONTAINER AGE STATE HELD LEASES"),
        ("clients", 36, "PID PROCESS LEASES"),  # with a pid of three digits USER takes 40 columns
        ("devices", 60, "INDEX NAME BUDGET ALLOCATED"),
    ):
        _, written = terminal.run(command, "--directory", directory, columns=columns)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", written).splitlines()
        assert plain[0].split()[: len(titles.split())] == titles.split()
        assert max(map(len, plain)) <= max(columns, 30)


@pytest.mark.slow
def test_sentences_are_broken_between_words_where_a_terminal_is_narrow(directory: Path, llama: str) -> None:
    for arguments in (["topology"], ["show", llama]):
        _, written = terminal.run(*arguments, "--directory", directory, columns=60)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", written)
        assert max(map(len, plain.splitlines())) <= 60
        assert plain.split() == " ".join(lines(directory, *arguments)).split()


def test_ls_tells_devices_by_their_numbers(directory: Path, name: str) -> None:
    with Broker(directory) as broker:
        broker.create(name, Layout.pack([("x", "U8", (5,))]), devices=(1, 0)).seal()
    assert lines(directory, "ls")[1].split()[5] == "0,1"


@pytest.mark.slow
def test_nothing_is_said_in_a_sentence_and_in_json_is_an_empty_list(directory: Path) -> None:
    assert lines(directory, "ls") == ["No pools: nothing has been loaded yet, or everything is retired."]
    assert lines(directory, "clients") == ["No clients: no process is attached, or none of this user."]
    assert document(directory, "ls") == []
    assert document(directory, "clients") == []


def test_ls_has_one_object_per_live_version(directory: Path, llama: str) -> None:
    uuids = [device["uuid"] for device in document(directory, "devices")]
    with Broker(directory) as broker, broker.attach(llama, device=0):
        (pool,) = document(directory, "ls")
    assert list(pool) == POOL_KEYS
    assert pool == {
        "schema": 1,
        "name": llama,
        "version": 1,
        "state": "current",
        "nbytes": 512,
        "tensors": 2,
        "share": "vmm",
        "devices": uuids,
        "durable": False,
        "leases": 1,
        "owner": os.getuid(),
        "group": os.getgid(),
        "mode": 0o644,
        "sharded": False,
        "writable": False,
        "how": None,
        "why": None,
        "opened_by": "descriptor",
        "protected": True,
        "digest": None,
        "memory": 4 << 20,
        "shared": 0,
        "published": pool["published"],
    }
    assert 0 < pool["published"] <= time.time()


def test_ls_shows_the_same_as_a_table(directory: Path, llama: str) -> None:
    assert [line.split() for line in lines(directory, "ls")] == [
        ["POOL", "STATE", "SIZE", "TENSORS", "DEVICES", "LEASES", "OWNER", "MODE"],
        [f"{llama}@1", "current", "512", "B", "2", "0,1", "0", USER, "644"],
    ]


@pytest.mark.slow
def test_tables_fit_a_terminal_of_80_columns(directory: Path, tmp_path: Path) -> None:
    name = "models/" + "x" * 90
    path = checkpoints.write(tmp_path / "one.safetensors", checkpoints.filled([("w" * 120, "U8", (7,))]))
    assert run("load", name, path, "--directory", directory).returncode == 0
    with Broker(directory) as broker, broker.attach(name):
        for command in (["ls"], ["show", name], ["clients"], ["devices"]):
            status, written = terminal.run(*command, "--directory", directory)
            plain = re.sub(r"\x1b\[[0-9;]*m", "", written).splitlines()
            assert status == 0
            if command[0] != "show":  # its heading names the pool in a sentence
                assert max(map(len, plain)) <= 80
            else:
                assert max(len(line) for line in plain[plain.index("") :]) <= 80
            assert "\x1b[1m" in written


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_styles_are_left_out_where_they_are_not_wanted(directory: Path, name: str, value: str) -> None:
    assert "\x1b" not in terminal.run("devices", "--directory", directory, **{name: value})[1]


@pytest.mark.slow
def test_shared_memory_is_said_once(directory: Path, name: str) -> None:
    with Broker(directory) as broker:
        broker.publish(name, {"a": bytes(3 << 20), "b": bytes(1 << 20)})
        with broker.attach(name):
            broker.publish(name, {"b": bytes([1]) * (1 << 20)}, base=1)
            old, new = document(directory, "ls")
            assert [(pool["memory"], pool["shared"]) for pool in (old, new)] == [(4 << 20, 0), (6 << 20, 4 << 20)]
            assert sum(device["allocated"] for device in document(directory, "devices")) == 6 << 20
            shown = document(directory, "show", name)
            assert shown["shared_with"] == [{"version": 1, "allocations": 1, "nbytes": 4 << 20}]
            said = "has 6.0 MiB of device memory, in part shared with version 1 (4.0 MiB)"
            assert said in lines(directory, "show", name)
            title, first, second = lines(directory, "ls")
            assert title.endswith("SHARED")
            assert (first.split()[-1], second.split()[-2:]) == ("none", ["4.0", "MiB"])


def test_show_adds_the_layout_to_what_ls_says(directory: Path, llama: str) -> None:
    shown = document(directory, "show", llama)
    assert list(shown) == [*POOL_KEYS, "layout", "digests", "shared_with", "holders"]
    added = {"layout": shown["layout"], "digests": None, "shared_with": [], "holders": []}
    assert [shown] == [pool | added for pool in document(directory, "ls")]
    place = {"allocation": 0, "offset": 0, "device": None}  # on all of them
    assert shown["layout"] == {
        "allocations": [512],
        "tensors": [
            {"name": "norm.weight", "dtype": "BF16", "shape": [4, 8], "nbytes": 64, **place},
            {"name": "step", "dtype": "I64", "shape": [], "nbytes": 8, **place, "offset": 256},
        ],
    }


@pytest.mark.parametrize("options", [["--json"], []])
def test_show_tells_of_a_version_that_ends_while_it_asks(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with Broker(directory) as owner:
        with owner.create(name, Layout.pack([("x", "U8", (5,))])) as draft:
            draft.seal(digest=True)
        devices = Broker.devices

        def retired_before(broker: Broker) -> Any:
            owner.retire(name)
            return devices(broker)

        monkeypatch.setattr(Broker, "devices", retired_before)
        assert main.run(["--directory", str(directory), "show", name, *options]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    if options:
        shown = json.loads(written.out)
        assert (shown["name"], shown["state"], shown["digests"]) == (name, "current", None)
    else:
        assert written.out.startswith(f"{name}@1: current, 0 leases, ")


def test_json_is_json_whatever_the_terminal_can_show(directory: Path, tmp_path: Path) -> None:
    names = {"größe", "\U0001f600", "a\nb\x1b[2J"}
    path = checkpoints.write(tmp_path / "x.safetensors", checkpoints.filled([(name, "U8", (1,)) for name in names]))
    assert run("load", "x", path, "--directory", directory).returncode == 0
    done = run("show", "x", "--json", "--directory", directory, env=environment(PYTHONIOENCODING="ascii"))
    assert {tensor["name"] for tensor in json.loads(done.stdout)["layout"]["tensors"]} == names


def test_show_reads_well(directory: Path, llama: str) -> None:
    uuids = [device["uuid"] for device in document(directory, "devices")]
    assert lines(directory, "show", f"{llama}@1") == [
        f"{llama}@1: current, 0 leases, owner {USER}",
        f"mode 644, group {GROUP}",
        "2 tensors, 512 B in 1 allocation, shared by vmm, opened by descriptor",
        *(f"on device {index} (cubroker host device {index}, {uuid})" for index, uuid in enumerate(uuids)),
        "",
        "TENSOR       DTYPE  SHAPE   SIZE  PLACE",
        "norm.weight  BF16   4x8     64 B    0:0",
        "step         I64    scalar   8 B  0:256",
    ]


def test_clients_are_processes_and_what_they_hold(directory: Path, llama: str) -> None:
    with Broker(directory) as broker, broker.attach(llama, device=0), broker.attach(llama, device=0):
        (client,) = document(directory, "clients")
        table = lines(directory, "clients")
        session = broker.session
    keys = ["schema", "session", "pid", "uid", "state", "leases", "mapped_beyond_leases", "locks", "process"]
    assert list(client) == keys
    began, *_ = (lease.pop("held_since") for lease in client["leases"])
    assert 0 <= time.time() - began < PATIENCE
    process = read_process(os.getpid())
    assert process is not None
    assert client["process"].pop("started") == pytest.approx(process.started, abs=1)  # the clock may be set meanwhile
    assert client == {
        "schema": 1,
        "session": session,
        "pid": os.getpid(),
        "uid": os.getuid(),
        "state": "connected",
        "leases": [{"pool": llama, "version": 1}] * 2,
        "mapped_beyond_leases": client["mapped_beyond_leases"],
        "locks": [],
        "process": {"name": process.name, "cgroup": process.cgroup},
    }
    assert client["mapped_beyond_leases"] in (0, None)  # None until the broker has looked for the first time
    header, row = table
    assert header.split() == ["SESSION", "PID", "PROCESS", "USER", "CONTAINER", "AGE", "STATE", "HELD", "LEASES"]
    assert row.split()[:4] == [str(session), str(os.getpid()), process.name, USER]
    assert re.search(r"\d+ (s|min|h)  connected  +\d+ s  " + re.escape(f"{llama}@1 (2 times)"), row)


def test_a_client_that_holds_nothing_is_listed_too(directory: Path) -> None:
    with Broker(directory):
        row = lines(directory, "clients")[1].split()
        assert (row[3], row[-3:]) == (USER, ["connected", "-", "none"])


def test_clients_shows_what_one_of_them_has_without_a_lease(directory: Path) -> None:
    with session(directory) as liar, Broker(directory):
        lease = liar.create("llama", share="vmm").lease
        liar.descriptors(lease, 1)  # and it keeps that
        liar.ask(Close(lease), Done)
        eventually(lambda: document(directory, "clients")[0]["mapped_beyond_leases"] == 2 << 20, "the broker to look")
        header, *rows = (line.split("  ") for line in lines(directory, "clients"))
    assert header[-1] == "BEYOND LEASES"
    assert [row[-1].strip() for row in rows] == ["2.0 MiB", "2.0 MiB"]  # both are of this process


def test_devices_are_counted_in_bytes(directory: Path, llama: str) -> None:
    devices = document(directory, "devices")
    assert [device["index"] for device in devices] == [0, 1]
    for device in devices:
        assert list(device) == ["schema", "index", "uuid", "name", "total", "budget", "allocated", "promised"]
        assert device["uuid"].startswith("HOST-")
        assert 0 < device["budget"] <= device["total"]
        assert (device["allocated"], device["promised"]) == (2 << 20, 0)  # whole blocks
    header, *rows = lines(directory, "devices")
    assert header.split() == ["INDEX", "UUID", "NAME", "TOTAL", "BUDGET", "ALLOCATED", "PROMISED"]
    for device, row in zip(devices, rows, strict=True):
        assert row.split()[0] == str(device["index"])
        assert device["uuid"].startswith(row.split()[1])
        assert row.endswith("2.0 MiB       0 B")


@pytest.mark.slow
def test_a_retired_version_goes_with_its_last_lease(directory: Path, llama: str) -> None:
    with Broker(directory) as broker:
        with broker.attach(llama, device=0):
            sentence = f"{llama}@1 is retired; its memory is freed with the last of 1 lease."
            assert lines(directory, "retire", llama) == [sentence]
            assert [pool["state"] for pool in document(directory, "ls")] == ["retired"]
        eventually(lambda: document(directory, "ls") == [], "the retired version to go")


def test_a_version_that_nobody_holds_goes_at_once(directory: Path, llama: str) -> None:
    assert lines(directory, "retire", f"{llama}@1") == [f"{llama}@1 is retired; its memory is freed now."]
    eventually(lambda: document(directory, "ls") == [], "the retired version to go")


@pytest.mark.parametrize("command", ["show", "retire"])
def test_an_unknown_pool_is_a_refusal_in_one_line(directory: Path, command: str) -> None:
    done = run(command, "nobody@3", "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"cubroker: .*nobody.*\n", done.stderr)


def test_a_sharded_pool_is_told_from_a_replicated_one(directory: Path) -> None:
    plan = {"embed": 0, "head": 1}
    layout = Layout.pack([("embed", "U8", (300,)), ("head", "U8", (5,))], groups=plan)
    with Broker(directory) as broker:
        with broker.create("moe", layout, devices=(0, 1), plan=plan, share="vmm") as draft:
            draft.seal()
        uuids = [device.uuid for device in broker.devices()]
    _, line = lines(directory, "ls")
    assert line.split() == ["moe@1", "current", "768", "B", "2", "0,1", "sharded", "0", USER, "644"]
    assert document(directory, "ls")[0]["sharded"] is True
    shown = lines(directory, "show", "moe")
    assert "2 tensors, 768 B in 2 allocations, shared by vmm, opened by descriptor" in shown
    assert [line for line in shown if "sharded" in line] == [
        f"sharded, in part on device {index} (cubroker host device {index}, {uuid})" for index, uuid in enumerate(uuids)
    ]
    assert shown[-3:] == [
        "TENSOR  DTYPE  SHAPE   SIZE  PLACE  DEVICE",
        "embed   U8     300    300 B    0:0       0",
        "head    U8     5        5 B    1:0       1",
    ]
    tensors = document(directory, "show", "moe")["layout"]["tensors"]
    assert {tensor["name"]: tensor["device"] for tensor in tensors} == {"embed": uuids[0], "head": uuids[1]}


def test_a_writable_pool_says_so(directory: Path) -> None:
    with Broker(directory) as broker, broker.create("kv", Layout.pack([("x", "U8", (5,))]), writable=True) as draft:
        draft.seal()
    assert document(directory, "ls")[0]["writable"] is True
    shared = "shared by vmm, opened by descriptor, writable by its readers"
    assert f"1 tensor, 256 B in 1 allocation, {shared}" in lines(directory, "show", "kv")


def test_a_pool_that_its_readers_can_write_by_mistake_says_so(directory: Path) -> None:
    with Broker(directory) as broker, broker.create("bare", Layout.pack([("x", "U8", (5,))]), share="ipc") as draft:
        draft.seal()
    assert document(directory, "ls")[0]["protected"] is False
    shared = "shared by ipc, not protected from writes by its readers"
    assert f"1 tensor, 256 B in 1 allocation, {shared}" in lines(directory, "show", "bare")


def test_a_multicast_pool_says_how_all_its_replicas_are_written(directory: Path) -> None:
    layout = Layout.pack([("x", "U8", (5,))])
    with Broker(directory) as broker, broker.create("acts", layout, devices=(0, 1), share="multicast") as draft:
        draft.seal()
    told = document(directory, "ls")[0]
    assert (told["how"], told["why"]) == ("multicast", "every device takes part")
    assert "written to all devices at once by multicast: every device takes part" in lines(directory, "show", "acts")


LINK_KEYS = [
    "schema",
    *("from", "to", "access", "performance_rank"),
    *("native_atomics", "array_access", "only_partial_atomics", "atomics"),
]


@pytest.fixture(scope="module")
def pairs() -> Iterator[Path]:
    """A broker whose four devices reach each other in twos."""
    with serving("host:4@8MiB/2") as broker:
        yield broker.directory


def test_the_table_says_who_reaches_whom(pairs: Path) -> None:
    done = run("topology", "--directory", pairs)
    assert (done.returncode, done.stderr) == (0, "")
    header, *rows = done.stdout.splitlines()[:5]
    assert header.split() == ["FROM", "TO", "0", "TO", "1", "TO", "2", "TO", "3"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    reached = [[cell not in ("no", "-") for cell in row.split()[-4:]] for row in rows]
    assert reached == [
        [False, True, False, False],
        [True, False, False, False],
        [False, False, False, True],
        [False, False, True, False],
    ]
    assert rows[0].split()[-4] == "-"
    assert "performance rank" in done.stdout


def test_the_table_of_links_has_no_names_where_a_terminal_is_too_narrow_for_them(pairs: Path) -> None:
    for columns, first in ((60, "0 cubroker host device 0"), (40, "   0")):
        _, written = terminal.run("topology", "--directory", pairs, columns=columns)
        header, row, *_ = re.sub(r"\x1b\[[0-9;]*m", "", written).splitlines()
        assert header.split() == ["FROM", "TO", "0", "TO", "1", "TO", "2", "TO", "3"]
        assert re.fullmatch(re.escape(first) + r" +- +\d\S* +no +no", row)
        assert len(header) <= columns


def test_json_has_one_object_per_way(pairs: Path) -> None:
    done = run("topology", "--json", "--directory", pairs)
    assert (done.returncode, done.stderr) == (0, "")
    ways = json.loads(done.stdout)
    assert [list(way) for way in ways] == [LINK_KEYS] * 12
    with Broker(pairs) as broker:
        uuids = [device.uuid for device in broker.driver.devices]
        links = broker.driver.peers.matrix()
    for way, link in zip(ways, links, strict=True):
        assert (way["from"], way["to"]) == (uuids[link.device], uuids[link.peer])
        assert (way["access"], way["performance_rank"]) == (link.access, link.performance_rank)
        assert all(isinstance(forms, list) for forms in way["atomics"].values())
    assert {(way["from"], way["to"]) for way in ways if way["access"]} == {
        (uuids[one], uuids[other]) for one, other in ((0, 1), (1, 0), (2, 3), (3, 2))
    }


def test_without_a_broker_there_is_no_topology(tmp_path: Path) -> None:
    assert run("topology", "--directory", tmp_path).returncode == 3
