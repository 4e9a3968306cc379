"""Tests Flat: an exchange bucket is one vector, whose codes are those of a model with one layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import gradcomp as gc
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError
from gradcomp.testing.simulation import Simulation

QUANTIZE = gc.Quantize(4, 64)
FLOATS = [
    gc.LayerSpec("empty", (0,)),
    gc.LayerSpec("bias", (1,), kind="bias"),
    gc.LayerSpec("odd", (37,), kind="norm"),
    gc.LayerSpec("matrix", (29, 31)),
    gc.LayerSpec("tail", (3,)),
]
HALVES = [gc.LayerSpec("half", (5, 7), dtype="float16"), gc.LayerSpec("half.bias", (3,), dtype="float16")]
every_world = pytest.mark.parametrize("world", [1, 2, 3])


def of_one_layer(
    compressor, layers: Sequence[gc.LayerSpec], gradients, world: int, scale: float = 1.0, **settings
) -> np.ndarray:
    """Returns the mean of the values of ``layers`` as one layer of float32, which has the first one's name."""

    def joined(rank) -> np.ndarray:
        parts = zip(layers, rank, strict=True)
        return np.concatenate(
            [np.zeros(i.size, np.float32) if g is None else np.float32(g) for i, g in parts]
        )

    layer = gc.LayerSpec(layers[0].name, (sum(layer.size for layer in layers),))
    ranks = Simulation([layer], compressor, world, **settings)
    return ranks.step([[joined(rank)] for rank in gradients], scale=scale).mean(0)


def of_flat(means: Sequence[np.ndarray | None]) -> bytes:
    return b"".join(mean.tobytes() for mean in means if mean is not None)


@every_world
@pytest.mark.parametrize(
    ("compressor", "scale", "settings"),
    [
        (QUANTIZE, 8.0, {"shuffle": True}),
        (gc.Quantize(3, 33, "linf"), 1.0, {"reduction": "hierarchical"}),
        (gc.Quantize(4, 64, rounding="shift"), 1.0, {"reduction": "parameter_server"}),
        (gc.Quantize(2, 16, rounding="nearest", feedback=False), 1.0, {"reduction": "ring"}),
        (gc.Quantize(4, 64, allocate="bucket"), 1.0, {}),
        (gc.NUQSGD(4, 64), 1.0, {"reduction": "gather"}),
        (gc.TernGrad(64), 1.0, {"reduction": "all_to_all"}),
        (gc.Cast("bfloat16"), 1.0, {"reduction": "tree"}),
    ],
)
def test_means_are_those_of_the_concatenated_layers(compressor, scale: float, settings, world: int):
    ranks = Simulation(FLOATS, gc.Flat(compressor), world, **settings)
    gradients = ranks.gradients()
    want = of_one_layer(compressor, FLOATS, gradients, world, scale, **settings)
    assert of_flat(ranks.step(gradients, scale=scale).all_means()) == want.tobytes()


@every_world
def test_layers_of_another_dtype_are_another_vector(world: int):
    ranks = Simulation([*FLOATS, *HALVES], gc.Flat(QUANTIZE), world)
    gradients, count = ranks.gradients(), len(FLOATS)
    means = ranks.step(gradients).all_means()
    want = of_one_layer(QUANTIZE, FLOATS, [rank[:count] for rank in gradients], world)
    assert of_flat(means[:count]) == want.tobytes()
    want = of_one_layer(QUANTIZE, HALVES, [rank[count:] for rank in gradients], world)
    assert of_flat(means[count:]) == want.astype(np.float16).tobytes()


def test_an_exchange_bucket_with_slices_of_one_layer_is_as_it_would_be_alone():
    layers = [gc.LayerSpec("matrix", (40, 50))]
    flat, alone = (Simulation(layers, c, 3, slice_elements=256) for c in (gc.Flat(QUANTIZE), QUANTIZE))
    gradients = alone.gradients()
    for _ in range(2):
        assert flat.step(gradients).mean(0).tobytes() == alone.step(gradients).mean(0).tobytes()


