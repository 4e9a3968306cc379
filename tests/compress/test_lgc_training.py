"""On how many samples LGC trains: measured on each rank, agreed on by all."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from compress.learning import A, job, weights_of, without_momentum

from gradcomp import LGC, Config, ConfigError, Policy
from gradcomp.compress import from_string
from gradcomp.contrib.lgc import base
from gradcomp.contrib.lgc.base import MEASURED, Stopwatch, every
from gradcomp.exchange.snapshot import merge, restore, snapshot
from gradcomp.job.start import refusal

EVERY = "shared_trained_every"


def agreed(ranks) -> int:
    """m, which all ranks have."""
    (found,) = {int(pipeline.fields[EVERY].value(A)[0]) for pipeline in ranks.pipelines}
    return found


def trained(ranks, steps: int) -> list[int]:
    """The steps, of so many more, in which weights changed."""
    found = []
    for _ in range(steps):
        before, step = weights_of(ranks), ranks.pipelines[0].step
        ranks.step().all_means()
        if not np.array_equal(weights_of(ranks), before):
            found.append(step)
    return found


@pytest.fixture
def slow_and_fast(monkeypatch):
    """A lesson takes 0.4% of the rest of a step on the rank that makes its watch first, 12% on the other one."""
    made = count()

    def watch() -> Stopwatch:
        lesson = 0.004 if next(made) % 2 == 0 else 0.12
        times = (t for i in count() for t in (i * (1 + lesson), i * (1 + lesson) + lesson))
        return Stopwatch(lambda: next(times))

    monkeypatch.setattr("gradcomp.contrib.lgc.lgc.Stopwatch", watch)


def test_a_watch_tells_the_median_lesson_beside_the_median_rest():
    spans = [(3.0, 100.0)] + [(0.25, 2.0)] * MEASURED  # the first of each is slow
    now, times = 0.0, []
    for lesson, rest in spans:
        times += [now, now + lesson]
        now += lesson + rest
    ticks = iter([*times, now, now + 0.25])
    watch = Stopwatch(lambda: next(ticks))
    parts = [watch.part]
    for i in range(len(spans) + 1):
        assert watch.time(lambda i=i: i) == i
        parts.append(watch.part)
    assert parts[: MEASURED + 1] == [0.0] * (MEASURED + 1)
    assert parts[MEASURED + 1] == parts[-1] == 0.125


@pytest.mark.parametrize(
    ("parts", "number"),
    [
        ([0.01, 0.05], 1),
        ([0.0501, 0.01], 2),
        ([0.01, 0.24], 5),
        ([1e9, 0.1], 1000),
        ([0.0, 0.3], 0),
        ([np.nan, 0.3], 0),
        ([0.3, np.nan], 0),
        ([np.inf, 0.3], 0),
        ([0.3, -1.0], 0),
    ],
)
def test_the_slowest_rank_decides_once_all_have_measured(parts, number: int):
    assert every(parts) == number


def test_ranks_agree_on_a_share_once_and_say_so(slow_and_fast, caplog):
    ranks = job(without_momentum(train_steps=40), reorder=False, shuffle=True, delay=0.3)
    with caplog.at_level("INFO", "gradcomp"):
        assert trained(ranks, MEASURED + 1) == list(range(MEASURED + 1))
        assert agreed(ranks) == 0
        assert not caplog.records
        assert trained(ranks, 10) == [12, 15, 18]
        assert agreed(ranks) == 3
    (said,) = caplog.records
    assert said.getMessage() == (
        "step 11: LGC trains on one of 3 samples from now on, so that steps take at most 5% longer; one training took "
        "12.0% of the rest of a step"
    )


def test_a_step_that_is_discarded_fixes_no_share(slow_and_fast):
    ranks = job(without_momentum(train_steps=40), reorder=False)
    trained(ranks, MEASURED + 1)
    ranks.step(commit=False)
    assert agreed(ranks) == 0
    ranks.step()
    assert agreed(ranks) == 3


@pytest.mark.parametrize("world", [2, 3])
def test_the_share_is_saved(slow_and_fast, world: int):
    old, new = (
        job(without_momentum(train_steps=40), reorder=False),
        job(without_momentum(train_steps=40), world),
    )
    trained(old, MEASURED + 2)
    states = [snapshot(pipeline) for pipeline in old.pipelines]
    for rank, pipeline in enumerate(new.pipelines):
        restore(pipeline, states[rank] if world == 2 else merge(iter(states), rank, world))
    assert agreed(new) == 3
    assert trained(new, 6) == [12, 15]


@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3])
def test_a_fixed_share_needs_no_clock(share: float):
    ranks = job(without_momentum(train_steps=40, train_share=share))
    assert trained(ranks, 7) == list(range(0, 7, round(1 / share)))
    assert EVERY not in ranks.pipelines[0].fields.names


@pytest.mark.parametrize("share", [0, 0.4, 1.5, True, None, "half", 1e-9, -0.5])
def test_a_share_is_one_part_of_a_whole_number(share):
    with pytest.raises(ConfigError, match="train_share"):
        LGC(train_share=share)


def test_runs_that_repeat_need_a_fixed_share():
    assert LGC().train_share == base.AUTO == from_string("lgc:train_share=auto").train_share
    repeats = Config(deterministic=True)
    assert "train_share" in str(refusal(repeats, Policy(LGC())))
    assert refusal(repeats, Policy("lgc:train_share=0.25")) is None
    assert refusal(repeats, Policy("lgc:train_steps=0")) is None
