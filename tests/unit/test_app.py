"""The routes, as far as they answer without Redis."""

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from headway.api.app import create_app
from headway.api.schemas import ErrorAnswer
from headway.shared.job import mint_job_id
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT, COMPLETIONS, estimate
from valkey_server import free_port

MAX_BODY_BYTES = 250_000
MESSAGES = [{"role": "user", "content": "hello"}]


def count(endpoint: str, body: Mapping[str, Any]) -> list[int]:
    """The estimate; it breaks, as a fault of ours would, when a prompt asks for that."""
    if "break" in str(body):
        raise RuntimeError(f"cannot count {body}")
    return estimate(endpoint, body)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """An API whose Redis is not there."""
    settings = Settings(
        engine="simulated",
        served_model="org/m",
        redis_url=f"redis://127.0.0.1:{free_port()}/0",
        max_model_len=100,
        short_below=10,
        mid_to=50,
        max_body_bytes=MAX_BODY_BYTES,
    )
    app = create_app(settings, counter=count)
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://h") as client:
        yield client


def refused(answer: httpx.Response, status_code: int) -> Any:
    """The error object of an answer, in OpenAI's shape."""
    assert answer.status_code == status_code
    return ErrorAnswer.model_validate_json(answer.content, strict=True).error


async def test_the_process_is_alive_but_not_ready(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert refused(await client.get("/ready"), 503).code == "queue_unavailable"


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "hi"})])
async def test_without_redis_callers_are_asked_to_come_again(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body)
    # I expect an answer that SDKs retry, and that does not show the operator's hosts
    error = refused(answer, 503)
    assert (error.code, error.type) == ("queue_unavailable", "server_error")
    assert int(answer.headers["retry-after"]) > 0
    assert "127.0.0.1" not in answer.text


async def test_models(client: httpx.AsyncClient) -> None:
    [model] = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("org/m", "model", 100)
    assert model["owned_by"] == "headway-simulated-engine"
    assert (await client.get("/v1/models/org/m")).json() == model
    assert refused(await client.get("/v1/models/other"), 404).code == "model_not_found"


async def test_unknown_paths_and_methods_have_openais_shape(client: httpx.AsyncClient) -> None:
    assert refused(await client.get("/v1/nothing"), 404).type == "invalid_request_error"
    answer = await client.delete("/v1/jobs")
    assert refused(answer, 405).code == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("job_id", ["x", "job-0", "job-0-a%2Fb", "job-{0}-abc", "job-0-ä"])
@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/events"), ("POST", "/cancel")])
async def test_what_is_no_job_id_is_not_found(client: httpx.AsyncClient, job_id: str, method: str, path: str) -> None:
    answer = await client.request(method, f"/v1/jobs/{job_id}{path}")
    assert refused(answer, 404).code == ("not_found" if "%2F" in job_id else "job_not_found")


async def test_a_job_that_nobody_can_look_up_is_503(client: httpx.AsyncClient) -> None:
    assert refused(await client.get(f"/v1/jobs/{mint_job_id()}"), 503).code == "queue_unavailable"


@pytest.mark.parametrize(
    ("body", "status_code", "code", "param"),
    [
        ({"messages": MESSAGES, "model": "other"}, 404, "model_not_found", "model"),
        ({"messages": MESSAGES, "max_tokens": 100}, 400, "context_length_exceeded", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "context_length_exceeded", "messages"),
        ({"messages": MESSAGES, "n": 0}, 400, None, "n"),
        ({"messages": []}, 400, None, "messages"),
        ([], 400, None, None),
    ],
)
async def test_a_bad_request_is_refused_before_it_is_queued(
    client: httpx.AsyncClient, body: Any, status_code: int, code: str | None, param: str | None
) -> None:
    error = refused(await client.post(CHAT, json=body), status_code)
    assert (error.type, error.code, error.param) == ("invalid_request_error", code, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        b'{"endpoint": "/v1/completions"}',
        b'{"endpoint": "/v1/embeddings", "body": {}}',
        b'{"endpoint": "/v1/completions", "body": "text"}',
        b'{"endpoint": "/v1/completions", "body": {"prompt": "x"}, "tier": "gold"}',
        b'{"endpoint": "/v1/completions", "body": {"prompt": "x"}, "deadline": 3}',
        b'{"endpoint": "/v1/completions", "body": {"prompt": "\xff"}}',
        b'{"endpoint": "/v1/completions", "body": %s}' % (b"[" * 100_000 + b"]" * 100_000),
    ],
)
async def test_what_is_no_job_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    assert refused(await client.post("/v1/jobs", content=body), 400).type == "invalid_request_error"


async def test_a_body_over_the_limit_is_read_no_further(client: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 100_000
            yield b"x" * 100_000

    error = refused(await client.post(CHAT, content=endless()), 413)
    assert (error.type, error.code) == ("invalid_request_error", "body_too_large")
    assert sent == 300_000


async def test_a_body_at_the_limit_is_read(client: httpx.AsyncClient) -> None:
    body = b'{"messages": []}'.ljust(MAX_BODY_BYTES)
    assert refused(await client.post(CHAT, content=body), 400).param == "messages"
    assert refused(await client.post(CHAT, content=body + b" "), 413).code == "body_too_large"


async def test_a_fault_of_ours_shows_and_logs_no_prompt(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a prompt that runs into a fault whose text quotes the prompt
    with caplog.at_level(logging.DEBUG):
        answer = await client.post(COMPLETIONS, json={"prompt": "break my secret"})
    # I expect a 500 that says nothing, and a log that says where but not what
    error = refused(answer, 500)
    assert error.type == "server_error"
    assert "RuntimeError in POST /v1/completions" in caplog.text
    assert "in count" in caplog.text
    assert "secret" not in answer.text + caplog.text


async def test_the_documentation_names_every_route_and_request(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/generate",
        "/health",
        "/infer",
        "/metrics",
        "/ready",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        "/v1/jobs/{job_id}/cancel",
        "/v1/jobs/{job_id}/events",
        "/v1/models",
        "/v1/models/{model}",
    }
    chat = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["required"] == ["messages"]
    generate = document["paths"]["/generate"]["post"]
    assert generate["requestBody"]["content"]["application/json"]["schema"]["required"] == ["prompt"]
    assert generate["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/GenerateAnswer")
    assert "$defs" not in str(document)
    assert (await client.get("/docs")).status_code == 200
