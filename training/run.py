"""One training run: model, data, optimiser and counters, and what is done with all of them
together.

A run is set up from its settings and from the checkpoint that it continues, takes steps, evaluates,
saves itself and writes its log. When it does what is the business of train.py; how files look is
that of formats/run_folder.py and training/dataset.py.
"""

import contextlib
import gc
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.profiler import record_function

import hardware
from config import Config
from formats import files, pretrained, run_folder
from formats.run_folder import CheckpointError
from generating import decode
from hardware import out_of_memory
from model import GPT
from training import ranks
from training.dataset import Dataset, read_meta
from training.guard import RunError
from training.loggers import Loggers, check_installed
from training.saver import Saver
from training.setup import changes, check_same, encode_prompts, load_tokenizer, model_config
from training.step import (
    compile_or_not,
    evaluate,
    forward_backward,
    learning_rate_at,
    make_optimizer,
    optimizer_step,
)


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint."""

    step: int = 0
    sequences: int = 0  # drawn from the training data so far: the position in the data order
    elapsed_s: float = 0.0  # of training, compilation included, evaluation and saving not
    running_s: float = 0.0  # of everything, over all starts: what a rented machine costs
    # Since the last log line: the sum of losses and how many; and bad steps in a row, and in all.
    # On the device while training.
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])


class Run:
    """One training run: what `train` sets up, and what it then does with all of it together."""

    def __init__(self, config: Config):
        """Find device and data, build the model, continue from a checkpoint if there is one. Writes
        nothing.
        """
        self.started = time.monotonic()
        check_installed(config)
        self.config, self.folder = config, Path(config.checkpoint_dir)
        self.device = hardware.find_device(config.device, ranks.local)
        hardware.respect_quota()
        self.dtype = hardware.find_dtype(self.device, config.dtype)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            ranks.connect(self.device)
        self.meta = read_meta(config.data_dir)
        self.tokenizer = load_tokenizer(config.data_dir, self.meta)
        self.prompts = encode_prompts(self.tokenizer, config.sample_prompts)
        resumed, state = self.find_resume()
        source = pretrained.load(config.init_from) if config.init_from and not resumed else None
        if source:
            source.check_fits(config, self.tokenizer)
        shape = {} if not config.init_from else state["model"] if resumed else asdict(source.config)
        pretrained.fill_shape(config, shape)
        self.model_config = model_config(config, self.meta, shape.get("vocab_size"))
        if resumed:
            self.check_resume(resumed, state)

        place = config.block_size, self.device, config.data_location
        self.train_data = Dataset(config.data_dir, self.meta, "train", *place)
        self.val_data = (
            Dataset(config.data_dir, self.meta, "val", *place)
            if self.meta.splits["val"].tokens
            else None
        )

        torch.set_float32_matmul_precision("high")  # TF32 where products stay in float32
        torch.manual_seed(config.seed)
        self.model = GPT(self.model_config, config.zero_init).to(self.device)
        if source:
            self.model.load_state_dict(source.cut_to(config.block_size))
        self.forward = self.model  # until compile()
        sequences = (
            config.max_steps * config.batch_size
            if config.max_steps
            else config.epochs * self.train_data.windows
        )
        pays = hardware.compile_pays(
            self.device, sequences * config.block_size * self.model.flops_per_token()
        )
        self.compiles = pays if config.compile is None else config.compile
        self.optimizer = make_optimizer(self.model, config, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.progress = self.load(resumed, state) if resumed else Progress()
        self.sums = torch.tensor(self.progress.sums, device=self.device)
        self.running_before = self.progress.running_s
        self.saved_step, self.saved_at = self.progress.step, time.monotonic()
        self.unwritten, self.complained, self.loggers = [], False, None

        left = math.ceil(
            (config.epochs * self.train_data.windows - self.progress.sequences) / config.batch_size
        )
        self.total_steps = config.max_steps or self.progress.step + max(0, left)
        self.log = [r for r in run_folder.read_log(self.folder) if r["step"] <= self.progress.step]
        self.evaluated = max((r["step"] for r in self.log if "val_loss" in r), default=0)
        named = files.read_json(self.folder / "best.json", step=int, val_loss=float) or {}
        kept = {run_folder.step_of(folder) for folder in run_folder.steps(self.folder)}
        scored = [
            r
            for r in (named, *self.log)
            if r.get("val_loss") is not None
            and r["step"] in kept
            and r["step"] <= self.progress.step
        ]
        self.known_best = min(scored, key=lambda r: r["val_loss"], default=None)
        self.saver = Saver(
            self.folder,
            config.keep_last,
            self.progress.step,
            self.known_best["val_loss"] if self.known_best else math.inf,
        )
        self.share = config.batch_size // ranks.count  # sequences a step of this process
        self.micro_batch = self.eval_micro_batch = divisor(
            self.share, config.micro_batch_size or self.share
        )
        self.recall_memory()
        self.check_together()

    def check_together(self):
        """Raises RunError unless all processes see the same checkpoint, log and data."""
        seen = run_folder.fingerprint(
            {
                "step": self.progress.step,
                "evaluated": self.evaluated,
                "data": self.meta.identity(),
                "steps": self.total_steps,
                "micro": self.micro_batch,
            }
        )
        if len(set(ranks.gather(int(seen[:12], 16)))) > 1:
            raise RunError(
                "the processes of this run do not see the same checkpoint or data; several"
                f" machines need {self.folder} and {self.config.data_dir} on a shared disk, or"
                " copies on each"
            )

    def find_resume(self):
        """The step folder to continue from and its state, or (None, {}). Raises CheckpointError
        where `resume` forbids what is there.
        """
        mode = self.config.resume
        if mode == "never" and run_folder.steps(self.folder):
            raise CheckpointError(
                f"{self.folder} already holds a run, and resume = never: choose another"
                " checkpoint_dir, or remove that folder"
            )
        folder, state, self.problems = run_folder.latest(self.folder)
        for problem in self.problems:
            print(f"passed over: {problem}")
        if not folder and self.problems:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole; to start anew, choose another"
                " checkpoint_dir"
            )
        if not folder and mode == "must":
            raise CheckpointError(
                f"resume = must, but there is no checkpoint at {self.folder};"
                f" {run_folder.what_is_there(self.folder)}"
            )
        if folder:
            state["model"] = asdict(run_folder.read_shape(folder, state))
        return folder, state

    def check_resume(self, folder, state):
        """Raises CheckpointError where shape, data or seed are not those of the checkpoint; prints
        what else has changed.
        """
        saved = state | {"optimizer": state["settings"].get("optimizer", "adamw")}
        now = {
            "model": asdict(self.model_config),
            "data": self.meta.identity(),
            "seed": self.config.seed,
            "optimizer": self.config.optimizer,
        }
        check_same(saved, now, folder)
        print(changes(state["settings"], asdict(self.config)), end="")

    def load(self, folder, state) -> Progress:
        """Weights and optimiser from a checkpoint; learning rate, decay and the like stay as they
        are set now.
        """
        self.model.load_state_dict(run_folder.load_tensors(folder / "model.pt"))
        saved = run_folder.load_tensors(folder / "optimizer.pt", mmap=False)
        for group, now in zip(
            saved["optimizer"]["param_groups"], self.optimizer.param_groups, strict=True
        ):
            group.update({k: v for k, v in now.items() if k != "params"})
        self.optimizer.load_state_dict(saved["optimizer"])
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
    def running_s(self) -> float:
        """Seconds that the run has taken in all, over all its starts."""
        return self.running_before + time.monotonic() - self.started

    @property
    def cost(self) -> float | None:
        """What the run has cost so far, in the unit of cost_per_hour."""
        return (
            self.running_s / 3600 * self.config.cost_per_hour if self.config.cost_per_hour else None
        )

    @property
    def over_budget(self) -> str | None:
        """Which budget is used up, in words, or None."""
        c = self.config
        if c.max_hours is not None and self.running_s > c.max_hours * 3600:
            return f"max_hours = {c.max_hours}"
        return (
            f"max_cost = {c.max_cost}"
            if c.max_cost is not None and self.cost > c.max_cost
            else None
        )

    @property
    def evaluation_due(self) -> bool:
        """Whether this step is one to evaluate at, and has not been yet."""
        step, interval = self.progress.step, self.config.eval_interval
        due = step == self.total_steps or interval and step % interval == 0
        return bool(self.val_data and step > self.evaluated and due)

    @property
    def save_due(self) -> bool:
        """Whether to save now. An evaluation is preceded by a save: it may be what runs out of
        memory.
        """
        step, interval, minutes = (
            self.progress.step,
            self.config.save_interval,
            self.config.save_minutes,
        )
        timed = minutes and time.monotonic() > self.saved_at + 60 * minutes and not self.saver.busy
        return step > self.saved_step and bool(
            self.evaluation_due
            or step == self.total_steps
            or timed
            or interval
            and step % interval == 0
        )

    def compile(self) -> str | None:
        """Compile the model; returns why it was not, if it was not."""
        self.forward, problem = self.within_memory(
            "micro_batch",
            lambda micro: compile_or_not(
                self.model,
                *self.train_data.batch(0, micro, self.config.seed),
                self.cast,
                self.scaler,
            ),
        )
        return problem

    def train_step(self, signals) -> torch.Tensor:
        """One optimiser step; returns the gradients' norm, on the device. Several processes each
        take their share of its sequences.
        """
        config, progress = self.config, self.progress
        with record_function("data"):
            x, y = self.train_data.batch(
                progress.sequences + ranks.rank * self.share, self.share, config.seed
            )
        loss = self.within_memory(
            "micro_batch",
            lambda micro: forward_backward(self.forward, x, y, micro, self.cast, self.scaler),
        )
        loss = ranks.add_up_gradients(self.model.parameters(), loss)
        with signals:
            lr = learning_rate_at(progress.step, self.total_steps, config)
            norm = optimizer_step(self.model, self.optimizer, self.scaler, lr, config.grad_clip)
            good = (
                loss if self.scaler.is_enabled() else norm
            ).isfinite()  # the scaler's own skips are no bad steps
            kept, bad = torch.where(good, loss, 0.0), (~good).float()
            self.sums = torch.stack(
                (
                    self.sums[0] + kept,
                    self.sums[1] + 1 - bad,
                    (self.sums[2] + 1) * bad,
                    self.sums[3] + bad,
                )
            )
            progress.step += 1
            progress.sequences += config.batch_size
        return norm

    def within_memory(self, which: str, work):
        """work(sequences at once), with half as many each time that the memory does not suffice, in
        whichever process. which: "micro_batch" or "eval_micro_batch". Raises RunError when a
        single sequence is too much.
        """
        while True:
            result, fits = None, True
            try:
                if self.config.dropout:  # dropout follows from (seed, step) as the data does: resuming needs no random state
                    torch.manual_seed(
                        (
                            self.config.seed * 0x9E3779B97F4A7C15
                            + self.progress.step
                            + (ranks.rank << 40)
                        )
                        % 2**63
                    )
                result = work(getattr(self, which))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                fits = False
            if all(ranks.gather(fits)):
                return result
            # Out of the except clause: the error's traceback held on to the tensors.
            self.model.zero_grad(set_to_none=True)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            now, c = getattr(self, which), self.config
            if now == 1:
                raise RunError(
                    f"out of memory on {hardware.describe(self.device)} with a single sequence of"
                    f" {c.block_size} tokens. What takes less: block_size = {c.block_size // 2}, a"
                    f" smaller n_layer ({c.n_layer}) or n_embd ({c.n_embd})"
                    + (", dtype = bfloat16" if self.dtype == torch.float32 else "")
                    + "; or end what else uses the memory"
                )
            fits = divisor(self.share, now // 2)
            setattr(self, which, fits)
            self.eval_micro_batch = min(
                self.eval_micro_batch, self.micro_batch
            )  # the same memory, and compiled for the same shape
            print(
                f"\nout of memory with {now} sequences at once; from here on {fits}, and the same"
                f" {c.batch_size} a step",
                flush=True,
            )
            if not c.dry_run:
                self.record({"event": "out of memory", which: fits})
                with self.tolerate_disk():
                    if ranks.main:
                        files.write_json(self.folder / "memory.json", self.memory())

    def memory(self) -> dict:
        """What memory.json records: the sequences at once that fitted, and where."""
        where = {
            "device": hardware.describe(self.device),
            "micro_batch_size": self.config.micro_batch_size,
        }
        return where | {"micro_batch": self.micro_batch, "eval_micro_batch": self.eval_micro_batch}

    def recall_memory(self):
        """Begin with the sequences at once that an earlier start on such a device ended with,
        unless micro_batch_size is set anew.
        """
        known = (
            files.read_json(self.folder / "memory.json", micro_batch=int, eval_micro_batch=int)
            or {}
        )
        if all(known.get(name) == self.memory()[name] for name in ("device", "micro_batch_size")):
            for which in ("micro_batch", "eval_micro_batch"):
                setattr(
                    self,
                    which,
                    divisor(self.share, max(1, min(getattr(self, which), known[which]))),
                )

    def record(self, values: dict) -> dict:
        """Write a line to the log, with step and time; returns it. A line that the disk does not
        take waits for the next.
        """
        line = {
            "step": self.progress.step,
            **values,
            "elapsed_s": round(self.progress.elapsed_s, 3),
            "cost": self.cost and round(self.cost, 4),
        }
        if not ranks.main:
            return line
        self.unwritten.append(line)
        with self.tolerate_disk():
            run_folder.append_log(self.folder, *self.unwritten)
            self.unwritten.clear()
        if self.loggers:
            self.loggers.write(line)
        return line

    def begin_log(self) -> None:
        """What the log holds up to this step stays; then a line on this start: machine, versions,
        data and the length of the run.
        """
        run_folder.write_log(self.folder, self.log)
        if self.known_best:  # a crash may have come between a save and its evaluation's mark
            files.write_json(
                self.folder / "best.json", {k: self.known_best[k] for k in ("step", "val_loss")}
            )
        self.loggers = Loggers(self.config, self.folder, self.progress.step)
        data = {
            "dir": self.config.data_dir,
            "tokenizer": self.meta.tokenizer["kind"],
            **self.meta.identity(),
        }
        size = {
            "parameters": self.model.num_parameters(),
            "total_steps": self.total_steps,
            "steps_per_epoch": self.train_data.windows / self.config.batch_size,
        }
        self.record(
            {
                "event": "start",
                "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                **self.versions(),
                "python": platform.python_version(),
                **size,
                "data": data,
            }
        )

    @contextlib.contextmanager
    def tolerate_disk(self):
        """What is not needed to continue the run does not end it when its folder takes no writes;
        said once.
        """
        try:
            yield
        except OSError as error:
            if not self.complained:
                print(
                    f"\n{self.folder} takes no writes: {error}; training goes on",
                    file=sys.stderr,
                    flush=True,
                )
            self.complained = True

    def log_step(self, norm: float, speed: float) -> dict:
        """Write the log's line for this step and start new sums. norm: of the gradients; speed:
        tokens/s since the line before.
        """
        total, count, _, bad = self.sums.tolist()
        peak = hardware.peak_flops(self.device)
        line = {
            "tokens": self.tokens,
            "epoch": round(self.epoch, 6),
            "loss": total / count if count else None,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": round(speed, 1),
            "mfu": (
                round(speed * self.model.flops_per_token() / (peak * ranks.count), 4)
                if peak
                else None
            ),
            "bad_steps": int(bad),
        }
        self.sums[:2] = 0.0
        return self.record(line)

    def check_numbers(self):
        """Raises RunError after max_bad_steps steps in a row whose loss or gradients are no
        numbers.
        """
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1e-3:
            raise RunError(
                f"the gradients overflow float16 at any scale, up to step {self.progress.step:,};"
                " the weights took none of them. What helps: dtype = float32, or a lower"
                " learning_rate"
            )
        in_a_row = int(self.sums[2])
        if in_a_row >= self.config.max_bad_steps:
            self.saver.wait()
            fp16 = ", dtype = bfloat16 instead of float16" if self.dtype == torch.float16 else ""
            raise RunError(
                f"{in_a_row} steps in a row, up to step {self.progress.step:,}, had a loss or"
                " gradients that are no numbers; the weights took none of them. The last good"
                f" checkpoint is {self.folder}/step_{self.saver.saved:08d}. What helps: a lower"
                f" learning_rate (now {self.config.learning_rate}), a longer warmup_steps{fp16}, or"
                " another look at the data"
            )

    def profiled(self, table: str, seconds: dict) -> None:
        """Show what --profile found, and keep it in the log."""
        print(f"\n{table}", flush=True)
        self.record(
            {
                "event": "profile",
                "seconds_a_step": {part: round(s, 6) for part, s in seconds.items()},
            }
        )

    def versions(self) -> dict:
        """What the run runs on."""
        return {
            "torch": torch.__version__,
            "processes": ranks.count,
            "device": hardware.describe(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def copied(self) -> list[torch.Tensor]:
        """What a save copies, as parameters of the same sizes: each for itself and for its moments,
        AdamW's two or Muon's one.
        """
        return [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            for _ in range(2 if group.get("muon") else 3)
        ]

    def save(self) -> None:
        """Copy the state of this step and have it written, by the main process."""
        progress = self.progress
        self.saved_step, self.saved_at = progress.step, time.monotonic()
        if not ranks.main:
            return
        self.saver.wait()  # the copy would; it also says what the best is
        progress.sums, progress.running_s = self.sums.tolist(), self.running_s
        state = {
            "step": progress.step,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "best_val_loss": None if self.saver.best == math.inf else self.saver.best,
            "seed": self.config.seed,
            "progress": asdict(progress),
            "model": asdict(self.model_config),
            "data": self.meta.identity(),
            "settings": asdict(self.config),
            "versions": self.versions(),
        }
        optimizer = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        self.saver.save(state, self.model.state_dict(), optimizer, self.tokenizer.to_json())

    def save_now(self) -> bool:
        """Have this step on the disk before returning; False if that failed."""
        self.saver.wait()
        if self.saver.saved < self.progress.step:
            self.save()
            self.saver.wait()
        return not ranks.main or self.saver.saved == self.progress.step

    def evaluate(self) -> tuple[float, list[dict]]:
        """Validation loss, the answers to sample_prompts as {"prompt", "text"}, and whether this
        step is the best: all into the run's folder.
        """
        config, step = self.config, self.progress.step
        windows = config.eval_batches * config.batch_size
        total, count = self.within_memory(
            "eval_micro_batch",
            lambda micro: evaluate(self.forward, self.val_data, windows, micro, self.cast),
        )
        loss = sum(ranks.gather(total)) / sum(ranks.gather(count))
        samples = self.answer_prompts() if ranks.main else []
        if samples:
            self.record({"samples": samples})
        if loss < self.saver.best and ranks.main:
            self.saver.mark_best(step, loss)
        finite = math.isfinite(loss)
        self.record(
            {
                "val_loss": loss if finite else None,
                "bits_per_byte": self.bits_per_byte(loss) if finite else None,
            }
        )  # last: what has it is done with
        self.evaluated = step
        return loss, samples

    def bits_per_byte(self, loss: float) -> float:
        """Validation loss in nats a token as bits a byte of UTF-8 text, which compares across
        tokenizers.
        """
        val = self.meta.splits["val"]
        return loss / math.log(2) * val.tokens / max(1, val.text_bytes)

    def answer_prompts(self) -> list[dict]:
        """The answers to sample_prompts; none where the memory does not suffice for them."""
        try:
            self.model.eval()
            return [
                {"prompt": prompt, "text": self.complete(ids)}
                for prompt, ids in zip(self.config.sample_prompts, self.prompts, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            print(
                f"\nno memory for sample_prompts at step {self.progress.step:,}; training goes on",
                flush=True,
            )
            return []
        finally:
            self.model.train()

    def complete(self, prompt: list[int], max_new_tokens: int = 64) -> str:
        """What the model writes after the tokens of a prompt; it differs between evaluations by the
        weights alone.
        """
        generator = torch.Generator(self.device).manual_seed(self.config.seed)
        out = []
        with self.cast():
            for (next_id,) in decode.generate(
                self.model,
                [prompt],
                max_new_tokens,
                temperature=0.8,
                top_k=50,
                vocab_size=self.tokenizer.vocab_size,
                generator=generator,
            ):
                if next_id == self.tokenizer.eot_id:
                    break
                out.append(next_id)
        return self.tokenizer.decode(out)

    def banner(self) -> str:
        """What is about to run, in a few lines."""
        c = self.config
        where = {"gpu": "on the GPU", "ram": "in RAM", "mmap": "memory-mapped"}[
            self.train_data.location
        ]
        saves = [f"{c.save_interval:,} steps"] * bool(c.save_interval) + [
            f"{c.save_minutes:g} minutes"
        ] * bool(c.save_minutes)
        lines = {
            "device": (
                f"{f'{ranks.count} x ' if ranks.count > 1 else ''}{hardware.describe(self.device)},"
                f" {str(self.dtype).removeprefix('torch.')},"
                f" {'compiled' if self.compiles else 'not compiled'}"
            ),
            "model": (
                f"{self.model.num_parameters():,} parameters, {c.n_layer} layers x {c.n_embd},"
                f" context {c.block_size}, vocabulary {self.model_config.vocab_size:,}"
            ),
            "data": (
                f"{c.data_dir}, {self.train_data.length:,} tokens {where}; "
                + (
                    f"{self.val_data.length:,} for validation"
                    if self.val_data
                    else "none for validation, so no evaluations"
                )
            ),
            "step": (
                f"{c.batch_size * c.block_size:,} tokens = {c.batch_size} x {c.block_size}"
                + (
                    f", {self.micro_batch} sequences at a time"
                    if self.micro_batch < self.share
                    else ""
                )
                + (
                    ", as memory.json remembers"
                    if self.micro_batch < (c.micro_batch_size or self.share)
                    else ""
                )
            ),
            "start": (
                f"the weights of {c.init_from}"
                + (
                    ", which this run, begun already, does not read again"
                    if self.progress.step
                    else ""
                )
                if c.init_from
                else ""
            ),
            "run": (
                f"{self.total_steps:,} steps, {self.train_data.windows / c.batch_size:,.1f} an"
                " epoch"
                + (f"; continues at step {self.progress.step:,}" if self.progress.step else "")
            ),
            "warning": (
                f"warmup_steps = {c.warmup_steps} takes the whole run; lower it"
                if c.warmup_steps >= self.total_steps
                else ""
            ),
            "checkpoints": (
                f"{self.folder}, every {' and '.join(saves)}" if saves else str(self.folder)
            ),
        }
        return "\n".join(f"{name:12}{text}" for name, text in lines.items() if text)


def divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` up to `limit`."""
    return max(n for n in range(1, min(whole, limit) + 1) if whole % n == 0)
