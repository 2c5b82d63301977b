"""The one seam between Headway and whatever generates tokens."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One run of an engine.

    Attributes:
        id: the job id; the engine's response id ends in it (`chatcmpl-<id>`).
        endpoint: the OpenAI path.
        body: the request body as the engine shall see it, `stream` included.
    """

    id: str
    endpoint: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One streamed chunk: its JSON bytes as the engine wrote them, and the same parsed."""

    raw: bytes
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Final:
    """The last thing that a run yields.

    Attributes:
        status_code: the engine's HTTP status; of an error inside a stream, that error's code.
        body: the JSON body of a plain answer or of an error; None after a stream that ended well.
        begun: False when the engine never began the request: the job goes back, and nothing counts against it. Who
            says so has waited before, or is dead; else the same job would come round again at once.
    """

    status_code: int
    body: bytes | None
    begun: bool = True


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can hold at once, and what one request may be at most."""

    slots: int
    kv_tokens: int
    max_model_len: int


class Engine(Protocol):
    """Runs requests; many at once, each ending on its own."""

    @property
    def alive(self) -> bool:
        """False once the engine has died: its owner stops pulling, publishes nothing final and exits."""
        ...

    def capacity(self) -> Capacity:
        """What the engine can hold, as the engine itself says."""
        ...

    def run(self, request: Request) -> AsyncGenerator[Chunk | Final, None]:
        """Yields the chunks, if the body asks for a stream, and then exactly one `Final`.

        Closing the iterator aborts the request inside the engine, before `aclose()` returns.
        """
        ...
