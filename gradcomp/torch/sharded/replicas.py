"""Replicas of a sharded model: the mean of every shard's gradient over them, by any compressor.

``fully_shard`` of a mesh with two dimensions runs its own all-reduce before any hook. The model is therefore sharded
among the ranks of one dimension, and the other one is a group that the mean is taken over here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from gradcomp.compress import Policy
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.arrivals import Submission
from gradcomp.exchange.driver import Phase, Words
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.job import settings
from gradcomp.job.launch import Ranks
from gradcomp.job.network import make_transport
from gradcomp.job.process_sets import ProcessSet, members
from gradcomp.job.start import Proposal, propose, start
from gradcomp.job.state import Runtime
from gradcomp.torch.broadcast_state import broadcast_parameters
from gradcomp.torch.devices import Handed, device_of, staging_for
from gradcomp.torch.layers import Exchange, Named, ParameterSamples, kind_of, refuse_thawed
from gradcomp.torch.loss_scale import LossScale, Scaler
from gradcomp.torch.modules import EndOfBackward, refuse_inside_backward, watch_backward
from gradcomp.torch.optimizers import Listener, Momenta, StepWatch, warn_if_it_averages
from gradcomp.torch.sharded.units import Unit
from gradcomp.torch.streams import number_of
from gradcomp.torch.tensors import CompressionState, Form, dtype_name

logger = logging.getLogger("gradcomp")

_TWO_DIMENSIONS = """\
{unit} is sharded over a mesh of {ndim} dimensions, on which torch adds up the replicas itself. With replicas=, shard it
over one dimension and name the other one:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh["shards"])
    gc.compress_fsdp(model, replicas=("quantize:bits=4", mesh["replicas"]))"""


@dataclass(frozen=True)
class Arguments(settings.Arguments):
    """The arguments of the exchange between replicas; ``shard`` is the number of this rank's shards."""

    compared: ClassVar[tuple[str, ...]] = (*settings.Arguments.compared, "shard")

    shard: int = 0


@dataclass(frozen=True)
class Replicas:
    """Holds what ``replicas=`` asks for, checked. ``parameters`` are torch's FSDPParams of the layers, by unit."""

    ranks: Ranks
    arguments: Arguments
    proposal: Proposal
    parameters: list[list[Any]]
    frozen: Named

    @property
    def described(self) -> list[Any]:
        """Return what must be equal on all ranks, of whatever shards, as JSON takes it."""
        return [repr(self.proposal.policy), repr(self.proposal.controller), len(self.ranks)]


def check_replicas(
    state: Runtime, units: Sequence[Unit], given: Any, callers: Ranks, optimizer: Any
) -> Replicas:
    """Return what ``replicas=`` asks for; raise ConfigError for what cannot work."""
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise ConfigError(
            'replicas must be (compression, group) or (compression, group, controller), as ("quantize:bits=4", '
            f'mesh["replicas"]), got {given!r:.80}'
        )
    if state.config.what_if:
        raise ConfigError("a what-if run fakes the exchanges of shards: leave replicas= away in it")
    for unit in units:
        if (ndim := unit.parameters[0].mesh.ndim) != 1:
            raise ConfigError(_TWO_DIMENSIONS.format(unit=unit.name, ndim=ndim))
    if len({unit.ranks for unit in units}) > 1:
        raise ConfigError("replicas= needs one mesh for all units, and this model has several")
    shards = [state.network.ranks.index(rank) for rank in units[0].ranks]
    ranks = members(given[1])
    if not set(ranks) <= set(callers):
        raise ConfigError(
            f"the replicas of this rank's shards are on {ProcessSet(ranks)}, of which not all call compress_fsdp: "
            "name all of them in process_set="
        )
    if len(both := sorted(set(ranks) & set(shards))) > 1:
        raise ConfigError(
            f"ranks {both} hold different shards of one replica, and cannot be replicas of each other: give the "
            "group of the ranks that hold this rank's shards, the other dimension of the mesh"
        )
    parameters, frozen, layers = _parameters(units)
    arguments = Arguments(
        given[0], controller=given[2] if len(given) == 3 else None, shard=shards.index(state.rank)
    )
    policy = arguments.check()
    following = [c.to_string() for c in policy.compressors if c.traits.follows_rate]
    if following and optimizer is None:
        raise ConfigError(f"{following[0]} follows the learning rate: give optimizer= to compress_fsdp")
    return Replicas(ranks, arguments, propose(policy, layers, 0, arguments.controller), parameters, frozen)


