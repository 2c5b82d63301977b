"""Counting prompt tokens."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tiny_model
from headway.shared.errors import ConfigurationError
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT, COMPLETIONS, Counter, estimate, load_counter

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def count(tmp_path_factory: pytest.TempPathFactory) -> Counter:
    """The counter of a tokenizer that has one token a byte."""
    folder = tiny_model.make(tmp_path_factory.mktemp("tiny"))
    return load_counter(Settings(engine="simulated", tokenizer=str(folder)))


def rendered(*texts: str) -> int:
    """Tokens of a chat of user messages in the tiny model's template; its marks are one token each."""
    marks = len("user\n") + len("\n") + 2
    return sum(marks + len(text.encode()) for text in texts) + 1 + len("assistant\n")


def test_a_chat_is_counted_with_the_template(count: Counter) -> None:
    assert count(CHAT, HELLO) == [rendered("hello")]


def test_content_in_parts_counts_like_one_text(count: Counter) -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "b"},
    ]
    assert count(CHAT, {"messages": [{"role": "user", "content": parts}]}) == [rendered("a\nb")]


def test_the_generation_prompt_can_be_left_out(count: Counter) -> None:
    without = count(CHAT, {**HELLO, "add_generation_prompt": False})
    assert without == [rendered("hello") - 1 - len("assistant\n")]


@pytest.mark.parametrize("extra", [{"tokenize": True}, {"chat_template": "{{ 1 // 0 }}"}, "no object"])
def test_template_arguments_of_the_caller_never_break_the_count(count: Counter, extra: object) -> None:
    # Given arguments that the template function refuses, or a template of the caller's own
    [tokens] = count(CHAT, {**HELLO, "chat_template_kwargs": extra})
    # I expect a count of the text, and that a foreign template was not run
    assert len("hello") <= tokens <= rendered("hello")


def each_prompt(count: Callable[[str, dict[str, Any]], list[int]], prompt: object) -> list[int]:
    return count(COMPLETIONS, {"prompt": prompt})


def test_the_prompts_of_a_completion_are_counted_each(count: Counter) -> None:
    assert each_prompt(count, "größer") == [8]
    assert each_prompt(count, ["a", "bcd"]) == [1, 3]
    assert each_prompt(count, [5, 6, 7]) == [3]
    assert each_prompt(count, [[5, 6], [7]]) == [2, 1]


def test_half_a_surrogate_pair_is_counted(count: Counter) -> None:
    assert each_prompt(count, "a\ud800") == [2]
    assert each_prompt(estimate, "a\ud800") == [1]


def test_threads_may_count_at_once(count: Counter) -> None:
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda _: count(CHAT, HELLO), range(64)))
    assert counts == [[rendered("hello")]] * 64


def test_without_a_tokenizer_four_bytes_are_a_token() -> None:
    count = load_counter(Settings(engine="simulated", model="just a name"))
    assert each_prompt(count, "x" * 400) == [100]
    assert each_prompt(count, ["x" * 5, ""]) == [2, 1]
    assert each_prompt(count, [[1, 2, 3], [4]]) == [3, 1]
    assert count(CHAT, HELLO) == [4 + 2]


def test_the_estimate_sees_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 400}}]
    [tokens] = estimate(CHAT, {**HELLO, "tools": tools})
    assert tokens > 100


def test_a_missing_tokenizer_is_a_setting_at_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="HEADWAY_TOKENIZER"):
        load_counter(Settings(engine="simulated", tokenizer=str(tmp_path)))
