"""The training loop against formulas, and what it leaves."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import CNNConfig, loss_with, same_tensors, tiny, undisturbed
from torch.nn import functional as F

from vitbook.data import load
from vitbook.measures.heads import measure_heads
from vitbook.models.vit import ViTConfig
from vitbook.runs import Recipe, Run, obtain, training
from vitbook.runs.training import fit, learning_rate, precision

pytestmark = pytest.mark.usefixtures("own_world")


def test_learning_rate_rises_in_a_line_and_falls_as_a_cosine():
    run = Run("shapes", ViTConfig(), Recipe(epochs=4, warmup=2, lr=0.8, min_lr=0.2))
    rates = [learning_rate(run, step, 5) for step in range(20)]
    assert rates[:10] == pytest.approx([0.08 * n for n in range(1, 11)])
    assert rates[10] == pytest.approx(0.8)
    assert rates[10:] == pytest.approx([0.5 + 0.3 * math.cos(math.pi * n / 10) for n in range(10)])
    assert rates[15] == pytest.approx(0.5)
    assert learning_rate(run, 20, 5) == pytest.approx(0.2)
    no_warmup, all_warmup = (replace(run, recipe=replace(run.recipe, warmup=w)) for w in (0, 4))
    assert learning_rate(no_warmup, 0, 5) == pytest.approx(0.8)
    assert [learning_rate(all_warmup, n, 5) for n in (0, 19)] == pytest.approx([0.04, 0.8])


def saved(checkpoint: Path, prefix: str = "model/") -> dict[str, torch.Tensor]:
    """The float32 weights (or another part) of a checkpoint."""
    return {k.removeprefix(prefix): v for k, v in load_file(checkpoint).items() if k.startswith(prefix)}


def start_of(run: Run) -> torch.nn.Module:
    """The model before its first step, by the rule that (seed, epoch 0) makes it."""
    torch.manual_seed(run.seed * 1_000_003)
    return run.model.build()


def test_weight_decay_shrinks_matrices_only(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "F", loss_with(lambda n, loss: 0 * loss))  # no gradient: the decay alone is left
    run = tiny(
        0,
        {
            "recipe.epochs": 1, "recipe.warmup": 0, "recipe.batch": 128, "recipe.lr": 0.5, "recipe.weight_decay": 0.5,
            "model.registers": 2,
        },
    )  # fmt: skip
    before = {k: v.clone() for k, v in start_of(run).state_dict().items()}
    fit(run, tmp_path / "c.safetensors")
    after = saved(tmp_path / "c.safetensors")
    layers = [f"blocks.{i}.{name}" for i in range(2) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    decayed = {f"{name}.weight" for name in ("patch_embed.proj", "head", *layers)}
    assert {"cls_token", "reg_token", "pos_embed", "norm.weight", "head.bias"} <= before.keys() - decayed
    for name, value in before.items():
        assert torch.equal(after[name], 0.75 * value if name in decayed else value), name


def adamw_by_hand(run: Run) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Loshchilov & Hutter 2019, algorithm 2, on the last epoch's weights and the mean loss of each epoch."""
    r, data = run.recipe, load("shapes", "train", limit=run.limit)
    model, steps = start_of(run), len(data) // r.batch
    m, v = ({k: torch.zeros_like(p) for k, p in model.named_parameters()} for _ in range(2))
    t, losses = 0, []
    model.train()
    for epoch in range(1, r.epochs + 1):
        torch.manual_seed(run.seed * 1_000_003 + epoch)
        total = 0.0
        for images, targets in r.augment.epoch(data, r.batch):
            lr, t = learning_rate(run, t, steps), t + 1
            loss = -(targets * model(images).log_softmax(-1)).sum(-1).mean()
            names, parameters = zip(*model.named_parameters(), strict=True)
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            scale = min(1.0, r.clip / (norm.item() + 1e-6)) if r.clip else 1.0
            for name, p, g in zip(names, parameters, gradients, strict=True):
                g = scale * g  # noqa: PLW2901
                m[name] = r.betas[0] * m[name] + (1 - r.betas[0]) * g
                v[name] = r.betas[1] * v[name] + (1 - r.betas[1]) * g**2
                m_hat, v_hat = m[name] / (1 - r.betas[0] ** t), v[name] / (1 - r.betas[1] ** t)
                decay = r.weight_decay if p.ndim > 1 and name not in ("cls_token", "pos_embed") else 0.0
                with torch.no_grad():
                    p.sub_(lr * (m_hat / (v_hat.sqrt() + 1e-8) + decay * p))
            total += loss.item()
        losses.append(total / steps)
    return model.state_dict(), losses


