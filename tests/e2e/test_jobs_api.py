"""`/v1/jobs` over real processes: submit, poll, wait, follow from anywhere, cancel."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis import Redis

from headway.api.schemas import JobObject
from headway.shared.keys import Keys
from headway.shared.tokens import CHAT, COMPLETIONS
from headway.worker.engines.simulated_openai import text
from helpers import PATIENCE_S, eventually
from programs import MODEL, ApiProgram, Program, Stack

WAIT = {"Prefer": "wait=30"}


async def submit(http: httpx.AsyncClient, max_tokens: int = 5, **fields: Any) -> str:
    """The id of a new job."""
    order = {"endpoint": COMPLETIONS, "body": {"prompt": "Once", "max_tokens": max_tokens}, **fields}
    answer = await http.post("/v1/jobs", json=order)
    assert answer.status_code == 202
    return str(answer.json()["id"])


async def look(http: httpx.AsyncClient, job_id: str, **headers: str) -> JobObject:
    answer = await http.get(f"/v1/jobs/{job_id}", headers=headers)
    assert answer.status_code == 200
    return JobObject.model_validate_json(answer.content, strict=True)


async def read(http: httpx.AsyncClient, job_id: str, after: int = 0) -> bytes:
    """All events behind an offset, up to the end."""
    headers = {"Last-Event-ID": str(after)} if after else {}
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert answer.status_code == 200
    return answer.content


async def read_frames(events: AsyncIterator[bytes], count: int, more: int = 0) -> bytes:
    """So many whole frames and so many bytes of the next one."""
    got = b""
    async for part in events:
        got += part
        if got.count(b"\n\n") > count or (got.count(b"\n\n") == count and not more):
            break
    whole = b"".join(frame + b"\n\n" for frame in got.split(b"\n\n")[:count])
    return got[: len(whole) + more]


def last_id(events: bytes) -> int:
    """The id of the last whole frame, as a reader would have kept it."""
    frames = events.split(b"\n\n")[:-1]
    return int(frames[-1].split(b"\n")[0].removeprefix(b"id: ")) if frames else 0


async def test_a_job_from_submit_to_result(http: httpx.AsyncClient, other: httpx.AsyncClient) -> None:
    # If I submit a job
    order = {"endpoint": CHAT, "body": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}}
    answer = await http.post("/v1/jobs", json={**order, "tier": "priority"})
    job = JobObject.model_validate_json(answer.content, strict=True)
    # I expect to be told where it is
    assert (answer.status_code, answer.headers["location"]) == (202, job.links.self)
    assert (job.lane, job.tier, job.endpoint) == ("short", "priority", CHAT)
    assert answer.headers["x-job-id"] == answer.headers["x-request-id"] == job.id
    # and its answer, when I wait for it at any process
    done = await look(other, job.id, **WAIT)
    assert done.status == "completed"
    assert done.result is not None
    assert done.result["choices"][0]["message"]["content"] == text(job.id, 0, 0, 6)
    assert (done.output_tokens, done.error, done.attempt) == (6, None, 1)
    assert done.batch is not None
    times = done.timeline.model_dump()
    assert sorted(times.values()) == list(times.values())


async def test_polling(http: httpx.AsyncClient) -> None:
    job_id = await submit(http, 30)
    seen = []
    async with asyncio.timeout(PATIENCE_S):
        while not seen or seen[-1] in ("queued", "in_progress"):
            seen.append((await look(http, job_id)).status)
    assert seen[-1] == "completed"


async def test_the_body_is_kept_as_the_bytes_that_came_in(http: httpx.AsyncClient, stack: Stack) -> None:
    body = b'{ "prompt":"Gr\\u00fc\xc3\x9fe",\n"max_tokens" : 1,"temperature":0.50 }'
    answer = await http.post("/v1/jobs", content=b'{"endpoint": "/v1/completions", "body": %s }' % body)
    with Redis.from_url(stack.settings["REDIS_URL"]) as redis:
        assert redis.get(Keys(stack.settings["PREFIX"]).body(answer.json()["id"])) == body


@pytest.mark.parametrize(("tokens", "lane"), [(199, "short"), (200, "mid"), (800, "mid"), (801, "long")])
async def test_the_length_of_the_prompt_chooses_the_lane(http: httpx.AsyncClient, tokens: int, lane: str) -> None:
    job_id = await submit(http, body={"prompt": [1] * tokens, "max_tokens": 1})
    assert (await look(http, job_id, **WAIT)).lane == lane


async def test_an_engine_that_refuses_fails_the_job(http: httpx.AsyncClient) -> None:
    job_id = await submit(http, body={"prompt": "x", "temperature": -1})
    job = await look(http, job_id, **WAIT)
    assert job.error is not None
    assert (job.status, job.error.param, job.result) == ("failed", "temperature", None)
    assert (await read(http, job_id)).endswith(b'"status":"failed"}\n\n')


async def test_respond_async(http: httpx.AsyncClient) -> None:
    body = {"prompt": "Once", "max_tokens": 3}
    answer = await http.post(COMPLETIONS, json=body, headers={"Prefer": "respond-async"})
    assert (answer.status_code, answer.headers["preference-applied"]) == (202, "respond-async")
    job = await look(http, answer.json()["id"], **WAIT)
    assert job.result is not None
    assert job.result["choices"][0]["text"] == text(job.id, 0, 0, 3)
    assert (await read(http, job.id)).startswith(b"id: 1\nevent: chunk\n")


@pytest.mark.parametrize("more", [0, 9], ids=["between frames", "in mid-frame"])
async def test_events_cut_anywhere_continue_at_another_process(
    http: httpx.AsyncClient, other: httpx.AsyncClient, more: int
) -> None:
    events = 0
    cut = 0
    while cut == 0 or cut < events:
        # Given a reader of a running job whose connection is cut behind some event
        job_id = await submit(http, 12)
        async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            first = await read_frames(answer.aiter_raw(), cut, more)
        whole = first[: first.rfind(b"\n\n") + 2] if b"\n\n" in first else b""
        assert whole.count(b"\n\n") == cut
        # If it resumes at another process
        rest = await read(other, job_id, last_id(whole))
        # I expect the bytes of a reader who was never cut
        assert whole + rest == await read(http, job_id)
        events = (whole + rest).count(b"\n\n")
        cut += 1
    assert events > 12


async def test_a_killed_api_process_loses_no_reader(http: httpx.AsyncClient, stack: Stack) -> None:
    # Given a reader at an API process of its own, and a chat that streams through that process too
    doomed = ApiProgram(stack.settings)
    async with httpx.AsyncClient(base_url=doomed.url, timeout=PATIENCE_S) as client:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "stream": True}
        job_id = await submit(client, 300)
        async with (
            client.stream("GET", f"/v1/jobs/{job_id}/events") as events,
            client.stream("POST", CHAT, json=chat) as stream,
        ):
            parts = events.aiter_raw()
            got = await read_frames(parts, 5)
            # If that process is killed in mid-stream
            doomed.kill()
            with pytest.raises(httpx.HTTPError):
                await stream.aread()
    # I expect the rest at another process, after the last whole event that came
    rest = await read(http, job_id, last_id(got))
    assert got + rest == await read(http, job_id)
    # and that the chat ran on without its caller
    done = await look(http, stream.headers["x-job-id"], **WAIT)
    assert (done.status, done.output_tokens) == ("completed", 300)


async def test_readers_at_once_and_late_ones_get_the_same(http: httpx.AsyncClient, other: httpx.AsyncClient) -> None:
    job_id = await submit(http, 40)
    at_once = await asyncio.gather(*(read(client, job_id) for client in (http, other) * 3))
    late = await read(other, job_id)
    assert set(at_once) == {late}
    assert late.endswith(b'event: end\ndata: {"id":"%s","status":"completed"}\n\n' % job_id.encode())


async def test_the_offset_can_stand_in_the_url_and_the_header_wins(http: httpx.AsyncClient) -> None:
    job_id = await submit(http, 5)
    whole = await read(http, job_id)
    path = f"/v1/jobs/{job_id}/events?after=2"
    assert whole.endswith((await http.get(path)).content)
    assert (await http.get(path)).content.startswith(b"id: 3\n")
    assert (await http.get(path, headers={"Last-Event-ID": "4"})).content.startswith(b"id: 5\n")
    assert (await http.get(path, headers={"Last-Event-ID": ""})).content.startswith(b"id: 3\n")


async def test_a_reader_who_has_the_end_is_told_to_stop(http: httpx.AsyncClient) -> None:
    job_id = await submit(http, 2)
    last = last_id(await read(http, job_id))
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(last)})
    assert (answer.status_code, answer.content) == (204, b"")


async def test_a_reader_of_a_job_without_a_log_is_told_to_stop(http: httpx.AsyncClient) -> None:
    # Given a plain job, and a reader who has its end
    job_id = (await http.post(COMPLETIONS, json={"prompt": "Once", "max_tokens": 2})).headers["x-job-id"]
    last = last_id(await read(http, job_id))
    # If it reconnects, I expect the end not to come again
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(last)})
    assert (answer.status_code, answer.content) == (204, b"")
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(last + 1)})
    assert answer.status_code == 400


async def test_the_events_of_an_expired_log_are_gone(http: httpx.AsyncClient, stack: Stack) -> None:
    # Given a job whose log has expired
    job_id = await submit(http, 3)
    last = last_id(await read(http, job_id))
    with Redis.from_url(stack.settings["REDIS_URL"]) as redis:
        redis.delete(Keys(stack.settings["PREFIX"]).log(job_id))
    # If a reader comes who lacks events, I expect 410, which makes browsers stop
    for offset in (0, last - 1):
        answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(offset)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "log_expired")
    # and 204 for one who has all of them
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(last)})
    assert answer.status_code == 204


@pytest.mark.parametrize("offset", ["-1", "1.5", "abc", "1000", "9" * 40])
async def test_an_offset_that_no_event_has_is_refused(http: httpx.AsyncClient, offset: str) -> None:
    job_id = await submit(http, 2)
    answer = await http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": offset})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_cancelling_a_running_job(http: httpx.AsyncClient, other: httpx.AsyncClient) -> None:
    # Given a job that would run for seconds, of which some text is there
    job_id = await submit(http, 1900)
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        parts = answer.aiter_raw()
        await read_frames(parts, 3)
        # If I cancel it at another process, and again
        assert (await other.post(f"/v1/jobs/{job_id}/cancel")).status_code == 200
        again = await other.post(f"/v1/jobs/{job_id}/cancel")
        rest = b"".join([part async for part in parts])
    # I expect its readers to see the end, and that cancelling once more changes nothing
    assert again.status_code == 200
    assert rest.endswith(b'"status":"cancelled"}\n\n')
    job = await look(http, job_id)
    assert job.error is not None
    assert (job.status, job.error.code) == ("cancelled", "cancelled")
    after = await http.post(f"/v1/jobs/{job_id}/cancel")
    assert (after.status_code, after.json()["status"]) == (200, "cancelled")


async def test_200_callers_wait_on_at_most_4_connections(stack: Stack) -> None:
    # Given an API process without a worker, and 200 callers who wait for plain answers
    settings = {**stack.settings, "PREFIX": f"hw-test-{secrets.token_hex(6)}"}
    lane = Keys(settings["PREFIX"]).lane("0", MODEL, "short", "default")
    with Redis.from_url(stack.settings["REDIS_URL"]) as redis:

        def connections() -> set[str]:
            return {client["id"] for client in redis.client_list()}

        before = connections()
        api = ApiProgram(settings)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=api.url, timeout=2 * PATIENCE_S, limits=limits) as http:
            body = {"prompt": "Once", "max_tokens": 2}
            callers = [asyncio.create_task(http.post(COMPLETIONS, json=body)) for _ in range(200)]
            await eventually(lambda: redis.xlen(lane) == 200)
            # I expect few connections to the server
            assert 1 <= len(connections() - before) <= 4
            # and an answer for each of them once there is a worker
            worker = Program("headway.worker", settings)
            answers = await asyncio.gather(*callers)
    assert [answer.status_code for answer in answers] == [200] * 200
    assert all(a.json()["choices"][0]["text"] == text(a.headers["x-job-id"], 0, 0, 2) for a in answers)
    assert (worker.stop(), api.stop()) == (0, -15)


async def test_an_api_that_stops_cancels_no_job(http: httpx.AsyncClient, stack: Stack) -> None:
    # Given a reader at an API process, of a job that runs for longer than the process will
    api = ApiProgram({**stack.settings, "API_GRACE_S": "1"})
    async with httpx.AsyncClient(base_url=api.url, timeout=PATIENCE_S) as client:
        job_id = await submit(client, 1900)
        async with client.stream("GET", f"/v1/jobs/{job_id}/events") as events:
            parts = events.aiter_raw()
            got = await read_frames(parts, 3)
            # If the process is asked to stop
            await asyncio.to_thread(api.stop)
            with pytest.raises(httpx.HTTPError):
                await read_frames(parts, 1900)
    # I expect the job to run to its end, and the reader to go on elsewhere
    job = await look(http, job_id, **WAIT)
    assert (job.status, job.cancel_requested, job.output_tokens) == ("completed", False, 1900)
    assert (await read(http, job_id)).endswith(await read(http, job_id, last_id(got)))
