"""What a trial of ``with join(...)`` trains: drawn by seed, the same on all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass

from configurations import ROWS

REDUCTIONS = (
    "sra", "ring", "tree", "all_to_all", "gather", "parameter_server", "parameter_server:servers=2",
    "hierarchical", "auto",
)  # fmt: skip
CONTROLLERS = (
    "accordion:low=8,high=2,eta=3.0,every_steps=3", "adaqs:low=8,high=1,factor=0.9,every_steps=3",
    "kmeans:every_steps=3,levels=2/4/8,alpha=1.5", "linear:every_steps=3,levels=2/4/8,window=3,alpha=none",
    "lgreco:every_steps=3,window=3",
)  # fmt: skip
FRONTENDS = ("optimizer", "optimizer", "hook", "hook in Join", "hook behind in Join")


@dataclass(frozen=True)
class Trial:
    """One training; ``batches`` by epoch and rank."""

    seed: int
    frontend: str
    row: str
    reduction: str
    controller: str
    divide: str
    batches: tuple[tuple[int, ...], ...]
    optimizer: str
    finish: str
    passes: int
    clips: bool
    schedules: bool
    scales: bool
    agrees: bool

    def line(self) -> str:
        how = f"{self.frontend} {self.divide}"
        return f"{self.seed};{how};{self.row};{self.reduction};{self.controller}"


def draw(seed: int, world: int, frontends: tuple[str, ...] = FRONTENDS) -> Trial:
    """The trial of this seed."""
    chosen = random.Random(1000 * seed + world)
    # A rank that has joined does not know the rate that these follow, and fake compression trains nothing.
    rows = [
        n for n, row in ROWS.items() if not row.compressor.traits.follows_rate and not n.startswith("fake")
    ]
    frontend = chosen.choice(frontends)
    controller = chosen.choice(CONTROLLERS) if chosen.random() < 0.3 else ""
    finish = (
        chosen.choice(["backward", "backward", "step", "forward"]) if frontend == "optimizer" else "backward"
    )
    plain = finish != "forward"
    return Trial(
        seed,
        frontend,
        "minmax-4" if controller else chosen.choice(rows),
        chosen.choice(REDUCTIONS),
        controller,
        chosen.choice(["all", "active"]),
        tuple(_batches(chosen, world) for _ in range(chosen.choice([1, 2]))),
        chosen.choice(["SGD", "AdamW", "Adam"]),
        finish,
        chosen.choice([1, 1, 2]),
        plain and chosen.random() < 0.5,
        chosen.random() < 0.7,
        plain and chosen.random() < 0.3,
        plain and frontend == "optimizer" and chosen.random() < 0.2,
    )


def _batches(chosen: random.Random, world: int) -> tuple[int, ...]:
    how = chosen.random()
    if how < 0.15:  # all at once
        return (chosen.randrange(5),) * world
    if how < 0.3:  # one goes on alone
        alone = chosen.randrange(world)
        return tuple(6 if rank == alone else chosen.randrange(2) for rank in range(world))
    return tuple(chosen.randrange(7) for _ in range(world))
