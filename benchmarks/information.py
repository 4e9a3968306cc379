"""The information plane of gradients (Abrahamyan et al. 2021, section III): what two ranks' gradients have in common.

    python benchmarks/information.py --cifar cifar10_10k.npz [--data text.txt] [--figures docs]

ResNet-20 on CIFAR-10 and an LSTM on text train uncompressed with two ranks, then ResNet-20 with four. Every
``--every`` steps the gradients are recorded as they are before compression: layers of up to 40,000 elements whole, as
in the paper, of larger ones so many elements. The table has the mean over layers and steps of the entropy H, of the
mutual information I, and of I where the elements of one rank were shuffled; each for several histograms. *Gaussian* is
the exact information of Gaussian variables with the correlation of the gradients, *estimated* what the histogram finds
in such draws. *Magnitudes* is I - shuffled where the signs of one rank's gradients are drawn at random, which leaves
what the magnitudes have in common. ``--figures`` draws Figures 3 and 4 for both models, and Figure 12 for four ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from convergence_rows import LSTM, RESNET
from convergence_tasks import Settings, load, make_job
from options import positive
from soak import launch

#: Whole layers of ResNet-20.
ELEMENTS = 40_000
#: By the name in the table: how the histogram is made.
HISTOGRAMS: dict[str, dict[str, Any]] = {
    "2^32 levels": {"bins": 2**32},
    "2^14 levels": {"bins": 2**14},
    "2^12 levels": {"bins": 2**12},
    "2 m^(1/3) bins": {},
    "2 m^(1/3) quantiles": {"binning": "quantile"},
}
HEADERS = [
    "bits per element",
    "H",
    "I",
    "shuffled",
    "excess",
    "Gaussian",
    "estimated",
    "magnitudes",
    "I/H, %",
    "shuffled/H, %",
]
#: Task, ranks, and the pairs that are compared; those of four ranks were drawn once.
RUNS = {
    "resnet": (RESNET, 2, ((0, 1),)),
    "lstm": (LSTM, 2, ((0, 1),)),
    "resnet-four": (RESNET, 4, ((0, 2), (1, 3))),
}


def run_rank(options: argparse.Namespace, task: str, path: Path) -> None:
    """Train and record."""
    import torch

    import gradcomp.torch as gc

    torch.set_num_threads(1)
    gc.init(log_level="warning")
    settings = Settings(0, options.steps, 0, *(str(p) if p else None for p in (options.data, options.cifar)))
    job = make_job(task, settings, load(task, settings), options.seed, gc.rank(), gc.size())
    opt = gc.DistributedOptimizer(job.optimizer, job.model.named_parameters())
    gc.record_gradients(opt, path, every=options.every, elements=ELEMENTS, limit_bytes=1 << 30)
    loss = torch.zeros(())
    for _, (inputs, targets) in zip(range(options.steps), job.batches, strict=False):
        opt.zero_grad()
        loss = job.loss(job.model, inputs, targets)
        loss.backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip)
        opt.step()
    gc.shutdown()
    print(json.dumps({"loss": loss.item()}))


def with_drawn_signs(found: Any, rank: int) -> Any:
    """The recording with random signs on one rank."""
    import numpy as np

    values = found.values.copy()
    signs = np.random.default_rng(0).integers(2, size=values[:, rank].shape, dtype=np.int8)
    values[:, rank] *= (2 * signs - 1).astype(np.float32)
    return dataclasses.replace(found, values=values)


def rows_of(name: str, found: Any, pairs: Any, shuffles: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """A row of the table for each histogram and pair, and the planes."""
    import numpy as np

    from gradcomp.analysis import information_plane

    rows, planes = [], {}
    for pair in pairs:
        unsigned = with_drawn_signs(found, pair[1])
        for title, settings in HISTOGRAMS.items():
            plane = planes[pair, title] = information_plane(found, pair, shuffles=shuffles, **settings)
            drawn = information_plane(unsigned, pair, shuffles=shuffles, **settings)
            bits = [plane.entropy, plane.mutual, plane.null, plane.mutual - plane.null, plane.gaussian]
            rows.append(
                [
                    f"{name}, ranks {pair[0]} and {pair[1]}, {title}",
                    *(f"{np.nanmean(values):.3f}" for values in bits),
                    f"{np.nanmean(plane.calibration):.3f}",
                    f"{np.nanmean(drawn.mutual - drawn.null):.3f}",
                    f"{100 * plane.share(plane.mutual):.1f}",
                    f"{100 * plane.share(plane.null):.1f}",
                ]
            )
    return rows, planes


def draw(name: str, planes: dict[Any, Any], pairs: Any, directory: Path) -> None:
    """Figures 3 and 4 by the paper's histogram and by ours; of more ranks one row for each pair."""
    from gradcomp.plots import draw_information

    titles = [title for title, settings in HISTOGRAMS.items() if settings in ({"bins": 2**32}, {})]
    shown = (
        [(pair, titles[1]) for pair in pairs] if len(pairs) > 1 else [(pairs[0], title) for title in titles]
    )
    heads = [f"ranks {pair[0]} and {pair[1]}, {title}" for pair, title in shown]
    draw_information([planes[key] for key in shown], directory / f"information-{name}.png", heads)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", choices=RUNS, action="append", help="some runs only (default: all)")
    parser.add_argument("--cifar", type=Path, help="CIFAR-10 as .npz; without it there is no ResNet")
    parser.add_argument(
        "--data", type=Path, help="a text file (default: the text of Python's standard library)"
    )
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--every", type=positive, default=10)
    parser.add_argument("--shuffles", type=positive, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figures", type=Path, help="draw into this directory")
    parser.add_argument(
        "--keep", type=Path, help="leave the recordings in this directory; what is there is not trained again"
    )
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options, RUNS[options.rank][0], options.path)
        return 0
    for name in ("data", "cifar"):
        if (path := getattr(options, name)) is not None and not path.is_file():
            parser.error(f"--{name}: there is no file {path}")
    chosen = options.run or [run for run, (task, *_) in RUNS.items() if task != RESNET or options.cifar]
    if options.cifar is None and any(RUNS[run][0] == RESNET for run in chosen):
        parser.error("ResNet needs --cifar")
    from gradcomp.analysis import read

    machine, rows, losses = report.machine(), [], []
    with tempfile.TemporaryDirectory(prefix="gradcomp-information-") as temporary:
        for name in chosen:
            _, world, pairs = RUNS[name]
            path = (options.keep or Path(temporary)) / f"{name}.npz"
            if not path.exists():
                ended = launch([__file__, *sys.argv[1:], "--rank", name, "--path", str(path)], world)
                losses.append(f"{name}: {ended[0]['loss']:.3f}")
            found, planes = rows_of(name, read(path), pairs, options.shuffles)
            rows += found
            if options.figures:
                draw(name, planes, pairs, options.figures)
    print(report.describe(machine))
    print(report.table(HEADERS, rows))
    if losses:
        print(f"loss of rank 0 in the last of {options.steps} steps: {'; '.join(losses)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
