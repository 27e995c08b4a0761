"""The training loop: one run, start to end, resumable after every epoch.

The step path never waits for the device: losses are written to a tensor there and read once an epoch. On a CPU a
resumed run ends with the same bits as an undisturbed one: all draws of an epoch follow from (seed, epoch), and the
number of threads, which decides the order of sums, comes from the checkpoint.
"""

import contextlib
import functools
import math
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torch.nn import functional as F

from vitbook.data import SETS, ImageSet, grid_shuffle, load
from vitbook.measures.heads import measure_heads
from vitbook.runs import checkpoint as checkpoints
from vitbook.runs.spec import Run, describe

LIBRARIES = ("torch", "torchvision", "timm", "numpy")  # whose versions a record names
UNDECAYED = ("pos_embed", "cls_token", "reg_token")  # weight decay leaves these alone, beside what is no matrix
CLEAN = 2_000  # training images, without augmentation, on which arms with different targets are compared
PROBED = 1_000  # evaluation images on which heads are measured
MILESTONES = {0, 1, 2, 3, 5, 8, 10, 15, 20, 30, 40, 50, 60, 80}  # then every hundredth half: 100, 150, 200, …
_ONE_TRAINING = threading.Lock()


class NonFiniteLoss(RuntimeError):
    """Training met a loss that is not a number or infinite, or weights that are; the last good checkpoint is kept."""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One training at a time in a process: torch's generator belongs to all its threads. How many is put back after."""
    with _ONE_TRAINING:
        threads = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@_alone()
def fit(
    run: Run,
    checkpoint: Path | None = None,
    *,
    device: str | None = None,
    report: Callable[[int, dict], None] | None = None,
) -> dict:
    """Trains ``run`` and returns what its record holds.

    ``checkpoint``: a file that is written after every epoch and resumed from when it is there. ``report(epoch, row)``
    is called after each epoch.

    The result: ``curves`` (epoch, loss, lr, seconds), ``measures`` (at each milestone: accuracy and NLL on the whole
    evaluation split, ``clean_loss`` on 2,000 fixed training images with hard labels, ``heads`` on the first 1,000
    evaluation images), ``provenance``, and the tensors ``weights`` (half precision) and, for seed 0, ``warmup`` (the
    weights at the end of warmup). Everything is measured on the half-rounded weights, cast up to float32.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    train = load(run.data, "train", limit=run.limit, device=device)
    test = load(run.data, SETS[run.data].splits[1], device=device)
    recipe = run.recipe
    classes = getattr(run.model, "classes", len(train.classes))
    if classes != len(train.classes):
        raise ValueError(
            f"the model has {classes} classes and {run.data} has {len(train.classes)}; set model.classes to that"
        )
    steps = len(train) // recipe.batch
    if not steps:
        raise ValueError(f"batch={recipe.batch} is larger than the {len(train)} training images; lower it")

    if checkpoint:
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
    state = checkpoints.resume(checkpoint, run) if checkpoint else None
    plain = state["plain"] if state else {
        "epoch": 0, "threads": torch.get_num_threads(), "precision": precision(device), "starts": 0,
        "curves": {"epoch": [], "loss": [], "lr": [], "seconds": []}, "measures": [], "scaler": None,
    }  # fmt: skip
    plain["starts"] += 1
    here = machine(device)  # as this start finds it: files may change while it goes on with what it has loaded
    torch.set_num_threads(plain["threads"])
    with _seeded(run.seed, 0, device):
        model = run.model.build().to(device)
    groups = param_groups_weight_decay(model, recipe.weight_decay, no_weight_decay_list=UNDECAYED)
    # fused: the default step reads a scalar back to the host twice
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=plain["precision"] == "fp16")
    warmup: dict[str, Tensor] = {}
    if state:
        warmup = checkpoints.restore(state["tensors"], model, optimizer, device)
        if plain["scaler"]:
            scaler.load_state_dict(plain["scaler"])
    else:
        plain["measures"].append({"epoch": 0, **evaluate(run, half(model), train, test)})

    forward = torch.compile(model) if device == "cuda" else model  # gains nothing on a CPU
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plain["precision"])
    for epoch in range(plain["epoch"] + 1, recipe.epochs + 1):
        start = time.perf_counter()
        model.train()
        losses = torch.zeros(steps, device=device)
        with _seeded(run.seed, epoch, device):
            for i, (images, targets) in enumerate(recipe.augment.epoch(train, recipe.batch)):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(run, (epoch - 1) * steps + i, steps)
                with torch.autocast(torch.device(device).type, dtype, enabled=dtype is not None):
                    logits = forward(given(run, images))
                loss = F.cross_entropy(logits.float(), targets)
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                if recipe.clip:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
                scaler.step(optimizer)
                scaler.update()
                losses[i] = loss.detach()
        # No loss of this epoch has met the last step's weights: they are looked at themselves, as a record keeps them.
        whole = torch.stack([v.isfinite().all() for v in half(model).values()]).all()
        # The one look at the device in an epoch.
        found = torch.cat([losses, torch.where(whole, 0.0, torch.nan)[None]]).cpu()
        if not found.isfinite().all():
            step = int((~found.isfinite()).nonzero()[0])
            what = f"the loss was {found[step]}" if step < steps else "the weights left the range of half precision"
            step = min(step, steps - 1)
            kept = f"The last good checkpoint is kept at {checkpoint}. " if checkpoint and checkpoint.exists() else ""
            raise NonFiniteLoss(
                f"{describe(run)}: {what} in epoch {epoch}, step {step + 1} of {steps}, at learning rate "
                f"{learning_rate(run, (epoch - 1) * steps + step, steps):.3g}. {kept}"
                "Lower the learning rate, or clip the gradient"
            )
        found = found[:steps]
        row = {
            "loss": found.mean().item(),
            "lr": learning_rate(run, epoch * steps - 1, steps),
            "seconds": time.perf_counter() - start,
        }
        if epoch == recipe.warmup and run.seed == 0:
            warmup = half(model)
        if epoch in MILESTONES or (epoch >= 100 and epoch % 50 == 0) or epoch == recipe.epochs:
            plain["measures"].append({"epoch": epoch, **evaluate(run, half(model), train, test)})
            row["accuracy"] = plain["measures"][-1]["accuracy"]
        for name, column in plain["curves"].items():
            column.append(epoch if name == "epoch" else float(f"{row[name]:.6g}"))
        plain |= {"epoch": epoch, "scaler": scaler.state_dict() or None}
        if checkpoint:
            checkpoints.save(checkpoint, run, plain, model, optimizer, warmup)
        if report:
            report(epoch, row)

    result = {
        "curves": plain["curves"],
        "measures": plain["measures"],
        "provenance": provenance(here, plain, train, test),
    }
    return result | {"weights": half(model)} | ({"warmup": warmup} if warmup else {})


def learning_rate(run: Run, step: int, steps: int) -> float:
    """The rate of a step (from 0), ``steps`` an epoch: linear to the peak over the warmup, a cosine to ``min_lr``."""
    r = run.recipe
    warm, total = r.warmup * steps, r.epochs * steps
    if step < warm:
        return r.lr * (step + 1) / warm
    return r.min_lr + (r.lr - r.min_lr) * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(total - warm, 1)))


def given(run: Run, images: Tensor) -> Tensor:
    """What the model of ``run`` is given for normalised images, in training (mixed ones too) and in evaluation."""
    return grid_shuffle(images, run.shuffle) if run.shuffle else images


@functools.lru_cache
def precision(device: str) -> str:
    """``bf16`` where its matrix product is half as fast again as float32's, else ``fp16`` on CUDA or ``fp32``."""
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device != "cpu":
        return "fp32"

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(8):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        return min(times)

    return "bf16" if seconds(torch.float32) > 1.5 * seconds(torch.bfloat16) else "fp32"


