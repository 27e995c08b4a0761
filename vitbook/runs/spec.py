"""Run, Recipe and Profile: an experiment as pure data, and what a scale changes of it."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pandas as pd

from vitbook.data import SETS, Augment


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: AdamW, linear warmup, cosine decay, both per step; the last partial batch is dropped.

    Weight decay acts on matrices only, not on biases, norms, positions and the CLS or register tokens.
    """

    epochs: int = 100
    batch: int = 128
    lr: float = 1e-3  # peak
    warmup: int = 10  # epochs of linear warmup
    min_lr: float = 0.0  # where the cosine ends
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float | None = None  # largest norm of the gradient
    augment: Augment = Augment()

    def __post_init__(self):
        object.__setattr__(self, "betas", tuple(self.betas))
        whole = all(type(n) is int for n in (self.epochs, self.batch, self.warmup))
        if not whole or self.epochs < 1 or self.batch < 1 or not 0 <= self.warmup <= self.epochs:
            raise ValueError(
                f"epochs={self.epochs}, batch={self.batch}, warmup={self.warmup}: "
                "whole numbers, at least one epoch and one image a batch, and a warmup within the epochs are needed"
            )
        if (
            not 0 < self.lr < math.inf
            or not 0 <= self.min_lr <= self.lr
            or not 0 <= self.weight_decay < math.inf
            or (self.clip is not None and not 0 < self.clip < math.inf)
            or len(self.betas) != 2
            or not all(0 <= beta < 1 for beta in self.betas)
        ):
            raise ValueError(
                f"lr={self.lr}, min_lr={self.min_lr}, weight_decay={self.weight_decay}, clip={self.clip}, "
                f"betas={self.betas}: lr and clip are positive, min_lr lies between 0 and lr, weight_decay is not "
                "negative, the two betas lie in 0 to 1"
            )


@dataclass(frozen=True)
class Run:
    """One experiment: a model trained on a data set by a recipe from one seed. Written at the paper's scale."""

    data: str  # a set of vitbook.data.load
    model: Any  # a frozen dataclass with build() and flops(): ViTConfig, TimmConfig, …
    recipe: Recipe = Recipe()
    seed: int = 0
    limit: int | None = None  # the first n training images in the canonical order; None: all
    shuffle: int = 0  # pixels: side of the cells that change places in every image the model is given; 0: none

    def __post_init__(self):
        if self.data not in SETS:
            raise ValueError(f"data={self.data!r} is no data set; there are {', '.join(SETS)}")
        made = is_dataclass(self.model) and not isinstance(self.model, type)
        if not made or not hasattr(self.model, "build") or not hasattr(self.model, "flops"):
            raise ValueError(
                f"model={self.model!r:.100} is no model config; give ViTConfig(…) or another frozen dataclass with "
                "build() and flops(). (To measure a trained module no Run is needed)"
            )
        whole = all(type(n) is int for n in (self.seed, self.shuffle, 1 if self.limit is None else self.limit))
        if not whole or self.seed < 0 or self.shuffle < 0 or (self.limit is not None and self.limit < 1):
            raise ValueError(
                f"seed={self.seed!r}, limit={self.limit!r}, shuffle={self.shuffle!r}: "
                "whole numbers are needed, seed and shuffle not negative, the limit at least 1"
            )

    @property
    def spec(self) -> dict:
        """The run as JSON data, without the fields that equal their default."""
        return {"run": canonical(self)}

    @property
    def id(self) -> str:
        """Twelve hex digits that name this run: fields added later, with their default, leave it alone."""
        return key_of(self.spec)


def describe(run: Run) -> str:
    """How messages name a run."""
    return f"{run.data} {run.id} seed {run.seed}"


def canonical(value: Any) -> Any:
    """JSON data of a config: defaults left out, whole floats as integers, tuples as lists; a model under its class."""
    if is_dataclass(value):
        kept = {}
        for f in fields(value):
            v = getattr(value, f.name)
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            if default is dataclasses.MISSING or v != default:
                v = bool(v) if isinstance(default, bool) else v  # 1 == True: equal runs have one id
                kept[f.name] = {_named(type(v)): canonical(v)} if f.name == "model" else canonical(v)
        return kept
    if isinstance(value, dict):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{value!r} of type {type(value).__name__} is no plain data; a spec holds numbers, text, lists and dictionaries"
    )


