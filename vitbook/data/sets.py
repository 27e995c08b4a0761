"""`load`: the same name is the same images in the same order, whatever the origin; decoded once, then cached."""

import functools
import hashlib
import json
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitbook.data import origins
from vitbook.data.origins import SETS, DataUnavailable, Triple
from vitbook.data.shapes import draw

CACHE_FORMAT = 1


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A split, decoded: one tensor of pixels, one of labels, and where they came from."""

    images: Tensor  # uint8 [N,3,H,W]
    labels: Tensor  # int64 [N]; masks: uint8 [N,H,W]
    classes: tuple[str, ...]  # index = label
    source: str  # Hub name or file names
    fingerprint: str  # SHA-1 over pixels and labels of the whole split, whatever the limit
    name: str
    split: str
    mean: Triple  # published, per channel, for pixels in [0, 1]
    std: Triple
    ignore_index: int | None = None  # for masks: the value that stands for "no class"

    def __len__(self) -> int:
        return len(self.images)

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return tuple(self.images.shape[-2:])

    def normalise(self, images: Tensor, mean: Triple | None = None, std: Triple | None = None) -> Tensor:
        """(x / 255 - mean) / std: uint8 [B,3,H,W] or [3,H,W] to float32 of the same shape, on the same device.

        Mean and deviation are the set's published ones unless given (a pretrained model brings its own).
        """
        if images.dtype != torch.uint8 or images.shape[-3:-2] != (3,):
            raise ValueError(
                f"normalise takes uint8 [..., 3, H, W], got {images.dtype} {list(images.shape)}; permute(0, 3, 1, 2) "
                "puts channels first, and (255 * x).round().to(torch.uint8) makes bytes of floats in 0..1"
            )
        scale = torch.tensor([mean or self.mean, std or self.std])[..., None, None]
        mean, std = scale.to(images.device, non_blocking=True)
        return images.to(torch.float32).div_(255).sub_(mean).div_(std)

    def to(self, device: str | torch.device) -> "ImageSet":
        """The same set on another device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


def load(
    name: str,
    split: str,
    *,
    limit: int | None = None,
    root: str | os.PathLike | None = None,
    device: str | torch.device = "cpu",
) -> ImageSet:
    """One split of a set, in the canonical order; `limit` takes the first images of that order.

    Looked for in turn: Parquet files in the folder `root` (else the environment's VITBOOK_DATA), the decoded cache
    (in VITBOOK_CACHE, else the user's cache folder), the Hugging Face Hub. A file that is there is believed or
    refused, never skipped.

    The order: round robin over the classes, within a class by the SHA-1 of the RGB bytes; so any prefix is
    balanced, and it is the same from every origin.

    Raises ValueError for an unknown set or split, a limit that is not in 1..N, and files that are damaged;
    DataUnavailable when no origin has the set.
    """
    if name not in SETS:
        raise ValueError(
            f"unknown data set {name!r}; there are {', '.join(SETS)}. (Measures take any normalised images; to train "
            "on another set, describe it in vitbook/data/origins.py)"
        )
    spec = SETS[name]
    if split not in spec.splits:
        raise ValueError(f"{name} has no split {split!r}; there are {', '.join(spec.splits)}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit is {limit!r}; it must be a whole number of images, 1 or more, or None for all")
    if root is not None and not Path(root).is_dir():
        raise ValueError(f"root {str(root)!r} is not a folder; name one that holds Parquet files, or leave it out")

    whole = _drawn(split) if spec.stem is None else _obtain(name, split, root)
    if limit is None and spec.stem is None:
        limit = len(whole)  # to be copied below: a drawn set stays as it was drawn
    if limit is None:
        return whole.to(device)
    if limit > len(whole):
        raise ValueError(
            f"limit {limit} is more than the {len(whole)} images of {name} {split}; lower it or leave it out"
        )
    # a copy, so that the rest of the split can be freed
    return replace(whole, images=whole.images[:limit].clone(), labels=whole.labels[:limit].clone()).to(device)


@functools.cache
def _drawn(split: str) -> ImageSet:
    """`shapes`, whose drawing takes longer than many a run on it."""
    return _arranged("shapes", split, draw(split), SETS["shapes"].classes, "computed")


def load_or_shapes(name: str, split: str, *, limit: int | None = None) -> ImageSet:
    """Images for a figure: those of :func:`load`, or where they cannot be had `shapes`, with a note that says so.

    `shapes` has 500: a larger limit then means all of them.
    """
    try:
        return load(name, split, limit=limit)
    except DataUnavailable:
        print(f"Note: {name} could not be had here, so this page shows the synthetic set `shapes` in its place.")
        shapes = load("shapes", "test")
        return shapes if limit is None or limit >= len(shapes) else load("shapes", "test", limit=limit)


