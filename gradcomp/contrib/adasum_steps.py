"""``DistributedOptimizer(op=Adasum)``: each rank steps alone, and the ranks' steps are combined by Adasum.

    x_{t+1} = x_t + Adasum over ranks of delta_i,    delta_i = step_i(x_t, g_i) - x_t

g_i is rank i's own gradient and step_i its own optimizer, whose state (momentum, for example) differs between
ranks. Each parameter is a vector of its own. :mod:`gradcomp.job.reduce_op` defines the sum. The definition is
Horovod's; unlike Horovod, ``step()`` does all of the work, so what a script does to gradients between
``backward()`` and ``step()`` has an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.exchange.request_group import Call
from gradcomp.job import runtime
from gradcomp.job.channel import channel_of
from gradcomp.job.collectives import refuse
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Adasum, ScaledOp, coder_of
from gradcomp.torch.async_calls import begin_allreduce, coder, descriptors
from gradcomp.torch.distributed_state import Adopted, Arguments, NamedParameters, adopt, check_plain
from gradcomp.torch.layers import name_parameters

_HOW = ScaledOp(Adasum)


class _Core:
    """The state that Adasum adds to an optimizer: the collective's name, its ranks and the dtype on the wire."""

    def __init__(
        self, name: str, process_set: Members, compression: Any, names: dict[torch.Tensor, str]
    ) -> None:
        self._name = name
        self.parameter_names = names
        self._process_set = process_set
        (self._compress, self._decompress), _ = coder_of(compression, coder)

    @torch.no_grad()
    def combine(self, parameters: list[torch.Tensor], starts: list[torch.Tensor]) -> None:
        """Replace this rank's step from ``starts`` by the Adasum of all ranks' steps. Collective."""
        coded = [self._compress(p.detach() - start) for p, start in zip(parameters, starts, strict=True)]
        deltas = [delta for delta, _ in coded]
        sums = begin_allreduce(deltas, self._name, _HOW, self._process_set, in_place=True).wait()
        for p, start, total, (_, context) in zip(parameters, starts, sums, coded, strict=True):
            p.copy_(start.add_(self._decompress(total, context)))


class AdasumSteps(Adopted):
    """The methods of an optimizer whose steps are combined by Adasum."""

    _gradcomp: _Core

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's own gradients, then replace the step by the Adasum of all ranks' steps.

        Collective: every rank steps.
        """
        parameters = _trainable(self)
        starts = [p.detach().clone() for p in parameters]
        self._opt_called = True  # learning rate schedulers warn without it
        loss = super().step(closure)  # type: ignore[misc]
        self._gradcomp.combine(parameters, starts)
        return loss

    # A scheduler that was made before wrapping looks for this attribute and warns without it.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Do nothing, because gradients stay this rank's own."""

    def skip_synchronize(self) -> Any:
        """Raise StateError, because under Adasum ``step()`` has no exchange of gradients that could be skipped."""
        raise StateError(
            "skip_synchronize() has no meaning with op=Adasum: ranks exchange steps, not gradients"
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the argument only: ``step()`` takes the gradients that have accumulated when it is called."""
        Arguments(op=Adasum, backward_passes_per_step=passes).check_adasum()


def begin_adasum_steps(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None,
    process_set: Members,
    arguments: Arguments,
) -> None:
    """Make the optimizer combine its steps by Adasum.

    Collective. Raises ConfigError on every rank if one rank's arguments are wrong.

    Wire: one round in which calls are compared; then in each ``step()`` log2(N) d bytes per rank, where N is
    a power of two and d the size of the parameters in the dtype in which they are combined: float32, or
    float64 for float64.
    """
    ranks = members(process_set)
    state = runtime.current()
    name = f"Adasum of {state.name(ranks)}"
    try:
        check_plain(optimizer)
        arguments.check_adasum()
        named, frozen = name_parameters(optimizer, named_parameters)
        (compress, _), wrong = coder_of(arguments.compression, coder)
        if wrong is not None:
            raise ConfigError(
                f"{wrong}: Adasum weighs the ranks' steps by their angles, so each travels as a whole vector"
            )
        sent = [compress(parameter.detach())[0] for parameter in _trainable(optimizer)]
        called, problem = descriptors("allreduce", sent, name, process_set, _HOW)
        if problem := problem or next((each.problem for each in called if each.problem), None):
            raise ConfigError(problem)
    except Exception as error:
        with suppress(ConfigError):
            refuse("DistributedOptimizer", ranks, str(error))
        raise
    lines = [
        "DistributedOptimizer(op=Adasum)",
        *(f"{one}: {form}" for (one, _), form in zip(named, called, strict=True)),
    ]
    channel = channel_of(ranks)
    assert channel is not None, "a world of one has no Adasum"
    channel.submit(Call("DistributedOptimizer", lines), lambda _: None).result()
    names: dict[torch.Tensor, str] = {parameter: one for one, parameter in (*named, *frozen)}
    adopt(optimizer, AdasumSteps, _Core(name, process_set, arguments.compression, names))


def _trainable(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
