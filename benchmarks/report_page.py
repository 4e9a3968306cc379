"""The page of a report, and what its run log costs a step.

    python benchmarks/report_page.py                       # both; needs Chromium: make chromium
    python benchmarks/report_page.py --only logging --pairs 200
    python benchmarks/report_page.py --train gravac --log run.jsonl    # a run to make a page of

The page is that of a made-up run: 1,000 steps, 160 layers, 8 ranks, GraVAC's gains and 60 changes of plan. It is opened
in a headless Chromium, which tells when the last chart is drawn; a figure is the median of five.

The cost is that of two ranks on this host over Gloo, which train a GPT of 160 layers with TopK and error feedback. The
log of steps and layers is on for ten steps and off for ten, on both ranks: A B A B ... in one job. A ratio is that of
the mean steps of a block and the next one; their mean has an interval of 95%, by the bootstrap. Beside it stands what
the calls of the log took on rank 0, counted in every call, with its background work: of the steps with a log, and for
samples of layers, which go by the clock, of all steps.

The bars: the page is below 3 MB and drawn within 2 s; logging takes at most 0.5% of a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import report

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES, MOST_SECONDS, MOST_SHARE = 3_000_000, 2.0, 0.005
BLOCK_STEPS = 10
#: The calls that are about samples of layers.
SAMPLES = ("look", "measured")
#: Chromium's numbers of them.
SCHEMES = {"dark": 0, "light": 1}

# -- the page ------------------------------------------------------------------------------------------------------


def long_run(path: Path, steps: int = 1000, layers: int = 160, ranks: int = 8, seed: int = 0) -> None:
    """Writes the log of a made-up run, in which rank 3 is slow, to ``path``."""
    import gradcomp as gc
    from gradcomp.core.journal import Journal
    from gradcomp.core.run_lines import PERIOD, Factor, Gains, Sample, Window

    draw = np.random.default_rng(seed)
    specs = [gc.LayerSpec(f"blocks.{k // 4}.part{k % 4}.weight", (64 + k, 256)) for k in range(layers)]
    journal = Journal(path)
    journal.run(ranks, "gravac(minimum=10)", "error_feedback[topk:density=0.1]", specs)
    windows = steps // 10
    for number in range(windows):
        step = 10 * number
        if number % max(windows // 60, 1) == 0:
            levels = [gc.Quantize(int(bits)) for bits in draw.integers(2, 8, layers)]
            rows = zip(specs, levels, strict=True)
            plan = gc.Plan(number, tuple(gc.Assignment(s.name, c.family_string(), c.level) for s, c in rows))
            sent = [spec.size * level.bits / 8 for spec, level in zip(specs, levels, strict=True)]
            journal.choice(step, f"window ends at step {step}: more of the errors fit the budget")
            journal.plan(step, plan, sent)
        worked = 0.05 + 0.004 * draw.random(ranks)
        worked[3] += 0.008 * (draw.random() < 0.7)
        end = worked.max() + 0.006
        waited, last = worked.max() - worked, np.eye(ranks)[worked.argmax()] * 10
        parts = {
            "seconds": np.full(ranks, end), "backward": 0.6 * worked, "exposed": end - worked, "waited": waited,
            "codec": np.full(ranks, 0.003), "wire": np.full(ranks, 0.02), "sent_bytes": np.full(ranks, 8e5),
            "last": last,
        }  # fmt: skip
        rounded = {name: tuple(np.round(values, 7).tolist()) for name, values in parts.items()}
        skipped = ((step + 4, 7),) if number in (2, 50) else ()
        journal.line(Window(step, 10, **rounded, skipped=skipped, discarded=int(number == 9)))
        for layer in draw.integers(0, layers, 4).tolist():
            norm, share = float(draw.random()) + 0.1, float(draw.random())
            journal.line(Sample(step, layer, round(norm, 4), round(share, 4), round(0.5 * share, 5)))
        if number % 10 == 9:
            for layer in range(layers):
                journal.line(Sample(step, layer, 1.0, None, round(0.1 * float(draw.random()), 5), PERIOD))
        factors = [
            (1.0, 1.0, None),
            (10.0, 0.9, 30.0),
            (20.0, 0.8 - 0.1 * np.exp(-number), 45.0),
            (40.0, None, None),
        ]
        found = tuple(Factor(factor, gain, speed, step) for factor, gain, speed in factors)
        journal.line(Gains(step, "*", 0.7, 10.0, 20.0, 2.0 + float(np.sin(number)), (1.5, 1.25), found))
    journal.close()


class _Serve(SimpleHTTPRequestHandler):
    """Serves a folder, and takes what the page that looks at a report has found."""

    found: queue.Queue[bytes]

    def do_POST(self) -> None:
        self.found.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def look(page: Path, chromium: str, width: int, scheme: str, timeout: float = 60.0) -> dict[str, Any]:
    """Opens a report in a headless Chromium and returns what is drawn; ``console`` has what it wrote there."""
    found: queue.Queue[bytes] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "report.html").write_bytes(page.read_bytes())
        (root / "look.html").write_bytes(Path(__file__).with_suffix(".html").read_bytes())
        handler = functools.partial(type("Serve", (_Serve,), {"found": found}), directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            flags = [
                "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--remote-debugging-port=0",
                f"--user-data-dir={folder}/profile", f"--window-size={max(width, 500)},1000",
                f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            ]  # fmt: skip
            url = f"http://127.0.0.1:{server.server_port}/look.html?width={width}"
            with (root / "stderr").open("w+b") as errors:
                browser = subprocess.Popen([chromium, *flags, url], stdout=errors, stderr=errors)
                try:
                    posted = found.get(timeout=timeout)
                except queue.Empty:
                    errors.seek(0)
                    raise RuntimeError(f"nothing was drawn: {errors.read()[-2000:].decode()}") from None
                finally:
                    browser.terminate()
                    browser.wait()
                    server.shutdown()
                    thread.join()
                errors.seek(0)
                lines = errors.read().decode(errors="replace").splitlines()
    return {**json.loads(posted), "console": [line for line in lines if "CONSOLE" in line]}


def shoot(page: Path, chromium: str, out: Path, width: int, height: int, scheme: str) -> None:
    """Takes a picture of the top of a report."""
    flags = [
        "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        f"--window-size={width},{height}", f"--screenshot={out}",
    ]  # fmt: skip
    subprocess.run([chromium, *flags, page.resolve().as_uri()], check=True, capture_output=True)


def measure_page(chromium: str, repeats: int = 5) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "run.jsonl", Path(folder) / "report.html"
        long_run(log)
        command = [sys.executable, "-m", "gradcomp", "report", str(log), "-o", str(page)]
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        made = time.perf_counter() - begin
        opened = [look(page, chromium, 1366, "light")["seconds"] for _ in range(repeats)]
        return {
            "log_bytes": log.stat().st_size,
            "page_bytes": page.stat().st_size,
            "made_seconds": made,
            "opened_seconds": opened,
        }


# -- the cost of logging -------------------------------------------------------------------------------------------


class Counted:
    """Adds up the seconds of some methods, on any thread, each without those that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = threading.local()

    def wrap(self, owner: Any, name: str) -> None:
        work = getattr(owner, name)

        @functools.wraps(work)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "held", False):
                return work(*args, **kwargs)
            self._inside.held, begin = True, time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._inside.held = False
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        setattr(owner, name, counted)


