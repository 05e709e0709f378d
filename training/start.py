"""Where a run starts: new weights, a checkpoint of its own, or the weights of init_from.

`find_start` chooses. Each kind gives the settings, with the model's shape taken over, says what
does not fit, and loads its state. A difference is an error in a sentence.
"""

import math
import sys
from collections.abc import Collection
from dataclasses import asdict, fields, replace
from os.path import abspath
from pathlib import Path
from shlex import quote

from config import LEARNT, SETTINGS, Config, ConfigError
from formats import pretrained, run_folder
from formats.address import AddressError
from formats.data_folder import Meta, read_meta
from formats.mirror import Mirror, address_of
from formats.run_folder import CheckpointError
from model import GPTConfig
from training import RunError, distributed
from training.dataset import Data
from training.optimizer import reserve_state
from training.state import Counters, State

UNIMPORTANT = ("resume", "checkpoint_dir", "dry_run")  # changes of these settings are not listed


class NewRun:
    """A run that begins with new weights."""

    changes = ""

    def __init__(self):
        self.counters = Counters()

    def settings(self, config: Config) -> Config:
        """The settings, with the shape of what the run starts from where it was not given."""
        return config

    def check(self, config: Config, data: Data) -> None:
        """Raises an error where settings or data do not fit. config: from settings()."""
        c = config
        if c.induction_init and not (c.arch == "qwen3" and c.zero_init and c.n_layer > 1):
            raise ConfigError(
                "induction_init needs arch = qwen3, zero_init = True and n_layer of at least 2; set"
                " induction_init = False"
            )

    def shape(self, config: Config, vocab_size: int) -> GPTConfig:
        """The model's shape. vocab_size: of the tokenizer."""
        return model_shape(config, vocab_size)

    def load(self, state: State) -> None:
        """Copy what was saved into the run's state."""


class Checkpoint:
    """A step of the same run. saved: the content of its state.json."""

    def __init__(self, folder: Path, saved: dict):
        self.folder, self.saved = folder, saved
        self.trained = pretrained.read_shape(folder, saved)
        self.counters = Counters(**saved["progress"])
        self.changes = ""
        self.differences = []

    def settings(self, config: Config) -> Config:
        shape = shape_settings(self.trained)
        self.differences = differences(config, shape, config.given, "the checkpoint")
        return replace(config, **shape)

    def check(self, config: Config, data: Data) -> None:
        saved, now = self.saved["settings"], config.recorded()
        fixed = {name: saved.get(name, now[name]) for name in ("seed", "optimizer")}
        if config.init_from and abspath(config.init_from) != abspath(saved.get("init_from") or ""):
            fixed["init_from"] = saved.get("init_from")
        self.differences += differences(config, fixed, fixed, "the checkpoint")
        other = other_data(self.saved["data"], data.meta, "the checkpoint")
        if self.differences:
            raise CheckpointError(
                f"{self.folder} cannot be continued with these settings; revert them, or choose"
                " another checkpoint_dir:\n" + "\n".join(self.differences + other)
            )
        if other:
            same_tokenizer = "tokenizer_sha256" not in other[0]
            raise CheckpointError(
                f"{self.folder} continues only on the data that it was trained on:\n{other[0]}\n"
                + on_other_data(self.folder.parent, config.data_dir if same_tokenizer else None)
            )
        self.changes = changed_settings(saved, now)

    def shape(self, config: Config, vocab_size: int) -> GPTConfig:
        return replace(self.trained, dropout=config.dropout)

    def load(self, state: State) -> None:
        """Copy weights and the optimiser's state into the run's own.

        The optimiser's are matched by the parameters' names, and its settings stay as set. Its
        state is copied into tensors of our own: fused AdamW writes out of bounds where a moment has
        another shape than its parameter. Raises CheckpointError for what does not fit.
        """
        tensors = pretrained.load_tensors(self.folder / "model.pt")
        pretrained.fill(state.model, tensors, self.folder)
        path, parameters = self.folder / "optimizer.pt", dict(state.model.named_parameters())
        saved = pretrained.load_tensors(path)
        reserve_state(state.optimizer)
        try:
            for number, name in enumerate(saved["names"]):
                values = saved["optimizer"]["state"][number]
                for kind, own in state.optimizer.state[parameters[name]].items():
                    own.copy_(values[kind])
            if saved["scaler"] and state.scaler.is_enabled():
                state.scaler.load_state_dict(saved["scaler"])
        except (LookupError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} does not fit the model ({type(error).__name__}: {error}); remove"
                f" {self.folder} to continue from an older one"
            ) from None


