"""Every public name of horovod.torch has a row on the page of Horovod's names, and is what the row says."""

from __future__ import annotations

import inspect
import types

import pytest
from horovod_names import PAGE, ROWS, STATES, Row, with_table

import gradcomp.torch as gc

#: Of horovod.torch 0.28.1, beside standard modules that it imports.
NAMES = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min",
    "ProcessSet", "Product", "Sum", "SyncBatchNorm", "add_process_set", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "ccl_built", "check_extension",
    "compression", "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic", "functions",
    "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_initialized", "join", "local_rank",
    "local_size", "mpi_built", "mpi_enabled", "mpi_lib_v2", "mpi_ops", "mpi_threads_supported", "nccl_built",
    "optimizer", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built",
    "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "sync_batch_norm",
    "synchronize",
]  # fmt: skip


def test_every_name_has_one_row() -> None:
    assert sorted(row.name for row in ROWS) == sorted(NAMES)
    assert all(row.state in STATES for row in ROWS)
    assert all(row.note for row in ROWS if row.state != "same"), "a row that is not the same says why"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_name_is_what_its_row_says(row: Row) -> None:
    assert (row.name in gc.__all__) == row.present
    if row.present:
        found = getattr(gc, row.name)
        assert isinstance(found, types.ModuleType) == (row.name == "elastic"), "other modules are ours alone"
        if row.arguments:
            assert (
                list(inspect.signature(found).parameters)[: len(row.arguments.split())]
                == row.arguments.split()
            )


def test_every_name_of_an_installed_horovod_has_a_row() -> None:
    hvd = pytest.importorskip("horovod.torch")
    public = {name for name in dir(hvd) if not name.startswith("_")}
    assert public <= set(NAMES)


@pytest.mark.parametrize("row", [row for row in ROWS if row.arguments], ids=lambda row: row.name)
def test_arguments_are_horovods(row: Row) -> None:
    hvd = pytest.importorskip("horovod.torch")
    assert list(inspect.signature(getattr(hvd, row.name)).parameters) == row.arguments.split()


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "run PYTHONPATH=tests python tests/horovod_names.py"


def test_what_is_built_needs_no_init_and_one_rank_uses_no_engine() -> None:
    assert gc.gloo_built() is True
    assert isinstance(gc.nccl_built(), int)
    assert not gc.rocm_built()
    for question in (gc.gloo_enabled, gc.mpi_enabled, gc.is_homogeneous):
        with pytest.raises(gc.StateError, match="init"):
            question()
    gc.init()
    try:
        assert gc.is_homogeneous()
        assert not gc.gloo_enabled()
        assert not gc.mpi_enabled()
    finally:
        gc.shutdown()
