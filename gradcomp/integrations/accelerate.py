"""Compresses gradients in Hugging Face Accelerate, by one call after ``accelerator.prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradcomp.core.errors import need

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
    """Compresses the gradients of a prepared model, and saves their state with ``accelerator.save_state``.

    Registers a :func:`gradcomp.torch.ddp_comm_hook` on the DistributedDataParallel that ``prepare`` returned, with the
    accelerator's own GradScaler. ``save_state(directory)`` then writes each rank's compression state to
    ``directory/gradcomp``, and the states of further models to ``gradcomp_1`` and so on. ``load_state(directory)``
    loads it. With the same number of ranks, training then continues bit for bit.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: the model that ``prepare`` returned, before its first step.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer.
        controller: as for ``ddp_comm_hook``.
        missing_ok: also load checkpoints without compression state; residuals then start from zero.

    Returns:
        The state of ``ddp_comm_hook``: ``state.compression_metrics()`` is a flat dictionary for ``accelerator.log``.

    Raises:
        ConfigError: the model was not prepared by this accelerator, or is not in DistributedDataParallel; and the
            errors of ``ddp_comm_hook``. Saving and loading raise the errors of :func:`gradcomp.torch.save` and
            :func:`gradcomp.torch.load`.

    Collective. Calls ``gc.init()`` if the script has not called it. Wire: see the compressor.
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
    """Returns the directory of a model, numbered as Accelerate numbers the models in a checkpoint."""
    number = next(number for number, each in enumerate(models) if bare(each) is bare(model))
    return Path(checkpoint) / (DIRECTORY if number == 0 else f"{DIRECTORY}_{number}")
