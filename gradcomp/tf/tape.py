"""``DistributedGradientTape``: a tape whose gradients are means over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import tensorflow as tf

from gradcomp.compress import Compression, Compressor, Policy, as_policy
from gradcomp.control import Controller
from gradcomp.core.config import refuse_removed
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.job import runtime, settings
from gradcomp.job.launch import Ranks
from gradcomp.job.process_sets import Members, members
from gradcomp.job.reduce_op import Average, ReduceOp, Sum
from gradcomp.job.report import metrics_of
from gradcomp.job.state import Runtime
from gradcomp.tf.bridge import plain
from gradcomp.tf.collectives import grouped_allreduce
from gradcomp.tf.exchange import Exchange
from gradcomp.tf.layers import specs
from gradcomp.tf.local import Local, check_ignored
from gradcomp.tf.sensitivity import Sensitivity, check_sensitivity

Tape = TypeVar("Tape", bound="tf.GradientTape")

#: Most exchanges that tapes may have. Each keeps its variables, residuals and a communicator until shutdown().
MOST_EXCHANGES = 32


@plain
def DistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Policy | Compressor | str = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Members = None,
    scale_local_gradients: bool = True,
    *,
    reduction: str | None = None,
    controller: Controller | str | None = None,
    layers: bool = True,
    residuals: str | None = None,
    sensitivity: Sensitivity | None = None,
) -> Tape:
    """Make ``gradtape.gradient(loss, variables)`` return gradients averaged over ranks; returns the same tape.

        g_mean = (1/N) sum over ranks of g_i, each layer compressed as ``compression`` says

    A tape is made anew in every step, but residuals and plans last. They belong to the variables: all calls with the
    same variables and arguments share one :class:`Exchange`, which the first of them makes. This works in eager mode,
    and inside tf.function, which is traced once.

    Args:
        gradtape: a ``tf.GradientTape``; changed in place.
        device_dense: Horovod's argument without effect.
        device_sparse: Horovod's argument without effect.
        compression: a compressor, its string form, or a :class:`gradcomp.Policy` of them by layer. ``"auto"`` chooses
            the least compression that hides the communication on this network, see
            :class:`gradcomp.control.auto.Auto`.
        op: ``Average`` or ``Sum`` over ranks. Any other makes an allreduce of the gradients, see
            :func:`gradcomp.tf.allreduce`, with the compressions of that function.
        gradient_predivide_factor: gradients are divided by it before the exchange, and the mean is multiplied by it
            after.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients; else their rows are gathered, uncompressed.
        num_groups: Horovod's older spelling of ``groups``.
        groups: Horovod's argument without effect: exchange buckets form by themselves, and no value depends on them.
        process_set: the ranks to average over, if not all. Only these ranks call this.
        scale_local_gradients: divide gradients of variables that ``register_local_source`` named by the number of
            ranks; they are not exchanged.
        reduction: the algorithm that adds codes over ranks, if not that of ``init()`` or GRADCOMP_REDUCTION.
        controller: a controller that changes the levels of layers while training runs, such as
            ``gradcomp.LGreCo(every_steps=500)``, or its string form.
        layers: False compresses each exchange bucket as one vector, as a library beneath the framework has to, which
            knows no layers: biases and norms too, at one level, without feedback. See :class:`gradcomp.Flat`; it takes
            a quantiser, and no policy or controller.
        residuals: removed; anything but None raises a ConfigError that says what to do instead.
        sensitivity: the training loss on a batch, for ``controller=LGreCo(metric="loss")``, with the optimizer that
            applies the means: ``Sensitivity(model, loss, optimizer=optimizer)``. Call its ``measure()`` after each
            step.

    ``gradient()`` is collective. Each call is a step, so apply its means. Wire: see the compressor;
    uncompressed, 2 d (N-1)/N bytes per rank. State: residuals where the compressor keeps them, 8 bytes an element.
    Raises ConfigError for bad arguments, for sources that are not variables and under ``jit_compile=True``,
    PlanMismatchError on every rank if the ranks differ, StateError before ``init()``, for a variable of which only
    other ranks have a gradient, and if every step has new variables. Arguments mean what they mean in Horovod.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigError(f"expected a tf.GradientTape, got {type(gradtape).__name__}")
    if isinstance(gradtape, _Distributed):
        raise StateError("this tape is already a DistributedGradientTape; wrap a tape once only")
    refuse_removed("residuals", residuals)
    check_ignored(num_groups, groups, device_dense=device_dense, device_sparse=device_sparse)
    given = _Arguments(
        as_policy(compression) if layers and op in (Average, Sum) else compression,
        1,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        reduction,
        controller,
        layers=layers,
        sensitivity=sensitivity,
        ranks=members(process_set),
        local=Local(None, scale_local_gradients),
    )
    kind = type(gradtape)
    gradtape.__dict__["_gradcomp"] = given
    gradtape.__class__ = type(
        kind.__name__, (_Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    return gradtape


@plain
def PartialDistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Policy | Compressor | str = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Members = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **arguments: Any,
) -> Tape:
    """Make a distributed tape, but keep the gradients of the variables of ``local_layers`` on each rank.

    ``local_layers`` is a layer of Keras or a list of them. ``arguments`` are gradcomp's own, by keyword.
    Otherwise this is :func:`DistributedGradientTape`.
    """
    local = Local(local_layers, scale_local_gradients)
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients, **arguments,
    )  # fmt: skip
    tape.__dict__["_gradcomp"] = replace(tape.__dict__["_gradcomp"], local=local)
    return tape


