"""The reduced dynamics against autograd of the full model, against their direct form, and against the fact sheet."""

import itertools
import math

import numpy as np
import pytest
import torch
from theory_oracle import Direct, draws, lay_out, peak_memory, race
from torch.nn import functional as F

from vitbook.theory import Diverged, PatchAssociationData, PositionalAttentionModel, reduced_dynamics
from vitbook.theory.dynamics import Reduced, draw_sets, set_states

STATES = [(0.03, 0.0, 0.0), (0.03, 1.2, -0.1), (0.2, 3.0, -0.4), (0.05, -0.3, 0.2)]  # α, γ, ρ


def unit(data: PatchAssociationData) -> torch.Tensor:
    """w* with length one in float64."""
    return F.normalize(data.w.double(), dim=0)


def full_model(data: PatchAssociationData, state: tuple, **shape) -> PositionalAttentionModel:
    """The D × D model in float64 with v = α w*, A = γ inside the sets, ρ across; the sets one after another."""
    alpha, gamma, rho = state
    model = PositionalAttentionModel(data.patches, data.dim, **shape).double()
    sets = torch.arange(data.patches) // data.set_size
    with torch.no_grad():
        model.v.copy_(alpha * unit(data))
        model.positions.copy_(rho + (gamma - rho) * (sets[:, None] == sets).double())
    return model


def loss(model: PositionalAttentionModel, data: PatchAssociationData, signs: torch.Tensor) -> torch.Tensor:
    """Mean over signs [n,L,C] and over both labels."""
    x = signs.flatten(1)[..., None] * unit(data)
    return (F.softplus(-model(x)).mean() + F.softplus(model(-x)).mean()) / 2


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("D", "C", "q", "p", "nu", "sigma_a"), [(60, 3, 0.2, 3, 0.01, 3.0), (24, 4, 0.4, 5, 0.2, 1.0)])
def test_updates_are_those_of_autograd_on_the_full_model(state, D, C, q, p, nu, sigma_a):
    data = PatchAssociationData(patches=D, set_size=C, q=q, dim=3)
    counts = draw_sets(data, 200, np.random.default_rng(1))
    signs = lay_out(counts, C)
    model = full_model(data, state, power=p, nu=nu, sigma_a=sigma_a)
    loss(model, data, signs).backward()
    sets = torch.arange(D) // C
    inside = (sets[:, None] == sets) & ~torch.eye(D, dtype=bool)
    across = sets[:, None] != sets
    alone = model.v.grad @ unit(data)
    expected = [-g.item() for g in (alone, model.positions.grad[inside].mean(), model.positions.grad[across].mean())]
    assert torch.allclose(model.v.grad, alone * unit(data), rtol=1e-12)
    found = Reduced(data, counts, p, nu, sigma_a).directions(*state)
    assert found == pytest.approx(expected, rel=1e-10)
    assert Direct(signs, p, nu, sigma_a).directions(*state) == pytest.approx(expected, rel=1e-10)


def test_on_symmetric_data_the_full_model_stays_in_three_numbers():
    data = PatchAssociationData(patches=6, set_size=3, q=0.4, dim=2)
    counts = draw_sets(data, 8, np.random.default_rng(3))
    within = list(itertools.permutations(range(3)))
    pairs = [(list(a), [3 + j for j in b]) for a in within for b in within]
    orders = [order for a, b in pairs for order in (a + b, b + a)]  # 72: the whole symmetry
    signs = lay_out(counts, 3).flatten(1)[:, orders].flatten(0, 1).unflatten(1, (2, 3))
    model = full_model(data, (0.1, 0.0, 0.0), power=3, nu=0.1, sigma_a=1.0)
    reduced, state = Reduced(data, counts, 3, 0.1, 1.0), np.array([0.1, 0.0, 0.0])
    sets = torch.arange(6) // 3
    inside, across = (sets[:, None] == sets) & ~torch.eye(6, dtype=bool), sets[:, None] != sets
    for _ in range(60):
        model.zero_grad()
        loss(model, data, signs).backward()
        with torch.no_grad():
            model.v -= 0.05 * model.v.grad
            model.positions -= 40.0 * model.positions.grad
        state += np.array([0.05, 40.0, 40.0]) * reduced.directions(*state)
        A = model.scores()
        for entries, value in ((A[inside], state[1]), (A[across], state[2])):
            assert (entries.max() - entries.min()).item() <= 1e-10
            assert entries.mean().item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert (model.v - state[0] * unit(data)).abs().max().item() <= 1e-10
    assert state[1] > 0.2  # it went somewhere


