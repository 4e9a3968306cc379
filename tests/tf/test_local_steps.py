"""Keras' LocalSteps: ranks train by themselves, and what they average is what one process computes for all of them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from batch import on_ranks
from elastic_job import job
from preloaded import TENSORFLOW

pytest.importorskip("tensorflow")

import keras
from keras_checks import ENV, assert_close, assert_equal

import gradcomp.tf as gc

BATCHES, ROWS = 7, 4
#: Fragments of the model's four variables: the first kernel has more elements than the rest.
HALVES = [range(1), range(1, 4)]


def model_of(**compiling: Any) -> Any:
    keras.utils.set_random_seed(3)
    one = keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(17, "tanh", name="first"), keras.layers.Dense(3, name="last")],
        name="net",
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


def reference(
    world: int, every: int, rate: float, momentum: float, parts: list[range], delay: int, mixing: float
) -> tuple[list[Any], list[Any]]:
    """The ranks' models, and the anchors, after one pass over the data."""
    models = [model_of() for _ in range(world)]
    anchors = [variable.numpy().copy() for variable in models[0].trainable_variables]
    velocity = [np.zeros_like(anchor) for anchor in anchors]
    means: dict[int, dict[int, Any]] = {}  # of exchanges under way: by part, then by variable

    def land(number: int) -> None:
        for i, mean in means.pop(number, {}).items():
            # Keras' Nesterov: v <- m v - lr g;  w <- w + m v - lr g
            velocity[i] = momentum * velocity[i] - rate * mean
            anchors[i] = anchors[i] + (momentum * velocity[i] - rate * mean if momentum else -rate * mean)

    def mix(number: int) -> None:
        land(number)
        for one in models:
            for i in parts[number]:
                own = one.trainable_variables[i]
                own.assign(mixing * own + (1 - mixing) * anchors[i] if delay else anchors[i])

    for batch in range(1, BATCHES + 1):
        for rank, one in enumerate(models):
            x, y = (each[(batch - 1) * ROWS : batch * ROWS] for each in data_of(rank))
            one.train_on_batch(x, y)
        for number, part in enumerate(parts):
            begun = batch - every * (number + 1) // len(parts)
            if number in means and (begun - delay) % every == 0:
                mix(number)
            if begun % every == 0:
                own = [[one.trainable_variables[i].numpy() for one in models] for i in part]
                means[number] = {i: anchors[i] - sum(each) / world for i, each in zip(part, own, strict=True)}
                if not delay:
                    mix(number)
    for number in range(len(parts)):
        land(number)
    return models, anchors


