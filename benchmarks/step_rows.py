"""The rows of the step benchmark: ways to exchange gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compressions import has_momentum

MOMENTUM = 0.9
IDEAL, DDP, IDENTITY = "ideal", "ddp", "identity"
POWERSGD, HOOK, TOPK, FINE = "powersgd-4", "ddp-powersgd-4", "topk", "topk-0.1"
UNTRAINED, AUTO = "lgc-untrained", "lgc-auto"
FORWARD = "forward"


@dataclass(frozen=True)
class Row:
    """A way to exchange. ``kind``: none, ddp or gradcomp; ``how``: the hook or the compression.

    ``momentum``: the optimizer's; 0 where the compression has it. ``extra``: only measured when it is asked for.
    ``by``: what registers gradcomp: the wrapped optimizer, a communication hook of DDP, or its backend's name.
    ``finish``: that of gradcomp's optimizer.
    """

    key: str
    title: str
    kind: str
    how: str = ""
    momentum: float = MOMENTUM
    extra: bool = False
    by: str = "optimizer"
    finish: str = "backward"


ROWS = (
    Row(IDEAL, "no exchange", "none"),
    Row(DDP, "DDP", "ddp"),
    Row("ddp-fp16", "DDP, fp16 hook", "ddp", "fp16"),
    Row(IDENTITY, "gradcomp none", "gradcomp", "none"),
    Row("bf16", "gradcomp bf16", "gradcomp", "bf16"),
    Row("8bit", "gradcomp 8 bits", "gradcomp", "quantize:bits=8"),
    Row("4bit", "gradcomp 4 bits, stochastic", "gradcomp", "quantize:bits=4"),
    Row(
        "4bit-feedback", "gradcomp 4 bits, nearest, feedback", "gradcomp", "quantize:bits=4,rounding=nearest"
    ),
    Row("4bit-hook", "DDP, gradcomp's hook, 4 bits", "gradcomp", "quantize:bits=4", extra=True, by="hook"),
    Row("4bit-backend", 'DDP, backend="gradcomp"', "gradcomp", "quantize:bits=4", extra=True, by="backend"),
    Row(HOOK, "DDP, PowerSGD hook, rank 4, one bucket", "ddp", "powersgd"),
    Row(POWERSGD, "gradcomp PowerSGD, rank 4", "gradcomp", "powersgd:rank=4"),
    Row(TOPK, "gradcomp TopK 1%", "gradcomp", "topk:density=0.01"),
    Row(
        "powersgd-4-alternate",
        "gradcomp PowerSGD, rank 4, half-iterations",
        "gradcomp",
        "powersgd:rank=4,alternate=true",
        extra=True,
    ),
    Row(
        "topk-raw",
        "gradcomp TopK 1%, 32-bit indices",
        "gradcomp",
        "topk:density=0.01,indices=raw",
        extra=True,
    ),
    Row(FINE, "gradcomp TopK 0.1%", "gradcomp", "topk:density=0.001", extra=True),
    # Single phases of LGC. In phase 3 the nets are those that training begins with, so losses are no one's.
    *(
        Row(
            key,
            f"gradcomp LGC 0.1%, {title}",
            "gradcomp",
            f"lgc:warmup_steps=0,{how}",
            momentum=0.0,
            extra=True,
        )
        for key, title, how in (
            ("lgc-1", "codes, one channel", "train_steps=0,code_channels=1"),
            ("lgc-4", "codes, four channels", "train_steps=0"),
            ("lgc-1-all", "codes of all layers, one channel", "train_steps=0,code_channels=1,ends=false"),
            ("lgc-4-all", "codes of all layers, four channels", "train_steps=0,ends=false"),
            (UNTRAINED, "phase 2 without training", "train_steps=1000000,train_share=0.001"),
            ("lgc-trained", "phase 2, training on all samples", "train_steps=1000000,train_share=1.0"),
            (AUTO, "phase 2, training on a measured share", "train_steps=1000000"),
        )
    ),
    Row("dgc", "gradcomp DGC 0.1%", "gradcomp", "dgc:density=0.001", momentum=0.0, extra=True),
    Row("scaled-sign", "gradcomp ScaledSign", "gradcomp", "scaled_sign", extra=True),
    Row("random-k", "gradcomp RandomK 1%", "gradcomp", "random_k:density=0.01", extra=True),
    Row("fp8", "gradcomp BlockFloat, FP8 (E4M3)", "gradcomp", "block_float", extra=True),
    Row("fp4", "gradcomp BlockFloat, FP4 (E2M1)", "gradcomp", "block_float:format=fp4_e2m1", extra=True),
    Row(
        "nvfp4",
        "gradcomp BlockFloat, NVFP4",
        "gradcomp",
        "block_float:format=fp4_e2m1,block=16,scale=e4m3",
        extra=True,
    ),
)


def choose(keys: str | None, compressions: list[str], *, forward: bool = False) -> tuple[Row, ...]:
    """The rows of these keys with the two that all others are compared with; and one more for each compression.

    ``forward``: each row of gradcomp a second time, with ``finish="forward"``.
    """
    known = {row.key: row for row in ROWS}
    if keys is None:
        chosen = [row for row in ROWS if not row.extra]
    else:
        wanted = keys.split(",")
        if unknown := [key for key in wanted if key not in known]:
            raise SystemExit(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(known)}")
        chosen = [known[key] for key in dict.fromkeys([IDEAL, DDP, *wanted])]
    chosen += [
        Row(text, f"gradcomp {text}", "gradcomp", text, momentum=0.0 if has_momentum(text) else MOMENTUM)
        for text in compressions
    ]
    if not forward:
        return tuple(chosen)
    return tuple(
        each for row in chosen for each in ((row, forward_of(row)) if row.kind == "gradcomp" else (row,))
    )


def forward_of(row: Row) -> Row:
    """The same with ``finish="forward"``."""
    return replace(row, key=f"{row.key}-{FORWARD}", title=f'{row.title}, finish="forward"', finish=FORWARD)
