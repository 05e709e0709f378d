"""config/laptop.py, nanochat and transformers on the same documents: bits per byte over seconds.

nanochat brings its tokenizer of VOCABULARY ids, its loader and its recipe; the Trainer of
transformers gets our tokens and keeps its other defaults. All train for as many steps as take the
seconds given, by the times of a short run. Their schedules therefore end when their time does, and
PyTorch's cache has what it compiles for them. One function scores the weights of all.
"""

import dataclasses
import itertools
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import config as settings
import hardware
from benchmarks import ENVIRONMENT, edited_copy, run_apart, run_script, train_in
from config import Config
from formats import huggingface
from formats.data_folder import read_meta, read_tokens
from formats.run_folder import step_name
from generating.load import load_model
from preparing.sources import find_sources
from tokenizer_bpe import Tokenizer
from training.start import model_shape

VOCABULARY = 4096
RATES = (12, 24, 48)  # multiples of nanochat's, which are made for a batch 128 times as large
TRAINER_RATES = (1e-3, 3e-3)  # its default, 5e-5, is for fine-tuning
# Files are cut at the ends of lines into documents of about a context: nanochat's loader trains on
# the beginning of a longer one and drops the rest.
DOCUMENT = re.compile(r"(?s).{1,1500}(?:\n|\Z)|.{1500}")
HELD_OUT = 20  # of so many files one
SCORED = 100  # documents
SHORT, POINTS = 20, 10  # steps of a short run; points of a curve
OURS = "config/laptop.py"
OPTIONS = """
    --data_dir={data} --compile=True --eval_interval=0 --save_minutes=0 --keep_last=100
    --log_interval=1 --sample_prompts=[]
"""
# The learning rates of its base_train.py in July 2026; it scales them by batch size and width.
ITS_RATES = {"embedding": 0.3, "unembedding": 0.008, "matrix": 0.02, "scalar": 0.5}
COMMON, SEED = "nanochat/common.py", "torch.manual_seed(42)"  # a file of it, and a line there


def read_documents(data: str | None) -> tuple[list[str], list[str]]:
    """Documents to train on, and SCORED of those held out, in an order that is always the same.

    data: a folder of .txt files, or a glob; None: Python's standard library. A file is held out as
    a whole. Raises InputError.
    """
    train, held_out = [], []
    for i, source in enumerate(find_sources([data] if data else [])):
        text = Path(source.path).read_text(encoding="utf-8", errors="replace")
        (train if i % HELD_OUT else held_out).extend(DOCUMENT.findall(text))
    for documents in (train, held_out):
        random.Random(0).shuffle(documents)
    return train, held_out[:SCORED]


def bits_per_byte(
    model: Callable, documents: list[list[int]], context: int, text_bytes: int
) -> float:
    """Bits per byte in windows of the context from each document's start.

    model: ids, int64 [1, T] -> logits [1, T, V]. documents: the ids of each, after the one that a
    document begins with. text_bytes: of all their text.
    """
    nats = 0.0
    for ids in documents:
        for i in range(0, len(ids) - 1, context):
            window = torch.tensor(ids[i : i + context + 1])
            with torch.inference_mode():  # nanochat's forward takes no single id
                logits = model(window[None, :context])[0, : len(window) - 1].float().cpu()
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / math.log(2) / text_bytes


class Ours:
    """Runs of config/laptop.py. command: the words of train.py. config: their settings."""

    def __init__(self, folder: Path, documents: Path, extra: list[str]):
        data = folder / "data"
        options = [f"--vocab_size={VOCABULARY}", "--val_fraction=0", f"--out={data}"]
        run_script("prepare_data.py", str(documents), *options)
        self.folder = folder / "run"
        self.command = [OURS, *OPTIONS.format(data=data).split(), *extra]
        self.config = settings.load(self.command)
        self.device = hardware.find_device(self.config.device)

    def train(self, steps: int, save_every: int, seed: int) -> list[float]:
        """Seconds of training after each step; every save_every-th and the last are saved."""
        shutil.rmtree(self.folder, ignore_errors=True)
        options = [f"--max_steps={steps}", f"--save_interval={save_every}", f"--seed={seed}"]
        log = train_in(self.folder, *self.command, *options)
        return [record["elapsed_s"] for record in log if "loss" in record]

    def load(self, step: int) -> tuple[Callable, Callable]:
        """The model of a saved step, ids -> logits, and its tokenizer, a document -> ids."""
        return self.as_trained(load_model(self.folder / step_name(step), self.device)[0])

    def as_trained(self, model: Callable) -> tuple[Callable, Callable]:
        """A model in the precision of training, and the tokenizer of our data."""
        dtype = hardware.find_dtype(self.device, self.config.dtype)
        tokenizer = Tokenizer.load(self.config.data_dir)

        def logits(ids):
            with hardware.autocast(self.device, dtype):
                return model(ids.to(self.device))

        return logits, lambda text: [tokenizer.eot_id, *tokenizer.encode(text).tolist()]


