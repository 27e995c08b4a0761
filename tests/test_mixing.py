"""MixUp, CutMix, its controls, smoothing, per-image operations: closed forms, and torchvision's own results."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torchvision.transforms import v2

from vitbook.data import Augment, load, mixing
from vitbook.data.policies import COLOURS, LEVELS, POLICIES, AutoAugment, ColorJitter


@pytest.mark.parametrize(("alpha", "weight"), [(0.2, 0.899), (0.8, 0.772), (1.0, 0.750)])
def test_mixup_blends_images_as_it_shares_labels(alpha, weight):
    """Mean of the larger label weight, as published; the blend is read off images of constant colour."""
    images, labels = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 4, 4).clone(), torch.tensor([0, 1])
    torch.manual_seed(0)
    larger, n = [], 1_500
    for _ in range(n):
        mixed, targets = Augment(mixup=alpha).mix(images, labels, 2)
        assert torch.allclose(mixed.mean((1, 2, 3)), targets[:, 1], atol=1e-6)
        larger.append(targets.max().item())
    assert sum(larger) / n == pytest.approx(weight, abs=4 * 0.17 / math.sqrt(n))


def test_both_mixings_take_turns_evenly():
    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
    augment, n = Augment(mixup=50.0, cutmix=50.0), 1_000
    torch.manual_seed(0)
    # CutMix leaves or copies each pixel, MixUp changes them all
    cut = sum((augment.mix(images, labels, 2)[0] == images).any().item() for _ in range(n))
    assert cut / n == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(n))


@pytest.mark.parametrize("law", [v2.CutMix, v2.MixUp])
def test_one_draw_a_batch_is_torchvision(law):
    images, labels = torch.randn(6, 3, 16, 12), torch.tensor([0, 3, 1, 1, 2, 4])
    augment = Augment(cutmix=1.0) if law is v2.CutMix else Augment(mixup=0.8)
    for seed in range(20):
        torch.manual_seed(seed)
        got = augment.mix(images, labels, 5)
        torch.manual_seed(seed)
        torch.rand(())  # whether the batch is mixed
        want = law(alpha=augment.cutmix or augment.mixup, num_classes=5)(images, labels)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


def numbered(n, h, w):
    """Images of one value each, 1 … n, and labels 0 … n - 1."""
    return torch.arange(1.0, n + 1)[:, None, None, None].expand(n, 3, h, w).clone(), torch.arange(n)


def test_per_image_every_image_has_its_own_box_and_its_own_share():
    images, labels = numbered(400, 32, 32)
    torch.manual_seed(0)
    mixed, targets = Augment(cutmix=1.0, per_image=True).mix(images, labels, 400)
    own = (mixed == images)[:, 0].double().mean((1, 2))
    assert torch.allclose(targets[labels, labels].double(), own) and torch.allclose(targets.sum(1), torch.ones(400))
    assert torch.equal(mixed[:, 0] != images[:, 0], mixed[:, 0] == images.roll(1, 0)[:, 0])
    assert len(own.unique()) > 150
    assert (1 - own).mean().item() == pytest.approx(0.299, abs=4 * 0.185 / 20)  # the published mean area
    mixed, targets = Augment(mixup=1.0, per_image=True).mix(images, labels, 400)
    share = targets[labels, labels]
    assert torch.allclose(mixed[:, 0, 0, 0], share * images[:, 0, 0, 0] + (1 - share) * images.roll(1, 0)[:, 0, 0, 0])
    assert len(share.unique()) > 390 and share.mean().item() == pytest.approx(0.5, abs=4 * 0.289 / 20)


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("kind", mixing.CUTS)
def test_controls_of_cutmix(kind, per_image):
    """By the same draws as CutMix itself: which pixels change, to what, and what is asked of the model."""
    images, labels = torch.rand(6, 3, 32, 24) + 1, torch.arange(6)
    hard, other = torch.eye(6), torch.eye(6).roll(1, 0)
    crossed = changed = 0
    for seed in range(30):
        torch.manual_seed(seed)
        pasted, shared = Augment(cutmix=1.0, per_image=per_image).mix(images, labels, 6)
        torch.manual_seed(seed)
        mixed, targets = Augment(cutmix=1.0, cut=kind, per_image=per_image).mix(images, labels, 6)
        box = (pasted != images)[:, :1].expand_as(images)
        own = shared.diagonal()[:, None]
        assert torch.allclose(own[:, 0], 1 - box[:, 0].float().mean((1, 2)), atol=1e-6)
        crossed += int((own < 0.5).sum())
        if kind == "labels":
            assert torch.equal(mixed, images)
        elif kind == "erase":
            assert torch.equal(mixed, torch.where(box, 0, images))
        elif kind != "shuffle":
            assert torch.equal(mixed, pasted)
        else:
            assert torch.equal(mixed[~box], images[~box])
            patches, before = (
                x.view(6, 3, 8, 4, 8, 3).permute(0, 2, 4, 1, 3, 5).reshape(6, 64, 36) for x in (mixed, images)
            )
            whole = box.view(6, 3, 8, 4, 8, 3).permute(0, 2, 4, 1, 3, 5).reshape(6, 64, 36).all(2)
            for now, then, inside in zip(patches, before, whole, strict=True):
                came = (now[:, None] == then).all(2).int().argmax(1)  # the place each patch came from
                assert torch.equal(now, then[came])
                assert torch.equal(came.sort().values, torch.arange(64))
                assert torch.equal(came[~inside], torch.arange(64)[~inside])
                changed += int((came != torch.arange(64)).sum() > 0.5 * inside.sum() > 4)
        want = {"paste": shared, "labels": shared, "major": torch.where(own >= 0.5, hard, other)}
        assert torch.allclose(targets, want.get(kind, hard), atol=1e-6)
    assert crossed > 10 and (kind != "shuffle" or changed > 30)


def test_smoothing_gives_every_class_its_share():
    labels = torch.tensor([2, 0])
    _, targets = Augment(smoothing=0.1).mix(torch.zeros(2, 3, 4, 4), labels, 4)
    assert torch.allclose(targets, torch.tensor([[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]]))


def test_smoothing_of_mixed_targets_is_the_mixture_of_smoothed_losses():
    """λ' ℓ(y_a) + (1 - λ') ℓ(y_b), ℓ = (1 - ε) CE + ε mean_k(-log p_k), is cross-entropy with the smoothed mixture."""
    images, labels, eps, logits = torch.rand(2, 3, 8, 8), torch.tensor([0, 3]), 0.1, torch.randn(2, 5)
    torch.manual_seed(1)
    _, hard = Augment(cutmix=1.0).mix(images, labels, 5)
    torch.manual_seed(1)
    _, soft = Augment(cutmix=1.0, smoothing=eps).mix(images, labels, 5)
    logp = logits.log_softmax(1)
    want = sum(hard[:, k] * ((1 - eps) * -logp[:, k] - eps * logp.mean(1)) for k in range(5))
    assert torch.allclose(-(soft * logp).sum(1), want, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_sub_policy_and_sign_is_what_torchvision_does(policy):
    """torchvision, held to one sub-policy that is certain, gives one of our results over the signs, and each."""
    ours, theirs = AutoAugment(policy), v2.AutoAugment(POLICIES[policy])
    image = load("shapes", "test", limit=3).images[2:]
    torch.manual_seed(0)
    for sub in list(ours._policies):
        theirs._policies = [tuple((operation, 1.0, level) for operation, _, level in sub)]
        signs = [(False, True) if ours._AUGMENTATION_SPACE[operation][1] else (False,) for operation, _, _ in sub]
        want = {}
        for both in product(*signs):
            result = image
            for (operation, _, level), negative in zip(sub, both, strict=True):
                result = ours.apply(result, operation, ours.magnitude(operation, level, (32, 32), negative))
            want[both] = result
        seen = set()
        for _ in range(40):
            found = theirs(image)
            matches = [both for both, result in want.items() if torch.equal(found, result)]
            assert matches, sub
            seen.update(matches)
            if len(seen) == len(want):
                break
        assert len(seen) == len(want), sub


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chunk_is_every_image_by_itself(policy):
    """The grouped result equals each image taken alone through the operations that its draws name."""
    images = load("shapes", "test", limit=120).images
    augment = AutoAugment(policy)
    torch.manual_seed(5)
    got = augment(images)
    torch.manual_seed(5)
    chosen = torch.randint(len(augment._policies), (len(images),))
    alone, changed = images.clone(), 0
    for stage in (0, 1):
        chance, sign = torch.rand(len(images)), torch.rand(len(images)) <= 0.5
        for i in range(len(images)):
            operation, probability, level = augment._policies[chosen[i]][stage]
            if chance[i] <= probability:
                magnitude = augment.magnitude(operation, level, (32, 32), bool(sign[i]))
                alone[i : i + 1] = augment.apply(alone[i : i + 1], operation, magnitude)
                changed += 1
    assert torch.equal(got, alone)
    assert changed > 60 and not torch.equal(got, images)


def test_a_chunk_of_colours_is_every_image_by_itself():
    images, jitter = load("shapes", "test", limit=90).images, ColorJitter(0.4)
    torch.manual_seed(3)
    got = jitter(images)
    torch.manual_seed(3)
    order = torch.rand(90, 4).argsort(1)
    level = torch.randint(LEVELS, (90, 4))
    assert all(len(column.unique()) == 4 for column in order.T)
    for i in range(90):
        image = images[i]
        for operation in order[i].tolist():
            low, high = (-0.1, 0.1) if operation == 3 else (0.6, 1.4)
            image = COLOURS[operation](image, low + (high - low) * level[i, operation].item() / (LEVELS - 1))
        assert torch.equal(got[i], image)
    assert (got != images).flatten(1).any(1).all()


def test_colours_reach_the_ends_that_torchvision_draws_between():
    theirs = v2.ColorJitter(0.4, 0.4, 0.4, 0.1)
    ranges = [theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue]
    assert torch.allclose(torch.tensor(ColorJitter(0.4).ranges), torch.tensor(ranges))
    grey = torch.full((1, 3, 4, 4), 100, dtype=torch.uint8)
    assert [ColorJitter(0.4).apply(grey, 0, n).max().item() for n in (0, LEVELS - 1)] == [60, 140]


def test_policy_follows_crop_and_flip_and_leaves_the_input_alone():
    images = load("shapes", "test", limit=50).images
    before = images.clone()
    torch.manual_seed(0)
    want = AutoAugment("cifar10")(Augment().pixels(images))
    torch.manual_seed(0)
    assert torch.equal(Augment(policy="cifar10").pixels(images), want) and torch.equal(images, before)


@pytest.mark.parametrize(("fields", "message"), [
    ({"policy": "svhm"}, "policy is 'svhm'; choose one of cifar10, imagenet"),
    ({"mixup": -1.0}, "mixup is -1.0"),
    ({"smoothing": 1.0}, "smoothing is 1.0"),
    ({"jitter": 1.5}, "jitter is 1.5"),
    ({"cutmix": 1.0, "cut": "copy"}, "cut is 'copy'; choose one of paste, major, labels, erase, shuffle"),
    ({"cut": "erase"}, "cut is 'erase', a control of CutMix, and cutmix is 0"),
])  # fmt: skip
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Augment(**fields)


def test_shuffle_needs_a_grid_of_patches():
    data = load("shapes", "test", limit=10)
    odd = replace(data, images=data.images[:, :, :30])
    with pytest.raises(ValueError, match="images of 30 × 32 pixels cannot be cut into the 8 × 8 patches"):
        Augment(cutmix=1.0, cut="shuffle").epoch(odd, 5)
