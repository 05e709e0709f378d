"""Which checkpoint a run continues from, whether it fits, and its state back in place.

Knows run folders and plain values; what it finds it returns. Says what does not fit in a sentence.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from config import Config
from formats import run_folder
from formats.run_folder import CheckpointError
from model import GPTConfig
from training import shard
from training.state import Progress

UNIMPORTANT = ("resume", "checkpoint_dir", "dry_run")  # settings whose change needs no mention


@dataclass
class Checkpoint:
    """What a run continues from. shape: of its model. state: the content of state.json."""

    folder: Path
    state: dict
    shape: GPTConfig

    @property
    def progress(self) -> Progress:
        """How far it was."""
        return Progress.from_json(self.state["progress"])


def find_checkpoint(run: Path, mode: str) -> Checkpoint | None:
    """The newest whole step of a run; None where it is to begin. mode: the setting `resume`.

    Prints what was passed over. Raises CheckpointError where `mode` forbids what is there.
    """
    if mode == "never" and run_folder.steps(run):
        raise CheckpointError(
            f"{run} already holds a run, and resume = never: choose another checkpoint_dir, or "
            "remove that folder"
        )
    folder, state, problems = run_folder.latest(run)
    for problem in problems:
        print(f"passed over: {problem}")
    if folder:
        return Checkpoint(folder, state, run_folder.read_shape(folder, state))
    if problems:
        raise CheckpointError(
            f"no checkpoint in {run} is whole; to start anew, choose another checkpoint_dir"
        )
    if mode == "must":
        there = run_folder.what_is_there(run)
        raise CheckpointError(f"resume = must, but there is no checkpoint at {run}; {there}")
    return None


def check_same(checkpoint: Checkpoint, config: Config, shape: GPTConfig, data: dict) -> None:
    """Raises CheckpointError listing all in which shape, seed, optimiser or data differ.

    shape, data: of the run as it is set now; data as Meta.identity() gives it.
    """
    saved, differences = checkpoint.state, []
    for name, now in asdict(shape).items():
        was = getattr(checkpoint.shape, name)
        if was != now and name != "dropout":
            differences.append(difference(f"model {name}", was, now))
    if saved["seed"] != config.seed:
        differences.append(difference("seed", saved["seed"], config.seed))
    optimizer = saved["settings"].get("optimizer", "adamw")
    if optimizer != config.optimizer:
        differences.append(difference("optimizer", optimizer, config.optimizer))
    differences += other_data(saved["data"], data)
    if differences:
        raise CheckpointError(
            f"{checkpoint.folder} cannot be continued with these settings; set them back, or "
            "choose another checkpoint_dir:\n" + "\n".join(differences)
        )


def difference(name: str, was, now) -> str:
    """A line of the list."""
    return f"  {name}: {was} in the checkpoint, {now} now"


def other_data(was: dict, now: dict) -> list[str]:
    """A line of the list where the data is not what it was, with the first thing that tells."""
    changed = [name for name, value in now.items() if was.get(name, value) != value]
    if not changed:
        return []
    if "tokenizer_sha256" in changed:
        sizes = f"vocabulary of {was['vocab_size']:,} in the checkpoint, {now['vocab_size']:,} now"
        return [f"  other data: made with another tokenizer ({sizes})"]
    if "tokens" in changed:
        before, after = was["tokens"]["train"], now["tokens"]["train"]
        return [f"  other data: {before:,} training tokens in the checkpoint, {after:,} now"]
    return ["  other data: as many tokens as in the checkpoint, but others"]


def changed_settings(saved: dict, now: dict) -> str:
    """A table of the settings that a resumed run changes; empty if there are none."""
    rows = [("changed", "checkpoint", "now")]
    for name, value in now.items():
        if name in saved and saved[name] != value and name not in UNIMPORTANT:
            rows.append((name, str(saved[name]), str(value)))
    if len(rows) == 1:
        return ""
    return "".join(f"{name:18}{was:>24}{is_now:>24}\n" for name, was, is_now in rows)


def restore_weights(checkpoint: Checkpoint, model) -> None:
    """Weights from a checkpoint."""
    model.load_state_dict(run_folder.load_tensors(checkpoint.folder / "model.pt"))


def restore_optimizer(checkpoint: Checkpoint, optimizer, scaler: torch.amp.GradScaler) -> None:
    """The optimiser's state from a checkpoint; learning rate, decay and so on stay as set."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    mmap = any(map(shard.is_dtensor, parameters))  # who keeps a part of it copies that
    saved = run_folder.load_tensors(checkpoint.folder / "optimizer.pt", mmap=mmap)
    shard.distribute_state(saved["optimizer"]["state"], parameters)
    groups = saved["optimizer"]["param_groups"]
    for group, now in zip(groups, optimizer.param_groups, strict=True):
        group.update({k: v for k, v in now.items() if k != "params"})
    optimizer.load_state_dict(saved["optimizer"])
    if saved["scaler"] and scaler.is_enabled():
        scaler.load_state_dict(saved["scaler"])
