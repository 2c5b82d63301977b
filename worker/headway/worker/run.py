"""One delivery, from its open to its end: the engine's chunks in, replies and the result out."""

import asyncio
import logging
from contextlib import aclosing
from typing import Literal

from headway.shared.errors import InvalidRequest, error_body, frames
from headway.shared.job import Delivery, Outcome, Reply
from headway.shared.queue import Queue
from headway.worker.engines.base import Engine, Final
from headway.worker.metrics import Ending, WorkerMetrics
from headway.worker.output import Output
from headway.worker.patience import patiently

_log = logging.getLogger(__name__)

#: Why a run was ended before its time: a cancel, a drain, another holder, or a fault while publishing.
Interruption = Literal["cancel", "return", "lost", "broken"]


class Run:
    """Runs one delivery. Publishing goes on beside generating: what comes during one append travels with the next."""

    def __init__(
        self, queue: Queue, engine: Engine, delivery: Delivery, metrics: WorkerMetrics, *, max_attempts: int
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._delivery = delivery
        self._metrics = metrics
        self._given_up = delivery.failures >= max_attempts
        self._output = Output(delivery.job)
        self._offset = delivery.offset
        # An earlier attempt has published: readers must know that what they have is void.
        self._outbox: list[Reply] = [Reply(0, "restarted", b"{}")] if delivery.offset else []
        self._news = asyncio.Event()
        self._ended = False
        self._begun = True
        self._interruption: Interruption | None = "cancel" if delivery.cancel_requested else None
        self._generating: asyncio.Task[Final] | None = None

    @property
    def job_id(self) -> str:
        return self._delivery.job.id

    def interrupt(self, why: Interruption) -> None:
        """Aborts the run inside the engine. The first reason counts; a second must not cut the abort itself off."""
        if self._interruption is None:
            self._interruption = why
            if self._generating is not None:
                self._generating.cancel()

    async def __call__(self) -> None:
        """Generates and publishes, and then finishes the job or gives it back."""
        self._metrics.started(self._delivery)
        try:
            await self._generate_and_publish()
            await self._conclude(self._outcome())
        except Exception as error:
            _log.error("%s: the run broke off: %s\n%s", self.job_id, type(error).__name__, frames(error))
            await self._give_back("run broke off", failed=True)

    async def _generate_and_publish(self) -> None:
        self._generating = asyncio.create_task(self._generate())
        publishing = asyncio.create_task(self._publish())
        try:
            await asyncio.wait([self._generating, publishing], return_when=asyncio.FIRST_COMPLETED)
            if publishing.done():
                publishing.result()
            await asyncio.wait([self._generating])
            self._ended = True
            self._news.set()
            await publishing
        except BaseException:
            self.interrupt("broken")
            publishing.cancel()
            await asyncio.wait([self._generating, publishing])
            raise

    async def _generate(self) -> Final:
        if self._interruption:
            raise asyncio.CancelledError
        if self._given_up:
            return Final(500, None)
        try:
            request = self._output.request()
        except InvalidRequest as error:
            return Final(error.status_code, error_body(error))
        async with aclosing(self._engine.run(request)) as items:
            async for item in items:
                if isinstance(item, Final):
                    self._begun = item.begun
                    return item
                if self._output.add(item):
                    self._metrics.first_token(self._delivery, self._output)
                if self._delivery.job.log:
                    self._outbox.append(Reply(0, "chunk", item.raw))
                    self._news.set()
        raise RuntimeError("the engine ended a run without a Final")

    async def _publish(self) -> None:
        while not self._ended and self._interruption != "lost":
            await self._news.wait()
            self._news.clear()
            if self._outbox and not self._ended:
                await self._append(self._take_outbox())

    async def _append(self, replies: list[Reply]) -> None:
        word, cancel = await patiently(lambda: self._queue.append(self._delivery, self._offset, replies))
        self._offset += len(replies)
        if word == "lost":
            self.interrupt("lost")
        elif cancel:
            self.interrupt("cancel")

    def _take_outbox(self) -> list[Reply]:
        replies, self._outbox = self._outbox, []
        return replies

    def _outcome(self) -> Outcome | None:
        """How the job ends; None when it goes back to its lane."""
        assert self._generating is not None
        if self._generating.cancelled():
            return self._output.cancelled() if self._interruption == "cancel" else None
        return self._output.given_up() if self._given_up else self._output.outcome(self._final(self._generating))

    def _final(self, generating: asyncio.Task[Final]) -> Final:
        error = generating.exception()
        if error is None:
            return generating.result()
        _log.error("%s: the engine raised %s\n%s", self.job_id, type(error).__name__, frames(error))
        return Final(500, None)

    async def _conclude(self, outcome: Outcome | None) -> None:
        if self._interruption == "lost":
            _log.warning("%s: no longer this attempt's; nothing more is published", self.job_id)
            self._ended_as("lost")
        elif outcome is not None:
            await self._finish(outcome)
        elif self._interruption == "return":
            await self._give_back("worker stopped", failed=False)
        elif not self._begun:
            await self._give_back("engine has not begun it", failed=False)
        else:
            await self._give_back("engine failed", failed=True)

    async def _give_back(self, reason: str, *, failed: bool) -> None:
        word = await patiently(lambda: self._queue.requeue(self._delivery, reason, failed=failed))
        _log.info("%s: attempt %d given back, %s: %s", self.job_id, self._delivery.attempt, reason, word)
        if word == "cancelled":
            await self._finish(self._output.cancelled())
        else:
            self._ended_as("lost" if word == "lost" else "retried" if failed else "returned")

    async def _finish(self, outcome: Outcome) -> None:
        replies = self._take_outbox()
        word = await patiently(
            lambda: self._queue.finish(
                self._delivery,
                self._offset,
                outcome,
                replies=replies,
                output_tokens=self._output.tokens,
                first_token_age_s=self._output.first_token_age_s(),
            )
        )
        self._ended_as("lost" if word == "lost" else outcome.status)

    def _ended_as(self, ending: Ending) -> None:
        self._metrics.ended(self._delivery, self._output, ending)
