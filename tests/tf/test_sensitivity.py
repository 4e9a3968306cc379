"""``gradcomp.tf.Sensitivity`` measures the known changes, those of the torch frontend, and training does not notice."""

# ruff: noqa: E402

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from batch import on_ranks

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install gradcomp[tf-cpu]")

import keras
from keras_checks import ENV, assert_alike, fit, new_names, world_of_one
from logs import logged

import gradcomp.tf as gc
from gradcomp.tf import exchange as exchanges
from gradcomp.tf import tape as tapes

EVERYTHING = gc.Filter(min_elements=0, min_dimensions=2, exclude_kinds=())


class Quadratic(keras.layers.Layer):
    """L(1) = sum over layers of h / 2 ||w||^2, with h = 3 and 5."""

    def build(self, shape: Any = None) -> None:
        self.a = self.add_weight(shape=(6, 4), initializer=keras.initializers.RandomNormal(seed=1), name="a")
        self.b = self.add_weight(shape=(5, 3), initializer=keras.initializers.RandomNormal(seed=2), name="b")
        self.built = True

    def call(self, x: Any) -> Any:
        return x * (1.5 * keras.ops.sum(self.a**2) + 2.5 * keras.ops.sum(self.b**2))


ONE = np.ones((), np.float32)


#: By name: an optimizer, and how far it goes for a part e of a gradient, momentum included.
OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.1), lambda e, o, i: 0.1 * e),
    "momentum": (lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), lambda e, o, i: e),
    "adam": (
        lambda: keras.optimizers.AdamW(0.01, beta_2=0.99),
        lambda e, o, i: 0.01 * e * np.sqrt(1 - 0.99**3) / (np.sqrt(o._velocities[i]) + 1e-7),
    ),
    "rmsprop": (
        lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
        lambda e, o, i: 0.02 * e / np.sqrt(o._velocities[i] + 1e-7),
    ),
    "adagrad": (
        lambda: keras.optimizers.Adagrad(0.01),
        lambda e, o, i: 0.01 * e / np.sqrt(o._accumulators[i] + 1e-7),
    ),
}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_change_of_a_quadratic_loss_is_that_of_its_formula(kind: str, double: bool) -> None:
    model = Quadratic()
    model.build()
    make, goes = OPTIMIZERS[kind]
    optimizer = make()
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = model(ONE)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    sensitivity = gc.Sensitivity(model, lambda model: model(ONE), double=double)
    sensitivity.check(variables)
    draw = np.random.default_rng(1)
    cells = [(i, 0.1 * draw.standard_normal(variables[i].shape).astype(np.float32)) for i in (1, 0, 1)]
    found = sensitivity.changes(variables, optimizer, 2, [(i, e.reshape(-1)) for i, e in cells])
    for (i, error), change in zip(cells, found, strict=True):
        w, h = np.asarray(variables[i]), (3.0, 5.0)[i]
        step = goes(2 * error.astype(np.float64), optimizer, i)
        if not double:
            step = (w + step).astype(np.float32).astype(np.float64) - w
        expected = h * float((w.astype(np.float64) * step + step**2 / 2).sum())
        assert change == pytest.approx(expected, rel=1e-5, abs=0 if double else 3e-6)


def noisy(policy: str = "float32") -> Any:
    new_names()
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    activity = "l2" if policy == "float32" else None  # Keras does not add losses of two types
    inside = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, activation="tanh")])
    parts = [
        keras.layers.Dense(16), keras.layers.BatchNormalization(), inside, keras.layers.Dropout(0.3, seed=5),
        keras.layers.Dense(5, activity_regularizer=activity, kernel_regularizer="l2"),
    ]  # fmt: skip
    keras.config.set_dtype_policy("float32")
    return keras.Sequential([keras.Input((12,)), *parts])


def batches(seed: int, rows: int = 16) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((rows, 12)).astype(np.float32), draw.integers(0, 5, rows)


HELD = batches(10**6)


def loss_of(model: Any) -> Any:
    logits = model(HELD[0], training=True)
    losses = keras.losses.sparse_categorical_crossentropy(HELD[1], logits, from_logits=True)
    return functools.reduce(keras.ops.add, model.losses, tf.reduce_mean(losses))


