"""What rank 0 says of an exchange and what was probably not intended; what every rank can read of it."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from batch import on_ranks
from logs import logged
from small_torch import NEAREST, assert_same_on_all_ranks, backward, initialised, loss_of, net, train, wrap

import gradcomp.torch as gc
from gradcomp.core.trace import PHASES, range_name


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
@on_ranks(2)
def test_auto_gives_its_own_account_after_50_steps_and_a_model_that_waits_for_latency_is_told_so(
    width, compression, says, not_said
):
    with initialised(statistics_every_steps=0):
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


# ---------------------------------------------------------------------- what can be read


@on_ranks(2)
def test_no_reader_communicates():
    model = net()
    optimizer = wrap(model, NEAREST)
    train(model, optimizer, 1)
    if gc.rank() == 0:
        optimizer.statistics()
        assert optimizer.compression_metrics()["gradcomp/steps"] == 1
        optimizer.reduced_statistics()
        optimizer.trace_spans()
        optimizer.state_dict()
        optimizer.compression_state()
        repr(optimizer)
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_a_timeline_records_all_phases_and_profilers_see_them():
    from torch._C._profiler import _ExperimentalConfig

    model = net()
    optimizer = wrap(model, NEAREST)

    def step() -> None:
        train(model, optimizer, 1)
        optimizer.zero_grad()

    step()
    with tempfile.TemporaryDirectory() as directory:
        alone, each = Path(directory, "alone.json"), Path(directory, "{rank}.json")
        optimizer.write_trace(Path(directory, "trace.json"))
        gc.start_timeline(alone)
        if gc.rank() == 0:
            with pytest.raises(gc.StateError, match="is being recorded"):
                gc.start_timeline(alone)
        step()
        gc.stop_timeline()
        gc.stop_timeline()
        step()
        assert alone.exists() == (gc.rank() == 0)
        gc.start_timeline(each, mark_cycles=True)
        later = wrap(net(), NEAREST)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        ) as profile:
            step()
            step()
        gc.allreduce(torch.ones(3), name="loss")
        gc.allgather(torch.ones(2000))
        gc.stop_timeline()
        trace = json.loads(Path(directory, "trace.json").read_text())["traceEvents"]
        spans = [e for e in trace if e["ph"] == "X"]
        assert {e["name"] for e in spans} >= set(PHASES)
        assert all(e["dur"] >= 0 and e["pid"] == gc.rank() for e in spans)
        for path in [alone] * (gc.rank() == 0) + [Path(directory, f"{gc.rank()}.json")]:
            events = json.loads(path.read_text())["traceEvents"]
            rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
            calls = [e for e in events if rows.get(e["tid"]) == "collectives" and e["ph"] == "X"]
            called = [e["name"] for e in calls]
            assert called[-4:] == ["negotiate", "allreduce loss", "negotiate", "allgather"] or path == alone
            assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in calls)
            spans = [e for e in events if e["ph"] == "X" and e not in calls]
            assert {e["name"] for e in spans} == set(PHASES)
            assert {e["pid"] for e in events} == {gc.rank()}
            assert (
                len({e["args"]["step"] for e in spans}) == len([e for e in events if e["ph"] == "i"])
                or path == alone
            )
    del later
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["gradcomp: wait"] == 2
    computed = ("compress", "reduce", "decompress")
    assert {range_name(phase) for phase in computed} <= counts.keys()
    assert {name for name in counts if name.startswith("gradcomp")} <= {range_name(phase) for phase in PHASES}


@on_ranks(2)
def test_banner_periodic_line_and_verdict_appear_on_rank_0_only_and_reduced_statistics_are_equal():
    with initialised(statistics_every_steps=20):
        with logged() as said:
            model = net()
            optimizer = wrap(model, NEAREST)
            train(model, optimizer, 61)  # what is due after a step is said when the next one begins
        counts = [
            len([t for t in said if "compressed; exact" in t]),
            len([t for t in said if t.startswith("step ")]),
            len([t for t in said if "bfloat16" in t]),
        ]
        assert counts == ([1, 3, 1] if gc.rank() == 0 else [0, 0, 0]), said
        mine = optimizer.reduced_statistics()
        assert mine.steps == 60
        everyone = gc.allgather_object(mine.vector().tolist())
        assert everyone[0] == everyone[1]


# ---------------------------------------------------------------------- feedback that is never committed


def by_hand(model: torch.nn.Module) -> None:
    """A step that does not call ``optimizer.step()``."""
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)


def told(lines: list[str]) -> int:
    return len([line for line in lines if "never applied" in line])


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@on_ranks(2)
def test_three_exchanges_that_no_step_accepts_are_warned_about_once(zero):
    model = net()
    optimizer = wrap(model, NEAREST)
    counts = []
    with logged() as lines:
        for step in range(8):
            (optimizer if zero == "optimizer" else model).zero_grad()
            backward(model, step)
            by_hand(model)
            counts.append(told(lines))
    assert counts == [0, 0, 0, *[int(gc.rank() == 0)] * 5]


@pytest.mark.parametrize("case", ["without state", "not finite", "two between steps"])
@on_ranks(2)
def test_discarded_exchanges_are_no_reason_to_warn(case):
    model = net()
    optimizer = wrap(model, "none" if case == "without state" else NEAREST)
    with logged() as lines:
        for step in range(9):
            optimizer.zero_grad()
            (loss_of(model, step) * (float("inf") if case == "not finite" else 1.0)).backward()
            if case == "without state":
                by_hand(model)
            if case == "two between steps" and step % 3 == 2:
                optimizer.step()
    assert not told(lines)
