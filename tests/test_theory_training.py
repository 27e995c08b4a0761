"""Training in the toy world: one step by hand, what it may depend on, and a world small enough for a second."""

from dataclasses import replace

import pytest
import torch

from vitbook.theory import (
    Diverged,
    PatchAssociationData,
    PositionalAttentionModel,
    train,
    transfer,
)

WORLD = PatchAssociationData()  # (D, C, q, d) = (100, 4, .2, 16)


def test_a_small_world_in_a_second():
    data = PatchAssociationData(patches=36, set_size=3)
    model = PositionalAttentionModel(36, factored=True)
    curves, _ = train(model, data, samples=4_000, batch=200, steps=400, rates=(0.002, 0.003), every=400)
    last = curves.iloc[-1]
    assert last.accuracy >= 0.97 and last.recovery >= 0.95 and last.mass >= 0.6


def test_hiding_the_sets_changes_nothing():
    plain = PatchAssociationData(patches=36, set_size=3)
    hidden = replace(plain, hidden=True)
    options = {"samples": 500, "batch": 100, "steps": 60, "optimizer": "gd", "rates": (3e-4, 20.0), "every": 30}
    (curves, scores), (same, moved) = (train(PositionalAttentionModel(36), data, **options) for data in (plain, hidden))
    back = moved[:, hidden.places][:, :, hidden.places]
    assert torch.allclose(back, scores, atol=1e-4) and not torch.allclose(moved, scores, atol=1e-2)
    assert curves.accuracy.tolist() == pytest.approx(same.accuracy.tolist(), abs=0.005)


def test_training_follows_from_the_seed_alone():
    data = PatchAssociationData(patches=12, set_size=3, dim=4)

    def run(seed: int) -> torch.Tensor:
        return train(PositionalAttentionModel(12, 4), data, samples=60, batch=20, steps=4, every=2, seed=seed).scores

    torch.manual_seed(1)
    one = run(0)
    torch.manual_seed(2)
    assert torch.equal(one, run(0)) and not torch.equal(one, run(1))
    assert one.shape == (3, 12, 12)  # steps 0, 2 and 4


def test_one_step_of_plain_descent_by_hand():
    data = PatchAssociationData(patches=12, set_size=3, dim=4)
    model, twin = PositionalAttentionModel(12, 4), PositionalAttentionModel(12, 4)
    train(model, data, samples=30, batch=50, steps=1, optimizer="gd", rates=(0.1, 5.0), stages=(0.5,), seed=6)
    generator = torch.Generator().manual_seed(6)
    data.sample(2_000, generator)  # the test comes first
    x, y = data.sample(30, generator)
    D, S = 12, twin.attention()
    o = D * (x @ twin.v) @ S.T
    F = (o**3 + 0.01 * o).sum(1)
    r = (y * torch.sigmoid(-y * F))[:, None] * (3 * o**2 + 0.01)  # [n,D]
    by_v = torch.einsum("ni,ij,njd->d", r, D * S, x) / 30
    by_a = torch.einsum("ni,ij,nij->ij", r, D * S, (x @ twin.v)[:, None] - o[..., None] / D) / 30
    assert torch.allclose(model.v, twin.v + 0.5 * 0.1 * by_v, atol=1e-6)
    assert torch.allclose(model.scores(), twin.scores() + (0.5 * 5.0 * by_a).fill_diagonal_(0), atol=1e-6)


def test_a_rate_of_zero_keeps_the_positions():
    data = PatchAssociationData(patches=12, set_size=3, dim=4)
    model = PositionalAttentionModel(12, 4)
    start = model.v.detach().clone()
    train(model, data, samples=30, steps=3, rates=(0.002, 0.0))
    assert (model.positions == 0).all() and not torch.equal(model.v, start)


def test_bad_input_is_refused_with_the_reason():
    model = PositionalAttentionModel()
    with pytest.raises(ValueError, match="optimizer='sgd' is unknown; choose one of adam, gd"):
        train(model, WORLD, optimizer="sgd")
    with pytest.raises(ValueError, match="samples=0"):
        train(model, WORLD, samples=0)
    with pytest.raises(ValueError, match="the model has 100 patches and the law 36"):
        transfer(model, PatchAssociationData(patches=36), [4])
    with pytest.raises(Diverged, match=r"step \d+ of 50 left the finite numbers, at rates \(0.5, 50.0\); lower them"):
        train(model, WORLD, samples=200, batch=200, steps=50, optimizer="gd", rates=(0.5, 50.0))
