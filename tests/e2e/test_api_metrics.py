"""What an API process shows to Prometheus; the test plays the worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from api_bench import Bench, working
from headway.api import app as app_module
from headway.api.app import create_app
from headway.shared.job import Outcome, Status
from headway.shared.keys import GROUP, Keys
from headway.shared.settings import Settings
from headway.shared.tokens import COMPLETIONS, estimate
from helpers import DONE, PATIENCE_S
from monitoring import Page
from programs import MODEL, serving
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


async def test_a_socket_that_is_refused(bench: Bench) -> None:
    # Given a page of another host, whose socket is refused before it is one
    with pytest.raises(InvalidStatus):
        await connect(bench.url.replace("http", "ws") + COMPLETIONS, origin="http://elsewhere.example")

    # I expect it under the HTTP status
    await shows(bench, answered((COMPLETIONS, "403")))


async def have_groups(url: str, streams: list[str]) -> None:
    """Returns when all these streams are there, each with its group."""
    async with asyncio.timeout(PATIENCE_S), Redis.from_url(url) as redis:
        while await redis.exists(*streams) < len(streams):  # noqa: ASYNC110 - Redis says nothing by itself
            await asyncio.sleep(0.01)
        for stream in streams:
            assert [group["name"].decode() for group in await redis.xinfo_groups(stream)] == [GROUP]


@pytest.mark.parametrize("late", [False, True])
async def test_the_lanes_are_there_before_a_job_and_without_a_scrape(
    tmp_path: Path, prefix: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an API whose Redis is there, or is not there yet
    monkeypatch.setattr(app_module, "_RETRY_S", 0.05)
    server = Valkey(tmp_path)
    streams = [s for lane in ("short", "mid", "long") for s in Keys(prefix).lane_streams("0", MODEL, lane)]
    settings = Settings(engine="simulated", served_model=MODEL, redis_url=server.url, prefix=prefix)
    if not late:
        server.start()
    try:
        async with serving(create_app(settings, counter=estimate)) as url:
            if late:
                # It has looked for Redis in vain.
                async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                    assert (await http.get("/ready")).status_code == 503
                server.start()

            # I expect all streams, without a scrape that would make them
            await have_groups(server.url, streams)
    finally:
        server.stop()


async def test_a_key_that_is_no_lane_breaks_no_page(bench: Bench, redis_url: str, prefix: str) -> None:
    # Given something else under the key of a lane
    stream = Keys(prefix).lane("0", MODEL, "long", "flex")
    async with Redis.from_url(redis_url) as redis:
        await have_groups(redis_url, [stream])
        await redis.set(stream, "something")

    # If the API is scraped, I expect the lanes to be missing, and everything else to be there
    answer = await bench.http.get("/metrics")
    assert answer.status_code == 200
    assert "headway_redis_up 0.0" in answer.text
    assert "headway_lane_waiting_jobs{" not in answer.text
    assert Page(answer.text)["headway_requests_open", {}] == 1


async def test_a_scrape_while_redis_hangs(tmp_path: Path, prefix: str) -> None:
    # Given an API whose Redis takes connections and answers nothing
    server = Valkey(tmp_path)
    server.start()
    try:
        async with working(redis_url=server.url, prefix=prefix) as bench:
            await shows(bench, lambda found: found["headway_redis_up", {}] == 1)
            with server.hanging():
                # If it is scraped, I expect a page in the time that Prometheus gives it
                async with asyncio.timeout(8):
                    hung = await page(bench)
            assert "headway_redis_up 0.0" in hung.text
            assert "headway_lane_waiting_jobs{" not in hung.text

            # If Redis goes on, I expect the lanes
            back = await shows(bench, lambda found: found["headway_redis_up", {}] == 1)
            assert back.text.count("headway_lane_waiting_jobs{") == 12
    finally:
        server.kill()


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
