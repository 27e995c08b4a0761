"""How fast, on this machine: ratios against what readers would otherwise use, each side at its best thread setting.

`python tests/bench.py` takes a few minutes, prints a table and writes it to book/bench.json, from which the page of
figures is made. Run it with nothing beside it. Every row is one ratio measured in one run, with the level that this
project asks of itself; where a CPU has no bf16 matrix product, ratios of training speed are printed and not required.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import theory_oracle
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F
from torchvision.transforms import v2

from vitbook.data import Augment, ImageSet, load
from vitbook.measures.heads import measure_heads
from vitbook.models.vit import ViT, ViTConfig, resized
from vitbook.runs import Recipe, Run, fit
from vitbook.runs.training import machine, precision

SOURCE_A = {"dim": 192, "depth": 8, "heads": 8, "mlp_ratio": 2}
THREADS = sorted({1, os.cpu_count() or 1})
OUT = Path(__file__).parents[1] / "book" / "bench.json"


def race(*rivals: Callable[[], object], repeats: int = 5, threads: list[int] = THREADS) -> list[tuple[float, int]]:
    """Of each rival: its fewest seconds over repeats and thread settings, and the threads that gave them.

    They take turns, so that whatever else the machine does meets them alike.
    """
    times = [{} for _ in rivals]
    for turn in range(repeats + 1):  # the first turn warms up
        for n in threads:
            torch.set_num_threads(n)
            for work, mine in zip(rivals, times, strict=True):
                start = time.perf_counter()
                work()
                if turn:
                    mine[n] = min(time.perf_counter() - start, mine.get(n, float("inf")))
    return [(min(mine.values()), min(mine, key=mine.get)) for mine in times]


def peak(dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product."""
    n = 2048
    a = torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / race(lambda: a @ a)[0][0]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> Callable[[], None]:
    """One training step on a fixed batch of 128."""
    images, targets = torch.randn(128, 3, 32, 32), torch.randint(100, (128,))

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def timm_vit() -> VisionTransformer:
    """The same shape as timm ships it."""
    return VisionTransformer(
        img_size=32, patch_size=4, embed_dim=192, depth=8, num_heads=8, mlp_ratio=2, num_classes=100
    )


def training_step() -> dict:
    model, peer = ViT(**SOURCE_A), timm_vit()
    dtype = torch.bfloat16 if precision("cpu") == "bf16" else None
    (fast, threads), (slow, their_threads) = race(
        steps(model, torch.optim.AdamW(model.parameters(), fused=True), dtype),
        steps(peer, torch.optim.AdamW(peer.parameters()), None),
    )
    work = 3 * ViTConfig(**SOURCE_A).flops() * 128 / fast
    share = work / peak(dtype or torch.float32)
    ours = f"{128 / fast:.0f} images/s ({threads} threads; {share:.0%} of the matmul peak)"
    theirs = f"timm, fp32, fused: {128 / slow:.0f} images/s ({their_threads} threads)"
    return row("training step, 8×192, batch 128", ours, theirs, slow / fast, 2.7)


