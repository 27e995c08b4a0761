"""What frozen patch tokens are worth for dense work: segmentation by a small decoder, retrieval of labelled patches.

Conventions, stated once. Features are the patches as the last block leaves them, [n,rows,columns,D], before the final
norm and before any refinement (source C's protocol); they are computed once, so images are not augmented. Masks are
whole numbers [n,H,W], H and W whole multiples of rows and columns. ``ignore`` is the value of a mask that stands for no
class (void): such pixels train nothing, are stored nowhere and count in no score. Predicted masks are uint8 [n,H,W].

A class's IoU is TP / (TP + FP + FN) over the pixels of all images together. The mean is taken over the classes that
occur in the masks; one that does not has no IoU (NaN), but what is taken for it is missing in those classes that
own the pixels. (Source C's retrieval on ADE20K counts its ignored class as 0 and reads lower by 150/151.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from vitbook.measures.probes import check_finite, nearest
from vitbook.measures.signals import Grid, block_outputs, outputs, places

Size = tuple[int, int]


def patch_features(
    model: Callable,
    images: Tensor | Iterable[Tensor],
    *,
    grid: Grid | None = None,
    prefix: int | None = None,
    batch: int = 8,
) -> Tensor:
    """The patches that a model's last block leaves, at their places: [n,rows,columns,D] float32.

    ``model``: called as ``model(images, capture=True) -> (logits, {"block0.out": [B,T,D], …})``; ``grid`` and
    ``prefix`` are the model's own unless given; ``images`` as in :func:`vitbook.measures.signals.outputs`. For the time
    of a batch the model keeps every layer's maps, B · H · T² numbers each: take small batches of large grids.
    """
    grid, prefix = places(model, grid, prefix)
    parts = []
    for _, kept in outputs(model, images, capture=True, batch=batch):
        parts.append(block_outputs(kept, grid, prefix)[-1][:, prefix:].float().unflatten(1, grid))
    return torch.cat(parts)


def check_masks(masks: Tensor, classes: int, ignore: int | None, what: str = "masks") -> None:
    """Raises ``ValueError`` unless ``masks`` is integer [n,H,W] of values 0 to classes - 1, or ``ignore``."""
    if not 2 <= classes <= 255:
        raise ValueError(f"classes={classes} must lie in 2 to 255, for masks are bytes")
    if ignore is not None and not classes <= ignore <= 255:
        raise ValueError(
            f"ignore={ignore} must lie in {classes} to 255, above the {classes} classes; give void pixels such a value"
        )
    if masks.ndim != 3 or masks.is_floating_point():
        raise ValueError(f"{what} are {masks.dtype} {list(masks.shape)}; whole numbers [n, H, W] are needed")
    masks = masks.long()  # in int8 the value 255 would be the same as -1
    wrong = (masks < 0) | (masks >= classes)
    if ignore is not None:
        wrong &= masks != ignore
    if wrong.any():
        raise ValueError(
            f"{what} hold {masks[wrong][0].item()}, but classes={classes} and ignore={ignore}: every pixel must be in "
            f"0 to {classes - 1}, or the value given as ignore="
        )


def confusion(predicted: Tensor, masks: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Pixels by class in the masks (row) and class predicted (column), [K,K] int64; both arguments [n,H,W]."""
    if predicted.shape != masks.shape:
        raise ValueError(
            f"predicted masks {list(predicted.shape)} are not of the shape of the masks {list(masks.shape)}"
        )
    check_masks(masks, classes, ignore)
    check_masks(predicted, classes, None, "predicted masks")
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=masks.device)
    for guess, truth in zip(predicted.split(64), masks.split(64), strict=True):
        pairs = truth.long() * classes + guess.long()
        counts += torch.bincount(pairs[truth < classes], minlength=classes * classes)
    if not counts.any():
        raise ValueError("no pixel of the masks has a class: all are void, or there is no mask")
    return counts.view(classes, classes)


def _overlap(counts: Tensor) -> Tensor:
    """IoU of every class (row) with every predicted class (column), [K,K] float64; 0 where neither occurs."""
    union = counts.sum(1, keepdim=True) + counts.sum(0) - counts
    return counts.double() / union.clamp(min=1)


