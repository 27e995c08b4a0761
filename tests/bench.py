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

import torch
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F
from torchvision.transforms import v2

from vitbook.data import Augment, load
from vitbook.measures.heads import measure_heads
from vitbook.models.vit import ViT, ViTConfig
from vitbook.runs import Recipe, Run, fit
from vitbook.runs.training import machine, precision

SOURCE_A = {"dim": 192, "depth": 8, "heads": 8, "mlp_ratio": 2}
THREADS = sorted({1, os.cpu_count() or 1})
OUT = Path(__file__).parents[1] / "book" / "bench.json"


def best(work: Callable[[], object], repeats: int = 5) -> tuple[float, int]:
    """Fewest seconds of ``work()`` over thread settings and repeats, and the threads that gave them."""
    times = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        work()
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times[threads] = min(time.perf_counter() - start, times.get(threads, float("inf")))
    threads = min(times, key=times.get)
    return times[threads], threads


def peak(dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product."""
    n = 2048
    a = torch.ones(n, n, dtype=dtype)
    return 2 * n**3 / best(lambda: a @ a)[0]


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
    fast, threads = best(steps(model, torch.optim.AdamW(model.parameters(), fused=True), dtype))
    slow, their_threads = best(steps(peer, torch.optim.AdamW(peer.parameters()), None))
    work = 3 * ViTConfig(**SOURCE_A).flops() * 128 / fast
    share = work / peak(dtype or torch.float32)
    ours = f"{128 / fast:.0f} images/s ({threads} threads; {share:.0%} of the matmul peak)"
    theirs = f"timm, fp32, fused: {128 / slow:.0f} images/s ({their_threads} threads)"
    return row("training step, 8×192, batch 128", ours, theirs, slow / fast, 2.7)


def whole_epoch(images: int = 3_840) -> dict:
    """Data to update. Ours is ``fit`` itself; theirs the usual torchvision recipe with two workers."""
    model = ViTConfig(**SOURCE_A)
    run = Run("cifar100", model, Recipe(epochs=1, warmup=0, augment=Augment()), limit=images)
    times = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        with mock.patch("vitbook.runs.training.evaluate", return_value={"accuracy": 0.0}):  # not timed, and slow
            times[threads] = fit(run)["curves"]["seconds"][0]
    threads = min(times, key=times.get)
    data = load("cifar100", "train", limit=images)
    pictures = [v2.functional.to_pil_image(image) for image in data.images]
    usual = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToImage(),
                        v2.ToDtype(torch.float32, scale=True), v2.Normalize(data.mean, data.std)])  # fmt: skip

    class Usual(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return images

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            return usual(pictures[i]), int(data.labels[i])

    theirs = timm_vit()
    optimizer = torch.optim.AdamW(theirs.parameters())
    loader = torch.utils.data.DataLoader(
        Usual(), 128, shuffle=True, drop_last=True, num_workers=2, persistent_workers=True
    )

    def epoch() -> None:
        for x, labels in loader:
            loss = F.cross_entropy(theirs(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    slow, their_threads = best(epoch, repeats=1)
    fast = times[threads]
    ours = f"{images / fast:.0f} images/s ({threads} threads)"
    other = f"timm and a DataLoader, two workers: {images / slow:.0f} images/s ({their_threads} threads)"
    return row("whole epoch, data to update", ours, other, slow / fast, 3.5)


def heads_time() -> dict:
    model, images = ViT(dim=384, depth=7, heads=6, classes=10).eval(), torch.randn(1_000, 3, 32, 32)

    @torch.no_grad()
    def forward() -> None:
        for x in images.split(64):
            model(x, fused=False)

    plain, _ = best(forward, repeats=2)
    measured, threads = best(lambda: measure_heads(model, images), repeats=2)
    ours, theirs = f"{measured:.1f} s ({threads} threads)", f"plain fp32 forward: {plain:.1f} s"
    return row("measure_heads, 7×384, 1,000 images", ours, theirs, measured / plain, 1.15, at_most=True, bf16=False)


MEMORY = """
import resource, sys, torch
from vitbook.models.vit import ViT
from vitbook.measures.heads import measure_heads
model, images = ViT(dim=384, depth=7, heads=6, classes=10).eval(), torch.randn(1_000, 3, 32, 32)
with torch.no_grad():
    model(images[:64], fused=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.argv[1] == "stream":
        measure_heads(model, images)
    else:
        kept = [{k: v for k, v in model(x, capture=True)[1].items() if "attn" in k} for x in images.split(64)]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def heads_memory() -> dict:
    def used(how: str) -> float:
        return float(subprocess.run([sys.executable, "-c", MEMORY, how], check=True, capture_output=True).stdout)

    stream, keep = used("stream"), used("keep")
    ours, theirs = f"{stream:.0f} MiB", f"keeping all maps: {keep:.0f} MiB"
    return row("memory of measure_heads, the same", ours, theirs, stream / keep, 0.25, at_most=True, bf16=False)


def row(
    what: str, ours: str, theirs: str, ratio: float, level: float, *, at_most: bool = False, bf16: bool = True
) -> dict:
    """One line of the table; ``bf16`` marks ratios that need a bf16 matrix product."""
    met = ratio <= level if at_most else ratio >= level
    asked = f"{'≤' if at_most else '≥'} {level}"
    required = not bf16 or precision("cpu") == "bf16"
    verdict = "met" if met else "NOT MET" if required else "not required here"
    line = {"what": what, "ours": ours, "the other": theirs, "ratio": f"{ratio:.2f}", "asked for": asked, "": verdict}
    print("  ".join(line.values()), flush=True)
    return line


def main() -> None:
    rows = [training_step(), whole_epoch(), heads_time(), heads_memory()]
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
    sys.exit(any(line[""] == "NOT MET" for line in rows))


if __name__ == "__main__":
    main()