class Usual(torch.utils.data.Dataset):
    """The usual recipe: PIL images, one by one, through torchvision's transforms."""

    def __init__(self, data: ImageSet, *more: v2.Transform):
        self.pictures, self.labels = [v2.functional.to_pil_image(image) for image in data.images], data.labels.tolist()
        self.transform = v2.Compose([
            v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *more,
            v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.pictures[i]), self.labels[i]

    def loader(self, batch: int, workers: int) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(
            self, batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0
        )


def epoch_of(run: Run) -> float:
    """Seconds of one epoch of ``fit``, data to update, at the present thread setting."""
    with mock.patch("vitbook.runs.training.evaluate", return_value={"accuracy": 0.0}):  # not timed, and slow
        return fit(run)["curves"]["seconds"][0]


def whole_epoch(images: int = 2_560) -> dict:
    """Ours is ``fit`` itself; theirs timm's model fed by a DataLoader with two workers."""
    run = Run("cifar100", ViTConfig(**SOURCE_A), Recipe(epochs=1, warmup=0, augment=Augment()), limit=images)
    theirs = timm_vit()
    optimizer = torch.optim.AdamW(theirs.parameters())
    loader = Usual(load("cifar100", "train", limit=images)).loader(128, workers=2)

    def epoch() -> None:
        for x, labels in loader:
            loss = F.cross_entropy(theirs(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    times = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        times[threads] = epoch_of(run)
    threads = min(times, key=times.get)
    [(slow, their_threads)] = race(epoch, repeats=1)
    fast = times[threads]
    ours = f"{images / fast:.0f} images/s ({threads} threads)"
    other = f"timm and a DataLoader, two workers: {images / slow:.0f} images/s ({their_threads} threads)"
    return row("whole epoch, data to update", ours, other, slow / fast, 3.5)


def augmentation(images: int = 10_000) -> list[dict]:
    """Crop, flip, AutoAugment and CutMix, to normalised images and soft targets; and their share of an epoch."""
    data = load("cifar100", "train", limit=images)
    augment, batch = Augment(policy="cifar10", cutmix=1.0), 128
    usual = Usual(data, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10))
    cutmix = v2.CutMix(alpha=1.0, num_classes=100)
    one, two = usual.loader(batch, workers=0), usual.loader(batch, workers=2)

    def ours() -> None:
        for _ in augment.epoch(data, batch):
            pass

    def theirs(loader: torch.utils.data.DataLoader) -> None:
        for x, labels in loader:
            cutmix(x, labels)

    (fast, _), (slow, _) = race(ours, lambda: theirs(one), repeats=1, threads=[1])
    (both, threads), (their_both, _) = race(ours, lambda: theirs(two), repeats=1)
    base = ViTConfig(dim=64, depth=6, heads=4)
    torch.set_num_threads(1)
    epoch = epoch_of(Run("cifar100", base, Recipe(epochs=1, warmup=0, batch=64, augment=augment), limit=5_000))
    part, whole = fast / images, epoch / 5_000  # seconds an image

    def speeds(ours: float, theirs: float, how: str, who: str) -> tuple[str, str, float]:
        return f"{images / ours:.0f} images/s ({how})", f"{who}: {images / theirs:.0f} images/s", theirs / ours

    alone = speeds(fast, slow, "1 thread", "torchvision, PIL, one process")
    together = speeds(both, their_both, f"{threads} threads", "a DataLoader, two workers")
    of_it = f"{1e6 * part:.0f} µs an image", f"the whole epoch: {1e6 * whole:.0f} µs", part / whole
    return [
        row("augmentation, one core", *alone, 4, bf16=False),
        row("augmentation, all cores", *together, 2, bf16=False),
        row("augmentation in an epoch, 6×64", *of_it, 0.1, at_most=True, bf16=False),
    ]


def heads_time() -> dict:
    model, images = ViT(dim=384, depth=7, heads=6, classes=10).eval(), torch.randn(1_000, 3, 32, 32)

    @torch.no_grad()
    def forward() -> None:
        for x in images.split(64):
            model(x, fused=False)

    (plain, _), (measured, threads) = race(forward, lambda: measure_heads(model, images), repeats=2)
    ours, theirs = f"{measured:.1f} s ({threads} threads)", f"plain fp32 forward: {plain:.1f} s"
    return row("measure_heads, 7×384, 1,000 images", ours, theirs, measured / plain, 1.15, at_most=True, bf16=False)


HEADS_MEMORY = """
from vitbook.measures.heads import measure_heads
model, images = ViT(dim=384, depth=7, heads=6, classes=10).eval(), torch.randn(1_000, 3, 32, 32)
with torch.no_grad():
    model(images[:64], fused=False)
    before = used()
    if how == "stream":
        measure_heads(model, images)
    else:
        kept = [{k: v for k, v in model(x, capture=True)[1].items() if "attn" in k} for x in images.split(64)]
"""

GAUG_MEMORY = """
size, batch = 224, 8
model = ViT(dim=192, depth=12, heads=3, image=size, patch=16, attention=how)
images = torch.randn(batch, 3, size, size)
before = used()
for _ in range(2):
    model(images).square().mean().backward()
"""

USED = """
import resource, sys, torch
from vitbook.models.vit import ViT
how, used = sys.argv[1], lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
%s
print((used() - before) / 1024)
"""


def memory(program: str, how: str) -> float:
    """MiB by which a process of its own grew while it ran ``program`` in that way."""
    return float(subprocess.run([sys.executable, "-c", USED % program, how], check=True, capture_output=True).stdout)


def heads_memory() -> dict:
    stream, keep = memory(HEADS_MEMORY, "stream"), memory(HEADS_MEMORY, "keep")
    ours, theirs = f"{stream:.0f} MiB", f"keeping all maps: {keep:.0f} MiB"
    return row("memory of measure_heads, the same", ours, theirs, stream / keep, 0.25, at_most=True, bf16=False)


def gaug() -> list[dict]:
    """ViT-tiny in fp32 with and without GAug's bias, each with the attention, explicit or fused, that is faster."""

    def training(model: ViT, fused: bool) -> Callable[[], None]:
        images, targets = torch.randn(8, 3, 224, 224), torch.randint(model.config.classes, (8,))

        def step() -> None:
            model.zero_grad()
            F.cross_entropy(model(images, fused=fused), targets).backward()

        return step

    def evaluation(model: ViT, fused: bool) -> Callable[[], None]:
        large, images = resized(model, 512).eval(), torch.randn(2, 3, 512, 512)
        return torch.no_grad()(lambda: large(images, fused=fused))

    def compared(what: str, work: Callable[[ViT, bool], Callable[[], None]], batch: int, level: float) -> dict:
        models = [ViT(dim=192, depth=12, heads=3, image=224, patch=16, attention=name) for name in ("plain", "gaug")]
        times = race(*[work(model, fused) for model in models for fused in (False, True)], repeats=3)
        plain, ours = min(times[:2]), min(times[2:])
        said = [f"{batch / seconds:.1f} images/s ({threads} threads)" for seconds, threads in (ours, plain)]
        return row(what, said[0], f"plain attention: {said[1]}", ours[0] / plain[0], level, at_most=True, bf16=False)

    return [
        compared("GAug, ViT-tiny, 224 px, training", training, 8, 1.3),
        compared("GAug, the same at 512 px, evaluation", evaluation, 2, 1.6),
    ]


def gaug_memory() -> dict:
    ours, plain = memory(GAUG_MEMORY, "gaug"), memory(GAUG_MEMORY, "plain")
    return row(
        "memory of GAug in training, batch of 8", f"{ours:.0f} MiB", f"plain attention: {plain:.0f} MiB", ours / plain
    )


def theory() -> list[dict]:
    torch.set_num_threads(1)
    ours, direct = theory_oracle.race()
    small, large = theory_oracle.peak_memory(512), theory_oracle.peak_memory(51_200)
    return [
        row(
            "reduced dynamics, 2,000 steps at (512, 8, 0.12)",
            f"{ours:.2f} s",
            f"set by set, as written: {direct:.1f} s",
            direct / ours,
            2,
            bf16=False,
        ),
        row(
            "memory of the reduced dynamics, patches of 51,200 numbers",
            f"{large / 2**20:.1f} MiB",
            f"of 512 numbers: {small / 2**20:.1f} MiB",
            large / small,
            1.01,
            at_most=True,
            bf16=False,
        ),
    ]


def row(
    what: str,
    ours: str,
    theirs: str,
    ratio: float,
    level: float | None = None,
    *,
    at_most: bool = False,
    bf16: bool = True,
) -> dict:
    """One line of the table; ``bf16`` marks ratios that need a bf16 matrix product. No level: told, not asked for."""
    if level is None:
        asked, verdict = "–", "–"
    else:
        met = ratio <= level if at_most else ratio >= level
        asked = f"{'≤' if at_most else '≥'} {level}"
        required = not bf16 or precision("cpu") == "bf16"
        verdict = "met" if met else "NOT MET" if required else "not required here"
    line = {
        "what": what,
        "ours": ours,
        "the other": theirs,
        "ratio": f"{ratio:.2f}",
        "asked for": asked,
        "level": verdict,
    }
    print("  ".join(line.values()), flush=True)
    return line


def main() -> None:
    # Memory first: a process inherits the high-water mark of the one that starts it.
    of_heads, of_gaug = heads_memory(), gaug_memory()
    speeds = [training_step(), whole_epoch(), *augmentation(), heads_time()]
    rows = [*speeds, of_heads, *gaug(), of_gaug, *theory()]
    about = machine("cpu")
    peaks = {name: peak(dtype) / 1e12 for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    said = {
        "CPU": f"{about['device']}, {os.cpu_count()} cores",
        "matmul peak": ", ".join(f"{name} {rate:.2f} TFLOP/s" for name, rate in peaks.items()),
        "date": about["date"][:10],
        "versions": ", ".join(f"{name} {text}" for name, text in about["versions"].items()),
    }
    part = OUT.with_suffix(".part")
    part.write_text(json.dumps({"machine": said, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    os.replace(part, OUT)
    sys.exit(any(line["level"] == "NOT MET" for line in rows))


if __name__ == "__main__":
    main()
