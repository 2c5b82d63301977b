"""A real Prometheus on an API and a worker that are processes of their own, with the simulated engine."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headway.shared.tokens import COMPLETIONS
from helpers import PATIENCE_S
from monitoring import Page, complaints, expressions, program, prometheus
from programs import MAX_MODEL_LEN, MODEL, ROOT, ApiProgram, Program
from valkey_server import Valkey, free_port

#: Characters of a prompt, at four a token, by the lane that it goes to.
PROMPTS = {"short": 40, "mid": 1200, "long": 4000}

#: A job of this many tokens runs until somebody cancels it.
ENDLESS = {"prompt": "x", "max_tokens": MAX_MODEL_LEN - 1}

#: vLLM's own metrics need vLLM; test_real_model.py asks for them.
ASKED = [expression for expression in expressions() if "vllm:" not in expression]

SECRET = "rosebud"


@dataclass(frozen=True)
class System:
    """Two processes, and what they count on."""

    server: Valkey
    api: str
    worker: str

    @property
    def pages(self) -> dict[str, str]:
        """Host and port of the two pages, by job."""
        return {"headway-api": self.api.removeprefix("http://"), "headway-worker": self.worker.removeprefix("http://")}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    server = Valkey(tmp_path_factory.mktemp("valkey"), appendonly=True)
    server.start()
    port = free_port()
    settings = {
        "REDIS_URL": server.url,
        "ENGINE": "simulated",
        "SERVED_MODEL": MODEL,
        "MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "SHORT_BELOW": "200",
        "MID_TO": "800",
        "SIMULATED_STEP_MS": "5",
        "HEALTH_PORT": str(port),
        "DRAIN_S": "1",
    }
    worker = Program("headway.worker", settings)
    try:
        api = ApiProgram(settings)
        try:
            yield System(server, api.url, f"http://127.0.0.1:{port}")
        finally:
            api.stop()
    finally:
        worker.stop()
        server.stop()


@pytest.fixture
async def http(system: System) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=system.api, timeout=PATIENCE_S) as client:
        yield client


async def load(http: httpx.AsyncClient) -> list[httpx.Response]:
    """Something of each kind: jobs of all lanes, a stream, one that the engine refuses, refused requests, a cancel.

    Returns:
        The answers of the jobs of all lanes.
    """

    def ask(**fields: Any) -> Any:
        return http.post(COMPLETIONS, json={"prompt": SECRET, "max_tokens": 5, **fields})

    lanes = [ask(prompt=SECRET.ljust(length)) for length in PROMPTS.values()]
    refused = [ask(temperature=-1), ask(max_tokens="many"), http.get("/v1/jobs/none")]
    answers: list[httpx.Response] = await asyncio.gather(*lanes, *refused, ask(stream=True))
    await cancel_one(http)
    return answers[: len(lanes)]


async def cancel_one(http: httpx.AsyncClient) -> None:
    """Submits a job that does not end and cancels it; returns when it has ended."""
    job = (await http.post("/v1/jobs", json={"endpoint": COMPLETIONS, "body": ENDLESS})).json()
    await http.post(job["links"]["cancel"])
    await http.get(job["links"]["self"], headers={"Prefer": "wait=20"})


async def page(http: httpx.AsyncClient, url: str) -> Page:
    return Page((await http.get(f"{url}/metrics")).raise_for_status().text)


async def first(http: httpx.AsyncClient, url: str, wanted: Callable[[Page], bool]) -> Page:
    """The first page that is as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while not wanted(found := await page(http, url)):  # noqa: ASYNC110 - a page is asked for, it tells nobody
            await asyncio.sleep(0.01)
        return found


def growth(before: Page, now: Page, name: str, label: str) -> dict[str, float]:
    old = before.sums(name, label)
    grown = {key: value - old.get(key, 0) for key, value in now.sums(name, label).items()}
    return {key: value for key, value in grown.items() if value}


async def test_every_series_of_the_dashboard_has_data(system: System, http: httpx.AsyncClient, tmp_path: Path) -> None:
    # Given a Prometheus that scrapes both
    with prometheus(tmp_path, system.pages) as server:
        # If the system works, I expect an answer to all that the dashboard asks, and both pages to be read
        lacking = asked = [*ASKED, 'up{job="headway-api"} == 1', 'up{job="headway-worker"} == 1']
        for _ in range(60):
            await load(http)
            if not (lacking := await asyncio.to_thread(server.lacking, asked)):
                break
        assert not lacking

        # I expect all three lanes where a panel shows one line a lane
        by_lane = [expression for expression in ASKED if " by (lane" in expression]
        assert by_lane
        for expression in by_lane:
            series = await asyncio.to_thread(server.query, expression)
            assert {each["metric"]["lane"] for each in series} == set(PROMPTS), expression


