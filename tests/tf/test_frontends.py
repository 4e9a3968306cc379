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

import gradcomp.tf as gc
from gradcomp.tf import tape as tapes

ENV = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
tapes.MOST_EXCHANGES = 1000  # every model is new


class Keras(contract.FrontendContract):
    name = "keras"
    takes = (
        "op", "backward_passes_per_step", "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set",
        "reduction", "residuals",
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

    def save(self, path: str) -> None:
        gc.save(path, self.state)

    def load(self, path: str) -> None:
        gc.load(path, self.state)


class Tape(Keras):
    name = "tape"
    takes = (
        "op", "gradient_predivide_factor", "groups", "sparse_as_dense", "process_set", "reduction", "residuals",
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
BOTH = pytest.mark.parametrize("frontend", FRONTENDS)


@pytest.mark.parametrize(("frontend", "case"), contract.bad_arguments(Keras, Tape))
@on_ranks(2, env=ENV)
def test_a_bad_argument_is_refused(frontend, case):
    contract.refuses(FRONTENDS[frontend](), case)


@BOTH
@on_ranks(2, env=ENV)
def test_a_bad_argument_of_one_rank_is_an_error_on_all(frontend):
    contract.refuses_on_one_rank(FRONTENDS[frontend]())


@BOTH
@on_ranks(2, env=ENV)
def test_a_factor_of_sums_is_refused(frontend):
    contract.refuses_factor_without_average(FRONTENDS[frontend]())


@pytest.mark.parametrize("argument", ["sparse_as_dense", "gradient_predivide_factor", "op"])
@BOTH
@on_ranks(2, env=ENV)
def test_arguments_that_differ_are_refused_by_all_and_named(frontend, argument):
    contract.refuses_what_differs(FRONTENDS[frontend](), argument)


@BOTH
@on_ranks(2, env=ENV)
def test_compression_that_differs_is_refused_by_all_and_the_layer_is_named(frontend):
    contract.refuses_compression_that_differs(FRONTENDS[frontend]())


@pytest.mark.parametrize(("frontend", "case"), contract.good_arguments(Keras, Tape))
@on_ranks(2, env=ENV)
def test_steps_have_the_means(frontend, case):
    contract.steps_with(FRONTENDS[frontend](), case)


@on_ranks(2, env=ENV)
def test_passes_are_summed():
    contract.sums_passes(Keras())


@BOTH
@on_ranks(2, env=ENV)
def test_a_saved_state_resumes_bit_for_bit(frontend):
    make = FRONTENDS[frontend]
    contract.resumes(make(), make(), gc.broadcast_object(contract.new_directory()))
