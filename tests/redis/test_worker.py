"""The worker on the real server, with an engine that the test plays by hand."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from engine_fakes import ScriptedEngine, chunk
from headway.shared.errors import QueueUnavailable
from headway.shared.job import Job, Record, Status
from headway.shared.keys import GROUP, Keys
from headway.shared.lanes import make_lanes
from headway.shared.queue import Queue
from headway.worker import worker as worker_module
from headway.worker.batch import Window
from headway.worker.engines.base import Chunk, Final, Request
from headway.worker.health import health_app
from headway.worker.worker import Worker
from helpers import PATIENCE_S, eventually, make_job, transcript
from valkey_server import Valkey

LANES = make_lanes(256, 1024, (0.5, 0.3, 0.2))

Working = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def working(queue: Queue, engine: ScriptedEngine) -> Working:
    """Runs a worker for the length of a block, and drains it at the end."""

    @asynccontextmanager
    async def run(name: str = "w1", **options: object) -> AsyncIterator[Worker]:
        worker = Worker(queue, engine, name=name, model="m", lanes=LANES, **options)  # type: ignore[arg-type]
        running = asyncio.create_task(worker.run())
        await eventually(lambda: worker.state != "starting")
        try:
            yield worker
        finally:
            await worker.stop(0)
            await asyncio.wait_for(running, PATIENCE_S)

    return run


async def _record(queue: Queue, job: Job) -> Record:
    record = await queue.record(job.id)
    assert record is not None
    return record


async def _ends(queue: Queue, *jobs: Job) -> list[Record]:
    """The records of the jobs once they have ended."""
    await asyncio.gather(*(transcript(queue, job.id) for job in jobs))
    return [await _record(queue, job) for job in jobs]


async def _nothing_left(redis: Redis, keys: Keys, lane: str = "short") -> bool:
    pending = [await redis.xpending(stream, GROUP) for stream in keys.lane_streams("0", "m", lane)]
    entries = [await redis.xlen(stream) for stream in keys.lane_streams("0", "m", lane)]
    return sum(entries) == 0 and sum(each["pending"] for each in pending) == 0


async def test_a_job_runs_to_its_end(queue: Queue, working: Working, redis: Redis, keys: Keys) -> None:
    # Given a worker
    async with working():
        # If a job comes, I expect its chunks, its assembled answer, and nothing left in its lane
        job = make_job()
        await queue.submit(job)
        replies = await transcript(queue, job.id)
        assert [json.loads(r.data)["choices"][0]["delta"]["content"] for r in replies[:-1]] == ["Hello", ""]
        assert replies[-1].data == b"completed"
        result = await queue.result(job.id)
        assert result is not None
        assert json.loads(result.body)["choices"][0]["message"]["content"] == "Hello"
        assert await _nothing_left(redis, keys)


@pytest.mark.parametrize(
    ("answer", "status", "status_code"),
    [
        ([Final(200, b'{"choices": []}')], Status.COMPLETED, 200),
        ([Final(400, b'{"error": {"message": "no"}}')], Status.FAILED, 400),
        ([chunk("a"), Final(404, b'{"error": {"message": "no"}}')], Status.FAILED, 404),
    ],
)
async def test_what_ends_a_job(
    queue: Queue, working: Working, engine: ScriptedEngine, answer: list[Final], status: Status, status_code: int
) -> None:
    # Given what the engine will answer
    engine.answers.append(list(answer))
    async with working():
        # If a job runs, I expect its end after one attempt
        job = make_job()
        await queue.submit(job)
        (record,) = await _ends(queue, job)
        assert (record.status, record.status_code, record.attempt) == (status, status_code, 1)


@pytest.mark.parametrize(
    "failure", [[Final(500, None)], [chunk("a"), chunk("", "abort"), Final(200, None)], [Final(503, b"{}")]]
)
async def test_an_engine_failure_is_tried_again(
    queue: Queue, working: Working, engine: ScriptedEngine, failure: list[Final]
) -> None:
    # Given an engine that fails once
    engine.answers.append(list(failure))
    async with working():
        # If a job runs, I expect a second attempt to complete it, announced if text had been published
        job = make_job()
        await queue.submit(job)
        (record,) = await _ends(queue, job)
        assert (record.status, record.attempt) == (Status.COMPLETED, 2)
        kinds = [reply.kind for reply in await transcript(queue, job.id)]
        assert kinds.count("restarted") == (1 if len(failure) > 1 else 0)
        assert kinds[-3:] == ["chunk", "chunk", "end"]


async def test_a_job_that_fails_each_time_is_given_up(queue: Queue, working: Working, engine: ScriptedEngine) -> None:
    # Given an engine that always fails
    engine.answers.extend([[Final(500, None)], [Final(500, None)]])
    async with working(max_attempts=2):
        # If a job runs, I expect an end after the last attempt, with an error object
        job = make_job()
        await queue.submit(job)
        (record,) = await _ends(queue, job)
        assert (record.status, record.status_code, record.failures) == (Status.FAILED, 500, 2)
        assert len(engine.started) == 2
        result = await queue.result(job.id)
        assert result is not None
        assert json.loads(result.body)["error"]["code"] == "engine_failed"


async def test_the_window_closes_in_time(queue: Queue, working: Working) -> None:
    # Given a window of 100 ms, and 16 jobs that come 10 ms apart
    jobs = [make_job(lane=lane) for lane in ("short", "mid") for _ in range(8)]
    async with working(window=Window(max_wait_s=0.1)):
        for job in jobs:
            await queue.submit(job)
            await asyncio.sleep(0.01)

        # I expect the first to leave after 100 ms, with what came meanwhile
        records = await _ends(queue, *jobs)
        assert records[0].batch_closed_by == "timeout"
        assert records[0].batch_window_ms == pytest.approx(100, abs=15)
        together = [record for record in records if record.batch == records[0].batch]
        assert len(together) == records[0].batch_size
        assert 1 < len(together) < 16


async def test_the_window_closes_when_full(queue: Queue, working: Working) -> None:
    # Given a window of a minute for at most 4 jobs, which all wait already
    jobs = [make_job() for _ in range(4)]
    await asyncio.gather(*(queue.submit(job) for job in jobs))
    async with working(window=Window(max_wait_s=60, max_jobs=4)):
        # I expect them together, at once
        records = await _ends(queue, *jobs)
        assert {(r.batch, r.batch_size, r.batch_closed_by) for r in records} == {("w1/1", 4, "full")}


async def test_the_window_closes_at_max_tokens(queue: Queue, working: Working) -> None:
    # Given a window of half a second for at most 100 prompt tokens, and jobs of 40
    jobs = [make_job(prompt_tokens=40) for _ in range(5)]
    for job in jobs:
        await queue.submit(job)
    async with working(window=Window(max_wait_s=0.5, max_tokens=100)):
        # I expect two in each batch, for a third would be over it, and the last to wait for company
        records = await _ends(queue, *jobs)
        closed = [(record.batch_size, record.batch_closed_by) for record in records]
        assert sorted(closed) == [(1, "timeout"), *[(2, "tokens")] * 4]
        assert [record.attempt for record in records] == [1] * 5


async def test_without_a_window_what_is_there_goes_at_once(queue: Queue, working: Working) -> None:
    # Given three jobs that wait, and no window
    jobs = [make_job() for _ in range(3)]
    await asyncio.gather(*(queue.submit(job) for job in jobs))
    async with working():
        # I expect one batch, at once
        records = await _ends(queue, *jobs)
        assert {(record.batch, record.batch_closed_by) for record in records} == {("w1/1", "immediate")}
        assert records[0].batch_window_ms is not None
        assert records[0].batch_window_ms < 15


async def test_a_batch_is_no_barrier(queue: Queue, working: Working, engine: ScriptedEngine) -> None:
    # Given a batch of two, the longer of which still runs
    longer, shorter, later = make_job(), make_job(), make_job()
    go = engine.hold(longer.id)
    for job in (longer, shorter):
        await queue.submit(job)
    async with working():
        await _ends(queue, shorter)

        # If another job comes, I expect it to run and end before the longer one
        await queue.submit(later)
        await _ends(queue, later)
        assert (await _record(queue, longer)).status is Status.IN_PROGRESS
        go.set()
        assert (await _ends(queue, longer))[0].status is Status.COMPLETED


async def test_a_full_lane_waits_in_redis_and_blocks_no_other(
    queue: Queue, working: Working, engine: ScriptedEngine, redis: Redis, keys: Keys
) -> None:
    # Given lane `long` with 2 of the 10 slots, both taken
    jobs = [make_job(lane="long") for _ in range(3)]
    holds = [engine.hold(job.id) for job in jobs]
    for job in jobs:
        await queue.submit(job)
    async with working():
        await eventually(lambda: len(engine.started) == 2)

        # I expect the third to be nobody's yet, and short jobs to run
        short = make_job()
        await queue.submit(short)
        await _ends(queue, short)
        assert (await redis.xpending(keys.lane("0", "m", "long", "default"), GROUP))["pending"] == 2
        assert (await _record(queue, jobs[2])).status is Status.QUEUED

        # If a slot of the lane becomes free while the worker waits for other work, I expect the third to start at once
        holds[0].set()
        async with asyncio.timeout(1):
            await eventually(lambda: jobs[2].id in engine.started)
        for hold in holds:
            hold.set()
        await _ends(queue, *jobs)


async def test_kv_tokens_bound_a_lane(queue: Queue, working: Working, engine: ScriptedEngine) -> None:
    # Given lane `short` with 45,000 KV tokens, and jobs that reserve 20,000
    jobs = [make_job(reserve_tokens=20_000) for _ in range(3)]
    holds = [engine.hold(job.id) for job in jobs]
    for job in jobs:
        await queue.submit(job)
    async with working():
        # I expect two to run, and the third to start when one has ended
        await eventually(lambda: len(engine.started) == 2)
        assert (await _record(queue, jobs[2])).status is Status.QUEUED
        holds[0].set()
        await eventually(lambda: len(engine.started) == 3)
        for hold in holds:
            hold.set()
        assert [record.attempt for record in await _ends(queue, *jobs)] == [1, 1, 1]


async def test_a_job_larger_than_its_lane_runs_alone(queue: Queue, working: Working) -> None:
    # Given a job that reserves more than its lane has, and has more choices than its lane has slots
    job = make_job(lane="long", reserve_tokens=99_000, choices=8)
    await queue.submit(job)
    async with working():
        # I expect it to run all the same
        assert (await _ends(queue, job))[0].status is Status.COMPLETED


async def test_cancel_of_a_running_job_aborts_it(queue: Queue, working: Working, engine: ScriptedEngine) -> None:
    # Given running jobs, with and without a log
    jobs = [make_job(), make_job(log=False)]
    for job in jobs:
        engine.hold(job.id)
        await queue.submit(job)
    async with working():
        await eventually(lambda: len(engine.started) == 2)
        following = [asyncio.create_task(transcript(queue, job.id)) for job in jobs]

        # If somebody cancels them, I expect an abort in the engine within a second, and the text so far
        async with asyncio.timeout(1):
            for job in jobs:
                await queue.cancel(job.id)
            await asyncio.gather(*following)
        assert sorted(engine.aborted) == sorted(job.id for job in jobs)
        for job in jobs:
            result = await queue.result(job.id)
            assert result is not None
            assert result.status is Status.CANCELLED
            assert json.loads(result.body)["partial"]["choices"][0]["message"]["content"] == "Hello"


async def test_a_cancel_whose_notice_was_lost_is_found(
    queue: Queue, working: Working, engine: ScriptedEngine, redis: Redis, keys: Keys
) -> None:
    # Given a running job without a log, whose cancel flag was set while the worker's notices were away
    job = make_job(log=False)
    engine.hold(job.id)
    await queue.submit(job)
    async with working():
        await eventually(lambda: engine.started)
        await redis.hset(keys.job(job.id), "cancel", "1")

        # If the notices come back, I expect it to be cancelled
        await redis.client_kill_filter(_type="pubsub")
        (record,) = await _ends(queue, job)
        assert record.status is Status.CANCELLED


async def test_a_cancel_that_overtakes_the_open_counts(
    queue: Queue, working: Working, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job that is cancelled after its open, before the worker has the answer
    job = make_job(log=False)
    engine.hold(job.id)
    told = asyncio.Event()
    opened = Queue.open

    async def open_slowly(self: Queue, *args: Any) -> Any:
        delivery = await opened(self, *args)
        assert await queue.cancel(job.id) is Status.IN_PROGRESS
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        return delivery

    monkeypatch.setattr(Queue, "open", open_slowly)

    # If it runs, I expect it to be cancelled
    async with working(), queue.cancels(lambda message: told.set() if message else None):
        await queue.submit(job)
        (record,) = await _ends(queue, job)
        assert record.status is Status.CANCELLED


async def test_a_body_that_is_no_json_fails_its_job_alone(queue: Queue, working: Working) -> None:
    # Given a job that no API would have made, and one behind it
    broken, good = make_job(body=b"{"), make_job()
    async with working():
        for job in (broken, good):
            await queue.submit(job)

        # I expect the first to fail, and the worker to go on
        records = await _ends(queue, broken, good)
        assert [(record.status, record.status_code) for record in records] == [
            (Status.FAILED, 400),
            (Status.COMPLETED, 200),
        ]


async def test_stop_finishes_what_fits_and_returns_the_rest(
    queue: Queue, working: Working, engine: ScriptedEngine
) -> None:
    # Given a worker with a job that will end in time, and one that will not
    quick, slow = make_job(), make_job()
    go = engine.hold(quick.id)
    engine.hold(slow.id)
    for job in (quick, slow):
        await queue.submit(job)
    async with working() as worker:
        await eventually(lambda: worker.running == 2)

        # If it is stopped with a grace
        stopping = asyncio.create_task(worker.stop(0.5))
        go.set()
        await stopping

        # I expect the first to be finished, and the second back in its lane
        assert (await _record(queue, quick)).status is Status.COMPLETED
        record = await _record(queue, slow)
        assert (record.status, record.worker) == (Status.QUEUED, None)
        assert not worker.pulling

    # And another worker to run it, which tells readers that what they have is void
    engine.holds.clear()
    async with working("w2"):
        (record,) = await _ends(queue, slow)
        assert (record.status, record.attempt, record.worker) == (Status.COMPLETED, 2, "w2")
        kinds = [reply.kind for reply in await transcript(queue, slow.id)]
        assert kinds == ["chunk", "restarted", "chunk", "chunk", "end"]


async def test_quiet_reads_no_more_and_returns_what_was_read(
    queue: Queue, working: Working, engine: ScriptedEngine, redis: Redis, keys: Keys
) -> None:
    # Given a worker inside a window of a minute that holds a job, and one that runs nothing
    job = make_job()
    async with working(window=Window(max_wait_s=60)) as worker:
        await queue.submit(job)

        async def read() -> bool:
            return bool((await redis.xpending(keys.lane("0", "m", "short", "default"), GROUP))["pending"])

        async with asyncio.timeout(PATIENCE_S):
            while not await read():
                pass

        # If it goes quiet, I expect the job back in its lane, with no attempt spent
        await worker.quiet()
        await eventually(lambda: worker.state == "stopped")
    record = await _record(queue, job)
    assert (record.status, record.attempt) == (Status.QUEUED, 0)
    assert engine.started == []
    assert await redis.xlen(keys.lane("0", "m", "short", "returned")) == 1


async def test_a_dead_engine_gives_its_jobs_back_and_ends_the_worker(queue: Queue, engine: ScriptedEngine) -> None:
    # Given a worker with a running job
    job = make_job()
    engine.answers.append([chunk("a"), Final(500, None)])
    go = engine.hold(job.id)
    await queue.submit(job)
    worker = Worker(queue, engine, name="w1", model="m", lanes=LANES)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: engine.started)

    # If the engine dies under it
    engine.alive = False
    go.set()

    # I expect the worker to end, unhealthy, and the job to wait for another
    await asyncio.wait_for(running, PATIENCE_S)
    assert (worker.state, worker.pulling) == ("engine died", False)
    assert (await _record(queue, job)).status is Status.QUEUED


async def test_a_hung_run_does_not_keep_a_dead_engine(queue: Queue, engine: ScriptedEngine) -> None:
    # Given a worker with a run that will never end
    job = make_job()
    engine.hold(job.id)
    await queue.submit(job)
    worker = Worker(queue, engine, name="w1", model="m", lanes=LANES)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: engine.started)

    # If the engine dies, I expect the worker to end all the same, and the job to be back
    engine.alive = False
    await asyncio.wait_for(running, PATIENCE_S)
    assert (await _record(queue, job)).status is Status.QUEUED


async def test_drains_do_not_count_as_failures(queue: Queue, working: Working, engine: ScriptedEngine) -> None:
    # Given a job that two workers gave back because they were stopped
    job = make_job()
    go = engine.hold(job.id)
    await queue.submit(job)
    for name in ("w1", "w2"):
        async with working(name) as worker:
            await eventually(lambda worker=worker: worker.running == 1)  # type: ignore[misc]

    # If the engine fails once under a third that gives up after two failures, I expect the job to complete
    engine.answers.append([Final(503, None)])
    go.set()
    async with working("w3", max_attempts=2):
        (record,) = await _ends(queue, job)
        assert (record.status, record.attempt, record.failures) == (Status.COMPLETED, 4, 1)


async def test_stop_returns_a_job_that_is_just_being_opened(
    queue: Queue, working: Working, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose open is on its way
    job = make_job()
    opening, go = asyncio.Event(), asyncio.Event()
    opened = Queue.open

    async def open_slowly(self: Queue, *args: Any) -> Any:
        delivery = await opened(self, *args)
        opening.set()
        await go.wait()
        return delivery

    monkeypatch.setattr(Queue, "open", open_slowly)
    async with working() as worker:
        await queue.submit(job)
        await opening.wait()

        # If it is stopped without a grace, I expect the job back in its lane, and no run
        stopping = asyncio.create_task(worker.stop(0))
        await eventually(lambda: worker.state == "quiet")
        go.set()
        await stopping
    assert (await _record(queue, job)).status is Status.QUEUED
    assert engine.started == []


@pytest.mark.parametrize("choices", [1, 5])
async def test_a_job_without_room_is_not_read_again_and_again(
    queue: Queue, working: Working, engine: ScriptedEngine, redis: Redis, choices: int
) -> None:
    # Given lane `short` with 5 slots and 45,000 tokens, a running job, and one that does not fit beside it
    running = make_job(reserve_tokens=30_000)
    go = engine.hold(running.id)
    large = make_job(choices=choices, reserve_tokens=20_000)
    await queue.submit(running)
    async with working():
        await eventually(lambda: engine.started)
        await queue.submit(large)
        await asyncio.sleep(0.1)  # It has been read and given back.
        before = (await redis.info("commandstats"))["cmdstat_xadd"]["calls"]

        # If small ones come behind it, I expect hardly a move in its lane, and that none overtakes it
        small = [make_job() for _ in range(5)]
        for job in small:
            await queue.submit(job)
        await asyncio.sleep(0.2)
        assert (await redis.info("commandstats"))["cmdstat_xadd"]["calls"] - before < 20
        assert engine.started == [running.id]
        go.set()
        await _ends(queue, large, *small)
        assert engine.started[1] == large.id


async def test_a_fault_while_publishing_gives_the_job_back(
    queue: Queue, working: Working, engine: ScriptedEngine, redis: Redis, keys: Keys
) -> None:
    # Given a running job whose log was cut by a failover
    job = make_job()
    go = engine.hold(job.id)
    await queue.submit(job)
    async with working():

        async def published() -> bool:
            return await redis.hget(keys.job(job.id), "offset") == b"1"

        async with asyncio.timeout(PATIENCE_S):
            while not await published():
                pass
        await redis.hset(keys.job(job.id), "offset", 0)
        await redis.delete(keys.log(job.id))
        go.set()

        # I expect a second attempt to complete it
        (record,) = await _ends(queue, job)
        assert (record.status, record.attempt, record.failures) == (Status.COMPLETED, 2, 1)
        assert [reply.offset for reply in await transcript(queue, job.id)] == [1, 2, 3]


async def test_a_job_that_the_engine_never_began_has_no_failure(
    queue: Queue, working: Working, engine: ScriptedEngine
) -> None:
    # Given an engine that is too full to begin a job, twice, and a worker that would take one failure for the last
    engine.answers.extend([[Final(503, None, begun=False)], [Final(503, None, begun=False)]])
    async with working(max_attempts=1):
        # If a job runs, I expect its answer, and no failure
        job = make_job()
        await queue.submit(job)
        (record,) = await _ends(queue, job)
        assert (record.status, record.attempt, record.failures) == (Status.COMPLETED, 3, 0)


async def test_half_of_a_surrogate_pair_is_passed_on(queue: Queue, working: Working, engine: ScriptedEngine) -> None:
    # Given a stream whose text UTF-8 cannot carry, although JSON can
    engine.answers.append([chunk("列\ud800"), chunk("", "stop"), Final(200, None)])
    async with working():
        # If a job runs, I expect that very text in the answer
        job = make_job()
        await queue.submit(job)
        (record,) = await _ends(queue, job)
        assert (record.status, record.failures) == (Status.COMPLETED, 0)
        result = await queue.result(job.id)
        assert result is not None
        assert json.loads(result.body)["choices"][0]["message"]["content"] == "列\ud800"


async def test_an_answer_that_is_no_json_is_the_engines_failure(
    queue: Queue, working: Working, engine: ScriptedEngine
) -> None:
    engine.answers.append([Final(200, b"not json")])
    job = make_job()
    async with working():
        await queue.submit(job)
        (record,) = await _ends(queue, job)
        assert (record.status, record.failures) == (Status.COMPLETED, 1)


async def test_a_malformed_entry_is_dropped(
    queue: Queue, working: Working, engine: ScriptedEngine, redis: Redis, keys: Keys
) -> None:
    # Given entries that no script has written, before a good job
    stream = keys.lane("0", "m", "short", "default")
    for fields in ({"job": "job-0-x"}, {"job": "?", "prompt_tokens": 1, "reserve_tokens": 1, "choices": 1}, {"a": "b"}):
        await redis.xadd(stream, fields)
    job = make_job()
    await queue.submit(job)

    # If a worker reads them, I expect the good job to run, and nothing left
    async with working():
        assert (await _ends(queue, job))[0].status is Status.COMPLETED
        assert await _nothing_left(redis, keys)


async def test_an_own_job_that_came_back_is_counted_once(
    queue: Queue, working: Working, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that gives a job back, and reads it again before it has the answer
    job = make_job()
    engine.answers.append([Final(500, None)])
    requeue, go, calls = Queue.requeue, asyncio.Event(), []

    async def requeue_slowly(self: Queue, *args: Any, **options: Any) -> Any:
        answer = await requeue(self, *args, **options)
        calls.append(answer)
        await asyncio.wait_for(go.wait(), PATIENCE_S)
        return answer

    monkeypatch.setattr(Queue, "requeue", requeue_slowly)
    hold = engine.hold(job.id)
    async with working() as worker:
        await queue.submit(job)
        await eventually(lambda: len(engine.started) == 2)

        # If the answer comes while the second attempt runs, I expect that one to stay in hand, and all room back later
        go.set()
        await asyncio.sleep(0.05)
        assert worker.running == 1
        hold.set()
        await _ends(queue, job)
        await eventually(lambda: worker.running == 0)
        full = [make_job() for _ in range(5)]
        for each in full:
            engine.hold(each.id)
            await queue.submit(each)
        await eventually(lambda: worker.running == 5)
        for each in full:
            engine.hold(each.id).set()
        await _ends(queue, *full)


async def test_an_abort_is_not_cut_off_by_a_second_reason(queue: Queue, working: Working) -> None:
    # Given an engine that takes a while to abort
    class Slow(ScriptedEngine):
        async def run(self, request: Request) -> AsyncGenerator[Chunk | Final, None]:
            self.started.append(request.id)
            try:
                yield chunk("a")
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.05)
                self.aborted.append(request.id)

    engine = Slow()
    job = make_job()
    worker = Worker(queue, engine, name="w1", model="m", lanes=LANES)
    running = asyncio.create_task(worker.run())
    await queue.submit(job)
    await eventually(lambda: engine.started)

    # If its job is cancelled and the worker is stopped meanwhile, I expect the abort to be complete
    await queue.cancel(job.id)
    await worker.stop(0)
    await running
    assert engine.aborted == [job.id]
    assert (await _record(queue, job)).status is Status.CANCELLED


async def test_a_busy_server_ends_no_worker(queue: Queue, working: Working, redis: Redis) -> None:
    # Given a server on which somebody's script takes long
    busy = "local t = redis.call('TIME')[1] + 1 while redis.call('TIME')[1] - t < 1 do end"
    await redis.config_set("busy-reply-threshold", 50)
    async with working() as worker:
        slow = asyncio.create_task(redis.eval(busy, 0))

        async def ping_while_it_runs() -> None:
            while not slow.done():
                await queue.ping()

        with pytest.raises(QueueUnavailable):
            await ping_while_it_runs()

        # If it has ended, I expect the worker to work
        await slow
        await redis.config_set("busy-reply-threshold", 5000)
        job = make_job()
        await queue.submit(job)
        assert (await _ends(queue, job))[0].status is Status.COMPLETED
        await eventually(lambda: worker.pulling)


async def test_stop_ends_though_redis_is_away(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker with a running job, whose server is gone
    monkeypatch.setattr(worker_module, "_GIVE_BACK_S", 0.2)
    valkey = Valkey(tmp_path)
    valkey.start()
    async with Queue.connect(valkey.url) as queue:
        job = make_job()
        engine.hold(job.id)
        await queue.submit(job)
        worker = Worker(queue, engine, name="w1", model="m", lanes=LANES)
        running = asyncio.create_task(worker.run())
        await eventually(lambda: engine.started)
        valkey.kill()

        # If it is stopped, I expect it to end all the same, its run aborted
        await asyncio.wait_for(worker.stop(0), PATIENCE_S)
        await running
        assert engine.aborted == [job.id]
        assert worker.state == "stopped"


async def test_health_means_pulling(queue: Queue, working: Working, engine: ScriptedEngine) -> None:
    # Given a worker
    async with working() as worker:
        assert (worker.state, worker.pulling) == ("pulling", True)

        # If all lanes are full, I expect it to be healthy still
        jobs = [make_job(lane=lane) for lane, n in (("short", 5), ("mid", 3), ("long", 2)) for _ in range(n)]
        holds = [engine.hold(job.id) for job in jobs]
        await asyncio.gather(*(queue.submit(job) for job in jobs))
        await eventually(lambda: worker.state == "full")
        assert worker.pulling
        for hold in holds:
            hold.set()
        await _ends(queue, *jobs)
        await eventually(lambda: worker.state == "pulling")

        # If it goes quiet, I expect it not to be
        await worker.quiet()
        assert not worker.pulling


async def test_liveness_is_not_health(tmp_path: Path, engine: ScriptedEngine) -> None:
    # Given a worker with a job that runs on, on a server that will go
    valkey = Valkey(tmp_path)
    valkey.start()
    async with Queue.connect(valkey.url) as queue:
        worker = Worker(queue, engine, name="w1", model="m", lanes=LANES)
        transport = httpx.ASGITransport(health_app(worker))
        async with httpx.AsyncClient(transport=transport, base_url="http://w") as http:

            async def statuses() -> tuple[int, int]:
                return (await http.get("/live")).status_code, (await http.get("/health")).status_code

            job = make_job()
            go = engine.hold(job.id)
            await queue.submit(job)
            running = asyncio.create_task(worker.run())
            await eventually(lambda: engine.started)
            assert await statuses() == (200, 200)

            # If Redis goes away, I expect it to be alive, and not to pull
            valkey.kill()
            await eventually(lambda: worker.state == "waiting for Redis")
            assert await statuses() == (200, 503)
            valkey.start()
            await eventually(lambda: worker.pulling)

            # If it goes quiet, I expect the same: who kills it then kills its job
            await worker.quiet()
            assert await statuses() == (200, 503)

            # If its engine dies, I expect it to be dead
            engine.alive = False
            assert await statuses() == (503, 503)
            go.set()
            await asyncio.wait_for(running, PATIENCE_S)
    valkey.stop()


async def test_three_workers_share_the_work(queue: Queue, working: Working) -> None:
    # Given three workers
    jobs = [make_job(lane=lane) for lane in ("short", "mid", "long") for _ in range(30)]
    async with working("w1"), working("w2"), working("w3"):
        # If 90 jobs come, I expect each to run once
        await asyncio.gather(*(queue.submit(job) for job in jobs))
        records = await _ends(queue, *jobs)
        assert {record.attempt for record in records} == {1}
        assert {record.status for record in records} == {Status.COMPLETED}


async def test_a_worker_outlives_the_loss_of_its_connections(
    queue: Queue, working: Working, engine: ScriptedEngine, redis: Redis
) -> None:
    # Given a worker with a running job
    job, later = make_job(), make_job()
    go = engine.hold(job.id)
    await queue.submit(job)
    async with working() as worker:
        await eventually(lambda: engine.started)

        # If the server drops all its connections
        with suppress(Exception):
            await redis.client_kill_filter(_type="normal", skipme=True)
        go.set()

        # I expect the running job to end, and the next one too
        await queue.submit(later)
        records = await _ends(queue, job, later)
        assert [record.attempt for record in records] == [1, 1]
        await eventually(lambda: worker.pulling)
