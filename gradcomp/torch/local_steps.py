"""``LocalSteps``: ranks step by themselves, and exchange what has changed once in many steps."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.compress.checks import check_number, check_whole
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import balanced_parts
from gradcomp.core.trace import Statistics
from gradcomp.exchange.checkpoint_manager import not_from_checkpoint
from gradcomp.job import runtime
from gradcomp.job.all_or_none import Together
from gradcomp.job.launch import Ranks
from gradcomp.job.process_sets import Members, members
from gradcomp.torch.broadcast_state import broadcast_parameters
from gradcomp.torch.layers import Named, refuse_thawed
from gradcomp.torch.modules import bare
from gradcomp.torch.optimizer import DistributedOptimizer
from gradcomp.torch.optimizers import scalars_of, settings_of, share_settings
from gradcomp.torch.tensors import dense_problem, is_dtensor

if TYPE_CHECKING:
    from gradcomp.torch.optimizer import DistributedTorchOptimizer


class Fragment:
    """Parameters that are exchanged together: their anchors, the outer optimizer, and when they are mixed next.

    ``optimizer`` is a DistributedOptimizer of the anchors, whose gradients are the pseudo-gradients.
    """

    def __init__(self, named: Named, anchors: Sequence[torch.nn.Parameter], optimizer: Any) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.anchors = list(anchors)
        self.optimizer: DistributedTorchOptimizer = optimizer
        #: The step after which the outer parameters are mixed in; None if no exchange has begun since they were.
        self.due: int | None = None
        #: True while an exchange is under way.
        self.pending = False

    def begin(self) -> None:
        """Start to exchange anchor minus parameter. Nothing waits."""
        with torch.no_grad():
            own = [parameter.detach() for parameter in self.parameters]
            moved = torch._foreach_sub([anchor.detach() for anchor in self.anchors], own)
        # The hooks of a DistributedOptimizer take gradients from a backward pass.
        torch.autograd.backward(self.anchors, moved)
        exchange = self.optimizer._gradcomp
        if exchange.driver.attached:
            exchange.begin()
        self.pending = True

    def land(self) -> None:
        """Wait for the mean, and let the outer optimizer step on it. It does not depend on the local parameters."""
        if self.pending:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.pending = False

    def drop(self) -> None:
        """End an exchange that is under way, and throw its mean away."""
        self.optimizer.zero_grad()
        self.pending = False

    @torch.no_grad()
    def mix(self, share: float) -> None:
        """Make the parameters ``share`` of themselves and the rest of their anchors."""
        self.land()
        own = [parameter.detach() for parameter in self.parameters]
        if share:
            torch._foreach_lerp_(own, [anchor.detach() for anchor in self.anchors], 1.0 - share)
        else:
            torch._foreach_copy_(own, [anchor.detach() for anchor in self.anchors])
        self.due = None


class LocalSteps(torch.optim.Optimizer):
    """Let every rank step by itself, and average what has changed after every ``every`` steps.

        D_r = anchor - theta_r                      the pseudo-gradient of rank r
        anchor <- outer step with mean(D_r)         on all ranks
        theta_r <- anchor                           or, with a delay, a theta_r + (1 - a) anchor

    Pseudo-gradients take the way of gradients: layers, policies, compressors, feedback, controllers and reductions are
    those of :func:`DistributedOptimizer`, once in ``every`` steps. Anchors and the state of ``outer`` are equal on all
    ranks, bit for bit, after every exchange; so are parameters where ``fragments=1`` and ``delay=0``. The state of
    ``inner_optimizer``, and buffers as those of batch norm, stay each rank's own.

    Args:
        model: all its trainable parameters are exchanged. They must be dense, whole tensors.
        inner_optimizer: steps on this rank's gradients, with any learning rate schedule.
        every: the steps of a round.
        outer: the optimizer of the model's parameters that steps on the mean of pseudo-gradients. It must be new; here
            it gets anchors for its parameters, and a scheduler of it goes on to set its rates. The default,
            ``SGD(lr=1)``, makes the anchor the mean of the ranks' parameters.
        compression: as in :func:`DistributedOptimizer`; so are ``controller``, ``reduction`` and ``process_set``.
        fragments: in how many parts, of consecutive parameters with about as many elements, the model is exchanged.
            Part i of P is exchanged ``every`` (i+1) // P steps after the beginning of each round, so that a link is
            used all the time.
        delay: how many further steps are taken while an exchange is under way, at most ``every``. The mean of what had
            changed at step t is applied after step t + ``delay``.
        mixing: the share a of the local parameters where ``delay`` is not 0.

    A step that a GradScaler skips on one rank counts as a step of the round. Steps are counted by :meth:`step`, so all
    ranks must call it equally often; where they cannot, use :func:`join`.

    Collective when it is made, and in each ``every``-th ``step()`` (``step()`` number t + ``delay``). All ranks get the
    parameters and buffers of the first. Wire: once in ``every`` steps what a step of :func:`DistributedOptimizer` sends
    with this compression; rounds likewise. Memory: an anchor for each parameter, of its dtype and on its device, the
    outer optimizer's state, residuals, and, while an exchange is under way, the pseudo-gradient.
    State: :meth:`state_dict` has all of it.
    Raises ConfigError on every rank for arguments that cannot work, a sharded model, and one that
    DistributedDataParallel averages over the same ranks; PlanMismatchError if the ranks differ; StateError before
    ``init()``.
    Source: Douillard et al. 2023 (DiLoCo); Douillard et al. 2025 (Streaming DiLoCo), for fragments, delay
    and mixing. Differs: fragments are consecutive layers, where the paper prefers every P-th block.
    """

    #: A GradScaler then calls ``step()`` also where it found values that are not finite, so all ranks count alike.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        every: int = 30,
        outer: torch.optim.Optimizer | None = None,
        compression: Policy | Compressor | str = Compression.none,
        controller: Controller | str | None = None,
        *,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.5,
        reduction: str | None = None,
        process_set: Members = None,
    ) -> None:
        state, ranks = runtime.current(), members(process_set)
        elastic = state.network.member is not None
        given = [f"every: {every}", f"fragments: {fragments}", f"delay: {delay}", f"mixing: {mixing}"]
        if isinstance(outer, torch.optim.Optimizer):
            given.append(f"outer: {type(outer).__name__} {scalars_of([outer])}")

        def validate() -> tuple[None, None]:
            check_whole("every", every)
            check_whole("fragments", fragments, 1, every)
            check_whole("delay", delay, 0, every)
            check_number("mixing", mixing, "[0, 1)")
            _check(model, inner_optimizer, outer, ranks, fragments)
            return None, None

        # An elastic job has no generation yet: the ranks are compared when its state begins.
        Together("LocalSteps", (state.rank,) if elastic else ranks, given).do("check its arguments", validate)
        whole = bare(model)
        named = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
        self._frozen = [(name, p) for name, p in whole.named_parameters() if not p.requires_grad]
        super().__init__(inner_optimizer.param_groups, {})
        self.model, self.inner = model, inner_optimizer
        self.every, self.delay, self._mixing = every, delay, mixing if delay else 0.0
        self.outer = torch.optim.SGD([p for _, p in named], lr=1.0) if outer is None else outer
        self._steps = 0
        self._share()
        if not elastic:
            broadcast_parameters(whole, ranks[0], process_set)
        parts = balanced_parts([p.numel() for _, p in named], fragments)
        self.fragments = [
            self._fragment(named[begin:end], compression, controller, reduction, process_set)
            for begin, end in parts
        ]

    def _fragment(
        self,
        named: Named,
        compression: Policy | Compressor | str,
        controller: Controller | str | None,
        reduction: str | None,
        process_set: Members,
    ) -> Fragment:
        anchors = {id(p): torch.nn.Parameter(p.detach().clone()) for _, p in named}
        optimizer = copy.copy(self.outer)
        optimizer.state = defaultdict(dict)
        optimizer.param_groups = [
            {**settings_of(group), "params": [anchors[id(p)] for p in group["params"] if id(p) in anchors]}
            for group in self.outer.param_groups
        ]
        wrapped = DistributedOptimizer(
            optimizer,
            [(name, anchors[id(p)]) for name, p in named],
            compression,
            process_set=process_set,
            finish="step",
            grad_scaler=False,
            reduction=reduction,
            controller=copy.deepcopy(controller),
        )
        return Fragment(named, [anchors[id(p)] for _, p in named], wrapped)

    def _share(self) -> None:
        """Have the inner optimizer's groups and state, which ``load_state_dict`` replaces."""
        self.param_groups, self.state, self.defaults = (
            self.inner.param_groups,
            self.inner.state,
            self.inner.defaults,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's gradients; then exchange what is due. Collective in every ``every``-th call."""
        self._share()
        refuse_thawed(self._frozen, "LocalSteps was made", "make a new one after unfreezing")
        loss = None
        if self._unscale():
            loss = self.inner.step() if closure is None else self.inner.step(closure)
        self._steps += 1
        for number, fragment in enumerate(self.fragments):
            if fragment.due == self._steps:
                fragment.mix(self._mixing)
            if (self._steps - self.every * (number + 1) // len(self.fragments)) % self.every == 0:
                self._begin(fragment)
                if not self.delay:
                    fragment.mix(self._mixing)
        return loss

    def _begin(self, fragment: Fragment) -> None:
        """Begin an exchange; the outer settings of now apply to its mean, whenever that is stepped on."""
        share_settings(self.outer, fragment.optimizer)
        self.outer._opt_called = True  # type: ignore[attr-defined]  # for its schedulers
        fragment.begin()
        fragment.due = self._steps + self.delay

    def _unscale(self) -> bool:
        """Divide gradients by the scale of a GradScaler that calls; return False if it found any that is not finite."""
        if (found := getattr(self, "found_inf", None)) is not None and bool(found):
            return False
        if (scale := getattr(self, "grad_scale", None)) is not None:
            held = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(held, 1.0 / float(scale))
        return True

    def settle(self) -> None:
        """Wait for exchanges that are under way, and step on them; parameters are mixed when it is time. Collective."""
        for fragment in self.fragments:
            fragment.land()

    @property
    def steps(self) -> int:
        """Return how many steps were counted."""
        return self._steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this rank."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further parameters once it is made: StateError."""
        if "fragments" in self.__dict__:
            raise StateError("LocalSteps takes no further parameters: make a new one with the whole model")
        super().add_param_group(param_group)

    def statistics(self) -> Statistics:
        """Return this rank's counters since the start, of all fragments; ``steps`` counts exchanges."""
        found = [fragment.optimizer.statistics() for fragment in self.fragments]
        total = Statistics()
        for each in fields(total):
            setattr(total, each.name, sum(getattr(one, each.name) for one in found))
        return total

    # -- state -----------------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """Return all state but the residuals, which another rank could go on with. It waits as :meth:`settle` does."""
        self.settle()
        return {
            "inner": self.inner.state_dict(),
            "steps": self._steps,
            "due": [fragment.due for fragment in self.fragments],
            "anchors": [[anchor.detach() for anchor in fragment.anchors] for fragment in self.fragments],
            "outer": [fragment.optimizer.state_dict() for fragment in self.fragments],
        }

    @torch.no_grad()
    def load_progress(self, progress: dict[str, Any]) -> None:
        """Take over what :meth:`progress` returned, on this rank or another. StateError for other parameters."""
        shapes = [
            [[list(anchor.shape) for anchor in anchors] for anchors in each]
            for each in (progress["anchors"], [fragment.anchors for fragment in self.fragments])
        ]
        if shapes[0] != shapes[1]:
            raise StateError("the state is that of other parameters, or of other fragments")
        self.inner.load_state_dict(progress["inner"])
        self._share()
        self._steps = progress["steps"]
        for fragment, due, anchors, outer in zip(
            self.fragments, progress["due"], progress["anchors"], progress["outer"], strict=True
        ):
            fragment.drop()
            fragment.due = due
            torch._foreach_copy_([anchor.detach() for anchor in fragment.anchors], anchors)
            with not_from_checkpoint(fragment.optimizer):
                fragment.optimizer.load_state_dict(outer)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: both optimizers, anchors, residuals, the place in the round. Collective.

        It waits for an exchange that is under way. With it and this rank's ``model.state_dict()``, training continues
        bit for bit on the same rank of as many ranks.
        """
        progress = self.progress()
        inner = progress.pop("inner")
        progress["compression"] = [fragment.optimizer.compression_state() for fragment in self.fragments]
        return {**inner, "local_steps": progress}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank. Local. StateError if it is that of other parameters."""
        inner = dict(state_dict)
        if (own := inner.pop("local_steps", None)) is None:
            raise StateError(
                "this is not a state of LocalSteps; load that of a plain optimizer into the inner one"
            )
        self.load_progress({**own, "inner": inner})
        for fragment, compression in zip(self.fragments, own["compression"], strict=True):
            fragment.optimizer.load_compression_state(compression)


def _check(model: Any, inner: Any, outer: Any, ranks: Ranks, fragments: int) -> None:
    """Raise ConfigError for a model and optimizers that local steps cannot be taken with."""
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        averaged = dist.get_process_group_ranks(model.process_group)
        if len(set(averaged) & set(ranks)) > 1:
            raise ConfigError("DistributedDataParallel averages this model in every step: give model.module")
    owned = {id(p): name for name, p in bare(model).named_parameters() if p.requires_grad}
    if len(owned) < fragments:
        raise ConfigError(
            f"the model has {len(owned)} trainable parameters, too few for {fragments} fragments"
        )
    for name, parameter in bare(model).named_parameters():
        if is_dtensor(parameter):
            raise ConfigError(
                f"{name!r} is sharded: local steps need a whole model on every rank; for sharded models there are "
                "compress_fsdp(..., replicas=) and ZeroOptimizer"
            )
        if problem := dense_problem(parameter):
            raise ConfigError(f"{name!r}: {problem}")
    for title, one in (("inner_optimizer", inner), ("outer", outer)):
        if one is None and title == "outer":
            continue
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(f"{title} must be a torch.optim.Optimizer, got {type(one).__name__}")
        if hasattr(one, "_gradcomp") or isinstance(one, LocalSteps):
            raise ConfigError(f"{title} exchanges by itself: give a plain optimizer")
        held = {id(p) for group in one.param_groups for p in group["params"]}
        if any(id(p) not in owned for g in one.param_groups for p in g["params"] if p.requires_grad):
            raise ConfigError(f"{title} has a parameter that the model has not")
        if title == "outer" and (missing := [name for key, name in owned.items() if key not in held]):
            raise ConfigError(f"outer must have all parameters of the model, and lacks {missing[0]!r}")
    if outer is not None and outer.state:
        raise ConfigError("outer has stepped already: give a new one")
