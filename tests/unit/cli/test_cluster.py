"""export, fetch, peers and certificates: what they are given, what they print, and the statuses that they end with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cubroker.cli import cluster, format, main
from cubroker.client import Broker
from cubroker.integrations.cluster import fetch as fetching
from cubroker.integrations.cluster.messages import Fetched, Offer, Offers, PeerRefusal
from cubroker.protocol.paths import SESSION_SOCKET
from tests import accounts
from tests.brokers import BrokerProcess, eventually, serving
from tests.cluster import ENGINE, exporting, fetch, need_engine
from tests.unit.cli.processes import DEADLINE, environment, run
from tests.unit.integrations.cluster.hosts import HOST, Certificates, publish
from tests.unit.integrations.cluster.liar import lying

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


# -- wrong usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("fetch", "Missing argument 'NAME[@VERSION]'"),
        ("fetch m@x", "'x' is no version"),
        ("fetch m --from ,", "names no host, as gpu-1,gpu-2:7411 does"),
        ("fetch m --from gpu-1:0", "has an invalid port; ports are 1 to 65535"),
        ("fetch m --from gpu-1,a..b", "names no exporter"),
        ("fetch m --from 1.2.3", "names no exporter"),
        ("fetch m --owner root", "--owner says whose version suffices for --if-absent"),
        ("fetch m --follow --if-absent", "--follow fetches current versions for ever"),
        ("fetch m@1 --follow", "--follow fetches current versions for ever"),
        ("fetch m --follow --wait 1", "--follow fetches current versions for ever"),
        ("fetch m --metrics 127.0.0.1:9412", "--metrics works only with --follow"),
        ("fetch m --width 0", "0 is not in the range"),
        ("fetch m --patience 0", "--patience"),
        ("fetch m --mode rw", "is no mode"),
        ("fetch m --share rdma", "'rdma' is not one of"),
        ("fetch m --wait -1", "--wait"),
        ("export --listen gpu-1:http", "names no exporter"),
        ("export --readers 0", "0 is not in the range"),
        ("export --metrics :1", "names no exporter"),
        ("export --metrics 127.0.0.1", "has no port, as 127.0.0.1:9412 has"),
        ("export --metrics ::1:7411", "has no port, as 127.0.0.1:9412 has"),
        ("peers --from", "requires an argument"),
        ("peers --from ,,", "names no host"),
        ("certificates issue x --user root", "Missing option '--authority'"),
        ("certificates issue x --authority y", "Missing option '--user'"),
        ("certificates issue x --authority y --user root --days 0", "0 is not in the range"),
        ("certificates issue x --authority y --user root --host 1.2.3", "'1.2.3' is no name or address of a host"),
        ("certificates issue x --authority y --user root --host b:1", "'b:1' is no name or address of a host"),
        ("certificates revoke x", "Missing option '--authority'"),
        ("certificates authority", "Missing argument 'DIR'"),
    ],
)
def test_wrong_usage_is_status_2(arguments: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments.split(" ")) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert reason in " ".join(errors.split())


# -- certificates ----------------------------------------------------------------------------------


def test_certificates_are_made_shown_and_revoked(tmp_path: Path) -> None:
    authority, host, user = tmp_path / "authority", tmp_path / "host", tmp_path / "user"
    done = run("certificates", "authority", authority, "--days", "9")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{authority}/ca.pem: the authority; keep {authority} safe, and give no host its ca-key.pem\n"

    named = ("--host", "gpu-1", "--host", "10.0.0.1")
    done = run("certificates", "issue", host, "--authority", authority, "--user", "root", *named)
    assert done.stdout.startswith(f"{host}/cert.pem: exports as gpu-1, 10.0.0.1, and fetches as user root; copy {host}")
    done = run("certificates", "issue", user, "--authority", authority, "--user", "alice")
    assert done.stdout.startswith(f"{user}/cert.pem: fetches as user alice; ")

    done = run("certificates", "show", host)
    assert done.stdout.startswith("user root, exports as gpu-1, 10.0.0.1, valid until 2")
    done = run("certificates", "show", user / "cert.pem")
    assert done.stdout.startswith("user alice, fetches, and does not export, valid until 2")
    shown = json.loads(run("certificates", "show", host, "--json").stdout)
    assert {*shown} == {"schema", "user", "hosts", "until", "authority"}
    assert shown["authority"] is False
    done = run("certificates", "show", authority / "ca.pem")
    assert done.stdout.startswith("authority cubroker cluster, valid until 2")
    assert json.loads(run("certificates", "show", authority / "ca.pem", "--json").stdout)["authority"] is True
    assert (shown["schema"], shown["user"], shown["hosts"]) == (1, "root", ["gpu-1", "10.0.0.1"])

    done = run("certificates", "revoke", user, "--authority", authority)
    assert done.stdout == (
        f"{authority}/crl.pem: copy it to every host, beside its ca.pem, and `systemctl reload cubroker-export` there\n"
    )


@pytest.mark.slow
def test_certificates_that_cannot_be_made_are_status_1(tmp_path: Path, certificates: Certificates) -> None:
    (tmp_path / "file").write_text("")
    given = ("--authority", certificates.authority)
    for arguments, reason in (
        (("authority", certificates.authority), "has an authority, and a new one would make"),
        (("authority", tmp_path / "file"), "File exists; check the path"),
        (("authority", tmp_path / "file" / "below"), "Not a directory; check the path"),
        (("issue", certificates.host, *given, "--user", "root"), "has a certificate, which is not replaced"),
        (("issue", tmp_path / "x", *given, "--user", ""), "cannot be the user of a certificate"),
        (("issue", tmp_path / "x", "--authority", tmp_path, "--user", "root"), "has no authority"),
        (("revoke", tmp_path, *given), "there is no certificate at"),
        (("show", tmp_path / "file"), "is no certificate in PEM"),
    ):
        done = run("certificates", *arguments)
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert done.stderr.startswith("cubroker: ")
        assert len(done.stderr.splitlines()) == 1
        assert reason in done.stderr
    assert not (tmp_path / "x").exists()


# -- peers -----------------------------------------------------------------------------------------

OFFERS = Offers(
    (
        Offer("m", 3, 1 << 20, 2, current=True),
        Offer("m", 4, 1 << 20, 2, False, b"a" * 16, 1 << 18),
        Offer("n\x1b[31m", 1, 5, 1, current=False),
    ),
    1,
    8,
)
OFFER = {"name": "m", "version": 3, "nbytes": 1 << 20, "tensors": 2, "current": True, "content": None, "there": None}


def test_peers_are_shown_with_what_they_have(certificates: Certificates) -> None:
    with lying(certificates.host, {"List": OFFERS}) as one, lying(certificates.host) as two:
        hosts = f"{one.address}, {two.address}"
        done = run("peers", "--from", hosts, "--certificates", certificates.host)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.split() for line in done.stdout.splitlines()] == [
            ["HOST", "POOL", "STATE", "SIZE", "TENSORS", "READERS"],
            [str(one.address), "m@3", "current", "1.0", "MiB", "2", "1", "of", "8"],
            [str(one.address), "m@4", "25%", "there", "1.0", "MiB", "2", "1", "of", "8"],
            [str(one.address), "n\\x1b[31m@1", "superseded", "5", "B", "1", "1", "of", "8"],
            [str(two.address), "none", "0", "of", "8"],
        ]
        done = run("peers", "m*", "--from", hosts, "--certificates", certificates.host, "--json")
    first, second = json.loads(done.stdout)
    assert first == {
        "schema": 1,
        "host": HOST,
        "address": None,
        "addresses": [],
        "port": one.address.port,
        "error": None,
        "readers": 1,
        "limit": 8,
        "pools": [OFFER, OFFER | {"version": 4, "current": False, "content": "61" * 16, "there": 1 << 18}],
    }
    assert (second["port"], second["pools"]) == (two.address.port, [])


def test_a_peer_that_claims_a_part_of_nothing_is_shown(certificates: Certificates) -> None:
    offers = (Offer("m", 1, 0, 1, False, there=0), Offer("m", 2, 1, 1, False, there=5))
    with lying(certificates.host, {"List": Offers(offers, 0, 8)}) as liar:
        done = run("peers", "--from", str(liar.address), "--certificates", certificates.host)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[2] for line in done.stdout.splitlines()[1:]] == ["0%", "100%"]


def test_a_peer_that_does_not_answer_is_status_1_and_the_others_are_shown(certificates: Certificates) -> None:
    nobody = f"{HOST}:{free_port()}"
    with (
        lying(certificates.host, {"List": OFFERS}) as one,
        lying(certificates.host, {"PeerHello": PeerRefusal("denied", "not\x1b[31m\nyou")}) as two,
    ):
        peers = ("--from", f"{one.address},{two.address},{nobody}")
        done = run("peers", *peers, "--certificates", certificates.host)
        assert done.returncode == 1
        assert len(done.stdout.splitlines()) == 4
        assert done.stderr == f"cubroker: not\\x1b[31m you; no exporter answers at {nobody}: Connection refused\n"
        done = run("peers", "n*", *peers, "--certificates", certificates.host, "--json")
        assert done.returncode == 1
        assert json.loads(done.stdout)[0]["error"] is None
        assert json.loads(done.stdout)[2]["pools"] is None


def test_where_no_peer_answers_there_is_no_table(certificates: Certificates) -> None:
    nobody = f"{HOST}:{free_port()}"
    done = run("peers", "--from", nobody, "--certificates", certificates.host)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"cubroker: no exporter answers at {nobody}: Connection refused\n"


def test_peers_come_from_the_variable_else_they_are_not_known(certificates: Certificates, tmp_path: Path) -> None:
    with lying(certificates.host) as one:
        env = environment(CUBROKER_PEERS=str(one.address), CUBROKER_CERTIFICATES=str(certificates.host))
        assert run("peers", env=env).returncode == 0
    done = run("peers", env=environment(CUBROKER_PEERS=","))
    assert (done.returncode, done.stdout) == (1, "")
    assert "no peers are known: name them by --from or $CUBROKER_PEERS, or in /etc/cubroker/cluster/peers.toml" in (
        done.stderr
    )
    done = run("peers", "--from", "gpu-1", "--certificates", tmp_path)
    assert done.returncode == 1
    assert f"there is no {tmp_path}/ca.pem" in done.stderr


# -- fetch -----------------------------------------------------------------------------------------

KEYS = {"schema", "name", "version", "nbytes", "tensors", "seconds", "read_seconds", "sources", "fetched", "from_parts"}


def test_what_is_there_is_not_fetched_again(certificates: Certificates, directory: Path, name: str) -> None:
    publish(directory, name)
    options = ("--if-absent", "--from", "gpu-1", "--directory", directory, "--certificates", certificates.host)
    done = run("fetch", name, *options, "--owner", accounts.user_name())
    assert (done.returncode, done.stdout) == (0, f"{name}@1: already there (2 tensors, 1.0 KiB); nothing fetched\n")
    with Broker(directory) as broker:
        before = broker.session
    told = json.loads(run("fetch", name, *options, "--json").stdout)
    with Broker(directory) as broker:
        assert broker.session == before + 2  # the fetch takes one
    assert {*told} == KEYS
    assert (told["schema"], told["name"], told["version"], told["fetched"]) == (1, name, 1, False)


IMPATIENT = """
from cubroker.client.loading import loader
from cubroker.integrations.cluster import fetch_process

