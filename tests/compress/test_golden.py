"""Compares the bytes on the wire with files: two ranks, two layers and two steps of each configuration.

``PYTHONPATH=tests python tests/compress/test_golden.py`` rewrites the files; read the text of a failure first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from configurations import ROWS

from gradcomp import LayerSpec
from gradcomp.testing.simulation import Simulation

GOLDEN = Path(__file__).parent / "golden"
LAYERS = [LayerSpec("first.weight", (7, 11)), LayerSpec("second.weight", (20,))]
BYTES_PER_LINE = 32
CHANGED = (
    "The bytes on the wire changed. Ranks with and without this change cannot train together, and cannot repeat each "
    "other's runs. If that is the intention: raise PROTOCOL in gradcomp/reduce/header.py, say so in "
    "docs/wire-format.md, and run `PYTHONPATH=tests python tests/compress/test_golden.py`."
)


def gradients(step: int) -> list[list[np.ndarray]]:
    """Returns numbers that are exact in float32 and do not depend on a library's generator."""

    def one(rank: int, layer: int) -> np.ndarray:
        i = np.arange(LAYERS[layer].size, dtype=np.int64)
        mixed = (i + 1) * 7919 + rank * 104729 + layer * 1299709 + step * 15485863
        return ((mixed * mixed % 1009 - 504) / 256).astype(np.float32)

    return [[one(rank, layer) for layer in range(len(LAYERS))] for rank in range(2)]


def messages(name: str) -> dict[str, bytes]:
    """Returns what each rank sends, by a title."""
    ranks = Simulation(LAYERS, ROWS[name].compressor, 2, record=True, reorder=False)
    for step in range(2):
        ranks.step(gradients(step))
    return {
        f"rank {r}, collective {c}, {kind}": data
        for r, rank in enumerate(ranks.ranks)
        for c, (kind, data) in enumerate(rank.transport.sent)
    }


def to_text(sent: dict[str, bytes]) -> str:
    blocks = []
    for title, data in sent.items():
        lines = [data[i : i + BYTES_PER_LINE].hex() for i in range(0, len(data), BYTES_PER_LINE)]
        blocks.append("\n".join([f"{title}, {len(data)} bytes", *lines, ""]))
    return "\n".join(blocks)


def sums_of(text: str) -> tuple[list[str], np.ndarray]:
    """Returns the titles of messages, all of which must be sums, and their floats."""
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    assert all("allreduce" in title for title, *_ in blocks)
    lines = "".join(line for _, *lines in blocks for line in lines)
    return [title for title, *_ in blocks], np.frombuffer(bytes.fromhex(lines), np.float32)


@pytest.mark.parametrize("name", ROWS)
def test_wire_bytes_are_as_they_were(name: str):
    want, got = (GOLDEN / f"{name}.txt").read_text(), to_text(messages(name))
    if ROWS[name].products:  # the last bits of matrix products may differ
        (titles, floats), (of_file, expected) = sums_of(got), sums_of(want)
        assert titles == of_file, CHANGED
        np.testing.assert_allclose(floats, expected, rtol=1e-4, atol=1e-4, err_msg=CHANGED)
    else:
        assert got == want, CHANGED


def test_every_configuration_has_a_golden_file_and_no_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(ROWS)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for row in ROWS:
        (GOLDEN / f"{row}.txt").write_text(to_text(messages(row)))
