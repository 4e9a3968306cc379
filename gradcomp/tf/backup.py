"""``BackupAndRestore``: resumes training after a kill, with the compression state."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from gradcomp.core.errors import ConfigError, StateError, WireFormatError
from gradcomp.exchange.checkpoint_manager import checkpoint_manager_of
from gradcomp.job import runtime
from gradcomp.job.all_or_none import Together
from gradcomp.job.checkpoint import load, save
from gradcomp.job.process_sets import ProcessSet
from gradcomp.tf import keras_model
from gradcomp.tf.objects import broadcast_variables

_LATEST = "latest"
# Keras' BackupAndRestore uses the next two names too, so it can read a backup's directory.
_WEIGHTS = "latest.weights.h5"
_METADATA = "training_metadata.json"
_COMPRESSION = "compression"
_NAME = re.compile(r"epoch-[0-9]+-iteration-[0-9]+")


class BackupAndRestore(keras.callbacks.Callback):
    """Back the training state up, and resume from the last backup when ``fit`` is called again after a kill.

    The first rank writes weights, optimizer and epoch as ``keras.callbacks.BackupAndRestore`` does. After the same step
    every rank writes its compression state (:func:`gradcomp.tf.save`) and the states of its random layers to the same
    directory.
    Each backup has its own directory. The file ``latest`` names the last backup; one rename replaces it when all ranks
    have written, so a kill at any moment leaves this backup or the one before. On the same number of ranks, training
    then continues bit for bit if its epochs start from the same data. With ``save_freq`` in batches it continues from
    the beginning of the epoch, as with Keras' callback. After a signal that :func:`gradcomp.tf.handle_preemption` has
    noted it backs up after the batch, and ends ``fit``; this backup is kept.

    Args:
        backup_dir: a directory that all ranks share, for this run alone.
        save_freq: ``"epoch"``, or a number of batches.
        delete_checkpoint: remove the backup when training ends without an error.

    Collective. Wire: all variables once, on restoring. Raises ConfigError for bad arguments, a model that is not built
    or has no distributed optimizer, and several optimizers that are not built; StateError on every rank if
    a backup cannot be written or read, or its parts are not of one step.
    """

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: Literal["epoch"] | int = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        if not str(backup_dir):
            raise ConfigError("backup_dir is empty; pass a directory that all ranks share")
        if save_freq != "epoch" and (type(save_freq) is not int or save_freq < 1):
            raise ConfigError(f'save_freq must be "epoch" or a number of batches, got {save_freq!r}')
        self.backup_dir = Path(backup_dir)
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self._epoch = 0
        self._last_batch = -1
        self._since = 0
        self._preempted = False  # by the signal, which has ended the epoch early

    # ------------------------------------------------------------------------------------------ Keras calls

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the last backup, if there is one."""
        self._preempted = False
        keras_model.require_distributed(self.model, self)
        if not self.model.built or not keras_model.build_optimizers(self.model):
            raise ConfigError(
                "BackupAndRestore needs a model that is built before fit(), because it restores the weights then. If "
                "the model has no call() of its own, set model.built = True"
            )
        if unbuilt := [name for name, one in keras_model.optimizers_of(self.model).items() if not one.built]:
            raise ConfigError(
                "BackupAndRestore needs all optimizers of a model with several to be built before fit(): call "
                f"build(variables) of {', '.join(unbuilt)}"
            )
        found = self._of_root("read", self._read_latest)
        if found is not None:
            self._restore(self._directory(found["name"]), found)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch for backups within it."""
        self._epoch, self._last_batch = epoch, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Write a backup after every ``save_freq`` batches, if it is a number, and when the job is preempted."""
        if runtime.preempted():
            if not self._preempted:
                self._preempted = self.model.stop_training = True
                ends = batch + 1 == self.params["steps"]
                self._backup(self._epoch + ends, 0 if ends else batch)
            return
        if self.save_freq == "epoch":
            return
        self._since += batch - self._last_batch
        self._last_batch = batch
        if self._since >= self.save_freq:
            self._since = 0
            self._backup(self._epoch, batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write a backup if ``save_freq`` is ``"epoch"``."""
        if self.save_freq == "epoch" and not self._preempted:
            self._backup(epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backup if ``delete_checkpoint`` is set."""
        if self.delete_checkpoint and not self._preempted:
            self._of_root("removed", lambda: self._remove_all_but(None))

    # ------------------------------------------------------------------------------------------ files

    def _backup(self, epoch: int, batch: int) -> None:
        optimizers = keras_model.optimizers_of(self.model)
        iteration = sum(int(getattr(one, "inner_optimizer", one)._iterations) for one in optimizers.values())
        name = f"epoch-{epoch}-iteration-{iteration}"
        directory = self._directory(name)
        metadata = {"epoch": epoch, "batch": batch, "iteration": iteration, "step": self._steps()}

        def write() -> None:
            directory.mkdir(parents=True, exist_ok=True)
            self.model.save_weights(str(directory / _WEIGHTS), overwrite=True)
            (directory / _METADATA).write_text(json.dumps(metadata))

        def publish() -> None:
            partial = self.backup_dir / f"{_LATEST}.partial"
            partial.write_text(name)
            partial.replace(self.backup_dir / _LATEST)
            self._remove_all_but(name)

        self._of_root("written", write)
        self._on_all("random states", lambda: self._write_random_states(directory))
        for path, optimizer in self._compressions(directory):
            save(path, optimizer)  # returns when all ranks have written their files
        self._of_root("written", publish)

    def _restore(self, directory: Path, found: dict[str, Any]) -> None:
        model = self.model
        self._of_root("read", lambda: model.load_weights(str(directory / _WEIGHTS)))
        ranks = keras_model.ranks_of(model)
        broadcast_variables(keras_model.variables_of(model), ranks[0], process_set=ProcessSet(ranks))
        self._on_all("random states", lambda: self._read_random_states(directory))
        for path, optimizer in self._compressions(directory):
            load(path, optimizer)
        step = self._steps()
        if step != found["step"]:
            raise StateError(
                f"{directory}: its weights are of step {found['step']}, its compression state of step {step}"
            )
        model._initial_epoch = found["epoch"]

    def _read_latest(self) -> dict[str, Any] | None:
        path = self.backup_dir / _LATEST
        if not path.exists():
            return None
        name = path.read_text()
        found = json.loads((self._directory(name) / _METADATA).read_text())
        return {"name": name, "epoch": int(found["epoch"]), "step": int(found["step"])}

    def _directory(self, name: str) -> Path:
        """Return a backup's directory.

        Raises WireFormatError for other names than those of backups, because they could lead outside
        ``backup_dir``.
        """
        if not _NAME.fullmatch(name):
            raise WireFormatError(f"{name!r:.80} is not the name of a backup")
        return self.backup_dir / name

    def _remove_all_but(self, name: str | None) -> None:
        if not self.backup_dir.is_dir():
            return
        if name is None:
            (self.backup_dir / _LATEST).unlink(missing_ok=True)
        for directory in self.backup_dir.glob("epoch-*-iteration-*"):
            if directory.name != name:
                shutil.rmtree(directory, ignore_errors=True)
        if name is None and not any(self.backup_dir.iterdir()):
            self.backup_dir.rmdir()

    def _steps(self) -> int:
        """Return the sum of the optimizers' step numbers."""
        return sum(checkpoint_manager_of(one).step for one in keras_model.optimizers_of(self.model).values())

    def _compressions(self, directory: Path) -> list[tuple[Path, Any]]:
        """Return, for each optimizer, the path of its compression state in a backup, and the optimizer."""
        return [
            (directory / (_COMPRESSION if name == "optimizer" else f"{_COMPRESSION}-{name}"), optimizer)
            for name, optimizer in keras_model.optimizers_of(self.model).items()
        ]

    def _write_random_states(self, directory: Path) -> None:
        states = [np.asarray(variable) for variable in self._random_states()]
        if states:
            np.savez(self._file_of_rank(directory), *states)

    def _read_random_states(self, directory: Path) -> None:
        file = self._file_of_rank(directory)
        if file.exists():
            with np.load(file) as states:
                for variable, name in zip(self._random_states(), states.files, strict=True):
                    variable.assign(states[name])

    def _on_all(self, stage: str, work: Callable[[], object]) -> None:
        """Run ``work`` on every rank; if it fails on one, raise on all. Collective."""
        Together("BackupAndRestore", keras_model.ranks_of(self.model)).do(stage, lambda: (work(), None))

    def _file_of_rank(self, directory: Path) -> Path:
        return directory / f"random-{runtime.rank()}-of-{runtime.size()}.npz"

    def _random_states(self) -> list[Any]:
        """Return the states of random layers, which differ between ranks."""
        known = {id(variable) for variable in [*self.model.weights, *self.model.metrics_variables]}
        return [variable for variable in self.model.variables if id(variable) not in known]

    def _of_root(self, what: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the first rank, and return its result on every rank.

        Raises StateError on every rank if ``work`` raises. ``what``: a
        participle for the message, such as "read". Collective.
        """
        ranks = Together("BackupAndRestore", keras_model.ranks_of(self.model))

        def of_first() -> tuple[None, Any]:
            try:
                return None, work() if ranks.rank == 0 else None
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                raise StateError(f"a backup in {self.backup_dir} cannot be {what}: {text}") from error

        return ranks.do(what, of_first)[1][0]
