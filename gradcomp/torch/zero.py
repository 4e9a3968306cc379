"""``ZeroOptimizer``: each rank keeps and steps a part of the optimizer (ZeRO-1), and sends quantised differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import torch

from gradcomp.compress import Compressor, Policy, Quantize, as_policy
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.agreement import agree
from gradcomp.exchange.requests import ALL_GATHER, REDUCE_SCATTER, REPEATED, even_borders
from gradcomp.job import runtime
from gradcomp.job.process_sets import Members, members
from gradcomp.job.start import start_requests, validate_together
from gradcomp.reduce.header import APPLIED, DISCARDED
from gradcomp.torch.broadcast_state import broadcast_parameters
from gradcomp.torch.layers import refuse_thawed
from gradcomp.torch.loss_scale import means_before_unscaling
from gradcomp.torch.optimizers import scalars_of, settings_of, share_settings
from gradcomp.torch.sharded.checks import check_policy, compressor
from gradcomp.torch.sharded.exchange import ShardedStatistics, told
from gradcomp.torch.zero_exchange import ZeroExchange
from gradcomp.torch.zero_parts import Part, check_elementwise, flat, layer_of, named_in
from gradcomp.torch.zero_state import copied, cut, joined, places_of

WEIGHTS = Quantize(bits=4, rounding="nearest", feedback=False)
GRADIENTS = Quantize(bits=8)


class ZeroOptimizer(torch.optim.Optimizer):
    """Step on a part of every parameter on each rank, and send the other ranks what changed (ZeRO-1).

    The model is replicated. Of each parameter, rank j owns the j-th of N nearly equal parts: a float32 master m of it,
    and the optimizer's state. The model's parameters are replicas r. In a step

        g = (1/N) sum over ranks of Q_g(g_i)    reduce-scatter: an owner has the mean of its part only
        m <- m after a step with g              on the owner
        r <- r + Q_w(m - r)                     all-gather: all ranks add the decoded values, the owner too

    so replicas are equal, bit for bit. What a step loses stays in m - r, which the next step sends. Uncompressed
    layers (biases, norms, small ones, or all with ``weights="none"``) get r <- m, rounded to the dtype of r.

    Args:
        params: parameters, groups of them, or ``model.named_parameters()``, whose names a policy matches. They must be
            dense float32, bfloat16 or float16 tensors in the host's memory.
        optimizer_class: the optimizer. Its steps must be elementwise, which is checked by steps on a small matrix.
        gradients: the quantiser of gradients, its string form, or a :class:`gradcomp.Policy`.
        weights: the quantiser of differences, likewise.
        differences: False sends r <- Q_w(m) instead, to compare.
        process_set: the ranks that have the model, if not all of the job.
        defaults: arguments of ``optimizer_class``, such as ``lr=1e-3``.

    All is exchanged in ``step()``; gradients earlier if :meth:`clip_grad_norm_` or ``GradScaler.unscale_`` needs them.
    Until then ``.grad`` holds a rank's own gradients, and accumulates over backward passes; ``step()`` uses its memory,
    and leaves None. A gradient that only some ranks have counts as zeros on the others; a parameter of which no rank
    has one is not stepped. Parameters that were changed between two steps, as by ``model.load_state_dict()``, become
    the masters.

    Collective. All ranks get the parameters of the first. Wire, for d elements: a rank sends (N-1)/N d (b_g + b_w) / 8
    bytes a step for b_g and b_w bits, scales and headers. Memory: beside parameters and gradients, (4 + optimizer) d/N
    bytes, and buffers for 2 Mi elements, or for the largest parameter. State: no residuals.
    Raises ConfigError for arguments that cannot work, PlanMismatchError on every rank if the ranks differ, StateError
    in the next step after one that only some ranks took.
    Source: Rajbhandari et al. 2020 (ZeRO, stage 1); Jia et al. 2024 (SDP4Bit), for the differences. Differs: rounding
    is to nearest; gradients are not transformed, and are reduced in one level.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        gradients: Policy | Compressor | str = GRADIENTS,
        weights: Policy | Compressor | str = WEIGHTS,
        *,
        differences: bool = True,
        process_set: Members = None,
        **defaults: Any,
    ) -> None:
        state, ranks = runtime.current(), members(process_set)
        self._place, self._world = ranks.index(state.rank), len(ranks)

        def validate() -> tuple[Policy, Policy]:
            if state.what_if(ranks):
                raise ConfigError(
                    "a what-if run fakes exchanges of gradients, and ZeroOptimizer sends weights too"
                )
            policies = as_policy(gradients), as_policy(weights)
            super(ZeroOptimizer, self).__init__(params, {})
            named = named_in(self.param_groups)
            self._frozen = [(name, p) for name, p in named if not p.requires_grad]
            self._named = [(name, p) for name, p in named if p.requires_grad]
            layers = [layer_of(name, p) for name, p in self._named]
            if not layers:
                raise ConfigError("there is no trainable parameter")
            for kind, policy in zip((REDUCE_SCATTER, ALL_GATHER), policies, strict=True):
                check_policy(kind, layers, policy)
            if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
                raise ConfigError(
                    f"optimizer_class must be a class, as torch.optim.AdamW, got {optimizer_class!r}"
                )
            self._numbers = check_elementwise(optimizer_class, settings_of(self.param_groups[0]), defaults)
            self._parts = self._make_parts(layers, policies[1], differences)
            masters = {id(part.parameter): part.master for part in self._parts}
            groups = [
                {
                    **settings_of(group),
                    "params": [masters[id(p)] for p in group["params"] if id(p) in masters],
                }
                for group in self.param_groups
            ]
            self._inner = optimizer_class(groups, **defaults)
            return policies

        policies, transport = validate_together(state, ranks, validate)
        self.defaults = self._inner.defaults
        share_settings(self._inner, self)
        self._reduced = self._dropped = self._stepped = False
        self._seen: list[tuple[ref[torch.Tensor], int] | None] = [None] * len(self._named)
        self._exchange: ZeroExchange | None = None
        if transport is not None:
            described = {
                "optimizer": optimizer_class.__name__,
                "settings": scalars_of([self]),
                "gradients": repr(policies[0]),
                "weights": repr(policies[1]),
                "differences": differences,
                "parameters": {part.name: repr(part.layer) for part in self._parts},
                "frozen parameters": [name for name, _ in self._frozen],
            }
            wait_for = state.watchdog.patient(state.config, "the other ranks to compare their optimizers")
            agree(transport, described, wait_for=wait_for)
            self._exchange = ZeroExchange(start_requests(state, ranks, transport), self._parts, *policies)
            broadcast_parameters([*self._named, *self._frozen], ranks[0], process_set)
            means_before_unscaling()
        for part in self._parts:
            part.adopt()
        if self._place == 0:
            texts = len(self._parts), policies[1].brief, policies[0].brief
            runtime.logger.info("ZeroOptimizer: %d parameters; weights by %s, gradients by %s", *texts)

    def _make_parts(self, layers: Sequence[LayerSpec], weights: Policy, differences: bool) -> list[Part]:
        parts = []
        for (name, parameter), layer in zip(self._named, layers, strict=True):
            begin, end = even_borders(layer.size, self._world)[self._place :][:2]
            master = torch.nn.Parameter(torch.zeros(end - begin))
            by_difference = differences and not compressor(layer, weights).traits.exact
            parts.append(Part(name, parameter, layer, begin, end, master, by_difference))
        return parts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce gradients, step on this rank's parts, and send what changed. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reduce()
        for part in self._parts:
            if part.version != part.parameter._version:
                part.adopt()
        share_settings(self, self._inner)
        self._inner.step()
        share_settings(self._inner, self)
        if self._exchange is not None:
            self._exchange.gather()
        for part in self._parts:
            if self._exchange is None:
                flat(part.parameter).copy_(part.master)
            part.version = part.parameter._version
            part.clear()
        self._reduced = False
        self._note_gradients(stepped=True)
        return loss

    @torch.no_grad()
    def _reduce(self) -> None:
        """Make the means of this rank's parts the gradients of its masters, unless they are already."""
        with nullcontext() if self._exchange is None else told(self._exchange.exchanger):
            refuse_thawed(self._frozen, "the ZeroOptimizer was made", "make a new one after unfreezing")
            if self._reduced and self._has_new_gradients():
                raise StateError(
                    "gradients were changed after they had been reduced, by backward(), or by another clip_grad_norm_ "
                    "than that of ZeroOptimizer, which clips the means"
                )
            gradients = {part: part.gradient() for part in self._parts}
        if self._reduced:
            return
        again = self._stepped and not self._has_new_gradients()
        outcome = DISCARDED if self._dropped else REPEATED if again else APPLIED
        if self._exchange is not None:
            self._exchange.reduce(gradients, outcome, scalars_of([self]))
        else:
            for part, gradient in gradients.items():
                mean = part.memory_for_mean(gradient)
                part.take(mean if gradient is None else mean.copy_(gradient), present=gradient is not None)
        self._reduced, self._dropped = True, False
        self._note_gradients(stepped=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients. If other ranks step on theirs instead, the next step of all ranks raises."""
        self._dropped |= self._has_new_gradients()
        super().zero_grad(set_to_none)
        self._reduced = False
        self._note_gradients(stepped=False)

    def _has_new_gradients(self) -> bool:
        """Return whether a gradient is another one, or has other values, than when they were last noted."""
        return any(
            p.grad is not None and (known is None or known[0]() is not p.grad or known[1] != p.grad._version)
            for (_, p), known in zip(self._named, self._seen, strict=True)
        )

    def _note_gradients(self, *, stepped: bool) -> None:
        self._stepped = stepped
        self._seen = [None if p.grad is None else (ref(p.grad), p.grad._version) for _, p in self._named]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the means so that their norm over all parameters is at most ``max_norm``; return what it was.

        ||g|| = (sum |g|^p)^(1/p), or the largest |g| for p = inf, in float64. With a GradScaler, call ``unscale_``
        first. Collective. Wire: 8 bytes a rank.
        """
        self._reduce()
        means = [part.master.grad for part in self._parts if part.master.grad is not None]
        norms = [
            torch.linalg.vector_norm(mean, norm_type, dtype=torch.float64) for mean in means if len(mean)
        ]
        total = torch.linalg.vector_norm(
            torch.stack([torch.zeros((), dtype=torch.float64), *norms]), norm_type
        )
        if self._exchange is not None:
            said = self._exchange.exchanger.allgather_bytes(np.float64(total.item()).tobytes())
            total = torch.linalg.vector_norm(
                torch.frombuffer(bytearray(b"".join(said)), dtype=torch.float64), norm_type
            )
        if means:
            torch._foreach_mul_(means, torch.clamp(max_norm / (total + 1e-6), max=1.0).item())
        return torch.as_tensor(total, dtype=torch.float32)

    def _finish_exchange(self) -> Any:
        """Return what a GradScaler looks at: the means, and a value that is NaN on all ranks unless all are finite."""
        self._reduce()
        masters = [part.master for part in self._parts if part.master.grad is not None]
        finite = all(master.grad.isfinite().all().item() for master in masters if master.grad is not None)
        if self._exchange is not None:
            finite = self._exchange.exchanger.vote(finite)
        common = torch.zeros(1)
        common.grad = torch.full((1,), 0.0 if finite else torch.nan)
        return SimpleNamespace(param_groups=[{"params": [*masters, common]}])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters once the optimizer is made: StateError."""
        if "_inner" in self.__dict__:
            raise StateError("a ZeroOptimizer takes no further parameters: make a new one with all of them")
        super().add_param_group(param_group)

    def statistics(self) -> ShardedStatistics:
        """Return a copy of what this rank has counted so far; ``gathers`` and ``scatters`` count requests."""
        return ShardedStatistics() if self._exchange is None else replace(self._exchange.statistics)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, masters included. It loads on the same rank of as many ranks. Local.

        With it and ``model.state_dict()``, training continues bit for bit.
        """
        share_settings(self, self._inner)  # a scheduler may have changed them after the step
        zero = {"part": [self._place, self._world], "draws": self._exchange.draws if self._exchange else 0}
        masters = [part.master.detach() for part in self._parts]
        return {**self._inner.state_dict(), "masters": masters, "zero": zero}

    def full_state_dict(self, root_rank: int | None = None) -> dict[str, Any]:
        """Return the state in the form of a plain optimizer of whole parameters, and their float32 ``"masters"``.

        It loads into an ``optimizer_class``, and into a ZeroOptimizer of any number of ranks. With ``root_rank``, the
        others return {}. Collective. Wire: (N-1)/N d (4 + optimizer) bytes a rank.
        """
        places, keeps = places_of(self.param_groups), root_rank in (None, runtime.rank())
        exchanger = self._exchange.exchanger if self._exchange else None
        masters: list[Any] = [None] * len(places)
        state: dict[int, Any] = {}
        for part in self._parts:
            place, held = places[id(part.parameter)], self._inner.state.get(part.master, {})
            masters[place] = joined(part, part.master, exchanger, keeps=keeps)
            found = {
                key: joined(part, held[key], exchanger, keeps=keeps)
                if isinstance(held[key], torch.Tensor) and key not in self._numbers
                else copied(held[key])
                for key in sorted(held)
            }
            if found:
                state[place] = found
        groups = [
            {**group, "params": [places[id(p)] for p in group["params"]]} for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups, "masters": masters} if keeps else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, a :meth:`full_state_dict`, or a plain optimizer's. Local.

        Load the model before. Where the state has no masters, the parameters become them. Raises StateError for the
        state of another rank, of another number of ranks, or of other parameters.
        """
        if (zero := state_dict.get("zero")) is None:
            state_dict = cut(state_dict, self.param_groups, self._parts, self._numbers)
        elif zero["part"] != [self._place, self._world]:
            raise StateError(
                "this is the state of rank {} of {}, and this is rank {} of {}: for another number of ranks, save "
                "full_state_dict()".format(*zero["part"], self._place, self._world)
            )
        masters = state_dict["masters"]
        if [len(master) for master in masters] != [part.size for part in self._parts]:
            raise StateError("the state is that of other parameters")
        self._inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        share_settings(self._inner, self)
        for part, master in zip(self._parts, masters, strict=True):
            part.adopt()
            part.master.data.copy_(master)
        if zero is not None and self._exchange is not None:
            self._exchange.draws = zero["draws"]
