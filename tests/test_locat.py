"""GAug and its variants against the source's formula, pair by pair, and closed forms."""

import math

import pytest
import torch
from small import images, largest_difference, stir
from torch.nn import functional as F

from vitbook.measures.heads import attention_distance
from vitbook.models.gaussian import (
    AutoScale,
    FixedWidth,
    FromInput,
    InverseDistance,
    Isotropic,
    Laplace,
    NoScale,
)
from vitbook.models.locat import GaussianBias

EPSILON = {7: 0.1, 8: 0.1, 14: 0.1, 16: 0.1, 28: 0.2, 30: 0.2, 32: 0.2, 64: 0.4, 128: 0.8}  # the fact sheet's


def stirred(kind=GaussianBias, head_dim=8, grid=(4, 6), prefix=1, **options) -> GaussianBias:
    return stir(kind(head_dim, grid, prefix, **options), 0.4)


def queries(bias: GaussianBias, grid=None, heads=2, head_dim=8) -> torch.Tensor:
    rows, cols = grid or bias.grid
    return images(2, heads, bias.prefix + rows * cols, head_dim, seed=5)


def offsets(grid) -> torch.Tensor:
    """Row and column offsets of every pair of patches, [N,N,2] float64."""
    places = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float64) for n in grid))
    return places[:, None] - places


def gaussian(d: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * (d**2 / width).sum(-1))


def direct(bias, q, grid, kernel=gaussian, epsilon=0.1) -> torch.Tensor:
    """The source's formula in float64, with the exponential of every pair."""
    P, (h, w), q = bias.prefix, bias.grid, q[:, :, bias.prefix :].double()
    M = max(h, w) ** 2
    layer = {name: p.detach().double() for name, p in bias.named_parameters()}
    z = q @ layer["log_var.weight"].T + layer["log_var.bias"] - (math.log(M - 1) if M > 2 else 0)
    var = M / (1 + torch.exp(-z)) * (1 if tuple(grid) == (h, w) else min(grid) / min(h, w))
    alpha = torch.log1p(torch.exp(q @ layer["log_alpha.weight"].T + layer["log_alpha.bias"]))
    near = offsets(grid).abs().clamp(max=max(h, w) - 1)
    S = torch.zeros(*q.shape[:2], P + len(near), P + len(near), dtype=torch.float64)
    S[:, :, P:, P:] = alpha * kernel(near, var[:, :, :, None] + epsilon)
    return S


# ---- GAug: the closed forms


@pytest.mark.parametrize(
    ("trained", "prefix", "grid"),
    [
        ((4, 6), 1, (4, 6)),
        ((8, 8), 5, (8, 8)),
        ((5, 3), 0, (5, 3)),
        ((14, 14), 1, (14, 14)),
        ((30, 30), 1, (30, 30)),
        ((8, 8), 1, (12, 10)),
        ((14, 14), 1, (20, 33)),
        ((8, 8), 1, (5, 7)),
        ((2, 2), 1, (2, 2)),
        ((1, 7), 1, (1, 7)),
        ((1, 1), 1, (1, 1)),
        ((64, 64), 0, (6, 9)),
    ],
)
def test_the_separable_bias_is_the_formula(trained, prefix, grid):
    bias = stirred(grid=trained, prefix=prefix)
    q = queries(bias, grid)
    with torch.no_grad():
        S = bias(q) if grid == trained else bias(q, grid)
    assert S.dtype == torch.float32
    assert largest_difference(S, direct(bias, q, grid, epsilon=EPSILON.get(max(trained), 0.1))) <= 1e-6


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_bounds_diagonal_and_prefix(prefix):
    bias = stirred(prefix=prefix)
    q = queries(bias)
    with torch.no_grad():
        S, (var, alpha) = bias(q), bias.predict(q)
    assert var.shape == (2, 2, 4, 6, 2) and alpha.shape == (2, 2, 4, 6, 1)
    assert ((var > 0) & (var < 36)).all() and (alpha > 0).all()
    patches, alpha = S[:, :, prefix:, prefix:], alpha.flatten(2)
    assert ((patches >= 0) & (patches <= alpha[..., None])).all()
    assert torch.equal(patches.diagonal(dim1=-2, dim2=-1), alpha)
    assert not S[:, :, :prefix].any() and not S[..., :prefix].any()
    assert largest_difference(patches, patches.transpose(-2, -1)) > 0.1  # width and strength are the query's


