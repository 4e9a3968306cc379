"""Compares the autoencoder with PyTorch's layers, and tests that no order of sums changes its results."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gradcomp.contrib.lgc import autoencoder as autoencoder_module
from gradcomp.contrib.lgc.autoencoder import Autoencoder, product, whole
from gradcomp.contrib.lgc.server import Decoders

TOLERANCE = 1e-5


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return product(whole(a, a.shape[1]), whole(b, a.shape[1]))


def weights_of(net: Autoencoder) -> np.ndarray:
    return net.first_weights(3)


def tensors(net: Autoencoder, weights: np.ndarray) -> list[torch.Tensor]:
    """Returns the leaves of the graph in PyTorch's shapes: (out, in, 3), and (in, out, 3) for deconvolutions."""
    parts = np.split(weights, np.cumsum([rows * columns for rows, columns in net.shapes])[:-1])
    found = []
    for i, (part, (rows, columns)) in enumerate(zip(parts, net.shapes, strict=True)):
        taps = 1 if i == 9 and net.deconvolutions == 4 else 3
        by_tap = part.reshape(rows, taps, columns // taps).transpose(0, 2, 1)
        found.append(torch.tensor(by_tap, dtype=torch.float64, requires_grad=True))
    return found


def encoded(layers: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i, stride in enumerate((2, 2, 2, 2, 1)):
        x = F.conv1d(x, layers[i], stride=stride, padding=1)
        x = x if i == 4 else F.leaky_relu(x, 0.01)
    return x


def decoded(layers: list[torch.Tensor], x: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    strides = (2, 2, 2, 2) if len(layers) == 10 else (1, 2, 2, 2, 2)
    for weights, stride in zip(layers[5:-1], strides, strict=True):
        x = F.conv_transpose1d(x, weights, stride=stride, padding=1, output_padding=stride - 1)
        x = F.leaky_relu(x, 0.01)
    x = x if beside is None else torch.cat([x, beside], 1)
    return F.conv1d(x, layers[-1], padding=layers[-1].shape[-1] // 2)


def samples(ranks: int, values: int) -> np.ndarray:
    rows = np.random.default_rng(values).standard_normal((ranks, values))
    return (rows / np.sqrt(values)).astype(np.float32)


def padded(rows: np.ndarray) -> torch.Tensor:
    wide = np.zeros((len(rows), 1, -(-rows.shape[1] // 16) * 16))
    wide[:, 0, : rows.shape[1]] = rows
    return torch.tensor(wide)


def assert_close(got: np.ndarray, want: torch.Tensor) -> None:
    expected = want.detach().numpy().reshape(-1)
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize(("channels", "values", "deconvolutions"), [(4, 16, 5), (4, 50, 4), (1, 300, 5)])
def test_code_and_decode_are_those_of_pytorch(channels: int, values: int, deconvolutions: int):
    net = Autoencoder(channels, deconvolutions=deconvolutions)
    weights, row = net.first_weights(3), samples(1, values)
    layers = tensors(net, weights)
    code = net.encode(weights, row[0])
    assert len(code) == net.code_length(values) == channels * -(-values // 16)
    expected = encoded(layers, padded(row))
    assert_close(code, expected)
    assert_close(net.decode(weights, code, values), decoded(layers, expected)[0, 0, :values])


@pytest.mark.parametrize(
    ("channels", "values", "ranks", "deconvolutions"), [(4, 50, 1, 4), (4, 64, 3, 5), (1, 40, 2, 5)]
)
def test_loss_and_gradient_are_those_of_pytorch(channels: int, values: int, ranks: int, deconvolutions: int):
    net = Autoencoder(channels, deconvolutions=deconvolutions)
    weights, rows = net.first_weights(3), samples(ranks, values)
    layers = tensors(net, weights)
    inputs = padded(rows)
    found = decoded(layers, encoded(layers, inputs).mean(0, keepdim=True))
    expected = (found - inputs.mean(0, keepdim=True)).square().sum()
    expected.backward()
    loss, gradient = net.gradient(weights, rows)
    assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
    parts = np.split(gradient, np.cumsum([a * b for a, b in net.shapes])[:-1])
    for part, layer in zip(parts, layers, strict=True):
        assert_close(part, layer.grad.permute(0, 2, 1))
    trained, before = net.train(weights, rows, 0.001)
    assert before == loss
    np.testing.assert_array_equal(trained, weights - np.float32(0.001) * gradient)


@pytest.mark.parametrize(
    ("ranks", "similarity", "drawn", "deconvolutions"), [(3, 0.5, 1, 5), (2, 0.0, 0, 4), (1, 2.0, 0, 5)]
)
def test_loss_and_gradient_of_many_decoders_are_those_of_pytorch(
    ranks: int, similarity: float, drawn: int, deconvolutions: int
):
    net = Decoders(4, ranks, similarity, deconvolutions)
    first = net.first_weights(3)
    weights = (first + 0.01 * np.random.default_rng(0).standard_normal(net.size)).astype(np.float32)
    rows = samples(ranks, 50)
    innovations = np.where(np.abs(rows) > 0.2, rows, np.float32(0))
    assert innovations.any()
    end, step = net.pair.encoder_size, net.decoder_size
    parts = [weights[end + k * step : end + (k + 1) * step] for k in range(ranks)]
    decoders = [tensors(net.pair, np.concatenate([weights[:end], part])) for part in parts]
    for layers in decoders[1:]:
        layers[:5] = decoders[0][:5]
    inputs, beside = padded(rows), padded(innovations)
    codes = encoded(decoders[0], inputs)
    found = torch.cat(
        [decoded(decoders[k], codes[drawn : drawn + 1], beside[k : k + 1]) for k in range(ranks)]
    )
    reconstruction = (found - inputs).square().sum()
    pairs = sum((codes[k] - codes[m]).square().sum() for k in range(ranks) for m in range(ranks) if m != k)
    (reconstruction + similarity * pairs).backward()
    loss, apart, gradient = net.gradient(weights, rows, innovations, drawn)
    assert loss == pytest.approx(reconstruction.item(), rel=TOLERANCE)
    assert apart == pytest.approx(torch.as_tensor(pairs).item(), rel=TOLERANCE)
    shapes = [*net.pair.shapes[:5], *net.pair.shapes[5:] * ranks]
    leaves = [*decoders[0][:5], *(layer for layers in decoders for layer in layers[5:])]
    got = np.split(gradient, np.cumsum([a * b for a, b in shapes])[:-1])
    for part, layer in zip(got, leaves, strict=True):
        assert_close(part, layer.grad.permute(0, 2, 1))
    decoded_rows = net.decode(weights, net.encode(weights, rows[drawn]), innovations)
    assert_close(decoded_rows.reshape(-1), found[:, 0, :50])
    trained, before = net.train(weights, rows, innovations, drawn, 0.001)
    assert before == loss / ranks
    np.testing.assert_array_equal(trained, weights - np.float32(0.001) * gradient)


def test_decoders_that_are_not_trained_give_nearly_the_innovations():
    net, rows = Decoders(4, 3), samples(3, 640)
    weights = net.first_weights(0)
    found = net.decode(weights, net.encode(weights, rows[0]), rows)
    assert np.linalg.norm(found - rows) < 0.5 * np.linalg.norm(rows)


def test_other_numbers_of_ranks_keep_decoders_and_begin_others():
    first, old = Decoders(4, 5).first_weights(1), Decoders(4, 3).first_weights(0)
    end, step = Decoders(4, 3).pair.encoder_size, Decoders(4, 3).decoder_size
    wider = Decoders(4, 5).adapted(old, 1)
    np.testing.assert_array_equal(wider[: len(old)], old)
    np.testing.assert_array_equal(wider[len(old) :], first[end + 3 * step :])
    np.testing.assert_array_equal(Decoders(4, 1).adapted(old, 1), old[: end + step])
    assert Decoders(4, 5).adapted(old[:-1], 1) is None
    assert Decoders(4, 5).adapted(old[:end], 1) is None


def test_the_sizes_are_those_that_are_documented():
    assert (Autoencoder(4).size, Autoencoder(4, deconvolutions=4).size) == (219_552, 216_416)
    assert (Autoencoder(1).size, Autoencoder(1, deconvolutions=4).size) == (218_688, 215_552)
    assert Decoders(4, 1).size == 219_555
    assert Decoders(4, 2).decoder_size == 46_563
    assert Decoders(4, 2).pair.encoder_size == 172_992


def test_first_weights_keep_the_size_of_the_code_and_give_little():
    net = Autoencoder(4)
    weights, row = net.first_weights(0), samples(1, 4096)[0]
    code = net.encode(weights, row)
    assert 0.2 < np.linalg.norm(code) / np.linalg.norm(row) < 5
    assert np.linalg.norm(net.decode(weights, code, len(row))) < 0.5 * np.linalg.norm(row)
    assert not np.array_equal(weights, net.first_weights(1))


def test_coding_commutes_with_powers_of_two_and_zeros_give_zeros():
    net = Autoencoder(4)
    weights, row = net.first_weights(3), samples(1, 50)[0]
    np.testing.assert_array_equal(
        net.encode(weights, row * np.float32(2.0**-40)), net.encode(weights, row) * np.float32(2.0**-40)
    )
    assert not net.decode(weights, net.encode(weights, np.zeros(50, np.float32)), 50).any()


def test_a_scale_of_the_samples_is_its_square_in_the_rate():
    net, rows = Autoencoder(4), samples(2, 50)
    weights = net.first_weights(3)
    trained, loss = net.train(weights, rows, 2.0**-6)
    scaled, larger = net.train(weights, rows * np.float32(8), 2.0**-12)
    np.testing.assert_array_equal(trained, scaled)
    assert larger == 64 * loss


def test_a_step_that_is_not_finite_changes_nothing():
    net = Autoencoder(4)
    weights = net.first_weights(3)
    trained, _ = net.train(weights, np.full((1, 16), 1e30, np.float32), 0.9)
    np.testing.assert_array_equal(trained, weights)


# --- products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 3, 64, 768, 6000])
def test_products_do_not_depend_on_the_order_of_their_sums(terms: int):
    generator = np.random.default_rng(terms)
    a = generator.standard_normal((7, terms)).astype(np.float32)
    b = (1e-6 * generator.standard_normal((terms, 9))).astype(np.float32)
    order = generator.permutation(terms)
    product = exact_product(a, b)
    np.testing.assert_array_equal(exact_product(a[:, order], np.ascontiguousarray(b[order])), product)
    np.testing.assert_array_equal(exact_product(b.T, a.T).T, product)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(product, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("threads", [0, 1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3000), (3000, 1), (129, 67), (700, 1100)])
def test_products_in_blocks_are_the_products(rows: int, columns: int, threads: int, monkeypatch):
    """The last product is computed in one piece, and so are all if the BLAS has one thread."""
    monkeypatch.setattr(autoencoder_module, "_threads", lambda: lambda: threads)
    generator = np.random.default_rng(rows)
    a = generator.integers(-9, 9, (rows, 130)).astype(np.float32)
    b = generator.integers(-9, 9, (130, columns)).astype(np.float32)
    np.testing.assert_array_equal(exact_product(a, b), a.astype(np.int64) @ b.astype(np.int64))


def test_the_largest_sums_stay_exact():
    terms = 1023
    one = np.float32(np.nextafter(np.float32(1), np.float32(0)))  # rounds up to 2**bits
    product = exact_product(np.full((1, terms), one), np.full((terms, 1), one))
    assert product[0, 0] == terms


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_factor_that_is_not_finite_makes_the_product_nan(value: float):
    assert np.isnan(exact_product(np.array([[1, value]], np.float32), np.ones((2, 3), np.float32))).all()


def test_zeros_and_the_smallest_numbers_pass():
    assert not exact_product(np.zeros((2, 3), np.float32), np.ones((3, 2), np.float32)).any()
    tiny = np.full((1, 1), 1e-45, np.float32)
    np.testing.assert_array_equal(exact_product(tiny, np.ones((1, 1), np.float32)), tiny)


def test_the_threads_of_numpys_blas_are_known(monkeypatch):
    assert autoencoder_module._threads()() >= 0
    monkeypatch.setattr(autoencoder_module.ctypes, "CDLL", lambda path: object())
    assert autoencoder_module._threads.__wrapped__()() == 0
