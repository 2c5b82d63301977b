"""Queue: the one door to Redis. Each verb is one script or one command, and each is safe to repeat."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from headway.shared.autopipeline import AutoPipeline
from headway.shared.connect import SOCKET_TIMEOUT_S, connect
from headway.shared.errors import JobCancelled, JobNotFound, LogExpired, error_body
from headway.shared.job import Delivery, Job, LaneState, Outcome, Record, Reply, Status, Ticket
from headway.shared.keys import GROUP, Keys
from headway.shared.lane_reader import MAX_BLOCK_S, LaneReader
from headway.shared.news import News
from headway.shared.notices import Notices
from headway.shared.records import decode_delivery, decode_record
from headway.shared.settings import Settings

#: Seconds after which a follower looks into the log though no notice came: a message of Pub/Sub can be lost.
SAFETY_READ_S = 5.0

#: An offset behind every log: who follows from here hears nothing, and comes back when the job has ended.
BEHIND_ALL = 2**62

#: Replies read at once; a late reader of a long log gets it in pages of so many.
_PAGE = 1000

Append = Literal["ok", "already", "lost"]
_W = TypeVar("_W", bound=str)


class LogGap(RuntimeError):
    """A writer expected another offset than the log has: a fault of the writer, never of the caller."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the three keys of a job outlive its end, in seconds."""

    record_s: float = 86400
    result_s: float = 3600
    log_s: float = 600

    @property
    def args(self) -> list[int]:
        return [round(1000 * s) for s in (self.record_s, self.result_s, self.log_s)]


@dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batch that a delivery was admitted with, for its record."""

    name: str
    size: int
    closed_by: str
    window_ms: int

    @property
    def args(self) -> list[str | int]:
        return [self.name, self.size, self.closed_by, self.window_ms]


class Queue:
    """Jobs, lanes and reply channels of one shard; make it with `Queue.connect`."""

    def __init__(
        self, url: str, pipeline: AutoPipeline, notices: Notices, keys: Keys, retention: Retention, shard: str
    ) -> None:
        self._url = url
        self._pipeline = pipeline
        self._notices = notices
        self._keys = keys
        self._retention = retention
        self._shard = shard

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, *, prefix: str = "hw", retention: Retention | None = None, shard: str = "0"
    ) -> "AsyncIterator[Queue]":
        """Opens two connections, the second for notices. A server that is down is no error until a verb needs it.

        Raises:
            ConfigurationError: the URL is not one of Redis.
        """
        keys = Keys(prefix)
        pipeline = AutoPipeline(connect(url))
        notices = Notices(connect(url, socket_timeout_s=None, retries=0), keys.events(shard))
        try:
            yield cls(url, pipeline, notices, keys, retention or Retention(), shard)
        finally:
            await notices.aclose()
            await pipeline.aclose()

    @classmethod
    def of(cls, settings: Settings, url: str | None = None) -> "AbstractAsyncContextManager[Queue]":
        """The queue that the settings describe, or the same at another `url`; errors as `connect`."""
        retention = Retention(settings.keep_record_s, settings.keep_result_s, settings.keep_log_s)
        return cls.connect(url or settings.redis_url, prefix=settings.prefix, retention=retention)

    async def ping(self) -> None:
        """Raises QueueUnavailable unless the server answers."""
        await self._pipeline.command("PING")

    async def survey(self, model: str, lanes: Iterable[str]) -> list[LaneState]:
        """How full the lanes of all models are; of this model also those that never had a job.

        Raises:
            QueueUnavailable: the server could not be reached.
        """
        members = await self._pipeline.command("SMEMBERS", self._keys.lanes(self._shard))
        named = {f"{model}:{lane}" for lane in lanes} | {member.decode() for member in members}
        pairs = [name.rpartition(":") for name in sorted(named)]
        streams = [s for m, _, lane in pairs for s in self._keys.lane_streams(self._shard, m, lane)]
        counts = await self._pipeline.script("survey", [self._keys.backlog(self._shard), *streams], [GROUP])
        return [
            LaneState(*self._keys.parse_lane(stream), max(0, waiting), running, max(0, tokens), oldest_ms / 1000)
            for stream, waiting, running, oldest_ms, tokens in zip(
                streams, counts[::4], counts[1::4], counts[2::4], counts[3::4], strict=True
            )
        ]

    # The submitter's verbs.

    async def submit(self, job: Job) -> Literal["queued", "already"]:
        """Puts a job into its lane; `already` when this id was accepted before.

        Raises:
            QueueUnavailable: the job was not accepted, or its acceptance could not be confirmed.
        """
        keys = [
            self._keys.job(job.id),
            self._keys.body(job.id),
            self._keys.lane(self._shard, job.model, job.lane, job.tier),
            self._keys.lanes(self._shard),
            *self._accounts,
        ]
        fields = {
            "model": job.model,
            "endpoint": job.endpoint,
            "lane": job.lane,
            "tier": job.tier,
            "log": int(job.log),
        }
        counts = [job.prompt_tokens, job.reserve_tokens, job.choices]
        flat = [part for pair in fields.items() for part in pair]
        lane = f"{job.model}:{job.lane}"
        answer = await self._pipeline.script("submit", keys, [job.id, job.body, GROUP, lane, *counts, *flat])
        return _word(answer, "queued", "already")

    async def cancel(self, job_id: str) -> Status | None:
        """Cancels a job: a queued one ends at once, a running one as soon as its holder has aborted it.

        Returns:
            The status after the call, or None when there is no such job.
        """
        end = JobCancelled("The job was cancelled before it started.")
        channels = [self._keys.notice(job_id), self._keys.cancels(self._shard)]
        args = [job_id, error_body(end), end.status_code, *channels, *self._retention.args]
        answer = await self._pipeline.script("cancel", [*self._job_keys(job_id), *self._accounts], args)
        return Status(answer.decode()) if answer else None

    async def record(self, job_id: str) -> Record | None:
        """What is known of a job; None when there is no such job, or no longer."""
        flat = await self._pipeline.command("HGETALL", self._keys.job(job_id))
        return decode_record(job_id, flat) if flat else None

    async def result(self, job_id: str) -> Outcome | None:
        """How a job ended; None while it has not, or when the result has expired."""
        record, body = await asyncio.gather(
            self.record(job_id), self._pipeline.command("GET", self._keys.result(job_id))
        )
        if record is None or body is None or record.status_code is None:
            return None
        return Outcome(record.status, record.status_code, body)

    async def follow(self, job_id: str, after: int = 0) -> AsyncGenerator[Reply, None]:
        """Yields the replies behind offset `after`, as they come, up to the final one.

        Subscribes, awaits the confirmation, and only then reads; so nothing falls between. Of a job without a log it
        yields the end alone. To a reader who has the end it yields nothing, and ends with the job.

        Raises:
            JobNotFound: there is no such job, or no longer.
            LogExpired: the job has ended, and replies that the reader lacks are gone.
            QueueUnavailable: Redis is down; following again from the last offset misses nothing.
        """
        news = News()
        async with self._notices.subscribed(self._keys.notice(job_id), news.take):
            while True:
                await news.wait(SAFETY_READ_S)
                told = news.behind(after)
                ended, replies = (False, told) if told is not None else await self._read_log(job_id, after)
                for reply in replies:
                    yield reply
                    if reply.final:
                        return
                    after = reply.offset
                if ended and not replies:
                    return
                if ended or len(replies) == _PAGE:
                    news.look()

    # The worker's verbs.

    @asynccontextmanager
    async def lane_reader(self, worker: str, model: str) -> AsyncIterator[LaneReader]:
        """The worker's way to its lanes: a third connection, for blocking reads."""
        # A read that its server has not ended in time is one whose server has vanished.
        connection = connect(self._url, socket_timeout_s=MAX_BLOCK_S + SOCKET_TIMEOUT_S, retries=0)
        try:
            yield LaneReader(connection, self._pipeline, self._keys, self._shard, worker, model)
        finally:
            await connection.disconnect()

    @asynccontextmanager
    async def cancels(self, notify: Callable[[bytes | None], None]) -> AsyncIterator[None]:
        """Calls `notify` with the id of each running job that is cancelled; with None when some may be missed."""
        async with self._notices.subscribed(self._keys.cancels(self._shard), notify):
            yield

    async def open(self, ticket: Ticket, worker: str, batch: Batch) -> Delivery | None:
        """Starts an attempt; None when the entry is not (or no longer) this worker's to run."""
        keys = [
            self._keys.job(ticket.job_id),
            self._keys.body(ticket.job_id),
            ticket.stream,
            *self._accounts,
        ]
        args = [ticket.job_id, ticket.entry, GROUP, worker, *batch.args]
        answer = await self._pipeline.script("open", keys, args)
        if answer[0] != b"opened":
            return None
        _, flat, body = answer
        return decode_delivery(ticket, flat, body or b"")

    async def append(self, delivery: Delivery, offset: int, replies: Sequence[Reply]) -> tuple[Append, bool]:
        """Publishes replies behind `offset`; whether it worked, and whether somebody wants the job cancelled.

        Raises:
            LogGap: the log does not end at `offset`.
        """
        job_id = delivery.job.id
        keys = [self._keys.job(job_id), self._keys.log(job_id)]
        args = [delivery.attempt, offset, self._keys.notice(job_id), *_flat(replies)]
        answer = await self._pipeline.script("append", keys, args)
        if answer[0] == b"gap":
            raise LogGap(f"{job_id}: expected offset {offset}, found {answer[1]}")
        word: Append = _word(answer[0], "ok", "already", "lost")
        return word, word != "lost" and bool(answer[2])

    async def finish(
        self,
        delivery: Delivery,
        offset: int,
        outcome: Outcome,
        *,
        replies: Sequence[Reply] = (),
        output_tokens: int = 0,
        first_token_age_s: float | None = None,
    ) -> Append:
        """Ends a job: its last replies, the result and the final status at once, and only for its holder.

        Args:
            first_token_age_s: seconds since its first token came; None when none did.

        Raises:
            LogGap: the log does not end at `offset`.
        """
        job_id, ticket = delivery.job.id, delivery.ticket
        age_ms = "" if first_token_age_s is None else round(1000 * first_token_age_s)
        args = [
            job_id,
            delivery.attempt,
            offset,
            GROUP,
            ticket.entry,
            outcome.status,
            outcome.status_code,
            outcome.body,
        ]
        args += [output_tokens, age_ms, self._keys.notice(job_id), *self._retention.args, *_flat(replies)]
        keys = [*self._job_keys(job_id), ticket.stream, self._keys.events(self._shard)]
        answer: bytes = await self._pipeline.script("finish", keys, args)
        if answer == b"gap":
            raise LogGap(f"{job_id}: finish expected offset {offset}")
        return _word(answer, "ok", "already", "lost")

    async def requeue(
        self, delivery: Delivery | Ticket, reason: str, *, failed: bool = False
    ) -> Literal["ok", "lost", "cancelled"]:
        """Gives a job back to its lane, to be read first; `cancelled` when the holder shall finish it instead.

        Args:
            delivery: an open delivery, or the ticket of an entry that was read but not opened; an entry for which there
                is nothing left to do is dropped.
            failed: the engine has failed under the job, which counts to `max_attempts`.
        """
        if isinstance(delivery, Delivery):
            ticket, attempt = delivery.ticket, str(delivery.attempt)
        else:
            ticket, attempt = delivery, ""
        keys = [
            self._keys.job(ticket.job_id),
            ticket.stream,
            self._keys.returned(ticket.stream),
            *self._accounts,
        ]
        args = [ticket.job_id, attempt, GROUP, ticket.entry, reason, int(failed)]
        answer: bytes = await self._pipeline.script("requeue", keys, args)
        return _word(answer, "ok", "lost", "cancelled")

    @property
    def _accounts(self) -> tuple[str, str]:
        return self._keys.events(self._shard), self._keys.backlog(self._shard)

    def _job_keys(self, job_id: str) -> list[str]:
        return [
            self._keys.job(job_id),
            self._keys.body(job_id),
            self._keys.log(job_id),
            self._keys.result(job_id),
        ]

    async def _read_log(self, job_id: str, after: int) -> tuple[bool, list[Reply]]:
        # The record goes first: once its status is terminal, the log that is read behind it is complete.
        record, entries = await asyncio.gather(
            self._pipeline.command("HMGET", self._keys.job(job_id), "status", "log", "offset"),
            self._pipeline.command("XRANGE", self._keys.log(job_id), f"({after}-0", "+", "COUNT", _PAGE),
        )
        # Of the fields in an entry, the scripts always write the kind first and then the data.
        replies = [Reply(int(i.split(b"-")[0]), kind.decode(), data) for i, (_, kind, _, data) in entries]
        if record[0] is None:
            if replies:
                return False, replies
            raise JobNotFound(f"There is no job {job_id}, or its record has expired.")
        status, offset = Status(record[0].decode()), int(record[2])
        if status.terminal and record[1] == b"0" and after <= offset:
            return True, [Reply(offset + 1, "end", status.encode())]
        lacking = replies[0].offset > after + 1 if replies else status.terminal and after < offset
        if lacking:
            raise LogExpired(f"The log of job {job_id} has expired.")
        return status.terminal, replies


def _flat(replies: Sequence[Reply]) -> list[str | bytes]:
    return [part for reply in replies for part in (reply.kind, reply.data)]


def _word(answer: bytes, *known: _W) -> _W:
    return next(word for word in known if word.encode() == answer)
