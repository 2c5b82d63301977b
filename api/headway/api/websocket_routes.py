"""OpenAI's two paths as WebSockets: one request in, its chunks out, each a message."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import NoReturn
from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from headway.api.answering import openai_chunks, until_completed
from headway.api.errors import shown, status_of
from headway.api.following import follow, unless
from headway.api.service import Service, Serving
from headway.shared.errors import HeadwayError, InvalidRequest, QueueUnavailable
from headway.shared.intake import Accepted, parse_object
from headway.shared.tokens import CHAT, COMPLETIONS

router = APIRouter()

_log = logging.getLogger(__name__)

#: Seconds within which the request must have come: a client that says nothing shall not hold a connection for ever.
REQUEST_S = 30.0

#: Closing codes from here to 4999 are an application's own; behind it stands the HTTP status of the error.
_ERROR_CODES = 4000


class RequestTimeout(InvalidRequest):
    """The client has sent no request in time."""

    status_code = 408
    code = "request_timeout"


@router.websocket(CHAT)
async def chat(websocket: WebSocket, service: Serving) -> None:
    """Answers a chat."""
    await _serve(websocket, service, CHAT)


@router.websocket(COMPLETIONS)
async def completions(websocket: WebSocket, service: Serving) -> None:
    """Completes one or more prompts."""
    await _serve(websocket, service, COMPLETIONS)


async def _serve(websocket: WebSocket, service: Service, endpoint: str) -> None:
    job_id = ""
    # A client that hangs up is no fault; its job runs on.
    with suppress(WebSocketDisconnect):
        if _foreign(websocket):
            await websocket.close()
            return
        await websocket.accept()
        try:
            raw = await _request(websocket)
            accepted = await service.submit(endpoint, await asyncio.to_thread(_as_stream, raw))
            job_id = accepted.job.id
            await unless(_interruption(websocket), _send_chunks(websocket, service, accepted))
        except HeadwayError as error:
            if isinstance(error, QueueUnavailable):
                _log.warning("WebSocket %s: %s", endpoint, error)
            await _send(websocket, shown(error))
            await _close(websocket, _ERROR_CODES + status_of(error), job_id)
        else:
            await _close(websocket, 1000, job_id)


def _foreign(websocket: WebSocket) -> bool:
    """Whether a web page of another host asks: browsers let every page open sockets everywhere, and read what comes."""
    origin = websocket.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != websocket.headers.get("host")


async def _request(websocket: WebSocket) -> bytes:
    try:
        async with asyncio.timeout(REQUEST_S):
            return await _receive(websocket)
    except TimeoutError:
        raise RequestTimeout(f"No request came within {REQUEST_S:g} seconds.") from None


async def _receive(websocket: WebSocket) -> bytes:
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"])
    text: str | None = message.get("text")
    data: bytes = message["bytes"] if text is None else text.encode()
    return data


def _as_stream(raw: bytes) -> bytes:
    fields = parse_object(raw)
    if fields.get("stream") is False:
        raise InvalidRequest("A WebSocket always streams: leave stream out, or post the request.", param="stream")
    return json.dumps({**fields, "stream": True}).encode() if fields.get("stream") is None else raw


async def _interruption(websocket: WebSocket) -> NoReturn:
    await _receive(websocket)
    raise InvalidRequest("A connection takes one request: open another one for the next. The first one's job runs on.")


async def _send_chunks(websocket: WebSocket, service: Service, accepted: Accepted) -> None:
    replies = until_completed(service, accepted.job, follow(service.queue, accepted.job.id))
    async with aclosing(openai_chunks(accepted, replies)) as chunks:
        async for chunk in chunks:
            await _send(websocket, chunk)


async def _send(websocket: WebSocket, message: bytes) -> None:
    with _closed_by_the_server():
        await websocket.send_text(message.decode())


async def _close(websocket: WebSocket, code: int, reason: str) -> None:
    with _closed_by_the_server():
        await websocket.close(code, reason)


@contextmanager
def _closed_by_the_server() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        # Its answer when it has just closed the connection itself, as after a ping that nobody answered.
        raise WebSocketDisconnect(1006) from None