async def test_promtool_has_no_complaint(system: System, http: httpx.AsyncClient) -> None:
    # Given both pages, with something on them
    await load(http)
    for url in (system.api, system.worker):
        text = (await page(http, url)).text

        # I expect promtool to find nothing, though it does where there is something
        assert complaints(text) == []
        assert complaints(text.replace("# HELP headway_redis_up", "# headway_redis_up"))


async def test_both_processes_count_what_was_done(system: System, http: httpx.AsyncClient) -> None:
    # Given what was counted before
    before = await page(http, system.api), await page(http, system.worker)

    # If jobs of all lanes, a stream, an error and a cancel go through
    usages = [answer.json()["usage"] for answer in await load(http)]

    # I expect the worker to have ended each as what it ended; one that was cancelled before its open is no attempt
    def outcomes(now: Page) -> dict[str, float]:
        return {"cancelled": 0.0} | growth(before[1], now, "headway_attempts_total", "outcome")

    done = await first(http, system.worker, lambda now: sum(outcomes(now).values()) - outcomes(now)["cancelled"] == 5)
    assert outcomes(done) | {"cancelled": 0} == {"completed": 4, "failed": 1, "cancelled": 0}
    assert outcomes(done)["cancelled"] <= 1

    # I expect the API to have accepted them all
    accepted = growth(before[0], await page(http, system.api), "headway_jobs_submitted_total", "lane")
    assert accepted == {"short": 4, "mid": 1, "long": 1}

    # I expect the tokens of the lanes with one job to be what their callers were told
    for name, field in (("prompt", "prompt_tokens"), ("output", "completion_tokens")):
        tokens = growth(before[1], done, f"headway_{name}_tokens_total", "lane")
        assert (tokens["mid"], tokens["long"]) == (usages[1][field], usages[2][field])


async def test_pages_give_nothing_away(system: System, http: httpx.AsyncClient) -> None:
    # Given a job with its text and its id, and paths that its caller has made up
    job = (await http.post("/v1/jobs", json={"endpoint": COMPLETIONS, "body": {"prompt": SECRET}})).json()
    done = (await http.get(job["links"]["self"], headers={"Prefer": "wait=20"})).json()
    answer = done["result"]["choices"][0]["text"]
    await http.get(f"/{SECRET}/{job['id']}", headers={"User-Agent": SECRET})

    # I expect none of it on either page
    for url in (system.api, system.worker):
        text = (await page(http, url)).text
        assert "headway_build_info" in text
        assert not any(secret in text for secret in (SECRET, job["id"], answer))


async def test_scrapes_while_redis_is_down(system: System, http: httpx.AsyncClient) -> None:
    # Given that Redis is away
    system.server.stop()
    try:
        # If both are scraped, several times at once, I expect pages in time, without figures of the lanes
        async with asyncio.timeout(8):
            pages = await asyncio.gather(*(page(http, url) for url in (system.api, system.worker) * 3))
        for each in pages:
            assert "headway_redis_up 0.0" in each.text
            assert "headway_lane_waiting_jobs{" not in each.text
    finally:
        system.server.start()

    # If Redis is back, I expect them again
    for url in (system.api, system.worker):
        back = await first(http, url, lambda now: now["headway_redis_up", {}] == 1)
        assert back.text.count("headway_lane_waiting_jobs{") == 12


@pytest.mark.parametrize("kind", ["config", "rules"])
def test_promtool_reads_what_we_ship(kind: str, tmp_path: Path) -> None:
    # Given the scrape configurations of the docs and of Docker Compose, and the alerts as Prometheus itself takes them
    docs = (ROOT / "docs/operations.md").read_text().split("```yaml\nscrape_configs:")[1]
    alerts = yaml.safe_load((ROOT / "k8s/monitoring/alerts.yaml").read_text())["spec"]
    shipped = {
        "config": ["scrape_configs:" + docs.split("```")[0], (ROOT / "k8s/monitoring/prometheus.yml").read_text()],
        "rules": [yaml.safe_dump(alerts)],
    }
    for number, text in enumerate(shipped[kind]):
        path = tmp_path / f"{number}.yml"
        path.write_text(text)

        # I expect Prometheus's own checker to accept them
        command = [program("promtool"), "check", kind, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
