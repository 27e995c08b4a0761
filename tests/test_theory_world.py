"""The toy world's laws against their definitions and closed forms, and the models of it that need no training."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Generator

from vitbook.theory import (
    GaussianPatchData,
    LinearModel,
    PatchAssociationData,
    PositionalAttentionModel,
    association,
    generaliser,
    train,
)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


# ---- the sets


@pytest.mark.parametrize(
    ("patches", "size", "grid", "tile"),
    [(100, 4, (10, 10), (2, 2)), (144, 6, (12, 12), (2, 3)), (512, 8, (16, 32), (2, 4)), (36, 3, (6, 6), (1, 3)),
     (60, 3, (6, 10), (3, 1)), (7 * 5, 7, (5, 7), (1, 7))],
)  # fmt: skip
def test_sets_are_tiles_of_the_grid(patches, size, grid, tile):
    data = PatchAssociationData(patches=patches, set_size=size)
    assert (data.grid, data.tile, data.set_count) == (grid, tile, patches // size)
    picture = data.sets.view(grid)
    high, wide = tile
    for number, corner in enumerate((r, c) for r in range(0, grid[0], high) for c in range(0, grid[1], wide)):
        block = picture[corner[0] : corner[0] + high, corner[1] : corner[1] + wide]
        assert (block == number).all() and block.numel() == size


def test_hidden_sets_are_the_same_law_at_other_places():
    plain, hidden = PatchAssociationData(dim=5), PatchAssociationData(dim=5, hidden=True)
    assert torch.equal(hidden.sets[hidden.places], plain.sets) and not torch.equal(hidden.sets, plain.sets)
    assert not torch.equal(replace(hidden, seed=1).places, hidden.places)
    (x, y), (moved, same) = plain.sample(50, seeded()), hidden.sample(50, seeded())
    assert torch.equal(y, same) and torch.allclose(moved[:, hidden.places], x, atol=1e-6)
    gaussian = GaussianPatchData(hidden=True)
    (x, y), (moved, same) = GaussianPatchData().sample(50, seeded()), gaussian.sample(50, seeded())
    assert torch.equal(moved[:, gaussian.places], x) and torch.equal(y, same)


# ---- the laws


def test_the_structured_law():
    data = PatchAssociationData(patches=24, set_size=3, q=0.3, dim=8)
    n = 20_000
    s, y, informative = data.signs(n, seeded())
    own = data.sets == informative[:, None]
    assert (own.sum(1) == 3).all() and torch.equal(s[own].view(n, 3), y[:, None].expand(n, 3))
    stray = s[~own]
    for sign, chance in ((1, 0.15), (-1, 0.15), (0, 0.7)):
        assert (stray == sign).float().mean().item() == pytest.approx(chance, abs=5 * math.sqrt(0.21 / len(stray)))
    assert abs(y.mean().item()) < 5 / math.sqrt(n)
    assert informative.bincount(minlength=8).div(n).tolist() == pytest.approx([1 / 8] * 8, abs=5 * 0.33 / math.sqrt(n))
    x, labels = data.sample(n, seeded())
    assert torch.equal(labels, y) and (data.features(x) - s).abs().max() < 1e-5  # the noise has no part along w*
    noise = (x - s[..., None] * data.w).flatten(0, 1)
    expected = (torch.eye(8) - torch.outer(data.w, data.w)) / 8
    assert (noise.T @ noise / len(noise) - expected).abs().max() < 5 * math.sqrt(2) / 8 / math.sqrt(len(noise))


def test_features_are_orthogonal_units():
    laws = [PatchAssociationData(feature=k) for k in range(16)]
    gram = torch.stack([law.w for law in laws])
    assert torch.allclose(gram @ gram.T, torch.eye(16), atol=1e-6)
    assert all(torch.equal(law.sets, laws[0].sets) for law in laws)


def test_label_function():
    data = PatchAssociationData(patches=12, set_size=4)  # 3 × 4 patches, tiles of 1 × 4
    s = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, -1, -1, -1, -1], [1, 1, 1, 0, -1, -1, -1, -1, 0, -1, 0, 0]]).float()
    assert data.label_function(s).tolist() == [0, -4]
    wide = PatchAssociationData(patches=40, set_size=20)  # 0.9 C = 18: a sum of 18 is silent, 19 speaks
    s = torch.ones(2, 40).masked_fill(wide.sets == 1, 0)
    s[0, (wide.sets == 0).nonzero()[0]] = -1
    s[1, (wide.sets == 0).nonzero()[0]] = 0
    assert wide.label_function(s * (1 + 1e-6)).tolist() == [0, 19]
    gaussian = GaussianPatchData(patches=12, set_size=4, gain=0.5)
    f = gaussian.label_function(torch.arange(12.0)[None])
    assert f.item() == pytest.approx(math.tanh(1.5) + math.tanh(5.5) + math.tanh(9.5))


def test_the_label_function_gives_the_label_but_for_chance_sets():
    data = PatchAssociationData(dim=4)
    x, y = data.sample(20_000, seeded())
    agree = (data.label_function(data.features(x)) * y > 0).float().mean().item()
    # Another set reaches -C y with chance 24 · .1⁴ and then f* ≤ 0
    assert agree == pytest.approx(1 - 24 * 0.1**4, abs=1e-3)
    gaussian = GaussianPatchData()
    x, y = gaussian.sample(2_000, seeded())
    assert (gaussian.label_function(gaussian.features(x)) * y > 0).all() and abs(y.mean().item()) < 0.12


@pytest.mark.parametrize(
    ("patches", "size", "q", "half", "whole"),
    [(100, 4, 0.2, ".1812", None), (144, 6, 0.25, ".1539", None), (64, 4, 0.25, ".1519", None),
     (1024, 8, 0.08, ".1875", None), (36, 3, 0.2, ".1235", ".162")],
)  # fmt: skip
def test_the_sum_rule_errs_as_the_law_says(patches, size, q, half, whole):
    data = PatchAssociationData(patches=patches, set_size=size, q=q)
    assert data.sum_rule_error() == pytest.approx(float(half), abs=5e-5)
    if whole:
        assert data.sum_rule_error(ties=1) == pytest.approx(float(whole), abs=5e-4)
    s, y, _ = data.signs(4_000, seeded())
    score = s.sum(1) * y
    sampled = (score < 0).float().mean() + (score == 0).float().mean() / 2
    assert sampled.item() == pytest.approx(data.sum_rule_error(), abs=0.03)


# ---- models


def by_hand(model: PositionalAttentionModel, x: torch.Tensor) -> list[float]:
    """F, patch by patch, as the definition reads."""
    outputs, A = [], model.scores().tolist()
    for sample in x:
        values = (sample @ model.v).tolist()
        total = 0.0
        for row in A:
            Z = sum(math.exp(a) for a in row)
            o = len(row) * sum(math.exp(a) / Z * value for a, value in zip(row, values, strict=True))
            total += o**model.power + model.nu * o
        outputs.append(total)
    return outputs


@pytest.mark.parametrize(("power", "factored"), [(3, False), (5, False), (3, True)])
def test_the_positional_model_is_its_formula(power, factored):
    model = PositionalAttentionModel(6, 5, power=power, nu=0.1, sigma_a=1.5, factored=factored, omega=0.3, seed=2)
    with torch.no_grad():
        model.positions.add_(torch.randn(6, 6, generator=seeded(3)))
        A = model.scores()
        assert A.diagonal().tolist() == [1.5] * 6
        raw = model.positions @ model.positions.T if factored else model.positions
        assert torch.equal(A[~torch.eye(6, dtype=bool)], raw[~torch.eye(6, dtype=bool)])
        x = torch.randn(7, 6, 5, generator=seeded(4))
        assert model(x).tolist() == pytest.approx(by_hand(model, x), rel=1e-4)
        assert torch.allclose(model(-x), -model(x)) and torch.allclose(model.attention().sum(1), torch.ones(6))


def test_the_model_starts_where_it_should():
    plain, factored = PositionalAttentionModel(9, 400, omega=0.1, seed=5), PositionalAttentionModel(9, factored=True)
    start = torch.zeros(9, 9).fill_diagonal_(3)
    assert torch.equal(plain.scores(), start) and torch.allclose(factored.positions, math.sqrt(3) * torch.eye(9))
    assert torch.equal(factored.scores(), start)
    assert plain.v.std().item() == pytest.approx(0.1, rel=0.15)
    assert torch.equal(plain.v, PositionalAttentionModel(9, 400, omega=0.1, seed=5).v)


def test_the_diagonal_never_moves():
    for factored in (False, True):
        model = PositionalAttentionModel(12, 4, factored=factored)
        train(model, PatchAssociationData(patches=12, set_size=3, dim=4), samples=100, batch=50, steps=5)
        assert model.scores().diagonal().tolist() == [3.0] * 12 and model.scores()[0, 1] != 0


def test_linear_models_are_sums():
    x = torch.randn(5, 6, 4, generator=seeded())
    for shared in (True, False):
        model = LinearModel(6, 4, shared=shared)
        with torch.no_grad():
            model.v.copy_(torch.randn(model.v.shape, generator=seeded(1)))
            assert torch.allclose(model(x), (x * model.v).sum((1, 2)), atol=1e-5)


@pytest.mark.parametrize(("shift", "recovery"), [(0, 1.0), (1, 0.0), (7, 0.0)])
def test_a_model_generalises_with_association_or_without(shift, recovery):
    data = PatchAssociationData(hidden=True)
    model = generaliser(data, shift)
    x, y = data.sample(10_000, seeded())
    with torch.no_grad():
        assert (model(x) * y <= 0).float().mean().item() <= 0.004  # sheet: .0015; the law's own floor is .0024
    found = association(model.scores(), data.sets)
    assert found["recovery"] == found["recall"] == recovery
    assert (found["mass"] > 0.9) == (shift == 0)


# ---- association


def test_association_of_a_table_by_hand():
    sets = torch.tensor([0, 0, 0, 1, 1, 1])
    scores = torch.tensor(
        [
            [-9, 3, 2, 1, 0, 0],  # both found
            [3, 0, 1, 2, 0, 0],  # one of two
            [1, 1, 0, 1, 0, 0],  # three tied for two places: no recovery, 4/3 of 2
            [0, 0, 0, 0, 0, 0],  # all tied: chance
            [9, 9, 0, 0, 0, 0],  # none
            [0, 0, 0, 5, 5, 0],  # both, whatever their order
        ]
    ).float()
    found = association(scores, sets)
    assert found["recovery"] == pytest.approx(2 / 6)
    assert found["recall"] == pytest.approx((1 + 1 / 2 + 2 / 3 + 2 / 5 + 0 + 1) / 6)
    e = math.exp
    masses = [(e(3) + e(2)) / (e(3) + e(2) + e(1) + 2), (e(3) + e(1)) / (e(3) + e(1) + e(2) + 2)]
    masses += [2 * e(1) / (3 * e(1) + 2), 2 / 5, 2 / (2 * e(9) + 3), 2 * e(5) / (2 * e(5) + 3)]
    assert found["mass"] == pytest.approx(sum(masses) / 6, rel=1e-6)


def test_association_at_the_start_is_chance_and_knows_no_order():
    data = PatchAssociationData(hidden=True)
    chance = 3 / 99
    start = association(PositionalAttentionModel().scores(), data.sets)
    assert start == {"recovery": 0.0, "recall": pytest.approx(chance), "mass": pytest.approx(chance)}
    scores = torch.randn(100, 100, generator=seeded())
    order = torch.randperm(100, generator=seeded(1))
    assert association(scores[order][:, order], data.sets[order]) == pytest.approx(association(scores, data.sets))


# ---- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PatchAssociationData(patches=10, set_size=4), "set_size=4, patches=10: .* divisor of patches"),
        (lambda: PatchAssociationData(patches=4, set_size=4), "two or more sets"),
        (lambda: PatchAssociationData(patches=4, set_size=1), "of at least 2"),
        (lambda: PatchAssociationData(dim=1), "dim=1: .* at least 2"),
        (lambda: PatchAssociationData(feature=16), "feature=16: there are dim=16"),
        (lambda: PatchAssociationData(q=1.2), "q=1.2"),
        (lambda: GaussianPatchData(gain=0), "gain=0"),
        (lambda: PositionalAttentionModel(power=4), "power=4: .* odd"),
        (lambda: PositionalAttentionModel(power=1), "power=1"),
        (lambda: PositionalAttentionModel(nu=-1), "nu=-1"),
        (lambda: PositionalAttentionModel(factored=True, sigma_a=0), "sigma_a=0: .* give a positive one"),
        (lambda: association(torch.zeros(4, 4), torch.zeros(5)), r"shape \(4, 4\) and sets of shape \(5,\)"),
        (lambda: association(torch.full((4, 4), math.nan), torch.tensor([0, 0, 1, 1])), "NaN"),
        (lambda: association(torch.zeros(3, 3), torch.tensor([0, 0, 1])), "at least two patches"),
        (lambda: association(torch.zeros(4, 4), torch.zeros(4)), "two sets"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()
