"""deploy/docker-compose.yml: each profile's tokenizer started as it says, and called from its engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
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
    options,
)

PATH = ROOT / "deploy/docker-compose.yml"
PROFILES = ["cpu", "gpu", "shared-gpu"]


def interpolated(content: Any) -> Any:
    """With the defaults of the variables, which all have one."""
    if isinstance(content, dict):
        return {key: interpolated(value) for key, value in content.items()}
    if isinstance(content, list):
        return [interpolated(value) for value in content]
    if isinstance(content, str):
        content = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", content)
        assert "$" not in content, f"a variable without a default in {content}"
    return content


FILE = interpolated(yaml.safe_load(PATH.read_text()))
SERVICES: dict[str, dict[str, Any]] = FILE["services"]


def seconds(text: str) -> float:
    """A duration, such as 1m30s."""
    return sum(float(number) * {"m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([ms])", text))


def binds(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted, by its path in the container."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}


def container(service: dict[str, Any]) -> Container:
    """What compose would run."""
    image = image_of(service["image"])
    uid, gid = map(int, service["user"].split(":"))
    entrypoint = service.get("entrypoint") or json_list(image.value("ENTRYPOINT"))
    return Container(
        command=(*entrypoint, *service["command"]),
        environment=image.environment | service["environment"],
        uid=uid,
        gid=gid,
        groups=tuple(map(int, service.get("group_add", ()))),
        mounts=binds(service),
    )


def made(name: str, first: Container) -> Folder:
    """A new volume: as the file says, or else as the folder in the image of the container that mounts it first."""
    options = ((FILE["volumes"][name] or {}).get("driver_opts") or {}).get("o")
    if options is None:
        image = SERVER if first.command[0] == "mimo-tokenizer" else ENGINE
        return image.folders[next(path for path, volume in first.mounts.items() if volume == name)]
    told = dict(option.split("=") for option in options.split(","))
    return Folder(int(told["uid"]), int(told["gid"]), int(told["mode"], 8))


@pytest.mark.parametrize("profile", PROFILES)
def test_an_engine_encodes_and_decodes(profile: str, machine: Machine) -> None:
    service = SERVICES[f"tokenizer-{profile}"]
    tokenizer, engine = container(service), container(SERVICES[f"engine-{profile}"])
    for one in (tokenizer, engine):
        for name in one.mounts.values():
            if not (machine.root / name).exists():
                machine.volume(name, made(name, one))
    process = machine.start(tokenizer)
    keyword, *health = service["healthcheck"]["test"]
    assert keyword == "CMD"
    machine.wait(process, lambda: machine.run(tokenizer, *health).returncode == 0)

    address = engine_address(engine)
    answered = machine.calls(engine, address)
    assert answered.stdout.strip() == ANSWER, answered.stdout
    if os.geteuid() == 0:
        assert machine.calls(engine, address, groups=()).returncode != 0, "anybody may connect"

    port = machine.ports[int(str(tokenizer.told("--metrics-address")).rpartition(":")[2])]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        assert "mimo_tokenizer_ready 1.0" in response.read().decode()

    grace = float(str(tokenizer.told("--grace-seconds")))
    assert grace < seconds(service["stop_grace_period"])
    status, log = machine.stop(process, seconds(service["stop_grace_period"]))
    assert status == 0, log
    assert f"grace_seconds={grace:g}" in log
    assert machine.run(tokenizer, *health).returncode == 1


# ---------------------------------------------------------------- the file alone


def test_the_schema() -> None:
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", PATH]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_kept_apart(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert int(service["user"].split(":")[0]) > 0
    assert_pinned(service["image"], version("mimo-audio-tokenizer-service"))
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_no_secrets() -> None:
    assert_no_secrets(FILE)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profiles_engine_waits_for_its_tokenizer(profile: str) -> None:
    tokenizer, engine = SERVICES[f"tokenizer-{profile}"], SERVICES[f"engine-{profile}"]
    assert tokenizer["profiles"] == engine["profiles"] == [profile]
    assert engine["depends_on"] == {f"tokenizer-{profile}": {"condition": "service_healthy"}}
    assert container(tokenizer).uid == SERVER.user[0]
    assert container(tokenizer).gid == SERVER.user[1]
    assert container(engine).uid not in (0, SERVER.user[0])
    assert container(engine).groups == (SERVER.user[1],)
    # The same socket in the same volume, and nothing else that both have.
    shared = set(container(tokenizer).mounts.items()) & set(container(engine).mounts.items())
    assert shared == {("/run/mimo-tokenizer", "socket")}
    assert engine_address(container(engine)) == container(tokenizer).told("--address")
    assert FILE["volumes"].keys() >= {*container(tokenizer).mounts.values(), *container(engine).mounts.values()}
    assert made("socket", container(tokenizer)) == SERVER.folders["/run/mimo-tokenizer"]
    # What the image writes to is what the file leaves writable, and /tmp.
    assert set(container(tokenizer).mounts) == set(json_list(SERVER.value("VOLUME")))


def gpus(service: dict[str, Any]) -> list[str]:
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    return [number for device in devices for number in device["device_ids"]]


@pytest.mark.parametrize("profile", PROFILES)
def test_each_has_the_gpus_that_it_uses(profile: str) -> None:
    tokenizer, engine = SERVICES[f"tokenizer-{profile}"], SERVICES[f"engine-{profile}"]
    device = container(tokenizer).told("--device")
    assert device == ("cpu" if profile == "cpu" else "cuda:0")
    assert len(gpus(tokenizer)) == (device != "cpu")
    assert tokenizer["image"].endswith("-cpu" if device == "cpu" else "-cuda")
    assert tokenizer["build"]["args"] == {"VARIANT": "cpu" if device == "cpu" else "cuda"}
    file = str(container(engine).told("--deploy-config")).rpartition("/")[2]
    text = (ROOT / "deploy/engine" / file).read_text()
    assert {stage["devices"] for stage in yaml.safe_load(text)["stages"]} == {str(n) for n in range(len(gpus(engine)))}
    # The deploy file's own first lines say which server it goes with.
    command = options(
        re.sub(r"\\\n#|\n#", " ", text).partition("mimo-tokenizer serve")[2].partition("vllm serve")[0].split()
    )
    assert command.get("--device-memory-limit") == container(tokenizer).told("--device-memory-limit")
    theirs = re.fullmatch(r"cuda:(\d)", command["--device"])
    assert [theirs[1]] == gpus(tokenizer) if theirs else gpus(tokenizer) == []


# ---------------------------------------------------------------- the dashboard


def test_prometheus_finds_every_tokenizer() -> None:
    service = SERVICES["prometheus"]
    config = yaml.safe_load((PATH.parent / binds(service)["/etc/prometheus/prometheus.yml"]).read_text())
    assert set(config) == {"global", "scrape_configs"}
    (job,) = config["scrape_configs"]
    # Left out: the path is /metrics, and the scheme HTTP.
    assert set(job) == {"job_name", "static_configs"}
    ((target,),) = (one["targets"] for one in job["static_configs"])
    host, _, port = target.partition(":")
    for profile in PROFILES:
        tokenizer = SERVICES[f"tokenizer-{profile}"]
        assert host in tokenizer["networks"]["default"]["aliases"]
        assert container(tokenizer).told("--metrics-address") == f"0.0.0.0:{port}"
    assert "networks" not in service, "the default network is the tokenizers'"


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    service = SERVICES["grafana"]
    mounted = binds(service)
    folder = PATH.parent / mounted["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    # Prometheus' own port, which no flag changes.
    assert source["url"] == "http://prometheus:9090"
    assert "command" not in SERVICES["prometheus"]
    assert source["type"] == "prometheus"
    assert source["isDefault"] is True
    prometheus = yaml.safe_load((PATH.parent / "prometheus/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((folder / "dashboards/mimo-tokenizer.yml").read_text())["providers"]
    (dashboard,) = [path for path in mounted if path.endswith(".json")]
    assert str(Path(dashboard).parent) == provider["options"]["path"]
    assert (PATH.parent / mounted[dashboard]).resolve() == ROOT / "deploy/grafana/mimo-tokenizer.json"
    assert service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    assert "networks" not in service
    assert SERVICES["prometheus"]["profiles"] == service["profiles"] == ["monitoring"]


def test_what_is_mounted_is_there() -> None:
    for service in SERVICES.values():
        for source in binds(service).values():
            assert source in FILE["volumes"] or (source.startswith("./") and (PATH.parent / source).exists()), source
