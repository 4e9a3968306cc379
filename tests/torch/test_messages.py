"""What rank 0 says when an optimizer is made: how much is compressed, and what was probably not intended."""

from __future__ import annotations

import logging

import pytest
import torch
from batch import on_ranks
from logs import logged

import gradcomp.torch as gc


def said_of(compression, *, named: bool = True, level: int = logging.INFO, **arguments) -> list[str]:
    """What is logged from this level on while an optimizer of two linear layers is made."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged(level) as said:
        gc.DistributedOptimizer(
            optimizer, model.named_parameters() if named else None, compression, **arguments
        )
    assert gc.rank() == 0 or not said
    return said if gc.rank() == 0 else []


def warned_of(compression, **arguments) -> list[str]:
    return said_of(compression, level=logging.WARNING, **arguments)


@pytest.mark.parametrize(
    ("compression", "controller", "line"),
    [
        ("none", None, "none: 0.01 MB in 4 layers, uncompressed"),
        (
            "topk",
            None,
            "topk:density=0.01: 92.6% of 0.01 MB in 4 layers compressed; exact: 2 bias, 1 fewer than 1024",
        ),
        (
            "quantize:bits=4,scaling=l2",
            "lgreco",
            "quantize:bits=4,scaling=l2 under lgreco: 92.6% of 0.01 MB in 4 layers",
        ),
        ("auto", None, "auto: 92.6% of 0.01 MB in 4 layers may be compressed; exact: 2 bias"),
        ("error_feedback[topk:density=0.1]", None, "error_feedback[topk:density=0.1]: 92.6%"),
    ],
)
@on_ranks(2)
def test_one_line_says_how_much_is_compressed(compression, controller, line):
    said = said_of(compression, controller=controller)
    assert len(said) == (1 if gc.rank() == 0 else 0), said
    assert all(one.startswith(line) for one in said), said


@on_ranks(2)
def test_the_rest_is_logged_at_debug():
    said = said_of("powersgd:rank=64", level=logging.DEBUG)
    if gc.rank() == 0:
        assert any(line.startswith("state 0.0") and line.endswith("1 buckets") for line in said), said
        assert any(line.startswith("0.weight: ") for line in said), said


@on_ranks(2)
def test_patterns_that_match_no_layer_and_nothing_compressed_are_warned_about():
    four = gc.Quantize(4)
    kept = gc.Filter(exclude=("*.gamma",), include=("1.weight",))
    warned = warned_of(gc.Policy(four, {"head.*": "none", "0.*": "none"}, kept))
    assert warned == [
        f"the policy's pattern {pattern!r} matches no layer; the first are 0.weight, 0.bias, 1.weight"
        for pattern in ("head.*", "*.gamma")
        if gc.rank() == 0
    ]
    warned = warned_of(gc.Policy(four, filter=gc.Filter(min_elements=10**6)))
    assert len(warned) == (gc.rank() == 0)
    begins = "nothing is compressed: every layer is excluded (2 fewer than 1000000 elements, 2 bias"
    assert all(line.startswith(begins) for line in warned)


@on_ranks(2)
def test_names_by_position_are_warned_about_where_they_matter():
    assert not warned_of("none", named=False)
    assert not warned_of("topk")
    warned = warned_of("topk", named=False)
    if gc.rank() == 0:
        (line,) = warned
        assert "named by position (group0.param0, ...)" in line
        assert "model.named_parameters()" in line


@on_ranks(2)
def test_passes_that_nobody_declared_are_warned_about_once():
    def warned(passes: int, keep: bool, **arguments) -> list[str]:
        model = torch.nn.Linear(8, 4)
        optimizer = gc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **arguments
        )
        with logged(logging.WARNING) as said:
            for _ in range(8):
                optimizer.zero_grad()
                for _ in range(passes):
                    if not keep:
                        optimizer.zero_grad()
                    model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        assert gc.rank() == 0 or not said
        return said

    said = warned(4, keep=True)
    if gc.rank() == 0:
        (line,) = said
        assert line.startswith("step() comes every 4 exchanges")
        assert "backward_passes_per_step=4" in line
    said = warned(6, keep=True, backward_passes_per_step=2)
    assert len(said) == (gc.rank() == 0)
    assert all("backward_passes_per_step=6" in line for line in said)
    assert not warned(4, keep=True, backward_passes_per_step=4)
    assert not warned(4, keep=False)  # as a GAN's judge, whose gradients in the maker's pass are thrown away
    assert not warned(1, keep=True)


@pytest.mark.parametrize(
    ("width", "compression", "says", "not_said"),
    [(64, "auto", "; auto: ", "wire would send"), (8, "none", "the rest is latency", "; auto: ")],
)
@on_ranks(2, "fifty", statistics_every_steps=0)
def test_auto_gives_its_own_account_after_50_steps_and_a_model_that_waits_for_latency_is_told_so(
    width, compression, says, not_said
):
    model = torch.nn.Linear(width, width // 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), compression)
    with logged() as said:
        for _ in range(51):
            optimizer.zero_grad()
            model(torch.ones(2, width)).sum().backward()
            optimizer.step()
    if gc.rank() == 0:
        (line,) = [one for one in said if one.startswith("after 50 steps")]
        assert says in line
        assert not_said not in line
