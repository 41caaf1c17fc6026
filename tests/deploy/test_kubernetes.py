"""deploy/kubernetes: the containers started as the files say, probed as the kubelet does, and called."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import trustme
import yaml
from containers import (
    ANSWER,
    ENGINE,
    ROOT,
    SERVER,
    Container,
    Folder,
    Machine,
    assert_no_secrets,
    assert_pinned,
    engine_address,
    image_of,
    json_list,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

FOLDER = ROOT / "deploy/kubernetes"


def resources(name: str) -> dict[str, Any]:
    """A file's, by kind."""
    return {content["kind"]: content for content in yaml.safe_load_all((FOLDER / name).read_text())}


POD = resources("pod.yaml")
SHARED = resources("shared.yaml")
IN_POD = POD["Pod"]["spec"]
IN_SHARED = SHARED["Deployment"]["spec"]["template"]["spec"]
(TOKENIZER,) = IN_POD["initContainers"]
(ENGINE_OF_POD,) = IN_POD["containers"]
(SHARED_TOKENIZER,) = IN_SHARED["containers"]
SERVERS = [pytest.param(IN_POD, TOKENIZER, id="pod"), pytest.param(IN_SHARED, SHARED_TOKENIZER, id="shared")]
ALL = [*SERVERS, pytest.param(IN_POD, ENGINE_OF_POD, id="engine")]


def container(pod: dict[str, Any], spec: dict[str, Any]) -> Container:
    """What the kubelet would run."""
    image = image_of(spec["image"])
    user = spec["securityContext"]
    return Container(
        command=(*(spec.get("command") or json_list(image.value("ENTRYPOINT"))), *spec["args"]),
        environment=image.environment | {one["name"]: one["value"] for one in spec.get("env", ())},
        uid=user["runAsUser"],
        gid=user["runAsGroup"],
        groups=(pod["securityContext"]["fsGroup"],),
        mounts={
            mount["mountPath"]: "/".join(filter(None, (mount["name"], mount.get("subPath"))))
            for mount in spec["volumeMounts"]
        },
    )


def make_volumes(machine: Machine, pod: dict[str, Any], *containers: Container) -> None:
    """As the kubelet does: root's, open to the pod's fsGroup, whose folders and files belong to it, too."""
    folder = Folder(0, pod["securityContext"]["fsGroup"], 0o2775)
    for name in {name for one in containers for name in one.mounts.values()}:
        machine.volume(name, folder)


def secret(machine: Machine, pod: dict[str, Any], name: str, files: dict[str, bytes]) -> None:
    """Write a secret's files into its volume."""
    (volume,) = [one["secret"] for one in pod["volumes"] if one["name"] == name]
    for file, content in files.items():
        path = machine.root / name / file
        path.write_bytes(content)
        if os.geteuid() == 0:
            os.chown(path, 0, pod["securityContext"]["fsGroup"])
        path.chmod(volume["defaultMode"])


def probe(machine: Machine, spec: dict[str, Any], kind: str) -> bool:
    """A gRPC probe: plain text, over TCP, to the pod's address."""
    told = spec[kind]["grpc"]
    with grpc.insecure_channel(f"127.0.0.1:{machine.ports.get(told['port'])}") as channel:
        request = health_pb2.HealthCheckRequest(service=told["service"])
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=spec[kind].get("timeoutSeconds", 1))
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_the_engine_of_the_pod_encodes_and_decodes(machine: Machine) -> None:
    tokenizer, engine = container(IN_POD, TOKENIZER), container(IN_POD, ENGINE_OF_POD)
    make_volumes(machine, IN_POD, tokenizer, engine)
    process = machine.start(tokenizer)
    machine.wait(process, lambda: probe(machine, TOKENIZER, "startupProbe"))
    assert probe(machine, TOKENIZER, "readinessProbe")
    assert probe(machine, TOKENIZER, "livenessProbe")
    address = engine_address(engine)
    answered = machine.calls(engine, address)
    assert answered.stdout.strip() == ANSWER, answered.stdout
    if os.geteuid() == 0:
        assert machine.calls(engine, address, groups=()).returncode != 0, "anybody may connect"
    status, log = machine.stop(process, IN_POD["terminationGracePeriodSeconds"])
    assert status == 0, log


