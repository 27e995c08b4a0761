"""Runs that are killed, interrupted or asked for twice end as if nothing had happened, bit for bit."""

import itertools
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import CNNConfig, ask, assert_same, loss_with, same_tensors, start, tiny, undisturbed

from vitbook.runs import NonFiniteLoss, obtain, store, training
from vitbook.runs import checkpoint as checkpoints

pytestmark = pytest.mark.usefixtures("own_world")


class Interrupted(Exception):
    pass


def stop_after(epoch: int):
    def report(now: int, row: dict) -> None:
        if now == epoch:
            raise Interrupted

    return report


def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path):
    run, cache = tiny(), tmp_path / "cache"
    places = [("step", 3), ("checkpoint half", 1), ("checkpoint before", 1), ("checkpoint after", 1), ("step", 5)]
    places += [("checkpoint half", 2), ("record half", 1), ("record half", 2), ("record before", 1)]
    for place in places:
        child = start(ask, cache, run, place)
        child.join(300)
        assert child.exitcode == -signal.SIGKILL, place
        assert store.find(run.id) is None, place
    assert all(left.name.startswith(".new-") for left in (cache / "records").iterdir())
    record = obtain(run)
    assert_same(record, undisturbed(run))
    assert record.provenance["starts"] == 4  # three left an epoch each; this one loaded what was left
    assert not list(cache.glob("checkpoints/*"))


def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path):
    run, cache, moments = tiny(1, {"recipe.epochs": 9}), tmp_path / "cache", random.Random(0)
    killed = 0
    for _ in range(3):
        child = start(ask, cache, run)
        checkpoint = cache / "checkpoints" / f"{run.id}.safetensors"
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while child.is_alive() and (checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0) == before:
            time.sleep(0.001)  # until this one has come at least an epoch further
        time.sleep(moments.uniform(0, 0.1))
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
    assert killed >= 2
    assert_same(obtain(run), undisturbed(run))


def test_killed_after_the_record_is_in_place_it_is_there_and_the_checkpoint_goes(tmp_path):
    run, cache = tiny(), tmp_path / "cache"
    child = start(ask, cache, run, ("record after", 1))
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    assert list(cache.glob("checkpoints/*"))
    assert obtain(run, train=False).run == run
    assert not list(cache.glob("checkpoints/*"))


def test_the_second_to_ask_waits_and_then_loads(tmp_path):
    run, cache = tiny(), tmp_path / "cache"
    with store.lock(run.id):
        child = start(ask, cache, run)
        told = cache / f"{child.pid}.err"
        while child.is_alive() and not (told.exists() and told.read_text()):
            time.sleep(0.01)
        assert told.read_text() == f"record {run.id}: another process is making it; waiting\n"
        store.write(run.spec, training.fit(run))
    child.join(300)
    assert child.exitcode == 0
    assert not (cache / "trained.log").exists()  # the child has trained nothing


def test_of_two_that_start_at_once_one_trains(tmp_path):
    run, cache = tiny(), tmp_path / "cache"
    children = [start(ask, cache, run) for _ in range(2)]
    for child in children:
        child.join(300)
    assert [child.exitcode for child in children] == [0, 0]
    assert len((cache / "trained.log").read_text().split()) == 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_resumed_in_any_precision_it_ends_with_the_same_bits(tmp_path, monkeypatch, precision):
    run, checkpoint = tiny(1), tmp_path / "c.safetensors"
    monkeypatch.setattr(training, "precision", lambda device: precision)
    whole = training.fit(run)
    with pytest.raises(Interrupted):
        training.fit(run, checkpoint, report=stop_after(2))
    monkeypatch.setattr(training, "precision", lambda device: "bf16")  # another machine: the checkpoint's counts
    resumed = training.fit(run, checkpoint)
    assert same_tensors(resumed["weights"], whole["weights"])
    assert resumed["measures"] == whole["measures"]
    assert resumed["provenance"]["precision"] == precision


