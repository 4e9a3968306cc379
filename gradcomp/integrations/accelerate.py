"""Compression under Hugging Face Accelerate: one call after ``accelerator.prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradcomp.core.requires import need

need(__name__, "accelerate", "torch", "accelerate")

# isort: split
import torch
from accelerate import Accelerator

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError
from gradcomp.integrations.hooks import DIRECTORY, load_state, register, save_state
from gradcomp.torch.ddp import HookState
from gradcomp.torch.modules import bare


def compress(
    accelerator: Accelerator,
    model: torch.nn.Module,
    compression: Policy | Compressor | str = Compression.none,
    *,
    controller: Controller | str | None = None,
    missing_ok: bool = False,
) -> HookState:
    """Compress the gradients of a prepared model, and save their state with ``accelerator.save_state``.

    Registers a :func:`gradcomp.torch.ddp_comm_hook` on the DistributedDataParallel that ``prepare`` returned, with the
    accelerator's own GradScaler. ``save_state(directory)`` then writes each rank's compression state to
    ``directory/gradcomp``, for further models ``gradcomp_1`` and so on; ``load_state(directory)`` goes on from it, bit
    for bit on as many ranks.

    Args:
        accelerator: the one that prepared the model.
        model: what ``prepare`` returned, before its first step.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer.
        controller: as for ``ddp_comm_hook``.
        missing_ok: load checkpoints without compression state too; residuals then start from zero.

    Returns what ``ddp_comm_hook`` does: ``state.metrics()`` is a flat dictionary for ``accelerator.log``.
    Collective. Calls ``gc.init()`` if nobody has. Wire: see the compressor. Raises as ``ddp_comm_hook``, and
    ConfigError for a model that this accelerator has not prepared or that is in no DistributedDataParallel.
    Saving and loading raise as :func:`gradcomp.torch.save` and :func:`gradcomp.torch.load`.
    """
    if not any(bare(each) is bare(model) for each in accelerator._models):
        raise ConfigError("compress() takes the model that this accelerator's prepare() returned")
    state = register(model, compression, "Accelerate", grad_scaler=accelerator.scaler, controller=controller)

    def save(models: list[Any], _: list[Any], output_dir: str) -> None:
        save_state(_directory(output_dir, models, model), state)

    def load(models: list[Any], input_dir: str) -> None:
        load_state(_directory(input_dir, models, model), state, missing_ok=missing_ok)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return state


def _directory(checkpoint: str, models: list[Any], model: torch.nn.Module) -> Path:
    """Numbered as Accelerate numbers the models in a checkpoint."""
    number = next(number for number, each in enumerate(models) if bare(each) is bare(model))
    return Path(checkpoint) / (DIRECTORY if number == 0 else f"{DIRECTORY}_{number}")