def _named(config: type) -> str:
    """A config of the book by its name; one from elsewhere with its module, for it may bear the same name."""
    ours = config.__module__.startswith("vitbook.")
    return config.__name__ if ours else f"{config.__module__}.{config.__qualname__}"


def key_of(spec: dict) -> str:
    """The name of a spec: the first twelve hex digits of the SHA-256 of its canonical JSON."""
    text = json.dumps(canonical(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Profile:
    """What a scale changes of the paper's runs: field overrides as paths (``{"model.depth": 6}``), and the seeds.

    An override that is a function is given the paper's value: ``{"recipe.epochs": lambda n: n * 3 // 10}`` keeps the
    proportions between runs of different length.
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)

    def scale(self, run: Run) -> Run:
        """``run`` at this scale."""
        return changed(run, self.changes)

    def runs(self, run: Run) -> list[Run]:
        """``run`` at this scale, once from each seed."""
        return [replace(self.scale(run), seed=seed) for seed in self.seeds]

    def differences(self, run: Run) -> pd.DataFrame:
        """What changed against the paper's run: a row a field, columns ``paper`` and this profile's name.

        Where nothing changed, the seeds stand alone, in a column of this profile's name.
        """
        scaled = self.scale(run)
        rows = {path: (_get(run, path), _get(scaled, path)) for path in self.changes}
        rows = {path: pair for path, pair in rows.items() if pair[0] != pair[1]} | {"seeds": (PAPER.seeds, self.seeds)}
        table = pd.DataFrame.from_dict(rows, orient="index", columns=["paper", self.name]).rename_axis("field")
        return table if len(rows) > 1 else table.iloc[:, 1:]

    def with_changes(self, **parts: Any) -> "Profile":
        """This profile with other seeds (``seeds=``) or further changes (``changes=``, added to those it has)."""
        return replace(
            self, changes=self.changes | parts.get("changes", {}), seeds=tuple(parts.get("seeds", self.seeds))
        )


def _get(thing: Any, path: str) -> Any:
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


def changed(thing: Any, changes: dict[str, Any]) -> Any:
    """A config with fields changed that are named by path: ``changed(run, {"recipe.augment.cutmix": 1.0})``.

    A change that is a function is given the old value. Fields of one part change together, lest half-way it be refused.
    """
    known = {f.name for f in fields(thing)} if is_dataclass(thing) else set()
    parts: dict[str, Any] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if name not in known:
            raise ValueError(
                f"a profile changes {path!r}, and {type(thing).__name__} has no field {name!r}; it has {sorted(known)}"
            )
        if rest and name in changes:
            raise ValueError(f"a profile changes both {name!r} and {path!r}; change the whole or its fields")
        if rest:
            parts.setdefault(name, {})[rest] = value
        else:
            parts[name] = value(getattr(thing, name)) if callable(value) else value
    nested = {path.partition(".")[0] for path in changes if "." in path}
    return replace(thing, **{k: changed(getattr(thing, k), v) if k in nested else v for k, v in parts.items()})


SMOKE = Profile(
    "smoke",
    {
        "data": "shapes", "limit": 512, "model.image": 32, "model.patch": 4, "model.classes": 10, "model.dim": 32,
        "model.depth": 2, "model.heads": 2, "recipe.epochs": 2, "recipe.batch": 64, "recipe.lr": 3e-3,
        "recipe.warmup": 1,
    },
)  # fmt: skip
DESK = Profile(
    "desk",
    {
        "model.dim": 64, "model.depth": 6, "model.heads": 4, "model.mlp_ratio": 2, "recipe.epochs": 50,
        "recipe.batch": 64, "recipe.lr": 3e-3, "recipe.warmup": 5,
    },
)  # fmt: skip
PAPER = Profile("paper", seeds=(0, 1, 2))


def choose(name: str, *profiles: Profile) -> Profile:
    """The profile of that name among those a chapter offers (by default the usual smoke, desk and paper)."""
    offered = {p.name: p for p in (SMOKE, DESK, PAPER)} | {p.name: p for p in profiles}
    if name not in offered:
        raise ValueError(f"profile={name!r} is unknown; choose one of {', '.join(offered)}")
    return offered[name]
