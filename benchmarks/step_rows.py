"""The rows of the step benchmark: ways to exchange gradients."""

from __future__ import annotations

from dataclasses import dataclass

IDEAL, DDP, IDENTITY = "ideal", "ddp", "identity"


@dataclass(frozen=True)
class Row:
    """A way to exchange. ``kind``: none, ddp or gradcomp; ``how``: the hook or the compression."""

    key: str
    title: str
    kind: str
    how: str = ""


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
)


def choose(keys: str | None, compressions: list[str]) -> tuple[Row, ...]:
    known = {row.key: row for row in ROWS}
    if keys is None:
        chosen = list(ROWS)
    else:
        wanted = keys.split(",")
        if unknown := [key for key in wanted if key not in known]:
            raise SystemExit(f"--rows: unknown {', '.join(unknown)}; there are {', '.join(known)}")
        chosen = [known[key] for key in dict.fromkeys([IDEAL, DDP, *wanted])]
    return (*chosen, *(Row(text, f"gradcomp {text}", "gradcomp", text) for text in compressions))
