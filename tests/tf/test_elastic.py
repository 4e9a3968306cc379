"""Elastic training with Keras: ranks die and come, in ``fit`` and in a loop of one's own."""

from __future__ import annotations

import pytest
from elastic_job import job, telescoped, went_on
from preloaded import TENSORFLOW

FIT = """
    import hashlib, json, os, signal, sys
    import keras
    import numpy as np
    import gradcomp.tf as gc

    least, die = int(os.environ["LEAST"]), int(os.environ.get("DIE", -1))
    gc.init(timeout_seconds=60)
    drawn = np.random.default_rng(0)
    images, labels = drawn.standard_normal((240, 12)).astype("float32"), drawn.integers(0, 3, 240)
    model = keras.Sequential([keras.Input([12]), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)])
    opt = gc.DistributedOptimizer(keras.optimizers.Adam(1e-2), compression=sys.argv[1])
    model.compile(opt, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    sampler = gc.elastic.ElasticSampler(labels)
    state = gc.elastic.KerasState(model, sampler=sampler, epoch=0, batch=0, sizes=[])
    rates = []
    state.register_reset_callbacks([lambda: rates.append(gc.size())])


    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            sampler.record_batch(batch, 4)
            if (state.epoch, state.batch) == (1, die):
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_end(self, epoch, logs=None):
            sampler.set_epoch(epoch + 1)


    @gc.elastic.run
    def train(state):
        state.sizes = [*state.sizes, gc.size()]
        print(json.dumps({"size": gc.size(), "epoch": state.epoch, "batch": state.batch}), flush=True)
        while state.epoch < 4 or gc.size() < least:
            own = list(sampler)
            callbacks = [gc.elastic.UpdateBatchStateCallback(state), Record(),
                         gc.elastic.UpdateEpochStateCallback(state), gc.elastic.CommitStateCallback(state, 3)]
            history = model.fit(images[own], labels[own], batch_size=4, shuffle=False, verbose=0,
                                initial_epoch=state.epoch, epochs=state.epoch + 1, callbacks=callbacks)


    train(state)
    held = [*model.weights, *model.optimizer.variables]
    digest = hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in held)).hexdigest()
    print(json.dumps({"digest": digest, "epoch": state.epoch, "sizes": state.sizes, "resets": rates}), flush=True)
"""


@pytest.mark.parametrize("compression", ["topk:density=0.1", "powersgd:rank=2"])
def test_fit_survives_a_kill_of_rank_0_and_takes_a_newcomer_in(compression) -> None:
    with job(FIT, TENSORFLOW, GRADCOMP_MIN_RANKS=3) as started:
        for number in range(3):
            # A process dies in the second epoch, if it is rank 0 or not: the ranks are not known before.
            started.start(compression, LEAST=3, DIE=5 if number == 0 else -1, GRADCOMP_MIN_RANKS=1)
        assert started.wait(0) == -9, started.log(1)
        started.until(lambda: any(one.get("size") == 2 for one in started.said(1)))
        started.start(compression, LEAST=3, GRADCOMP_MIN_RANKS=1)
        assert started.finish() == [-9, 0, 0, 0], [started.log(n) for n in range(4)]
        results = [started.said(n)[-1] for n in (1, 2, 3)]
        assert len({result["digest"] for result in results}) == 1
        assert all(result["epoch"] >= 4 for result in results)
        assert [result["sizes"] for result in results] == [[3, 2, 3]] * 3
        assert [result["resets"] for result in results] == [[2, 3], [2, 3], []]
        begins = [one for one in started.said(1) if "size" in one]
        assert [(one["size"], one["epoch"], one["batch"]) for one in begins[:2]] == [(3, 0, 0), (2, 1, 3)]


