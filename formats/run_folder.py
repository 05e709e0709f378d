"""A run's state <-> checkpoints/<run>/: step folders, best.json, and log.jsonl.

A step folder is complete or does not exist: it is written under a temporary name, flushed to disk,
and renamed. Knows files and plain values, not what they mean; formats/pretrained.py reads the
tensors. Imports PyTorch only to write tensors, so that a report can read a run without it.
"""

import contextlib
import fnmatch
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path

from command_line import UserError, our_file, quote
from config.loader import RECORDED
from formats.files import (
    atomic_folder,
    check_room,
    delete_folder,
    few,
    fingerprint,
    is_foreign,
    object_in,
    read_checked,
    read_json,
    read_text,
    sha256,
    write_checked,
    write_json,
    write_text,
)

FORMAT = 1
LOG = "log.jsonl"  # one object per line; docs/training.md lists the fields
ROOT = Path("checkpoints")
STEP_NAME = re.compile(r"step_(\d+)")
STEP_STATE = re.compile(r"step_\d+/state\.json")
REPLACED = re.compile(r"(log\.jsonl|best\.json|trace\.json|step_\d+/.*)")  # and config.json
SAVED_AT = "%Y-%m-%dT%H:%M:%S%z"
FILES = ("model.pt", "optimizer.pt", "tokenizer.json")  # of a step folder, besides state.json
# {file name or pattern of other programs' weights: what to do with them}.
OTHERS = {
    "ckpt.pt": "this program does not read nanoGPT's ckpt.pt. Train on its text here (python"
    f" {our_file('prepare_data.py')} TEXT --tokenizer gpt2), or convert its weights as"
    " docs/from-nanogpt.md#weights-of-nanogpt shows",
    "adapter_config.json": "it holds an adapter, such as a LoRA, which is not supported. Merge it"
    " into its model with peft: AutoPeftModelForCausalLM.from_pretrained(FOLDER).merge_and_unload()"
    ".save_pretrained(OUT)",
    "pytorch_model*.bin": "weights in pytorch_model.bin become model.safetensors with transformers:"
    " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)",
    "*.gguf": "this program writes GGUF files and does not read them; give the folder in Hugging"
    " Face's format that the file was made from",
}


class CheckpointError(UserError):
    """A checkpoint that is missing or cannot be used."""


class DamagedError(CheckpointError):
    """A step that is not as it was saved: a run continues from the one before it."""


