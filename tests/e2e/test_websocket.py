"""OpenAI's paths as WebSockets, through the websockets package."""

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from api_bench import Bench, followed, working
from headway.api import following, websocket_routes
from headway.api.app import create_app
from headway.shared.job import Outcome, Reply, Status
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT, COMPLETIONS, estimate
from headway.worker.engines.simulated_openai import text
from helpers import DONE, PATIENCE_S, chunks, eventually
from programs import MAX_MODEL_LEN, MODEL, ApiProgram, Stack, serving
from valkey_server import Valkey

REFUSED = Outcome(Status.FAILED, 422, b'{"error": {"message": "no", "type": "t", "param": null, "code": 422}}')
TEXT = '{"choices":[{"text":"a"}]}'
MAX_BODY_BYTES = 100_000


@dataclass(frozen=True)
class Heard:
    """What came over a socket, up to and with its close."""

    messages: list[Any]
    code: int | None
    reason: str | None

    @property
    def error(self) -> Any:
        """The error, which is the last message."""
        return self.messages[-1]["error"]


def socket(url: str, endpoint: str = COMPLETIONS) -> connect:
    return connect(url.replace("http", "ws", 1) + endpoint, open_timeout=PATIENCE_S, max_size=None)


async def listen(websocket: ClientConnection) -> Heard:
    """All that comes from now on."""
    messages = []
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionClosed):
            while True:
                messages.append(json.loads(await websocket.recv(decode=True)))
    return Heard(messages, websocket.close_code, websocket.close_reason)


async def ask(url: str, request: Any, endpoint: str = COMPLETIONS) -> Heard:
    async with socket(url, endpoint) as websocket:
        await websocket.send(json.dumps(request) if isinstance(request, dict) else request)
        return await listen(websocket)


@pytest.mark.parametrize("as_bytes", [False, True])
async def test_a_completion_comes_in_chunks(stack: Stack, as_bytes: bool) -> None:
    request = json.dumps({"prompt": "größer 🚂", "max_tokens": 40}, ensure_ascii=False)
    heard = await ask(stack.api, request.encode() if as_bytes else request)
    # I expect a normal close that names the job, as the chunks' ids do
    assert heard.code == 1000
    job_id = heard.reason or ""
    assert {chunk["id"] for chunk in heard.messages} == {f"cmpl-{job_id}"}
    assert "".join(chunk["choices"][0]["text"] for chunk in heard.messages) == text(job_id, 0, 0, 40)
    assert len(heard.messages) > 5


async def test_a_chat_comes_in_chunks(stack: Stack) -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    heard = await ask(stack.api, request, CHAT)
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in heard.messages)
    assert (heard.code, said) == (1000, text(heard.reason or "", 0, 0, 9))


@pytest.mark.parametrize("usage", [True, False])
async def test_usage_comes_where_it_is_asked_for(stack: Stack, usage: bool) -> None:
    request = {"prompt": "x", "max_tokens": 3, "stream_options": {"include_usage": usage}}
    last = (await ask(stack.api, request)).messages[-1]
    assert (last["choices"] == [], "usage" in last) == (usage, usage)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": None}, {"n": 2}, {"stop": ["x"]}])
async def test_every_request_streams(bench: Bench, fields: dict[str, Any]) -> None:
    # Given requests that say so or not, of which the last two would not run as streams by themselves
    async with socket(bench.url) as websocket:
        await websocket.send(json.dumps({"prompt": "x", **fields}))
        delivery = await bench.take()
        assert json.loads(delivery.job.body) == {"prompt": "x", **fields, "stream": True}
        assert delivery.job.log
        await bench.queue.append(delivery, 0, chunks(TEXT))
        await bench.queue.finish(delivery, 1, DONE)
        heard = await listen(websocket)
    assert heard == Heard([json.loads(TEXT)], 1000, delivery.job.id)


WRONG: list[tuple[Any, int, str | None]] = [
    ("", 4400, None),
    ("{", 4400, None),
    (b"\xff", 4400, None),
    ("[" * 50_000, 4400, None),
    ("[]", 4400, None),
    ({}, 4400, "prompt"),
    ({"prompt": None}, 4400, "prompt"),
    ({"prompt": "x", "max_tokens": "ten"}, 4400, "max_tokens"),
    ({"prompt": "x", "temperature": "hot"}, 4400, "temperature"),
    ({"prompt": "x", "stream": False}, 4400, "stream"),
    ({"prompt": "x", "stream": "yes"}, 4400, "stream"),
    ({"prompt": "x", "model": "gpt-0"}, 4404, "model"),
    ({"prompt": [1] * MAX_MODEL_LEN}, 4400, "prompt"),
]


