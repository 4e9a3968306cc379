"""Starts and ends this process's part in a job, returns its rank and engines, logs, and records a timeline."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from gradcomp.core.config import Config, unknown_variables
from gradcomp.core.errors import ConfigError, GradcompError, StateError, TransportError
from gradcomp.core.scheme import AUTO
from gradcomp.exchange.thread import finish_background
from gradcomp.job import preemption, process_end
from gradcomp.job.cores import available_cores, kernel_threads, warn_of_threads
from gradcomp.job.launch import Launch, Ranks
from gradcomp.job.membership import describe, introduce, part, set_of, warn_of_variables
from gradcomp.job.network import Network
from gradcomp.job.report import announce_job
from gradcomp.job.state import Runtime
from gradcomp.kernels import dispatch

logger = logging.getLogger("gradcomp")

FORMAT = "gradcomp %(levelname)s rank %(rank)s: %(message)s"

_runtime: Runtime | None = None
#: The arguments of the last :func:`begin`, with which an elastic job begins its next generation.
_begun: tuple[Any, ...] = ()
_lives: dict[Ranks, int] = {}  # init after shutdown must not read what the last job of these ranks published


def begin(
    join: Callable[[Config], tuple[Launch, Network]],
    process_sets: Iterable[Any],
    settings: dict[str, Any],
    *,
    training_threads: int = 1,
) -> None:
    """Initialise gradcomp for every frontend's ``init``: choose settings, meet through ``join``, exchange hosts.

    ``training_threads``: the number of threads on which the frontend's framework computes on the host.
    """
    global _runtime, _begun
    if _runtime is not None:
        if settings or process_sets:
            raise StateError(
                "gradcomp is already initialised; call shutdown() before init() with other settings"
            )
        return
    _begun = join, settings, training_threads
    ours = start_logging()
    config = Config.resolve(**settings)
    ours.level(config.log_level)
    _choose_kernels(config)
    while (runtime := _meet(join, config, process_sets, training_threads, ours)) is None:
        logger.info("a rank of the generation is gone, so the others form another one")
    _runtime = runtime
    preemption.process.agreed = False
    process_end.observe()
    atexit.register(shutdown)
    announce_job(runtime)


def _meet(
    join: Callable[[Config], tuple[Launch, Network]],
    config: Config,
    process_sets: Iterable[Any],
    training_threads: int,
    ours: Ranked,
) -> Runtime | None:
    """Return the runtime of the job, or None if the generation of an elastic job fell apart meanwhile."""
    try:
        launch, network = join(config)
    except BaseException:
        warn_of_variables([unknown_variables(os.environ)])  # a misspelt variable may be the cause
        raise
    ours.rank = network.rank
    if config.transport == AUTO and len(network.ranks) > 1:
        config = replace(config, transport=network.engine)
    _lives[network.ranks] = life = _lives.get(network.ranks, 0) + 1
    runtime = Runtime(launch, config, network, life)
    try:
        if config.timeline:
            runtime.start_timeline(config.timeline)
        if runtime.size > 1:
            introduce(runtime, sorted(set_of(one, runtime.size) for one in process_sets))
            process_end.watch_launcher(runtime)
            _watch_generation(runtime)
            # shutdown() needs the watchdog, and cannot make one once the rank that serves the store is gone.
            runtime.watchdog.start()
        else:
            warn_of_variables([unknown_variables(os.environ)])
        _choose_threads(runtime, training_threads)
    except BaseException as error:
        _release(runtime, orderly=network.member is None)
        if network.member is None or not isinstance(error, TransportError):
            raise
        network.member.give_up()
        return None
    return runtime


def shutdown() -> None:
    """Leave the job: finish what is exchanged, wait for the other ranks, and release everything.

    It may be called again, and is registered to run at exit. After an uncaught exception it tells the other ranks to
    stop instead.
    """
    failed = process_end.uncaught()
    reason = (
        None if failed is None or _runtime is None else f"rank {_runtime.rank} ended with {describe(failed)}"
    )
    runtime = _leave(reason)
    if runtime is None:
        return
    preemption.restore()
    if runtime.network.member is not None:
        runtime.network.member.leave()


def next_generation(reason: str | None) -> None:
    """Leave the generation of an elastic job and join the next one; ``reason`` says why it failed, or is None.

    Groups, exchangers and channels of the old one are released. Errors: see :func:`begin`.
    """
    runtime = _leave(reason)
    if reason is not None and runtime is not None and runtime.network.member is not None:
        runtime.network.member.give_up()
    join, settings, training_threads = _begun
    begin(join, (), settings, training_threads=training_threads)


def _watch_generation(runtime: Runtime) -> None:
    """Let the watchdog end all waits once a member of the generation is known to be dead."""
    member, before = runtime.network.member, runtime.watchdog.beside

    def lost() -> GradcompError | None:
        if member is not None and member.broken:
            return TransportError(f"aborted: {member.broken}")
        return before()

    runtime.watchdog.beside = lost


def _leave(reason: str | None) -> Runtime | None:
    """Leave the job, after a failure for this ``reason``; return the runtime that ended, or None without one."""
    global _runtime
    runtime, _runtime = _runtime, None
    if runtime is None:
        return None
    atexit.unregister(shutdown)
    if os.getpid() != runtime.process:
        return None  # a forked child has nothing of its own to leave
    process_end.stop_observing()
    orderly = part(runtime, reason) if runtime.size > 1 else reason is None
    runtime.engine.stop()
    finish_background()
    for exchanger in runtime.exchangers:
        exchanger.close()
    if runtime.size > 1:
        runtime.watchdog.stop()
    _release(runtime, orderly)
    return runtime


def _release(runtime: Runtime, orderly: bool) -> None:
    if runtime.timeline is not None:
        runtime.timeline.close()
    for group in runtime.groups.values():
        if orderly:
            group.close()
        else:
            group.abandon()
    runtime.network.close()


def is_initialized() -> bool:
    """Return whether :func:`init` was called and :func:`shutdown` was not."""
    return _runtime is not None


def current() -> Runtime:
    """Return the runtime; StateError before :func:`init`."""
    if _runtime is None:
        raise StateError("gradcomp is not initialised; call gc.init() first")
    return _runtime


def rank() -> int:
    """Return this process's rank in the job, 0 .. size - 1.

    Raises:
        StateError: before ``init``.
    """
    return current().rank


def size() -> int:
    """Return the number of processes in the job.

    Raises:
        StateError: before ``init``.
    """
    return current().size


def local_rank() -> int:
    """Return this process's number among those of the job on its host.

    Raises:
        StateError: before ``init``.
    """
    return current().launch.local_rank


def local_size() -> int:
    """Return the number of the job's processes on this host.

    Raises:
        StateError: before ``init``.
    """
    return current().launch.local_size


def cross_rank() -> int:
    """Return this process's number among those with its local rank, of which every host has at most one.

    Raises:
        StateError: before ``init``.
    """
    return current().launch.cross_rank


def cross_size() -> int:
    """Return the number of processes with this one's local rank.

    Raises:
        StateError: before ``init``.
    """
    return current().launch.cross_size


def preempted() -> bool:
    """Return whether some rank has got a signal that :func:`handle_preemption` handles, as all ranks know.

    Read it after ``step()``: there it is the same on all ranks, so that all can save and leave together. A signal
    travels in the headers of the next exchange that begins on its rank, and needs no message of its own; until then it
    is false, on that rank too. It stays true until ``shutdown()``. Exchanges among some of the ranks, such as those of
    a process set, do not carry it. In a world of one, where nothing is exchanged, it is true from the signal on.

    Raises:
        StateError: before ``init``.
    """
    told = preemption.process
    return told.requested if current().size == 1 else told.agreed


def _choose_kernels(config: Config) -> None:
    try:
        dispatch.use("reference" if config.kernels == "reference" else "native")
        if config.isa != "auto":
            from gradcomp import _native

            _native.set_isa(config.isa)
    except ValueError as error:
        raise ConfigError(f"kernels={config.kernels}, isa={config.isa}: {error}") from error


def _choose_threads(runtime: Runtime, training_threads: int) -> None:
    asked, cores, local_ranks = runtime.config.threads, available_cores(), runtime.launch.local_size
    threads = kernel_threads(asked, cores, local_ranks, training_threads)
    runtime.shares_core = training_threads >= max(cores // local_ranks, 1)
    dispatch.set_threads(threads)
    if runtime.launch.local_rank == 0:
        warn_of_threads(asked, cores, local_ranks, threads)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record the phases of every exchange bucket in a file of Chrome trace JSON, for chrome://tracing or Perfetto.

    Rows are exchange buckets, and times are microseconds from this call on. Phases: ready (until the last gradient
    came), queue, compress, send, reduce, decompress, wait (of the training thread), feedback. Kernels that compress
    also write the next residual, so the phase feedback contains only the rest: accepting the new residuals. The file
    grows twice a second, and is valid JSON after every write. ``gradcomp trace`` joins the files of all ranks.

    Local: ranks need not agree. ``shutdown`` ends the recording.

    Args:
        file_path: the file that rank 0 writes; other ranks record nothing. With ``{rank}`` in it every rank writes its
            own.
        mark_cycles: whether to mark where each step begins. There are no cycles here: an exchange bucket leaves once it
            is complete.

    Raises:
        ConfigError: if the file cannot be made.
        StateError: before ``init``, and while a timeline is being recorded.
    """
    state = current()
    if state.timeline is not None:
        raise StateError("a timeline is being recorded; call stop_timeline() first")
    state.start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording that :func:`start_timeline` began; do nothing on a rank that records nothing.

    Raises:
        StateError: before ``init``.
    """
    state = current()
    timeline, state.timeline = state.timeline, None
    if timeline is not None:
        timeline.close()


# ---- log lines, each with its rank


class Ranked(logging.Filter):
    """Gives every record of the logger an attribute ``rank`` for formats; it is "?" before the ranks have met."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: int | str = "?"

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True

    def level(self, name: str) -> None:
        """Set the logger's level, unless the program has set one."""
        if logger.level == logging.NOTSET:
            logger.setLevel(name.upper())


