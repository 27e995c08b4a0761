"""Asking for runs: from the record store, or trained now."""

import contextlib
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from vitbook.data import SETS
from vitbook.measures.heads import patch_distances
from vitbook.runs import store
from vitbook.runs.checkpoint import progress
from vitbook.runs.spec import Run, describe
from vitbook.runs.training import fit, rebuild

CPU_RATE = 6e10  # training FLOP/s of one core of a CPU with bf16 matrix products, measured on the book's base model


class NotRecorded(LookupError):
    """A run that no record holds, asked for without leave to train."""


@dataclass(frozen=True)
class Record:
    """What a finished run left. Everything was measured on the half-precision weights, cast up to float32."""

    run: Run
    curves: dict[str, list]  # a value an epoch: epoch, loss, lr, seconds
    measures: list[dict]  # a row a milestone: epoch, accuracy, nll, clean_loss, heads
    provenance: dict
    weights: dict[str, Tensor] | None = None  # None where only the measures are kept
    warmup: dict[str, Tensor] | None = None  # seed 0: the weights at the end of warmup

    @property
    def accuracy(self) -> float:
        """On the whole evaluation split, at the end of training (never the best on the way)."""
        return self.measures[-1]["accuracy"]

    def heads(self, epoch: int | None = None, unit: str = "patch") -> pd.DataFrame:
        """The heads at a milestone (the last by default), as :func:`vitbook.measures.heads.measure_heads` gave them.

        Distances in ``unit``: "patch", "px", or "max", parts of the largest distance between two patches.
        """
        epochs = [row["epoch"] for row in self.measures]
        epoch = epochs[-1] if epoch is None else epoch
        if epoch not in epochs:
            raise ValueError(f"nothing was measured at epoch {epoch}; there are {', '.join(map(str, epochs))}")
        row = self.measures[epochs.index(epoch)]
        if "heads" not in row:
            raise ValueError(
                f"{describe(self.run)} has no attention heads: its model is a {type(self.run.model).__name__}"
            )
        # A record holds 0 for 0.0 and None for NaN: columns get back the type that they were measured in
        table = pd.DataFrame(
            {k: pd.Series(v, dtype=int if k in ("layer", "head") else float) for k, v in row["heads"].items()}
        )
        model = self.run.model
        side = model.patch if unit == "px" else None
        if isinstance(side, tuple) and side[0] != side[1]:
            raise ValueError(
                f"patches of {side[0]} × {side[1]} pixels: distances recorded in patches do not tell those in pixels; "
                'measure the model itself, measure_heads(record.model(), images, unit="px", patch=…)'
            )
        scale = patch_distances(model.grid, unit, side).max() / patch_distances(model.grid).max()
        return table.assign(**{k: table[k] * scale.item() for k in ("distance", "distance_se", "leaky")})

    def model(self, device: str = "cpu", at: str = "weights") -> nn.Module:
        """The trained model, in evaluation mode; ``at="warmup"``: as it was at the end of warmup."""
        weights = getattr(self, at)
        if weights is None:
            raise ValueError(
                f"the {at} of {describe(self.run)} are not kept here: the book ships the final weights of seed 0 "
                "of models with attention, and all others stay in the cache of the machine that trained them"
            )
        return rebuild(self.run, weights, device)


def obtain(run: Run, *, train: bool = True) -> Record:
    """The record of a run: found, or trained here and now (resuming from a checkpoint when there is one).

    With ``train=False`` a run without a record raises :class:`NotRecorded`.
    """
    if not train and store.find(store.key_of(run.spec)) is None:
        raise NotRecorded(_how_to_record([run]))
    checkpoint = _checkpoint(run)
    result = store.remember(run.spec, lambda: fit(run, checkpoint, report=_progress(run)))
    for left in checkpoint.parent.glob(f"*{checkpoint.name}*"):  # with the scratch files of processes that were killed
        with contextlib.suppress(OSError):  # the cache may be read-only: a shipped record needs none
            left.unlink()
    return Record(run, **result)


def _checkpoint(run: Run) -> Path:
    return store.cache() / "checkpoints" / f"{run.id}.safetensors"


