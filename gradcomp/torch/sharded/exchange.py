"""The collectives that ``fully_shard`` calls: gathers of quantised weights, and means of quantised gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradcomp.compress import Cast, Compressor, Identity, Policy
from gradcomp.core.errors import ConfigError, GradcompError
from gradcomp.core.layers import ITEM_BYTES
from gradcomp.engine import Exchanger
from gradcomp.kernels.segments import DTYPE_NUMBERS, DTYPES
from gradcomp.pipeline.request_arrays import Array
from gradcomp.pipeline.request_group import Run
from gradcomp.pipeline.requests import ALL_GATHER, REDUCE_SCATTER, PreparedRequest, Request
from gradcomp.torch.layers import dtype_name

if TYPE_CHECKING:
    from gradcomp.torch.sharded.units import Sharded, Unit

Ranks = tuple[int, ...]


@dataclass
class ShardedStatistics:
    """What this rank has exchanged so far. Bytes are those that it sent to other ranks, headers included.

    ``gathers``: of weights, of which ``reused`` decoded codes that were there: in backward without a message.
    ``scatters``: reductions of gradients. ``exchange_seconds``: in which the program waited for them.
    """

    gathers: int = 0
    reused: int = 0
    scatters: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    exchange_seconds: float = 0.0


@dataclass(eq=False)
class Settings:
    """Of one :class:`ShardedCompression`. ``exchanger``: among ranks of torch.distributed, made when it is asked for.

    ``steps``: how often the optimizer stepped, if it is known; else shards are looked at. ``exact``: weights travel
    uncompressed for now.
    """

    weights: Policy
    gradients: Policy
    exchanger: Callable[[Ranks], Exchanger]
    reuse: bool
    redraw: bool
    steps: int | None
    exact: bool = False
    statistics: ShardedStatistics = field(default_factory=ShardedStatistics)


@dataclass(eq=False)
class UnitExchange:
    """What one unit exchanges. ``changes``, ``gathers``, ``scatters``: how often; random numbers belong to them."""

    unit: Unit
    settings: Settings
    changes: int = 0
    gathers: int = 0
    scatters: int = 0
    _prepared: dict[Any, PreparedRequest] = field(default_factory=dict)
    #: The shards whose codes were gathered last, by request.
    _gathered: dict[PreparedRequest, Any] = field(default_factory=dict)
    _shards: Any = None

    @property
    def counts(self) -> list[int]:
        """What random numbers of the next collectives belong to, for :meth:`resume`."""
        return [self.changes + (self._now() != self._shards), self.gathers, self.scatters]

    def resume(self, changes: int, gathers: int, scatters: int) -> None:
        """Go on from these counts, with the shards that this rank has now."""
        self.changes, self.gathers, self.scatters = changes, gathers, scatters
        self._shards = self._now()

    def _now(self) -> Any:
        """Differs from what it was if this rank's shards may do so."""
        return self.settings.steps, self.unit.versions()

    def gather(self, output: torch.Tensor, own: torch.Tensor, ranks: Ranks) -> None:
        """Fill ``output`` with the decoded shards of all ranks."""
        settings = self.settings
        exact = settings.exact or ranks != self.unit.ranks  # others gather what was decoded before
        exchanger = settings.exchanger(ranks)
        with _told(exchanger):
            numbers = self.unit.gathered(output.numel(), len(ranks))
            request = self._request(exchanger, ALL_GATHER, numbers, output.dtype, ranks, exact=exact)
        settings.statistics.gathers += 1
        self.gathers += 1
        reuse = settings.reuse and not exact
        if reuse and request in self._gathered and in_backward():
            settings.statistics.reused += 1
            with _on_host(output) as whole:
                request.decode_again([whole])
            return
        shards = self._now()
        if shards != self._shards:
            self._shards, self.changes = shards, self.changes + 1
        unchanged = reuse and self._gathered.get(request) == shards
        draw = self.gathers if settings.redraw else self.changes if settings.steps is None else settings.steps
        settings.statistics.weight_bytes += self._run(exchanger, request, own, output, draw, unchanged)
        if reuse:
            self._gathered[request] = shards

    def scatter(self, output: torch.Tensor, whole: torch.Tensor, ranks: Ranks, op: Any) -> None:
        """Fill ``output`` with this rank's shards of the sum, or mean, over ranks."""
        exchanger, statistics = self.settings.exchanger(ranks), self.settings.statistics
        with _told(exchanger):
            average, factor = _operation(op)
            numbers = self.unit.reduced(whole.numel(), len(ranks))
            request = self._request(exchanger, REDUCE_SCATTER, numbers, whole.dtype, ranks, average=average)
        self.unit.with_gradient.difference_update(numbers)
        statistics.gradient_bytes += self._run(exchanger, request, whole, output, self.scatters)
        self.scatters += 1
        statistics.scatters += 1
        if factor != 1.0:
            output.mul_(factor)

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
        key = kind, tuple(numbers), dtype, ranks, exact, average
        if key not in self._prepared:
            parameters = [self.unit.parameters[i] for i in numbers]
            policy = self.settings.weights if kind == ALL_GATHER else self.settings.gradients
            request = Request(
                kind,
                tuple(one.spec(dtype) for one in parameters),
                tuple(uncompressed(dtype) if exact else compressor(one, dtype, policy) for one in parameters),
                tuple(one.borders(len(ranks)) for one in parameters),
                average,
                self.unit.name,
                self.unit.blocks(numbers, len(ranks)),
            )
            kept = kind == ALL_GATHER and self.settings.reuse and not exact
            self._prepared[key] = exchanger.prepare(request, apart=kept)
        return self._prepared[key]

    def _run(
        self,
        exchanger: Exchanger,
        request: PreparedRequest,
        source: torch.Tensor,
        target: torch.Tensor,
        draw: int,
        unchanged: bool = False,
    ) -> int:
        """Exchange; the bytes that this rank sent."""
        begin, before = perf_counter(), exchanger.pipeline.transport.bytes_sent
        with _on_host(target) as outputs:
            exchanger.begin([Run(request, [_array(source.cpu())], [outputs], draw, unchanged)])
            exchanger.finish()
        self.settings.statistics.exchange_seconds += perf_counter() - begin
        return exchanger.pipeline.transport.bytes_sent - before


