"""Every error as `{"error": {"message", "type", "param", "code"}}`, and no text of a caller in a log."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.shared.errors import HeadwayError, InvalidRequest, JobCancelled, QueueUnavailable, error_body, frames
from headway.shared.job import Outcome

_log = logging.getLogger(__name__)

#: What `Retry-After` says while Redis is down, in seconds; a server that was restarted is back by then.
RETRY_AFTER_S = 2


#: How a WebSocket is closed by a fault of ours.
_INTERNAL_ERROR = 1011


class BodyTooLarge(InvalidRequest):
    """The body is longer than HEADWAY_MAX_BODY_BYTES."""

    status_code = 413
    code = "body_too_large"


class NotCompleted(HeadwayError):
    """A job has ended, but not as completed: its caller gets the status and the body of the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"The job has ended as {outcome.status}.")
        self.outcome = outcome


def install(app: FastAPI) -> None:
    """Makes the app answer every error in OpenAI's shape."""
    for kind in (HeadwayError, HTTPException, RequestValidationError, ClientDisconnect):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(_Unexpected)


def accepted_as(request: Request, headers: Mapping[str, str]) -> None:
    """Every error from now on names the job, which runs on, and tells SDKs that to ask again would make it run twice.

    Args:
        headers: what answers say of the job.
    """
    request.state.error_headers = {**headers, "X-Should-Retry": "false"}


def error_headers(request: Request) -> dict[str, str]:
    """What an error of this request says besides; nothing while no job is accepted."""
    headers: dict[str, str] = getattr(request.state, "error_headers", {})
    return headers


async def _answer(request: Request, error: Exception) -> Response:
    match error:
        case QueueUnavailable():
            _log.warning("%s %s: %s", request.method, request.url.path, error)
            headers = error_headers(request) or {"Retry-After": str(RETRY_AFTER_S)}
            return json_response(shown(error), error.status_code, headers)
        case HeadwayError():
            return json_response(shown(error), status_of(error), error_headers(request))
        case RequestValidationError():
            return json_response(error_body(_invalid(error)), InvalidRequest.status_code)
        case HTTPException():
            return _plain(error.status_code, error.detail, error.headers)
        case _:
            # The client has hung up; nobody reads this.
            return Response(status_code=JobCancelled.status_code)


def status_of(error: HeadwayError) -> int:
    """The HTTP status of an error."""
    return error.outcome.status_code if isinstance(error, NotCompleted) else error.status_code


def shown(error: HeadwayError) -> bytes:
    """The error's JSON for a caller. What Redis says is the operator's business, for it names hosts."""
    if isinstance(error, NotCompleted):
        return error.outcome.body
    if isinstance(error, QueueUnavailable):
        return error_body(QueueUnavailable("The queue cannot be reached at the moment. Please try again."))
    return error_body(error)


def json_response(body: bytes, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response whose JSON is there already."""
    return Response(body, status_code, headers, media_type="application/json")


def _plain(status_code: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    kind = InvalidRequest.type if status_code < 500 else HeadwayError.type
    code = HTTPStatus(status_code).phrase.lower().replace(" ", "_")
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json_response(msgspec.json.encode({"error": error}), status_code, headers)


def _invalid(error: RequestValidationError) -> InvalidRequest:
    # Pydantic's own text would quote what came in.
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return InvalidRequest(f"{name}: {first['msg']}", param=name)


class _Unexpected:
    """Answers what no handler knows with a 500 that gives nothing away.

    It logs where the error arose but not its text, which may quote a prompt. Starlette's handler for `Exception` would
    raise the error again, and the server would log it whole.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        method = scope.get("method", "WebSocket")
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            # The process stops and cuts what still streams. That is no fault, which a traceback would make of it.
            _log.info("cut %s %s", method, scope["path"])
        except Exception as error:
            _log.error("%s in %s %s\n%s", type(error).__name__, method, scope["path"], frames(error))
            # A response that has begun cannot change its status: the server closes the connection.
            if scope["type"] == "websocket":
                # The server refuses a close where there is nothing left to close.
                with suppress(OSError, RuntimeError):
                    await send({"type": "websocket.close", "code": _INTERNAL_ERROR})
            elif not started:
                message = "The server had an error while it processed your request."
                await _plain(500, message, error_headers(Request(scope)))(scope, receive, send)