class Weights:
    """The weights of init_from, with which a new run begins."""

    changes = ""

    def __init__(self, found: pretrained.Pretrained):
        self.found = found
        self.counters = Counters()

    def settings(self, config: Config) -> Config:
        """A shorter context is fine: of learned positions the first are kept."""
        trained = shape_settings(self.found.config)
        if "block_size" in config.given and config.block_size < trained["block_size"]:
            trained["block_size"] = config.block_size
        differ = differences(config, trained, config.given, "the weights")
        if differ:
            raise CheckpointError(
                f"init_from = {self.found.path} has another shape; leave out these settings to take"
                " its own (block_size may be shorter), or start from scratch:\n" + "\n".join(differ)
            )
        return replace(config, **trained)

    def check(self, config: Config, data: Data) -> None:
        """Weights without a tokenizer need a vocabulary of the data's size, or padded a little."""
        found, tokenizer = self.found, data.tokenizer
        padding = found.config.vocab_size - tokenizer.vocab_size
        fits = 0 <= padding < 64
        if found.tokenizer:
            fits = found.tokenizer.same_as(tokenizer)
        if not fits:
            how = f"{tokenizer.vocab_size:,} ids against {found.config.vocab_size:,}"
            if padding == 0:
                how = "other tokens for the same ids"
            raise CheckpointError(
                f"{config.data_dir} has another tokenizer than the weights of {found.path} ({how});"
                " prepare the text with theirs:\n"
                f"  python prepare_data.py TEXT --tokenizer {quote(found.path.as_posix())} --out"
                " data/NAME"
            )

    def shape(self, config: Config, vocab_size: int) -> GPTConfig:
        """The vocabulary stays that of the weights: new rows would take probability from theirs."""
        return replace(self.found.config, block_size=config.block_size, dropout=config.dropout)

    def load(self, state: State) -> None:
        tensors = self.found.cut_to(state.model.config.block_size)
        pretrained.fill(state.model, tensors, self.found.path)


Start = NewRun | Checkpoint | Weights


def find_start(config: Config) -> Start:
    """The newest whole step of the run, on the disk or in the mirror; else init_from; else new.

    Prints what was passed over. Raises CheckpointError where `resume` forbids what is there, and
    where all of it is damaged; AddressError and RunError as fetch_from_mirror does.
    """
    run = Path(config.checkpoint_dir)
    if distributed.is_main and not config.dry_run:
        run_folder.part_from_original(run)
    problems = fetch_from_mirror(config, run)
    distributed.gather(0)  # the first process fetches
    if config.resume == "never" and run_folder.steps(run):
        raise CheckpointError(
            f"{run} already holds a run, and resume = never: choose another checkpoint_dir, or"
            " remove what is there"
        )
    folder, saved, damaged = run_folder.latest(run)
    for problem in [*problems, *damaged]:
        print(f"skipping damaged checkpoint: {problem}")
    if folder:
        return Checkpoint(folder, saved)
    if problems or damaged:
        raise CheckpointError(
            f"no checkpoint in {run} is whole; to start from scratch, choose another checkpoint_dir"
        )
    if config.resume == "must":
        there = run_folder.what_is_there(run)
        raise CheckpointError(f"resume = must, but there is no checkpoint at {run}; {there}")
    if not config.init_from:
        return NewRun()
    try:
        return Weights(pretrained.load(config.init_from))
    except CheckpointError as error:
        raise CheckpointError(
            f"init_from = {config.init_from}: {error}\nGive the weights to start from as"
            " --init_from=RUN, a run, a folder in Hugging Face's format or an address"
        ) from None


