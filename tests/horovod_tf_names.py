"""Every public name of Horovod 0.28.1 for TensorFlow and Keras, and what it is here.

``docs/horovod-tensorflow-names.md`` has the tables.

PYTHONPATH=tests python tests/horovod_tf_names.py    # writes the tables into the page
"""

from __future__ import annotations

from pathlib import Path

from horovod_names import Row

PAGE = Path(__file__).resolve().parents[1] / "docs/horovod-tensorflow-names.md"

_ALL = "bool, uint8, int8, int16, unsigned integers and bfloat16 too"
_IGNORED = "`device_dense`, `device_sparse` and `ignore_name_scope` change nothing"
_OBJECTS = (
    "None, numbers, strings, bytes, NumPy arrays, lists, tuples and dicts; other classes are refused, so no "
)
_OBJECTS += "rank runs another's code; no `session`"
_HELPER = "a helper of Horovod's own modules"
_WRAPS = "compresses, if `compression=` says so; `op` is Average or Sum; the same object, changed in place; "
_WRAPS += "`name`, devices, `num_groups` and `groups` change nothing"

#: Of all three modules.
_COMMON = (
    *(Row(name, "same", "") for name in (
        "cross_rank", "cross_size", "global_process_set", "is_initialized", "local_rank", "local_size", "rank", "size",
        "stop_timeline",
    )),
    Row("Average", "same", "of integers: loses its fraction, without overflow"),
    Row("Sum", "same", "of bool: or"),
    Row("Adasum", "same", "an allreduce of floating-point tensors among a power of two of ranks; a tape's `op`"),
    Row("Compression", "better", "`none`, `fp16`, `bf16`, with `compress` and `decompress`, and for optimizers "
        "and tapes all [compressors](compressors/index.md)"),
    Row("ProcessSet", "better", "needs no registration; ranks only, no MPI communicator; no `process_set_id`"),
    Row("add_process_set", "better", "local; needs no setting", "process_set"),
    Row("remove_process_set", "same", "connections stay until `shutdown`", "process_set"),
    Row("init", "differs", "`init(comm=None, process_sets=None, **settings)`; `comm` must be all ranks"),
    Row("shutdown", "same", "`init` may follow"),
    Row("mpi_built", "same", "whether mpi4py is installed"),
    Row("mpi_enabled", "same", "whether the gradients of this job are sent by MPI"),
    Row("mpi_threads_supported", "better", "False without MPI, instead of an error"),
    Row("gloo_built", "same", "whether PyTorch is installed and has Gloo"),
    Row("gloo_enabled", "same", "whether the rendezvous is torch.distributed"),
    Row("nccl_built", "same", "the version of CuPy's NCCL, or 0"),
    Row("cuda_built", "same", "whether CuPy or cuda-bindings is installed"),
    *(Row(f"{name}_built", "same", "False") for name in ("rocm", "ccl", "ddl")),
    Row("start_timeline", "differs", "a row is a bucket; `{rank}` in the path: a file for every rank; "
        "[Timeline](timeline.md)", "file_path mark_cycles"),
    Row("elastic", "differs", "`run`, `KerasState`, `ObjectState`, `ElasticSampler` and the callbacks; ranks meet in a "
        "store of gradcomp's: see [Elastic training](elastic.md)"),
    Row("broadcast_global_variables", "same", "an error, as Horovod's in eager mode: TensorFlow 2 has no list of all "
        "variables; `broadcast_variables(model.variables)`", "root_rank"),
)  # fmt: skip

