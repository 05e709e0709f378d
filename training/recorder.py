"""The reports of a run: log.jsonl, the loggers, the terminal, and samples for sample_prompts.

Builds every record of the log and every line that the loop prints. If a write fails, this is
reported, and the run continues.
"""

import contextlib
import importlib.util
import math
import platform
import statistics
import sys
import textwrap
import threading
import time
from unicodedata import category

from tqdm import tqdm

import hardware
from command_line import duration, our_file, our_tool, plural, quote
from formats import files, run_folder
from generating.text import complete
from model import GPT
from tokenizer_bpe import Tokenizer
from training import distributed, warn
from training.loggers import Loggers
from training.run import Run

NEW_TOKENS = 64  # generated per sample prompt
CONTROLS = {"Cc", "Zl", "Zp"}  # Unicode's categories of what moves the cursor
QUIET_S = 20  # seconds between lines where there is no progress bar
tqdm.set_lock(threading.RLock())  # tqdm's own is shared by processes; the end of a run leaks it


class Recorder:
    """Writes and prints in the first process only.

    The others' stdout is discarded (distributed.init), so only methods that write, read or compute
    need on_main.
    """

    def __init__(self, run: Run):
        self.run = run
        self.unwritten = []  # records that could not be written yet
        self.training_losses = []  # since the last evaluation of this start
        self.last_loss = 0.0  # of training or validation
        self.logged_step = run.step
        self.tokens_per_second = None
        self.printed_at = 0.0
        self.loggers = None
        if distributed.is_main:
            self.loggers = Loggers(run.config, run.folder, run.step, run.id)
        self.bar = tqdm(
            total=run.schedule.total_steps,
            initial=run.step,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} in {elapsed}{postfix}",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty() or not distributed.is_main,
        )

    # -- the log ----------------------------------------------------------------------------------

    @distributed.on_main
    def begin(self) -> None:
        """Write config.json, the log up to this step, and a record of this start."""
        run = self.run
        run_folder.write_config(run.folder, run.config.recorded(), run.id)
        if not run.step and run_folder.has_saved(run.folder):
            aside = run.folder / f"log_before_{time.strftime('%Y-%m-%d_%H%M%S')}.jsonl"
            (run.folder / run_folder.LOG).rename(aside)
            print(f"the checkpoints of this run are gone: it begins again, its log is in {aside}")
        run_folder.write_log(run.folder, run.log)
        start = {
            "event": "start",
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            **run.versions(),
            "python": platform.python_version(),
            "parameters": run.model.num_parameters(),
            "total_steps": run.schedule.total_steps,
            "data": {
                "dir": run.config.data_dir,
                "tokenizer": run.data.meta.tokenizer["kind"],
                **run.data.meta.identity(),
            },
        }
        self.record(start)

    @distributed.on_main
    def record(self, values: dict) -> None:
        """Add a record to the log, with step, time and cost.

        A record that cannot be written is kept for the next call; only the first such failure in a
        row is reported.
        """
        counters, cost = self.run.counters, self.run.clock.cost
        record = {
            "step": counters.step,
            **values,
            "elapsed_s": round(self.run.clock.elapsed_s, 3),
            "running_s": round(self.run.clock.running_s, 3),
            "cost": round(cost, 4) if cost else cost,
        }
        self.unwritten.append(record)
        try:
            run_folder.append_log(self.run.folder, *self.unwritten)
            self.unwritten.clear()
        except OSError as error:
            if len(self.unwritten) == 1:
                why = f"{self.run.folder} cannot be written to: {files.error_message(error)}"
                warn(f"{why}; training continues")
        self.loggers.write(record)

    def halved(self, before: int) -> None:
        """Record and print that micro-batches of `before` sequences do not fit in memory."""
        size = self.run.micro_batch
        self.record({"event": "out of memory", "micro_batch": size})
        print(
            f"micro-batches of {before} sequences do not fit in memory; training with {size}, and"
            " the same batch_size"
        )

    # -- while it runs ----------------------------------------------------------------------------

    def step(self, seconds: float) -> None:
        """Record and show this step. seconds: of training since the last recorded step."""
        run, step = self.run, self.run.step
        summed = run.loss_sums.pop()
        loss = summed["loss"]
        speed = (step - self.logged_step) * run.config.tokens_per_step / seconds
        mfu = None
        if peak := run.device.peak_flops:
            mfu = speed * run.model.flops_per_token() / (peak * distributed.world_size)
        self.record(
            {
                "tokens": run.tokens,
                "epoch": round(run.epoch, 6),
                **summed,
                "lr": run.learning_rate,
                "tokens_per_second": round(speed, 1),
                "mfu": round(mfu, 4) if mfu else None,
                "peak_memory_gb": hardware.peak_memory_gb(run.device.torch),
            }
        )
        self.logged_step, self.tokens_per_second = step, speed
        if loss is not None:
            self.training_losses.append(loss)
            self.last_loss = loss
        self.show_step(loss, mfu, summed["bad_steps"])

    def show_step(self, loss: float | None, mfu: float | None, bad_steps: int) -> None:
        """Show the step on the progress bar; without one, print a line every QUIET_S."""
        parts = ["loss NaN" if loss is None else f"loss {loss:.4f}"]
        if mfu:
            parts.append(f"MFU {mfu:.1%}")
        parts += self.pace()
        if bad_steps:
            parts.append(f"{bad_steps:,} skipped for NaN or infinity")
        text = ", ".join(parts)
        self.bar.set_postfix_str(text)
        due = time.monotonic() > self.printed_at + QUIET_S
        if self.bar.disable and due and not self.run.schedule.evaluation_due:  # has its own line
            self.printed_at = time.monotonic()
            print(f"{self.position()}: {text}")

    def position(self) -> str:
        return f"step {self.run.step:,} of {self.run.schedule.total_steps:,}"

    def pace(self) -> list[str]:
        """Speed, cost so far and time left as text, as far as they are known."""
        run, speed, cost = self.run, self.tokens_per_second, self.run.clock.cost
        tokens_left = run.schedule.steps_left * run.config.tokens_per_step
        parts = []
        if speed:
            parts.append(f"{speed:,.0f} tokens/s")
        if cost:
            parts.append(f"cost {cost:.2f}")
        if speed and tokens_left:
            parts.append(f"{duration(tokens_left / speed)} left")
        return parts

    @distributed.on_main
    def evaluation(self, val_loss: float) -> None:
        """Record and show an evaluation, followed by samples for sample_prompts.

        val_loss: in nats per token.
        """
        run, c = self.run, self.run.config
        answers = answer_prompts(run.model, run.data.tokenizer, c.sample_prompts, c.seed, run.cast)
        best = math.inf if run.saver.best is None else run.saver.best
        best = min(best, val_loss)  # this order ignores a NaN
        bits = run.data.meta.bits_per_byte(val_loss, c.loss_on)
        if answers:
            self.record({"samples": answers})
        values = {"val_loss": val_loss, "bits_per_byte": bits}
        # Last, as it marks the evaluation as complete.
        self.record(values if math.isfinite(val_loss) else dict.fromkeys(values))
        parts = []
        if self.training_losses:
            parts.append(f"training loss {statistics.mean(self.training_losses):.4f}")
        parts += [f"validation loss {val_loss:.4f}", f"{bits:.3f} bits per byte"]
        if math.isfinite(best):
            parts.append(f"best {best:.4f}")
        parts += self.pace()
        self.training_losses.clear()
        self.last_loss = val_loss
        tqdm.write(f"{self.position()}, epoch {run.epoch:.2f}: {', '.join(parts)}")
        if answers:
            tqdm.write(samples(answers))

    def profile(self, table: str, seconds: dict) -> None:
        print(f"\n{table}")
        rounded = {part: round(s, 6) for part, s in seconds.items()}
        self.record({"event": "profile", "seconds_a_step": rounded})

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the progress bar and the loggers, and write what the log could not take before."""
        self.bar.close()
        if self.unwritten:
            with contextlib.suppress(OSError):
                files.patiently(run_folder.append_log, self.run.folder, *self.unwritten)
        if self.loggers:
            self.loggers.close()

    def interrupted(self, reason: str) -> None:
        """Print the last line of a run that was ended by a signal or an error."""
        self.bar.close()
        step = "no step completed yet"
        if self.run.step:
            step = f"step {self.run.step:,} is saved in {self.run.folder}"
        print(f"\n{reason}: {step}. To continue:\n  {continue_command(self.run)}")

    @distributed.on_main
    def summary(self, ending: str) -> None:
        """Print the last lines of a run: its figures, and commands to go on with."""
        run, folder, cost = self.run, self.run.folder, self.run.clock.cost
        self.bar.close()
        line = f"{ending}: {plural(run.step, 'step')}, {run.tokens:,} tokens in "
        line += f"{duration(run.clock.elapsed_s)} of training"
        if cost:
            line += f", cost {cost:.2f}"
        if peak := hardware.peak_memory_gb(run.device.torch):
            line += f", at most {peak:.1f} GB of GPU memory"
        print(f"\n{line}")
        if not run_folder.steps(folder):
            return  # the budget was used up before the first step
        if run.saver.best is not None:
            print(f"best validation loss {run.saver.best:.4f}, kept in {run_folder.find(folder)}")
        else:
            print(f"the last checkpoint is {run_folder.find(folder)}")
        guessing = math.log(run.data.meta.vocab_size)
        if self.last_loss > guessing:
            print(
                f"its loss, {self.last_loss:.2f}, is no better than guessing ({guessing:.2f});"
                " train longer, or start again with a lower learning_rate"
            )
        print(f"  {generate_command(run)}")
        tool = "report" if importlib.util.find_spec("matplotlib") else "evaluate"
        print(f"  python {our_tool(tool)} {quote(folder.as_posix())}")


def continue_command(run: Run) -> str:
    """The command that continues a run with its own settings."""
    launcher = "python"
    if distributed.world_size > 1:  # several machines need further options
        launcher = f"torchrun --nproc_per_node={distributed.local_world_size}"
    return f"{launcher} {our_file('train.py')} {quote(run.folder.as_posix())}"


def generate_command(run: Run) -> str:
    """The command that generates from a run, or chats if it was trained on conversations."""
    command = f"python {our_file('generate.py')} --checkpoint {quote(run.folder.as_posix())}"
    if run.data.meta.splits["train"].mask:
        return f"{command} --chat"
    for prompt in run.config.sample_prompts[:1]:
        return f"{command} --prompt={quote(prompt)}"
    return command  # no default prompt: the text may lack its characters


# -- samples ---------------------------------------------------------------------------------------


def answer_prompts(
    model: GPT, tokenizer: Tokenizer, prompts: list[str], seed: int, cast
) -> list[dict]:
    """Generate a sample per prompt: [{"prompt", "text"}].

    The same weights and seed give the same text. cast: makes an autocast context.
    """
    settings = {"seed": seed, "temperature": 0.8, "top_k": 50}
    answers = []
    model.eval()
    for prompt in prompts:
        with cast():
            *_, (answer,) = complete(model, tokenizer, [prompt], NEW_TOKENS, **settings)
        answers.append({"prompt": prompt, "text": answer.text})
    model.train()
    return answers


def samples(answers: list[dict]) -> str:
    """Format prompts with their continuations, indented. answers: [{"prompt", "text"}].

    Control characters, which an untrained model may generate, are shown as "?".
    """
    lines = []
    for answer in answers:
        text = (answer["prompt"] + answer["text"]).rstrip().expandtabs(4)
        text = "".join(c if c == "\n" or category(c) not in CONTROLS else "?" for c in text)
        for line in text.split("\n"):
            lines += textwrap.wrap(line, 120, drop_whitespace=False) or [""]
        lines.append("")
    return "\n".join(f"  | {line}".rstrip() for line in lines[:-1])