loader.WAIT_TOLD = 0.01
fetch_process.main()
"""


def test_what_a_fetch_waits_for_is_told(
    certificates: Certificates, directory: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(fetching, "MODULE", "impatient")
    lines: list[str] = []
    given = ("--from", "gpu-1", "--directory", directory, "--certificates", certificates.host, "--wait", DEADLINE)
    with Broker(directory) as broker, broker.lock(name) as lock:

        def note(line: str) -> None:
            lines.append(line)
            if "waits" in line:
                publish(directory, name)
                lock.close()

        monkeypatch.setattr(format, "note", note)
        assert main.run(["fetch", name, "--if-absent", *map(str, given)]) == 0
    begun = f"fetching {name}"
    assert lines == [begun, f"{begun}: waits for the lock of the name; see `cubroker top`"]


def test_a_fetch_that_fails_is_one_line(certificates: Certificates, directory: Path, tmp_path: Path) -> None:
    nobody = f"{HOST}:{free_port()}"
    given: list[Any] = ["--from", nobody, "--certificates", certificates.host]
    done = run("fetch", "m", *given, "--directory", tmp_path)
    assert (done.returncode, done.stdout) == (3, "")  # no broker
    done = run("fetch", "m", *given, "--directory", directory, "--device", "7")
    assert (done.returncode, done.stdout) == (1, "")
    done = run("fetch", "m", "--from", nobody, "--certificates", tmp_path, "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"there is no {tmp_path}/ca.pem" in done.stderr


def test_what_was_fetched_is_told_in_one_line() -> None:
    done = Fetched("m", 2, 3 << 20, 1, 4.0, 2.0, ("gpu-1:7411", "gpu\x1b-2:7411"), fetched=True)
    assert cluster.summary(done, " on /run/x") == (
        "m@2 on /run/x: 1 tensor, 3.0 MiB in 4.00 s (1.5 MiB/s) from gpu-1:7411, gpu\\x1b-2:7411"
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", "fetch m --from gpu-1", "fetch m --from gpu-1 --device 0"])
def test_a_broker_has_as_long_to_greet_as_the_command_line_says(
    certificates: Certificates, tmp_path: Path, command: str
) -> None:
    if command == "export":
        need_engine()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / SESSION_SOCKET))
        silent.listen()
        given = ("--directory", tmp_path, "--certificates", certificates.host)
        done = run("--timeout", "0.05", *command.split(" "), *given)
    assert (done.returncode, done.stdout) == (3, "")
    assert "did not answer within 0.05 s: its socket listens" in done.stderr
    assert done.stderr.endswith("; cubroker --timeout SECONDS waits longer\n")


# -- export ----------------------------------------------------------------------------------------


def test_an_exporter_without_nixl_does_not_start(certificates: Certificates, directory: Path) -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(('nixl', 'nixl_cu13', 'nixl_cu12')))"
    command = [sys.executable, "-c", f"{hidden}; from cubroker.cli.main import main; sys.exit(main())"]
    given = ("--directory", directory, "--certificates", certificates.host)
    done = subprocess.run([*command, "export", *given], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    why = "a transfer between hosts needs nixl, which is not installed: pip install 'cubroker[nixl]'"
    assert done.stderr == f"cubroker: {why}\n"


def test_an_exporter_that_cannot_start_is_one_line(certificates: Certificates, directory: Path, tmp_path: Path) -> None:
    need_engine()
    given = ("--directory", directory, "--certificates", certificates.host)
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        done = run("export", "--listen", address, *given)
        assert (done.returncode, "name another --listen" in done.stderr) == (1, True)
        done = run("export", "--metrics", address, *given)
        assert (done.returncode, "name another --metrics" in done.stderr) == (1, True)
        done = run("fetch", "m", "--follow", "--from", "gpu-1", "--metrics", address, *given)
        assert (done.returncode, "name another --metrics" in done.stderr) == (1, True)
    done = run("export", "--listen", f"{HOST}:0", "--directory", tmp_path, "--certificates", certificates.host)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"cubroker: no broker serves {tmp_path}; start one with: ")
    done = run("export", "--listen", f"{HOST}:0", "--directory", directory, "--certificates", tmp_path)
    assert (done.returncode, f"there is no {tmp_path}/ca.pem" in done.stderr) == (1, True)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """A service manager, which is told how its services are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        yield server


