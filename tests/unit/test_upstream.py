"""The upstream engine in front of servers that a test plays by hand: what it asks, and what it makes of the answers."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings
from headway.worker.engines import sse, upstream_http
from headway.worker.engines import upstream as module
from headway.worker.engines.answer import CUT_SHORT
from headway.worker.engines.base import Capacity, Chunk, Final, Request
from headway.worker.engines.upstream import Upstream, UpstreamEngine, openai_error, pause_s
from headway.worker.engines.upstream_http import base_url
from helpers import PATIENCE_S, eventually
from programs import serving
from valkey_server import free_port

CHAT = "/v1/chat/completions"
KEY = "sk-very-secret"
NOT_BEGUN = Final(503, None, begun=False)
MODELS = {"data": [{"id": "m", "max_model_len": 1000}, {"id": "other"}]}
ANSWER = {"id": "chatcmpl-1", "model": "m", "choices": [], "usage": {"completion_tokens": 1}}
ERROR = {"error": {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for seconds here."""
    for name in ("_POLL_S", "_SETTLE_S", "_FIRST_PAUSE_S"):
        monkeypatch.setattr(module, name, 0.01)


class Server:
    """An OpenAI-compatible server; each list of answers is used up to its last one, which then stays."""

    def __init__(self) -> None:
        self.models: deque[Response] = deque([JSONResponse(MODELS)])
        self.answers: deque[Response] = deque([JSONResponse(ANSWER)])
        self.looks = 0
        self.asked: list[HttpRequest] = []
        self.bodies: list[dict[str, Any]] = []
        self.app = FastAPI()
        self.app.add_api_route("/v1/models", self._models, methods=["GET"])
        self.app.add_api_route("/{path:path}", self._answer, methods=["POST"])

    async def _models(self) -> Response:
        self.looks += 1
        return self.models.popleft() if len(self.models) > 1 else self.models[0]

    async def _answer(self, request: HttpRequest) -> Response:
        self.asked.append(request)
        self.bodies.append(await request.json())
        return self.answers.popleft() if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def url(server: Server) -> AsyncIterator[str]:
    async with serving(server.app) as url:
        yield url


def upstream(url: str, **options: Any) -> Upstream:
    wanted = {"api_key": SecretStr(KEY), "model": "m", "served_model": "m", "slots": 4, "kv_tokens": 5000} | options
    return Upstream(url=url, **wanted)


def starting(url: str, **options: Any):
    return UpstreamEngine.start(upstream(url, **options))


def events(*payloads: object) -> StreamingResponse:
    """An event stream; texts stand for themselves, everything else for its JSON."""
    texts = [each if isinstance(each, str) else json.dumps(each) for each in payloads]
    return StreamingResponse((f"data: {text}\n\n" for text in texts), media_type="text/event-stream")


async def run(engine: UpstreamEngine, body: dict[str, Any] | None = None) -> tuple[list[Chunk], Final]:
    async with asyncio.timeout(PATIENCE_S):
        *chunks, final = [item async for item in engine.run(Request("job-0-x", CHAT, body or {"messages": []}))]
    return chunks, final


# What is asked and what comes back


async def test_what_is_sent(server: Server, url: str) -> None:
    # Given a body without a model, and a server that knows the model by another name
    async with starting(url, served_model="ours") as engine:
        # If it runs, I expect the server's name of the model, the job's id, the key, and that nothing is compressed
        _, final = await run(engine, {"messages": [], "max_tokens": 3})
    assert server.bodies == [{"messages": [], "max_tokens": 3, "model": "m"}]
    assert server.asked[0].headers["x-request-id"] == "job-0-x"
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert server.asked[0].headers["accept-encoding"] == "identity"
    # and the answer under the name that callers use
    assert json.loads(final.body) == {**ANSWER, "model": "ours"}


async def test_without_a_key_none_is_sent(server: Server, url: str) -> None:
    async with starting(url, api_key=None) as engine:
        await run(engine)
    assert "authorization" not in server.asked[0].headers


