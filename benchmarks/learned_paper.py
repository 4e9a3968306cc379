"""The figures of Abrahamyan et al. 2021 set beside each other: what follows from one, and what another one says."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Section VI-A and Tables II and IV: ResNet-50, 25.55 million parameters in float32, at a density of 0.1%.
GRADIENT = 102.2e6
VALUES = GRADIENT / 4 / 1000
VALUE_BYTES = 4 * VALUES
NODES = 8
TOTAL = 351e12  # Table II, the baseline's information
FIRST_LAYER = 4 * 7 * 7 * 3 * 64
EXACT_STEPS, TRAIN_STEPS = 200, 300

LEADER, OTHERS = GRADIENT / 386, GRADIENT / 2800  # Table II, parameter server
RING = GRADIENT / 202
#: Iterations that make 8 nodes send 351 TB: 86 epochs of 1.28 million images in batches of 256.
ITERATIONS = TOTAL / (NODES * GRADIENT)
CIFAR_LEADER, CIFAR_OTHERS, CIFAR_RING = GRADIENT / 5709, GRADIENT / 8616, GRADIENT / 3193  # Table IV
CODE_101 = 170e6 / 8095 - 170e6 / 17000  # ResNet-101


def information(leader: float, others: float) -> float:
    """Table II's: what all nodes send in all steps; exact ones first, then values, then codes."""
    codes = (ITERATIONS - EXACT_STEPS - TRAIN_STEPS) * (leader + (NODES - 1) * others)
    return NODES * (EXACT_STEPS * GRADIENT + TRAIN_STEPS * VALUE_BYTES) + codes


def index_bits(density: float) -> float:
    """Entropy of a position in bits, if every element is as likely to be selected: H(density) / density."""
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density)


@dataclass(frozen=True)
class Line:
    """A figure, what follows from others, and what is to be said of the two."""

    printed: str
    arithmetic: str
    verdict: str


def _kb(size: float) -> str:
    return f"{size / 1e3:.1f} KB"


def lines() -> list[Line]:
    """Every comparison; the text of the first column says where it is printed."""
    code = LEADER - OTHERS
    cifar_code = CIFAR_LEADER - CIFAR_OTHERS
    positions = VALUES * index_bits(0.001) / 8
    server = information(LEADER, OTHERS)
    return [
        Line(
            "2,800x in Table II; the first layer travels exactly (VI-A)",
            f"ResNet-50's first layer has 7 x 7 x 3 x 64 floats, {_kb(FIRST_LAYER)}: at most "
            f"{GRADIENT / FIRST_LAYER:,.0f}x; 2,800x is {_kb(OTHERS)} for everything",
            "contradicts: the first layer is left out",
        ),
        Line(
            "386x and 2,800x in Table II, with and without the common code",
            f"{_kb(LEADER)} - {_kb(OTHERS)} = {_kb(code)} of code and indices; all selected values are "
            f"{_kb(VALUE_BYTES)}, with raw indices of 4 bytes {_kb(2 * VALUE_BYTES)}",
            "larger than the values and their indices, uncoded",
        ),
        Line(
            "5,709x and 8,616x in Table IV, the same model and density",
            f"{_kb(CIFAR_LEADER)} - {_kb(CIFAR_OTHERS)} = {_kb(cifar_code)}, 1/{VALUE_BYTES / cifar_code:.1f} of the "
            f"values (ResNet-101: 1/{170e3 / CODE_101:.1f}); Table II has {code / cifar_code:.0f} times that",
            "contradicts: no room for indices, which V-A counts",
        ),
        Line(
            "202x in Table II and 3,193x in Table IV: the ring, the same model and density",
            f"{_kb(RING)} and {_kb(CIFAR_RING)}, {RING / CIFAR_RING:.1f} times as much",
            "contradicts, unless the tables count differently",
        ),
        Line(
            "3,193x in Table IV, DEFLATE-coded indices counted (V-A)",
            f"a code of 1/16 takes {_kb(VALUE_BYTES / 16)} of {_kb(CIFAR_RING)}: "
            f"{8 * (CIFAR_RING - VALUE_BYTES / 16) / VALUES:.1f} bits an index; positions that are equally likely need "
            f"{index_bits(0.001):.1f} bits, {_kb(positions)}",
            "fits only selections that cluster",
        ),
        Line(
            "DGC at 277x in Table II, at 1,000x in Table IV",
            f"by values 1 / 0.1% = 1,000x; with raw indices 500x; 277x is {_kb(GRADIENT / 277)}, "
            f"{GRADIENT / 277 / VALUES:.1f} bytes a value",
            "two ways to count; Table IV leaves DGC's indices out",
        ),
        Line(
            "Sparse GD at 1,000x on ResNet-50 and at 413x on PSPNet, one table, one density",
            f"120 MB / 413 = {120e6 / 413 / 1e6:.2f} MB; the values are 0.12 MB",
            "two ways to count in one table",
        ),
        Line(
            "794x in total (VI-B), 0.4 TB in Table II",
            f"351 / 0.4 = {351 / 0.4:.0f}; 351 / 794 = {351 / 794:.3f} TB. From 386x, 2,800x and 200 exact steps: "
            f"{server / 1e12:.3f} TB, {TOTAL / server:.0f}x",
            "0.442 prints as 0.4; the columns give another sum",
        ),
        Line(
            "184x in total, 1.9 TB: the ring",
            f"351 / 1.9 = {351 / 1.9:.1f}; from 202x and 200 exact steps: {information(RING, RING) / 1e12:.2f} TB",
            "agrees",
        ),
        Line(
            "phase 3 is about 89% of the iterations of classification (VI-A)",
            f"351 TB are {ITERATIONS:,.0f} iterations of 8 nodes: phase 3 is "
            f"{100 * (1 - (EXACT_STEPS + TRAIN_STEPS) / ITERATIONS):.2f}%; 89% is a run of "
            f"{(EXACT_STEPS + TRAIN_STEPS) / 0.11:,.0f}",
            "contradicts, on ImageNet",
        ),
        Line(
            "innovation: 0.001% (III), 0.00001 mu (V-B1), the top 10% of each layer's selection (Algorithm 1)",
            f"of mu = {VALUES:,.0f}: {1e-5 * VALUES:.2f} values by V-B1, {0.1 * VALUES:,.0f} by Algorithm 1; 8,616x "
            f"leaves room for {CIFAR_OTHERS / 4:,.0f} floats, 2,800x for {OTHERS / 4:,.0f}",
            "contradicts: less than one value, or a tenth",
        ),
        Line(
            "speed-up of 1.7 and 2.56 (VI-B), Table III",
            "1 s / 0.6 s = 1.67; 1 s / 0.4 s = 2.50",
            "agrees, as rounded",
        ),
        Line(
            "momentum correction (V-A, Table I)",
            "neither algorithm has it; g_acc only adds up what was not sent",
            "contradicts; ours is DGC's",
        ),
        Line(
            "every node takes the leader's indices (V-A)",
            "Algorithm 2 masks g_l by its own top 0.1% on every node k; means of codes then mix positions",
            "contradicts; ours are the leader's",
        ),
    ]


def show() -> str:
    """As a table."""
    rows = [f"| {line.printed} | {line.arithmetic} | {line.verdict} |" for line in lines()]
    return "\n".join(["| printed in the paper | arithmetic | so |", "|---|---|---|", *rows])
