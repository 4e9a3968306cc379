"""The watchdog of a process, and what it learns of others: ranks are watchdogs that share a control channel."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from gradcomp import Config, TransportError
from gradcomp.exchange.watchdog import DEADLOCK, NOWHERE, Wait, Watchdog
from gradcomp.transport.control import LocalControl


class Waits(Wait):
    """Since an hour."""

    scope, position, where = "user/all", (3, -1, 0), "allreduce, call 3"

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__(watchdog, Config(timeout_seconds=1e6, stall_warning_seconds=1e6))
        self.since = time.monotonic() - 3600


@pytest.fixture
def two() -> Iterator[list[Watchdog]]:
    control = LocalControl()
    watchdogs = [Watchdog(control, rank) for rank in range(2)]
    yield watchdogs
    for watchdog in watchdogs:
        watchdog.stop()


def test_one_thread_watches_all_waits(two: list[Watchdog]) -> None:
    before = threading.active_count()
    for _ in range(5):
        two[0].add(Waits(two[0]))
    assert threading.active_count() == before + 1


def test_a_watchdog_that_was_stopped_or_has_nothing_to_watch_has_no_thread(two: list[Watchdog]) -> None:
    before = threading.active_count()
    assert two[0].hold(lambda: True, Config(), str)
    assert threading.active_count() == before
    two[0].start()
    two[0].stop()
    two[0].add(Waits(two[0]))
    assert threading.active_count() == before


def test_what_a_look_finds_or_raises_is_raised_by_who_waits(two: list[Watchdog]) -> None:
    def look(waited: float) -> None:
        raise OSError("the log is full")

    with pytest.raises(TransportError, match="found out"):
        two[0].hold(lambda: False, Config(), str, lambda waited: TransportError("found out"))
    with pytest.raises(OSError, match="the log is full"):
        two[0].hold(lambda: False, Config(), str, look)


def test_the_cause_of_a_deadlock_is_raised_by_a_rank_that_sees_the_end_of_another_first(
    two: list[Watchdog],
) -> None:
    def look(waited: float) -> TransportError:
        two[0].control.publish(DEADLOCK, b"they wait for each other")
        return TransportError("aborted: rank 0 ended")

    with pytest.raises(TransportError, match="they wait for each other"):
        two[1].hold(lambda: False, Config(), str, look)


def test_a_wait_warns_once_and_ends_at_the_deadline(two: list[Watchdog], caplog) -> None:
    config = Config(timeout_seconds=1.6, stall_warning_seconds=0.1)
    with caplog.at_level(logging.WARNING, logger="gradcomp"):
        assert not two[0].hold(lambda: False, config, lambda: "it waits")
    assert [record.getMessage() for record in caplog.records] == ["it waits"]


def test_a_rank_says_what_it_waits_for_and_where_it_is(two: list[Watchdog]) -> None:
    asks, answers = two
    answers.start()
    assert asks.ask([1])[1].positions.get("user/all", NOWHERE) == NOWHERE  # before it waits for anything
    answers.add(Waits(answers))
    answer = asks.ask([1])[1]
    assert (answer.waits_for, answer.positions) == ("allreduce, call 3", {"user/all": (3, -1, 0)})


@pytest.mark.usefixtures("short_patience")
def test_of_a_rank_that_is_dead_nothing_is_known(two: list[Watchdog]) -> None:
    assert two[0].ask([1]) == {}


def test_the_last_word_of_a_rank_answers_every_question(two: list[Watchdog]) -> None:
    asks, left = two
    assert not asks.has_left(1)
    left.leave()
    assert asks.ask([1])[1].left
    assert asks.has_left(1)
