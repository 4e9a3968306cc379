"""compress_fsdp: models that fully_shard has sharded, on ranks of their own."""

from __future__ import annotations

import gc as gc_module
import weakref

import pytest
import torch
from batch import on_ranks
from sharded_models import (
    CASES,
    COARSE,
    EXACT,
    Case,
    decoded,
    go_on,
    loss_of,
    same_bits,
    same_everywhere,
    shards,
    train,
    two_hosts,
)

import gradcomp.torch as gc
from gradcomp.exchange.request_group import RequestOrder
from gradcomp.reduce.header import ByteHeader, padded
from gradcomp.torch.sharded.exchange import GatherWeights, ReduceGradients

# --- what every way to shard must give -------------------------------------------------------------------------


def check_exact(case: Case, _: str | None) -> None:
    """Uncompressed, a run is that of fully_shard alone: bit for bit where two summands are added."""
    plain, ours = train(case), train(case, compress=EXACT)
    mine, theirs = shards(ours.model), shards(plain.model)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)
    assert gc.size() > 2 or same_bits(mine, theirs)
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=1e-5, atol=1e-6)


def check_quantised(case: Case, _: str | None) -> None:
    """Every rank computes with the same weights in every step, and training goes on as without compression."""
    plain, ours = train(case), train(case, 0, COARSE)
    for step in range(3):
        go_on(ours, case, range(step, step + 1))
        assert same_everywhere(decoded(ours.model))
    assert ours.losses != plain.losses
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0.05, atol=0.05)


def interrupted(
    case: Case, reuse: str | None, hierarchical: bool | None
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, shards and bytes of a run whose steps repeat, with all that a rank may do between them."""
    ours = train(case, 4, COARSE, reuse=reuse, hierarchical=hierarchical)

    @torch.no_grad()
    def evaluate(*steps: int) -> None:
        ours.losses += [loss_of(ours.model, step).item() for step in steps]

    evaluate(20)
    go_on(ours, case, range(4, 7))
    evaluate(21, 22)
    with ours.state.exact_weights():
        evaluate(23)
    go_on(ours, case, range(7, 9))
    if gc.rank() == 1:
        with torch.no_grad():
            ours.model.head.weight.to_local().mul_(2)  # new shards on one rank
    go_on(ours, case, range(9, 12))
    ours.model.load_state_dict({key: value.detach() * 0.5 for key, value in ours.model.state_dict().items()})
    go_on(ours, case, range(12, 15))
    statistics = ours.state.statistics()
    return ours.losses, shards(ours.model), statistics.weight_bytes + statistics.gradient_bytes


def check_predicted(case: Case, reuse: str | None, hierarchical: bool | None = None) -> None:
    """Predicted collectives give the bits of compared ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RequestOrder, "predicted", None)
        compared = interrupted(case, reuse, hierarchical)
    predicted = interrupted(case, reuse, hierarchical)
    assert predicted[0] == compared[0]
    assert same_bits(predicted[1], compared[1])
    assert predicted[2] != compared[2]


def check_reused(case: Case, keeps: str | None) -> None:
    """With codes kept training is the same; unless ``keeps`` is none, backward sends nothing."""
    ours, kept = train(case, compress=COARSE), train(case, compress=COARSE, reuse="codes")
    assert kept.losses == ours.losses
    assert same_bits(shards(kept.model), shards(ours.model))
    once, twice = kept.state.statistics(), ours.state.statistics()
    assert once.gathers == twice.gathers
    assert (once.gradient_bytes - twice.gradient_bytes) % 56 == 0  # they compare at other times
    if keeps:
        assert once.reused > 0
        assert once.weight_bytes < 0.75 * twice.weight_bytes


CHECKS = {
    "exact": check_exact, "quantised": check_quantised, "predicted": check_predicted, "reused": check_reused,
}  # fmt: skip


def cases(**listed: str) -> list:
    """By check, names of cases between semicolons. A star marks those that keep codes."""
    return [
        (check, name.strip(" *"), "codes" if "*" in name else None)
        for check, names in listed.items()
        for name in names.split("; ")
    ]