@pytest.fixture
def source() -> Iterator[BrokerProcess]:
    """The broker of another host."""
    with serving() as process:
        yield process


def told(manager: socket.socket) -> list[str]:
    """Return what a service manager has been told: the first line of each message."""
    manager.setblocking(False)
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode().splitlines()[0])
        except BlockingIOError:
            return found


def figures(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("cubroker_")]
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines)}


def test_a_follower_goes_on_where_its_output_cannot_be_written() -> None:
    program = (
        "import sys; from cubroker.cli import cluster, main\n"
        "from cubroker.integrations.cluster.messages import Fetched\n"
        "versions = (Fetched('m', number, 1, 1, 1.0, 1.0, ('gpu-1',), fetched=True) for number in (1, 2))\n"
        "cluster.follow = lambda *_, **__: versions\n"
        "sys.argv = ['cubroker', 'fetch', 'm', '--follow', '--from', 'gpu-1']; sys.exit(main.main())"
    )
    script = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, program]
    done = subprocess.run(script, stderr=subprocess.PIPE, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stderr) == (0, "cubroker: cannot write the output: Bad file descriptor\n" * 2)


@pytest.mark.slow
def test_figures_and_a_reload_of_services_that_export_and_follow(
    certificates: Certificates,
    source: BrokerProcess,
    directory: Path,
    name: str,
    manager: socket.socket,
    tmp_path: Path,
) -> None:
    need_engine()
    publish(source.directory, name)
    folder = tmp_path / "own"
    folder.mkdir()
    for file in certificates.host.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
        (folder / file.name).chmod(0o600)
    port, follows = free_port(), free_port()
    environ = {"NOTIFY_SOCKET": manager.getsockname()}
    with exporting(source.directory, folder, "--metrics", f"{HOST}:{port}", environment=environ) as exporter:
        command = ["fetch", name, "--follow", "--from", exporter.address, "--metrics", f"{HOST}:{follows}", "--json"]
        with subprocess.Popen(
            [sys.executable, "-m", "cubroker", *command, "--directory", directory, "--certificates", folder],
            env=os.environ | ENGINE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as follower:
            assert follower.stdout
            assert follower.stderr
            lines = ""
            while not lines.endswith("}\n"):
                lines += follower.stdout.readline()
            done = json.loads(lines)
            assert {*done} == KEYS
            assert (done["version"], done["fetched"], done["sources"]) == (1, True, [exporter.address])
            found = figures(follows)
            assert found[f'cubroker_fetch_bytes_total{{pool="{name}"}}'] == done["nbytes"]
            assert found[f'cubroker_fetch_part_bytes_total{{pool="{name}"}}'] == done["from_parts"] == 0
            assert found[f'cubroker_fetch_version{{pool="{name}"}}'] == 1
            assert found[f'cubroker_fetch_seconds_count{{pool="{name}"}}'] == 1
            eventually(lambda: figures(port)["cubroker_export_readers"] == 0, "the reader to end")
            found = figures(port)
            assert found["cubroker_export_connections"] == 1
            assert found["cubroker_export_drafts"] == 0
            assert found[f'cubroker_export_read_bytes_total{{pool="{name}"}}'] == done["nbytes"]
            assert found[f'cubroker_export_versions_total{{pool="{name}"}}'] == 1

            status, why = fetch(directory, folder, "none", "--from", exporter.address)
            assert (status, "it has no none that this host may fetch" in why) == (1, True)

            right = (folder / "ca.pem").read_bytes()
            (folder / "ca.pem").write_text("damaged")
            exporter.process.send_signal(signal.SIGHUP)
            eventually(lambda: "the certificates stay as they were: " in exporter.log(), "the failure")
            (folder / "ca.pem").write_bytes(right)
            exporter.process.send_signal(signal.SIGHUP)
            eventually(lambda: "the certificates were read again" in exporter.log(), "the reload")

            assert exporter.stop() == 0
            said = told(manager)
            assert [each for each in said if each != "STATUS=exporting"] == [
                "READY=1",
                "RELOADING=1",
                "READY=1",
                "RELOADING=1",
                "READY=1",
                "STOPPING=1",
            ]
            assert "trying again" in follower.stderr.readline()
            eventually(lambda: "cubroker_fetch_failures_total" in str(figures(follows)), "the failure")
            follower.send_signal(signal.SIGINT)
            follower.communicate()
    with Broker(directory) as broker:
        eventually(lambda: not any(pool.leases for pool in broker.pools()), "leases to end")
