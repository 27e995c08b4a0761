"""Per-image operations in groups: AutoAugment on a whole chunk of images at a time.

Each image draws its own sub-policy, as it would alone. Images that drew the same operation, magnitude and sign then go
through it together, so that a chunk costs a few kernel calls and not one an image; the operations are torchvision's
own. All draws come from torch's default generator on the CPU, so grouping needs no look at the device.
"""

import torch
from torch import Tensor
from torchvision.transforms import v2

POLICIES = {"cifar10": v2.AutoAugmentPolicy.CIFAR10, "imagenet": v2.AutoAugmentPolicy.IMAGENET}


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
            for (operation, magnitude), parts in plan.items():
                rows = torch.cat(parts).to(images.device, non_blocking=True)
                images[rows] = self.apply(images[rows], operation, magnitude)
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
