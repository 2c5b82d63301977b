"""A Headway whose worker runs its jobs on another Headway: as programs that wait, die and come back."""

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from headway.shared.tokens import COMPLETIONS
from helpers import PATIENCE_S
from programs import MODEL, ApiProgram, Program, Stack
from valkey_server import Valkey, free_port

KEY = "sk-very-secret"


@pytest.fixture
def settings(server: Valkey) -> dict[str, str]:
    """Of the front: its own queue, and its own name for the model."""
    return {
        "REDIS_URL": server.url,
        "PREFIX": f"hw-front-{secrets.token_hex(6)}",
        "ENGINE": "upstream",
        "SERVED_MODEL": "ours",
        "SHORT_BELOW": "200",
        "MID_TO": "800",
        "UPSTREAM_MODEL": MODEL,
        "UPSTREAM_API_KEY": KEY,
        "HEALTH_PORT": "0",
    }


@pytest.fixture
def programs() -> Iterator[ExitStack]:
    """Ends what a test has started."""
    with ExitStack() as stack:
        yield stack


def start(programs: ExitStack, settings: dict[str, str]) -> Program:
    worker = Program("headway.worker", settings)
    programs.callback(worker.kill)
    return worker


def start_api(programs: ExitStack, settings: dict[str, str]) -> ApiProgram:
    api = ApiProgram(settings)
    programs.callback(api.kill)
    return api


def test_a_worker_that_waits_for_its_upstream_can_be_stopped(settings: dict[str, str], programs: ExitStack) -> None:
    # Given a worker whose upstream is not there
    url = f"http://127.0.0.1:{free_port()}"
    worker = start(programs, {**settings, "UPSTREAM_URL": url})
    # If it says that it waits, and is told to stop, I expect a clean end
    line = worker.wait_for_log("waiting for the upstream")
    assert url in line
    assert worker.stop() == 0
    assert KEY not in "".join(worker.log)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"UPSTREAM_URL": ""}, "HEADWAY_UPSTREAM_URL names no server"),
        ({"UPSTREAM_MODEL": "nobody"}, f"HEADWAY_UPSTREAM_MODEL: the upstream has no 'nobody', but {MODEL}"),
        ({"ENGINE_ARGS": "--enforce-eager"}, "HEADWAY_ENGINE_ARGS"),
    ],
)
def test_a_wrong_setting_ends_the_worker_in_one_line(
    stack: Stack, settings: dict[str, str], programs: ExitStack, change: dict[str, str], said: str
) -> None:
    # Given a setting that cannot be right, if a worker starts, I expect status 2 and one line
    worker = start(programs, {**settings, "UPSTREAM_URL": f"{stack.api}/v1", **change})
    assert worker.wait() == 2
    (line,) = worker.log
    assert said in line


def test_an_upstream_dies_in_mid_stream_and_comes_back(
    stack: Stack, settings: dict[str, str], programs: ExitStack
) -> None:
    # Given a front, and behind it an API of a Headway that takes some seconds for 200 tokens
    behind = {**stack.settings, "PREFIX": f"hw-behind-{secrets.token_hex(6)}", "SIMULATED_STEP_MS": "20"}
    behind["API_PORT"] = str(free_port())
    start(programs, behind)
    upstream = start_api(programs, behind)
    settings = {**settings, "UPSTREAM_URL": upstream.url}
    worker = start(programs, settings)
    api = start_api(programs, settings)
    order = {"endpoint": COMPLETIONS, "body": {"model": "ours", "prompt": "Once", "max_tokens": 200, "stream": True}}
    with httpx.Client(base_url=api.url, timeout=3 * PATIENCE_S) as http:
        job = http.post("/v1/jobs", json=order).json()

        # If the upstream is killed while the job streams
        with http.stream("GET", f"/v1/jobs/{job['id']}/events") as events:
            lines = events.iter_lines()
            next(line for line in lines if line.startswith("data: "))
            upstream.kill()
            # I expect the worker to end as after an engine's death
            assert worker.wait() == 70
            # and, once both are there again, the job to begin anew and to end well, under our name of the model
            start_api(programs, behind)
            start(programs, settings)
            rest = [line.removeprefix("data: ") for line in lines if line]
        done = http.get(f"/v1/jobs/{job['id']}").json()
    after = rest[rest.index("event: restarted") :]
    chunks = [json.loads(line) for line in after if line.startswith('{"') and "choices" in line]
    assert {chunk["model"] for chunk in chunks} == {"ours"}
    assert (done["status"], done["attempt"], done["output_tokens"]) == ("completed", 2, 200)
    assert KEY not in "".join(worker.log)
