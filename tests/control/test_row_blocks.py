"""L-GreCo over blocks of rows: its items, what it chooses, and how runs with blocks agree and go on."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from control.observed import environment_of, shared
from control.resumed import after_step, check_resumed, resumed, states_of, without_times
from loudest import levels

from gradcomp import Accordion, ConfigError, ErrorFeedback, LayerSpec, LGreCo, LocalClip, Quantize, TopK
from gradcomp.compress import at_level
from gradcomp.compress.blocks import borders
from gradcomp.control import PeriodObservations
from gradcomp.control.candidates import CandidateLevels, layer_bytes
from gradcomp.control.distortion.code_errors import block_errors
from gradcomp.control.distortion.errors import errors
from gradcomp.control.measurement import COLUMNS, measure
from gradcomp.control.phased import Phase
from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.core.vectors import HostVector
from gradcomp.kernels.devices import HOST
from gradcomp.testing.simulation import Simulation, true_mean

LAYERS = [
    LayerSpec("a", (64, 24)),
    LayerSpec("b", (9, 200), "float16"),
    LayerSpec("c", (500,)),
    LayerSpec("d", (5, 8)),
    LayerSpec("e", (0, 4)),
]
FOUR = Quantize(4, 16)
BITS = [2, 3, 4, 5, 6]


def candidates(controller: LGreCo, layers=LAYERS, own=FOUR) -> CandidateLevels:
    return controller.candidate_levels(environment_of(layers, [own] * len(layers)))


def uneven(ranks: Simulation) -> list:
    """Gradients whose rows have sizes of their own, from 1/16 to 16, in no order."""
    drawn = ranks.gradients()
    for rank in drawn:
        for layer, values in zip(ranks.layers, rank, strict=True):
            rows = values.reshape(layer.shape[0] or 1, -1)
            rows *= (2.0 ** ((7 * np.arange(len(rows)) // 3) % 9 - 4))[:, None].astype(values.dtype)
    return drawn


def test_what_is_divided():
    found = candidates(LGreCo(10, blocks=8))
    count = {LAYERS[layer].name: len(rows) for layer, rows in found.items.items()}
    assert count == {"a": 8, "b": 8, "c": 1, "d": 1, "e": 1}
    assert [spec.size for spec in found.specs[:8]] == [192] * 8
    assert [spec.size for spec in found.specs[8:16]] == [192, 208, 192, 208, 192, 208, 192, 408]
    assert found.starts[8:16].tolist() == [0, 192, 400, 592, 800, 992, 1200, 1392]
    whole = candidates(LGreCo(10))
    for layer, rows in found.items.items():
        np.testing.assert_allclose(found.costs[rows].sum(axis=0), whole.costs[layer])
    assert found.layer_of.tolist() == [0] * 8 + [1] * 8 + [2, 3, 4]


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (FOUR, {"levels": [2, 4, TopK(0.1)]}),
        (FOUR, {"levels": [2, 4, Quantize(4, 64)]}),
        (FOUR, {"levels": "hybrid"}),
        (TopK(0.1), {}),
        (FOUR, {"blocks": 1}),
    ],
    ids=["families", "buckets", "hybrid", "TopK", "one"],
)
def test_what_is_not_divided(own, options):
    found = candidates(LGreCo(10, **{"blocks": 8, **options}), own=own)
    assert found.layers.tolist() == [0, 1, 2, 3, 4]
    assert found.specs == tuple(LAYERS)
    assert not found.starts.any()


@pytest.mark.parametrize(
    "own", [ErrorFeedback(FOUR), LocalClip(FOUR, max_norm=1)], ids=["feedback", "clipped"]
)
def test_wrapped_quantisers_are_divided_as_the_quantiser_is(own):
    assert candidates(LGreCo(10, blocks=8), own=own).layers.tolist() == [0] * 8 + [1] * 8 + [2, 3, 4]


@pytest.mark.parametrize("own", [Quantize((2, 4)), ErrorFeedback(Quantize((2, 4)))], ids=str)
def test_levels_by_block_are_no_reference(own):
    with pytest.raises(ConfigError, match="single levels"):
        candidates(LGreCo(10), own=own)
    with pytest.raises(ConfigError, match="single levels"):
        candidates(LGreCo(10, levels=[2, 4, own]))


@pytest.mark.parametrize("memory", [None, 900, 3000])
@pytest.mark.parametrize(
    "own", [FOUR, Quantize(4, 16, rounding="nearest"), Quantize(4, 16, allocate="bytes")], ids=str
)
def test_a_layer_loses_what_its_blocks_lose(own, memory):
    layer = LayerSpec("a", (100, 600))  # more than is coded at once
    found = candidates(LGreCo(10, blocks=5), [layer], own)
    values = np.random.default_rng(0).standard_normal(layer.size).astype(np.float32)
    table = measure(found, {0: HostVector(values)}, COLUMNS + found.width, 7, HOST, memory)
    whole = errors(found.choices[0], layer, values, 7)
    np.testing.assert_allclose(np.sqrt(np.square(table[:, COLUMNS:]).sum(axis=0)), whole, rtol=1e-6)
    for row, at in enumerate(found.starts.tolist()):
        part = values[at : at + found.specs[row].size].astype(np.float64)
        expected = [np.linalg.norm(part), part.mean(), part.std()]
        np.testing.assert_allclose(table[row, :COLUMNS], expected, rtol=1e-6, atol=1e-9)


def test_the_error_of_a_block_is_that_of_its_elements_alone():
    layer, own = LayerSpec("a", (30, 64)), Quantize(4, 16, rounding="nearest")
    found = candidates(LGreCo(10, blocks=5), [layer], own)
    values = np.random.default_rng(0).standard_normal(layer.size).astype(np.float32)
    values[:400] *= 50
    lost = block_errors(found.choices[0], layer, HostVector(values), found.starts, 7)
    for row, at in enumerate(found.starts.tolist()):
        alone = errors(found.choices[row], found.specs[row], values[at : at + found.specs[row].size], 7)
        np.testing.assert_allclose(lost[row], alone, rtol=1e-6)


def test_what_several_levels_lose_is_what_their_blocks_do():
    layer = LayerSpec("a", (30, 64))
    values = np.random.default_rng(0).standard_normal(layer.size).astype(np.float32)
    own = [Quantize(bits, 16) for bits in (2, 7, 4)]
    begins = np.array(borders(layer, 3, 16)[:-1])
    blocks = np.diag(block_errors(own, layer, HostVector(values), begins, 7))
    found = errors([Quantize((2, 7, 4), 16)], layer, values, 7)
    np.testing.assert_allclose(found, [np.linalg.norm(blocks)], rtol=1e-6)


def test_blocks_of_values_that_are_not_finite_or_do_not_fit():
    layer = LayerSpec("a", (30, 64))
    found = candidates(LGreCo(10, blocks=5), [layer])
    values = np.full(layer.size, 3e38, np.float32)
    values[::2] *= -1
    lost = block_errors(found.choices[0], layer, HostVector(values), found.starts, 7)
    assert np.isinf(lost).all()
    values[100] = np.nan
    assert np.isnan(block_errors(found.choices[0], layer, HostVector(values), found.starts, 7)).all()
    with pytest.raises(ConfigError, match="blocks of layer 'a' takes"):
        block_errors(
            found.choices[0], layer, HostVector(np.zeros_like(values)), found.starts, 7, memory_bytes=100
        )


def decided(
    controller: LGreCo, world: int = 2, own=FOUR, layers=LAYERS, **settings
) -> tuple[Simulation, PeriodObservations]:
    """Ranks after their first decision, and what it was made from."""
    ranks = Simulation(layers, own, world, controller=controller, **settings)
    seen, _ = shared(ranks, lambda _: uneven(ranks), 3 * controller.every_steps)
    for _ in range(3 * controller.every_steps):
        if ranks.pipelines[0].controller.observations is None:
            break
        ranks.step(uneven(ranks))
    else:
        raise AssertionError("nothing was decided")
    ranks.step(uneven(ranks))  # the plan is announced in one step and applies from the next
    return ranks, seen


def predicted(plan, world: int) -> float:
    """Bytes that a rank sends a step under the plan."""
    return sum(
        layer_bytes(at_level(a.compressor, a.level), layer, Scheme("sra"), Topology.one_host(world))
        for a, layer in zip(plan.assignments, LAYERS, strict=True)
    )


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("settings", [{}, {"slice_elements": 300}], ids=["whole", "slices"])
def test_never_dearer_than_by_layers_and_within_the_budget(world, settings):
    by_block, seen = decided(LGreCo(6, levels=BITS, blocks=8), world, **settings)
    by_layer, whole = decided(LGreCo(6, levels=BITS), world, **settings)
    found = levels(by_block)
    assert isinstance(found[0], tuple)
    assert len(set(found[0])) > 2
    assert found[0] != tuple(sorted(found[0]))
    squares, rows = seen.errors**2, np.arange(len(seen.norm))
    chosen = by_block.pipelines[0].controller.current
    budget = squares[rows, seen.candidates.reference].sum()
    np.testing.assert_allclose(
        budget, (whole.errors[np.arange(5), whole.candidates.reference] ** 2).sum(), rtol=1e-5
    )
    assert squares[rows, chosen].sum() <= budget * (1 + len(rows) / 10_000)
    fewer = predicted(by_layer.pipelines[0].plan, world) / predicted(by_block.pipelines[0].plan, world)
    assert fewer > 1.05
    # The plan's bytes are those of the choices.
    expected = seen.costs[rows, chosen].sum()
    assert predicted(by_block.pipelines[0].plan, world) == pytest.approx(expected)


def test_the_optimum_of_a_tiny_case():
    controller = LGreCo(6, levels=[2, 4, 6], blocks=5)
    _, seen = decided(controller, layers=[LayerSpec("a", (10, 40)), LayerSpec("b", (4, 16))])
    assert len(seen.norm) == 6
    squares, costs, rows = seen.errors**2, seen.costs, np.arange(6)
    budget = squares[rows, seen.candidates.reference].sum()
    every = np.array(list(itertools.product(range(3), repeat=6)))
    fits = squares[rows, every].sum(axis=1) <= budget * (1 - 6 / 10_000)
    best = costs[rows, every].sum(axis=1)[fits].min()
    found = controller.decide(seen).choices
    assert costs[rows, found].sum() <= best
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"metric": "squared"},
        {"metric": "adam"},
        {"metric": "norm"},
        {"window": 4},
        {"accordion": Accordion(low=5, high=3, every_steps=4)},
    ],
    ids=str,
)
def test_every_form_of_it_takes_blocks(options):
    ranks, seen = decided(LGreCo(4, blocks=4, **options), own=Quantize(4, 16))
    assert len(seen.norm) == 4 + 4 + 3
    assert ranks.pipelines[0].plan.version > 0


def test_a_silent_block_keeps_its_level():
    ranks = Simulation(LAYERS[:1], FOUR, 2, controller=LGreCo(4, levels=BITS, blocks=8))
    for _ in range(10):
        drawn = uneven(ranks)
        for rank in drawn:
            rank[0][:192] = 0
        ranks.step(drawn)
    (found,) = levels(ranks)
    assert found[0] == 4
    assert len(set(found)) > 1


def test_blocks_of_one_level_are_a_plan_without_blocks():
    ranks = Simulation(LAYERS, FOUR, 2, controller=LGreCo(4, levels=[4], blocks=8))
    before = ranks.pipelines[0].plan.to_json()
    for _ in range(9):
        ranks.step()
    assert ranks.pipelines[0].plan.to_json() == before


@pytest.mark.parametrize("world", [1, 3])
def test_feedback_telescopes_through_its_plans(world):
    own = Quantize(4, 16, rounding="nearest")
    ranks = Simulation(LAYERS, own, world, controller=LGreCo(3, levels=BITS, blocks=8), slice_elements=300)
    missing, seen = [np.zeros(layer.size) for layer in LAYERS], set()
    for step in range(14):
        drawn = uneven(ranks) if step < 6 else [[g[::-1].copy() for g in rank] for rank in uneven(ranks)]
        means = ranks.step(drawn).all_means()
        seen.add(levels(ranks)[0])
        for i in range(len(LAYERS)):
            missing[i] += true_mean(drawn, i) - means[i].astype(np.float64)
    assert len(seen) >= (2 if world == 1 else 3)
    for i, layer in enumerate(LAYERS):
        np.testing.assert_allclose(
            missing[i], ranks.owed(i), atol=2e-4 if layer.dtype == "float32" else 2.0**-4
        )


# --- checkpoints ---------------------------------------------------------------------------------------------------


def job(world: int = 3, **options) -> Simulation:
    controller = LGreCo(3, **{"levels": BITS, "blocks": 8, **options})
    return Simulation(LAYERS, FOUR, world, controller=controller, slice_elements=300)


def through_json(states):
    """What a checkpoint holds beside arrays, as text."""
    texts = [json.dumps(state.shared.to_plain()) for state in states]
    assert len(set(texts)) == 1
    return [replace(s, shared=type(s.shared).from_plain(json.loads(texts[0]))) for s in states]


@pytest.mark.parametrize("options", [{"window": 2}, {"samples": 2}], ids=["sums", "samples"])
def test_resumed_is_uninterrupted_bit_for_bit(options, monkeypatch):
    without_times(monkeypatch)
    source = job(**options)
    drawn = [uneven(source) for _ in range(15)]
    whole = check_resumed(
        lambda: job(**options),
        lambda ranks, n: after_step(ranks, ranks.step(drawn[n])),
        15,
        range(5, 10),
        lambda states, at: through_json(states),
    )
    assert any(isinstance(level, tuple) for level in levels(whole))


@pytest.mark.parametrize("other", [1, 5, 16])
def test_another_number_of_blocks_goes_on_from_the_reference(other):
    states = None
    ranks = job()
    for _ in range(8):
        ranks.step(uneven(ranks))
        if ranks.pipelines[0].plan.version:
            states = states or states_of(ranks)
    held = ranks.pipelines[0].plan.assignments[0].level
    assert isinstance(held, tuple)
    found = resumed(job(blocks=other), through_json(states))
    assert found.pipelines[0].plan.assignments[0].level == states[0].shared.plan.assignments[0].level
    run = found.pipelines[0].controller
    rows = run.candidates.items[0]
    assert (run.current[rows] == run.candidates.reference[rows]).all()
    for _ in range(9):
        found.step(uneven(found))
    level = levels(found)[0]
    assert len(level if isinstance(level, tuple) else (level,)) == other


def test_ranks_without_layers_begin_anew_with_those_that_have_some():
    """With other blocks, what one rank holds does not fit; the other one holds nothing."""

    def alone(blocks):
        controller = LGreCo(3, levels=BITS, blocks=blocks, samples=2)
        return Simulation(LAYERS[:1], FOUR, 2, controller=controller)

    ranks, phases = alone(8), set()
    for _ in range(7):
        ranks.step(uneven(ranks))
        phases.add(ranks.pipelines[0].controller.phase)
        found = resumed(alone(4), through_json(states_of(ranks)))
        assert len({p.controller.phase for p in found.pipelines}) == 1
        passed = set()
        for _ in range(10):
            found.step(uneven(found))
            passed.add(found.pipelines[0].controller.phase)
        assert {Phase.SHARE, Phase.ANNOUNCE} <= passed
    assert {Phase.SHARE, Phase.ANNOUNCE} <= phases


@pytest.mark.parametrize("samples", [None, 2])
def test_a_run_without_blocks_goes_on_with_them(samples):
    options = {"samples": samples} if samples else {"window": 2}
    ranks = job(blocks=1, **options)
    for _ in range(8):
        ranks.step(uneven(ranks))
    found = resumed(job(**options), through_json(states_of(ranks)))
    before = levels(ranks)
    run = found.pipelines[0].controller
    chosen = [run.candidates.choices[row][run.current[row]].level for row in run.candidates.items[0]]
    assert chosen == [before[0]] * 8
    for _ in range(9):
        found.step(uneven(found))
    assert isinstance(levels(found)[0], tuple)


@pytest.mark.parametrize("world", [1, 2])
def test_blocks_go_to_other_numbers_of_ranks(world):
    old, new = job(3, samples=2), job(world, samples=2)
    for _ in range(7):
        old.step(uneven(old))
    resumed(new, through_json(states_of(old)))
    assert levels(new) == levels(old)
    for _ in range(9):
        new.step(uneven(new))
    levels(new)
