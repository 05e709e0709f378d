"""Train a GPT on a prepared data set, on one device.

    python train.py config/gpt2_small.py [--key=value ...]

Reads top to bottom: what is run, the parts of a step, then `train`, which sets them up and loops. All settings and their
meanings: config/__init__.py, or --help. Stopped in any way, the same command continues the run.
"""
import contextlib
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import checkpoint
import config as settings
import hardware
from checkpoint import CheckpointError
from config import Config, ConfigError
from dataset import DataError, Dataset, Meta, read_meta
from hardware import DeviceError
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer, TokenizerError


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint."""

    step: int = 0
    sequences: int = 0  # drawn from the training data so far: the position in the data order
    elapsed_s: float = 0.0  # of training, compilation included, evaluation and saving not
    loss_sum: float = 0.0  # over the steps since the last log line
    loss_count: int = 0


class Stop(BaseException):
    """Raised by a signal wherever the program is, but for the moments in `Signals.hold`. No `except Exception` swallows it."""

    def __init__(self, signum):
        self.signum = signum


class Signals:
    """SIGTERM, SIGHUP and Ctrl-C end the run with a save; a second Ctrl-C ends it at once."""

    def __init__(self):
        self.received, self.held = None, False
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), self.on_signal)

    def on_signal(self, signum, frame):
        if self.received and signum == signal.SIGINT:
            print("\nleft at once; the last checkpoint is whole", file=sys.stderr, flush=True)
            os._exit(130)
        if not self.received:
            self.received = signum
            if not self.held:
                raise Stop(signum)

    def __enter__(self):
        """Hold signals back: weights and counters change together, or not at all."""
        self.held = True

    def __exit__(self, *error):
        self.held = False
        if self.received:
            raise Stop(self.received)


# -- the parts of a step ------------------------------------------------------------------------------------------------


def learning_rate_at(step: int, total_steps: int, config: Config) -> float:
    """The learning rate of step `step` (from 0): linear warm-up, then a cosine that ends at min_lr with the last step."""
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    return low + (config.learning_rate - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_optimizer(model: GPT, config: Config, device: torch.device) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2017) with weight decay on matrices only: biases and norms are left alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-8, fused=device.type in ("cuda", "cpu"))


def forward_backward(model, x, y, micro_batch: int, cast, scaler) -> torch.Tensor:
    """Gradients of the mean loss over x, y: int64 [B, T], `micro_batch` sequences at a time. Returns that loss, on the device."""
    total = torch.zeros((), device=x.device)
    parts = len(x) // micro_batch
    for part_x, part_y in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
        with cast():
            loss = model(part_x, part_y) / parts
        scaler.scale(loss).backward()
        total += loss.detach()
    return total


def optimizer_step(model, optimizer, scaler, lr: float, grad_clip: float) -> torch.Tensor:
    """Clip the gradients, take the step, clear them. Returns their norm before clipping, on the device.

    A norm that is not finite leaves weights and optimiser as they are. Fused AdamW takes the clipping factor and that
    decision as tensors, in its one pass over the gradients, so nothing waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    fused = optimizer.defaults.get("fused") and not scaler.is_enabled()
    if fused:
        optimizer.grad_scale = (norm / grad_clip).clamp(min=1.0) if grad_clip else None
        optimizer.found_inf = 1.0 - norm.isfinite().float()
    elif grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    if fused or scaler.is_enabled() or norm.isfinite():
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def evaluate(model, data: Dataset, windows: int, micro_batch: int, cast) -> float:
    """Mean loss in nats a token over `windows` fixed windows of a split, all of it for 0.

    Runs with gradients enabled but never uses them: so the compiled forward is the one of training, with its memory and no second compilation.
    """
    dropout = model.config.dropout
    if dropout:
        model.eval()
    total, count = 0.0, 0
    for x, y, predictions in data.evaluation(windows, micro_batch):
        with cast():
            total = total + model(x, y).detach().double() * predictions
        count += predictions
    if dropout:
        model.train()
    return float(total) / count