def test_transposing_the_grid_swaps_the_channels():
    bias = stirred(grid=(3, 5))
    q = queries(bias)
    turned = GaussianBias(8, (5, 3))
    turned.load_state_dict({k: v.flip(0) if "var" in k else v for k, v in bias.state_dict().items()})
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(15).view(3, 5).T.flatten()])
    with torch.no_grad():
        expected = bias(q)[:, :, order][..., order]
        assert torch.allclose(turned(q[:, :, order]), expected, atol=1e-6)
        turned.load_state_dict(bias.state_dict())
        assert largest_difference(turned(q[:, :, order]), expected) > 0.01


def test_channel_0_is_the_variance_of_rows():
    bias = GaussianBias(8, (3, 5), prefix=0)
    with torch.no_grad():
        bias.log_var.bias.copy_(torch.tensor([1e3, -1e3]))  # Σ = (25, 0)
        S = bias(torch.zeros(1, 1, 15, 8))[0, 0, 0].view(3, 5)
    ln2 = math.log(2)
    assert S[:, 0].tolist() == pytest.approx([ln2 * math.exp(-0.5 * n * n / 25.1) for n in range(3)], abs=1e-6)
    assert S[0].tolist() == pytest.approx([ln2 * math.exp(-0.5 * n * n / 0.1) for n in range(5)], abs=1e-6)


def test_where_it_starts():
    torch.manual_seed(0)
    bias = GaussianBias(64, (14, 14))
    zero = torch.zeros(1, 1, 197, 64)
    with torch.no_grad():
        var, alpha = bias.predict(zero)
        assert torch.allclose(var, torch.ones(()), atol=1e-5) and torch.allclose(alpha, torch.tensor(math.log(2)))
        row = bias(zero)[0, 0, 1, 1:6].tolist()
        q = torch.zeros(1, 1, 197, 64)
        bias.log_var.weight.zero_()
        for pre, printed in ((-1, 0.369), (1, 2.69), (5, 84.7), (10, 194.3)):
            bias.log_var.bias.fill_(pre)
            assert bias.predict(q)[0][0, 0, 0, 0].tolist() == pytest.approx([printed] * 2, rel=2e-3)
    assert row == pytest.approx([0.693, 0.440, 0.1125, 0.0116, 0.0005], abs=5e-4)
    fresh = GaussianBias(64, (14, 14))
    assert 0.015 < fresh.log_var.weight.std() < 0.025 and not fresh.log_var.bias.any()
    assert not fresh.log_alpha.bias.any() and fresh.log_alpha.weight.abs().max() < 0.1


@pytest.mark.parametrize(("side", "epsilon"), EPSILON.items())
def test_epsilon(side, epsilon):
    assert GaussianBias(4, (side, side)).epsilon == GaussianBias(4, (2, side)).epsilon == pytest.approx(epsilon)


@pytest.mark.parametrize(
    ("grid", "printed"), [((32, 32), 2.286), ((30, 30), 2.143), ((14, 20), 1.0), ((7, 30), 0.5), ((20, 16), 8 / 7)]
)
def test_the_variance_on_another_grid(grid, printed):
    bias, q = GaussianBias(4, (14, 14)), torch.zeros(1, 1, 1 + grid[0] * grid[1], 4)
    assert torch.allclose(bias.predict(q, grid)[0], torch.tensor(printed), atol=5e-4)


def test_far_cells_of_a_larger_grid_count_as_the_farthest_of_training():
    bias = GaussianBias(4, (4, 4), prefix=0)
    torch.nn.init.constant_(bias.log_var.bias, 1e3)  # Σ = 16, twice that on the larger grid
    with torch.no_grad():
        S = bias(torch.zeros(1, 1, 80, 4), (8, 10))[0, 0, 0].view(8, 10)
    expected = [math.log(2) * math.exp(-0.5 * min(n, 3) ** 2 / 32.1) for n in range(10)]
    assert S[0].tolist() == pytest.approx(expected, abs=1e-6)
    huge = GaussianBias(4, (1, 128), prefix=0)
    assert huge.reach**2 == pytest.approx(13100) and GaussianBias(4, (1, 115)).reach == 114


