"""What lies under deploy/ is what Kubernetes and systemd read, and calls the program as it is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from h3trt.cli import app

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM = "/opt/h3trt/.venv/bin/h3trt"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_own_schemas_take_the_manifests(manifest: Path) -> None:
    for document in yaml.safe_load_all(manifest.read_text()):
        kubernetes_validate.validate(document, "1.29", strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    """Were they not found, everything would pass."""
    document = yaml.safe_load((DEPLOY / "kubernetes" / "service.yaml").read_text())
    document["spec"]["prots"] = document["spec"].pop("ports")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.29", strict=True)


def _deployment() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())


def test_the_parts_of_the_installation_name_each_other() -> None:
    parts = {
        document["kind"]: document for manifest in MANIFESTS for document in yaml.safe_load_all(manifest.read_text())
    }
    deployment = parts["Deployment"]
    labels, pod = deployment["spec"]["template"]["metadata"]["labels"], deployment["spec"]["template"]["spec"]
    assert parts["Service"]["spec"]["selector"] == labels
    assert parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert parts["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    ports = {port["name"] for container in pod["containers"] for port in container["ports"]}
    assert {port["targetPort"] for port in parts["Service"]["spec"]["ports"]} <= ports
    used = set(re.findall(r"\$\((\w+)\)", str(pod)))
    assert used == set(parts["ConfigMap"]["data"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = {one["name"] for c in (*pod["initContainers"], *pod["containers"]) for one in c["volumeMounts"]}
    assert volumes == mounts


def test_the_server_is_stopped_after_its_gateway_and_both_have_time_to_drain() -> None:
    """Sidecars, which are init containers that stay, end after the main container."""
    pod, settings = (
        _deployment()["spec"]["template"]["spec"],
        yaml.safe_load((DEPLOY / "kubernetes" / "configmap.yaml").read_text()),
    )
    (server,) = pod["initContainers"]
    assert (server["name"], server["restartPolicy"]) == ("triton", "Always")
    assert [container["name"] for container in pod["containers"]] == ["gateway"]
    assert pod["terminationGracePeriodSeconds"] > 2 * int(settings["data"]["H3_DRAIN_SECONDS"])


def _commands() -> Iterator[list[str]]:
    """Every call of the program under deploy/."""
    pod = _deployment()["spec"]["template"]["spec"]
    for container in (*pod["initContainers"], *pod["containers"]):
        yield container["command"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if command := container.get(probe, {}).get("exec", {}).get("command"):
                yield command
    for unit in UNITS:
        yield from (line.removeprefix("ExecStart=").split() for line in _lines(unit) if line.startswith("ExecStart="))


def _lines(unit: Path) -> list[str]:
    return unit.read_text().splitlines()


@pytest.mark.parametrize("command", list(_commands()), ids=" ".join)
def test_the_program_has_every_command_and_option_that_is_called(command: list[str]) -> None:
    assert command[0] == PROGRAM
    known = get_command(app).commands[command[1]]  # type: ignore[attr-defined]
    options = {name for parameter in known.params for name in parameter.opts}
    assert {word.partition("=")[0] for word in command[2:] if word.startswith("--")} <= options


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("this machine has no systemd-analyze")
    for unit in UNITS:
        # The program is not installed where the units expect it.
        (tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAM, sys.executable))
    files = [str(tmp_path / unit.name) for unit in UNITS]
    done = subprocess.run([verify, "verify", "--man=no", *files], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_unit_s_wrong_setting_is_found(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("this machine has no systemd-analyze")
    text = UNITS[0].read_text().replace(PROGRAM, sys.executable).replace("Restart=on-failure", "Restart=sometimes")
    (tmp_path / UNITS[0].name).write_text(text)
    done = subprocess.run([verify, "verify", "--man=no", str(tmp_path / UNITS[0].name)], capture_output=True, text=True)
    assert "sometimes" in done.stderr