def _parameters(units: Sequence[Unit]) -> tuple[list[list[Any]], Named, list[LayerSpec]]:
    """Return torch's FSDPParams that are trained, by unit, the frozen parameters, and this rank's shards as layers."""
    found: list[list[Any]] = []
    frozen: Named = []
    layers: list[LayerSpec] = []
    for unit in units:
        group = unit.group
        torchs = [id(p.sharded_param) for p in group.fsdp_params]
        if torchs != [id(one.current) for one in unit.parameters]:
            raise ConfigError(
                f"{unit.name}: torch {torch.__version__} has its parameters in another order than compress_fsdp expects"
            )
        if any(p.offload_to_cpu for p in group.fsdp_params):
            raise ConfigError(f"{unit.name} has a CPUOffloadPolicy, which replicas= does not support")
        found.append([])
        for one, p in zip(unit.parameters, group.fsdp_params, strict=True):
            shard = p.sharded_param._local_tensor
            if shard.is_meta:
                raise ConfigError(
                    f"parameter {one.name!r} is on the meta device: give the model its values before compress_fsdp, "
                    "which makes those of all replicas equal"
                )
            if not p.sharded_param.requires_grad:
                frozen.append((one.name, p.sharded_param))
                continue
            found[-1].append(p)
            layers.append(
                LayerSpec(
                    one.name, tuple(shard.shape), dtype_name(shard.dtype), kind_of(one.name, shard.dim())
                )
            )
    return found, frozen, layers


