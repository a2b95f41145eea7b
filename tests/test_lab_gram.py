"""Inner products of scores: from parameters, from a layer's deltas and inputs, and through sketches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_kernels import lab


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_blocks_add_up_to_the_whole() -> None:
    blocks = [normal(2, 3, 4, 5), normal(2, 3, 7, seed=1), normal(2, 3, seed=2)]
    whole = torch.cat([block.reshape(2, 3, -1) for block in blocks], 2)
    torch.testing.assert_close(lab.score_gram(blocks), whole @ whole.mT, rtol=1e-12, atol=1e-12)
    array = lab.score_gram(whole.numpy())
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, (whole @ whole.mT).numpy())


@pytest.mark.parametrize("masked", [False, True])
def test_ghost_products_are_those_of_the_gradients(masked: bool) -> None:
    P, G, T, Do, Di = 2, 3, 5, 4, 6
    weight = normal(Do, Di).requires_grad_()
    x, delta = normal(P, G, T, Di, seed=1), normal(P, G, T, Do, seed=2)
    mask = torch.ones(P, G, T)
    if masked:
        mask[0, 1, 2:] = mask[1, 2, 0] = 0
        x[0, 1, 3] = torch.nan
    gradients = []
    for p, g in np.ndindex(P, G):
        live = mask[p, g] != 0
        loss = (delta[p, g][live] * (x[p, g][live] @ weight.T)).sum()
        gradients.append(torch.autograd.grad(loss, weight)[0].flatten())
    explicit = torch.stack(gradients).view(P, G, -1)
    ours = lab.ghost_gram(delta, x, mask if masked else None)
    torch.testing.assert_close(ours, explicit @ explicit.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["gauss", "rademacher", "count"])
def test_sketches_are_unbiased_and_as_noisy_as_they_should_be(kind: str) -> None:
    scores = normal(1, 2, 30)
    K = (scores @ scores.mT)[0]
    k, draws = 8, 600
    found = []
    for seed in range(draws):
        sketched = lab.sketch([scores[:, :, :11], scores[:, :, 11:].reshape(1, 2, 19, 1)], k, kind, seed)
        assert sketched.shape == (1, 2, k)
        found.append((sketched @ sketched.mT)[0])
    values = torch.stack(found)
    z = (values.mean(0) - K) / (values.std(0) / draws**0.5)
    assert z.abs().max() < 4
    # var <Ra, Rb> = (|a|^2 |b|^2 + <a, b>^2) / k, for signs a little less
    expected = ((K[0, 0] * K[1, 1] + K[0, 1] ** 2) / k).sqrt()
    assert values[:, 0, 1].std() == pytest.approx(expected.item(), rel=0.15)


def test_one_seed_is_one_matrix() -> None:
    scores = normal(2, 2, 9)
    whole, halves = (lab.sketch(s, 5, "gauss", seed=3) for s in (scores, torch.cat([scores[:1], 2 * scores[1:]])))
    torch.testing.assert_close(2 * whole[1], halves[1])
    assert not torch.equal(whole, lab.sketch(scores, 5, "gauss", seed=4))
    assert isinstance(lab.sketch(scores.numpy(), 5), np.ndarray)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: lab.score_gram([]), "scores must hold an array"),
        (
            lambda: lab.score_gram([normal(2, 3, 1), normal(3, 3, 1)]),
            r"must have the shape \[2, 3\] of the first array",
        ),
        (lambda: lab.score_gram(normal(3)), r"scores must be \[P, G, ...\]"),
        (lambda: lab.sketch(normal(1, 1, 1), 0), "k must be >= 1"),
        (lambda: lab.sketch(normal(1, 1, 1), 1, "gaus"), "Did you mean 'gauss'?"),
        (lambda: lab.sketch([], 1), "grads must hold an array"),
        (lambda: lab.ghost_gram(normal(1, 1, 2, 1), normal(1, 1, 3, 1)), "h must have the shape"),
    ],
)
def test_refusals(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