def functions(model: Any) -> Any:
    """The loss calls functions that are traced before, one of them for XLA."""
    for compiles in (False, True):
        model.traced = getattr(model, "traced", {})
        if compiles not in model.traced:
            model.traced[compiles] = tf.function(model.call, jit_compile=compiles)
            model.traced[compiles](HELD[0])
    return sum(tf.reduce_mean(model.traced[compiles](HELD[0]) ** 2) for compiles in (False, True))


def mixed() -> Any:
    return noisy("mixed_bfloat16")


def recurrent() -> Any:
    new_names()
    keras.utils.set_random_seed(3)
    parts = [keras.layers.Reshape((3, 4)), keras.layers.LSTM(6), keras.layers.LayerNormalization()]
    return keras.Sequential([keras.Input((12,)), *parts, keras.layers.Dense(5)])


MODELS = {"nested": (noisy, loss_of), "mixed": (mixed, loss_of), "recurrent": (recurrent, loss_of)}


@pytest.mark.parametrize("name", MODELS)
def test_changes_that_float32_would_round_away_are_measured(name: str) -> None:
    make, loss = MODELS[name]
    model = make()
    if name == "recurrent":
        loss = lambda model: tf.reduce_mean(model(HELD[0]) ** 2)  # noqa: E731
    variables, changes = model.trainable_variables, {}
    tiny = np.full(variables[0].shape, 1e-11, np.float32).reshape(-1)
    for double in (True, False):
        sensitivity = gc.Sensitivity(model, loss, double=double)
        sensitivity.check(variables)
        cells = [(0, tiny), (0, 2 * tiny)]
        changes[double] = sensitivity.changes(variables, keras.optimizers.SGD(1.0), 1, cells)
    assert changes[False] == [0, 0]
    assert changes[True][0] != 0
    assert changes[True][1] == pytest.approx(2 * changes[True][0], rel=2e-2)


def narrowed(model: Any) -> Any:
    narrow = tf.cast(model(HELD[0]), tf.float32, name="narrow")
    return tf.reduce_mean(tf.cast(narrow, tf.float64))


@pytest.mark.parametrize(("loss", "names"), [(loss_of, []), (narrowed, ["narrow"])], ids=["wide", "narrow"])
def test_an_op_that_narrows_values_is_named(loss: Any, names: list[str]) -> None:
    model = noisy()
    sensitivity = gc.Sensitivity(model, loss)
    sensitivity.check(model.trainable_variables)
    with logged() as lines:
        sensitivity.changes(model.trainable_variables, keras.optimizers.SGD(0.1), 1, [])
    assert [line.split()[1] for line in lines if "narrows float64" in line] == names


def test_functions_that_the_loss_calls_see_the_changes() -> None:
    """Once traced, and compiled, they would have the variables in them."""
    model = noisy()
    variables = model.trainable_variables
    functions(model)
    sensitivity = gc.Sensitivity(model, functions, double=False)
    sensitivity.check(variables)
    error = np.full(variables[0].shape, 0.1, np.float32).reshape(-1)
    whole = sensitivity.changes(variables, keras.optimizers.SGD(1.0), 1, [(0, error)])[0]
    plain = gc.Sensitivity(model, lambda model: tf.reduce_mean(model(HELD[0]) ** 2), double=False)
    plain.check(variables)
    assert whole == pytest.approx(
        2 * plain.changes(variables, keras.optimizers.SGD(1.0), 1, [(0, error)])[0], rel=1e-3
    )
    assert whole != 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_measurement_leaves_no_trace(fails: bool) -> None:
    """Variables, seeds, random states, layers' types and losses are as before, also if the loss raises."""
    model, called = noisy(), []
    variables = model.trainable_variables
    model(HELD[0], training=True)

    def everything() -> Any:
        values = [np.asarray(each).tobytes() for each in model.variables]
        draws = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        layers = [(each.dtype_policy.name, each.compute_dtype) for each in model._flatten_layers()]
        return values, draws, layers, [float(each) for each in model.losses], model.inputs[0].dtype

    def rude(model: Any) -> Any:
        random.random()
        np.random.rand()  # noqa: NPY002
        called.append(model.layers[0].compute_dtype)
        model.layers[0].bias.assign_add(tf.ones(16))
        if fails:
            raise RuntimeError("a user's error")
        return loss_of(model)

    before = everything()
    sensitivity = gc.Sensitivity(model, rude)
    sensitivity.check(variables)
    cells = [(0, np.full(12 * 16, value, np.float32)) for value in (1.0, 0.0)]
    if fails:
        with pytest.raises(RuntimeError, match="a user's error"):
            sensitivity.changes(variables, keras.optimizers.SGD(0.1), 1, cells)
    else:
        changes = sensitivity.changes(variables, keras.optimizers.SGD(0.1), 1, cells)
        assert changes[0] != 0
        assert changes[1] == 0, "all passes draw the same numbers"
        assert changes == sensitivity.changes(variables, keras.optimizers.SGD(0.1), 1, cells)
    assert called == ["float64"]
    assert everything() == before
    assert not tf.config.functions_run_eagerly()


