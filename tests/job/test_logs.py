"""Lines of the log carry their rank and level, and a program's own configuration stays."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gradcomp.job.runtime import FORMAT, Ranked, logger, start_logging


@contextmanager
def bare() -> Iterator[None]:
    """The logger as in a program that has configured nothing."""
    handlers, filters, propagate = logger.handlers[:], logger.filters[:], logger.propagate
    logger.handlers[:], logger.filters[:], logger.propagate = [], [], False
    try:
        yield
    finally:
        logger.handlers[:], logger.filters[:], logger.propagate = handlers, filters, propagate


def test_a_line_has_level_and_rank(capsys: pytest.CaptureFixture[str]):
    with bare():
        ours = start_logging()
        ours.level("info")
        logger.warning("early")
        ours.rank = 3
        logger.info("later")
        logger.debug("not at this level")
        assert capsys.readouterr().err.splitlines() == [
            "gradcomp WARNING rank ?: early",
            "gradcomp INFO rank 3: later",
        ]


def test_a_program_that_has_configured_logging_keeps_its_configuration():
    with bare():
        own = logging.StreamHandler()
        logger.addHandler(own)
        logger.setLevel(logging.ERROR)
        ours = start_logging()
        ours.level("debug")
        assert logger.handlers == [own]
        assert logger.level == logging.ERROR


def test_any_format_may_name_the_rank(caplog: pytest.LogCaptureFixture):
    with bare():
        logger.addHandler(caplog.handler)
        start_logging().rank = 5
        logger.error("text")
        assert logging.Formatter(FORMAT).format(caplog.records[0]) == "gradcomp ERROR rank 5: text"


def test_another_start_adds_nothing():
    with bare():
        first = start_logging()
        assert start_logging() is first
        assert (len(logger.handlers), sum(isinstance(one, Ranked) for one in logger.filters)) == (1, 1)
