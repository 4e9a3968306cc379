"""``join``: ranks that are out of data stand in for the others' steps, and all ranks end with the same state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.exchange.exchanger import Exchanger
from gradcomp.job import joining, runtime
from gradcomp.job.channel import channel_of
from gradcomp.job.joining import Context, Divide
from gradcomp.job.launch import Ranks
from gradcomp.job.process_sets import ProcessSet, members
from gradcomp.job.reduce_op import Max
from gradcomp.torch.broadcast_state import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    problem_of_sending,
)
from gradcomp.torch.collectives import allreduce
from gradcomp.torch.ddp import HookState
from gradcomp.torch.hooks import GradientExchange
from gradcomp.torch.layers import exchange_of
from gradcomp.torch.local_steps import LocalSteps
from gradcomp.torch.modules import live

Self = TypeVar("Self", bound="JoinContext")


@runtime_checkable
class Stateful(Protocol):
    """Has state that ranks must share, such as a learning rate scheduler or a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@overload
def join(device: int = -1) -> int: ...


@overload
def join(
    device: torch.optim.Optimizer,
    *others: Stateful,
    model: torch.nn.Module | None = None,
    divide: Divide = "all",
) -> JoinContext: ...


def join(
    device: Any = -1, *others: Stateful, model: torch.nn.Module | None = None, divide: Divide = "all"
) -> int | JoinContext:
    """Let ranks have unequal numbers of batches: ``with join(optimizer, scheduler, model=model):`` around the loop.

        with gc.join(opt, scheduler, scaler, model=model):
            for batch in batches:  # more on some ranks than on others
                ...            # backward, clipping, opt.step(), scheduler.step(), as always

    A rank that leaves the block takes part in the steps that others still take, without a gradient: it sends its
    residual, and does not step. In allreduces it contributes zeros. Once all ranks have left, all have the state of a
    rank that trained last: parameters and optimizer state, with the learning rate, and the state of all that is given
    here. Residuals stay each rank's own. An error in the block is raised at once, without waiting.

        g_mean = (1/N) sum over ranks of g_i, where g_i = 0 on ranks that have left; N: all ranks, or those in the block

    ``join()`` without an optimizer is Horovod's: a rank that is out of data calls it, and it returns, on all ranks, the
    rank that joined last, from which the program broadcasts. That rank's optimizers made most steps; of several such
    ranks it is the one that joined after most collectives, and of several of these the highest.

    Args:
        device: the optimizer, which makes the call a context. It is a :func:`DistributedOptimizer`,
            :class:`LocalSteps`, or with ``model=ddp`` the plain optimizer of a DistributedDataParallel. A number is
            Horovod's argument, which has no effect.
        others: further optimizers, and objects with ``state_dict()``: learning rate schedulers, a GradScaler. The
            scaler that the optimizer was given, or has found, is one of them without being named.
        model: the module, whose buffers and frozen parameters are then sent too. A DistributedDataParallel takes part
            with its own :class:`torch.distributed.algorithms.Join`, whether it has a hook or not.
        divide: ``"all"`` divides by the number of all ranks, so that a rank's samples weigh the same in every step.
            ``"active"`` divides by the number of ranks that still train.

    The context may also be given to torch's ``Join``, beside a DistributedDataParallel and in any order:
    ``with Join([ddp, gc.join(opt, scheduler)]):``. ``divide_by_initial_world_size=False`` is then
    ``divide="active"``.

    Collective over the optimizers' ranks, at the beginning and at the end. Wire: one comparison at the beginning; the
    messages of the other ranks' exchanges; with ``divide="active"`` one number a step; at the end the state that is
    sent, in broadcasts. Unused, it costs nothing.
    Raises ConfigError on every rank for arguments that cannot work, such as ``op=Adasum``, residuals that follow the
    learning rate, ``divide="active"`` with ``op=Sum`` or a state that cannot be sent; for ``compress_fsdp`` and
    ``ZeroOptimizer``, whose exchanges need every rank; and on the rank that calls it for a collective other than
    allreduce after another rank has left. PlanMismatchError if the arguments differ, StateError before ``init``,
    TransportError if a rank fails.
    """
    if isinstance(device, int) and not others and model is None and divide == "all":
        return joining.join()
    return JoinContext([device, *others], model, divide)


