"""Fake compression, and the controller that runs its ratios in turn and prints the curve."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from gradcomp import ConfigError, Fake, Filter, Identity, LayerSpec, Policy, Quantize, TopK, WhatIf
from gradcomp.compress import fake, from_string
from gradcomp.control import Environment, controller_from_string
from gradcomp.control.what_if import FIRST_STEPS, Point, Step, curve, knee
from gradcomp.core.topology import Topology
from gradcomp.core.what_if import NOTHING, parse
from gradcomp.exchange.snapshot import snapshot
from gradcomp.testing.simulation import Simulation, same_bytes

LAYERS = [
    LayerSpec("empty", (0,)),
    LayerSpec("bias", (37,), kind="bias"),
    LayerSpec("half", (11,), "float16"),
    LayerSpec("matrix", (5, 7)),
    LayerSpec("brain", (13,), "bfloat16"),
    LayerSpec("double", (50,), "float64"),
    LayerSpec("scalar", ()),
    LayerSpec("large", (29, 31)),
]
REDUCTIONS = ("sra", "ring", "tree", "all_to_all", "gather", "parameter_server:servers=2", "hierarchical")
RATIOS = (1, 1.5, 3, 8, 100.0, NOTHING)


def whole(ranks: Simulation) -> list[np.ndarray]:
    """The means of a step in float64; all ranks hold the same bytes."""
    return [mean.astype(np.float64) for mean in ranks.step().all_means()]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_the_first_values_of_a_bucket_are_the_exact_mean_and_the_rest_is_zero(world, reduction, ratio):
    options = {"slice_elements": 256, "reduction": reduction, "shuffle": True, "delay": 0.3}
    ranks = Simulation(LAYERS, Fake(ratio), world, **options)
    exact = Simulation(LAYERS, Identity(), world, **options)
    for _ in range(2):
        gradients = ranks.gradients()
        found, want = ranks.step(gradients).all_means(), exact.step(gradients).all_means()
        assert all(np.isfinite(mean.astype(np.float64)).all() for mean in found)
        if ratio == 1:
            assert all(map(same_bytes, found, want))
            continue
        for bucket in ranks.pipelines[0].layout.buckets:
            for group in bucket.groups:
                rows = list(zip(group.layers.tolist(), group.table, strict=True))
                parts = [(i, slice(int(row["start"]), int(row["start"] + row["length"]))) for i, row in rows]
                got = np.concatenate([found[i][part] for i, part in parts]).astype(np.float64)
                true = np.concatenate([want[i][part] for i, part in parts]).astype(np.float64)
                sends = len(got) if isinstance(group.compressor, Identity) else int(np.ceil(len(got) / ratio))
                np.testing.assert_allclose(got[:sends], true[:sends], rtol=2**-7, atol=1e-6)
                assert not got[sends:].any()
                assert np.count_nonzero(got[:sends]) == np.count_nonzero(true[:sends])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bytes_are_those_of_the_uncompressed_payload_over_the_ratio(world, reduction):
    layers = [LayerSpec("a", (300, 401)), LayerSpec("b", (77,)), LayerSpec("c", (50000,))]

    def sent(compressor) -> int:
        ranks = Simulation(layers, compressor, world, reduction=reduction, slice_elements=1 << 18)
        before = [rank.transport.bytes_sent for rank in ranks.ranks]
        ranks.step()
        return sum(rank.transport.bytes_sent for rank in ranks.ranks) - sum(before)

    headers = sent(Fake(NOTHING))
    dense = sent(Fake(1 + 2**-20)) - headers
    for ratio in (2, 7.9, 32):
        assert sent(Fake(ratio)) - headers == pytest.approx(dense / ratio, rel=0.01)


def test_values_that_are_not_finite_are_found_where_they_travel_and_become_zero_where_they_do_not():
    layers = [LayerSpec("first", (64,)), LayerSpec("last", (64,))]
    ranks = Simulation(layers, Fake(2), 3, reorder=False)
    for layer, seen in (
        (1, True),
        (0, False),
    ):  # the last layer's gradient arrives first, and the order is the layers'
        gradients = ranks.gradients()
        gradients[1][1 - layer][5] = np.nan
        outcome = ranks.step(gradients)
        assert outcome.result.finite != seen
        assert outcome.committed == [not seen] * 3
        if not seen:
            assert all(np.isfinite(mean).all() for mean in outcome.all_means())


def test_a_layer_that_no_rank_has_is_not_written():
    ranks = Simulation(LAYERS, Fake(4), 2)
    assert ranks.step(ranks.gradients(absent=[3, 7])).all_means()[7] is None
    first = ranks.gradients()
    first[0][7] = None  # only rank 1 has it
    assert ranks.step(first).all_means()[7] is not None


def test_coding_takes_the_seconds_of_a_gigabyte(monkeypatch):
    spent: list[float] = []
    monkeypatch.setattr(fake, "spend", spent.append)
    Simulation([LayerSpec("a", (1000, 250))], Fake(4, codec_seconds=3.0), 2, slice_elements=1 << 20).step()
    assert spent == [pytest.approx(3e-3)] * 2


def test_coding_computes_until_the_time_has_passed():
    now = iter([0.0, 0.4, 0.8, 1.2])
    fake.spend(1.0, lambda: next(now))
    assert next(now, None) is None
    fake.spend(0.0, lambda: pytest.fail("nothing is to be spent"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fake(0.5),
        lambda: Fake(float("inf")),
        lambda: Fake(True),
        lambda: Fake(2, codec_seconds=-1),
        lambda: from_string("error_feedback[fake:ratio=4]"),
        lambda: from_string("warmup[fake]:steps=3"),
        lambda: WhatIf((1, 1.0)),
        lambda: WhatIf(("a",)),
        lambda: WhatIf((0,)),
        lambda: WhatIf(block_steps=4),
        lambda: controller_from_string("what_if:ratios=0.5/2"),
        *(
            lambda text=text: parse(text)
            for text in ("1,", "x", "1,2x", "1x2x3", "nan", "0", "2,2", ",".join(map(str, range(1, 19))))
        ),
    ],
)
def test_what_cannot_be_is_a_config_error(make):
    with pytest.raises(ConfigError):
        make()


def test_ratios_are_read_from_text():
    assert parse("4, 1,2").gradients == (1, 2, 4)
    grid = parse("1,2x1,INF")
    assert (grid.weights, grid.gradients, grid.is_grid) == ((1, 2), (1, NOTHING), True)
    assert controller_from_string("what_if:ratios=inf/2") == WhatIf((2, NOTHING))


# --- the controller -------------------------------------------------------------------------------------------


def test_every_ratio_has_its_turn_and_all_ranks_take_it_together():
    everything = Filter(min_elements=0, min_dimensions=0, exclude_kinds=())
    ranks = Simulation(
        LAYERS, Policy(Fake(8), filter=everything), 3, shuffle=True, controller=WhatIf((1, 4), block_steps=5)
    )
    seen: list[float] = []
    for _ in range(FIRST_STEPS + 2 * 3 * 5 + 1):
        levels = {a.level for a in ranks.pipelines[0].plan.assignments if a.layer != "double"}
        assert len(levels) == 1
        assert len({p.plan.to_json() for p in ranks.pipelines}) == 1
        seen += levels
        whole(ranks)
    assert seen[FIRST_STEPS:] == ([1] * 5 + [4] * 5 + [NOTHING] * 5) * 2 + [1]
    points = [p.controller.points for p in ranks.pipelines]
    assert points[0] == points[1] == points[2]
    assert [len(point.seconds) for point in points[0]] == [2, 2, 2]
    double = 2 * 50 * 8 * 2 / 3  # which no compressor takes
    assert points[0][0].sent_bytes - double == pytest.approx(4 * (points[0][1].sent_bytes - double), rel=0.02)


def test_other_compressors_are_replaced_and_a_run_that_continues_begins_a_new_round():
    def job() -> Simulation:
        return Simulation(LAYERS, Quantize(4, 64), 2, controller=WhatIf((2,), block_steps=5))

    ranks = job()
    for _ in range(FIRST_STEPS + 12):
        whole(ranks)
    assert ranks.pipelines[0].has_faked
    again = job()
    for old, new in zip(ranks.pipelines, again.pipelines, strict=True):
        state = snapshot(old)
        new.controller.restore(state.shared.control["state"], state.control)
    assert again.pipelines[0].controller.points == ranks.pipelines[0].controller.points
    for _ in range(FIRST_STEPS + 11):
        whole(again)
    assert [len(point.seconds) for point in again.pipelines[0].controller.points] == [2, 2]


def environment(rank: int, world: int = 2) -> Environment:
    layers = [LayerSpec("a", (10,))]
    return Environment(layers, [TopK()], rank, Topology.one_host(world), None)  # type: ignore[arg-type]


def run(seconds, steps: int, world: int = 2):
    """Runs of two ranks, whose steps take what ``seconds(ratio, rank, step)`` says."""
    runs = [WhatIf((1, 2), block_steps=8).begin(environment(rank, world)) for rank in range(world)]
    nothing = np.zeros(0)
    took = [0.0] * world
    for step in range(steps):
        for one in runs:
            one.begin(step)
        parts = [one.contribution(step) for one in runs]
        sums = None if parts[0] is None else np.sum(parts, axis=0)
        ratios = [one.choices[0].ratio for one in runs]
        done = Step(
            step, True, sums, 0.0, nothing, nothing, nothing, nothing.astype(np.int64), 0.0, 100 / ratios[0]
        )
        for rank, one in enumerate(runs):
            one.finish(replace(done, seconds=took[rank]))
        took = [seconds(ratios[rank], rank, step) for rank in range(world)]
    return runs


def test_the_slowest_rank_of_each_step_counts_and_steps_after_a_change_do_not():
    def seconds(ratio: float, rank: int, step: int) -> float:
        place = (step - FIRST_STEPS) % 8
        if step < FIRST_STEPS or not 3 <= place < 7:
            return 1e9  # memory is allocated, or the next block is prepared
        return 1 / ratio + (0.25 if rank == step % 2 else 0.0)

    runs = run(seconds, FIRST_STEPS + 2 * 24 + 1)
    for one in runs:
        assert [point.median for point in one.points] == pytest.approx([1.25, 0.75, 0.25])
        assert [len(point.seconds) for point in one.points] == [8, 8, 8]
        assert [point.sent_bytes for point in one.points] == pytest.approx([100, 50, 100 / NOTHING])


def test_rank_0_logs_the_curve_after_1_2_4_rounds_and_at_the_end(caplog):
    caplog.set_level(logging.INFO, "gradcomp")
    runs = run(lambda ratio, *_: 1 / ratio, FIRST_STEPS + 4 * 24 + 1)
    assert len(caplog.records) == 3
    for one in runs:
        one.close()  # nothing was measured since
    assert len(caplog.records) == 3
    runs = run(lambda ratio, *_: 1 / ratio, FIRST_STEPS + 3 * 24 + 1)
    caplog.clear()
    for one in runs:
        one.close()
    assert len(caplog.records) == 1
    caplog.clear()
    for one in run(lambda *_: 1.0, 20):
        one.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "takes 31 steps" in caplog.text


def test_the_knee_is_the_least_ratio_that_is_about_as_fast_as_any():
    points = [
        Point(str(r), 1e6 / r, [s] * 3) for r, s in ((1, 0.4), (2, 0.2), (4, 0.103), (8, 0.1), (16, 0.09))
    ]
    assert knee(points).label == "4"
    table = curve(points, 2)
    assert "knee: ratio 4, 103.0 ms" in table
    assert "(ratio 16): 90.0 ms" in table
    assert [line.split()[0] for line in table.splitlines()[2:7]] == ["1", "2", "4", "8", "16"]
