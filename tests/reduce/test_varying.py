"""Tests chunks whose sizes depend on data: equal means, fewer bytes, and hostile sizes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gradcomp import LayerSpec, Quantize, WireFormatError
from gradcomp.core.topology import Topology
from gradcomp.kernels import segments
from gradcomp.reduce import sra
from gradcomp.reduce.header import ByteHeader, padded
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation, same_bytes

LAYERS = [
    LayerSpec("empty", (0,)),
    LayerSpec("uneven", (40, 33)),
    LayerSpec("half", (300,), "float16"),
    LayerSpec("small", (7,)),
]
HEADER = ByteHeader.size(len(LAYERS))
BITS = Quantize(4, 32, allocate="bucket")
REDUCTIONS = ("sra", "parameter_server", "parameter_server:servers=2")


def uneven(world: int, step: int) -> Any:
    """Returns gradients whose buckets have ranges that differ more in later steps."""
    rng = np.random.default_rng(step)
    ranks = []
    for _ in range(world):
        layers = []
        for layer in LAYERS:
            scales = np.exp2((step % 5 - 1.5) * rng.normal(size=-(-layer.size // 32))).repeat(32)[
                : layer.size
            ]
            dtype = np.float16 if layer.dtype == "float16" else np.float32
            layers.append((rng.normal(size=layer.size) * scales).astype(dtype))
        ranks.append(layers)
    return ranks


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("feedback", [False, True])
def test_the_mean_is_that_of_chunks_of_a_fixed_size(
    reduction: str, world: int, feedback: bool, monkeypatch: Any
) -> None:
    compressor = Quantize(4, 32, allocate="bucket", feedback=feedback)
    # Another order of layers would be other chunks, whose buckets have other bits.
    options = {"reduction": reduction, "reorder": False, "slice_elements": 700}
    varying = Simulation(LAYERS, compressor, world, shuffle=True, delay=0.3, **options)
    monkeypatch.setattr(sra, "varies", lambda parts: False)
    fixed = Simulation(LAYERS, compressor, world, **options)
    for step in range(7):
        given = uneven(world, step)
        assert all(map(same_bytes, varying.step(given).all_means(), fixed.step(given).all_means()))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_only_what_is_used_travels(reduction: str) -> None:
    layers = [LayerSpec("w", (64 * 512,))]
    rng = np.random.default_rng(0)
    scales = np.exp2(2 * rng.normal(size=64)).repeat(512)
    sent = {}
    for allocate in (None, "bucket", "bytes"):
        ranks = Simulation(layers, Quantize(4, allocate=allocate), 3, reduction=reduction)
        given = [[(rng.normal(size=64 * 512) * scales).astype(np.float32)] for _ in range(3)]
        for _ in range(2):
            ranks.step(given)
        before = [p.transport.bytes_sent for p in ranks.pipelines]
        ranks.step(given)
        after = [p.transport.bytes_sent for p in ranks.pipelines]
        sent[allocate] = sum(after) - sum(before)
    assert sent["bucket"] * 1.3 < sent[None]
    assert 0 <= sent["bytes"] - sent[None] <= 1.02 * 4 * 64 + 12 * padded(1)


def test_other_reductions_keep_their_bytes() -> None:
    for reduction in ("ring", "tree", "all_to_all", "gather", "hierarchical"):
        topology = Topology((0, 0, 1))
        one, other = (
            Simulation(LAYERS, Quantize(4, 32, allocate=allocate), 3, reduction=reduction, topology=topology)
            for allocate in ("bucket", "bytes")
        )
        given = uneven(3, 3)
        assert all(map(same_bytes, one.step(given).all_means(), other.step(given).all_means()))


def put(at: int, value: int) -> Any:
    def change(payload: np.ndarray) -> None:
        payload[at : at + 8] = np.array([value]).view(np.uint8)

    return change


def fill(payload: np.ndarray) -> None:
    payload[padded(8 * 3) :] = 0xFF


def shorten(payload: np.ndarray) -> None:
    payload[:24].view("<i8")[1] -= 1


SIZES, CODES = "announced chunks of", "bits of the buckets|end too early"


@pytest.mark.parametrize(
    ("reduction", "round_number", "change", "complaint"),
    [
        *(("sra", number, put(8 - 8 * number, size), SIZES) for number in (0, 1) for size in (-1, 1 << 40)),
        ("sra", 0, fill, CODES),
        ("sra", 0, shorten, ""),
        ("parameter_server", 2, fill, CODES),
        ("parameter_server:servers=2", 2, fill, CODES),
    ],
)
def test_impossible_sizes_and_codes_are_refused(
    reduction: str, round_number: int, change: Any, complaint: str
) -> None:
    """One rank's payloads of a round are changed in the second step, when sizes have been sent before."""
    active = False

    def tamper(source: int, _: int, message: np.ndarray) -> np.ndarray:
        if not active or source != 0 or not len(message) or message[3] != round_number:
            return message
        message = message.copy()
        change(message[HEADER:])
        return message

    ranks = Simulation(LAYERS, BITS, 3, reduction=reduction, tamper=tamper, reorder=False)
    ranks.step(uneven(3, 3))
    active = True
    errors = [str(error) for error in ranks.attempt(uneven(3, 3)) if isinstance(error, WireFormatError)]
    assert errors
    assert re.search(complaint, errors[0])


def test_a_header_says_how_long_the_payload_is() -> None:
    ranks = Simulation(LAYERS, BITS, 2, record=True)
    ranks.step(uneven(2, 0))
    first, rest, *_ = [data for _, data in ranks.pipelines[0].transport.sent]
    # At first there is no room: two sizes, then the chunk.
    told = payload_of(first).view("<i8")
    assert len(told) == 2
    assert told[0] == 0
    assert len(payload_of(rest)) == told[1]


def test_codecs_of_fixed_size_take_no_part() -> None:
    assert segments.MINMAX_LEAST_ERROR in segments.ALLOCATED
    ranks = Simulation(LAYERS, Quantize(4, 32, allocate="bytes"), 2)
    (program,) = ranks.pipelines[0].laid_out.programs
    assert program.reduction is not None
    assert program.reduction.by_kernels
