"""Length classes and their bounds."""

import pytest

from headway.shared.errors import ConfigurationError
from headway.shared.lanes import check_bounds, classify, make_lanes

SHARES = (0.5, 0.3, 0.2)


@pytest.mark.parametrize(
    ("tokens", "lane"),
    [(0, "short"), (8191, "short"), (8192, "mid"), (32768, "mid"), (32769, "long"), (10**6, "long")],
)
def test_classify(tokens: int, lane: str) -> None:
    assert classify(tokens, make_lanes(8192, 32768, SHARES)).name == lane


@pytest.mark.parametrize(("short_below", "mid_to"), [(0, 10), (-1, 10), (20, 10)])
def test_bounds_must_rise(short_below: int, mid_to: int) -> None:
    with pytest.raises(ConfigurationError, match="HEADWAY_SHORT_BELOW"):
        make_lanes(short_below, mid_to, SHARES)


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.5), (1.0, 0.0, 0.0), (0.5, -0.1, 0.2)])
def test_shares_must_be_parts_of_one(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigurationError, match="HEADWAY_LANE_SHARES"):
        make_lanes(10, 20, shares)


def test_bounds_above_the_models_length_are_refused() -> None:
    # Given bounds of 8192 and 32768; if neither is above the model's length, I expect no complaint, else one that helps
    lanes = make_lanes(8192, 32768, SHARES)
    check_bounds(lanes, 32768)
    for max_model_len in (32767, 8192, 100):
        with pytest.raises(ConfigurationError, match="lower HEADWAY_SHORT_BELOW and HEADWAY_MID_TO"):
            check_bounds(lanes, max_model_len)