class JoinContext(Joinable):
    """Implements what :func:`join` returns for an optimizer: a context manager, and a Joinable for torch's ``Join``."""

    def __init__(self, given: Sequence[Any], model: torch.nn.Module | None, divide: Divide) -> None:
        super().__init__()
        if not given or not isinstance(given[0], torch.optim.Optimizer):
            raise ConfigError("with join(optimizer, *others): the first argument is the optimizer")
        for each in given:
            if not isinstance(each, Stateful):
                raise ConfigError(f"join: {type(each).__name__} has no state_dict() and load_state_dict()")
        if not isinstance(model, torch.nn.Module | None):
            raise ConfigError(f"join: model must be a torch.nn.Module, got {type(model).__name__}")
        self._local = [each for each in given if isinstance(each, LocalSteps)]
        self._optimizers = [
            each
            for each in given
            if isinstance(each, torch.optim.Optimizer) and not isinstance(each, LocalSteps)
        ]
        self._outer = [fragment.optimizer for each in self._local for fragment in each.fragments]
        self._others = [each for each in given if not isinstance(each, torch.optim.Optimizer)]
        self._others += map(_Progress, self._local)
        if model is None and self._local:
            model = self._local[0].model
        self._model, self._divide = model, divide
        self._context: Context | None = None
        self._within: Join | None = None
        #: The rank whose state all ranks have since the end of the context; -1 before.
        self.last = -1

    # -- the context ----------------------------------------------------------------------------------------------

    def __enter__(self: Self) -> Self:
        """Compare the arguments over ranks."""
        if isinstance(self._model, DistributedDataParallel):
            self._within = Join([self._model, self], divide_by_initial_world_size=self._divide == "all")
            self._within.__enter__()  # type: ignore[no-untyped-call]
            return self
        ranks, problem = self._ranks()
        self._begin(ranks, problem, self._divide)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stand in for this rank until all have left, then take over the state of a rank that trained last."""
        if self._within is not None:
            within, self._within = self._within, None
            with self._ending():
                within.__exit__(kind, error, traceback)
            return
        with self._ending() as context:
            if error is None:
                for one in self._local:
                    one.settle()
                self._receive(context.ranks, context.join())

    @contextmanager
    def _ending(self) -> Iterator[Context]:
        assert self._context is not None, "the context has begun"
        context, self._context = self._context, None
        try:
            yield context
        finally:
            context.end()

    def _begin(
        self, ranks: Ranks, problem: str | None, divide: Divide, within: Exchanger | None = None
    ) -> None:
        if self._context is not None:
            raise StateError("this join context has begun and not ended")
        for other in self._to_send():
            if unsendable := problem_of_sending(other.state_dict()):
                problem = problem or f"the state of {type(other).__name__}: {unsendable}"
        optimizers = [*self._optimizers, *self._outer]
        lines = [type(each).__name__ for each in (*optimizers, *self._to_send())]
        cores = [core for one in optimizers if (core := _core(one)) is not None]
        given = [core.exchanger for core in cores if core.driver.attached]
        context = Context(ranks, divide)
        context.begin([*lines, f"model: {type(self._model).__name__}"], problem, given, within)
        self._context = context

    def _ranks(self) -> tuple[Ranks, str | None]:
        """Return the ranks that exchange with the optimizers, and what keeps them from joining."""
        everyone = runtime.current().everyone
        ranks: set[Ranks] = set()
        problem = None
        for one in (*self._optimizers, *self._outer):
            core = _core(one)
            if core is None:
                if _is_wrapped(one):
                    problem = "with op=Adasum the ranks' optimizers have different state"
                continue
            ranks.add(core.checkpoint_manager.ranks)
        if len(ranks) == 1:
            return ranks.pop(), problem
        if ranks:
            return everyone, "the optimizers exchange with different ranks: join one after the other"
        return everyone, problem or (
            "none of the optimizers is a DistributedOptimizer; for a DistributedDataParallel give model=ddp"
        )

    def _to_send(self) -> list[Any]:
        """Return the objects besides optimizers whose state is sent."""
        found = list(self._others)
        for one in self._optimizers:
            core = _core(one)
            scaler = None if core is None else core.arguments.loss_scale.scaler
            if isinstance(scaler, Stateful) and all(scaler is not each for each in found):
                found.append(scaler)
        return found

    def _receive(self, ranks: Ranks, last: int) -> None:
        """Give all ranks the state of the one that trained last. Collective."""
        self.last = last
        if len(ranks) == 1:
            return
        among = ProcessSet(ranks)
        sent: set[int] = set()
        if self._model is not None:
            broadcast_parameters(self._model, last, among)
            sent.update(map(id, self._model.parameters()))
        for one in self._optimizers:
            if left := [p for group in one.param_groups for p in group["params"] if id(p) not in sent]:
                broadcast_parameters(left, last, among)
            broadcast_optimizer_state(one, last, process_set=among)
        is_last = runtime.rank() == last
        for other in self._to_send():
            state = broadcast_object(other.state_dict() if is_last else None, last, process_set=among)
            if not is_last:
                other.load_state_dict(state)

    # -- torch.distributed.algorithms.Join ------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Begin: torch's ``Join`` calls it when it is made. Collective."""
        ddp, ranks = self._ddp(), members(self.join_process_group)
        divide: Divide = self._divide if kwargs.get("divide_by_initial_world_size", True) else "active"
        problem = None
        if any(_is_wrapped(one) for one in self._optimizers):
            problem = (
                "a DistributedOptimizer is not for torch's Join, nor for a DistributedDataParallel: use "
                "`with join(optimizer)` alone"
            )
        hook = None if ddp is None else exchange_of(ddp.parameters())
        exchanger = None
        if isinstance(hook, HookState):
            exchanger = hook.exchanger
            for one in self._optimizers:
                hook.know(one)
        self._begin(ranks, problem, divide, exchanger)
        return _Hook(self, ranks, ddp)

    def _ddp(self) -> DistributedDataParallel | None:
        """Return the DistributedDataParallel of the optimizer's parameters."""
        if isinstance(self._model, DistributedDataParallel):
            return self._model
        held = {id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]}
        for ddp in live(DistributedDataParallel):
            if any(id(parameter) in held for parameter in ddp.parameters()):
                return ddp
        return None

    @property
    def join_device(self) -> torch.device:
        """Return the device of the optimizer's first parameter."""
        device: torch.device = (self._optimizers or self._outer)[0].param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """Return the group of the DistributedDataParallel; without one, the default group."""
        ddp = self._ddp()
        return dist.group.WORLD if ddp is None else ddp.process_group


