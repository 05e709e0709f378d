"""Samples, a curve and durations as text, in a terminal, a log file or a Colab cell alike.

ASCII except for the samples. Knows plain values only.
"""

import contextlib
import sys
import textwrap


class Output:
    """stdout or stderr of a run: training continues when the terminal or the log file is gone."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> None:
        """Write the text, or drop it if that fails."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)

    def flush(self) -> None:
        """Flush the stream; a disk that is full now may have room later."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def warn(message: str) -> None:
    """Print to stderr, below a progress bar."""
    print(f"\n{message}", file=sys.stderr)


def samples(answers: list[dict]) -> str:
    """Prompts and how the model continued them, indented. answers: [{"prompt", "text"}].

    Control characters, which an untrained model writes too, are shown as "?".
    """
    lines = []
    for answer in answers:
        text = (answer["prompt"] + answer["text"]).rstrip().expandtabs(4)
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        for line in text.split("\n"):
            lines += textwrap.wrap(line, 120, drop_whitespace=False) or [""]
        lines.append("")
    return "\n".join(f"  | {line}".rstrip() for line in lines[:-1])


def curve(training: list[tuple], validation: list[tuple], width: int = 64, height: int = 12) -> str:
    """Losses over steps in characters: "." for training, "o" for validation.

    training, validation: (step, loss) in order; loss None where there is none. A "." is the mean of
    its column. The steep first twentieth may be above the picture. Returns "" where there is
    nothing to draw.
    """
    training = [(step, loss) for step, loss in training if loss is not None]
    validation = [(step, loss) for step, loss in validation if loss is not None]
    steps = {step for step, _ in training + validation}
    if len(steps) < 2:
        return ""
    end = max(steps)
    columns = [[] for _ in range(width)]
    for step, loss in training:
        columns[min(width - 1, step * width // end)].append(loss)
    dots = [(x, sum(losses) / len(losses), ".") for x, losses in enumerate(columns) if losses]
    dots += [(min(width - 1, step * width // end), loss, "o") for step, loss in validation]

    low = min(y for _, y, _ in dots)
    high = max([y for x, y, _ in dots if x >= width // 20] or [y for _, y, _ in dots])
    rows = [[" "] * width for _ in range(height)]
    for x, y, mark in dots:
        row = round((high - y) / (high - low or 1) * (height - 1))
        rows[max(0, row)][x] = mark

    labels = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"]
    lines = [f"{'loss':>7}   . training   o validation"]
    for label, row in zip(labels, rows, strict=True):
        lines.append(f"{label:>7} |{''.join(row)}".rstrip())
    lines.append(f"{'':7} +{'-' * width}")
    lines.append(f"{'':8} 0{f'step {end:,}':>{width - 1}}")
    return "\n".join(lines)
