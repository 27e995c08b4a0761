"""Runs by name, and what a scale changes of them."""

import dataclasses
import hashlib
import json
import math
from dataclasses import replace

import pandas as pd
import pytest
from tiny_runs import CNNConfig

from vitbook.data import Augment
from vitbook.models.adapters import TimmConfig
from vitbook.models.vit import ViTConfig
from vitbook.runs import DESK, PAPER, SMOKE, Profile, Recipe, Run, choose
from vitbook.runs.spec import canonical, key_of

DEFAULT = Run("cifar10", ViTConfig())
FULL = Run(
    "cifar10",
    ViTConfig(dim=384, depth=7, heads=6, classes=10),
    Recipe(epochs=100, batch=256, augment=Augment(cutmix=1.0)),
)


# Names


def test_golden_ids():
    desk = DESK.with_changes(changes={"recipe.epochs": 30}, seeds=(0, 1))
    assert [replace(desk.scale(FULL), seed=s).id for s in desk.seeds] == ["aa35e2e5ab02", "349a3e1fb5e8"]
    assert DEFAULT.id == "711415aa711b"


def test_an_id_is_the_hash_of_what_differs_from_the_defaults():
    assert DEFAULT.spec == {"run": {"data": "cifar10", "model": {"ViTConfig": {}}}}
    text = json.dumps(DEFAULT.spec, sort_keys=True, separators=(",", ":"))
    assert DEFAULT.id == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert replace(FULL, seed=1).spec["run"] == {
        "data": "cifar10",
        "model": {"ViTConfig": {"dim": 384, "depth": 7, "heads": 6, "classes": 10}},
        "recipe": {"batch": 256, "augment": {"cutmix": 1}},  # epochs=100 is the default
        "seed": 1,
    }


def with_field(cls: type) -> type:
    """The class as a later version might have it: of the same name, with one more field."""
    home = {"__module__": cls.__module__}
    return dataclasses.make_dataclass(cls.__name__, [("later", float, 0.5)], bases=(cls,), namespace=home, frozen=True)


