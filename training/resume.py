"""What a run starts from, a checkpoint or the weights of init_from; whether it fits; its state.

Says what does not fit in a sentence.
"""

import copy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

import torch

from config import Config
from formats import huggingface, pretrained, run_folder
from formats.address import AddressError
from formats.mirror import Mirror, address_of
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import Tokenizer
from training import RunError, distributed, shard
from training.optimizer import reserve_state
from training.state import Progress

UNIMPORTANT = ("resume", "checkpoint_dir", "dry_run")  # settings whose change needs no mention


@dataclass
class Checkpoint:
    """What a run continues from. config: of its model. state: the content of state.json."""

    folder: Path
    state: dict
    config: GPTConfig

    def load(self, model, optimizer, scaler: torch.amp.GradScaler) -> Progress:
        """Copy weights and the optimiser's state into the run's own; returns how far it was.

        The optimiser's by the parameters' names, whatever groups they are in now and were in then;
        its settings stay as set. Into tensors of our own: fused AdamW writes out of bounds where a
        moment has another shape than its parameter. Raises CheckpointError for what does not fit.
        """
        weights = run_folder.load_tensors(self.folder / "model.pt")
        huggingface.check_tensors(self.folder, self.config, weights)
        load_weights(model, weights)
        path, parameters = self.folder / "optimizer.pt", dict(model.named_parameters())
        saved = run_folder.load_tensors(path)
        reserve_state(optimizer)
        try:
            for number, name in enumerate(saved["names"]):
                values = saved["optimizer"]["state"][number]
                for kind, own in optimizer.state[parameters[name]].items():
                    value, shape = values[kind], [*own.shape]
                    if value.shape != own.shape:
                        raise ValueError(f"{kind} of {name}: {[*value.shape]}, expected {shape}")
                    own.copy_(shard.distribute(value, own))
            if saved["scaler"] and scaler.is_enabled():
                scaler.load_state_dict(saved["scaler"])
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not fit the model ({type(error).__name__}: {error}); remove"
                f" {self.folder} to continue from an older one"
            ) from None
        return Progress(**self.state["progress"])


def load_weights(model, tensors: dict[str, torch.Tensor]) -> None:
    """Copy whole tensors into a model, which may be sharded."""
    for name, own in model.state_dict().items():
        own.copy_(shard.distribute(tensors[name], own))


def find_start(config: Config) -> Checkpoint | Pretrained | None:
    """What a run continues from, else the weights of init_from, else None. Raises as both do."""
    checkpoint = find_checkpoint(config)
    if checkpoint or not config.init_from:
        return checkpoint
    try:
        return pretrained.load(config.init_from)
    except CheckpointError as error:
        raise CheckpointError(f"init_from = {config.init_from}: {error}") from None


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
    was = identity(checkpoint.config, saved["seed"], optimizer, data | saved["data"])
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


# -- the weights of init_from ----------------------------------------------------------------------


def with_shape(config: Config, start: Checkpoint | Pretrained | None) -> Config:
    """The settings, with init_from in the shape of what the run starts from.

    Raises CheckpointError where settings that were given ask for another shape than the weights
    have; a shorter context is fine, as the first positions are kept.
    """
    if not config.init_from:
        return config
    filled, differences = copy.copy(config), []
    for name, trained in asdict(start.config).items():
        if name in ("vocab_size", "dropout"):  # no setting; no property of trained weights
            continue
        now = getattr(config, name)
        shorter = name == "block_size" and now < trained
        if name not in config.given:
            setattr(filled, name, trained)
        elif now != trained and not shorter:
            differences.append(f"  {name}: {trained} in the weights, {now} in the settings")
    if differences and isinstance(start, Pretrained):
        raise CheckpointError(
            f"init_from = {start.path} has another shape; leave out these settings to take its"
            " own (block_size may be shorter), or start from scratch:\n" + "\n".join(differences)
        )
    return filled


def check_tokenizer(weights: Pretrained, data_dir: str, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where the weights were trained with another tokenizer than the data's.

    Without a tokenizer among the weights, their vocabulary has to fit: it may be padded a little.
    """
    padding = weights.config.vocab_size - tokenizer.vocab_size
    fits = 0 <= padding < 64
    if weights.tokenizer:
        fits = weights.tokenizer.same_as(tokenizer)
    if not fits:
        how = f"{tokenizer.vocab_size:,} ids against {weights.config.vocab_size:,}"
        if padding == 0:
            how = "other tokens for the same ids"
        theirs = quote(weights.path.as_posix())
        raise CheckpointError(
            f"{data_dir} has another tokenizer than the weights of {weights.path} ({how});"
            " prepare the text with theirs:\n"
            f"  python prepare_data.py TEXT --tokenizer {theirs} --out data/NAME"
        )