def check(
    every: int, rate: float = 1.0, momentum: float = 0.0, parts: list[range] | None = None, **others: Any
) -> None:
    one = model_of()
    parts = parts or [range(4)]
    outer = keras.optimizers.SGD(rate, momentum, nesterov=momentum > 0) if rate != 1.0 else None
    steps = gc.LocalSteps(every, outer, fragments=len(parts), **others)
    fit(one, gc.rank(), steps)
    delay, mixing = others.get("delay", 0), others.get("mixing", 0.5)
    models, anchors = reference(gc.size(), every, rate, momentum, parts, delay, mixing)
    assert_close(one.trainable_variables, models[gc.rank()].trainable_variables)
    assert_close([each for fragment in steps.fragments for each in fragment.anchors], anchors)
    due = [BATCHES - every * (number + 1) // len(parts) for number in range(len(parts))]
    assert steps.statistics().steps == (sum(1 + d // every for d in due) if gc.size() > 1 else 0)


@on_ranks(1, env=ENV)
def test_one_process():
    check(2)
    check(3, 0.7, 0.9)


@on_ranks(2, env=ENV)
def test_two_ranks():
    check(2)
    check(3, 0.7, 0.9)
    check(1)
    check(2, 0.7, 0.9, HALVES)
    check(3, 0.7, 0.9, HALVES, delay=1)
    check(2, delay=2, mixing=0.25)


@on_ranks(3, env=ENV)
def test_three_ranks():
    check(2, 0.5, 0.5, HALVES, delay=1, mixing=0.0)


@on_ranks(2, env=ENV)
def test_weights_are_equal_after_a_round_with_compression_by_layer():
    one = model_of()
    policy = gc.Policy(gc.TopK(0.1), filter=gc.Filter(exclude=("last/*",), min_elements=2))
    steps = gc.LocalSteps(BATCHES, compression=policy)
    fit(one, gc.rank(), steps)
    theirs = gc.allgather_object([variable.numpy() for variable in one.trainable_variables])
    assert_equal(theirs[0], theirs[1])
    assert [name for names, _ in steps.fragments[0].optimizer.buckets() for name in names] != []
    assert {variable.path for variable in steps.fragments[0].anchors} == {
        v.path for v in one.trainable_variables
    }
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


@on_ranks(2, env=ENV)
def test_presets_are_settings_of_local_steps():
    values = gc.Quantize(2, bucket_size=64, rounding="nearest")
    everything = gc.Filter(exclude_kinds=(), min_elements=0, min_dimensions=0)
    policy = gc.Policy(gc.ChunkedTopK(0.1, 64, 0.9, values=values), filter=everything)
    nesterov = keras.optimizers.SGD(0.5, 0.8, nesterov=True)
    pairs = [
        (gc.DiLoCo(2, outer_lr=0.5, outer_momentum=0.8, delay=1), gc.LocalSteps(2, nesterov, delay=1)),
        (gc.SparseLoCo(2, density=0.1, chunk=64, decay=0.9), gc.LocalSteps(2, compression=policy)),
    ]
    for preset, written_out in pairs:
        models = model_of(), model_of()
        fit(models[0], gc.rank(), preset)
        fit(models[1], gc.rank(), written_out)
        assert_equal(models[0].trainable_variables, [each.numpy() for each in models[1].trainable_variables])
    assert gc.SparseLoCo().every == 15
    with pytest.raises(gc.ConfigError, match="bits must be"):
        gc.SparseLoCo(bits=9)


@pytest.mark.parametrize("delay", [0, 2])
@on_ranks(2, env=ENV)
def test_training_continues_bit_for_bit_from_a_saved_state(delay: int):
    """Also in the middle of a round, with an exchange under way; residuals and momentum are in the state."""

    def steps() -> Any:
        outer = keras.optimizers.SGD(0.7, 0.9, nesterov=True)
        policy = gc.Policy(gc.TopK(0.2), filter=gc.Filter(min_elements=2))
        return gc.LocalSteps(3, outer, policy, fragments=2, delay=delay)

    whole, callback = model_of(), steps()
    fit(whole, gc.rank(), callback)
    weights = [variable.numpy() for variable in (*whole.variables, *whole.optimizer.variables)]
    state = pickle.loads(pickle.dumps(callback.state_dict()))
    fit(whole, gc.rank(), callback)

    again, resumed = model_of(), steps()
    again.optimizer.build(again.trainable_variables)
    for variable, value in zip((*again.variables, *again.optimizer.variables), weights, strict=True):
        variable.assign(value)
    resumed.load_state_dict(state)
    fit(again, gc.rank(), resumed)
    assert_equal(again.trainable_variables, [variable.numpy() for variable in whole.trainable_variables])
    for mine, theirs in zip(resumed.fragments, callback.fragments, strict=True):
        assert_equal(mine.anchors, [anchor.numpy() for anchor in theirs.anchors])
    with pytest.raises(gc.StateError, match="another model"):
        resumed.load_state_dict({**state, "variables": state["variables"][::-1]})


@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(3, env=ENV)
def test_ranks_with_fewer_batches_join(delay: int):
    """Ranks have 3, 5 and 7 batches. All end with what the last one has, and go on together."""
    one, rank = model_of(), gc.rank()
    steps = gc.LocalSteps(2, compression="topk:density=0.3", fragments=2, delay=delay)
    x, y = data_of(rank)
    rows = (3 + 2 * rank) * ROWS
    callbacks = [steps, gc.callbacks.Join(local_steps=steps)]
    one.fit(x[:rows], y[:rows], batch_size=ROWS, shuffle=False, verbose=0, callbacks=callbacks)
    assert steps.progress[0] == BATCHES
    held = [variable.numpy() for variable in (*one.variables, *one.optimizer.variables, *steps.variables)]
    theirs = gc.allgather_object((steps.progress, held))
    for progress, values in theirs[1:]:
        assert progress == theirs[0][0]
        assert_equal(values, theirs[0][1])
    begun = steps.statistics().steps
    one.fit(x[:8], y[:8], batch_size=ROWS, shuffle=False, verbose=0, callbacks=[steps])
    assert steps.statistics().steps == begun + 2


@on_ranks(2, env=ENV)
def test_a_mean_over_ranks_of_which_one_has_left_counts_its_pseudo_gradient_as_zero():
    one, rank = model_of(), gc.rank()
    x, y = data_of(rank)
    rows = (2 + 2 * rank) * ROWS
    steps = gc.LocalSteps(2)
    one.fit(
        x[:rows],
        y[:rows],
        batch_size=ROWS,
        shuffle=False,
        verbose=0,
        callbacks=[steps, gc.callbacks.Join(local_steps=steps)],
    )
    models = [model_of() for _ in range(2)]
    for begin in range(0, 4 * ROWS, ROWS):
        for other, alone in enumerate(models):
            if begin < (2 + 2 * other) * ROWS:
                alone.train_on_batch(*(each[begin : begin + ROWS] for each in data_of(other)))
        if begin == ROWS:
            means = [
                sum(v.numpy() for v in each) / 2
                for each in zip(*(m.trainable_variables for m in models), strict=True)
            ]
            for alone in models:
                for variable, mean in zip(alone.trainable_variables, means, strict=True):
                    variable.assign(mean)
    expected = [(mean + v.numpy()) / 2 for mean, v in zip(means, models[1].trainable_variables, strict=True)]
    assert_close(one.trainable_variables, expected)


@on_ranks(2, env=ENV)
def test_join_with_local_steps_that_do_not_train_is_refused():
    with pytest.raises(gc.ConfigError, match="has not begun"):
        fit(model_of(), gc.rank(), gc.callbacks.Join(local_steps=gc.LocalSteps(2)))


@on_ranks(1, env=ENV)
def test_a_callback_that_has_not_begun_has_no_state():
    with pytest.raises(gc.StateError, match="first fit"):
        gc.LocalSteps().state_dict()


REFUSED = {
    "every": ({"every": 0}, {}, "every must be a whole number"),
    "fragments": ({"fragments": 5}, {}, "4 trainable variables"),
    "delay": ({"every": 2, "delay": 3}, {}, "delay must be"),
    "accumulation": (
        {"outer": keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)},
        {},
        "steps on every mean",
    ),
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


ELASTIC = """
    import hashlib, json, os, signal, sys
    import keras
    import numpy as np
    import gradcomp.tf as gc

    least, die = int(os.environ["LEAST"]), int(os.environ.get("DIE", -1))
    gc.init(timeout_seconds=60)
    drawn = np.random.default_rng(0)
    x, y = drawn.standard_normal((48, 12)).astype("float32"), drawn.integers(0, 3, 48)
    model = keras.Sequential([keras.Input([12]), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)], name="net")
    model.compile(keras.optimizers.AdamW(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps = gc.LocalSteps(2, keras.optimizers.SGD(0.7, 0.5), "topk:density=0.2", fragments=2, delay=int(sys.argv[1]))
    state = gc.elastic.KerasState(model, steps=steps, epoch=0, batch=0, sizes=[])


    class Die(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (state.epoch, batch) == (1, die):
                os.kill(os.getpid(), signal.SIGKILL)


    @gc.elastic.run
    def train(state):
        state.sizes = [*state.sizes, gc.size()]
        print(json.dumps({"size": gc.size(), "epoch": state.epoch}), flush=True)
        while state.epoch < 4 or gc.size() < least:
            callbacks = [Die(), steps, gc.elastic.UpdateEpochStateCallback(state),
                         gc.elastic.CommitStateCallback(state, 4)]
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0, initial_epoch=state.epoch,
                      epochs=state.epoch + 1, callbacks=callbacks)


    train(state)
    held = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in steps.variables)).hexdigest()
    print(json.dumps({"digest": held, "progress": steps.progress, "sizes": state.sizes}), flush=True)
"""


@pytest.mark.parametrize("delay", [0, 1])
def test_local_steps_survive_a_kill_and_take_a_newcomer_in(delay: int) -> None:
    """A rank dies in the middle of a round. Survivors go on from the last commit, and a newcomer gets their anchors."""
    with job(ELASTIC, TENSORFLOW) as started:
        for number in range(3):
            started.start(delay, LEAST=3, DIE=6 if number == 0 else -1)
        assert started.wait(0) == -9, started.log(1)
        started.until(lambda: any(one.get("size") == 2 for one in started.said(1)))
        started.start(delay, LEAST=3)
        assert started.finish() == [-9, 0, 0, 0], [started.log(n) for n in range(4)]
        results = [started.said(n)[-1] for n in (1, 2, 3)]
        assert len({result["digest"] for result in results}) == 1
        assert all(result["progress"] == results[0]["progress"] for result in results)
        assert [result["sizes"] for result in results] == [[3, 2, 3]] * 3


@on_ranks(1, env=ENV)
def test_a_state_keeps_local_steps_whose_model_is_checked():
    wrapped = model_of()
    wrapped.compile(gc.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(gc.ConfigError, match="exchanges every gradient"):
        gc.elastic.KerasState(wrapped, steps=gc.LocalSteps())
