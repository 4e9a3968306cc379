"""The call after Accelerate's prepare(), with the real library and two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented import block, needs, results, train

pytestmark = [pytest.mark.full, needs("accelerate")]

PROLOGUE = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
set_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(128, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
source = torch.Generator().manual_seed(5)
dataset = torch.utils.data.TensorDataset(
    torch.randn(96, 64, generator=source), torch.randint(10, (96,), generator=source)
)
loader = torch.utils.data.DataLoader(dataset, batch_size=8)  # shuffled, Accelerate itself resumes in another order
criterion = torch.nn.CrossEntropyLoss()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
"""
IMPORTED = ("gradcomp.integrations.accelerate",)
METRICS = "\nmetrics = state.compression_metrics()"


def page(resume: bool, epochs: int) -> str:
    code = block("Accelerate")
    assert "else 0, 2):" in code
    return f"resume = {resume}\n" + code.replace("else 0, 2):", f"else 0, {epochs}):") + METRICS


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = results(train(tmp_path, PROLOGUE, page(False, 2), IMPORTED))
    assert whole[0].metrics["gradcomp/steps"] == 6
    results(train(tmp_path, PROLOGUE, page(False, 1), IMPORTED))
    (state,) = (tmp_path / "checkpoint/gradcomp").iterdir()
    assert {"rank-0-of-2.safetensors", "rank-1-of-2.safetensors"} < {file.name for file in state.iterdir()}
    resumed = results(train(tmp_path, PROLOGUE, page(True, 2), IMPORTED))
    assert resumed[0].metrics["gradcomp/steps"] == 3
    assert resumed[0].weights == whole[0].weights


def test_the_accelerators_scaler_is_found_and_changes_no_bit(tmp_path: Path) -> None:
    scaled = PROLOGUE + 'accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)\n'
    said = "\nassert accelerator.scaler.get_scale() == 256.0 and optimizer.scaler is accelerator.scaler"
    with_scaler = results(train(tmp_path, scaled, page(False, 1) + said, IMPORTED))
    without = results(train(tmp_path, PROLOGUE, page(False, 1), IMPORTED))
    assert with_scaler[0].weights == without[0].weights


def test_two_models_have_a_directory_each(tmp_path: Path) -> None:
    code = """
from gradcomp.integrations.accelerate import compress
second = torch.nn.Linear(64, 64)
model, second = accelerator.prepare(model, second)
state, other = compress(accelerator, model, "topk:density=0.1"), compress(accelerator, second, "topk:density=0.1")
for _ in range(2):
    model(second(torch.ones(4, 64) * accelerator.process_index)).sum().backward()
    model.zero_grad()
    second.zero_grad()
accelerator.save_state("checkpoint")
accelerator.load_state("checkpoint")
model(second(torch.ones(4, 64))).sum().backward()
"""
    results(train(tmp_path, PROLOGUE, code + METRICS, IMPORTED))
    assert (tmp_path / "checkpoint/gradcomp").is_dir()
    assert (tmp_path / "checkpoint/gradcomp_1").is_dir()


def test_a_model_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    code = """
from gradcomp.integrations.accelerate import compress
state = compress(accelerator, model, "quantize:bits=4")
"""
    for rank in train(tmp_path, PROLOGUE, code, IMPORTED):
        assert rank.returncode == 1
        assert (
            "ConfigError: compress() takes the model that this accelerator's prepare() returned"
            in rank.stderr
        )
