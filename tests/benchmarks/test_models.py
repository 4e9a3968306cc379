"""What the benchmarks train."""

from __future__ import annotations

import itertools

import models
import numpy as np
import pytest
import torch


def numbered_images(margin: int) -> models.Images:
    """Two images, of 1 2 3 4 and 5 6 7 8 in the first row, zero elsewhere."""
    images = torch.zeros(2, 1, 4, 4)
    images[0, 0, 0], images[1, 0, 0] = torch.arange(1.0, 5), torch.arange(5.0, 9)
    return models.Images(images, torch.arange(2), images, torch.arange(2), margin)


def test_images_are_shifted_and_flipped_one_by_one():
    data = numbered_images(margin=1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([data.augmented(torch.tensor([1, 0]), generator) for _ in range(100)])
    seen = {tuple(row) for batch in drawn[:, 0, 0].tolist() for row in batch if any(row)}
    row = (5.0, 6.0, 7.0, 8.0)
    shifted = {(*row[1:], 0.0), row, (0.0, *row[:-1])}
    flipped = row[::-1]
    assert seen == shifted | {(*flipped[1:], 0.0), flipped, (0.0, *flipped[:-1])}
    assert not torch.equal(drawn[:, 0] > 0, drawn[:, 1] > 0), "each image has a draw of its own"


def test_without_a_margin_images_stay_as_they_are():
    data = numbered_images(margin=0)
    assert torch.equal(data.augmented(torch.tensor([1]), torch.Generator()), data.images[1:])


def test_cifar_is_averaged_to_16_pixels_in_the_order_of_colours(tmp_path):
    pixels = np.zeros((3, 32, 32, 3), np.uint8)
    pixels[1, :2, :2, 2] = 255  # the first small pixel, blue
    labels = np.array([3, 1, 2], np.uint8)
    path = tmp_path / "images.npz"
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels[:1], y_test=labels[:1])
    data = models.load_cifar(path)
    assert data.images.shape == (3, 3, 16, 16)
    assert data.labels.tolist() == [3, 1, 2]
    assert torch.nonzero(data.images > 0).tolist() == [[1, 2, 0, 0]]


@pytest.mark.parametrize(
    ("make", "millions"),
    [
        (models.WordLSTM, 10.6),
        (lambda: models.ResNet((2, 2, 2, 2), 64), 11.173_962),
        (lambda: models.ResNet((3, 3, 3), 16), 0.272_474),
    ],
    ids=["WordLSTM", "ResNet-18", "ResNet-20"],
)
def test_models_have_their_usual_size(make, millions):
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(
        millions, rel=5e-3 if millions == 10.6 else 1e-9
    )


def test_words_are_numbered_by_falling_frequency_and_the_rest_is_word_0(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(["a"] * 50 + ["b"] * 30 + ["c"] * 20))
    text = models.load_text(path, vocabulary=3)
    assert text.train.tolist() == [1] * 50 + [2] * 30 + [0] * 10
    assert text.test.tolist() == [0] * 10


def test_targets_are_the_words_after_the_tokens(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"{i:03}" for i in range(200)))
    text = models.load_text(path)
    tokens, targets = next(text.batches(rank=0, batch=4, length=5, seed=0))
    assert torch.equal(targets, tokens + 1)
    for tokens, targets in text.test_batches(batch=2, length=3, limit=100):
        assert torch.equal(targets, tokens + 1)


def test_byte_pairs_are_learned_from_what_is_not_held_out(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 900 + "cd" * 100)
    text = models.load_byte_pairs(path, vocabulary=258)
    assert len(text.test) == 200  # no pair was learned for the letters of the held-out tenth
    assert len(text.train) == 450  # "abab" is one token: "ab" was learned first, then twice as much
    assert len(models.load_byte_pairs(path, vocabulary=257).train) == 900


def test_batches_depend_on_seed_and_rank_only():
    text = models.Text(torch.arange(1000), torch.arange(10), "numbers")

    def first(rank: int, seed: int) -> list[int]:
        batches = itertools.islice(text.batches(rank, 2, 4, seed), 3)
        return torch.cat([tokens for tokens, _ in batches]).flatten().tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(rank, seed)) for rank in range(2) for seed in range(2)}) == 4


def test_the_standard_library_is_text_enough():
    text = models.load_text(None, limit_words=100_000)
    assert len(text.train) == 90_000
    assert len(text.test) == 10_000