def start_logging() -> Ranked:
    """Prepare the logger: handlers of the program stay; where there are none, lines go to standard error."""
    ranked = next((one for one in logger.filters if isinstance(one, Ranked)), None)
    if ranked is None:
        ranked = Ranked()
        logger.addFilter(ranked)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    return ranked


# ---- Horovod's questions about engines: ..._built asks about this process, ..._enabled about the job


def mpi_built() -> bool:
    """Return whether mpi4py is installed, through which gradcomp uses MPI."""
    return find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether this job sends its gradients over MPI.

    Raises:
        StateError: before ``init``.
    """
    state = current()
    return state.size > 1 and "mpi" in state.config.transport.split("+")


def mpi_threads_supported() -> bool:
    """Return whether MPI was initialised in this process, and with MPI_THREAD_MULTIPLE."""
    if "mpi4py.MPI" not in sys.modules:
        return False
    from mpi4py import MPI

    return bool(MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_enabled() -> bool:
    """Return whether this job's ranks met through torch.distributed, whose Gloo then carries the user's collectives.

    Raises:
        StateError: before ``init``.
    """
    state = current()
    return state.size > 1 and state.network.engine == "torch"


def nccl_built() -> int:
    """Return the version of CuPy's NCCL, such as 22203, which the nccl transport needs; 0 if there is none."""
    try:
        from cupy.cuda import nccl
    except ImportError:
        return 0
    return int(nccl.get_version()) if getattr(nccl, "available", False) else 0


def cuda_built() -> bool:
    """Return whether CuPy or cuda-bindings is installed, with which gradcomp's kernels run on CUDA devices."""
    if find_spec("cupy") is not None:
        return True
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def rocm_built() -> bool:
    """Return False, because there are no kernels for ROCm."""
    return False


def ccl_built() -> bool:
    """Return False, because oneCCL is not among the transports."""
    return False


def ddl_built() -> bool:
    """Return False, because IBM's DDL is not among the transports."""
    return False


def is_homogeneous() -> bool:
    """Return whether every host of the job has the same number of ranks.

    Raises:
        StateError: before ``init``.
    """
    topology = current().topology
    return len({len(topology.members(leader)) for leader in topology.leaders}) == 1
