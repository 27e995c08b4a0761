"""MixUp, label smoothing and per-image policies: closed forms, and torchvision's own result on each image alone."""

import math
from itertools import product

import pytest
import torch
from torchvision.transforms import v2

from vitbook.data import Augment, load
from vitbook.data.policies import POLICIES, AutoAugment


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
])  # fmt: skip
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Augment(**fields)