def iou(counts: Tensor) -> Tensor:
    """IoU of each class from a confusion matrix [K,K], [K] float64; NaN for a class that occurs in no mask."""
    return torch.where(counts.sum(1) > 0, _overlap(counts).diagonal(), torch.nan)


def mean_iou(counts: Tensor) -> float:
    """Mean IoU over the classes that occur in the masks, from a confusion matrix [K,K]."""
    return iou(counts).nanmean().item()


def match_classes(counts: Tensor) -> Tensor:
    """The confusion matrix [K,K] with its predicted classes renamed, one to one, so that the mean IoU is largest.

    Hungarian matching, as the retrieval protocol has it. It lets a prediction be right up to its names, so the mean IoU
    after it is never lower than before.
    """
    _, column = linear_sum_assignment(_overlap(counts).cpu().numpy(), maximize=True)
    return counts[:, torch.from_numpy(column).to(counts.device)]


def check_dense(features: Tensor, masks: Tensor, classes: int, ignore: int | None) -> None:
    """Raises ``ValueError`` unless features [n,rows,columns,D] and masks [n,H,W] belong together."""
    check_masks(masks, classes, ignore)
    if features.ndim != 4 or len(features) != len(masks) or not len(masks):
        raise ValueError(
            f"features {list(features.shape)} and masks {list(masks.shape)} do not belong together; "
            "[n, rows, columns, D] and [n, H, W] are needed, n ≥ 1"
        )
    patch_size(masks.shape[1:], features.shape[1:3])
    check_finite(features)


def patch_size(size: Size, grid: Grid) -> tuple[int, int]:
    """Pixels of a patch (height, width): a mask of ``size`` pixels, cut by the grid."""
    if any(side < n or side % n for side, n in zip(size, grid, strict=True)):
        raise ValueError(
            f"masks of {size[0]} × {size[1]} pixels cannot be cut into the {grid[0]} × {grid[1]} patches of the "
            "features; resize masks and images together, to whole patches"
        )
    return size[0] // grid[0], size[1] // grid[1]


def _upsampled(scores: Tensor, size: Size) -> Tensor:
    """[n,K,rows,columns] → [n,K,H,W]."""
    return F.interpolate(scores, size, mode="bilinear", align_corners=False)


def fit_decoder(
    features: Tensor,
    masks: Tensor,
    classes: int,
    *,
    ignore: int | None = None,
    iterations: int = 20_000,
    batch: int = 32,
    seed: int = 0,
) -> nn.Sequential:
    """The source's decoder, trained on frozen features [n,rows,columns,D] and masks [n,H,W]; see :func:`segment`.

    A 1 × 1 convolution to 512, group norm of one group, GELU, a 1 × 1 convolution to the classes (it takes
    [n,D,rows,columns]); its logits are upsampled bilinearly to the masks. Cross-entropy over labelled pixels; AdamW
    (lr 1e-3, weight decay 0.01), the rate rising linearly from 1e-7 over the first quarter and falling linearly to
    1e-11. ``iterations`` of ``batch`` images, drawn without replacement until all have been seen. Start and order come
    from ``seed`` alone.
    """
    check_dense(features, masks, classes, ignore)
    if iterations < 5 or batch < 1:
        raise ValueError(f"iterations={iterations}, batch={batch}: at least 5 iterations of 1 image are needed")
    if not (masks < classes).any():
        raise ValueError("no pixel of the masks has a class: there is nothing to learn")
    device = features.device
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        decoder = nn.Sequential(
            nn.Conv2d(features.shape[-1], 512, 1), nn.GroupNorm(1, 512), nn.GELU(), nn.Conv2d(512, classes, 1)
        ).to(device)
        optimiser = torch.optim.AdamW(decoder.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser,
            max_lr=1e-3,
            total_steps=iterations,
            pct_start=0.25,
            anneal_strategy="linear",
            cycle_momentum=False,
            div_factor=1e4,
            final_div_factor=1e4,
        )
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(iterations):
            while len(order) < batch:
                order = torch.cat([order, torch.randperm(len(features))])
            rows, order = order[:batch].to(device), order[batch:]
            truth = masks[rows].long()
            known = truth < classes
            logits = _upsampled(decoder(features[rows].float().movedim(-1, 1)), masks.shape[1:])
            # The sum over labelled pixels and their number, for a batch may be void throughout.
            loss = F.cross_entropy(logits, truth.where(known, -1), ignore_index=-1, reduction="sum")
            optimiser.zero_grad()
            (loss / known.sum().clamp(min=1)).backward()
            optimiser.step()
            schedule.step()
    return decoder.requires_grad_(False)


