"""Every public name of horovod.torch 0.28.1, and what it is here; ``docs/horovod-names.md`` has the table.

PYTHONPATH=tests python tests/horovod_names.py    # writes the table into the page
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/horovod-names.md"
BEGIN, END = "<!-- names: begin -->", "<!-- names: end -->"

#: same: Horovod's meaning. better: the same call does more, or fails better. differs: what it says. missing: not there.
#: refused: not there on purpose.
STATES = ("same", "better", "differs", "missing", "refused")


@dataclass(frozen=True)
class Row:
    """``arguments``: Horovod's, in its order, which gradcomp's begin with; empty for what is not called."""

    name: str
    state: str
    note: str
    arguments: str = ""

    @property
    def present(self) -> bool:
        return self.state in ("same", "better", "differs")


_REDUCE = "average name op prescale_factor postscale_factor process_set"
_CODED = "average name compression op prescale_factor postscale_factor process_set"
_SCATTER = "name op process_set prescale_factor postscale_factor"
_OPS = "bool, uint8, int8, int16, unsigned integers and bfloat16 too"
_MODULE = "modules inside the package are gradcomp's own; import names from `gradcomp.torch`"

ROWS = (
    Row("Adasum", "same", "an allreduce of floating-point tensors among a power of two of ranks, on the CPU too"),
    Row("Average", "same", "of integers: loses its fraction, without overflow"),
    Row("Sum", "same", "of bool: or"),
    Row("Min", "same", "a NaN of any rank is the result"),
    Row("Max", "same", "a NaN of any rank is the result"),
    Row("Product", "same", "of bool: and"),
    Row("Compression", "better", "`none`, `fp16`, `bf16`, and for optimizers all [compressors](compressors/index.md)"),
    Row("DistributedOptimizer", "differs", "compresses, if `compression=` says so; the mean is in `.grad` when "
        "`backward()` returns; `groups` is checked and has no effect; Adasum without MPI, also in process sets",
        "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups "
        "groups sparse_as_dense process_set"),
    Row("HorovodInternalError", "same", "another name of `GradcompError`, from which all errors derive"),
    Row("ProcessSet", "better", "needs no registration; ranks only, no MPI communicator"),
    Row("SyncBatchNorm", "better", "on the CPU too; batches may differ in size, and be empty",
        "num_features eps momentum affine track_running_stats"),
    Row("add_process_set", "better", "local; needs no setting", "process_set"),
    Row("remove_process_set", "same", "connections stay until `shutdown`", "process_set"),
    Row("global_process_set", "same", ""),
    Row("allgather", "better", "complex dtypes too", "tensor name process_set"),
    Row("allgather_async", "same", "", "tensor name process_set"),
    Row("grouped_allgather", "better", "complex dtypes too", "tensors name process_set"),
    Row("grouped_allgather_async", "same", "", "tensors name process_set"),
    Row("allgather_object", "differs", "tensors and plain values; other classes are refused, so no rank runs "
        "another's code", "obj name"),
    Row("allreduce", "better", f"{_OPS}; Min, Max and Product have their own gradients", f"tensor {_CODED}"),
    Row("allreduce_", "better", _OPS, f"tensor {_REDUCE}"),
    Row("allreduce_async", "better", _OPS, f"tensor {_REDUCE}"),
    Row("allreduce_async_", "better", _OPS, f"tensor {_REDUCE}"),
    Row("grouped_allreduce", "better", _OPS, f"tensors {_CODED}"),
    Row("grouped_allreduce_", "better", _OPS, f"tensors {_REDUCE}"),
    Row("grouped_allreduce_async", "better", _OPS, f"tensors {_REDUCE}"),
    Row("grouped_allreduce_async_", "better", _OPS, f"tensors {_REDUCE}"),
    Row("sparse_allreduce_async", "better", "the result is coalesced; the handle may be called, and synchronized",
        "tensor name op process_set"),
    Row("alltoall", "same", "splits may be integers of any dtype, or a list", "tensor splits name process_set"),
    Row("alltoall_async", "same", "", "tensor splits name process_set"),
    Row("barrier", "same", "", "process_set"),
    Row("broadcast", "same", "", "tensor root_rank name process_set"),
    Row("broadcast_", "same", "", "tensor root_rank name process_set"),
    Row("broadcast_async", "same", "", "tensor root_rank name process_set"),
    Row("broadcast_async_", "same", "", "tensor root_rank name process_set"),
    Row("broadcast_object", "differs", "as `allgather_object`", "obj root_rank name process_set"),
    Row("broadcast_optimizer_state", "better", "LBFGS too; takes no step to make state, so `model=` is not needed and "
        "gradients do not change",
        "optimizer root_rank model"),
    Row("broadcast_parameters", "better", "compares names, shapes and dtypes first; takes a module too, and then "
        "gives it the root's extra state (`get_extra_state`), which a `state_dict()` cannot: a warning says so",
        "params root_rank"),
    Row("reducescatter", "better", "Min, Max and Product too",
        "tensor name compression op process_set prescale_factor postscale_factor"),
    Row("reducescatter_async", "better", "Min, Max and Product too", f"tensor {_SCATTER}"),
    Row("grouped_reducescatter", "better", "Min, Max and Product too",
        "tensors name compression op process_set prescale_factor postscale_factor"),
    Row("grouped_reducescatter_async", "better", "Min, Max and Product too", f"tensors {_SCATTER}"),
    Row("poll", "same", "", "handle"),
    Row("synchronize", "better", "a second call returns the same result", "handle"),
    Row("join", "better", "also with compressors, whose residuals are still sent; a collective of the "
        "other ranks that is not an allreduce is a `ConfigError` there", "device"),
    Row("init", "differs", "`comm=` of some ranks only where torch.distributed is initialised; else `process_set=`"),
    Row("shutdown", "same", "`init` may follow"),
    Row("is_initialized", "same", ""),
    Row("rank", "same", ""),
    Row("size", "same", ""),
    Row("local_rank", "same", ""),
    Row("local_size", "same", ""),
    Row("cross_rank", "same", ""),
    Row("cross_size", "same", ""),
    Row("mpi_built", "same", "whether mpi4py is installed"),
    Row("mpi_enabled", "same", "whether the gradients of this job are sent by MPI"),
    Row("mpi_threads_supported", "better", "False without MPI, instead of an error"),
    Row("gloo_built", "same", "whether PyTorch has Gloo"),
    Row("gloo_enabled", "same", "whether the rendezvous is torch.distributed"),
    Row("nccl_built", "same", "the version of CuPy's NCCL, or 0"),
    Row("cuda_built", "same", "whether CuPy or cuda-bindings is installed"),
    Row("rocm_built", "same", "False"),
    Row("ccl_built", "same", "False"),
    Row("ddl_built", "same", "False"),
    Row("start_timeline", "differs", "a row is a bucket; `{rank}` in the path: a file for every rank; "
        "[Timeline](timeline.md)", "file_path mark_cycles"),
    Row("stop_timeline", "same", ""),
    Row("elastic", "differs", "`run`, `TorchState`, `ObjectState` and `ElasticSampler`; ranks meet in a store "
        "of gradcomp's: see [Elastic training](elastic.md)"),
    Row("check_extension", "refused", "gradcomp has no extension to check"),
    Row("compression", "refused", _MODULE),
    Row("functions", "refused", _MODULE),
    Row("mpi_lib_v2", "refused", _MODULE),
    Row("mpi_ops", "refused", _MODULE),
    Row("optimizer", "refused", _MODULE),
    Row("sync_batch_norm", "refused", _MODULE),
)  # fmt: skip


def table() -> str:
    """The rows in Markdown, by name."""
    lines = ["| name | state | difference |", "|---|---|---|"]
    lines += [
        f"| `{row.name}` | {row.state} | {row.note} |"
        for row in sorted(ROWS, key=lambda row: row.name.lower())
    ]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page's text with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
