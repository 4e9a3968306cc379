"""Compresses gradients in Hugging Face Transformers' ``Trainer``, by a callback."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from gradcomp.core.errors import need

need(__name__, "transformers", "torch", "transformers")

# isort: split
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError
from gradcomp.integrations.hooks import DIRECTORY, load_state, register, save_state
from gradcomp.torch.ddp import HookState
from gradcomp.torch.modules import bare, live


class CompressionCallback(TrainerCallback):
    """Compresses, saves and resumes: ``Trainer(..., callbacks=[CompressionCallback("quantize:bits=4")])``.

    When training begins, it registers a :func:`gradcomp.torch.ddp_comm_hook` on the DistributedDataParallel that the
    trainer has wrapped around its model; the hook finds the GradScaler. With every checkpoint each rank's compression
    state is written to ``checkpoint-N/gradcomp``. ``trainer.train(resume_from_checkpoint=...)`` continues from this
    state, bit for bit with the same number of ranks. :meth:`compression_metrics` are added to the logs, for callbacks
    after this one.

    Args:
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer.
        controller: as for ``ddp_comm_hook``.
        resume_from: the checkpoint, if ``resume_from_checkpoint`` is a path outside of ``output_dir``.
        missing_ok: also resume from checkpoints without compression state; residuals then start from zero.

    Raises:
        ConfigError: the trainer does not use DistributedDataParallel, or searches hyperparameters; and the errors of
            ``ddp_comm_hook``. Saving and resuming raise as :func:`gradcomp.torch.save` and :func:`gradcomp.torch.load`.

    Collective. Calls ``gc.init()`` if that was not done. Wire: see the compressor.
    """

    def __init__(
        self,
        compression: Policy | Compressor | str = Compression.none,
        *,
        controller: Controller | str | None = None,
        resume_from: str | Path | None = None,
        missing_ok: bool = False,
    ) -> None:
        self._arguments = compression, controller
        self._resume_from = resume_from
        self._missing_ok = missing_ok
        self._wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        #: The state of ``ddp_comm_hook``; None before training begins.
        self.compression_state: HookState | None = None

    def compression_metrics(self) -> dict[str, float]:
        """Returns the counters of this rank, ``{"gradcomp/ratio": 7.6, ...}``; empty before training."""
        return {} if self.compression_state is None else self.compression_state.compression_metrics()

    # -- methods that the trainer calls ---------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Registers the hook on the wrapped model, and loads the compression state if training resumes."""
        if state.is_hyper_param_search:
            raise ConfigError("CompressionCallback does not support a search of hyperparameters")
        assert model is not None
        found = [ddp for ddp in live(DistributedDataParallel) if bare(ddp) is bare(model)]
        new = [ddp for ddp in found if ddp not in self._wrapped]
        if len(new) > 1:
            raise ConfigError(
                f"the model is in {len(new)} DistributedDataParallels; keep the one that trains it"
            )
        if new or self.compression_state is None:
            compression, controller = self._arguments
            wrapped = new[0] if new else model
            self.compression_state = register(wrapped, compression, "Trainer", controller=controller)
            self._wrapped.add(wrapped)
        if state.global_step > 0:
            load_state(
                self._directory(self._resume_from, args, state),
                self.compression_state,
                model,
                missing_ok=self._missing_ok,
                hint="; if resume_from_checkpoint is a path elsewhere, give it to the callback as resume_from=",
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the compression state to the checkpoint that the trainer has written."""
        if self.compression_state is not None and not args.save_only_model:
            save_state(self._directory(None, args, state), self.compression_state)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the metrics to the logs, for callbacks after this one."""
        if logs is not None:
            logs.update(self.compression_metrics())

    def _directory(self, given: str | Path | None, args: TrainingArguments, state: TrainerState) -> Path:
        assert args.output_dir is not None
        return Path(given or Path(args.output_dir) / f"checkpoint-{state.global_step}") / DIRECTORY