@torch.no_grad()
def segment(decoder: nn.Module, features: Tensor, size: Size, *, batch: int = 32) -> Tensor:
    """The class of each pixel by a trained decoder: features [n,rows,columns,D] → uint8 [n,H,W], (H, W) = ``size``."""
    patch_size(size, features.shape[1:3])
    check_finite(features)
    parts = [_upsampled(decoder(part.float().movedim(-1, 1)), size).argmax(1) for part in features.split(batch)]
    return torch.cat([part.to(torch.uint8) for part in parts])


@dataclass(frozen=True, eq=False)
class Memory:
    """Patches that were stored with what they show."""

    keys: Tensor  # [M,D]
    labels: Tensor  # [M,K] float32, the share of each class among the patch's labelled pixels

    def __len__(self) -> int:
        return len(self.keys)


def patch_labels(masks: Tensor, grid: Grid, classes: int, ignore: int | None = None) -> Tensor:
    """The share of each class among each patch's labelled pixels: [n,H,W] → [n,rows,columns,K] float32.

    A patch that is void throughout has zeros.
    """
    check_masks(masks, classes, ignore)
    patch = patch_size(masks.shape[1:], grid)
    shares = [F.avg_pool2d((masks == c).float()[:, None], patch)[:, 0] for c in range(classes)]
    shares = torch.stack(shares, -1)
    total = shares.sum(-1, keepdim=True)
    return shares / total.where(total > 0, 1)


def build_memory(
    features: Tensor,
    masks: Tensor,
    classes: int,
    *,
    ignore: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Memory:
    """All patches of the images that have a labelled pixel or, with ``limit``, at most so many, drawn by ``seed``.

    The source's memory has no limit and takes void for class 0, which is its background; to do the same, write 0 there.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: a memory holds at least one patch; None means all")
    check_dense(features, masks, classes, ignore)
    labels = patch_labels(masks, features.shape[1:3], classes, ignore).flatten(0, 2)
    labelled = (labels.sum(-1) > 0).nonzero()[:, 0]
    if not len(labelled):
        raise ValueError("no pixel of the masks has a class: there is nothing to store")
    if limit is not None and limit < len(labelled):
        drawn = torch.randperm(len(labelled), generator=torch.Generator().manual_seed(seed))[:limit]
        labelled = labelled[drawn.to(labelled.device)]
    return Memory(features.flatten(0, 2)[labelled], labels[labelled])


@torch.no_grad()
def retrieve(memory: Memory, features: Tensor, size: Size, *, k: int = 30, temperature: float = 0.02) -> Tensor:
    """The class of each pixel by the stored patches most like its own: [n,rows,columns,D] → uint8 [n,H,W].

    Dense nearest-neighbour retrieval (the Hummingbird protocol): the exact ``k`` of largest cosine; their labels'
    mean, weighted by softmax(cosine / ``temperature``); upsampled bilinearly to ``size`` = (H, W); the largest.
    """
    patch_size(size, features.shape[1:3])
    scores = [
        (weights[:, None] @ memory.labels[which])[:, 0]
        for weights, which in nearest(features.flatten(0, 2), memory.keys, k, temperature)
    ]
    scores = torch.cat(scores).unflatten(0, features.shape[:3]).movedim(-1, 1)
    return torch.cat([_upsampled(part, size).argmax(1).to(torch.uint8) for part in scores.split(32)])
