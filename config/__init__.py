"""The settings of a training run: their names, types, defaults and meanings.

A preset is a Python file of plain assignments (`learning_rate = 3e-4`), as the others in this
folder are; the command line overrides it (`--learning_rate=1e-4`). How both are read is in
config/loader.py. Nothing here knows what the settings are used for.
"""

import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from config.loader import ConfigError, help_text, presets, read_argument, read_preset, setting

__all__ = ["SETTINGS", "Config", "ConfigError", "load"]


@dataclass
class Config:
    """The settings of one run. None means "derived from the others"; the meaning says how."""

    data_dir: str = setting(
        "data/python_stdlib",
        "prepared folder to train on, as prepare_data.py writes it",
        section="data and run",
    )
    data_location: str = setting(
        "auto",
        "where the tokens are; auto: the fastest memory with enough room",
        ["auto", "gpu", "ram", "mmap"],
    )
    checkpoint_dir: str | None = setting(None, "folder of this run; None: checkpoints/PRESET")
    mirror: str | None = setting(None, "folder or address (s3://bucket/runs) to copy each save to")
    resume: str = setting(
        "auto",
        "auto: continue a run if there is one; must: only continue; never: only start",
        ["auto", "must", "never"],
    )
    profile: bool = setting(False, "time the parts of a few steps: a table, and a Chrome trace")
    dry_run: bool = setting(False, "print the memory, disk, hours and money it will take, and end")

    init_from: str | None = setting(
        None,
        "weights to start from: a run, a step, a Hugging Face folder, or the address of one",
        section="model",
    )
    arch: str = setting(
        "gpt2", "architecture; qwen3: RMSNorm, rotary, SwiGLU, no biases", ["gpt2", "qwen3"]
    )
    n_layer: int = setting(12, "layers", low=1)
    n_head: int = setting(
        12, "attention heads per layer; must divide n_embd unless head_dim is set", low=1
    )
    n_embd: int = setting(768, "width of the model", low=1)
    block_size: int = setting(1024, "context: tokens in a sequence", low=1)
    bias: bool = setting(True, "biases in Linear and LayerNorm, as in GPT-2; qwen3 has none")
    dropout: float = setting(0.0, "dropout probability, for data seen many times", low=0)
    tie_weights: bool = setting(True, "one matrix for embedding and head, as in GPT-2")
    n_inner: int | None = setting(
        None, "width of the MLP; None: 4 n_embd, or 8/3 n_embd for qwen3", low=1
    )
    n_kv_head: int | None = setting(None, "heads of keys and values (qwen3); None: n_head", low=1)
    head_dim: int | None = setting(None, "width of a head (qwen3); None: n_embd / n_head", low=1)
    rope_theta: float = setting(10_000.0, "base of rotary wavelengths (qwen3)", low=1)
    zero_init: bool = setting(False, "start with zero projections onto the residual stream")

    loss_on: str = setting(
        "all",
        "tokens in the loss: all, or only the assistant's replies in conversations",
        ["all", "assistant"],
        section="optimisation",
    )
    optimizer: str = setting(
        "adamw", "muon: Muon for the blocks' matrices, AdamW for the rest", ["adamw", "muon"]
    )
    batch_size: int = setting(32, "sequences in an optimiser step, over all GPUs", low=1)
    micro_batch_size: int | None = setting(
        None, "sequences in a micro-batch; must divide batch_size; None: all", low=1
    )
    learning_rate: float = setting(3e-4, "peak learning rate", low=0)
    min_lr: float | None = setting(
        None, "final learning rate; None: a tenth of the peak, with wsd 0", low=0
    )
    lr_schedule: str = setting("cosine", "wsd: constant, then linear decay", ["cosine", "wsd"])
    decay_fraction: float = setting(0.5, "share of the steps in which wsd decays", low=0)
    warmup_steps: int = setting(200, "steps of linear warm-up", low=0)
    embedding_lr: float | None = setting(
        None, "peak learning rate of positions and of untied tokens; None: learning_rate", low=0
    )
    muon_lr: float = setting(0.02, "peak learning rate of Muon's matrices", low=0)
    muon_momentum: float = setting(0.95, "Muon's momentum", low=0)
    weight_decay: float = setting(0.1, "decoupled weight decay, on matrices only", low=0)
    beta1: float = setting(0.9, "AdamW's momentum", low=0)
    beta2: float = setting(0.95, "AdamW's second-moment decay per step", low=0)
    beta2_tokens: float | None = setting(
        None, "half-life of the second moment in tokens; replaces beta2", low=1
    )
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping", low=0)
    epochs: float | None = setting(
        None, "passes over the training data; None: 1, or as many as max_steps takes", low=0
    )
    max_steps: int | None = setting(None, "steps in all; with epochs: whichever comes first", low=1)

    eval_interval: int = setting(
        500, "steps between evaluations; 0: only at the end", low=0, section="logging and saving"
    )
    eval_batches: int = setting(
        20, "batches in an evaluation; 0: the whole validation split", low=0
    )
    log_interval: int = setting(10, "steps between log lines", low=1)
    save_interval: int = setting(1000, "steps between checkpoints; 0: none by steps", low=0)
    save_minutes: float = setting(15.0, "minutes between checkpoints; 0: only by steps", low=0)
    keep_last: int = setting(2, "newest checkpoints to keep; the best is always kept", low=1)
    sample_prompts: list = setting([], "prompts to answer at each evaluation, in log and terminal")
    tensorboard: bool = setting(False, "also write the curves for TensorBoard")
    wandb: str | None = setting(None, "also send the curves to this Weights & Biases project")
    max_bad_steps: int = setting(
        10, "end the run after this many steps in a row with NaN or infinity; it skips each", low=1
    )

    cost_per_hour: float = setting(0.0, "price of the machine per hour", low=0, section="budget")
    max_cost: float | None = setting(None, "save and stop when this much is spent", low=0)
    max_hours: float | None = setting(None, "save and stop after this many hours in all", low=0)

    device: str = setting("auto", "auto, cuda, cuda:1, xpu, mps or cpu", section="machine")
    dtype: str = setting(
        "auto",
        "precision of matrix products; auto: the fastest that the device has",
        ["auto", "bfloat16", "float16", "float32"],
    )
    allreduce_dtype: str = setting(
        "float32", "precision of the gradients summed over GPUs", ["float32", "bfloat16"]
    )
    compile: bool | str | None = setting(
        None, "torch.compile; None: if the run is long enough; max: also tune kernels", ["max"]
    )
    fp8_head: bool = setting(
        False, "head's matrix products in 8 bits (L4, RTX 4090, H100 or newer)"
    )
    activation_checkpointing: bool = setting(False, "recompute activations to save memory")
    loss_chunks: int | None = setting(
        None, "compute head and loss in this many chunks; None: as memory demands", low=1
    )
    shard: bool = setting(False, "shard the model over torchrun's GPUs (FSDP2)")
    seed: int = setting(1337, "seed of initial weights, data order and dropout", low=0)

    # Not a setting: the names that preset and command line set. init_from must not contradict them.
    given = frozenset()


