"""Keras' LocalSteps: ranks train by themselves, and what they average is what one process computes for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batch import on_ranks

pytest.importorskip("tensorflow")

import keras
from keras_checks import ENV, assert_close, assert_equal

import gradcomp.tf as gc

BATCHES, ROWS = 7, 4


def model_of(**compiling: Any) -> Any:
    keras.utils.set_random_seed(3)
    one = keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(17, "tanh", name="first"), keras.layers.Dense(3, name="last")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    one.compile(keras.optimizers.AdamW(0.02), loss, **compiling)
    return one


def data_of(rank: int) -> tuple[Any, Any]:
    drawn = np.random.default_rng(10 + rank)
    return drawn.standard_normal((BATCHES * ROWS, 6)).astype("float32"), drawn.integers(0, 3, BATCHES * ROWS)


def fit(one: Any, rank: int, *callbacks: Any) -> None:
    x, y = data_of(rank)
    one.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=list(callbacks))


def reference(world: int, every: int, rate: float, momentum: float) -> tuple[list[Any], list[Any]]:
    """The ranks' models, and the anchors, after one pass over the data."""
    models = [model_of() for _ in range(world)]
    anchors = [variable.numpy().copy() for variable in models[0].trainable_variables]
    velocity = [np.zeros_like(anchor) for anchor in anchors]
    for batch in range(BATCHES):
        for rank, one in enumerate(models):
            x, y = (each[batch * ROWS : (batch + 1) * ROWS] for each in data_of(rank))
            one.train_on_batch(x, y)
        if (batch + 1) % every:
            continue
        for i, anchor in enumerate(anchors):
            mean = sum(anchor - one.trainable_variables[i].numpy() for one in models) / world
            # Keras' Nesterov: v <- m v - lr g;  w <- w + m v - lr g
            velocity[i] = momentum * velocity[i] - rate * mean
            anchors[i] = anchor + (momentum * velocity[i] - rate * mean if momentum else -rate * mean)
            for one in models:
                one.trainable_variables[i].assign(anchors[i])
    return models, anchors


def check(every: int, rate: float = 1.0, momentum: float = 0.0) -> None:
    one = model_of()
    outer = keras.optimizers.SGD(rate, momentum, nesterov=momentum > 0) if rate != 1.0 else None
    steps = gc.LocalSteps(every, outer)
    fit(one, gc.rank(), steps)
    models, anchors = reference(gc.size(), every, rate, momentum)
    assert_close(one.trainable_variables, models[gc.rank()].trainable_variables)
    assert_close(steps._anchors, anchors)
    assert steps.statistics().steps == (BATCHES // every if gc.size() > 1 else 0)


@on_ranks(1, env=ENV)
def test_one_process():
    check(2)
    check(3, 0.7, 0.9)


@on_ranks(2, env=ENV)
def test_two_ranks():
    check(2)
    check(3, 0.7, 0.9)
    check(1)


@on_ranks(3, env=ENV)
def test_three_ranks():
    check(2, 0.5, 0.5)


@on_ranks(2, env=ENV)
def test_weights_are_equal_after_a_round_with_compression_by_layer():
    one = model_of()
    policy = gc.Policy(gc.TopK(0.1), filter=gc.Filter(exclude=("last/*",), min_elements=2))
    steps = gc.LocalSteps(BATCHES, compression=policy)
    fit(one, gc.rank(), steps)
    theirs = gc.allgather_object([variable.numpy() for variable in one.trainable_variables])
    assert_equal(theirs[0], theirs[1])
    assert [name for names, _ in steps.outer.buckets() for name in names] != []
    assert {variable.path for variable in steps._anchors} == {v.path for v in one.trainable_variables}
    fit(one, gc.rank(), steps)  # rounds go on
    assert steps.statistics().steps == 2


@on_ranks(2, env=ENV)
def test_all_ranks_begin_with_the_first_ones_weights():
    one = model_of()
    if gc.rank() == 1:
        for variable in one.trainable_variables:
            variable.assign_add(variable + 1)
    fit(one, 0, gc.LocalSteps(100))
    alone = model_of()
    fit(alone, 0)
    assert_close(one.trainable_variables, alone.trainable_variables)


REFUSED = {
    "every": ({"every": 0}, {}, "every must be a whole number"),
    "outer": ({"outer": "sgd"}, {}, "outer must be a keras.optimizers.Optimizer"),
    "steps per execution": ({}, {"steps_per_execution": 2}, "steps_per_execution=1"),
    "compression": ({"compression": "quantize:bits=9"}, {}, "bits"),
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2, env=ENV)
def test_what_cannot_work_is_refused_on_every_rank(what: str):
    arguments, compiling, says = REFUSED[what]
    with pytest.raises(gc.ConfigError, match=says):
        fit(model_of(**compiling), gc.rank(), gc.LocalSteps(**arguments))


@on_ranks(2, env=ENV)
def test_other_models_and_ranks_that_differ_are_refused():
    with pytest.raises(gc.PlanMismatchError, match="every"):
        fit(model_of(), gc.rank(), gc.LocalSteps(2 + gc.rank()))
    wrapped = model_of()
    wrapped.compile(gc.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(gc.ConfigError, match="exchanges every gradient"):
        fit(wrapped, gc.rank(), gc.LocalSteps())
    unbuilt = keras.Sequential([keras.layers.Dense(3)])
    unbuilt.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(gc.ConfigError, match="is built"):
        fit(unbuilt, gc.rank(), gc.LocalSteps())
    steps = gc.LocalSteps()
    fit(model_of(), gc.rank(), steps)
    with pytest.raises(gc.StateError, match="anchors of one model"):
        fit(model_of(), gc.rank(), steps)
