"""How a continuous-batching engine spends its steps: pure, without a clock.

The rules are those of vLLM's scheduler, first come first served, without prefix caching and without a
threshold for long prompts. Each step has one budget of tokens. Running sequences are served first, in the
order in which they started: one token for a decoding sequence, as much of its prompt as the budget holds
for another. What remains of the budget starts waiting sequences. KV memory is counted in whole blocks;
when a running sequence needs a block and none is free, the sequence that started last loses all of its
own, goes back to the head of the waiting ones and later computes its prompt and what it had generated
again.
"""

from collections import deque
from dataclasses import dataclass, field

from headway.shared.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What an engine's step costs and holds.

    The defaults are round numbers of the order of an 8B model on one data-centre GPU, not a measurement.

    Attributes:
        step_s: seconds that a step takes whatever is in it.
        prefill_token_s: seconds for each prompt token computed, recomputed ones included.
        decode_sequence_s: seconds for each sequence that decodes one token.
        step_tokens: most tokens computed in one step (vLLM's `max_num_batched_tokens`).
        block_tokens: tokens in one KV block.
    """

    step_s: float = 0.008
    prefill_token_s: float = 0.000_04
    decode_sequence_s: float = 0.000_05
    step_tokens: int = 2048
    block_tokens: int = 16

    def duration_s(self, prefill_tokens: int, decoding: int) -> float:
        """Seconds that a step with this much in it takes."""
        return self.step_s + self.prefill_token_s * prefill_tokens + self.decode_sequence_s * decoding


#: An engine whose steps take no time: for tests of everything but time.
INSTANT = Constants(step_s=0, prefill_token_s=0, decode_sequence_s=0)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did. Sequences are named by the ids that `Model.admit` gave them.

    Attributes:
        tokens: the sequences that got their next token.
        finished: those of them for which it was the last.
        preempted: the sequences that lost their KV blocks and wait again.
        prefill_tokens: prompt tokens computed, over all sequences.
        decoding: sequences that decoded.
    """

    tokens: tuple[int, ...]
    finished: tuple[int, ...]
    preempted: tuple[int, ...]
    prefill_tokens: int
    decoding: int
    duration_s: float


@dataclass(slots=True, eq=False)
class _Sequence:
    id: int
    prompt_tokens: int
    output_tokens: int
    generated: int = 0
    computed: int = 0

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be generated."""
        return self.prompt_tokens + self.generated - self.computed

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.missing == 1


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    budget: int
    served: list[_Sequence] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    decoding: int = 0


class Model:
    """The state of a simulated engine: which sequences wait, which run, and how much KV memory is free.

    Raises:
        ConfigurationError: the step budget cannot give each slot one token, or there is less than one block.
    """

    def __init__(self, *, slots: int, kv_tokens: int, constants: Constants) -> None:
        if not 1 <= slots <= constants.step_tokens:
            raise ConfigurationError(f"slots must be 1 to step_tokens ({constants.step_tokens}), not {slots}")
        if kv_tokens < constants.block_tokens:
            raise ConfigurationError(f"kv_tokens must hold one block of {constants.block_tokens}, not {kv_tokens}")
        self._constants = constants
        self._slots = slots
        self._blocks = kv_tokens // constants.block_tokens
        self._free_blocks = self._blocks
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._live: dict[int, _Sequence] = {}
        self._admitted = 0

    @property
    def kv_tokens(self) -> int:
        """KV tokens in whole blocks: the most that one sequence may need."""
        return self._blocks * self._constants.block_tokens

    @property
    def kv_tokens_free(self) -> int:
        return self._free_blocks * self._constants.block_tokens

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def admit(self, prompt_tokens: int, output_tokens: int) -> int:
        """Lets a sequence wait for its turn; the answer is its id.

        Raises:
            ValueError: it is empty, or it could not be held even alone.
        """
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a sequence has at least one prompt token and one output token")
        if prompt_tokens + output_tokens > self.kv_tokens:
            raise ValueError(f"{prompt_tokens} + {output_tokens} tokens exceed {self.kv_tokens} KV tokens")
        self._admitted += 1
        sequence = _Sequence(self._admitted, prompt_tokens, output_tokens)
        self._live[sequence.id] = sequence
        self._waiting.append(sequence)
        return sequence.id

    def remove(self, sequence_id: int) -> None:
        """Frees what the sequence holds; one that has ended is no error."""
        sequence = self._live.pop(sequence_id, None)
        if sequence is not None:
            self._release(sequence)
            (self._running if sequence in self._running else self._waiting).remove(sequence)

    def step(self) -> Step:
        """Plans and takes one step."""
        plan = _Plan(self._constants.step_tokens)
        self._serve_running(plan)
        self._start_waiting(plan)
        return self._take(plan)

    def _serve_running(self, plan: _Plan) -> None:
        position = 0
        while position < len(self._running) and plan.budget:
            sequence = self._running[position]
            if not self._make_room(sequence, plan):
                return
            self._compute(sequence, plan)
            position += 1

    def _make_room(self, sequence: _Sequence, plan: _Plan) -> bool:
        """Preempts from the end until the sequence's share of this step fits; false if it fell itself."""
        while self._blocks_more(sequence, min(sequence.missing, plan.budget)) > self._free_blocks:
            victim = self._running.pop()
            self._release(victim)
            # At the head it also keeps others from starting in this step: all of it cannot fit any more.
            self._waiting.appendleft(victim)
            plan.preempted.append(victim.id)
            if victim is sequence:
                return False
        return True

    def _start_waiting(self, plan: _Plan) -> None:
        while self._waiting and plan.budget and len(self._running) < self._slots:
            # A prompt waits until all of it fits, although its blocks are taken step by step: that is
            # vLLM's `scheduler_reserve_full_isl`, without which prompts evict each other half-way.
            if self._blocks_more(self._waiting[0], self._waiting[0].missing) > self._free_blocks:
                return
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            self._compute(sequence, plan)

    def _compute(self, sequence: _Sequence, plan: _Plan) -> None:
        tokens = min(sequence.missing, plan.budget)
        if sequence.decoding:
            plan.decoding += 1
        else:
            plan.prefill_tokens += tokens
        self._free_blocks -= self._blocks_more(sequence, tokens)
        sequence.computed += tokens
        plan.budget -= tokens
        plan.served.append(sequence)

    def _take(self, plan: _Plan) -> Step:
        ready = [sequence for sequence in plan.served if not sequence.missing]
        for sequence in ready:
            sequence.generated += 1
        finished = [sequence for sequence in ready if sequence.generated == sequence.output_tokens]
        for sequence in finished:
            self.remove(sequence.id)
        return Step(
            tokens=tuple(sequence.id for sequence in ready),
            finished=tuple(sequence.id for sequence in finished),
            preempted=tuple(plan.preempted),
            prefill_tokens=plan.prefill_tokens,
            decoding=plan.decoding,
            duration_s=self._constants.duration_s(plan.prefill_tokens, plan.decoding),
        )

    def _release(self, sequence: _Sequence) -> None:
        self._free_blocks += self._blocks_of(sequence.computed)
        sequence.computed = 0

    def _blocks_more(self, sequence: _Sequence, tokens: int) -> int:
        return self._blocks_of(sequence.computed + tokens) - self._blocks_of(sequence.computed)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._constants.block_tokens)
