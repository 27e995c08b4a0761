"""Similarities of position embeddings: the closed form against all orders of a small grid, and known patterns."""

import itertools
import math

import pytest
import torch

from vitbook.measures.heads import neighbours, patch_distances
from vitbook.measures.positions import neighbour_similarity, position_similarity


def noise(n: int, seed: int = 0) -> torch.Tensor:
    """A symmetric [n,n] without pattern."""
    m = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return m + m.T


def test_cosines_of_the_patches_alone():
    positions = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.0, 3.0], [2.0, 2.0]]])
    half = math.sqrt(0.5)
    want = torch.tensor([[1, 0, half], [0, 1, half], [half, half, 1]], dtype=torch.float64)
    assert torch.allclose(position_similarity(positions), want)
    assert torch.allclose(position_similarity(positions[0, 1:], prefix=0), want)


@pytest.mark.parametrize("grid", [(2, 3), (1, 6)])
def test_the_moments_are_those_of_all_orders(grid):
    similarity, near = noise(6), neighbours(grid)
    orders = torch.tensor(list(itertools.permutations(range(6))))
    null = similarity[orders[:, :, None], orders[:, None, :]][:, near].mean(1)
    found = neighbour_similarity(similarity, grid)
    assert found["neighbours"] == pytest.approx(similarity[near].mean().item())
    assert found["pairs"] == pytest.approx(null.mean().item())
    assert found["sd"] == pytest.approx(null.std(correction=0).item())
    assert found["z"] == pytest.approx((null[0] - null.mean()).item() / null.std(correction=0).item())
    assert found["low"] == pytest.approx(null.quantile(0.025).item(), abs=0.15 * found["sd"])
    assert found["high"] == pytest.approx(null.quantile(0.975).item(), abs=0.15 * found["sd"])


def test_without_a_pattern_z_is_a_standard_score():
    scores = torch.tensor([neighbour_similarity(noise(64, seed), (8, 8), 2)["z"] for seed in range(200)])
    assert abs(scores.mean()) < 0.25
    assert 0.85 < scores.std() < 1.15


def test_a_local_pattern_is_found_lost_in_a_wrong_order_and_back_when_that_is_undone():
    local = torch.exp(-(patch_distances((8, 8)) ** 2) / 4)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    moved = local[order][:, order]
    assert neighbour_similarity(local, (8, 8))["z"] > 15
    assert abs(neighbour_similarity(moved, (8, 8))["z"]) < 3
    back = order.argsort()
    assert neighbour_similarity(moved[back][:, back], (8, 8)) == pytest.approx(neighbour_similarity(local, (8, 8)))


def test_neither_the_diagonal_nor_scale_nor_shift_counts():
    similarity = noise(9)
    found = neighbour_similarity(similarity, (3, 3))
    other = neighbour_similarity(5 * similarity + 7 + 100 * torch.eye(9), (3, 3))
    assert other["z"] == pytest.approx(found["z"])
    assert other["pairs"] == pytest.approx(5 * found["pairs"] + 7)


def test_what_cannot_be_tested_is_refused():
    with pytest.raises(ValueError, match=r"similarities of shape \(5, 5\) do not belong to the grid \(2, 2\)"):
        neighbour_similarity(noise(5), (2, 2))
    with pytest.raises(ValueError, match="3 patches are too few"):
        neighbour_similarity(noise(3), (1, 3))
    for similarity, grid in ((torch.ones(9, 9), (3, 3)), (noise(4), (2, 2))):
        with pytest.raises(ValueError, match="no order of the patches differs from another"):
            neighbour_similarity(similarity, grid)