def test_a_client_of_the_shared_server_encodes_and_decodes(machine: Machine) -> None:
    tokenizer = container(IN_SHARED, SHARED_TOKENIZER)
    make_volumes(machine, IN_SHARED, tokenizer)
    authority = trustme.CA()
    name = SHARED["Service"]["metadata"]["name"]
    certificate = authority.issue_cert(name)
    chain = b"".join(blob.bytes() for blob in certificate.cert_chain_pems)
    secret(machine, IN_SHARED, "tls", {"tls.crt": chain, "tls.key": certificate.private_key_pem.bytes()})
    secret(machine, IN_SHARED, "token", {"tokens": b"a-token-of-this-test\n"})
    process = machine.start(tokenizer)
    machine.wait(process, lambda: probe(machine, SHARED_TOKENIZER, "startupProbe"))

    # On another machine, with the files that its owner was given.
    authority.cert_pem.write_to_path(machine.root / "ca.crt")
    token = machine.root / "token-of-client"
    token.write_text("a-token-of-this-test\n")
    environment = {
        "MIMO_AUDIO_TOKENIZER_TLS_CA": str(machine.root / "ca.crt"),
        "MIMO_AUDIO_TOKENIZER_TLS_SERVER_NAME": name,
        "MIMO_AUDIO_TOKENIZER_TOKEN_FILE": str(token),
    }
    client = Container(("true",), environment, uid=10003, gid=10003, groups=(), mounts={})
    address = f"127.0.0.1:{machine.ports[50051]}"
    answered = machine.calls(client, address)
    assert answered.stdout.strip() == ANSWER, answered.stdout
    token.write_text("another-token-of-this-test\n")
    assert machine.calls(client, address).returncode != 0, "any token will do"
    status, log = machine.stop(process, IN_SHARED["terminationGracePeriodSeconds"])
    assert status == 0, log
    assert "a-token-of-this-test" not in log


# ---------------------------------------------------------------- the files alone


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
@pytest.mark.parametrize("kubernetes", ["1.30", kubernetes_validate.latest_version()])
def test_the_schema(path: Path, kubernetes: str) -> None:
    """Of the oldest version that the files are for, and the newest that is known here."""
    for content in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(content, kubernetes, strict=True)
        assert_no_secrets(content)


@pytest.mark.parametrize(("pod", "spec"), ALL)
def test_a_container_is_kept_apart(pod: dict[str, Any], spec: dict[str, Any]) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    context = spec["securityContext"]
    assert context["runAsUser"] > 0
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert spec["resources"]["limits"]["memory"]
    assert_pinned(spec["image"], version("mimo-audio-tokenizer-service"))


@pytest.mark.parametrize(("pod", "spec"), ALL)
def test_what_is_mounted_is_a_volume(pod: dict[str, Any], spec: dict[str, Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in spec["volumeMounts"]} <= volumes.keys()
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in volumes.values()
        if len(volume) > 1 and "persistentVolumeClaim" in volume
    }
    assert claims <= {POD["PersistentVolumeClaim"]["metadata"]["name"]}
    mounts = {mount["mountPath"]: mount for mount in spec["volumeMounts"]}
    assert "/tmp" in mounts
    # A file of a secret that is mounted by itself is never renewed.
    assert all("subPath" not in mount for mount in mounts.values() if "secret" in volumes[mount["name"]])
    if image_of(spec["image"]) is SERVER:
        assert mounts.keys() >= ({"/cache"} if pod is IN_SHARED else set(json_list(SERVER.value("VOLUME"))))
    else:
        assert mounts.keys() >= ENGINE.folders.keys()


