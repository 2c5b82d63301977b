"""The whole system with real vLLM and the small real model, through the openai package: nothing here is simulated."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from headway.producer.embedded import MODEL_NAME
from headway.producer.stack import Stack
from headway.shared.settings import Settings
from monitoring import Page, complaints, expressions, prometheus

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None and "CI" not in os.environ, reason="vLLM is not installed"),
]

#: Seconds that one answer may take while vLLM runs on two busy cores.
ANSWER_S = 300

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """What `headway up` runs, with the embedded profile."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("up"), api_port=0, health_port=0, drain_s=1)
    async with Stack(settings, say=lambda _: None) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.api_url}/v1", api_key="none", max_retries=0, timeout=ANSWER_S
    ) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, max_tokens=16, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.id.startswith("chatcmpl-job-0-")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_stream_says_the_same(client: openai.AsyncOpenAI) -> None:
    # Given a plain answer
    plain = await client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, max_tokens=16, temperature=0)

    # If I ask for a stream with usage, I expect its text in pieces, and its usage
    stream = await client.chat.completions.create(
        model=MODEL_NAME, messages=CAPITAL, max_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert sum(bool(c.choices) for c in chunks) > 3
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == [MODEL_NAME]


async def test_completions_of_several_prompts(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL_NAME, prompt=["The sky is", "Grass is"], max_tokens=4, temperature=0
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.text for choice in answer.choices)


async def test_two_choices_with_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL_NAME, messages=CAPITAL, max_tokens=4, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs and choice.logprobs.content for choice in answer.choices)


async def test_structured_output(client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model=MODEL_NAME, messages=CAPITAL, max_tokens=40, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Paris", "Rome")


async def test_errors_before_the_queue(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="gpt-9", messages=CAPITAL)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model=MODEL_NAME, prompt="word " * 9000)
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_vllm_keep_their_own_words(client: openai.AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model=MODEL_NAME, messages=CAPITAL, temperature=-1, stream=stream)


async def test_the_prompt_is_counted_as_vllm_counts_it(client: openai.AsyncOpenAI, stack: Stack) -> None:
    # Given jobs of all three lanes
    async with httpx.AsyncClient(base_url=stack.api_url, timeout=ANSWER_S) as http:
        seen = {}
        for words in (3, 300, 1500):
            body = {"messages": [{"role": "user", "content": "naïve " * words}], "max_tokens": 1}
            job = (await http.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})).json()
            job = (await http.get(job["links"]["self"], headers={"Prefer": "wait=60"})).json()

            # I expect the API's count of each prompt to be the engine's
            assert job["status"] == "completed"
            assert job["prompt_tokens"] == job["result"]["usage"]["prompt_tokens"]
            seen[job["lane"]] = job["prompt_tokens"]
    assert list(seen) == ["short", "mid", "long"]


async def test_sixteen_at_once_are_one_crowd(client: openai.AsyncOpenAI) -> None:
    # If 16 callers ask at once, I expect 16 answers to their own questions
    numbers = range(16)
    answers = await asyncio.gather(
        *(
            client.completions.create(model=MODEL_NAME, prompt=f"{n} {n} {n} {n} {n}", max_tokens=4, temperature=0)
            for n in numbers
        )
    )
    assert sum(str(n) in answer.choices[0].text for n, answer in zip(numbers, answers, strict=True)) >= 12


async def _chat_in_each_lane(client: openai.AsyncOpenAI) -> None:
    prompts: list[Any] = [[{"role": "user", "content": "naïve " * words}] for words in (3, 300, 1500)]
    await asyncio.gather(
        *(client.chat.completions.create(model=MODEL_NAME, messages=prompt, max_tokens=3) for prompt in prompts)
    )


async def test_the_workers_page_has_vllms_metrics_and_ours(client: openai.AsyncOpenAI, stack: Stack) -> None:
    # Given a worker that has answered
    await _chat_in_each_lane(client)
    async with httpx.AsyncClient(timeout=ANSWER_S) as http:
        page = Page((await http.get(stack.health_url.replace("/health", "/metrics"))).text)

    # I expect its own counts, and beside them all of vLLM's that the dashboard shows
    assert page.sums("headway_attempts_total", "outcome")["completed"] >= 3
    assert complaints(page.text) == []
    shown = set(re.findall(r"\bvllm:\w+", " ".join(expressions())))
    assert shown
    assert {name.removesuffix("_total") for name in shown} < set(page.families)
    assert page.families["vllm:time_to_first_token_seconds"] == "histogram"


async def test_every_series_of_the_dashboard_has_data(client: openai.AsyncOpenAI, stack: Stack, tmp_path: Path) -> None:
    # Given a Prometheus that scrapes the API and the worker
    urls = {"headway-api": stack.api_url, "headway-worker": stack.health_url.removesuffix("/health")}
    with prometheus(tmp_path, {job: url.removeprefix("http://") for job, url in urls.items()}) as server:
        # If jobs of all lanes go through, and a request is refused, I expect an answer to all that the dashboard asks
        lacking = expressions()
        for _ in range(60):
            await _chat_in_each_lane(client)
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("gpt-9")
            if not (lacking := await asyncio.to_thread(server.lacking, expressions())):
                break
        assert not lacking
