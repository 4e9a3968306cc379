"""The examples of whole programs run as they are: ranks end alike, learn, and resume bit for bit."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import preloaded
import pytest
from launching import TORCHRUN, Finished, run_command
from transport_engines import mpich, no_mpi

pytestmark = pytest.mark.full
needs_torch = pytest.mark.skipif(not preloaded.HAS_TORCH, reason="needs torch: pip install gradcomp[torch]")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(launcher: Sequence[str], name: str, *arguments: str) -> str:
    command = [*launcher, sys.executable, str(EXAMPLES / name), *arguments]
    ended: Finished = run_command(command, env={"TF_CPP_MIN_LOG_LEVEL": "3"}, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def shared(output: str) -> tuple[float, str]:
    """Accuracy and digest of the weights, which both ranks must have in common."""
    said = re.findall(r"^rank (\d): accuracy ([0-9.]+), weights (\w{16})$", output, re.MULTILINE)
    assert sorted(rank for rank, _, _ in said) == ["0", "1"], output
    ((accuracy, digest),) = {(float(figure), digest) for _, figure, digest in said}
    return accuracy, digest


@needs_torch
@pytest.mark.parametrize(
    ("option", "least", "most"), [("--fp16-allreduce", 1.9, 2.0), ("--compression=quantize:bits=4", 7.0, 8.0)]
)
def test_the_benchmark_counts_images_and_bytes(option: str, least: float, most: float) -> None:
    few = ["--width=16", "--blocks=1", "--image-size=16", "--batch-size=4", "--num-warmup-batches=1"]
    output = run(TORCHRUN, "synthetic_resnet.py", option, *few, "--num-batches-per-iter=2", "--num-iters=3")
    assert len(re.findall(r"^iteration \d: ", output, re.MULTILINE)) == 3
    one = re.search(r"^per rank: ([\d.]+) \+- [\d.]+ images/s$", output, re.MULTILINE)
    all_ranks = re.search(r"^total of 2 ranks: ([\d.]+) \+- [\d.]+ images/s$", output, re.MULTILINE)
    assert one, output
    assert all_ranks, output
    assert float(all_ranks[1]) == pytest.approx(2 * float(one[1]), abs=0.11)
    ratio = re.search(r"bytes per rank and step, ratio ([\d.]+)$", output, re.MULTILINE)
    assert ratio, output
    assert least < float(ratio[1]) <= most


@needs_torch
def test_ranks_with_unequal_numbers_of_samples_end_alike() -> None:
    accuracy, _ = shared(run(TORCHRUN, "uneven.py"))
    assert accuracy > 0.9


@needs_torch
def test_digits_are_learned_at_4_bits() -> None:
    output = run(TORCHRUN, "mnist_style.py", "--compression=quantize:bits=4", "--epochs=7")
    accuracy, _ = shared(output)
    assert accuracy > 0.9
    assert output.count("test loss") == 7  # rank 0 alone


@needs_torch
@pytest.mark.parametrize("norm", [[], ["--sync-batch-norm"]])
def test_a_resnet_goes_on_from_its_checkpoint_bit_for_bit(tmp_path: Path, norm: list[str]) -> None:
    options = ["--compression=topk:density=0.05", "--batch-size=16", "--batches-per-allreduce=2", *norm]
    options += ["--warmup-epochs=1", "--decay-epochs", "2", "--epochs"]
    through = run(TORCHRUN, "imagenet_style.py", *options, "3")
    halves = [
        run(TORCHRUN, "imagenet_style.py", f"--checkpoint={tmp_path}", *options, epochs)
        for epochs in ("2", "3")
    ]
    epochs = re.findall(r"^epoch .*$", through, re.MULTILINE)
    assert re.findall(r"^epoch .*$", "\n".join(halves), re.MULTILINE) == epochs
    assert shared(halves[1]) == shared(through)
    assert shared(halves[0]) != shared(through)
    assert shared(through)[0] > 0.5
    rates = [float(rate) for rate in re.findall(r"rate ([\d.]+)", through)]
    assert rates[0] < rates[1] == 0.08  # two ranks, two batches a step
    assert rates[2] == pytest.approx(0.008)


@needs_torch
def test_a_resnet_trains_on_images_of_a_file(tmp_path: Path) -> None:
    """Three classes, bright at the top, in the middle or at the bottom: chance is 0.33."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 360)
    images = draw.integers(0, 150, (360, 12, 12, 3))
    for image, label in zip(images, labels, strict=True):
        image[4 * label : 4 * label + 4] += 100
    file = tmp_path / "images.npz"
    arrays = {
        "x_train": images[:300],
        "y_train": labels[:300],
        "x_test": images[300:],
        "y_test": labels[300:],
    }
    np.savez(file, **{name: array.astype(np.uint8) for name, array in arrays.items()})
    options = ["--epochs=3", "--width=8", "--batch-size=10", "--warmup-epochs=0"]
    accuracy, _ = shared(run(TORCHRUN, "imagenet_style.py", f"--data={file}", *options))
    assert accuracy > 0.8


@pytest.mark.skipif(bool(no_mpi()), reason=no_mpi() or "MPI is here")
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install gradcomp[tf-cpu]"
)
def test_keras_fit_warms_up_and_keeps_its_best_model(tmp_path: Path) -> None:
    best = tmp_path / "best.keras"
    output = run([mpich(), "-n", "2"], "keras_fit.py", f"--save={best}", "--epochs=6", "--compression=bf16")
    accuracy, _ = shared(output)
    assert accuracy > 0.9
    assert "rates 0.0450 0.0600 0.0600 0.0600 0.0600 0.0060" in output
    kept = re.search(r"best model: accuracy ([\d.]+)", output)
    assert kept, output
    assert float(kept[1]) > 0.9
    assert best.is_file()
