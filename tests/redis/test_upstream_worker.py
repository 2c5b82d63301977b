"""A worker whose upstream is gone or full: what is counted against its jobs."""

import asyncio
from collections import deque

import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from headway.shared.job import Status
from headway.shared.lanes import make_lanes
from headway.shared.queue import Queue
from headway.worker.engines import upstream as module
from headway.worker.engines.upstream import Upstream, UpstreamEngine
from headway.worker.worker import Worker
from helpers import PATIENCE_S, make_job, transcript
from programs import serving

LANES = make_lanes(256, 1024, (0.5, 0.3, 0.2))


async def test_a_job_that_a_dead_upstream_never_saw_has_no_failure(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose upstream lists its models, and then is gone
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "m", "max_model_len": 32768}]})
    async with serving(app) as url:
        engines = UpstreamEngine.start(Upstream(url=url, model="m", served_model="m", slots=8, kv_tokens=100_000))
        engine = await engines.__aenter__()
    worker = Worker(queue, engine, name="w1", model="m", lanes=LANES, max_attempts=1)
    working = asyncio.create_task(worker.run())

    # If jobs come, I expect the worker to end as after an engine's death
    jobs = [make_job() for _ in range(3)]
    for job in jobs:
        await queue.submit(job)
    await asyncio.wait_for(working, PATIENCE_S)
    await engines.__aexit__(None, None, None)
    assert worker.state == "engine died"
    # and the jobs, for which one failure would have been the last, to wait in their lane for another
    records = [await queue.record(job.id) for job in jobs]
    assert [(record.status, record.failures) for record in records if record] == [(Status.QUEUED, 0)] * 3


async def test_a_job_that_waits_for_a_full_upstream_has_no_failure(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an upstream that is full for longer than a run has patience, twice over
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.1)
    answers = deque([Response(status_code=429, headers={"retry-after": "1000"}) for _ in range(4)])
    app = FastAPI()
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "m", "max_model_len": 32768}]})
    app.add_api_route(
        "/v1/chat/completions",
        lambda: answers.popleft() if answers else JSONResponse({"choices": []}),
        methods=["POST"],
    )
    upstream = {"model": "m", "served_model": "m", "slots": 8, "kv_tokens": 100_000}
    async with serving(app) as url, UpstreamEngine.start(Upstream(url=url, **upstream)) as engine:  # type: ignore[arg-type]
        worker = Worker(queue, engine, name="w1", model="m", lanes=LANES, max_attempts=1)
        working = asyncio.create_task(worker.run())
        # If a job comes, for which one failure would be the last
        job = make_job(log=False)
        await queue.submit(job)
        await transcript(queue, job.id)
        await worker.stop(0)
        await working
    # I expect its answer, and that each attempt has waited as long as it may
    record = await queue.record(job.id)
    assert record is not None
    assert (record.status, record.failures, record.attempt) == (Status.COMPLETED, 0, 3)
