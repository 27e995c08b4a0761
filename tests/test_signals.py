"""Locality of patches and their similarity to CLS: patterns with known numbers, and the definition as a loop."""

import math

import pytest
import torch
from small import SMALL, images, largest_difference, stir
from torch.nn.functional import cosine_similarity

from vitbook.measures.signals import cls_similarity, measure_tokens, outputs, pair_similarity, patch_locality
from vitbook.models.vit import ViT


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_hot(codes: torch.Tensor) -> torch.Tensor:
    """A grid of codes [rows,columns] as one image's patches [1,N,D], orthogonal where codes differ."""
    return torch.nn.functional.one_hot(codes.flatten()).float()[None]


@pytest.mark.parametrize("length", [1.0, 250.0])
def test_tokens_that_are_all_the_same(length):
    tokens = length * torch.ones(3, 1 + 12, 5)
    for value in (patch_locality(tokens, (3, 4)), cls_similarity(tokens), pair_similarity(tokens)):
        assert value.tolist() == pytest.approx([1, 1, 1])


def test_tokens_that_have_nothing_in_common():
    tokens = one_hot(torch.arange(12))
    assert patch_locality(tokens, (3, 4), 0).item() == pytest.approx(0, abs=1e-6)
    assert pair_similarity(tokens, 0).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(4, 6), (2, 2), (5, 4)])
def test_a_checkerboard(rows, columns):
    sign = (torch.arange(rows)[:, None] + torch.arange(columns)) % 2 * 2 - 1
    tokens = sign.flatten()[None, :, None] * torch.tensor([3.0, 4.0])
    # Sides −1, diagonals +1: 0 of eight inside, −1 of five at an edge, −1 of three in a corner.
    edge = 2 * (rows - 2) + 2 * (columns - 2)
    expected = (4 * (-1 / 3) + edge * (-1 / 5)) / (rows * columns)
    assert patch_locality(tokens, (rows, columns), 0).item() == pytest.approx(expected, abs=1e-6)
    assert pair_similarity(tokens, 0).item() == pytest.approx(-1 / (rows * columns - 1), abs=1e-6)


def test_stripes_tell_rows_from_columns():
    rows, columns = 3, 5
    stripes = one_hot(torch.arange(rows)[:, None].expand(rows, columns))  # a row has one code
    # The same row holds 1 of 3 neighbours in a corner, 2 of 5 at top and bottom, 1 of 5 at the sides, 2 of 8 inside.
    expected = (4 / 3 + 2 * (columns - 2) * 2 / 5 + 2 * (rows - 2) / 5 + (rows - 2) * (columns - 2) / 4) / 15
    assert patch_locality(stripes, (rows, columns), 0).item() == pytest.approx(expected)
    assert patch_locality(stripes, (columns, rows), 0).item() != pytest.approx(expected, abs=0.05)
    assert pair_similarity(stripes, 0).item() == pytest.approx((columns - 1) / (rows * columns - 1))


@pytest.mark.parametrize(("grid", "prefix"), [((3, 4), 1), ((1, 5), 0), ((4, 2), 3)])
def test_the_definitions_as_loops(grid, prefix):
    N = grid[0] * grid[1]
    tokens = random_tokens(2, prefix + N, 6) + 0.5
    cells = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    for image, locality, pairs in zip(
        tokens, patch_locality(tokens, grid, prefix), pair_similarity(tokens, prefix), strict=True
    ):
        patches, means, every = image[prefix:], [], []
        for i, a in enumerate(cells):
            near = []
            for j, b in enumerate(cells):
                cosine = cosine_similarity(patches[i], patches[j], dim=0).item()
                every += [cosine] if i != j else []
                near += [cosine] if max(abs(a[0] - b[0]), abs(a[1] - b[1])) == 1 else []
            means.append(sum(near) / len(near))
        assert locality.item() == pytest.approx(sum(means) / N, abs=1e-6)
        assert pairs.item() == pytest.approx(sum(every) / (N * (N - 1)), abs=1e-6)


def test_cls_is_the_first_token_and_registers_are_no_patches():
    tokens = torch.zeros(1, 2 + 4, 3)
    tokens[0, 0] = torch.tensor([2.0, 0, 0])
    tokens[0, 1] = torch.tensor([0, 0, 9.0])  # a register
    for i, degrees in enumerate((0, 60, 90, 180)):
        angle = math.radians(degrees)
        tokens[0, 2 + i] = (i + 1) * torch.tensor([math.cos(angle), math.sin(angle), 0])
    assert cls_similarity(tokens, 2).item() == pytest.approx((1 + 0.5 + 0 - 1) / 4, abs=1e-6)