def copy_checkout(path: Path, copy: Path, train: Path, val: Path, vocab_size: int) -> None:
    """Copy a checkout, with two parquet files as its shards, and train its tokenizer."""
    edited_copy(path, copy, COMMON, {SEED: 'torch.manual_seed(int(os.environ["SEED"]))'})
    shards = copy / "base" / "base_data_climbmix"
    shards.mkdir(parents=True)
    (shards / "shard_00000.parquet").symlink_to(train)
    (shards / "shard_00001.parquet").symlink_to(val)  # its loader takes the last for validation
    run_nanochat(copy, "scripts.tok_train", f"--vocab-size={vocab_size}", SEED="0")


def run_nanochat(copy: Path, *words: str, **variables: str) -> str:
    """Run one of its scripts with variables in the environment; returns what it prints."""
    env = ENVIRONMENT | {"NANOCHAT_BASE_DIR": str(copy / "base")} | variables
    result = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=copy,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        env=env,
    )
    if result.returncode:
        sys.exit(result.stdout)
    return result.stdout


class Nanochat:
    """Runs of a copy at the shape, batch and dtype of ours, with full attention as its runcpu.sh.

    Left to itself it takes float32 on a CPU, where a step in bfloat16 takes half the time. rates:
    what all its learning rates are multiplied with. command: the words of base_train.
    """

    def __init__(self, copy: Path, c: Config, device: torch.device, rates: float):
        self.copy, self.device = copy, device
        self.dtype = str(hardware.find_dtype(device, c.dtype)).removeprefix("torch.")
        self.command = [
            "scripts.base_train",
            f"--device-type={device.type}",
            f"--depth={c.n_layer}",
            f"--aspect-ratio={c.n_embd // c.n_layer}",  # it rounds the width up to whole heads
            f"--head-dim={c.n_embd // c.n_head}",
            f"--max-seq-len={c.block_size}",
            "--window-pattern=L",
            f"--device-batch-size={c.batch_size}",
            f"--total-batch-size={c.batch_size * c.block_size}",
            *(f"--{name}-lr={rates * value}" for name, value in ITS_RATES.items()),
            *("--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1", "--model-tag=run"),
        ]

    def train(self, steps: int, save_every: int, seed: int) -> list[float]:
        """Seconds of training after each step; every save_every-th and the last are saved."""
        options = [f"--num-iterations={steps}", f"--save-every={save_every}"]
        variables = {"NANOCHAT_DTYPE": self.dtype, "SEED": str(seed)}
        output = run_nanochat(self.copy, *self.command, *options, **variables)
        milliseconds = map(float, re.findall(r"\| dt: ([\d.]+)ms", output))
        return list(itertools.accumulate(ms / 1000 for ms in milliseconds))

    def load(self, step: int) -> tuple[Callable, Callable]:
        """The model of a saved step, ids -> logits, and its tokenizer, a document -> ids."""
        os.environ |= {"NANOCHAT_BASE_DIR": str(self.copy / "base"), "NANOCHAT_DTYPE": self.dtype}
        if str(self.copy) not in sys.path:
            sys.path.append(str(self.copy))
        from nanochat.checkpoint_manager import build_model

        folder = self.copy / "base" / "base_checkpoints" / "run"
        model, tokenizer, _ = build_model(folder, step, self.device, "eval")
        return model, lambda text: tokenizer.encode(text, prepend="<|bos|>")


