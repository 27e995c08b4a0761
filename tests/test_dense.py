"""Dense measures of frozen features: closed forms, brute force with NumPy, and the decoder's training written out."""

import itertools
import math

import numpy as np
import pytest
import torch
from small import images, largest_difference, stir
from torch import nn
from torch.nn import functional as F

from vitbook.data import DataUnavailable, load
from vitbook.measures.dense import (
    Memory,
    build_memory,
    confusion,
    fit_decoder,
    iou,
    match_classes,
    mean_iou,
    patch_features,
    patch_labels,
    retrieve,
    segment,
)
from vitbook.models.vit import ViT

VOID = 255


def drawn(*shape: int, classes: int, seed: int = 0, void: float = 0.0) -> torch.Tensor:
    """Random masks, a share of their pixels void."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.randint(classes, shape, generator=generator)
    return masks.masked_fill(torch.rand(shape, generator=generator) < void, VOID).to(torch.uint8)


def row(*values: int) -> torch.Tensor:
    """One mask of one row of pixels, [1,1,W]."""
    return torch.tensor(values, dtype=torch.uint8)[None, None]


def perfect(masks: torch.Tensor, classes: int) -> torch.Tensor:
    """A feature for every pixel that says its class: [n,H,W] → [n,H,W,K], of a length that varies."""
    length = 1 + torch.rand(*masks.shape, 1, generator=torch.Generator().manual_seed(3))
    return F.one_hot(masks.long(), classes) * length


def test_two_classes_right_half_of_the_time():
    counts = confusion(row(0, 1, 0, 1), row(0, 0, 1, 1), 2)
    assert counts.tolist() == [[1, 1], [1, 1]]
    assert iou(counts).tolist() == pytest.approx([1 / 3, 1 / 3])
    assert mean_iou(counts) == pytest.approx(1 / 3)


def test_rows_are_true_and_columns_predicted():
    assert confusion(row(0, 0, 1), row(0, 1, 1), 3).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_void_pixels_count_nowhere():
    truth = row(0, 0, 1, 1, VOID, VOID)
    for guess in itertools.product((0, 1), repeat=2):
        counts = confusion(row(0, 1, 1, 1, *guess), truth, 2, VOID)
        assert iou(counts).tolist() == pytest.approx([1 / 2, 2 / 3])


def test_a_class_in_no_mask_has_no_iou_and_costs_the_classes_it_is_taken_for():
    counts = confusion(row(0, 2, 1, 1), row(0, 0, 1, 1), 4)
    assert iou(counts)[:2].tolist() == [0.5, 1] and iou(counts)[2:].isnan().all()
    assert mean_iou(counts) == 0.75


@pytest.mark.parametrize("classes", [2, 5, 11])
def test_iou_is_brute_force(classes):
    masks = drawn(70, 5, 7, classes=classes, void=0.2)
    guess = torch.where(drawn(70, 5, 7, classes=2, seed=1).bool(), drawn(70, 5, 7, classes=classes, seed=2), masks)
    guess = guess.where(guess != VOID, 0)
    t, g = masks.numpy().ravel(), guess.numpy().ravel()
    t, g = t[t != VOID], g[t != VOID]
    expected = [np.sum((t == c) & (g == c)) / np.sum((t == c) | (g == c)) for c in range(classes)]
    counts = confusion(guess, masks, classes, VOID)
    assert iou(counts).tolist() == pytest.approx(expected)
    assert mean_iou(counts) == pytest.approx(np.mean(expected))
    assert counts.sum() == len(t)


def test_guesses_that_do_not_look_have_the_iou_of_their_frequencies():
    p, q = torch.tensor([6, 3, 1]), torch.tensor([2, 3, 5])
    assert iou(p[:, None] * q).tolist() == pytest.approx((p * q / (10 * (p + q) - p * q)).tolist())
    for classes in (2, 4, 10):
        assert mean_iou(torch.ones(classes, classes).long()) == pytest.approx(1 / (2 * classes - 1))


def test_matching_recovers_a_renaming():
    masks, names = drawn(3, 8, 8, classes=5), torch.tensor([3, 0, 4, 1, 2], dtype=torch.uint8)
    counts = confusion(names[masks.long()], masks, 5)
    assert mean_iou(counts) == 0
    assert mean_iou(match_classes(counts)) == 1


@pytest.mark.parametrize("seed", range(6))
def test_matching_is_the_best_of_all_renamings(seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(30, (4, 4), generator=generator)
    counts[:, 2] *= 5  # one large prediction, so that most pixels in common is not the largest IoU
    if seed > 3:
        counts[1] = 0  # a class in no mask
    best = max(mean_iou(counts[:, list(order)]) for order in itertools.permutations(range(4)))
    assert mean_iou(match_classes(counts)) == pytest.approx(best)
    assert best >= mean_iou(counts)


def test_patch_features_are_the_last_blocks_patches_at_their_places():
    model = stir(ViT(image=(8, 12), patch=4, dim=8, depth=3, heads=2, registers=2, classes=5), 0.3)
    x = images(5, 3, 8, 12)
    features = patch_features(model, x, batch=2)
    with torch.no_grad():
        last = model(x, capture=True)[1]["block2.out"]
    assert features.shape == (5, 2, 3, 8)
    for r, c in itertools.product(range(2), range(3)):
        assert largest_difference(features[:, r, c], last[:, 3 + 3 * r + c]) < 1e-6


def test_decoder_has_the_layers_of_the_source():
    decoder = fit_decoder(torch.randn(2, 2, 2, 24), drawn(2, 4, 4, classes=11), 11, iterations=5, batch=2)
    assert [type(layer) for layer in decoder] == [nn.Conv2d, nn.GroupNorm, nn.GELU, nn.Conv2d]
    assert decoder[1].num_groups == 1
    assert sum(p.numel() for p in decoder.parameters()) == (24 + 1) * 512 + 2 * 512 + (512 + 1) * 11


def test_perfect_features_are_segmented_without_a_fault():
    masks = drawn(4, 6, 8, classes=3, void=0.1)
    features = perfect(masks.where(masks != VOID, 0), 3)
    decoder = fit_decoder(features, masks, 3, ignore=VOID, iterations=60, batch=4)
    assert mean_iou(confusion(segment(decoder, features, (6, 8)), masks, 3, VOID)) == 1


def test_features_that_say_nothing_give_the_commonest_class_everywhere():
    masks = torch.zeros(4, 4, 8, dtype=torch.uint8)
    masks[:, :, :2], masks[:, :, -1] = 1, VOID  # 5 columns of class 0, 2 of class 1, 1 void
    features = torch.ones(4, 2, 4, 6)
    decoder = fit_decoder(features, masks, 2, ignore=VOID, iterations=30, batch=4)
    counts = confusion(segment(decoder, features, (4, 8)), masks, 2, VOID)
    assert iou(counts).tolist() == pytest.approx([5 / 7, 0])


def test_decoder_training_written_out():
    generator = torch.Generator().manual_seed(0)
    features, masks = torch.randn(3, 2, 3, 5, generator=generator), drawn(3, 4, 6, classes=3, void=0.1)
    masks[0, 1:] = VOID  # a batch of few labelled pixels weighs as much as any other
    found = fit_decoder(features, masks, 3, ignore=VOID, iterations=12, batch=1, seed=7)
    torch.manual_seed(7)
    first, norm, _, last = layers = nn.Sequential(
        nn.Conv2d(5, 512, 1), nn.GroupNorm(1, 512), nn.GELU(), nn.Conv2d(512, 3, 1)
    )
    params = [first.weight, first.bias, norm.weight, norm.bias, last.weight, last.bias]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    order = torch.cat([torch.randperm(3) for _ in range(4)])
    for t, which in enumerate(order.split(1)):
        # AdamW; the rate rises over steps 0 to 2 = ¼ · 12 − 1, and falls over the nine after them.
        low, peak, least = 1e-7, 1e-3, 1e-11
        rate = low + (peak - low) * t / 2 if t <= 2 else peak + (least - peak) * (t - 2) / 9
        logits = F.interpolate(layers(features[which].permute(0, 3, 1, 2)), scale_factor=2, mode="bilinear")
        truth, known = masks[which], masks[which] != VOID
        loss = -logits.log_softmax(1).movedim(1, -1)[known].gather(1, truth[known].long()[:, None]).mean()
        gradients = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g, (m, v) in zip(params, gradients, moments, strict=True):
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g**2)
                step = m / (1 - 0.9 ** (t + 1)) / ((v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8)
                p.mul_(1 - rate * 0.01).sub_(rate * step)
    x = features.permute(0, 3, 1, 2)
    assert largest_difference(found(x), layers(x)) < 1e-4
    assert largest_difference(found[0].weight, first.weight) < 1e-5


def test_decoder_is_a_function_of_its_seed_and_leaves_the_generator_alone():
    features, masks = torch.randn(5, 2, 2, 4), drawn(5, 2, 2, classes=3)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a = fit_decoder(features, masks, 3, iterations=6, batch=2, seed=1)
    assert torch.equal(torch.rand(1), expected)
    with torch.no_grad():
        b = fit_decoder(features, masks, 3, iterations=6, batch=2, seed=1)
    other = fit_decoder(features, masks, 3, iterations=6, batch=2, seed=2)
    assert torch.equal(a[3].weight, b[3].weight)
    assert not torch.equal(a[3].weight, other[3].weight)
    assert not any(p.requires_grad for p in a.parameters())


def test_decoder_trains_inside_inference_mode():
    features, masks = torch.randn(4, 2, 2, 3), drawn(4, 4, 4, classes=3)
    expected = fit_decoder(features, masks, 3, iterations=5, batch=2)
    with torch.inference_mode():
        found = fit_decoder(features.clone(), masks.clone(), 3, iterations=5, batch=2)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), found.parameters(), strict=True))


def test_a_void_image_teaches_the_decoder_nothing():
    features, masks = torch.randn(3, 2, 2, 4), drawn(3, 4, 4, classes=3)
    masks[1] = VOID
    changed = features.clone()
    changed[1] = 100 * torch.randn(2, 2, 4)
    a, b = (fit_decoder(f, masks, 3, ignore=VOID, iterations=9, batch=1) for f in (features, changed))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert all(p.isfinite().all() for p in a.parameters())


def test_scores_are_upsampled_between_the_patches_centres():
    # Score of class 0 falls from 1 to 0 between two centres, that of class 1 rises from 0 to 1/3: equal at x = 3/4.
    # Four pixels a patch have their centres at x = −3/8, −1/8, 1/8, …, 5/8, 7/8: class 1 begins with the sixth.
    scores = torch.tensor([[1.0, 0.0], [0.0, 1 / 3]])[None, None]
    predicted = segment(nn.Identity(), scores, (4, 8))
    assert predicted.dtype == torch.uint8
    assert predicted.tolist() == [[[0, 0, 0, 0, 0, 1, 1, 1]] * 4]


def test_patch_labels_are_shares_of_the_labelled_pixels():
    mask = torch.tensor(
        [
            [0, 0, 1, 1, VOID, VOID],
            [0, 1, 1, VOID, VOID, VOID],
            [2, 2, 0, 0, 0, 1],
            [2, 2, 0, 0, 2, VOID],
        ],
        dtype=torch.uint8,
    )
    labels = patch_labels(mask[None], (2, 3), 3, VOID)[0]
    expected = [
        [[3 / 4, 1 / 4, 0], [0, 1, 0], [0, 0, 0]],
        [[0, 0, 1], [1, 0, 0], [1 / 3, 1 / 3, 1 / 3]],
    ]
    assert torch.allclose(labels, torch.tensor(expected))


def test_memory_holds_the_patches_with_a_label_or_a_sample_of_them():
    masks = drawn(6, 4, 6, classes=3, void=0.6)
    features = torch.arange(36.0).view(6, 2, 3, 1) + 1
    labels = patch_labels(masks, (2, 3), 3, VOID).flatten(0, 2)
    labelled = [i for i, label in enumerate(labels) if label.any()]
    assert 10 < len(labelled) < 36
    memory = build_memory(features, masks, 3, ignore=VOID)
    assert memory.keys[:, 0].int().tolist() == [i + 1 for i in labelled]
    assert torch.equal(memory.labels, labels[labelled])
    sample = build_memory(features, masks, 3, ignore=VOID, limit=10, seed=1)
    kept = [int(key) - 1 for key in sample.keys[:, 0]]
    assert len(sample) == len(set(kept)) == 10 and set(kept) <= set(labelled)
    assert torch.equal(sample.labels, labels[kept])
    assert torch.equal(build_memory(features, masks, 3, ignore=VOID, limit=10, seed=1).keys, sample.keys)
    assert not torch.equal(build_memory(features, masks, 3, ignore=VOID, limit=10, seed=2).keys, sample.keys)
    assert len(build_memory(features, masks, 3, ignore=VOID, limit=10_000)) == len(labelled)


def test_a_memory_of_the_queries_themselves_retrieves_them():
    masks = drawn(5, 4, 6, classes=4, void=0.2)
    features = torch.randn(5, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    # Among random directions of 16 numbers none is near enough to outweigh the patch itself at temperature 0.02.
    predicted = retrieve(build_memory(features, masks, 4, ignore=VOID), features, (4, 6))
    assert mean_iou(confusion(predicted, masks, 4, VOID)) == 1


def test_retrieval_by_features_that_say_nothing_is_chance():
    # With the labels' frequencies p in memory and in the images, a class's IoU is p² / (2p − p²) = p / (2 − p).
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([0.7, 0.3])
    known, asked = (p.multinomial(n * 400, True, generator=generator).view(n, 20, 20) for n in (10, 30))
    stored, queries = (torch.randn(n, 20, 20, 5, generator=generator) for n in (10, 30))
    counts = confusion(retrieve(build_memory(stored, known, 2), queries, (20, 20), k=1), asked, 2)
    assert iou(counts).tolist() == pytest.approx((p / (2 - p)).tolist(), abs=0.03)


@pytest.mark.parametrize(("options", "k", "temperature"), [({"k": 7, "temperature": 0.3}, 7, 0.3), ({}, 30, 0.02)])
def test_retrieval_is_brute_force(options, k, temperature):
    generator = torch.Generator().manual_seed(0)
    # Within a narrow cone, so that many neighbours have a say.
    stored, queries = (1 + 0.3 * torch.randn(n, 2, 3, 4, generator=generator) for n in (9, 12))
    masks = drawn(9, 4, 6, classes=3, void=0.3)
    predicted = retrieve(build_memory(stored, masks, 3, ignore=VOID), queries, (4, 6), **options)

    keys, labels = [], []
    for (n, r, c), cell in zip(np.ndindex(9, 2, 3), stored.double().flatten(0, 2).numpy(), strict=True):
        pixels = masks[n, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2].numpy()
        if (pixels != VOID).any():
            keys.append(cell / np.linalg.norm(cell))
            labels.append([(pixels == label).sum() / (pixels != VOID).sum() for label in range(3)])
    scores = np.zeros((12, 3, 2, 3))
    for n, r, c in np.ndindex(12, 2, 3):
        query = queries[n, r, c].double().numpy()
        cosine = np.array(keys) @ query / np.linalg.norm(query)
        near = np.argsort(-cosine)[:k]
        weights = np.exp(cosine[near] / temperature)
        scores[n, :, r, c] = weights @ np.array(labels)[near] / weights.sum()
    expected = np.zeros((12, 3, 4, 6))
    for h, w in np.ndindex(4, 6):
        y, x = min(max((h + 0.5) / 2 - 0.5, 0), 1), min(max((w + 0.5) / 2 - 0.5, 0), 2)
        r, c = 0, min(math.floor(x), 1)
        dy, dx = y - r, x - c
        expected[:, :, h, w] = (1 - dy) * ((1 - dx) * scores[:, :, r, c] + dx * scores[:, :, r, c + 1]) + dy * (
            (1 - dx) * scores[:, :, r + 1, c] + dx * scores[:, :, r + 1, c + 1]
        )
    assert predicted.tolist() == expected.argmax(1).tolist()


def test_camvid_patches_that_know_their_labels():
    try:
        data = load("camvid-half", "valid", limit=6)
    except DataUnavailable as reason:
        pytest.skip(str(reason))
    masks = F.interpolate(data.labels[:, None], (96, 128), mode="nearest")[:, 0]
    classes, void = 11, data.ignore_index
    assert void == 11 and (masks == void).any()
    sample = build_memory(patch_labels(masks, (24, 32), classes, void), masks, classes, ignore=void, limit=1000)
    assert len(sample) == 1000 and torch.allclose(sample.labels.sum(1), torch.ones(1000))
    # As the source has it, void is class 0 in memory; in the score it counts nowhere.
    filled = masks.where(masks != void, 0)
    shares = patch_labels(filled, (24, 32), classes)
    predicted = retrieve(build_memory(shares, filled, classes), shares, (96, 128), k=1)
    counts = confusion(predicted, masks, classes, void)
    assert counts.sum() == (masks != void).sum()
    # The nearest patch has equal shares: what is lost is lost to patches of 4 pixels and upsampling alone.
    assert torch.equal(predicted, segment(nn.Identity(), shares, (96, 128)))
    assert 0.6 < mean_iou(counts) < 1


MASKS, FEATURES = drawn(2, 4, 6, classes=3), torch.ones(2, 2, 3, 4)
MEMORY = Memory(torch.ones(5, 4), torch.ones(5, 3) / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_decoder(torch.ones(2, 2, 4, 4), MASKS, 3), "4 × 6 pixels cannot be cut into the 2 × 4 patches"),
        (lambda: fit_decoder(torch.ones(2, 8, 6, 4), MASKS, 3), "cannot be cut into the 8 × 6"),
        (lambda: fit_decoder(FEATURES[:1], MASKS, 3), "do not belong together"),
        (lambda: fit_decoder(FEATURES, MASKS, 2), "masks hold 2, but classes=2 and ignore=None"),
        (lambda: fit_decoder(FEATURES, MASKS | 128, 3, ignore=200), r"masks hold 1\d\d, but classes=3 and ignore=200"),
        (lambda: fit_decoder(FEATURES, MASKS, 3, ignore=0), "ignore=0 must lie in 3 to 255"),
        (lambda: fit_decoder(FEATURES, MASKS, 300), "classes=300 must lie in 2 to 255"),
        (lambda: fit_decoder(FEATURES, MASKS.float(), 3), "masks are torch.float32"),
        (lambda: fit_decoder(FEATURES / 0, MASKS, 3), "NaN or infinite"),
        (lambda: fit_decoder(FEATURES, MASKS, 3, iterations=0), "iterations=0"),
        (lambda: fit_decoder(FEATURES, MASKS * 0 + VOID, 3, ignore=VOID), "nothing to learn"),
        (lambda: segment(nn.Identity(), FEATURES, (5, 6)), "5 × 6 pixels cannot be cut"),
        (lambda: build_memory(FEATURES, MASKS, 3, limit=0), "limit=0: a memory holds at least one patch"),
        (lambda: build_memory(FEATURES, MASKS * 0 + VOID, 3, ignore=VOID), "nothing to store"),
        (lambda: retrieve(MEMORY, FEATURES, (4, 6)), "k=30 neighbours among 5 stored"),
        (lambda: retrieve(MEMORY, FEATURES, (4, 7), k=3), "4 × 7 pixels cannot be cut"),
        (lambda: confusion(MASKS[:1], MASKS, 3), "not of the shape of the masks"),
        (lambda: confusion(MASKS + 1, MASKS, 3), "predicted masks hold 3"),
        (lambda: confusion(MASKS, MASKS * 0 + VOID, 3, VOID), "no pixel of the masks has a class"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
