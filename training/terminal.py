"""What a run says in the terminal, as text: evaluations, samples, its loss curve in characters.

Text made of plain values, in ASCII but for the samples, so that it reads as well in a log file or a
Colab cell. Knows no run and no files.
"""

import textwrap
from dataclasses import dataclass


@dataclass
class Evaluation:
    """An evaluation as a line. Losses in nats a token; None leaves a part out.

    training_loss: the mean since the evaluation before, as the report has it. best: the lowest
    validation loss so far.
    """

    step: int
    total_steps: int
    epoch: float
    training_loss: float | None
    val_loss: float
    bits_per_byte: float
    best: float
    tokens_per_second: float | None
    cost: float | None
    seconds_left: float | None

    def __str__(self) -> str:
        parts = []
        if self.training_loss is not None:
            parts.append(f"training loss {self.training_loss:.4f}")
        parts.append(f"validation loss {self.val_loss:.4f}")
        parts.append(f"{self.bits_per_byte:.3f} bits per byte")
        parts.append(f"best {self.best:.4f}")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.cost is not None:
            parts.append(f"cost {self.cost:.2f}")
        if self.seconds_left:
            parts.append(f"{duration(self.seconds_left)} left")
        where = f"step {self.step:,} of {self.total_steps:,}, epoch {self.epoch:.2f}"
        return f"{where}: {', '.join(parts)}"


def samples(answers: list[dict], width: int = 120) -> str:
    """Prompts and what the model made of them, indented. answers: [{"prompt", "text"}].

    Characters that would move the cursor or change the terminal's colours are shown as "?": an
    untrained model writes those too.
    """
    lines = []
    for answer in answers:
        text = (answer["prompt"] + answer["text"]).rstrip().expandtabs(4)
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        for line in text.split("\n"):
            lines += textwrap.wrap(line, width, drop_whitespace=False) or [""]
        lines.append("")
    return "\n".join(f"  | {line}".rstrip() for line in lines[:-1])


def curve(training: list[tuple], validation: list[tuple], width: int = 64, height: int = 12) -> str:
    """Losses over steps in characters: "." for training, "o" for validation.

    training, validation: (step, loss) in order; loss None where there is none. A "." is the mean of
    what falls into its column. The first twentieth of the steps may lie above the picture. Returns
    "" where there is nothing to draw.
    """
    training = [(step, loss) for step, loss in training if loss is not None]
    validation = [(step, loss) for step, loss in validation if loss is not None]
    if len({step for step, _ in training + validation}) < 2:
        return ""
    end = max(step for step, _ in training + validation)

    def column_of(step):
        return min(width - 1, step * width // end)

    columns = [[] for _ in range(width)]
    for step, loss in training:
        columns[column_of(step)].append(loss)
    dots = [(x, sum(losses) / len(losses), ".") for x, losses in enumerate(columns) if losses]
    dots += [(column_of(step), loss, "o") for step, loss in validation]
    low = min(y for _, y, _ in dots)
    high = max([y for x, y, _ in dots if x >= width // 20] or [y for _, y, _ in dots])
    rows = [[" "] * width for _ in range(height)]
    for x, y, mark in dots:
        down = round((high - y) / (high - low or 1) * (height - 1))
        rows[min(height - 1, max(0, down))][x] = mark
    labels = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"]
    lines = [f"{'loss':>7}   . training   o validation"]
    lines += [
        f"{label:>7} |{''.join(row)}".rstrip() for label, row in zip(labels, rows, strict=True)
    ]
    lines += [f"{'':7} +{'-' * width}", f"{'':8} 0{f'step {end:,}':>{width - 1}}"]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 5 s, 2 h 10 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600:,} h {s % 3600 // 60} min"