def obtain_many(
    runs: Iterable[Run], *, train: bool = True, partial: bool = False, executor: Executor | None = None
) -> dict[Run, Record]:
    """The records of many runs, in their order; those that are missing are trained side by side.

    ``executor``: any ``concurrent.futures.Executor``, such as ``dask.distributed.Client().get_executor()``; by
    default two worker processes of one thread each, which together do as much as one process with two threads, and
    more with small models. Runs that take seconds are trained in this process. A worker trains one run at a time,
    however many threads it has; all need the same folder as VITBOOK_CACHE. When a run fails, the others are made all
    the same, and then its error is raised.

    ``train=False`` raises :class:`NotRecorded` when one is missing; with ``partial=True`` it returns those there are
    and says which are missing.
    """
    runs = list(dict.fromkeys(runs))
    missing = [r for r in runs if store.find(store.key_of(r.spec)) is None]
    if missing and not train:
        if not partial:
            raise NotRecorded(_how_to_record(missing))
        print(_how_to_record(missing))
        runs = [r for r in runs if r not in missing]
    elif missing:
        cost = {r: minutes(r) * (1 - progress(_checkpoint(r)) / r.recipe.epochs) for r in missing}
        small = executor is None and sum(cost.values()) < 1
        if not small:
            _say(
                f"{len(runs)} runs: {len(runs) - len(missing)} recorded, {len(missing)} missing, "
                f"about {sum(cost.values()):.0f} core-minutes left"
            )
        _train(missing, cost, _Here() if small else executor)
    return {run: obtain(run, train=train) for run in runs}


class _Here(Executor):
    """Does what is submitted at once, in this process."""

    def submit(self, work: Callable, /, *arguments: Any) -> Future:
        future = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


def _train(missing: list[Run], cost: dict[Run, float], executor: Executor | None) -> None:
    own = None
    if executor is None:
        # spawn: a forked process inherits torch's threads in a broken state
        spawn = multiprocessing.get_context("spawn")
        executor = own = ProcessPoolExecutor(min(2, os.cpu_count() or 1), spawn, initializer=_one_thread)
    failures = []
    futures = {executor.submit(_make, run): run for run in missing}
    try:
        for future in as_completed(futures):
            run = futures[future]
            cost.pop(run)
            error = future.exception()
            if error is None and store.find(run.id) is None:
                error = NotRecorded(
                    f"{describe(run)} was recorded by a worker, but not in {store.cache()}: "
                    "let VITBOOK_CACHE name one folder that all workers share"
                )
            if error:
                failures.append(error)
                _say(f"{describe(run)} failed: {error}")
            elif not isinstance(executor, _Here):
                _say(f"{describe(run)} recorded; {len(cost)} left, about {sum(cost.values()):.0f} core-minutes")
    finally:
        if own:
            own.shutdown(cancel_futures=True)
    if failures:
        raise failures[0]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _one_thread() -> None:
    """A worker's start: one thread, and an end when the process that asked is gone."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)  # checkpoints and locks survive this, as they survive a kill


def _make(run: Run) -> None:
    obtain(run)


def minutes(run: Run, rate: float | None = None) -> float:
    """Estimated minutes to train ``run``, from its FLOPs: on one CPU core, or at ``rate`` FLOP/s."""
    images = run.limit or SETS[run.data].train_images
    work = 3 * run.model.flops() * images * run.recipe.epochs  # backward is twice forward
    return work / (rate or CPU_RATE) / 60


def _how_to_record(missing: list[Run]) -> str:
    names = "\n".join(f"  {describe(r)}: {r.model.__class__.__name__}, {r.recipe.epochs} epochs" for r in missing)
    return (
        f"{len(missing)} run{'s are' if len(missing) > 1 else ' is'} not recorded yet (about "
        f"{math.ceil(sum(minutes(r) for r in missing))} core-minutes). `make record CHAPTER=… PROFILE=…` "
        f"with the chapter's name and desk or paper records them, and so does obtain(run):\n{names}"
    )


def _progress(run: Run):
    """After each epoch: a bar's step on a terminal, elsewhere one line."""
    bar = None

    def report(epoch: int, row: dict) -> None:
        nonlocal bar
        if sys.stderr.isatty():
            place = (multiprocessing.current_process()._identity or (1,))[0] - 1
            bar = bar or tqdm(
                total=run.recipe.epochs, initial=epoch - 1, desc=describe(run), unit="epoch", position=place
            )
            bar.set_postfix({k: f"{v:.3g}" for k, v in row.items()}, refresh=False)
            bar.update()
            if epoch == run.recipe.epochs:
                bar.close()
        elif run.recipe.epochs > 5:
            text = "  ".join(f"{k} {v:.4g}" for k, v in row.items())
            _say(f"{describe(run)}  epoch {epoch}/{run.recipe.epochs}  {text}")

    return report
