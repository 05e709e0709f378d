"""Where a run starts: new weights, a checkpoint of its own, or the weights of init_from.

`find_start` chooses, adopts the model's shape, and reports settings or data that do not match as an
error for the user.
"""

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from os.path import abspath
from pathlib import Path

from command_line import our_file, quote
from config import LEARNED, SETTINGS, Config, ConfigError
from config.loader import fitting
from formats import pretrained, run_folder
from formats.address import AddressError
from formats.data_folder import Meta, read_meta
from formats.files import few
from formats.mirror import Mirror, address_of
from formats.run_folder import CheckpointError
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer
from training import RunError, distributed
from training.optimizer import load_state, reserve_state
from training.run import Progress, code_versions
from training.saver import copy_to_ram

# Changes of these settings are not listed.
UNIMPORTANT = ("resume", "checkpoint_dir", "dry_run", "profile")


@dataclass
class Start:
    """Where a run starts.

    config: the settings, with the shape of the loaded weights. shape: of the model. progress: of
    the checkpoint. load(model, optimizer, scaler): loads saved values into them; None for new
    weights. context: of the model, if it may exceed the sequences that the run trains on.
    """

    config: Config
    shape: GPTConfig
    progress: Progress = field(default_factory=Progress)
    load: Callable | None = None
    context: int | None = None


def find_start(config: Config, meta: Meta, tokenizer: Tokenizer) -> Start:
    """Choose the newest intact step, on disk or in the mirror; else init_from; else new weights.

    Prints which damaged steps it skips, and which settings change. Raises CheckpointError if
    `resume` does not allow what it finds, if all steps are damaged, or if settings or data do not
    match; AddressError and RunError as fetch_from_mirror does.
    """
    run = Path(config.checkpoint_dir)
    if distributed.is_main and not config.dry_run:
        run_folder.delete_partial(run)  # a kill can leave a large partial checkpoint
        run_folder.new_id_for_a_copy(run)
    problems = fetch_from_mirror(config, run)
    distributed.barrier()  # the first process fetches
    if config.resume == "never" and run_folder.steps(run):
        raise CheckpointError(
            f"{run} already holds a run, and resume = never: choose another checkpoint_dir, or"
            " remove what is there"
        )
    folder, saved, damaged = run_folder.latest(run)
    for problem in [*problems, *damaged]:
        print(f"skipping damaged checkpoint: {problem}")
    if folder:
        return from_checkpoint(config, folder, saved, meta)
    if problems or damaged:
        raise CheckpointError(
            f"no checkpoint in {run} is whole; to start from scratch, choose another checkpoint_dir"
        )
    if config.resume == "must":
        there = run_folder.what_is_there(run)
        raise CheckpointError(f"resume = must, but there is no checkpoint at {run}; {there}")
    if config.init_from:
        return from_weights(config, tokenizer)
    return from_scratch(config, meta.vocab_size)


def from_scratch(config: Config, vocab_size: int) -> Start:
    """Start from new weights. vocab_size: of the tokenizer."""
    shape = model_shape(config, vocab_size)
    c = replace(config, **shape_settings(shape))
    suits = c.arch == "qwen3" and c.zero_init and c.n_layer > 1 and c.n_kv_head is None
    if c.induction_init and not suits:
        raise ConfigError(
            "induction_init needs arch = qwen3, zero_init = True, n_layer of at least 2 and no"
            " n_kv_head; set induction_init = False"
        )
    return Start(c, shape)


def from_checkpoint(config: Config, folder: Path, saved: dict, meta: Meta) -> Start:
    """Start from a step of the same run. saved: the content of its state.json."""
    trained = pretrained.read_shape(folder, saved)
    shape, before = shape_settings(trained), saved["settings"]
    fixed = {name: before[name] for name in ("seed", "optimizer", "loss_on") if name in before}
    if config.init_from and abspath(config.init_from) != abspath(before.get("init_from") or ""):
        fixed["init_from"] = before.get("init_from")
    differ = differences(config, shape | fixed, config.given | fixed.keys(), "the checkpoint")
    config = replace(config, **shape)
    unknown = saved["progress"].keys() - {field.name for field in fields(Progress)}
    if unknown:
        raise CheckpointError(
            f"a later version of this program saved {folder}: this one does not know its"
            f" {', '.join(sorted(unknown))}; use that version, or update this one"
        )
    progress, now = Progress(**saved["progress"]), config.recorded()
    if now["micro_batch_size"] != before.get("micro_batch_size"):
        progress.micro_batch_limit = None  # the user has chosen another
    other = other_data(saved["data"], meta, "the checkpoint")
    if differ:
        raise CheckpointError(
            f"{folder} cannot be continued with these settings:\n"
            + "\n".join(differ + other)
            + "\nFor a new run, add --checkpoint_dir=checkpoints/NAME; to continue this one, run\n"
            f"  python {our_file('train.py')} {quote(folder.parent.as_posix())}"
        )
    if other:
        same_tokenizer = "tokenizer_sha256" not in other[0]
        raise CheckpointError(
            f"{folder} continues only on the data that it was trained on:\n{other[0]}\n"
            + on_other_data(folder.parent, config.data_dir if same_tokenizer else None)
        )
    versions = code_versions()
    print_changes(versions | saved.get("versions", {}) | before, versions | now)
    return Start(
        config,
        shape=replace(trained, dropout=config.dropout),
        progress=progress,
        load=partial(load_checkpoint, folder),
        context=saved.get("context"),
    )


