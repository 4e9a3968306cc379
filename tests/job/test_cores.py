"""How many threads share the work of a rank's kernels: at most its share of the host's cores."""

from __future__ import annotations

import logging
import os
import sys

import pytest
from launching import run_ranks

import gradcomp.torch as gc
from gradcomp.job.cores import available_cores, kernel_threads, warn_of_threads
from gradcomp.kernels import dispatch


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "training", "threads"),
    [
        pytest.param(0, 2, 2, 1, 1, id="a core a rank"),
        pytest.param(0, 2, 1, 1, 1, id="the framework keeps one"),
        pytest.param(0, 8, 2, 1, 3, id="as torchrun starts ranks"),
        pytest.param(0, 8, 2, 8, 1, id="the framework has a thread for every core"),
        pytest.param(0, 8, 2, 4, 1, id="or for every core of the share"),
        pytest.param(0, 9, 2, 1, 3, id="no part of a core"),
        pytest.param(0, 1, 4, 1, 1, id="more ranks than cores"),
        pytest.param(2, 2, 1, 1, 2, id="asked"),
        pytest.param(1, 64, 1, 1, 1, id="asked for one"),
        pytest.param(5, 8, 2, 1, 4, id="asked for more than the share"),
        pytest.param(2, 2, 2, 1, 1, id="asked where each has a core"),
        pytest.param(3, 8, 2, 8, 3, id="asked beside a framework that takes all"),
    ],
)
def test_threads(asked: int, cores: int, ranks: int, training: int, threads: int):
    assert kernel_threads(asked, cores, ranks, training) == threads


def test_a_number_above_the_share_is_said(caplog: pytest.LogCaptureFixture):
    warn_of_threads(5, 8, 2, 4)
    warn_of_threads(2, 1, 1, 1)
    for fine in ((4, 4), (0, 3)):
        warn_of_threads(fine[0], 8, 2, fine[1])
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            "threads=5: 8 cores for 2 ranks of this host, so each uses 4 threads for its kernels",
        ),
        (logging.WARNING, "threads=2: 1 core for 1 rank of this host, so each uses 1 thread for its kernels"),
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="systems have no affinity")
def test_cores_that_the_launcher_took_away_do_not_count():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert available_cores() == len(before)


def test_init_sets_the_threads_once_and_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gradcomp.job.runtime.available_cores", lambda: 6)
    before = dispatch.threads()
    try:
        for asked, threads, warnings in ((4, 4, 0), (7, 6, 1)):
            caplog.clear()
            gc.init(threads=asked)
            gc.shutdown()
            assert dispatch.threads() == threads
            assert sum(record.levelno == logging.WARNING for record in caplog.records) == warnings
    finally:
        dispatch.set_threads(before)


def test_ranks_of_a_host_share_its_cores_and_the_first_warns():
    finished = run_ranks(
        """
        import os
        import gradcomp.torch as gc
        from gradcomp.job import runtime
        from gradcomp.kernels import dispatch

        runtime.available_cores = lambda: 5
        gc.init(timeout_seconds=60)
        print("threads", dispatch.threads())
        """,
        2,
        env={"GRADCOMP_THREADS": "3"},
    )
    assert [rank.stdout.split() for rank in finished] == [["threads", "2"]] * 2
    said = "threads=3: 5 cores for 2 ranks of this host, so each uses 2 threads for its kernels"
    assert [rank.stderr.count(said) for rank in finished] == [1, 0]
