"""The record store: what a computation left, found again by what it was asked.

An entry is a folder named by the key of its spec, ``KEY/record.json`` and, for tensors, one ``NAME.safetensors``
each. It is written beside its place and renamed into it, so that it is there whole or not at all, and never changed.
Entries shipped with the book are looked up first, then the user's cache, where new ones go.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitbook.runs.spec import canonical, key_of

FORMAT = 1


class DamagedRecord(RuntimeError):
    """A record folder that is not what was written."""


def cache() -> Path:
    """The user's folder for new records, checkpoints and locks: ``VITBOOK_CACHE``, or the system's cache folder."""
    return Path(os.environ.get("VITBOOK_CACHE") or platformdirs.user_cache_dir("vitbook"))


def shipped() -> Path:
    """The records that come with the book."""
    return Path(__file__).parents[2] / "book" / "records"


def find(key: str) -> Path | None:
    """The folder of an entry, or None."""
    return next((f / key for f in (shipped(), cache() / "records") if (f / key).exists()), None)


def remember(spec: dict, compute: Callable[[], dict], *, make: bool = True) -> dict | None:
    """What ``compute()`` gave for ``spec``: from the store, or computed now and kept. None if it is absent and
    ``make`` is false.

    ``spec`` says all that the result depends on, as plain data, with a ``version`` to raise when the computation
    changes, such as ``{"run": run.id, "measure": "patch locality", "version": 1}``. ``compute`` returns plain data
    (numbers, text, lists, dictionaries), and under some of its names dictionaries of tensors. Two processes that ask
    for one entry: the second waits and then loads it.
    """
    key = key_of(spec)
    if find(key) is None:
        if not make:
            return None
        with lock(key):
            if find(key) is None:
                write(spec, compute())
    publish(key)
    return read(key)


def read(key: str) -> dict:
    """The entry of that key; :class:`DamagedRecord` names the file that is not as it was written.

    The book ships few weights, and who trained a run has them all: they are added from the cache where its entry says
    the same as the shipped one.
    """
    folder = find(key)
    if folder is None:
        raise KeyError(f"no record {key}; looked in {shipped()} and {cache() / 'records'}")
    content = _content(folder, key)
    result = content["result"] | _tensors(folder, content)
    own = cache() / "records" / key
    if own != folder and own.exists():
        with contextlib.suppress(DamagedRecord):
            kept = _content(own, key)
            if {**kept["result"], "provenance": 0} == {**content["result"], "provenance": 0}:
                result = _tensors(own, kept) | result
    return result


def _content(folder: Path, key: str) -> dict:
    """What ``record.json`` of an entry holds, checked."""
    path = folder / "record.json"
    remedy = f"delete the folder {folder} and record again"
    try:
        entry = json.loads(path.read_text("utf-8"))
        found = entry["format"]
        content = entry["content"] if found == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedRecord(f"{path} is damaged or half-written ({error}); {remedy}") from error
    if found != FORMAT:
        raise DamagedRecord(f"{path} has format {found}, this vitbook reads {FORMAT}; update vitbook, or {remedy}")
    if entry.get("sha256") != _digest(content) or key_of(content["spec"]) != key:
        raise DamagedRecord(f"{path} is not what was written: its checksum or its spec does not fit; {remedy}")
    return content


def _tensors(folder: Path, content: dict) -> dict[str, dict[str, Tensor]]:
    """The groups of tensors beside an entry's ``record.json``, each checked."""
    result, remedy = {}, f"delete the folder {folder} and record again"
    for name, digest in content["files"].items():
        file = folder / f"{name}.safetensors"
        try:
            if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise DamagedRecord(f"{file} is not what was written: its checksum does not fit; {remedy}")
            result[name] = load_file(file)
        except (OSError, SafetensorError) as error:
            raise DamagedRecord(f"{file} cannot be read ({error}); {remedy}") from error
    return result


def write(spec: dict, result: dict, root: Path | None = None) -> Path:
    """Puts an entry into the cache, or into the store at ``root``, in one step."""
    root = root or cache() / "records"
    root.mkdir(parents=True, exist_ok=True)
    tensors = {
        k: v for k, v in result.items() if isinstance(v, dict) and v and all(isinstance(t, Tensor) for t in v.values())
    }
    place = root / key_of(spec)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        files = {}
        for name, group in tensors.items():
            file = scratch / f"{name}.safetensors"
            save_file({k: t.detach().cpu().contiguous().clone() for k, t in group.items()}, file)
            files[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        plain = {k: v for k, v in result.items() if k not in tensors}
        content = {"spec": canonical(spec), "result": canonical(plain), "files": files}
        entry = {"format": FORMAT, "sha256": _digest(content), "content": content}
        try:
            text = json.dumps(entry, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"the result for {content['spec']} holds NaN or an infinite number, which no record keeps; "
                "give None where a number is missing"
            ) from error
        (scratch / "record.json").write_text(text, "utf-8")
        scratch.chmod(0o755)  # mkdtemp's folders are private
        with contextlib.suppress(OSError):  # somebody else wrote the same entry meanwhile: theirs stays
            os.replace(scratch, place)
        if not place.exists():
            raise OSError(f"{place} could not be put in place")
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk by an error of its own
        raise OSError(
            f"the record {place} could not be written ({error}); nothing half-written is left. "
            "Free space or make the folder writable, and ask again"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def recording() -> bool:
    """Whether ``make record`` runs this page (``VITBOOK_PUBLISH=1``), with or without training: it may then measure
    what is trained, for weights of other seeds than 0 stay on the machine that trained them."""
    return os.environ.get("VITBOOK_PUBLISH") == "1"


def publish(key: str) -> None:
    """Copies a finished entry of the cache into the book, when ``make record`` asks for it.

    To stay small, the book carries final weights only, of seed 0, and none of models without attention, which no page
    looks into; every measure goes along.
    """
    if not recording() or (shipped() / key).exists():
        return
    result, content = read(key), _content(find(key), key)
    run = content["spec"].get("run")
    if isinstance(run, dict):
        wanted = not run.get("seed", 0) and "heads" in result["measures"][-1]
        along = ("weights",) if wanted else ()
        result = {name: part for name, part in result.items() if name not in content["files"] or name in along}
    write(content["spec"], result, shipped())


@contextlib.contextmanager
def lock(key: str) -> Iterator[None]:
    """Held while an entry is made. Says so when another process holds it, and waits. The folder must be writable:
    checked here, before any work."""
    folder = cache() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (cache() / "records").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache() / "records"):
            pass
        guard = FileLock(folder / f"{key}.lock")
        try:
            guard.acquire(timeout=0)
        except Timeout:
            print(f"record {key}: another process is making it; waiting", file=sys.stderr, flush=True)
            guard.acquire()
    except OSError as error:
        raise OSError(error.errno, f"the cache {cache()} is not writable ({error.strerror}); nothing was computed. "
                      "Set VITBOOK_CACHE to a folder you may write to") from error  # fmt: skip
    try:
        yield
    finally:
        guard.release()


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