@pytest.mark.parametrize("served", ["m", "ours"])
async def test_chunks_are_passed_on(server: Server, url: str, served: str) -> None:
    # Given a stream with odd spacing, half of a surrogate pair, a comment and a chunk without a model
    first, second = '{"model":  "m", "choices": [{"text": "\\ud800"}]}', '{"choices": []}'
    server.answers = deque([events(first + "\n\n: waiting", second, "[DONE]")])
    async with starting(url, served_model=served) as engine:
        chunks, final = await run(engine)

    # If both names are the same, I expect the server's bytes, and else the callers' name and the rest as it was
    renamed = json.dumps({**json.loads(first), "model": "ours"})
    assert [chunk.raw.decode() for chunk in chunks] == [first if served == "m" else renamed, second]
    assert [chunk.data for chunk in chunks] == [json.loads(chunk.raw) for chunk in chunks]
    assert final == Final(200, None)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/gateway", "/gateway/v1"])
async def test_the_url_may_end_in_v1_and_have_a_path(server: Server, path: str) -> None:
    # Given the server at the root and under a path
    root = FastAPI()
    root.mount("/gateway", server.app)
    root.mount("/", server.app)
    async with serving(root) as url, starting(url + path) as engine:
        # If it is named with or without /v1, I expect the same route
        await run(engine)
        prefix = "/gateway" if "gateway" in path else ""
        assert server.asked[0].url.path == f"{prefix}{CHAT}"


async def test_a_proxy_of_the_environment_is_not_used(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    async with starting(url) as engine:
        assert (await run(engine))[1].status_code == 200


async def test_as_many_run_at_once_as_the_worker_sends(server: Server, url: str) -> None:
    # Given a server that answers nobody before 150 are there
    async def answer(request: HttpRequest) -> Response:
        server.asked.append(request)
        if len(server.asked) == 150:
            everybody.set()
        await everybody.wait()
        return JSONResponse(ANSWER)

    everybody = asyncio.Event()
    server.app.router.routes.clear()
    server.app.add_api_route("/v1/models", server._models, methods=["GET"])
    server.app.add_api_route(CHAT, answer, methods=["POST"])
    async with starting(url, slots=150) as engine:
        # If 150 run at once, I expect that none waits for a connection
        finals = [final for _, final in await asyncio.gather(*(run(engine) for _ in range(150)))]
    assert {final.status_code for final in finals} == {200}


# The start


@pytest.mark.parametrize(("given", "length"), [(None, 1000), (700, 700)])
async def test_the_capacity_is_set_and_the_context_is_asked(url: str, given: int | None, length: int) -> None:
    async with starting(url, max_model_len=given) as engine:
        assert engine.capacity() == Capacity(4, 5000, length)
        assert engine.alive


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Response(status_code=429), "429"),
        (Response(status_code=503), "503"),
        (Response(status_code=404), "404"),
        (JSONResponse(MODELS, 404), "404"),
        (Response(status_code=307, headers={"location": "/"}), "307"),
        (Response("<html>"), "lists no models"),
        (JSONResponse({"data": []}), "lists no models"),
        (JSONResponse({"data": [{"name": "m"}]}), "lists no models"),
    ],
)
async def test_the_start_waits_for_a_server_that_is_not_ready(
    server: Server, url: str, caplog: pytest.LogCaptureFixture, answer: Response, said: str
) -> None:
    # Given a server, or a proxy before it, that does not list its models yet
    server.models.extendleft([answer, answer])
    # If I start, I expect an engine, and one line that said what it waited for
    async with starting(url) as engine:
        assert engine.alive
    (line,) = [record.message for record in caplog.records if record.name == module.__name__]
    assert url in line
    assert said in line


