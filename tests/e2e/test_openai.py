"""The openai package against the whole system, with the simulated engine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from headway.worker.engines.simulated_openai import FINGERPRINT, text
from helpers import PATIENCE_S
from programs import MAX_MODEL_LEN, MODEL, Stack

MESSAGES: Any = [{"role": "user", "content": "Which train is next?"}]


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.api}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def expected(response_id: str, tokens: int, choice: int = 0) -> str:
    """What the simulated engine says to the job behind a response."""
    return text(response_id.partition("-")[2], choice, 0, tokens)


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7)
    [choice] = answer.choices
    assert choice.message.content == expected(answer.id, 7)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.model) == (7, MODEL)


def test_the_synchronous_client_too(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.api}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=3)
    assert answer.choices[0].message.content == expected(answer.id, 3)


async def test_every_answer_says_that_it_is_simulated(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert answer.system_fingerprint == FINGERPRINT


@pytest.mark.parametrize("usage", [True, False])
async def test_streamed_chat(client: openai.AsyncOpenAI, usage: bool) -> None:
    options: Any = {"stream_options": {"include_usage": True}} if usage else {}
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=40, stream=True, **options)
    chunks = [chunk async for chunk in stream]
    # I expect the text in pieces, and the usage, alone and last, only where it was asked for
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == expected(chunks[0].id, 40)
    assert len(chunks) > 5
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == ([40] if usage else [])
    assert [bool(chunk.choices) for chunk in chunks[-2:]] == [True, not usage]


async def test_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5)
    assert [choice.text for choice in answer.choices] == [expected(answer.id, 5)]


async def test_streamed_completion(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="Once", max_tokens=20, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(chunks[0].id, 20)


@pytest.mark.parametrize("prompt", [["one", "two", "three"], [[1, 2], [3], [4, 5]]])
async def test_a_list_of_prompts(client: openai.AsyncOpenAI, prompt: Any) -> None:
    answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
    assert [choice.text for choice in answer.choices] == [expected(answer.id, 4, i) for i in range(3)]


async def test_two_choices(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, n=2)
    assert [choice.message.content for choice in answer.choices] == [expected(answer.id, 4, i) for i in range(2)]


async def test_two_streamed_choices(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, n=2, stream=True)
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == expected(chunks[0].id, 9, index)


async def test_models(client: openai.AsyncOpenAI) -> None:
    [model] = (await client.models.list()).data
    assert (model.id, model.owned_by) == (MODEL, "headway-simulated-engine")
    assert model.model_dump()["max_model_len"] == MAX_MODEL_LEN
    assert await client.models.retrieve(MODEL) == model


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_model_is_not_found(client: openai.AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="gpt-0", messages=MESSAGES, stream=stream)
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_a_bad_request(client: openai.AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, prompt=[1] * MAX_MODEL_LEN, stream=stream)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wrong", [{"n": 0}, {"max_tokens": -1}, {"temperature": -1}])
async def test_bad_parameters_are_a_bad_request(
    client: openai.AsyncOpenAI, stream: bool, wrong: dict[str, Any]
) -> None:
    # Given a fault that the API sees, or (the temperature) one that only the engine sees
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream, **wrong)
    assert refused.value.param in wrong


async def test_the_request_id_is_the_job_id(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert raw.parse().id == f"chatcmpl-{raw.headers['x-job-id']}"
    assert raw.headers["x-request-id"] == raw.headers["x-job-id"]
    assert raw.headers["x-queue-class"] == "short"


async def test_many_at_once_get_each_their_own_answer(client: openai.AsyncOpenAI) -> None:
    async def ask(tokens: int) -> bool:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=tokens)
        return answer.choices[0].message.content == expected(answer.id, tokens)

    assert all(await asyncio.gather(*(ask(tokens) for tokens in range(1, 31))))
