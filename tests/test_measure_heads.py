"""``measure_heads`` against a loop written from the definition, all maps at once, and an untrained model."""

import math
import weakref

import pytest
import torch
from small import random_attention

from vitbook.measures.heads import attention_distance, attention_entropy, measure_heads, neighbours
from vitbook.models.vit import ViT


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
        return x, {"embed": x} | {f"block{i}.attn": layer[which] for i, layer in enumerate(self.layers)}


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


def test_an_image_without_weight_on_patches_is_left_out_of_the_distance():
    far, parked = torch.zeros(5, 5), torch.zeros(5, 5)
    far[:, 4] = 1.0  # every query looks at the last of 2 × 2 patches alone: 1.414, 1, 1 and 0 away
    parked[:, 0] = 1.0  # every query looks at CLS alone
    model = Maps([torch.stack([far, far, parked])[:, None]], (2, 2), 1)
    row = measure_heads(model, torch.arange(3.0).view(3, 1, 1, 1)).iloc[0]
    assert row.distance == pytest.approx((2 + math.sqrt(2)) / 4)
    assert row.distance_se == pytest.approx(0, abs=1e-6)
    assert row.leaky == pytest.approx((2 + math.sqrt(2)) / 4 * 2 / 3)
    assert row.cls == pytest.approx(1 / 3)


def test_one_image_has_no_standard_error():
    model = Maps([torch.full((1, 1, 5, 5), 0.2)], (2, 2), 1)
    assert math.isnan(measure_heads(model, torch.zeros(1, 1, 1, 1)).distance_se[0])


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
            result = super().__call__(x, capture)
            for name, t in result[1].items():
                if name.endswith(".attn"):
                    alive.add(t)
            self.peak = max(self.peak, sum(t.nbytes for t in alive))
            return result

    layers = [random_attention(8, 2, 5, seed=s) for s in range(3)]
    few, many = Counting(layers, (2, 2), 1), Counting(layers, (2, 2), 1)
    measure_heads(few, torch.arange(16) % 8, batch=4)
    measure_heads(many, torch.arange(400) % 8, batch=4)
    one_batch = 3 * 4 * 2 * 5 * 5 * 4
    assert one_batch <= many.peak == few.peak <= 2 * one_batch


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


@pytest.mark.parametrize(("grid", "prefix"), [((4, 4), 1), ((2, 5), 0), ((3, 3), 2)])
def test_masses_are_parts_of_one(grid, prefix):
    a = random_attention(6, 3, grid[0] * grid[1] + prefix, sharpness=5)
    masses = measure_heads(Maps([a], grid, prefix), torch.arange(6))[["self", "cls", "neighbours"]]
    assert (masses >= 0).all().all() and (masses.sum(axis=1) <= 1 + 1e-6).all()


UNIFORM = torch.full((1, 1, 65, 65), 1 / 65)


def changed(value: float) -> torch.Tensor:
    a = UNIFORM.clone()
    a[0, 0, 3, 5] = value
    return a


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: measure_heads(Maps([UNIFORM], (8, 8), 1), []), "no images"),
        (lambda: measure_heads(Maps([UNIFORM], (8, 8), 1), torch.empty(0)), "no images"),
        (lambda: measure_heads(Maps([UNIFORM], (8, 8), 1), torch.zeros(1), grid=(4, 4)), "does not match the grid"),
        (lambda: measure_heads(Maps([UNIFORM], (8, 8), 1), torch.zeros(1), unit="px"), "patch=None"),
        (lambda: measure_heads(Maps([changed(math.nan)], (8, 8), 1), torch.zeros(1)), "NaN"),
        (lambda: measure_heads(Maps([changed(0.0)], (8, 8), 1), torch.zeros(1)), "not to one"),
        (lambda: measure_heads(Maps([], (8, 8), 1), torch.zeros(1)), "no attention maps"),
    ],
)
def test_bad_input_is_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_that_does_not_say_its_grid_is_pointed_to_capture():
    with pytest.raises(ValueError, match=r"type Linear, does not say its grid and prefix; wrap a timm model"):
        measure_heads(torch.nn.Linear(3, 3), torch.zeros(1, 3, 8, 8))
