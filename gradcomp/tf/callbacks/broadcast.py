"""``BroadcastGlobalVariables``: all ranks start with one rank's variables."""

from __future__ import annotations

from typing import Any

import keras

from gradcomp.core.errors import ConfigError
from gradcomp.job import runtime
from gradcomp.job.process_sets import ProcessSet
from gradcomp.tf.callbacks.common import build_optimizers, ranks_of, require_distributed, variables_of
from gradcomp.tf.local import Local
from gradcomp.tf.variables import broadcast_variables


class BroadcastGlobalVariables(keras.callbacks.Callback):
    """Give all ranks the weights and the optimizer's variables of ``root_rank`` when training begins.

    If the model is not built yet, it has nothing to send before the end of its first batch, and broadcasts then. States
    of random layers stay each rank's own, as do ``local_variables``, a variable or a list. Wire: all other variables
    once. If a model has several optimizers, in any of its attributes, all distributed ones are broadcast. Collective.
    Raises ConfigError if the model has no distributed optimizer, and for a model that is not built with
    ``steps_per_execution`` of more than 1: its ranks would take several steps from different weights.
    """

    def __init__(self, root_rank: int = 0, local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = Local()
        single = hasattr(local_variables, "assign")
        for variable in [local_variables] if single else list(local_variables or []):
            if not hasattr(variable, "assign"):
                raise ConfigError(f"local_variables must be variables, got {type(variable).__name__}")
            self._local.add(variable)
        self._due = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast now, or after the first batch if the model is not built."""
        require_distributed(self.model, self)
        self._due = not build_optimizers(self.model)
        if not self._due:
            self._broadcast()
        elif self.model.steps_per_execution > 1 and runtime.size() > 1:
            raise ConfigError(
                "BroadcastGlobalVariables: the model is not built, and takes several steps before a callback is "
                "called; build it before fit(), or set steps_per_execution=1"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast if the model was not built before its first batch."""
        if self._due:
            self._due = False
            self._broadcast()

    def _broadcast(self) -> None:
        shared = [variable for variable in variables_of(self.model) if variable not in self._local]
        broadcast_variables(shared, self.root_rank, process_set=ProcessSet(ranks_of(self.model)))
