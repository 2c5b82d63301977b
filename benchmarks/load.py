"""The load generator of `overhead.py`: one client for every server, in a process of its own. The last line is JSON.

It speaks OpenAI's chat dialect, so it measures any server that does.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from itertools import chain
from typing import Any

import click
import httpx
import uvloop

#: Each answer has exactly so many tokens, so that all servers do the same work.
OUTPUT_TOKENS = 64

#: The same for answers of which only the first text counts.
_FEW_TOKENS = 2

#: In the small model's vocabulary a token each. With the chat template, 20 of them are a prompt of some 50 tokens.
_WORDS = ("railway", "station", "journey", "distance", "platform", "passenger", "schedule", "conductor", "junction")
_PROMPT_WORDS = 20

#: Of a prompt whose first text is timed: the less there is to compute, the less the engine's own scatter hides.
_FEW_WORDS = 2

#: Seconds after which a system is idle again: vLLM's processes spin for one more after their last step.
_PAUSE_S = 1.2

_PATIENCE_S = 600


@click.group()
def main() -> None:
    """Put load on servers that speak OpenAI's dialect."""


@main.command()
@click.argument("url")
@click.option("--model", required=True)
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=32, show_default=True)
@click.option("--stream/--plain", default=True, show_default=True)
@click.option("--seed", default="load", show_default=True, help="Other seeds are other prompts.")
def throughput(url: str, model: str, requests: int, concurrency: int, stream: bool, seed: str) -> None:
    """Keep so many requests under way until all are answered, and count the output tokens."""
    texts = prompts(seed, requests)
    print(json.dumps(uvloop.run(_throughput(url, model, texts, concurrency, stream))))


@main.command()
@click.argument("urls", nargs=-1, required=True)
@click.option("--model", required=True)
@click.option("--requests", type=click.IntRange(1), default=20, show_default=True, help="Requests to each server.")
@click.option("--seed", default="load", show_default=True, help="Other seeds are other prompts.")
def first_token(urls: tuple[str, ...], model: str, requests: int, seed: str) -> None:
    """Ask servers in turn, one request at a time, and say when each was sent and when its first text came."""
    print(json.dumps(uvloop.run(_first_tokens(urls, model, requests, seed))))


def prompts(seed: str, count: int, words: int = _PROMPT_WORDS) -> list[str]:
    """Prompts of one length that differ from their start."""
    chance = random.Random(seed)
    return [" ".join([f"{seed} {n}", *chance.choices(_WORDS, k=words)]) for n in range(count)]


async def _throughput(url: str, model: str, texts: list[str], concurrency: int, stream: bool) -> dict[str, Any]:
    waiting = iter(texts)
    # The callers share the iterator: each takes the next prompt as soon as it has its answer.
    async with _client(url) as api:
        await _ask(api, model, "warm up", stream)
        begun = time.monotonic()
        answers = await asyncio.gather(*(_caller(api, model, waiting, stream) for _ in range(concurrency)))
        seconds = time.monotonic() - begun
    usages = list(chain.from_iterable(answers))
    tokens = sum(usage["completion_tokens"] for usage in usages)
    if (len(usages), tokens) != (len(texts), len(texts) * OUTPUT_TOKENS):
        raise click.ClickException(f"{url} gave {tokens} tokens in {len(usages)} answers to {len(texts)} requests")
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages) / len(usages)
    return {"seconds": seconds, "output_tokens": tokens, "prompt_tokens": prompt_tokens}


async def _caller(api: httpx.AsyncClient, model: str, waiting: Iterator[str], stream: bool) -> list[dict[str, Any]]:
    return [await _ask(api, model, text, stream) for text in waiting]


def _ask(api: httpx.AsyncClient, model: str, text: str, stream: bool) -> Awaitable[dict[str, Any]]:
    return _streamed_usage(api, _body(model, text, True)) if stream else _usage(api, _body(model, text, False))


async def _usage(api: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = (await api.post("/v1/chat/completions", json=body)).raise_for_status().json()
    usage: dict[str, Any] = answer["usage"]
    return usage


async def _streamed_usage(api: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The usage that the last chunk of a stream carries."""
    last: dict[str, Any] = {}
    async with api.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for chunk in _chunks(response):
            last = chunk
    usage: dict[str, Any] = last["usage"]
    return usage


async def _first_tokens(urls: tuple[str, ...], model: str, requests: int, seed: str) -> list[list[dict[str, Any]]]:
    """For each server its requests. Who is asked first changes at each turn."""
    answers: list[list[dict[str, Any]]] = [[] for _ in urls]
    clients = [_client(url) for url in urls]
    for turn, text in enumerate(prompts(seed, requests, _FEW_WORDS)):
        for index in sorted(range(len(urls)), reverse=bool(turn % 2)):
            await asyncio.sleep(_PAUSE_S)
            answers[index].append(await _first_token(clients[index], _body(model, text, True, _FEW_TOKENS)))
    for client in clients:
        await client.aclose()
    return answers


async def _first_token(api: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """When a request was sent and when its first text came, in Unix seconds, and the job that it was, if it was one."""
    sent_at, token_at = time.time(), None
    async with api.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for chunk in _chunks(response):
            if token_at is None and any(choice["delta"].get("content") for choice in chunk["choices"]):
                token_at = time.time()
    return {"sent_at": sent_at, "token_at": token_at, "job": response.headers.get("x-job-id")}


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream. A stream without its end, or an error in it, is none."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data != line:
            yield json.loads(data)
    raise click.ClickException("a stream stopped before its end")


def _body(model: str, text: str, stream: bool, tokens: int = OUTPUT_TOKENS) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits, trust_env=False)


if __name__ == "__main__":
    main()