@pytest.mark.parametrize("grid", [(4, 6), (6, 32)])
def test_grids_of_32_rows_train_coarsely(grid):
    bias = stirred(grid=(32, 32), prefix=2)
    q = queries(bias, grid)
    cells = F.avg_pool2d(q[:, :, 2:].unflatten(2, grid).permute(0, 1, 4, 2, 3).flatten(0, 1), 2)
    cells = cells.unflatten(0, (2, 2)).flatten(3).transpose(2, 3)
    half = (grid[0] // 2, grid[1] // 2)
    coarse = GaussianBias(8, (32, 32), prefix=0)
    coarse.load_state_dict(bias.state_dict())
    ratio = min(grid) / min(half)  # ``direct`` shall widen by the fine grid, and measure in fine units

    def twice(d, width):
        return gaussian(2 * d, (width - 0.2) * ratio + 0.2)

    S = direct(coarse, cells, half, kernel=twice, epsilon=0.2).unflatten(3, half).unflatten(2, half)
    for axis in (2, 3, 4, 5):
        S = S.repeat_interleave(2, axis)
    with torch.no_grad():
        trained, evaluated = bias.train()(q, grid), bias.eval()(q, grid)
    assert largest_difference(trained[:, :, 2:, 2:], S.flatten(4).flatten(2, 3)) <= 1e-6
    assert not trained[:, :, :2].any() and not trained[..., :2].any()
    assert largest_difference(evaluated, direct(bias, q, grid, epsilon=0.2)) <= 1e-6
    assert largest_difference(trained, evaluated) > 0.1


def test_fewer_rows_train_as_they_are_evaluated():
    bias = stirred(grid=(31, 64))
    q = queries(bias, (5, 7))
    with torch.no_grad():
        assert torch.equal(bias.train()(q, (5, 7)), bias.eval()(q, (5, 7)))


def test_full_precision_whatever_the_autocast():
    bias = stirred(grid=(14, 14))
    q = queries(bias)
    with torch.no_grad():
        S = bias(q)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(bias(q), S)
            assert torch.equal(bias(q.bfloat16()), bias(q.bfloat16().float()).bfloat16())
        assert bias(q.bfloat16()).dtype == torch.bfloat16
        rounded = bias(q.half())
        assert rounded.dtype == torch.float16 and largest_difference(rounded.float(), bias(q.half().float())) <= 2e-3
        assert bias.double()(q.double()).dtype == torch.float64
        assert torch.isfinite(bias.half()(q.half())).all()


@pytest.mark.parametrize("kind", [GaussianBias, InverseDistance])
def test_adding_in_place_is_adding(kind):
    bias = stirred(kind, grid=(3, 5), prefix=2)
    q, logits = queries(bias), images(2, 2, 17, 17, seed=9)
    with torch.no_grad():
        assert torch.allclose(bias.add_to(logits.clone(), q), logits + bias(q), atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            low = bias.add_to(logits.bfloat16(), q).float()
        assert largest_difference(low, logits.bfloat16().float() + bias(q)) <= 0.02


def test_the_derivatives_are_those_of_the_formula_once_and_twice():
    bias = stirred(head_dim=2, grid=(1, 2), prefix=1).double()
    q, logits = (images(1, 1, 3, n, seed=n).double().requires_grad_() for n in (2, 3))

    def added(logits, q):
        return bias.add_to(logits * 1, q)

    assert torch.autograd.gradcheck(bias, (q,)) and torch.autograd.gradcheck(added, (logits, q))
    assert torch.autograd.gradgradcheck(added, (logits, q), fast_mode=True)
    one, two = stirred(prefix=2), stirred(prefix=2)
    two.load_state_dict(one.state_dict())
    x, wide = queries(one), images(2, 2, 26, 26, seed=9).requires_grad_()
    ((wide + one(x)).softmax(-1) * wide.detach()).sum().backward()
    expected, wide.grad = wide.grad, None
    (two.add_to(wide * 1, x).softmax(-1) * wide.detach()).sum().backward()
    assert torch.allclose(wide.grad, expected, atol=1e-5)
    for p, r in zip(one.parameters(), two.parameters(), strict=True):
        assert r.grad.any() and torch.allclose(p.grad, r.grad, rtol=1e-4, atol=1e-4)


# ---- the variants, our readings


def test_variants_that_are_special_cases():
    full = stirred()
    q = queries(full)
    with torch.no_grad():
        S, (var, alpha) = full(q), full.predict(q)
        unit = S[:, :, 1:, 1:] / alpha.flatten(2)[..., None]
        for kind, factor in ((NoScale, torch.ones(())), (AutoScale, q[:, :, 1:, None].square().mean(-1).sqrt())):
            part = kind(8, (4, 6))
            part.load_state_dict({k: v for k, v in full.state_dict().items() if "var" in k})
            assert torch.allclose(part(q)[:, :, 1:, 1:], factor * unit, atol=1e-6)

        one = Isotropic(8, (4, 6))
        one.load_state_dict({k: v[:1] for k, v in full.state_dict().items()})
        both = GaussianBias(8, (4, 6))
        both.load_state_dict({k: v[[0, 0]] if "var" in k else v for k, v in full.state_dict().items()})
        assert torch.allclose(one(q), both(q), atol=1e-6)

        fixed = FixedWidth(8, (4, 6))
        fixed.load_state_dict({k: v for k, v in full.state_dict().items() if "alpha" in k})
        expected = alpha.flatten(2)[..., None] * gaussian(offsets((4, 6)), torch.tensor(1.1)).float()
        assert torch.allclose(fixed(q)[:, :, 1:, 1:], expected, atol=1e-6)
        assert var.std() > 0.1 and torch.allclose(fixed.predict(q)[0], torch.ones(()))


def test_the_variance_from_the_input_is_shared_by_heads():
    bias = stirred(FromInput, dim=16)
    q, x = queries(bias), images(2, 25, 16, seed=7)
    with torch.no_grad():
        var, _ = bias.predict(q, x=x)
        expected = 36 * torch.sigmoid(bias.log_var(x[:, 1:]) - math.log(35))
        assert torch.allclose(var, expected.view(2, 1, 4, 6, 2), atol=1e-5)
        S, alpha = bias(q, x=x), F.softplus(bias.log_alpha(q[:, :, 1:]))
        shape = gaussian(offsets((4, 6)), expected.double()[:, None, :, None] + 0.1).float()
        assert torch.allclose(S[:, :, 1:, 1:], alpha * shape, atol=1e-6)
    with pytest.raises(ValueError, match="reads the variance from the layer's input; give it as x="):
        bias(q)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        (Laplace, lambda d, width: torch.exp(-(d / width.sqrt()).sum(-1))),
        (InverseDistance, lambda d, width: 1 / (1 + (d / width.sqrt()).sum(-1))),
    ],
)
def test_other_kernels(kind, kernel):
    bias = stirred(kind, grid=(5, 3))
    q = queries(bias).requires_grad_()
    S = bias(q)
    assert largest_difference(S, direct(bias, q, (5, 3), kernel)) <= 1e-6
    S.sum().backward()
    assert torch.isfinite(q.grad).all() and q.grad[:, :, 1:].any() and not q.grad[:, :, :1].any()