def test_the_number_of_threads_comes_from_the_checkpoint_and_does_not_stay(tmp_path, monkeypatch):
    run, checkpoint, told = tiny(), tmp_path / "c.safetensors", []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(Interrupted):
        training.fit(run, checkpoint, report=stop_after(2))
    assert told == [3, 3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    result = training.fit(run, checkpoint)
    assert told == [3, 3, 3, 5]
    assert result["provenance"]["threads"] == 3
    assert result["provenance"]["starts"] == 2


def test_a_finished_checkpoint_is_not_trained_again(tmp_path, monkeypatch):
    run, checkpoint = tiny(), tmp_path / "c.safetensors"
    training.fit(run, checkpoint)
    monkeypatch.setattr(training, "learning_rate", None)  # a step would call it
    again = training.fit(run, checkpoint)
    assert same_tensors(again["weights"], undisturbed(run)["weights"])
    assert again["curves"]["loss"] == undisturbed(run)["curves"]["loss"]
    assert again["measures"] == undisturbed(run)["measures"]


def test_the_warmup_of_a_batch_norm_is_kept_whole_numbers_included(tmp_path):
    run, checkpoint = tiny(0, {}), tmp_path / "c.safetensors"
    run = type(run)("shapes", CNNConfig(), run.recipe, limit=128)
    whole = undisturbed(run)
    assert whole["warmup"]["1.num_batches_tracked"] == 4  # one epoch of four steps
    assert whole["weights"]["1.num_batches_tracked"] == 12
    with pytest.raises(Interrupted):
        training.fit(run, checkpoint, report=stop_after(2))
    resumed = training.fit(run, checkpoint)
    assert same_tensors(resumed["warmup"], whole["warmup"])
    assert same_tensors(resumed["weights"], whole["weights"])


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    run, checkpoint = tiny(), tmp_path / "c.safetensors"
    rate = training.learning_rate(run, 6, 4)
    with monkeypatch.context() as patch:
        patch.setattr(training, "F", loss_with(lambda n, loss: loss * float("nan") if n >= 7 else loss))
        with pytest.raises(NonFiniteLoss) as error:
            training.fit(run, checkpoint)
    told = str(error.value)
    assert f"{run.id} seed 0: the loss was nan in epoch 2, step 3 of 4, at learning rate {rate:.3g}." in told
    assert f"The last good checkpoint is kept at {checkpoint}." in told
    resumed = training.fit(run, checkpoint)
    assert same_tensors(resumed["weights"], undisturbed(run)["weights"])
    assert resumed["curves"]["epoch"] == [1, 2, 3]


def test_a_loss_that_is_not_finite_in_the_first_epoch_leaves_no_checkpoint_and_promises_none(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "F", loss_with(lambda n, loss: loss * float("inf")))
    with pytest.raises(NonFiniteLoss, match=r"the loss was inf in epoch 1, step 1 of 4") as error:
        training.fit(tiny(), tmp_path / "c.safetensors")
    assert "checkpoint" not in str(error.value)
    assert not list(tmp_path.glob("*.safetensors"))


def test_weights_that_a_record_could_not_hold_stop_the_run_though_every_loss_is_finite(tmp_path):
    run = tiny(0, {"recipe.epochs": 2, "recipe.warmup": 0, "recipe.batch": 128, "recipe.lr": 1e6, "recipe.min_lr": 1e6})
    with pytest.raises(
        NonFiniteLoss, match=r"weights left the range of half precision in epoch 1, step 1 of 1, .*1e\+06"
    ):
        training.fit(run, tmp_path / "c.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))


def garble(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:-50])
    return "no readable checkpoint"


def pickle(file: Path) -> str:
    torch.save({"model/head.weight": torch.zeros(3)}, file)
    return "no readable checkpoint"


def empty(file: Path) -> str:
    file.write_bytes(b"")
    return "no readable checkpoint"


def other_run(file: Path) -> str:
    with pytest.raises(Interrupted):
        training.fit(tiny(5), file.with_name("other"), report=stop_after(1))
    file.with_name("other").replace(file)
    return f"is the checkpoint of run {tiny(5).id}, not of {tiny().id}"


def other_format(file: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(checkpoints, "CHECKPOINT_FORMAT", 9)
        training.fit(tiny(), file.with_name("other"), report=stop_after(1))
    file.with_name("other").replace(file)
    return "has checkpoint format 9, not 1"


@pytest.mark.parametrize("spoil", [garble, pickle, empty, other_run, other_format])
def test_a_checkpoint_that_is_not_this_runs_is_refused_and_left_alone(tmp_path, monkeypatch, spoil):
    run, file = tiny(), tmp_path / "cache" / "checkpoints" / f"{tiny().id}.safetensors"
    with pytest.raises(Interrupted):
        training.fit(run, file, report=stop_after(1))
    message, before = spoil(file), file.read_bytes()
    monkeypatch.setattr(training, "learning_rate", None)  # a step would call it
    with pytest.raises(ValueError, match=message):
        obtain(run)
    assert file.read_bytes() == before
    assert store.find(run.id) is None


def test_a_checkpoint_that_cannot_be_written_does_not_stop_the_training(tmp_path, monkeypatch, capsys):
    run, checkpoint, calls = tiny(), tmp_path / "c.safetensors", itertools.count(1)
    whole = checkpoints.save_file

    def sometimes(*arguments):
        if next(calls) in (2, 3):
            raise checkpoints.SafetensorError("I/O error: No space left on device (os error 28)")
        whole(*arguments)

    monkeypatch.setattr(checkpoints, "save_file", sometimes)
    result = training.fit(run, checkpoint)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in told] == [
        f"shapes {run.id} seed 0: no checkpoint after epoch {n}" for n in (2, 3)
    ]
    assert same_tensors(result["weights"], undisturbed(run)["weights"])
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_an_unwritable_place_for_checkpoints_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(training, "evaluate", None)  # the first work would call it
    with pytest.raises(OSError, match="file"):
        training.fit(tiny(), tmp_path / "file" / "c.safetensors")