#: Of horovod.tensorflow.
TF_ROWS = (
    *_COMMON,
    *(Row(name, "same", "a NaN of any rank is the result") for name in ("Min", "Max")),
    Row("Product", "same", "of bool: and"),
    Row("is_homogeneous", "same", ""),
    Row("allreduce", "better", f"{_ALL}; {_IGNORED}", "tensor average device_dense device_sparse compression op "
        "prescale_factor postscale_factor name process_set ignore_name_scope"),
    Row("grouped_allreduce", "better", "as `allreduce`; dtypes may differ", "tensors average device_dense "
        "device_sparse compression op prescale_factor postscale_factor process_set ignore_name_scope name"),
    Row("reducescatter", "better", f"{_ALL}; Min, Max and Product too", "tensor device_dense compression op name "
        "process_set ignore_name_scope prescale_factor postscale_factor"),
    Row("grouped_reducescatter", "better", "as `reducescatter`; `name=` too", "tensors device_dense compression op "
        "process_set prescale_factor postscale_factor"),
    Row("allgather", "better", "complex dtypes too", "tensor name ignore_name_scope process_set"),
    Row("grouped_allgather", "better", "as `allgather`; dtypes may differ",
        "tensors name ignore_name_scope process_set"),
    Row("broadcast", "better", "complex dtypes too", "tensor root_rank name ignore_name_scope process_set"),
    Row("broadcast_", "better", "compares names, shapes and dtypes first", "variables root_rank name process_set"),
    Row("broadcast_variables", "better", "compares names, shapes and dtypes first; always in place",
        "variables root_rank process_set inplace"),
    Row("alltoall", "same", "splits may be integers of any dtype, or a list",
        "tensor splits name ignore_name_scope process_set"),
    Row("broadcast_object", "differs", _OBJECTS, "obj root_rank session name process_set"),
    Row("broadcast_object_fn", "differs", "as `broadcast_object`; works in TensorFlow 2",
        "root_rank session name process_set"),
    Row("allgather_object", "differs", "as `broadcast_object`", "obj session name process_set"),
    Row("join", "better", "also with compressors, whose residuals are still sent; an integer in eager mode; a "
        "collective of the other ranks that is not an allreduce is a `ConfigError` there"),
    Row("size_op", "differs", "takes a ProcessSet instead of its id", "process_set_id name"),
    Row("process_set_included_op", "differs", "as `size_op`; raises an error before `init` instead of returning a code",
        "process_set_id name"),
    *(Row(name, "same", "", "name") for name in ("rank_op", "local_rank_op", "local_size_op")),
    Row("DistributedOptimizer", "differs", f"{_WRAPS}; optimizers of Keras 3, as TensorFlow 2.16 and later have them",
        "optimizer name use_locking device_dense device_sparse compression sparse_as_dense backward_passes_per_step op "
        "gradient_predivide_factor average_aggregated_gradients num_groups groups process_set scale_local_gradients"),
    Row("DistributedGradientTape", "differs", "compresses, if `compression=` says so; the same object, changed in "
        "place; devices, `num_groups` and `groups` change nothing", "gradtape device_dense device_sparse compression "
        "sparse_as_dense op gradient_predivide_factor num_groups groups process_set scale_local_gradients"),
    Row("PartialDistributedGradientTape", "differs", "as `DistributedGradientTape`", "gradtape device_dense "
        "device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups groups process_set "
        "local_layers scale_local_gradients"),
    Row("SyncBatchNormalization", "better", "batches may differ in size, and be empty; masks; `process_set=`", "fused"),
    Row("BroadcastGlobalVariablesHook", "refused", "a hook for sessions of TensorFlow 1; Horovod has none either where "
        "`tf.estimator` is gone"),
    *(Row(name, "refused", _HELPER) for name in (
        "LocalGradientAggregationHelper", "check_extension", "check_num_rank_power_of_2", "gpu_available",
        "handle_average_backwards_compatibility", "refs_to_vars", "split_list", "vars_to_refs",
    )),
)  # fmt: skip

#: Of horovod.keras and horovod.tensorflow.keras together.
KERAS_ROWS = (
    *_COMMON,
    Row("DistributedOptimizer", "differs", f"{_WRAPS}; the order of arguments is that of `horovod.tensorflow.keras`",
        "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
        "backward_passes_per_step average_aggregated_gradients num_groups groups process_set scale_local_gradients"),
    Row("PartialDistributedOptimizer", "differs", "as `DistributedOptimizer`; layers need not be built",
        "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op groups "
        "process_set local_layers scale_local_gradients"),
    Row("allreduce", "better", f"{_ALL}; Average by default",
        "value name average prescale_factor postscale_factor op compression"),
    Row("allgather", "better", "complex dtypes too", "value name"),
    Row("broadcast", "better", "complex dtypes too", "value root_rank name"),
    Row("reducescatter", "better", _ALL, "value name op"),
    Row("load_model", "differs", "files of Keras 3, which hold the plain optimizer; no `legacy_opts`",
        "filepath custom_optimizers custom_objects compression legacy_opts"),
    Row("callbacks", "same", "its names are below"),
    Row("is_version_greater_equal_than", "refused", _HELPER),
)  # fmt: skip

#: Of their modules ``callbacks``.
CALLBACK_ROWS = (
    Row("BroadcastGlobalVariablesCallback", "better", "before the first batch where the model is built",
        "root_rank device local_variables"),
    Row("MetricAverageCallback", "same", "", "device"),
    Row("LearningRateScheduleCallback", "better", "scales SGD's velocity, which a traced function notices",
        "initial_lr multiplier start_epoch end_epoch staircase momentum_correction steps_per_epoch"),
    Row("LearningRateWarmupCallback", "better", "as `LearningRateScheduleCallback`",
        "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose"),
    Row("BestModelCheckpoint", "refused", "it is for Horovod's Spark estimators, which set its path; put "
        "`keras.callbacks.ModelCheckpoint(path, save_best_only=True)` after `MetricAverageCallback` on one rank"),
    Row("is_version_greater_equal_than", "refused", _HELPER),
)  # fmt: skip

TABLES = {"tensorflow": TF_ROWS, "keras": KERAS_ROWS, "callbacks": CALLBACK_ROWS}

#: What is there, and what is Horovod's, by table: modules of each.
MODULES = {
    "tensorflow": ("gradcomp.tf", ["tensorflow/__init__.py"]),
    "keras": ("gradcomp.tf.keras", ["keras/__init__.py", "tensorflow/keras/__init__.py"]),
    "callbacks": ("gradcomp.tf.keras.callbacks", ["keras/callbacks.py", "tensorflow/keras/callbacks.py"]),
}


def rows(name: str) -> list[Row]:
    """A table's rows, by name."""
    return sorted(TABLES[name], key=lambda row: row.name.lower())


def with_tables(text: str) -> str:
    """The page's text with the tables as they are now."""
    for name in TABLES:
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        lines = ["| name | state | difference |", "|---|---|---|"]
        lines += [f"| `{row.name}` | {row.state} | {row.note} |" for row in rows(name)]
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
