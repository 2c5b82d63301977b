"""Lanes: length classes of prompts. Pure."""

from dataclasses import dataclass

from headway.shared.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Lane:
    """A length class.

    Attributes:
        max_prompt_tokens: the longest prompt that belongs here; None for the last lane.
        share: the part of the engine's slots and KV tokens that its jobs may hold, 0 to 1.
    """

    name: str
    max_prompt_tokens: int | None
    share: float


def make_lanes(short_below: int, mid_to: int, shares: tuple[float, float, float]) -> tuple[Lane, ...]:
    """The three lanes: `short` < `short_below` tokens, `mid` to `mid_to`, `long` above.

    Raises:
        ConfigurationError: the bounds do not rise, or the shares are not parts of 1.
    """
    if not 0 < short_below <= mid_to:
        raise ConfigurationError(f"lane bounds must rise: HEADWAY_SHORT_BELOW={short_below}, HEADWAY_MID_TO={mid_to}")
    if min(shares) <= 0 or sum(shares) > 1.0001:
        raise ConfigurationError(f"HEADWAY_LANE_SHARES must be three positive parts of 1, not {shares}")
    return (
        Lane("short", short_below - 1, shares[0]),
        Lane("mid", mid_to, shares[1]),
        Lane("long", None, shares[2]),
    )


def classify(prompt_tokens: int, lanes: tuple[Lane, ...]) -> Lane:
    """The first lane whose bound the prompt does not exceed."""
    return next(x for x in lanes if x.max_prompt_tokens is None or prompt_tokens <= x.max_prompt_tokens)


def check_bounds(lanes: tuple[Lane, ...], max_model_len: int) -> None:
    """Refuses bounds that leave a lane without any possible job.

    Raises:
        ConfigurationError: a lane begins above the model's length.
    """
    for lane in lanes:
        if lane.max_prompt_tokens is not None and lane.max_prompt_tokens > max_model_len:
            raise ConfigurationError(
                f"the bound of lane {lane.name!r} ({lane.max_prompt_tokens} tokens) is above the model's length"
                f" ({max_model_len}), so the lanes above it would stay empty:"
                " lower HEADWAY_SHORT_BELOW and HEADWAY_MID_TO"
            )
