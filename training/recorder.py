"""What a run tells of itself: log.jsonl, the loggers, the terminal, the report.

Reads the parts of a run. What is not needed to continue a run never
ends it: a folder that takes no writes is reported once.
"""

import contextlib
import importlib.util
import math
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

import hardware
from formats import files, run_folder, run_log
from training import distributed, terminal
from training.loggers import Loggers
from training.setup import Run
from training.terminal import Evaluation, duration

QUIET_S = 20  # between lines where there is no terminal to show a progress bar on
WORTH_A_REPORT_S = 20  # of training: drawing takes about 3 s


class Recorder:
    """Writes and prints, in the first process alone."""

    def __init__(self, run: Run):
        self.run = run
        self.loggers = None
        self.unwritten = []  # records that the disk did not take
        self.complained = False
        self.last_step = {}  # its record
        self.losses = losses_since_evaluation(run.log)
        self.logged_step = run.state.progress.step
        self.printed_at = 0.0
        self.bar = None  # until the first step

    # -- the log ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Settings and log on the disk: the past up to this step, and a record of this start."""
        run, step = self.run, self.run.state.progress.step
        files.write_json(run.folder / "config.json", asdict(run.config))
        run_log.write(run.folder, run.log)
        self.loggers = Loggers(run.config, run.folder, step)
        data = {"dir": run.config.data_dir, "tokenizer": run.meta.tokenizer["kind"]}
        self.record(
            {"event": "start", "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            | run.versions()
            | {
                "python": platform.python_version(),
                "parameters": run.state.model.num_parameters(),
                "total_steps": run.schedule.total_steps,
                "steps_per_epoch": run.trainer.train_data.windows / run.config.batch_size,
                "data": data | run.meta.identity(),
            }
        )

    def record(self, values: dict) -> dict:
        """Write a record to the log, with step and time; returns it.

        One that the disk does not take waits for the next.
        """
        progress, cost = self.run.state.progress, self.run.budget.cost
        record = {
            "step": progress.step,
            **values,
            "elapsed_s": round(progress.elapsed_s, 3),
            "cost": round(cost, 4) if cost else cost,
        }
        if distributed.is_main:
            self.unwritten.append(record)
            with self.tolerate_disk():
                run_log.append(self.run.folder, *self.unwritten)
                self.unwritten.clear()
            if self.loggers:
                self.loggers.write(record)
        return record

    @contextlib.contextmanager
    def tolerate_disk(self):
        """A write that fails does not end the run; said once."""
        try:
            yield
        except OSError as error:
            if not self.complained:
                print(
                    f"\n{self.run.folder} takes no writes: {files.in_words(error)}; training goes"
                    " on",
                    file=sys.stderr,
                    flush=True,
                )
            self.complained = True

    def halved(self, sizes: dict) -> None:
        """Memory ran out: into the log, and into memory.json for the next start."""
        self.record({"event": "out of memory", **sizes})
        if distributed.is_main:
            with self.tolerate_disk():
                files.write_json(self.run.folder / "memory.json", self.run.memory.to_json())

    # -- while it runs ----------------------------------------------------------------------------

    def compiled(self, seconds: float, problem: str | None) -> None:
        """The end of the line that says "compiling ..."."""
        if problem:
            print(f"failed; training goes on without it. {problem}", flush=True)
        else:
            print(f"{seconds:.1f} s", flush=True)

    def open_bar(self) -> None:
        """Show the progress bar from here on, where there is a terminal."""
        self.bar = tqdm(
            total=self.run.schedule.total_steps,
            initial=self.run.state.progress.step,
            unit="step",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )

    def tick(self) -> None:
        """A step has been taken."""
        self.bar.update()

    def step(self, seconds: float) -> None:
        """Record this step and show it. seconds: of training, since the last record."""
        run, steps = self.run, self.run.state.progress.step - self.logged_step
        tokens = steps * run.config.batch_size * run.config.block_size
        speed = tokens / seconds
        peak = hardware.peak_flops(run.device)
        mfu = None
        if peak:
            mfu = round(
                speed * run.state.model.flops_per_token() / (peak * distributed.world_size), 4
            )
        loss, norm, bad_steps = run.trainer.take_window()
        self.last_step = self.record(
            {
                "tokens": run.tokens,
                "epoch": round(run.epoch, 6),
                "loss": loss,
                "lr": run.state.optimizer.param_groups[0]["lr"],
                "grad_norm": norm if math.isfinite(norm) else None,
                "tokens_per_second": round(speed, 1),
                "mfu": mfu,
                "bad_steps": bad_steps,
            }
        )
        self.logged_step = run.state.progress.step
        if loss is not None:
            self.losses.append(loss)
        self.show_step(self.last_step)

    def show_step(self, record: dict) -> None:
        """The step on the progress bar; where there is none, a line now and then."""
        loss = "NaN" if record["loss"] is None else f"{record['loss']:.4f}"
        speed = record["tokens_per_second"]
        parts = [
            f"loss {loss}",
            f"{speed:,.0f} tok/s",
            f"MFU {record['mfu']:.1%}" if record["mfu"] else "MFU n/a",
        ]
        if record["cost"]:
            parts.append(f"cost {record['cost']:.2f}")
        if record["bad_steps"]:
            parts.append(f"{record['bad_steps']:,} skipped")
        self.bar.set_postfix_str(", ".join(parts))
        due = time.monotonic() > self.printed_at + QUIET_S
        if self.bar.disable and due and not self.run.schedule.evaluation_due:  # it has its own line
            self.printed_at = time.monotonic()
            skipped = ""
            if record["bad_steps"]:
                skipped = f", {record['bad_steps']:,} of the steps skipped for NaN or infinity"
            print(
                f"step {record['step']:,} of {self.run.schedule.total_steps:,}: loss {loss}, "
                f"{speed:,.0f} tokens/s, {duration(self.seconds_left())} left{skipped}",
                flush=True,
            )

    def seconds_left(self) -> float | None:
        """Seconds of training to the end at the last known speed."""
        speed, config = self.last_step.get("tokens_per_second"), self.run.config
        if not speed:
            return None
        return self.run.schedule.steps_left * config.batch_size * config.block_size / speed

    def evaluation(self, val_loss: float, best: float, answers: list[dict]) -> None:
        """Record and show an evaluation, with the answers to sample_prompts under it.

        val_loss: in nats a token. best: the lowest so far, this one included.
        """
        run, finite = self.run, math.isfinite(val_loss)
        bits = run.meta.bits_per_byte(val_loss, run.config.loss_on)
        training_loss = sum(self.losses) / len(self.losses) if self.losses else None
        if answers:
            self.record({"samples": answers})
        values = {
            "val_loss": val_loss if finite else None,
            "bits_per_byte": bits if finite else None,
        }
        self.record(values)  # written last: it marks the evaluation as complete
        evaluation = Evaluation(
            step=run.state.progress.step,
            total_steps=run.schedule.total_steps,
            epoch=run.epoch,
            training_loss=training_loss,
            val_loss=val_loss,
            bits_per_byte=bits,
            best=best,
            tokens_per_second=self.last_step.get("tokens_per_second"),
            cost=run.budget.cost,
            seconds_left=self.seconds_left(),
        )
        self.losses.clear()
        tqdm.write(str(evaluation))
        if answers:
            tqdm.write(terminal.samples(answers))
        sys.stdout.flush()

    def profile(self, table: str, seconds: dict) -> None:
        """Show what --profile found, and keep it in the log."""
        print(f"\n{table}", flush=True)
        rounded = {part: round(s, 6) for part, s in seconds.items()}
        self.record({"event": "profile", "seconds_a_step": rounded})

    # -- the end ----------------------------------------------------------------------------------

    def loss_curve(self) -> str:
        """The losses of all starts in characters; "" where there is nothing to draw."""
        training, validation = [], []
        for record in run_log.iterate(self.run.folder):
            if "loss" in record:
                training.append((record["step"], record["loss"]))
            if "val_loss" in record:
                validation.append((record["step"], record["val_loss"]))
        return terminal.curve(training, validation)

    def summary(self, outcome: str, best: float) -> None:
        """The last lines of a run, and its report. best: its lowest validation loss."""
        run, folder, curve = self.run, self.run.folder, self.loss_curve()
        cost = f", cost {run.budget.cost:.2f}" if run.budget.cost else ""
        if curve:
            print(f"\n{curve}")
        print(
            f"\n{outcome}: {run.state.progress.step:,} steps, {run.tokens:,} tokens in "
            f"{duration(run.state.progress.elapsed_s)} of training{cost}"
        )
        if not run_folder.steps(folder):
            return  # the budget took not a step
        if math.isfinite(best):
            print(f"best validation loss {best:.4f}, kept in {run_folder.find(folder)}")
        else:
            print(f"the last checkpoint is {run_folder.find(folder)}")
        print(f"  {generate_command(folder)}")
        if not curve:
            return
        if run.state.progress.elapsed_s > WORTH_A_REPORT_S and draw_report(folder):
            print(f"  report: {folder / 'report.html'}")
        else:
            print(f"  python -m tools.report {folder}")

    def close(self) -> None:
        """Nothing is drawn or logged any more."""
        if self.bar:
            self.bar.close()
        if self.loggers:
            self.loggers.close()


def losses_since_evaluation(log: list[dict]) -> list[float]:
    """The training losses of a log after its last evaluation."""
    losses = []
    for record in log:
        if "val_loss" in record:
            losses = []
        elif record.get("loss") is not None:
            losses.append(record["loss"])
    return losses


def draw_report(folder: Path, timeout_s: float = 60) -> bool:
    """Draw report.html of a run with tools.report, which needs matplotlib; whether it could."""
    if not importlib.util.find_spec("matplotlib"):
        return False
    command = [sys.executable, "-m", "tools.report", folder.absolute()]
    try:
        drawn = subprocess.run(
            command, cwd=Path(__file__).parent.parent, capture_output=True, timeout=timeout_s
        )
    except (OSError, subprocess.TimeoutExpired):  # no memory for another process, or too few cores
        return False
    return drawn.returncode == 0


def generate_command(folder: Path) -> str:
    """The command that generates from a run."""
    return f"python generate.py --checkpoint {folder} --prompt TEXT"
