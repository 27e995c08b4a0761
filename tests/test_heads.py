"""Head measures against the numbers of the fact sheets, closed forms and a loop written from the definition."""

import math
import weakref

import pytest
import torch

from vitbook.measures.heads import (
    attention_distance,
    attention_entropy,
    cls_maps,
    measure_heads,
    neighbours,
    patch_distances,
    reference_heads,
    rollout,
)
from vitbook.models.vit import ViT

GRID = (8, 8)


def agrees(value: float, printed: str):
    """True when ``value`` rounds to the digits that are printed (within float32)."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.5 * 10**-digits + 1e-5


def head(a: torch.Tensor) -> torch.Tensor:
    """[T,T] → [1,1,T,T] float32."""
    return a.float()[None, None]


def random_attention(*shape: int, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    return (sharpness * torch.randn(*shape, shape[-1], generator=torch.Generator().manual_seed(seed))).softmax(-1)


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


def slow(a, grid, prefix, has_cls, size=(1, 1)):
    """The definitions, a loop for each sum: seven numbers of one head's [B,T,T]."""
    T, places = a.shape[-1], [(r * size[0], c * size[1]) for r in range(grid[0]) for c in range(grid[1])]
    cells = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    totals = dict.fromkeys(("distance", "leaky", "entropy", "self", "cls", "neighbours", "cls_entropy"), 0.0)
    for rows in a.tolist():
        for i in range(prefix, T):
            left = sum(rows[i][prefix:])
            for j in range(T):
                w = rows[i][j]
                totals["entropy"] -= w * math.log(w) if w else 0
                if j < prefix:
                    totals["cls"] += w if has_cls and j == 0 else 0
                    continue
                far = math.dist(places[i - prefix], places[j - prefix])
                totals["distance"] += w / left * far
                totals["leaky"] += w * far
                totals["self"] += w if i == j else 0
                steps = [abs(p - q) for p, q in zip(cells[i - prefix], cells[j - prefix], strict=True)]
                totals["neighbours"] += w if max(steps) == 1 else 0
        totals["cls_entropy"] -= sum(w * math.log(w) for w in rows[0]) * (T - prefix) if has_cls else math.nan
    return {name: total / (len(a) * (T - prefix)) for name, total in totals.items()}


class Maps:
    """A stand-in for a model: gives maps that were made beforehand; an "image" holds nothing but its number."""

    def __init__(self, layers, grid, prefix, has_cls=True):
        self.layers, self.grid, self.prefix, self.has_cls = layers, grid, prefix, has_cls

    def __call__(self, x, capture):
        which = x.flatten().long()
        return None, {"embed": x} | {f"block{i}.attn": layer[which] for i, layer in enumerate(self.layers)}


@pytest.mark.parametrize(
    ("grid", "prefix", "has_cls", "size"),
    [((3, 3), 1, True, (1, 1)), ((2, 4), 3, True, (4, 2)), ((3, 2), 0, False, (1, 1)), ((2, 3), 2, False, (1, 1))],
)
def test_measure_heads_is_the_definition(grid, prefix, has_cls, size):
    n, T = 5, grid[0] * grid[1] + prefix
    layers = [random_attention(n, 2, T, seed=s, sharpness=3) for s in (1, 2, 3)]
    unit = {} if size == (1, 1) else {"unit": "px", "patch": size}
    table = measure_heads(Maps(layers, grid, prefix, has_cls), torch.arange(n), batch=2, **unit)
    assert table[["layer", "head"]].values.tolist() == [[layer, h] for layer in range(3) for h in range(2)]
    for row in table.to_dict("records"):
        expected = slow(layers[row["layer"]][:, row["head"]], grid, prefix, has_cls, size)
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=2e-6, nan_ok=True), name
        assert row["effective"] == pytest.approx(math.exp(expected["entropy"]), rel=1e-5)


