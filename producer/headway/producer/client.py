"""The asynchronous client: straight on Redis, without the API in between."""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from typing import Any, Self

from headway.shared import following
from headway.shared.errors import InvalidRequest, JobFailed, JobNotFound, StreamRestarted
from headway.shared.intake import Intake
from headway.shared.job import Outcome, Record, Reply, Status, Tier, shard_of
from headway.shared.limits import model_length
from headway.shared.queue import BEHIND_ALL, Queue
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT, COMPLETIONS, Counter, estimate, load_counter

#: Seconds that a reader waits for a Redis that has gone away before it gives up; a failover takes less.
OUTAGE_S = 60.0


class AsyncJobHandle:
    """A job, wherever it runs. A handle holds nothing, so losing it loses nothing; its id gives a new one."""

    def __init__(self, queue: Queue, job_id: str) -> None:
        self._queue = queue
        self.id = job_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def status(self) -> Record:
        """What Redis knows of the job now.

        Raises:
            JobNotFound: no such job, or its record has expired.
        """
        record = await self._queue.record(self.id)
        if record is None:
            raise self._gone()
        return record

    async def cancel(self) -> Status:
        """Cancels the job. A queued one is cancelled at once; a running one when its worker has aborted it.

        Returns:
            The status after the call; a job that has ended keeps its status.

        Raises:
            JobNotFound: no such job, or its record has expired.
        """
        status = await self._queue.cancel(self.id)
        if status is None:
            raise self._gone()
        return status

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the end and gives the plain OpenAI answer.

        Args:
            timeout: seconds; None waits for ever, and 0 only looks.

        Raises:
            InvalidRequest: the timeout is no number.
            TimeoutError: it has not ended yet; the job goes on, and this may be called again.
            JobFailed: it ended as failed, cancelled or expired.
            JobNotFound: no such job, or its result has expired.
            QueueUnavailable: Redis is down, or stayed away for `OUTAGE_S` while this waited.
        """
        if timeout is not None and math.isnan(timeout):
            raise InvalidRequest("timeout must be a number of seconds", param="timeout")
        if not (await self.status()).status.terminal:
            async with asyncio.timeout(timeout), aclosing(self.follow(BEHIND_ALL)) as replies:
                async for _ in replies:
                    pass
        return _answer(await self._outcome())

    async def follow(self, after: int = 0) -> AsyncGenerator[Reply, None]:
        """The reply channel itself behind offset `after`: every chunk, every restart, and the end, which comes last.

        It goes on from the last offset when Redis was away for a while.

        Raises:
            JobNotFound: no such job, or its record has expired.
            LogExpired: the job has ended, and replies behind `after` are gone; `result` may still be there.
            QueueUnavailable: Redis is down, or stayed away for `OUTAGE_S` meanwhile.
        """
        # Who meets an outage at once hears of it at once; only who has begun waits for its end.
        await self.status()
        async with aclosing(following.follow(self._queue, self.id, after, patience_s=OUTAGE_S)) as replies:
            async for reply in replies:
                yield reply

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """The OpenAI chunks from the first on, parsed; the last one may carry the usage and no choices.

        A job that does not run as a stream, such as one with `seed`, `stop` or `n`, gives its plain answer instead.
        An attempt that had to begin again shows as `{"object": "job.restarted"}`: the chunks before it are void.

        Raises:
            JobFailed: after the chunks, when the job ended as failed, cancelled or expired.
            JobNotFound, LogExpired, QueueUnavailable: as `follow`.
        """
        streamed = False
        async with aclosing(self.follow()) as replies:
            async for reply in replies:
                if reply.kind == "chunk":
                    streamed = True
                    yield json.loads(reply.data)
                elif reply.kind == "restarted":
                    yield {"object": "job.restarted"}
                elif not streamed or reply.data != Status.COMPLETED.encode():
                    yield _answer(await self._outcome())

    async def text(self) -> AsyncGenerator[str, None]:
        """The text of the first choice, piece by piece.

        Raises:
            StreamRestarted: the job had to begin again; the text so far is void, and `result` waits for the new one.
            JobFailed, JobNotFound, LogExpired, QueueUnavailable: as `stream`.
        """
        begun = False
        async with aclosing(self.stream()) as chunks:
            async for chunk in chunks:
                if chunk.get("object") == "job.restarted" and begun:
                    raise StreamRestarted(f"job {self.id} had to begin again: the text so far is void")
                if delta := text_of(chunk):
                    begun = True
                    yield delta

    async def _outcome(self) -> Outcome:
        outcome = await self._queue.result(self.id)
        if outcome is None:
            raise JobNotFound(f"the result of job {self.id} has expired")
        return outcome

    def _gone(self) -> JobNotFound:
        return JobNotFound(f"no job {self.id}, or its record has expired")


class AsyncClient:
    """Submits jobs and finds them again; make it with `AsyncClient.connect`.

    One client serves any number of tasks on two connections.
    """

    def __init__(self, queue: Queue, intake: Intake) -> None:
        self._queue = queue
        self._intake = intake

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str | None = None, *, settings: Settings | None = None) -> AsyncIterator[Self]:
        """Opens a client. A Redis that is down is no error until a verb needs it.

        Args:
            url: of Redis or Valkey; `settings.redis_url` when not given.
            settings: read from the environment (`HEADWAY_*`) when not given.

        Raises:
            ConfigurationError: the URL is not one of Redis.
        """
        settings = settings or Settings()
        async with Queue.of(settings, url) as queue:
            counter = await asyncio.to_thread(_counter, settings)
            yield cls(queue, Intake(settings, counter, await asyncio.to_thread(model_length, settings)))

    async def submit(
        self,
        /,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt: str | Sequence[Any] | None = None,
        endpoint: str | None = None,
        body: Mapping[str, Any] | bytes | None = None,
        tier: Tier = "default",
        **params: Any,
    ) -> AsyncJobHandle:
        """Puts a job into its lane. Give exactly one of `messages`, `prompt` and `body`.

        Args:
            messages: for a chat completion.
            prompt: for a completion: a text, its token ids, or a list of either.
            endpoint: the OpenAI path that `body` is for.
            body: a whole request body; bytes go to the engine as they are.
            params: further fields of the body, such as `max_tokens` or `temperature`.

        Raises:
            InvalidRequest: the request cannot be served as it is.
            QueueUnavailable: the job was not accepted, or its acceptance could not be confirmed.
        """
        path, raw = request(messages=messages, prompt=prompt, endpoint=endpoint, body=body, params=params)
        job = await asyncio.to_thread(self._intake.job, path, raw, tier=tier, log=True)
        await self._queue.submit(job)
        return AsyncJobHandle(self._queue, job.id)

    def job(self, job_id: str) -> AsyncJobHandle:
        """The handle of a job by its id; whether there is such a job shows when it is asked.

        Raises:
            JobNotFound: the text is not a job id.
        """
        try:
            shard_of(job_id)
        except ValueError as error:
            raise JobNotFound(str(error)) from error
        return AsyncJobHandle(self._queue, job_id)


def request(
    *,
    messages: Sequence[Mapping[str, Any]] | None,
    prompt: str | Sequence[Any] | None,
    endpoint: str | None,
    body: Mapping[str, Any] | bytes | None,
    params: Mapping[str, Any],
) -> tuple[str, bytes]:
    """The OpenAI path and the body's bytes of what `submit` was given.

    Raises:
        InvalidRequest: not exactly one of `messages`, `prompt` and `body`, or what does not go with it.
    """
    if [messages, prompt, body].count(None) != 2:
        raise InvalidRequest("give exactly one of messages, prompt and body")
    if body is None:
        path = CHAT if prompt is None else COMPLETIONS
        content: Mapping[str, Any] = {"messages": messages} if prompt is None else {"prompt": prompt}
        return endpoint or path, json.dumps({**content, **params}).encode()
    if endpoint is None:
        raise InvalidRequest("a body needs its endpoint, such as /v1/chat/completions", param="endpoint")
    if not isinstance(body, bytes):
        return endpoint, json.dumps({**body, **params}).encode()
    if params:
        raise InvalidRequest("a body given as bytes takes no further fields", param=min(params))
    return endpoint, body


def text_of(answer: Mapping[str, Any]) -> str:
    """The text of the first choice of a plain answer or of a chunk, chat or not; empty where there is none."""
    choice: Mapping[str, Any] = next((c for c in answer.get("choices", ()) if c["index"] == 0), {})
    part = choice.get("delta") or choice.get("message") or {}
    return part.get("content") or choice.get("text") or ""


def _answer(outcome: Outcome) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(outcome.body) if outcome.body else {}
    if outcome.status is Status.COMPLETED:
        return body
    message = (body.get("error") or {}).get("message") or f"the job ended as {outcome.status}"
    raise JobFailed(message, outcome_status=outcome.status, http_status=outcome.status_code)


def _counter(settings: Settings) -> Counter:
    # A light client has no tokenizer: it estimates, which decides the lane only.
    if settings.tokenizer and find_spec("transformers"):
        return load_counter(settings)
    return estimate
