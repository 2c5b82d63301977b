"""How long a prompt is: by the model's own tokenizer and chat template, or estimated from its bytes."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

#: Tokens of each prompt of a body, by its endpoint; a chat is one prompt. The body's shape has been checked before.
Counter = Callable[[str, Mapping[str, Any]], list[int]]

#: What English text takes in most vocabularies. Other languages have more bytes a character and fewer a token.
_BYTES_PER_TOKEN = 4

#: What a chat template spends on each message: its role and the marks around it.
_TOKENS_PER_MESSAGE = 4


def load_counter(settings: Settings) -> Counter:
    """The counter for the configured model: its tokenizer, or `estimate` where no tokenizer is configured.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded.
    """
    name = settings.tokenizer or (settings.model if settings.engine == "vllm" else "")
    return partial(_count, _load_tokenizer(name)) if name else estimate


def estimate(endpoint: str, body: Mapping[str, Any]) -> list[int]:
    """One token for four bytes, at least one a prompt. Prompts that are token ids are counted exactly."""
    if endpoint == CHAT:
        marks = _TOKENS_PER_MESSAGE * len(body["messages"])
        return [marks + _estimate_text(_conversation(body))]
    return [_estimate_text(prompt) if isinstance(prompt, str) else len(prompt) for prompt in split_prompts(body)]


def split_prompts(body: Mapping[str, Any]) -> Sequence[str | list[int]]:
    """The prompts of a completion: one is a text or a list of token ids, several are a list of those."""
    prompt = body["prompt"]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


def _estimate_text(text: str) -> int:
    # A lone surrogate is valid JSON but no UTF-8; it counts as the mark that replaces it.
    return max(1, -(-len(text.encode(errors="replace")) // _BYTES_PER_TOKEN))


def _conversation(body: Mapping[str, Any]) -> str:
    """All the text of a chat, without a template."""
    tools = body.get("tools")
    texts = [_content(message) for message in body["messages"]]
    return "\n".join([*texts, json.dumps(tools, ensure_ascii=False)] if tools else texts)


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message; its content is a text, or a list of parts of which some carry text."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _load_tokenizer(name: str) -> Any:
    try:
        # Seconds to import, and no part of a light client.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise ConfigurationError(f"the tokenizer {name!r} needs transformers: install headway[api]") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no tokenizer at {name!r} (HEADWAY_TOKENIZER or HEADWAY_MODEL): {error}") from error


def _count(tokenizer: Any, endpoint: str, body: Mapping[str, Any]) -> list[int]:
    if endpoint == CHAT:
        return [_length(tokenizer, _render(tokenizer, body), special=False)]
    return [
        _length(tokenizer, prompt, special=body.get("add_special_tokens") is not False)
        if isinstance(prompt, str)
        else len(prompt)
        for prompt in split_prompts(body)
    ]


def _length(tokenizer: Any, text: str, *, special: bool) -> int:
    clean = text.encode(errors="replace").decode()
    return len(tokenizer(clean, add_special_tokens=special, verbose=False)["input_ids"])


def _render(tokenizer: Any, body: Mapping[str, Any]) -> str:
    """The prompt of a chat, as the model's template writes it."""
    extra = body.get("chat_template_kwargs")
    options = {k: v for k, v in extra.items() if k != "chat_template"} if isinstance(extra, Mapping) else {}
    try:
        return cast(
            "str",
            tokenizer.apply_chat_template(
                [{**message, "content": _content(message)} for message in body["messages"]],
                tools=body.get("tools"),
                add_generation_prompt=body.get("add_generation_prompt", True),
                continue_final_message=body.get("continue_final_message", False),
                tokenize=False,
                **options,
            ),
        )
    except Exception:
        # A template may refuse a conversation in any way that it likes; the engine will say so in its own words.
        return _conversation(body)