def test_the_loop_is_the_direct_one():
    data = PatchAssociationData(patches=48, set_size=6, q=0.3)
    shape = {"power": 5, "nu": 1e-4, "sigma_a": 2.0}
    table = reduced_dynamics(data, **shape, rates=(1e-3, 30.0), steps=50, samples=300, every=20, seed=4)
    assert table.step.tolist() == [0, 20, 40, 50]
    direct = Direct(draws(data, 300, 4), **shape)
    expected = direct.descend(1e-4 ** (1 / 4), (1e-3, 30.0), 50)
    assert table[["alpha", "gamma", "rho"]].iloc[-1].tolist() == pytest.approx(expected, rel=1e-10)
    assert table.gamma.iloc[-1] > 0.05


@pytest.mark.parametrize(("D", "C", "sigma_a", "printed"), [(100, 4, 3, 119), (1024, 8, 2, 1030), (512, 8, 3, 531)])
def test_attention_at_the_start(D, C, sigma_a, printed):
    data = PatchAssociationData(patches=D, set_size=C)
    row = reduced_dynamics(data, sigma_a=sigma_a, steps=1, samples=10).iloc[0]
    assert round(row.Z) == printed and row.alpha == pytest.approx(1e-3)
    assert row.Lambda + (C - 1) * row.Gamma + (D - C) * row.Xi == pytest.approx(D)
    assert row.Lambda / row.Gamma == pytest.approx(math.exp(sigma_a)) and row.Gamma == pytest.approx(row.Xi)
    assert row.signal == pytest.approx(row.alpha * (row.Lambda + (C - 1) * row.Gamma))


def test_a_small_alpha_grows_by_the_linear_part():
    # σ' ≈ ν and sigmoid ≈ ½: Δα ≈ η ν D C / 2; E T = C, so the sample's T stands in for C
    data = PatchAssociationData()
    counts = draw_sets(data, 20_000, np.random.default_rng(0))
    by_alpha, _, _ = Reduced(data, counts, 3, 0.01, 3.0).directions(1e-7, 0.0, 0.0)
    assert by_alpha == pytest.approx(0.01 * 100 * 4 / 2, rel=0.03)


def test_the_output_is_the_models_and_its_parts_add_up():
    data = PatchAssociationData(patches=24, set_size=4, q=0.4, dim=3)
    counts = draw_sets(data, 50, np.random.default_rng(2))
    signs, state = lay_out(counts, 4), STATES[1]
    model = full_model(data, state, power=3, nu=0.01, sigma_a=2.0)
    reduced = Reduced(data, counts, 3, 0.01, 2.0)
    x = signs.flatten(1)[..., None] * unit(data)
    with torch.no_grad():
        o = 24 * (x @ model.v) @ model.attention().T
        rows = o**3 + 0.01 * o
    assert reduced.output(*state) == pytest.approx(rows.sum(1).numpy(), rel=1e-10)
    assert (signs[:, -1] == 1).all()  # the informative set is laid out last
    assert reduced.informative(*state) == pytest.approx(rows[:, -4:].sum(1).numpy(), rel=1e-10)


def test_set_counts_follow_the_law():
    data = PatchAssociationData(patches=30, set_size=3, q=0.3)
    n = 20_000
    counts = draw_sets(data, n, np.random.default_rng(0))
    states = set_states(3).tolist()
    assert states[-1] == [3, 0] and len(states) == len({tuple(s) for s in states}) == 10
    assert (counts.sum(1) == 10).all() and (counts[:, -1] >= 1).all()
    s, y, informative = data.signs(n, torch.Generator().manual_seed(0))
    s = (s * y[:, None])[:, data.sets.argsort(stable=True)].unflatten(1, (10, 3))
    s = s[torch.arange(10) != informative[:, None]].unflatten(0, (n, 9))
    for k, (plus, minus) in enumerate(states):
        drawn = counts[:, k].mean() - (k == 9)
        seen = (((s == 1).sum(2) == plus) & ((s == -1).sum(2) == minus)).double().sum(1).mean().item()
        assert drawn == pytest.approx(seen, abs=0.06)
    assert counts[:, states.index([1, 1])].mean() == pytest.approx(9 * 6 * 0.15**2 * 0.7, abs=0.03)


