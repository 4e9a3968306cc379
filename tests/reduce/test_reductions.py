"""Tests every reduction: all ranks have the mean of its scheme, nothing is lost, and every flag reaches all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import (
    PARTIAL,
    REDUCTIONS,
    Model,
    compressors,
    fits,
    layer_lists,
    topologies,
    with_residuals,
)
from tiers import examples

from gradcomp import Cast, ConfigError, Identity, LayerSpec, OneBit, Quantize, Signum
from gradcomp.core.topology import Topology
from gradcomp.reduce.model import Network
from gradcomp.testing.simulation import SPARSE, Simulation, plan_for, same_bytes, true_mean

WORLDS = (2, 3, 4, 5, 7)

every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
every_world = pytest.mark.parametrize("world", WORLDS)
LAYERS = [
    LayerSpec("empty", (0,)),
    LayerSpec("one", (1,)),
    LayerSpec("half", (129,), "float16"),
    LayerSpec("odd", (301,)),
    LayerSpec("brain", (64,), "bfloat16"),
    LayerSpec("last", (5,)),
]
HALF, ODD = 2, 3
TWO_HOSTS = Topology((0, 0, 1, 1))


def simulate(reduction: str, compressor, world: int, **options) -> Simulation:
    options.setdefault("topology", Topology(tuple(r // 2 for r in range(world))))
    options.setdefault("layers", LAYERS)
    layers = options.pop("layers")
    return Simulation(layers, compressor, world, reduction=reduction, reorder=False, **options)


timings = st.builds(
    dict,
    overlap=st.booleans(),
    shuffle=st.booleans(),
    delay=st.sampled_from([0, 0.4]),
    seed=st.integers(0, 99),
)

# --- the mean -----------------------------------------------------------------------------------------------


@every_reduction
@examples(45)
@given(
    layers=layer_lists,
    compressor=compressors | with_residuals | st.just(Identity()),
    world=st.sampled_from([1, 2, 3, 4, 5, 7]),
    cap=st.sampled_from([20, 40, 100, 200, 10**6]),
    timing=timings,
    data=st.data(),
)
def test_the_mean_and_the_residuals_are_those_of_the_scheme_whatever_slices_and_timing(
    reduction: str, layers, compressor, world: int, cap: int, timing, data
):
    if isinstance(compressor, Identity):  # what is not bfloat16 takes an allreduce
        layers = [LayerSpec(layer.name, layer.shape, "bfloat16") for layer in layers]
    topology = data.draw(st.sampled_from(topologies(world)))
    if not fits(reduction, world) and world > 1:
        return
    options = {"layers": layers, "topology": topology, "slice_elements": cap, **timing}
    ranks = simulate(reduction, compressor, world, **options)
    model = Model(reduction, ranks, compressor)
    for _ in range(3):
        gradients = ranks.gradients()
        want, means = model.step(gradients), ranks.step(gradients).all_means()
        assert all(map(same_bytes, means, want))
    if compressor.traits.keeps_residual:
        for rank, pipeline in enumerate(ranks.pipelines):
            for i in range(len(layers)):
                assert same_bytes(pipeline.residuals.first.value(i), model.first[rank][i])
            for row, owned in enumerate(pipeline.residuals.ranges):
                value = model.second[owned.layer][owned.start : owned.end]
                assert same_bytes(pipeline.residuals.second.value(row), value)


@every_reduction
def test_layers_keep_their_own_bits_in_a_fused_bucket(reduction: str):
    """If two plans differ in one layer's bits, the means of the other layers are equal."""
    layers = [LayerSpec(f"w{i}", (96,)) for i in range(4)]

    def run(bits: int) -> list[np.ndarray]:
        plan = plan_for(layers, Quantize(4, 16))
        other = plan_for(layers, Quantize(bits, 16)).assignments[1]
        plan = type(plan)(0, (plan.assignments[0], other, *plan.assignments[2:]))
        ranks = simulate(reduction, plan, 3, layers=layers)
        assert len(ranks.pipelines[0].layout.buckets) == 1
        return ranks.step().all_means()

    few, many = run(2), run(8)
    same = list(map(same_bytes, few, many))
    if reduction == "ring":
        # Other chunk borders, another order of addition, for all but the first one's layers.
        assert not same[1]
    else:
        assert same == [True, False, True, True]