#: Of those that are left to the full run, each differs by one of torch's options.
TWO_RANKS = cases(
    exact="by blocks; modules together, in another order; columns; tied; frozen; unused; bfloat16; prefetched",
    quantised="by blocks; tied; bfloat16; micro-batches",
    predicted="by blocks; micro-batches*",
    reused="by blocks*; micro-batches*; prefetched*",
)
ON_TWO = "; ".join(name for name, case in CASES.items() if case.ranks is None)
TWO_RANKS_MORE = cases(
    exact=ON_TWO,
    quantised=ON_TWO,
    predicted="by blocks*; micro-batches; prefetched*; unused; not resharded",
    reused="not resharded; unused*",
)
TWO_RANKS += [pytest.param(*one, marks=pytest.mark.full) for one in TWO_RANKS_MORE if one not in TWO_RANKS]
THREE_RANKS = cases(
    exact="by blocks; columns; tied; unused; sums; modules together, in another order",
    quantised="by blocks; columns",
    predicted="by blocks; by blocks*",
)
FOUR_RANKS = cases(
    exact="by blocks; two meshes; resharded among two",
    quantised="two meshes; resharded among two",
    predicted="by blocks*; two meshes, micro-batches*; resharded among two, micro-batches*",
    reused="two meshes, micro-batches*; resharded among two, micro-batches",
)


@pytest.mark.parametrize(("check", "name", "reuse"), TWO_RANKS)
@on_ranks(2)
def test_two_ranks_train_as_they_should(check: str, name: str, reuse: str | None):
    CHECKS[check](CASES[name], reuse)


@pytest.mark.full
@pytest.mark.parametrize(("check", "name", "reuse"), THREE_RANKS)
@on_ranks(3)
def test_three_ranks_train_as_they_should(check: str, name: str, reuse: str | None):
    CHECKS[check](CASES[name], reuse)


@pytest.mark.full
@pytest.mark.parametrize(("check", "name", "reuse"), FOUR_RANKS)
@on_ranks(4)
def test_four_ranks_train_as_they_should(check: str, name: str, reuse: str | None):
    CHECKS[check](CASES[name], reuse)


# --- hosts of several ranks ------------------------------------------------------------------------------------

TWO_AND_ONE, TWO_AND_TWO = two_hosts(0, 0, 1), two_hosts(0, 0, 1, 1)


def check_two_levels(name: str, reuse: str | None, between: float) -> None:
    """Gathers in two levels give the bits of one level; ``between`` is the ratio of their bytes between hosts.

    So do reductions but for the order of sums; and every rank decodes the same, whatever is coded.
    """
    case = CASES[name]
    flat, ours = (train(case, 4, COARSE, reuse=reuse, hierarchical=levels) for levels in (False, None))
    assert ours.losses == flat.losses
    assert same_bits(shards(ours.model), shards(flat.model))
    exact = train(case, 4, EXACT, reuse=reuse, hierarchical=True)
    torch.testing.assert_close(shards(exact.model), shards(train(case, 4).model), rtol=1e-4, atol=2e-6)
    both, again = (train(case, 4, COARSE, reuse=reuse, hierarchical=True) for _ in range(2))
    sent = [trained.state.statistics().between_bytes for trained in (flat, ours, both)]
    of_ranks = [sent] * gc.size()
    torch.distributed.all_gather_object(of_ranks, sent)
    flat_bytes, gathered_bytes, both_bytes = map(sum, zip(*of_ranks, strict=True))
    assert both_bytes < gathered_bytes < flat_bytes
    assert both_bytes / flat_bytes == pytest.approx(between, rel=0.02)
    assert same_bits(shards(both.model), shards(again.model))
    assert same_everywhere(decoded(both.model))
    torch.testing.assert_close(torch.tensor(both.losses), torch.tensor(flat.losses), rtol=0.05, atol=0.05)


@on_ranks(3, "two and one", env=TWO_AND_ONE)
def test_two_levels_give_the_same_with_hosts_of_unequal_size():
    check_two_levels("by blocks", None, between=0.75)


@pytest.mark.full
@pytest.mark.parametrize("name", ["by blocks", "micro-batches", "columns"])
@pytest.mark.parametrize("reuse", [None, "codes"])
@on_ranks(4, "two and two", env=TWO_AND_TWO)
def test_two_levels_give_the_same_with_two_hosts_of_two_ranks(name: str, reuse: str | None):
    check_two_levels(name, reuse, between=0.5)


@pytest.mark.parametrize("reuse", [None, "codes"])
@on_ranks(3, "two and one", env=TWO_AND_ONE)
def test_two_levels_are_predicted_as_one_is(reuse: str | None):
    check_predicted(CASES["by blocks"], reuse, hierarchical=True)