def compile_or_not(model: GPT, x, y, cast, scaler):
    """The compiled model after one trial forward and backward on x, y; or, with the reason, the model as it is."""
    try:
        compiled = torch.compile(model)
        with cast():
            loss = compiled(x, y)
        scaler.scale(loss).backward()
        return compiled, None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler, an old GPU, a bug: none of them is a reason not to train
        torch._dynamo.reset()
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return model, f"{type(error).__name__}: {lines[0]}"
    finally:
        model.zero_grad(set_to_none=True)


# -- a run --------------------------------------------------------------------------------------------------------------


class Run:
    """One training run: what `train` sets up, and what it then does with all of it together."""

    def __init__(self, config: Config):
        """Find device and data, build the model, continue from a checkpoint if there is one. Writes nothing."""
        self.config, self.folder = config, Path(config.checkpoint_dir)
        self.device = hardware.find_device(config.device)
        self.dtype = hardware.find_dtype(self.device, config.dtype)
        self.meta = read_meta(config.data_dir)
        self.tokenizer = Tokenizer.load(Path(config.data_dir) / self.meta.tokenizer["file"])
        self.model_config = model_config(config, self.meta)
        resumed, state = self.find_resume()

        place = config.block_size, self.device, config.data_location
        self.train_data = Dataset(config.data_dir, self.meta, "train", *place)
        self.val_data = Dataset(config.data_dir, self.meta, "val", *place) if self.meta.splits["val"].tokens else None

        torch.set_float32_matmul_precision("high")  # TF32 where products stay in float32
        torch.manual_seed(config.seed)
        self.model = GPT(self.model_config).to(self.device)
        self.forward = self.model  # compiled when the loop starts
        self.optimizer = make_optimizer(self.model, config, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.progress = self.load(resumed, state) if resumed else Progress()
        self.loss_sum = torch.tensor(self.progress.loss_sum, device=self.device)
        self.saved_step = self.progress.step

        self.micro_batch = config.micro_batch_size or config.batch_size
        left = math.ceil((config.epochs * self.train_data.windows - self.progress.sequences) / config.batch_size)
        self.total_steps = config.max_steps or self.progress.step + max(0, left)
        self.log = [r for r in checkpoint.read_log(self.folder) if r["step"] <= self.progress.step]
        self.evaluated = max((r["step"] for r in self.log if "val_loss" in r), default=0)
        self.best = min((r["val_loss"] for r in self.log if "val_loss" in r), default=math.inf)

    def find_resume(self):
        """The step folder to continue from and its state, or (None, {}). Raises CheckpointError where `resume` forbids what is there."""
        mode = self.config.resume
        if mode == "never" and checkpoint.steps(self.folder):
            raise CheckpointError(f"{self.folder} already holds a run, and resume = never: choose another checkpoint_dir, or remove that folder")
        folder, state, problems = checkpoint.latest(self.folder)
        for problem in problems:
            print(f"passed over: {problem}")
        if not folder and problems:
            raise CheckpointError(f"no checkpoint in {self.folder} is whole; to start anew, choose another checkpoint_dir")
        if not folder and mode == "must":
            raise CheckpointError(f"resume = must, but there is no checkpoint at {self.folder}; {checkpoint.what_is_there(self.folder)}")
        if folder:
            check_same(state, {"model": asdict(self.model_config), "data": self.meta.identity(), "seed": self.config.seed}, folder)
        return folder, state

    def load(self, folder, state) -> Progress:
        """Weights and optimiser from a checkpoint; learning rate, decay and the like stay as they are set now."""
        self.model.load_state_dict(checkpoint.load_tensors(folder / "model.pt"))
        saved = checkpoint.load_tensors(folder / "optimizer.pt")
        now = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(saved["optimizer"])
        for group, values in zip(self.optimizer.param_groups, now, strict=True):
            group.update(values)
        if saved["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(saved["scaler"])
        return Progress(**{k: v for k, v in state["progress"].items() if k in asdict(Progress())})

    def cast(self):
        """Autocast to the run's dtype."""
        return hardware.autocast(self.device, self.dtype)

    @property
    def tokens(self) -> int:
        """Training tokens seen so far."""
        return self.progress.sequences * self.config.block_size

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.progress.sequences / self.train_data.windows

    @property
    def evaluation_due(self) -> bool:
        """Whether this step is one to evaluate at, and has not been yet."""
        step, interval = self.progress.step, self.config.eval_interval
        due = step == self.total_steps or interval and step % interval == 0
        return bool(self.val_data and step > self.evaluated and due)

    @property
    def save_due(self) -> bool:
        """Whether this step is one to save at. An evaluation is preceded by a save: it may be what runs out of memory."""
        step, interval = self.progress.step, self.config.save_interval
        return step > self.saved_step and bool(self.evaluation_due or step == self.total_steps or interval and step % interval == 0)

    def train_step(self, signals) -> torch.Tensor:
        """One optimiser step; returns the gradients' norm, on the device."""
        config, progress = self.config, self.progress
        if config.dropout:  # dropout follows from (seed, step) as the data does: resuming needs no random state
            torch.manual_seed((config.seed * 0x9E3779B97F4A7C15 + progress.step) % 2**63)
        x, y = self.train_data.batch(progress.sequences, config.batch_size, config.seed)
        loss = forward_backward(self.forward, x, y, self.micro_batch, self.cast, self.scaler)
        with signals:
            lr = learning_rate_at(progress.step, self.total_steps, config)
            norm = optimizer_step(self.model, self.optimizer, self.scaler, lr, config.grad_clip)
            self.loss_sum += loss
            progress.step += 1
            progress.sequences += config.batch_size
            progress.loss_count += 1
        return norm

    def save(self) -> None:
        """Write a checkpoint of this step."""
        progress = self.progress
        progress.loss_sum = float(self.loss_sum)
        state = {
            "step": progress.step,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "best_val_loss": None if self.best == math.inf else self.best,
            "seed": self.config.seed,
            "progress": asdict(progress),
            "model": asdict(self.model_config),
            "data": self.meta.identity(),
            "settings": asdict(self.config),
            "versions": {"torch": torch.__version__, "device": hardware.describe(self.device), "dtype": str(self.dtype).removeprefix("torch.")},
        }
        optimizer = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        checkpoint.save(self.folder, state, self.model.state_dict(), optimizer, self.tokenizer.to_json())
        self.saved_step = progress.step
        checkpoint.rotate(self.folder, self.config.keep_last)

    def log_line(self, norm: float, speed: float) -> dict:
        """Write and return the log's line for this step. norm: of the gradients; speed: tokens/s since the line before."""
        progress = self.progress
        peak = hardware.peak_flops(self.device)
        record = {
            "step": progress.step,
            "tokens": self.tokens,
            "epoch": round(self.epoch, 6),
            "loss": float(self.loss_sum) / progress.loss_count,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "tokens_per_second": round(speed, 1),
            "mfu": round(speed * self.model.flops_per_token() / peak, 4) if peak else None,
            "elapsed_s": round(progress.elapsed_s, 3),
        }
        checkpoint.append_log(self.folder, record)
        self.loss_sum.zero_()
        progress.loss_count = 0
        return record

    def evaluate(self) -> float:
        """Validation loss, the answers to sample_prompts, and whether this step is the best: all into the run's folder."""
        config, step = self.config, self.progress.step
        loss = evaluate(self.forward, self.val_data, config.eval_batches * config.batch_size, self.micro_batch, self.cast)
        if config.sample_prompts:
            samples = [{"prompt": prompt, "text": self.complete(prompt)} for prompt in config.sample_prompts]
            checkpoint.append_log(self.folder, {"step": step, "samples": samples})
        if loss < self.best:
            self.best = loss
            checkpoint.write_json(self.folder / "best.json", {"step": step, "val_loss": loss})
        record = {"step": step, "val_loss": loss, "bits_per_byte": self.bits_per_byte(loss), "elapsed_s": round(self.progress.elapsed_s, 3)}
        checkpoint.append_log(self.folder, record)  # last: a step with a val_loss in the log is done with
        self.evaluated = step
        return loss

    def bits_per_byte(self, loss: float) -> float:
        """Validation loss in nats a token as bits a byte of UTF-8 text, which compares across tokenizers."""
        val = self.meta.splits["val"]
        return loss / math.log(2) * val.tokens / max(1, val.text_bytes)

    def complete(self, prompt: str, max_new_tokens: int = 64) -> str:
        """What the model writes after a prompt; it differs between evaluations by the weights alone."""
        ids = torch.tensor(self.tokenizer.encode(prompt).astype("int64"), device=self.device)[None]
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        out = []
        self.model.eval()
        with self.cast():
            for next_id in self.model.generate(ids, max_new_tokens, 0.8, 50, vocab_size=self.tokenizer.vocab_size, generator=generator):
                if next_id == self.tokenizer.eot_id:
                    break
                out.append(int(next_id))
        self.model.train()
        return self.tokenizer.decode(out)

    def banner(self) -> str:
        """What is about to run, in a few lines."""
        c = self.config
        where = {"gpu": "on the GPU", "ram": "in RAM", "mmap": "memory-mapped"}[self.train_data.location]
        lines = {
            "device": f"{hardware.describe(self.device)}, {str(self.dtype).removeprefix('torch.')}",
            "model": f"{self.model.num_parameters():,} parameters, {c.n_layer} layers x {c.n_embd}, context {c.block_size}, vocabulary {self.model_config.vocab_size:,}",
            "data": f"{c.data_dir}, {self.train_data.length:,} tokens {where}; " + (f"{self.val_data.length:,} for validation" if self.val_data else "none for validation, so no evaluations"),
            "step": f"{c.batch_size * c.block_size:,} tokens = {c.batch_size} x {c.block_size}" + (f", {self.micro_batch} sequences at a time" if self.micro_batch < c.batch_size else ""),
            "run": f"{self.total_steps:,} steps, {self.train_data.windows / c.batch_size:,.1f} an epoch" + (f"; continues at step {self.progress.step:,}" if self.progress.step else ""),
            "checkpoints": str(self.folder),
        }
        return "\n".join(f"{name:12}{text}" for name, text in lines.items())


def model_config(config: Config, meta: Meta) -> GPTConfig:
    """The model's shape for these settings and data. Large vocabularies are rounded up to a multiple of 64, as tensor cores
    like it (GPT-2's 50,257 becomes 50,304); the ids so added are never sampled."""
    vocab_size = meta.vocab_size if meta.vocab_size <= 1024 else -(-meta.vocab_size // 64) * 64
    shape = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout", "tie_weights")}
    try:
        return GPTConfig(vocab_size=vocab_size, **shape)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_same(saved: dict, now: dict, folder: Path) -> None:
    """Raises CheckpointError listing every way in which shape, data or seed differ from what a checkpoint was made with."""
    differences = []
    for part, values in now.items():
        pairs = values.items() if isinstance(values, dict) else [(None, values)]
        for name, value in pairs:
            was = saved[part].get(name, value) if name else saved[part]
            if was != value and name != "dropout":
                differences.append(f"  {f'{part} {name}' if name else part}: {was} in the checkpoint, {value} now")
    if differences:
        raise CheckpointError(f"{folder} cannot be continued with these settings; set them back, or choose another checkpoint_dir:\n" + "\n".join(differences))


class Clock:
    """Seconds of training: between start() and stop(), with the device's work waited for."""

    def __init__(self, run: Run):
        self.run, self.since_log = run, 0.0
        self.start()

    def start(self):
        """Training goes on."""
        self.mark = time.perf_counter()

    def stop(self):
        """Add what has passed since start()."""
        hardware.synchronize(self.run.device)
        passed = time.perf_counter() - self.mark
        self.run.progress.elapsed_s += passed
        self.since_log += passed
        self.start()


def train(config: Config) -> None:
    """A whole run, from its settings to the last checkpoint."""
    signals = Signals()
    try:
        run = Run(config)
    except Stop as stop:
        leave(stop.signum, "nothing had begun")
    print(run.banner(), flush=True)
    if run.progress.step >= run.total_steps and not run.evaluation_due:
        print(f"finished already, at step {run.progress.step:,}. To train longer raise epochs or max_steps. To generate:\n  {generate_command(run)}")
        return
    run.folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(run.folder / "config.json", asdict(config))
    checkpoint.write_log(run.folder, run.log)
    try:
        loop(run, signals)
    except Stop as stop:
        with contextlib.suppress(Stop), signals:
            if run.saved_step < run.progress.step:
                run.save()
        leave(stop.signum, f"step {run.progress.step:,} is saved in {run.folder}; the same command continues")
    best = f", best validation loss {run.best:.4f}" if run.val_data else ""
    print(f"finished: {run.progress.step:,} steps, {run.tokens:,} tokens in {duration(run.progress.elapsed_s)} of training{best}\n  {generate_command(run)}")


def loop(run: Run, signals: Signals) -> None:
    """Step until the run is done; log, save and evaluate on the way."""
    config, progress = run.config, run.progress
    tokens_per_step = config.batch_size * config.block_size
    clock, logged, printed = Clock(run), run.progress.step, 0.0
    if config.compile:
        print("compiling ...", end=" ", flush=True)
        x, y = run.train_data.batch(0, run.micro_batch, config.seed)
        run.forward, problem = compile_or_not(run.model, x, y, run.cast, run.scaler)
        clock.stop()
        print(f"failed; training goes on without it. {problem}" if problem else f"{clock.since_log:.1f} s", flush=True)
        clock.since_log = 0.0
    bar = tqdm(total=run.total_steps, initial=progress.step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
    while True:
        if run.save_due or run.evaluation_due:
            clock.stop()
            if run.save_due:
                with signals:
                    run.save()
            if run.evaluation_due:
                loss = run.evaluate()
                tqdm.write(f"step {progress.step:,}: validation loss {loss:.4f}, {run.bits_per_byte(loss):.3f} bits per byte, best {run.best:.4f}; trained {duration(progress.elapsed_s)}")
                sys.stdout.flush()
            clock.start()
        if progress.step >= run.total_steps:
            break
        norm = run.train_step(signals)
        bar.update()
        if progress.step % config.log_interval == 0 or progress.step == run.total_steps:
            with signals:
                clock.stop()
                speed = (progress.step - logged) * tokens_per_step / clock.since_log
                record = run.log_line(float(norm), speed)
                logged, clock.since_log = progress.step, 0.0
            bar.set_postfix_str(f"loss {record['loss']:.4f}, {speed:,.0f} tok/s, MFU " + (f"{record['mfu']:.1%}" if record["mfu"] else "n/a"))
            if bar.disable and time.monotonic() > printed + 20:
                printed = time.monotonic()
                left = duration((run.total_steps - progress.step) * tokens_per_step / speed)
                print(f"step {progress.step:,} of {run.total_steps:,}: loss {record['loss']:.4f}, {speed:,.0f} tokens/s, {left} left", flush=True)
    bar.close()


def leave(signum: int, message: str):
    """End the process with the status that a signal calls for: 130 for Ctrl-C, 143 for SIGTERM."""
    print(f"\n{signal.Signals(signum).name}: {message}", flush=True)
    sys.exit(128 + signum)


def generate_command(run: Run) -> str:
    """The command that generates from a run."""
    return f"python generate.py --checkpoint {run.folder} --prompt TEXT"


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 5 s, 2 h 10 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60} min"


if __name__ == "__main__":
    try:
        train(settings.load(sys.argv[1:]))
    except (ConfigError, DataError, TokenizerError, CheckpointError, DeviceError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
