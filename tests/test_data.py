"""The sets of `data`: one order whatever the origin, a cache that can be trusted, bad files refused by name."""

import hashlib
import io
import json
import os

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from vitbook.data import Augment, DataUnavailable, load, origins
from vitbook.data.sets import canonical_order

REAL = os.environ.get("VITBOOK_DATA")
real = pytest.mark.skipif(not REAL, reason="VITBOOK_DATA names no folder of image sets")
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMES = origins.SETS["cifar10"].classes


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no data folder, and a Hub that refuses."""
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITBOOK_DATA", raising=False)
    monkeypatch.setattr(origins, "_hub_may_answer", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    return tmp_path / "cache" / "data"


def refuse(*_, **__):
    raise ConnectionError("no route to the Hub")


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def pictures(n=23, side=6, seed=0):
    """Random pixels and labels of three of ten classes, unevenly many."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, side, side, 3), np.uint8), rng.choice([1, 4, 7], n, p=[0.6, 0.3, 0.1])


def write(path, images, labels, columns=("img", "label"), *, image_type=IMAGE, label_type=None, names=NAMES):
    """A Parquet file in the Hub's layout; images as pixels or as encoded bytes."""
    cells = [{"bytes": i if isinstance(i, bytes) else png(i), "path": None} for i in images]
    if image_type != IMAGE:
        cells = [c["bytes"] for c in cells]
    table = pa.table({columns[0]: pa.array(cells, image_type), columns[1]: pa.array(labels, label_type or pa.int64())})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"class_names": json.dumps(names)} if names else None), path)
    return path


def round_robin(pixels, labels):
    """The canonical order, told the slow way."""
    piles = {}
    for i, label in enumerate(labels):
        piles.setdefault(int(label), []).append(i)
    for pile in piles.values():
        pile.sort(key=lambda i: hashlib.sha1(pixels[i].tobytes()).hexdigest())
    return [piles[c][turn] for turn in range(len(labels)) for c in sorted(piles) if turn < len(piles[c])]


# --- one order, one fingerprint, whatever the origin


def test_order_and_fingerprint_do_not_depend_on_the_origin(cache, tmp_path, monkeypatch):
    pixels, labels = pictures()
    write(tmp_path / "a" / "cifar10-train.parquet", pixels, labels)
    mixed = np.random.default_rng(1).permutation(len(labels))
    for shard, rows in enumerate(np.array_split(mixed, 3)):
        write(tmp_path / "b" / "cifar10" / f"train-{shard:05d}-of-00003.parquet", pixels[rows], labels[rows])
        write(tmp_path / "c" / f"cifar10-train-{shard:05d}-of-00003.parquet", pixels[rows[::-1]], labels[rows[::-1]])
    sets = [load("cifar10", "train", root=tmp_path / folder) for folder in "abc"]

    (cache / "cifar10-train.safetensors").unlink()
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))})
    rows = {"img": [Image.fromarray(p) for p in pixels[mixed]], "label": labels[mixed]}
    hub = datasets.Dataset.from_dict(rows, features)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or hub)
    sets.append(load("cifar10", "train"))
    assert asked == [(("uoft-cs/cifar10", None), {"split": "train"})]
    assert sets[-1].source == "Hugging Face Hub uoft-cs/cifar10" and "cifar10-train.parquet" in sets[0].source

    order = round_robin(pixels, labels)
    for data in sets:
        assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), pixels[order])
        assert data.labels.tolist() == labels[order].tolist() and data.labels.dtype == torch.int64
        assert data.classes == NAMES and data.fingerprint == sets[0].fingerprint
    raw = sets[0].images.numpy().tobytes() + sets[0].labels.numpy().astype("<i8").tobytes()
    assert sets[0].fingerprint == hashlib.sha1(raw).hexdigest()


