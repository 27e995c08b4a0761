"""Per-image operations in groups: AutoAugment and ColorJitter on a whole chunk of images at a time.

Each image draws for itself, as it would alone. Images that drew the same operation, magnitude and sign then go
through it together, so that a chunk costs a few kernel calls and not one an image; the operations are torchvision's
own. All draws come from torch's default generator on the CPU, so grouping needs no look at the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

POLICIES = {"cifar10": v2.AutoAugmentPolicy.CIFAR10, "imagenet": v2.AutoAugmentPolicy.IMAGENET}
COLOURS = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
LEVELS = 32  # strengths of each colour operation: few enough for large groups


def in_groups(images: Tensor, plan: dict[tuple, list[Tensor]], apply: Callable[..., Tensor]) -> None:
    """Changes ``images`` in place: for each key, ``apply(those of its rows, *key)``."""
    for key, parts in plan.items():
        rows = torch.cat(parts).to(images.device, non_blocking=True)
        images[rows] = apply(images[rows], *key)


class AutoAugment(v2.AutoAugment):
    """AutoAugment (Cubuk et al. 2019) with a sub-policy of its own for every image of uint8 [B,3,H,W]."""

    def __init__(self, policy: str):
        super().__init__(POLICIES[policy])

    def forward(self, images: Tensor) -> Tensor:
        chosen = torch.randint(len(self._policies), (len(images),))
        images = images.clone()
        for stage in (0, 1):
            chance, sign = torch.rand(len(images)), torch.rand(len(images)) <= 0.5
            plan: dict[tuple[str, float], list[Tensor]] = {}
            for number, policy in enumerate(self._policies):
                operation, probability, level = policy[stage]
                takes = (chosen == number) & (chance <= probability)
                for negative in (False, True):
                    rows = (takes & (sign == negative)).nonzero().flatten()
                    if len(rows):
                        key = operation, self.magnitude(operation, level, images.shape[-2:], negative)
                        plan.setdefault(key, []).append(rows)
            in_groups(images, plan, self.apply)
        return images

    def magnitude(self, operation: str, level: int | None, size: tuple[int, int], negative: bool) -> float:
        """What torchvision makes of a sub-policy's level (0 … 9) at that image size, signed where the operation is."""
        magnitudes, signed = self._AUGMENTATION_SPACE[operation]
        table = magnitudes(10, *size)
        if table is None:
            return 0.0
        return float(table[level]) * (-1 if signed and negative else 1)

    def apply(self, images: Tensor, operation: str, magnitude: float) -> Tensor:
        """One operation of torchvision on images that share it."""
        return self._apply_image_or_video_transform(images, operation, magnitude, self.interpolation, self._fill)


class ColorJitter:
    """torchvision's ColorJitter for every image of uint8 [B,3,H,W] by itself, at ``LEVELS`` strengths.

    Brightness, contrast and saturation by a factor within 1 ± ``strength``, hue turned by up to ± ``strength`` / 4 of
    the circle, the four in random order.
    """

    def __init__(self, strength: float):
        self.ranges = [(1 - strength, 1 + strength)] * 3 + [(-strength / 4, strength / 4)]

    def __call__(self, images: Tensor) -> Tensor:
        images = images.clone()
        order = torch.rand(len(images), len(COLOURS)).argsort(1)  # which operation comes when
        level = torch.randint(LEVELS, (len(images), len(COLOURS)))  # of each operation
        for stage in range(len(COLOURS)):
            plan = {}
            for operation in range(len(COLOURS)):
                mine = order[:, stage] == operation
                for strength in range(LEVELS):
                    rows = (mine & (level[:, operation] == strength)).nonzero().flatten()
                    if len(rows):
                        plan[operation, strength] = [rows]
            in_groups(images, plan, self.apply)
        return images

    def apply(self, images: Tensor, operation: int, level: int) -> Tensor:
        """One of the four on images that share its strength, level 0 … ``LEVELS`` - 1 of its range."""
        low, high = self.ranges[operation]
        return COLOURS[operation](images, low + (high - low) * level / (LEVELS - 1))
