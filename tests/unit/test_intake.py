"""From a request body to a job."""

import json
from typing import Any

import pytest

from headway.shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from headway.shared.intake import Intake
from headway.shared.job import shard_of
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT, COMPLETIONS, estimate

SETTINGS = Settings(
    engine="simulated", served_model="m", short_below=10, mid_to=20, expected_output_tokens=5, max_model_len=100
)
MESSAGES = [{"role": "user", "content": "hello"}]


def intake(max_model_len: int | None = 100) -> Intake:
    return Intake(SETTINGS, estimate, max_model_len)


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def ids(count: int) -> list[int]:
    return list(range(count))


def test_a_job_keeps_the_bytes_that_came_in() -> None:
    body = b'{ "prompt" : [1,2,3],\n "temperature":0.10, "unknown":"\\u00e4" }'
    job = intake().job(COMPLETIONS, body)
    assert job.body == body
    assert (job.endpoint, job.model, job.tier) == (COMPLETIONS, "m", "default")
    assert shard_of(job.id) == "0"


def test_each_job_has_its_own_id() -> None:
    assert intake().job(CHAT, raw(messages=MESSAGES)).id != intake().job(CHAT, raw(messages=MESSAGES)).id


@pytest.mark.parametrize(
    ("prompt", "lane"),
    [(ids(9), "short"), (ids(10), "mid"), (ids(20), "mid"), (ids(21), "long"), ([ids(11), ids(10)], "long")],
)
def test_all_prompts_together_choose_the_lane(prompt: Any, lane: str) -> None:
    assert intake().job(COMPLETIONS, raw(prompt=prompt)).lane == lane


@pytest.mark.parametrize(
    ("fields", "reserve", "choices"),
    [
        ({"prompt": ids(7)}, 7 + 5, 1),
        ({"prompt": ids(7), "max_tokens": 30}, 37, 1),
        ({"prompt": ids(7), "max_tokens": 0}, 7, 1),
        ({"prompt": ids(7), "max_tokens": 30, "n": 3}, 3 * 37, 3),
        ({"prompt": [ids(7), ids(2)], "max_tokens": 3, "n": 2}, 2 * (10 + 5), 4),
        ({"prompt": ids(98)}, 100, 1),
    ],
)
def test_what_a_job_reserves(fields: dict[str, Any], reserve: int, choices: int) -> None:
    job = intake().job(COMPLETIONS, raw(**fields))
    assert (job.reserve_tokens, job.choices) == (reserve, choices)


def test_a_chat_prefers_the_newer_name_of_its_limit() -> None:
    job = intake().job(CHAT, raw(messages=MESSAGES, max_tokens=9, max_completion_tokens=2))
    assert job.reserve_tokens == job.prompt_tokens + 2


def test_a_log_is_kept_for_streams_and_where_it_is_wanted() -> None:
    stream, plain = raw(messages=MESSAGES, stream=True), raw(messages=MESSAGES, stream=None)
    assert intake().job(CHAT, stream).log
    assert not intake().job(CHAT, plain).log
    assert intake().job(CHAT, plain, log=True).log


def test_how_the_caller_wants_to_be_answered() -> None:
    body = raw(messages=MESSAGES, stream=True, stream_options={"include_usage": True})
    accepted = intake().accept(CHAT, body, tier="flex")
    assert (accepted.stream, accepted.include_usage, accepted.job.tier) == (True, True, "flex")
    assert not intake().accept(CHAT, raw(messages=MESSAGES, stream=True)).include_usage


@pytest.mark.parametrize("model", [None, "", "m"])
def test_no_model_means_the_configured_one(model: str | None) -> None:
    assert intake().job(CHAT, raw(messages=MESSAGES, model=model)).model == "m"


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFound) as refused:
        intake().job(CHAT, raw(messages=MESSAGES, model="other"))
    assert (refused.value.status_code, refused.value.code, refused.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("fields", [{"prompt": ids(100)}, {"prompt": [ids(1), ids(99)], "max_tokens": 2}])
def test_what_cannot_fit_the_model_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 100 tokens") as refused:
        intake().job(COMPLETIONS, raw(**fields))
    assert refused.value.param == "prompt"


def test_the_last_token_of_the_context_can_be_used() -> None:
    assert intake().job(COMPLETIONS, raw(prompt=ids(99), max_tokens=1)).reserve_tokens == 100
    assert intake().job(COMPLETIONS, raw(prompt=ids(99))).reserve_tokens == 100


def test_an_unknown_context_length_refuses_nothing() -> None:
    assert intake(None).job(COMPLETIONS, raw(prompt=ids(1000))).reserve_tokens == 1005


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": MESSAGES, "model": 3}, "model"),
        ({"messages": MESSAGES, "n": 0}, "n"),
        ({"messages": MESSAGES, "n": 129}, "n"),
        ({"messages": MESSAGES, "n": True}, "n"),
        ({"messages": MESSAGES, "max_tokens": -1}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 2**31}, "max_tokens"),
        ({"messages": MESSAGES, "max_tokens": 10**4000}, "max_tokens"),
        ({"messages": MESSAGES, "max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"messages": MESSAGES, "stream": "yes"}, "stream"),
        ({"messages": MESSAGES, "stream": True, "stream_options": []}, "stream_options"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
    ],
)
def test_a_chat_of_the_wrong_shape_is_refused_with_the_field_at_fault(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        intake().job(CHAT, raw(**fields))
    assert (refused.value.param, refused.value.status_code) == (param, 400)


@pytest.mark.parametrize("prompt", [None, [], 5, {}, [1, "a"], [[]], [[1.5]], [True]])
def test_a_prompt_of_the_wrong_shape_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        intake().job(COMPLETIONS, raw(prompt=prompt))
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"\xff\xfe\xff", b"[" * 200_000, b'{"n": 1' + b"0" * 5000 + b"}"]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON"):
        intake().job(CHAT, body)


def test_what_is_wrong_with_the_json_is_said_without_quoting_it() -> None:
    with pytest.raises(InvalidRequest, match="character 13") as refused:
        intake().job(CHAT, b'{"messages": secret}')
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tier must be one of priority, default, flex") as refused:
        intake().job(CHAT, raw(messages=MESSAGES), tier="gold")  # type: ignore[arg-type]
    assert refused.value.param == "tier"


def test_an_unknown_endpoint_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="endpoint must be one of"):
        intake().job("/v1/embeddings", raw(input="x"))