@every_reduction
def test_sums_are_n_times_the_means(reduction: str):
    means, sums = (simulate(reduction, Quantize(4, 32), 4, average=average) for average in (True, False))
    gradients = means.gradients()
    for mean, total in zip(means.step(gradients).all_means(), sums.step(gradients).all_means(), strict=True):
        np.testing.assert_array_equal(total, mean * mean.dtype.type(4))


# --- residuals ----------------------------------------------------------------------------------------------


@every_reduction
@pytest.mark.parametrize(
    ("world", "compressor"),
    [(2, OneBit(50)), (3, Cast("bfloat16", feedback=True)), (5, Quantize(2, 33, rounding="nearest"))],
    ids=str,
)
def test_error_feedback_telescopes_over_many_steps(reduction: str, world: int, compressor):
    """The sum of true means minus applied means is what the residuals hold, and that stays bounded."""
    layers = [LayerSpec("w", (301,)), LayerSpec("empty", (0,)), LayerSpec("v", (64,))]
    ranks = simulate(reduction, compressor, world, layers=layers, slice_elements=100)
    missing = [np.zeros(layer.size) for layer in layers]
    sizes = []
    for _ in range(25):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for i, mean in enumerate(means):
            missing[i] += true_mean(gradients, i) - mean.astype(np.float64)
            owed = ranks.owed(i)
            bound = 4e-6 * max(1.0, np.abs(owed).max(initial=0))
            np.testing.assert_allclose(missing[i], owed, rtol=0, atol=bound)
        sizes.append(np.linalg.norm(ranks.owed(0)))
    assert sizes[-1] < 3 * max(sizes[:8])
    assert sizes[-1] > 0


@every_reduction
def test_who_encodes_the_mean_keeps_its_error(reduction: str):
    for feedback in (True, False):
        ranks = simulate(reduction, Quantize(2, 16, feedback=feedback), 4, topology=TWO_HOSTS)
        owned = [sum(r.length for r in p.residuals.ranges) for p in ranks.pipelines]
        encoded = feedback and reduction not in ("ring", "tree", "all_to_all", "gather")
        assert sum(owned) == encoded * sum(layer.size for layer in LAYERS)
        assert reduction != "hierarchical" or not any(owned[1::2])


@every_reduction
def test_a_change_of_reduction_keeps_what_is_owed(reduction: str):
    """A server-side error without an owner moves to a residual, times N."""
    before = simulate("sra", Quantize(2, 16, rounding="nearest"), 4, topology=TWO_HOSTS)
    before.step()
    after = simulate(reduction, Quantize(2, 16, rounding="nearest"), 4, topology=TWO_HOSTS)
    for old, new in zip(before.pipelines, after.pipelines, strict=True):
        ranges = new.residuals.ranges
        new.residuals = old.residuals
        new.residuals.own(ranges, 4)
    np.testing.assert_allclose(after.owed(ODD), before.owed(ODD), atol=1e-6)


# --- votes and values that are not finite -------------------------------------------------------------------


@every_reduction
@pytest.mark.parametrize(("world", "bad"), [(2, np.nan), (3, -np.inf), (5, np.nan)])
def test_a_value_that_is_not_finite_is_seen_by_all_and_poisons_nothing(
    reduction: str, world: int, bad: float
):
    ranks = simulate(reduction, Quantize(3, 50, feedback=True), world, slice_elements=100)
    ranks.step()
    before = ranks.state()
    for culprit in range(world):
        gradients = ranks.gradients()
        gradients[culprit][ODD][culprit::90] = bad
        outcome = ranks.step(gradients)
        assert outcome.result.nonfinite.tolist() == [i == ODD for i in range(len(LAYERS))]
        assert outcome.committed == [False] * world
        means = outcome.all_means()
        assert np.isnan(means[ODD][culprit])
        assert all(np.isfinite(m.astype(np.float32)).all() for i, m in enumerate(means) if i != ODD)
        assert ranks.state() == before
    outcome = ranks.step()
    assert outcome.committed == [True] * world


