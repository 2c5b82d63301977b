"""What a follower has heard: the replies themselves where that is certain, else that it must look."""

import asyncio

import pytest

from headway.shared.job import Reply
from headway.shared.news import News, parse
from helpers import PATIENCE_S


def chunk(offset: int, text: str = "text") -> Reply:
    return Reply(offset, "chunk", text.encode())


def notice(*replies: Reply) -> bytes:
    """As append.lua writes it."""
    header = " ".join([str(replies[0].offset), *(f"{reply.kind}:{len(reply.data)}" for reply in replies)])
    return header.encode() + b"\n" + b"".join(reply.data for reply in replies)


def heard(*notices: bytes | None) -> News:
    news = News()
    for each in notices:
        news.take(each)
    return news


@pytest.mark.parametrize(
    "replies",
    [
        [chunk(1)],
        [Reply(7, "restarted", b"{}"), chunk(8, 'a\nb "c" 7 chunk:3\n'), chunk(9, ""), chunk(10, "naïve 🚂")],
    ],
    ids=["one", "several"],
)
def test_a_notice_has_its_replies(replies: list[Reply]) -> None:
    assert list(parse(notice(*replies))) == replies


@pytest.mark.parametrize("told", [b"", b"12"])
def test_a_notice_may_only_say_that_there_is_something_new(told: bytes) -> None:
    assert list(parse(told)) == []
    assert heard(told).behind(0) is None


def test_what_follows_without_a_gap_is_handed_on() -> None:
    # Given notices of which the first is old, and the second partly
    news = heard(notice(chunk(1)), notice(chunk(2), chunk(3)), notice(chunk(4)))

    # If the reader has two replies, I expect the other two, and nothing when it asks again
    assert news.behind(2) == [chunk(3), chunk(4)]
    assert news.behind(4) == []


@pytest.mark.parametrize(
    "notices",
    [
        [notice(chunk(3))],
        [notice(chunk(1)), notice(chunk(3))],
        [notice(chunk(1)), None],
        [None, notice(chunk(1))],
        [notice(chunk(1)), b"2"],
        [notice(chunk(2)), notice(chunk(1))],
    ],
    ids=["later", "gap", "reconnected", "subscribed", "long", "disorder"],
)
def test_where_something_may_be_missing_the_log_is_asked(notices: list[bytes | None]) -> None:
    # Given a reader at the beginning, to whom not all was told, I expect that it must read the log; once
    news = heard(*notices)
    assert news.behind(0) is None
    assert news.behind(3) == []


def test_a_slow_reader_is_told_no_more_than_fits() -> None:
    # Given more replies than are kept for a reader that does not come
    news = heard(*(notice(chunk(offset)) for offset in range(1, 1000)))

    # If it comes, I expect that it must read the log
    assert news.behind(0) is None


async def test_silence_is_a_reason_to_look() -> None:
    # Given a follower that hears nothing, if it waits in vain, I expect that it looks
    news = News()
    await news.wait(0.001)
    assert news.behind(0) is None


async def test_a_notice_ends_a_wait() -> None:
    # Given a follower that waits
    news = News()
    waiting = asyncio.create_task(news.wait(PATIENCE_S))
    await asyncio.sleep(0)

    # If it is told a reply, I expect the wait over, and no need to look
    news.take(notice(chunk(1)))
    await asyncio.wait_for(waiting, PATIENCE_S)
    assert news.behind(0) == [chunk(1)]
