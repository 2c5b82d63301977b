"""OpenAI's own paths: chat, completions, models."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.api.answering import accept, answer, openai_chunks, stream
from headway.api.errors import json_response
from headway.api.job_object import links
from headway.api.prefer import preferences
from headway.api.schemas import ChatRequest, CompletionRequest, ErrorAnswer, JobObject, Model, ModelList, request_body
from headway.api.service import Body, Service, Serving, job_headers
from headway.shared.errors import ModelNotFound
from headway.shared.job import Job
from headway.shared.tokens import CHAT, COMPLETIONS

router = APIRouter(tags=["OpenAI"])

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "OpenAI's answer; with `stream: true` its event stream"},
    202: {"model": JobObject, "description": "only with `Prefer: respond-async`"},
    "4XX": {"model": ErrorAnswer},
    503: {"model": ErrorAnswer},
}


@router.post(CHAT, responses=_ANSWERS, openapi_extra=request_body(ChatRequest))
async def chat(request: Request, service: Serving, body: Body) -> Response:
    """Answers a chat."""
    return await _serve(request, service, CHAT, body)


@router.post(COMPLETIONS, responses=_ANSWERS, openapi_extra=request_body(CompletionRequest))
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
    accepted = await accept(request, service, endpoint, body, log=True if later else None)
    job = accepted.job
    if later:
        return await _respond_async(service, job)
    if accepted.stream:
        return await stream(request, service, job, partial(openai_chunks, accepted))
    outcome = await answer(request, service, job)
    return json_response(outcome.body, outcome.status_code, job_headers(job.id, job.lane))


async def _respond_async(service: Service, job: Job) -> Response:
    headers = job_headers(job.id, job.lane)
    headers |= {"Location": links(job.id)["self"], "Preference-Applied": "respond-async"}
    return json_response(await service.job_object(job.id), 202, headers)