def train(how: str, metric: str, levels: tuple[int, ...] = (4,), steps: int = 20) -> tuple[Any, Any]:
    """The variables' bits and the plan after training with a controller."""
    model = noisy("mixed_float16" if how == "scaled" else "float32")
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    controller = gc.LGreCo(8, levels=list(levels), metric=metric, window=8)
    given: dict[str, Any] = {"compression": gc.Policy(gc.Quantize(4, 16), filter=EVERYTHING)}
    given["controller"] = controller
    if metric == "loss":
        applies = inner if how == "tape" else None
        given["sensitivity"] = gc.Sensitivity(model, loss_of, optimizer=applies)
    x, y = batches(gc.rank(), 16 * steps)
    if how in ("fit", "eagerly", "scaled"):
        optimizer = gc.DistributedOptimizer(inner, **given)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, run_eagerly=how == "eagerly")
        fit(model, x, y, batch=16)
        exchange = optimizer._gradcomp.exchange
    else:
        optimizer = inner if how == "tape" else gc.DistributedOptimizer(inner, **given)
        optimizer.build(model.trainable_variables)
        made: list[Any] = []

        @tf.function
        def step(x: Any, y: Any) -> None:
            tape = tf.GradientTape()
            with gc.DistributedGradientTape(tape, **given) if how == "tape" else tape as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), True)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            if how == "tape":
                made.append(tapes.exchange_of(model.trainable_variables, tape._gradcomp))
            optimizer.apply(gradients, model.trainable_variables)

        for i in range(steps):
            step(x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16])
            if metric == "loss":
                given["sensitivity"].measure()
        exchange = made[0] if how == "tape" else optimizer._gradcomp.exchange
    bits = [np.asarray(each).tobytes() for each in [*model.variables, *inner.variables]]
    assert_alike(model.trainable_variables)
    return bits, exchange.exchanger and exchange.exchanger.pipeline.plan


def check_training(how: str) -> None:
    """With one level the plan cannot change, so runs with and without losses must end with the same bits."""
    assert train(how, "norm")[0] == train(how, "loss")[0]
    plan = train(how, "loss", (2, 3, 4, 5, 6), 40)[1]
    if gc.size() > 1:
        assert plan.version > 0
        assert gc.broadcast_object(plan.to_json(), 0) == plan.to_json()


@pytest.mark.parametrize("how", ["fit", "eagerly", "scaled", "function", "tape"])
@on_ranks(2, env=ENV)
def test_training_does_not_notice(how: str) -> None:
    check_training(how)


@on_ranks(1, env=ENV)
def test_training_does_not_notice_among_one() -> None:
    check_training("fit")


@on_ranks(3, env=ENV)
def test_training_does_not_notice_among_three() -> None:
    check_training("fit")


LEVELS: dict[str, tuple[Any, list[float]]] = {
    "quantize": (gc.Quantize(4, 16), [2, 4, 6]),
    "powersgd": (gc.PowerSGD(2), [1, 2, 3]),
    "topk": (gc.TopK(0.2), [0.1, 0.2, 0.4]),
}
SHAPES = {"w": (12, 16), "b": (16,), "v": (16, 5)}


