"""Runs that take a tenth of a second, and processes that are killed at a chosen place, for several test files."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vitbook.data import Augment
from vitbook.models.vit import ViTConfig
from vitbook.runs import SMOKE, Recipe, Run, checkpoint, obtain, records, store, training

PAPER = Run("cifar10", ViTConfig(classes=10, drop_path=0.2), Recipe(augment=Augment(cutmix=1.0)))
TINY = SMOKE.with_changes(
    changes={"limit": 128, "model.patch": 8, "model.dim": 16, "recipe.batch": 32, "recipe.epochs": 3}
)


def tiny(seed: int = 0, changes: dict[str, Any] | None = None) -> Run:
    """A run on `shapes` of three epochs of four steps, with drop path and CutMix; ``changes`` as a profile's."""
    return replace(TINY.with_changes(changes=changes or {}).scale(PAPER), seed=seed)


@dataclass(frozen=True)
class CNNConfig:
    """A convolutional net with a batch norm: a model without heads, and with a whole number among its buffers."""

    channels: tuple[int, ...] = (4,)
    classes: int = 10

    def build(self) -> nn.Module:
        layers, width = [], 3
        for c in self.channels:
            layers += [nn.Conv2d(width, c, 3, stride=4), nn.BatchNorm2d(c), nn.ReLU()]
            width = c
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, self.classes))

    def flops(self) -> int:
        return 2 * 64 * 27 * sum(self.channels)


@functools.cache
def undisturbed(run: Run) -> dict:
    """What ``fit`` gives; computed once for all tests of a file, in bf16 with one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "precision", lambda device: "bf16")
        return training.fit(run)


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def assert_same(record: records.Record, result: dict) -> None:
    """The record holds what ``fit`` gave: weights bit for bit, curves (but for the seconds) and measures."""
    assert same_tensors(record.weights, result["weights"])
    assert same_tensors(record.warmup or {}, result.get("warmup", {}))
    assert record.measures == result["measures"]
    assert {k: v for k, v in record.curves.items() if k != "seconds"} == {
        k: v for k, v in result["curves"].items() if k != "seconds"
    }


def put(run: Run) -> Path:
    """The run's record as it is made, in the cache."""
    return store.write(run.spec, undisturbed(run))


def loss_with(on_call: Callable[[int, torch.Tensor], torch.Tensor]) -> SimpleNamespace:
    """A stand-in for torch.nn.functional in the training loop: ``on_call(n, loss)`` is step n's loss (from 1)."""
    calls = itertools.count(1)

    def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, **options: str) -> torch.Tensor:
        loss = nn.functional.cross_entropy(logits, targets, **options)
        return loss if options else on_call(next(calls), loss)

    return SimpleNamespace(cross_entropy=cross_entropy)


_FORKS = multiprocessing.get_context("forkserver")  # imports torch once, before anything has threads
_FORKS.set_forkserver_preload(["vitbook.runs"])


def start(work: Callable, *arguments: Any) -> multiprocessing.Process:
    """``work(*arguments)`` in a process of its own."""
    process = _FORKS.Process(target=work, args=arguments)
    process.start()
    return process


def ask(cache: Path, run: Run, die: tuple[str, int] | None = None) -> None:
    """For a child: asks for ``run``, and kills itself (SIGKILL) at the nth pass of a place, ``die``; notes what it did.

    Places: ``step``, and for the checkpoint and the record ``… half`` (a file half-written), ``… before`` and
    ``… after`` (the rename that puts it in place).
    """
    os.environ["VITBOOK_CACHE"] = str(cache)
    torch.set_num_threads(1)
    training.precision = lambda device: "bf16"
    passes = itertools.count(1)

    def strike(place: str) -> None:
        if die and place == die[0] and next(passes) == die[1]:
            os.kill(os.getpid(), signal.SIGKILL)

    rate, rename, fit = training.learning_rate, os.replace, records.fit

    def learning_rate(*arguments: Any) -> float:
        strike("step")
        return rate(*arguments)

    def writer(kind: str, whole: Callable) -> Callable:
        def save_file(tensors: dict, file: Path, *meta: Any) -> None:
            if die and die[0] == f"{kind} half":
                Path(file).write_bytes(bytes(1_000))
            strike(f"{kind} half")
            whole(tensors, file, *meta)

        return save_file

    def put(source: Path, target: Path) -> None:
        kind = "checkpoint" if str(target).endswith(".safetensors") else "record"
        strike(f"{kind} before")
        rename(source, target)
        strike(f"{kind} after")

    def noted(*arguments: Any, **options: Any) -> dict:
        with open(cache / "trained.log", "a") as log:
            log.write(f"{os.getpid()}\n")
        return fit(*arguments, **options)

    cache.mkdir(parents=True, exist_ok=True)
    training.learning_rate, os.replace, records.fit = learning_rate, put, noted
    checkpoint.save_file = writer("checkpoint", checkpoint.save_file)
    store.save_file = writer("record", store.save_file)
    with open(cache / f"{os.getpid()}.err", "w", buffering=1) as sys.stderr:
        obtain(run)
