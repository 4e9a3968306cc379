"""Compresses gradients in Lightning's ``Trainer``, by a strategy, and logs metrics, by a callback."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from gradcomp.core.errors import need

need(__name__, "lightning", "torch", "lightning")

# isort: split
import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError
from gradcomp.integrations.hooks import DIRECTORY, load_state, register, save_state
from gradcomp.integrations.loggers import HasMetrics
from gradcomp.torch.ddp import HookState


class CompressedDDPStrategy(DDPStrategy):
    """A DDPStrategy with compressed gradients: ``Trainer(strategy=CompressedDDPStrategy("quantize:bits=4"))``.

    Registers a :func:`gradcomp.torch.ddp_comm_hook` on the DistributedDataParallel, with the GradScaler of
    ``precision="16-mixed"``. When a checkpoint ``FILE.ckpt`` is saved (by ``ModelCheckpoint`` or
    ``trainer.save_checkpoint``), each rank's compression state is first written to the directory
    ``FILE.ckpt.gradcomp``; both are removed together. ``trainer.fit(ckpt_path=...)`` continues from both, bit for bit
    with the same number of ranks.

    Args:
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer.
        controller: as for ``ddp_comm_hook``.
        missing_ok: also resume from checkpoints without compression state; residuals then start from zero.
        arguments: those of DDPStrategy.

    Raises:
        ConfigError: the checkpoint is at a URL, but the directory must be on storage that all ranks share; and the
            errors of ``ddp_comm_hook``. Saving and resuming raise as :func:`gradcomp.torch.save` and
            :func:`gradcomp.torch.load`.

    Collective. Calls ``gc.init()`` if that was not done. Wire: see the compressor.
    """

    def __init__(
        self,
        compression: Policy | Compressor | str = Compression.none,
        *,
        controller: Controller | str | None = None,
        missing_ok: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._compression = compression, controller
        self._missing_ok = missing_ok
        self._loaded_from: Path | None = None
        #: The state of ``ddp_comm_hook``; None before ``fit``.
        self.compression_state: HookState | None = None

    def compression_metrics(self) -> dict[str, float]:
        """Returns the counters of this rank as a flat dictionary for ``log_dict``; empty before ``fit``."""
        return {} if self.compression_state is None else self.compression_state.compression_metrics()

    # -- methods that the trainer calls ---------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Wraps the model, and registers the hook."""
        super().configure_ddp()
        compression, controller = self._compression
        self.compression_state = register(
            self.model,
            compression,
            "Lightning",
            grad_scaler=getattr(self.precision_plugin, "scaler", None),
            controller=controller,
        )

    def setup(self, trainer: pl.Trainer) -> None:
        """Loads the compression state once the model has the parameters of the checkpoint, if there is one."""
        loaded_from, self._loaded_from = self._loaded_from, None
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and loaded_from is not None:
            assert self.compression_state is not None
            directory = _beside(loaded_from)
            load_state(directory, self.compression_state, self.model, missing_ok=self._missing_ok)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Notes the checkpoint's path, since the trainer calls this before :meth:`setup`, when there is no hook yet."""
        self._loaded_from = Path(checkpoint_path)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes the compression state first, so that every existing checkpoint file has its directory."""
        if self.compression_state is not None and "optimizer_states" in checkpoint:
            # Ranks may make file names from different metrics, so all use rank 0's name.
            save_state(_beside(self.broadcast(str(filepath))), self.compression_state)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes the file, and then the directory."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in str(filepath):
            shutil.rmtree(_beside(filepath), ignore_errors=True)


class CompressionMetrics(pl.Callback):
    """Writes ``compression_metrics()`` to the trainer's loggers: ``Trainer(callbacks=[CompressionMetrics()])``.

    It writes the means of the last ``every`` steps, next to what the module logs. Lightning's loggers write on rank 0
    only.

    Args:
        opt: the state of a hook or the optimizer that gradcomp returned; by default, the trainer's
            :class:`CompressedDDPStrategy`.
        every: the number of steps of which the means are written; by default, the trainer's ``log_every_n_steps``.

    Raises ConfigError if ``every`` is not positive, and when training begins if nothing compresses.
    """

    def __init__(self, opt: HasMetrics | None = None, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"every must be at least 1 step, got {every}")
        self._opt, self._every, self._written = opt, every, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that there is something to write."""
        if self._opt is None and not isinstance(trainer.strategy, CompressedDDPStrategy):
            raise ConfigError(
                "CompressionMetrics: the trainer has no CompressedDDPStrategy; give the callback opt=, the optimizer "
                "or the state of a hook"
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any, **named: Any) -> None:
        """Write the metrics, if the batch ended a step whose number is a multiple of ``every``."""
        step = trainer.global_step
        if step % (self._every or trainer.log_every_n_steps or 1) or step == self._written:
            return
        self._written = step
        source = self._opt or trainer.strategy
        for one in trainer.loggers:
            one.log_metrics(source.compression_metrics(), step=step)


def _beside(filepath: str | Path) -> Path:
    """Returns the directory of the compression state of a checkpoint, which may be a link to another."""
    if "://" in str(filepath):
        raise ConfigError(
            f"{filepath}: compression state is saved to storage that all ranks share, not to a URL"
        )
    path = Path(filepath).resolve()
    return path.with_name(f"{path.name}.{DIRECTORY}")