def save(run: Path, state: dict, model: dict, optimizer: dict, tokenizer_json: str) -> Path:
    """Write run/step_N/ with model.pt, optimizer.pt, tokenizer.json and state.json; returns it.

    state: plain values. model, optimizer: state dicts of tensors and plain values. Raises OSError
    if writing fails, and then leaves nothing.
    """
    final = run / step_name(state["step"])
    with atomic_folder(final) as partial:
        check_room(run, tensor_bytes((model, optimizer)), "lower keep_last")
        save_tensors(model, partial / "model.pt")
        save_tensors(optimizer, partial / "optimizer.pt")
        (partial / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8", newline="\n")
        files = {}
        for path in [partial / name for name in FILES]:
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        saved = time.strftime(SAVED_AT)
        content = {"format": FORMAT, "saved": saved} | state | {"files": files}
        write_checked(partial / "state.json", content)
    return final


def save_tensors(value: dict, path: Path) -> None:
    """torch.save, but raises the disk's OSError in place of torch's RuntimeError."""
    import torch

    with open(path, "wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def tensor_bytes(values) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples; shared memory counts once."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum({place_of(t): t.nbytes for t in tensors}.values())


def place_of(tensor) -> tuple[int, int]:
    """Where a tensor's memory begins: its storage, and the offset in it.

    An Apple GPU's data_ptr() adds the offset to an object's address, where another's object may be
    (github.com/pytorch/pytorch/pull/190373).
    """
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset()


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step_{step:08d}"


def steps(run: Path) -> list[Path]:
    """The step folders of a run, oldest first."""
    return sorted((p for p in run.glob("step_*") if STEP_NAME.fullmatch(p.name)), key=step_of)


def step_of(folder: Path) -> int:
    """The step in a step folder's name."""
    return int(STEP_NAME.fullmatch(folder.name)[1])


def read_state(folder: Path, names=FILES) -> dict:
    """The values in state.json, after checking their checksum and those of the files `names`.

    Raises DamagedError naming the missing or damaged file, CheckpointError for a later format, and
    OSError if the folder cannot be read at the moment.
    """
    path = folder / "state.json"
    try:
        state = object_in(path.read_bytes())
        found = state.get("format")
        if isinstance(found, int) and found > FORMAT:
            raise CheckpointError(
                f"a later version of this program saved {folder}: its format is {found}, and this"
                f" version reads {FORMAT}; use that version, or update this one"
            )
        if state.pop("sha256", None) != fingerprint(state):
            raise DamagedError(f"{path} is damaged: its values are not those it was saved with")
        for name in names:
            if sha256(folder / name) != state["files"][name]["sha256"]:
                raise DamagedError(f"{folder / name} is damaged: it is not what was saved")
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename} is missing") from None
    return state


def latest(run: Path) -> tuple[Path | None, dict, list[str]]:
    """The newest intact step folder, its state, and a sentence for each damaged one skipped.

    (None, {}, ...) if there is none. Raises OSError and CheckpointError as read_state does: a mount
    that fails for a moment, or a later version, does not make steps look damaged.
    """
    problems = []
    for folder in reversed(steps(run)):
        try:
            return folder, read_state(folder), problems
        except DamagedError as error:
            if not folder.exists():  # a training process has saved and rotated: look again
                return latest(run)
            problems.append(str(error))
    return None, {}, problems


def find(path: str | Path | None) -> Path:
    """The step folder to generate from.

    path: a step folder; a run, for its best step by validation loss, else its newest; None for the
    run under checkpoints/ that was saved last. Raises CheckpointError, which lists what there is.
    """
    if path is None:
        runs = runs_with_steps() or [config.parent for config in ROOT.glob("*/config.json")]
        if not runs:
            raise CheckpointError(
                f"no checkpoint under {ROOT}/ of {Path.cwd()} yet; train one: python"
                f" {our_file('train.py')} config/demo.py"
            )
        path = runs[0]
    path = Path(path)
    if (path / "state.json").exists():
        return path
    found = steps(path)
    if not found:
        raise CheckpointError(f"no checkpoint at {path}; {what_is_there(path)}")
    best = path / step_name(best_of(path) or 0)
    return best if best in found else found[-1]


def runs_with_steps(root: Path = ROOT) -> list[Path]:
    """The runs in a folder, such as checkpoints/, that have saved a step; the latest first."""
    saved = {run: saved_at(folders[-1]) for run in root.glob("*") if (folders := steps(run))}
    return sorted(saved, key=saved.get, reverse=True)


def saved_at(folder: Path) -> tuple[float, float]:
    """When a step was saved: by its state.json; within the same second, by the folder's time.

    The folder's time alone changes with a copy, and with each file that another program puts there,
    such as Finder's .DS_Store.
    """
    saved = read_checked(folder / "state.json").get("saved", "")
    touched = folder.stat().st_mtime
    try:
        return datetime.strptime(saved, SAVED_AT).timestamp(), touched
    except ValueError:  # state.json is damaged, or the system writes the time zone in words
        return touched, touched


def is_hf(folder: Path) -> bool:
    """True if the folder is in Hugging Face's format: its config.json names an architecture."""
    return isinstance(read_json(folder / "config.json").get("model_type"), str)


def what_is_there(path: Path) -> str:
    """A message for a path without a checkpoint: what it is, and where checkpoints are."""
    if (path / "state.json").exists():
        return f"it is one step of a run; give the run: {path.parent.as_posix()}"
    if hint := other_format([path.name, *(file.name for file in path.glob("*"))]):
        return hint
    if path.is_file():
        folder = path.parent.as_posix()
        return f"it is a file, not the folder of a run, a step or a model; give {folder}"
    here = "it holds no step_* folder" if path.exists() else "it does not exist"
    if is_hf(path):
        here = "it is a folder in Hugging Face's format, which has neither steps nor a log"
    elif any(path.glob("*.safetensors")):
        here = "it has no valid config.json that names the architecture of its weights"
    elif len(path.parts) == 2 and not path.parent.exists() and path.parent != ROOT:
        here += f" (a model on the Hugging Face Hub is hf://{path.as_posix()})"
    if RECORDED in read_text(path / "config.json"):
        command = f"python {our_file('train.py')} {quote(path.as_posix())}"
        here = f"this run has not saved yet. If it was stopped: {command}"
    # Such as the folders of Hugging Face's cache.
    nested = [*path.glob("*/config.json"), *path.glob("snapshots/*/config.json")]
    if inner := [file.parent.as_posix() for file in nested if is_hf(file.parent)]:
        return f"it holds folders in Hugging Face's format; give one of them: {few(inner)}"
    if held := runs_with_steps(path):
        return f"it holds runs; give one of them: {few([run.as_posix() for run in held])}"
    runs = few([run.as_posix() for run in runs_with_steps()])
    if runs:
        return f"{here}; runs with checkpoints: {runs}"
    return f"{here}; there are none under {ROOT}/ of {Path.cwd()} either"


def other_format(names: Iterable[str]) -> str:
    """What to do with another program's weights among these files; "" if there are none."""
    names = list(names)
    return next((hint for pattern, hint in OTHERS.items() if fnmatch.filter(names, pattern)), "")


def read_best(run: Path) -> dict | None:
    """The content of best.json: "step" and "val_loss" of the best evaluation so far.

    None if the file is missing or damaged.
    """
    path = run / "best.json"
    match read_checked(path) or read_json(path):  # older runs have no checksum
        case {"step": int(), "val_loss": float(), **others} as best if not others:
            return best
    return None


def best_of(run: Path) -> int | None:
    """The step that best.json names."""
    best = read_best(run)
    return best["step"] if best else None


def write_best(run: Path, step: int | None, val_loss: float | None) -> None:
    """Write a step and its loss to best.json; delete the file if step is None."""
    best = {"step": step, "val_loss": val_loss}
    if step is None:
        (run / "best.json").unlink(missing_ok=True)
    elif best != read_best(run):
        write_checked(run / "best.json", best)


def set_aside(run: Path, step: int) -> None:
    """Rename the step folders after `step`, which are damaged.

    The run resumes from `step`, so they must not count as its newest.
    """
    for folder in steps(run):
        if step_of(folder) > step:
            os.replace(folder, folder.with_name(f"damaged_{folder.name}_{time.time_ns()}"))


def rotate(run: Path, keep_last: int, best: int | None) -> None:
    """Delete all step folders but the newest `keep_last` and the best. Not during a save."""
    for folder in steps(run)[:-keep_last]:
        if step_of(folder) != best:
            delete_folder(folder)
    delete_partial(run)


def delete_partial(run: Path) -> None:
    """Delete what interrupted saves left. Not during a save."""
    for partial in run.glob(".step_*.partial"):
        delete_folder(partial)


# -- log.jsonl -------------------------------------------------------------------------------------


def append_log(run: Path, *records: dict) -> None:
    """Append records to log.jsonl, on a new line if a full disk cut the last one short."""
    with open(run / LOG, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(_as_lines(records).encode("utf-8", "backslashreplace"))


def write_log(run: Path, records: list[dict]) -> None:
    """Replace log.jsonl, whole or not at all.

    A resumed run uses it to drop the records after its checkpoint.
    """
    write_text(run / LOG, _as_lines(records))


def has_saved(run: Path) -> bool:
    """True if the log of a run records a saved checkpoint."""
    return any(record.get("event") == "save" for record in read_log(run))


def evaluation_at(run: Path, step: int) -> dict | None:
    """The evaluation at a step; None if there was none, or its loss was not finite."""
    for record in read_log(run):
        if record["step"] == step and record.get("val_loss") is not None:
            return record
    return None


def _as_lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read_log(run: Path) -> list[dict]:
    """The records of log.jsonl; skips invalid lines, such as one cut short by a crash."""
    path, records = run / LOG, []
    if not path.exists():
        return records
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if _is_record(record):
                    records.append(record)
    return records


def _is_record(value):
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return False
    numbers = ("loss", "val_loss", "running_s")
    return all(isinstance(value.get(name), int | float | None) for name in numbers)


# -- identity --------------------------------------------------------------------------------------


def run_id(run: Path) -> str | None:
    """The id of the run in a folder; None if there is none."""
    paths = [run / "config.json", *(folder / "state.json" for folder in steps(run)[-1:])]
    known = (identity(read_json(path)).get("id") for path in paths)
    return next(filter(None, known), None)


def identity(settings: dict) -> dict:
    """A run's id and folder, from its config.json; {} if it is damaged."""
    own = settings.get("run")
    return own if isinstance(own, dict) else {}


def write_config(run: Path, settings: dict, run_id: str) -> None:
    """Write config.json: settings, id, and folder, so that copies are recognized."""
    own = {"id": run_id, "folder": str(run.resolve())}
    write_json(run / "config.json", settings | {"run": own})


def new_id_for_a_copy(run: Path) -> None:
    """Give a run folder a new id if it is a copy of another folder that still exists.

    If this user may not read that folder, the run counts as moved.
    """
    settings = read_json(run / "config.json")
    own = identity(settings)
    original = Path(own.get("folder", run))
    if not os.access(original / "config.json", os.R_OK):
        return
    if own.get("id") and own["id"] == run_id(original) and not original.samefile(run):
        write_config(run, settings, secrets.token_hex(8))
        (run / "wandb_id").unlink(missing_ok=True)


def check_own(run: Path) -> None:
    """Raises CheckpointError if a run in this folder would overwrite files that no run wrote."""
    paths = [*run.glob("*.json*"), *run.glob("step_*/*")]
    names = [path.relative_to(run).as_posix() for path in paths]
    name = foreign(names, read_text(run / "config.json"))
    if name:
        raise CheckpointError(
            f"checkpoint_dir = {run} holds {name}, which no run wrote and this one would replace;"
            " choose another checkpoint_dir (init_from is the setting for weights to start from)"
        )


def foreign(names: Collection[str], config: str) -> str:
    """A file in a folder that a run would overwrite but no run wrote; "" if there is none.

    names: the files in the folder and in its step folders. config: the text of config.json, which
    shows whether a run wrote it.
    """
    if is_foreign(config, RECORDED):
        return "config.json"
    if RECORDED in config or any(STEP_STATE.fullmatch(name) for name in names):
        return ""
    return next(filter(REPLACED.fullmatch, names), "")
