"""What else scripts do on a GPU: what must hold, and short runs on the CPU, where every way comes to the same."""

from __future__ import annotations

import json

import gpu_uses
import pytest


def ranks(parameters: str = "a", losses: tuple[float, ...] = (4.0, 2.0), by: str = "") -> list[dict]:
    return [{"parameters": parameters, "losses": list(losses), "by": by} for _ in range(2)]


def test_without_cupy_parameters_are_the_same():
    found = {run: ranks(by=run) for run in gpu_uses.USES["without-cupy"]}
    assert gpu_uses.judge("without-cupy", found, on_gpu=True) == []
    found["neither"] = ranks("b", by="neither")
    wrong = gpu_uses.judge("without-cupy", found, on_gpu=True)
    assert wrong == [f"neither: rank {rank} is not as in 'cupy'" for rank in (0, 1)]


def test_a_run_that_did_not_go_another_way_shows_nothing():
    found = {run: ranks(by="CupyCuda") for run in gpu_uses.USES["without-cupy"]}
    assert len(gpu_uses.judge("without-cupy", found, on_gpu=True)) == 1
    assert gpu_uses.judge("without-cupy", found, on_gpu=False) == []


def test_ranks_that_differ_are_wrong_whatever_their_losses():
    found = {"eager": ranks(), "compiled": [*ranks()[:1], *ranks("b")[:1]]}
    assert gpu_uses.judge("compile", found, on_gpu=True) == ["compiled: the ranks differ"]


@pytest.mark.parametrize(
    ("run", "last", "count"),
    [("8 bits", 2.09, 0), ("8 bits", 2.11, 2), ("8 bits", float("nan"), 2), ("uncompressed", 2.01, 2)],
)
def test_sharded_losses_are_those_of_fully_shard(run, last, count):
    found = {each: ranks() for each in gpu_uses.USES["fsdp"]} | {run: ranks(losses=(4.0, last))}
    assert len(gpu_uses.judge("fsdp", found, on_gpu=True)) == count


TINY = {"layers": 1, "width": 16, "heads": 2, "words": 32, "length": 8, "batch": 2}


@pytest.mark.full
@pytest.mark.parametrize("use", list(gpu_uses.USES))
def test_a_short_run(use, run_script, tmp_path):
    path = tmp_path / "use.json"
    shape = [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
    arguments = ["--device", "cpu", "--backend", "aot_eager", "--steps", "3", "--seconds", "150", *shape]
    done = run_script("benchmarks/gpu_uses.py", use, *arguments, "--json", str(path), check=False)
    assert done.returncode in (0, gpu_uses.NOT_HERE), done.stdout + done.stderr
    if done.returncode == 0:
        assert done.stdout.endswith("all holds\n")
        assert list(json.loads(path.read_text())["runs"]) == list(gpu_uses.USES[use])
    else:
        assert "torch" in done.stdout.splitlines()[-1]
