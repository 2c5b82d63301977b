"""The Kubernetes overlays: they build, are valid, and are equal to the code."""

import re
import shlex
import subprocess
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from dockerfile import IMAGES, ROOT
from manifests import (
    MARGIN_S,
    OVERLAYS,
    Document,
    container,
    environment,
    of_kind,
    only,
    overlay,
    pod,
    promtool,
    settings,
)

from headway.api.app import create_app
from headway.shared.job import TIERS
from headway.shared.keys import GROUP, RETURNED, Keys
from headway.shared.lanes import Lane
from headway.shared.settings import Settings

SCHEMAS = ROOT / "tests/deploy/schemas"

#: The version against which the manifests are validated: the newest that the validator knows.
KUBERNETES = str(kubernetes_validate.latest_version())

#: The overlays that need KEDA and the Prometheus operator.
WITH_OPERATORS = ("gpu", "gpu-tp4")


@pytest.fixture(params=OVERLAYS)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return overlay(request.param)


@pytest.fixture(params=WITH_OPERATORS)
def watched(request: pytest.FixtureRequest) -> list[Document]:
    return overlay(request.param)


@cache
def custom_schemas() -> dict[tuple[str, str], Document]:
    """The schemas of custom resources, by API version and kind; what they do not know is refused."""
    found: dict[tuple[str, str], Document] = {}
    for path in SCHEMAS.glob("*.yaml"):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
            found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = strict(schema)
    return found