@pytest.mark.full
@pytest.mark.parametrize("hierarchical", [None, True, False])
@on_ranks(3, "over two transports", env=lambda rank: {**TWO_AND_ONE(rank), "GRADCOMP_TRANSPORT": "shm+torch"})
def test_bytes_to_other_hosts_are_those_of_the_transport_between_them(hierarchical: bool | None):
    """In steps that are predicted, in which nothing is compared."""
    ours = train(CASES["by blocks"], 4, COARSE, hierarchical=hierarchical)
    (exchanger,) = ours.state._exchangers.values()

    def sent() -> tuple[int, int]:
        return exchanger.pipeline.transport.bytes_between_hosts, ours.state.statistics().between_bytes

    before = sent()
    go_on(ours, CASES["by blocks"], range(4, 6))
    measured, counted = (b - a for a, b in zip(before, sent(), strict=True))
    assert measured == counted > 0


# --- weights that are quantised --------------------------------------------------------------------------------


@on_ranks(2)
def test_norms_biases_and_small_parameters_travel_as_they_are():
    ours = train(CASES["by blocks"], 1, COARSE)
    masters = {name: p.full_tensor() for name, p in ours.model.named_parameters()}
    for module in [*ours.model.blocks, ours.model]:
        module.unshard()
    for name, parameter in ours.model.named_parameters():
        large = parameter.ndim > 1 and parameter.numel() >= 1024
        assert torch.equal(parameter, masters[name]) != large, name


@on_ranks(2)
def test_one_shift_serves_forward_and_backward_unless_every_gather_draws():
    case = CASES["by blocks"]
    for redraw, same in (("step", True), ("gather", False)):
        ours = train(case, 1, COARSE, redraw=redraw)
        assert (decoded(ours.model) == decoded(ours.model)) == same


@on_ranks(2)
def test_exact_weights_are_the_shards_of_all():
    ours = train(CASES["by blocks"], 2, COARSE)
    plain = train(CASES["by blocks"], 0)
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        theirs.to_local().detach().copy_(mine.to_local().detach())
    with torch.no_grad():
        expected, lossy = loss_of(plain.model, 9), loss_of(ours.model, 9)
        with ours.state.exact_weights():
            exact = loss_of(ours.model, 9)
        again = loss_of(ours.model, 9)
    assert exact == expected
    assert lossy == again != exact


# --- counts ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_gathers_and_reductions_are_two_and_one_a_unit_and_one_of_the_root():
    for name, gathers, scatters in (("by blocks", 5, 3), ("not resharded", 3, 3), ("as a whole", 1, 1)):
        for passes in (1, 2):
            case = CASES[name]
            case = Case(options=case.options, shard=case.shard, passes=passes)
            counted = train(case, 2, COARSE).state.statistics()
            assert (counted.gathers, counted.scatters) == (2 * passes * gathers, 2 * passes * scatters), name


