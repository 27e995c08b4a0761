"""Asking for runs: what is missing says so, and many at once come as if each had been alone."""

import os
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from tiny_runs import assert_same, put, same_tensors, tiny, undisturbed

from vitbook.runs import NotRecorded, fit, obtain, obtain_many, records
from vitbook.runs.checkpoint import progress

pytestmark = pytest.mark.usefixtures("own_world")


def test_what_is_not_recorded_says_what_would_record_it(tmp_path, no_training):
    run = tiny()
    with pytest.raises(NotRecorded, match=r"1 run is not recorded yet \(about 1 core-minutes\)") as error:
        obtain(run, train=False)
    assert "`make record CHAPTER=… PROFILE=…` with the chapter's name and desk or paper" in str(error.value)
    assert f"shapes {run.id} seed 0: ViTConfig, 3 epochs" in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_many_come_in_the_order_asked_for(no_training, capsys):
    runs = [tiny(2), tiny(0), tiny(1)]
    put(runs[0]), put(runs[2])
    with pytest.raises(NotRecorded, match=rf"1 run is .*\n  shapes {runs[1].id} seed 0"):
        obtain_many(runs, train=False)
    some = obtain_many(runs, train=False, partial=True)
    assert list(some) == [runs[0], runs[2]]
    assert f"shapes {runs[1].id} seed 0" in capsys.readouterr().out
    put(runs[1])
    found = obtain_many([*runs, runs[0]], train=False)
    assert list(found) == runs
    assert all(record.run == run for run, record in found.items())
    assert same_tensors(found[runs[2]].weights, undisturbed(tiny(1))["weights"])


BAD = tiny(0, {"model.classes": 7})


def check_many(runs: list, executor: Executor | None) -> None:
    """One run fails; the others are made all the same, as if each had been alone."""
    with pytest.raises(ValueError, match="the model has 7 classes and shapes has 10"):
        obtain_many([runs[0], BAD, *runs[1:]], executor=executor)
    for run in runs:
        assert_same(obtain(run, train=False), undisturbed(run))
    assert list(obtain_many(runs, train=False)) == runs


def test_many_in_this_process(capsys):
    check_many([tiny(0), tiny(1)], None)
    told = capsys.readouterr().err
    assert told.startswith(f"shapes {BAD.id} seed 0 failed: the model has 7 classes")
    assert len(told.splitlines()) == 1


def test_many_in_threads_share_no_draws(capsys):
    with ThreadPoolExecutor(2) as executor:
        check_many([tiny(0), tiny(1)], executor)
    told = capsys.readouterr().err
    assert "3 runs: 0 recorded, 3 missing, about 0 core-minutes left" in told
    assert f"shapes {tiny(1).id} seed 1 recorded; " in told


def test_many_in_processes(monkeypatch, tmp_path):
    """The default for runs that take long: two processes of one thread, whatever this one has."""
    runs = [tiny(0, {"recipe.epochs": 1}), tiny(1, {"recipe.epochs": 1})]
    monkeypatch.setattr(records, "CPU_RATE", 1.0)
    with pytest.raises(ValueError, match="the model has 7 classes"):
        obtain_many([BAD, *runs])
    made = [obtain(run, train=False) for run in runs]
    assert [record.provenance["threads"] for record in made] == [1, 1]
    assert [record.measures[-1]["epoch"] for record in made] == [1, 1]


def test_many_on_a_dask_cluster():
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        check_many([tiny(0), tiny(1)], client.get_executor())


class Elsewhere(Executor):
    """Workers that keep what they make to themselves."""

    def submit(self, work, /, *arguments):
        future = Future()
        future.set_result(None)
        return future


def test_workers_that_do_not_share_the_cache_are_told(no_training):
    with pytest.raises(NotRecorded, match=r"recorded by a worker, but not in .*: let VITBOOK_CACHE name one folder"):
        obtain_many([tiny()], executor=Elsewhere())


def test_progress_is_a_line_an_epoch_or_a_bar_on_a_terminal(monkeypatch, capsys):
    run = replace(tiny(), recipe=replace(tiny().recipe, epochs=6, warmup=1))
    row = {"loss": 1.25, "lr": 1e-3, "seconds": 2.0}
    report = records._progress(run)
    for epoch in range(1, 7):
        report(epoch, row)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6 and lines[3].startswith(f"shapes {run.id} seed 0  epoch 4/6  loss 1.25")
    monkeypatch.setattr(records.sys.stderr, "isatty", lambda: True, raising=False)
    report = records._progress(run)
    for epoch in range(1, 7):
        report(epoch, row)
    assert "6/6" in capsys.readouterr().err


def test_time_left_counts_what_a_checkpoint_holds(tmp_path):
    run = tiny()
    path = tmp_path / "checkpoint.safetensors"
    assert progress(path) == 0
    with pytest.raises(KeyboardInterrupt):
        fit(run, path, report=interrupt)
    assert progress(path) == 1


def interrupt(epoch: int, row: dict) -> None:
    raise KeyboardInterrupt


POOL = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from vitbook.runs.records import _one_thread
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_one_thread)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
"""


def test_a_worker_ends_with_the_process_that_asked(tmp_path):
    """However that one ends: else an orphan would train on, and hold the lock of its run."""
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        os.kill(worker, 0)  # it is there
        parent.kill()
        for _ in range(200):
            try:
                os.kill(worker, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("the worker outlived its parent")
