"""What travels: frozen values, no I/O.

A `Job` is one inference request as it was accepted. A `Delivery` is that job in one worker's hands; Redis
decides whose it is. A `Reply` is one entry of the job's reply channel. A `Record` is what Redis knows of a job.
"""

import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

#: What a job id looks like; the shard that holds the job's keys stands between the first two dashes.
JOB_ID = re.compile(r"job-(?P<shard>[A-Za-z0-9]+)-[A-Za-z0-9_-]+")

TIERS = ("priority", "default", "flex")
Tier = Literal["priority", "default", "flex"]


class Status(StrEnum):
    """OpenAI's own words; a job is `queued`, then `in_progress`, then has exactly one of the others for ever."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


def mint_job_id(shard: str = "0") -> str:
    """A new job id. The submitter mints it, so that a submit whose answer was lost can be repeated."""
    return f"job-{shard}-{secrets.token_hex(12)}"


def shard_of(job_id: str) -> str:
    """The shard in a job id, which is the hash tag of all its keys.

    Raises:
        ValueError: the text is not a job id.
    """
    match = JOB_ID.fullmatch(job_id)
    if match is None:
        raise ValueError(f"not a job id: {job_id!r}")
    return match["shard"]


@dataclass(frozen=True, slots=True)
class Job:
    """One inference request.

    Attributes:
        endpoint: the OpenAI path, such as `/v1/chat/completions`.
        body: the request body, the bytes that came in.
        prompt_tokens: what the lane was chosen by.
        reserve_tokens: KV tokens that it may need at most: (prompt + expected output) × choices.
        choices: how many sequences it runs, `n` × prompts.
        log: whether its tokens are kept for readers; a plain synchronous job that nobody watches keeps none.
    """

    id: str
    model: str
    endpoint: str
    body: bytes
    lane: str
    prompt_tokens: int
    reserve_tokens: int
    choices: int = 1
    tier: Tier = "default"
    log: bool = True


@dataclass(frozen=True, slots=True)
class Ticket:
    """A lane entry that a worker has read but not opened: enough to decide admission by, without the body."""

    job_id: str
    stream: str
    entry: str
    lane: str
    prompt_tokens: int
    reserve_tokens: int
    choices: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A job in one worker's hands.

    Attributes:
        attempt: the fencing token: every write for this delivery carries it.
        failures: how often the engine has failed under the job before.
        offset: how many replies the log held at the open; more than 0 means that an earlier attempt has published.
        cancel_requested: somebody wants the job cancelled.
        lane_wait_s: seconds from when it came into its lane, or came back there, to the open.
        age_s: seconds from when it was accepted to the open.
    """

    job: Job
    ticket: Ticket
    attempt: int
    failures: int
    offset: int
    cancel_requested: bool
    lane_wait_s: float
    age_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """One entry of a reply channel.

    Attributes:
        offset: 1 for the first entry, then + 1 each.
        kind: `chunk` (data is one OpenAI chunk as JSON), `restarted` (what came before is void) or `end` (data is
            the final status), which is always the last.
    """

    offset: int
    kind: Literal["chunk", "restarted", "end"]
    data: bytes

    @property
    def final(self) -> bool:
        return self.kind == "end"


@dataclass(frozen=True, slots=True)
class Record:
    """What Redis knows of a job. Instants are the server's, in Unix milliseconds; None where not reached yet."""

    id: str
    status: Status
    model: str
    endpoint: str
    lane: str
    tier: str
    prompt_tokens: int
    attempt: int
    failures: int
    offset: int
    log: bool
    cancel_requested: bool
    returned_for: str | None
    status_code: int | None
    worker: str | None
    batch: str | None
    batch_size: int | None
    batch_closed_by: str | None
    batch_window_ms: int | None
    output_tokens: int | None
    queued_at_ms: int
    started_at_ms: int | None
    first_token_at_ms: int | None
    finished_at_ms: int | None


@dataclass(frozen=True, slots=True)
class LaneState:
    """How full one stream of a lane is.

    Attributes:
        tier: a service tier, or `returned`.
        waiting: entries that no worker has read; those of cancelled jobs count until one does.
        running: entries that a worker holds.
        waiting_tokens: prompt tokens of the queued jobs.
        oldest_wait_s: how long the next entry has waited, in seconds; 0 when none waits.
    """

    model: str
    lane: str
    tier: str
    waiting: int
    running: int
    waiting_tokens: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: the terminal status, the HTTP status and the JSON body for its caller."""

    status: Status
    status_code: int
    body: bytes