async def test_the_start_waits_for_a_server_that_is_not_there() -> None:
    # Given a port where nobody listens
    port = free_port()
    engines = starting(f"http://127.0.0.1:{port}")
    coming = asyncio.create_task(engines.__aenter__())
    # If I start, I expect it to wait
    await asyncio.wait([coming], timeout=0.1)
    assert not coming.done()
    # If a server comes, I expect an engine
    async with Wire(port=port):
        await asyncio.wait_for(coming, PATIENCE_S)
        await engines.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("answer", "options", "said"),
    [
        (Response(status_code=401), {}, "HEADWAY_UPSTREAM_API_KEY.*401"),
        (Response(status_code=403), {}, "HEADWAY_UPSTREAM_API_KEY.*403"),
        (JSONResponse(MODELS), {"model": "n"}, "HEADWAY_UPSTREAM_MODEL.*'n'.*m, other"),
        (JSONResponse(MODELS), {"model": "other"}, "HEADWAY_MAX_MODEL_LEN"),
    ],
)
async def test_a_server_that_does_not_fit_is_refused(
    server: Server, url: str, answer: Response, options: dict[str, Any], said: str
) -> None:
    # Given what the server says of its models, if I start, I expect to be told which setting is wrong
    server.models = deque([answer])
    with pytest.raises(ConfigurationError, match=said) as caught:
        async with starting(url, **options):
            pass
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:8000", "ftp://host", "http://", "http://h:x", "http://127.0.0.1:99999", "http://xn--/"),
        *("http://u:p4ss@h", "http://h?k=p4ss", "http://h#x"),
    ],
)
def test_a_url_that_is_none_of_http_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="HEADWAY_UPSTREAM_URL") as caught:
        base_url(url)
    assert "p4ss" not in caught.value.message


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel", " \n"])
async def test_a_key_that_no_header_can_carry_is_refused(url: str, key: str) -> None:
    with pytest.raises(ConfigurationError, match="HEADWAY_UPSTREAM_API_KEY") as caught:
        async with starting(url, api_key=SecretStr(key)):
            pass
    assert key not in caught.value.message


async def test_the_key_is_in_no_log_and_no_repr(server: Server, url: str, caplog: pytest.LogCaptureFixture) -> None:
    # Given a server that refuses every run, with all that anybody logs
    caplog.set_level(logging.DEBUG)
    server.answers = deque([Response(status_code=401)])
    async with starting(f"{url}/", api_key=SecretStr(f"{KEY}\n")) as engine:
        await run(engine)
        # I expect the key nowhere; a line end behind it, as files have, does no harm
        assert KEY not in caplog.text
        assert KEY not in repr(vars(engine))
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(Settings(upstream_api_key=SecretStr(KEY)))


# Whose fault an answer is


@pytest.mark.parametrize("status_code", [400, 413, 422])
async def test_a_refusal_is_the_jobs_own(server: Server, url: str, status_code: int) -> None:
    server.answers = deque([JSONResponse(ERROR, status_code)])
    async with starting(url) as engine:
        _, final = await run(engine)
    assert (final.status_code, json.loads(final.body)) == (status_code, ERROR)


@pytest.mark.parametrize("status_code", [307, 401, 402, 403, 404, 405, 408, 409, 410, 418, 499])
async def test_no_other_4xx_is_the_jobs_fault(server: Server, url: str, status_code: int) -> None:
    # Given a server that answers a run so, and lists its models as ever
    server.answers = deque([JSONResponse(ERROR, status_code, headers={"location": "/"})])
    async with starting(url) as engine:
        _, final = await run(engine)
        # I expect an engine's failure, of an engine that lives
        assert (final.status_code, engine.alive) == (502, True)


@pytest.mark.parametrize("status_code", [500, 502, 504])
async def test_a_server_error_stays_one(server: Server, url: str, status_code: int) -> None:
    server.answers = deque([JSONResponse(ERROR, status_code)])
    async with starting(url) as engine:
        _, final = await run(engine)
        assert (final.status_code, final.begun, engine.alive) == (status_code, True, True)


@pytest.mark.parametrize(
    ("answer", "begun"),
    [
        (Response(status_code=502), False),
        (Response(status_code=504), False),
        (Response(status_code=500), True),
        (events({"choices": []}, {"error": {"code": 502}}), True),
    ],
)
async def test_what_a_proxy_says_of_a_dead_server_is_no_failure(
    server: Server, url: str, answer: Response, begun: bool
) -> None:
    # Given a proxy that answers for a server that is gone
    async with starting(url) as engine:
        server.answers, server.models = deque([answer]), deque([Response(status_code=502)])
        # If a job runs, I expect a dead engine, and a failure only where the server itself has answered
        _, final = await run(engine)
        assert (final.begun, engine.alive) == (begun, False)


