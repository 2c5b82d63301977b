"""The compose file and the Kubernetes overlays, as Docker and kubectl understand them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from dockerfile import ROOT

from headway.shared.settings import Settings

OVERLAYS = sorted(path.name for path in (ROOT / "k8s/overlays").iterdir())
ENV_FILES = (".env", "gpu.env")

#: Seconds that a process needs beside its grace: a worker gives jobs back, and vLLM's own processes end.
MARGIN_S = 15

#: The first kubectl whose kustomize knows all that the overlays use.
KUBECTL_AT_LEAST = (1, 27)

Document = dict[str, Any]


def settings(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What a program makes of an environment, in which every HEADWAY_* variable must be a setting."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"HEADWAY_{name.upper()}", raising=False)
    given = {name: value for name, value in environment.items() if name.startswith("HEADWAY_")}
    assert {name.removeprefix("HEADWAY_").lower() for name in given} <= set(Settings.model_fields)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return Settings()


def env_file(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def compose(env: str) -> dict[str, Document]:
    """The services that `docker compose --env-file <env> up` starts, by name."""
    values = env_file(env)

    def put_in(match: re.Match[str]) -> str:
        return values.get(match["name"]) or match["default"]

    text = re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", put_in, (ROOT / "docker-compose.yml").read_text())
    assert "${" not in text, "a variable without a default"
    active = set(values["COMPOSE_PROFILES"].split(","))
    services: dict[str, Document] = yaml.safe_load(text)["services"]
    for service in services.values():
        service["environment"] = {name: str(value) for name, value in service.get("environment", {}).items()}
    return {
        name: service
        for name, service in services.items()
        if not service.get("profiles") or active & set(service["profiles"])
    }


@cache
def overlay(name: str) -> list[Document]:
    """The documents that `kubectl apply -k` would send."""
    made = subprocess.run(
        [kubectl(), "kustomize", str(ROOT / "k8s/overlays" / name)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return [document for document in yaml.safe_load_all(made.stdout) if document]


def of_kind(documents: list[Document], kind: str) -> dict[str, Document]:
    return {each["metadata"]["name"]: each for each in documents if each["kind"] == kind}


def only(documents: list[Document], kind: str, name: str) -> Document:
    """The document of that kind whose name begins so; what kustomize generates has a hash behind it."""
    (found,) = (each for key, each in of_kind(documents, kind).items() if re.fullmatch(rf"{name}(-\w{{10}})?", key))
    return found


def pod(documents: list[Document], name: str) -> Document:
    """The pod template of a Deployment or StatefulSet."""
    workloads = of_kind(documents, "Deployment") | of_kind(documents, "StatefulSet")
    spec: Document = workloads[name]["spec"]["template"]["spec"]
    return spec


def container(documents: list[Document], deployment: str) -> Document:
    (one,) = pod(documents, deployment)["containers"]
    found: Document = one
    return found


def environment(documents: list[Document], deployment: str) -> dict[str, str]:
    """The HEADWAY_* variables of a Deployment's container, with `$(NAME)` as Kubernetes puts it in."""
    each = container(documents, deployment)
    values: dict[str, str] = {}
    for source in each["envFrom"]:
        values |= of_kind(documents, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    known = {"REDIS_PASSWORD": "secret"}
    for variable in each["env"]:
        if "value" in variable:
            values[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], variable["value"])
    return {name: value for name, value in values.items() if name.startswith("HEADWAY_")}


@cache
def kubectl() -> str:
    """A kubectl that is new enough: this environment's, else the machine's."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        missing("there is no kubectl")
    version = _version(found)
    if version < KUBECTL_AT_LEAST:
        missing(f"{found} is {version}, and {KUBECTL_AT_LEAST} is needed")
    return found


def _version(kubectl: str) -> tuple[int, int]:
    shown = subprocess.run([kubectl, "version", "--client", "--output", "json"], capture_output=True, check=True)
    client = json.loads(shown.stdout)["clientVersion"]
    return int(client["major"]), int(re.sub(r"\D", "", client["minor"]))


def missing(what: str) -> NoReturn:
    """What a test needs is not there: CI has everything, a laptop need not."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def promtool() -> str:
    return shutil.which("promtool") or missing("there is no promtool")
