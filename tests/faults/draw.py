"""A trial, drawn from a seed: what trains, how it exchanges, what goes wrong, when and on which rank."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

WORLD = 3
STEPS = 12
#: A rank gives up after so long; a stopped rank's 16 s are more, its 3 s are less.
TIMEOUT_SECONDS = 6.0
LAYERS = 3

#: What trains and over which transport, with its weight in the draw.
STACKS = {"torch": 3, "ddp": 3, "shm": 2, "mpi": 2, "keras": 2}
#: Those whose ranks mpiexec starts. It ends the others itself when one of its processes dies.
UNDER_MPI = ("mpi", "keras")
COMPRESSIONS = ("none", "quantize:bits=4", "topk:density=0.1", "powersgd:rank=2", "lgreco")
REDUCTIONS = ("sra", "ring", "tree", "all_to_all", "gather", "parameter_server", "hierarchical")

#: Where in a step a rank may fail. ``timer``: a few milliseconds after the backward pass began, wherever that is.
MOMENTS = ("forward", "backward", "hook", "gradients", "step", "timer")

SIGNALS = ("kill", "term", "stop 3 s", "stop 16 s")
#: Each with the moments of a step in which it may come; none: it is of the whole run.
FAULTS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    **dict.fromkeys(SIGNALS, MOMENTS),
    "exception in backward": ("backward",),
    "exception in a hook": ("hook",),
    "exception in a logging handler": ("forward", "gradients"),
    "skip before backward": ("forward",),
    "skip after backward": ("gradients",),
    "double backward": ("forward",),
    "uneven end": ("forward",),
    "uneven end, metric": ("forward",),
    "NaN": ("forward",),
    "other compression": (),
    "other model": (),
    "other order of layers": (),
    "layer unused": (),
    "link down": ("forward", "gradients"),
    "link down 2 s": ("forward", "gradients"),
    "link loses 5%": ("forward",),
    "disk full": ("step",),
}
#: Ranks on hosts of their own, made of network namespaces.
NETWORK = ("link down", "link down 2 s", "link loses 5%")

#: Those that only root can bring about.
NEEDS_ROOT = (*NETWORK, "disk full")

#: Combinations that cannot be: a stack, the faults, and why.
INVALID: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("shm", NETWORK, "shared memory has no link"),
    ("mpi", NETWORK, "mpiexec starts its processes on one host"),
    ("keras", NETWORK, "mpiexec starts its processes on one host"),
    ("keras", ("layer unused",), "a compiled Keras model uses the same layers in every call"),
    (
        "keras",
        ("skip after backward", "exception in a hook"),
        "train_on_batch has no user's code after backward",
    ),
)
#: Until then DistributedDataParallel forms its buckets, by collectives of its own that raise what they raise.
DDP_READY_STEP = 2
#: In Keras the exchange is inside ``train_on_batch``: between its backward pass and its step there is no user's code.
KERAS_MOMENTS = ("forward", "backward", "step", "timer")


@dataclass(frozen=True)
class Trial:
    """One run of three ranks. ``delay``: seconds of the moment ``timer``."""

    seed: int
    stack: str
    compression: str
    reduction: str
    fault: str
    moment: str = ""
    step: int = 0
    victim: int = 1
    delay: float = 0.0

    @property
    def stopped_seconds(self) -> float:
        """How long the fault itself lasts."""
        return {"stop 3 s": 3.0, "stop 16 s": 16.0, "exception in a logging handler": 2.5}.get(
            self.fault, 0.0
        )

    @property
    def deadline_seconds(self) -> float:
        """When every process must have ended: the fault, the timeout, 10 s of farewells, and a busy machine's share."""
        return self.stopped_seconds + TIMEOUT_SECONDS + 10.0 + 50.0

    def to_plain(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)


def valid(stack: str, fault: str, moment: str) -> bool:
    """Whether the combination can be; INVALID says why not."""
    if any(stack == one and fault in faults for one, faults, _ in INVALID):
        return False
    return stack != "keras" or not moment or moment in KERAS_MOMENTS


def draw(seed: int, *, fault: str = "", stack: str = "", privileged: bool = True) -> Trial:
    """The trial of a seed; ``fault`` and ``stack`` fix these. Not ``privileged``: without faults that need root."""
    generator = random.Random(f"fault {seed}")
    while True:
        chosen = fault or generator.choice(list(FAULTS))
        where = stack or generator.choices(list(STACKS), list(STACKS.values()))[0]
        moment = generator.choice(FAULTS[chosen] or ("",))
        trial = Trial(
            seed,
            where,
            generator.choice(COMPRESSIONS),
            generator.choice(REDUCTIONS),
            chosen,
            moment,
            max(generator.randrange(STEPS - 1), DDP_READY_STEP if where == "ddp" else 0),
            generator.randrange(WORLD),
            round(generator.uniform(0.0, 0.03), 4),
        )
        if valid(where, chosen, moment) and (privileged or chosen not in NEEDS_ROOT):
            return trial
