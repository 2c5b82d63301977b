"""What all routes share: the queue, the intake and the settings of one process."""

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection, Request

from headway.api.errors import BodyTooLarge
from headway.api.job_object import job_object
from headway.api.metrics import ApiMetrics
from headway.shared.errors import JobNotFound
from headway.shared.intake import Accepted, Intake
from headway.shared.job import JOB_ID, Outcome, Record, Tier
from headway.shared.queue import Queue
from headway.shared.settings import Settings

#: Bytes of a body that is counted at once: a chat in a millisecond, the worst list of prompts in some twenty.
_SHORT_BODY = 2048


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of a running API.

    Attributes:
        max_model_len: the model's context in tokens; None where only the engine knows it.
        started_at: Unix seconds.
    """

    settings: Settings
    intake: Intake
    queue: Queue
    metrics: ApiMetrics
    max_model_len: int | None
    started_at: int

    async def submit(self, endpoint: str, raw: bytes, *, tier: Tier = "default", log: bool | None = None) -> Accepted:
        """Puts a request into the queue; same errors as `Intake.accept` and `Queue.submit`."""
        began_at = time.monotonic()
        # To count a short body takes less time than to hand it to a thread; a long one would hold up everybody.
        if len(raw) < _SHORT_BODY:
            accepted = self.intake.accept(endpoint, raw, tier=tier, log=log)
        else:
            accepted = await asyncio.to_thread(self.intake.accept, endpoint, raw, tier=tier, log=log)
        await self.queue.submit(accepted.job)
        self.metrics.accepted(accepted.job, time.monotonic() - began_at)
        return accepted

    async def count_lanes(self) -> bool:
        """Brings the metrics of the lanes up to date, and makes lanes that are missing; whether that worked."""
        return await self.metrics.lanes.refresh(self.queue, self.settings.model_name, self.settings.lanes)

    async def record(self, job_id: str) -> Record:
        """Raises JobNotFound when there is no such job, or no longer."""
        record = await self.queue.record(job_id) if JOB_ID.fullmatch(job_id) else None
        if record is None:
            raise JobNotFound("There is no such job, or its record has expired.", param="job_id")
        return record

    async def outcome(self, job_id: str) -> Outcome:
        """How a job ended. Raises JobNotFound when that is not known any more."""
        outcome = await self.queue.result(job_id)
        if outcome is None:
            raise JobNotFound("The result of this job has expired.")
        return outcome

    async def job_object(self, job_id: str) -> bytes:
        """The job as JSON. Raises JobNotFound."""
        record = await self.record(job_id)
        return job_object(record, await self.queue.result(job_id) if record.status.terminal else None)


async def _service(connection: HTTPConnection) -> Service:
    service: Service = connection.app.state.service
    return service


async def _read_body(request: Request) -> bytes:
    """Raises BodyTooLarge as soon as the limit is passed, so that nobody can fill the memory."""
    limit = request.app.state.service.settings.max_body_bytes
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise BodyTooLarge(f"The request body is longer than {limit} bytes.")
    return bytes(body)


def job_headers(job_id: str, lane: str) -> dict[str, str]:
    """What every answer about a job says of it."""
    return {"X-Job-Id": job_id, "X-Request-Id": job_id, "X-Queue-Class": lane}


Serving = Annotated[Service, Depends(_service)]
Body = Annotated[bytes, Depends(_read_body)]
