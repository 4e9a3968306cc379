"""Code that the integrations share: registers the hook on a wrapped model, and saves its state in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradcomp.compress import Compressor, Policy
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import runtime
from gradcomp.torch.ddp import HookState, ddp_comm_hook
from gradcomp.torch.runtime import init
from gradcomp.torch.saving import load, save

#: Name of the compression state's directory inside a library's own checkpoint, or suffix of the checkpoint's name.
DIRECTORY = "gradcomp"


def register(
    model: torch.nn.Module, compression: Policy | Compressor | str, library: str, **options: Any
) -> HookState:
    """Registers a :func:`gradcomp.torch.ddp_comm_hook` on a DistributedDataParallel model and returns its state.

    Calls ``gc.init()`` if the script has not called it. ``options`` are arguments of ``ddp_comm_hook``. A world of one
    rank needs no hook. Collective. Raises ConfigError if several ranks train and the model is not in
    DistributedDataParallel.
    """
    if not runtime.is_initialized():
        init()
    ddp = _ddp_of(model)
    if ddp is None and runtime.size() > 1:
        raise ConfigError(
            f"{library} has not wrapped the model in DistributedDataParallel, whose gradients gradcomp compresses: it "
            f"is a {type(model).__name__}"
        )
    state, hook = ddp_comm_hook(model if ddp is None else ddp, compression, **options)
    if ddp is not None:
        ddp.register_comm_hook(state, hook)
    return state


def _ddp_of(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel that the model is or that was compiled to it, or None."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return None
        model = inner
    return model


def save_state(directory: str | Path, state: HookState) -> None:
    """Saves the compression state next to a library's checkpoint. Collective; raises as :func:`gradcomp.torch.save`."""
    save(directory, state, keep=0)


def load_state(
    directory: str | Path,
    state: HookState,
    model: torch.nn.Module | None = None,
    *,
    missing_ok: bool,
    hint: str = "",
) -> None:
    """Continues from :func:`save_state`. Collective; errors as :func:`gradcomp.torch.load`.

    ``model``: if its parameters are loaded already, they are compared at once, else when the next step begins.
    ``missing_ok``: residuals start from zero if the checkpoint has no compression state; the next step logs it.
    """
    try:
        found = load(directory, state, model=model, missing_ok=missing_ok)
    except StateError as error:
        if not Path(directory).exists():
            raise StateError(
                f"{directory} does not exist: the checkpoint was saved without compression state, or the job ended "
                f"before it was complete{hint}; missing_ok=True starts with residuals of zero"
            ) from error
        raise
    if found is None:
        state.checkpoint_manager.state_is_due()
