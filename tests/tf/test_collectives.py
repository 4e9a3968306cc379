"""TensorFlow's collectives: Horovod's meanings, and a typed error on every rank where there is no meaning.

All checks of a world run in one job, see ``tf_collectives``: two and three ranks met through torch.distributed,
with one thread for ops, and two through MPI. Three check in tf.function only what can be checked there.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import preloaded
import pytest
from launching import run_command, run_ranks
from transport_engines import mpich, no_mpi

pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")

import numpy as np
import tensorflow as tf
import tf_collective_checks  # noqa: F401 - adds its checks
import tf_horovod_checks  # noqa: F401 - the same
from keras_checks import ENV, world_of_one
from tf_collectives import CHECKS

import gradcomp.tf as gc
from gradcomp.tf.objects import decode, encode

#: By where ranks meet, and their number.
JOBS = [("torch", 2), ("torch", 3), ("mpi", 2)]
CASES = [
    pytest.param(f"{name} {mode}", *job, marks=[] if job == JOBS[0] else pytest.mark.full)
    for job in JOBS
    for name, (_, modes) in CHECKS.items()
    for mode in (modes if job[1] == 2 else modes[-1:])
]
PROGRAM = """
import sys, tf_collective_checks, tf_horovod_checks
from tf_collectives import main
main(*sys.argv[1:])
"""


@functools.cache
def outcomes(meet: str, world: int) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as directory:
        if meet == "mpi":
            launcher = [mpich(), "-n", str(world), sys.executable, "-c", PROGRAM, directory, "0"]
            ended = [run_command(launcher, timeout=240)]
        else:
            ended = run_ranks(
                PROGRAM,
                world,
                env=ENV,
                timeout=240,
                arguments=(directory, "1"),
                imported=preloaded.TENSORFLOW,
            )
        for one in ended:
            assert one.returncode == 0, one.stdout + one.stderr
        return [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("name", "meet", "world"), CASES)
def test_in_a_world(name: str, meet: str, world: int) -> None:
    if meet == "mpi" and (missing := no_mpi()):
        pytest.skip(missing)
    if meet == "torch" and not preloaded.HAS_TORCH:
        pytest.skip("needs torch: pip install gradcomp[torch]")
    found = enumerate(outcomes(meet, world))
    wrong = [f"rank {rank}: {outcome[name]}" for rank, outcome in found if outcome[name]]
    assert not wrong, "\n".join(wrong)


# --------------------------------------------------------------------------------------------- world of one


@pytest.fixture
def one_rank():
    with world_of_one():
        yield


@pytest.mark.usefixtures("one_rank")
class TestWorldOfOne:
    @pytest.mark.parametrize("collective", [gc.allreduce, gc.allgather, gc.reducescatter, gc.alltoall])
    def test_everything_is_the_tensor_and_differentiable(self, collective) -> None:
        value = tf.constant([[1.0, 2.0]])
        for call in (collective, tf.function(collective), tf.function(collective, jit_compile=True)):
            np.testing.assert_array_equal(call(value), value)
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = tf.reduce_sum(collective(value) * 2.0)
        np.testing.assert_array_equal(tape.gradient(result, value), [[2.0, 2.0]])

    @pytest.mark.parametrize("mode", [lambda function: function, tf.function], ids=["eager", "graph"])
    def test_factors_count(self, mode) -> None:
        for op in (gc.Sum, gc.Average, gc.Min, gc.Max, gc.Product, gc.Adasum):

            def scaled(x, op=op):
                return gc.allreduce(x, op=op, prescale_factor=3.0, postscale_factor=0.5)

            np.testing.assert_array_equal(mode(scaled)(tf.constant([1.0, 2.0])), [1.5, 3.0])
        halved = mode(lambda x: gc.reducescatter(x, op=gc.Sum, postscale_factor=0.5))
        np.testing.assert_array_equal(halved(tf.constant([7, -7])), [3, -3])

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(gc.allreduce(x, prescale_factor=3.0, postscale_factor=0.5))
            return tape.gradient(y, x)

        np.testing.assert_array_equal(mode(gradient)(tf.ones(2)), [1.5, 1.5])

    def test_groups_slices_and_variables_stay_what_they_are(self) -> None:
        group = [tf.ones([2]), tf.constant([[3]])]
        for collective in (gc.grouped_allreduce, gc.grouped_allgather, gc.grouped_reducescatter):
            for result, value in zip(collective(group), group, strict=True):
                np.testing.assert_array_equal(result, value)
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]), tf.constant([5, 2]))
        result = gc.allreduce(slices)
        np.testing.assert_array_equal(tf.convert_to_tensor(result), tf.convert_to_tensor(slices))
        rows, received = gc.alltoall(tf.range(3), [3])
        assert (rows.numpy().tolist(), received.numpy().tolist()) == ([0, 1, 2], [3])
        variable = tf.Variable([1.0, 2.0])
        gc.broadcast_variables([variable])
        np.testing.assert_array_equal(variable, [1.0, 2.0])
        np.testing.assert_array_equal(gc.broadcast(variable, 0), [1.0, 2.0])

    def test_any_object_is_itself_and_this_rank_the_last_to_join(self) -> None:
        anything = object()
        assert gc.broadcast_object(anything) is anything
        assert gc.allgather_object(anything) == [anything]
        assert gc.join() == tf.function(gc.join)() == 0

    def test_a_barrier_calls_nobody(self) -> None:
        assert gc.barrier() is None
        graph = tf.function(gc.barrier).get_concrete_function().graph
        assert "PyFunc" not in {operation.type for operation in graph.get_operations()}

    def test_arguments_are_checked_as_in_larger_worlds(self) -> None:
        for call in (
            lambda: gc.allreduce(tf.constant([True])),
            lambda: gc.alltoall(tf.ones(3), [2]),
            lambda: gc.broadcast(tf.ones(1), 1),
            lambda: gc.broadcast_object(1, root_rank=1),
            lambda: gc.broadcast_variables([], root_rank=1),
        ):
            with pytest.raises(gc.ConfigError):
                call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: gc.allreduce(tf.ones(1)),
        lambda: gc.allgather(tf.ones(1)),
        lambda: gc.broadcast(tf.ones(1), 0),
        lambda: gc.reducescatter(tf.ones(1)),
        lambda: gc.alltoall(tf.ones(1)),
        lambda: gc.broadcast_object(1),
        lambda: gc.broadcast_variables([]),
        lambda: gc.broadcast_([], 0),
        lambda: gc.grouped_allreduce([tf.ones(1)]),
        lambda: gc.allgather_object(1),
        gc.barrier,
        gc.join,
        gc.size_op,
        gc.rank_op,
    ],
)
def test_before_init(call) -> None:
    with pytest.raises(gc.StateError, match="init"):
        call()


# -------------------------------------------------------------------------------------------- hostile bytes


def test_arrays_in_the_other_byte_order_arrive_as_they_are() -> None:
    sent = np.array([1.5, -2.0], dtype=">f4")
    assert decode(encode({"a": sent, "b": sent[1]})) == {"a": pytest.approx([1.5, -2.0]), "b": -2.0}


def test_bytes_that_are_no_object_are_refused() -> None:
    good = encode({"a": [1, np.arange(4), b"xyz", (np.float32(1),)]})
    cut = [b"", good[:7], good[:-1], good + b"\0"]
    changed = [good.replace(b"int64", b"int63"), good.replace(b"3}", b"-}")]
    texts = [
        b'{"exec": 1}', b'{"bytes": -1}', b'{"array": ["int8", [-1]]}', b"{}", b'{"array": []}',
        b'{"array": ["float32", [1e999]]}', b"[" * 100000,
    ]  # fmt: skip
    for bad in (*cut, *changed, *(len(text).to_bytes(8, "little") + text for text in texts)):
        with pytest.raises(gc.WireFormatError):
            decode(bad)
