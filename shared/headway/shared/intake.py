"""From a request body to a `Job`: checks what the queue itself relies on, and leaves the rest to the engine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from headway.shared.job import TIERS, Job, Tier, mint_job_id
from headway.shared.lanes import classify
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT, COMPLETIONS, Counter

ENDPOINTS = (CHAT, COMPLETIONS)

#: OpenAI's own bound of `n`.
_MAX_N = 128

#: More tokens than any model has, and a number that every part of the system can hold.
_MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job, and how its caller wants to be answered.

    Attributes:
        stream: the body asks for a stream.
        include_usage: the stream shall end with the chunk that has the usage and no choices.
    """

    job: Job
    stream: bool
    include_usage: bool


class Intake:
    """Makes jobs for the one model that the settings name."""

    def __init__(self, settings: Settings, counter: Counter, max_model_len: int | None = None) -> None:
        """
        Args:
            max_model_len: the model's context in tokens; None where it is not known, and then the engine refuses.
        """
        self._settings = settings
        self._counter = counter
        self._max_model_len = max_model_len

    def job(self, endpoint: str, raw: bytes, *, tier: Tier = "default", log: bool | None = None) -> Job:
        """The job of a request; same errors as `accept`."""
        return self.accept(endpoint, raw, tier=tier, log=log).job

    def accept(self, endpoint: str, raw: bytes, *, tier: Tier = "default", log: bool | None = None) -> Accepted:
        """Reads a request. Counting a long prompt takes a while: call it in a thread.

        Args:
            raw: the body, which the job keeps as it is.
            log: whether the job's tokens are kept for readers; None keeps them when the body asks for a stream.

        Raises:
            InvalidRequest: the body is not what the endpoint takes.
            ModelNotFound: the body names another model.
            ContextLengthExceeded: a prompt and the output that it asks for are longer than the model's context.
        """
        if tier not in TIERS:
            raise InvalidRequest(f"tier must be one of {', '.join(TIERS)}.", param="tier")
        body = parse_object(raw)
        _check_shape(endpoint, body)
        self._check_model(body)
        n, stream = _integer(body, "n", 1, _MAX_N) or 1, _flag(body, "stream")
        include_usage = _include_usage(body, stream)
        output = _output_limit(endpoint, body)
        prompts = self._counter(endpoint, body)
        for tokens in prompts:
            self._check_length(endpoint, tokens, output)
        job = Job(
            id=mint_job_id(),
            model=self._settings.model_name,
            endpoint=endpoint,
            body=raw,
            lane=classify(sum(prompts), self._settings.lanes).name,
            prompt_tokens=sum(prompts),
            reserve_tokens=n * sum(self._reserve(tokens, output) for tokens in prompts),
            choices=n * len(prompts),
            tier=tier,
            log=stream if log is None else log,
        )
        return Accepted(job, stream, include_usage)

    def _check_model(self, body: Mapping[str, Any]) -> None:
        name = body.get("model") or self._settings.model_name
        if not isinstance(name, str):
            raise InvalidRequest("model must be a string.", param="model")
        if name != self._settings.model_name:
            raise ModelNotFound(f"The model `{name}` does not exist.", param="model")

    def _check_length(self, endpoint: str, prompt_tokens: int, output: int | None) -> None:
        # A model that has no room left for one token of output has none for the prompt either.
        longest = self._max_model_len
        if longest is None or prompt_tokens + (output or 1) <= longest:
            return
        wish = f" and {output} of output" if output else ""
        raise ContextLengthExceeded(
            f"This model's maximum context length is {longest} tokens. However, your request has"
            f" {prompt_tokens} tokens of input{wish}. Please reduce its length.",
            param="messages" if endpoint == CHAT else "prompt",
        )

    def _reserve(self, prompt_tokens: int, output: int | None) -> int:
        wanted = prompt_tokens + (self._settings.expected_output_tokens if output is None else output)
        return wanted if self._max_model_len is None else min(wanted, self._max_model_len)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises InvalidRequest when it is none."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        # The parser's own text names a position; the exception holds the document, which belongs in no log.
        where = f": {error.msg}, character {error.pos}" if isinstance(error, json.JSONDecodeError) else "."
        raise InvalidRequest(f"The body is not valid JSON{where}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return body


def _check_shape(endpoint: str, body: Mapping[str, Any]) -> None:
    if endpoint == CHAT:
        _check_messages(body.get("messages"))
    elif endpoint == COMPLETIONS:
        _check_prompt(body.get("prompt"))
    else:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message.", param="messages")
    if not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise InvalidRequest("Each message must be an object with a role.", param="messages")


def _check_prompt(prompt: object) -> None:
    several = isinstance(prompt, list) and bool(prompt) and all(_is_prompt(each) for each in prompt)
    if not (several or _is_prompt(prompt)):
        raise InvalidRequest("prompt must be a string, a list of token ids, or a list of those.", param="prompt")


def _is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(each) is int for each in value)
    return isinstance(value, str)


def _integer(body: Mapping[str, Any], name: str, least: int, most: int = _MAX_INTEGER) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    # JSON's true is no number, although Python's is.
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"{name} must be an integer, {least} to {most}.", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false.", param=name)
    return bool(value)


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object.", param="stream_options")
    if not stream:
        # The worker streams on its own account, so the engine would not notice.
        raise InvalidRequest("stream_options is allowed only with stream=true.", param="stream_options")
    return _flag(options, "include_usage")


def _output_limit(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """The most tokens that a choice may have; None when the caller names no limit. 0 is how one asks for an echo."""
    limit = _integer(body, "max_tokens", 0)
    newer = _integer(body, "max_completion_tokens", 0) if endpoint == CHAT else None
    return limit if newer is None else newer