def test_round_robin_skips_exhausted_classes_and_limit_takes_the_first(cache, tmp_path):
    pixels, labels = pictures(40)
    data = load("cifar10", "train", root=write(tmp_path / "f" / "cifar10-train.parquet", pixels, labels).parent)
    few = load("cifar10", "train", limit=7, root=tmp_path / "f")
    assert torch.equal(few.images, data.images[:7]) and torch.equal(few.labels, data.labels[:7])
    assert (len(few), few.fingerprint, few.image_size) == (7, data.fingerprint, (6, 6))
    assert few.images.untyped_storage().nbytes() == 7 * 3 * 36  # the other images can be freed
    for n in range(1, 41):  # in any prefix a class lags behind another only if it has no more images
        seen, whole = np.bincount(data.labels[:n], minlength=10), np.bincount(labels, minlength=10)
        assert all(seen[c] == whole[c] or seen[c] >= seen.max() - 1 for c in (1, 4, 7))
    assert canonical_order(pixels[:3], np.array([9, 2, 2])).tolist()[1] == 0


def test_one_in_eight_classes_of_the_hub_is_the_set_of_25(cache, monkeypatch):
    pixels, _ = pictures(6)
    labels = [0, 8, 9, 192, 199, 16]
    names = [f"n{i:08d}" for i in range(200)]

    def hub(names):
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
        rows = {"image": [Image.fromarray(p) for p in pixels], "label": labels}
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict(rows, features))

    hub(names[::-1])
    with pytest.raises(ValueError, match="200 sorted class ids"):
        load("tiny-imagenet-25", "valid")
    hub(names)
    data = load("tiny-imagenet-25", "valid")
    assert data.labels.tolist() == [0, 1, 2, 24] and len(data.classes) == 25
    assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), pixels[[0, 1, 5, 3]])
    assert len(load("tiny-imagenet", "valid")) == 6 and load("tiny-imagenet", "valid").classes == tuple(names)


def test_masks_are_ordered_by_pixels_alone(cache, tmp_path):
    pixels, _ = pictures(9)
    masks = np.random.default_rng(2).integers(0, 12, (9, 6, 6), np.uint8)
    cells = [{"bytes": png(m), "path": "m.png"} for m in masks]
    write(tmp_path / "f" / "camvid-half-test.parquet", pixels, cells, ("image", "label"), label_type=IMAGE, names=None)
    data = load("camvid-half", "test", root=tmp_path / "f")
    order = round_robin(pixels, np.zeros(9))
    assert np.array_equal(data.labels.numpy(), masks[order]) and data.labels.dtype == torch.uint8
    assert np.array_equal(data.images.permute(0, 2, 3, 1).numpy(), pixels[order])
    assert data.ignore_index == 11 and data.classes[11] == "unlabelled"
    with pytest.raises(ValueError, match="masks"):
        Augment().epoch(data, 2)


@real
@pytest.mark.parametrize(("split", "count", "mark"), [
    ("train", 50_000, "267dc4cb12"),
    ("test", 10_000, "268b58d999"),
])  # fmt: skip
def test_cifar10_is_the_published_set(split, count, mark):
    data = load("cifar10", split)
    assert len(data) == count and data.image_size == (32, 32) and data.classes == NAMES
    assert torch.equal(data.labels, torch.arange(count) % 10)  # so the first 10 k rows hold k of each class
    assert data.fingerprint.startswith(mark)
    if split == "train":
        value = torch.arange(256) / 255.0
        counts = torch.stack([c.flatten().bincount(minlength=256) for c in data.images.unbind(1)]).double()
        mean = counts @ value.double() / counts.sum(1)
        std = (counts @ value.double() ** 2 / counts.sum(1) - mean**2).sqrt()
        assert mean.tolist() == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=1e-6)
        assert std.tolist() == pytest.approx([0.24703223, 0.24348513, 0.26158784], abs=1e-6)
        assert data.mean == pytest.approx(mean.tolist(), abs=1e-4) and data.std == pytest.approx(std.tolist(), abs=1e-4)


@real
def test_other_sets_are_as_described():
    tiny, camvid = load("tiny-imagenet-25", "valid"), load("camvid-half", "train")
    assert tiny.classes == origins.SETS["tiny-imagenet-25"].classes  # those a copy from the Hub gets
    assert tiny.labels.bincount().tolist() == [50] * 25 and tiny.image_size == (64, 64)
    assert len(camvid) == 367 and camvid.image_size == (180, 240)
    share = camvid.labels.flatten().bincount(minlength=12) / camvid.labels.numel()
    published = [16.9, 23.3, 1.0, 31.5, 4.5, 9.7, 1.2, 1.1, 5.9, 0.6, 0.3, 3.9]
    assert (100 * share).tolist() == pytest.approx(published, abs=0.05)