LOOP = """
    import json, os, signal, sys
    import keras
    import numpy as np
    import tensorflow as tf
    import gradcomp.tf as gc

    least, die = int(os.environ["LEAST"]), int(os.environ.get("DIE", -1))
    gc.init(timeout_seconds=60)
    model = keras.Sequential([keras.Input([40]), keras.layers.Dense(64, use_bias=False)])
    opt = gc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=sys.argv[1])
    state = gc.elastic.KerasState(model, opt, step=0)
    drawn = np.random.default_rng(os.getpid())
    total = lambda: model.weights[0].numpy().astype("float64").sum()


    def left():
        found = opt.compression_state()
        second = found["second_residuals"].sum()
        return [sum(v.astype("float64").sum() for v in found["residuals"].values()), second]


    def say(**values):
        print(json.dumps(values, default=float), flush=True)


    @gc.elastic.run
    def train(state):
        begun, own, first, before = state.step, 0.0, total(), left()
        say(size=gc.size(), begun=begun, left=before)
        step = tf.function(lambda gradient: opt.apply([gradient], model.trainable_variables))
        while state.step < max(8, begun + 2) or gc.size() < least:
            gradient = drawn.standard_normal((40, 64)).astype("float32")
            if state.step == die:
                os.kill(os.getpid(), signal.SIGKILL)
            step(tf.constant(gradient))
            own += gradient.astype("float64").sum()
            state.step += 1
            say(size=gc.size(), begun=begun, step=state.step, own=own, applied=first - total(), before=before,
                after=left())
            state.commit()


    train(state)
    say(weights=total())
"""


@pytest.mark.parametrize("compression", ["topk:density=0.05", "quantize:bits=4,feedback=true"])
def test_what_was_applied_and_what_is_left_are_the_gradients(compression) -> None:
    with job(LOOP, TENSORFLOW) as started:
        for number in range(3):
            started.start(compression, LEAST=3, DIE=4 if number == 1 else -1)
        assert started.wait(1) == -9, started.log(0)
        started.until(
            lambda: all(any("applied" in one and one["size"] == 2 for one in started.said(n)) for n in (0, 2))
        )
        started.start(compression, LEAST=3)
        assert started.finish() == [0, -9, 0, 0], [started.log(n) for n in range(4)]
        assert telescoped([started.said(n) for n in range(4)]) >= {2, 3}
        for number in (0, 2):
            went_on(started.said(number))
        assert next(one for one in started.said(3) if "left" in one)["left"][0] == 0.0
        assert len({started.said(n)[-1]["weights"] for n in (0, 2, 3)}) == 1


REFUSED = """
    import json
    import keras
    import tensorflow as tf
    import gradcomp.tf as gc


    def refusal(call):
        try:
            call()
        except gc.GradcompError as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"


    said = [refusal(lambda: gc.init(process_sets=[[0]])), refusal(lambda: gc.init(comm=[0]))]
    gc.init(timeout_seconds=40)
    model = keras.Sequential([keras.layers.Dense(4)])
    said.append(refusal(lambda: gc.elastic.KerasState(model)))
    wrap = lambda **given: gc.DistributedOptimizer(keras.optimizers.SGD(0.1), **given)
    said.append(refusal(lambda: wrap(process_set=gc.ProcessSet([gc.rank()]))))
    model.build([1, 3])
    model.compile(wrap(), "mse")
    said.append(refusal(lambda: model.fit(tf.zeros([4, 3]), tf.zeros([4, 4]), verbose=0)))


    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([1, 3])))
        gc.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)


    said.append(refusal(gradient))
    said.append(refusal(lambda: gc.elastic.CommitStateCallback(None, 0)))
    state = gc.elastic.KerasState(model)
    gc.elastic.run(lambda state: model.fit(tf.zeros([4, 3]), tf.zeros([4, 4]), verbose=0))(state)
    print(json.dumps({"said": said}))
"""


def test_what_an_elastic_job_cannot_do_is_refused() -> None:
    parts = [
        "no process sets", "all of its ranks", "that is built", "no process sets", "outside of the function",
        "a tape cannot", "at least 1",
    ]  # fmt: skip
    with job(REFUSED, TENSORFLOW, GRADCOMP_MIN_RANKS=2) as started:
        for _ in range(2):
            started.start()
        assert started.finish() == [0, 0], started.log(0)
        for number in range(2):
            for text, part in zip(started.said(number)[0]["said"], parts, strict=True):
                assert part in text
