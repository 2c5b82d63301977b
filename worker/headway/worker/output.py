"""What a run has produced so far, and how its job ends. No I/O."""

import json
import time
from typing import Any

from headway.shared.errors import HeadwayError, InvalidRequest, JobCancelled, error_body
from headway.shared.job import Job, Outcome, Status
from headway.worker.assemble import Assembler, as_stream
from headway.worker.engines.base import Chunk, Final, Request


class EngineFailed(HeadwayError):
    """The engine failed under the job each time it was tried."""

    code = "engine_failed"


class Output:
    """The answer of one attempt."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._assembler = Assembler(job.endpoint)
        self._aborted = False
        self._began_at = time.monotonic()
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self.tokens = 0

    def request(self) -> Request:
        """What the engine is asked.

        Raises:
            InvalidRequest: the body is no JSON object, or has expired.
        """
        try:
            body = json.loads(self._job.body)
        except ValueError as error:
            raise InvalidRequest("The body of this job is not JSON, or is not there any more.") from error
        if not isinstance(body, dict):
            raise InvalidRequest("The body of this job is no JSON object.")
        endpoint = self._job.endpoint
        return Request(self._job.id, endpoint, as_stream(endpoint, body) or body)

    def add(self, chunk: Chunk) -> bool:
        """Takes the next chunk of a stream; whether it is the first that has a token."""
        self._assembler.add(chunk.data)
        first = self._first_token_at is None
        if has_token := bool(chunk.data.get("choices")):
            self._last_token_at = time.monotonic()
            self._first_token_at = self._first_token_at or self._last_token_at
        self._look(chunk.data)
        return first and has_token

    def age_s(self) -> float:
        """Seconds since the attempt began."""
        return time.monotonic() - self._began_at

    def inter_token_s(self) -> float | None:
        """Mean seconds between two tokens of one choice; None unless they came in several chunks."""
        gaps = self.tokens // self._job.choices - 1
        if gaps < 1 or self._first_token_at in (None, self._last_token_at):
            return None
        return (self._last_token_at - self._first_token_at) / gaps

    def first_token_age_s(self) -> float | None:
        """Seconds since the first token; None for an answer that came whole."""
        return None if self._first_token_at is None else time.monotonic() - self._first_token_at

    def outcome(self, final: Final) -> Outcome | None:
        """How the job ends after the engine's last word; None when the engine has failed and it shall be tried again.

        2xx is an answer unless the engine was told to stop meanwhile ("abort", which comes with status 200). 4xx is the
        caller's error and final at once. Everything else is the engine's fault.
        """
        if final.body is not None and final.status_code < 300:
            self._look(json.loads(final.body))
        if final.status_code < 300 and not self._aborted:
            return Outcome(Status.COMPLETED, final.status_code, final.body or self._assembled())
        if 400 <= final.status_code < 500:
            return Outcome(Status.FAILED, final.status_code, final.body or b"")
        return None

    def given_up(self) -> Outcome:
        """The end of a job under which the engine has failed too often."""
        error = EngineFailed("The engine failed each time that it ran this job.")
        return Outcome(Status.FAILED, error.status_code, error_body(error))

    def cancelled(self) -> Outcome:
        """The end of a cancelled job; the text so far is kept beside the error."""
        error = JobCancelled("The job was cancelled while it ran.")
        partial = json.loads(self._assembled()) if self._first_token_at is not None else None
        return Outcome(Status.CANCELLED, error.status_code, error_body(error, partial=partial))

    def _assembled(self) -> bytes:
        # Half of a surrogate pair, which JSON can escape and UTF-8 cannot carry, stays escaped.
        return json.dumps(self._assembler.answer(), ensure_ascii=False).encode(errors="backslashreplace")

    def _look(self, data: Any) -> None:
        self._aborted |= any(choice.get("finish_reason") == "abort" for choice in data.get("choices") or ())
        self.tokens = (data.get("usage") or {}).get("completion_tokens") or self.tokens