# --- the cache


def test_cache_spares_decoding_until_the_files_change(cache, tmp_path, monkeypatch):
    file = write(tmp_path / "f" / "cifar10-train.parquet", *pictures())
    first = load("cifar10", "train", root=file.parent)
    decode, calls = origins.decode, []
    monkeypatch.setattr(origins, "decode", lambda *a: calls.append(a) or decode(*a))
    for root in (file.parent, None, tmp_path):  # the folder, no folder, a folder that lacks the set
        again = load("cifar10", "train", root=root)
        assert torch.equal(again.images, first.images) and torch.equal(again.labels, first.labels)
        assert (again.classes, again.source, again.mean) == (first.classes, first.source, first.mean)
    assert not calls
    os.utime(file, ns=(0, 0))
    load("cifar10", "train", root=file.parent)
    assert len(calls) == 1
    write(file, *pictures(5))
    assert len(load("cifar10", "train", root=file.parent)) == len(load("cifar10", "train")) == 5
    assert [f.name for f in cache.iterdir()] == ["cifar10-train.safetensors"]


@pytest.mark.parametrize("harm", [
    lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),  # one bit of one label
    lambda raw: raw[: len(raw) // 2],
    lambda raw: b"",
    lambda raw: raw.replace(b'\\"format\\": 1', b'\\"format\\": 9'),
])  # fmt: skip
def test_damaged_cache_is_rebuilt_or_named(cache, tmp_path, harm):
    file = write(tmp_path / "f" / "cifar10-train.parquet", *pictures())
    first, kept = load("cifar10", "train", root=file.parent), cache / "cifar10-train.safetensors"
    whole = kept.read_bytes()
    kept.write_bytes(harm(whole))
    assert kept.read_bytes() != whole
    with pytest.raises(DataUnavailable, match=r"cifar10-train.safetensors is (damaged|of format 9).*delete it"):
        load("cifar10", "train")
    assert torch.equal(load("cifar10", "train", root=file.parent).labels, first.labels)
    assert torch.equal(load("cifar10", "train").images, first.images)


def test_a_cache_that_cannot_be_written_only_warns(cache, tmp_path, monkeypatch):
    file = write(tmp_path / "f" / "cifar10-train.parquet", *pictures())
    monkeypatch.setenv("VITBOOK_CACHE", str(file))  # not a folder
    with pytest.warns(UserWarning, match="could not be cached"):
        assert len(load("cifar10", "train", root=file.parent)) == 23


# --- bad input: named, and nothing written


def test_unavailable_names_everything_that_was_tried(cache, tmp_path, monkeypatch):
    with pytest.raises(DataUnavailable, match=r"(?s)VITBOOK_DATA not set.*cache: no .*uoft-cs/cifar10.*no route"):
        load("cifar10", "test")
    monkeypatch.setenv("VITBOOK_DATA", str(tmp_path))
    with pytest.raises(
        DataUnavailable,
        match=r"(?s)no camvid-half-test.parquet or .* or camvid-half/test-\*.parquet in .*local files only",
    ):
        load("camvid-half", "test")


def test_a_silent_hub_is_given_up_at_once(cache, monkeypatch):
    class Silent:
        def head(self, url, timeout):
            assert url.startswith("http") and timeout <= 5
            raise TimeoutError

    monkeypatch.undo()  # the real probe, and a load_dataset that must not be reached
    monkeypatch.setenv("VITBOOK_CACHE", str(cache))
    monkeypatch.delenv("VITBOOK_DATA", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Silent)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked a Hub that is not there"))
    with pytest.raises(DataUnavailable, match="no answer"):
        load("cifar10", "test")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # its own cache is asked, and only that
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DataUnavailable, match="no route"):
        load("cifar10", "test")


