"""What frozen features say about a whole image: weighted nearest neighbours, and a linear probe.

Both work on one vector an image, [n,D], computed once (so no augmentation). Neighbours are searched exactly, never
approximately; source C's protocol for models trained without labels is k-NN with weights e^(cosine / 0.07).
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitbook.measures.signals import outputs

CHUNK = 2**24  # similarities held at a time


def image_features(model: Callable, images: Tensor | Iterable[Tensor], *, batch: int = 64) -> Tensor:
    """What a model gives for each image, [n,D] float32: of a model *without a head*, the features its head would read.

    Take the head off before: ``model.head = torch.nn.Identity()``, or ``reset_classifier(0)`` of a timm model. Then
    the final norm, a refinement and the pooling are all in. ``images`` as in :func:`vitbook.measures.signals.outputs`.
    """
    parts = [x.float() for x in outputs(model, images, capture=False, batch=batch)]
    if parts[0].ndim != 2:
        raise ValueError(f"the model gives {list(parts[0].shape)} for a batch; one vector an image, [B, D], is needed")
    return torch.cat(parts)


def nearest(queries: Tensor, keys: Tensor, k: int, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The k keys [M,D] of largest cosine with each query [q,D], exactly, in chunks of queries that bound the memory.

    Yields (weights [c,k] = softmax(cosine / temperature), which sum to one; numbers of the keys [c,k]).
    """
    if not 1 <= k <= len(keys):
        raise ValueError(f"k={k} neighbours among {len(keys)} stored vectors; k must lie in 1 to {len(keys)}")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be positive")
    if queries.shape[-1] != keys.shape[-1]:
        raise ValueError(f"queries of width {queries.shape[-1]} and stored vectors of width {keys.shape[-1]} differ")
    check_finite(queries)
    queries, keys = F.normalize(queries.float(), dim=-1), F.normalize(keys.float(), dim=-1)
    for part in queries.split(max(1, min(CHUNK // len(keys), 4096))):
        with torch.autocast(part.device.type, enabled=False):
            similar, which = (part @ keys.T).topk(k)
        yield (similar / temperature).softmax(-1), which


def check_finite(features: Tensor) -> None:
    """Raises ``ValueError`` on NaN and infinite values."""
    if not features.isfinite().all():
        raise ValueError("features hold NaN or infinite values; the model's weights or inputs are broken")


def check_labels(features: Tensor, labels: Tensor, classes: int) -> None:
    """Raises ``ValueError`` unless ``features`` is finite [n,D] and ``labels`` integer [n] within 0 to classes - 1."""
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"features {list(features.shape)} and labels {list(labels.shape)} do not belong together; "
            "[n, D] and [n] are needed"
        )
    if labels.is_floating_point() or not len(labels):
        raise ValueError(f"labels are {len(labels)} numbers of {labels.dtype}; at least one whole number is needed")
    low, high = labels.min().item(), labels.max().item()
    if low < 0 or high >= classes:
        raise ValueError(f"labels run from {low} to {high}, but classes={classes}: they must lie in 0 to {classes - 1}")
    check_finite(features)


def knn_scores(
    features: Tensor, labels: Tensor, queries: Tensor, classes: int, *, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Weighted k-NN: the share of the votes that each class gets for each query, [q,K].

    ``features`` [n,D] and ``labels`` [n] are the known images, ``queries`` [q,D] those asked about. A neighbour's vote
    weighs e^(cosine / temperature); the source takes k among 10, 20, 100 and 200.
    """
    check_labels(features, labels, classes)
    scores = []
    for weights, which in nearest(queries, features, k, temperature):
        scores.append(weights.new_zeros(len(weights), classes).scatter_add_(1, labels[which].long(), weights))
    return torch.cat(scores)


def linear_probe(features: Tensor, labels: Tensor, classes: int, *, penalty: float = 1e-4) -> nn.Linear:
    """The best linear classifier of frozen features [n,D]: a layer D → K that takes features as they are.

    It minimises the mean cross-entropy plus ``penalty`` / 2 times the squared weights (not the bias) of standardised
    features. The problem is strictly convex in the weights and solved by L-BFGS to a gradient below 1e-5 (or 1,000
    iterations), so that no seed, learning rate or schedule enters; the source trains its probe by SGD for 100 epochs.
    """
    check_labels(features, labels, classes)
    if not penalty > 0:
        raise ValueError(f"penalty={penalty} must be positive: without it separable classes have no finite optimum")
    features, labels = features.float(), labels.long()
    deviation, mean = torch.std_mean(features, 0, correction=0)
    deviation = torch.where(deviation > 0, deviation, 1)  # a constant feature stays zero
    x = (features - mean) / deviation
    weight = x.new_zeros(classes, x.shape[1], requires_grad=True)
    bias = x.new_zeros(classes, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias],
        max_iter=1000,
        max_eval=2000,
        tolerance_grad=1e-5,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = F.cross_entropy(F.linear(x, weight, bias), labels) + penalty / 2 * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)
    # Without a random start, which would draw from the global generator.
    probe = nn.utils.skip_init(nn.Linear, x.shape[1], classes, device=x.device).requires_grad_(False)
    with torch.no_grad():
        probe.weight.copy_(weight / deviation)
        probe.bias.copy_(bias - F.linear(mean, probe.weight))
    return probe


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Share of the images whose largest score [n,K] is that of their label [n]."""
    if len(scores) != len(labels):
        raise ValueError(f"{len(scores)} rows of scores and {len(labels)} labels do not belong together")
    return (scores.argmax(1) == labels).double().mean().item()