SETTINGS = {field.name: field for field in dataclasses.fields(Config)}


def load(argv: list[str]) -> Config:
    """The settings for a command line, `[PRESET.py] [--key=value ...]`.

    Prints the settings and exits for --help. Raises ConfigError.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(SETTINGS, Config()))
        sys.exit(0)
    if not argv:
        names = ", ".join(path.name for path in presets())
        raise ConfigError(
            "which run? Name a preset, as in python train.py config/demo.py; config/ has"
            f" {names}; --help lists the settings"
        )
    typed = dict(read_argument(arg, SETTINGS) for arg in argv if arg.startswith("--"))
    paths = [Path(arg) for arg in argv if not arg.startswith("--")]
    if len(paths) > 1:
        raise ConfigError(f"a run takes one preset, not {paths[0]} and {paths[1]}")
    values = read_preset(paths[0], SETTINGS) if paths else {}
    if typed.get("max_steps") or typed.get("epochs"):  # replaces both of the preset
        values |= {"max_steps": None, "epochs": None}
    values |= typed
    config = Config(**values)
    config.given = frozenset(values)
    if config.max_steps is None and config.epochs is None:
        config.epochs = 1.0
    if config.checkpoint_dir is None:
        run = paths[0].stem if paths else "run"
        config.checkpoint_dir = f"checkpoints/{run}"
    check(config)
    return config


def check(config: Config) -> None:
    """Raises ConfigError where settings contradict each other."""
    c = config
    if c.batch_size * c.block_size >= 2**31:
        raise ConfigError(
            f"batch_size = {c.batch_size} x block_size = {c.block_size}: a step must be below 2**31"
            " tokens; lower one of them"
        )
    micro = c.micro_batch_size
    if micro and c.batch_size % micro:
        fits = next(n for n in range(min(micro, c.batch_size), 0, -1) if c.batch_size % n == 0)
        raise ConfigError(
            f"micro_batch_size = {micro} does not divide batch_size = {c.batch_size}; the next"
            f" smaller that does is {fits}"
        )
    if c.arch == "qwen3" and c.bias and "bias" in c.given:
        raise ConfigError("bias = True, but arch = qwen3 has no biases; leave bias out")
    conflicts = {
        f"loss_chunks = {c.loss_chunks}": (c.loss_chunks or 1) > 1,
        "shard = True": c.shard,
        "loss_on = assistant": c.loss_on == "assistant",  # few targets: gradients beyond its range
    }
    for conflict, is_set in conflicts.items():
        if c.fp8_head and is_set:
            raise ConfigError(f"fp8_head = True does not go with {conflict}; leave one of them out")
    for name in ("beta1", "beta2", "muon_momentum"):
        if getattr(c, name) >= 1:
            raise ConfigError(f"{name} = {getattr(c, name)}: it must be below 1")
    if c.seed >= 2**32:
        raise ConfigError(f"seed = {c.seed}: it must be below 2**32")
    if (c.min_lr or 0) > c.learning_rate:
        raise ConfigError(f"min_lr = {c.min_lr} is above learning_rate = {c.learning_rate}")
    if c.decay_fraction > 1:
        raise ConfigError(f"decay_fraction = {c.decay_fraction}: it must be at most 1")
    if c.optimizer == "muon" and not c.learning_rate:
        raise ConfigError("optimizer = muon needs learning_rate > 0: muon_lr follows its schedule")
    if c.embedding_lr is not None and not c.learning_rate:
        raise ConfigError("embedding_lr needs learning_rate > 0, whose schedule it follows")
    if c.embedding_lr is not None and c.tie_weights and c.arch == "qwen3":
        raise ConfigError(
            "embedding_lr needs tie_weights = False: tied, it would be the head's too, and qwen3"
            " learns no positions; or set embedding_lr = None"
        )
    if c.max_cost is not None and not c.cost_per_hour:
        raise ConfigError(
            f"max_cost = {c.max_cost} needs cost_per_hour, the price of the machine per hour"
        )
    if c.epochs == 0:
        raise ConfigError("epochs = 0: nothing to train")
    check_folders(c.checkpoint_dir, c.mirror)
    check_start(c.init_from)


def check_folders(checkpoint_dir: str, mirror: str | None) -> None:
    """Raises ConfigError where a run or its mirror cannot be written."""
    if not checkpoint_dir or Path(checkpoint_dir).is_file():
        raise ConfigError(f"checkpoint_dir = {checkpoint_dir!r}: it must be a folder")
    if "://" in checkpoint_dir or checkpoint_dir.startswith("~"):
        raise ConfigError(
            f"checkpoint_dir = {checkpoint_dir}: it must be a folder of this machine, without ~;"
            " mirror = s3://bucket/runs copies each save to an address"
        )
    if Path(checkpoint_dir, "state.json").exists():
        raise ConfigError(
            f"checkpoint_dir = {checkpoint_dir} is one step of a run; the run is"
            f" {Path(checkpoint_dir).parent}"
        )
    if mirror is None:
        return
    if not mirror or mirror.startswith(("http://", "https://")) or Path(mirror).is_file():
        raise ConfigError(
            f"mirror = {mirror!r}: it must be a folder, or an address that takes files, such as"
            " s3://bucket/runs"
        )
    run = Path(checkpoint_dir).resolve()
    path = re.sub("^(file|local)://", "", mirror)
    copy = Path(path, run.name).resolve()
    if "://" not in path and (copy.is_relative_to(run) or run.is_relative_to(copy)):
        raise ConfigError(
            f"mirror = {mirror}: the copy of this run, {copy}, would be the run itself, inside it"
            " or around it; choose a folder on another disk, or an address"
        )


def check_start(init_from: str | None) -> None:
    """Raises ConfigError for what init_from means in nanoGPT, with what to write here."""
    if init_from is None or Path(init_from).exists():
        return
    if init_from in ("scratch", "resume"):
        raise ConfigError(
            f"init_from = {init_from}: leave init_from out; a run starts from new weights, and the"
            " same command continues it"
        )
    if init_from in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        raise ConfigError(
            f"init_from = {init_from}: the published weights are init_from ="
            f" hf://openai-community/{init_from}"
        )