@pytest.mark.parametrize(
    "nothing", [Response(status_code=204), Response(b""), events(), events("[DONE]"), events(": waiting", "[DONE]")]
)
async def test_an_answer_that_says_nothing_is_an_engines_failure(server: Server, url: str, nothing: Response) -> None:
    server.answers = deque([nothing])
    async with starting(url) as engine:
        assert await run(engine) == ([], Final(500, CUT_SHORT))


async def test_an_event_without_an_end_is_an_engines_failure(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    # Given a stream of one chunk, and then of more than one event may have
    pieces = iter([f"data: {json.dumps({'choices': []})}\n\n", *("x" * 60 for _ in range(2))])
    server.answers = deque([StreamingResponse(pieces, media_type="Text/Event-Stream")])
    async with starting(url) as engine:
        chunks, final = await run(engine)
    assert (len(chunks), final) == (1, Final(500, CUT_SHORT))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"object": "error", "message": "too long", "code": 400}', "too long"),
        (b'{"error": "too long", "error_type": "validation"}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b'{"detail": [{"loc": ["n"]}]}', "The engine refuses the request with status 422."),
        (b"<html>", "The engine refuses the request with status 422."),
        (b"[]", "The engine refuses the request with status 422."),
    ],
)
def test_a_refusal_gets_openais_shape(body: bytes, message: str) -> None:
    error = json.loads(openai_error(422, body))["error"]
    assert (error["message"], error["code"]) == (message, 422)


@pytest.mark.parametrize(
    ("error", "status_code"),
    [
        ({"message": "no", "code": 400}, 400),
        ({"message": "no", "code": "400"}, 400),
        ({"message": "no", "code": "cancelled"}, 500),
        ({"message": "no", "code": 200}, 500),
        ("no", 500),
    ],
)
async def test_an_error_inside_a_stream_has_its_own_status(
    server: Server, url: str, error: object, status_code: int
) -> None:
    # Given a stream that ends in an error, as vLLM, Headway or TGI would write it
    server.answers = deque([events({"choices": []}, {"error": error})])
    async with starting(url) as engine:
        chunks, final = await run(engine)
    assert (len(chunks), final.status_code) == (1, status_code)


# Patience


