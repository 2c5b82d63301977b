"""What can go wrong, as a tree; the HTTP status and the OpenAI error code stand on the class.

HeadwayError
├── InvalidRequest            400
│   ├── ContextLengthExceeded 400, code context_length_exceeded
│   ├── ModelNotFound         404, code model_not_found
│   ├── JobNotFound           404, code job_not_found
│   └── LogExpired            410, code log_expired
├── JobCancelled              499, code cancelled
├── JobFailed                 the job ended otherwise than completed (client side)
├── StreamRestarted           the text read so far is void (client side)
├── QueueUnavailable          503: Redis is down, loading or refuses the write
│   └── QueueClosed           503: this process has closed its connection
└── ConfigurationError        a setting is wrong; raised at start
"""

import json
import traceback
from typing import Any, ClassVar


class HeadwayError(Exception):
    """The root; `param` names the request field at fault, where there is one."""

    status_code: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(HeadwayError):
    """The request cannot be served as it is; sending it again cannot help."""

    status_code = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output together are longer than the model's context."""

    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    """No such model is served here."""

    status_code = 404
    code = "model_not_found"


class JobNotFound(InvalidRequest):
    """No job has this id, or its record has expired."""

    status_code = 404
    code = "job_not_found"


class LogExpired(InvalidRequest):
    """The job has ended, and its log no longer has all the replies that the reader lacks; the result may be there."""

    status_code = 410
    code = "log_expired"


class JobCancelled(HeadwayError):
    """Somebody cancelled the job; 499 is nginx's word for a request that its client has closed."""

    status_code = 499
    type = "invalid_request_error"
    code = "cancelled"


class JobFailed(HeadwayError):
    """The job ended as failed, cancelled or expired; `outcome_status` says which, the message says why."""

    def __init__(self, message: str, *, outcome_status: str, http_status: int) -> None:
        super().__init__(message)
        self.outcome_status = outcome_status
        self.http_status = http_status


class StreamRestarted(HeadwayError):
    """The attempt that a reader followed could not be continued exactly; the job began again from its start."""


class QueueUnavailable(HeadwayError):
    """Redis did not take the command, or its answer was lost; the same call may be made again without harm."""

    status_code = 503
    code = "queue_unavailable"


class QueueClosed(QueueUnavailable):
    """The caller's own side has closed the queue; to try again cannot help."""


class ConfigurationError(HeadwayError):
    """A setting is wrong; the message names it and says what would be right."""


def frames(error: BaseException) -> str:
    """Where an error arose, for logs, without its text, which may quote a prompt."""
    return "".join(traceback.format_tb(error.__traceback__))


def error_body(error: HeadwayError, **further: Any) -> bytes:
    """The error in OpenAI's shape, as JSON; `further` stands beside `error`."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json.dumps({"error": fields, **further}).encode()
