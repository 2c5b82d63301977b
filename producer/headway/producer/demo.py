"""`headway demo`: the whole of Headway on this machine, a real answer, and what a micro-batch gains."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from headway.producer.client import text_of
from headway.producer.measure import OUTPUT_TOKENS, Round, one_by_one, prompts, summary, together
from headway.producer.stack import Stack
from headway.producer.up import SIMULATED, stack_settings, until_signal
from headway.shared.settings import Settings
from headway.shared.tokens import CHAT

QUESTION = "What is the capital of France, and what is it known for?"

#: The exit status of a program that Ctrl-C has ended.
INTERRUPTED = 130


@click.command()
@click.option("--engine", type=click.Choice(["vllm", "simulated"]), help="What generates the tokens.")
def main(engine: str | None) -> None:
    """Start everything here, ask a real model, and show what a micro-batch gains.

    It has its own data folder and free ports, and leaves nothing behind. The last line is JSON.
    """
    with tempfile.TemporaryDirectory(prefix="headway-demo-") as folder:
        done = asyncio.run(_demo(demo_settings(engine, Path(folder))))
    sys.exit(0 if done else INTERRUPTED)


def demo_settings(engine: str | None, folder: Path) -> Settings:
    """The settings of the environment, with the demo's own data folder and free ports."""
    return stack_settings(engine, data_dir=folder, api_port=0, health_port=0)


async def _demo(settings: Settings) -> bool:
    console = Console(highlight=False)
    stack = Stack(settings, say=lambda text: console.print(text, style="dim", markup=False, soft_wrap=True))
    if stack.settings.engine == "simulated":
        console.print(SIMULATED, style="bold yellow")
    async with until_signal(stack), stack:
        async with httpx.AsyncClient(base_url=stack.api_url, timeout=600, trust_env=False) as api:
            await _ask(api, console)
            result = await compare(api, console, "demo")
        settings = stack.settings
        print(json.dumps({"engine": settings.engine, "model": settings.model_name, **result}), flush=True)
        return True
    return False


async def _ask(api: httpx.AsyncClient, console: Console) -> None:
    console.print(f"\n[bold]{QUESTION}[/bold]")
    async for piece in _answer(api, QUESTION):
        console.print(piece, end="", markup=False, soft_wrap=True)
    console.print("\n")


async def _answer(api: httpx.AsyncClient, question: str) -> AsyncIterator[str]:
    """The pieces of a streamed answer, as they come."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 96, "temperature": 0, "stream": True}
    async with api.stream("POST", CHAT, json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if line.startswith("data: ") and data != "[DONE]":
                yield text_of(json.loads(data))


async def compare(api: httpx.AsyncClient, console: Console, seed: str) -> dict[str, Any]:
    """Runs the mix at once and one by one, shows both, and gives the figures.

    Raises:
        MeasurementFailed: a job did not complete.
        httpx.HTTPError: the API does not answer, or not well.
    """
    texts = prompts(f"{seed}-together")
    console.print(f"{len(texts)} prompts at once, {OUTPUT_TOKENS} tokens each", style="dim")
    at_once = await together(api, texts)
    console.print(_table(at_once))
    with console.status("the same number one by one") as status:
        serial = await one_by_one(
            api,
            prompts(f"{seed}-serial"),
            lambda done: status.update(f"the same number one by one: {done} of {len(texts)}"),
        )
    result = summary(at_once, serial)
    console.print(f"together    {at_once.tokens_per_s:7.1f} tokens/s ({at_once.seconds:.1f} s)")
    console.print(f"one by one  {serial.tokens_per_s:7.1f} tokens/s ({serial.seconds:.1f} s)")
    console.print(f"ratio       {result['ratio']:7.1f}", style="bold")
    return result


def _table(at_once: Round) -> Table:
    table = Table("lane", "prompt tokens", "wait", "first token", "tokens", "micro-batch", "its size", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for job in at_once.jobs:
        table.add_row(*_row(job))
    return table


def _row(job: dict[str, Any]) -> list[str]:
    times, batch = job["timeline"], job["batch"]
    # A batch is named after its worker, of which there is one here.
    number = batch["name"].rpartition("/")[2]
    return [
        job["lane"],
        str(job["prompt_tokens"]),
        _seconds(times["queued_at_ms"], times["started_at_ms"]),
        _seconds(times["queued_at_ms"], times["first_token_at_ms"]),
        str(job["output_tokens"]),
        f"#{number}",
        str(batch["size"]),
    ]


def _seconds(start_ms: int, end_ms: int | None) -> str:
    return "" if end_ms is None else f"{(end_ms - start_ms) / 1000:.2f} s"
