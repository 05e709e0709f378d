"""The settings of a training run: their names, types, defaults and meanings.

A preset is a Python file of plain assignments (`learning_rate = 3e-4`), as the others in this
folder are; the command line overrides it (`--learning_rate=1e-4`). How both are read is in
config/loader.py. Nothing here knows what the settings are used for.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from config.loader import ConfigError, help_text, read_argument, read_preset, setting, settings_of

__all__ = ["SETTINGS", "Config", "ConfigError", "load"]


@dataclass
class Config:
    """The settings of one run. None stands for "derived from the others", as the meaning says."""

    # data and run
    data_dir: str = setting(
        "data/python_stdlib", "prepared folder to train on, as prepare_data.py writes it"
    )
    data_location: str = setting(
        "auto",
        "where the tokens lie; auto: the fastest that holds them",
        ["auto", "gpu", "ram", "mmap"],
    )
    checkpoint_dir: str | None = setting(None, "folder of this run; None: checkpoints/PRESET")
    mirror: str | None = setting(
        None, "folder or address (s3://bucket/runs) that each save is copied to"
    )
    resume: str = setting(
        "auto",
        "a run in checkpoint_dir: continue it, insist on one, or refuse it",
        ["auto", "must", "never"],
    )
    profile: bool = setting(False, "time the parts of a few steps: a table, and a Chrome trace")
    dry_run: bool = setting(False, "print the memory, disk, hours and money it will take, and end")
    # model
    init_from: str | None = setting(
        None, "weights to start from: a run, a step, a Hugging Face folder, or the address of one"
    )
    arch: str = setting(
        "gpt2", "qwen3: RMSNorm, rotary positions, SwiGLU, no biases", ["gpt2", "qwen3"]
    )
    n_layer: int = setting(12, "layers", low=1)
    n_head: int = setting(12, "attention heads a layer; must divide n_embd", low=1)
    n_embd: int = setting(768, "width of the model", low=1)
    block_size: int = setting(1024, "context: tokens a sequence", low=1)
    bias: bool = setting(True, "biases in Linear and LayerNorm, as in GPT-2; qwen3 has none")
    dropout: float = setting(0.0, "dropout probability, for data seen many times", low=0)
    tie_weights: bool = setting(True, "one matrix for embedding and head, as in GPT-2")
    n_inner: int | None = setting(
        None, "width of the MLP; None: 4 n_embd, qwen3: 8/3 n_embd", low=1
    )
    n_kv_head: int | None = setting(None, "heads of keys and values (qwen3); None: n_head", low=1)
    head_dim: int | None = setting(None, "width of a head (qwen3); None: n_embd / n_head", low=1)
    rope_theta: float = setting(10_000.0, "base of rotary wavelengths (qwen3)", low=1)
    zero_init: bool = setting(False, "begin with zero projections onto the residual stream")
    # optimisation
    loss_on: str = setting(
        "all", "assistant: in conversations its replies alone count", ["all", "assistant"]
    )
    optimizer: str = setting(
        "adamw", "muon: the blocks' matrices by Muon, the rest by AdamW", ["adamw", "muon"]
    )
    batch_size: int = setting(32, "sequences an optimiser step, over all GPUs", low=1)
    micro_batch_size: int | None = setting(
        None, "sequences at once in a GPU's memory; must divide batch_size; None: all", low=1
    )
    learning_rate: float = setting(3e-4, "peak learning rate", low=0)
    min_lr: float | None = setting(None, "the last step's; None: a tenth; wsd: 0", low=0)
    lr_schedule: str = setting(
        "cosine", "wsd: constant, then a straight line down", ["cosine", "wsd"]
    )
    decay_fraction: float = setting(0.5, "share of the steps in which wsd decays", low=0)
    warmup_steps: int = setting(200, "steps of linear warm-up", low=0)
    muon_lr: float = setting(0.02, "peak learning rate of Muon's matrices", low=0)
    muon_momentum: float = setting(0.95, "Muon's momentum", low=0)
    weight_decay: float = setting(0.1, "decoupled weight decay, on matrices only", low=0)
    beta1: float = setting(0.9, "AdamW's momentum", low=0)
    beta2: float = setting(0.95, "AdamW's second-moment decay a step", low=0)
    beta2_tokens: float | None = setting(
        None, "beta2 as a half-life in tokens, for any batch_size; overrides it", low=1
    )
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping", low=0)
    epochs: float | None = setting(
        None, "passes over the training data; None: 1, or as many as max_steps takes", low=0
    )
    max_steps: int | None = setting(
        None, "optimiser steps in all; with epochs: what is reached first", low=1
    )
    # looking, logging, saving
    eval_interval: int = setting(500, "steps between evaluations; 0: only at the end", low=0)
    eval_batches: int = setting(20, "batches an evaluation; 0: the whole validation split", low=0)
    log_interval: int = setting(10, "steps between log lines", low=1)
    save_interval: int = setting(1000, "steps between checkpoints; 0: none by steps", low=0)
    save_minutes: float = setting(15.0, "minutes between checkpoints; 0: only by steps", low=0)
    keep_last: int = setting(2, "newest checkpoints kept, and the best besides", low=1)
    sample_prompts: list[str] = setting(
        [], "prompts answered at each evaluation, into log and terminal"
    )
    report_minutes: float = setting(
        1.0, "least minutes between drawings of report.html; 0: none", low=0
    )
    tensorboard: bool = setting(False, "also write the curves for TensorBoard")
    wandb: str | None = setting(None, "also send the curves to this Weights & Biases project")
    max_bad_steps: int = setting(
        10, "steps in a row with NaN or infinity, all skipped, that end the run soon after", low=1
    )
    # budget
    cost_per_hour: float = setting(0.0, "price of the machine an hour, in any unit", low=0)
    max_cost: float | None = setting(None, "stop with a save when this much is spent", low=0)
    max_hours: float | None = setting(None, "stop with a save after so many hours in all", low=0)
    # machine
    device: str = setting("auto", "auto, cuda, cuda:1, mps or cpu")
    dtype: str = setting(
        "auto",
        "precision of matrix products; auto: the fastest that the device has",
        ["auto", "bfloat16", "float16", "float32"],
    )
    allreduce_dtype: str = setting(
        "float32", "precision of the gradients summed over GPUs", ["float32", "bfloat16"]
    )
    compile: bool | None = setting(
        None, "torch.compile; None: if the run repays it; max: tune kernels for minutes", ["max"]
    )
    cuda_graphs: bool = setting(False, "replay a step as CUDA graphs, for few sequences a GPU")
    fp8_head: bool = setting(False, "the head's products in 8 bits, from H100, L4 and RTX 4090 on")
    activation_checkpointing: bool = setting(False, "compute layers twice and keep less")
    loss_chunks: int | None = setting(
        None, "parts in which head and loss are computed; None: as memory demands", low=1
    )
    shard: bool = setting(False, "share the model out over torchrun's GPUs (FSDP2)")
    seed: int = setting(1337, "initial weights, data order and dropout follow from it", low=0)

    # Not a setting: the names that the preset and the command line set, which `init_from` must not
    # contradict.
    given = frozenset()


SETTINGS = settings_of(Config)


def load(argv: list[str]) -> Config:
    """The settings for a command line, `[PRESET.py] [--key=value ...]`.

    Prints the settings and exits for --help. Raises ConfigError.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text(SETTINGS))
        sys.exit(0)
    presets = [Path(arg) for arg in argv if not arg.startswith("--")]
    if len(presets) > 1:
        raise ConfigError(
            f"{presets[0]} and {presets[1]}: a run takes one preset (settings are given as"
            " --key=value)"
        )
    values = {}
    for preset in presets:
        values |= read_preset(preset, SETTINGS)
    typed = dict(read_argument(arg, SETTINGS) for arg in argv if arg.startswith("--"))
    if typed.get("max_steps") or typed.get("epochs"):  # how long to train is said anew
        values |= {"max_steps": None, "epochs": None}
    values |= typed
    config = Config(**values)
    config.given = frozenset(values)
    if config.max_steps is None and config.epochs is None:
        config.epochs = 1.0
    if config.checkpoint_dir is None:
        run = presets[0].stem if presets else "run"
        config.checkpoint_dir = f"checkpoints/{run}"
    check(config)
    return config


