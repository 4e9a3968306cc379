"""``ElasticSampler``: which samples a rank takes, while the number of ranks changes in mid-epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import numpy as np

from gradcomp.job import runtime


class ElasticSampler:
    """Gives each rank its part of an epoch's samples, and after a change of ranks its part of those that are left.

    All ranks shuffle alike. Rank i of N takes elements i, i + N, ... of the samples that no rank has processed; at the
    end some are given twice, so that all ranks have equally many. Give it to the state too, and call
    :meth:`record_batch` after each step.

    Args:
        dataset: what has a length.
        shuffle: whether samples come in a random order, another one in each epoch.
        seed: the seed of that order, equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        #: How many samples of the epoch all ranks have processed.
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing is processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def reset(self) -> None:
        """Share out the rest of the epoch over the ranks of now."""
        initialized = runtime.is_initialized()
        self.rank, self.num_replicas = (runtime.rank(), runtime.size()) if initialized else (0, 1)
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        self.remaining_indices: list[int] = order[self.processed_num :].tolist()
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of its samples that are processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from the result of :meth:`state_dict`, with the ranks of now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        left, size = self.remaining_indices, len(self.remaining_indices)
        places = range(self.rank, self.num_samples * self.num_replicas, self.num_replicas)
        return iter([left[place % size] for place in places])

    def __len__(self) -> int:
        return self.num_samples
