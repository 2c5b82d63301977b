"""What a worker shows to Prometheus, after jobs whose course the test decides."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from engine_fakes import ScriptedEngine, chunk
from headway.shared.job import Job
from headway.shared.keys import GROUP, Keys
from headway.shared.lane_reader import LaneReader
from headway.shared.lanes import make_lanes
from headway.shared.queue import Queue
from headway.worker.batch import Window
from headway.worker.engines.base import Chunk, Final
from headway.worker.metrics import WorkerMetrics
from headway.worker.worker import Worker
from helpers import PATIENCE_S, eventually, make_job, read_one, transcript
from monitoring import Page
from valkey_server import Valkey

LANES = make_lanes(256, 1024, (0.5, 0.3, 0.2))
NAMES = [lane.name for lane in LANES]
SHORT = {"lane": "short"}

Working = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def worker(queue: Queue, engine: ScriptedEngine) -> Worker:
    metrics = WorkerMetrics(CollectorRegistry(), NAMES)
    return Worker(queue, engine, name="w1", model="m", lanes=LANES, metrics=metrics)


async def page(worker: Worker) -> Page:
    return Page((await worker.metrics())[0].decode())


@asynccontextmanager
async def running(worker: Worker, queue: Queue, *jobs: Job) -> AsyncIterator[None]:
    """Runs the worker for the length of a block, on these jobs; leaves when it holds none any more."""
    for job in jobs:
        await queue.submit(job)
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        await worker.stop(PATIENCE_S)
        await asyncio.wait_for(task, PATIENCE_S)


def answer(tokens: int) -> list[Chunk | Final]:
    """A stream of so many tokens, with its usage at the end."""
    usage = Chunk(b"{}", {"choices": [], "usage": {"completion_tokens": tokens}})
    return [*(chunk("a") for _ in range(tokens - 1)), chunk("", "stop"), usage, Final(200, None)]


async def test_after_some_jobs_the_page_says_so_many(queue: Queue, worker: Worker, engine: ScriptedEngine) -> None:
    # Given two short jobs and a long one, and what each will be answered
    jobs = [make_job(prompt_tokens=10), make_job(prompt_tokens=20), make_job(lane="long", prompt_tokens=2000)]
    engine.answers.extend([answer(3), answer(4), answer(5)])

    # If a worker runs them
    async with running(worker, queue, *jobs):
        await asyncio.gather(*(transcript(queue, job.id) for job in jobs))
    done = await page(worker)

    # I expect every count and sum to be theirs
    assert done.sums("headway_attempts_total", "outcome") == {"completed": 3}
    assert done.sums("headway_attempts_total", "lane") == {"short": 2, "long": 1}
    assert done.sums("headway_prompt_tokens_total", "lane") == {"short": 30, "long": 2000}
    assert done.sums("headway_output_tokens_total", "lane") == {"short": 7, "long": 5}
    for name in ("queue_wait", "time_to_first_token", "inter_token", "job"):
        assert done.sums(f"headway_{name}_seconds_count", "lane") == {"short": 2, "long": 1}, name
    assert done.sums("headway_batch_jobs_sum", "closed_by") == {"immediate": 3}
    batches = done.sums("headway_batch_jobs_count", "closed_by")
    assert done.sums("headway_batch_window_seconds_count", "closed_by") == batches
    assert not any(done.sums(f"headway_{name}", "lane") for name in ("jobs_in_flight", "engine_slots_used"))


async def test_times_are_those_of_the_job(queue: Queue, worker: Worker, engine: ScriptedEngine, redis: Redis) -> None:
    # Given a job of three tokens that stays at its first for a tenth of a second of the server's clock
    job = make_job()
    engine.answers.append(answer(3))
    go = engine.hold(job.id)
    async with running(worker, queue, job):
        await eventually(lambda: engine.started)
        began = await _now_s(redis)
        while await _now_s(redis) < began + 0.1:
            pass

        # If it goes on
        go.set()
        await transcript(queue, job.id)
    done = await page(worker)

    # I expect its time to have that tenth, the mean of its two gaps a half of it, and its first token none
    assert done["headway_job_seconds_sum", SHORT] >= 0.1
    assert done["headway_inter_token_seconds_sum", SHORT] >= 0.05
    first_token_s = done["headway_time_to_first_token_seconds_sum", SHORT]
    # Redis counts both in whole milliseconds.
    assert done["headway_queue_wait_seconds_sum", SHORT] <= first_token_s + 0.002
    assert first_token_s <= done["headway_job_seconds_sum", SHORT] - 0.1


async def _now_s(redis: Redis) -> float:
    seconds, microseconds = await redis.time()
    return float(seconds) + float(microseconds) / 1e6


@pytest.mark.parametrize(
    ("first", "endings"),
    [
        ([Final(400, b'{"error": {"message": "no"}}')], {"failed": 1}),
        ([Final(500, None)], {"retried": 1, "completed": 1}),
        ([chunk("a"), chunk("", "abort"), Final(200, None)], {"retried": 1, "completed": 1}),
    ],
)
async def test_attempts_are_counted_by_their_end(
    queue: Queue, worker: Worker, engine: ScriptedEngine, first: list[Chunk | Final], endings: dict[str, float]
) -> None:
    # Given what the engine says at first; after that it answers
    engine.answers.append(first)
    job = make_job()

    # If a job has run, I expect each of its attempts under its own end, and its prompt once
    async with running(worker, queue, job):
        await transcript(queue, job.id)
    done = await page(worker)
    assert done.sums("headway_attempts_total", "outcome") == endings
    assert done.sums("headway_prompt_tokens_total", "lane") == {"short": 10}
    assert done.sums("headway_job_seconds_count", "lane") == ({"short": 1} if "completed" in endings else {})


async def test_a_second_attempt_has_no_first_token(queue: Queue, worker: Worker, engine: ScriptedEngine) -> None:
    # Given an engine that fails once its first token is published
    job = make_job()
    engine.answers.append([chunk("a"), Final(500, None)])
    go = engine.hold(job.id)
    async with running(worker, queue, job):
        following = queue.follow(job.id)
        await anext(following)
        await following.aclose()

        # If the second attempt answers, I expect one first token: readers have it from the first
        go.set()
        await transcript(queue, job.id)
    done = await page(worker)
    assert done.sums("headway_attempts_total", "outcome") == {"retried": 1, "completed": 1}
    assert done["headway_time_to_first_token_seconds_count", SHORT] == 1
    assert done["headway_queue_wait_seconds_count", SHORT] == 2


async def test_what_is_held_is_shown_while_it_is_held(queue: Queue, worker: Worker, engine: ScriptedEngine) -> None:
    # Given an engine of 10 slots and 100,000 tokens with a job of two choices, and one that waits
    job, waiting = make_job(choices=2, reserve_tokens=300), make_job("other", prompt_tokens=7)
    engine.hold(job.id)
    async with running(worker, queue, job, waiting):
        await eventually(lambda: engine.started)

        # I expect it in the worker's hands and in the lane, with its slots and tokens, and the other as waiting
        held = await page(worker)
        assert (held["headway_worker_pulling", {}], held["headway_redis_up", {}]) == (1, 1)
        assert held.sums("headway_jobs_in_flight", "lane") == {"short": 1}
        assert held.sums("headway_engine_slots_used", "lane") == {"short": 2}
        assert held.sums("headway_engine_kv_tokens_reserved", "lane") == {"short": 300}
        assert (held["headway_engine_slots", {}], held["headway_engine_kv_tokens", {}]) == (10, 100_000)
        assert held.sums("headway_lane_running_jobs", "model") == {"m": 1}
        assert held.sums("headway_lane_waiting_jobs", "model") == {"other": 1}
        assert held.sums("headway_lane_waiting_tokens", "model") == {"other": 7}

        # If it is cancelled, I expect that as its end, and nothing held
        await queue.cancel(job.id)
        await transcript(queue, job.id)
    done = await page(worker)
    assert done.sums("headway_attempts_total", "outcome") == {"cancelled": 1}
    assert not done.sums("headway_jobs_in_flight", "lane")
    assert not done.sums("headway_output_tokens_total", "lane")
    assert done["headway_worker_pulling", {}] == 0


async def test_a_job_that_a_stopping_worker_gives_back(queue: Queue, worker: Worker, engine: ScriptedEngine) -> None:
    # Given a running job
    job = make_job()
    engine.hold(job.id)
    async with running(worker, queue, job):
        await eventually(lambda: engine.started)

        # If its worker stops, I expect it as returned, in its lane, and not among those that ended
        await worker.stop(0)
    done = await page(worker)
    assert done.sums("headway_attempts_total", "outcome") == {"returned": 1}
    assert done.sums("headway_lane_waiting_jobs", "tier") == {"returned": 1}
    assert not done.sums("headway_prompt_tokens_total", "lane")


async def test_a_job_that_is_no_longer_the_workers(
    queue: Queue, worker: Worker, engine: ScriptedEngine, redis: Redis, keys: Keys
) -> None:
    # Given a running job whose record names another attempt
    job = make_job()
    go = engine.hold(job.id)
    async with running(worker, queue, job):
        await eventually(lambda: engine.started)
        await redis.hincrby(keys.job(job.id), "attempt", 1)

        # If the engine goes on, I expect the attempt as lost
        go.set()
        await eventually(lambda: not worker.running)
    assert (await page(worker)).sums("headway_attempts_total", "outcome") == {"lost": 1}


async def test_every_end_is_there_before_the_first(worker: Worker) -> None:
    # If nothing has happened yet, I expect each end of each lane as 0, so that the first one is seen as an increase
    text = (await page(worker)).text
    for name in NAMES:
        for end in ("completed", "failed", "cancelled", "expired", "returned", "retried", "lost"):
            assert f'headway_attempts_total{{lane="{name}",outcome="{end}"}} 0.0' in text


@pytest.mark.parametrize("last", [Final(200, None), Final(500, None)])
async def test_an_attempt_that_ends_when_it_is_no_longer_the_workers(
    queue: Queue, worker: Worker, engine: ScriptedEngine, redis: Redis, keys: Keys, last: Final
) -> None:
    # Given a running job that has published all its text, and whose record then names another attempt
    job = make_job()
    engine.answers.append([chunk("a", "stop"), last])
    go = engine.hold(job.id)
    async with running(worker, queue, job):
        following = queue.follow(job.id)
        assert (await anext(following)).kind == "chunk"
        await following.aclose()
        await redis.hincrby(keys.job(job.id), "attempt", 1)

        # If the engine ends it or fails, I expect the attempt as lost, and as nothing else
        go.set()
        await eventually(lambda: not worker.running)
    done = await page(worker)
    assert done.sums("headway_attempts_total", "outcome") == {"lost": 1}
    assert not done.sums("headway_job_seconds_count", "lane")


async def test_the_wait_of_a_job_that_came_back(
    queue: Queue, worker: Worker, reader: LaneReader, redis: Redis, keys: Keys
) -> None:
    # Given a job that came ten minutes ago, and that another worker gives back now
    job = make_job()
    await queue.submit(job)
    await redis.hincrby(keys.job(job.id), "queued_at_ms", -600_000)
    await queue.requeue(await read_one(reader), "test")

    # If it runs to its end
    async with running(worker, queue):
        await transcript(queue, job.id)
    done = await page(worker)

    # I expect its wait to count from its return, and all that its caller feels from its submit
    assert done["headway_queue_wait_seconds_sum", SHORT] < 300
    assert 600 <= done["headway_time_to_first_token_seconds_sum", SHORT] < 900
    assert 600 <= done["headway_job_seconds_sum", SHORT] < 900


async def test_the_wait_of_a_job_in_its_lane(queue: Queue, worker: Worker, redis: Redis, keys: Keys) -> None:
    # Given a job whose entry came into its lane ten minutes ago
    job = make_job()
    await queue.submit(job)
    stream = keys.lane("0", "m", "short", "default")
    ((entry, fields),) = await redis.xrange(stream)
    await redis.delete(stream)
    old = f"{int(entry.partition(b'-')[0]) - 600_000}-0"
    await redis.xadd(stream, fields, id=old)
    await redis.hset(keys.job(job.id), "entry", old)

    # If it runs, I expect ten minutes of wait
    async with running(worker, queue):
        await transcript(queue, job.id)
    assert 600 <= (await page(worker))["headway_queue_wait_seconds_sum", SHORT] < 900


async def test_the_window_of_a_micro_batch_is_in_seconds(queue: Queue, engine: ScriptedEngine) -> None:
    # Given a worker that waits a fifth of a second for company
    metrics, window = WorkerMetrics(CollectorRegistry(), NAMES), Window(max_wait_s=0.2)
    worker = Worker(queue, engine, name="w1", model="m", lanes=LANES, metrics=metrics, window=window)

    # If one job comes, I expect so long a window
    job = make_job()
    async with running(worker, queue, job):
        await transcript(queue, job.id)
    assert 0.2 <= (await page(worker))["headway_batch_window_seconds_sum", {"closed_by": "timeout"}] < PATIENCE_S


async def test_a_key_that_is_no_lane_breaks_no_page(queue: Queue, worker: Worker, redis: Redis, keys: Keys) -> None:
    # Given something else under the key of a lane
    await redis.set(keys.lane("0", "m", "short", "flex"), "something")

    # If the worker is scraped, I expect the lanes to be missing, and everything else to be there
    found = await page(worker)
    assert "headway_redis_up 0.0" in found.text
    assert "headway_lane_waiting_jobs{" not in found.text
    assert found["headway_engine_slots", {}] == 10


async def test_the_lanes_are_as_redis_says(queue: Queue, worker: Worker, redis: Redis, keys: Keys) -> None:
    # Given jobs in several lanes and tiers, and no worker that runs
    for lane, tier in (("short", "default"), ("short", "default"), ("mid", "priority"), ("long", "flex")):
        await queue.submit(make_job(lane=lane, tier=tier))

    # I expect each of the twelve streams to be as XINFO says
    now = await page(worker)
    for lane in NAMES:
        for stream in keys.lane_streams("0", "m", lane):
            (group,) = await redis.xinfo_groups(stream)
            labels = {"model": "m", "lane": lane, "tier": stream.rpartition(":")[2]}
            assert group["name"].decode() == GROUP
            assert now["headway_lane_waiting_jobs", labels] == group["lag"]
    assert sum(now.sums("headway_lane_waiting_jobs", "lane").values()) == 4


async def test_a_scrape_without_redis(tmp_path: Path, engine: ScriptedEngine) -> None:
    # Given a worker whose Redis is down
    server = Valkey(tmp_path)
    metrics = WorkerMetrics(CollectorRegistry(), NAMES)
    async with Queue.connect(server.url) as queue:
        worker = Worker(queue, engine, name="w1", model="m", lanes=LANES, metrics=metrics)

        # If it is scraped, I expect a page in time for Prometheus, without figures of the lanes
        async with asyncio.timeout(8):
            away = await page(worker)
        assert "headway_redis_up 0.0" in away.text
        assert "headway_lane_waiting_jobs{" not in away.text
        assert away["headway_engine_slots", {}] == 10

        # If Redis comes, I expect them
        server.start()
        try:
            back = await page(worker)
        finally:
            server.stop()
        assert back["headway_redis_up", {}] == 1
        assert back.text.count("headway_lane_waiting_jobs{") == 12


async def test_a_page_gives_nothing_away(queue: Queue, worker: Worker, engine: ScriptedEngine) -> None:
    # Given a job whose prompt and answer are secrets, under an engine that fails once
    body = {"messages": [{"role": "user", "content": "secret prompt"}], "user": "secret user"}
    job = make_job(body=json.dumps(body).encode())
    engine.answers.extend([[Final(500, b'{"error": {"message": "secret error"}}')], [chunk("secret answer")]])
    engine.answers[-1].append(Final(200, None))

    # If it has run, I expect no word of it on the page, nor its id
    async with running(worker, queue, job):
        await transcript(queue, job.id)
    text = (await page(worker)).text
    assert 'outcome="completed"} 1.0' in text
    assert "secret" not in text
    assert job.id not in text
