"""``gradcomp estimate`` predicts what compression would gain; it needs neither a network nor a change of code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from gradcomp.cli.output import Exit, json_option, print_json, show, table
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.scheme import AUTO
from gradcomp.core.topology import Topology
from gradcomp.estimate.choices import DDP, Choice
from gradcomp.estimate.models import MODELS, layers_of
from gradcomp.estimate.predict import (
    PAYLOAD,
    Estimate,
    Situation,
    best,
    device_processor,
    estimate,
    gains,
    host_processor,
    readiness,
    reduction,
)
from gradcomp.reduce.model import Network

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)bit(?:/s)?", re.IGNORECASE)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def _rate(_context: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Converts a rate such as ``10gbit`` to bytes of payload a second."""
    found = _RATE.fullmatch(value.strip())
    if found is None or not float(found[1]) > 0:
        raise click.BadParameter(f"a rate is a number with a unit, as 1gbit or 100mbit; got {value!r}")
    return float(found[1]) * _UNITS[found[2].lower()] / 8 * PAYLOAD


@click.command()
@click.option(
    "--model",
    required=True,
    help=f"{', '.join(MODELS)}; 300M; package:function; a safetensors file; a run log.",
)
@click.option("--hosts", type=click.IntRange(1, 4096), required=True, metavar="N", help="Machines.")
@click.option(
    "--ranks-per-host", "local", type=click.IntRange(1, 64), default=1, metavar="N", help="Default: 1."
)
@click.option("--link", callback=_rate, required=True, help="Rate of a machine's network, as 10gbit.")
@click.option(
    "--local-link", callback=_rate, default="100gbit", help="Between ranks of one machine; default: 100gbit."
)
@click.option("--latency-us", type=float, default=100.0, metavar="US", help="Of a message; default: 100.")
@click.option(
    "--backward-ms", type=float, required=True, metavar="MS", help="A backward pass, without exchange."
)
@click.option(
    "--step-ms", type=float, metavar="MS", help="A step without exchange; default: 1.5 backward passes."
)
@click.option(
    "--device",
    type=click.Choice(["gpu", "cpu"]),
    default="gpu",
    help="What trains. cpu: codecs are measured here, and share the cores with training. Default: gpu.",
)
@click.option(
    "--codec-gbytes",
    type=float,
    metavar="GB",
    help="A GPU's codecs, in GB of gradients a second; default: 100.",
)
@click.option(
    "--every",
    type=click.IntRange(1, 100_000),
    metavar="H",
    help="Show local steps, exchanged once in H steps.",
)
@json_option
def command(
    model: str,
    hosts: int,
    local: int,
    link: float,
    local_link: float,
    latency_us: float,
    backward_ms: float,
    step_ms: float | None,
    device: str,
    codec_gbytes: float | None,
    every: int | None,
    as_json: bool,
) -> int:
    """Predict the step under DistributedDataParallel, its hooks and gradcomp's choices.

    The step without exchange is what `with ddp.no_sync():` takes.
    """
    step_ms = 1.5 * backward_ms if step_ms is None else step_ms
    if not 0 < backward_ms <= step_ms or not latency_us >= 0:
        raise ConfigError(
            f"times must be positive, and a backward pass is no longer than its step; got --backward-ms {backward_ms}, "
            f"--step-ms {step_ms}, --latency-us {latency_us}"
        )
    if codec_gbytes is not None and (device == "cpu" or not codec_gbytes > 0):
        raise ConfigError("--codec-gbytes is a positive number, and for GPUs: a CPU's codecs are measured")
    layers = layers_of(model)
    gigabytes = 100.0 if codec_gbytes is None else codec_gbytes
    situation = Situation(
        layers,
        readiness(layers, backward_ms / 1e3),
        backward_ms / 1e3,
        step_ms / 1e3,
        Topology(tuple(host for host in range(hosts) for _ in range(local))),
        Network(latency_us / 1e6, 1 / link, 1.0, 1.0, latency_us / 1e6, 1 / local_link),
        host_processor() if device == "cpu" else device_processor(1e9 * gigabytes),
    )
    estimates = estimate(situation, every)
    helps, line = gains(estimates), verdict(estimates, situation.topology)
    if every is not None and gains(estimates, "local"):
        helps, line = True, f"{line} {local_verdict(estimates, situation.topology, every)}"
    if as_json:
        print_json(
            {
                "parameters": sum(layer.size for layer in layers),
                "gradient_bytes": sum(layer.nbytes for layer in layers),
                "ranks": situation.topology.world,
                "alone_seconds": situation.alone,
                "choices": [_as_json(one) for one in estimates],
                "helps": helps,
                "verdict": line,
            }
        )
    else:
        _print(layers, situation, estimates, every, line, gigabytes if device == "gpu" else None)
    return Exit.OK if helps else Exit.NO_GAIN