PIXELS, LABELS = pictures()
BROKEN = {
    "not a whole Parquet file": lambda p: p.write_bytes(write(p, PIXELS, LABELS).read_bytes()[:-99]),
    r"not a whole Parquet file \(": lambda p: p.write_bytes(b""),
    "no rows": lambda p: write(p, [], []),
    "needs an image in": lambda p: write(p, PIXELS, LABELS, ("picture", "label")),
    "a label in": lambda p: write(p, PIXELS, LABELS, ("img", "fine_label")),
    "needs struct<bytes, path>": lambda p: write(p, PIXELS, LABELS, image_type=pa.binary()),
    "needs whole numbers": lambda p: write(p, PIXELS, LABELS.astype(str).tolist(), label_type=pa.string()),
    "row 2: image cannot be decoded": lambda p: write(p, [*PIXELS[:2], b"not a picture"], LABELS[:3]),
    "row 1: image cannot be decoded": lambda p: write(p, [PIXELS[0], png(PIXELS[1])[:60]], LABELS[:2]),
    "row 3: label 10 is not within 0 to 9": lambda p: write(p, PIXELS[:4], [0, 9, 1, 10]),
    "row 1: label -1": lambda p: write(p, PIXELS[:2], [0, -1]),
    "row 0: label None": lambda p: write(p, PIXELS[:2], [None, 1]),
    "row 2: 5 × 5 pixels where the first image has 6 × 6": lambda p: write(
        p, [*PIXELS[:2], PIXELS[2, :5, :5]], LABELS[:3]
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_bad_files_are_refused_by_name(cache, tmp_path, message):
    BROKEN[message](tmp_path / "cifar10-test.parquet")
    with pytest.raises(ValueError, match=rf"cifar10-test.parquet.*{message}.*Fetch the file anew"):
        load("cifar10", "test", root=tmp_path)
    assert not cache.exists()


@pytest.mark.parametrize(("mask", "message"), [
    (np.full((6, 6), 12, np.uint8), "mask value 12 is not within 0 to 11"),
    (np.zeros((6, 5), np.uint8), "6 × 5 pixels; needs 8 bit and 6 × 6"),
    (np.zeros((6, 6, 3), np.uint8), "mask of mode RGB"),
])  # fmt: skip
def test_bad_masks_are_refused_by_name(cache, tmp_path, mask, message):
    cells = [{"bytes": png(mask), "path": ""}]
    write(tmp_path / "camvid-half-valid.parquet", PIXELS[:1], cells, ("image", "label"), label_type=IMAGE, names=None)
    with pytest.raises(ValueError, match=rf"camvid-half-valid.parquet, row 0: .*{message}"):
        load("camvid-half", "valid", root=tmp_path)
    assert not cache.exists()


def test_shards_must_agree_on_classes_and_a_set_must_have_some(cache, tmp_path):
    for shard, names in enumerate((["a", "b"], ["b", "a"])):
        write(tmp_path / f"cifar10-test-{shard}.parquet", PIXELS[:2], [0, 1], names=names)
    with pytest.raises(ValueError, match=r"cifar10-test-1.parquet: its classes differ"):
        load("cifar10", "test", root=tmp_path)
    write(tmp_path / "cifar100-test.parquet", PIXELS[:2], [0, 1], ("img", "fine_label"), names=None)
    with pytest.raises(ValueError, match="no class names"):
        load("cifar100", "test", root=tmp_path)


@pytest.mark.parametrize(("arguments", "options", "message"), [
    (("cifar11", "train"), {}, "unknown data set 'cifar11'; there are cifar10, cifar100, tiny-imagenet-25"),
    (("cifar10", "valid"), {}, "cifar10 has no split 'valid'; there are train, test"),
    (("shapes", "test"), {"limit": 0}, "limit is 0"),
    (("shapes", "test"), {"limit": -3}, "limit is -3"),
    (("shapes", "test"), {"limit": 2.0}, "limit is 2.0"),
    (("shapes", "test"), {"limit": True}, "limit is True"),
    (("shapes", "test"), {"limit": 501}, "limit 501 is more than the 500 images"),
    (("cifar10", "test"), {"root": "no/such/folder"}, "is not a folder"),
])  # fmt: skip
def test_bad_arguments(cache, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        load(*arguments, **options)
    assert not cache.exists()


def test_a_data_folder_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("VITBOOK_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="nowhere', which is no folder"):
        load("cifar10", "test")
