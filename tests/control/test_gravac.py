"""GraVAC: Algorithm 1 of Tyagi and Swany 2023 as it is read here, and the same plan on all ranks in every step."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from control.resumed import after_step, check_resumed, plan_of, resumed, states_of, through_files
from hypothesis import given
from hypothesis import strategies as st
from loudest import Loudest
from tiers import examples

from gradcomp import (
    DGC,
    ConfigError,
    ErrorFeedback,
    LayerSpec,
    Policy,
    Quantize,
    RandomBlock,
    RandomK,
    RedSync,
    SIDCo,
    StateError,
    TopK,
    TwoLevelSelection,
    Warmup,
)
from gradcomp.compress import at_level
from gradcomp.control.base import to_plain
from gradcomp.control.gravac import GraVAC, GraVACRun
from gradcomp.control.gravac_gains import UNBOUNDED
from gradcomp.control.gravac_search import Search
from gradcomp.testing.simulation import SPARSE, Simulation, true_mean

LAYERS = [
    LayerSpec("a", (40, 13)),
    LayerSpec("none", (0,)),
    LayerSpec("b", (300,), "float16"),
    LayerSpec("c", (90,)),
    LayerSpec("double", (9,), "float64"),
]
SMALL = GraVAC(2, 16, epsilon=0.8, window=7, omega=0.05)
# Under gradients as drawn below its choices change often.
RESTLESS = replace(SMALL, epsilon=0.6, gain="energy")


# --- candidates -------------------------------------------------------------------------------------------------------


def test_candidates_are_the_papers():
    assert GraVAC().candidates == (10, 20, 40, 160, 1000)
    assert GraVAC(10, 2000, policy="geometric").candidates == (10, 20, 40, 80, 160, 320, 640, 1280, 2000)
    assert GraVAC(1.5, 50, policy="geometric").candidates == (1.5, 3, 6, 12, 24, 48, 50)
    assert GraVAC(10, 10).candidates == (10,)
    assert GraVAC(1, 4).candidates == (1, 2, 4)
    assert GraVAC(1, 1e300).candidates[-1] == 1e300


# --- Algorithm 1, line by line ----------------------------------------------------------------------------------------


class Literal:
    """Algorithm 1 with scalars, dictionaries and whole histories; comments are its line numbers."""

    def __init__(self, controller: GraVAC, world: int) -> None:
        self.candidates = controller.candidates
        self.epsilon, self.window, self.omega = controller.epsilon, controller.window, controller.omega
        self.world = world
        self.theta_min = self.theta_c = self.candidates[0]
        self.of_averages = controller.gain == "released"
        self.samples: dict[float, list[tuple[float, float]]] = {}
        self.t_compress: dict[float, float] = {}
        self.t_sys: dict[float, list[float]] = {}  # of the window
        self.send = 1.0
        self.i = 0

    def delta(self, theta: float) -> float:
        """EWMAs by their definition, weights w (1 - w)^age: of norms and of gradients' norms; of gains, and of 1."""
        if theta == 1:
            return 1.0
        newest = min(1.0, self.world / 100)
        kept = self.samples.get(theta, [])
        weights = [newest * (1 - newest) ** age for age in range(len(kept))][::-1]
        sums = [
            sum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*kept, strict=True)
        ]
        return sums[0] / sums[1] if kept else float("nan")

    def timed(self, theta: float, t_iter: float) -> None:
        self.t_sys.setdefault(theta, []).append(self.world / t_iter)  # 29

    def iteration(self, gain, size: float) -> None:
        self.i += 1
        whole = size if self.of_averages else 1.0
        for theta in {self.theta_min, self.theta_c}:
            self.samples.setdefault(theta, []).append((whole * gain(theta), whole))  # 7, 9
        if self.i % self.window == 0:  # 32
            for theta, speeds in self.t_sys.items():
                self.t_compress[theta] = statistics.median(speeds) * self.delta(theta)  # 30
            self.t_sys = {}
            delta_min, delta_c = self.delta(self.theta_min), self.delta(self.theta_c)
            if self.omega >= abs(delta_min - delta_c) / delta_min:  # 34, before 33
                self.theta_min = self.theta_c  # 35
            above = [theta for theta in self.candidates if theta > self.theta_c]
            self.theta_c = above[0] if above else self.candidates[-1]  # 33
            ct = sorted((t, theta) for theta, t in self.t_compress.items())  # 36
            if len(ct) >= 2 and abs((ct[-1][0] - ct[-2][0]) / ct[-2][0]) <= self.omega:  # 37
                theta_ideal = min(ct[-1][1], ct[-2][1])  # 38
                self.theta_c = theta_ideal  # 39
                self.theta_min = min(self.theta_min, theta_ideal)
        if self.delta(self.theta_c) >= self.epsilon:  # 11
            self.send = self.theta_c
        elif self.delta(self.theta_min) >= self.epsilon:  # 16
            self.send = self.theta_min
        else:  # 21
            self.send = 1.0