def test_a_prescribed_alpha_is_followed_and_moves_a_alike():
    data = PatchAssociationData(patches=48, set_size=6, q=0.3)
    shape = {"power": 3, "nu": 0.01, "steps": 40, "samples": 200, "every": 1, "seed": 3}
    free = reduced_dynamics(data, **shape, alpha=0.01, rates=(1e-3, 30.0))
    tied = reduced_dynamics(data, **shape, alpha=free.alpha.to_numpy(), rates=(0.5, 30.0))
    assert np.allclose(free, tied, rtol=1e-12)
    flat = reduced_dynamics(data, **shape, alpha=[0.01] * 41, rates=(1e-3, 30.0))
    assert (flat.alpha == 0.01).all() and flat.gamma.iloc[-1] < free.gamma.iloc[-1]


def test_fresh_draws_are_new_in_every_step_and_follow_from_the_seed():
    data = PatchAssociationData(patches=48, set_size=6, q=0.3)
    shape = {"steps": 3, "samples": 50, "every": 1}
    fixed, fresh = reduced_dynamics(data, **shape), reduced_dynamics(data, **shape, fresh=True)
    assert fresh.equals(reduced_dynamics(data, **shape, fresh=True))
    assert not fresh.equals(reduced_dynamics(data, **shape, fresh=True, seed=1))
    assert fixed.alpha[1] == fresh.alpha[1] and fixed.alpha[2] != fresh.alpha[2]


def test_three_events():
    # (144, 6, .2), p = 5: α rises (I), dips while Γ jumps (II), and the effective row signal carries the rest
    data = PatchAssociationData(patches=144, set_size=6, q=0.2)
    t = reduced_dynamics(data, power=5, nu=1e-8, rates=(1e-4, 60.0), steps=1_000, samples=3_000).set_index("step")
    assert t.alpha[0] == pytest.approx(0.01) and t.Gamma[0] == pytest.approx(0.96, abs=0.01)
    plateau = t.alpha.idxmax()
    assert 80 <= plateau <= 200 and 0.045 <= t.alpha[plateau] <= 0.056 and t.Gamma[plateau] < 2.5
    assert t.alpha[480] < 0.7 * t.alpha[plateau] and t.Gamma[480] > 7
    assert t.error[0] > 0.1 and t.error[480] < 0.01 and t.error[1000] <= 0.004
    assert t.signal[480] > 1.2 * t.signal[plateau] and t.signal[1000] > t.signal[480]
    assert t.informative[0] < t.others[0] and (t.rho <= 1e-4).all() and t.rho.min() > -0.25


def test_slow_v_on_fresh_draws_never_falls_and_association_is_a_jump():
    data = PatchAssociationData(patches=512, set_size=8, q=0.12)
    t = reduced_dynamics(
        data, nu=4e-6, sigma_a=3.0, rates=(1e-7, 1_000.0), steps=1_500, samples=300, fresh=True, every=60
    ).set_index("step")
    assert t.alpha[0] == pytest.approx(0.002) and t.alpha[1200] == pytest.approx(0.0044, rel=0.1)
    assert (t.alpha.diff().dropna() > -1e-5).all() and t.alpha[1500] == pytest.approx(0.0051, rel=0.1)
    assert t.Gamma[1200] < 5 and t.Gamma[1500] > 25 and t.error[1500] < 1e-3 < t.error[1200]


def test_neither_time_nor_memory_knows_the_dimension_of_a_patch():
    ours, direct = race(steps=100)
    assert direct >= 2 * ours
    assert peak_memory(100_000) <= 1.01 * peak_memory(16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"power": 4}, "power=4"),
        ({"power": 1}, "power=1"),
        ({"steps": 0}, "steps=0"),
        ({"alpha": 0.0}, "alpha reaches 0.0"),
        ({"nu": 0.0}, "alpha reaches 0.0"),
        ({"alpha": [0.1, 0.1]}, "a path of 2 values; for steps=2500 it needs 2501"),
        ({"alpha": [0.1, -0.1], "steps": 1}, "alpha reaches -0.1"),
    ],
)
def test_bad_input_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        reduced_dynamics(PatchAssociationData(), **options)


def test_a_rate_that_is_too_large_is_named():
    with pytest.raises(Diverged, match=r"step \d+ of 100 led to .* lower them"):
        reduced_dynamics(PatchAssociationData(), nu=0.01, rates=(1.0, 40.0), steps=100, samples=100)
