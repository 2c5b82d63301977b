"""The Python client, straight on Redis, against a real worker; where a moment matters, the test plays the worker."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as Redis_
from redis.asyncio import Redis

from headway.producer import AsyncClient, AsyncJobHandle, Client
from headway.producer.client import text_of
from headway.shared.errors import (
    ConfigurationError,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    LogExpired,
    ModelNotFound,
    QueueClosed,
    QueueUnavailable,
    StreamRestarted,
)
from headway.shared.job import Delivery, Outcome, Reply, Status, mint_job_id
from headway.shared.keys import Keys
from headway.shared.queue import Queue
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT, COMPLETIONS
from helpers import ALONE, DONE, PATIENCE_S
from programs import Stack
from valkey_server import Valkey, free_port

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="session")
def settings(stack: Stack) -> Settings:
    """The settings of the running stack."""
    return Settings(**{name.lower(): value for name, value in stack.settings.items()})


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[AsyncClient]:
    async with AsyncClient.connect(settings=settings) as client:
        yield client


@pytest.fixture
def unserved(redis_url: str, prefix: str) -> Settings:
    """Settings of a queue that no worker reads."""
    return Settings(redis_url=redis_url, prefix=prefix, served_model="m", engine="simulated")


class Played:
    """A worker that the test plays: takes one job and publishes what it is told."""

    def __init__(self, queue: Queue, delivery: Delivery) -> None:
        self.queue = queue
        self.delivery = delivery
        self._offset = delivery.offset

    @classmethod
    async def take(cls, queue: Queue) -> "Played":
        async with queue.lane_reader("w1", "m") as reader:
            names = await reader.lanes(["short"])
            async with asyncio.timeout(PATIENCE_S):
                while not (tickets := await reader.wait(names, 1)):
                    pass
        delivery = await queue.open(tickets[0], "w1", ALONE)
        assert delivery is not None
        return cls(queue, delivery)

    async def say(self, *texts: str) -> None:
        await self._append(*(Reply(0, "chunk", json.dumps(chunk(text)).encode()) for text in texts))

    async def begin_again(self) -> None:
        await self._append(Reply(0, "restarted", b"{}"))

    async def finish(self, outcome: Outcome = DONE) -> None:
        assert await self.queue.finish(self.delivery, self._offset, outcome) == "ok"

    async def _append(self, *replies: Reply) -> None:
        assert (await self.queue.append(self.delivery, self._offset, replies))[0] == "ok"
        self._offset += len(replies)


def chunk(text: str) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}


async def all_text(job: AsyncJobHandle) -> str:
    async with asyncio.timeout(PATIENCE_S):
        return "".join([text_of(chunk) async for chunk in job.stream()])


async def test_an_answer_comes_plain_and_as_a_stream(client: AsyncClient) -> None:
    # Given a running stack
    # If I submit a chat
    job = await client.submit(messages=HELLO, max_tokens=12)
    # I expect the plain answer, and the same text from the stream, though I come late
    answer = await job.result(PATIENCE_S)
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["completion_tokens"] == 12
    assert await all_text(job) == text_of(answer) != ""
    assert "".join([piece async for piece in job.text()]) == text_of(answer)
    # and a record that says how it went
    record = await job.status()
    assert (record.status, record.lane, record.output_tokens) == ("completed", "short", 12)


async def test_a_prompt_and_a_body_find_their_endpoint_and_lane(client: AsyncClient) -> None:
    # If I submit a prompt of about 500 tokens (mid), and a body as bytes (short) in another tier
    prompt = await client.submit(prompt="word " * 400, max_tokens=3)
    body = await client.submit(endpoint=COMPLETIONS, body=b'{"prompt": "x",  "max_tokens": 4}', tier="priority")
    # I expect both to run where they belong
    assert (await prompt.result(PATIENCE_S))["object"] == "text_completion"
    assert (await body.result(PATIENCE_S))["usage"]["completion_tokens"] == 4
    assert (await prompt.status()).lane == "mid"
    assert ((await body.status()).tier, (await body.status()).endpoint) == ("priority", COMPLETIONS)


async def test_a_job_is_found_again_by_its_id(client: AsyncClient, settings: Settings) -> None:
    # Given a job of one client
    job = await client.submit(messages=HELLO, max_tokens=3)
    # If I ask another client for its id, I expect the same answer
    async with AsyncClient.connect(settings=settings) as other:
        found = other.job(job.id)
        assert await found.result(PATIENCE_S) == await job.result(PATIENCE_S)
        assert repr(found) == f"AsyncJobHandle('{job.id}')"


async def test_a_job_that_there_is_not(client: AsyncClient) -> None:
    # If I ask for an id that nobody has
    nobody = client.job(mint_job_id())
    # I expect each verb to say so
    for verb in (nobody.status, nobody.cancel, nobody.result):
        with pytest.raises(JobNotFound):
            await verb()
    with pytest.raises(JobNotFound):
        await all_text(nobody)
    # and a text that is no id to be refused at once
    with pytest.raises(JobNotFound, match="not a job id"):
        client.job("42")


async def test_a_running_job_is_cancelled(client: AsyncClient) -> None:
    # Given a job of some 1500 tokens that has begun
    job = await client.submit(messages=HELLO, max_tokens=1500)
    stream = job.stream()
    await anext(stream)
    # If I cancel it
    assert await job.cancel() == "in_progress"
    # I expect the stream to end with an error, long before the end of the text
    with pytest.raises(JobFailed) as caught:
        async for _ in stream:
            pass
    assert (caught.value.outcome_status, caught.value.http_status) == ("cancelled", 499)
    assert ((await job.status()).output_tokens or 0) < 1500


async def test_a_queued_job_is_cancelled_at_once(unserved: Settings) -> None:
    async with AsyncClient.connect(settings=unserved) as client:
        # Given a job that no worker takes
        job = await client.submit(messages=HELLO)
        # If I cancel it, I expect it to be over
        assert await job.cancel() == "cancelled"
        with pytest.raises(JobFailed, match="cancelled") as caught:
            await job.result(PATIENCE_S)
        assert caught.value.outcome_status == "cancelled"


async def test_a_wait_that_ends_leaves_the_job(unserved: Settings) -> None:
    async with AsyncClient.connect(settings=unserved) as client, queue_of(unserved) as queue:
        # Given a job that no worker has taken yet
        job = await client.submit(messages=HELLO)
        # If I wait for a moment, I expect a TimeoutError, and the job to be there still
        with pytest.raises(TimeoutError):
            await job.result(0.05)
        assert (await job.status()).status == "queued"
        # and the answer when I wait again and it ends
        await (await Played.take(queue)).finish()
        assert await job.result(PATIENCE_S) == json.loads(DONE.body)


async def test_a_job_that_fails(unserved: Settings) -> None:
    async with AsyncClient.connect(settings=unserved) as client, queue_of(unserved) as queue:
        # Given two jobs that the engine refuses, one with a reason
        for body, message in ((b'{"error": {"message": "bad schema"}}', "bad schema"), (b"", "ended as failed")):
            job = await client.submit(messages=HELLO)
            await (await Played.take(queue)).finish(Outcome(Status.FAILED, 400, body))
            # If I ask for the result, I expect the engine's own words and status
            with pytest.raises(JobFailed, match=message) as caught:
                await job.result(PATIENCE_S)
            assert (caught.value.outcome_status, caught.value.http_status) == ("failed", 400)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({}, InvalidRequest),
        ({"messages": HELLO, "prompt": "x"}, InvalidRequest),
        ({"body": {"prompt": "x"}}, InvalidRequest),
        ({"endpoint": COMPLETIONS, "body": b'{"prompt": "x"}', "n": 2}, InvalidRequest),
        ({"endpoint": "/v1/embeddings", "body": {}}, InvalidRequest),
        ({"messages": []}, InvalidRequest),
        ({"messages": HELLO, "model": "another"}, ModelNotFound),
    ],
)
async def test_what_cannot_be_submitted(client: AsyncClient, request_: dict[str, Any], error: type[Exception]) -> None:
    # If I submit something that the queue cannot serve, I expect to be told before anything is queued
    with pytest.raises(error):
        await client.submit(**request_)


async def test_a_text_that_does_not_come_in_pieces(client: AsyncClient) -> None:
    # Given jobs that the worker does not run as streams
    for wish in ({"seed": 1}, {"stop": ["zzz"]}, {"n": 2}):
        job = await client.submit(prompt="x", max_tokens=5, **wish)
        # If I read their text, I expect all of it
        async with asyncio.timeout(PATIENCE_S):
            pieces = await collect(job.text())
        assert pieces == [text_of(await job.result(PATIENCE_S))] != [""]


async def test_a_wait_of_nothing_only_looks(client: AsyncClient, unserved: Settings) -> None:
    # Given a job that has ended, and one that has not
    job = await client.submit(messages=HELLO, max_tokens=3)
    answer = await job.result(PATIENCE_S)
    async with AsyncClient.connect(settings=unserved) as other:
        waiting = await other.submit(messages=HELLO)
        # If I give it no time, I expect the answer of the one, and a timeout for the other
        assert await job.result(0) == answer
        with pytest.raises(TimeoutError):
            await waiting.result(0)
    # and a time that is none to be refused
    with pytest.raises(InvalidRequest, match="timeout"):
        await job.result(float("nan"))


async def test_an_expired_log_is_told(unserved: Settings) -> None:
    async with AsyncClient.connect(settings=unserved) as client, queue_of(unserved) as queue:
        # Given a job whose log has expired, and whose result has not
        job = await client.submit(messages=HELLO)
        worker = await Played.take(queue)
        await worker.say("lost")
        await worker.finish()
        async with Redis.from_url(unserved.redis_url) as redis:
            await redis.delete(Keys(unserved.prefix).log(job.id))
        # If I read it, I expect an error instead of an empty text, and the result all the same
        with pytest.raises(LogExpired):
            await collect(job.text())
        assert await job.result(PATIENCE_S) == json.loads(DONE.body)


async def test_a_redis_that_is_down_fails_readers_at_once(tmp_path: Path) -> None:
    # Given an address where nobody listens, and a clock that would show any pause
    async with AsyncClient.connect(f"redis://127.0.0.1:{free_port()}/0", settings=Settings(served_model="m")) as client:
        job = client.job(mint_job_id())
        # If I read or wait, I expect an error well before the end of an outage is waited for
        for reading in (collect(job.text()), job.result()):
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(QueueUnavailable):
                    await reading


async def test_a_redis_that_is_down_is_named(tmp_path: Path) -> None:
    # Given an address where nobody listens
    async with AsyncClient.connect(f"redis://127.0.0.1:{free_port()}/0", settings=Settings(served_model="m")) as client:
        # If I submit, I expect one clear error
        with pytest.raises(QueueUnavailable, match="Redis"):
            await client.submit(messages=HELLO)


async def test_an_address_that_is_none() -> None:
    # If I connect to something else than a Redis URL, I expect the setting to be named
    with pytest.raises(ConfigurationError, match="HEADWAY_REDIS_URL"):
        async with AsyncClient.connect("http://127.0.0.1"):
            pass


async def test_a_stream_outlives_the_server(tmp_path: Path) -> None:
    # Given a reader who has half of an answer
    server = Valkey(tmp_path, appendonly=True)
    server.start()
    settings = Settings(redis_url=server.url, served_model="m")
    try:
        async with AsyncClient.connect(settings=settings) as client, queue_of(settings) as queue:
            job = await client.submit(messages=HELLO)
            worker = await Played.take(queue)
            await worker.say("a", "b")
            pieces = job.text()
            assert [await anext(pieces), await anext(pieces)] == ["a", "b"]
            waiting = asyncio.create_task(job.result(PATIENCE_S))
            # If the server is killed, comes back, and the answer goes on
            server.kill()
            rest = asyncio.create_task(collect(pieces))
            server.start()
            await worker.say("c")
            await worker.finish()
            # I expect the other half, nothing twice, and the result
            async with asyncio.timeout(PATIENCE_S):
                assert await rest == ["c"]
                assert await waiting == json.loads(DONE.body)
    finally:
        server.stop()


async def test_a_restart_is_told(unserved: Settings) -> None:
    async with AsyncClient.connect(settings=unserved) as client, queue_of(unserved) as queue:
        # Given an answer that had to begin again
        job = await client.submit(messages=HELLO)
        worker = await Played.take(queue)
        await worker.say("void")
        await worker.begin_again()
        await worker.say("good")
        await worker.finish()
        # If I read it as text, I expect an error before any text of the new attempt
        pieces = job.text()
        assert await anext(pieces) == "void"
        with pytest.raises(StreamRestarted):
            await anext(pieces)
        # and as chunks, a mark between the two
        seen = [part.get("object") async for part in job.stream()]
        assert seen == ["chat.completion.chunk", "job.restarted", "chat.completion.chunk"]


def test_the_blocking_client_does_the_same(settings: Settings) -> None:
    # Given code that is not asynchronous
    with Client.connect(settings=settings) as client:
        # If I use each verb
        job = client.submit(messages=HELLO, max_tokens=5)
        answer = job.result(timeout=PATIENCE_S)
        # I expect what the asynchronous client gives
        assert answer["usage"]["completion_tokens"] == 5
        assert "".join(job.text()) == "".join(text_of(part) for part in job.stream()) == text_of(answer)
        assert [reply.kind for reply in client.job(job.id).follow()][-1] == "end"
        assert job.status().status == job.cancel() == "completed"
        assert (client.job(job.id).id, repr(job)) == (job.id, f"JobHandle('{job.id}')")
        with pytest.raises(JobNotFound):
            client.job(mint_job_id()).status()
    assert Client.submit.__doc__ == AsyncClient.submit.__doc__


def test_the_blocking_client_serves_many_threads(settings: Settings) -> None:
    # Given one client and eight threads
    with Client.connect(settings=settings) as client, ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> int:
            answer = client.submit(prompt="x", max_tokens=number).result(PATIENCE_S)
            return int(answer["usage"]["completion_tokens"])

        # If each asks for something else, I expect each to get its own
        assert list(pool.map(ask, range(1, 17))) == list(range(1, 17))


@pytest.mark.parametrize("verb", ["result", "follow", "stream", "text"])
def test_ctrl_c_ends_a_wait_at_once(unserved: Settings, verb: str) -> None:
    with Client.connect(settings=unserved) as client, Redis_.from_url(unserved.redis_url) as redis:
        # Given a job that never ends
        job = client.submit(messages=HELLO)
        channel = Keys(unserved.prefix).notice(job.id)

        def until_followers_are(count: int) -> None:
            while redis.pubsub_numsub(channel)[0][1] != count:
                pass

        def interrupt() -> None:
            until_followers_are(1)
            os.kill(os.getpid(), signal.SIGINT)

        # If I wait for it, and press Ctrl-C
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(getattr(job, verb)())
        # I expect nobody to follow it any more, and the client to work and to end
        until_followers_are(0)
        assert job.status().status == "queued"


def test_what_is_left_open_ends_with_the_client(settings: Settings) -> None:
    # Given a stream that was begun and not read to its end
    with Client.connect(settings=settings) as client:
        pieces = client.submit(messages=HELLO, max_tokens=200).text()
        next(pieces)
    # If the client has ended, I expect that the stream can be closed, without a word
    pieces.close()


def test_a_wait_in_another_thread_ends_with_the_client(unserved: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a thread that waits for a job that never ends
    monkeypatch.setattr("headway.shared.queue.SAFETY_READ_S", 0.05)
    with ThreadPoolExecutor(1) as pool:
        with Client.connect(settings=unserved) as client, Redis_.from_url(unserved.redis_url) as redis:
            job = client.submit(messages=HELLO)
            waiting = pool.submit(job.result)
            while not redis.pubsub_numsub(Keys(unserved.prefix).notice(job.id))[0][1]:
                pass
        # If the client ends, I expect the thread to be told why
        with pytest.raises(QueueClosed):
            waiting.result(PATIENCE_S)


def test_a_stream_can_be_left_early(settings: Settings) -> None:
    with Client.connect(settings=settings) as client:
        # Given an answer that I stop reading
        job = client.submit(messages=HELLO, max_tokens=200)
        for _ in job.text():
            break
        # If I ask for the result, I expect all of it: to leave a stream cancels nothing
        assert job.result(PATIENCE_S)["usage"]["completion_tokens"] == 200


def test_an_endpoint_of_ones_own(settings: Settings) -> None:
    with Client.connect(settings=settings) as client:
        # If I give a body as an object, I expect further fields to be added to it
        job = client.submit(endpoint=CHAT, body={"messages": HELLO}, max_tokens=2)
        assert job.result(PATIENCE_S)["usage"]["completion_tokens"] == 2


async def collect(pieces: AsyncIterator[str]) -> list[str]:
    return [piece async for piece in pieces]


def queue_of(settings: Settings) -> Any:
    return Queue.connect(settings.redis_url, prefix=settings.prefix)
