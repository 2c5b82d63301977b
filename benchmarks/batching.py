"""What batching gains on this machine: 16 prompts at once against 16 one by one. The last line is JSON.

`--url` measures a Headway that runs already; else one is started here, as `headway demo` does.
"""

import asyncio
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console

from headway.producer.cli import one_line
from headway.producer.demo import INTERRUPTED, compare, demo_settings
from headway.producer.stack import Stack
from headway.producer.up import SIMULATED, until_signal


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Rounds, each with fresh prompts.")
@click.option("--engine", type=click.Choice(["vllm", "simulated"]), help="What generates the tokens.")
@click.option("--url", help="An API that runs already.")
def main(rounds: int, engine: str | None, url: str | None) -> None:
    """Measure what batching gains on this machine."""
    console = Console(highlight=False)
    try:
        model, results = asyncio.run(_measure(console, rounds, engine, url))
    except Exception as error:
        raise one_line(error) or error from error
    ratios = [result["ratio"] for result in results]
    line = {"benchmark": "batching", "machine": platform.machine(), "model": model, "rounds": results}
    print(json.dumps({**line, "ratio_median": round(statistics.median(ratios), 2), "ratio_least": min(ratios)}))


async def _measure(
    console: Console, rounds: int, engine: str | None, url: str | None
) -> tuple[str, list[dict[str, Any]]]:
    """The model's name, and the figures of each round."""
    async with _api(engine, url, console) as api:
        models = (await api.get("/v1/models")).raise_for_status().json()["data"]
        return models[0]["id"], [await compare(api, console, f"round-{n}") for n in range(1, rounds + 1)]
    sys.exit(INTERRUPTED)


@asynccontextmanager
async def _api(engine: str | None, url: str | None, console: Console) -> AsyncIterator[httpx.AsyncClient]:
    if url:
        async with httpx.AsyncClient(base_url=url, timeout=600) as api:
            yield api
        return
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        stack = Stack(demo_settings(engine, Path(folder)), say=lambda text: console.print(text, style="dim"))
        if stack.settings.engine == "simulated":
            console.print(SIMULATED, style="bold yellow")
        async with until_signal(stack), stack, httpx.AsyncClient(base_url=stack.api_url, timeout=600) as api:
            yield api


if __name__ == "__main__":
    main()
