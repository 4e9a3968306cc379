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
STACKS = {"torch": 3, "ddp": 3, "shm": 2, "mpi": 2, "keras": 2, "fsdp": 2}
#: Those whose ranks mpiexec starts. It ends the others itself when one of its processes dies.
UNDER_MPI = ("mpi", "keras")
COMPRESSIONS = ("none", "quantize:bits=4", "topk:density=0.1", "powersgd:rank=2", "lgreco")
REDUCTIONS = ("sra", "ring", "tree", "all_to_all", "gather", "parameter_server", "hierarchical")

#: Where in a step a rank may fail. ``timer``: a few milliseconds after the backward pass began, wherever that is.
MOMENTS = ("forward", "backward", "hook", "gradients", "step", "timer")

SIGNALS = ("kill", "term", "stop 3 s", "stop 16 s")

#: Ranks that no longer apply the same, which no message says.
DRIFTS = ("other rate", "gradients edited", "clipped locally")
#: How many steps ranks may take once they differ, by fault: two exchanges are to notice it.
LATE = dict.fromkeys((*DRIFTS, "double step"), 1)
#: The full comparisons of parameters are over by then, and there are exchanges left to notice.
FIRST_DRIFT, LAST_DRIFT = 5, STEPS - 5
#: What a rank receives is changed, or taken for another rank's; no rank may use it.
ON_THE_WAY = ("message altered", "message misdelivered")
MESSAGES = (*ON_THE_WAY, "message altered by its sender")

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
    **dict.fromkeys(DRIFTS, ()),
    "loss without parameters": (),
    **dict.fromkeys(MESSAGES, ()),
    "double step": (),
    "launcher killed": (),
    "ends at once": (),
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
        (
            "skip after backward",
            "exception in a hook",
            "gradients edited",
            "clipped locally",
            "loss without parameters",
            "double step",
        ),
        "train_on_batch has no user's code after backward",
    ),
    ("ddp", ("loss without parameters",), "DistributedDataParallel has an error of its own about it"),
    ("mpi", ("launcher killed",), "mpiexec's own processes end what it has started"),
    ("keras", ("launcher killed",), "mpiexec's own processes end what it has started"),
    ("fsdp", DRIFTS, "each rank's shards are its own: nobody else has what they could be compared with"),
    ("fsdp", ("exception in a hook",), "shards get their gradients from fully_shard, without a hook"),
    ("fsdp", ("disk full",), "gc.save is for compression state, of which sharded models have none"),
)
#: What these exchange is added up on the way, in messages that are not gradcomp's.
WITHOUT_MESSAGES = ("none", "powersgd:rank=2")
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
    def timeout_seconds(self) -> float:
        """When a rank gives up waiting. Who has ended is to be found out long before."""
        return 20.0 if self.fault == "ends at once" else TIMEOUT_SECONDS

    @property
    def stopped_seconds(self) -> float:
        """How long the fault itself lasts."""
        return {"stop 3 s": 3.0, "stop 16 s": 16.0, "exception in a logging handler": 2.5}.get(
            self.fault, 0.0
        )

    @property
    def deadline_seconds(self) -> float:
        """When every process must have ended: the fault, the timeout, 10 s of farewells, and a busy machine's share."""
        return self.stopped_seconds + self.timeout_seconds + 10.0 + 50.0

    def to_plain(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self)


def valid(stack: str, fault: str, moment: str, compression: str = "") -> bool:
    """Whether the combination can be; INVALID and WITHOUT_MESSAGES say why not."""
    if fault in MESSAGES and compression in WITHOUT_MESSAGES:
        return False
    if any(stack == one and fault in faults for one, faults, _ in INVALID):
        return False
    if stack == "fsdp" and moment == "hook":
        return False
    return stack != "keras" or not moment or moment in KERAS_MOMENTS


def draw(seed: int, *, fault: str = "", stack: str = "", privileged: bool = True) -> Trial:
    """The trial of a seed; ``fault`` and ``stack`` fix these. Not ``privileged``: without faults that need root."""
    generator = random.Random(f"fault {seed}")
    while True:
        chosen = fault or generator.choice(list(FAULTS))
        where = stack or generator.choices(list(STACKS), list(STACKS.values()))[0]
        moment = generator.choice(FAULTS[chosen] or ("",))
        step = max(generator.randrange(STEPS - 1), DDP_READY_STEP if where == "ddp" else 0)
        trial = Trial(
            seed,
            where,
            generator.choice(COMPRESSIONS),
            generator.choice(REDUCTIONS),
            chosen,
            moment,
            min(max(step, FIRST_DRIFT * (chosen in DRIFTS)), LAST_DRIFT) if chosen in LATE else step,
            generator.randrange(WORLD),
            round(generator.uniform(0.0, 0.03), 4),
        )
        if valid(where, chosen, moment, trial.compression) and (privileged or chosen not in NEEDS_ROOT):
            return trial