def chosen(search: Search, row: int = 0) -> tuple[float, float, float]:
    """theta_min, theta_c, and what is sent next."""
    return tuple(search.factors[k[row]] for k in (search.minimum, search.candidate, search.sent))


@pytest.mark.parametrize("world", [1, 8, 60, 250])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("form", ["norm", "released"])
def test_decisions_are_those_of_the_algorithm(world: int, seed: int, form: str):
    draw = np.random.default_rng(seed)
    controller = GraVAC(
        float(draw.choice([1, 2, 10])),
        float(draw.choice([30, 1000])),
        float(draw.choice([0.3, 0.7, 0.95])),
        window=int(draw.integers(1, 9)),
        omega=float(draw.choice([0, 0.02, 0.3])),
        policy=str(draw.choice(["exponential", "geometric"])),
        gain=form,
    )
    literal, search = Literal(controller, world), controller.search(world, 1)
    exponents = draw.uniform(0.01, 0.4, 250)
    observed = set()
    for i in range(250):
        exponent = exponents[i // 40 * 40] * draw.uniform(0.7, 1.4)

        def gain(theta, exponent=exponent):
            return float(theta) ** -exponent

        if i:
            t_iter = (0.2 + 1 / literal.send) * draw.uniform(0.98, 1.02)
            literal.timed(literal.send, t_iter)
            search.time(t_iter, search.sent)
        least, candidate, _ = chosen(search)
        size = draw.uniform(1, 1e6)
        search.step(*(np.array([size * g]) for g in (1, gain(least), gain(candidate))))
        literal.iteration(gain, size)
        assert chosen(search) == (literal.theta_min, literal.theta_c, literal.send), f"iteration {i + 1}"
        observed.add(literal.send)
    assert int(search.steps.sum()) == 250
    assert observed <= set(search.factors)


def test_two_steps_by_hand():
    # Of 50 ranks, the newest sample weighs one half. ||g|| = 2 and then 1, of which the selection keeps 1 and then 0.9.
    by_norm, by_energy, released = (
        GraVAC(gain=gain).search(50, 1) for gain in ("norm", "energy", "released")
    )
    for whole, kept in ((2.0, 1.0), (1.0, 0.9)):
        for search in (by_norm, released):
            search.step(*(np.array([x]) for x in (whole, kept, kept)))
        by_energy.step(*(np.array([x * x]) for x in (whole, kept, kept)))
    # (1/4 0.5 + 1/2 0.9) / (1/4 + 1/2), its squares, and (1/4 1 + 1/2 0.9) / (1/4 2 + 1/2 1).
    assert by_norm.gains[0, 1] == pytest.approx(0.575 / 0.75, rel=1e-15)
    assert by_energy.gains[0, 1] == pytest.approx(0.4675 / 0.75, rel=1e-15)
    assert released.gains[0, 1] == pytest.approx(0.7, rel=1e-15)
    assert [chosen(search)[2] for search in (by_norm, by_energy, released)] == [10, 1, 10]


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.05, 0.95),
    st.floats(0.05, 0.95),
    st.sampled_from(["norm", "released"]),
    st.sampled_from([2, 30, 250]),
)
@examples(40)
def test_a_higher_epsilon_never_sends_fewer_bytes(seed, one, other, gain, world):
    """On the same gains, in every step: with omega = 0 nothing else decides what is measured."""
    draw = np.random.default_rng(seed)
    exponents, sizes = draw.uniform(0.01, 0.6, 60), draw.uniform(1, 1e3, 60)
    searches = [
        GraVAC(epsilon=e, window=7, omega=0, gain=gain).search(world, 1) for e in sorted((one, other))
    ]
    for exponent, size in zip(exponents, sizes, strict=True):
        sent = []
        for search in searches:
            least, candidate, factor = chosen(search)
            search.time(1 / factor, search.sent)
            search.step(*(np.array([size * theta**-exponent]) for theta in (1, least, candidate)))
            sent.append(chosen(search)[2])
        assert sent[0] >= sent[1]