def test_narrow_windows_leave_the_bias_little_to_do():
    """The negative case (GCViT, in the source without code and without gain): how far a bias can pull attention in."""

    def distance(side: int, alpha: float) -> float:
        bias = GaussianBias(4, (side, side), prefix=0)
        torch.nn.init.constant_(bias.log_alpha.bias, math.log(math.expm1(alpha)))
        with torch.no_grad():
            attn = bias(torch.zeros(1, 1, side**2, 4)).softmax(-1)
        return attention_distance(attn, (side, side), prefix=0).item()

    none = 1e-6
    gains = [distance(side, none) - distance(side, 6.0) for side in (3, 7, 14)]
    assert gains == pytest.approx([1.16, 3.0, 5.21], abs=0.01)
    # A plain window is as local as the whole grid under a strong bias.
    assert distance(3, none) < distance(14, 6.0) and distance(7, none) < distance(14, 4.0)


# ---- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GaussianBias(8, (4, 4))(torch.zeros(1, 2, 16, 8)), r"\(1, 2, 16, 8\) do not match the grid \(4, 4\)"),
        (lambda: GaussianBias(8, (4, 4))(torch.zeros(1, 2, 25, 8), (4, 5)), r"\[B, H, 21, d\]; give the grid of these"),
        (lambda: GaussianBias(8, (4, 4))(torch.zeros(2, 17, 8)), r"\(2, 17, 8\) do not match"),
        (lambda: GaussianBias(8, (0, 4)), r"grid=\(0, 4\)"),
        (lambda: GaussianBias(8, (4, 4), prefix=-1), "prefix=-1"),
        (lambda: GaussianBias(8, (33, 32))(torch.zeros(1, 1, 1057, 8)), r"grid \(33, 32\) has an odd side"),
        (lambda: GaussianBias(8, (32, 32))(torch.zeros(1, 1, 13, 8), (4, 3)), r"\(4, 3\) has an odd side.*even number"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_bias_beyond_float16_is_refused():
    bias = GaussianBias(8, (4, 4)).eval()
    torch.nn.init.constant_(bias.log_alpha.bias, 7e4)
    q = torch.zeros(1, 1, 17, 8)
    assert bias(q).max() == 7e4
    with pytest.raises(ValueError, match=r"α = 7e\+04 overflows float16 \(largest 65504\); use bfloat16 or float32"):
        bias(q.half())
