"""Which sets there are, where their Parquet rows come from, and how rows become checked uint8 arrays."""

import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tqdm import tqdm

from vitbook.data.shapes import CLASSES

Triple = tuple[float, float, float]

IMAGENET: tuple[Triple, Triple] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TINY: tuple[Triple, Triple] = ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
BLOCK = 256  # images a thread decodes at a time
HUB_SECONDS = 5.0  # patience with a Hub that does not answer


class DataUnavailable(RuntimeError):
    """No origin could supply a set; the message names every one that was tried and why it failed."""


@dataclass(frozen=True)
class SetSpec:
    """What is known about a set before any file is opened; split names are those of the Hub and of the files."""

    splits: tuple[str, ...]
    train_images: int  # in the first split
    norm: tuple[Triple, Triple]  # published mean and standard deviation per channel, pixels in [0, 1]
    stem: str | None = None  # local files are {stem}-{split}.parquet; None for a set that is computed
    hub: str | None = None
    config: str | None = None
    image: tuple[str, ...] = ("image", "img")  # the first of these columns that exists
    label: tuple[str, ...] = ("label",)
    classes: tuple[str, ...] = ()  # used when the file carries none
    every: int = 1  # on the Hub, keep every n-th class only
    ignore_index: int | None = None  # given for masks: the value that stands for "no class"


SETS: dict[str, SetSpec] = {
    "cifar10": SetSpec(
        ("train", "test"), 50_000, ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), "cifar10", "uoft-cs/cifar10",
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": SetSpec(
        ("train", "test"), 50_000, ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)), "cifar100", "uoft-cs/cifar100",
        label=("fine_label",),
    ),
    "tiny-imagenet-25": SetSpec(
        ("train", "valid"), 12_500, TINY, "tiny-imagenet25", "zh-plus/tiny-imagenet", every=8,
        classes=(
            "goldfish, Carassius auratus", "black widow, Latrodectus mactans", "slug", "Chihuahua", "Egyptian cat",
            "walking stick, walkingstick, stick insect", "hog, pig, grunter, squealer, Sus scrofa", "baboon",
            "bannister, banister, balustrade, balusters, handrail", "beaker", "bucket, pail", "chain",
            "dam, dike, dyke", "frying pan, frypan, skillet", "kimono", "miniskirt, mini", "pay-phone, pay-station",
            "potter's wheel", "sandal", "spider web, spider's web", "teapot", "umbrella", "comic book", "bell pepper",
            "potpie",
        ),
    ),
    "tiny-imagenet": SetSpec(("train", "valid"), 100_000, TINY, "tiny-imagenet", "zh-plus/tiny-imagenet"),
    "svhn": SetSpec(
        ("train", "test"), 73_257, ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)), "svhn", "ufldl-stanford/svhn",
        "cropped_digits", classes=tuple("0123456789"),
    ),
    "camvid-half": SetSpec(
        ("train", "valid", "test"), 367, IMAGENET, "camvid-half", ignore_index=11,
        classes=("sky", "building", "pole", "road", "pavement", "tree", "sign_symbol", "fence", "car", "pedestrian",
                 "bicyclist", "unlabelled"),
    ),
    "shapes": SetSpec(("train", "test"), 2_000, IMAGENET, classes=CLASSES),
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Encoded images and their labels (masks: encoded too), with the place each came from."""

    images: Sequence[bytes | None]
    labels: Sequence[int | bytes | None]
    places: Sequence[tuple[str, int]]  # file or Hub name, row in it
    classes: tuple[str, ...]
    masks: bool

    def bad(self, row: int, problem: str) -> ValueError:
        """The error for one row: file, row, what is wrong, what to do."""
        name, number = self.places[row]
        return bad(f"{name}, row {number}", problem)


PATTERNS = ("{stem}-{split}.parquet", "{stem}-{split}-*.parquet", "{stem}/{split}-*.parquet")  # of a folder's files


def bad(where: str, problem: str) -> ValueError:
    """The error for data that are there but wrong."""
    return ValueError(
        f"{where}: {problem}. Nothing was kept. Fetch the file anew, or move it away to use the cache or the Hub."
    )


def find_parquet(folder: Path, spec: SetSpec, split: str) -> list[Path]:
    """The split's files in a folder, sorted by name; empty when the folder lacks the set."""
    for pattern in PATTERNS:
        if files := sorted(folder.glob(pattern.format(stem=spec.stem, split=split))):
            return files
    return []


def read_parquet(files: Sequence[Path], spec: SetSpec) -> Rows:
    """Rows of one split from its Parquet files.

    Raises ValueError, naming the file, when one is truncated or empty, lacks a column, or names other classes
    than the first.
    """
    parts = []
    for path in files:
        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
                image, label = _columns(schema, spec, path.name)
                table = file.read(columns=[image, label])
        except (pa.ArrowInvalid, OSError) as error:
            raise bad(path.name, f"not a whole Parquet file ({error})") from error
        parts.append(_rows(table, image, label, _class_names(schema, label) or spec.classes, path.name))
    for path, part in zip(files, parts, strict=True):
        if part.classes != parts[0].classes:
            raise bad(path.name, f"its classes differ from those of {files[0].name}; all files of a split must agree")
    images, labels, places = (
        [item for part in parts for item in getattr(part, field)] for field in ("images", "labels", "places")
    )
    return Rows(images, labels, places, parts[0].classes, parts[0].masks)


