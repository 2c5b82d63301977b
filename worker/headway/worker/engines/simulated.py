"""An engine without a model: real admission, real steps, real streams, invented words.

For tests, load tests and capacity simulation. One step loop serves all requests (`step_model`) and takes
the time that its `Constants` say; every response says what it is (`simulated_openai`). It is never a
default.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headway.shared.errors import ConfigurationError
from headway.worker.engines.base import Capacity, Chunk, Final, Request
from headway.worker.engines.simulated_openai import (
    Answer,
    Contract,
    Count,
    Order,
    Refused,
    count_bytes,
    error,
    token,
)
from headway.worker.engines.step_model import INSTANT, Constants, Model, Step

__all__ = ["INSTANT", "Constants", "SimulatedEngine", "token"]

_CONSTANTS = Constants()
_DEAD = "The simulated engine is dead."


@dataclass(slots=True, eq=False)
class _Run:
    answer: Answer
    sequences: tuple[int, ...]
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedEngine:
    """Implements `Engine`. Use `start`, which also runs and ends its step loop."""

    def __init__(self, contract: Contract, model: Model, slots: int) -> None:
        self._contract = contract
        self._model = model
        self._slots = slots
        self._alive = True
        self._work = asyncio.Event()
        self._owners: dict[int, tuple[_Run, int]] = {}

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        *,
        model: str = "headway-simulated",
        slots: int = 64,
        kv_tokens: int = 262_144,
        max_model_len: int = 32_768,
        constants: Constants = _CONSTANTS,
        count: Count = count_bytes,
    ) -> AsyncIterator["SimulatedEngine"]:
        """A running engine; what still runs at the exit gets the error of a dead engine.

        Raises:
            ConfigurationError: the longest request would not fit the KV memory, or the model refuses the numbers.
        """
        steps = Model(slots=slots, kv_tokens=kv_tokens, constants=constants)
        if max_model_len > steps.kv_tokens:
            raise ConfigurationError(f"max_model_len {max_model_len} exceeds the {steps.kv_tokens} KV tokens")
        engine = cls(Contract(model=model, max_model_len=max_model_len, count=count), steps, slots)
        loop = asyncio.create_task(engine._loop())
        try:
            yield engine
        finally:
            engine.die()
            loop.cancel()
            await asyncio.wait([loop])
            if not loop.cancelled():
                loop.result()

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self._model.running

    @property
    def waiting(self) -> int:
        """Sequences inside the engine that hold no slot, for want of slots or KV blocks."""
        return self._model.waiting

    @property
    def kv_tokens_free(self) -> int:
        return self._model.kv_tokens_free

    def capacity(self) -> Capacity:
        return Capacity(self._slots, self._model.kv_tokens, self._contract.max_model_len)

    def die(self) -> None:
        """Dies as an engine process does: every request, running or to come, gets a 500."""
        self._alive = False
        self._work.set()
        for run, _ in self._owners.values():
            run.changed.set()

    async def run(self, request: Request) -> AsyncGenerator[Chunk | Final, None]:
        """See `Engine.run`. Death ends a stream with a `Final` of status 500 that carries the error."""
        try:
            order = self._contract.accept(request)
        except Refused as refused:
            yield refused.final()
            return
        run = self._begin(order)
        try:
            while self._alive:
                await run.changed.wait()
                run.changed.clear()
                # Asked before the chunks are handed out: what is generated while the reader holds one of
                # them comes with the next round.
                complete = run.answer.complete
                for chunk in run.answer.news():
                    yield chunk
                if complete:
                    yield run.answer.final()
                    return
            yield error(500, _DEAD)
        finally:
            self._end(run)

    def _begin(self, order: Order) -> _Run:
        sequences = tuple(
            self._model.admit(prompt_tokens, order.max_tokens)
            for prompt_tokens in order.prompts
            for _ in range(order.n)
        )
        run = _Run(Answer(order, created=int(time.time())), sequences)
        self._owners.update((sequence, (run, choice)) for choice, sequence in enumerate(sequences))
        self._work.set()
        return run

    def _end(self, run: _Run) -> None:
        for sequence in run.sequences:
            self._model.remove(sequence)
            del self._owners[sequence]

    async def _loop(self) -> None:
        """Takes steps, with one timed wait each, as long as there is work.

        A step is due its duration after the last one was *due*, not after it came: late wake-ups do not add up.
        """
        clock = asyncio.get_running_loop()
        due = clock.time()
        try:
            while self._alive:
                if not self._model.busy:
                    self._work.clear()
                    await self._work.wait()
                    due = clock.time()
                step = self._model.step()
                due += step.duration_s
                await asyncio.sleep(max(0.0, due - clock.time()))
                self._publish(step)
        finally:
            # However the loop ends, nobody shall wait for its next step.
            self.die()

    def _publish(self, step: Step) -> None:
        for sequence in step.tokens:
            # A request may have been closed while the step took its time.
            if owner := self._owners.get(sequence):
                run, choice = owner
                run.answer.generated[choice] += 1
                run.changed.set()
