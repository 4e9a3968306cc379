"""The collectives that ``fully_shard`` calls: gathers of quantised weights, and means of quantised gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from gradcomp.compress import Compressor, Fake, Identity, Policy
from gradcomp.compress.fake import spend
from gradcomp.core.errors import ConfigError, GradcompError
from gradcomp.core.layers import ITEM_BYTES
from gradcomp.core.topology import Topology
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.exchange.fingerprint import NOTHING, Fingerprint
from gradcomp.exchange.request_group import Run
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, REPEATED, Array, PreparedRequest, Request
from gradcomp.kernels.segments import DTYPE_NUMBERS, DTYPES
from gradcomp.reduce.header import APPLIED, DISCARDED, KEPT
from gradcomp.torch.optimizers import StepWatch
from gradcomp.torch.sharded.checks import compressor
from gradcomp.torch.sharded.levels import KINDS, UnitLevels
from gradcomp.torch.sharded.lgreco import ShardedLGreCo
from gradcomp.torch.sharded.what_if import Grid, part_of, zero_the_rest
from gradcomp.torch.tensors import dtype_name

if TYPE_CHECKING:
    from gradcomp.torch.sharded.units import Sharded, Snapshot, Unit

Ranks = tuple[int, ...]


@dataclass
class ShardedStatistics:
    """Counts of what this rank has exchanged; bytes are those sent to other ranks, headers included.

    ``gathers`` counts gathers of weights, of which ``reused`` decoded the codes of forward without a message.
    ``scatters`` counts reductions of gradients. ``dense_bytes`` is what uncompressed gathers and reductions of the same
    tensors would have sent, those that ``reuse`` saved included. ``between_bytes`` are those of ``weight_bytes`` and
    ``gradient_bytes`` that went to other hosts, without comparisons. ``exchange_seconds`` is the time for which the
    program waited for all of them. ``replica_bytes`` were sent to other replicas; ``replica_seconds`` is the time for
    which the program waited for their means at the end of backward.
    """

    gathers: int = 0
    reused: int = 0
    scatters: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    dense_bytes: int = 0
    between_bytes: int = 0
    exchange_seconds: float = 0.0
    replica_bytes: int = 0
    replica_seconds: float = 0.0


@dataclass(eq=False)
class ShardedSettings:
    """The settings and the shared state of one :class:`ShardedCompression`.

    ``exchanger`` returns the exchanger among ranks of torch.distributed, made when it is first asked for.
    ``draw_rank`` is this rank's number in the job. ``steps`` counts steps of the optimizer, or is None if
    none was given. ``watch`` counts the steps of all optimizers on the model. ``topology`` returns that of
    ranks of torch.distributed, and ``hierarchical`` says which collectives use it; None: gathers only. After
    ``learn_levels`` steps levels are learned. ``exact`` is set while weights travel uncompressed. ``grid`` has the
    ratios of a what-if run. ``lgreco`` chooses quantisers.
    """

    weights: Policy
    gradients: Policy
    exchanger: Callable[[Ranks], Exchanger]
    draw_rank: int
    reuse: bool
    redraw: bool
    steps: int | None
    watch: StepWatch
    topology: Callable[[Ranks], Topology]
    learn_levels: tuple[int, ...] = ()
    hierarchical: bool | None = None
    exact: bool = False
    grid: Grid | None = None
    lgreco: ShardedLGreCo | None = None
    statistics: ShardedStatistics = field(default_factory=ShardedStatistics)
    #: When the first exchange began; None before it.
    began: float | None = None
    #: Exchanger -> checksum of the codes that its last gather received.
    decoded: dict[Exchanger, int] = field(default_factory=dict)
    _seen: dict[Exchanger, int] = field(default_factory=dict)

    def fake(self, kind: str) -> Fake | None:
        """Return the fake compression of these collectives, or None if they are not faked."""
        default = (self.weights if kind == ALL_GATHER else self.gradients).default
        if self.grid is not None:
            return self.grid.fakes[kind == REDUCE_SCATTER]
        return default if isinstance(default, Fake) else None

    def hosts(self, kind: str, ranks: Ranks) -> tuple[int, ...] | None:
        """Return the hosts of these ranks if these collectives use two levels, else None."""
        used = kind == ALL_GATHER if self.hierarchical is None else self.hierarchical
        topology = self.topology(ranks)
        return topology.hosts if used and topology.has_two_levels else None

    def fingerprint(self, exchanger: Exchanger) -> Fingerprint:
        """Return the values that must be equal on these ranks: optimizer settings and codes of weights, not shards."""
        if not exchanger.compares:
            return NOTHING
        return Fingerprint(np.zeros(1, np.uint32), self.watch.scalars(), self.decoded.get(exchanger, 0))

    def outcome(self, exchanger: Exchanger, unit: Unit) -> int:
        """Return this rank's outcome since the last exchange among these ranks, which must be equal on all of them."""
        steps = self.watch.steps - self._seen.get(exchanger, 0)
        self._seen[exchanger] = self.watch.steps
        if steps:
            return APPLIED if steps == 1 else REPEATED
        if (accumulates := unit.accumulates) is None:
            return 0
        return KEPT if accumulates else DISCARDED


