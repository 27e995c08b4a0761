"""Distance, entropy and rollout against the numbers of the fact sheets and closed forms."""

import math

import pytest
import torch
from small import random_attention

from vitbook.measures.heads import (
    attention_distance,
    attention_entropy,
    cls_maps,
    neighbours,
    patch_distances,
    reference_heads,
    rollout,
)

GRID = (8, 8)


def agrees(value: float, printed: str):
    """True when ``value`` rounds to the digits that are printed (within float32)."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.5 * 10**-digits + 1e-5


def head(a: torch.Tensor) -> torch.Tensor:
    """[T,T] → [1,1,T,T] float32."""
    return a.float()[None, None]


# patches, px at 4 px patches, / largest distance, / diagonal of the image, entropy, entropy / ln 64
REFERENCE = {
    "self only": ("0", "0", "0", "0", "0", "0"),
    "4 neighbours, no self": ("1.0000", "4.000", "0.1010", "0.0884", "1.2351", "0.2970"),
    "self + 4 neighbours": ("0.7729", "3.092", "0.0781", "0.0683", "1.4938", "0.3592"),
    "8 neighbours, no self": ("1.1873", "4.749", "0.1199", "0.1049", "1.8419", "0.4429"),
    "3×3 window": ("1.0212", "4.085", "0.1032", "0.0903", "1.9945", "0.4796"),
    "5×5 window": ("1.7464", "6.986", "0.1764", "0.1544", "2.8519", "0.6857"),
    "7×7 window": ("2.4074", "9.630", "0.2432", "0.2128", "3.3667", "0.8095"),
    "Gaussian σ = 0.5": ("0.3594", "1.438", "0.0363", "0.0318", "1.1880", "0.2856"),
    "Gaussian σ = 1": ("1.1045", "4.418", "0.1116", "0.0976", "2.4924", "0.5993"),
    "Gaussian σ = 2": ("2.1321", "8.528", "0.2154", "0.1884", "3.5112", "0.8443"),
    "uniform": ("4.1365", "16.546", "0.4178", "0.3656", "4.1589", "1"),
    "one near-centre key": ("3.0939", "12.376", "0.3125", "0.2735", "0", "0"),
    "one corner key": ("5.4720", "21.888", "0.5528", "0.4837", "0", "0"),
    "point-mirrored patch": ("6.0869", "24.348", "0.6149", "0.5380", "0", "0"),
    "92 % self, 8 % on 4 neighbours": ("0.0800", "0.320", "0.0081", "0.0071", "0.3776", "0.0908"),
}


def test_reference_heads_are_those_of_the_table():
    assert list(reference_heads(GRID)) == list(REFERENCE)


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_head(name):
    a = head(reference_heads(GRID)[name])
    patches, px, largest, diagonal, entropy, normalised = REFERENCE[name]
    assert agrees(attention_distance(a, GRID, 0).item(), patches)
    assert agrees(attention_distance(a, GRID, 0, "px", 4).item(), px)
    assert agrees(attention_distance(a, GRID, 0, "max").item(), largest)
    assert agrees(attention_distance(a, GRID, 0).item() / (8 * 2**0.5), diagonal)
    assert agrees(attention_entropy(a, 0).item(), entropy)
    assert agrees(attention_entropy(a, 0).item() / math.log(64), normalised)


@pytest.mark.parametrize(
    ("grid", "patch", "kept", "excluded", "leaky"),
    [((8, 8), 4, "16.5459", "16.8086", "16.2914"), ((4, 4), 8, "16.0641", "17.1351", "15.1192")],
)
def test_conventions_of_a_uniform_head(grid, patch, kept, excluded, leaky):
    T = grid[0] * grid[1] + 1
    a = torch.full((2, 3, T, T), 1 / T)

    def distance(**convention):
        return attention_distance(a, grid, 1, "px", patch, **convention)

    assert distance().shape == (3,)
    assert all(agrees(v, kept) for v in distance().tolist())
    assert all(agrees(v, excluded) for v in distance(count_self=False).tolist())
    assert all(agrees(v, leaky) for v in distance(renormalise=False).tolist())
    assert torch.allclose(attention_entropy(a), torch.tensor(math.log(T)), atol=1e-5)


def test_uniform_query_cell_by_cell():
    printed = [
        ["21.888", "19.73", "18.246", "17.494"],
        ["19.73", "17.39", "15.790", "14.98"],
        ["18.246", "15.790", "14.105", "13.251"],
        ["17.494", "14.98", "13.251", "12.376"],
    ]
    cells = patch_distances(GRID, "px", 4).mean(1).view(8, 8)
    for turned in (cells, cells.flip(0), cells.flip(1), cells.flip(0, 1)):  # one quadrant stands for all
        for r, row in enumerate(printed):
            for c, text in enumerate(row):
                assert agrees(turned[r, c].item(), text)
    assert agrees(cells[2, 3].item(), "13.2514")
    assert agrees(cells[2, 3].item() * 64 / 63, "13.4617")
    four = patch_distances((4, 4), "px", 8).mean(1).view(4, 4)
    assert all(agrees(four[r, c].item(), text) for r, c, text in [(0, 0, "19.247"), (0, 1, "16.148"), (1, 1, "12.715")])


@pytest.mark.parametrize(("cls", "leaky"), [(0.1, "14.89"), (0.3, "11.58"), (0.5, "8.27")])
def test_a_head_that_parks_its_weight_on_cls_reads_near_only_when_leaky(cls, leaky):
    a = torch.full((1, 1, 65, 65), (1 - cls) / 64)
    a[..., 0] = cls
    assert agrees(attention_distance(a, GRID, 1, "px", 4, renormalise=False).item(), leaky)
    assert agrees(attention_distance(a, GRID, 1, "px", 4).item(), "16.546")


def test_masses_bound_the_smallest_distances_of_source_a():
    # Every other patch is at least one patch away, so weight off itself ≤ distance: 0.008 needs 92 %, 0.024 needs 76 %.
    scale = patch_distances(GRID).max().item()
    assert scale == pytest.approx(7 * 2**0.5)
    assert agrees(1 - 0.008 * scale, "0.92") and agrees(1 - 0.024 * scale, "0.76")
    for seed in range(5):
        a = random_attention(1, 4, 64, seed=seed, sharpness=6)
        off = 1 - a.diagonal(dim1=-2, dim2=-1).mean((0, 2))
        assert (off <= attention_distance(a, GRID, 0) + 1e-6).all()


def test_distances_and_neighbours_on_an_oblong_grid():
    d = patch_distances((2, 3), "px", (4, 6))
    assert d[0].tolist() == pytest.approx([0, 6, 12, 4, 52**0.5, 160**0.5])
    assert patch_distances((2, 3), "max").max() == 1
    assert neighbours((2, 3)).sum(1).tolist() == [3, 5, 3, 3, 5, 3]
    assert neighbours(GRID).float().mean().item() * 64 == pytest.approx((4 * 3 + 24 * 5 + 36 * 8) / 64)


def test_entropies_are_averaged_not_maps():
    a = torch.zeros(16, 1, 65, 65)
    chosen = torch.rand(16, 1, 65, 65, generator=torch.Generator().manual_seed(0)).topk(6, -1).indices
    a.scatter_(-1, chosen, 1 / 6)
    assert attention_entropy(a).item() == pytest.approx(math.log(6), abs=1e-5)
    assert attention_entropy(a.mean(0, keepdim=True)).item() > 3.5


def test_three_far_keys_are_more_concentrated_than_a_local_window():
    # Source B's remark: entropy cannot tell far from near, distance can.
    far = torch.zeros(64, 64, dtype=torch.float64).index_fill_(1, torch.tensor([0, 7, 63]), 1 / 3)
    assert attention_entropy(head(far), 0).item() == pytest.approx(math.log(3), abs=1e-5)
    local = head(reference_heads(GRID)["3×3 window"])
    assert attention_entropy(local, 0) > attention_entropy(head(far), 0)
    assert attention_distance(local, GRID, 0) < attention_distance(head(far), GRID, 0)


@pytest.mark.parametrize(
    ("depth", "to_cls", "to_patch"), [(7, "0.0230769", "0.0152644"), (8, "0.0192308", "0.0153245")]
)
def test_rollout_of_uniform_attention(depth, to_cls, to_patch):
    r = rollout([torch.full((2, 3, 65, 65), 1 / 65)] * depth)
    assert r.shape == (2, 65, 65)
    assert r[0, 0, 0].item() == pytest.approx(float(to_cls), abs=6e-8)
    assert r[0, 0, 1:].tolist() == pytest.approx([float(to_patch)] * 64, abs=6e-8)
    assert r[0, 0, 0].item() == pytest.approx(2**-depth + (1 - 2**-depth) / 65, abs=1e-7)


def test_rollout_of_identity_is_identity():
    assert torch.equal(rollout([torch.eye(5).expand(2, 3, 5, 5)] * 4), torch.eye(5).expand(2, 5, 5))


def test_rollout_multiplies_later_layers_from_the_left():
    first = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[None, None]  # M = [[1, 0], [½, ½]]
    second = torch.tensor([[0.0, 1.0], [0.0, 1.0]])[None, None]  # M = [[½, ½], [0, 1]]
    assert rollout([first, second])[0].tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert rollout([second, first])[0].tolist() == [[0.5, 0.5], [0.25, 0.75]]
    assert rollout([first])[0].tolist() == [[1, 0], [0.5, 0.5]]


def test_rollout_rows_sum_to_one_and_heads_are_averaged():
    layers = [random_attention(3, 4, 10, seed=s) for s in range(5)]
    r = rollout(layers)
    assert torch.allclose(r.sum(-1), torch.ones(3, 10), atol=1e-5)
    assert torch.allclose(r, rollout([layer.mean(1, keepdim=True) for layer in layers]), atol=1e-6)


def test_cls_maps():
    a = torch.arange(2 * 3 * 49.0).view(2, 3, 7, 7)
    maps = cls_maps(a, (2, 3))
    assert maps.shape == (2, 3, 2, 3)
    assert maps[0, 0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert cls_maps(a[:, 0], (1, 5), prefix=2)[1].tolist() == [[149, 150, 151, 152, 153]]


@pytest.mark.parametrize("seed", range(4))
def test_bounds_and_invariances(seed):
    grid, prefix = [((4, 4), 1), ((2, 5), 0), ((3, 3), 2), ((1, 6), 1)][seed]
    T = grid[0] * grid[1] + prefix
    a = random_attention(6, 3, T, seed=seed, sharpness=1 + 3 * seed)
    largest = patch_distances(grid).max().item()
    d, h = attention_distance(a, grid, prefix), attention_entropy(a, prefix)
    assert (d >= 0).all() and (d <= largest).all() and (h >= 0).all() and (h <= math.log(T) + 1e-6).all()
    assert torch.allclose(attention_distance(a, grid, prefix, "max"), d / largest)
    assert (attention_distance(a, grid, prefix, renormalise=False) <= d + 1e-6).all()
    assert torch.allclose(attention_distance(a[torch.randperm(6)], grid, prefix), d)
    assert torch.equal(attention_distance(a[:, [2, 0, 1]], grid, prefix), d[[2, 0, 1]])
    assert torch.equal(attention_entropy(a[:, [2, 0, 1]], prefix), h[[2, 0, 1]])
    # Turning the grid by half a turn moves every patch and no distance.
    order = [*range(prefix), *reversed(range(prefix, T))]
    turned = a[:, :, order][:, :, :, order]
    assert torch.allclose(attention_distance(turned, grid, prefix), d, atol=1e-6)


UNIFORM = torch.full((1, 1, 65, 65), 1 / 65)


def changed(value: float) -> torch.Tensor:
    a = UNIFORM.clone()
    a[0, 0, 3, 5] = value
    return a


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_distance(UNIFORM, (8, 7)), r"\(1, 1, 65, 65\) does not match the grid \(8, 7\)"),
        (lambda: attention_distance(UNIFORM, GRID, prefix=0), "with 0 tokens in front"),
        (lambda: attention_distance(UNIFORM[0], GRID), r"\(1, 65, 65\) does not match"),
        (lambda: attention_distance(changed(-0.1), GRID), "holds -0.1: probabilities are not negative"),
        (lambda: attention_distance(changed(0.1), GRID), r"sum to 1.0000…1.0846, not to one$"),
        (lambda: attention_distance(changed(0.1), GRID, renormalise=False), r"not to one$"),
        (lambda: attention_distance(changed(0.0), GRID), "taken only by name: renormalise=False"),
        (lambda: attention_distance(changed(math.nan), GRID), "NaN"),
        (lambda: attention_distance(changed(math.inf), GRID), "infinite"),
        (lambda: attention_distance(UNIFORM, GRID, unit="cm"), "unit='cm' is unknown"),
        (lambda: attention_distance(UNIFORM, GRID, unit="px"), "unit='px', patch=None"),
        (lambda: attention_distance(UNIFORM, GRID, patch=4), "unit='patch', patch=4"),
        (lambda: attention_distance(UNIFORM, GRID, renormalise=False, count_self=False), "count_self=False needs"),
        (lambda: attention_entropy(UNIFORM / 2), "sum to 0.5000"),
        (lambda: attention_distance(UNIFORM[0], GRID), r"attn\[None\]"),
        (lambda: rollout([]), "no layers"),
        (lambda: rollout(UNIFORM), "no layers, or of one alone"),
        (lambda: rollout([UNIFORM[0]]), r"attn\[None\]"),
        (lambda: cls_maps(UNIFORM, (7, 7)), r"maps over 65 tokens are not a grid \(7, 7\) with 1 tokens"),
        (lambda: rollout([UNIFORM, UNIFORM * 2]), "sum to 2.0000"),
        (lambda: cls_maps(UNIFORM, GRID, prefix=0), "prefix=0"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_below_one_are_taken_when_leaky_is_asked_for():
    dropped = UNIFORM.clone()
    dropped[..., 0] = 0  # CLS column dropped and not made up for
    assert agrees(attention_distance(dropped, GRID, 1, "px", 4, renormalise=False).item(), "16.2914")
