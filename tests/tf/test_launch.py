"""TensorFlow's ranks meet through what is installed, and say what is missing."""

from __future__ import annotations

import json

import preloaded
import pytest
from launching import plain_variables, run_ranks
from transport_engines import no_mpi, under_mpiexec

pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")

from gradcomp.core.errors import ConfigError
from gradcomp.tf.runtime import choose, init

BOTH = {"mpi", "torch"}


@pytest.mark.parametrize(
    ("launcher", "transport", "installed", "expected"),
    [
        ("mpirun", "auto", BOTH, "mpi"),
        ("mpirun", "auto", {"torch"}, "torch"),
        ("mpirun", "torch", BOTH, "torch"),
        ("mpirun", "shm", BOTH, "mpi"),
        ("mpirun", "shm+torch", BOTH, "torch"),
        ("slurm", "auto", BOTH, "mpi"),
        ("torchrun", "auto", BOTH, "torch"),
        ("torchrun", "shm", BOTH, "torch"),
        ("torchrun", "shm+mpi", BOTH, "mpi"),
        ("horovodrun", "horovod", BOTH, "torch"),
    ],
)
def test_the_engine_follows_from_launcher_and_transport(launcher, transport, installed, expected):
    assert choose(launcher, transport, installed) == expected


@pytest.mark.parametrize(
    ("launcher", "transport", "installed", "advice"),
    [
        ("mpirun", "auto", set(), r"pip install gradcomp\[mpi\]"),
        ("mpirun", "mpi", {"torch"}, r"pip install gradcomp\[mpi\]"),
        ("torchrun", "auto", {"mpi"}, "pip install torch; or start the ranks with mpiexec"),
        ("mpirun", "torch", {"mpi"}, "pip install torch$"),
        ("horovodrun", "horovod", {"mpi"}, "pip install torch$"),
    ],
)
def test_a_missing_engine_is_named(launcher, transport, installed, advice):
    with pytest.raises(ConfigError, match=advice):
        choose(launcher, transport, installed)


PROGRAM = """
import json, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hide())
import numpy as np
import tensorflow as tf
import gradcomp.tf as gc

weight = tf.Variable(tf.ones(3))

def mean_gradient():
    with gc.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(weight * (gc.rank() + 1.0))
    return tape.gradient(loss, weight)

found = []
try:
    for life in range(2):  # init after shutdown makes everything anew
        gc.init(timeout_seconds=40)
        total = gc.allreduce(np.full(3, gc.rank() + 1.0, dtype=np.float32), op=gc.Sum)
        found = [gc.rank(), gc.size(), gc.local_rank(), gc.local_size(), total.numpy().tolist()]
        found.append(tf.function(mean_gradient)().numpy().tolist())
        some = gc.ProcessSet([gc.size() - 2, gc.size() - 1])
        if some.included():
            found.append(gc.allgather(np.array([gc.rank()]), process_set=some).numpy().tolist())
        gc.shutdown()
    found.append("torch" in sys.modules)
except gc.GradcompError as error:
    found = [type(error).__name__, str(error)]
print(json.dumps(found) + "\\n", end="", flush=True)
"""


@pytest.mark.skipif(bool(no_mpi()), reason=no_mpi())
@pytest.mark.parametrize(
    ("world", "imported"),
    [
        pytest.param(2, preloaded.TENSORFLOW_ALONE, id="2"),
        pytest.param(3, preloaded.TENSORFLOW_ALONE, id="3", marks=pytest.mark.full),
        pytest.param(2, (), id="2-interpreters", marks=pytest.mark.full),
    ],
)
def test_mpi_is_enough(world: int, imported: tuple[str, ...]):
    done = under_mpiexec(PROGRAM.replace("HIDDEN", '("torch",)'), world, imported=imported)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(json.loads(line) for line in done.stdout.splitlines()) == [
        [
            *(rank, world, rank, world, [world * (world + 1) / 2] * 3, [(world + 1) / 2] * 3),
            *(*([some] if rank in some else []), False),
        ]
        for some in [[world - 2, world - 1]]
        for rank in range(world)
    ]


@pytest.mark.full
def test_torchrun_without_torch_says_what_to_install():
    (done,) = run_ranks(PROGRAM.replace("HIDDEN", '("torch",)'), 1, env=lambda _: plain_variables(0, 2, "1"))
    kind, text = json.loads(done.stdout)
    assert kind == "ConfigError"
    assert "pip install torch" in text


def test_a_half_set_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        init()