def check(config: Config) -> None:
    """Raises ConfigError where settings contradict each other."""
    micro = config.micro_batch_size
    if micro and config.batch_size % micro:
        smaller = range(1, min(micro, config.batch_size) + 1)
        fits = max(size for size in smaller if config.batch_size % size == 0)
        raise ConfigError(
            f"micro_batch_size = {micro} does not divide batch_size = {config.batch_size}; the next"
            f" smaller that does is {fits}"
        )
    if config.arch == "qwen3" and config.bias and "bias" in config.given:
        raise ConfigError(
            "bias = True, but arch = qwen3 has no biases; leave bias out, or take arch = gpt2"
        )
    if config.fp8_head and (config.loss_chunks or 1) > 1:
        raise ConfigError(
            f"fp8_head = True, but loss_chunks = {config.loss_chunks}, whose products are in 16"
            " bits; leave one of them out"
        )
    for name in ("cuda_graphs", "fp8_head"):
        if config.shard and getattr(config, name):
            raise ConfigError(f"shard = True cannot go with {name} = True yet")
    if config.beta1 >= 1 or config.beta2 >= 1:
        raise ConfigError(f"beta1 = {config.beta1}, beta2 = {config.beta2}: both must be below 1")
    if config.seed >= 2**32:
        raise ConfigError(f"seed = {config.seed}: it must be below 2**32")
    if not config.checkpoint_dir or Path(config.checkpoint_dir).is_file():
        raise ConfigError(
            f"checkpoint_dir = {config.checkpoint_dir!r}: it must be a folder, there or to be made"
        )
    check_mirror(config.mirror, config.checkpoint_dir)
    check_start(config.init_from)
    if (config.min_lr or 0) > config.learning_rate:
        raise ConfigError(
            f"min_lr = {config.min_lr} is above learning_rate = {config.learning_rate}; min_lr ="
            " None takes a tenth of it"
        )
    if config.decay_fraction > 1:
        raise ConfigError(
            f"decay_fraction = {config.decay_fraction}: it is a share of the steps, at most 1"
        )
    if config.optimizer == "muon" and not config.learning_rate:
        raise ConfigError(
            "optimizer = muon needs a learning_rate above 0: the schedule of muon_lr follows it"
        )
    if config.max_cost is not None and not config.cost_per_hour:
        raise ConfigError(
            f"max_cost = {config.max_cost} needs cost_per_hour, the price of the machine an hour"
        )
    if config.epochs == 0:
        raise ConfigError("epochs = 0: nothing to train")