class _Progress:
    """Gives and takes what ranks must share of local steps: all state but residuals."""

    def __init__(self, steps: LocalSteps) -> None:
        self.state_dict = steps.progress
        self.load_state_dict = steps.load_progress


class _Hook(JoinHook):
    """Takes part in allreduces while DistributedDataParallel's own hook takes part in the steps."""

    def __init__(self, context: JoinContext, ranks: Ranks, ddp: DistributedDataParallel | None) -> None:
        self._context, self._ranks = context, ranks
        self._channel = channel_of(ranks)
        self._reply: Any = None
        # DistributedDataParallel tells the ranks that have joined of each forward pass, if it is Join's first. If this
        # context is, it must do so before DistributedDataParallel calls its own collectives there.
        self._notifying = None if ddp is None else ddp.register_forward_pre_hook(self._notify)

    def _notify(self, *_: object) -> None:
        Join.notify_join_context(self._context)

    def main_hook(self) -> None:
        """Stand in for this rank in allreduces, from the first call on."""
        if self._reply is None and self._channel is not None:
            self._reply = joining.announce(self._channel)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the state of a rank that was one of the last to join."""
        self.main_hook()
        context, rank = self._context, runtime.rank()
        if self._notifying is not None:
            self._notifying.remove()
        last = rank
        if self._reply is not None:
            self._reply.result()
            mine = torch.tensor(rank if is_last_joiner else -1)
            last = int(allreduce(mine, op=Max, process_set=ProcessSet(self._ranks)))
        context._receive(self._ranks, last)
        if context._within is None and context._context is not None:  # torch's Join has no other end
            with context._ending():
                pass


def _is_wrapped(optimizer: Any) -> bool:
    return "_gradcomp" in vars(optimizer)


def _core(optimizer: Any) -> GradientExchange | None:
    """Return the exchange of a wrapped optimizer; None for others."""
    core = vars(optimizer).get("_gradcomp")
    return core if isinstance(core, GradientExchange) else None
