"""How processes begin and end, under torchrun and without."""

from __future__ import annotations

import functools
import json

import preloaded
import pytest
from launching import run_ranks, run_torchrun

TRAIN = """
import sys
import torch
import gradcomp.torch as gc

gc.init()
model = torch.nn.Linear(64, 64)
gc.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                    "quantize:bits=4")
for step in range(12):
    optimizer.zero_grad()
    model(torch.full((2, 64), 1.0 + gc.rank())).square().mean().backward()
    optimizer.step()
print(gc.rank(), gc.size(), gc.local_rank(), gc.local_size(), float(model.weight.detach().sum()))
"""


either = pytest.mark.parametrize(
    "launch",
    [
        pytest.param(functools.partial(run_ranks, imported=preloaded.TORCH), id="forks"),
        pytest.param(run_ranks, id="interpreters", marks=pytest.mark.full),
    ],
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(preloaded.TORCH, id="forks"),
        pytest.param((), id="interpreters", marks=pytest.mark.full),
    ],
)
def under_torchrun(request):
    return run_torchrun(TRAIN, 2, imported=request.param)


def test_torchrun_ranks_end_in_good_order_without_shutdown(under_torchrun):
    assert [end.returncode for end in under_torchrun] == [0, 0], under_torchrun[0].stderr


def test_torchrun_ranks_know_their_places_and_train_alike(under_torchrun):
    first, second = (end.stdout.split() for end in under_torchrun)
    assert (first[:4], second[:4]) == (["0", "2", "0", "2"], ["1", "2", "1", "2"])
    assert first[4] == second[4]


def test_the_banner_is_rank_0s_alone(under_torchrun):
    assert "2 ranks on 1 host by torchrun" in under_torchrun[0].stderr
    assert "compressed; exact" in under_torchrun[0].stderr
    assert "gradcomp" not in under_torchrun[1].stderr


@either
def test_a_plain_python_is_a_world_of_one_and_says_so(launch):
    (end,) = launch(TRAIN, 1, env=lambda _: {})
    assert end.returncode == 0, end.stderr
    assert end.stdout.split()[:4] == ["0", "1", "0", "1"]
    assert "nothing is exchanged, compression is bypassed" in end.stderr


@either
@pytest.mark.parametrize(
    "ending", ["gc.shutdown()", "model(torch.ones(1, 64)).sum().backward(); sys.exit(0)"]
)
def test_every_ending_is_clean(launch, ending):
    for end in launch(TRAIN + ending + "\n", 2):
        assert end.returncode == 0, end.stderr
        assert "Traceback" not in end.stderr
        assert "terminate" not in end.stderr


def test_a_whole_run_leaves_a_timeline(tmp_path):
    ends = run_torchrun(
        TRAIN, 2, imported=preloaded.TORCH, env={"GRADCOMP_TIMELINE": str(tmp_path / "{rank}.json")}
    )
    assert [end.returncode for end in ends] == [0, 0], ends[0].stderr
    for rank in range(2):
        events = json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"]
        spans = [e["args"] for e in events if e["ph"] == "X"]
        assert {args["step"] for args in spans if "step" in args} == set(range(12))
