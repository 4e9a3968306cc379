"""The rows of the benchmark of learned compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convergence_rows import LSTM, RESNET

TASKS = (RESNET, LSTM)
REFERENCE = "none"

#: The paper's phases: exact steps, then steps of values while the nets train.
EXACT_STEPS, TRAIN_STEPS = 200, 300
#: Steps of training whose losses of the nets are kept as one mean.
NETS_EVERY = 10


@dataclass(frozen=True)
class Arm:
    """A compression."""

    key: str
    title: str
    compression: str

    def on(self, task: str) -> str:
        """The compression in this task.

        The first layer of the LSTM is its embedding, 40% of the parameters: there LGC codes all layers. The task clips
        too; what has momentum does it on each rank instead, as DGC does.
        """
        if task != LSTM:
            return self.compression
        name, _, fields = self.compression.partition(":")
        if name in ("lgc", "plain_code"):
            joined = ",".join(filter(None, [fields, "ends=false"]))
            return f"local_clip[{name}:{joined}]:max_norm={LSTM_CLIP}"
        return self.compression.replace(_DGC_CLIP[RESNET], _DGC_CLIP[LSTM])


LSTM_CLIP = 0.25
_DGC_CLIP = {RESNET: "dgc:", LSTM: f"dgc:clip={LSTM_CLIP},"}

#: Figure 13 compares strategies: sparse from the first step, densities that fall over steps, or exact steps first.
STRATEGIES = {"fixed": "fixed", "dgc": "exponential", "warmup": "warm-up"}

# The share of training is fixed: one that ranks measure makes results a matter of load.
ARMS = (
    Arm(REFERENCE, "uncompressed", "none"),
    Arm("sparse-gd", "Sparse GD 0.1%", "topk:density=0.001,indices=deflate"),
    Arm("dgc", "DGC 0.1%", "dgc:density=0.001,warmup_steps=312,indices=deflate"),
    Arm("ring-values", "ring without codes (ScaleCom)", "plain_code:kind=values"),
    Arm("lgc", "LGC ring, 4 channels", "lgc:train_share=1.0"),
    Arm("lgc-1", "LGC ring, 1 channel", "lgc:train_share=1.0,code_channels=1"),
    Arm(
        "lgc-rate",
        "LGC ring, 4 channels, rate 0.01",
        "lgc:train_share=1.0,learning_rate=0.01,train_steps=300",
    ),
    Arm("lgc-untrained", "LGC ring, 4 channels, never trained", "lgc:train_share=1.0,learning_rate=0.0"),
    Arm("lgc-feedback", "LGC ring, 4 channels, feedback", "lgc:train_share=1.0,feedback=true"),
    Arm("bits-8", "8 bits a value (bytes of 4 channels)", "plain_code:kind=bits,bits=8"),
    Arm("bits-2", "2 bits a value (bytes of 1 channel)", "plain_code:kind=bits,bits=2"),
    Arm("projection-4", "random projection, 4 of 16", "plain_code:kind=projection,code_channels=4"),
    Arm("projection-1", "random projection, 1 of 16", "plain_code:kind=projection,code_channels=1"),
    Arm("fixed", "DGC 0.1%, from the first step", "dgc:density=0.001,indices=deflate"),
    Arm("warmup", "DGC 0.1%, after 200 exact steps", "warmup[dgc:density=0.001,indices=deflate]:steps=200"),
    Arm("lgc-server", "LGC server, lambda2 0.5", "lgc:train_share=1.0,form=server,similarity=0.5"),
    Arm("lgc-server-0", "LGC server, lambda2 0", "lgc:train_share=1.0,form=server,similarity=0.0"),
    Arm(
        "lgc-server-untrained",
        "LGC server, never trained",
        "lgc:train_share=1.0,form=server,similarity=0.5,learning_rate=0.0",
    ),
)
#: Which plain codes take the bytes of which learned code.
EQUAL_BYTES = {
    "lgc": ("bits-8", "projection-4"),
    "lgc-rate": ("bits-8", "projection-4"),
    "lgc-1": ("bits-2", "projection-1"),
}


def choose(keys: str | None) -> list[Arm]:
    """The rows of ``keys``, all if None, the reference first. SystemExit for a key that does not exist."""
    known = {arm.key: arm for arm in ARMS}
    wanted: Sequence[str] = list(known) if keys is None else keys.split(",")
    if unknown := [key for key in wanted if key not in known]:
        raise SystemExit(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[key] for key in dict.fromkeys([REFERENCE, *wanted])]