class Net(keras.layers.Layer):
    def build(self, shape: Any = None) -> None:
        for name, shape in SHAPES.items():
            initializer = keras.initializers.RandomNormal(0, 0.3, seed=len(name + str(shape)))
            setattr(self, name, self.add_weight(shape=shape, initializer=initializer, name=name))
        self.built = True

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(keras.ops.tanh(keras.ops.matmul(x, self.w) + self.b), self.v)


#: Without TopK under Adam: elements that were never sent have no second moment, and epsilons mean other things.
TABLES = [*((family, "momentum") for family in LEVELS), ("quantize", "adam"), ("powersgd", "adam")]


@pytest.mark.parametrize(("family", "kind"), TABLES)
@on_ranks(2, "tables", env=ENV, deterministic=True)
def test_both_frontends_measure_the_same_table(family: str, kind: str) -> None:
    """From the same weights, batch and gradients."""
    import torch

    import gradcomp.torch as gct

    net = Net(name="net")
    net.build()
    x, y = HELD
    names = [variable.path for variable in net.trainable_variables]

    class Same(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in SHAPES:
                value = torch.tensor(np.asarray(getattr(net, name)))
                setattr(self, name, torch.nn.Parameter(value))

        def forward(self, x: Any) -> Any:
            return torch.tanh(x @ self.w + self.b) @ self.v

    same = Same()
    at, to = torch.tensor(x), torch.tensor(y)
    compression, levels = LEVELS[family]
    given: dict[str, Any] = {
        "compression": gc.Policy(compression, filter=EVERYTHING),
        "controller": gc.LGreCo(6, levels=levels, metric="loss", window=6),
    }
    if kind == "adam":
        ours = keras.optimizers.Adam(0.01, beta_2=0.9, epsilon=1e-9)
        theirs = torch.optim.Adam(same.parameters(), 0.01, betas=(0.9, 0.9), eps=1e-9)
    else:
        ours = keras.optimizers.SGD(0.05, momentum=0.9)
        theirs = torch.optim.SGD(same.parameters(), 0.05, momentum=0.9)

    def cross_entropy(model: Any) -> Any:
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))

    ours = gc.DistributedOptimizer(ours, **given, sensitivity=gc.Sensitivity(net, cross_entropy))
    ours.build(net.trainable_variables)
    loss = lambda model: torch.nn.functional.cross_entropy(model(at), to)  # noqa: E731
    theirs = gct.DistributedOptimizer(
        theirs,
        list(zip(names, same.parameters(), strict=True)),
        **given,
        sensitivity=gct.Sensitivity(same, loss),
    )
    tables: dict[int, Any] = {}
    for step in range(40):
        draw = np.random.default_rng([step, gc.rank()])
        gradients = [draw.standard_normal(shape).astype(np.float32) for shape in SHAPES.values()]
        ours.apply([tf.constant(each) for each in gradients], net.trainable_variables)
        theirs.zero_grad()
        pairs = zip(same.parameters(), gradients, strict=True)
        sum((p * torch.tensor(each)).sum() for p, each in pairs).backward()
        theirs.step()
        for number, each in enumerate((ours, theirs)):
            observed = each._exchanger_or_none().pipeline.controller.observations
            if observed is not None:
                tables.setdefault(number, observed)
    assert tables[0].step == tables[1].step
    assert np.isfinite(tables[0].losses).all()
    assert (tables[0].losses > 0).any()
    np.testing.assert_allclose(tables[0].losses, tables[1].losses, rtol=2e-3, atol=1e-9)
    losses = tables[0].losses.tolist()
    assert gc.broadcast_object(losses, 0) == losses


