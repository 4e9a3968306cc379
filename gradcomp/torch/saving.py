"""``save`` and ``load``: checkpoints of compression state, model, optimizer and the user's own values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch

from gradcomp.core.errors import ConfigError, StateError
from gradcomp.exchange.checkpoint import Sink, Writer
from gradcomp.job.checkpoint import KEEP, Found, load_with, save_with
from gradcomp.torch.layers import Exchange
from gradcomp.torch.modules import bare
from gradcomp.torch.optimizer import Distributed
from gradcomp.torch.tensors import culprit

logger = logging.getLogger("gradcomp")

_MODEL = "model.pt"
_SHOWN = 5


def save(
    directory: str | Path,
    opt: Any,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    extra: dict[str, Any] | None = None,
    keep: int = KEEP,
) -> None:
    """Write a new checkpoint to ``directory``: residuals, step, plan, bucket order, and the arguments below.

    A checkpoint is complete once all ranks' files are on disk. A job that is killed at any moment finds this one
    complete, or else the one before.

    Args:
        directory: a directory on storage that all ranks share, used for one optimizer.
        opt: the optimizer that :func:`DistributedOptimizer` returned, or the state of :func:`ddp_comm_hook`.
        model: its ``state_dict()`` on rank 0 is saved, and with it that of the wrapped optimizer.
        optimizer: the optimizer that is used with a :func:`ddp_comm_hook`, whose ``state_dict()`` on rank 0 is saved.
        extra: each rank's own tensors, numbers, strings and containers of them; :func:`load` returns them.
        keep: how many older checkpoints stay.

    Collective over the ranks of ``opt``, between two steps. Wire: a few hundred bytes per rank, and up to 12 per
    parameter. Disk: 4 bytes per rank for each element with feedback, and 4/N for the chunk owner's; model and optimizer
    once. Raises StateError on every rank if a step is open, parameters differ between ranks, a value is not one that
    ``torch.load(weights_only=True)`` reads, or a file cannot be written; the older checkpoints are then untouched.
    Raises ConfigError for wrong arguments, PlanMismatchError if the ranks' calls differ.
    """

    def parts(rank: int, world: int) -> dict[str, Writer]:
        job = _Job(opt, model, optimizer)
        files: dict[str, Writer] = {}
        if rank == 0 and (model is not None or optimizer is not None):
            files[_MODEL] = partial(_write, job.state_dicts())
        if extra is not None:
            if not isinstance(extra, dict):
                raise ConfigError(f"extra must be a dict, got {type(extra).__name__}")
            files[_extra_name(rank, world)] = partial(_write, extra)
        return files

    arguments = [*_given(model=model, optimizer=optimizer, extra=extra), f"keep: {keep}"]
    save_with(directory, opt, parts, keep=keep, arguments=arguments)


def load(
    directory: str | Path,
    opt: Any,
    *,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    missing_ok: bool = False,
) -> dict[str, Any] | None:
    """Resume from the last complete checkpoint that :func:`save` wrote to ``directory``; returns its ``extra``, or {}.

    With the number of ranks that saved it, training continues bit for bit. With another number, every rank gets the
    mean over the old ranks of their residuals, and rank 0's ``extra``.

    Args:
        directory: the directory given to :func:`save`, or one of the checkpoints in it.
        opt: as for :func:`save`, wrapped anew with the same layers.
        model: the model to load, and with it the optimizer in ``opt``. If no model was saved, load it before the call.
        optimizer: as for :func:`save`.
        missing_ok: return None, on every rank, if there is no complete checkpoint.

    Without ``model`` or ``optimizer``, load these yourself, before or after. The parameters are compared with those at
    the save: at once if you pass a model that was not saved here, else when the next step begins.
    Collective, between two steps. Rank 0 reads the manifest for all; every rank reads its own file, and the model's.
    Raises StateError on every rank, and changes nothing, if there is no checkpoint, a file is missing or damaged, a
    layer is unknown, missing or of another shape, a parameter is of another step, the format is another version's, or a
    step is open. Raises ConfigError and PlanMismatchError as :func:`save` does.
    """

    def prepare(found: Found) -> Callable[[], dict[str, Any]]:
        job = _Job(opt, model, optimizer)
        path = found.part(_MODEL)
        held: dict[str, Any] = {} if path is None else _read(path)
        job.check(held)
        expected = found.expected()
        if model is not None and "model" not in held and expected is not None:
            expected.check(found.checkpoint_manager.digests())
        if expected is None:
            logger.info("%s does not say what the parameters were: they are not checked", found.directory)
        world = len(found.manifest.files)
        of_rank = found.part(_extra_name(found.rank if world == found.world else 0, world))
        extra = {} if of_rank is None else _read(of_rank)

        def use() -> dict[str, Any]:
            job.restore(held)
            return extra

        return use

    arguments = [*_given(model=model, optimizer=optimizer), f"missing_ok: {missing_ok}"]
    return load_with(directory, opt, prepare, missing_ok=missing_ok, arguments=arguments)


def _given(**arguments: Any) -> list[str]:
    return [f"{name}: {'none' if value is None else 'given'}" for name, value in arguments.items()]


class _Job:
    """The model and the optimizer to save or load together with a compression state."""

    def __init__(self, opt: Any, model: Any, optimizer: Any) -> None:
        if model is not None and not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(opt, Distributed):
            if optimizer is not None and optimizer is not opt:
                raise ConfigError(
                    "optimizer= is for a ddp_comm_hook: a DistributedOptimizer is saved with model="
                )
            optimizer = None if model is None else opt
        self._model = None if model is None else bare(model)
        self._optimizer = optimizer
        if self._model is not None:
            own = {id(parameter) for parameter in self._model.parameters()}
            exchange = getattr(opt, "_gradcomp", opt)
            named = exchange.named if isinstance(exchange, Exchange) else []
            strangers = [name for name, parameter in named if id(parameter) not in own]
            if strangers:
                raise ConfigError(f"model= does not have the parameter {strangers[0]!r} that is exchanged")

    def state_dicts(self) -> dict[str, Any]:
        """Return the state dicts to save, and the optimizer's class name.

        The name is checked when loading, because optimizers of other classes load a state without complaint.
        """
        states: dict[str, Any] = {}
        if self._model is not None:
            states["model"] = self._model.state_dict()
        if self._optimizer is not None:
            states["optimizer"] = self._optimizer.state_dict()
            states["optimizer_class"] = type(self._optimizer).__name__
        return states

    def check(self, held: Mapping[str, Any]) -> None:
        """Raise StateError if the saved state does not fit. Changes nothing."""
        if self._model is not None and "model" in held:
            _check_model(self._model.state_dict(), held["model"])
        if self._optimizer is not None and "optimizer" in held:
            _check_optimizer(self._optimizer, held["optimizer"], held["optimizer_class"])
        if "optimizer" in held and self._model is not None and self._optimizer is None:
            raise ConfigError("the checkpoint has the state of an optimizer: pass it as optimizer=")

    def restore(self, held: Mapping[str, Any]) -> None:
        if self._model is not None and "model" in held:
            self._model.load_state_dict(held["model"])
        if self._optimizer is not None and "optimizer" in held:
            self._optimizer.load_state_dict(held["optimizer"])


def _check_model(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    found = [f"unknown {name!r}" for name in saved if name not in mine]
    found += [f"missing {name!r}" for name in mine if name not in saved]
    for name in mine.keys() & saved.keys():
        shapes = [
            list(value.shape) if isinstance(value, torch.Tensor) else None
            for value in (saved[name], mine[name])
        ]
        if shapes[0] != shapes[1]:
            found.append(f"{name!r} has shape {shapes[0]}, in this model {shapes[1]}")
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise StateError(f"the saved model is another one: {'; '.join(found[:_SHOWN])}{more}")


def _check_optimizer(mine: torch.optim.Optimizer, saved: Mapping[str, Any], name: str) -> None:
    if name != (own := type(mine).__name__):  # which wrapping does not change
        raise StateError(f"the saved optimizer is a {name}, this one a {own}")
    sizes = [
        [len(group["params"]) for group in groups] for groups in (saved["param_groups"], mine.param_groups)
    ]
    if sizes[0] != sizes[1]:
        raise StateError(f"the saved optimizer has groups of {sizes[0]} parameters, this one of {sizes[1]}")


def _extra_name(rank: int, world: int) -> str:
    return f"extra-{rank}-of-{world}.pt"


def _write(value: dict[str, Any], sink: Sink) -> None:
    """Write a value to the file, and check that it loads without running code that a pickle names."""
    try:
        torch.save(value, cast(IO[bytes], sink))
        if sink.flush():
            torch.load(sink.path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise StateError(
            "only tensors, numbers, strings, bytes, None and lists, tuples, dicts and sets of them can be saved, this "
            f"has {culprit(error, value)}"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise StateError(f"{path.name} does not load: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(value, dict):
        raise StateError(f"{path.name} holds a {type(value).__name__}")
    return value