@pytest.mark.parametrize("status_code", [429, 503])
async def test_a_full_server_is_asked_again(
    server: Server, url: str, status_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that is full twice and says for how long
    pauses: list[tuple[int, float]] = []
    monkeypatch.setattr(module, "pause_s", lambda *asked: pauses.append(asked) or 0)
    full = [Response(status_code=status_code, headers={"retry-after": after}) for after in ("7", "Fri, 31 Dec 1999")]
    server.answers.extendleft(full[::-1])
    async with starting(url) as engine:
        # If a job runs, I expect its answer, and pauses as the server wished
        assert (await run(engine))[1].status_code == 200
    assert len(server.asked) == 3
    assert pauses == [(0, 7.0), (1, 0.0)]


def test_pauses_grow_and_never_undercut_the_servers_wish() -> None:
    grown = [pause_s(tries, 0) for tries in (0, 3, 100)]
    assert grown[0] < grown[1] < grown[2] <= module._LONGEST_PAUSE_S * 1.25
    assert 20 <= pause_s(0, 20) <= 25


async def test_patience_ends(server: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a server that stays full, and asks for more than there is
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    server.answers = deque([Response(status_code=429, headers={"retry-after": "1000"})])
    async with starting(url) as engine:
        # If a job runs, I expect that it never began, after a last try at the end of the wait, and an engine that lives
        assert (await run(engine))[1] == NOT_BEGUN
        assert (len(server.asked), engine.alive) == (2, True)


async def test_who_says_that_asking_again_runs_it_twice_is_not_asked_again(server: Server, url: str) -> None:
    server.answers = deque([JSONResponse(ERROR, 503, headers={"x-should-retry": "false"})])
    async with starting(url) as engine:
        _, final = await run(engine)
        assert (final.status_code, final.begun) == (503, True)
    assert len(server.asked) == 1


async def test_waiting_can_be_aborted(server: Server, url: str) -> None:
    # Given a run that waits for a full server
    server.answers = deque([Response(status_code=503, headers={"retry-after": "1000"})])
    async with starting(url) as engine:
        running = asyncio.create_task(run(engine))
        await eventually(lambda: server.asked)
        # If it is cancelled, I expect it to end
        running.cancel()
        await asyncio.wait_for(asyncio.wait([running]), PATIENCE_S)
        assert running.cancelled()


# Connections that break

Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Wire:
    """A server of bare bytes: lists its models, and treats each POST as the next handler says."""

    def __init__(self, *handlers: Handler, port: int = 0) -> None:
        self._handlers = deque(handlers)
        self._port = port
        self.posts = 0
        self.looks = 0
        self.lists_models = True
        self.hung_up = asyncio.Event()

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    def vanish(self) -> None:
        """From now on connections are refused."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET"):
                self.looks += 1
                if self.lists_models:
                    writer.write(plain(MODELS))
                else:
                    await reader.read()
            else:
                length = int(head.lower().split(b"content-length: ")[1].split()[0])
                await reader.readexactly(length)
                self.posts += 1
                await self._handlers.popleft()(writer)
                if not writer.is_closing():
                    await reader.read()
                    self.hung_up.set()
        finally:
            writer.close()


def plain(body: object) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def answer(writer: asyncio.StreamWriter) -> None:
    writer.write(plain(ANSWER))
    await writer.drain()
    writer.close()


async def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def say_nothing(writer: asyncio.StreamWriter) -> None:
    pass


async def begin_a_stream(writer: asyncio.StreamWriter) -> None:
    event = b'data: {"choices": []}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + f"{len(event):x}\r\n".encode() + event + b"\r\n")
    await writer.drain()


async def cut_a_stream(writer: asyncio.StreamWriter) -> None:
    await begin_a_stream(writer)
    writer.close()


async def cut_an_answer(writer: asyncio.StreamWriter) -> None:
    writer.write(plain(ANSWER)[:-5])
    await writer.drain()
    writer.close()


@asynccontextmanager
async def wired(*handlers: Handler) -> AsyncIterator[tuple[Wire, UpstreamEngine]]:
    async with Wire(*handlers) as wire, starting(wire.url) as engine:
        yield wire, engine


@pytest.mark.parametrize("fault", [reset, hang_up])
async def test_a_connection_that_breaks_before_the_answer_is_tried_once_more(fault: Handler) -> None:
    async with wired(fault, answer) as (wire, engine):
        # If it breaks once, I expect the answer all the same
        assert (await run(engine))[1].status_code == 200
        assert (wire.posts, engine.alive) == (2, True)


async def test_a_request_that_breaks_its_connection_twice_has_failed() -> None:
    async with wired(reset, reset) as (wire, engine):
        # If it breaks twice while the server lists its models as ever, I expect a failure, of an engine that lives
        assert (await run(engine))[1].status_code == 502
        assert (wire.posts, engine.alive) == (2, True)


async def test_a_server_that_a_request_brings_down_has_failed() -> None:
    async def go_down(writer: asyncio.StreamWriter) -> None:
        wire.vanish()
        writer.transport.abort()

    async with wired(go_down) as (wire, engine):
        # If the server goes while it has the request, I expect a failure that counts, and an engine that is dead
        assert (await run(engine))[1].status_code == 502
        assert not engine.alive


@pytest.mark.parametrize("cut", [cut_a_stream, cut_an_answer])
async def test_an_answer_that_is_cut_is_an_engines_failure(cut: Handler) -> None:
    async with wired(cut) as (_, engine):
        # If an answer stops in the middle while the server lives, I expect a failure, and no second request
        chunks, final = await run(engine)
        assert final == Final(500, CUT_SHORT)
        assert len(chunks) == (cut is cut_a_stream)
        assert engine.alive


async def test_the_end_of_the_server_is_seen_at_the_cut() -> None:
    async def cut_and_go_down(writer: asyncio.StreamWriter) -> None:
        wire.vanish()
        await cut_a_stream(writer)

    async with wired(cut_and_go_down) as (wire, engine):
        # If the server goes in mid-stream, I expect it to be dead before the run's end is told
        assert (await run(engine))[1] == Final(500, CUT_SHORT)
        assert not engine.alive


async def test_a_job_that_a_dead_server_never_saw_has_not_begun() -> None:
    # Given a server that is gone, if a job runs, I expect that it never began, and a dead engine
    async with wired() as (wire, engine):
        wire.vanish()
        assert (await run(engine))[1] == NOT_BEGUN
        assert not engine.alive


async def test_a_server_that_hangs_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a server that keeps its connections and says nothing any more
    monkeypatch.setattr(module, "_SILENCE_S", 0.05)
    monkeypatch.setattr(upstream_http, "_CONNECT_S", 0.1)
    async with wired(begin_a_stream) as (wire, engine):
        wire.lists_models = False
        # If a job runs, I expect the engine's death, so that its owner takes the job back
        running = asyncio.create_task(run(engine))
        await eventually(lambda: not engine.alive)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])


async def test_a_long_prompt_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a server that says nothing of a job for long, and lists its models as ever
    async def think(writer: asyncio.StreamWriter) -> None:
        await eventually(lambda: wire.looks >= 4)
        await answer(writer)

    monkeypatch.setattr(module, "_SILENCE_S", 0.01)
    async with wired(think) as (wire, engine):
        # If it answers after some looks, I expect the answer
        assert (await run(engine))[1].status_code == 200
        assert (wire.posts, engine.alive) == (1, True)


async def test_an_idle_server_is_left_alone(server: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given no job
    monkeypatch.setattr(module, "_SILENCE_S", 0.01)
    async with starting(url):
        # If many silences pass, I expect no look but that of the start
        await asyncio.sleep(0.1)
    assert server.looks == 1


async def test_a_sign_of_life_that_never_ends_is_none(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a server that fails under a run, and then lists its models a blank at a time
    async def drip() -> AsyncIterator[str]:
        while True:
            yield " "
            await asyncio.sleep(0.01)

    monkeypatch.setattr(upstream_http, "_CONNECT_S", 0.1)
    async with starting(url) as engine:
        server.answers = deque([Response(status_code=500)])
        server.models = deque(StreamingResponse(drip()) for _ in range(module._PROBES + 1))
        # I expect it to be dead
        await run(engine)
        assert not engine.alive


@pytest.mark.parametrize("answer", [Response(status_code=401), JSONResponse({"data": [{"id": "other"}]})])
async def test_a_server_that_fits_no_more_is_a_dead_one(server: Server, url: str, answer: Response) -> None:
    # Given a server that runs nothing any more, since the key is refused or the model is another
    async with starting(url) as engine:
        server.answers, server.models = deque([Response(status_code=404)]), deque([answer])
        # If a job runs, I expect a dead engine, so that the other jobs stay in their lanes
        assert (await run(engine))[1] == NOT_BEGUN
        assert not engine.alive


@pytest.mark.parametrize(
    "useless", [Response(status_code=503), Response(status_code=404), JSONResponse({"data": [{"id": "other"}]})]
)
async def test_one_sign_of_life_may_fail(server: Server, url: str, useless: Response) -> None:
    # Given a server that answers a run with an error and then, for a moment, nothing useful
    async with starting(url) as engine:
        server.answers = deque([Response(status_code=500)])
        server.models.extendleft([useless, useless])
        # I expect it to live
        await run(engine)
        assert engine.alive


@pytest.mark.parametrize("silent", [say_nothing, begin_a_stream])
async def test_to_close_a_run_closes_its_connection(silent: Handler) -> None:
    async with wired(silent) as (wire, engine):
        # Given a run without an answer yet, or in mid-stream
        async with aclosing(engine.run(Request("job-0-x", CHAT, {"messages": []}))) as items:
            reading = asyncio.create_task(anext(items))
            await eventually(lambda: wire.posts)
            if silent is begin_a_stream:
                await reading
            # If it is cancelled, or its iterator is closed
            reading.cancel()
            await asyncio.wait([reading])
        # I expect no connection at once, and the server to see its end
        assert engine._http._transport._pool.connections == []
        await asyncio.wait_for(wire.hung_up.wait(), PATIENCE_S)
