"""Batched augmentation on the tensor's device: geometry on large uint8 chunks, then mixing per batch.

All draws come from torch's default generator on the CPU, so that an epoch is a function of its seed alone, and the
same on every device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitbook.data import mixing
from vitbook.data.policies import POLICIES, AutoAugment, ColorJitter
from vitbook.data.sets import ImageSet

CHUNK = 2_048  # images whose geometry is drawn and applied together, at least


@dataclass(frozen=True)
class Augment:
    """What is done to training images; pure data.

    To each image: `crop`, pixels of zero padding on each side before a random crop back to size, 0 for none; `flip`,
    mirror half of the images; `policy`, AutoAugment's "cifar10" or "imagenet", None for none; `jitter`, the strength s
    of ColorJitter (brightness, contrast and saturation within 1 ± s, hue within ± s / 4), 0 for none. To each batch:
    `mixup` and `cutmix`, the α of their Beta(α, α), 0 for none (with both, each batch takes one of them with equal
    chance); `mix_p`, the share of batches that are mixed; `per_image`, a λ and a box for every image in place of one
    for the batch; `cut`, CutMix itself or a control of it (the table of `vitbook.data.mixing`); `smoothing`, the ε of
    label smoothing, which gives every class ε / K.
    """

    crop: int = 4
    flip: bool = True
    policy: str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_p: float = 1.0
    smoothing: float = 0.0
    jitter: float = 0.0
    per_image: bool = False
    cut: str = "paste"

    def __post_init__(self) -> None:
        if isinstance(self.crop, bool) or not isinstance(self.crop, int) or self.crop < 0:
            raise ValueError(f"crop is {self.crop!r}; it must be a whole number of pixels, 0 for none")
        if self.policy is not None and self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; choose one of {', '.join(POLICIES)}, or None for none")
        for name in ("mixup", "cutmix"):
            alpha = getattr(self, name)
            if not (math.isfinite(alpha) and alpha >= 0):
                raise ValueError(f"{name} is {alpha!r}; its α must be positive, or 0 for none")
        if not 0 <= self.mix_p <= 1:
            raise ValueError(f"mix_p is {self.mix_p!r}; a probability lies in 0 to 1")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing is {self.smoothing!r}; the share of the label spread evenly lies in 0 to 1")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is {self.jitter!r}; its strength lies in 0 to 1")
        if self.cut not in mixing.CUTS:
            raise ValueError(f"cut is {self.cut!r}; choose one of {', '.join(mixing.CUTS)}")
        if self.cut != "paste" and not self.cutmix:
            raise ValueError(f"cut is {self.cut!r}, a control of CutMix, and cutmix is 0; set its α")

    def pixels(self, images: Tensor) -> Tensor:
        """What is done to each image by its own draws: uint8 [B,3,H,W] to the same shape."""
        if self.crop or self.flip:
            images = self._shifted(images)
        images = AutoAugment(self.policy)(images) if self.policy else images
        return ColorJitter(self.jitter)(images) if self.jitter else images

    def _shifted(self, images: Tensor) -> Tensor:
        b, c, h, w = images.shape
        self._check_crop(h, w)
        flipped = torch.randint(2, (b,)) if self.flip else torch.zeros(b, dtype=torch.int64)
        top, left = torch.randint(2 * self.crop + 1, (2, b))
        padded = F.pad(images, [self.crop] * 4)
        sheets = torch.stack((padded, padded.flip(-1)))  # [2, B, 3, H + 2 crop, W + 2 crop]
        # A row of an output image is a run of w bytes in memory: all rows of all images are one gather of runs.
        image = (flipped * b + torch.arange(b))[:, None, None]
        row = (image * c + torch.arange(c)[:, None]) * sheets.shape[-2] + top[:, None, None] + torch.arange(h)
        start = row * sheets.shape[-1] + left[:, None, None]  # [B, 3, H]
        start = start.flatten().to(images.device, non_blocking=True)
        return sheets.flatten().unfold(0, w, 1).index_select(0, start).view(b, c, h, w)

    def mix(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Images float [B,3,H,W] and labels int64 [B] to images and soft targets float32 [B,classes].

        MixUp blends, CutMix pastes a box, from the batch's neighbour images; the target is shared by the blend's
        weight, or by the pixels actually pasted (λ' = 1 - box pixels / HW).
        """
        # Not one_hot: on some devices it looks at the labels' values, and waits for them.
        targets = torch.zeros(len(labels), classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
        if (self.mixup or self.cutmix) and torch.rand(()) < self.mix_p:
            if self.cutmix and (not self.mixup or torch.rand(()) < 0.5):
                images, targets = mixing.cut(images, targets, self.cutmix, self.cut, self.per_image)
            else:
                images, targets = mixing.blend(images, targets, self.mixup, self.per_image)
        if self.smoothing:
            targets = torch.lerp(targets, torch.full_like(targets, 1 / classes), self.smoothing)
        return images, targets

    def epoch(self, data: ImageSet, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch, shuffled, the incomplete last batch dropped: normalised images float32 [b,3,H,W] and targets
        float32 [b,classes], on the set's device. Seed torch before the first batch to repeat it."""
        if data.labels.ndim != 1:
            raise ValueError(f"{data.name} has masks, not labels; an epoch of soft targets needs one label an image")
        if not 1 <= batch <= len(data):
            raise ValueError(f"batch {batch} is not within 1 to {len(data)}, the number of images")
        self._check_crop(*data.image_size)
        if self.cut == "shuffle" and any(side % mixing.GRID for side in data.image_size):
            raise ValueError(
                f"images of {' × '.join(map(str, data.image_size))} pixels cannot be cut into the {mixing.GRID} × "
                f"{mixing.GRID} patches that cut='shuffle' moves; choose another cut"
            )
        return self._batches(data, batch)

    def _check_crop(self, h: int, w: int) -> None:
        if self.crop >= min(h, w):
            raise ValueError(f"crop {self.crop} is not smaller than the images ({h} × {w} pixels); lower it")

    def _batches(self, data: ImageSet, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(data))[: len(data) // batch * batch].to(data.images.device)
        for rows in order.split(math.ceil(CHUNK / batch) * batch):
            images, labels = self.pixels(data.images[rows]), data.labels[rows]
            for one, its in zip(images.split(batch), labels.split(batch), strict=True):
                yield self.mix(data.normalise(one), its, len(data.classes))