def test_bytes_are_those_of_one_vector():
    """A message has a flag for each layer in its header; the payloads have the same size, scales included."""
    flat = Simulation(FLOATS, gc.Flat(QUANTIZE), 2)
    (bucket,) = flat.pipelines[0].layout.buckets
    elements = sum(layer.size for layer in FLOATS)
    assert bucket.payload_bytes == -(-elements // 2) + 8 * -(-elements // 64)
    assert flat.pipelines[0].predicted.sum() == bucket.payload_bytes  # 2 (N-1)/N of it, with 2 ranks


@every_world
def test_a_layer_without_a_gradient_contributes_zeros(world: int):
    """One that no rank has stays without, and takes its place in the vector all the same."""
    ranks = Simulation(FLOATS, gc.Flat(QUANTIZE), world)
    gradients = ranks.gradients()
    gradients[0][3] = None
    for rank in gradients:
        rank[2] = None
    borders = np.cumsum([layer.size for layer in FLOATS])[:-1]
    want = np.split(of_one_layer(QUANTIZE, FLOATS, gradients, world), borders)
    for layer, mean in enumerate(ranks.step(gradients).all_means()):
        if layer == 2 or (layer, world) == (3, 1):
            assert mean is None
        else:
            assert mean.tobytes() == want[layer].tobytes()


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        ("none", "takes a quantiser"),
        ("cast:dtype=float32", "takes a quantiser"),
        ("topk:density=0.1", "takes a quantiser"),
        ("powersgd:rank=2", "takes a quantiser"),
        ("ef21[quantize]", "takes a quantiser"),
        ("warmup[quantize]:steps=3", "takes a quantiser"),
        ("flat[quantize]", "takes a quantiser"),
        ("signum", "takes a quantiser"),
        ("fake", "sends no gradient"),
        ("quantize:rounding=nearest", "keeps no residual"),
        ("scaled_sign", "keeps no residual"),
        ("quantize:bits=2/4", "one level"),
    ],
)
def test_what_makes_no_sense_without_layers_is_refused(inner: str, text: str):
    with pytest.raises(ConfigError, match=text):
        gc.Flat(inner)


@pytest.mark.parametrize("outer", ["error_feedback", "momentum_correction", "local_clip", "ef21"])
@pytest.mark.parametrize("inner", ["flat[quantize:bits=8]", "warmup[flat[quantize:bits=8]]"])
def test_state_by_layer_does_not_go_around_it(outer: str, inner: str):
    with pytest.raises(ConfigError, match=r"knows no layers|not into it"):
        from_string(f"{outer}[{inner}]")


def test_a_policy_excludes_layers_from_the_vector_and_a_schedule_begins_it_later():
    """The small layers are sent exactly beside it, and all of them until the warm-up ends."""
    policy = gc.Policy(
        "warmup[flat[quantize:bits=2]]:steps=1", filter=gc.Filter(min_elements=8, exclude=("tail",))
    )
    ranks = Simulation(FLOATS, policy, 2)
    for step in range(2):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for layer, mean in enumerate(means):
            exact = np.array_equal(mean, (gradients[0][layer] + gradients[1][layer]) / np.float32(2))
            assert exact == (layer != 3 or step == 0)


def test_plans_hold_no_level_of_a_layer():
    """Layers of other levels are other vectors, and a controller finds nothing to choose."""
    flat = gc.Flat("quantize:bits=3")
    assert (flat.level, flat.alternatives()) == (None, ())
    policy = gc.Policy(flat, overrides={"matrix": "flat[quantize:bits=5]"}, filter=gc.Filter((), 0, 0))
    (bucket,) = Simulation(FLOATS, policy, 2).pipelines[0].layout.buckets
    assert [group.compressor.inner.bits for group in bucket.groups] == [3, 5]
    with pytest.raises(ConfigError, match="has no level"):
        flat.with_level(4)
