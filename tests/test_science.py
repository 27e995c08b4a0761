"""Shipped records are measured anew from their shipped weights: reading a stored number back proves nothing."""

import json
import os

import build
import pandas as pd
import pytest

from vitbook.data import SETS, Augment, load
from vitbook.models.adapters import TimmConfig
from vitbook.models.vit import ViTConfig
from vitbook.runs import Recipe, Run, store
from vitbook.runs.training import evaluate

MODELS = {config.__name__: config for config in (ViTConfig, TimmConfig)}


def run_of(spec: dict) -> Run:
    """The run that a record's spec describes."""
    plain = dict(spec["run"])
    ((kind, fields),) = plain.pop("model").items()
    recipe = dict(plain.pop("recipe", {}))
    recipe["augment"] = Augment(**recipe.get("augment", {}))
    return Run(model=MODELS[kind](**fields), recipe=Recipe(**recipe), **plain)


def shipped_runs() -> dict[str, dict]:
    """The specs of all shipped runs, by key."""
    entries = {path.parent.name: json.loads(path.read_text()) for path in sorted(build.RECORDS.glob("*/record.json"))}
    specs = {key: entry["content"]["spec"] for key, entry in entries.items()}
    return {key: spec for key, spec in specs.items() if isinstance(spec.get("run"), dict)}


def one_a_chapter() -> dict[str, str]:
    """For each chapter with verdicts: the first of their records that ships its weights."""
    claims, chosen = build.load_claims(build.CLAIMS), {}
    for verdict in build.recorded_verdicts():
        for key in verdict["records"]:
            if (build.RECORDS / key / "weights.safetensors").exists():
                chosen.setdefault(claims[verdict["claim"]].chapter, key)
    return chosen


def test_every_record_is_whole_and_named_by_its_run(monkeypatch, tmp_path):
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path))  # what the book ships, without what its maker has beside it
    for key, spec in shipped_runs().items():
        assert run_of(spec).id == key
        result = store.read(key)
        assert result["curves"]["epoch"][-1] == result["measures"][-1]["epoch"] == run_of(spec).recipe.epochs
        assert ("weights" in result) == (run_of(spec).seed == 0 and "heads" in result["measures"][-1])


def test_records_stay_small():
    assert sum(path.stat().st_size for path in build.RECORDS.rglob("*")) < 40e6


@pytest.mark.skipif("VITBOOK_DATA" not in os.environ, reason="needs the real images")
@pytest.mark.parametrize(("chapter", "key"), one_a_chapter().items())
def test_a_shipped_model_measures_as_recorded(chapter, key):
    run, record = run_of(shipped_runs()[key]), store.read(key)
    train = load(run.data, "train", limit=run.limit)
    test = load(run.data, SETS[run.data].splits[1])
    assert record["provenance"]["data"]["test"] == test.fingerprint
    again, recorded = evaluate(run, record["weights"], train, test), record["measures"][-1]
    assert again["accuracy"] == pytest.approx(recorded["accuracy"], abs=3 / len(test))  # a near tie may turn over
    for name in ("nll", "clean_loss"):
        assert again[name] == pytest.approx(recorded[name], rel=1e-4), name
    now, then = pd.DataFrame(again["heads"]), pd.DataFrame(recorded["heads"])
    assert list(now) == list(then) and len(now) == run.model.depth * run.model.heads
    pd.testing.assert_frame_equal(now, then, check_dtype=False, rtol=1e-3, atol=1e-4)
