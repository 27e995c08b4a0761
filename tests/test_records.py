"""The record store: what is damaged, half-written, not writable, published or remembered."""

import contextlib
import errno
import hashlib
import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny_runs import CNNConfig, ask, assert_same, put, same_tensors, start, tiny, undisturbed

from vitbook.runs import DamagedRecord, obtain, obtain_many, records, remember, store, training

pytestmark = pytest.mark.usefixtures("own_world")


# Damage


def truncated(folder: Path) -> str:
    text = (folder / "record.json").read_text()
    (folder / "record.json").write_text(text[: len(text) // 2])
    return r"record\.json is damaged or half-written"


def no_json(folder: Path) -> str:
    (folder / "record.json").unlink()
    return r"record\.json is damaged or half-written"


def a_list(folder: Path) -> str:
    (folder / "record.json").write_text("[]")
    return r"record\.json is damaged or half-written"


def not_text(folder: Path) -> str:
    (folder / "record.json").write_bytes(b"\xff\xfe{}")
    return r"record\.json is damaged or half-written"


def digit(folder: Path) -> str:
    text = (folder / "record.json").read_text()
    place = text.index('"nll": ') + 9
    (folder / "record.json").write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :])
    return r"record\.json is not what was written: its checksum"


def no_weights(folder: Path) -> str:
    (folder / "weights.safetensors").unlink()
    return r"weights\.safetensors cannot be read"


def bit(folder: Path) -> str:
    content = bytearray((folder / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(content)
    return r"weights\.safetensors is not what was written: its checksum"


def pickled(folder: Path) -> str:
    torch.save({"head.weight": torch.zeros(3)}, folder / "weights.safetensors")
    return r"weights\.safetensors is not what was written: its checksum"


def pickled_and_signed(folder: Path) -> str:
    pickled(folder)
    entry = json.loads((folder / "record.json").read_text())
    digest = hashlib.sha256((folder / "weights.safetensors").read_bytes()).hexdigest()
    entry["content"]["files"]["weights"] = digest
    entry["sha256"] = store._digest(entry["content"])
    (folder / "record.json").write_text(json.dumps(entry))
    return r"weights\.safetensors cannot be read"


def later_format(folder: Path) -> str:
    (folder / "record.json").write_text('{"format": 2, "elsewhere": {}}')
    return r"record\.json has format 2, this vitbook reads 1; update vitbook"


def other_spec(folder: Path) -> str:
    shutil.rmtree(folder)
    put(tiny(1)).rename(folder)
    return r"record\.json is not what was written: .* its spec does not fit"


def a_file(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.touch()
    return r"record\.json is damaged or half-written"


DAMAGES = [
    truncated, no_json, a_list, not_text, digit, no_weights, bit, pickled, pickled_and_signed, later_format, other_spec,
    a_file,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused_by_file_and_nothing_is_trained(no_training, damage):
    run = tiny()
    folder = put(run)
    assert_same(obtain(run), undisturbed(run))
    message = damage(folder)
    for train in (True, False):
        with pytest.raises(DamagedRecord, match=message) as error:
            obtain(run, train=train)
        assert f"delete the folder {folder} and record again" in str(error.value)


def test_a_half_written_folder_is_no_record():
    run = tiny()
    half = put(run).rename(store.cache() / "records" / ".new-abc")
    assert store.find(run.id) is None
    assert_same(obtain(run), undisturbed(run))
    assert half.exists()  # somebody may be writing it


# Places that cannot be written


def test_a_cache_that_is_not_writable_is_refused_before_any_work(tmp_path, monkeypatch, no_training):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cache .*/file/cache is not writable .*nothing was computed. Set VITBOOK_CACHE"):
        obtain(tiny())

    def denied(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store.tempfile, "TemporaryFile", denied)
    with pytest.raises(OSError, match=r"not writable \(Permission denied\)"):
        obtain(tiny())


def test_a_shipped_record_needs_no_cache(tmp_path, monkeypatch, no_training):
    run = tiny()
    store.write(run.spec, undisturbed(run), store.shipped())
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path / "file" / "cache"))
    assert_same(obtain(run), undisturbed(run))
    assert list(obtain_many([run], train=False)) == [run]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def full_for_safetensors(*_: object) -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(store, "save_file", full), (store, "save_file", full_for_safetensors), (Path, "write_text", full)],
)
def test_a_disk_that_is_full_while_recording_costs_no_training(tmp_path, monkeypatch, owner, name, fault):
    run = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault)
        with pytest.raises(OSError, match=rf"the record .*{run.id} could not be written .*No space.*Free space"):
            obtain(run)
    assert not list((tmp_path / "cache" / "records").iterdir())
    monkeypatch.setattr(training, "learning_rate", None)  # a step would call it
    assert_same(obtain(run), undisturbed(run))
    assert not list((tmp_path / "cache" / "checkpoints").iterdir())


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_real_full_disk(tmp_path, monkeypatch):
    run, disk = tiny(), tmp_path / "disk"
    with small_disk(disk):
        monkeypatch.setenv("VITBOOK_CACHE", str(disk))

        def fill(epoch: int, row: dict) -> None:
            if epoch == 3:
                with contextlib.suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass

        with monkeypatch.context() as patch:
            patch.setattr(records, "_progress", lambda run: fill)
            with pytest.raises(OSError, match="could not be written"):
                obtain(run)
        (disk / "ballast").unlink()
        monkeypatch.setattr(training, "learning_rate", None)  # a step would call it
        assert_same(obtain(run), undisturbed(run))


