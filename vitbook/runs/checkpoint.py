"""Where a training stands, in one file that is replaced after every epoch."""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitbook.runs.spec import Run, describe

CHECKPOINT_FORMAT = 1


def save(
    path: Path, run: Run, plain: dict, model: nn.Module, optimizer: torch.optim.Optimizer, warmup: dict[str, Tensor]
) -> None:
    """Replaces the file; ``plain`` is what JSON holds (epoch, threads, precision, curves, measures).

    A full disk is told, and training goes on with the older file in place.
    """
    tensors = {f"model/{k}": v for k, v in model.state_dict().items()} | {f"warmup/{k}": v for k, v in warmup.items()}
    for name, p in model.named_parameters():
        tensors |= {f"optimizer/{name}/{k}": v for k, v in optimizer.state[p].items()}
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    meta = {"format": CHECKPOINT_FORMAT, "run": run.id, "plain": plain}
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, scratch, {"state": json.dumps(meta)})
        os.replace(scratch, path)
    except (OSError, SafetensorError) as error:
        print(
            f"{describe(run)}: no checkpoint after epoch {plain['epoch']} ({error}); training goes on", file=sys.stderr
        )
    finally:
        scratch.unlink(missing_ok=True)


def resume(path: Path, run: Run) -> dict | None:
    """``{"plain": …, "tensors": …}`` as saved, None where there is no file; ValueError for one of another run."""
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads(file.metadata()["state"])
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (a safetensors file is no dict)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no readable checkpoint ({error}); delete it to start this run anew") from error
    if meta.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {meta.get('format')}, not {CHECKPOINT_FORMAT}; delete it to start anew"
        )
    if meta["run"] != run.id:
        raise ValueError(f"{path} is the checkpoint of run {meta['run']}, not of {run.id}; give each run its own file")
    return {"plain": meta["plain"], "tensors": tensors}


def restore(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> dict[str, Tensor]:
    """Puts weights and optimiser back as they were; returns the weights at the end of warmup, if they are there."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v.to(device) for k, v in tensors.items() if k.startswith(prefix)}

    model.load_state_dict(part("model/"))
    for name, p in model.named_parameters():
        optimizer.state[p] = part(f"optimizer/{name}/")
    return part("warmup/")


def progress(path: Path) -> int:
    """The epochs that a checkpoint holds; 0 where there is none to read."""
    try:
        with safe_open(path, "pt") as file:
            return json.loads(file.metadata()["state"])["plain"]["epoch"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return 0
