"""The settings of a training run: their names, types, defaults, limits and meanings.

A preset is a Python file of plain assignments (`learning_rate = 3e-4`), as the others in this
folder are; the command line overrides it (`--learning_rate=1e-4`). config/loader.py reads both.
Nothing here knows what the settings are used for.
"""

import dataclasses
import sys
from dataclasses import dataclass

from command_line import our_file
from config.loader import (
    ConfigError,
    check,
    help_text,
    presets,
    read_arguments,
    read_preset,
    read_run,
    setting,
)


@dataclass
class Config:
    """The settings of one run. None means "derived from the others"; the meaning says how."""

    data_dir: str = setting(
        "data/python_stdlib",
        "folder of tokens written by prepare_data.py",
        section="data and run",
        place=True,
    )
    checkpoint_dir: str | None = setting(
        None, "folder of this run; by default checkpoints/ and the preset's name", place=True
    )
    mirror: str | None = setting(
        None, "folder or address (s3://bucket/runs) that gets a copy of each save", place=True
    )
    resume: str = setting(
        "auto",
        "auto: continue a run if there is one; must: only continue; never: only start",
        choices=["auto", "must", "never"],
    )
    profile: bool = setting(
        False, "measure where the time of a step goes: prints a table and writes a Chrome trace"
    )
    dry_run: bool = setting(
        False, "print the memory, disk space, hours and cost of the run, and train nothing"
    )

    init_from: str | None = setting(
        None,
        "weights to start from: a run, a step, a Hugging Face folder, or the address of one",
        section="model",
        place=True,
    )
    arch: str = setting(
        "gpt2",
        "architecture; llama: RMSNorm, rotary, SwiGLU, no biases; qwen3: QK norm too",
        choices=["gpt2", "qwen3", "llama"],
    )
    n_layer: int = setting(12, "layers", low=1, high=1000)
    n_head: int = setting(12, "attention heads per layer; must divide n_embd", low=1)
    n_kv_head: int | None = setting(
        None,
        "heads of keys and values, for grouped-query attention; not with gpt2; by default n_head",
        low=1,
    )
    n_embd: int = setting(768, "width of the model", low=1, high=2**19)
    block_size: int = setting(1024, "context: tokens in a sequence", low=1, high=2**20)
    bias: bool = setting(True, "biases in Linear and LayerNorm, as in GPT-2; others have none")
    dropout: float = setting(0.0, "dropout probability, for data seen many times", high=0.9)
    tie_weights: bool = setting(True, "one matrix for embedding and output, as in GPT-2")
    zero_init: bool = setting(
        False,
        "start with zeros in the last matrix of attention, MLP and (if not tied) output",
    )
    induction_init: bool = setting(
        False,
        "start with attention heads that copy repeated text; only with arch = qwen3 and"
        " zero_init = True",
    )

    loss_on: str = setting(
        "all",
        "tokens in the loss: all, or only the assistant's replies in conversations",
        choices=["all", "assistant"],
        section="optimization",
    )
    optimizer: str = setting(
        "adamw",
        "muon: Muon for the matrices inside the layers, AdamW for the rest",
        choices=["adamw", "muon"],
    )
    batch_size: int = setting(
        32, "sequences before each update of the weights, over all GPUs", low=1, high=2**20
    )
    micro_batch_size: int | None = setting(
        None, "sequences computed at once, at most; by default the whole batch", low=1
    )
    learning_rate: float = setting(3e-4, "peak learning rate")
    min_lr: float | None = setting(
        None, "final learning rate; by default 10% of the peak (cosine) or 0 (wsd)"
    )
    lr_schedule: str = setting(
        "cosine", "wsd: constant, then linear decay over the last half", choices=["cosine", "wsd"]
    )
    warmup_steps: int = setting(200, "steps of linear warm-up")
    embedding_lr: float | None = setting(
        None,
        "peak learning rate of the token embedding (if tie_weights = False) and of GPT-2's"
        " positions; by default learning_rate",
        low=1e-9,
    )
    muon_lr: float = setting(0.02, "peak learning rate of Muon's matrices", low=1e-9)
    muon_momentum: float = setting(0.95, "Muon's momentum", high=0.9999)
    weight_decay: float | None = setting(
        0.1,
        "weight decay, on matrices only; None: 0 for one epoch, more for each further one",
    )
    beta1: float = setting(0.9, "AdamW's momentum", high=0.9999)
    beta2: float = setting(
        0.95, "AdamW's second-moment decay per step; closer to 1 for small batches", high=0.99999
    )
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping")
    epochs: float | None = setting(
        None, "epochs to train; by default 1, or as many as max_steps needs", low=1e-6
    )
    max_steps: int | None = setting(
        None, "steps to train; with epochs, the run stops at whichever comes first", low=1
    )

    eval_interval: int = setting(
        500, "steps between evaluations; 0: only at the end", section="logging and saving"
    )
    eval_batches: int = setting(20, "batches in an evaluation; 0: the whole validation split")
    log_interval: int = setting(10, "steps between log lines", low=1)
    save_interval: int = setting(1000, "steps between checkpoints; 0: none by steps")
    save_minutes: float = setting(15.0, "minutes between checkpoints; 0: only by steps")
    keep_last: int = setting(2, "newest checkpoints to keep; the best is always kept", low=1)
    sample_prompts: list | None = setting(
        [],
        "prompts to continue at each evaluation, in log and terminal; None: three words of the"
        " validation text",
    )
    tensorboard: bool = setting(False, "also write the curves for TensorBoard")
    wandb: str | None = setting(
        None, "also send the curves to this Weights & Biases project, as PROJECT or TEAM/PROJECT"
    )

    cost_per_hour: float = setting(0.0, "price of the machine per hour", section="budget")
    max_cost: float | None = setting(None, "save and stop when this much is spent")
    max_hours: float | None = setting(None, "save and stop after this many hours in all")

    device: str = setting("auto", "auto, cuda, cuda:1, xpu, mps or cpu", section="machine")
    dtype: str = setting(
        "auto",
        "precision of matrix products; auto: bfloat16 where it is fast, else float16 or float32;"
        " with float32, NVIDIA GPUs from Ampere on multiply in TF32",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    compile: bool | None = setting(
        None, "compile the model; by default only if the run is long enough to gain time"
    )
    activation_checkpointing: bool = setting(False, "recompute activations to save memory")
    seed: int = setting(1337, "seed of weights, data order and dropout", high=2**32 - 1)

    # Not settings: the names that preset, run or command line set to a value, and those that the
    # command line sets.
    given: frozenset = dataclasses.field(default=frozenset(), repr=False, compare=False)
    typed: frozenset = dataclasses.field(default=frozenset(), repr=False, compare=False)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size

    def recorded(self) -> dict:
        """The settings as plain values, for config.json and state.json."""
        return {name: getattr(self, name) for name in SETTINGS}


SETTINGS = {field.name: field for field in dataclasses.fields(Config) if field.metadata}


def _learned():
    """The names of the settings on which the weights of a step depend."""
    section, names = None, {"seed"}
    for name, field in SETTINGS.items():
        section = field.metadata["section"] or section
        if section in ("model", "optimization"):
            names.add(name)
    return names - {"epochs", "max_steps", "micro_batch_size"}


LEARNED = _learned()


def load(argv: list[str]) -> Config:
    """The settings for a command line, `[PRESET.py or RUN] [--key=value ...]`; see read_arguments.

    A run, such as checkpoints/demo, stands for the settings it recorded. Prints the settings and
    exits for --help. Raises ConfigError.
    """
    if {"--help", "-h"}.intersection(argv):
        print(help_text(SETTINGS, Config()))
        sys.exit(0)
    if not argv:
        names = ", ".join(path.name for path in presets())
        raise ConfigError(
            f"which run? Name a preset, as in python {our_file('train.py')} config/demo.py; config/"
            f" has {names}; --help lists the settings"
        )
    typed, preset = read_arguments(argv, SETTINGS)
    values, name = {}, "run"
    if preset:
        read = read_run if preset.is_dir() else read_preset
        values, name = read(preset, SETTINGS), preset.stem
    if typed.get("max_steps") or typed.get("epochs"):  # replaces both of the preset
        values |= {"max_steps": None, "epochs": None}
    values |= typed
    if values.get("arch") in ("qwen3", "llama"):
        values["bias"] = False  # or a run would record biases that it does not have
    given = frozenset(name for name, value in values.items() if value is not None)
    config = Config(**values, given=given, typed=frozenset(typed))
    config.checkpoint_dir = config.checkpoint_dir or f"checkpoints/{name}"
    if config.max_steps is None and config.epochs is None:
        config.epochs = 1.0
    check(config)
    return config
