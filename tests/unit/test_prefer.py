"""The `Prefer` header."""

import pytest

from headway.api.prefer import MAX_WAIT_S, preferences, wait_s


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], {}),
        (["respond-async"], {"respond-async": ""}),
        (["respond-async, wait=10"], {"respond-async": "", "wait": "10"}),
        (["Respond-Async", 'WAIT = "10"'], {"respond-async": "", "wait": "10"}),
        (["wait=5; unit=s, wait=9"], {"wait": "5"}),
        ([" , ;"], {}),
    ],
)
def test_preferences_over_all_headers(headers: list[str], found: dict[str, str]) -> None:
    assert preferences(headers) == found


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30", 30),
        ("0", 0),
        ("1000", MAX_WAIT_S),
        ("-1", 0),
        ("soon", 0),
        ("1.5", 0),
        ("٣", 0),
        ("9" * 5000, 0),
        ("", 0),
    ],
)
def test_a_wait_is_bounded_and_nonsense_is_no_wish(value: str, seconds: int) -> None:
    assert wait_s({"wait": value}) == seconds


def test_no_wait() -> None:
    assert wait_s({"respond-async": ""}) == 0
