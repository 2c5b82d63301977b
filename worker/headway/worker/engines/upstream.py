"""An engine that runs elsewhere: any OpenAI-compatible server (`vllm serve`, SGLang, TGI, another Headway), by HTTP.

What the server is asked is what the job says, under the server's own name of the model; what it answers is passed on
byte by byte. What is ours: to wait for a server that is not there yet, to be patient with a full one, to tell the job's
faults from the server's, and to notice that it is gone.
"""

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import SecretStr

from headway.shared.errors import ConfigurationError
from headway.worker.engines.answer import Answer, error_body
from headway.worker.engines.base import Capacity, Chunk, Final, Request
from headway.worker.engines.upstream_http import NotReady, client, model_card, named_error

_log = logging.getLogger(__name__)

#: Seconds between two looks at a server that is not ready yet, and between two lines of the log that say so.
_POLL_S, _TELL_S = 1.0, 30.0

#: Seconds that one run waits in all for a server that is full or loading: longer than a crowd lasts, short enough for
#: another worker, with another server, to get the job.
_PATIENCE_S = 60.0

#: Seconds of the first pause in such a wait, doubled up to the longest; a server may ask for more.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0

#: A dying server answers 500 for a moment before it answers nothing. Without a pause, that moment would be long enough
#: for a job to come back and fail as often as it may.
_SETTLE_S = 1.0

#: Signs of life that must fail before a server counts as gone: a proxy that restarts breaks one.
_PROBES = 3

#: Seconds in which no run hears anything, after which a sign of life is looked for: a server that hangs keeps its
#: connections.
_SILENCE_S = 60.0

#: The answers that find fault with the request itself. Any other 4xx is about the key, the route, the model's name or
#: the traffic, in which no job has a part.
_REFUSALS = frozenset({400, 413, 422})

#: "I am full" and "I am loading": nothing has begun, and the same request can be answered later.
_BUSY = frozenset({429, 503})

#: What a proxy says when it cannot reach the server.
_UNREACHED = frozenset({502, 504})

#: The end of a run that the server never began.
_NOT_BEGUN = Final(503, None, begun=False)

_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """A server, and what this worker may use of it.

    Attributes:
        url: with or without `/v1`.
        model: the server's name of the model.
        served_model: the name that callers use.
        slots: sequences that may run there at once.
        kv_tokens: tokens that they may have in all.
        max_model_len: the model's context in tokens; None takes what the server says.
        api_key: sent as a bearer token.
    """

    url: str
    model: str
    served_model: str
    slots: int
    kv_tokens: int
    max_model_len: int | None = None
    api_key: SecretStr | None = None