def run_rank(pairs: int, log: str) -> dict[str, Any]:
    """Trains in blocks, with and without lines about steps and layers in turn."""
    import torch
    from models import WordGPT

    import gradcomp.torch as gc
    from gradcomp.exchange import layer_samples
    from gradcomp.exchange.layer_samples import LayerSamples
    from gradcomp.exchange.run_log import RunLog
    from gradcomp.exchange.step_times import StepTimes
    from gradcomp.job import runtime

    counted = Counted()
    for owner, names in {
        StepTimes: ("opened", "waited", "issue"),
        RunLog: ("_write_window",),
        LayerSamples: ("look",),
        layer_samples: ("measured",),
    }.items():
        for name in names:
            counted.wrap(owner, name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = WordGPT(2000, width=64, layers=13, heads=4, length=32)
    gc.init(log_level="error", run_log=log, run_log_every_steps=BLOCK_STEPS)
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), gc.TopK(0.05)
    )
    (exchanger,) = runtime.current().exchangers
    pipeline = exchanger.pipeline
    on = pipeline.times, pipeline.samples
    generator = torch.Generator().manual_seed(gc.rank())
    means: list[float] = []
    # The window of the last block that counts is gathered in a block after it.
    for block in range(2 * pairs + 3):
        pipeline.times, pipeline.samples = on if block % 2 == 0 else (None, None)
        exchanger._times = pipeline.times
        begin = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            words = torch.randint(0, 2000, (16, 33), generator=generator)
            optimizer.zero_grad()
            model(words[:, :-1], words[:, 1:]).backward()
            optimizer.step()
        means.append((time.perf_counter() - begin) / BLOCK_STEPS)
        if block == 1:
            counted.seconds.clear()
    gc.shutdown()
    means = means[2:-1]
    all_seconds, logged = BLOCK_STEPS * sum(means), BLOCK_STEPS * sum(means[::2])
    layers = sum(1 for _ in model.parameters())
    return {
        "means": means,
        "layers": layers,
        "counted": counted.seconds,
        "seconds": all_seconds,
        "logged_seconds": logged,
    }


