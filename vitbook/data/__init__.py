"""Images in, images and soft targets out: data sets, the synthetic `shapes`, batched augmentation."""

from vitbook.data.augment import Augment
from vitbook.data.origins import SETS, DataUnavailable
from vitbook.data.sets import ImageSet, load, load_or_shapes
from vitbook.data.shuffle import cell_order, grid_shuffle

__all__ = [
    "SETS", "Augment", "DataUnavailable", "ImageSet", "cell_order", "grid_shuffle", "load", "load_or_shapes",
]  # fmt: skip
