"""What a micro-batch gains: the same fixed mix of prompts at once, and one by one, over HTTP."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from headway.shared.errors import HeadwayError
from headway.shared.tokens import COMPLETIONS

#: How many prompts of how many words: with the embedded bounds (256 and 1024 tokens) they go to all three lanes.
MIX = ((8, 20), (5, 150), (3, 600))

#: Each answer has exactly so many tokens, so that two rounds do the same work.
OUTPUT_TOKENS = 64

#: In the small model's vocabulary two tokens each, and one token each. Three in four are of the first kind, so that 150
#: words are just more than 256 tokens and 600 just more than 1024.
_TWO_TOKENS_EACH = """
footplate pantograph catenary railcar stationmaster guardrail firebox sleepers freightcar shunting signalbox trackside
ballasts funicular culverts
"""
_ONE_TOKEN_EACH = "railway station journey distance platform passenger schedule conductor junction carriage"

#: Seconds that one request for a job waits for its end.
_WAIT_S = 60


class MeasurementFailed(HeadwayError):
    """A job of the measurement did not complete."""


@dataclass(frozen=True, slots=True)
class Round:
    """Some jobs, as `/v1/jobs/{id}` shows them after their end, and the seconds that they took together."""

    jobs: list[dict[str, Any]]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(job["output_tokens"] for job in self.jobs)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def prompts(seed: str) -> list[str]:
    """The mix. Two prompts, of one seed or of two, differ from the start, so no prefix cache helps."""
    return [
        _prompt(f"{seed}-{words}-{number}", words)
        # The long ones go last, so that the table reads from short to long.
        for count, words in MIX
        for number in range(count)
    ]


async def together(api: httpx.AsyncClient, texts: Sequence[str]) -> Round:
    """Submits all prompts at once.

    Raises:
        MeasurementFailed: a job did not complete.
        httpx.HTTPError: the API does not answer, or not well.
    """
    begun = time.monotonic()
    jobs = await asyncio.gather(*(_run(api, text) for text in texts))
    return Round(jobs, time.monotonic() - begun)


async def one_by_one(api: httpx.AsyncClient, texts: Sequence[str], tell: Callable[[int], None]) -> Round:
    """Submits each prompt when the one before has ended; same errors as `together`.

    Args:
        tell: is given the number of prompts done, after each.
    """
    begun = time.monotonic()
    jobs = []
    for text in texts:
        jobs.append(await _run(api, text))
        tell(len(jobs))
    return Round(jobs, time.monotonic() - begun)


def summary(at_once: Round, serial: Round) -> dict[str, Any]:
    """The two rates and their ratio, for the JSON line."""
    return {
        "jobs": len(at_once.jobs),
        "tokens": at_once.tokens,
        "together_tokens_per_s": round(at_once.tokens_per_s, 1),
        "one_by_one_tokens_per_s": round(serial.tokens_per_s, 1),
        "ratio": round(at_once.tokens_per_s / serial.tokens_per_s, 2),
    }


def _prompt(seed: str, words: int) -> str:
    # The seed stands in front: words alone could begin alike by chance.
    chance, one, two = random.Random(seed), _ONE_TOKEN_EACH.split(), _TWO_TOKENS_EACH.split()
    return " ".join([seed, *(chance.choice(one if n % 4 == 3 else two) for n in range(words - 1))])


async def _run(api: httpx.AsyncClient, text: str) -> dict[str, Any]:
    # Not a chat: its template would begin all prompts alike.
    body = {"prompt": text, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    accepted = await api.post("/v1/jobs", json={"endpoint": COMPLETIONS, "body": body})
    job = accepted.raise_for_status().json()
    while job["status"] in ("queued", "in_progress"):
        answer = await api.get(job["links"]["self"], headers={"Prefer": f"wait={_WAIT_S}"}, timeout=_WAIT_S + 10)
        job = answer.raise_for_status().json()
    if job["status"] != "completed":
        raise MeasurementFailed(f"job {job['id']} ended as {job['status']}: {job['error']}")
    return dict(job)