def run(search: Search, steps: int, gain, seconds=lambda theta: 1.0) -> None:
    for _ in range(steps):
        least, candidate, sent = chosen(search)
        search.time(seconds(sent), search.sent)
        search.step(np.ones(1), np.array([gain(least)]), np.array([gain(candidate)]))


def test_it_falls_back_to_the_minimum_and_then_to_dense():
    gains = {10: 0.8, 20: 0.5}
    search = GraVAC(window=3, maximum=20).search(100, 1)
    run(search, 4, gains.get)
    assert chosen(search) == (10, 20, 10)
    gains[10] = 0.6
    run(search, 1, gains.get)
    assert chosen(search) == (10, 20, 1)
    gains[20], gains[10] = 0.7, 0.9
    run(search, 1, gains.get)
    assert chosen(search) == (10, 20, 20), "a gain of epsilon is enough"


def falling(theta: float) -> float:
    """More than omega is lost from each candidate to the next but the last."""
    return 0.95 * theta**-0.02


def test_it_stops_where_throughput_is_saturated():
    # Tyagi and Swany 2023, section IV-B: those of 1280 and 2000 lie within omega, so it stays at 1280.
    controller = GraVAC(10, 2000, window=4, policy="geometric")
    search = controller.search(100, 1)
    run(search, 200, falling, seconds=lambda theta: 1 / min(theta, 1290))
    assert chosen(search) == (10, 1280, 1280)


@pytest.mark.parametrize("seconds_at_40", [0.98, 0.99])
def test_the_ideal_factor_is_the_lower_one_whichever_is_faster(seconds_at_40):
    search = GraVAC(10, 40, window=2).search(100, 1)
    run(search, 40, falling, seconds={1: 9, 10: 3, 20: 1.0, 40: seconds_at_40}.get)
    assert chosen(search) == (10, 20, 20)
    assert (search.throughput[0, 2] > search.throughput[0, 3]) == (seconds_at_40 == 0.99)


def test_an_ideal_factor_below_the_minimum_lowers_it():
    search = GraVAC(10, 40, window=2).search(100, 1)
    run(search, 4, lambda theta: 0.9, seconds=lambda theta: 1 / theta)
    assert chosen(search)[:2] == (20, 40)
    search.throughput[0] = [0.5, 100, np.nan, 100.5]  # 10 and 40 are alike, and the best
    run(search, 2, lambda theta: 0.1, seconds=lambda theta: 100)
    assert chosen(search)[:2] == (10, 10)


def test_what_is_not_finite_leaves_no_trace():
    search = GraVAC(window=2).search(100, 2)
    good = np.array([1.0, 2.0])
    search.step(good, good / 2, good / 3)
    before = json.dumps(to_plain(search.state(["x", "y"])))
    for bad in (np.nan, np.inf):
        for at in range(3):
            parts = [good.copy() for _ in range(3)]
            parts[at][1] = bad
            assert not search.step(*parts)
    assert not search.step(np.zeros(2), np.zeros(2), np.zeros(2))
    assert json.dumps(to_plain(search.state(["x", "y"]))) == before


def test_a_row_with_nothing_in_it_has_no_gain():
    search = GraVAC(window=2).search(100, 2)
    for _ in range(5):
        search.step(np.array([1.0, 0.0]), np.array([0.9, 0.0]), np.array([0.8, 0.0]))
    assert chosen(search, 0)[2] > 1
    assert chosen(search, 1)[2] == 1


# --- on ranks ---------------------------------------------------------------------------------------------------------


def scripted(monkeypatch, seconds) -> None:
    """Iterations take ``seconds(rank, number)``."""
    real = GraVACRun.finish

    def finish(running, step):
        taken = seconds(running.environment.rank, step.number - 1) if step.number else 0.0
        return real(running, replace(step, seconds=taken))

    monkeypatch.setattr(GraVACRun, "finish", finish)


def wild(rank: int, number: int) -> float:
    """Another time on every rank in every iteration, the same in every run."""
    return random.Random(1000 * number + rank).uniform(0.5, 3)


def drawn(ranks: Simulation, step: int, **options):
    """Gradients of which a few elements are nearly everything, or in which all are alike: gains go up and down."""
    gradients = ranks.gradients(**options)
    peaked = step % 24 >= 8
    for rank in gradients:
        for i, g in enumerate(rank):
            if isinstance(g, np.ndarray) and g.size > 9:
                g[:] = np.sign(g)
                if peaked:
                    g[(step + i) % 5 :: 19] *= 30
    return gradients


