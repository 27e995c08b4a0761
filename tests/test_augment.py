"""Synthetic shapes and batched augmentation: closed forms, oracles from torchvision, and CutMix's published figures."""

import math

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as TF

from vitbook.data import Augment, DataUnavailable, ImageSet, load, load_or_shapes, sets


def plain(images, labels=None, classes=2):
    """A set by hand whose normalised pixels are the raw values divided by 255."""
    labels = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
    names = tuple(map(str, range(classes)))
    return ImageSet(images, labels, names, "made by hand", "", "cifar10", "train", (0.0,) * 3, (1.0,) * 3)


# --- shapes


def probe(data):
    """What a linear probe sees: the spectrum of the brightness (texture), and its 8 × 8 reduction (arrangement)."""
    grey = data.images.double().mean(1) / 255
    coarse = torch.nn.functional.avg_pool2d(grey[:, None], 4).flatten(1)
    return torch.cat([torch.fft.rfft2(grey).abs().flatten(1) / 32, coarse, torch.ones(len(data), 1)], 1)


def test_shapes_can_be_learned_and_keep_their_class_when_mirrored():
    train, test = load("shapes", "train"), load("shapes", "test")
    x, y = probe(train), torch.nn.functional.one_hot(train.labels).double()
    weights = torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ y)
    for images in (test.images, test.images.flip(-1)):
        right = (probe(plain(images)) @ weights).argmax(1) == test.labels
        assert right.double().mean() > 0.9
        assert all(right[test.labels == c].double().mean() > 0.7 for c in range(10))


@pytest.mark.parametrize(
    ("split", "count", "mark"),
    [
        ("train", 2_000, "8b6662d4152852e3b1768fa89ab4cd86eb3ed2a9"),
        ("test", 500, "ef3d201b043a1a62df23b59b02b44feed0918ea0"),
    ],
)
def test_shapes_are_the_same_everywhere(split, count, mark):
    data = load("shapes", split)
    assert data.fingerprint == mark
    assert data.images.shape == (count, 3, 32, 32) and data.images.dtype == torch.uint8
    assert torch.equal(data.labels, torch.arange(count) % 10) and len(data.classes) == 10


def test_shapes_of_the_two_splits_differ():
    seen = {bytes(i.numpy().tobytes()) for i in load("shapes", "train").images}
    assert len(seen) == 2_000 and not seen & {i.numpy().tobytes() for i in load("shapes", "test").images}


def test_shapes_stand_in_for_images_that_cannot_be_had(monkeypatch, capsys):
    real = sets.load

    def unavailable(name, *a, **k):
        if name != "shapes":
            raise DataUnavailable("none")
        return real(name, *a, **k)

    monkeypatch.setattr(sets, "load", unavailable)
    assert len(load_or_shapes("cifar10", "test", limit=1_000)) == 500
    assert "cifar10 could not be had" in capsys.readouterr().out
    assert len(load_or_shapes("cifar10", "test", limit=7)) == 7


# --- normalise