@pytest.mark.parametrize(("pod", "spec"), SERVERS)
def test_ports_are_the_flags(pod: dict[str, Any], spec: dict[str, Any]) -> None:
    told = container(pod, spec)
    assert (told.uid, told.gid) == SERVER.user
    assert told.groups == (SERVER.user[1],)
    flags = {"grpc": "--address", "health": "--health-address", "metrics": "--metrics-address"}
    for port in spec["ports"]:
        assert told.told(flags[port["name"]]) == f"0.0.0.0:{port['containerPort']}"
    (health,) = [port["containerPort"] for port in spec["ports"] if port["name"] == "health"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert spec[kind]["grpc"] == {"port": health, "service": "mimo_audio_tokenizer.v1.AudioTokenizer"}
    assert spec["startupProbe"]["periodSeconds"] * spec["startupProbe"]["failureThreshold"] == 900


@pytest.mark.parametrize(("pod", "spec"), SERVERS)
def test_the_grace_is_within_the_pods(pod: dict[str, Any], spec: dict[str, Any]) -> None:
    asleep = spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    grace = float(str(container(pod, spec).told("--grace-seconds")))
    assert asleep + grace + 5 <= pod["terminationGracePeriodSeconds"]


def test_the_sidecar_starts_first_and_shares_a_socket_with_the_engine() -> None:
    assert TOKENIZER["restartPolicy"] == "Always"
    tokenizer, engine = container(IN_POD, TOKENIZER), container(IN_POD, ENGINE_OF_POD)
    shared = set(tokenizer.mounts.items()) & set(engine.mounts.items())
    assert shared == {("/run/mimo-tokenizer", "socket")}
    assert engine_address(engine) == tokenizer.told("--address")
    assert engine.uid != tokenizer.uid
    (http,) = ENGINE_OF_POD["ports"]
    assert engine.told("--port") == str(http["containerPort"])
    for kind in ("startupProbe", "readinessProbe"):
        assert ENGINE_OF_POD[kind]["httpGet"]["port"] == http["name"]


@pytest.mark.parametrize(("pod", "spec"), ALL)
def test_each_has_the_gpus_that_it_uses(pod: dict[str, Any], spec: dict[str, Any]) -> None:
    limit = spec["resources"]["limits"]["nvidia.com/gpu"]
    told = container(pod, spec)
    if image_of(spec["image"]) is SERVER:
        assert told.told("--device") == "cuda:0"
        assert spec["image"].endswith("-cuda")
        assert limit == 1
    else:
        file = ROOT / "deploy/engine" / str(told.told("--deploy-config")).rpartition("/")[2]
        stages = yaml.safe_load(file.read_text())["stages"]
        assert {stage["devices"] for stage in stages} == {str(number) for number in range(limit)}


def test_the_shared_service_is_of_the_deployment() -> None:
    deployment, service = SHARED["Deployment"]["spec"], SHARED["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == labels
    assert deployment["selector"]["matchLabels"] == labels
    assert SHARED["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert service["clusterIP"] == "None"
    ports = {port["name"]: port["containerPort"] for port in SHARED_TOKENIZER["ports"]}
    for port in service["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    assert deployment["replicas"] > SHARED["PodDisruptionBudget"]["spec"]["maxUnavailable"] > 0
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_policy_opens_calls_to_all_and_metrics_to_prometheus() -> None:
    policy = SHARED["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == SHARED["Deployment"]["spec"]["selector"]
    assert policy["policyTypes"] == ["Ingress"]
    opened = {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}
    # The kubelet asks for health, which no policy keeps out.
    assert opened.keys() == {port["name"] for port in SHARED_TOKENIZER["ports"]} - {"health"}
    assert opened["grpc"] == [{"namespaceSelector": {}}]
    assert opened["metrics"] != opened["grpc"]


def test_the_shared_server_has_tls_a_token_and_connections_that_end() -> None:
    told = container(IN_SHARED, SHARED_TOKENIZER)
    secrets = {volume["name"] for volume in IN_SHARED["volumes"] if "secret" in volume}
    for flag in ("--tls-cert", "--tls-key", "--token-file"):
        folder = str(Path(str(told.told(flag))).parent)
        assert told.mounts[folder] in secrets
    assert float(str(told.told("--max-connection-age-seconds"))) > 0
    for volume in IN_SHARED["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440
            assert volume["secret"]["secretName"] in re.findall(r"[\w-]+", (FOLDER / "README.md").read_text())
