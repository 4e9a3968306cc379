"""``LocalSteps``: a Keras callback that averages what ranks have learned once in many batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy
from gradcomp.compress.checks import check_number, check_whole
from gradcomp.control import Controller
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import balanced_parts
from gradcomp.core.trace import Statistics
from gradcomp.job import runtime
from gradcomp.job.all_or_none import Together
from gradcomp.job.process_sets import Members, ProcessSet, members
from gradcomp.tf.keras_model import core_of
from gradcomp.tf.objects import broadcast_variables
from gradcomp.tf.optimizer import DistributedOptimizer


class Fragment:
    """Variables that are exchanged together: their anchors, the outer optimizer, and when they are mixed next.

    ``optimizer`` is a DistributedOptimizer of the anchors, whose gradients are the pseudo-gradients.
    """

    def __init__(self, variables: Sequence[Any], optimizer: Any) -> None:
        self.variables = list(variables)
        self.anchors = [_anchor_of(variable) for variable in variables]
        self.optimizer = optimizer
        optimizer.build(self.anchors)
        #: The batch after which the outer weights are mixed in; None if no exchange has begun since they were.
        self.due: int | None = None
        #: The pseudo-gradients of an exchange that is under way; empty if there is none.
        self._moved: list[Any] = []

    def begin(self) -> None:
        """Start to exchange anchor minus weight. Nothing waits."""
        self._moved = [tf.subtract(anchor, own) for anchor, own in self._pairs()]
        rate = tf.convert_to_tensor(self.optimizer.learning_rate)
        core_of(self.optimizer).exchange.begin(self._moved, rate)

    def land(self) -> None:
        """Wait for the mean, and let the outer optimizer step on it. It does not depend on this rank's weights."""
        moved, self._moved = self._moved, []
        if moved:
            self.optimizer.apply(moved, self.anchors)

    def drop(self) -> None:
        """Forget an exchange that is under way: another exchange took its place."""
        self._moved = []

    def mix(self, share: float) -> None:
        """Make the weights ``share`` of themselves and the rest of their anchors."""
        self.land()
        for anchor, own in self._pairs():
            own.assign(anchor + share * (own - anchor) if share else anchor)
        self.due = None

    def _pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.anchors, self.variables, strict=True))