def measure_logging(pairs: int) -> dict[str, Any]:
    from soak import launch

    with tempfile.TemporaryDirectory() as folder:
        found = launch([__file__, "--rank", "--pairs", str(pairs), "--log", f"{folder}/run.jsonl"])[0]
    means = np.array(found["means"]).reshape(-1, 2)
    ratios = means[:, 0] / means[:, 1] - 1
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios))).mean(axis=1)
    shares = {
        name: seconds / found["seconds" if name in SAMPLES else "logged_seconds"]
        for name, seconds in found["counted"].items()
    }
    return {
        **found,
        "ratio": float(ratios.mean()),
        "interval": np.quantile(draws, [0.025, 0.975]).tolist(),
        "shares": shares,
        "counted_share": sum(shares.values()),
    }


# -- a run for pictures --------------------------------------------------------------------------------------------

CONTROLLED = {
    "gravac": ("error_feedback[topk:density=0.1]", "gravac:minimum=10,maximum=160,window=60"),
    "lgreco": ("quantize:bits=4", "lgreco:every_steps=60"),
}


def train_rank(kind: str, log: str, steps: int) -> dict[str, Any]:
    """Trains a GPT on words of Python's standard library, a batch of 16 lines of 32 words a step."""
    import torch
    from models import WordGPT, load_text

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.init(run_log=log, log_level="warning")
    text = load_text(None, vocabulary=4000, limit_words=200_000)
    model = WordGPT(4000, width=128, layers=4, heads=4, length=32)
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    compression, controller = CONTROLLED[kind]
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3),
        model.named_parameters(),
        compression,
        controller=controller,
    )
    loss = torch.zeros(())
    for (words, targets), _ in zip(text.batches(gc.rank(), 16, 32, 0), range(steps), strict=False):
        optimizer.zero_grad()
        loss = model(words, targets)
        loss.backward()
        optimizer.step()
    gc.shutdown()
    return {"loss": loss.item()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("page", "logging"))
    parser.add_argument("--pairs", type=int, default=100, help="pairs of blocks (default: 100)")
    parser.add_argument("--steps", type=int, default=500, help="steps of a run to train (default: 500)")
    parser.add_argument("--train", choices=CONTROLLED, help="train three ranks instead, with this controller")
    parser.add_argument("--log", help="the run log of --train")
    parser.add_argument(
        "--chromium", default=os.environ.get("GRADCOMP_CHROMIUM", str(ROOT / "scripts/chromium.sh"))
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        trained = options.train and train_rank(options.train, options.log, options.steps)
        print(json.dumps(trained or run_rank(options.pairs, options.log)))
        return 0
    if options.train:
        from soak import launch

        if options.log is None:
            parser.error("--train needs --log")
        print(launch([__file__, *sys.argv[1:], "--rank"], 3)[0])
        return 0
    machine = report.machine()
    print(report.describe(machine))
    found: dict[str, Any] = {"machine": machine}
    met = []
    if options.only != "logging":
        found["page"] = page = measure_page(options.chromium)
        opened = statistics.median(page["opened_seconds"])
        met += [page["page_bytes"] < MOST_BYTES, opened < MOST_SECONDS]
        row = [
            f"{page['log_bytes'] / 1e6:.2f}",
            f"{page['page_bytes'] / 1e6:.2f}",
            f"{page['made_seconds']:.1f}",
        ]
        rows = [["1,000 steps, 160 layers, 8 ranks", *row, f"{opened:.2f}", "yes" if all(met) else "NO"]]
        print(report.table(["run", "MB of log", "MB of page", "s to make", "s to open", "bars met"], rows))
    if options.only != "page":
        found["logging"] = cost = measure_logging(options.pairs)
        low, high = cost["interval"]
        met.append(cost["counted_share"] <= MOST_SHARE)
        step = f"{1e3 * statistics.mean(cost['means'][1::2]):.1f}"
        beside = f"{cost['ratio']:+.2%} ({low:+.2%} to {high:+.2%})"
        rows = [
            [
                f"{cost['layers']} layers",
                step,
                beside,
                f"{cost['counted_share']:.2%}",
                "yes" if met[-1] else "NO",
            ]
        ]
        print(
            report.table(["model", "ms a step", "with a log", "counted in its calls", "at most 0.5%"], rows)
        )
        print("; ".join(f"{name} {share:.3%}" for name, share in cost["shares"].items()))
    if options.json:
        options.json.write_text(json.dumps(found))
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