def test_normalise_is_the_closed_form():
    data = load("shapes", "test", limit=4)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    want = (data.images.permute(0, 2, 3, 1).numpy() / 255 - mean) / std
    got = data.normalise(data.images)
    assert got.dtype == torch.float32 and np.abs(got.permute(0, 2, 3, 1).numpy() - want).max() < 1e-6
    assert torch.equal(data.normalise(data.images[1]), got[1])
    inception = data.normalise(data.images, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert torch.allclose(inception, data.images / 127.5 - 1, atol=1e-6)
    for wrong in (got, data.images[:, :1], data.images[0, 0]):
        with pytest.raises(ValueError, match="uint8"):
            data.normalise(wrong)


# --- crop and flip


@pytest.mark.parametrize(("crop", "flip"), [(2, True), (2, False), (0, True), (4, True)])
def test_every_crop_is_one_of_the_possible_shifts_and_all_are_as_likely(crop, flip):
    h, w, draws = 7, 5, 60 * (2 * crop + 1) ** 2 * (1 + flip)
    image = torch.randint(1, 256, (3, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = TF.pad(image, [crop])
    shifts = [TF.crop(padded, t, left, h, w) for t in range(2 * crop + 1) for left in range(2 * crop + 1)]
    possible = {s.numpy().tobytes(): 0 for s in shifts + [TF.horizontal_flip(s) for s in shifts] * flip}
    torch.manual_seed(1)
    out = Augment(crop=crop, flip=flip).pixels(image.expand(draws, 3, h, w))
    assert out.shape == (draws, 3, h, w) and out.dtype == torch.uint8
    for one in out:
        possible[one.numpy().tobytes()] += 1  # KeyError: no possible shift
    assert len(possible) == draws / 60
    counts = np.array(list(possible.values()))
    assert ((counts - 60) ** 2 / 60).sum() < len(counts) + 5 * math.sqrt(2 * len(counts))  # χ² within five deviations


def test_each_image_of_a_batch_is_moved_by_itself():
    images = torch.arange(64, dtype=torch.uint8).add(100)[:, None, None, None].expand(64, 3, 9, 9).clone()
    torch.manual_seed(0)
    out = Augment(crop=3).pixels(images)
    assert torch.equal(out.amax((1, 2, 3)), images[:, 0, 0, 0])  # no pixel from another image
    assert len({tuple((o[0] > 0).nonzero()[0].tolist()) for o in out}) > 5
    assert Augment(crop=0, flip=False).pixels(images) is images


# --- CutMix


def test_targets_are_the_share_of_pixels():
    labels = torch.tensor([3, 0, 2, 4, 1])
    images = torch.arange(5.0)[:, None, None, None].expand(5, 3, 16, 12).clone()
    torch.manual_seed(0)
    for _ in range(50):
        mixed, targets = Augment(cutmix=1.0).mix(images, labels, 6)
        share = torch.stack([(mixed[:, 0] == i).float().mean((1, 2)) for i in range(5)], 1)  # of image i
        want = torch.zeros(5, 6).index_add(1, labels, share)
        assert torch.allclose(targets, want, atol=1e-6)
        assert torch.allclose(targets.sum(1), torch.ones(5), atol=1e-6)
        assert (mixed[:, 0] == mixed[:, 2]).all() and ((share > 0).sum(1) <= 2).all()


def test_cutmix_pastes_the_published_areas():
    """The check values of CutMix at α = 1 and 32 px, box side floored to an even number of pixels."""
    images, labels = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 32, 32).clone(), torch.tensor([0, 1])
    augment, n = Augment(cutmix=1.0), 6_000
    torch.manual_seed(0)
    area = torch.stack([augment.mix(images, labels, 2)[1][0, 1] for _ in range(n)]).double()
    error = 4 / math.sqrt(n)  # four standard errors of a quantity of unit deviation
    assert area.mean().item() == pytest.approx(0.299, abs=error * 0.185)
    assert (area > 0.5).double().mean().item() == pytest.approx(0.145, abs=error * math.sqrt(0.145 * 0.855))
    assert (area == 0).double().mean().item() == pytest.approx(0.004, abs=error * math.sqrt(0.004))
    assert torch.maximum(area, 1 - area).mean().item() == pytest.approx(0.733, abs=error * 0.15)
    quantiles = torch.quantile(area, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).double())
    assert quantiles.tolist() == pytest.approx([0.035, 0.150, 0.281, 0.422, 0.633], abs=0.02)


def test_cutmix_at_its_probability_and_hard_targets_without():
    images, labels = torch.rand(2, 3, 8, 8), torch.tensor([1, 0])
    torch.manual_seed(0)
    augment, n = Augment(cutmix=50.0, mix_p=0.25), 2_000  # so large an α that a mixed batch always has a box
    mixed = sum(not torch.equal(augment.mix(images, labels, 2)[0], images) for _ in range(n))
    assert mixed / n == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / n))
    same, targets = Augment().mix(images, labels, 3)
    assert torch.equal(same, images) and torch.equal(targets, torch.tensor([[0.0, 1, 0], [1, 0, 0]]))


# --- epochs


def test_an_epoch_is_every_image_once_less_the_last_incomplete_batch():
    n, batch = 5_000, 33
    number = torch.arange(n)
    images = (
        torch.stack([number // 256, number % 256, number * 0], 1).to(torch.uint8)[..., None, None].expand(n, 3, 2, 2)
    )
    data = plain(images, number % 7, classes=7)
    torch.manual_seed(0)
    batches = list(Augment(crop=0, flip=False).epoch(data, batch))
    assert len(batches) == n // batch and all(len(x) == len(y) == batch for x, y in batches)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    seen = (x[:, 0, 0, 0] * 255).round().long() * 256 + (x[:, 1, 0, 0] * 255).round().long()
    assert len(seen.unique()) == n // batch * batch
    assert torch.equal(y.argmax(1), seen % 7)  # each label stays with its image
    assert seen.double().diff().sign().sum().abs() < 300  # shuffled: neither rising nor falling


def test_an_epoch_is_a_function_of_the_seed_alone():
    data, augment = load("shapes", "test"), Augment(cutmix=1.0, mix_p=0.5)

    def epoch(seed):
        torch.manual_seed(seed)
        return [torch.cat([x.flatten(), y.flatten()]) for x, y in augment.epoch(data, 60)]

    first, again, other = epoch(3), epoch(3), epoch(4)
    assert len(first) == 8 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("fields", "message"), [
    ({"cutmix": -0.1}, "cutmix is -0.1"),
    ({"cutmix": math.nan}, "cutmix is nan"),
    ({"mix_p": 1.5}, "mix_p is 1.5"),
    ({"mix_p": -0.5}, "mix_p is -0.5"),
    ({"crop": -1}, "crop is -1"),
    ({"crop": 2.0}, "crop is 2.0"),
])  # fmt: skip
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Augment(**fields)


def test_bad_batches_and_crops():
    data = load("shapes", "test", limit=10)
    for batch in (0, -1, 11):
        with pytest.raises(ValueError, match=f"batch {batch} is not within 1 to 10"):
            Augment().epoch(data, batch)
    with pytest.raises(ValueError, match="crop 32 is not smaller"):
        Augment(crop=32).epoch(data, 5)
