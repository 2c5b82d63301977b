"""Worker: takes jobs from the lanes of one model and runs them on one engine."""

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from headway.shared.errors import QueueUnavailable, frames
from headway.shared.job import Delivery, Ticket
from headway.shared.lane_reader import LaneReader
from headway.shared.lanes import Lane
from headway.shared.metrics import exposition
from headway.shared.queue import Batch, Queue
from headway.worker.batch import MicroBatch, Window, collect
from headway.worker.budget import RESERVED_S, Budget
from headway.worker.engines.base import Engine
from headway.worker.metrics import WorkerMetrics
from headway.worker.patience import RETRY_S, patiently
from headway.worker.run import Run

_log = logging.getLogger(__name__)

#: What a worker is doing; only the first two are healthy.
State = Literal["pulling", "full", "starting", "waiting for Redis", "quiet", "stopped", "engine died"]

#: Seconds between two looks at the engine.
_WATCH_S = 0.2

#: Seconds that a stopping worker gives Redis to take its jobs back, once their grace is over.
_GIVE_BACK_S = 5.0


class Worker:
    """Its duties, in the order in which a job meets them: read what there is room for, admit it as a micro-batch, run
    each job until it ends on its own, and refill; until somebody says `quiet` or `stop`, or the engine dies."""

    def __init__(
        self,
        queue: Queue,
        engine: Engine,
        *,
        name: str,
        model: str,
        lanes: Iterable[Lane],
        window: Window | None = None,
        max_attempts: int = 3,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self._queue = queue
        self._engine = engine
        self._model = model
        self._lanes = tuple(lanes)
        self._window = window or Window()
        self._max_attempts = max_attempts
        self._metrics = metrics or WorkerMetrics(CollectorRegistry())
        self._budget = Budget(engine.capacity(), self._lanes)
        self._runs: dict[str, Run] = {}
        self._opening: set[str] = set()
        self._cancelled_while_opening: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._quiet = False
        self._unsure = False
        self._returning = False
        self._pull_task: asyncio.Task[None] | None = None
        self._finished = asyncio.Event()
        self._finished.set()
        self._reader: LaneReader | None = None
        self._numbers = itertools.count(1)

    @property
    def running(self) -> int:
        """Jobs in hand."""
        return len(self._runs)

    @property
    def pulling(self) -> bool:
        """Whether it takes work, or would as soon as there is room: the meaning of its health."""
        return self.state in ("pulling", "full") and self._engine.alive

    @property
    def _accepting(self) -> bool:
        return self._engine.alive and not self._quiet

    @property
    def alive(self) -> bool:
        """Whether its engine lives; without it nothing here can get better."""
        return self._engine.alive

    async def metrics(self) -> tuple[bytes, str]:
        """What Prometheus reads, and its media type. vLLM's own metrics are in the process's default registry."""
        await self._metrics.lanes.refresh(self._queue, self._model, self._lanes)
        self._metrics.refresh(pulling=self.pulling, capacity=self._engine.capacity(), budget=self._budget)
        return exposition(self._metrics.registry)

    async def run(self) -> None:
        """Pulls work until `quiet`, `stop` or the engine's death; returns when no job is in hand any more.

        Whatever else ends the pulling, the jobs in hand go back to their lanes first.
        """
        self._finished.clear()
        watching = asyncio.create_task(self._watch_engine())
        try:
            async with (
                self._queue.lane_reader(self.name, self._model) as self._reader,
                self._queue.cancels(self._on_cancel),
            ):
                self._pull_task = asyncio.create_task(self._pull(self._reader))
                await asyncio.wait([self._pull_task])
                if not self._pull_task.cancelled() and self._pull_task.exception():
                    self._return_runs()
                await self._drained()
                if not self._pull_task.cancelled():
                    self._pull_task.result()
        finally:
            watching.cancel()
            if self._pull_task is not None:
                self._pull_task.cancel()
            self.state = "stopped" if self._engine.alive else "engine died"
            self._finished.set()

    async def quiet(self) -> None:
        """Reads no more. What was read but not started goes back at once; what runs goes on."""
        self._quiet = True
        if self.state != "engine died":
            self.state = "quiet"
        self._room.set()
        if self._reader is not None:
            await self._reader.wake()

    async def stop(self, deadline_s: float) -> None:
        """Goes quiet, gives running jobs `deadline_s` seconds to end, and returns the rest to their lanes.

        Returns when `run` has ended. With Redis away, jobs stay this worker's by name, and it says so.
        """
        await self.quiet()
        if await self._finishes_within(deadline_s):
            return
        self._return_runs()
        if not await self._finishes_within(_GIVE_BACK_S):
            _log.error("Redis is away: not given back are %s", ", ".join(self._runs) or "entries not opened")
            for task in (*self._tasks, self._pull_task):
                if task is not None:
                    task.cancel()
            await self._finished.wait()

    def _return_runs(self) -> None:
        """From now on no job runs here: those that do are aborted, and all go back to their lanes."""
        self._returning = True
        for run in self._runs.values():
            run.interrupt("return")

    async def _finishes_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._finished.wait()
        return self._finished.is_set()

    async def _pull(self, reader: LaneReader) -> None:
        while self._accepting:
            await self._turn(reader)

    async def _turn(self, reader: LaneReader) -> None:
        if self._unsure:
            self._set_state("waiting for Redis")
            await asyncio.sleep(RETRY_S)
            with suppress(QueueUnavailable):
                await self._recover(reader)
            return
        batch = await collect(self._read, self._window)
        if batch is not None:
            await self._admit(batch)

    async def _read(self, most: int | None, wait_s: float | None) -> list[Ticket] | None:
        """Reads what there is room for, lane by lane, and waits only when all are empty.

        None without room, when quiet, or when Redis is down; then what was read before is admitted all the same.
        """
        assert self._reader is not None
        tickets: list[Ticket] = []
        try:
            names = await self._reader.lanes(lane.name for lane in self._lanes)
            rooms = {name: room for name in names if (room := self._budget.room(name))}
            if not self._accepting or not rooms:
                await self._await_room(wait_s)
                return None
            self._set_state("pulling")
            tickets += await self._take(await self._reader.read(rooms, most))
            if not tickets:
                tickets += await self._take(await self._reader.wait(rooms, wait_s))
        except QueueUnavailable as error:
            _log.warning("waiting for Redis: %s", error)
            self._unsure = True
            return tickets or None
        return tickets

    async def _await_room(self, wait_s: float | None) -> None:
        """Waits for room before a window. Inside one the batch goes to the engine at once: nothing more can join it."""
        if wait_s is None and self._accepting:
            self._set_state("full")
            self._room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(RESERVED_S):
                    await self._room.wait()

    async def _take(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Keeps the tickets that fit and returns the others to their lanes at once."""
        fitting = [ticket for ticket in tickets if self._budget.take(ticket)]
        await self._return([ticket for ticket in tickets if ticket not in fitting], "no room")
        return fitting

    async def _return(self, tickets: Iterable[Ticket], reason: str) -> None:
        await asyncio.gather(*(self._requeue(ticket, reason) for ticket in tickets))

    async def _requeue(self, ticket: Ticket, reason: str) -> None:
        await patiently(lambda: self._queue.requeue(ticket, reason))

    async def _recover(self, reader: LaneReader) -> None:
        """Returns the entries that a read whose answer was lost has left in this worker's name."""
        tickets = await reader.recover(await reader.lanes(lane.name for lane in self._lanes))
        for ticket in tickets:
            if ticket.job_id not in self._runs:
                await self._queue.requeue(ticket, "lost read")
        self._unsure = False

    async def _admit(self, batch: MicroBatch) -> None:
        for ticket in batch.surplus:
            self._budget.release(ticket)
        await self._return(batch.surplus, "no room")
        if not self._accepting:
            for ticket in batch.tickets:
                self._release(ticket)
            await self._return(batch.tickets, "quiet")
        else:
            described = self._describe(batch)
            await asyncio.gather(*(self._open(ticket, described) for ticket in batch.tickets))

    def _describe(self, batch: MicroBatch) -> Batch:
        window_s = time.monotonic() - batch.opened_at
        window_ms = round(1000 * window_s)
        self._metrics.batch(batch, window_s)
        name = f"{self.name}/{next(self._numbers)}"
        _log.info(
            "micro-batch %s: %d jobs, %d prompt tokens, %s after %d ms",
            name, len(batch.tickets), batch.prompt_tokens, batch.closed_by, window_ms,
        )  # fmt: skip
        return Batch(name, len(batch.tickets), str(batch.closed_by), window_ms)

    async def _open(self, ticket: Ticket, batch: Batch) -> None:
        self._opening.add(ticket.job_id)
        delivery = await patiently(lambda: self._queue.open(ticket, self.name, batch))
        self._opening.discard(ticket.job_id)
        cancelled = ticket.job_id in self._cancelled_while_opening
        self._cancelled_while_opening.discard(ticket.job_id)
        if delivery is None:
            self._release(ticket)
        else:
            self._start(delivery, cancelled=cancelled)

    def _start(self, delivery: Delivery, *, cancelled: bool) -> None:
        run = Run(self._queue, self._engine, delivery, self._metrics, max_attempts=self._max_attempts)
        if cancelled:
            run.interrupt("cancel")
        if self._returning:
            run.interrupt("return")
        self._runs[run.job_id] = run
        task = asyncio.create_task(run(), name=run.job_id)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, run, delivery.ticket))

    def _ended(self, task: asyncio.Task[None], run: Run, ticket: Ticket) -> None:
        self._tasks.discard(task)
        self._release(ticket)
        # A job that was given back may be here again before its first run has the answer.
        if self._runs.get(run.job_id) is run:
            del self._runs[run.job_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: given up: %s\n%s", run.job_id, type(error).__name__, frames(error))

    def _release(self, ticket: Ticket) -> None:
        """Frees a job's room, and wakes a read that did not watch its lane for want of room."""
        was_full = not self._budget.room(ticket.lane)
        self._budget.release(ticket)
        self._room.set()
        if was_full and self._reader is not None:
            self._spawn(self._reader.wake())

    def _on_cancel(self, message: bytes | None) -> None:
        if message is None:
            self._spawn(self._look_for_cancels())
        elif (job_id := message.decode()) in self._runs:
            self._runs[job_id].interrupt("cancel")
        elif job_id in self._opening:
            self._cancelled_while_opening.add(job_id)

    async def _look_for_cancels(self) -> None:
        """Messages may have been missed: asks for each job in hand whether somebody has cancelled it."""
        for run in tuple(self._runs.values()):
            record = await patiently(lambda run=run: self._queue.record(run.job_id))  # type: ignore[misc]
            if record is not None and record.cancel_requested:
                run.interrupt("cancel")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch_engine(self) -> None:
        while self._engine.alive:  # noqa: ASYNC110 - the seam has no event: an engine is asked, as health checks do
            await asyncio.sleep(_WATCH_S)
        _log.critical("the engine died; giving %d jobs back", self.running)
        self.state = "engine died"
        self._return_runs()
        await self.quiet()

    async def _drained(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _set_state(self, state: State) -> None:
        if not self._quiet:
            self.state = state
