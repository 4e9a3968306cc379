"""TensorFlow's examples run as they are, learn, and leave all ranks with the same weights."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import preloaded
import pytest
from launching import TORCHRUN, Finished, run_command
from transport_engines import mpich, no_mpi

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow: pip install gradcomp[tf-cpu]"
)
needs_mpi = pytest.mark.skipif(bool(no_mpi()), reason=no_mpi() or "MPI is here")
needs_torch = pytest.mark.skipif(not preloaded.HAS_TORCH, reason="needs torch: pip install gradcomp[torch]")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def start(launcher: Sequence[str], name: str, *arguments: str) -> Finished:
    command = [*launcher, sys.executable, str(EXAMPLES / name), *arguments]
    return run_command(command, env=QUIET, timeout=80)


def mpiexec(name: str, *arguments: str) -> Finished:
    return start([mpich(), "-n", "2"], name, *arguments)


def results(ended: Finished, world: int = 2) -> tuple[float, str]:
    """The figure and the digest of weights, which all ranks must share."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = {
        int(rank): (float(figure), digest)
        for rank, figure, digest in re.findall(
            r"rank (\d): (?:accuracy )?([0-9.]+)(?: bits a character)?, weights (\w{16})", ended.stdout
        )
    }
    assert set(said) == set(range(world)), ended.stdout
    assert len(set(said.values())) == 1, said
    return said[0]


@pytest.mark.full
@needs_mpi
def test_keras_fit_learns_digits() -> None:
    accuracy, _ = results(mpiexec("tf_keras_digits.py", "--epochs=5"))
    assert accuracy > 0.9


@pytest.mark.full
def test_keras_fit_alone_is_a_world_of_one() -> None:
    accuracy, _ = results(start([], "tf_keras_digits.py", "--epochs=3"), world=1)
    assert accuracy > 0.9


@pytest.mark.full
@needs_torch
def test_a_loop_of_ones_own_learns_digits_under_torchrun() -> None:
    accuracy, _ = results(start(TORCHRUN, "tf_tape.py"))
    assert accuracy > 0.9


@pytest.mark.full
@needs_mpi
def test_text_is_learned_at_levels_that_change() -> None:
    ended = mpiexec("tf_text.py", "--steps=160", "--every=40")
    bits, _ = results(ended)
    assert bits < 3.8  # a model that knows how often each character stands needs 4.5
    assert re.search(r"plan [1-9] by lgreco", ended.stderr), ended.stderr


@pytest.mark.full
@needs_mpi
def test_training_goes_on_after_a_kill_as_if_nothing_had_happened(tmp_path: Path) -> None:
    through = mpiexec("tf_resume.py", str(tmp_path / "through"), "--epochs=4")
    killed = mpiexec("tf_resume.py", str(tmp_path / "killed"), "--epochs=4", "--kill-in-epoch=3")
    assert killed.returncode != 0
    assert "epoch 3" in killed.stdout
    resumed = mpiexec("tf_resume.py", str(tmp_path / "killed"), "--epochs=4")
    assert re.findall(r"epoch \d", resumed.stdout) == ["epoch 3", "epoch 4"]
    accuracy, _ = results(resumed)
    assert accuracy > 0.85
    assert results(resumed) == results(through)


@pytest.mark.full
@needs_mpi
def test_ranks_with_unequal_numbers_of_samples_end_with_the_same_weights() -> None:
    accuracy, _ = results(mpiexec("tf_uneven.py"))
    assert accuracy > 0.9
