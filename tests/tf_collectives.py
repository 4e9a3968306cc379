"""gradcomp.tf as the checks of collectives call it, in eager mode and inside tf.function, and the list of all checks.

``main`` runs them in one process of a world, and writes what came of each, by name and mode, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import collective_adapters
import collective_checks
import collective_refusals
import numpy as np
import pytest
import tensorflow as tf
from collective_adapters import Check, Collectives
from without_inline import nothing_inline_among

import gradcomp.tf as gc
from gradcomp.tf import bridge


class TensorFlowCollectives(Collectives):
    """gradcomp.tf, to which Horovod's names are the same functions. ``graph``: whether calls are in a tf.function."""

    gc = gc

    def __init__(self, graph: bool) -> None:
        super().__init__()
        self.graph = graph

    def mode(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return tf.function(function) if self.graph else function

    def tensor(self, array: np.ndarray) -> Any:
        return tf.constant(array)

    def array(self, tensor: Any) -> np.ndarray:
        return np.asarray(tensor.numpy())

    @contextmanager
    def raises(self, kind: type[Exception], *texts: str) -> Iterator[None]:
        """An error while an op runs is TensorFlow's, with the class and the message in its text."""
        with pytest.raises((kind, tf.errors.OpError)) as caught:
            yield
        text = str(caught.value)
        assert isinstance(caught.value, kind) or f"{kind.__name__}: " in text, text
        assert all(part in text for part in texts), text

    def gradient(
        self, function: Callable[[Any], Any], array: np.ndarray, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        def both(x: Any, w: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = function(x)
                loss = tf.reduce_sum(result * w)
            return result, tape.gradient(loss, x)

        return self(both, array, weight)


#: By name: the check, and the modes in which it runs.
CHECKS: dict[str, tuple[Check, tuple[str, ...]]] = {}
MODES = ("eager", "graph")


def check(*modes: str) -> Callable[[Check], Check]:
    """Register a check, for both modes if none is named."""

    def register(function: Check) -> Check:
        assert function.__name__ not in CHECKS
        CHECKS[function.__name__] = function, modes or MODES
        return function

    return register


@check("graph")
def the_first_call_is_traced_once(c: Collectives) -> None:
    assert bridge._turn is None, "this must be the first check in a graph"
    call = tf.function(gc.allreduce)
    for _ in range(2):
        call(tf.ones(1))
    assert call.experimental_get_tracing_count() == 1


for function in (*collective_checks.CHECKS.values(), *collective_refusals.CHECKS.values()):
    check()(function)


def calling(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """The call, for arguments that tf.function would look into."""
    return lambda: function(*arguments)


def equal(left: Any, right: Any) -> None:
    collective_adapters.same(np.asarray(left), np.asarray(tf.convert_to_tensor(right)))


def main(directory: str, inter_op_threads: str) -> None:
    """Run all; ``inter_op_threads``: 0 for as many as TensorFlow wants."""
    tf.config.threading.set_inter_op_parallelism_threads(int(inter_op_threads))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    gc.init(timeout_seconds=60, stall_warning_seconds=1, log_level="warning")
    nothing_inline_among(3, gc.size())
    of_mode = {mode: TensorFlowCollectives(mode == "graph") for mode in MODES}
    outcomes = {}
    for name, (function, modes) in CHECKS.items():
        # In the larger world what is the same in both modes is looked at in one.
        for mode in modes if gc.size() == 2 else modes[-1:]:
            outcomes[f"{name} {mode}"] = collective_adapters.outcome(function, of_mode[mode])
    (Path(directory) / f"{gc.rank()}.json").write_text(json.dumps(outcomes))
    gc.shutdown()
