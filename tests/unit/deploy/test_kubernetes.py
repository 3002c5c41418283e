"""The manifests: against the schemas of Kubernetes, against each other, and what they run against cubroker."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from cubroker.client import Broker
from cubroker.integrations.cluster.connection import CA, CERTIFICATE, KEY
from cubroker.integrations.cluster.messages import PORT
from tests import checkpoints
from tests.brokers import PATIENCE, BrokerProcess
from tests.measuring import unmeasured
from tests.stores import storing
from tests.unit.cli.processes import environment, run
from tests.unit.deploy import containerfile

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/kubernetes"
FILES = ("cubroker.yaml", "worker.yaml", "export.yaml")
VERSIONS = ("1.27", "1.31", "")
"""Releases of Kubernetes: old ones that are in use, and the newest that the checker knows."""

FINAL = containerfile.read(ROOT / "deploy/container/Containerfile")[-1]
UID = int(FINAL.one("USER").value.partition(":")[0])
(CLIENTS,) = map(
    int, re.findall(r"groupadd --gid (\d+) cubroker-clients", " ".join(each.value for each in FINAL.all("RUN")))
)
"""The group of those who may connect."""


def documents(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / file).read_text()))


def one(file: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in documents(file) if each["kind"] == kind]
    return found


def pod(file: str) -> dict[str, Any]:
    spec: dict[str, Any] = owner(file)["template"]["spec"]
    return spec


def owner(file: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(file, "Deployment" if file == "worker.yaml" else "DaemonSet")["spec"]
    return spec


def containers() -> list[Any]:
    return [
        pytest.param(file, each, id=f"{file}-{each['name']}")
        for file in FILES
        for kind in ("initContainers", "containers")
        for each in pod(file)[kind]
    ]


(BROKER,) = pod("cubroker.yaml")["containers"]
SETTINGS = one("cubroker.yaml", "ConfigMap")["data"]["cubroker.toml"]


@pytest.fixture(scope="module")
def checker() -> Any:
    """The schemas of Kubernetes, for the tests that ask them: their import takes two seconds, for parsers of IRIs."""
    with unmeasured():
        return import_module("kubernetes_validate")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES)
def test_every_document_is_what_kubernetes_takes(checker: Any, file: str, version: str) -> None:
    for document in documents(file):
        checker.validate(document, version or checker.latest_version(), strict=True)


@pytest.mark.slow
def test_a_field_that_there_is_not_would_be_found(checker: Any) -> None:
    wrong = one("cubroker.yaml", "DaemonSet")
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(checker.ValidationError, match="hostPid"):
        checker.validate(wrong, checker.latest_version(), strict=True)


@pytest.mark.parametrize("file", FILES)
def test_pods_are_found_by_their_owner_and_have_the_volumes_that_they_mount(file: str) -> None:
    assert owner(file)["selector"]["matchLabels"] == owner(file)["template"]["metadata"]["labels"]
    volumes = {each["name"]: each for each in pod(file)["volumes"]}
    mounted = {
        mount["name"]
        for kind in ("initContainers", "containers")
        for each in pod(file)[kind]
        for mount in each["volumeMounts"]
    }
    assert mounted == volumes.keys()
    maps = {each["metadata"]["name"] for each in documents(file) if each["kind"] == "ConfigMap"}
    assert {each["configMap"]["name"] for each in volumes.values() if "configMap" in each} == maps


@pytest.mark.parametrize(("file", "container"), containers())
def test_no_container_has_more_privileges_than_it_needs(file: str, container: dict[str, Any]) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    changes_owner = container.get("command", [""])[0] == "chown"
    assert context["capabilities"].get("add", []) == ["CHOWN"] * changes_owner
    assert (context.get("runAsUser") == 0) == changes_owner
    assert pod(file)["securityContext"]["runAsNonRoot"] is True
    assert pod(file)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(file)["automountServiceAccountToken"] is False


def test_the_brokers_pods_need_no_network_and_have_none() -> None:
    policy = one("cubroker.yaml", "NetworkPolicy")
    assert policy["metadata"]["namespace"] == one("cubroker.yaml", "DaemonSet")["metadata"]["namespace"]
    assert policy["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ports = [
        each for kind in ("initContainers", "containers") for each in pod("cubroker.yaml")[kind] if "ports" in each
    ]
    assert ports == []
    assert "hostNetwork" not in pod("cubroker.yaml")


def test_exporters_are_found_by_their_service_and_reached_at_their_ports_alone() -> None:
    labels = owner("export.yaml")["template"]["metadata"]["labels"]
    service, policy = (one("export.yaml", kind)["spec"] for kind in ("Service", "NetworkPolicy"))
    assert (service["clusterIP"], service["selector"]) == ("None", labels)
    assert policy["podSelector"]["matchLabels"] == labels
    (export,) = pod("export.yaml")["containers"]
    (control, data) = policy["ingress"][0]["ports"]
    assert control["port"] == service["ports"][0]["port"] == export["ports"][0]["containerPort"] == PORT
    assert export["env"] == [{"name": "UCX_TCP_PORT_RANGE", "value": f"{data['port']}-{data['endPort']}"}]
    readers = int(export["command"][export["command"].index("--readers") + 1])
    assert data["endPort"] - data["port"] + 1 >= 4 * (readers + 1)


def test_the_exporter_gets_the_files_of_certificates_that_it_looks_for_and_none_else_may_read_the_key() -> None:
    volumes = {each["name"]: each for each in pod("export.yaml")["volumes"]}
    assert [each["path"] for each in volumes["secret"]["secret"]["items"]] == [CA, CERTIFICATE, KEY]
    (copy,) = pod("export.yaml")["initContainers"]
    assert "install -m 600 -t /certificates /secret/*.pem" in copy["command"][-1]
    (export,) = pod("export.yaml")["containers"]
    program, *words = export["command"]
    assert program == "cubroker"
    known = run(words[0], "--help").stdout
    assert [word for word in words if word.startswith("--") and word not in known] == []


def test_the_group_of_clients_is_nobodys_primary_group_so_that_it_owns_no_pool() -> None:
    primary = {pod(file)["securityContext"]["runAsGroup"] for file in FILES}
    assert CLIENTS not in primary
    assert len(primary) == len(FILES)


def test_there_is_one_user_one_group_and_one_directory_in_all_places() -> None:
    context = pod("cubroker.yaml")["securityContext"]
    owner = f"{UID}:{UID}"
    assert FINAL.one("USER").value == owner
    assert (context["runAsUser"], context["runAsGroup"]) == (UID, UID)
    assert pod("cubroker.yaml")["initContainers"][0]["command"] == ["chown", owner, "/run/cubroker"]
    assert f"group = {CLIENTS}\n" in SETTINGS
    assert [pod(file)["securityContext"]["supplementalGroups"] for file in FILES] == [[CLIENTS]] * len(FILES)
    directory = containerfile.environment(FINAL, {"PATH": ""})["CUBROKER_DIR"]
    for file in FILES:
        (run_volume,) = [each for each in pod(file)["volumes"] if each["name"] == "run"]
        assert run_volume["hostPath"]["path"] == directory
        for kind in ("initContainers", "containers"):
            for each in pod(file)[kind]:
                if each["name"] == "certificates":  # it only copies
                    continue
                assert directory in [mount["mountPath"] for mount in each["volumeMounts"] if mount["name"] == "run"]


def test_the_settings_are_where_the_image_looks_for_them_and_make_sense(tmp_path: Path) -> None:
    file = Path(containerfile.environment(FINAL, {"PATH": ""})["CUBROKER_CONFIG"])
    (mount,) = [each for each in BROKER["volumeMounts"] if each["name"] == "config"]
    assert file.parent == Path(mount["mountPath"])
    (tmp_path / file.name).write_text(SETTINGS)
    done = run("config", "check", tmp_path / file.name)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pool_is_for_the_pods_of_one_user_unless_its_creator_gives_it_a_mode() -> None:
    assert tomllib.loads(SETTINGS)["mode"] == 0o600
    assert len({pod(file)["securityContext"]["runAsUser"] for file in FILES}) == len(FILES)


def test_a_pod_has_more_time_to_end_than_the_broker_takes() -> None:
    (drain,) = [int(line.split()[-1]) for line in SETTINGS.splitlines() if line.startswith("drain_seconds")]
    *_, wait = BROKER["lifecycle"]["preStop"]["exec"]["command"]
    assert pod("cubroker.yaml")["terminationGracePeriodSeconds"] > drain + int(wait)


def test_before_a_pod_ends_its_broker_is_drained(broker: BrokerProcess) -> None:
    program, *arguments = BROKER["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "cubroker"
    env = environment(CUBROKER_DIR=str(broker.directory))
    assert run(*arguments, env=env).returncode == 0
    ready, live = (run(*BROKER[f"{probe}Probe"]["exec"]["command"][1:], env=env) for probe in ("readiness", "liveness"))
    assert (ready.returncode, live.returncode) == (1, 0)


@pytest.mark.slow
def test_probes_succeed_where_a_broker_serves_and_fail_where_there_is_none_and_have_the_time_that_they_take(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, *arguments = BROKER[probe]["exec"]["command"]
        assert program == "cubroker"
        assert run(*arguments, env=environment(CUBROKER_DIR=str(broker.directory))).returncode == 0
        assert run(*arguments, env=environment(CUBROKER_DIR=str(tmp_path))).returncode == 3
        assert BROKER[probe]["timeoutSeconds"] > 5, "ping waits for so long by itself"


@contextmanager
def working(script: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as worker:
        try:
            yield worker
        finally:
            worker.kill()


@pytest.mark.slow
def test_the_example_loads_once_attaches_and_gives_back_when_it_is_told_to_end(tmp_path: Path) -> None:
    tensors = checkpoints.filled([("norm.weight", "BF16", (4, 8)), ("step", "I64", ())])
    path = checkpoints.write(tmp_path / "llama.safetensors", tensors)
    (loader,) = pod("worker.yaml")["initContainers"]
    program, *arguments = [str(path) if each == "/models/llama" else each for each in loader["command"]]
    assert program == "cubroker"
    script = one("worker.yaml", "ConfigMap")["data"]["worker.py"]
    with storing() as broker:
        env = environment(CUBROKER_DIR=str(broker.directory))
        for _ in range(2):
            done = run(*arguments, env=env)
            assert done.returncode == 0, done.stderr
        with Broker(broker.directory) as observer, working(script, env) as worker:
            assert worker.stdout
            assert worker.stdout.readline() == f"llama@1: 2 tensors, {observer.pools()[0].nbytes} bytes\n"
            assert observer.pools()[0].leases == 1
            assert observer.pools()[0].durable
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE) == 0
            assert observer.pools()[0].leases == 0