class LocalSteps(keras.callbacks.Callback):
    """Let every rank train by itself, and average what has changed after every ``every`` batches.

        D_r = anchor - theta_r                      the pseudo-gradient of rank r
        anchor <- outer step with mean(D_r)         on all ranks
        theta_r <- anchor                           or, with a delay, a theta_r + (1 - a) anchor

    The model's own optimizer stays a plain one, whose state is each rank's own, as are weights that are not trained.
    Pseudo-gradients take the way of gradients: all compressors, policies, controllers and reductions work.

        model.fit(data, callbacks=[gc.LocalSteps(every=30, outer=keras.optimizers.SGD(0.7, 0.9, nesterov=True))])

    Args:
        every: the batches of a round. Rounds go on from one ``fit`` to the next.
        outer: the optimizer that steps on the mean of pseudo-gradients, for anchors of its own. A learning rate that is
            not a schedule may be assigned to at any time. The default, ``SGD(1.0)``, makes the anchor the mean of the
            ranks' weights.
        compression: as in :func:`gradcomp.tf.DistributedOptimizer`; so are ``controller`` and ``reduction``.
        fragments: in how many parts, of consecutive variables with about as many elements, the model is exchanged.
            Part i of P is exchanged ``every`` (i+1) // P batches after the beginning of each round.
        delay: how many further batches are trained on while an exchange is under way, at most ``every``. The mean of
            what had changed at batch t is applied after batch t + ``delay``.
        mixing: the share a of a rank's own weights where ``delay`` is not 0.
        process_set: the ranks to average over, if not all.

    Collective when training begins, where all ranks get the weights of the first, and after every ``every``-th batch
    (batch number t + ``delay``). All ranks must train on equally many batches, or use :func:`join` or
    :class:`gradcomp.tf.callbacks.Join` with this callback. Wire: once in ``every`` batches what a
    step of :func:`gradcomp.tf.DistributedOptimizer` sends with this compression. State: :meth:`state_dict` has all that
    the model has not.
    Raises ConfigError on every rank when ``fit`` begins: for wrong arguments, for a model that is not built or whose
    optimizer exchanges gradients, and for ``steps_per_execution`` of more than 1. PlanMismatchError if the ranks
    differ.
    Source: Douillard et al. 2023 (DiLoCo); Douillard et al. 2025 (Streaming DiLoCo), for fragments, delay and mixing.
    """

    def __init__(
        self,
        every: int = 30,
        outer: keras.optimizers.Optimizer | None = None,
        compression: Policy | Compressor | str = Compression.none,
        controller: Controller | str | None = None,
        *,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.5,
        reduction: str | None = None,
        process_set: Members = None,
    ) -> None:
        super().__init__()
        self.every, self.delay, self._mixing, self._parts = every, delay, mixing, fragments
        self.outer = keras.optimizers.SGD(1.0) if outer is None else outer
        self._given: dict[str, Any] = {
            "compression": compression,
            "controller": controller,
            "reduction": reduction,
        }
        self._process_set = process_set
        self._of_model: keras.Model | None = None
        self._batches = 0
        self._loaded: dict[str, Any] | None = None
        self.fragments: list[Fragment] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the anchors, unless an earlier ``fit`` has."""
        if self._of_model is None and runtime.current().network.member is not None:
            raise ConfigError(
                "LocalSteps in an elastic job: give the callback to KerasState(model, steps=callback)"
            )
        self.build(self.model)

    def build(self, model: keras.Model) -> None:
        """Make the anchors of a compiled model from the first rank's weights, once.

        Collective; in an elastic job local: :class:`gradcomp.tf.elastic.KerasState` calls it there, and sends the
        weights. Raises what the class says.
        """
        if self._of_model is not None:
            if self._of_model is not model:
                raise StateError(
                    "a LocalSteps callback keeps anchors of one model: make another for this one"
                )
            return
        ranks = members(self._process_set)
        elastic = runtime.current().network.member is not None
        given = [f"every: {self.every}", f"fragments: {self._parts}", f"delay: {self.delay}"]
        given += [f"mixing: {self._mixing}", f"a state was loaded: {self._loaded is not None}"]
        together = Together("LocalSteps", (runtime.rank(),) if elastic else ranks, given)
        together.do("check the model", lambda: self._check(model))
        own = model.trainable_variables
        if len(ranks) > 1 and self._loaded is None and not elastic:
            broadcast_variables(model.variables, ranks[0], process_set=ProcessSet(ranks))
        parts = balanced_parts([int(np.prod(variable.shape)) for variable in own], self._parts)
        self.fragments = [Fragment(own[begin:end], self._outer(ProcessSet(ranks))) for begin, end in parts]
        self._of_model = model
        if self._loaded is not None:
            self.load_state_dict(self._loaded)
            self._loaded = None

    def _outer(self, ranks: ProcessSet) -> Any:
        own = type(self.outer).from_config(self.outer.get_config())
        return DistributedOptimizer(own, process_set=ranks, **self._given)

    def _check(self, model: keras.Model) -> tuple[None, None]:
        check_whole("every", self.every)
        check_whole("fragments", self._parts, 1, self.every)
        check_whole("delay", self.delay, 0, self.every)
        check_number("mixing", self._mixing, "[0, 1)")
        if not model.built or not model.trainable_variables:
            raise ConfigError(
                "LocalSteps needs a model that is built: give it an Input, or call model.build(shape)"
            )
        if (count := len(model.trainable_variables)) < self._parts:
            raise ConfigError(
                f"the model has {count} trainable variables, too few for {self._parts} fragments"
            )
        if core_of(model.optimizer) is not None:
            raise ConfigError("the model's optimizer exchanges every gradient: compile with a plain one")
        if model.steps_per_execution != 1:
            raise ConfigError("LocalSteps counts batches: compile with steps_per_execution=1")
        if not isinstance(self.outer, keras.optimizers.Optimizer):
            raise ConfigError(f"outer must be a keras.optimizers.Optimizer, got {type(self.outer).__name__}")
        if (
            isinstance(self.outer, keras.optimizers.LossScaleOptimizer)
            or self.outer.gradient_accumulation_steps
        ):
            raise ConfigError(
                "outer steps on every mean, without a loss scale and gradient_accumulation_steps"
            )
        if self.outer.built or core_of(self.outer) is not None:
            raise ConfigError("outer must be new and not wrapped")
        return None, None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Average what is due. Collective after every ``every``-th batch."""
        self._batches += 1
        share = self._mixing if self.delay else 0.0
        for number, fragment in enumerate(self.fragments):
            if fragment.due == self._batches:
                fragment.mix(share)
            if (self._batches - self.every * (number + 1) // len(self.fragments)) % self.every == 0:
                self._share_rate(fragment.optimizer)
                fragment.begin()
                fragment.due = self._batches + self.delay
                if not self.delay:
                    fragment.mix(share)

    def _share_rate(self, optimizer: Any) -> None:
        if not isinstance(self.outer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            optimizer.learning_rate = float(self.outer.learning_rate)

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for exchanges that are under way; weights are mixed in a later ``fit``, when it is time. Collective."""
        self.settle()

    def settle(self) -> None:
        """Wait for exchanges that are under way, and step on their means. Collective."""
        for fragment in self.fragments:
            fragment.land()

    @property
    def variables(self) -> list[Any]:
        """The anchors and the outer optimizers' variables, which are equal on all ranks after every exchange."""
        return [
            variable for each in self.fragments for variable in (*each.anchors, *each.optimizer.variables)
        ]

    @property
    def progress(self) -> list[int]:
        """The place in the round, equal on all ranks: batches so far, and when fragments are mixed (-1: not)."""
        dues = [-1 if fragment.due is None else fragment.due for fragment in self.fragments]
        return [self._batches, *dues]

    @progress.setter
    def progress(self, numbers: Sequence[int]) -> None:
        self._batches, *dues = numbers
        for fragment, due in zip(self.fragments, dues, strict=True):
            fragment.due = None if due < 0 else due

    def statistics(self) -> Statistics:
        """Return this rank's counters since the start, of all fragments; ``steps`` counts exchanges."""
        found = [fragment.optimizer.statistics() for fragment in self.fragments]
        total = Statistics()
        for each in fields(total):
            setattr(total, each.name, sum(getattr(one, each.name) for one in found))
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state beside the model: anchors, outer optimizers, residuals, the place in the round.

        With it and this rank's whole model, as ``model.save`` writes it, training continues bit for bit on the same
        rank of as many ranks. All values are arrays, numbers and strings. Collective where an exchange is under way,
        which it waits for. StateError before the first ``fit``.
        """
        if self._of_model is None:
            raise StateError("LocalSteps has no state before the first fit")
        self.settle()
        return {
            "progress": self.progress,
            "variables": [variable.numpy() for variable in self.variables],
            "compression": [fragment.optimizer.compression_state() for fragment in self.fragments],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank; before the first ``fit`` on every rank. Local.

        Before the first ``fit`` nothing is checked yet, and weights are then not sent: every rank must have loaded its
        own model. StateError for a state of another model.
        """
        if self._of_model is None:
            self._loaded = state_dict
            return
        shapes = [
            [tuple(each.shape) for each in values] for values in (self.variables, state_dict["variables"])
        ]
        if shapes[0] != shapes[1] or len(self.fragments) != len(state_dict["compression"]):
            raise StateError("the state is that of another model or outer optimizer, or of other fragments")
        self.settle()
        for variable, value in zip(self.variables, state_dict["variables"], strict=True):
            variable.assign(value)
        for fragment, compression in zip(self.fragments, state_dict["compression"], strict=True):
            fragment.optimizer.load_compression_state(compression)
        self.progress = state_dict["progress"]


def _anchor_of(variable: Any) -> Any:
    """Return a variable of the same value, dtype and path, by which policies know it."""
    *scopes, name = variable.path.split("/")
    with ExitStack() as within:
        for scope in scopes:
            within.enter_context(keras.name_scope(scope))
        return keras.Variable(variable.numpy(), dtype=variable.dtype, name=name)
