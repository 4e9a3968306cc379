"""Keras' ``DistributedOptimizer`` and ``DistributedGradientTape`` keep the contract of all frontends."""

# ruff: noqa: E402

from __future__ import annotations

from typing import Any

import frontend_contract as contract
import numpy as np
import pytest
from batch import on_ranks

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")

import keras
from keras_checks import ENV

import gradcomp.tf as gc
from gradcomp.tf import tape as tapes

tapes.MOST_EXCHANGES = 1000  # every model is new


class Keras(contract.FrontendContract):
    name, gc = "keras", gc
    takes = (
        "op", "backward_passes_per_step", "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set",
        "reduction", "residuals", "layers",
    )  # fmt: skip

    def make_model(self) -> None:
        self.variables = [
            keras.Variable(np.zeros(shape, np.float32), name=f"layer{i}")
            for i, shape in enumerate(contract.SHAPES)
        ]

    def wrap(self, compression: Any = "none", **arguments: Any) -> None:
        self.state = gc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, **arguments)
        self.state.build(self.variables)

    def step(self, *passes: contract.Arrays) -> None:
        for gradients in passes:
            self.state.apply([tf.constant(each) for each in gradients])
        self.applied = [-variable.numpy() for variable in self.variables]
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, np.float32))

    def means(self) -> contract.Arrays:
        return self.applied


class Tape(Keras):
    name = "tape"
    takes = (
        "op", "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set", "reduction", "residuals",
        "layers",
    )  # fmt: skip

    def make_model(self) -> None:
        self.variables = [
            tf.Variable(tf.zeros(shape), name=f"layer{i}") for i, shape in enumerate(contract.SHAPES)
        ]

    def wrap(self, compression: Any = "none", **arguments: Any) -> None:
        self.arguments = {"compression": compression, **arguments}
        self.step([np.zeros(shape, np.float32) for shape in contract.SHAPES])

    def step(self, *passes: contract.Arrays) -> None:
        [gradients] = passes
        with gc.DistributedGradientTape(tf.GradientTape(), **self.arguments) as tape:
            pairs = zip(self.variables, gradients, strict=True)
            loss = tf.add_n([tf.reduce_sum(variable * gradient) for variable, gradient in pairs])
        self.applied = [mean.numpy() for mean in tape.gradient(loss, self.variables)]
        self.state = tapes.exchange_of(self.variables, tape._gradcomp)


FRONTENDS = {frontend.name: frontend for frontend in (Keras, Tape)}


@pytest.mark.parametrize(("frontend", "check", "case"), contract.cases(*FRONTENDS.values()))
@on_ranks(2, env=ENV)
def test_the_frontend_keeps_the_contract(frontend, check, case):
    contract.check(FRONTENDS[frontend](), check, case)
