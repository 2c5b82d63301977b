"""The two routes of simple clients: a prompt in, text out."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.api.answering import Events, Replies, accept, answer, stream
from headway.api.errors import json_response
from headway.api.schemas import ErrorAnswer, GenerateAnswer, GenerateRequest, InferAnswer, SimpleRequest, request_body
from headway.api.service import Body, Serving, job_headers
from headway.shared.errors import InvalidRequest
from headway.shared.intake import parse_object
from headway.shared.job import Job
from headway.shared.tokens import COMPLETIONS

router = APIRouter(tags=["Simple clients"])

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, 503: {"model": ErrorAnswer}}
_GENERATED = {"model": GenerateAnswer, "description": "With `stream: true` events whose texts are those so far"}

#: Characters of a label; it is repeated in every event of a stream.
_MAX_LABEL = 256


@dataclass(frozen=True, slots=True)
class _Order:
    """A request of a simple client.

    Attributes:
        body: the request for `/v1/completions`.
        label: what the caller calls it, if anything.
    """

    prompt: str
    body: bytes
    label: str | None

    def reply(self, job: Job, **content: object) -> bytes:
        return json.dumps({"id": self.label or job.id, **content}).encode()

    def texts(self, outputs: list[str]) -> list[str]:
        return [self.prompt + output for output in outputs]


@router.post("/infer", responses={200: {"model": InferAnswer}, **_ERRORS}, openapi_extra=request_body(SimpleRequest))
async def infer(request: Request, service: Serving, body: Body) -> Response:
    """Completes one prompt; answers with the output alone."""
    order = await asyncio.to_thread(_read, body, single=True)
    accepted = await accept(request, service, COMPLETIONS, order.body)
    [result] = _outputs((await answer(request, service, accepted.job)).body)
    return _response(order.reply(accepted.job, result=result), accepted.job)


@router.post("/generate", responses={200: _GENERATED, **_ERRORS}, openapi_extra=request_body(GenerateRequest))
async def generate(request: Request, service: Serving, body: Body) -> Response:
    """Completes one prompt; answers with the prompt and the output behind it, once for each choice."""
    order = await asyncio.to_thread(_read, body)
    accepted = await accept(request, service, COMPLETIONS, order.body)
    job = accepted.job
    if accepted.stream:
        return await stream(request, service, job, partial(_texts_so_far, order, job))
    outputs = _outputs((await answer(request, service, job)).body)
    return _response(order.reply(job, text=order.texts(outputs)), job)


def _read(raw: bytes, *, single: bool = False) -> _Order:
    fields = parse_object(raw)
    label, prompt = _label(fields.pop("id", None)), fields.get("prompt")
    if not isinstance(prompt, str):
        raise InvalidRequest("prompt must be one string.", param="prompt")
    if fields.get("echo"):
        raise InvalidRequest("echo is not known here: /generate repeats the prompt, /infer does not.", param="echo")
    if single:
        _check_single(fields)
    return _Order(prompt, json.dumps(fields).encode(), label)


def _check_single(fields: Mapping[str, Any]) -> None:
    if fields.get("stream"):
        raise InvalidRequest("/infer does not stream; /generate and /v1/completions do.", param="stream")
    if fields.get("n") not in (None, 1):
        raise InvalidRequest("/infer gives one result; /generate and /v1/completions give n.", param="n")


def _label(value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= _MAX_LABEL):
        raise InvalidRequest(f"id must be a string of 1 to {_MAX_LABEL} characters.", param="id")
    return value


def _outputs(completion: bytes) -> list[str]:
    return [choice.get("text") or "" for choice in json.loads(completion)["choices"]]


def _response(body: bytes, job: Job) -> Response:
    return json_response(body, headers=job_headers(job.id, job.lane))


async def _texts_so_far(order: _Order, job: Job, replies: Replies) -> Events:
    """An event for each chunk. After a restart they begin again from the prompt, since each replaces the one before."""
    outputs = [""] * job.choices
    async with aclosing(replies):
        async for reply in replies:
            if reply.kind == "restarted":
                outputs = [""] * job.choices
            elif choices := json.loads(reply.data).get("choices"):
                for choice in choices:
                    outputs[choice["index"]] += choice.get("text") or ""
                yield order.reply(job, text=order.texts(outputs))
