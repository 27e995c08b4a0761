"""k-NN and the linear probe: closed forms, brute force with NumPy, and an optimum found by SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, minimize
from scipy.special import logsumexp
from small import SMALL, images, stir, timm_vit
from torch import nn

from vitbook.measures import probes
from vitbook.measures.probes import accuracy, image_features, knn_scores, linear_probe, nearest
from vitbook.models.adapters import capture
from vitbook.models.vit import ViT


def labelled(n: int, dim: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, dim, generator=generator), torch.randint(classes, (n,), generator=generator)


def test_image_features_are_what_the_head_reads():
    model = stir(ViT(**SMALL), 0.3)
    x = images(5, 3, 16, 16)
    head, model.head = model.head, nn.Identity()
    features = image_features(model, x, batch=2)
    assert features.shape == (5, 24)
    model.head = head
    with torch.no_grad():
        assert torch.allclose(head(features), model(x), atol=1e-6)


def test_image_features_of_a_timm_model_without_its_classifier():
    model = timm_vit()
    x = images(3, 3, 16, 16)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(0)
    assert torch.allclose(image_features(capture(model), x), expected, atol=1e-6)


def test_nearest_is_brute_force(monkeypatch):
    monkeypatch.setattr(probes, "CHUNK", 100)  # 40 keys: two queries at a time
    keys, queries = labelled(40, 6, 2)[0], labelled(7, 6, 2, seed=1)[0] * 3
    parts = list(nearest(queries, keys, 5, 0.02))
    assert [len(weights) for weights, _ in parts] == [2, 2, 2, 1]
    weights, which = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    q, m = queries.double().numpy(), keys.double().numpy()
    cosine = (q @ m.T) / np.linalg.norm(q, axis=1)[:, None] / np.linalg.norm(m, axis=1)
    order = np.argsort(-cosine, axis=1)[:, :5]
    assert which.tolist() == order.tolist()
    expected = np.exp(np.take_along_axis(cosine, order, 1) / 0.02)
    assert np.allclose(weights, expected / expected.sum(1, keepdims=True), atol=1e-4)


def test_votes_weigh_e_to_the_cosine_over_temperature():
    angles = torch.tensor([0.0, 60.0, 60.0, 90.0]).deg2rad()
    known = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([[1.0], [5.0], [0.2], [1.0]])
    labels, query = torch.tensor([0, 1, 1, 2]), torch.tensor([[7.0, 0.0]])
    # Cosines 1, ½, ½, 0; class 1 wins when 2 e^(½/τ) > e^(1/τ), that is above τ = 1 / (2 ln 2).
    weights = [math.exp(1 / 0.8), 2 * math.exp(0.5 / 0.8), 1]
    scores = knn_scores(known, labels, query, 3, k=4, temperature=0.8)
    assert scores[0].tolist() == pytest.approx([w / sum(weights) for w in weights], abs=1e-6)
    usual = [math.exp(1 / 0.07), 2 * math.exp(0.5 / 0.07), 1]
    assert knn_scores(known, labels, query, 3, k=4)[0].tolist() == pytest.approx(
        [w / sum(usual) for w in usual], rel=1e-4
    )
    turn = 1 / (2 * math.log(2))
    assert knn_scores(known, labels, query, 3, k=4, temperature=turn - 0.01).argmax() == 0
    assert knn_scores(known, labels, query, 3, k=4, temperature=turn + 0.01).argmax() == 1
    assert knn_scores(known, labels, query, 4, k=3, temperature=0.8)[0, 2:].tolist() == [0, 0]


def test_known_images_find_themselves():
    features, labels = labelled(300, 8, 5)
    assert accuracy(knn_scores(features, labels, features, 5, k=1), labels) == 1


def test_features_that_say_nothing_give_chance():
    # One neighbour, independent of the query: right with probability Σ p².
    features, _ = labelled(2000, 4, 2)
    queries, _ = labelled(4000, 4, 2, seed=1)
    p = torch.tensor([0.6, 0.3, 0.1])
    generator = torch.Generator().manual_seed(2)
    labels, asked = (p.multinomial(n, True, generator=generator) for n in (2000, 4000))
    found = accuracy(knn_scores(features, labels, queries, 3, k=1), asked)
    assert found == pytest.approx(0.46, abs=4 * math.sqrt(0.46 * 0.54 / 2000))


def test_probe_of_one_feature_has_the_optimum_of_its_equation():
    # Feature ±1, class by its sign: by symmetry weights ∓w, and w = σ(−2w) / penalty.
    x = torch.tensor([[-1.0], [1.0]]).repeat(4, 1)
    labels = (x[:, 0] > 0).long()
    for penalty in (0.01, 1.0):
        w = brentq(lambda w, p=penalty: w - 1 / (p * (1 + math.exp(2 * w))), 0, 100)
        probe = linear_probe(x, labels, 2, penalty=penalty)
        assert probe.weight[:, 0].tolist() == pytest.approx([-w, w], rel=1e-3)
        moved = linear_probe(3 * x + 7, labels, 2, penalty=penalty)  # features are standardised
        assert torch.allclose(moved(3 * x + 7), probe(x), atol=1e-3)


def test_probe_is_the_optimum_that_scipy_finds():
    x, labels = labelled(120, 5, 3)
    x = x * torch.tensor([1.0, 20, 0.1, 3, 1]) + 4
    probe = linear_probe(x, labels, 3, penalty=0.02)
    a, y = x.double().numpy(), labels.numpy()
    a = (a - a.mean(0)) / a.std(0)

    def loss(theta: np.ndarray) -> float:
        w, b = theta[:15].reshape(3, 5), theta[15:]
        logits = a @ w.T + b
        return (logsumexp(logits, axis=1) - logits[range(120), y]).mean() + 0.01 * (w**2).sum()

    theta = minimize(loss, np.zeros(18), method="BFGS", options={"gtol": 1e-7}).x
    logits = a @ theta[:15].reshape(3, 5).T + theta[15:]
    centred = probe(x) - probe(x).mean(1, keepdim=True)  # a constant shift of all logits changes nothing
    assert np.allclose(centred, logits - logits.mean(1, keepdims=True), atol=2e-3)


def test_probe_separates_what_a_line_can_and_no_more():
    corners = torch.tensor([[-1.0, -1], [-1, 1], [1, -1], [1, 1]])
    one_side, crossed = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 0])
    assert accuracy(linear_probe(corners, one_side, 2)(corners), one_side) == 1
    assert linear_probe(corners, crossed, 2).weight.abs().max() < 1e-5  # XOR: the optimum is zero


def test_probe_of_constant_features_gives_the_class_frequencies():
    labels = torch.tensor([0, 0, 0, 1, 2, 2])
    scores = linear_probe(torch.full((6, 2), 3.0), labels, 4)(torch.full((1, 2), 3.0)).softmax(-1)[0]
    assert scores[:3].tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 3], abs=1e-3)
    assert scores[3] < 1e-3


def test_probe_draws_nothing_and_needs_no_gradients():
    x, labels = labelled(20, 3, 2)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with torch.no_grad():
        first = linear_probe(x, labels, 2)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.weight, linear_probe(x, labels, 2).weight)
    assert not first.weight.requires_grad


X, Y = labelled(12, 4, 3)[0], torch.arange(12) % 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: knn_scores(X, Y, X, 3), "k=20 neighbours among 12 stored"),
        (lambda: knn_scores(X, Y, X, 3, k=0), "k must lie in 1 to 12"),
        (lambda: knn_scores(X, Y, X, 3, k=2, temperature=0), "temperature=0 must be positive"),
        (lambda: knn_scores(X, Y, X[:, :3], 3, k=2), "width 3 and stored vectors of width 4"),
        (lambda: knn_scores(X, Y, X / 0, 3, k=2), "NaN or infinite"),
        (lambda: knn_scores(X, Y, X, 2, k=2), "run from 0 to 2, but classes=2"),
        (lambda: linear_probe(X, Y - 1, 3), "run from -1 to 1"),
        (lambda: linear_probe(X, Y[:5], 3), r"\[12, 4\] and labels \[5\] do not belong together"),
        (lambda: linear_probe(X, Y.float(), 3), "torch.float32; at least one whole number"),
        (lambda: linear_probe(X[:0], Y[:0], 3), "labels are 0 numbers"),
        (lambda: linear_probe(X / 0, Y, 3), "NaN or infinite"),
        (lambda: linear_probe(X, Y, 3, penalty=0), "penalty=0 must be positive"),
        (lambda: accuracy(X, Y[:3]), "12 rows of scores and 3 labels"),
        (lambda: image_features(lambda x, capture: x, images(2, 3, 4, 4)), r"gives \[2, 3, 4, 4\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