@on_ranks(2, env=ENV)
def test_what_is_refused() -> None:
    model, other, lgreco = noisy(), recurrent(), "lgreco:metric=loss"
    sensitivity = gc.Sensitivity(model, loss_of)

    def wrap(controller: Any = lgreco, built: bool = True, **arguments: Any) -> None:
        optimizer = keras.optimizers.SGD(0.1)
        if built:
            optimizer.build(model.trainable_variables)
        gc.DistributedOptimizer(optimizer, compression="quantize", controller=controller, **arguments)

    def tape(**arguments: Any) -> None:
        variables = model.trainable_variables
        with gc.DistributedGradientTape(tf.GradientTape(), compression="quantize", **arguments) as tape:
            loss = tf.add_n([tf.reduce_sum(variable) for variable in variables])
        tape.gradient(loss, variables)

    for call, named in (
        (wrap, r"sensitivity=Sensitivity\(model, loss\)"),
        (lambda: tape(controller=lgreco), r"sensitivity=Sensitivity\(model, loss\)"),
        (lambda: wrap("lgreco", sensitivity=sensitivity), 'LGreCo\\(metric="loss"\\)'),
        (lambda: wrap(None, sensitivity=sensitivity), 'LGreCo\\(metric="loss"\\)'),
        (lambda: wrap(built=False, sensitivity=loss_of), "must be a gradcomp.tf.Sensitivity"),
        (lambda: wrap(sensitivity=gc.Sensitivity(other, loss_of)), "no variable '.*kernel'"),
        (lambda: tape(controller=lgreco, sensitivity=sensitivity), "does not know the optimizer"),
        (lambda: tape(op=gc.Min, sensitivity=sensitivity), "sensitivity="),
        (lambda: gc.Sensitivity(loss_of, loss_of), "expected a keras.Model"),
        (lambda: gc.Sensitivity(model, 3), "expected a function"),
        (lambda: gc.Sensitivity(model, loss_of, optimizer="sgd"), "expected a keras.optimizers.Optimizer"),
        (tf.function(sensitivity.measure), "between steps"),
    ):
        with pytest.raises(gc.ConfigError, match=named):
            call()
    applied = gc.Sensitivity(model, loss_of, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(gc.ConfigError, match="is for a tape"):
        wrap(sensitivity=applied)
    # A rank that forgot it is an error on all ranks.
    kind = gc.PlanMismatchError if gc.rank() else gc.ConfigError
    with pytest.raises(kind, match="sensitivity="):
        wrap(**({"sensitivity": sensitivity} if gc.rank() else {}))


CASTS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda model: 1.0, "one number, got float"),
        (lambda model: model(HELD[0]), "one number, got .* of shape"),
        (lambda model: CASTS(HELD[1], model(HELD[0])), 'the loss is float32, .*dtype="float64"'),
    ],
    ids=["python", "many", "float32"],
)
def test_a_loss_that_is_no_number_or_was_rounded(returned: Any, said: str) -> None:
    model = noisy()
    sensitivity = gc.Sensitivity(model, returned)
    sensitivity.check(model.trainable_variables)
    with pytest.raises(gc.ConfigError, match=said):
        sensitivity.changes(model.trainable_variables, keras.optimizers.SGD(0.1), 1, [])


@on_ranks(2, "forgotten", env=ENV)
def test_losses_that_nobody_measures_are_an_error() -> None:
    exchanges.MOST_STEPS_UNMEASURED = 20
    model = Quadratic()
    model.build()
    sensitivity = gc.Sensitivity(model, lambda model: model(ONE))
    optimizer = gc.DistributedOptimizer(
        keras.optimizers.SGD(0.1),
        compression=gc.Policy(gc.Quantize(4, 16), filter=EVERYTHING),
        controller=gc.LGreCo(4, metric="loss"),
        sensitivity=sensitivity,
    )
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step() -> None:
        optimizer.apply([tf.ones(variable.shape) for variable in variables], variables)

    def run() -> None:
        with gc.typed_errors():
            for _ in range(60):
                step()

    with pytest.raises(gc.GradcompError, match="has waited for losses"):
        run()


def test_a_world_of_one_measures_nothing() -> None:
    model = noisy()
    called: list[int] = []
    with world_of_one():
        sensitivity = gc.Sensitivity(model, lambda model: called.append(1))
        optimizer = gc.DistributedOptimizer(
            keras.optimizers.SGD(0.1),
            compression="quantize",
            controller="lgreco:every_steps=2,metric=loss",
            sensitivity=sensitivity,
        )
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        fit(model, *batches(1, 64), batch=8)
        sensitivity.measure()
    assert not called