@pytest.fixture(scope="module")
def model_and_images():
    torch.manual_seed(0)
    model = ViT(image=(12, 16), patch=4, dim=16, depth=3, heads=2, registers=2, classes=5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model.eval(), torch.randn(17, 3, 12, 16)


@pytest.mark.parametrize("batch", [1, 7, 17])
def test_streaming_equals_all_maps_at_once(model_and_images, batch):
    model, images = model_and_images
    table = measure_heads(model, images, batch=batch, unit="max")
    with torch.no_grad():
        _, kept = model(images, capture=True)
    for layer, rows in table.groupby("layer"):
        a, grid, front = kept[f"block{layer}.attn"], (3, 4), 3
        patches = a[:, :, front:, front:]
        per_image = torch.cat([attention_distance(image[None], grid, front, "max")[None] for image in a])
        expected = {
            "distance": attention_distance(a, grid, front, "max"),
            "distance_se": per_image.std(0) / 17**0.5,
            "leaky": attention_distance(a, grid, front, "max", renormalise=False),
            "entropy": attention_entropy(a, front),
            "self": patches.diagonal(dim1=-2, dim2=-1).mean((0, 2)),
            "cls": a[:, :, front:, 0].mean((0, 2)),
            "neighbours": (patches * neighbours(grid)).sum(-1).mean((0, 2)),
        }
        for name, values in expected.items():
            assert torch.allclose(torch.tensor(rows[name].values).float(), values, atol=2e-6), name


def test_iterables_of_batches_and_the_order_of_images_change_nothing(model_and_images):
    model, images = model_and_images
    whole = measure_heads(model, images)
    shuffled = images[torch.randperm(17, generator=torch.Generator().manual_seed(1))]
    for other in (iter(images.split(5)), [images[:1], images[1:]], shuffled, (b for b in images.split(3))):
        assert (measure_heads(model, other) - whole).abs().max().max() < 2e-6


def test_measuring_leaves_the_model_in_its_mode(model_and_images):
    model, images = model_and_images
    model.train()
    measure_heads(model, images)
    assert model.training
    with pytest.raises(ValueError, match="do not fit"):
        measure_heads(model, torch.randn(2, 3, 8, 8))
    assert model.training
    model.eval()


def test_memory_does_not_grow_with_the_number_of_images():
    alive = weakref.WeakSet()

    class Counting(Maps):
        peak = 0

        def __call__(self, x, capture):
            _, kept = super().__call__(x, capture)
            for name, t in kept.items():
                if name.endswith(".attn"):
                    alive.add(t)
            self.peak = max(self.peak, sum(t.nbytes for t in alive))
            return None, kept

    layers = [random_attention(8, 2, 5, seed=s) for s in range(3)]
    few, many = Counting(layers, (2, 2), 1), Counting(layers, (2, 2), 1)
    measure_heads(few, torch.arange(16) % 8, batch=4)
    measure_heads(many, torch.arange(400) % 8, batch=4)
    one_batch = 3 * 4 * 2 * 5 * 5 * 4
    assert one_batch <= many.peak == few.peak <= 2 * one_batch


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


@pytest.mark.parametrize("seed", [0, 1])
def test_an_untrained_model_looks_everywhere(seed):
    torch.manual_seed(seed)
    model = ViT(image=32, patch=4, dim=384, depth=7, heads=6, classes=10)
    table = measure_heads(model, torch.randn(24, 3, 32, 32), unit="px", patch=4)
    assert len(table) == 42
    layers = table.groupby("layer")[["distance", "leaky"]].mean()
    assert layers.distance.between(16.49, 16.58).all()
    assert layers.leaky.between(16.25, 16.33).all()
    assert table.distance.between(16.546 - 0.15, 16.546 + 0.15).all()
    assert table.entropy.between(4.08, math.log(65) + 1e-5).all()
    assert table["self"].between(0.011, 0.021).all()
    assert table.cls.between(0.011, 0.021).all()


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
    table = measure_heads(Maps([a], grid, prefix), torch.arange(6))
    masses = table[["self", "cls", "neighbours"]]
    assert (masses >= 0).all().all() and (masses.sum(axis=1) <= 1 + 1e-6).all()


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
        (lambda: rollout([]), "no layers"),
        (lambda: rollout([UNIFORM, UNIFORM * 2]), "sum to 2.0000"),
        (lambda: cls_maps(UNIFORM, GRID, prefix=0), "prefix=0"),
        (lambda: measure_heads(Maps([UNIFORM], GRID, 1), []), "no images"),
        (lambda: measure_heads(Maps([UNIFORM], GRID, 1), torch.empty(0)), "no images"),
        (lambda: measure_heads(Maps([UNIFORM], GRID, 1), torch.zeros(1), grid=(4, 4)), "does not match the grid"),
        (lambda: measure_heads(Maps([UNIFORM], GRID, 1), torch.zeros(1), unit="px"), "patch=None"),
        (lambda: measure_heads(Maps([changed(math.nan)], GRID, 1), torch.zeros(1)), "NaN"),
        (lambda: measure_heads(Maps([changed(0.0)], GRID, 1), torch.zeros(1)), "not to one"),
        (lambda: measure_heads(Maps([], GRID, 1), torch.zeros(1)), "no attention maps"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_below_one_are_taken_when_leaky_is_asked_for():
    dropped = UNIFORM.clone()
    dropped[..., 0] = 0  # CLS column dropped and not made up for
    assert agrees(attention_distance(dropped, GRID, 1, "px", 4, renormalise=False).item(), "16.2914")
