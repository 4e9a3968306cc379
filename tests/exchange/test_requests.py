"""Reduce-scatters and all-gathers between steps: N ranks in one thread, and a few with engines of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from exchange.test_engine import ranks, step
from hypothesis import given
from hypothesis import strategies as st
from kernels.groups import Group, Segment
from reduce.schemes import total
from tiers import examples

from gradcomp import (
    EF21,
    Cast,
    ConfigError,
    ErrorFeedback,
    GradcompError,
    Identity,
    LayerSpec,
    PlanMismatchError,
    PowerSGD,
    Quantize,
    Signum,
    StateError,
    TopK,
    TransportError,
    WireFormatError,
)
from gradcomp.exchange.request_group import RequestGroup, RequestOrder, Run
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, PreparedRequest, Request, even_borders
from gradcomp.exchange.waiting import Waiting
from gradcomp.kernels import reference
from gradcomp.kernels.segments import MINMAX_SHIFT, OWNER_RANK
from gradcomp.reduce.header import ByteHeader, padded
from gradcomp.testing.recording import RecordingTransport
from gradcomp.testing.simulation import DTYPES, Simulation
from gradcomp.transport.inprocess import World

WORLDS = (1, 2, 3, 4, 7)
COMPARED_BYTES = 56

every_world = pytest.mark.parametrize("world", WORLDS)
every_kind = pytest.mark.parametrize("kind", [REDUCE_SCATTER, ALL_GATHER])

LAYERS = (
    LayerSpec("empty", (0,)),
    LayerSpec("one", (1,)),
    LayerSpec("odd", (37,)),
    LayerSpec("matrix", (29, 31)),
    LayerSpec("half", (50,), "float16"),
    LayerSpec("brain", (33,), "bfloat16"),
)
FLOATS = tuple(layer for layer in LAYERS if layer.dtype == "float32")


class Ranked:
    """One request on N ranks; ``run`` polls them in turns until all are done."""

    def __init__(
        self,
        requests: Request | Sequence[Request],
        world: int,
        tamper: Callable[[int, int, np.ndarray], np.ndarray] | None = None,
        seed: int = 0,
        delay: float = 0.0,
    ) -> None:
        self.size = world
        generator = np.random.default_rng(seed)
        hold = (lambda *_: generator.random() < delay) if delay else None
        self.world = World(world, delay=hold, tamper=tamper)
        self.transports = [RecordingTransport(self.world, rank) for rank in range(world)]
        given = [requests] * world if isinstance(requests, Request) else requests
        self.orders = [RequestOrder() for _ in range(world)]
        self.prepared = [
            PreparedRequest(request, rank, world, seed=seed, checksums=tamper is None)
            for rank, request in enumerate(given)
        ]

    def attempt(
        self, inputs: Sequence[Sequence[np.ndarray]], runs: Callable[[int], list[Run]] | None = None
    ) -> list[Exception | list[list[np.ndarray]]]:
        """Every rank's results, or its error."""
        runs = runs or (lambda rank: [Run(self.prepared[rank], inputs[rank])])
        groups = [
            RequestGroup(runs(rank), self.transports[rank], lambda *_: None, self.orders[rank])
            for rank in range(self.size)
        ]
        found: list[Exception | list[list[np.ndarray]] | None] = [None] * self.size
        for _ in range(10_000):
            left = [rank for rank in range(self.size) if found[rank] is None]
            if not left:
                return found
            for rank in left:
                try:
                    if groups[rank].poll() is Waiting.NOTHING:
                        found[rank] = groups[rank].results
                except GradcompError as error:
                    found[rank] = error
                    if groups[rank].verdict is None:
                        self.world.kill(rank)
        raise AssertionError("no progress")

    def run(self, inputs: Sequence[Sequence[np.ndarray]], *, commit: bool = True) -> list[list[np.ndarray]]:
        """Every rank's arrays; raises the first error."""
        found = self.attempt(inputs)
        for one in found:
            if isinstance(one, Exception):
                raise one
        if commit:
            assert len({prepared.commit() for prepared in self.prepared}) == 1
        return [arrays for (arrays,) in found]


def numbers(prepared: Sequence[PreparedRequest], seed: int = 0) -> list[list[np.ndarray]]:
    """``[rank][layer]`` arrays of normal numbers, as the requests take them."""
    generator = np.random.default_rng(seed)
    return [
        [
            generator.standard_normal(shape).astype(DTYPES[layer.dtype])
            for shape, layer in zip(own.input_shapes, own.request.layers, strict=True)
        ]
        for own in prepared
    ]