@on_ranks(2)
def test_bytes_are_those_of_codes_and_headers_and_at_first_of_comparisons():
    fewer = gc.Quantize(bits=3, bucket_size=64)
    ours = train(CASES["as a whole"], 1, (COARSE[0], fewer))
    counted = ours.state.statistics()
    parameters = list(ours.model.parameters())
    sent = {True: 0, False: 0}  # by whether they are ours: weights, at 6 bits, or gradients, at 3
    for parameter in parameters:
        rows = -(-parameter.shape[0] // 2)
        mine = (rows if gc.rank() == 0 else parameter.shape[0] - rows) * (
            parameter.numel() // parameter.shape[0]
        )
        for own, size, bits in ((True, mine, 6), (False, parameter.numel() - mine, 3)):
            coded = parameter.ndim > 1 and parameter.numel() >= 1024
            sent[own] += -(-size * bits // 8) + 8 * -(-size // 64) if coded else 4 * size
    weights, gradients = (padded(sent[own]) + ByteHeader.size(len(parameters)) for own in (True, False))
    assert (counted.weight_bytes, counted.gradient_bytes) == (weights + 56, gradients + 56)
    go_on(ours, CASES["as a whole"], range(1, 4))
    before = ours.state.statistics()
    go_on(ours, CASES["as a whole"], range(4, 6))
    after = ours.state.statistics()
    assert after.weight_bytes - before.weight_bytes == 2 * weights
    assert after.gradient_bytes - before.gradient_bytes == 2 * gradients


# --- codes that are kept ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_backward_after_exact_weights_does_not_use_codes_of_before():
    """The forward that it belongs to had none."""

    def gradients(reuse: str | None) -> list[torch.Tensor]:
        ours = train(CASES["by blocks"], 1, COARSE, reuse=reuse)
        with ours.state.exact_weights():
            loss = loss_of(ours.model, 5)
        loss.backward()
        return [p.grad.to_local() for p in ours.model.parameters() if p.grad is not None]

    assert same_bits(gradients(None), gradients("codes"))


@on_ranks(2)
def test_nothing_that_was_gathered_or_reduced_is_kept():
    """Else every rank would have the memory of the whole model, which sharding is to avoid."""
    kept = []

    def watched(collective):
        def call(output_tensor, *arguments, **named):
            kept.append(weakref.ref(output_tensor.untyped_storage()))
            return collective(output_tensor, *arguments, **named)

        call.allocate = collective.allocate
        return call

    for reuse in (None, "codes"):
        ours = train(CASES["by blocks"], 1, COARSE, reuse=reuse)
        for exchange in ours.state._units:
            for module in exchange.unit.modules:
                module.set_custom_all_gather(watched(GatherWeights(exchange)))
                module.set_custom_reduce_scatter(watched(ReduceGradients(exchange)))
        kept.clear()
        go_on(ours, CASES["by blocks"], range(1, 3))
        gc_module.collect()
        assert len(kept) == 16
        alive = sum(ref() is not None for ref in kept)
        assert alive <= 1, alive  # fully_shard itself keeps the last input of a reduction


@on_ranks(2)
def test_kept_codes_follow_the_shards():
    """Loaded weights, and those of an evaluation between steps, are gathered anew; unchanged ones only compared."""
    case = CASES["by blocks"]
    ours = train(case, 1, COARSE, reuse="codes")
    with torch.no_grad():
        before = loss_of(ours.model, 5)
        ours.model.reshard()
        counted = ours.state.statistics().weight_bytes
        assert loss_of(ours.model, 5) == before
        assert ours.state.statistics().weight_bytes - counted == 3 * 56
        ours.model.reshard()
        state = {name: p.detach() * 0.5 for name, p in ours.model.state_dict().items()}
        ours.model.load_state_dict(state)
        half = loss_of(ours.model, 5)
        assert half != before
        assert ours.state.statistics().weight_bytes - counted > 1000
        for _ in range(2):  # parameters that take the place of others
            ours.model.reshard()
            state = {name: p.detach() * 0.5 for name, p in ours.model.state_dict().items()}
            ours.model.load_state_dict(state, assign=True)
            last, half = half, loss_of(ours.model, 5)
            assert half != last
    assert same_everywhere(decoded(ours.model))


@on_ranks(2)
def test_where_one_rank_has_other_shards_all_gather_anew():
    ours = train(CASES["by blocks"], 1, COARSE, reuse="codes")
    if gc.rank() == 1:
        with torch.no_grad():
            ours.model.head.weight.to_local().mul_(2)
    with torch.no_grad():
        loss_of(ours.model, 5)
        ours.model.reshard()
    assert same_everywhere(decoded(ours.model))


# --- states ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_state_of_another_model_is_refused():
    ours = train(CASES["by blocks"], 0, COARSE)
    other = train(CASES["as a whole"], 0, COARSE)
    with pytest.raises(gc.StateError, match="units"):
        ours.state.load_state_dict(other.state.state_dict())
    own = ours.state.state_dict()
    short = {name: counts[:2] for name, counts in own["units"].items()}
    for bad in (None, {}, own | {"units": []}, own | {"units": short}, own | {"steps": "1"}):
        with pytest.raises(gc.StateError, match="no state of"):
            ours.state.load_state_dict(bad)


# --- what is not finite ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_infinity_on_one_rank_skips_the_step_everywhere_under_a_scaler():
    case = CASES["by blocks"]
    ours = train(case, 1, COARSE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = shards(ours.model)
    loss = scaler.scale(loss_of(ours.model, 1))
    (loss * float("inf") if gc.rank() == 1 else loss).backward()
    scaler.unscale_(ours.optimizer)
    scaler.step(ours.optimizer)
    scaler.update()
    assert same_everywhere(scaler.get_scale())
    assert scaler.get_scale() < 4.0
    assert same_bits(shards(ours.model), before)
    ours.optimizer.zero_grad()
    go_on(ours, case, range(2, 4))
    assert same_everywhere(decoded(ours.model))
