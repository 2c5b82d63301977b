"""How a job is run inside the worker, and how its plain answer is put together again. Pure.

A job that can be continued by another worker is run as a stream, however its caller asked for it, so that partial
text, checkpoints and late readers work for it. The plain answer is then assembled to what vLLM itself says to
the same body without `stream`.
"""

from collections.abc import Mapping
from typing import Any

from headway.shared.tokens import CHAT, COMPLETIONS

#: Body fields that leave a job continuable whatever their value. A field that is not named here, such as one of a
#: newer vLLM, makes its job run as it was asked: late text is a smaller harm than a wrong answer.
CONTINUABLE_FIELDS = frozenset(
    {
        "ignore_eos",
        "logit_bias",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "min_p",
        "min_tokens",
        "model",
        "priority",
        "prompt",
        "prompt_cache_key",
        "repetition_penalty",
        "safety_identifier",
        "service_tier",
        "stop_token_ids",
        "store",
        "stream",
        "stream_interval",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
        "user",
    }
)

#: Fields that clients often send with the value that does nothing; with another value the job cannot be continued.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "logprobs": (False,),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "tool_choice": ("none",),
}


def as_stream(endpoint: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The body with which the engine runs a job as a stream that ends in a usage chunk.

    None means that the job runs as it was asked: its caller wants no stream and it could not be continued, or
    the engine shall refuse what is wrong with it.
    """
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping) or not (body.get("stream") is True or _continuable(endpoint, body)):
        return None
    return {**body, "stream": True, "stream_options": {**options, "include_usage": True}}


def _continuable(endpoint: str, body: Mapping[str, Any]) -> bool:
    if body.get("stream_options"):
        return False  # Without `stream` it is an error, and vLLM's to report.
    return _one_text_prompt(endpoint, body) and all(
        value is None or name in CONTINUABLE_FIELDS or _neutral(name, value) for name, value in body.items()
    )


def _neutral(name: str, value: object) -> bool:
    # In Python False == 0 and True == 1, but `logprobs: 0` asks for logprobs and `logprobs: false` does not.
    return any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL_VALUES.get(name, ()))


def _one_text_prompt(endpoint: str, body: Mapping[str, Any]) -> bool:
    if endpoint == COMPLETIONS:
        return isinstance(body.get("prompt"), str)
    messages = body.get("messages")
    return endpoint == CHAT and isinstance(messages, list) and all(_is_text(message) for message in messages)


def _is_text(message: object) -> bool:
    match message:
        case {"content": str()}:
            return True
        case {"content": [*parts]}:
            return all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)
        case _:
            return False


#: The fields of vLLM's plain answers in their order; it writes those that do not apply as null.
CHAT_NULLS: Mapping[str, None] = dict.fromkeys(
    [
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
        "prompt_logprobs",
        "prompt_token_ids",
        "prompt_text",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
    ]
)
CHAT_CHOICE_NULLS: Mapping[str, None] = dict.fromkeys(
    ["index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"]
)
MESSAGE_NULLS: Mapping[str, None] = dict.fromkeys(
    ["role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"]
)
COMPLETION_NULLS: Mapping[str, None] = dict.fromkeys(
    [
        "id",
        "object",
        "created",
        "model",
        "choices",
        "service_tier",
        "system_fingerprint",
        "usage",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
    ]
)
COMPLETION_CHOICE_NULLS: Mapping[str, None] = dict.fromkeys(
    [
        "index",
        "text",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "token_ids",
        "prompt_logprobs",
        "prompt_token_ids",
        "routed_experts",
    ]
)
USAGE_NULLS: Mapping[str, None] = dict.fromkeys(
    ["prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"]
)
PROMPT_DETAIL_NULLS: Mapping[str, None] = dict.fromkeys(["cached_tokens", "created_cache_tokens", "multimodal_tokens"])


class Assembler:
    """Puts the chunks of one job together to the plain answer; good at any moment for the text so far."""

    def __init__(self, endpoint: str) -> None:
        self._chat = endpoint == CHAT
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Takes the next chunk, in the order of the stream."""
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                self._head[name] = value
        for choice in chunk.get("choices", ()):
            self._choices.setdefault(choice["index"], _Choice()).add(choice)

    @property
    def usage(self) -> dict[str, Any] | None:
        """The token counts, once the engine has told them."""
        return _usage(self._head["usage"]) if "usage" in self._head else None

    def answer(self) -> dict[str, Any] | None:
        """The `chat.completion` or `text_completion`; None before the first chunk.

        Of an unfinished stream it has the text so far, a null `finish_reason` and, as a rule, a null `usage`.
        """
        if not self._head:
            return None
        choices = [choice.answer(index, self._chat) for index, choice in sorted(self._choices.items())]
        return {
            **(CHAT_NULLS if self._chat else COMPLETION_NULLS),
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": choices,
            "usage": self.usage,
        }


class _Choice:
    """One choice as it grows. Texts are kept in pieces, so that a long answer costs no quadratic joining."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._role = "assistant"
        self._texts: dict[str, list[str]] = {}
        self._tool_calls: dict[int, dict[str, Any]] = {}

    def add(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self._role = delta.get("role") or self._role
        self._add_text("text", choice.get("text"))
        for name in ("content", "reasoning", "refusal"):
            self._add_text(name, delta.get(name))
        for call in delta.get("tool_calls") or ():
            _merge_tool_call(self._tool_calls.setdefault(call["index"], _tool_call()), call)
        for name in choice.keys() - {"index", "text", "delta"}:
            _grow(self._fields, name, choice[name])

    def _add_text(self, name: str, piece: str | None) -> None:
        if piece:
            self._texts.setdefault(name, []).append(piece)

    def _text(self, name: str) -> str | None:
        return "".join(self._texts[name]) if name in self._texts else None

    def answer(self, index: int, chat: bool) -> dict[str, Any]:
        if chat:
            own = {"index": index, "message": self._message()}
            return {**CHAT_CHOICE_NULLS, **self._fields, **own}
        return {
            **COMPLETION_CHOICE_NULLS,
            **self._fields,
            "index": index,
            "text": self._text("text") or "",
        }

    def _message(self) -> dict[str, Any]:
        said = {name: self._text(name) for name in ("content", "reasoning", "refusal")}
        message: dict[str, Any] = {**MESSAGE_NULLS, "role": self._role, **said}
        if self._tool_calls:
            message["tool_calls"] = [call for _, call in sorted(self._tool_calls.items())]
        elif message["content"] is None and message["reasoning"] is None:
            message["content"] = ""  # An empty answer is a text; none is only beside reasoning or tool calls.
        return message


def _grow(own: dict[str, Any], name: str, new: Any) -> None:
    """Lists grow (token ids, logprobs), also inside objects; of anything else the last that is not null stays."""
    old = own.get(name)
    if isinstance(new, list):
        own[name] = [] if old is None else old
        own[name].extend(new)
    elif isinstance(new, Mapping):
        inner = own[name] = {} if old is None else old
        for key, value in new.items():
            _grow(inner, key, value)
    else:
        own[name] = old if new is None else new


def _tool_call() -> dict[str, Any]:
    return {"id": None, "type": "function", "function": {"name": None, "arguments": ""}}


def _merge_tool_call(call: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """The name and the id come once, the arguments in pieces."""
    function = delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["function"]["name"] = function.get("name") or call["function"]["name"]
    call["function"]["arguments"] += function.get("arguments") or ""


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM leaves nulls out of the usage chunk, but not out of the plain answer."""
    filled = {**USAGE_NULLS, **usage}
    if filled["prompt_tokens_details"] is not None:
        filled["prompt_tokens_details"] = {**PROMPT_DETAIL_NULLS, **filled["prompt_tokens_details"]}
    return filled