class Trainer:
    """Runs of transformers' Trainer with its AdamW and its linearly falling learning rate.

    It trains a Llama of our shape on our tokens, with our batch and precision, and torch.compile.
    rate: the learning rate.
    """

    def __init__(self, folder: Path, ours: Ours, rate: float):
        self.folder, self.ours, self.rate = folder / "trainer", ours, rate
        self.command = ["transformers.Trainer", f"learning_rate={rate:g}"]

    def train(self, steps: int, save_every: int, seed: int) -> list[float]:
        """Seconds of training after each step; every save_every-th and the last are saved."""
        shutil.rmtree(self.folder, ignore_errors=True)
        c = self.ours.config
        return run_apart(train_llama, c, self.folder, self.rate, steps, save_every, seed)

    def load(self, step: int) -> tuple[Callable, Callable]:
        """The model of a saved step, ids -> logits, and our tokenizer, a document -> ids."""
        from transformers import LlamaForCausalLM

        path = self.folder / f"checkpoint-{step}"
        model = LlamaForCausalLM.from_pretrained(path).to(self.ours.device).eval()
        return self.ours.as_trained(lambda ids: model(ids).logits)


def train_llama(
    c: Config, folder: Path, rate: float, steps: int, save_every: int, seed: int
) -> list[float]:
    """Seconds after each step of Trainer; its checkpoints are in `folder`."""
    import transformers

    seconds = []

    class Clock(transformers.TrainerCallback):  # leaves out what is between steps, such as saving
        def on_step_begin(self, *args, **kwargs):
            self.begin = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            seconds.append(time.perf_counter() - self.begin)

    meta = read_meta(c.data_dir)
    tokens = torch.from_numpy(read_tokens(c.data_dir, meta, "train").astype("int64"))
    windows = tokens[: len(tokens) // c.block_size * c.block_size].view(-1, c.block_size)
    shape = dataclasses.replace(model_shape(c, meta.vocab_size), arch="llama")
    values = huggingface.config_values(shape, meta.vocab_size, meta.eot_id) | {"use_cache": False}
    device = hardware.find_device(c.device)
    dtype = hardware.find_dtype(device, c.dtype)
    transformers.set_seed(seed)
    arguments = transformers.TrainingArguments(
        str(folder),
        learning_rate=rate,
        max_steps=steps,
        per_device_train_batch_size=c.batch_size,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        torch_compile=True,
        use_cpu=device.type == "cpu",
        save_steps=save_every,
        seed=seed,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": window, "labels": window} for window in windows]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(values))
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    return list(itertools.accumulate(seconds))


def contenders(
    checkout: Path, data: str | None, seconds: float, extra: list[str], folder: Path
) -> tuple[dict[str, Callable], dict[str, list[str]], Config]:
    """nanochat and Trainer at several rates, and config/laptop.py: curves as functions of a seed.

    Also their command lines, and the settings of ours. seconds: of a run. extra: settings of ours;
    the others take shape and batch from them. folder: for all that is written.
    """
    import pyarrow as pa  # the other comparisons do without it
    import pyarrow.parquet as pq

    texts, held_out = read_documents(data)
    train, val = folder / "train.parquet", folder / "val.parquet"
    pq.write_table(pa.table({"text": texts}), train)
    pq.write_table(pa.table({"text": held_out}), val)
    copy, ours = folder / "nanochat", Ours(folder, train, extra)
    copy_checkout(checkout, copy, train, val, VOCABULARY)
    c = ours.config
    programs = [
        {f"nanochat, rates x {n}": Nanochat(copy, c, ours.device, n) for n in RATES},
        {f"Trainer, rate {n:g}": Trainer(folder, ours, n) for n in TRAINER_RATES},
        {OURS: ours},
    ]
    curves, commands = {}, {}
    for program in programs:
        steps = steps_in(seconds, next(iter(program.values())))
        for name, run in program.items():
            curves[name] = partial(curve, run, steps, held_out, c.block_size)
            commands[name] = [*run.command, f"{steps} steps"]
    return curves, commands, c


def steps_in(seconds: float, run) -> int:
    """Steps that take so many seconds without compilation, by a short run."""
    times = run.train(SHORT, SHORT, seed=0)
    step = statistics.median(b - a for a, b in itertools.pairwise(times))
    return max(POINTS, round(seconds / step))


def curve(
    run, steps: int, documents: list[str], context: int, seed: int
) -> list[tuple[float, float]]:
    """Seconds of training and bits per byte of the documents, at POINTS steps of a run."""
    every = math.ceil(steps / POINTS)
    seconds = run.train(steps, every, seed)
    points = []
    for step in [*range(every, steps, every), steps]:
        model, encode = run.load(step)
        size = sum(len(text.encode()) for text in documents)
        bits = bits_per_byte(model, list(map(encode, documents)), context, size)
        points.append((seconds[step - 1], bits))
    return points
