"""Every public name of Horovod for TensorFlow and Keras has a row on its page, and is what the row says."""

from __future__ import annotations

import importlib
import inspect
import types

import horovod_sources
import pytest
from horovod_names import STATES
from horovod_tf_names import MODULES, PAGE, TABLES, with_tables

pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf]")

import gradcomp.tf as gc

#: Of Horovod 0.28.1, for where it is not installed.
_KERAS = (
    "Adasum Average Compression DistributedOptimizer PartialDistributedOptimizer ProcessSet Sum add_process_set "
    "allgather allreduce broadcast broadcast_global_variables callbacks ccl_built cross_rank cross_size cuda_built "
    "ddl_built elastic global_process_set gloo_built gloo_enabled init is_initialized "
    "is_version_greater_equal_than load_model local_rank local_size mpi_built mpi_enabled mpi_threads_supported "
    "nccl_built rank reducescatter remove_process_set rocm_built shutdown size start_timeline stop_timeline"
)
_TENSORFLOW = (
    "Adasum Average BroadcastGlobalVariablesHook Compression DistributedGradientTape DistributedOptimizer "
    "LocalGradientAggregationHelper Max Min PartialDistributedGradientTape ProcessSet Product Sum "
    "SyncBatchNormalization add_process_set allgather allgather_object allreduce alltoall broadcast broadcast_ "
    "broadcast_global_variables broadcast_object broadcast_object_fn broadcast_variables ccl_built "
    "check_extension check_num_rank_power_of_2 cross_rank cross_size cuda_built ddl_built elastic "
    "global_process_set gloo_built gloo_enabled gpu_available grouped_allgather grouped_allreduce "
    "grouped_reducescatter handle_average_backwards_compatibility init is_homogeneous is_initialized join "
    "local_rank local_rank_op local_size local_size_op mpi_built mpi_enabled mpi_threads_supported nccl_built "
    "process_set_included_op rank rank_op reducescatter refs_to_vars remove_process_set rocm_built shutdown size "
    "size_op split_list start_timeline stop_timeline vars_to_refs"
)
_CALLBACKS = (
    "BestModelCheckpoint BroadcastGlobalVariablesCallback LearningRateScheduleCallback LearningRateWarmupCallback "
    "MetricAverageCallback is_version_greater_equal_than"
)
NAMES = {"tensorflow": _TENSORFLOW.split(), "keras": _KERAS.split(), "callbacks": _CALLBACKS.split()}

NO_HOROVOD = "needs Horovod's sources: pip install horovod"


@pytest.mark.parametrize("table", TABLES)
def test_every_name_has_one_row(table: str) -> None:
    given = TABLES[table]
    assert sorted(row.name for row in given) == sorted(NAMES[table])
    assert all(row.state in STATES for row in given)
    assert all(row.note for row in given if row.state != "same"), "a row that is not the same says why"


@pytest.mark.parametrize("table", TABLES)
def test_every_name_of_an_installed_horovod_has_a_row(table: str) -> None:
    directory = horovod_sources.directory()
    if directory is None:
        pytest.skip(NO_HOROVOD)
    public = set().union(*(horovod_sources.names(directory / file) for file in MODULES[table][1]))
    assert public == set(NAMES[table])


@pytest.mark.parametrize("table", TABLES)
def test_a_name_is_what_its_row_says(table: str) -> None:
    module = importlib.import_module(MODULES[table][0])
    assert {row.name for row in TABLES[table] if row.present} == set(NAMES[table]).intersection(
        module.__all__
    )
    for row in TABLES[table]:
        assert hasattr(module, row.name) == row.present, row.name
        if not row.present:
            with pytest.raises(AttributeError, match=f"has no '{row.name}': "):
                getattr(module, row.name)
            continue
        found, wanted = getattr(module, row.name), row.arguments.split()
        assert isinstance(found, types.ModuleType) == (row.name in ("callbacks", "elastic")), row.name
        assert not wanted or list(inspect.signature(found).parameters)[: len(wanted)] == wanted, row.name


@pytest.mark.parametrize("table", TABLES)
def test_arguments_are_horovods(table: str) -> None:
    directory = horovod_sources.directory()
    if directory is None:
        pytest.skip(NO_HOROVOD)
    files = [*MODULES[table][1]]
    files += ["tensorflow/mpi_ops.py", "tensorflow/functions.py"] if table == "tensorflow" else []
    found = {}
    for file in files:
        found.update(horovod_sources.arguments(directory / file))
    for row in TABLES[table]:
        if row.present and row.name != "init":
            wanted = row.arguments.split()
            assert found.get(row.name, wanted) == wanted, row.name


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    assert with_tables(text) == text, "run PYTHONPATH=tests python tests/horovod_tf_names.py"


def test_what_nobody_has_is_said_as_python_says_it() -> None:
    with pytest.raises(AttributeError, match=r"module 'gradcomp.tf' has no attribute 'no_such_name'"):
        gc.no_such_name  # noqa: B018


def test_what_is_built_needs_no_init() -> None:
    assert isinstance(gc.gloo_built(), bool)
    assert isinstance(gc.nccl_built(), int)
    assert not gc.rocm_built()
    for question in (gc.gloo_enabled, gc.mpi_enabled, gc.is_homogeneous):
        with pytest.raises(gc.StateError, match="init"):
            question()


def test_init_takes_horovods_arguments() -> None:
    for wrong, said in (([0, 1], "all 1 ranks"), ([1], "all 1 ranks"), (0, "a list of ranks")):
        with pytest.raises(gc.ConfigError, match=said):
            gc.init(comm=wrong)
    gc.init(comm=[0], process_sets="dynamic", log_level="warning")
    try:
        assert gc.is_homogeneous()
        assert not gc.gloo_enabled()
        assert not gc.mpi_enabled()
        with pytest.raises(gc.ConfigError, match=r"ranks 0 \.\. 0"):
            gc.add_process_set([0, 1])
    finally:
        gc.shutdown()


def test_horovods_errors_catch_gradcomps() -> None:
    assert issubclass(gc.ConfigError, gc.HorovodInternalError)
    assert issubclass(gc.HostsUpdatedInterrupt, gc.HorovodInternalError)
