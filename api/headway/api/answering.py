"""What the caller of a job gets, in every dialect: its answer, or its replies as they come, or the error of either."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from headway.api import sse
from headway.api.errors import NotCompleted, accepted_as, shown
from headway.api.following import follow, peek, unless_gone, until_end
from headway.api.service import Service, job_headers
from headway.shared.errors import HeadwayError, StreamRestarted
from headway.shared.intake import Accepted
from headway.shared.job import Job, Outcome, Reply, Status

#: Replies of a job that runs.
Replies = AsyncGenerator[Reply, None]

#: The data of events.
Events = AsyncGenerator[bytes, None]


async def accept(
    request: Request, service: Service, endpoint: str, body: bytes, *, log: bool | None = None
) -> Accepted:
    """Puts a request into the queue, and from now on its errors name the job; same errors as `Service.submit`."""
    accepted = await service.submit(endpoint, body, log=log)
    accepted_as(request, job_headers(accepted.job.id, accepted.job.lane))
    return accepted


async def answer(request: Request, service: Service, job: Job) -> Outcome:
    """The outcome of a job that will have completed.

    Raises:
        NotCompleted: it has ended otherwise.
        JobNotFound: its result has expired.
        ClientDisconnect: the client has hung up.
    """
    await unless_gone(request, until_end(service.queue, job.id))
    return await _completed(service, job)


async def stream(request: Request, service: Service, job: Job, dialect: Callable[[Replies], Events]) -> Response:
    """The job's replies as server-sent events, which a dialect makes of them; same errors as `answer`.

    The headers are held back until something is known, or a heartbeat is due: an error before the first token then has
    its own status.
    """
    heartbeat_s = service.settings.heartbeat_s
    following = follow(service.queue, job.id)
    first, replies = await unless_gone(request, peek(following, heartbeat_s))
    if first is not None and first.final:
        # Not `replies`: nothing of them has begun, so that to close them would close nothing.
        await following.aclose()
        await _completed(service, job)
    frames = _frames(dialect(until_completed(service, job, replies)))
    return sse.response(frames, heartbeat_s, job_headers(job.id, job.lane))


async def until_completed(service: Service, job: Job, replies: Replies) -> Replies:
    """All but the last of a job's replies.

    Raises:
        NotCompleted: the last one says that the job has ended otherwise; further errors as `follow`.
    """
    async with aclosing(replies):
        async for reply in replies:
            if not reply.final:
                yield reply
            elif reply.data != Status.COMPLETED.encode():
                await _completed(service, job)


async def openai_chunks(accepted: Accepted, replies: Replies) -> Events:
    """The chunks that OpenAI's clients expect.

    Raises:
        StreamRestarted: the job has begun again, for which OpenAI's dialect has no word; further errors as `replies`.
    """
    begun = False
    async with aclosing(replies):
        async for reply in replies:
            if reply.kind == "restarted" and begun:
                raise StreamRestarted(f"Text sent so far is void: the job began again. Read {accepted.job.id} anew.")
            elif reply.kind == "chunk" and (accepted.include_usage or not sse.is_usage_only(reply.data)):
                begun = True
                yield reply.data


async def _completed(service: Service, job: Job) -> Outcome:
    outcome = await service.outcome(job.id)
    if outcome.status is not Status.COMPLETED:
        raise NotCompleted(outcome)
    return outcome


async def _frames(events: Events) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(events):
            async for data in events:
                yield sse.data_frame(data)
        yield sse.DONE
    except HeadwayError as error:
        yield sse.data_frame(shown(error))
