"""``gradcomp bench`` among real ranks, with a model of the user's and with shapes alone, and how it spends its time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import run_torchrun

from gradcomp import ConfigError, LayerSpec
from gradcomp.bench.measure import _steps_that_fit
from gradcomp.bench.workload import make_workload
from gradcomp.cli import main
from gradcomp.estimate.choices import CHOICES

MODEL = """
import torch

def net():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(30, 61), torch.nn.ReLU(), torch.nn.Linear(61, 3))
    return layers, torch.ones(5, 30)
"""


@pytest.mark.parametrize(
    "model", ["benched_net:net", pytest.param("benched.safetensors", marks=pytest.mark.full)]
)
def test_every_choice_is_measured_and_the_ranks_end_together(tmp_path: Path, model):
    from safetensors.numpy import save_file

    (tmp_path / "benched_net.py").write_text(MODEL)
    save_file(
        {"a": np.zeros((31, 67), np.float32), "b": np.zeros(5, np.float32)}, tmp_path / "benched.safetensors"
    )
    program = (
        "import os, sys\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "from gradcomp.cli import main\n"
        f"sys.exit(main(['bench', '--model', {model!r}, '--backward-ms', '2', '--seconds', '30', '--json']))\n"
    )
    ranks = run_torchrun(program, 2, timeout=240)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr
    assert ranks[1].stdout == ""
    found = json.loads(ranks[0].stdout)
    assert found["parameters"] == (2_077 if "net" in model else 31 * 67 + 5)
    assert (found["ranks"], found["hosts"]) == (2, 1)
    assert [one["key"] for one in found["choices"]] == [choice.key for choice in CHOICES]
    assert all(one["step_seconds"] > 0 and one["predicted_seconds"] > 0 for one in found["choices"])
    assert found["verdict"]
    if "net" not in model:  # computes for as long as it was told: 2 ms of backward in steps of 3 ms
        assert 0.0019 < found["backward_seconds"] < found["alone_seconds"]
        assert found["alone_seconds"] > 0.0029


@pytest.mark.parametrize("rounds", [1, 4])
def test_every_choice_gets_the_same_time_and_what_does_not_fit_is_left_out(rounds: int):
    seconds, usual = 50.0 * rounds, dict.fromkeys((choice.key for choice in CHOICES), 0.01)
    assert set(_steps_that_fit(usual, rounds, seconds).values()) == {20}
    expected = usual | {"ddp": 0.6, "none": 4.0, "bf16": 200.0}
    some = _steps_that_fit(expected, rounds, seconds)
    assert 0 < some["ddp"] < 20
    assert some["none"] == 1  # the others leave enough for it
    assert some["bf16"] == 0
    assert rounds * sum(0.5 + (count + 3) * expected[key] for key, count in some.items() if count) <= seconds


def test_shapes_compute_for_as_long_as_they_are_told():
    import time

    from gradcomp.bench.workload import _synthetic

    layers = [LayerSpec("a.weight", (7, 5)), LayerSpec("h", (3,), "bfloat16")]
    workload = _synthetic(layers, 0.004, 0.02, torch.device("cpu"))
    loss = workload.loss(workload.module)
    begin = time.thread_time()
    loss.backward()
    assert 0.02 <= time.thread_time() - begin < 0.03
    gradients = [p.grad for p in workload.module.parameters()]
    assert [(tuple(g.shape), g.dtype) for g in gradients] == [((7, 5), torch.float32), ((3,), torch.bfloat16)]
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in gradients)


def test_a_loss_may_be_an_attribute_or_many_values(tmp_path: Path, monkeypatch):
    (tmp_path / "lossy_nets.py").write_text(
        "import torch, types\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x): return types.SimpleNamespace(loss=super().forward(x).sum())\n"
        "class Text(torch.nn.Linear):\n"
        "    def forward(self, x): return 'loss'\n"
        "def attribute(): return Net(3, 2), torch.ones(1, 3)\n"
        "def values(): return torch.nn.Linear(3, 2), torch.ones(4, 3)\n"
        "def text(): return Text(3, 2), torch.ones(4, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("attribute", "values"):
        made = make_workload(f"lossy_nets:{name}", None, None, torch.device("cpu"))
        assert made.loss(made.module).shape == ()
    made = make_workload("lossy_nets:text", None, None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="must return a tensor or have a loss, got str"):
        made.loss(made.module)
    with pytest.raises(ConfigError, match="gpt2-small gives shapes only: add --backward-ms"):
        make_workload("gpt2-small", None, None, torch.device("cpu"))


def test_one_rank_is_refused_in_one_line(capsys):
    assert main(["bench", "--model", "lstm", "--backward-ms", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "one rank exchanges nothing: start the command on all ranks" in line