def read_hub(spec: SetSpec, split: str) -> Rows:
    """Rows of one split through `datasets.load_dataset`. Raises DataUnavailable when the Hub cannot supply it."""
    import datasets  # noqa: PLC0415 - takes most of a second, and only a first load needs it

    if not _hub_may_answer():
        raise DataUnavailable(f"no answer from the Hugging Face Hub within {HUB_SECONDS:g} s")
    try:
        hub = datasets.load_dataset(spec.hub, spec.config, split=split)
    except Exception as error:  # its errors share no base: connection, HTTP, missing data set, missing cache
        raise DataUnavailable(f"{type(error).__name__}: {error}") from error
    image, label = _columns(hub.features.arrow_schema, spec, spec.hub)
    hub = hub.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    names = tuple(getattr(hub.features[label], "names", None) or ())
    table = hub.with_format("arrow")[:]
    if spec.every > 1:
        if names != tuple(sorted(names)) or len(names) != spec.every * len(spec.classes):
            raise bad(spec.hub, f"expected {spec.every * len(spec.classes)} sorted class ids, found {len(names)}")
        labels = table[label].to_numpy()
        keep = labels % spec.every == 0
        table = table.filter(pa.array(keep)).set_column(1, label, pa.array(labels[keep] // spec.every))
        names = ()
    return _rows(table, image, label, names or spec.classes, spec.hub)


def _hub_may_answer() -> bool:
    """One request without retries: left to itself the Hub's client tries for half a minute before it gives up."""
    import huggingface_hub  # noqa: PLC0415 - as above

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return True  # then load_dataset looks at its own cache only, at once
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception:  # of another library in each of its major versions
        return False
    return True


def _columns(schema: pa.Schema, spec: SetSpec, where: str) -> tuple[str, str]:
    image, label = (next((c for c in wanted if c in schema.names), None) for wanted in (spec.image, spec.label))
    if image is None or label is None:
        raise bad(
            where, f"columns {schema.names}; needs an image in {list(spec.image)} and a label in {list(spec.label)}"
        )
    masks = spec.ignore_index is not None
    for column, encoded in ((image, True), (label, masks)):
        kind = schema.field(column).type
        if encoded and not (pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0):
            raise bad(where, f"column {column!r} is {kind}; needs struct<bytes, path> with an encoded image file")
        if not encoded and not pa.types.is_integer(kind):
            raise bad(where, f"column {column!r} is {kind}; needs whole numbers")
    return image, label


def _class_names(schema: pa.Schema, label: str) -> tuple[str, ...]:
    """Class names a Parquet file carries: a plain list, or in the notation of the `datasets` library."""
    metadata = schema.metadata or {}
    if b"class_names" in metadata:
        return tuple(json.loads(metadata[b"class_names"]))
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return tuple(features.get(label, {}).get("names", ()))


def _rows(table: pa.Table, image: str, label: str, classes: tuple[str, ...], where: str) -> Rows:
    if not len(table):
        raise bad(where, "no rows; a split needs at least one image")
    if not classes:
        raise bad(where, "no class names; add them to the schema's metadata as class_names, a JSON list")

    images, labels = table[image].to_pylist(), table[label].to_pylist()
    masks = pa.types.is_struct(table[label].type)
    if masks:
        labels = [cell and cell["bytes"] for cell in labels]
    places = [(where, i) for i in range(len(table))]
    return Rows([cell and cell["bytes"] for cell in images], labels, places, classes, masks)


def decode(rows: Rows, title: str) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [N,H,W,3] and labels int64 [N] (masks: uint8 [N,H,W]), decoded by as many threads as cores.

    Raises ValueError naming file and row for an image that cannot be decoded, an image of another size than the
    first, and a label or mask value that is no class.
    """
    n, k = len(rows.images), len(rows.classes)
    if not rows.masks:
        for i, label in enumerate(rows.labels):
            if label is None or not 0 <= label < k:
                raise rows.bad(i, f"label {label} is not within 0 to {k - 1}, the {k} classes")
    first = _image(rows, 0)
    pixels = np.empty((n, *first.shape), np.uint8)
    labels = np.empty((n, *first.shape[:2]), np.uint8) if rows.masks else np.array(rows.labels, np.int64)

    def block(start: int) -> int:
        stop = min(start + BLOCK, n)
        for i in range(start, stop):
            image = _image(rows, i)
            if image.shape != first.shape:
                raise rows.bad(i, f"{_size(image)} pixels where the first image has {_size(first)}; all must agree")
            pixels[i] = image
            if rows.masks:
                labels[i] = _mask(rows, i, first)
        return stop - start

    with ThreadPoolExecutor() as pool, tqdm(total=n, desc=title, unit="image", disable=None) as bar:
        for done in pool.map(block, range(0, n, BLOCK)):
            bar.update(done)
    return pixels, labels


def _size(image: np.ndarray) -> str:
    return f"{image.shape[0]} × {image.shape[1]}"


def _open(rows: Rows, row: int, encoded: bytes | None, what: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(encoded or b""))
        image.load()
    except Exception as error:  # decoders raise many kinds
        raise rows.bad(row, f"{what} cannot be decoded ({error})") from error
    return image


def _image(rows: Rows, row: int) -> np.ndarray:
    return np.asarray(_open(rows, row, rows.images[row], "image").convert("RGB"))


def _mask(rows: Rows, row: int, image: np.ndarray) -> np.ndarray:
    opened = _open(rows, row, rows.labels[row], "mask")
    mask = np.asarray(opened)
    if opened.mode not in ("L", "P") or mask.shape != image.shape[:2]:
        raise rows.bad(row, f"mask of mode {opened.mode} and {_size(mask)} pixels; needs 8 bit and {_size(image)}")
    if mask.max() >= len(rows.classes):
        raise rows.bad(row, f"mask value {mask.max()} is not within 0 to {len(rows.classes) - 1}, the classes")
    return mask
