"""The strategy for Lightning's Trainer, with the real one and two ranks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from documented import EPILOGUE, Result, block, needs, results, train
from launching import Finished, run_command

pytestmark = [pytest.mark.full, needs("lightning")]

PROLOGUE = """
import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
seed_everything(1)

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def training_step(self, batch, index):
        self.log_dict(self.trainer.strategy.compression_metrics())
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

source = torch.Generator().manual_seed(5)
dataset = torch.utils.data.TensorDataset(
    torch.randn(96, 64, generator=source), torch.randint(10, (96,), generator=source)
)
loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
model = Net()
saving = ModelCheckpoint("saved", filename="{epoch}", save_top_k=-1, save_last="link")
"""
IMPORTED = ("lightning.pytorch", "gradcomp.integrations.lightning")
METRICS = "\nmetrics = strategy.compression_metrics()\nassert trainer.logged_metrics['gradcomp/ratio'] > 3"


def page(last: str | None) -> str:
    return f"last_checkpoint = {last!r}\n" + block("Lightning") + METRICS


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = results(train(tmp_path, PROLOGUE, page(None), IMPORTED))
    assert whole[0].metrics["gradcomp/steps"] == 6
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert saved == {
        "epoch=0.ckpt",
        "epoch=0.ckpt.gradcomp",
        "epoch=1.ckpt",
        "epoch=1.ckpt.gradcomp",
        "last.ckpt",
    }
    for name in saved:
        path = tmp_path / "saved" / name
        if name.endswith(".gradcomp"):
            if "epoch=1" in name:
                shutil.rmtree(path)
        elif "epoch=0" not in name:
            path.unlink()
    (tmp_path / "saved/last.ckpt").symlink_to("epoch=0.ckpt")
    resumed = results(train(tmp_path, PROLOGUE, page("saved/last.ckpt"), IMPORTED))
    assert resumed[0].metrics["gradcomp/steps"] == 3
    assert resumed[0].weights == whole[0].weights

    shutil.rmtree(tmp_path / "saved/epoch=0.ckpt.gradcomp")
    for rank in train(tmp_path, PROLOGUE, page("saved/epoch=0.ckpt"), IMPORTED):
        assert rank.returncode == 1
        assert "saved without compression state" in rank.stderr


def test_what_removes_a_checkpoint_removes_its_directory_and_evaluation_needs_none(tmp_path: Path) -> None:
    code = """
from gradcomp.integrations.lightning import CompressedDDPStrategy
strategy = CompressedDDPStrategy("topk:density=0.1", find_unused_parameters=True)
saving = ModelCheckpoint("saved", filename="{epoch}", save_top_k=1)
trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=3, callbacks=[saving], logger=False)
trainer.fit(model, loader)
Net.test_step = Net.training_step
trainer.save_checkpoint("weights.ckpt", weights_only=True)
trainer.test(model, loader, ckpt_path="weights.ckpt")
metrics = strategy.compression_metrics()
"""
    results(train(tmp_path, PROLOGUE, code, IMPORTED))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "epoch=2.ckpt",
        "epoch=2.ckpt.gradcomp",
    ]
    assert not (tmp_path / "weights.ckpt.gradcomp").exists()


def test_ranks_that_lightning_starts_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    ending = EPILOGUE.replace("print(", "open(f'{gc.rank()}.txt', 'w').write(").replace(
        '"result", json', '"result " + json'
    )
    script.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{PROLOGUE}\n{page(None)}\n{ending}")
    ended = run_command([sys.executable, str(script)])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ranks = [Finished(0, (tmp_path / f"{rank}.txt").read_text(), "") for rank in range(2)]
    assert isinstance(results(ranks)[0], Result)
