"""Which checkpoint a run continues from, whether it fits, and its state back in place.

Knows run folders, mirrors and plain values. Says what does not fit in a sentence.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from config import Config
from formats import huggingface, run_folder
from formats.address import AddressError
from formats.mirror import Mirror, address_of
from formats.run_folder import CheckpointError
from model import GPTConfig
from training import RunError, distributed, shard
from training.optimizer import reserve_state
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


def find_checkpoint(config: Config) -> Checkpoint | None:
    """The newest whole step of a run, of the disk and the mirror; None where it is to begin.

    A newer one in the mirror is fetched. Prints what was passed over. Raises CheckpointError where
    the setting `resume` forbids what is there, and where all of it is damaged; AddressError and
    RunError as download_newer does.
    """
    run, newest = Path(config.checkpoint_dir), None
    if config.mirror and not config.dry_run:
        for turn in range(distributed.world_size):  # machines may share the disk
            if turn == distributed.rank and distributed.local_rank == 0:
                newest = download_newer(config, run)
            distributed.gather(0)
    if config.resume == "never" and run_folder.steps(run):
        raise never_resume(run)
    folder, state, problems = newest or run_folder.latest(run)
    for problem in problems:
        print(f"passed over: {problem}")
    if folder:
        return Checkpoint(folder, state, run_folder.read_shape(folder, state))
    if problems:
        raise CheckpointError(
            f"no checkpoint in {run} is whole; to start from scratch, choose another checkpoint_dir"
        )
    if config.resume == "must":
        there = run_folder.what_is_there(run)
        raise CheckpointError(f"resume = must, but there is no checkpoint at {run}; {there}")
    return None


def download_newer(config: Config, run: Path) -> tuple[Path | None, dict, list[str]]:
    """The newest step of a run as run_folder.latest returns it, fetched if its mirror has it.

    Raises AddressError where a package is missing, CheckpointError where the mirror holds another
    run, RunError where it cannot be read and the disk has no checkpoint.
    """
    mirror = Mirror(address_of(config.mirror, run))
    try:
        if config.resume == "never" and mirror.whole():
            raise never_resume(mirror.address)
        return mirror.download_newer(run)
    except AddressError as error:
        if not run_folder.steps(run):
            raise RunError(
                f"{error}\n{run} has no checkpoint, and the mirror may have one: start again"
                f" later, correct mirror = {config.mirror}, or leave it out to begin a new run"
            ) from None
        print(f"{error}. The run goes on from {run}", file=sys.stderr, flush=True)
        return run_folder.latest(run)


def never_resume(place) -> CheckpointError:
    """What to say of a run that is there already."""
    return CheckpointError(
        f"{place} already holds a run, and resume = never: choose another checkpoint_dir, or remove"
        " what is there"
    )


def check_same(checkpoint: Checkpoint, config: Config, shape: GPTConfig, data: dict) -> None:
    """Raises CheckpointError listing every difference in shape, seed, optimiser and data.

    shape, data: of the run as it is set now; data as Meta.identity() gives it.
    """
    saved = checkpoint.state
    optimizer = saved["settings"].get("optimizer", Config.optimizer)
    was = identity(checkpoint.shape, saved["seed"], optimizer, data | saved["data"])
    now = identity(shape, config.seed, config.optimizer, data)
    differences = []
    for name, value in now.items():
        if was[name] != value:
            differences.append(f"  {name}: {was[name]} in the checkpoint, {value} now")
    if differences:
        raise CheckpointError(
            f"{checkpoint.folder} cannot be continued with these settings; set them back, or "
            "choose another checkpoint_dir:\n" + "\n".join(differences)
        )


def identity(shape: GPTConfig, seed: int, optimizer: str, data: dict) -> dict:
    """What a run has to keep from its first start to its last."""
    values = {f"model {name}": value for name, value in asdict(shape).items() if name != "dropout"}
    tokens, checksum = data["tokens"]["train"], run_folder.fingerprint(data)[:8]
    described = f"{tokens:,} tokens, vocabulary {data['vocab_size']:,} (checksum {checksum})"
    return values | {"seed": seed, "optimizer": optimizer, "data": described}


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
    """Load a checkpoint's weights into a model. Raises CheckpointError for those of another."""
    tensors = run_folder.load_tensors(checkpoint.folder / "model.pt")
    huggingface.check_tensors(checkpoint.folder, checkpoint.shape, tensors)
    model.load_state_dict(tensors)


def restore_optimizer(
    checkpoint: Checkpoint, model, optimizer, scaler: torch.amp.GradScaler
) -> None:
    """Copy a checkpoint's optimiser state into that of `optimizer`, whose settings stay as set.

    By the parameters' names, whatever groups they are in now and were in then. Into tensors of our
    own: fused AdamW writes out of bounds where a moment has another shape than its parameter.
    Raises CheckpointError for such a checkpoint, and for one that lacks the names.
    """
    path, parameters = checkpoint.folder / "optimizer.pt", dict(model.named_parameters())
    saved = run_folder.load_tensors(path)
    if "names" not in saved:
        raise CheckpointError(
            f"{checkpoint.folder} is of an older version and cannot be continued; another"
            f" checkpoint_dir with init_from = {checkpoint.folder} begins with its weights"
        )
    reserve_state(optimizer)
    try:
        for number, name in enumerate(saved["names"]):
            values = saved["optimizer"]["state"][number]
            for kind, own in optimizer.state[parameters[name]].items():
                value = values[kind]
                if value.shape != own.shape:
                    raise ValueError(f"{kind} of {name}: {[*value.shape]}, expected {[*own.shape]}")
                own.copy_(shard.distribute(value, own))
        if saved["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(saved["scaler"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not fit the model ({type(error).__name__}: {error}); remove"
            f" {checkpoint.folder} to continue from an older one"
        ) from None