def load_checkpoint(folder: Path, model: GPT, optimizer, scaler) -> None:
    """Load the weights and the optimizer state of a step.

    What reserve_state allocates is matched by parameter names and copied, since fused AdamW writes
    out of bounds if a moment has a different shape than its parameter. The optimizer's settings do
    not change. Raises CheckpointError if anything does not fit.
    """
    pretrained.fill(model, pretrained.load_tensors(folder / "model.pt"), folder)
    path, parameters = folder / "optimizer.pt", dict(model.named_parameters())
    saved = pretrained.load_tensors(path)
    reserve_state(optimizer)
    try:
        if not optimizer.state:  # it is neither AdamW nor Muon
            load_state(optimizer, copy_to_ram(saved["optimizer"]))
        else:
            for number, name in enumerate(saved["names"]):
                values = saved["optimizer"]["state"][number]
                for kind, own in optimizer.state[parameters[name]].items():
                    own.copy_(values[kind])
        if saved["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(saved["scaler"])
    except (LookupError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not fit the model ({type(error).__name__}: {error}); remove {folder} to"
            " continue from an older one"
        ) from None


def from_weights(config: Config, tokenizer: Tokenizer) -> Start:
    """Start a new run from the weights of init_from.

    Sequences may be shorter than their context, which keeps the first learned positions, and all
    rotary ones; a preset's longer block_size is reduced to theirs. The vocabulary stays theirs,
    since new rows would take probability from it.
    """
    try:
        found = pretrained.load(config.init_from)
    except CheckpointError as error:
        raise CheckpointError(
            f"init_from = {config.init_from}: {error}\nGive the weights to start from as"
            " --init_from=RUN, a run, a folder in Hugging Face's format or an address"
        ) from None
    trained = shape_settings(found.config)
    if "block_size" in config.given and config.block_size < trained["block_size"]:
        trained["block_size"] = config.block_size
    differ = differences(config, trained, config.given, "the weights")
    if differ:
        raise CheckpointError(
            f"init_from = {found.path} has another shape; leave out these settings to take its own"
            " (block_size may be shorter), or start from scratch:\n" + "\n".join(differ)
        )
    config = replace(config, **trained)
    check_tokenizer(config.data_dir, tokenizer, found)
    shape = replace(found.config, block_size=config.block_size, dropout=config.dropout)

    def load(model: GPT, optimizer, scaler) -> None:
        tensors = found.cut_to(shape.block_size)
        if added := [name for name in model.state_dict() if name not in tensors]:
            # By a change of model.py. `model`, which loads, has drawn no weights.
            print(f"not in {found.path}, and new in this run: {few(added)}")
            tensors = GPT(shape, config.zero_init).state_dict() | tensors
        pretrained.fill(model, tensors, found.path)

    context = found.config.block_size if found.config.modern else None
    return Start(config, shape, load=load, context=context)


def check_tokenizer(data_dir: str, tokenizer: Tokenizer, found: pretrained.Pretrained) -> None:
    """Raises CheckpointError if the data has another tokenizer than the weights.

    Weights without a tokenizer need a vocabulary of the data's size, or one with a little padding.
    """
    padding = found.config.vocab_size - tokenizer.vocab_size
    fits = 0 <= padding < 64
    if found.tokenizer:
        fits = found.tokenizer.same_as(tokenizer)
    if fits:
        return
    how = f"{tokenizer.vocab_size:,} ids against {found.config.vocab_size:,}"
    if padding == 0:
        how = "other tokens for the same ids"
    advice = "prepare the text with theirs"
    if not found.tokenizer:
        advice = f"put their tokenizer.json into {found.path}, and prepare the text with it"
    raise CheckpointError(
        f"{data_dir} has another tokenizer than the weights of {found.path} ({how}); {advice}:\n"
        f"  python {our_file('prepare_data.py')} TEXT --tokenizer {quote(found.path.as_posix())}"
        " --out data/NAME"
    )


def fetch_from_mirror(config: Config, run: Path) -> list[str]:
    """Fetch a newer step than the disk has; returns a sentence for each damaged step skipped.

    Raises CheckpointError if the mirror holds another run, RunError if it cannot be read and the
    disk has no checkpoint.
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
    """Raises CheckpointError if the mirror's run has other settings or data than this one.

    Called if the run's folder is empty: this may be a new machine, or a new run of the same name.
    """
    _, settings = mirror.check_same_run(Path(config.checkpoint_dir))
    saved = fitting(settings, SETTINGS)
    shape = {field.name for field in fields(GPTConfig)}
    known = {name: saved[name] for name in LEARNED & saved.keys()}
    names = set(known)
    if config.init_from:  # the shape comes from there
        names -= shape - config.given
    differ = differences(config, known, names, "the mirror")
    if trained_on := mirror.data():
        differ += other_data(trained_on, read_meta(config.data_dir), "the mirror")
    if differ:
        raise CheckpointError(
            f"{mirror.address} holds a run of this name with other settings. For a new run choose"
            " another checkpoint_dir. To continue that one, add --resume=must; its architecture,"
            " init_from and data cannot change:\n" + "\n".join(differ)
        )


def model_shape(config: Config, vocab_size: int) -> GPTConfig:
    """The shape of a new model. vocab_size: of the tokenizer.

    Large vocabularies are rounded up to a multiple of 64 for tensor cores (GPT-2's 50,257 becomes
    50,304); the added ids are never sampled.
    """
    if vocab_size > 1024:
        vocab_size = 64 * math.ceil(vocab_size / 64)
    shared = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name in SETTINGS}
    try:
        return GPTConfig(vocab_size=vocab_size, **shared)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def shape_settings(shape: GPTConfig) -> dict:
    """The settings that are determined by a model's shape; n_kv_head is None without groups."""
    values = asdict(shape)
    if shape.n_kv_head == shape.n_head:
        values["n_kv_head"] = None
    names = SETTINGS.keys() - {"dropout"}
    return {name: value for name, value in values.items() if name in names}


def differences(config: Config, trained: dict, names: Collection[str], where: str) -> list[str]:
    """A line for each setting in `names` whose value differs from the trained model's.

    n_kv_head may be given for a model without groups, which has as many as the model's n_head. With
    init_from, a preset's block_size is only an upper limit, since a preset is meant for weights of
    any context.
    """
    if "n_kv_head" in names and config.n_kv_head == trained.get("n_head"):
        config = replace(config, n_kv_head=None)
    context = trained.get("block_size", config.block_size)
    if config.init_from and "block_size" not in config.typed and config.block_size > context:
        config = replace(config, block_size=context)
    return [
        f"  {name}: {value} in {where}, {getattr(config, name)} now"
        for name, value in trained.items()
        if name in names and getattr(config, name) != value
    ]


def other_data(trained: dict, meta: Meta, where: str) -> list[str]:
    """A line if the data differs from a run's. trained: Meta.identity() of the run's data."""
    values = meta.identity().items()
    differ = [name for name, value in values if trained.get(name, value) != value]
    why = "another text, settings or version of prepare_data.py"
    return [f"  data: other {', '.join(differ)} than in {where}: {why}"] if differ else []


def on_other_data(run: Path, data_dir: str | None) -> str:
    """The commands that train a run's weights on other data. data_dir: None: not yet prepared."""
    source, data, prepare = quote(run.as_posix()), data_dir or "data/NAME", ""
    if data_dir is None:
        prepare = f"  python {our_file('prepare_data.py')} TEXT --tokenizer {source} --out {data}\n"
    return (
        f"To train its weights on other text, begin another run:\n{prepare}"
        f"  python {our_file('train.py')} config/finetune.py --init_from={source}"
        f" --data_dir={quote(data)} --checkpoint_dir=checkpoints/NAME"
    )


def print_changes(saved: dict, now: dict) -> None:
    """Print a table of what a resumed run changes, if anything; the values by setting or version.

    Older checkpoints have settings that are removed, and lack others, which had their defaults.
    """
    rows = [("changed", "checkpoint", "now")]
    for name, was in (Config().recorded() | saved).items():
        is_now = now.get(name, "removed" if was else was)  # without it, None and False stay
        if was != is_now and name not in UNIMPORTANT:
            rows.append((name, str(was), str(is_now)))
    if len(rows) > 1:
        print("\n".join(f"{name:18}{was:>24}{is_now:>24}" for name, was, is_now in rows))