def check_mirror(mirror: str | None, checkpoint_dir: str) -> None:
    """Raises ConfigError for a mirror that takes no files, and for one that is the run itself."""
    if mirror is None:
        return
    if not mirror or mirror.startswith(("http://", "https://")) or Path(mirror).is_file():
        raise ConfigError(
            f"mirror = {mirror!r}: it must be a folder, or an address that takes files, such as"
            " s3://bucket/runs"
        )
    run = Path(checkpoint_dir).resolve()
    if (Path(mirror) / run.name).resolve() == run:
        raise ConfigError(
            f"mirror = {mirror}: the copy of this run would lie in {checkpoint_dir}, which is the"
            " run itself; choose a folder on another disk, or an address"
        )


def check_start(init_from: str | None) -> None:
    """Raises ConfigError for what init_from means in nanoGPT, with what to write here."""
    if init_from is None or Path(init_from).exists():
        return
    if init_from == "scratch":
        raise ConfigError(
            "init_from = scratch: leave init_from out, and a new run starts from new weights"
        )
    if init_from == "resume":
        raise ConfigError(
            "init_from = resume: leave init_from out; the command that started a run continues it"
            " (resume = must refuses to start a new one)"
        )
    if init_from in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        raise ConfigError(
            f"init_from = {init_from}: it takes a folder or an address; fetch it first (pip install"
            f" huggingface_hub):\n  hf download openai-community/{init_from} --local-dir"
            f" models/{init_from}\nthen init_from = models/{init_from}; or, without fetching it"
            f" first, init_from = hf://openai-community/{init_from}"
        )
