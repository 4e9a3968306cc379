"""``compress_fsdp``: models that ``fully_shard`` has sharded exchange quantised weights and gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gradcomp.compress import Compressor, Fake, Policy, Quantize, as_policy
from gradcomp.control.lgreco import LGreCo
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.metrics import PREFIX, StepMetrics
from gradcomp.core.topology import Topology
from gradcomp.core.trace import Statistics
from gradcomp.core.what_if import parse as ratios_of
from gradcomp.exchange.agreement import agree
from gradcomp.exchange.checkpoint_manager import refuse_to_save
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER
from gradcomp.job import runtime
from gradcomp.job.launch import Ranks
from gradcomp.job.network import make_transport
from gradcomp.job.process_sets import Members, members
from gradcomp.job.start import start_requests, validate_together
from gradcomp.job.state import Runtime
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.modules import opaque
from gradcomp.torch.optimizers import StepWatch
from gradcomp.torch.sharded.checks import check_arguments, check_compressor
from gradcomp.torch.sharded.exchange import (
    GatherWeights,
    ReduceGradients,
    ShardedSettings,
    ShardedStatistics,
    UnitExchange,
)
from gradcomp.torch.sharded.lgreco import ShardedLGreCo, rows_of
from gradcomp.torch.sharded.what_if import Grid
from gradcomp.transport.base import Transport

if TYPE_CHECKING:
    from gradcomp.torch.sharded.replica_state import ReplicaState
    from gradcomp.torch.sharded.replicas import ReplicaExchange, Replicas
    from gradcomp.torch.sharded.units import Unit

logger = logging.getLogger("gradcomp")

_METRICS = tuple(f"{PREFIX}{name}" for name in ("step_ms", "exposed_ms", "sent_mb", "ratio", "steps"))

#: The quantisers of QSDP's experiments (Markov 2024, sections 5.6 and 5.7), for weights and for gradients.
WEIGHTS = Quantize(bits=8, bucket_size=1024, rounding="shift")
GRADIENTS = Quantize(bits=8, bucket_size=1024)

#: Module that ``fully_shard`` was called on -> the job in which it was compressed.
_compressed: WeakKeyDictionary[torch.nn.Module, Runtime] = WeakKeyDictionary()


def compress_fsdp(
    model: torch.nn.Module,
    weights: Policy | Compressor | str = WEIGHTS,
    gradients: Policy | Compressor | str = GRADIENTS,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: Scaler = None,
    reuse: str | None = None,
    redraw: str = "step",
    controller: LGreCo | None = None,
    learn_levels: Sequence[int] = (),
    hierarchical: bool | None = None,
    process_set: Members = None,
    replicas: tuple[Any, ...] | None = None,
) -> ShardedCompression:
    """Compress the all-gathers and reduce-scatters of a model that ``torch.distributed.fsdp.fully_shard`` has sharded.

    In forward and in backward every rank computes with Q_w(x), where x are the shards of all ranks. The optimizer steps
    on x itself, in its own dtype, with the mean over ranks of Q_g(g_i):

        x_{t+1} = step(x_t, (1/N) sum over i of Q_g(gradient of f_i at Q_w(x_t))).

    Args:
        model: the sharded model, of which every ``FSDPModule`` is compressed from now on.
        weights: the quantiser with which shards travel to all ranks, its string form, or a :class:`gradcomp.Policy`.
            Biases, norms and small parameters travel uncompressed, as under ``DistributedOptimizer``.
        gradients: the quantiser with which gradients travel to the owners of their shards, who add them in float32 in
            rank order. Means are not coded again.
        optimizer: the optimizer that steps on the shards, which makes its steps the steps of the compression. Without
            it, a step ends when the shards change.
        grad_scaler: the GradScaler in use; the ranks compare its scale here. No state depends on it.
        reuse: ``"codes"`` keeps the codes of all shards, so that backward decodes those of forward and sends nothing;
            gathers while the shards do not change, as in further micro-batches, compare 56 bytes. None gathers again.
        redraw: weights are rounded anew in every ``"step"``, or in every ``"gather"`` (Markov 2024, Algorithm C.1).
        controller: an :class:`gradcomp.LGreCo` that chooses the bits of every parameter's weights and gradients, within
            one budget for the errors of both; ``weights`` and ``gradients`` are its reference. It needs ``optimizer``.
        learn_levels: after so many steps of ``optimizer`` the levels of layers above 100,000 elements are learned,
            apart for weights and gradients: those of :class:`gradcomp.Quantize` by minimum and maximum with 1 to 7
            bits, or of a :class:`gradcomp.Codebook` between them. The paper learns at (400, 1900, 3800). Under
            ``rounding="shift"``, weights are then rounded to the nearest level, and gradients without bias.
        hierarchical: where hosts have several ranks, True sends everything in two levels: codes of weights cross
            between hosts once per host, and gradients are added in float32 inside a host before the sum is quantised
            and sent on. False sends every message straight to its rank. None does the first for weights only, which
            have the same bits in both forms.
        process_set: the ranks that call this, if not all of the job: those of all meshes in the model.
        replicas: ``(compression, group)`` or ``(compression, group, controller)``, for hybrid sharding: the gradient of
            every shard is then its mean over the ranks of ``group``, which hold the same shards of other replicas. The
            compression is any that ``DistributedOptimizer`` takes; a group is what ``process_set`` may be, as the
            other dimension of the mesh. The first replica's shards are broadcast here.

    Collective. Wire, for a unit of fully_shard with s elements in the largest shard, b bits and quantisation buckets of
    B elements: a gather takes one round of (N-1) (s b / 8 + 8 s / B) bytes a rank, a reduction of gradients the same,
    and headers; before each, 56 (N-1) bytes, until steps repeat. In two levels, among H hosts of L ranks, N-1 becomes
    H-1 for bytes to other hosts, and a second round is inside hosts, of (L-1) H times the codes of a shard, or of
    4 (L-1)/L bytes for each gradient. Learning takes 8 (2^b + 1) (N-1) bytes a layer, once for each number of
    ``learn_levels``. The mean over replicas takes what its compressor takes for the layers of one rank's shards, once a
    backward pass. State: with ``reuse`` the codes of the model on every rank; of replicas, what their compressor keeps
    for a rank's shards; learned levels; else no residuals. Gradients that are not finite make the means of their
    parameters NaN on all ranks.
    Raises ConfigError for a model that is not sharded or sharded by FSDP1, for tensor parallelism in addition to
    sharding, meshes beyond the job, compressors of ``weights`` and ``gradients`` that keep state, votes with
    ``hierarchical``, and ``replicas`` on a mesh of two dimensions; StateError if the model is compressed already;
    PlanMismatchError on every rank if the ranks differ.
    Source: Markov 2024, chapter 5, Algorithms 5.1 (levels) and C.1 (QSDP). Differs: by default backward computes with
    the weights of forward, which Algorithm C.1 quantises anew. On GPUs tensors are copied to the host and back; the
    cost is not measured.
    """
    state = runtime.current()
    ranks = members(process_set)

    def validate() -> tuple[list[Unit], tuple[Policy, Policy], Replicas | None]:
        # These import torch's packages, which takes long.
        from gradcomp.torch.sharded.replicas import check_replicas
        from gradcomp.torch.sharded.units import find_units

        units = find_units(model)
        policies = as_policy(weights), as_policy(gradients)
        LossScale(grad_scaler).check()
        if any(_compressed.get(module) is state for module in model.modules()):
            raise StateError(
                "compress_fsdp was called on this model, or on a part of it, before; call it once"
            )
        check_arguments(units, policies, optimizer, reuse, redraw, learn_levels, hierarchical, controller)
        for unit in units:
            if not {_of_job(state, rank) for rank in unit.ranks} <= set(ranks):
                raise ConfigError(
                    f"{unit.name} is sharded among ranks {list(unit.ranks)}, of which not all call compress_fsdp: "
                    "name all of them in process_set="
                )
        if state.what_if(ranks):
            policies = Policy(Fake()), Policy(Fake())
        asked = None if replicas is None else check_replicas(state, units, replicas, ranks, optimizer)
        return units, policies, asked

    (units, policies, asked), transport = validate_together(
        state, ranks, validate, "compress its sharded model", "has not called compress_fsdp"
    )
    compression = ShardedCompression(
        state,
        units,
        policies,
        optimizer,
        reuse == "codes",
        redraw == "gather",
        tuple(learn_levels),
        hierarchical,
        None if state.what_if(ranks) else controller,
    )
    if transport is not None:
        scale = grad_scaler.get_scale() if grad_scaler else None
        compression._begin(transport, ranks, optimizer, scale, asked)
    if asked is not None:
        compression._begin_replicas(asked, optimizer, grad_scaler)
    for unit in units:
        for module in unit.modules:
            _compressed[module] = state  # type: ignore[index]
    return compression


class ShardedCompression:
    """The compression of a sharded model: its statistics, its state, and exact weights for evaluation."""

    def __init__(
        self,
        state: Runtime,
        units: Sequence[Unit],
        policies: tuple[Policy, Policy],
        optimizer: torch.optim.Optimizer | None,
        reuse: bool,
        redraw: bool,
        learn_levels: tuple[int, ...],
        hierarchical: bool | None,
        controller: LGreCo | None,
    ) -> None:
        self._state = state
        steps = None if optimizer is None else 0
        watch = StepWatch(one.current for unit in units for one in unit.parameters)
        self._settings = ShardedSettings(
            *policies,
            self._exchanger,
            state.rank,
            reuse,
            redraw,
            steps,
            watch,
            self._topology,
            learn_levels,
            hierarchical,
        )
        self._units = [UnitExchange(unit, self._settings) for unit in units]
        self._exchangers: dict[Ranks, Exchanger] = {}
        self._metrics = StepMetrics()
        self._controller = controller
        #: The exchange between replicas, with the statistics of its own; None without ``replicas=``.
        self.replicas: ReplicaExchange | None = None
        #: How many reductions of gradients the last step of the optimizer had seen.
        self._reduced = 0

    def statistics(self) -> ShardedStatistics:
        """Return a copy of what this rank has counted so far."""
        between = sum(each.between_bytes for each in self._units)
        found = replace(self._settings.statistics, between_bytes=between)
        if self.replicas is not None:
            own = self.replicas.statistics()
            found.replica_bytes, found.replica_seconds = own.wire_bytes, own.exposed_seconds
        return found

    def compression_metrics(self) -> dict[str, float]:
        """Return one flat dictionary of numbers for a logger: ``{"gradcomp/ratio": 3.9, ...}``.

        The means are per step of the optimizers since the last call; at the first call, since the first gather. If
        there was no step since the last call, the same means are returned again.

        - ``gradcomp/step_ms``: milliseconds between the calls, divided by the steps.
        - ``gradcomp/exposed_ms``: milliseconds for which the program waited for gathers, reductions and means over
          replicas.
        - ``gradcomp/sent_mb``: millions of bytes that this rank sent, of weights and of gradients.
        - ``gradcomp/ratio``: bytes of uncompressed exchanges over bytes sent.
        - ``gradcomp/steps``: steps of the optimizers since the start.

        In a world of one the ratio is 1 and all other values are 0. Local, as :meth:`statistics`.
        """
        settings, counted = self._settings, self.statistics()
        dense = 0 if self.replicas is None else self.replicas.statistics().dense_bytes
        now = Statistics(
            steps=settings.watch.steps,
            wire_bytes=counted.weight_bytes + counted.gradient_bytes + counted.replica_bytes,
            dense_bytes=counted.dense_bytes + dense,
            exposed_seconds=counted.exchange_seconds + counted.replica_seconds,
            step_seconds=perf_counter() - settings.began if settings.began else 0.0,
        )
        found = self._metrics.read(now if settings.began else Statistics())
        return {name: found[name] for name in _METRICS}

    def plan(self) -> dict[str, dict[str, str]]:
        """Return the string forms of the compressors now, by ``"weights"`` and ``"gradients"`` and by parameter."""
        return {
            title: {
                one.name: each.current(kind, one, one.current.dtype).to_string()
                for each in self._units
                for one in each.unit.parameters
            }
            for title, kind in (("weights", ALL_GATHER), ("gradients", REDUCE_SCATTER))
        }

    @contextmanager
    def exact_weights(self) -> Iterator[None]:
        """Send weights uncompressed within a ``with`` block, as to evaluate what a checkpoint holds.

        All ranks must enter and leave the block at the same point of training.
        """
        self._reshard()
        self._settings.exact = True
        try:
            yield
        finally:
            self._settings.exact = False
            self._reshard()

    def state_dict(self) -> dict[str, Any]:
        """Return the counters that random numbers depend on, and learned levels, as numbers and strings.

        They are the same on all ranks that share shards.

        With ``replicas=`` it also returns the state of that exchange, as DTensors on the mesh of the shards and text,
        which torch.distributed.checkpoint saves. It is collective then, between two steps.

        Raises StateError in a run with fake compression, unless the settings allow it to save.
        """
        faked = any(self._settings.fake(kind) is not None for kind in (ALL_GATHER, REDUCE_SCATTER))
        if self._exchangers and faked:
            refuse_to_save(self._state.config)
        counts = {each.unit.name: each.counts for each in self._units}
        state: dict[str, Any] = {"version": 1, "steps": self._settings.steps, "units": counts}
        if levels := {each.unit.name: each.levels.state() for each in self._units if each.levels.found}:
            state |= {"version": 2, "levels": levels}
        if self._settings.lgreco is not None:
            state["lgreco"] = self._settings.lgreco.state()
        if (of_replicas := self._replica_state()) is not None:
            state["replicas"] = of_replicas.save()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from :meth:`state_dict`, after the model was loaded.

        A state of other shards is cut anew: residuals stay what they are, by element. Raises StateError if the state is
        that of another model, of other compressors' levels, or of another number of replicas.
        """
        from gradcomp.torch.sharded.units import unit_name  # as in compress_fsdp

        names = [each.unit.name for each in self._units]
        if not _is_state(state):
            raise StateError("this is no state of a ShardedCompression, as its state_dict() returns it")
        # Earlier versions named wrappers too.
        if list(counts := {unit_name(name): found for name, found in state["units"].items()}) != names:
            raise StateError(f"the state is of units {list(counts)}, the model has {names}")
        if (self._settings.lgreco is None) != ("lgreco" not in state):
            raise StateError(
                "the state and this compression are not both with, or both without, a controller"
            )
        if self._settings.lgreco is not None:
            self._settings.lgreco.resume(state["lgreco"])
        if (of_replicas := self._replica_state()) is not None:
            if "replicas" in state:
                of_replicas.load(state["replicas"])
            else:
                logger.warning("the state has no residuals of replicas=, which begin with zeros")
        if self._settings.steps is not None:
            self._settings.steps = state["steps"] or 0
        for each in self._units:
            each.load_levels(state.get("levels", {}).get(each.unit.name, {}))
            each.resume(*counts[each.unit.name])

    def _begin(
        self,
        transport: Transport,
        ranks: Ranks,
        optimizer: torch.optim.Optimizer | None,
        scale: float | None,
        asked: Replicas | None,
    ) -> None:
        """Compare the ranks' arguments, then install the collectives that ``fully_shard`` calls.

        Collective. Raises PlanMismatchError on every rank if the ranks differ.
        """
        state, settings, units = self._state, self._settings, [each.unit for each in self._units]
        described = {
            "weights": repr(settings.weights),
            "gradients": repr(settings.gradients),
            "reuse": settings.reuse,
            "redraw": settings.redraw,
            "learn_levels": list(settings.learn_levels),
            "hierarchical": settings.hierarchical,
            "optimizer": optimizer is not None,
            "controller": repr(self._controller),
            "scale of the loss": scale,
            "replicas": asked and asked.described,
            "units": {u.name: [[p.name, list(p.shape), p.dimension] for p in u.parameters] for u in units},
        }
        wait_for = state.watchdog.patient(state.config, "the other ranks to compare their sharded models")
        agree(transport, described, wait_for=wait_for)
        if any(unit.ranks == tuple(state.network.ranks[rank] for rank in ranks) for unit in units):
            self._add_exchanger(transport, ranks)
        else:
            transport.close()
        if state.what_if(ranks):
            self._begin_grid(says=state.rank == ranks[0])
        if self._controller is not None:
            self._begin_control(self._controller)
        for each in self._units:
            if len(each.unit.ranks) > 1:
                self._exchanger(each.unit.ranks)
            for module in each.unit.modules:
                module.set_custom_all_gather(GatherWeights(each))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(ReduceGradients(each))  # type: ignore[arg-type]
                module.register_forward_pre_hook(opaque(each.unit.watch_gradients))  # type: ignore[attr-defined]
        if optimizer is not None:
            optimizer.register_step_post_hook(self._stepped)
        if state.rank == ranks[0]:
            parameters = [one for unit in units for one in unit.parameters]
            logger.info(
                "fully_shard: %d units of %d parameters, %d of them uncompressed; weights by %s, gradients by %s",
                len(units),
                len(parameters),
                sum(
                    settings.weights.choose(one.spec(one.current.dtype))[1] is not None for one in parameters
                ),
                settings.weights.title,
                settings.gradients.title,
            )

    def _begin_replicas(
        self, asked: Replicas, optimizer: torch.optim.Optimizer | None, grad_scaler: Scaler
    ) -> None:
        """Begin the exchange between replicas. Collective over them."""
        from gradcomp.torch.sharded.replicas import ReplicaExchange

        units = [each.unit for each in self._units]
        self.replicas = ReplicaExchange(self._state, units, asked, optimizer, grad_scaler)

    def _replica_state(self) -> ReplicaState | None:
        """Return what saves the state of the exchange between replicas; None if there is nothing to save."""
        from gradcomp.torch.sharded.replica_state import ReplicaState

        if self.replicas is None or not self.replicas.driver.attached:
            return None
        ranks = self._units[0].unit.ranks
        gather = self._exchanger(ranks).allgather_bytes if len(ranks) > 1 else None
        return ReplicaState.of(self.replicas, len(ranks), gather)

    def _begin_grid(self, *, says: bool) -> None:
        """Begin a what-if run: ratios of the setting replace the compression."""
        settings, statistics = self._settings, self._settings.statistics
        among = self._units[0].unit.ranks
        exchanger = self._exchanger(among)
        transport = exchanger.pipeline.transport
        settings.grid = Grid(
            ratios_of(self._state.config.what_if),
            transport.size,
            transport.rank,
            lambda: self._exchanger(among),
            lambda: statistics.weight_bytes + statistics.gradient_bytes,
            says=says,
        )
        if says:
            logger.warning(
                "what_if=%s: fake compression replaces that of this program; training is worthless; %d steps give the "
                "first table",
                self._state.config.what_if,
                settings.grid.steps,
            )

    def _begin_control(self, controller: LGreCo) -> None:
        """Begin the choice of quantisers, among the ranks of all units."""
        settings, units = self._settings, [each.unit for each in self._units]
        policies = {ALL_GATHER: settings.weights, REDUCE_SCATTER: settings.gradients}
        rows = rows_of(units, policies, controller, check_compressor)
        exchanger = self._exchanger(units[0].ranks)
        settings.lgreco = ShardedLGreCo(controller, rows, exchanger, self._state.config.seed)

    def _stepped(self, *_: object) -> None:
        """Count a step, if gradients were reduced for it, and end it for the controller and for learned levels.

        torch's get_optimizer_state_dict steps an optimizer that has no state, at a rate of 0. A checkpoint must not
        change what is drawn after it.
        """
        settings = self._settings
        assert settings.steps is not None, "there is an optimizer"
        if settings.statistics.scatters == self._reduced:
            return
        self._reduced = settings.statistics.scatters
        settings.steps += 1
        if settings.lgreco is not None and settings.lgreco.end_step(settings.steps):
            for each in self._units:
                each.forget()
        for each in self._units:
            each.stepped()

    def _reshard(self) -> None:
        for each in self._units:
            for module in each.unit.modules:
                module.reshard()

    def _topology(self, ranks: Ranks) -> Topology:
        """Return the topology of ranks of torch.distributed."""
        return self._state.topology.among([_of_job(self._state, rank) for rank in ranks])

    def _exchanger(self, ranks: Ranks) -> Exchanger:
        """Return the exchanger among ranks of torch.distributed; collective the first time."""
        if ranks not in self._exchangers:
            job = tuple(_of_job(self._state, rank) for rank in ranks)
            self._add_exchanger(make_transport(self._state, job), job)
        return self._exchangers[ranks]

    def _add_exchanger(self, transport: Transport, ranks: Ranks) -> None:
        torchs = tuple(self._state.network.ranks[rank] for rank in ranks)
        self._exchangers[torchs] = start_requests(self._state, ranks, transport)


def _is_state(state: Any) -> bool:
    """Return True if it has the form of :meth:`ShardedCompression.state_dict`."""
    if not isinstance(state, dict) or state.get("version") not in (1, 2):
        return False
    if not isinstance(state.get("units"), dict) or not isinstance(state.get("levels", {}), dict):
        return False
    counts = list(state["units"].values())
    numbers = (
        [*chain(*counts), state.get("steps") or 0] if all(isinstance(c, list) for c in counts) else [None]
    )
    return all(type(n) is int for n in numbers) and all(len(c) == 3 for c in counts)


def _of_job(state: Runtime, rank: int) -> int:
    """Return the gradcomp rank of a rank of torch.distributed."""
    if rank not in state.network.ranks:
        raise ConfigError(
            f"the model's mesh has rank {rank}; gradcomp was initialised on {list(state.network.ranks)}: initialise it "
            "on all ranks of the mesh"
        )
    return state.network.ranks.index(rank)