def plans(ranks: Simulation) -> list:
    """The plan's compressors; all ranks must have the same."""
    plan_of(ranks)
    return [at_level(a.compressor, a.level) for a in ranks.pipelines[0].plan.assignments]


def go_on(ranks: Simulation, steps: range) -> None:
    for step in steps:
        ranks.step(drawn(ranks, step))
        plans(ranks)


def sends(ranks: Simulation) -> list[str]:
    return [getattr(c, "send", "exact") for c in plans(ranks)]


EXACT, SAMPLED, HALVED = TopK(0.5), DGC(momentum_factor=0.0), RedSync(0.5)


@pytest.mark.parametrize("per_layer", [False, True], ids=["model", "layers"])
@pytest.mark.parametrize(
    ("world", "compressor"),
    [
        *[(2, EXACT), (3, HALVED), (2, SAMPLED)],
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [(1, EXACT), (3, EXACT), (7, EXACT), (1, HALVED), (3, SAMPLED)]
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_plans_and_means_agree_and_nothing_is_lost(world, per_layer, compressor, monkeypatch):
    scripted(monkeypatch, wild)
    monkeypatch.setattr(Search, "_average", heavy(Search._average))
    ranks = Simulation(
        LAYERS, compressor, world, seed=world, shuffle=True, delay=0.3, slice_elements=200,
        controller=replace(SMALL, per_layer=per_layer),
    )  # fmt: skip
    missing = [np.zeros(layer.size) for layer in LAYERS]
    observed, versions = set(), []
    for step in range(40):
        gradients = drawn(ranks, step)
        observed.update(sends(ranks))
        versions.append(ranks.pipelines[0].plan.version)
        means = ranks.step(gradients).all_means()
        for i in (0, 3):
            missing[i] += true_mean(gradients, i) - means[i].astype(np.float64)
            np.testing.assert_allclose(missing[i], ranks.owed(i), atol=2e-4)
    plans(ranks)
    assert observed == {"candidate", "minimum", "dense", "exact"}
    assert max(np.diff(versions)) == 1
    searches = [json.dumps(p.controller.shared_state()) for p in ranks.pipelines]
    assert len(set(searches)) == 1


def heavy(average):
    """A few ranks give the newest sample little weight; here it has much, so that plans change often."""

    def averaged(search, *arguments):
        search.world, world = 40, search.world
        try:
            average(search, *arguments)
        finally:
            search.world = world

    return averaged


def test_a_layer_chooses_by_itself():
    layers = [LayerSpec("peaked", (500,)), LayerSpec("flat", (500,))]
    ranks = Simulation(layers, TopK(0.5), 2, controller=replace(SMALL, per_layer=True))
    for _ in range(6):
        gradients = [[np.ones(500, np.float32), np.ones(500, np.float32)] for _ in range(2)]
        for rank in gradients:
            rank[0][::100] = 50
        ranks.step(gradients)
    assert sends(ranks) == ["candidate", "dense"]


def test_gains_are_those_of_the_sums_over_ranks():
    parts = {}
    for gain in ("norm", "energy", "released"):
        ranks = Simulation(LAYERS, TopK(0.5), 3, controller=replace(SMALL, gain=gain))
        gradients = [[g * g.dtype.type(r + 1) for g in rank] for r, rank in enumerate(ranks.gradients())]
        ordered = [[np.sort(np.square(g.astype(np.float64)))[::-1] for g in rank] for rank in gradients]
        ranks.step(gradients)
        parts[gain] = ranks.pipelines[0].controller.search.gains[0, 1]
    squares = [(s[: round(s.size / 2)].sum(), s.sum()) for rank in ordered for s in rank[:4]]
    kept, whole = np.sqrt(squares).sum(axis=0)  # norms of layers, as the authors' code has it
    assert [parts["norm"], parts["released"]] == pytest.approx([kept / whole] * 2, rel=1e-6)
    kept, whole = np.sum(squares, axis=0)
    assert parts["energy"] == pytest.approx(kept / whole, rel=1e-6)


@pytest.mark.parametrize("gain", ["norm", "energy", "released"])
def test_gains_are_their_formulas_over_gradients_and_residuals(gain):
    """Which vector is below the line, squares or not, one average or two, and what stands for the candidate."""
    spec = [LayerSpec("a", (300,)), LayerSpec("b", (80,))]
    ranks = Simulation(spec, TopK(0.5), 2, controller=GraVAC(4, 16, epsilon=0.05, window=1000, gain=gain))
    searches = [pipeline.controller.search for pipeline in ranks.pipelines]
    for search in searches:
        search.candidate[:] = 3
    sums = []
    for step in range(8):
        gradients = ranks.gradients()
        parts = np.zeros(4)  # of gradients, p, and the parts that are kept at 4x and 16x
        for rank, pipeline in enumerate(ranks.pipelines):
            for i, g in enumerate(gradients[rank]):
                p = np.sort(np.abs(g + pipeline.residuals.first.value(i)).astype(np.float64))[::-1]
                # The plan of the first step was made when the minimum was the candidate.
                candidate = p[: round(len(p) / (16 if step else 4))]
                vectors = g.astype(np.float64), p, p[: len(p) // 4], candidate
                squares = np.array([vector @ vector for vector in vectors])
                parts += squares if gain == "energy" else np.sqrt(squares)
        sums.append(parts)
        ranks.step(gradients)
        weights = 0.98 ** np.arange(step + 1)[::-1]
        whole, total, least, candidate = np.array(sums).T
        if gain == "released":
            expected = [weights @ least / (weights @ whole)] * 2
        else:
            expected = [weights @ (kept / total) / weights.sum() for kept in (least, candidate)]
        assert searches[0].gains[0, [1, 3]].tolist() == pytest.approx(expected, rel=1e-6)
    assert ranks.pipelines[0].controller.steps_by_factor == {1: 1, 16: 7}
    assert (searches[0].gains[0, 1] > 1) == (gain == "released")


RANDOM = [RandomK(0.5), RandomBlock(0.5)]


@pytest.mark.parametrize(
    "compressor",
    [
        EXACT,
        SAMPLED,
        HALVED,
        SIDCo(0.5),
        *RANDOM,
        DGC(momentum_factor=0.9),
        ErrorFeedback(TopK(0.5), decay=0.5),
        TopK(0.5, feedback=False),
        TopK(0.5, values=Quantize(4, 32)),
    ],
    ids=lambda c: c.to_string()[:40],
)
def test_a_gain_is_a_share(compressor):
    for gain in ["norm"] if compressor in RANDOM else ["norm", "energy"]:
        ranks = Simulation(LAYERS, compressor, 2, controller=replace(SMALL, epsilon=0.01, gain=gain))
        for step in range(20):
            ranks.step(drawn(ranks, step))
            gains = ranks.pipelines[0].controller.search.gains
            known = gains[~np.isnan(gains)]
            assert ((known >= 0) & (known <= 1)).all()
        assert len(known) > 2
        assert (known < 1).any()


@pytest.mark.parametrize("compressor", RANDOM, ids=lambda c: c.name)
def test_the_gain_of_a_random_selection_is_one_over_the_root_of_the_factor(compressor):
    controller = GraVAC(1.5, 48, epsilon=0.7, window=10, omega=0, policy="geometric")
    for feedback in (False, True):
        drawing = replace(compressor, feedback=feedback)
        ranks = Simulation([LayerSpec("w", (6000,))], drawing, 3, controller=controller)
        for _ in range(60):
            ranks.step()
        running = ranks.pipelines[0].controller
        assert running.steps_by_factor == {1: 1, 1.5: 59}, "3x keeps 0.58"
        gains, factors = running.search.gains[0], np.array(running.search.factors)
        if not feedback:
            assert gains.tolist() == pytest.approx((factors**-0.5).tolist(), rel=0.03)
        elif compressor.name == "random_k":
            # A third of the elements are strata of their own, always sent. The others wait for a step in the mean, so
            # their energy in p is that of two gradients: 1 + 2 of 1 + 4 is kept.
            assert gains[1] == pytest.approx((3 / 5) ** 0.5, rel=0.02)


def test_by_the_released_form_a_random_selection_climbs():
    """Figure 11: with the residual above the line only, the minimum's gain passes 1, and the candidate has the same."""
    ranks = Simulation(
        [LayerSpec("w", (600,))], RandomK(), 2, delay=0.3,
        controller=GraVAC(1.5, 48, epsilon=0.7, window=10, policy="geometric", gain="released"),
    )  # fmt: skip
    missing = np.zeros(600)
    for _ in range(80):
        gradients = ranks.gradients()
        missing += true_mean(gradients, 0) - ranks.step(gradients).mean(0).astype(np.float64)
        np.testing.assert_allclose(missing, ranks.owed(0), atol=2e-4)
    assert set(ranks.pipelines[0].controller.steps_by_factor) >= {1.5, 3, 6, 12, 24, 48}


def test_where_a_tenth_keeps_half_of_the_energy_forms_compress_more_or_less():
    """As on a ResNet-20, whose gain by energy is 0.47 to 0.50, and by norm about the root of that."""
    sent = {}
    for gain in ("norm", "energy", "released"):
        ranks = Simulation([LayerSpec("w", (1000,))], TopK(0.1), 2, controller=GraVAC(window=40, gain=gain))
        draw = np.random.default_rng(0)
        for _ in range(120):
            # Of a tenth of the elements, nine times the others' energy each: a half of it all.
            loud = np.where(np.arange(1000) < 100, 3.0, 1.0) * draw.choice([-1, 1], 1000)
            ranks.step([[loud.astype(np.float32)] for _ in range(2)])
        sent[gain] = ranks.pipelines[0].controller.steps_by_factor
    assert sent["energy"] == {1: 120}
    # What is not sent is in p from then on: the gain falls, and a dense step clears the residual.
    assert sent["norm"].keys() == {1, 10}
    assert sent["norm"][1] > 60
    # Nothing restrains the candidate once the residual has made the minimum's gain large.
    assert sent["released"][1] == 1
    assert sent["released"].keys() >= {10, 20, 40}


def test_the_time_of_an_iteration_belongs_to_what_it_sent(monkeypatch):
    cost = {"dense": 8.0, "minimum": 2.0, "candidate": 1.0}
    sent = {}
    scripted(monkeypatch, lambda rank, number: cost[sent[number]] * (1 + rank))
    monkeypatch.setattr(Search, "_average", heavy(Search._average))
    taken, time = [], Search.time

    def noted(search, seconds, what):
        taken.append((seconds, what[0]))
        time(search, seconds, what)

    monkeypatch.setattr(Search, "time", noted)
    ranks = Simulation(LAYERS[:1], TopK(0.5), 3, controller=replace(RESTLESS, window=1000))
    for pipeline in ranks.pipelines:
        pipeline.controller.search.candidate[:] = 2  # so that it differs from the minimum
    for step in range(60):
        sent[step] = "dense" if step == 0 else sends(ranks)[0]
        ranks.step(drawn(ranks, step))
    assert set(sent.values()) == set(cost)
    names = ["dense", "minimum", "candidate"]
    # Three ranks take once, twice and three times as long. The first step, which nobody chose, does not count.
    expected = [(2 * cost[sent[i]], names.index(sent[i])) for i in range(1, 58)]
    assert taken[::3] == expected


def test_a_step_that_is_not_finite_is_skipped(monkeypatch):
    scripted(monkeypatch, lambda rank, number: 1.0)
    clean, ranks = (Simulation(LAYERS, TopK(0.5), 2, controller=SMALL) for _ in range(2))
    for step in range(12):
        gradients = drawn(clean, step)
        clean.step(gradients)
        if step in (0, 3, 6):
            bad = [[g.copy() for g in rank] for rank in gradients]
            bad[step % 2][0][5] = np.nan if step else np.inf
            before = ranks.pipelines[0].controller.search.state(["*"]).rows["*"]
            assert not ranks.step(bad).result.finite
            after = ranks.pipelines[0].controller.search.state(["*"]).rows["*"]
            assert replace(after, timed=[]) == replace(before, timed=[])
        ranks.step(gradients)
    a, b = (s.pipelines[0].controller.search for s in (clean, ranks))
    assert a.gains.tobytes() == b.gains.tobytes()
    assert np.array_equal(a.steps, b.steps)


def test_absent_and_sparse_layers_do_no_harm():
    ranks = Simulation(LAYERS, TopK(0.5), 3, shuffle=True, controller=replace(SMALL, per_layer=True))
    for step in range(12):
        gradients = drawn(ranks, step, absent=[0] if step % 3 else [])
        if step > 5:
            for rank in gradients:
                rank[3] = SPARSE
        ranks.step(gradients)
        plans(ranks)
    assert ranks.pipelines[0].ordering.sparse == {3}


def test_it_begins_when_the_warm_up_has_ended():
    ranks = Simulation(LAYERS, Warmup(TopK(0.5), 6), 2, controller=SMALL)
    for step in range(12):
        assert (sends(ranks)[0] == "exact") == (step < 6)
        ranks.step(drawn(ranks, 20))
    assert ranks.pipelines[0].controller.search.taken == 6


def test_a_minimum_of_one_is_dense():
    ranks = Simulation(LAYERS, TopK(0.5), 2, controller=GraVAC(1, 4, epsilon=0.5, window=3))
    found = []
    for _ in range(5):
        found.append(plans(ranks)[0])
        ranks.step(drawn(ranks, 20))
    assert [c.send for c in found] == ["dense"] * 3 + ["dense", "candidate"]
    assert found[4].candidate == 0.5


@pytest.mark.parametrize("per_layer", [False, True], ids=["model", "layers"])
def test_what_was_sent_is_counted(per_layer):
    layers = [LayerSpec("a", (400,)), LayerSpec("b", (100,))]
    ranks = Simulation(layers, TopK(0.5), 3, controller=replace(SMALL, per_layer=per_layer))
    running, floats = ranks.pipelines[0].controller, 0
    for step in range(30):
        for compressor, layer in zip(plans(ranks), layers, strict=True):
            share = {"dense": 1.0, "minimum": compressor.level, "candidate": compressor.candidate}[
                compressor.send
            ]
            floats += round(share * layer.size)
        ranks.step(drawn(ranks, step))
    assert running.floats_sent == floats
    assert running.dense_floats == 30 * 500
    assert set(running.steps_by_factor) <= {1, 2, 4, 8, 16}
    assert sum(running.steps_by_factor.values()) == 30 * (2 if per_layer else 1)


def test_the_end_of_a_window_is_explained():
    ranks = Simulation(LAYERS, TopK(0.5), 2, controller=SMALL)
    for step in range(7):
        assert ranks.pipelines[0].controller.reason == ""
        ranks.step(drawn(ranks, step))
    reason = ranks.pipelines[0].controller.reason
    assert reason.startswith("window ends at step 6: *: gains ")
    assert "now 2x to " in reason


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_layer", [False, True])
def test_resumed_is_uninterrupted_bit_for_bit(per_layer: bool, tmp_path, monkeypatch):
    scripted(monkeypatch, wild)
    monkeypatch.setattr(Search, "_average", heavy(Search._average))

    def job():
        return Simulation(LAYERS, DGC(0.5), 3, controller=replace(SMALL, per_layer=per_layer))

    source = job()
    gradients = [drawn(source, step) for step in range(24)]

    def step(ranks, number):
        return after_step(ranks, ranks.step(gradients[number])), ranks.state()

    whole = check_resumed(
        job, step, 24, (0, 1, 2, 7, 13), lambda states, at: through_files(states, tmp_path / str(at))
    )
    assert whole.pipelines[0].controller.search.taken == 24


@pytest.mark.parametrize("world", [1, 2, 5])
def test_another_number_of_ranks_goes_on(world: int):
    old, new = (Simulation(LAYERS, TopK(0.5), w, controller=SMALL) for w in (3, world))
    go_on(old, range(9))
    resumed(new, states_of(old))
    before, after = old.pipelines[0].controller.search, new.pipelines[-1].controller.search
    assert chosen(before) == chosen(after)
    assert before.gains.tobytes() == after.gains.tobytes()
    go_on(new, range(9, 20))
    assert after.taken == 20


def test_from_another_controllers_state_it_begins_anew(caplog):
    old = Simulation(LAYERS, TopK(0.5), 2, controller=Loudest(3))
    new = Simulation(LAYERS, TopK(0.5), 2, controller=SMALL)
    old.step()
    resumed(new, states_of(old))
    assert "begins anew" in caplog.text
    assert set(sends(new)) == {"exact"}
    for step in range(3):
        new.step(drawn(new, 20))
        assert (sends(new)[0] == "exact") is False, f"step {step}"
    assert new.pipelines[0].controller.search.taken == 2


def test_factors_that_are_none_here_begin_anew():
    old, new = (Simulation(LAYERS, TopK(0.5), 1, controller=c) for c in (SMALL, GraVAC(3, 12)))
    go_on(old, range(9))
    running = new.pipelines[0].controller
    running.restore(old.pipelines[0].controller.shared_state(), {})
    assert chosen(running.search) == (3, 3, 1)
    new.step(drawn(new, 20))


def test_a_run_of_the_unbounded_form_goes_on_with_it(caplog):
    """``norm`` named another form when its checkpoint was made; golden checkpoints show that its plans stay."""
    old = Simulation(LAYERS, TopK(0.5), 2, controller=SMALL)
    go_on(old, range(9))
    states = states_of(old)
    for state in states:
        assert state.shared.control["state"]["gain"] == "bounded"
        state.shared.control["state"]["gain"] = "norm"
    for _ in range(2):
        new = Simulation(LAYERS, TopK(0.5), 2, controller=SMALL)
        caplog.clear()
        resumed(new, states)
        assert caplog.text.count("the run goes on with that form") == 1
        assert [p.controller.form for p in new.pipelines] == [UNBOUNDED] * 2
        assert all(p.controller.search.of_averages for p in new.pipelines)
        go_on(new, range(9, 12))
        states = states_of(new)
        assert states[0].shared.control["state"]["gain"] == "norm"
    other = Simulation(LAYERS, TopK(0.5), 2, controller=replace(SMALL, gain="released"))
    resumed(other, states)
    assert "its gains are by norm, but gain='released' is set: gains begin anew" in caplog.text


def test_gains_of_another_form_begin_anew(caplog):
    """As from a checkpoint of before there were two: it holds none of a form."""
    old, new = (
        Simulation(LAYERS, TopK(0.5), 2, controller=replace(SMALL, gain=g)) for g in ("energy", "norm")
    )
    go_on(old, range(9))
    assert "gain" not in old.pipelines[0].controller.shared_state()
    resumed(new, states_of(old))
    line = "its gains are by energy, but gain='norm' is set: gains begin anew"
    assert caplog.text.count(line) == 1
    before, after = old.pipelines[0].controller.search, new.pipelines[0].controller.search
    assert chosen(after) == chosen(before)
    assert np.isnan(after.gains[:, 1:]).all()
    assert np.isnan(after.throughput).all()
    go_on(new, range(9, 20))
    assert after.taken == 20
    assert after.steps.sum() == 20


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("search"),
        lambda s: s.update(search=3),
        lambda s: s["search"].update(seconds=["x"]),
        lambda s: s["search"].update(seconds=[1.0] * 99),
        lambda s: s["search"]["rows"]["*"].pop("minimum"),
        lambda s: s["search"]["rows"]["*"].update(factors=[[1]]),
        lambda s: s.update(untimed=[7]),
        lambda s: s.pop("layers"),
    ],
)
def test_a_state_that_is_none_is_refused(change):
    ranks = Simulation(LAYERS, TopK(0.5), 1, controller=SMALL)
    go_on(ranks, range(5))
    running = ranks.pipelines[0].controller
    state = json.loads(json.dumps(running.shared_state()))
    change(state)
    with pytest.raises(StateError, match="not a state of gravac"):
        running.restore(state, {})


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "named"),
    [
        (Quantize(4), "quantize"),
        (ErrorFeedback(Quantize(4)), "quantize"),
        (Policy(TopK(0.1), overrides={"c": Quantize(4)}), "quantize"),
    ],
)
def test_one_layer_without_a_selection_by_density_is_refused(compression, named):
    with pytest.raises(ConfigError, match=rf"two_level_selection takes.*{named}"):
        Simulation(LAYERS, compression, 2, controller=SMALL)


def test_a_random_selection_is_refused_by_energy():
    energy = replace(SMALL, gain="energy")
    with pytest.raises(ConfigError, match=r"b: a random selection at a factor f has a gain of 1/f by energy"):
        Simulation(
            LAYERS, Policy(TopK(0.1), overrides={"b": ErrorFeedback(RandomK(0.1))}), 2, controller=energy
        )


def test_others_that_select_by_density_work():
    ranks = Simulation(LAYERS, SIDCo(0.5), 2, controller=SMALL)
    for step in range(10):
        ranks.step(drawn(ranks, step)).all_means()
        assert all(isinstance(c.inner, SIDCo) for c in plans(ranks) if isinstance(c, TwoLevelSelection))
    assert sum(ranks.pipelines[0].controller.steps_by_factor.values()) == 10


def test_the_string_form_names_everything():
    text = GraVAC(5, 50, 0.9, 100, 0.02, "geometric", True).to_string()
    assert text == (
        "gravac(minimum=5, maximum=50, epsilon=0.9, window=100, omega=0.02, policy=geometric, per_layer=True, "
        "gain=norm)"
    )
