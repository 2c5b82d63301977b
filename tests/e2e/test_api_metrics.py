"""What an API process shows to Prometheus; the test plays the worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from websockets.asyncio.client import connect

from api_bench import Bench, working
from headway.shared.job import Outcome, Status
from headway.shared.tokens import COMPLETIONS
from helpers import DONE, PATIENCE_S
from monitoring import Page
from valkey_server import Valkey

ROUTE = "route"


@pytest.fixture
async def bench(redis_url: str, prefix: str) -> AsyncIterator[Bench]:
    async with working(redis_url=redis_url, prefix=prefix) as bench:
        yield bench


async def page(bench: Bench) -> Page:
    return Page((await bench.http.get("/metrics")).text)


async def shows(bench: Bench, expected: Callable[[Page], bool]) -> Page:
    """The first page that is as expected: a request is counted only after its answer has left."""
    async with asyncio.timeout(PATIENCE_S):
        while not expected(found := await page(bench)):  # noqa: ASYNC110 - a page is asked for, it tells nobody
            await asyncio.sleep(0.01)
        return found


def answered(*requests: tuple[str, str]) -> Callable[[Page], bool]:
    """Whether so many requests of each route and status are counted."""
    wanted = {request: float(requests.count(request)) for request in requests}

    def are(found: Page) -> bool:
        return all(
            found["headway_requests_total", {ROUTE: route, "status": status}] == count
            for (route, status), count in wanted.items()
        )

    return are


async def answer(bench: Bench, asked: Awaitable[object], outcome: Outcome = DONE) -> None:
    delivery = await bench.take()
    await bench.queue.finish(delivery, 0, outcome)
    await asyncio.wait_for(asked, PATIENCE_S)


async def test_requests_by_route_and_answer(bench: Bench) -> None:
    # Given two jobs that were answered, one of them with an error of the engine
    await answer(bench, bench.ask())
    await answer(bench, bench.ask(), Outcome(Status.FAILED, 422, b'{"error": {"message": "no"}}'))

    # If others are refused: a wrong body, unknown jobs, and a path that there is not
    await bench.http.post(COMPLETIONS, content=b"{")
    for name in ("a", "b"):
        await bench.http.get(f"/v1/jobs/{name}")
    await bench.http.get("/secret/path")
    await bench.http.delete(COMPLETIONS)

    # I expect each under its route, whatever its path was, and its status
    found = await shows(
        bench,
        answered(
            (COMPLETIONS, "200"),
            (COMPLETIONS, "422"),
            (COMPLETIONS, "400"),
            (COMPLETIONS, "405"),
            ("/v1/jobs/{job_id}", "404"),
            ("/v1/jobs/{job_id}", "404"),
            ("none", "404"),
        ),
    )
    assert "secret" not in found.text


async def test_accepted_jobs_by_lane_and_tier(bench: Bench) -> None:
    # Given two accepted jobs of two tiers, and one that was refused
    for tier in ("default", "flex"):
        job = {"endpoint": COMPLETIONS, "body": {"prompt": "secret"}, "tier": tier}
        assert (await bench.http.post("/v1/jobs", json=job)).status_code == 202
    await bench.http.post("/v1/jobs", json={"endpoint": "/v1/embeddings", "body": {}})

    # I expect the two, each with the time that its submit took
    found = await page(bench)
    assert found["headway_jobs_submitted_total", {"lane": "short", "tier": "default"}] == 1
    assert found["headway_jobs_submitted_total", {"lane": "short", "tier": "flex"}] == 1
    assert found["headway_submit_seconds_count", {}] == 2
    assert 0 < found["headway_submit_seconds_sum", {}] < 2 * PATIENCE_S
    assert found.sums("headway_lane_waiting_jobs", "tier") == {"default": 1, "flex": 1}
    assert "secret" not in found.text


async def test_open_requests(bench: Bench) -> None:
    # Given a request that waits
    asked = bench.ask()
    delivery = await bench.take()

    # I expect it as open, beside the scrape itself; and afterwards the scrape alone
    assert (await page(bench))["headway_requests_open", {}] == 2
    await bench.queue.finish(delivery, 0, DONE)
    assert (await asked).is_success
    await shows(bench, lambda found: found["headway_requests_open", {}] == 1)


async def test_callers_that_hang_up(bench: Bench) -> None:
    # Given a request and a websocket that wait for their jobs
    asked = bench.ask()
    await bench.take()
    async with connect(bench.url.replace("http", "ws") + COMPLETIONS) as socket:
        await socket.send(json.dumps({"prompt": "Once"}))
        await bench.take()

    # If both callers leave, I expect the one under 499, and the other without a code of ours
    asked.cancel()
    await shows(bench, answered((COMPLETIONS, "499"), (COMPLETIONS, "hung up")))


@pytest.mark.parametrize(("message", "code"), [("{", "4400"), (json.dumps({"prompt": "Once"}), "1000")])
async def test_sockets_by_the_code_of_their_close(bench: Bench, message: str, code: str) -> None:
    # Given a websocket
    async with connect(bench.url.replace("http", "ws") + COMPLETIONS) as socket:
        await socket.send(message)
        if code == "1000":
            await answer(bench, socket.wait_closed())
        await socket.wait_closed()

    # I expect it under the code with which it was closed
    await shows(bench, answered((COMPLETIONS, code)))


async def test_a_scrape_without_redis(tmp_path: Path, prefix: str) -> None:
    # Given an API whose Redis goes away
    server = Valkey(tmp_path)
    server.start()
    try:
        async with working(redis_url=server.url, prefix=prefix) as bench:
            assert (await page(bench)).text.count("headway_lane_waiting_jobs{") == 12
            server.kill()

            # If it is scraped, I expect a page in time for Prometheus, without figures of the lanes
            async with asyncio.timeout(8):
                away = await page(bench)
            assert "headway_redis_up 0.0" in away.text
            assert "headway_lane_waiting_jobs{" not in away.text

            # If Redis is there again, I expect them
            server.start()
            back = await shows(bench, lambda found: found["headway_redis_up", {}] == 1)
            assert back.text.count("headway_lane_waiting_jobs{") == 12
    finally:
        server.kill()