@dataclass(frozen=True)
class _Arguments(settings.Arguments):
    ranks: Ranks = ()
    local: Local = field(default_factory=Local, compare=False)

    def check(self) -> Policy:
        check_sensitivity(self.sensitivity)
        if self.sensitivity is not None and self.sensitivity.optimizer is None:
            raise ConfigError(
                "sensitivity: a tape does not know the optimizer that applies its means: give "
                "Sensitivity(model, loss, optimizer=optimizer)"
            )
        return super().check()

    def means(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return the means over ranks of the gradients of these variables."""
        if self.op in (Average, Sum):
            return exchange_of(variables, self).exchange(gradients)
        if self.gradient_predivide_factor != 1.0 or not self.layers or self.sensitivity is not None:
            raise ConfigError(
                "gradient_predivide_factor needs op=Average if it is not 1, and so do layers=False and sensitivity="
            )
        given = [
            tf.convert_to_tensor(each) if self.sparse_as_dense and each is not None else each
            for each in gradients
        ]
        reduced = iter(
            grouped_allreduce(
                [each for each in given if each is not None],
                compression=self.compression,
                op=self.op,
                process_set=self.process_set,
            )
        )
        return [None if each is None else next(reduced) for each in given]


class _Distributed:
    """The methods that wrapping adds to a tape's class, or replaces in it."""

    _gradcomp: _Arguments

    @plain
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the means over ranks of the gradients of ``target`` with respect to ``sources``.

        All sources are variables. ``use_generic_names`` is Horovod's argument without effect.
        """
        if isinstance(unconnected_gradients, bool):  # Horovod has use_generic_names at this position
            unconnected_gradients = tf.UnconnectedGradients.NONE
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        given, variables, gradients = self._gradcomp, tf.nest.flatten(sources), tf.nest.flatten(own)
        stays = [variable in given.local for variable in variables]
        results = [
            given.local.gradient(gradient, len(given.ranks)) if own else gradient
            for gradient, own in zip(gradients, stays, strict=True)
        ]
        shared = [place for place, own in enumerate(stays) if not own]
        if shared:
            means = given.means(
                [variables[place] for place in shared], [gradients[place] for place in shared]
            )
            for place, mean in zip(shared, means, strict=True):
                results[place] = mean
        return tf.nest.pack_sequence_as(sources, results)

    def compression_metrics(self, sources: Any = None) -> dict[str, float]:
        """Return numbers for a logger, see :meth:`gradcomp.tf.DistributedOptimizer.compression_metrics`.

        They are of the exchange that all tapes with these arguments and variables share. So a tape that was wrapped
        outside of a tf.function, with the same arguments, reads what the tapes inside of it exchange. Before the first
        exchange the ratio is 1 and all other values are 0. Local.

        Args:
            sources: the variables that are given to ``gradient()``, needed only where tapes with the same arguments
                exchange the gradients of several lists of variables.

        Raises StateError if there are several such lists and ``sources`` is None.
        """
        given, wanted = self._gradcomp, None
        if sources is not None:
            wanted = tuple(id(each) for each in tf.nest.flatten(sources) if each not in given.local)
        found = [
            exchange
            for variables, exchanges in (_known if _runtime is runtime.current() else {}).items()
            for arguments, exchange in exchanges
            if arguments == given and wanted in (None, variables)
        ]
        if len(found) > 1:
            raise StateError(
                f"tapes with these arguments have {len(found)} exchanges: give compression_metrics() the variables "
                "that gradient() gets"
            )
        return metrics_of(found[0].exchanger if found else None)

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of this variable on this rank."""
        self._gradcomp.local.add(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Return pairs of variables and gradients: those that are local, and those that were exchanged."""
        found = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(found), strict=True))
        local = self._gradcomp.local
        return [each for each in pairs if each[0] in local], [each for each in pairs if each[0] not in local]


#: The exchanges of the last runtime by the ids of their variables, which they keep alive.
_known: dict[tuple[int, ...], list[tuple[_Arguments, Exchange]]] = {}
_runtime: Runtime | None = None


def exchange_of(variables: Sequence[Any], given: _Arguments) -> Exchange:
    """Return the exchange of these variables and arguments; collective the first time."""
    global _runtime
    if _runtime is not runtime.current():
        _runtime = runtime.current()
        _known.clear()
    found = _known.setdefault(tuple(map(id, variables)), [])
    for arguments, exchange in found:
        if arguments == given:
            return exchange
    if len({id(variable) for variable in variables}) < len(variables):
        raise ConfigError("the sources contain a variable more than once; pass each variable once")
    count = sum(map(len, _known.values()))
    if count >= MOST_EXCHANGES:
        names = ", ".join(layer.name for layer in specs(variables)[:3])
        raise StateError(
            f"tapes have {count} exchanges already, and this one has other variables or arguments "
            f"({names}{', ...' if len(variables) > 3 else ''}): make the model and its variables once, not in every "
            "step"
        )
    if _runtime.network.member is not None:
        raise ConfigError(
            "a tape cannot exchange in an elastic job: wrap the optimizer, and give the model to a KerasState"
        )
    with tf.init_scope():
        applies = None if given.sensitivity is None else given.sensitivity.optimizer
        exchange = Exchange(variables, given, optimizer=getattr(applies, "inner_optimizer", applies))
    if count:
        runtime.logger.warning(
            "a DistributedGradientTape has other variables, or other arguments, than earlier ones: it begins an "
            "exchange of its own (number %d), without their residuals",
            count + 1,
        )
    found.append((given, exchange))
    return exchange