def ask_with_small_files(cache: Path, run) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, 4_096))  # no file larger than that can be written
    with contextlib.suppress(OSError):
        ask(cache, run)


def test_a_system_that_refuses_every_large_file(tmp_path):
    run, cache = tiny(), tmp_path / "cache"
    child = start(ask_with_small_files, cache, run)
    child.join(300)
    told = (cache / f"{child.pid}.err").read_text()
    assert [f"no checkpoint after epoch {n} " in told for n in (1, 2, 3, 4)] == [True, True, True, False]
    assert child.exitcode == 0
    assert store.find(run.id) is None
    assert not [p for p in (cache / "records").iterdir() if p.name.startswith(".new")]


# Publishing and remembering


def test_publishing_ships_the_final_weights_of_seed_0_and_the_measures_of_all(monkeypatch, no_training):
    first, second, spec = tiny(0), tiny(1), {"probe": "positions", "version": 1}
    headless = replace(first, model=CNNConfig())
    put(first), put(second), put(headless)
    both = obtain_many([first, second])
    assert not store.shipped().exists()  # nobody asked for it
    monkeypatch.setenv("VITBOOK_PUBLISH", "1")
    for _ in range(2):
        assert obtain(first, train=False).measures == both[first].measures
        obtain_many([second, headless])
        remember(spec, lambda: {"score": 0.5, "table": {"x": torch.arange(3)}})
    monkeypatch.delenv("VITBOOK_PUBLISH")
    assert_same(obtain(second, train=False), undisturbed(second))  # who trained it has its weights
    shutil.rmtree(store.cache() / "records")
    shipped = obtain_many([first, second, headless], train=False)
    assert_same(shipped[first], {name: part for name, part in undisturbed(first).items() if name != "warmup"})
    assert shipped[second].weights is shipped[second].warmup is shipped[headless].weights is None
    with pytest.raises(ValueError, match=f"the warmup of shapes {first.id} seed 0 are not kept here"):
        shipped[first].model(at="warmup")
    assert shipped[second].measures == undisturbed(second)["measures"]
    with pytest.raises(ValueError, match=f"the weights of shapes {second.id} seed 1 are not kept here"):
        shipped[second].model()
    assert torch.equal(remember(spec, dict, make=False)["table"]["x"], torch.arange(3))
    assert {p.name for p in store.shipped().iterdir()} == {first.id, second.id, headless.id, store.key_of(spec)}


def test_remember_computes_once_and_gives_back_what_it_was_given():
    whole = torch.arange(6, dtype=torch.float32)
    tensors = {
        "half": torch.tensor([0.1, 65504.0]).half(), "brain": torch.tensor([0.1]).bfloat16(), "yes": whole > 2,
        "view": whole[1:3], "same view": whole[1:3], "turned": whole.view(2, 3).T, "one": torch.tensor(7),
    }  # fmt: skip
    plain = {"score": 0.1, "whole": 2.0, "none": None, "rows": [{"é": 1e-9}, {}], "pair": (True, "x")}
    calls = []

    def compute() -> dict:
        calls.append(1)
        return plain | {"maps": tensors}

    spec = {"measure": "m", "version": 1}
    assert remember(spec, compute, make=False) is None
    first, again = remember(spec, compute), remember(spec, compute)
    assert len(calls) == 1
    for result in (first, again):
        assert same_tensors(result.pop("maps"), tensors)
        assert result == plain | {"pair": [True, "x"]}
    remember(spec | {"version": 2}, compute)
    assert len(calls) == 2
    assert remember({"version": 1.0, "measure": "m"}, compute)["score"] == 0.1
    assert len(calls) == 2


@pytest.mark.parametrize("spec", [{"x": torch.zeros(1)}, {"x": {1, 2}}, {"x": Path("p")}, {"x": float("nan")}])
def test_a_spec_that_is_no_plain_data_is_refused_before_the_work(spec):
    with pytest.raises(ValueError, match=r"no plain data|not JSON compliant"):
        remember(spec, pytest.fail)
    assert not store.cache().exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_with_a_number_that_json_has_not_is_refused(value):
    spec = {"measure": "m"}
    with pytest.raises(ValueError, match=r"the result for \{'measure': 'm'\} holds NaN or an infinite number"):
        remember(spec, lambda: {"rows": [{"x": value}]})
    assert not list((store.cache() / "records").iterdir())
    assert remember(spec, lambda: {"rows": [{"x": None}]}) == {"rows": [{"x": None}]}


def test_a_key_that_nobody_recorded():
    with pytest.raises(KeyError, match="no record 0123456789ab"):
        store.read("0123456789ab")
