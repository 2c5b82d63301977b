"""What an API does for a caller while there is nothing to send, in this loop; the test plays the worker."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api_bench import Bench, followed, working
from headway.api import following
from headway.shared import following as outages
from headway.shared.job import Delivery, Outcome, Reply, Status
from headway.shared.keys import Keys
from headway.shared.queue import Queue
from headway.shared.tokens import COMPLETIONS
from helpers import DONE, chunks, eventually
from valkey_server import Valkey

REFUSED = Outcome(Status.FAILED, 422, b'{"error": {"message": "no", "type": "t", "param": null, "code": 422}}')
HEARTBEAT = b": waiting\n\n"
TEXT = b'{"choices":[{"text":"a"}]}'


def assert_not_to_be_asked_again(answer: httpx.Response, delivery: Delivery) -> None:
    assert (answer.headers["x-job-id"], answer.headers["x-should-retry"]) == (delivery.job.id, "false")


def error_in(frame: bytes) -> Any:
    return json.loads(frame.removeprefix(b"data: "))["error"]


async def until(parts: AsyncIterator[bytes], ending: bytes) -> bytes:
    """What comes, up to and with the first part that ends so."""
    got = b""
    async for part in parts:
        got += part
        if got.endswith(ending):
            return got
    raise AssertionError(f"the stream ended with {got[-100:]!r}")


async def test_a_stream_that_waits_beats(beating: Bench) -> None:
    # Given a stream whose job has not been read by any worker
    async with beating.http.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True}) as answer:
        parts = answer.aiter_raw()
        # I expect headers that keep proxies from buffering, and comments
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert (await until(parts, HEARTBEAT * 3)) == HEARTBEAT * 3
        # and, between the tokens of a slow job, more of them
        delivery = await beating.take()
        await beating.queue.append(delivery, 0, chunks(TEXT.decode()))
        assert b"data: " + TEXT + b"\n\n" + HEARTBEAT in await until(parts, TEXT + b"\n\n" + HEARTBEAT)
        await beating.queue.finish(delivery, 1, DONE)
        assert (await until(parts, b"[DONE]\n\n")).replace(HEARTBEAT, b"") == b"data: [DONE]\n\n"


async def test_events_beat_too(beating: Bench) -> None:
    order = {"endpoint": COMPLETIONS, "body": {"prompt": "x"}}
    job_id = (await beating.http.post("/v1/jobs", json=order)).json()["id"]
    async with beating.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        parts = answer.aiter_raw()
        assert answer.headers["x-accel-buffering"] == "no"
        await until(parts, HEARTBEAT * 3)
        await beating.queue.finish(await beating.take(), 0, DONE)
        await until(parts, b'"status":"completed"}\n\n')


async def test_an_error_before_the_first_token_has_its_own_status(bench: Bench) -> None:
    asking = bench.ask(stream=True)
    await bench.queue.finish(await bench.take(), 0, REFUSED)
    answer = await asking
    assert (answer.status_code, answer.content) == (422, REFUSED.body)
    assert answer.headers["content-type"] == "application/json"


async def test_an_error_behind_a_heartbeat_is_a_frame(beating: Bench) -> None:
    async with beating.http.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True}) as answer:
        parts = answer.aiter_raw()
        await until(parts, HEARTBEAT)
        await beating.queue.finish(await beating.take(), 0, REFUSED)
        rest = b"".join([part async for part in parts])
    assert error_in(rest.replace(HEARTBEAT, b""))["message"] == "no"


async def test_an_error_behind_text_is_a_frame_and_nothing_is_done(bench: Bench) -> None:
    asking = bench.ask(stream=True)
    delivery = await bench.take()
    await bench.queue.append(delivery, 0, chunks(TEXT.decode()))
    await bench.queue.finish(delivery, 1, REFUSED)
    answer = await asking
    text, error, rest = answer.content.split(b"\n\n")
    assert (answer.status_code, text, rest) == (200, b"data: " + TEXT, b"")
    assert error_in(error)["message"] == "no"


async def test_a_restart_before_any_text_is_no_business_of_the_caller(bench: Bench) -> None:
    asking = bench.ask(stream=True)
    delivery = await bench.take()
    await bench.queue.append(delivery, 0, [Reply(0, "restarted", b"{}"), *chunks(TEXT.decode())])
    await bench.queue.finish(delivery, 2, DONE)
    assert (await asking).content == b"data: " + TEXT + b"\n\ndata: [DONE]\n\n"


async def test_a_restart_behind_text_ends_an_openai_stream(bench: Bench) -> None:
    # Given a dialect that has no word for "what came before is void"
    asking = bench.ask(stream=True)
    delivery = await bench.take()
    await bench.queue.append(delivery, 0, [*chunks(TEXT.decode()), Reply(0, "restarted", b"{}"), *chunks("{}")])
    # I expect an error that names the job, and no text twice
    text, error, rest = (await asking).content.split(b"\n\n")
    assert (text, rest) == (b"data: " + TEXT, b"")
    assert delivery.job.id in error_in(error)["message"]


async def test_a_plain_answer_has_the_status_of_the_engine(bench: Bench) -> None:
    asking = bench.ask()
    await bench.queue.finish(await bench.take(), 0, REFUSED)
    answer = await asking
    assert (answer.status_code, answer.content) == (422, REFUSED.body)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_job_is_not_asked_for_again(bench: Bench, stream: bool) -> None:
    # Given a job that has failed by the engine's fault, which SDKs would send again
    asking = bench.ask(stream=stream)
    delivery = await bench.take()
    await bench.queue.finish(delivery, 0, Outcome(Status.FAILED, 500, REFUSED.body))
    answer = await asking
    assert answer.status_code == 500
    assert_not_to_be_asked_again(answer, delivery)


async def test_an_answer_that_has_expired_is_not_asked_for_again(bench: Bench, redis_url: str, prefix: str) -> None:
    # Given a caller, and an answer that is gone before the caller gets it
    asking = bench.ask()
    delivery = await bench.take()
    async with Redis.from_url(redis_url) as redis, redis.pipeline() as at_once:
        keys = Keys(prefix)
        at_once.hset(keys.job(delivery.job.id), mapping={"status": "completed", "status_code": 200})
        at_once.publish(keys.notice(delivery.job.id), 0)
        await at_once.execute()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    assert_not_to_be_asked_again(answer, delivery)


async def test_a_stream_that_has_lost_text_is_not_done(bench: Bench, redis_url: str, prefix: str) -> None:
    # Given a reader who has some text, and a log that loses the next
    asking = bench.http.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True})
    delivery_task = asyncio.create_task(bench.take())
    async with Redis.from_url(redis_url) as redis:
        submitted = asyncio.create_task(asking.__aenter__())
        delivery = await delivery_task
        await bench.queue.append(delivery, 0, chunks(TEXT.decode()))
        parts = (await submitted).aiter_raw()
        got = await until(parts, TEXT + b"\n\n")
        async with redis.pipeline() as at_once:
            keys = Keys(prefix)
            at_once.hset(keys.job(delivery.job.id), mapping={"status": "completed", "offset": 3})
            at_once.delete(keys.log(delivery.job.id))
            at_once.publish(keys.notice(delivery.job.id), 3)
            await at_once.execute()
        rest = b"".join([part async for part in parts])
        await asking.__aexit__(None, None, None)
    # I expect an error and no [DONE]
    assert got == b"data: " + TEXT + b"\n\n"
    assert error_in(rest)["code"] == "log_expired"


async def test_a_plain_job_keeps_no_log_and_its_readers_get_the_end(bench: Bench) -> None:
    asking = bench.ask()
    delivery = await bench.take()
    await bench.queue.finish(delivery, 0, DONE)
    assert (await asking).content == DONE.body
    events = await bench.http.get(f"/v1/jobs/{delivery.job.id}/events")
    assert events.content.startswith(b"id: 1\nevent: end\n")


async def test_a_cancelled_caller_is_told(bench: Bench) -> None:
    asking = bench.ask()
    delivery = await bench.take()
    assert (await bench.queue.requeue(delivery, "test")) == "ok"
    cancelled = await bench.http.post(f"/v1/jobs/{delivery.job.id}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")


async def test_a_wait_that_runs_out_shows_the_job_as_it_is(bench: Bench) -> None:
    order = {"endpoint": COMPLETIONS, "body": {"prompt": "x"}}
    job_id = (await bench.http.post("/v1/jobs", json=order)).json()["id"]
    answer = await bench.http.get(f"/v1/jobs/{job_id}", headers={"Prefer": "wait=1"})
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    assert answer.headers["preference-applied"] == "wait=1"


async def test_a_wait_ends_with_the_job(bench: Bench) -> None:
    order = {"endpoint": COMPLETIONS, "body": {"prompt": "x"}}
    job_id = (await bench.http.post("/v1/jobs", json=order)).json()["id"]
    delivery = await bench.take()
    waiting = asyncio.create_task(bench.http.get(f"/v1/jobs/{job_id}", headers={"Prefer": "wait=300"}))
    await bench.queue.finish(delivery, 0, DONE)
    assert (await waiting).json()["result"] == {"answer": 42}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_who_hangs_up_is_followed_no_more(
    bench: Bench, redis_url: str, prefix: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a caller who waits
    asking = bench.ask(stream=stream)
    delivery = await bench.take()
    async with followed(redis_url, prefix, delivery.job.id):
        # If it hangs up, I expect that nobody follows the job, which runs on
        asking.cancel()
    # and that this is no fault
    await bench.http.get("/health")
    assert [entry for entry in caplog.records if entry.levelno >= logging.ERROR] == []
    record = await bench.queue.record(delivery.job.id)
    assert record is not None
    assert (record.status, record.cancel_requested) == (Status.IN_PROGRESS, False)


async def test_callers_are_held_while_redis_restarts(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given followers that look into the log often, so that they notice an outage at once
    monkeypatch.setattr("headway.shared.queue.SAFETY_READ_S", 0.05)
    held = []

    until_back = outages.until_back

    async def hold(queue: Queue, patience_s: float) -> None:
        held.append(queue)
        await until_back(queue, patience_s)

    monkeypatch.setattr(outages, "until_back", hold)
    valkey = Valkey(tmp_path, appendonly=True)
    valkey.start()
    try:
        async with working(redis_url=valkey.url, prefix=prefix, heartbeat_s=0.02) as bench:
            # Given one caller who waits for a plain answer, and one who has some text of a stream
            asking = bench.ask()
            plain = await bench.take()
            async with bench.http.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True}) as answer:
                streamed = await bench.take()
                await bench.queue.append(streamed, 0, chunks(TEXT.decode()))
                parts = answer.aiter_raw()
                got = await until(parts, TEXT + b"\n\n")
                # If the server goes, and comes back when both have noticed
                await asyncio.to_thread(valkey.stop)
                await eventually(lambda: len(held) >= 2)
                await asyncio.to_thread(valkey.start)
                await bench.queue.finish(plain, 0, DONE)
                await bench.queue.append(streamed, 1, chunks(TEXT.decode()))
                await bench.queue.finish(streamed, 2, DONE)
                # I expect both to get all of their answers, and nothing twice
                got += await until(parts, b"[DONE]\n\n")
            assert got.replace(HEARTBEAT, b"") == 2 * (b"data: " + TEXT + b"\n\n") + b"data: [DONE]\n\n"
            assert (await asking).content == DONE.body
    finally:
        valkey.stop()


async def test_an_outage_that_lasts_is_an_error(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an API without patience, and a caller who waits
    monkeypatch.setattr("headway.shared.queue.SAFETY_READ_S", 0.05)
    monkeypatch.setattr(following, "PATIENCE_S", 0)
    valkey = Valkey(tmp_path)
    valkey.start()
    try:
        async with working(redis_url=valkey.url, prefix=prefix) as bench:
            asking = bench.ask()
            delivery = await bench.take()
            # If the server goes for good, I expect an error that SDKs do not answer with another job
            await asyncio.to_thread(valkey.stop)
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
            assert "retry-after" not in answer.headers
            assert_not_to_be_asked_again(answer, delivery)
    finally:
        valkey.stop()