def _obtain(name: str, split: str, root: str | os.PathLike | None) -> ImageSet:
    spec, cache = SETS[name], _cache_folder() / f"{name}-{split}.safetensors"
    tried = []
    folder = root or os.environ.get("VITBOOK_DATA")
    if folder and not Path(folder).is_dir():
        raise ValueError(f"VITBOOK_DATA is {folder!r}, which is no folder; name one of Parquet files, or unset it")
    files = origins.find_parquet(Path(folder), spec, split) if folder else []
    if not folder:
        tried.append("Parquet files: no root given and VITBOOK_DATA not set")
    elif not files:
        wanted = " or ".join(pattern.format(stem=spec.stem, split=split) for pattern in origins.PATTERNS)
        tried.append(f"Parquet files: no {wanted} in {folder}")
    signature = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]

    try:
        return _read_cache(cache, name, split, signature)
    except LookupError as error:
        tried.append(f"cache: {error}")

    if files:
        rows, source = origins.read_parquet(files, spec), "Parquet files " + ", ".join(f.name for f in files)
    elif spec.hub is None:
        tried.append(f"Hugging Face Hub: {name} is not there, it exists as local files only")
        raise _unavailable(name, split, tried)
    else:
        try:
            rows, source = origins.read_hub(spec, split), f"Hugging Face Hub {spec.hub}"
        except DataUnavailable as error:
            tried.append(f"Hugging Face Hub {spec.hub}: {error}")
            raise _unavailable(name, split, tried) from error
    data = _arranged(name, split, origins.decode(rows, f"{name} {split}"), rows.classes, source)
    _write_cache(cache, data, signature)
    return data


def _unavailable(name: str, split: str, tried: list[str]) -> DataUnavailable:
    return DataUnavailable(
        f"{name} {split} could not be had. Tried:\n"
        + "".join(f"  - {line}\n" for line in tried)
        + "Connect to a network, or name a folder of its Parquet files by VITBOOK_DATA."
    )


def _arranged(
    name: str, split: str, decoded: tuple[np.ndarray, np.ndarray], classes: tuple[str, ...], source: str
) -> ImageSet:
    """Pixels uint8 [N,H,W,3] and labels int64 [N] or masks uint8 [N,H,W], put into the canonical order."""
    spec, (pixels, labels) = SETS[name], decoded
    order = canonical_order(pixels, labels if labels.ndim == 1 else np.zeros(len(labels), np.int64))
    images = torch.from_numpy(np.ascontiguousarray(pixels[order].transpose(0, 3, 1, 2)))
    labels = torch.from_numpy(labels[order])
    mark = fingerprint(images, labels)
    return ImageSet(images, labels, classes, source, mark, name, split, *spec.norm, spec.ignore_index)


def canonical_order(pixels: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Row numbers [N]: round robin over the classes (exhausted ones skipped), within a class by SHA-1 of the bytes.

    Pixels uint8 [N,H,W,3], labels int64 [N].
    """
    digests = [hashlib.sha1(image, usedforsecurity=False).digest() for image in np.ascontiguousarray(pixels)]
    by_class = np.array(sorted(range(len(labels)), key=lambda i: (labels[i], digests[i])))
    grouped = labels[by_class]
    rank = np.arange(len(labels)) - np.searchsorted(grouped, grouped)
    return by_class[np.lexsort((grouped, rank))]


def fingerprint(images: Tensor, labels: Tensor) -> str:
    """SHA-1 (hex) over the bytes of images uint8 [N,3,H,W], then of labels (int64 little-endian, or uint8 masks)."""
    digest = hashlib.sha1(images.numpy(), usedforsecurity=False)
    digest.update(labels.numpy())
    return digest.hexdigest()


def _cache_folder() -> Path:
    return Path(os.environ.get("VITBOOK_CACHE") or platformdirs.user_cache_dir("vitbook")) / "data"


def _read_cache(path: Path, name: str, split: str, signature: list) -> ImageSet:
    """The cached split. Raises LookupError when it is absent, damaged, or made from other files than the signature's.

    An empty signature (no folder) accepts a cache of any source.
    """
    try:
        if not path.exists():
            raise LookupError(f"no {path}")
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("vitbook", "{}"))
            if about.get("format") != CACHE_FORMAT:
                raise LookupError(f"{path} is of format {about.get('format')}, not {CACHE_FORMAT}; delete it")
            if signature and about["signature"] != signature:
                raise LookupError(f"{path} was made from other files")
            images, labels = file.get_tensor("images"), file.get_tensor("labels")
    except (OSError, ValueError, SafetensorError) as error:
        raise LookupError(f"{path} is damaged ({error}); delete it") from error
    if fingerprint(images, labels) != about["fingerprint"]:
        raise LookupError(f"{path} is damaged, its checksum does not match; delete it")
    spec, classes = SETS[name], tuple(about["classes"])
    return ImageSet(
        images, labels, classes, about["source"], about["fingerprint"], name, split, *spec.norm, spec.ignore_index
    )


def _write_cache(path: Path, data: ImageSet, signature: list) -> None:
    about = {key: getattr(data, key) for key in ("classes", "source", "fingerprint")}
    about |= {"format": CACHE_FORMAT, "signature": signature}
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"images": data.images, "labels": data.labels}, part, {"vitbook": json.dumps(about)})
        os.replace(part, path)
    except (OSError, SafetensorError) as error:  # a full disk must not keep anyone from images already decoded
        warnings.warn(f"decoded {data.name} {data.split} could not be cached in {path.parent}: {error}", stacklevel=4)
    finally:
        with suppress(OSError):
            part.unlink()