def verdict(estimates: Sequence[Estimate], topology: Topology) -> str:
    """Returns one or two sentences: what to use, or that nothing is gained."""
    by_key = {one.choice.key: one for one in estimates}
    ddp, fastest = by_key[DDP.key], best(estimates)
    if not gains(estimates):
        exposed = milliseconds(max(ddp.exposed, 0.0))
        return (
            f"Nothing to gain here: a step of DDP takes {milliseconds(ddp.step)} ms, of which {exposed} are exposed "
            f"communication, and the best choice takes {milliseconds(fastest.step)} ms."
        )
    text = f"{_saving(fastest, ddp)}: {argument_of(fastest.choice, topology)}."
    safe = best(estimates, alike=True)
    if safe is not fastest:
        text += f" It changes training more than {_saving(safe, ddp)}: {argument_of(safe.choice, topology)}."
    hook = min((one for one in estimates if one.choice.kind == "ddp"), key=lambda one: one.step)
    if hook.step <= 1.05 * fastest.step:
        text += f" DDP's own hook is as fast: {hook.choice.title}, {milliseconds(hook.step)} ms."
    return text


def local_verdict(estimates: Sequence[Estimate], topology: Topology, every: int) -> str:
    """Returns a sentence: what local steps would gain."""
    ddp = next(one for one in estimates if one.choice is DDP)
    fastest = best(estimates, kind="local")
    return (
        f"Exchanged once in {every} steps: {_saving(fastest, ddp)}: {argument_of(fastest.choice, topology, every)}. It "
        "trains in another way: compare losses."
    )


def _saving(one: Estimate, ddp: Estimate) -> str:
    title, before = one.choice.title.removeprefix("gradcomp, "), milliseconds(ddp.step)
    ratio = f"{ddp.step / one.step:.2f} x"
    return f"{title}, {milliseconds(one.step)} ms a step in place of DDP's {before} ({ratio})"


def argument_of(choice: Choice, topology: Topology, every: int | None = None) -> str:
    """Returns what to paste into the call that wraps an optimizer, or that call for local steps; nothing for DDP."""
    if choice.kind == "ddp":
        return ""
    if choice.kind == "local":
        compression = f", compression={choice.how!r}" if choice.title == "LocalSteps" else ""
        return f"gc.{choice.title}(model, opt, every={every}{compression})"
    scheme = reduction(topology)
    return f"compression={choice.how!r}" + (f", reduction={scheme!r}" if scheme == AUTO else "")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _print(
    layers: Sequence[LayerSpec],
    situation: Situation,
    estimates: Sequence[Estimate],
    every: int | None,
    line: str,
    gigabytes: float | None,
) -> None:
    ddp = next(one for one in estimates if one.choice is DDP)
    rows = []
    for one in estimates:
        title = one.choice.title + (f", every {every}" if one.choice.kind == "local" else "")
        argument = argument_of(one.choice, situation.topology, every)
        columns = (
            f"{one.sent / 1e6:,.1f}",
            milliseconds(max(one.exposed, 0.0)),
            milliseconds(one.step),
            f"{ddp.step / one.step:.2f}",
        )
        rows.append([title, *columns, f"{one.memory / 1e6:,.0f}", argument])
    heads = ["", "MB sent", "exposed ms", "step ms", "x DDP", "memory MB", "argument"]
    ranks, hosts = situation.topology.world, len(situation.topology.leaders)
    assumed = (
        "codecs are timed on this machine, and share the core with training"
        if gigabytes is None
        else f"codecs on GPUs are assumed to take {gigabytes:g} GB of gradients a second: no GPU was measured"
    )
    elements = sum(layer.size for layer in layers)
    show(
        f"{elements:,} parameters in {len(layers)} layers, {ranks} ranks on {hosts} hosts; a step without exchange "
        f"takes {milliseconds(situation.alone)} ms\nmodelled; bytes by machine and step, memory by rank; {assumed}",
        table(heads, rows, left={0, 6}),
        line,
    )


def _as_json(one: Estimate) -> dict[str, Any]:
    return {
        "key": one.choice.key,
        "title": one.choice.title,
        "compression": one.choice.how if one.choice.kind == "gradcomp" else None,
        "sent_bytes": one.sent,
        "exposed_seconds": one.exposed,
        "step_seconds": one.step,
        "memory_bytes": one.memory,
    }