@pytest.mark.parametrize("clip", [None, 0.3])
def test_training_is_adamw_as_written_down(tmp_path, monkeypatch, clip):
    """Three steps an epoch of 32 of the 100 images: the last four are dropped."""
    monkeypatch.setattr(training, "precision", lambda device: "fp32")
    run = tiny(
        3,
        {
            "limit": 100, "recipe.epochs": 2, "recipe.clip": clip, "recipe.weight_decay": 0.1,
            "recipe.betas": (0.8, 0.95), "recipe.min_lr": 1e-3,
        },
    )  # fmt: skip
    result = fit(run, tmp_path / "c.safetensors")
    ours = saved(tmp_path / "c.safetensors")
    by_hand, losses = adamw_by_hand(run)
    for name, value in by_hand.items():
        if name.endswith("qkv.bias"):  # a key's bias has no gradient but rounding, which Adam's division blows up
            dim = run.model.dim
            value, ours[name] = (torch.cat([x[:dim], x[2 * dim :]]) for x in (value, ours[name]))  # noqa: PLW2901
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    assert result["curves"]["loss"] == pytest.approx(losses, rel=1e-5)
    assert result["curves"]["lr"] == pytest.approx([3e-3, learning_rate(run, 5, 3)], rel=1e-5)
    assert saved(tmp_path / "c.safetensors", "optimizer/head.bias/")["step"] == 6


def test_milestones_and_the_warmup_of_seed_0():
    run = tiny(0, {"recipe.epochs": 7})
    result = undisturbed(run)
    assert [row["epoch"] for row in result["measures"]] == [0, 1, 2, 3, 5, 7]
    assert result["curves"]["epoch"] == [1, 2, 3, 4, 5, 6, 7]
    # the rate of the warmup does not depend on what follows, so a run that ends there ends with those weights
    assert same_tensors(result["warmup"], undisturbed(tiny(0, {"recipe.epochs": 1}))["weights"])
    assert not same_tensors(result["warmup"], result["weights"])
    assert "warmup" not in undisturbed(tiny(1))
    assert "warmup" not in undisturbed(tiny(0, {"recipe.epochs": 1, "recipe.warmup": 0}))


def test_milestones_of_a_long_run(monkeypatch):
    monkeypatch.setattr(training, "evaluate", lambda *_: {"accuracy": 0.0})
    run = tiny(0, {"limit": 1, "recipe.batch": 1, "recipe.epochs": 101, "recipe.augment.cutmix": 0})
    epochs = [row["epoch"] for row in fit(run)["measures"]]
    assert epochs == [0, 1, 2, 3, 5, 8, 10, 15, 20, 30, 40, 50, 60, 80, 100, 101]