@every_reduction
@pytest.mark.parametrize("compressor", [Quantize(4, 50), Cast("float32"), Cast("bfloat16")], ids=str)
@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (0, 3), (2, 3)])
def test_a_partial_sum_that_overflows_is_seen_by_all(reduction: str, compressor, pair: tuple[int, int]):
    """Two finite values overflow in a partial sum, though the whole sum would be finite."""
    ranks = simulate(reduction, compressor, 4, topology=TWO_HOSTS)
    gradients = ranks.gradients()
    for rank in range(4):
        gradients[rank][ODD][:] = 3e38 if rank in pair else -3e38
    outcome = ranks.step(gradients)
    bad = outcome.result.nonfinite.tolist()
    assert bad == [i == ODD and bad[ODD] for i in range(len(LAYERS))]
    means = outcome.all_means()
    assert bad[ODD] or np.isfinite(means[ODD]).all()
    assert outcome.committed == [not bad[ODD]] * 4
    gradients = [[np.full(layer.size, 3e38, np.float32) if i == ODD else g for i, (layer, g) in
                  enumerate(zip(LAYERS, rank, strict=True))] for rank in gradients]  # fmt: skip
    assert not ranks.step(gradients).result.finite


@every_world
@every_reduction
def test_a_layer_that_one_rank_has_is_written_on_all(reduction: str, world: int):
    for present in range(world):
        ranks = simulate(reduction, Quantize(4, 32), world)
        gradients = [
            [g if rank == present or i != ODD else None for i, g in enumerate(row)]
            for rank, row in enumerate(ranks.gradients())
        ]
        outcome = ranks.step(gradients)
        assert outcome.result.present.all()
        assert outcome.mean(ODD).any()


@every_world
@every_reduction
def test_a_sparse_layer_is_known_to_all(reduction: str, world: int):
    for where in (0, world - 1):
        ranks = simulate(reduction, Quantize(4, 32), world)
        gradients = ranks.gradients()
        gradients[where][HALF] = SPARSE
        assert ranks.step(gradients).result.sparse.tolist() == [i == HALF for i in range(len(LAYERS))]


@every_world
@every_reduction
def test_a_plan_takes_over_when_all_ranks_hold_it_and_not_before(reduction: str, world: int):
    ranks = simulate(reduction, Quantize(4, 32), world, slice_elements=200, shuffle=True, delay=0.1)
    plan = plan_for(LAYERS, Quantize(6, 32), 1)
    for rank in reversed(range(world)):
        ranks.step()
        assert [p.plan.version for p in ranks.pipelines] == [0] * world
        ranks.pipelines[rank].propose(plan)
    ranks.step()
    assert [p.plan.version for p in ranks.pipelines] == [1] * world
    ranks.step().all_means()


# --- what cannot be -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", PARTIAL)
def test_votes_are_refused_where_partial_sums_travel(reduction: str):
    with pytest.raises(ConfigError, match=r"signum .* works with the reductions sra, all_to_all, gather"):
        simulate(reduction, Signum(32), 3)


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("reduction", [r for r in REDUCTIONS if r not in PARTIAL and r != "sra"])
def test_a_majority_is_the_same_under_all_that_count_at_once(reduction: str, world: int):
    want, got = (simulate(r, Signum(32, momentum=0.5), world, slice_elements=64) for r in ("sra", reduction))
    for _ in range(3):
        assert all(map(same_bytes, got.step().all_means(), want.step().all_means()))


def test_more_servers_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="servers=4 needs 1 to 3 servers among 3 ranks"):
        simulate("parameter_server:servers=4", Quantize(4), 3)


def test_a_rank_alone_serves_itself():
    ranks = simulate("parameter_server:servers=4", Quantize(8), 1)
    gradients = ranks.gradients()
    np.testing.assert_allclose(ranks.step(gradients).mean(ODD), gradients[0][ODD], atol=0.05)


def test_auto_needs_constants_between_hosts_and_none_inside_one():
    with pytest.raises(ConfigError, match="measured constants"):
        simulate("auto", Quantize(4), 4, topology=TWO_HOSTS)
    alone = simulate("auto", Quantize(4), 4, topology=Topology.one_host(4))
    sra = simulate("sra", Quantize(4), 4, topology=Topology.one_host(4))
    assert all(map(same_bytes, alone.step().all_means(), sra.step().all_means()))


def test_auto_takes_the_cheapest_for_every_bucket():
    slow_start = Network(alpha=1.0, beta=1e-9, encode_rate=1e9, decode_rate=1e9)
    ranks = simulate("auto", Quantize(4), 4, topology=Topology(tuple(range(4))), network=slow_start)
    chosen = {type(p.reduction).__name__ for pipeline in ranks.pipelines for p in pipeline.laid_out.programs}
    assert chosen == {"AllToAllBroadcast"}  # one round
    ranks.step().all_means()