def strict(schema: Any) -> Any:
    """The schema, refusing every field that it does not name, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields")
    return {key: strict(value) for key, value in schema.items()} | ({"additionalProperties": False} if closed else {})


def validate(document: Document) -> None:
    schema = custom_schemas().get((document["apiVersion"], document["kind"]))
    if schema is None:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    else:
        # The schema itself is not checked: its patterns are Go's.
        jsonschema.Draft202012Validator(schema).validate(document)


def lanes_and_tiers() -> list[tuple[str, str]]:
    return list(product([lane.name for lane in Settings().lanes], [RETURNED, *TIERS]))


def test_every_document_is_valid(documents: list[Document]) -> None:
    for document in documents:
        validate(document)


def test_a_wrong_field_is_noticed() -> None:
    # Given a document of each kind of schema, if a name in it is wrong, I expect a complaint
    own = only(overlay("gpu"), "PodDisruptionBudget", "headway-api")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(own | {"spec": own["spec"] | {"maxUnavailible": 1}})
    custom = only(overlay("gpu"), "ScaledObject", "headway-worker")
    with pytest.raises(jsonschema.ValidationError):
        validate(custom | {"spec": custom["spec"] | {"minReplicas": 1}})


def test_the_demo_needs_no_operator() -> None:
    assert {each["apiVersion"].partition("/")[0] for each in overlay("cpu-demo")} <= {
        "v1",
        "apps",
        "autoscaling",
        "networking.k8s.io",
        "policy",
    }


def test_everything_is_in_one_namespace(documents: list[Document]) -> None:
    assert {each["metadata"].get("namespace") for each in documents if each["kind"] != "Namespace"} == {"headway"}


@pytest.mark.parametrize("name", ["headway-api", "headway-worker"])
def test_each_setting_exists_and_fits(documents: list[Document], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = IMAGES["api" if name == "headway-api" else "cpu"]
    found = settings(stage.environment | environment(documents, name), monkeypatch)

    assert found.redis_url == "redis://:secret@redis:6379/0"
    assert found.model
    assert found.served_model


def test_the_password_is_known_before_it_is_put_into_the_url(documents: list[Document]) -> None:
    for name in ("headway-api", "headway-worker"):
        names = [variable["name"] for variable in container(documents, name)["env"]]
        assert names.index("REDIS_PASSWORD") < names.index("HEADWAY_REDIS_URL")


def test_a_stop_gives_more_time_than_the_program_takes(
    documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = settings(environment(documents, "headway-api"), monkeypatch)
    worker = settings(environment(documents, "headway-worker"), monkeypatch)
    pause_s = int(container(documents, "headway-api")["lifecycle"]["preStop"]["exec"]["command"][1])

    allowed = {
        name: pod(documents, name)["terminationGracePeriodSeconds"] for name in ("headway-api", "headway-worker")
    }
    assert allowed["headway-api"] >= pause_s + api.api_grace_s + MARGIN_S
    assert allowed["headway-worker"] >= worker.drain_s + MARGIN_S


def test_ports_are_the_programs_own(documents: list[Document]) -> None:
    defaults = Settings.model_fields
    for name, port in (("headway-api", "api_port"), ("headway-worker", "health_port")):
        (declared,) = container(documents, name)["ports"]
        assert declared["containerPort"] == defaults[port].default
        probes = [value for key, value in container(documents, name).items() if key.endswith("Probe")]
        assert [probe["httpGet"]["port"] for probe in probes] == [declared["name"]] * 3
    service = only(documents, "Service", "headway-api")
    assert service["spec"]["ports"][0]["targetPort"] == container(documents, "headway-api")["ports"][0]["name"]


def test_probes_ask_what_they_mean(documents: list[Document]) -> None:
    # A worker that drains, is full or waits for Redis is alive, and is killed by no probe.
    def asked(name: str) -> list[str]:
        probes = ("startupProbe", "livenessProbe", "readinessProbe")
        return [container(documents, name)[probe]["httpGet"]["path"] for probe in probes]

    assert asked("headway-api") == ["/health", "/health", "/ready"]
    assert asked("headway-worker") == ["/live", "/live", "/health"]
    served = {getattr(route, "path", "") for route in create_app(Settings()).routes}
    assert {*asked("headway-api"), "/metrics"} <= served


def test_containers_are_confined(documents: list[Document]) -> None:
    for name in ("headway-api", "headway-worker", "redis"):
        spec = pod(documents, name)
        assert spec["securityContext"]["runAsNonRoot"]
        for each in (*spec["containers"], *spec.get("initContainers", ())):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in each["resources"]["limits"]
    for name in ("headway-api", "headway-worker"):
        assert pod(documents, name)["securityContext"]["runAsUser"] == int(IMAGES["api"].last("USER").text)


def test_what_scales_a_deployment_sets_its_replicas_alone(documents: list[Document]) -> None:
    scalers = [*of_kind(documents, "HorizontalPodAutoscaler").values(), *of_kind(documents, "ScaledObject").values()]

    targets = [scaler["spec"]["scaleTargetRef"]["name"] for scaler in scalers]
    assert len(targets) == len(set(targets))
    assert all("replicas" not in of_kind(documents, "Deployment")[name]["spec"] for name in targets)


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "PodMonitor"])
def test_selectors_select_something(documents: list[Document], kind: str) -> None:
    workloads = of_kind(documents, "Deployment") | of_kind(documents, "StatefulSet")
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads.values()]
    labels += [each["metadata"].get("labels", {}) for each in of_kind(documents, "Service").values()]

    for each in of_kind(documents, kind).values():
        spec = each["spec"]
        selector = spec["podSelector"] if kind == "NetworkPolicy" else spec["selector"]
        wanted = selector if kind == "Service" else selector.get("matchLabels", {})
        assert any(wanted.items() <= found.items() for found in labels)


def test_gpus_are_as_many_as_share_the_model(watched: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(environment(watched, "headway-worker"), monkeypatch)

    worker = container(watched, "headway-worker")
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == found.tensor_parallel_size
    if found.tensor_parallel_size > 1:
        assert any(mount["mountPath"] == "/dev/shm" for mount in worker["volumeMounts"])
    strategy = of_kind(watched, "Deployment")["headway-worker"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_every_lane_stream_has_its_two_triggers(watched: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    # Given the streams that the code reads, for the model that the settings name
    found = settings(environment(watched, "headway-worker"), monkeypatch)
    keys = Keys(found.prefix)
    streams = {keys.lane("0", found.model_name, lane, tier) for lane, tier in lanes_and_tiers()}
    scaler = only(watched, "ScaledObject", "headway-worker")["spec"]

    # I expect each to have one trigger by what waits and one by what runs
    for metric in ("lagCount", "pendingEntriesCount"):
        triggers = [each["metadata"] for each in scaler["triggers"] if metric in each["metadata"]]
        assert sorted(trigger["stream"] for trigger in triggers) == sorted(streams)
    assert len(scaler["triggers"]) == 2 * len(streams)
    assert {trigger["metadata"]["consumerGroup"] for trigger in scaler["triggers"]} == {GROUP}
    assert all(isinstance(value, str) for trigger in scaler["triggers"] for value in trigger["metadata"].values())
    names = [trigger["name"] for trigger in scaler["triggers"]]
    assert len(names) == len(set(names))


def test_a_trigger_by_what_runs_asks_for_as_many_workers_as_that_fills(
    watched: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings(environment(watched, "headway-worker"), monkeypatch)
    arguments = shlex.split(found.engine_args)
    slots = int(arguments[arguments.index("--max-num-seqs") + 1])

    def room(lane: Lane) -> int:
        return int(slots * lane.share)

    wanted = {lane.name: str(room(lane)) for lane in found.lanes}
    for trigger in only(watched, "ScaledObject", "headway-worker")["spec"]["triggers"]:
        if (target := trigger["metadata"].get("pendingEntriesCount")) is not None:
            assert target == wanted[trigger["metadata"]["stream"].split(":")[4]]


def test_keda_reaches_redis_with_its_password(watched: list[Document]) -> None:
    scaler = only(watched, "ScaledObject", "headway-worker")["spec"]
    service = only(watched, "Service", "redis")
    address = (
        f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{service['spec']['ports'][0]['port']}"
    )
    assert {trigger["metadata"]["address"] for trigger in scaler["triggers"]} == {address}

    (authentication,) = {trigger["authenticationRef"]["name"] for trigger in scaler["triggers"]}
    (reference,) = only(watched, "TriggerAuthentication", authentication)["spec"]["secretTargetRef"]
    assert reference["key"] in only(watched, "Secret", reference["name"])["stringData"]


def test_workers_stay_until_a_new_one_could_have_started(watched: list[Document]) -> None:
    scaler = only(watched, "ScaledObject", "headway-worker")["spec"]
    probe = container(watched, "headway-worker")["startupProbe"]

    assert scaler["minReplicaCount"] == 0
    assert scaler["cooldownPeriod"] >= probe["periodSeconds"] * probe["failureThreshold"] / 2


def test_alerts_are_valid(watched: list[Document], tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(only(watched, "PrometheusRule", "headway")["spec"]))

    shown = subprocess.run([promtool(), "check", "rules", str(rules)], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_alerts_name_metrics_that_exist(watched: list[Document]) -> None:
    documented = set(re.findall(r"headway_\w+", (ROOT / "docs/operations.md").read_text()))

    for group in only(watched, "PrometheusRule", "headway")["spec"]["groups"]:
        for rule in group["rules"]:
            assert set(re.findall(r"headway_\w+", rule["expr"])) <= documented, rule["alert"]


def test_the_dashboard_is_the_one_of_docker_compose(watched: list[Document]) -> None:
    # Under one name for ever, or Grafana would show one dashboard for each version
    found = of_kind(watched, "ConfigMap")["headway-dashboard"]

    assert found["data"] == {"headway.json": (ROOT / "k8s/monitoring/dashboard.json").read_text()}
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
