"""The callback for Transformers' Trainer, with the real one, a tiny model and two ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from documented import block, needs, results, train

pytestmark = [pytest.mark.full, needs("transformers")]

PROLOGUE = """
import torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
transformers.set_seed(1)
ends = dict(bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=64, n_layer=1, n_head=2, **ends))
words = torch.randint(128, (64, 16), generator=torch.Generator().manual_seed(5))
dataset = [{"input_ids": row, "labels": row} for row in words]
arguments = TrainingArguments(
    "out", max_steps=6, save_steps=3, logging_steps=1, per_device_train_batch_size=2, learning_rate=0.01,
    gradient_accumulation_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
)
last_checkpoint = get_last_checkpoint("out") if os.path.isdir("out") else None
"""
IMPORTED = ("transformers.trainer", "gradcomp.integrations.transformers")
METRICS = "\nmetrics = compression.compression_metrics()"


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    code = block("Transformers") + METRICS
    whole = results(train(tmp_path, PROLOGUE, code, IMPORTED))
    assert whole[0].metrics["gradcomp/steps"] == 6
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    resumed = results(train(tmp_path, PROLOGUE, code, IMPORTED))
    assert resumed[0].metrics["gradcomp/steps"] == 3
    assert resumed[0].weights == whole[0].weights

    # Without the compression state it would not be equal, and says what is missing.
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    shutil.rmtree(tmp_path / "out/checkpoint-3/gradcomp")
    for rank in train(tmp_path, PROLOGUE, code, IMPORTED):
        assert rank.returncode == 1
        assert "StateError" in rank.stderr
        assert "saved without compression state" in rank.stderr
    tolerant = code.replace('density=0.1"', 'density=0.1", missing_ok=True')
    assert results(train(tmp_path, PROLOGUE, tolerant, IMPORTED))[0].weights != whole[0].weights


def test_loggers_behind_the_callback_get_the_metrics_and_training_twice_is_compressed_twice(
    tmp_path: Path,
) -> None:
    code = """
from gradcomp.integrations.transformers import CompressionCallback

class Logger(transformers.TrainerCallback):
    seen = []
    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))

compression = CompressionCallback("topk:density=0.1")
trainer = Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[compression, Logger()])
trainer.train()
assert all(logs["gradcomp/ratio"] > 3 for logs in Logger.seen), Logger.seen
first = compression.compression_state
trainer.train()
assert compression.compression_metrics()["gradcomp/steps"] == (6 if compression.compression_state is not first else 12)
"""
    results(train(tmp_path, PROLOGUE, code + METRICS, IMPORTED))
