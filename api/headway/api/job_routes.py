"""Jobs as what they are: submit, look, follow, cancel."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response

from headway.api import sse
from headway.api.errors import accepted_as, json_response, shown
from headway.api.following import follow, peek, unless_gone, until_end
from headway.api.job_object import links
from headway.api.prefer import MAX_WAIT_S, preferences, wait_s
from headway.api.schemas import ErrorAnswer, JobObject, JobRequest
from headway.api.service import Body, Service, Serving, job_headers
from headway.shared.errors import HeadwayError, InvalidRequest
from headway.shared.job import Reply, Tier

router = APIRouter(prefix="/v1/jobs", tags=["Jobs"])

_UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": ErrorAnswer}}

#: More digits than any log has entries.
_MAX_DIGITS = 15


class _Order(msgspec.Struct, forbid_unknown_fields=True):  # pyright: ignore[reportGeneralTypeIssues, reportCallIssue]
    """A `JobRequest` whose inner body stays the bytes that came in. A wish that nobody knows is refused, not lost."""

    endpoint: str
    body: msgspec.Raw
    tier: Tier = "default"


@router.post(
    "",
    status_code=202,
    responses={202: {"model": JobObject}, "4XX": {"model": ErrorAnswer}, 503: {"model": ErrorAnswer}},
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": JobRequest.model_json_schema()}}}
    },
)
async def submit(request: Request, service: Serving, body: Body) -> Response:
    """Accepts a job. Its tokens are kept, so that readers may come late."""
    try:
        order = msgspec.json.decode(body, type=_Order)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not a job: {error}") from None
    accepted = await service.submit(order.endpoint, bytes(order.body), tier=order.tier, log=True)
    job = accepted.job
    headers = job_headers(job.id, job.lane) | {"Location": links(job.id)["self"]}
    accepted_as(request, headers)
    return json_response(await service.job_object(job.id), 202, headers)


@router.get("/{job_id}", responses={200: {"model": JobObject}, **_UNKNOWN})
async def look(
    request: Request,
    service: Serving,
    job_id: str,
    prefer: Annotated[
        str | None, Header(description=f"`wait=n` waits up to n ≤ {MAX_WAIT_S} seconds for the end")
    ] = None,
) -> Response:
    """The job as it is now, or as it is when the wait is over; the status is 200 either way."""
    record = await service.record(job_id)
    patience = wait_s(preferences(request.headers.getlist("prefer")))
    headers = job_headers(job_id, record.lane)
    if patience:
        headers["Preference-Applied"] = f"wait={patience}"
        if not record.status.terminal:
            await unless_gone(request, _wait(service, job_id, patience))
    return json_response(await service.job_object(job_id), headers=headers)


@router.get(
    "/{job_id}/events",
    responses={200: {"content": {sse.MEDIA_TYPE: {}}}, 204: {}, "4XX": {"model": ErrorAnswer}},
)
async def events(
    service: Serving,
    job_id: str,
    after: Annotated[str | None, Query(description="offset of the last event that the reader has")] = None,
    last_event_id: Annotated[str | None, Header(description="the same; it wins over `after`")] = None,
) -> Response:
    """The job's replies as server-sent events: `chunk`, `restarted`, and `end`, which is the last.

    Any number of readers may read, from any offset, as often as they like. The answer to a reader who has the end
    is 204, which tells browsers to stop reconnecting. When the log no longer has what a reader lacks, it is 410.
    """
    record = await service.record(job_id)
    offset = _offset("Last-Event-ID", last_event_id) if last_event_id else _offset("after", after)
    ended = record.status.terminal
    # The end of a job without a log is in no log, so the record does not count it.
    last = record.offset + int(ended and not record.log)
    if offset > last:
        raise InvalidRequest(f"The job has no event {offset}; its last one is {last}.", param="Last-Event-ID")
    headers = job_headers(job_id, record.lane)
    if ended and offset == last:
        return Response(status_code=204, headers=headers)
    replies = follow(service.queue, job_id, offset)
    if ended:
        # What there is of it is there already, or it is an error that can have its own status.
        _, replies = await peek(replies)
    return sse.response(_frames(job_id, replies), service.settings.heartbeat_s, headers)


@router.post("/{job_id}/cancel", responses={200: {"model": JobObject}, **_UNKNOWN})
async def cancel(service: Serving, job_id: str) -> Response:
    """Cancels a job: a queued one ends at once, a running one as soon as its worker has aborted it.

    To cancel again, or a job that has ended, changes nothing and is no error.
    """
    record = await service.record(job_id)
    await service.queue.cancel(job_id)
    return json_response(await service.job_object(job_id), headers=job_headers(job_id, record.lane))


async def _wait(service: Service, job_id: str, patience_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await until_end(service.queue, job_id)


def _offset(name: str, text: str | None) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise InvalidRequest(f"{name} must be the id of an event.", param=name)
    return int(text)


async def _frames(job_id: str, replies: AsyncGenerator[Reply, None]) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(replies):
            async for reply in replies:
                yield sse.event_frame(job_id, reply)
    except HeadwayError as error:
        yield b"event: error\n" + sse.data_frame(shown(error))
