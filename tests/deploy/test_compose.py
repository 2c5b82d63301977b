"""The compose file: valid, and equal to the code."""

import subprocess
import sys
from typing import Any

import pytest
import yaml
from dockerfile import IMAGES, ROOT, stages
from manifests import ENV_FILES, MARGIN_S, compose, env_file, of_kind, overlay, promtool, settings

from headway.shared.settings import Settings

#: The services that run our own programs, with the image's stage.
OURS = {"api": "api", "worker": "cpu", "worker-gpu": "gpu"}


def ours(env: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in compose(env).items() if name in OURS}


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text.removesuffix("s"))


@pytest.fixture(params=ENV_FILES)
def env(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_the_file_is_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    shown = subprocess.run([*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True)

    assert shown.returncode == 0, shown.stdout


def test_there_is_one_worker_on_the_cpu_unless_gpus_are_asked_for() -> None:
    assert sorted(ours(".env")) == ["api", "worker"]
    assert sorted(ours("gpu.env")) == ["api", "worker-gpu"]


def test_nothing_of_what_docker_reads_by_itself_changes_a_program_started_without_it() -> None:
    assert env_file(".env") == {"COMPOSE_PROFILES": "cpu"}


def test_each_setting_exists_and_fits(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, service in ours(env).items():
        image = IMAGES[OURS[name]].environment
        found = settings(image | service["environment"], monkeypatch)
        assert found.redis_url == "redis://redis:6379/0"
        assert found.model
        assert found.engine == "vllm"


def test_api_and_worker_agree_on_everything_that_both_read(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    api, worker = (settings(service["environment"], monkeypatch) for service in ours(env).values())

    for name in ("redis_url", "prefix", "model_name", "model", "lanes", "max_model_len"):
        assert getattr(api, name) == getattr(worker, name)


def test_a_stop_gives_more_time_than_the_program_takes(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, service in ours(env).items():
        found = settings(service["environment"], monkeypatch)
        grace_s = found.api_grace_s if name == "api" else found.drain_s
        assert seconds(service["stop_grace_period"]) >= grace_s + MARGIN_S


def test_images_are_built_from_what_is_here(env: str) -> None:
    for service in compose(env).values():
        if "build" in service:
            found = stages(service["build"]["dockerfile"])
            assert service["build"].get("target", "") in {stage.name for stage in found}


def test_no_two_services_build_one_tag(env: str) -> None:
    # Or their exports would race.
    services = compose(env).values()
    built = [service["image"] for service in services if "build" in service]

    assert len(built) == len(set(built)) == 2
    # What another service builds must not be asked of a registry, which may have something else under the name.
    names = {service["image"] for service in services if service.get("pull_policy") == "never"}
    assert names == {service["image"] for service in services if "build" not in service} & set(built)


def test_images_have_the_names_that_kubernetes_uses() -> None:
    built = {service["image"] for env in ENV_FILES for service in compose(env).values() if "build" in service}
    for name in ("cpu-demo", "gpu"):
        for deployment in of_kind(overlay(name), "Deployment").values():
            spec = deployment["spec"]["template"]["spec"]
            assert {each["image"] for each in (*spec["containers"], *spec.get("initContainers", ()))} <= built


def test_every_image_is_pinned_and_every_service_says_whether_it_is_well(env: str) -> None:
    for name, service in compose(env).items():
        assert ":" in service["image"]
        assert "latest" not in service["image"]
        assert "healthcheck" in service or IMAGES[OURS[name]].all("HEALTHCHECK")


def test_what_is_published_is_published_to_this_machine_only_and_on_the_right_port(env: str) -> None:
    published = {name: service["ports"] for name, service in compose(env).items() if "ports" in service}

    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert published["api"] == [f"127.0.0.1:8000:{Settings.model_fields['api_port'].default}"]


def test_the_gpu_worker_has_as_many_gpus_as_share_the_model() -> None:
    worker = compose("gpu.env")["worker-gpu"]

    (devices,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert devices["count"] == worker["environment"]["HEADWAY_TENSOR_PARALLEL_SIZE"]


def test_redis_loses_nothing() -> None:
    command = compose(".env")["redis"]["command"]

    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"


def test_prometheus_asks_the_services_on_their_ports(env: str) -> None:
    config = yaml.safe_load((ROOT / "k8s/monitoring/prometheus.yml").read_text())

    asked = {
        (name, source["port"])
        for job in config["scrape_configs"]
        for source in job["dns_sd_configs"]
        for name in source["names"]
    }
    assert asked == {
        ("api", Settings.model_fields["api_port"].default),
        ("worker", Settings.model_fields["health_port"].default),
    }
    # The GPU's worker is asked by the other's name.
    names = {name for name, service in compose(env).items()} | {
        alias
        for service in compose(env).values()
        if "networks" in service
        for alias in service["networks"]["default"]["aliases"]
    }
    assert {name for name, _ in asked} <= names


def test_prometheus_takes_its_config() -> None:
    config = ROOT / "k8s/monitoring/prometheus.yml"
    shown = subprocess.run([promtool(), "check", "config", str(config)], capture_output=True, text=True)

    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_what_is_mounted_from_here_is_here(env: str) -> None:
    volumes = [volume for service in compose(env).values() for volume in service.get("volumes", ())]

    mounted = [volume.split(":")[0] for volume in volumes if volume.startswith("./")]
    assert len(mounted) >= 4
    assert all((ROOT / path).exists() for path in mounted)