def inputs_of(ranked: Ranked, seed: int = 0) -> list[list[np.ndarray]]:
    return numbers(ranked.prepared, seed)


def as_bytes(arrays: Sequence[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def shards(values: np.ndarray, world: int) -> list[np.ndarray]:
    borders = even_borders(values.size, world)
    return [values.reshape(-1)[a:b] for a, b in pairwise(borders)]


# --- values -----------------------------------------------------------------------------------------------------


@every_world
@pytest.mark.parametrize("average", [True, False])
def test_exact_codes_reduce_to_the_mean_in_rank_order(world: int, average: bool):
    ranked = Ranked(Request.of(REDUCE_SCATTER, LAYERS, Identity(), average=average), world)
    inputs = inputs_of(ranked)
    outputs = ranked.run(inputs)
    for i, layer in enumerate(LAYERS):
        mean = total([own[i].astype(np.float32) for own in inputs]) / np.float32(world)
        want = (mean * np.float32(1 if average else world)).astype(DTYPES[layer.dtype])
        for rank, shard in enumerate(shards(want, world)):
            assert outputs[rank][i].tobytes() == shard.tobytes(), layer.name


@every_world
def test_exact_codes_gather_to_the_arrays_themselves(world: int):
    layers = (*LAYERS, LayerSpec("double", (11, 3), "float64"))
    ranked = Ranked(Request.of(ALL_GATHER, layers, Identity()), world)
    inputs = inputs_of(ranked)
    outputs = ranked.run(inputs)
    for i, layer in enumerate(layers):
        whole = np.concatenate([own[i].reshape(-1) for own in inputs])
        for rank in range(world):
            assert outputs[rank][i].shape == layer.shape
            assert outputs[rank][i].tobytes() == whole.tobytes(), layer.name


@every_world
@pytest.mark.parametrize("compressor", [Quantize(4, 64), Quantize(8, 32, "linf"), Cast("float16")], ids=repr)
def test_codes_lose_no_more_than_a_step_of_their_scale(compressor, world: int):
    step = 1 / 127 if compressor != Quantize(4, 64) else 1 / 7
    reduced = Ranked(Request.of(REDUCE_SCATTER, FLOATS, compressor), world)
    inputs = inputs_of(reduced)
    for rank, arrays in enumerate(reduced.run(inputs)):
        for i, shard in enumerate(arrays):
            wanted = shards(np.mean([own[i] for own in inputs], axis=0), world)[rank]
            largest = max((np.abs(own[i]).max(initial=0) for own in inputs), default=0)
            assert np.abs(shard - wanted).max(initial=0) <= step * largest
    gathered = Ranked(Request.of(ALL_GATHER, FLOATS, compressor), world)
    inputs = inputs_of(gathered)
    outputs = gathered.run(inputs)
    for i in range(len(FLOATS)):
        wanted = np.concatenate([own[i] for own in inputs])
        assert {arrays[i].tobytes() for arrays in outputs} == {outputs[0][i].tobytes()}
        assert np.abs(outputs[0][i].reshape(-1) - wanted).max(initial=0) <= step * np.abs(wanted).max(
            initial=0
        )


@every_world
@pytest.mark.parametrize(
    "compressor", [Quantize(4, 16), Quantize(2, 16, "linf", "nearest", feedback=False)], ids=repr
)
def test_a_reduce_scatter_and_an_all_gather_are_scatter_reduce_allgather(compressor, world: int):
    """Bit for bit, draws included."""
    layers = [LayerSpec("a", (160,)), LayerSpec("b", (16 * 7, 4))]
    borders = tuple(tuple(16 * at for at in even_borders(layer.size // 16, world)) for layer in layers)
    both = [
        Ranked(Request.of(kind, layers, compressor, borders=borders), world)
        for kind in (REDUCE_SCATTER, ALL_GATHER)
    ]
    whole = Simulation(layers, compressor, world, reorder=False)
    for _ in range(2):
        gradients = whole.gradients()
        means = whole.step(gradients).all_means()
        for arrays in both[1].run(both[0].run(gradients)):
            for i, mean in enumerate(means):
                assert arrays[i].tobytes() == mean.tobytes()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_by_random_shift_do_not_depend_on_who_holds_them(world: int):
    """Every shard as the reference codes it, with one draw for a layer and a run, whoever holds it."""
    compressor = Quantize(8, 64, rounding="shift", feedback=False)
    ranked = Ranked(Request.of(ALL_GATHER, FLOATS, compressor), world, seed=5)
    for number in range(2):
        inputs = inputs_of(ranked, number)
        outputs = ranked.run(inputs)
        for i, layer in enumerate(FLOATS):
            wanted = []
            begins = even_borders(layer.size, world)
            for own, start in zip(inputs, begins, strict=False):
                shard = Segment(own[i], bits=8, bucket_size=64, start=start, layer=layer.hash)
                group = Group(MINMAX_SHIFT, [shard])
                draw = {"seed": 5, "step": number, "rank": OWNER_RANK}
                wanted.append(group.values(group.encode(reference, stochastic=True, **draw).payload)[0])
            for arrays in outputs:
                assert arrays[i].tobytes() == np.concatenate(wanted).tobytes(), layer.name


@examples(30)
@given(
    st.sampled_from([REDUCE_SCATTER, ALL_GATHER]),
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.integers(1, 5),
    st.data(),
)
def test_borders_may_be_anywhere(kind: str, sizes: list[int], world: int, data):
    layers = [LayerSpec(f"layer{i}", (n,)) for i, n in enumerate(sizes)]
    inner = st.lists(st.integers(0, 1000), min_size=world - 1, max_size=world - 1).map(sorted)
    borders = tuple((0, *(at * n // 1000 for at in data.draw(inner)), n) for n in sizes)
    ranked = Ranked(Request.of(kind, layers, Identity(), borders=borders), world, delay=0.3)
    inputs = inputs_of(ranked)
    outputs = ranked.run(inputs)
    for i, at in enumerate(borders):
        for rank in range(world):
            if kind == ALL_GATHER:
                want = np.concatenate([own[i] for own in inputs])
            else:
                want = (total([own[i] for own in inputs]) / np.float32(world))[at[rank] : at[rank + 1]]
            assert outputs[rank][i].tobytes() == want.tobytes()


def test_votes_are_counted():
    layers = [LayerSpec("a", (100,))]
    ranked = Ranked(Request.of(REDUCE_SCATTER, layers, Signum(16, momentum=0.0)), 3)
    inputs = inputs_of(ranked)
    signs = np.sign(sum(np.sign(own[0]) for own in inputs))
    for (found,), shard in zip(ranked.run(inputs), shards(signs, 3), strict=True):
        np.testing.assert_array_equal(found, shard)


# --- bytes ------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("compressor", [Quantize(4, 64), Identity()], ids=repr)
def test_bytes_are_the_formulas(kind: str, compressor, world: int):
    ranked = Ranked(Request.of(kind, FLOATS, compressor), world)
    ranked.run(inputs_of(ranked))

    def payload(rank: int) -> int:
        sizes = [len(shards(np.zeros(layer.size), world)[rank]) for layer in FLOATS]
        if compressor == Identity():
            return 4 * sum(sizes)
        return sum(8 * -(-n // 64) + -(-4 * n // 8) for n in sizes)

    messages = [ByteHeader.size(len(FLOATS)) + padded(payload(rank)) for rank in range(world)]
    for rank, (prepared, transport) in enumerate(zip(ranked.prepared, ranked.transports, strict=True)):
        own = messages[rank]
        want = sum(messages) - own if kind == REDUCE_SCATTER else (world - 1) * own
        assert prepared.bytes_sent == want
        assert transport.bytes_sent == want + (world - 1) * COMPARED_BYTES


# --- state ------------------------------------------------------------------------------------------------------

FEEDBACK = [
    Quantize(3, 16, rounding="nearest"),
    ErrorFeedback(Cast("bfloat16")),
    Quantize(4, 16, feedback=True),
]


@every_kind
@pytest.mark.parametrize("compressor", FEEDBACK, ids=repr)
@pytest.mark.parametrize("world", [1, 3])
def test_residuals_account_for_what_was_not_sent(kind: str, compressor, world: int):
    ranked = Ranked(Request.of(kind, FLOATS, compressor), world)
    missing = [np.zeros(layer.size) for layer in FLOATS]
    for seed in range(4):
        inputs = inputs_of(ranked, seed)
        outputs = ranked.run(inputs, commit=seed != 2)
        if seed == 2:
            continue  # what was discarded counts nowhere
        for i in range(len(FLOATS)):
            own, got = [
                np.concatenate([arrays[i].reshape(-1) for arrays in each]) for each in (inputs, outputs)
            ]
            if kind == REDUCE_SCATTER:
                missing[i] += own.reshape(world, -1).mean(axis=0, dtype=np.float64) - got
            else:
                missing[i] += own.astype(np.float64) - outputs[0][i].reshape(-1)
    for i, lost in enumerate(missing):
        held = [prepared.residuals.value(i).astype(np.float64) for prepared in ranked.prepared]
        owed = sum(held) / world if kind == REDUCE_SCATTER else np.concatenate(held)
        np.testing.assert_allclose(lost, owed, rtol=0, atol=2e-6)


@every_kind
def test_the_next_run_discards_what_was_not_committed(kind: str):
    ranked = Ranked(Request.of(kind, FLOATS, Quantize(2, 16, rounding="nearest")), 2)
    inputs = inputs_of(ranked)
    first, second = (as_bytes(ranked.run(inputs, commit=False)[1]) for _ in range(2))
    assert first == second
    for prepared in ranked.prepared:
        prepared.commit()
    assert as_bytes(ranked.run(inputs)[1]) != second


@every_kind
def test_ranks_that_went_different_ways_raise_in_the_next_run(kind: str):
    ranked = Ranked(Request.of(kind, FLOATS, Quantize(2, 16, rounding="nearest")), 3)
    inputs = inputs_of(ranked)
    ranked.run(inputs, commit=False)
    ranked.prepared[0].discard()
    ranked.prepared[1].commit()
    ranked.prepared[2].commit()
    errors = ranked.attempt(inputs)
    assert [type(error) for error in errors] == [StateError] * 3
    assert "some ranks committed run 0" in str(errors[0])


@every_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_value_that_is_not_finite_is_known_to_all_and_commits_nothing(kind: str, bad: float):
    ranked = Ranked(Request.of(kind, FLOATS, Quantize(2, 16, rounding="nearest")), 3)
    inputs = inputs_of(ranked)
    inputs[1][3].reshape(-1)[0] = bad
    outputs = ranked.run(inputs, commit=False)
    assert all(np.isnan(arrays[3]).all() and np.isfinite(arrays[2]).all() for arrays in outputs)
    assert [p.result.nonfinite.tolist() for p in ranked.prepared] == [[False, False, False, True]] * 3
    assert [p.commit() for p in ranked.prepared] == [False] * 3
    assert not any(p.residuals.value(i).any() for p in ranked.prepared for i in range(len(FLOATS)))


# --- what ranks disagree on -------------------------------------------------------------------------------------

PAIR = [LayerSpec("a", (12,)), LayerSpec("b", (4,))]
scattered = partial(Request.of, REDUCE_SCATTER, PAIR, Quantize(4, 16))
gathered = partial(Request.of, ALL_GATHER, PAIR)
scattered_by_hosts = partial(Request.of, REDUCE_SCATTER, PAIR, hosts=(0, 0, 1))
BASE = scattered()
DIFFERENT = {
    "kind": (gathered(Quantize(4, 16)), "all_gather"),
    "shape": (Request.of(REDUCE_SCATTER, [PAIR[0], LayerSpec("b", (5,))], Quantize(4, 16)), r"\[5\]"),
    "dtype": (
        Request.of(REDUCE_SCATTER, [LayerSpec("a", (12,), "float16"), PAIR[1]], Quantize(4, 16)),
        "float16",
    ),
    "codec": (Request.of(REDUCE_SCATTER, PAIR, Quantize(3, 16)), "bits=3"),
    "one layer's codec": (Request(REDUCE_SCATTER, BASE.layers, (Quantize(4, 16), Identity())), "none"),
    "shards": (scattered(borders=((0, 1, 2, 12), (0, 1, 2, 4))), "1, 2"),
    "sum": (scattered(average=False), "average False"),
    "name": (scattered(name="other"), "other"),
    "hosts": (scattered(hosts=(0, 0, 1)), "two levels"),
}


@pytest.mark.parametrize(("other", "text"), DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_ask_for_different_things_all_raise_and_can_go_on(other: Request, text: str):
    ranked = Ranked([BASE, other, BASE], 3)
    errors = ranked.attempt(inputs_of(ranked))
    assert [type(error) for error in errors] == [PlanMismatchError] * 3
    for error in errors:
        with pytest.raises(PlanMismatchError, match=text):
            raise error
    assert sum(transport.bytes_sent for transport in ranked.transports) < 3 * 4096  # descriptions only
    again = [PreparedRequest(BASE, rank, 3) for rank in range(3)]
    inputs = numbers(again)
    found = ranked.attempt(inputs, lambda rank: [Run(again[rank], inputs[rank])])
    assert not any(isinstance(one, Exception) for one in found)


REFUSED = {
    "kind": (Request.of("gossip", PAIR, Quantize(4)), "gossip"),
    "no layers": (Request.of(ALL_GATHER, [], Quantize(4)), "0 layers"),
    "compressors": (Request(ALL_GATHER, BASE.layers, (Quantize(4),)), "2 layers and 1 compressors"),
    "names": (Request.of(ALL_GATHER, [PAIR[0]] * 2, Quantize(4)), "'a'|a"),
    "sparse": (gathered(TopK(0.1)), "no codes"),
    "low rank": (gathered(PowerSGD(2)), "no codes"),
    "state": (Request.of(REDUCE_SCATTER, PAIR, EF21(Quantize(4, rounding="nearest"))), "another state"),
    "momentum": (Request.of(REDUCE_SCATTER, PAIR, Signum()), "momentum"),
    "borders": (gathered(Quantize(4), borders=((0, 5, 3, 12), (0, 1, 2, 4))), "ascending"),
    "one rank a host": (gathered(Quantize(4), hosts=(0, 1, 2)), "several hosts of 3 ranks"),
    "hosts of another world": (gathered(Quantize(4), hosts=(0, 0, 1, 1)), "several hosts of 3 ranks"),
    "residuals by hosts": (scattered_by_hosts(Quantize(3, 16, rounding="nearest")), "residuals of single"),
    "votes by hosts": (scattered_by_hosts(Signum(16, momentum=0.0)), "votes of single ranks"),
    "doubles": (Request.of(REDUCE_SCATTER, [LayerSpec("a", (4,), "float64")], Identity()), "float64"),
    "coded doubles": (Request.of(ALL_GATHER, [LayerSpec("a", (4,), "float64")], Quantize(4)), "float64"),
}


@pytest.mark.parametrize(("request_", "text"), REFUSED.values(), ids=REFUSED)
def test_one_rank_with_an_impossible_request_is_an_error_on_every_rank(request_: Request, text: str):
    ranked = Ranked([BASE, request_, BASE], 3)
    inputs = [[np.zeros(12, np.float32), np.zeros(4, np.float32)]] * 3
    for error in ranked.attempt(inputs):
        with pytest.raises(ConfigError, match=text):
            raise error


@pytest.mark.parametrize(
    "wrong",
    [
        [np.zeros(12, np.float32)],
        [np.zeros(12, np.float32), np.zeros(5, np.float32)],
        [np.zeros(12, np.float32), np.zeros(4, np.float64)],
        [np.zeros(12, np.float32), np.zeros(8, np.float32)[::2]],
        None,
    ],
    ids=["few", "size", "dtype", "gaps", "twice"],
)
@pytest.mark.parametrize("world", [1, 3])
def test_runs_that_do_not_fit_are_an_error_on_every_rank(wrong: list[np.ndarray] | None, world: int):
    """Arrays of another form, or a request that occurs twice in a group."""
    ranked = Ranked(BASE, world)
    inputs = inputs_of(ranked)
    inputs[-1] = wrong or inputs[-1]
    runs = [Run(prepared, own) for prepared, own in zip(ranked.prepared, inputs, strict=True)]
    found = ranked.attempt(inputs, lambda rank: [runs[rank]] * (1 if wrong else 2))
    assert [type(error) for error in found] == [ConfigError] * world
    assert not any(isinstance(found, Exception) for found in ranked.attempt(inputs_of(ranked)))


# --- payloads from elsewhere ------------------------------------------------------------------------------------

HEADER = ByteHeader.size(2)


def tampered(
    kind: str, change: Callable[[np.ndarray], np.ndarray], compressor=None, number: int = 1
) -> Ranked:
    """Rank 1's message to rank 0: the ``number``-th, of which the first one compares calls."""
    sent = [0]

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) == (1, 0):
            sent[0] += 1
            if sent[0] == number + 1:
                return change(message)
        return message

    return Ranked(Request.of(kind, BASE.layers, compressor or Quantize(4, 16)), 3, tamper=tamper)


def overwritten(at: int, data: bytes) -> Callable[[np.ndarray], np.ndarray]:
    def change(message: np.ndarray) -> np.ndarray:
        place = message[at : at + len(data)]
        place[:] = np.frombuffer(data, np.uint8)[: len(place)]
        return message

    return change


@every_kind
def test_random_bytes_in_the_comparison_are_a_typed_error(kind: str):
    for at in (0, 24, 32, 40, 48):  # whether there is a problem, and the digest
        ranked = tampered(kind, overwritten(at, b"\xff" * 8), number=0)
        found = ranked.attempt(inputs_of(ranked))
        assert isinstance(found[0], GradcompError), at


@every_kind
def test_damage_is_found_by_checksums(kind: str):
    ranked = tampered(kind, overwritten(HEADER + 9, b"\xee"))
    for prepared in ranked.prepared:
        prepared._checksums = True
    assert type(ranked.attempt(inputs_of(ranked))[0]) is WireFormatError


# --- on the engine's thread -------------------------------------------------------------------------------------

__all__ = ["ranks"]  # the fixture


def gather(exchanger, codec=None) -> Run:
    """Prepare an all-gather of zeros."""
    prepared = exchanger.prepare(Request.of(ALL_GATHER, FLOATS, codec or Identity()))
    return Run(prepared, [np.zeros(shape, np.float32) for shape in prepared.input_shapes])


def both(exchanger, rank: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A reduce-scatter and an all-gather in one group."""
    requests = [
        exchanger.prepare(Request.of(kind, FLOATS, Identity())) for kind in (REDUCE_SCATTER, ALL_GATHER)
    ]
    inputs = [[np.full(shape, rank + 1.0, np.float32) for shape in r.input_shapes] for r in requests]
    exchanger.begin([Run(r, own) for r, own in zip(requests, inputs, strict=True)])
    reduced, gathered = exchanger.finish()
    return reduced, gathered


def test_requests_run_between_steps(ranks):
    def work(rank, exchanger):
        step(rank, exchanger)
        reduced, gathered = both(exchanger, rank)
        after = step(rank, exchanger)
        return reduced, gathered, after

    for reduced, gathered, after in ranks(3).each(work):
        assert all((shard == 2.0).all() for shard in reduced)
        for layer, whole in zip(FLOATS, gathered, strict=True):
            sizes = np.diff(even_borders(layer.size, 3))
            np.testing.assert_array_equal(whole.reshape(-1), np.repeat([1.0, 2.0, 3.0], sizes))
        np.testing.assert_allclose(after[0], 2.0, rtol=1e-5)


def test_nothing_else_begins_while_a_group_is_under_way(ranks):
    def work(rank, exchanger):
        run = gather(exchanger)
        with pytest.raises(StateError, match="no group"):
            exchanger.finish()
        exchanger.begin([run])
        for call in (exchanger.open, lambda: exchanger.begin([]), lambda: exchanger.allgather_bytes(b"")):
            with pytest.raises(StateError, match="under way"):
                call()
        exchanger.finish()
        exchanger.open()
        with pytest.raises(StateError, match="a step is open"):
            exchanger.begin([run])
        exchanger.flush()
        exchanger.wait()

    ranks(2).each(work)


def test_a_difference_is_an_error_on_every_rank_and_leaves_the_exchanger_usable(ranks):
    def work(rank, exchanger):
        exchanger.begin([gather(exchanger, Quantize(4 - rank))])
        with pytest.raises(PlanMismatchError, match="bits=3"):
            exchanger.finish()
        return both(exchanger, rank)[0][1].size

    assert sorted(ranks(2).each(work)) == [0, 1]


def test_ranks_that_parted_cannot_go_on(ranks):
    def work(rank, exchanger):
        run = gather(exchanger, Quantize(4, rounding="nearest"))
        exchanger.begin([run])
        exchanger.finish()
        run.request.commit() if rank else run.request.discard()
        exchanger.begin([run])
        for call in (exchanger.finish, exchanger.open):
            with pytest.raises(StateError, match="some ranks committed"):
                call()

    ranks(2).each(work)


def test_a_rank_that_fails_ends_the_group_on_the_others(ranks):
    def work(rank, exchanger):
        if rank == 1:
            exchanger.abort("rank 1 gave up")
            return
        exchanger.begin([gather(exchanger)])
        with pytest.raises(TransportError, match="rank 1 gave up"):
            exchanger.finish()

    ranks(2, stall_warning_seconds=5.0, timeout_seconds=20.0).each(work)


def test_a_rank_that_ends_in_the_midst_of_a_group_tells_the_others(ranks):
    ended = threading.Event()

    def work(rank, exchanger):
        run = gather(exchanger)
        if rank == 0:
            exchanger.begin([run])
            exchanger.part()
            ended.set()
            return
        ended.wait(20)
        with pytest.raises(TransportError, match="rank 0 ended while a group of requests was under way"):
            exchanger.allgather_bytes(b"")

    ranks(2).each(work)