def test_what_is_recorded_was_measured_on_the_rounded_weights():
    run = tiny(0, {"recipe.lr": 0.02})
    record = obtain(run)
    assert {v.dtype for v in record.weights.values()} == {torch.float16}
    model, test, train = record.model(), load("shapes", "test"), load("shapes", "train", limit=128)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        logits, clean = model(test.normalise(test.images)), model(train.normalise(train.images))
    last = record.measures[-1]
    right = (logits.argmax(1) == test.labels).sum().item()
    assert right > 60  # it has learnt: chance is 50
    assert record.accuracy == last["accuracy"] == pytest.approx(right / 500, rel=1e-7)
    assert last["nll"] == pytest.approx(F.cross_entropy(logits, test.labels).item(), rel=1e-5)
    assert last["clean_loss"] == pytest.approx(F.cross_entropy(clean, train.labels).item(), rel=1e-5)
    again = measure_heads(model, test.normalise(test.images))
    pd.testing.assert_frame_equal(record.heads(), again, rtol=1e-5)
    assert not record.heads(0).distance.equals(record.heads().distance)
    with pytest.raises(ValueError, match="nothing was measured at epoch 9; there are 0, 1, 2, 3"):
        record.heads(9)
    px, largest = record.heads(unit="px"), record.heads(unit="max")  # patches of 8 px, 4 × 4 of them
    for name in ("distance", "distance_se", "leaky"):
        assert np.allclose(px[name], 8 * again[name], rtol=1e-5)
        assert np.allclose(largest[name], again[name] / (3 * 2**0.5), rtol=1e-5)
    pd.testing.assert_series_equal(px.entropy, record.heads().entropy)
    early = record.model(at="warmup").state_dict()
    assert all(torch.equal(early[k], v.float()) for k, v in record.warmup.items())


def test_head_tables_keep_their_types_without_cls():
    record = obtain(tiny(0, {"model.pool": "mean", "model.cls_token": False, "recipe.epochs": 1}))
    table = record.heads()
    assert table.cls_entropy.isna().all()
    assert (table.cls == 0).all()
    assert table.dtypes.astype(str).to_dict() == {
        c: "int64" if c in ("layer", "head") else "float64" for c in table.columns
    }


def test_a_model_without_heads_has_a_record_all_the_same():
    run = Run("shapes", CNNConfig((4, 8)), Recipe(epochs=1, batch=32, warmup=0), limit=64)
    record = obtain(run)
    assert record.measures[-1].keys() == {"epoch", "accuracy", "nll", "clean_loss"}
    assert record.model()[1].num_batches_tracked == 2
    with pytest.raises(ValueError, match=f"shapes {run.id} seed 0 has no attention heads: its model is a CNNConfig"):
        record.heads()


def test_training_leaves_the_callers_draws_alone(tmp_path):
    run = tiny(0, {"recipe.epochs": 1})
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    obtain(run).model()
    assert torch.equal(torch.rand(3), expected)


@dataclass(frozen=True)
class Seven(CNNConfig):
    classes: int = 7


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run("shapes", Seven(), limit=128), "the model has 7 classes and shapes has 10; set model.classes to that"),
        (tiny(0, {"recipe.batch": 129}), "batch=129 is larger than the 128 training images; lower it"),
        (tiny(0, {"model.image": 16}), "do not fit"),
        (tiny(0, {"limit": 2_001}), "limit 2001 is more than the 2000 images"),
    ],
)
def test_a_run_that_does_not_fit_its_data_is_refused_and_leaves_nothing(tmp_path, run, message):
    with pytest.raises(ValueError, match=message):
        obtain(run)
    assert not list((tmp_path / "cache" / "records").iterdir())
    assert not list((tmp_path / "cache").glob("checkpoints/*"))


def test_provenance_without_git(monkeypatch):
    def no_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(training, "subprocess", SimpleNamespace(run=no_git))
    made = fit(tiny(0, {"recipe.epochs": 1}))["provenance"]
    assert made["commit"] is made["modified"] is None
    assert made["data"]["train"] == load("shapes", "train").fingerprint
    assert made["data"]["images"] == 128
    assert made["threads"] == made["starts"] == 1
    assert made["versions"]["torch"] == torch.__version__.partition("+")[0]


@pytest.mark.parametrize(("fp32", "bf16", "expected"), [(3.0, 1.9, "bf16"), (3.0, 2.1, "fp32")])
def test_precision_of_a_cpu_is_bf16_where_it_pays(monkeypatch, fp32, bf16, expected):
    now = iter([t for length in (fp32, bf16) for n in range(8) for t in (10.0 * n, 10.0 * n + length)])
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    assert precision.__wrapped__("cpu") == expected


def test_precision_of_accelerators(monkeypatch):
    for able, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, able=able: able)
        assert precision.__wrapped__("cuda") == expected
    assert precision.__wrapped__("mps") == "fp32"
    assert precision("cpu") in ("bf16", "fp32")