@pytest.mark.parametrize(("request_", "code", "param"), WRONG, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named(stack: Stack, request_: Any, code: int, param: str | None) -> None:
    heard = await ask(stack.api, request_)
    assert (heard.code, len(heard.messages), heard.error["param"]) == (code, 1, param)
    assert heard.error["message"]
    # Only a job has an id, and only the engine's own refusals (the temperature) come from a job.
    assert bool(heard.reason) == (param == "temperature")


async def test_an_error_behind_text(bench: Bench) -> None:
    async with socket(bench.url) as websocket:
        await websocket.send('{"prompt": "x"}')
        delivery = await bench.take()
        await bench.queue.append(delivery, 0, chunks(TEXT))
        await bench.queue.finish(delivery, 1, REFUSED)
        heard = await listen(websocket)
    assert heard == Heard([json.loads(TEXT), json.loads(REFUSED.body)], 4422, delivery.job.id)


async def test_a_restart_behind_text_is_an_error_that_names_the_job(bench: Bench) -> None:
    async with socket(bench.url) as websocket:
        await websocket.send('{"prompt": "x"}')
        delivery = await bench.take()
        restart = Reply(0, "restarted", b"{}")
        await bench.queue.append(delivery, 0, [restart, *chunks(TEXT), restart, *chunks(TEXT)])
        heard = await listen(websocket)
    assert (heard.messages[:-1], heard.code, heard.reason) == ([json.loads(TEXT)], 4500, delivery.job.id)
    assert delivery.job.id in heard.error["message"]


async def test_a_cancelled_job(bench: Bench) -> None:
    async with socket(bench.url) as websocket:
        await websocket.send('{"prompt": "x"}')
        delivery = await bench.take()
        await bench.queue.requeue(delivery, "test")
        await bench.queue.cancel(delivery.job.id)
        heard = await listen(websocket)
    assert (heard.code, heard.error["code"]) == (4499, "cancelled")


async def test_without_redis() -> None:
    settings = Settings(engine="simulated", redis_url="unix:///no/such/socket")
    async with serving(create_app(settings, counter=estimate)) as url:
        heard = await ask(url, {"prompt": "x"})
    assert (heard.code, heard.error["code"]) == (4503, "queue_unavailable")
    assert "/no/such" not in heard.error["message"]


async def test_a_client_that_says_nothing_is_sent_away(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_routes, "REQUEST_S", 0.05)
    async with socket(bench.url) as websocket:
        heard = await listen(websocket)
    assert (heard.code, heard.error["code"]) == (4408, "request_timeout")


async def test_a_second_request_is_refused_and_the_first_ones_job_runs_on(
    bench: Bench, redis_url: str, prefix: str
) -> None:
    async with socket(bench.url) as websocket:
        await websocket.send('{"prompt": "x"}')
        delivery = await bench.take()
        async with followed(redis_url, prefix, delivery.job.id):
            await websocket.send('{"prompt": "y"}')
            heard = await listen(websocket)
    assert (heard.code, heard.reason) == (4400, delivery.job.id)
    assert "one request" in heard.error["message"]
    record = await bench.queue.record(delivery.job.id)
    assert record is not None
    assert (record.status, record.cancel_requested) == (Status.IN_PROGRESS, False)


@pytest.mark.parametrize("abrupt", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_hangs_up_is_followed_no_more(
    bench: Bench, redis_url: str, prefix: str, begun: bool, abrupt: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a client who waits, or has some text
    tasks = asyncio.all_tasks()
    async with socket(bench.url) as websocket:
        await websocket.send('{"prompt": "x"}')
        delivery = await bench.take()
        if begun:
            await bench.queue.append(delivery, 0, chunks(TEXT))
            await websocket.recv()
        async with followed(redis_url, prefix, delivery.job.id):
            # If it hangs up, I expect that nobody follows the job
            if abrupt:
                websocket.transport.abort()
            else:
                await websocket.close()
    # which runs on, and that this is no fault and leaves no task behind
    record = await bench.queue.record(delivery.job.id)
    assert record is not None
    assert (record.status, record.cancel_requested) == (Status.IN_PROGRESS, False)
    await eventually(lambda: not [task for task in asyncio.all_tasks() - tasks if "run_asgi" in str(task)])
    assert [entry for entry in caplog.records if entry.levelno >= logging.WARNING] == []


async def test_a_client_that_hangs_up_before_it_has_asked(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    tasks = asyncio.all_tasks()
    async with socket(bench.url):
        pass
    await eventually(lambda: not [task for task in asyncio.all_tasks() - tasks if "run_asgi" in str(task)])
    assert [entry for entry in caplog.records if entry.levelno >= logging.WARNING] == []


async def test_a_fault_of_ours_closes_and_logs_no_prompt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a fault whose text quotes the prompt
    def broken(raw: bytes) -> bytes:
        raise RuntimeError(raw)

    monkeypatch.setattr(websocket_routes, "_as_stream", broken)
    heard = await ask(bench.url, {"prompt": "my secret"})
    # I expect a close that says nothing, and a log that says where but not what
    assert heard == Heard([], 1011, "")
    assert f"RuntimeError in WebSocket {COMPLETIONS}" in caplog.text
    assert "in broken" in caplog.text
    assert "secret" not in caplog.text


async def test_an_outage_that_lasts_names_the_job(tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an API without patience, and a client who waits
    monkeypatch.setattr("headway.shared.queue.SAFETY_READ_S", 0.05)
    monkeypatch.setattr(following, "PATIENCE_S", 0)
    valkey = Valkey(tmp_path)
    valkey.start()
    try:
        async with working(redis_url=valkey.url, prefix=prefix) as bench, socket(bench.url) as websocket:
            await websocket.send('{"prompt": "x"}')
            delivery = await bench.take()
            # If the server goes for good, I expect to be told so, and which job it was
            await asyncio.to_thread(valkey.stop)
            heard = await listen(websocket)
            assert (heard.code, heard.reason, heard.error["code"]) == (4503, delivery.job.id, "queue_unavailable")
    finally:
        valkey.stop()


async def test_a_socket_that_the_server_has_closed_is_no_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a server that has closed a connection, as for want of pongs, but has not said so yet
    async def refuse(self: WebSocket, data: str) -> None:
        raise RuntimeError("Unexpected ASGI message 'websocket.send', after sending 'websocket.close'.")

    monkeypatch.setattr(WebSocket, "send_text", refuse)
    async with socket(bench.url) as websocket:
        await websocket.send('{"prompt": "x"}')
        await bench.queue.append(await bench.take(), 0, chunks(TEXT))
        # If a chunk comes just then, I expect the end without an alarm
        assert (await listen(websocket)).messages == []
    assert [entry for entry in caplog.records if entry.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("fragments", [False, True])
async def test_a_message_over_the_limit_is_read_no_further(stack: Stack, fragments: bool) -> None:
    api = ApiProgram({**stack.settings, "MAX_BODY_BYTES": str(MAX_BODY_BYTES)})
    try:
        request = '{"prompt": "x", "max_tokens": 1}'
        assert (await ask(api.url, request.ljust(MAX_BODY_BYTES))).code == 1000
        long = request.ljust(MAX_BODY_BYTES + 1)
        async with socket(api.url) as websocket:
            await websocket.send([long[:70_000], long[70_000:]] if fragments else long)
            heard = await listen(websocket)
        assert (heard.messages, heard.code) == ([], 1009)
    finally:
        api.stop()
    assert "Traceback" not in "".join(api.log)


@pytest.mark.parametrize("origin", ["http://elsewhere.example", "null", "http://127.0.0.1:1"])
async def test_a_page_of_another_host_is_refused(bench: Bench, origin: str) -> None:
    with pytest.raises(InvalidStatus) as refusal:
        await connect(bench.url.replace("http", "ws", 1) + COMPLETIONS, origin=origin)
    assert refusal.value.response.status_code == 403


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_page_of_the_same_host_is_served(bench: Bench, scheme: str) -> None:
    # Given a page of the API's own host, or of the proxy in front of it that speaks TLS
    origin = bench.url.replace("http", scheme, 1)
    async with connect(bench.url.replace("http", "ws", 1) + COMPLETIONS, origin=origin) as websocket:
        await websocket.send('{"prompt": "x"}')
        delivery = await bench.take()
        await bench.queue.finish(delivery, 0, DONE)
        assert (await listen(websocket)).code == 1000


async def test_no_log_has_the_query(stack: Stack) -> None:
    # Given callers who put a key into the address, of whom one is refused and one errs in the path
    api = ApiProgram(stack.settings)
    try:
        assert (await ask(api.url, {"prompt": "x", "max_tokens": 1}, f"{COMPLETIONS}?key=secret")).code == 1000
        for endpoint, origin in ((COMPLETIONS, "http://elsewhere.example"), ("/nowhere", None)):
            with pytest.raises(InvalidStatus):
                await connect(api.url.replace("http", "ws", 1) + f"{endpoint}?key=secret", origin=origin)
    finally:
        api.stop()
    # I expect the log of the process from start to end, without the key
    log = "".join(api.log)
    assert "Uvicorn running on" in log
    assert "Finished server process" in log
    assert "secret" not in log


async def test_an_api_that_stops_closes_sockets_and_ends_within_its_grace(stack: Stack) -> None:
    # Given one socket that has not asked, and one whose job runs for minutes
    api = ApiProgram({**stack.settings, "API_GRACE_S": "10"})
    try:
        async with socket(api.url) as silent, socket(api.url) as reading:
            await reading.send(json.dumps({"prompt": "x", "max_tokens": MAX_MODEL_LEN - 1}))
            job_id = json.loads(await reading.recv())["id"].removeprefix("cmpl-")
            # If the process is told to stop, I expect both to be told that the service restarts
            stopping = asyncio.create_task(asyncio.to_thread(api.stop))
            assert [(await listen(each)).code for each in (silent, reading)] == [1012, 1012]
            # and the process to end as one that was told so
            assert await stopping == -15
    finally:
        api.kill()
    assert "Traceback" not in "".join(api.log)
    assert job_id.startswith("job-0-")