def test_only_the_angle_counts():
    tokens = random_tokens(2, 13, 6)
    scaled = tokens * torch.rand(2, 13, 1, generator=torch.Generator().manual_seed(1)).add(0.1)
    assert largest_difference(patch_locality(tokens, (3, 4)), patch_locality(scaled, (3, 4))) < 1e-6
    assert largest_difference(cls_similarity(tokens), cls_similarity(scaled)) < 1e-6


@pytest.mark.parametrize("batch", [2, 5])
def test_measure_tokens_is_the_mean_over_images_of_each_layer(batch):
    model = stir(ViT(**SMALL, registers=2), 0.3)
    x = images(5, 3, 16, 16)
    table = measure_tokens(model, x, batch=batch)
    with torch.no_grad():
        _, kept = model(x, capture=True)
    assert table.layer.tolist() == [0, 1]
    for layer, row in table.iterrows():
        tokens = kept[f"block{layer}.out"]
        for name, values in {
            "locality": patch_locality(tokens, (4, 4), 3),
            "cls": cls_similarity(tokens, 3),
            "pairs": pair_similarity(tokens, 3),
        }.items():
            assert row[name] == pytest.approx(values.mean().item(), abs=1e-6)
            assert row[f"{name}_se"] == pytest.approx((values.std() / 5**0.5).item(), abs=1e-6)


def test_a_model_without_cls_has_no_similarity_to_it():
    model = ViT(**SMALL, cls_token=False, pool="mean", registers=1)
    table = measure_tokens(model, images(2, 3, 16, 16))
    assert table.cls.isna().all() and table.cls_se.isna().all()
    assert table[["locality", "pairs"]].notna().all(axis=None)


def test_modes_come_back_one_by_one_even_when_the_stream_is_left_early():
    model = ViT(**SMALL).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    stream = outputs(model, images(4, 3, 16, 16), capture=False, batch=2)
    next(stream)
    assert not any(module.training for module in model.modules())
    stream.close()
    assert [module.training for module in model.modules()] == modes


def test_outputs_are_float32_and_without_gradients():
    model = ViT(**SMALL).eval()
    with torch.autocast("cpu", torch.bfloat16):
        ((logits, kept),) = outputs(model, images(2, 3, 16, 16), capture=True)
    assert logits.dtype == kept["block1.out"].dtype == torch.float32
    assert not logits.requires_grad
    assert torch.equal(logits, model(images(2, 3, 16, 16), capture=True)[0].detach())


TOKENS = torch.ones(2, 13, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: patch_locality(TOKENS, (4, 4)), r"\(2, 13, 5\) do not match the grid \(4, 4\) with 1 in front"),
        (lambda: patch_locality(TOKENS[0], (3, 4)), r"\(13, 5\) do not match"),
        (lambda: patch_locality(TOKENS[:, :2], (1, 1)), r"\(1, 1\) has no neighbours"),
        (lambda: pair_similarity(TOKENS, 12), "1 patches make no pair"),
        (lambda: cls_similarity(TOKENS, 0), "prefix=0: a model without CLS"),
        (lambda: measure_tokens(lambda x, capture: None, TOKENS), "does not say its grid and prefix"),
        (lambda: measure_tokens(ViT(**SMALL), images(0, 3, 16, 16)), "no images to measure"),
        (
            lambda: measure_tokens(lambda x, capture: (x, {}), TOKENS, grid=8, prefix=1),
            r"grid=8: give rows and columns",
        ),
        (lambda: measure_tokens(lambda x: x, TOKENS, grid=(3, 4), prefix=1), "without an argument capture"),
        (lambda: measure_tokens(lambda x, capture: x, TOKENS, grid=(3, 4), prefix=1), r"capture=True\) gave a Tensor"),
        (lambda: measure_tokens(lambda x, **_: (x, [x]), TOKENS, grid=(3, 4), prefix=1), "gave a tuple"),
        (lambda: patch_locality(TOKENS[None], (3, 4)), "a feature map of shape"),
        (
            lambda: measure_tokens(lambda x, capture: (x, {"block0.attn": x}), TOKENS, grid=(3, 4), prefix=1),
            r"no intermediate named '….out'",
        ),
        (
            lambda: measure_tokens(lambda x, capture: (x, {"block0.out": x}), TOKENS, grid=(3, 3), prefix=1),
            "do not match the grid",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