def test_a_field_added_later_leaves_older_ids_alone():
    def as_later(value: object, **new: float) -> object:
        return with_field(type(value))(**{f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, **new)

    parts = {"model": FULL.model, "recipe": FULL.recipe}
    for name, part in parts.items():
        assert replace(FULL, **{name: as_later(part)}).id == FULL.id
        assert replace(FULL, **{name: as_later(part, later=0.25)}).id != FULL.id
    recipe = replace(FULL.recipe, augment=as_later(FULL.recipe.augment))
    assert replace(FULL, recipe=recipe).id == FULL.id
    assert as_later(FULL).id == FULL.id
    assert as_later(FULL, later=0.25).id != FULL.id


PINNED = {
    Run: {"recipe": Recipe(), "seed": 0, "limit": None, "shuffle": 0},
    Recipe: {
        "epochs": 100, "batch": 128, "lr": 1e-3, "warmup": 10, "min_lr": 0.0, "weight_decay": 0.05,
        "betas": (0.9, 0.999), "clip": None, "augment": Augment(),
    },
    Augment: {
        "crop": 4, "flip": True, "policy": None, "mixup": 0.0, "cutmix": 0.0, "mix_p": 1.0, "smoothing": 0.0,
        "jitter": 0.0, "per_image": False, "cut": "paste",
    },
    ViTConfig: {
        "image": 32, "patch": 4, "dim": 192, "depth": 8, "heads": 8, "mlp_ratio": 2, "classes": 100, "pool": "cls",
        "cls_token": True, "registers": 0, "drop_path": 0.0, "attention": "plain", "positions": True, "refine": False,
    },
    TimmConfig: {"image": None, "classes": 100, "options": ()},
}  # fmt: skip


@pytest.mark.parametrize("cls", PINNED)
def test_a_default_never_changes(cls: type):
    """Ids leave defaults out: with another one, an older record would stand for a run that was never made."""
    now = {f.name: f.default for f in dataclasses.fields(cls)}
    assert {name: now[name] for name in PINNED[cls]} == PINNED[cls]


def test_a_config_from_elsewhere_is_no_config_of_the_book():
    stranger = dataclasses.make_dataclass("ViTConfig", [], bases=(ViTConfig,), frozen=True)
    assert Run("cifar10", stranger()).id != DEFAULT.id


def test_one_spelling_for_numbers_and_sequences():
    assert Recipe(augment=Augment(per_image=1)) == Recipe(augment=Augment(per_image=True))
    assert len({replace(FULL, recipe=Recipe(augment=Augment(per_image=yes))).id for yes in (1, True)}) == 1
    model, recipe = ViTConfig(image=(32, 16), mlp_ratio=4), Recipe(lr=1, clip=2, betas=(0.5, 0.75))
    other = Recipe(lr=1.0, clip=2.0, betas=[0.5, 0.75])
    assert Run("svhn", model, recipe).id == Run("svhn", ViTConfig(image=[32, 16], mlp_ratio=4.0), other).id
    assert Run("svhn", ViTConfig(mlp_ratio=2.0)).id == Run("svhn", ViTConfig()).id
    assert key_of({"b": (1, 2.0), "a": {3: 1e3}}) == key_of({"a": {"3": 1000}, "b": [1.0, 2]})
    assert canonical({"x": 0.1, "y": (True, None, "z")}) == {"x": 0.1, "y": [True, None, "z"]}


def test_whatever_differs_changes_the_id():
    changes = [
        {}, {"data": "cifar100"}, {"seed": 1}, {"seed": 2}, {"limit": 100}, {"limit": 101},
        *({f"model.{k}": v} for k, v in {
            "image": 64, "patch": 8, "dim": 64, "depth": 6, "heads": 4, "mlp_ratio": 4, "classes": 10, "pool": "mean",
            "registers": 1, "drop_path": 0.1, "attention": "masked-diagonal",
        }.items()),
        {"model.pool": "mean", "model.cls_token": False},
        *({f"recipe.{k}": v} for k, v in {
            "epochs": 99, "batch": 64, "lr": 1e-4, "warmup": 5, "min_lr": 1e-5, "weight_decay": 0.1,
            "betas": (0.9, 0.95), "clip": 1.0,
        }.items()),
        *({f"recipe.augment.{k}": v} for k, v in {"crop": 0, "flip": False, "cutmix": 1, "mix_p": 0.5}.items()),
    ]  # fmt: skip
    ids = {Profile("changed", change).scale(DEFAULT).id for change in changes}
    assert len(ids) == len(changes)
    assert Run("cifar10", CNNConfig(classes=100)).id not in ids


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Run("mnist", ViTConfig()), "data='mnist' is no data set; there are cifar10, "),
        (lambda: Run("cifar10", ViTConfig), "is no model config"),
        (lambda: Run("cifar10", {"dim": 64}), "is no model config"),
        (lambda: Run("cifar10", Recipe()), "is no model config"),
        (lambda: replace(DEFAULT, seed=-1), "seed=-1"),
        (lambda: replace(DEFAULT, seed=0.5), "seed=0.5"),
        (lambda: replace(DEFAULT, limit=0), "limit=0"),
        (lambda: replace(DEFAULT, limit=10.5), "limit=10.5"),
        (lambda: Recipe(epochs=0), "epochs=0"),
        (lambda: Recipe(epochs=20.0), "epochs=20.0"),
        (lambda: Recipe(batch=0), "batch=0"),
        (lambda: Recipe(epochs=5), "epochs=5, batch=128, warmup=10"),
        (lambda: Recipe(lr=0), "lr=0"),
        (lambda: Recipe(lr=math.nan), "lr=nan"),
        (lambda: Recipe(min_lr=1), "min_lr=1"),
        (lambda: Recipe(weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: Recipe(clip=0), "clip=0"),
    ],
)
def test_a_run_that_cannot_be_is_refused_where_it_is_written(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Scales


def test_a_profile_changes_what_it_names_and_nothing_else():
    scaled = DESK.scale(FULL)
    assert scaled == Run(
        "cifar10",
        ViTConfig(dim=64, depth=6, heads=4, classes=10),
        Recipe(epochs=50, batch=64, lr=3e-3, warmup=5, augment=Augment(cutmix=1.0)),
    )
    assert PAPER.scale(FULL) == FULL
    assert SMOKE.scale(FULL).data == "shapes"
    more = DESK.with_changes(changes={"recipe.augment.cutmix": 0, "limit": 500}, seeds=[3, 4])
    assert more.seeds == (3, 4)
    assert more.name == "desk"
    assert more.scale(FULL) == replace(scaled, limit=500, recipe=replace(scaled.recipe, augment=Augment()))


def test_fields_that_only_fit_together_are_changed_together():
    both = Profile("both", {"recipe.epochs": 4, "recipe.warmup": 2})  # 4 epochs with 10 of warmup would be refused
    assert both.scale(DEFAULT).recipe == Recipe(epochs=4, warmup=2)


def test_differences_are_those_of_the_paper_in_a_table():
    profile = Profile("half", {"model.dim": 192, "model.depth": 7, "recipe.augment.cutmix": 0.5}, seeds=(0, 1))
    expected = pd.DataFrame(
        {"paper": [384, 1.0, (0, 1, 2)], "half": [192, 0.5, (0, 1)]},
        index=pd.Index(["model.dim", "recipe.augment.cutmix", "seeds"], name="field"),  # the depth is the paper's
    )
    pd.testing.assert_frame_equal(profile.differences(FULL), expected, check_dtype=False)


def test_a_profile_that_changes_nothing_shows_its_seeds_alone():
    index = pd.Index(["seeds"], name="field")
    pd.testing.assert_frame_equal(PAPER.differences(FULL), pd.DataFrame({"paper": [(0, 1, 2)]}, index=index))
    same = Profile("same", {"model.dim": 384}, seeds=(7,))  # names a field, and leaves it as it is
    pd.testing.assert_frame_equal(same.differences(FULL), pd.DataFrame({"same": [(7,)]}, index=index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.width": 3}, "changes 'width', and ViTConfig has no field 'width'; it has .*'dim'"),
        ({"epochs": 3}, "changes 'epochs', and Run has no field 'epochs'"),
        ({"data.name": "x"}, "changes 'name', and str has no field 'name'"),
        ({"model": ViTConfig(), "model.dim": 32}, "changes both 'model' and 'model.dim'"),
        ({"model.dim": 32, "model": ViTConfig()}, "changes both 'model' and 'model.dim'"),
    ],
)
def test_a_profile_that_fits_no_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Profile("odd", changes).scale(FULL)


def test_choose():
    own = Profile("smoke", seeds=(7,))
    assert choose("desk") is DESK
    assert choose("smoke") is SMOKE
    assert choose("smoke", own) is own
    with pytest.raises(ValueError, match="profile='huge' is unknown; choose one of smoke, desk, paper"):
        choose("huge")


def test_a_change_may_follow_the_papers_value_and_runs_are_one_a_seed():
    profile = Profile("third", {"recipe.epochs": lambda n: n * 3 // 10, "recipe.warmup": lambda n: n * 3 // 10}, (0, 4))
    long = Run("shapes", ViTConfig(classes=10), Recipe(epochs=200, warmup=10))
    assert [(run.recipe.epochs, run.recipe.warmup, run.seed) for run in profile.runs(long)] == [(60, 3, 0), (60, 3, 4)]
    assert profile.differences(long).loc["recipe.epochs"].tolist() == [200, 60]


@pytest.mark.parametrize(
    "fields", [{"lr": math.inf}, {"weight_decay": math.nan}, {"clip": math.nan}, {"betas": (2, 3)}]
)
def test_recipes_with_impossible_numbers_are_refused(fields):
    with pytest.raises(ValueError, match="lr and clip are positive"):
        Recipe(**fields)