class GatherWeights:
    """The all-gather of a unit, as ``FSDPModule.set_custom_all_gather`` takes it."""

    def __init__(self, exchange: UnitExchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Room for a tensor that is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Gather; it is done when this returns, also where the caller would wait later."""
        self._exchange.gather(output_tensor, input_tensor, tuple(dist.get_process_group_ranks(group)))


class ReduceGradients:
    """The reduce-scatter of a unit, as ``FSDPModule.set_custom_reduce_scatter`` takes it."""

    def __init__(self, exchange: UnitExchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Room for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce; it is done when this returns."""
        self._exchange.scatter(output_tensor, input_tensor, tuple(dist.get_process_group_ranks(group)), op)


def compressor(parameter: Sharded, dtype: torch.dtype, policy: Policy) -> Compressor:
    """How a parameter travels; what the policy excludes does uncompressed."""
    chosen, reason = policy.choose(parameter.spec(dtype))
    return uncompressed(dtype) if reason or isinstance(chosen, Identity) else chosen


def uncompressed(dtype: torch.dtype) -> Compressor:
    """What loses nothing of a tensor of this dtype."""
    return Cast("bfloat16") if dtype is torch.bfloat16 else Identity()


def in_backward() -> bool:
    """Whether this thread computes gradients."""
    return torch._C._current_graph_task_id() != -1


def _operation(op: Any) -> tuple[bool, float]:
    """Whether it averages, and what it multiplies its sum by. ConfigError for another."""
    if op == dist.ReduceOp.AVG:
        return True, 1.0
    if op == dist.ReduceOp.SUM:
        return False, 1.0
    if getattr(op, "op", None) == dist.ReduceOp.PREMUL_SUM:
        return False, float(op.factor)
    raise ConfigError(f"gradients are reduced by AVG, SUM or PREMUL_SUM, not by {op}")


@contextmanager
def _told(exchanger: Exchanger) -> Iterator[None]:
    """The other ranks hear at once why this one does not take part."""
    try:
        yield
    except GradcompError as error:
        exchanger.abort(f"{type(error).__name__}: {error}")
        raise


@contextmanager
def _on_host(target: torch.Tensor) -> Iterator[Array]:
    """The memory of a tensor, to be written; of one that is elsewhere, memory that is copied there in the end."""
    if target.device.type == "cpu":
        yield _array(target)
        return
    host = torch.empty_like(target, device="cpu")
    yield _array(host)
    target.copy_(host)


def _array(tensor: torch.Tensor) -> Array:
    name = dtype_name(tensor.dtype)
    if name not in ITEM_BYTES:
        raise ConfigError(f"parameters that are gathered as {name}; gradcomp takes {', '.join(ITEM_BYTES)}")
    array: Array = tensor.detach().view(torch.uint8).numpy().view(DTYPES[DTYPE_NUMBERS[name]])
    return array