class _Key(NamedTuple):
    """Identifies a request of a unit."""

    kind: str
    numbers: tuple[int, ...]
    dtype: torch.dtype
    ranks: Ranks
    exact: bool
    average: bool
    fake: Fake | None


@dataclass(eq=False)
class UnitExchange:
    """Exchanges the weights and gradients of one unit.

    The counters ``changes``, ``gathers`` and ``scatters`` seed the random draws. ``changes`` counts how often
    this rank's shards were found to differ from before.
    """

    unit: Unit
    settings: ShardedSettings
    changes: int = 0
    gathers: int = 0
    scatters: int = 0
    _prepared: dict[_Key, PreparedRequest] = field(default_factory=dict)
    #: Request -> the shards that its codes belong to, as ``changes`` and the number of steps.
    _codes: dict[PreparedRequest, tuple[int, int | None]] = field(default_factory=dict)
    _seen: Snapshot | None = None
    _seen_steps: int | None = None
    levels: UnitLevels = field(init=False)
    #: The bytes to other hosts of requests that are not prepared any more.
    _forgotten: int = 0

    def __post_init__(self) -> None:
        self.levels = UnitLevels(self.settings.learn_levels)

    @property
    def between_bytes(self) -> int:
        """The bytes that this rank has sent to other hosts, without comparisons."""
        return self._forgotten + sum(self._between(*one) for one in self._prepared.items())

    def _between(self, key: _Key, request: PreparedRequest) -> int:
        topology, own = self.settings.topology(key.ranks), dist.get_rank()
        inside = topology.members(key.ranks.index(own))
        return request.exchanged * sum(
            size for rank, size in enumerate(request.sent_to) if rank not in inside
        )

    @property
    def counts(self) -> list[int]:
        """The counters as the next collectives will find them, for :meth:`resume`."""
        return [self.changes + self._has_changed(self.unit.snapshot()), self.gathers, self.scatters]

    def resume(self, changes: int, gathers: int, scatters: int) -> None:
        """Continue from these counts, with the shards that this rank has now."""
        self.changes, self.gathers, self.scatters = changes, gathers, scatters
        self._seen, self._seen_steps = self.unit.snapshot(), self.settings.steps
        self._codes.clear()

    def chosen(self, kind: str, parameter: Sharded, dtype: torch.dtype) -> Compressor:
        """Return the compressor of a parameter before any levels were learned: the controller's, or the policy's."""
        lgreco = self.settings.lgreco
        if lgreco is not None and (found := lgreco.chosen.get((kind, parameter.name))) is not None:
            return found
        policy = self.settings.weights if kind == ALL_GATHER else self.settings.gradients
        return compressor(parameter.spec(dtype), policy)

    def current(self, kind: str, parameter: Sharded, dtype: torch.dtype) -> Compressor:
        """Return the compressor of a parameter now."""
        return self.levels.compressor(kind, parameter.spec(dtype), self.chosen(kind, parameter, dtype))

    def stepped(self) -> None:
        """Use the levels that were learned in the last step, if there are any."""
        self.forget(self.levels.adopt())

    def load_levels(self, state: Any) -> None:
        """Restore the levels of a saved state; StateError, and nothing changes, if they do not fit."""
        chosen = {
            (kind, one.name): (one.spec(one.current.dtype), self.chosen(kind, one, one.current.dtype))
            for kind in KINDS
            for one in self.unit.parameters
        }
        self.levels.load(state, chosen)
        self.forget(KINDS)

    def forget(self, kinds: Collection[str] = KINDS) -> None:
        """Forget the compressed requests of these kinds; they are prepared anew, with the levels of now."""
        for key in [key for key in self._prepared if key.kind in kinds and not key.exact]:
            request = self._prepared.pop(key)
            self._forgotten += self._between(key, request)
            self._codes.pop(request, None)
            request.release()

    def gather(self, output: torch.Tensor, own: torch.Tensor, ranks: Ranks) -> None:
        """Fill ``output`` with the decoded shards of all ranks."""
        settings, unit, in_backward = self.settings, self.unit, torch._C._current_graph_task_id() != -1
        if settings.grid is not None and not in_backward and not settings.exact:
            settings.grid.begin(settings.watch.steps)
        # Other ranks are those of a mesh for resharding after forward, whose weights are rounded already.
        exact = settings.exact or ranks != unit.ranks
        exchanger = settings.exchanger(ranks)
        with told(exchanger):
            _check_dtype(own)
            unit.check_gathered(output.numel(), len(ranks))
            request = self._request(
                exchanger, ALL_GATHER, range(len(unit.parameters)), own.dtype, ranks, exact=exact
            )
            if request.number == 0 and ranks == unit.ranks:
                unit.check_places(own)
        settings.statistics.gathers += 1
        settings.statistics.dense_bytes += (len(ranks) - 1) * own.nbytes
        self.gathers += 1
        if exact:
            if not in_backward:
                self._codes.clear()  # backward must gather exactly too, and not decode older codes
            settings.statistics.weight_bytes += self._run(exchanger, request, own, output, 0)
            return
        if settings.reuse and in_backward and self._codes.get(request, (0, -1))[1] == settings.steps:
            settings.statistics.reused += 1
            with _on_host(output) as whole:
                request.decode_again([whole])
            self._end_fake(ALL_GATHER, output, ranks)
            return
        snapshot = unit.snapshot()
        self.changes += self._has_changed(snapshot)
        self._seen, self._seen_steps = snapshot or self._seen, settings.steps
        shards = self.changes, settings.steps
        unchanged = settings.reuse and self._codes.get(request) == shards
        draw = self.gathers if settings.redraw else self.changes if settings.steps is None else settings.steps
        settings.statistics.weight_bytes += self._run(exchanger, request, own, output, draw, unchanged)
        if settings.lgreco is not None and not unchanged:
            settings.lgreco.ran(ALL_GATHER, unit)
        self._end_fake(ALL_GATHER, output, ranks)
        if settings.reuse:
            self._codes[request] = shards

    def _has_changed(self, snapshot: Snapshot | None) -> bool:
        """Return True if this rank's shards differ from those of the last gather."""
        if snapshot is None:
            return False
        if self.settings.steps != self._seen_steps or self._seen is None:
            return True
        return any(a[0]() is not b[0]() or a[1:] != b[1:] for a, b in zip(snapshot, self._seen, strict=True))

    def scatter(self, output: torch.Tensor, whole: torch.Tensor, ranks: Ranks, op: Any) -> None:
        """Fill ``output`` with this rank's shards of the sum, or mean, over ranks."""
        exchanger, statistics = self.settings.exchanger(ranks), self.settings.statistics
        with told(exchanger):
            _check_dtype(whole)
            average, factor = _operation(op)
            numbers = self.unit.reduced(whole.numel(), len(ranks))
            request = self._request(exchanger, REDUCE_SCATTER, numbers, whole.dtype, ranks, average=average)
        self.unit.with_gradient.difference_update(numbers)
        lgreco, steps = self.settings.lgreco, self.settings.steps
        if lgreco is not None and steps is not None:
            lgreco.ran(REDUCE_SCATTER, self.unit)
            if lgreco.is_sampled(steps):
                lgreco.see_gradients(self.unit, numbers, whole)
        statistics.gradient_bytes += self._run(exchanger, request, whole, output, self.scatters)
        statistics.dense_bytes += (len(ranks) - 1) * whole.nbytes // len(ranks)
        self.scatters += 1
        statistics.scatters += 1
        if factor != 1.0:
            output.mul_(factor)
        self._end_fake(REDUCE_SCATTER, output, ranks, output.numel())

    def _request(
        self,
        exchanger: Exchanger,
        kind: str,
        numbers: Sequence[int],
        dtype: torch.dtype,
        ranks: Ranks,
        *,
        exact: bool = False,
        average: bool = True,
    ) -> PreparedRequest:
        fake = None if exact else self.settings.fake(kind)
        key = _Key(kind, tuple(numbers), dtype, ranks, exact, average, fake)
        if key not in self._prepared:
            parameters = [self.unit.parameters[i] for i in numbers]
            blocks = self.unit.blocks(numbers, len(ranks))
            if fake is None:
                request = Request(
                    kind,
                    tuple(one.spec(dtype) for one in parameters),
                    tuple(Identity() if exact else self.current(kind, one, dtype) for one in parameters),
                    tuple(one.borders(len(ranks)) for one in parameters),
                    average,
                    self.unit.name,
                    blocks,
                )
            else:
                form = self.unit.name, blocks.size, len(ranks), dtype_name(dtype), fake.ratio
                request = part_of(kind, *form, average=average)
            request = replace(request, hosts=self.settings.hosts(kind, ranks))
            kept = kind == ALL_GATHER and self.settings.reuse and not exact
            self._prepared[key] = exchanger.prepare(request, apart=kept, draw_rank=self.settings.draw_rank)
        return self._prepared[key]

    def _end_fake(self, kind: str, target: torch.Tensor, ranks: Ranks, size: int = 0) -> None:
        """Zero what did not travel, and spend the time of coding, if this was fake compression.

        ``size`` is that of a rank's block, by default the target's share of a rank.
        """
        if (fake := self.settings.fake(kind)) is None:
            return
        zero_the_rest(target, size or target.numel() // len(ranks), fake.ratio)
        if fake.ratio != 1:
            spend(fake.codec_seconds * 4e-9 * target.numel())

    def _run(
        self,
        exchanger: Exchanger,
        request: PreparedRequest,
        source: torch.Tensor,
        target: torch.Tensor,
        draw: int,
        unchanged: bool = False,
    ) -> int:
        """Exchange, and return the number of bytes that this rank sent."""
        begin, before = perf_counter(), exchanger.pipeline.transport.bytes_sent
        self.settings.began = self.settings.began or begin
        outcome = self.settings.outcome(exchanger, self.unit)
        fingerprint = self.settings.fingerprint(exchanger)
        given, transport = array_of(source.cpu()), exchanger.pipeline.transport
        learnt = self.levels.learn(
            request.request, given, transport.rank, transport.size, self.settings.steps
        )
        with _on_host(target) as outputs:
            exchanger.begin([Run(request, [given], [outputs], draw, unchanged, outcome, fingerprint)])
            exchanger.finish()
        if request.result is not None and request.request.kind == ALL_GATHER:
            self.settings.decoded[exchanger] = request.result.checksum
        if learnt and request.result is not None and request.result.finite:
            with told(exchanger):
                self.levels.agree(exchanger, request.request.kind, learnt)
        request.discard()  # frees its references to the outputs
        self.settings.statistics.exchange_seconds += perf_counter() - begin
        return exchanger.pipeline.transport.bytes_sent - before


@dataclass(eq=False)
class _Collective:
    """The part of a custom collective that ``fully_shard`` needs in addition to the call."""

    exchange: UnitExchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a tensor for ``fully_shard`` to exchange."""
        return torch.empty(*size, dtype=dtype, device=device)


class GatherWeights(_Collective):
    """The all-gather of a unit, for ``FSDPModule.set_custom_all_gather``."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Gather; the result is complete on return, even with ``async_op``."""
        self.exchange.gather(output_tensor, input_tensor, tuple(dist.get_process_group_ranks(group)))


class ReduceGradients(_Collective):
    """The reduce-scatter of a unit, for ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce; the result is complete on return, even with ``async_op``."""
        self.exchange.scatter(output_tensor, input_tensor, tuple(dist.get_process_group_ranks(group)), op)


def _operation(op: Any) -> tuple[bool, float]:
    """Return whether the operation averages, and the factor on its sum; raise ConfigError for other operations."""
    if op == dist.ReduceOp.AVG:
        return True, 1.0
    if op == dist.ReduceOp.SUM:
        return False, 1.0
    if getattr(op, "op", None) == dist.ReduceOp.PREMUL_SUM:
        return False, float(op.factor)
    raise ConfigError(f"gradients are reduced by AVG, SUM or PREMUL_SUM, not by {op}")


@contextmanager
def told(exchanger: Exchanger) -> Iterator[None]:
    """Abort the other ranks' exchange at once, with this rank's error as the reason."""
    try:
        yield
    except GradcompError as error:
        exchanger.abort(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def _on_host(target: torch.Tensor) -> Iterator[Array]:
    """Yield the tensor's memory for writing, or host memory that is copied to the tensor's device at the end."""
    if target.device.type == "cpu":
        yield array_of(target)
        return
    host = torch.empty_like(target, device="cpu")
    yield array_of(host)
    target.copy_(host)


def array_of(tensor: torch.Tensor) -> Array:
    dtype = DTYPES[DTYPE_NUMBERS[dtype_name(tensor.dtype)]]
    array: Array = tensor.detach().view(torch.uint8).numpy().view(dtype)
    return array


def _check_dtype(tensor: torch.Tensor) -> None:
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        raise ConfigError(
            f"fully_shard exchanges {tensor.dtype}, as it does for parameters of several dtypes in one module; "
            f"gradcomp takes {', '.join(ITEM_BYTES)}"
        )
