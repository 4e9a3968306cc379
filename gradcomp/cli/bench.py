"""``gradcomp bench`` measures what ``gradcomp estimate`` predicts, on the job's own network and processors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from gradcomp.cli.estimate import argument_of, milliseconds, verdict
from gradcomp.cli.output import Exit, json_option, print_json, show, table
from gradcomp.core.errors import ConfigError, need
from gradcomp.estimate.choices import DDP
from gradcomp.estimate.models import MODELS
from gradcomp.estimate.predict import gains

if TYPE_CHECKING:
    from gradcomp.bench.measure import Measured


@click.command()
@click.option(
    "--model",
    required=True,
    help=f"{', '.join(MODELS)}; package:function, which returns (module, *inputs); a safetensors file; a run log.",
)
@click.option(
    "--backward-ms", type=float, metavar="MS", help="A backward pass; for models that give shapes only."
)
@click.option(
    "--step-ms", type=float, metavar="MS", help="A step without exchange; default: 1.5 backward passes."
)
@click.option(
    "--seconds", type=click.FloatRange(10), default=100.0, help="How long it may take; default: 100."
)
@json_option
def command(
    model: str, backward_ms: float | None, step_ms: float | None, seconds: float, as_json: bool
) -> int:
    """Measure the step under DistributedDataParallel, its hooks and gradcomp's choices.

    Start it as the training script is started, on the same machines: torchrun ... -m gradcomp bench --model ...
    """
    for name, given in (("--backward-ms", backward_ms), ("--step-ms", step_ms)):
        if given is not None and not given > 0:
            raise ConfigError(f"{name} must be positive, got {given}")
    need("gradcomp bench", "torch", "torch")
    from gradcomp.bench.measure import run

    logging.getLogger("gradcomp").setLevel(logging.ERROR)
    backward, step = (None if given is None else given / 1e3 for given in (backward_ms, step_ms))
    with Console(stderr=True).status("") as status:
        found, rank = run(model, backward, step, seconds, lambda text: status.update(f"measuring {text}"))
    if rank == 0:
        known = DDP.key in found.steps
        line = (
            verdict(found.outcomes, found.situation.topology)
            if known
            else "A step of DDP takes too long to measure it: give more --seconds."
        )
        if as_json:
            print_json(_as_json(found, known and gains(found.outcomes), line))
        else:
            _print(found, line)
    # Not Exit.NO_GAIN: a launcher reports a rank that ends with another code as failed.
    return Exit.OK


def _print(found: Measured, line: str) -> None:
    situation, ddp = found.situation, found.steps.get(DDP.key)
    rows = []
    for one in found.estimates:
        measured, predicted = found.steps.get(one.choice.key), milliseconds(one.step)
        argument = argument_of(one.choice, situation.topology)
        if measured is None:
            rows.append([one.choice.title, f"{one.sent / 1e6:,.1f}", "-", "-", "-", predicted, argument])
            continue
        exposed = milliseconds(max(measured - situation.alone, 0.0))
        ratio = f"{ddp / measured:.2f}" if ddp else "-"
        columns = exposed, milliseconds(measured), ratio, predicted
        rows.append([one.choice.title, f"{one.sent / 1e6:,.1f}", *columns, argument])
    heads = ["", "MB sent", "exposed ms", "step ms", "x DDP", "predicted ms", "argument"]
    ranks, hosts = situation.topology.world, len(situation.topology.leaders)
    where = f"{hosts} hosts" if hosts > 1 else "one host"
    elements = sum(layer.size for layer in situation.layers)
    show(
        f"{elements:,} parameters in {len(situation.layers)} layers, {ranks} ranks on {where}, "
        f"{8e-9 / situation.seconds_per_byte:.3g} Gbit/s; "
        f"a step without exchange takes {milliseconds(situation.alone)} ms",
        table(heads, rows, left={0, 6}),
        line,
    )


def _as_json(found: Measured, helps: bool, line: str) -> dict[str, Any]:
    situation = found.situation
    return {
        "parameters": sum(layer.size for layer in situation.layers),
        "ranks": situation.topology.world,
        "hosts": len(situation.topology.leaders),
        "bytes_per_second": 1 / situation.seconds_per_byte,
        "alone_seconds": situation.alone,
        "backward_seconds": situation.backward,
        "choices": [
            {
                "key": one.choice.key,
                "title": one.choice.title,
                "compression": one.choice.how if one.choice.kind == "gradcomp" else None,
                "sent_bytes": one.sent,
                "predicted_seconds": one.step,
                "step_seconds": found.steps.get(one.choice.key),
            }
            for one in found.estimates
        ],
        "helps": helps,
        "verdict": line,
    }