class ReplicaExchange(CompressionState, Listener, Exchange):
    """The exchange between replicas: one step of each backward pass, as under ``DistributedDataParallel``.

    ``fully_shard`` calls :meth:`_reduced` when it has reduced a unit, before it adds the result to the gradients. The
    gradients of before are put aside then, so that the new ones become tensors of their own, in which they are
    exchanged while backward goes on with further units. At its end the means are added to the gradients of before.

    Implements :class:`gradcomp.exchange.driver.Adapter`. A step is accepted when an optimizer has stepped on its means,
    or when the next backward pass adds to them; it is thrown away if neither happens. Construction is collective over
    the replicas.
    """

    words = Words("a backward pass of the sharded model has not ended")
    listener = None

    def __init__(
        self,
        state: Runtime,
        units: Sequence[Unit],
        asked: Replicas,
        optimizer: torch.optim.Optimizer | None,
        grad_scaler: Scaler,
    ) -> None:
        self.asked, self._units, self._optimizer = asked, units, optimizer
        self._parameters = [p for unit in asked.parameters for p in unit]
        ends = np.cumsum([0, *map(len, asked.parameters)]).tolist()
        self._layers = [
            list(zip(range(begin, end), ps, strict=True))
            for begin, end, ps in zip(ends, ends[1:], asked.parameters, strict=False)
        ]
        self._policy: Policy = asked.proposal.policy
        self._loss_scale = LossScale(grad_scaler)
        self._look()
        device = device_of(self.named)
        self._staging = staging_for(device, self.named[0][1].device)
        self.driver = start(
            state,
            asked.ranks,
            make_transport(state, asked.ranks) if len(asked.ranks) > 1 else None,
            asked.proposal,
            self,
            [layer.shape for layer in asked.proposal.layers],
            asked.arguments,
            device=device,
        )
        self.checkpoint_manager = self.driver.checkpoint_manager
        self._task: int | None = None  # the backward pass whose end was asked for
        #: The unit whose gradients come next, if their mean is to be taken, and its gradients of before, by layer.
        self._coming: tuple[int, bool, list[Any]] | None = None
        self._begun: set[int] = set()  # units of the open step
        #: Sums that set_requires_all_reduce(False) has deferred, by layer.
        self._local: dict[int, Any] = {}
        self._before: dict[int, Any] = {}
        self._handed: list[Handed] = []
        self._made: dict[int, Handed] = {}  # memory for the means of layers without a gradient on this rank
        self._means: list[tuple[Any, torch.Tensor]] = []
        self._steps = 0
        if not self.driver.attached:
            return
        self._samples = ParameterSamples(self.named, device)
        frozen = [(name, parameter._local_tensor) for name, parameter in asked.frozen]  # type: ignore[attr-defined]
        broadcast_parameters([*self.named, *frozen], asked.ranks[0], ProcessSet(asked.ranks))
        self._watch = StepWatch(self.parameters, self)
        self._scalars = self._watch.scalars
        pairs = [(layer.name, p) for layer, p in zip(asked.proposal.layers, self.parameters, strict=True)]
        self._momenta = Momenta(pairs, lambda: list(self._watch.ours))
        watch_backward()
        self._end = EndOfBackward(self._end_of_backward)
        for number, unit in enumerate(units):
            for module in unit.modules:
                module.set_all_reduce_hook(partial(self._reduced, number))

    @property
    def exchanger(self) -> Exchanger:
        return self.driver.exchanger

    @property
    def parameters(self) -> list[Any]:
        """Return the parameters of the layers, sharded."""
        return [p.sharded_param for p in self._parameters]

    def _exchanger_or_none(self) -> Exchanger | None:
        return self.driver.exchanger if self.driver.attached else None

    def _look(self) -> None:
        """Find this rank's shards, which are other tensors once a model was loaded with ``assign=True``."""
        shards = [p.sharded_param._local_tensor for p in self._parameters]
        names = [layer.name for layer in self.asked.proposal.layers]
        self.named = list(zip(names, shards, strict=True))

    # -- one step, on autograd's thread ---------------------------------------------------------------------------

    def _reduced(self, number: int, _: torch.Tensor) -> None:
        """Put a unit's gradients aside, since ``fully_shard`` is about to set the new ones."""
        with self.driver.telling():
            if (task := torch._C._current_graph_task_id()) != self._task:
                self._task = task
                self._end.wait()
            self._take()
            if number in self._begun:  # it is reduced twice in one backward pass
                self._finish()
            parameters = [p.sharded_param for _, p in self._layers[number]]
            is_meant = self._units[number].group.all_reduce_grads
            self._coming = number, is_meant, [parameter.grad for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None

    def _take(self) -> None:
        """Submit the gradients that were set since :meth:`_reduced`, or put them aside if no mean is to be taken."""
        if self._coming is None:
            return
        (number, is_meant, before), self._coming = self._coming, None
        ready: dict[int, torch.Tensor] = {}
        for (layer, p), old in zip(self._layers[number], before, strict=True):
            new = p.sharded_param.grad
            local = self._local.pop(layer, None)
            if local is not None and new is not None:
                new._local_tensor += local._local_tensor
            new = local if new is None else new
            if new is not None and is_meant:
                p.sharded_param.grad = new
                ready[layer] = new._local_tensor
                if old is not None:
                    self._before[layer] = old
                continue
            if new is not None:
                self._local[layer] = new
            p.sharded_param.grad = old
        if ready:
            if self.driver.phase is not Phase.OPEN:
                self._open()
            self._begun.add(number)
            self._submit(ready)

    def _submit(self, gradients: dict[int, torch.Tensor]) -> None:
        handed = list(map(self._staging.hand_in, gradients.values()))
        self._handed += handed
        addresses = [each.tensor.data_ptr() for each in handed]
        if self.exchanger.device.is_late:  # each has an event of its own
            for layer, each, address in zip(gradients, handed, addresses, strict=True):
                self.driver.submit(Submission(layer, address, address, each, each.event))
        else:
            self.driver.submit_all(list(gradients), np.array(addresses, np.uint64), handed)

    def _open(self) -> None:
        """Begin a step, after the end of the last one; errors of all ranks come first."""
        self.finalise()
        refuse_thawed(
            self.asked.frozen, "compress_fsdp was called", "call compress_fsdp on a new model instead"
        )
        before = self.named
        self._look()
        if any(a is not b for (_, a), (_, b) in zip(before, self.named, strict=True)):
            self._samples = ParameterSamples(self.named, self.exchanger.device)
        pipeline = self.exchanger.pipeline
        pipeline.lay_out()
        momenta = self._momenta.of_step(pipeline)
        self._staging.open()
        scale = self._loss_scale.of(pipeline)
        self._loss_scale.agree(self.exchanger)
        rate = None if self._optimizer is None else self._optimizer.param_groups[0].get("lr")
        self.driver.open(scale, number_of(0.0 if rate is None else rate), momenta)

    def _end_of_backward(self) -> None:
        self._task = None
        with self.driver.telling():
            self._take()
            self._finish()

    def _finish(self) -> None:
        """End the step if one is open: add the means to the gradients of before, and set those that were missing."""
        if self.driver.phase is not Phase.OPEN:
            return
        self.driver.flush()
        present = self.driver.wait().result.present.nonzero()[0].tolist()
        self._staging.give_back(self._handed)
        for layer, made in self._made.items():
            p = self._parameters[layer]
            if p.sharded_param.grad is not None:
                self._before[layer] = p.sharded_param.grad
            mean = self._staging.finished(made, Form.of(self.named[layer][1]))
            p.sharded_param.grad = p.to_sharded_dtensor(mean)
        for layer, old in self._before.items():
            parameter = self._parameters[layer].sharded_param
            old._local_tensor += parameter.grad._local_tensor
            parameter.grad = old
        self._means = [(p, p.sharded_param.grad) for p in map(self._parameters.__getitem__, present)]
        self._begun, self._before, self._handed, self._made = set(), {}, [], {}
        self._steps = self._watch.steps

    # -- gradcomp.exchange.driver.Adapter ---------------------------------------------------------------------------

    def allocate(self, layer: int) -> int:
        """Allocate memory for the mean of a layer that only other replicas have a gradient of."""
        self._made[layer] = self._staging.allocate(Form.of(self.named[layer][1]), None)
        return self._made[layer].tensor.data_ptr()

    def means_complete(self) -> None:
        """Do nothing: the end of backward uses the means."""

    def finalise(self) -> bool:
        """End a step whose means are there, by what became of them."""
        if self.driver.phase is Phase.DONE:
            if self._watch.steps != self._steps or not self._watch.ours:
                self.driver.commit()
            elif any(p.sharded_param.grad is mean for p, mean in self._means):
                self.driver.keep()
            else:
                self.driver.discard()
            self._means = []
        return True

    # -- gradcomp.torch.optimizers.Listener -----------------------------------------------------------------------

    def appears(self, optimizer: torch.optim.Optimizer, *, had_stepped: bool) -> None:
        """Warn where the optimizer does not fit the compression, or goes on from a checkpoint without its state."""
        if had_stepped:
            self.checkpoint_manager.state_was_due()
        if self.exchanger.pipeline.transport.rank == 0:
            warn_if_it_averages(optimizer, self._policy)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise StateError inside a backward pass, and withhold momentum that the exchange has applied."""
        refuse_inside_backward()
        self._momenta.withhold(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its momentum back."""
        self._momenta.give_back()