def half(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights rounded to half precision: what a record keeps and what every measure is taken on."""
    return {
        k: v.detach().to(torch.half if v.is_floating_point() else v.dtype, copy=True)
        for k, v in model.state_dict().items()
    }


def rebuild(run: Run, weights: dict[str, Tensor], device: str = "cpu") -> nn.Module:
    """The model of ``run`` with recorded weights, cast up to float32, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):  # the start drawn here is overwritten: it shall move nobody else's draws
        model = run.model.build()
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in weights.items()})
    return model.to(device).eval()


@torch.no_grad()
def evaluate(run: Run, weights: dict[str, Tensor], train: ImageSet, test: ImageSet) -> dict:
    """What a milestone measures: accuracy and NLL of the whole evaluation split, loss on clean images, all heads."""
    model = rebuild(run, weights, test.images.device)

    def scores(data: ImageSet, n: int) -> tuple[Tensor, Tensor]:
        nll, right = 0.0, 0.0
        for images, labels in zip(data.images[:n].split(125), data.labels[:n].split(125), strict=True):
            logits = model(given(run, data.normalise(images)))
            nll = nll + F.cross_entropy(logits, labels, reduction="sum").double()
            right = right + (logits.argmax(1) == labels).sum()
        n = min(n, len(data))
        return int(right) / n, (nll / n).item()

    accuracy, nll = scores(test, len(test))
    row = {"accuracy": accuracy, "nll": nll, "clean_loss": scores(train, CLEAN)[1]}
    if hasattr(model, "grid"):  # a model with one grid of patches has heads to measure; a CNN has none
        batches = (given(run, test.normalise(images)) for images in test.images[:PROBED].split(100))
        row["heads"] = table_to_json(measure_heads(model, batches))
    return row


def table_to_json(table: pd.DataFrame) -> dict[str, list]:
    """Columns of plain numbers, six significant digits; a missing value is None."""
    return {
        name: [
            None if v is None or v != v else int(v) if isinstance(v, int | np.integer) else float(f"{v:.6g}")
            for v in column.tolist()
        ]
        for name, column in table.items()
    }


def machine(device: str) -> dict:
    """Where and with what a number is made: commit, date, versions, device."""
    here = str(Path(__file__).parents[1])

    def git(*words: str) -> str | None:
        with contextlib.suppress(OSError):  # a machine may lack git
            answer = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, check=False)
            return answer.stdout.strip() if answer.returncode == 0 else None
        return None

    ours = git("ls-files", "--", here)  # empty where it is installed, even inside somebody else's repository
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "commit": git("rev-parse", "HEAD") if ours else None,
        "modified": bool(git("status", "--porcelain", "--", here)) if ours else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in LIBRARIES},
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else name,
    }


def provenance(here: dict, plain: dict, train: ImageSet, test: ImageSet) -> dict:
    """What a record says of its making; ``here``: the machine and the code, as the last start found them."""
    return here | {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": plain["threads"], "precision": plain["precision"], "starts": plain["starts"],
        "seconds": round(sum(plain["curves"]["seconds"]), 1),
        "data": {"train": train.fingerprint, "test": test.fingerprint, "images": len(train), "source": train.source},
    }  # fmt: skip


@contextlib.contextmanager
def _seeded(seed: int, epoch: int, device: str):
    """Torch's generators set by (seed, epoch) inside, and as they were after."""
    with torch.random.fork_rng(devices=[torch.device(device)] if device.startswith("cuda") else []):
        torch.manual_seed(seed * 1_000_003 + epoch)
        yield
