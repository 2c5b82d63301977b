"""OpenAI's own paths: chat, completions, models."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headway.api import sse
from headway.api.errors import accepted_as, error_headers, json_response, shown
from headway.api.following import follow, next_of, rejoin, unless_gone, until_end, with_heartbeats
from headway.api.job_object import links
from headway.api.prefer import preferences
from headway.api.schemas import ChatRequest, CompletionRequest, ErrorAnswer, JobObject, Model, ModelList
from headway.api.service import Body, Service, Serving, job_headers
from headway.shared.errors import HeadwayError, ModelNotFound, StreamRestarted
from headway.shared.intake import Accepted
from headway.shared.job import Job, Reply, Status
from headway.shared.tokens import CHAT, COMPLETIONS

router = APIRouter(tags=["OpenAI"])

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "OpenAI's answer; with `stream: true` its event stream"},
    202: {"model": JobObject, "description": "only with `Prefer: respond-async`"},
    "4XX": {"model": ErrorAnswer},
    503: {"model": ErrorAnswer},
}


def _body(model: type[ChatRequest | CompletionRequest]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


@router.post(CHAT, responses=_ANSWERS, openapi_extra=_body(ChatRequest))
async def chat(request: Request, service: Serving, body: Body) -> Response:
    """Answers a chat."""
    return await _serve(request, service, CHAT, body)


@router.post(COMPLETIONS, responses=_ANSWERS, openapi_extra=_body(CompletionRequest))
async def completions(request: Request, service: Serving, body: Body) -> Response:
    """Completes one or more prompts."""
    return await _serve(request, service, COMPLETIONS, body)


@router.get("/v1/models", response_model=ModelList)
async def models(service: Serving) -> ModelList:
    """The models that are served here."""
    return ModelList(data=[_model(service)])


@router.get("/v1/models/{model:path}", response_model=Model, responses={404: {"model": ErrorAnswer}})
async def one_model(model: str, service: Serving) -> Model:
    """One model."""
    if model != service.settings.model_name:
        raise ModelNotFound(f"The model `{model}` does not exist.", param="model")
    return _model(service)


def _model(service: Service) -> Model:
    simulated = service.settings.engine == "simulated"
    return Model(
        id=service.settings.model_name,
        created=service.started_at,
        # Nobody shall take invented words for a model's.
        owned_by="headway-simulated-engine" if simulated else "headway",
        max_model_len=service.max_model_len,
    )


async def _serve(request: Request, service: Service, endpoint: str, body: bytes) -> Response:
    later = "respond-async" in preferences(request.headers.getlist("prefer"))
    accepted = await service.submit(endpoint, body, log=True if later else None)
    accepted_as(request, job_headers(accepted.job.id, accepted.job.lane))
    if later:
        return await _respond_async(service, accepted.job)
    if accepted.stream:
        return await _stream(request, service, accepted)
    await unless_gone(request, until_end(service.queue, accepted.job.id))
    return await _answer(request, service, accepted.job)


async def _respond_async(service: Service, job: Job) -> Response:
    headers = job_headers(job.id, job.lane)
    headers |= {"Location": links(job.id)["self"], "Preference-Applied": "respond-async"}
    return json_response(await service.job_object(job.id), 202, headers)


async def _answer(request: Request, service: Service, job: Job) -> Response:
    outcome = await service.outcome(job.id)
    completed = outcome.status is Status.COMPLETED
    headers = job_headers(job.id, job.lane) if completed else error_headers(request)
    return json_response(outcome.body, outcome.status_code, headers)


async def _stream(request: Request, service: Service, accepted: Accepted) -> Response:
    """Holds the headers back until something is known: an error before the first token then has its own status."""
    job = accepted.job
    replies = with_heartbeats(follow(service.queue, job.id), service.settings.heartbeat_s)
    first = await unless_gone(request, next_of(replies))
    if first is not None and first.final and first.data != Status.COMPLETED.encode():
        await replies.aclose()
        return await _answer(request, service, job)
    frames = _frames(service, accepted, first, replies)
    return StreamingResponse(frames, headers=sse.HEADERS | job_headers(job.id, job.lane), media_type=sse.MEDIA_TYPE)


async def _frames(
    service: Service, accepted: Accepted, first: Reply | None, rest: AsyncGenerator[Reply | None, None]
) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with aclosing(rejoin(first, rest)) as replies:
            async for reply in replies:
                if reply is None:
                    yield sse.HEARTBEAT
                elif reply.final:
                    yield await _end_frame(service, accepted.job, reply)
                elif reply.kind == "restarted" and begun:
                    raise StreamRestarted(
                        f"Text sent so far is void: the job began again. Read {accepted.job.id} anew."
                    )
                elif reply.kind == "chunk" and (accepted.include_usage or not sse.is_usage_only(reply.data)):
                    begun = True
                    yield sse.data_frame(reply.data)
    except HeadwayError as error:
        yield sse.data_frame(shown(error))


async def _end_frame(service: Service, job: Job, end: Reply) -> bytes:
    if end.data == Status.COMPLETED.encode():
        return sse.DONE
    return sse.data_frame((await service.outcome(job.id)).body)
