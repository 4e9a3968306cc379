"""The bytes on the wire, pinned: two ranks, two layers, two steps for each configuration.

``PYTHONPATH=tests python tests/compress/test_golden.py`` rewrites the files; see the text of the failure first.
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


def gradients(step: int) -> list[list[np.ndarray]]:
    """Exact in float32, and without any library's random numbers."""

    def one(rank: int, layer: int) -> np.ndarray:
        i = np.arange(LAYERS[layer].size, dtype=np.int64)
        mixed = (i + 1) * 7919 + rank * 104729 + layer * 1299709 + step * 15485863
        return ((mixed * mixed % 1009 - 504) / 256).astype(np.float32)

    return [[one(rank, layer) for layer in range(len(LAYERS))] for rank in range(2)]


def messages(name: str) -> dict[str, bytes]:
    """What each rank sends, by a title."""
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


def from_text(text: str) -> dict[str, bytes]:
    found = {}
    for block in text.split("\n\n"):
        title, *lines = block.strip().split("\n")
        found[title.rsplit(", ", 1)[0]] = bytes.fromhex("".join(lines))
    return found


def difference(want: dict[str, bytes], got: dict[str, bytes], close: bool = False) -> str | None:
    """The first one, in words. ``close``: sums of floats may differ in their last bits."""
    if list(want) != list(got):
        return f"the messages are {list(got)} instead of {list(want)}"
    for title, a in want.items():
        b = got[title]
        if close and "allreduce" in title and len(a) == len(b):
            floats, expected = np.frombuffer(b, np.float32), np.frombuffer(a, np.float32)
            if not np.allclose(floats, expected, rtol=1e-4, atol=1e-4):
                return f"{title}: differs by {np.abs(floats - expected).max()}"
        elif a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"{title}: {len(b)} bytes instead of {len(a)}, the first difference is byte {at}"
    return None


@pytest.mark.parametrize("name", ROWS)
def test_wire_bytes_are_as_they_were(name: str):
    problem = difference(from_text((GOLDEN / f"{name}.txt").read_text()), messages(name), ROWS[name].products)
    if problem is not None:
        pytest.fail(
            f"{name}: the bytes on the wire changed. {problem}.\nRanks with and without this change cannot train "
            "together, and cannot repeat each other's runs. If that is the intention: raise PROTOCOL in "
            "gradcomp/reduce/header.py, say so in docs/wire-format.md, and run "
            "`PYTHONPATH=tests python tests/compress/test_golden.py`.",
            pytrace=False,
        )


def test_every_configuration_has_a_golden_file_and_no_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(ROWS)


def test_a_changed_byte_is_named():
    want = {"rank 0, collective 0, allreduce": bytes(40)}
    got = {"rank 0, collective 0, allreduce": bytes(33) + b"\1" + bytes(6)}
    assert "byte 33" in difference(want, got)
    assert difference(want, dict(want)) is None
    assert difference(from_text(to_text(got)), got) is None


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for row in ROWS:
        (GOLDEN / f"{row}.txt").write_text(to_text(messages(row)))