def fetch_from_mirror(config: Config, run: Path) -> list[str]:
    """Fetch a newer step than the disk has; returns what was passed over, in words.

    Raises CheckpointError where the mirror holds another run, RunError where it cannot be read and
    the disk has no checkpoint.
    """
    if not config.mirror or config.dry_run or not distributed.is_main:
        return []
    mirror = Mirror(address_of(config.mirror, run))
    try:
        if config.resume == "never" and mirror.whole():
            raise CheckpointError(
                f"{mirror.address} already holds a run, and resume = never: choose another"
                " checkpoint_dir, or remove what is there"
            )
        if config.resume == "auto" and not run_folder.run_id(run) and not run_folder.steps(run):
            check_meant(config, mirror)
        return mirror.fetch_newer(run)
    except AddressError as error:
        if not run_folder.steps(run):
            raise RunError(
                f"{error}\n{run} has no checkpoint, and the mirror may have one: start again"
                f" later, fix mirror = {config.mirror}, or leave it out to start a new run"
            ) from None
        print(f"{error}. Continuing from {run}", file=sys.stderr)
        return []


def check_meant(config: Config, mirror: Mirror) -> None:
    """Raises CheckpointError where a mirror holds a run that these settings do not continue.

    The folder of the run is empty: it may be a new machine, or a new run of the same name.
    """
    mirror.check_same_run(Path(config.checkpoint_dir))  # it may be no run at all
    saved = mirror.settings()
    shape = {field.name for field in fields(GPTConfig)}
    known = {name: saved[name] for name in LEARNT & saved.keys()}
    if config.init_from:  # it brings its shape
        known = {name: v for name, v in known.items() if name not in shape - config.given}
    differ = differences(config, known, known, "the mirror")
    if trained_on := mirror.data():
        differ += other_data(trained_on, read_meta(config.data_dir), "the mirror")
    if differ:
        raise CheckpointError(
            f"{mirror.address} holds a run of this name with other settings. For a new run choose"
            " another checkpoint_dir; to continue that one, add --resume=must:\n"
            + "\n".join(differ)
        )


def model_shape(config: Config, vocab_size: int) -> GPTConfig:
    """The shape of a new model. vocab_size: of the tokenizer.

    Large vocabularies are rounded up to a multiple of 64, as tensor cores like it (GPT-2's 50,257
    becomes 50,304); the ids so added are never sampled.
    """
    if vocab_size > 1024:
        vocab_size = 64 * math.ceil(vocab_size / 64)
    shared = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name in SETTINGS}
    try:
        return GPTConfig(vocab_size=vocab_size, **shared)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def shape_settings(shape: GPTConfig) -> dict:
    """The settings that a model's shape fixes: all of them but dropout."""
    values = asdict(shape).items()
    return {name: v for name, v in values if name in SETTINGS and name != "dropout"}


def differences(config: Config, trained: dict, names: Collection[str], where: str) -> list[str]:
    """A line for each of the settings called `names` that is not as trained."""
    return [
        f"  {name}: {value} in {where}, {getattr(config, name)} now"
        for name, value in trained.items()
        if name in names and getattr(config, name) != value
    ]


def other_data(trained: dict, meta: Meta, where: str) -> list[str]:
    """A line where the data is not that of a run. trained: as Meta.identity() has it."""
    values = meta.identity().items()
    differ = [name for name, value in values if trained.get(name, value) != value]
    return [f"  data: other {', '.join(differ)} than in {where}"] if differ else []


def on_other_data(run: Path, data_dir: str | None) -> str:
    """The commands that train a run's weights on other data; None: on data still to be prepared."""
    source, data, prepare = quote(run.as_posix()), data_dir or "data/NAME", ""
    if data_dir is None:
        prepare = f"  python prepare_data.py TEXT --tokenizer {source} --out {data}\n"
    return (
        f"To train its weights on other text, begin another run:\n{prepare}"
        f"  python train.py config/finetune.py --init_from={source} --data_dir={quote(data)}"
        " --checkpoint_dir=checkpoints/NAME"
    )


def changed_settings(saved: dict, now: dict) -> str:
    """A table of the settings that a resumed run changes; empty if there are none."""
    rows = [("changed", "checkpoint", "now")]
    for name, value in now.items():
        if name in saved and saved[name] != value and name not in UNIMPORTANT:
            rows.append((name, str(saved[name]), str(value)))
    if len(rows) == 1:
        return ""
    return "".join(f"{name:18}{was:>24}{is_now:>24}\n" for name, was, is_now in rows)
