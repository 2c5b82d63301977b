"""What goes over the wire, for the OpenAPI document and for tests.

Requests are not validated by these: the queue checks what it relies on, and the engine the rest, in its own words.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Request(BaseModel):
    """Fields of vLLM's OpenAI server that are not named here are passed on."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(default="", description="the served model; may be left out")
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = Field(default=None, examples=[{"include_usage": True}])


class ChatRequest(_Request):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]] = Field(examples=[[{"role": "user", "content": "What is a headway?"}]])
    max_completion_tokens: int | None = None


class CompletionRequest(_Request):
    """POST /v1/completions"""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(examples=["Once upon a time"])


class JobRequest(BaseModel):
    """POST /v1/jobs"""

    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any] = Field(description="the request for that endpoint; it is kept byte by byte")
    tier: Literal["priority", "default", "flex"] = "default"


class SimpleRequest(BaseModel):
    """POST /infer and POST /generate. Other fields of /v1/completions are passed on."""

    model_config = ConfigDict(extra="allow")

    prompt: str = Field(examples=["Once upon a time"])
    max_tokens: int | None = None
    temperature: float | None = None
    id: str | None = Field(
        default=None, min_length=1, max_length=256, description="your own label, which the answer repeats; no key"
    )


class GenerateRequest(SimpleRequest):
    """POST /generate"""

    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The request of a route that reads its body itself, for the OpenAPI document."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(_Response):
    """The error object that OpenAI's clients know."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(_Response):
    """The body of every answer that is an error."""

    error: Error


class InferAnswer(_Response):
    """What the model says, without the prompt."""

    id: str = Field(description="the label of the request, or the job's id")
    result: str


class GenerateAnswer(_Response):
    """The prompt with what the model says behind it, once for each choice."""

    id: str = Field(description="the label of the request, or the job's id")
    text: list[str]


class Timeline(_Response):
    """Instants of the server, in Unix milliseconds; null where not reached."""

    queued_at_ms: int
    started_at_ms: int | None
    first_token_at_ms: int | None
    finished_at_ms: int | None


class MicroBatch(_Response):
    """The micro-batch with which a job entered the engine, and why it left: `full`, `timeout`, …"""

    name: str
    size: int
    closed_by: str


class Links(_Response):
    """Where a job can be read, followed and cancelled."""

    self: str
    events: str
    cancel: str


class JobObject(_Response):
    """A job. Once it has ended, one of `result` and `error` is set until the result expires; then both are null."""

    id: str
    object: Literal["job"]
    status: Literal["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
    model: str
    endpoint: str
    lane: str
    tier: str
    prompt_tokens: int
    output_tokens: int | None
    attempt: int
    cancel_requested: bool
    created_at: int = Field(description="Unix seconds")
    timeline: Timeline
    batch: MicroBatch | None
    result: dict[str, Any] | None = Field(description="the plain OpenAI answer")
    error: Error | None
    links: Links


class Model(_Response):
    """A model that is served here."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(_Response):
    """All models that are served here."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(_Response):
    """The process is alive."""

    status: Literal["ok"] = "ok"
