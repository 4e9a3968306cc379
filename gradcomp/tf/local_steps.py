"""``LocalSteps``: a Keras callback that averages what ranks have learned once in many batches."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.compress.checks import check_whole
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.trace import Statistics
from gradcomp.job.all_or_none import Together
from gradcomp.job.process_sets import Members, ProcessSet, members
from gradcomp.tf.keras_model import core_of
from gradcomp.tf.objects import broadcast_variables
from gradcomp.tf.optimizer import DistributedOptimizer


class LocalSteps(keras.callbacks.Callback):
    """Let every rank train by itself, and average what has changed after every ``every`` batches.

        D_r = anchor - theta_r                      the pseudo-gradient of rank r
        anchor <- outer step with mean(D_r)         on all ranks
        theta_r <- anchor

    The model's own optimizer stays a plain one, whose state is each rank's own, as are weights that are not trained.
    Pseudo-gradients take the way of gradients: all compressors, policies, controllers and reductions work.

        model.fit(data, callbacks=[gc.LocalSteps(every=30, outer=keras.optimizers.SGD(0.7, 0.9, nesterov=True))])

    Args:
        every: the batches of a round. Rounds go on from one ``fit`` to the next.
        outer: the optimizer that steps on the mean of pseudo-gradients, for anchors of its own. The default,
            ``SGD(1.0)``, makes the anchor the mean of the ranks' weights.
        compression: as in :func:`gradcomp.tf.DistributedOptimizer`; so are ``controller`` and ``reduction``.
        process_set: the ranks to average over, if not all.

    Collective when training begins, where all ranks get the weights of the first, and after every ``every``-th batch.
    All ranks must train on equally many batches. Wire: once in ``every`` batches what a step of
    :func:`gradcomp.tf.DistributedOptimizer` sends with this compression.
    Raises ConfigError on every rank when ``fit`` begins: for wrong arguments, for a model that is not built or whose
    optimizer exchanges gradients, and for ``steps_per_execution`` of more than 1. PlanMismatchError if the ranks
    differ.
    Source: Douillard et al. 2023 (DiLoCo).
    """

    def __init__(
        self,
        every: int = 30,
        outer: keras.optimizers.Optimizer | None = None,
        compression: Policy | Compressor | str = Compression.none,
        controller: Controller | str | None = None,
        *,
        reduction: str | None = None,
        process_set: Members = None,
    ) -> None:
        super().__init__()
        self.every = every
        self.outer = keras.optimizers.SGD(1.0) if outer is None else outer
        self._given: dict[str, Any] = {
            "compression": compression,
            "controller": controller,
            "reduction": reduction,
        }
        self._process_set = process_set
        self._anchors: list[Any] = []
        self._of_model: keras.Model | None = None
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the anchors, from the first rank's weights, unless an earlier ``fit`` has."""
        if self._of_model is not None:
            if self._of_model is not self.model:
                raise StateError(
                    "a LocalSteps callback keeps anchors of one model: make another for this one"
                )
            return
        ranks = members(self._process_set)
        Together("LocalSteps", ranks, [f"every: {self.every}"]).do("check the model", self._check)
        model = self.model
        if len(ranks) > 1:
            broadcast_variables(model.variables, ranks[0], process_set=ProcessSet(ranks))
        self._anchors = [_anchor_of(variable) for variable in model.trainable_variables]
        self.outer = DistributedOptimizer(self.outer, process_set=ProcessSet(ranks), **self._given)
        self.outer.build(self._anchors)
        self._of_model = model

    def _check(self) -> tuple[None, None]:
        check_whole("every", self.every)
        if not self.model.built or not self.model.trainable_variables:
            raise ConfigError(
                "LocalSteps needs a model that is built: give it an Input, or call model.build(shape)"
            )
        if core_of(self.model.optimizer) is not None:
            raise ConfigError("the model's optimizer exchanges every gradient: compile with a plain one")
        if self.model.steps_per_execution != 1:
            raise ConfigError("LocalSteps counts batches: compile with steps_per_execution=1")
        if not isinstance(self.outer, keras.optimizers.Optimizer):
            raise ConfigError(f"outer must be a keras.optimizers.Optimizer, got {type(self.outer).__name__}")
        if self.outer.built or core_of(self.outer) is not None:
            raise ConfigError("outer must be new and not wrapped")
        return None, None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Average after the last batch of a round. Collective then."""
        self._batches += 1
        if self._batches % self.every == 0:
            own = self.model.trainable_variables
            moved = [
                tf.subtract(anchor, variable) for anchor, variable in zip(self._anchors, own, strict=True)
            ]
            self.outer.apply(moved, self._anchors)
            for anchor, variable in zip(self._anchors, own, strict=True):
                variable.assign(anchor)

    def statistics(self) -> Statistics:
        """Return this rank's counters since the start; ``steps`` counts exchanges."""
        return Statistics() if self._of_model is None else self.outer.statistics()


def _anchor_of(variable: Any) -> Any:
    """Return a variable of the same value, dtype and path, by which policies know it."""
    *scopes, name = variable.path.split("/")
    with ExitStack() as within:
        for scope in scopes:
            within.enter_context(keras.name_scope(scope))
        return keras.Variable(variable.numpy(), dtype=variable.dtype, name=name)
