"""The OpenAI contract of the simulated engine: what it accepts, and answers in the shapes that vLLM gives."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from headway.shared.tokens import CHAT, COMPLETIONS
from headway.worker.engines.base import Chunk, Final, Request

#: In every response, so that nobody takes simulated text for a model's.
FINGERPRINT = "headway-simulated"

#: OpenAI's default for completions. vLLM lets a chat run to the model's length, which helps no simulation.
DEFAULT_MAX_TOKENS = 16

#: 32 of them, so that five bits of a hash choose one. Those that take several bytes a character catch whoever
#: cuts text in bytes.
_VOCABULARY = (
    "a the of to in is on by at we train track signal lane steam bridge river lamp stone cloud north green "
    "early slow takes waits turns naïve größer 列车 поезд 🚂"
)
WORDS = tuple(_VOCABULARY.split())

#: Prompt tokens of a body with one prompt (a chat is one prompt), by its endpoint.
Count = Callable[[str, Mapping[str, Any]], int]


def token(request_id: str, choice: int, k: int) -> str:
    """Token number k, from 0, of one choice: a word with a leading space, the same in every process."""
    digest = blake2b(f"{request_id}/{choice}/{k}".encode(), digest_size=1).digest()
    return f" {WORDS[digest[0] % len(WORDS)]}"


def text(request_id: str, choice: int, first: int, end: int) -> str:
    """The tokens from `first` to before `end` of one choice."""
    return "".join(token(request_id, choice, k) for k in range(first, end))


def count_bytes(endpoint: str, body: Mapping[str, Any]) -> int:
    """An estimate for when there is no tokenizer: one token for four bytes. Token ids are counted exactly."""
    prompt = body["messages" if endpoint == CHAT else "prompt"]
    if endpoint == COMPLETIONS and isinstance(prompt, list):
        return len(prompt)
    as_text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    return max(1, -(-len(as_text.encode(errors="replace")) // 4))


class Refused(Exception):
    """The request is answered with this error and nothing else."""

    def __init__(self, status_code: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.param = param

    def final(self) -> Final:
        return error(self.status_code, str(self), self.param)


def error(status_code: int, message: str, param: str | None = None) -> Final:
    """An answer with vLLM's error object."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status_code, "InternalServerError")
    details = {"message": message, "type": kind, "param": param, "code": status_code}
    return Final(status_code, _json({"error": details}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A request that was accepted.

    Attributes:
        prompts: prompt tokens of each prompt.
        n: choices for each prompt.
        max_tokens: tokens of each choice: exactly so many are generated.
        interval: tokens that a chunk collects, except the first and the last chunk of a choice.
    """

    id: str
    endpoint: str
    model: str
    prompts: tuple[int, ...]
    n: int
    max_tokens: int
    stream: bool
    include_usage: bool
    interval: int

    @property
    def chat(self) -> bool:
        return self.endpoint == CHAT

    @property
    def choices(self) -> int:
        return self.n * len(self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What the simulated server accepts: one model, its length, and how prompts are counted."""

    model: str
    max_model_len: int
    count: Count

    def accept(self, request: Request) -> Order:
        """Reads a request.

        Raises:
            Refused: 404 for an unknown endpoint or model, 400 for anything else that vLLM would refuse.
        """
        if request.endpoint not in (CHAT, COMPLETIONS):
            raise Refused(404, f"Not found: {request.endpoint}")
        model = _string(request.body, "model", self.model)
        if model != self.model:
            raise Refused(404, f"The model `{model}` does not exist.", "model")
        order = self._read(request)
        for tokens in order.prompts:
            self._check_length(tokens, order.max_tokens)
        return order

    def _read(self, request: Request) -> Order:
        body = request.body
        _check_temperature(body)
        return Order(
            id=request.id,
            endpoint=request.endpoint,
            model=self.model,
            prompts=self._prompts(request),
            n=_positive(body, "n", 1),
            max_tokens=_max_tokens(request),
            stream=_flag(body, "stream"),
            include_usage=_include_usage(body),
            interval=_positive(body, "stream_interval", 1),
        )

    def _prompts(self, request: Request) -> tuple[int, ...]:
        if request.endpoint == CHAT:
            _check_messages(request.body.get("messages"))
            return (self.count(CHAT, request.body),)
        prompts = _split_prompts(request.body.get("prompt"))
        return tuple(self.count(COMPLETIONS, {**request.body, "prompt": prompt}) for prompt in prompts)

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens + max_tokens > self.max_model_len:
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {prompt_tokens} input tokens."
            )
            raise Refused(400, message, "input_tokens")


def _string(body: Mapping[str, Any], name: str, default: str) -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise Refused(400, f"{name} must be a string", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not (value is None or isinstance(value, bool)):
        raise Refused(400, f"{name} must be true or false", name)
    return bool(value)


def _positive(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not _is_integer(value) or value < 1:
        raise Refused(400, f"{name} must be an integer of at least 1", name)
    return int(value)


def _is_integer(value: object) -> bool:
    # JSON's true is no number, although Python's is.
    return isinstance(value, int) and not isinstance(value, bool)


def _max_tokens(request: Request) -> int:
    limit = _positive(request.body, "max_tokens", DEFAULT_MAX_TOKENS)
    return _positive(request.body, "max_completion_tokens", limit) if request.endpoint == CHAT else limit


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise Refused(400, "stream_options must be an object", "stream_options")
    if not body.get("stream"):
        raise Refused(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    return _flag(options, "include_usage")


def _check_temperature(body: Mapping[str, Any]) -> None:
    value = body.get("temperature")
    if value is None:
        return
    if not (_is_integer(value) or isinstance(value, float)) or value < 0:
        raise Refused(400, "temperature must be a number of at least 0", "temperature")


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages must be a list with at least one message", "messages")
    if not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):
        raise Refused(400, "each message must be an object with a role", "messages")


def _split_prompts(prompt: object) -> list[Any]:
    """One prompt is a text or a list of token ids; several are a list of those."""
    if _is_prompt(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and all(_is_prompt(each) for each in prompt):
        return prompt
    raise Refused(400, "prompt must be a string, a list of token ids, or a list of those", "prompt")


def _is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_integer(each) and each >= 0 for each in value)
    return isinstance(value, str) and value != ""


@dataclass(slots=True)
class Answer:
    """What the reader of one request has got and what there is to give; no I/O.

    Attributes:
        created: Unix seconds of the start, for the answer's `created`.
        generated: tokens generated so far, of each choice.
        sent: tokens that `news` has handed out, of each choice.
    """

    order: Order
    created: int
    generated: list[int] = field(init=False)
    sent: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.generated = [0] * self.order.choices
        self.sent = [0] * self.order.choices

    @property
    def complete(self) -> bool:
        return min(self.generated) == self.order.max_tokens

    def news(self) -> list[Chunk]:
        """The chunks that are due since the last call; a plain request has none.

        Tokens that came together come in one chunk, as from vLLM when its reader is slower than the engine.
        """
        due = [choice for choice in range(self.order.choices) if self._due(choice)] if self.order.stream else []
        chunks = [] if any(self.sent) or not due else self._roles()
        chunks += [self._chunk([self._delta(choice)]) for choice in due]
        if self.complete and self.order.include_usage:
            chunks.append(self._chunk([], usage=self._usage()))
        return chunks

    def final(self) -> Final:
        """The end of a complete answer."""
        if self.order.stream:
            return Final(200, None)
        kind = "chat.completion" if self.order.chat else "text_completion"
        choices = [self._choice(choice) for choice in range(self.order.choices)]
        return Final(200, _json(self._envelope(kind) | {"choices": choices, "usage": self._usage()}))

    def _due(self, choice: int) -> bool:
        generated, sent = self.generated[choice], self.sent[choice]
        if generated == sent:
            return False
        return sent == 0 or generated == self.order.max_tokens or generated - sent >= self.order.interval

    def _roles(self) -> list[Chunk]:
        """A chat's stream starts with the role of each choice."""
        if not self.order.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        ending = {"logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": i, "delta": delta} | ending]) for i in range(self.order.choices)]

    def _delta(self, choice: int) -> dict[str, Any]:
        end = self.generated[choice]
        news = text(self.order.id, choice, self.sent[choice], end)
        self.sent[choice] = end
        said = {"delta": {"content": news}} if self.order.chat else {"text": news}
        return {"index": choice} | said | self._ending(end)

    def _choice(self, choice: int) -> dict[str, Any]:
        whole = text(self.order.id, choice, 0, self.generated[choice])
        said = {"message": {"role": "assistant", "content": whole}} if self.order.chat else {"text": whole}
        return {"index": choice} | said | self._ending(self.generated[choice])

    def _ending(self, generated: int) -> dict[str, Any]:
        reason = "length" if generated == self.order.max_tokens else None
        return {"logprobs": None, "finish_reason": reason, "stop_reason": None}

    def _usage(self) -> dict[str, int]:
        prompt, completion = sum(self.order.prompts), sum(self.generated)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: object) -> Chunk:
        kind = "chat.completion.chunk" if self.order.chat else "text_completion"
        data = self._envelope(kind) | {"choices": choices} | more
        return Chunk(_json(data), data)

    def _envelope(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.order.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.order.id}",
            "object": kind,
            "created": self.created,
            "model": self.order.model,
            "system_fingerprint": FINGERPRINT,
        }


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