class UpstreamEngine:
    """Implements `Engine`. Made by `start`."""

    def __init__(self, http: httpx.AsyncClient, upstream: Upstream, max_model_len: int) -> None:
        self._http = http
        self._upstream = upstream
        self._capacity = Capacity(upstream.slots, upstream.kv_tokens, max_model_len)
        self._renamed = upstream.served_model != upstream.model
        self._alive = True
        self._looking = asyncio.Lock()
        self._runs = 0
        self._silent = False

    @classmethod
    @asynccontextmanager
    async def start(cls, upstream: Upstream) -> AsyncIterator["UpstreamEngine"]:
        """An engine whose server is ready; it waits for that, if need be for hours.

        Raises:
            ConfigurationError: the URL is none, the key is refused, or the server has other models or does not say
                how long its context is.
        """
        async with client(upstream.url, upstream.api_key, upstream.slots) as http:
            card = await _until_ready(http, upstream)
            engine = cls(http, upstream, upstream.max_model_len or _context(card))
            listening = asyncio.create_task(engine._listen())
            try:
                yield engine
            finally:
                listening.cancel()

    @property
    def alive(self) -> bool:
        return self._alive

    def capacity(self) -> Capacity:
        return self._capacity

    async def run(self, request: Request) -> AsyncGenerator[Chunk | Final, None]:
        """See `Engine.run`. To close the iterator closes the connection, by which the server knows to abort."""
        self._runs += 1
        try:
            response = await self._begin(request)
            if isinstance(response, Final):
                yield response
                return
            async with aclosing(self._answer(request, response)) as items:
                async for item in items:
                    yield item
        finally:
            self._runs -= 1

    async def _answer(self, request: Request, response: httpx.Response) -> AsyncGenerator[Chunk | Final, None]:
        answer = Answer(response.status_code, response.headers.get("content-type", ""))
        try:
            async for piece in response.aiter_bytes():
                self._silent = False
                for chunk in answer.feed(piece):
                    yield self._named(chunk)
            answer.end()
        except (httpx.RequestError, ValueError) as error:
            _log.warning("%s: the answer broke off (%s)", request.id, named_error(error))
        finally:
            await response.aclose()
        yield await self._judge(request, answer.final(), begun=response.is_success)

    async def _begin(self, request: Request) -> httpx.Response | Final:
        """Asks until an answer begins; a `Final` when none does.

        A connection may break before the answer, most often because it was kept alive too long. Then the server is
        asked once more, although it may have begun: nobody has seen a token, a server stops when its caller is gone,
        and the price is some computing. A second break is counted as a failure, since the request itself may be
        what brings the server down.
        """
        call = self._call(request)
        patient_until = time.monotonic() + _PATIENCE_S
        broken = False
        for tries in itertools.count():
            asked_s = 0.0
            try:
                response = await self._http.send(call, stream=True)
                if not _is_busy(response):
                    return response
                await response.aclose()
                asked_s = _retry_after_s(response)
            except _NEVER_SENT:
                if not await self._lives():
                    break
            except httpx.RequestError as error:
                _log.warning("%s: the connection broke before the answer (%s)", request.id, named_error(error))
                if not await self._lives() or broken:
                    return _failure(502, "the connection to the engine broke")
                broken = True
            if (left_s := patient_until - time.monotonic()) <= 0:
                break
            await asyncio.sleep(min(pause_s(tries, asked_s), left_s))
        await self._lives()
        return _NOT_BEGUN

    def _call(self, request: Request) -> httpx.Request:
        body = json.dumps({**request.body, "model": self._upstream.model}).encode()
        headers = {"content-type": "application/json", "x-request-id": request.id}
        return self._http.build_request("POST", request.endpoint, content=body, headers=headers)

    async def _judge(self, request: Request, final: Final, *, begun: bool) -> Final:
        """The answer as our caller shall see it: of a status that is not the job's fault, a server error.

        A proxy that cannot reach the server, or no longer has a route to it, says so of each job, and often before the
        server has seen it. So that is no failure of the job while the server gives no sign of life.
        """
        status_code = final.status_code
        if status_code < 300:
            return self._named_answer(final)
        if status_code in _REFUSALS:
            return Final(status_code, openai_error(status_code, final.body or b""))
        _log.warning("%s: the upstream's answer ended with status %d", request.id, status_code)
        await asyncio.sleep(_SETTLE_S)
        lives = await self._lives()
        if not lives and not begun and (status_code < 500 or status_code in _UNREACHED):
            return _NOT_BEGUN
        return final if status_code >= 500 else _failure(502, f"the engine answers {status_code}")

    async def _listen(self) -> None:
        """Looks for a sign of life whenever no run has heard anything for a while: a long prompt, or a server that
        hangs."""
        while True:
            self._silent = True
            await asyncio.sleep(_SILENCE_S)
            if self._runs and self._silent:
                await self._lives()

    async def _lives(self) -> bool:
        """Looks for a sign of life when something went wrong, and sets `alive`. Many may ask at once."""
        async with self._looking:
            self._alive = self._alive and await self._answers()
        return self._alive

    async def _answers(self) -> bool:
        for left in reversed(range(_PROBES)):
            try:
                await model_card(self._http, self._upstream.model)
            except (NotReady, ConfigurationError) as error:
                _log.warning("the upstream gives no sign of life: %s", error)
            else:
                return True
            if left:
                await asyncio.sleep(_POLL_S)
        return False

    def _named(self, chunk: Chunk) -> Chunk:
        """The chunk under the name that callers use; the server's own bytes where that is its name, too."""
        if not self._renamed or "model" not in chunk.data:
            return chunk
        data = {**chunk.data, "model": self._upstream.served_model}
        return Chunk(json.dumps(data).encode(), data)

    def _named_answer(self, final: Final) -> Final:
        if not self._renamed or final.body is None:
            return final
        data = json.loads(final.body)
        return Final(final.status_code, self._named(Chunk(final.body, data)).raw)


def pause_s(tries: int, asked_s: float) -> float:
    """Seconds before the next try, after `tries` before the last one: what the server asks for, but ever longer.

    A little is left to chance, so that a crowd that was turned away together does not come back together.
    """
    own_s = min(_FIRST_PAUSE_S * 2.0 ** min(tries, 10), _LONGEST_PAUSE_S)
    return max(own_s, asked_s) * random.uniform(1, 1.25)


def openai_error(status_code: int, body: bytes) -> bytes:
    """A refusal in OpenAI's shape: the server's own where it has that shape, else its message put into it."""
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    said = said if isinstance(said, Mapping) else {}
    if isinstance(said.get("error"), Mapping):
        return body
    # SGLang has `message`, TGI `error`, and FastAPI's own errors `detail`.
    texts = [text for name in ("message", "error", "detail") if isinstance(text := said.get(name), str)]
    message = texts[0] if texts else f"The engine refuses the request with status {status_code}."
    return error_body(status_code, message, "BadRequestError")


async def _until_ready(http: httpx.AsyncClient, upstream: Upstream) -> Mapping[str, Any]:
    told_at = -_TELL_S
    while True:
        try:
            return await model_card(http, upstream.model)
        except NotReady as error:
            if time.monotonic() - told_at >= _TELL_S:
                told_at = time.monotonic()
                _log.warning("waiting for the upstream at %s: %s", http.base_url, error)
        await asyncio.sleep(_POLL_S)


def _context(card: Mapping[str, Any]) -> int:
    length = card.get("max_model_len")
    if not isinstance(length, int):
        raise ConfigurationError("HEADWAY_MAX_MODEL_LEN must be set: the upstream does not say how long its context is")
    return length


def _is_busy(response: httpx.Response) -> bool:
    """Whether to ask again is right; some say by this header that it would be run twice."""
    return response.status_code in _BUSY and response.headers.get("x-should-retry") != "false"


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds for which the server asks; 0 when it does not, or names a date."""
    asked = response.headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else 0.0


def _failure(status_code: int, message: str) -> Final:
    return Final(status_code, error_body(status_code, message))
