"""What a run says in the terminal: a line an evaluation, the samples under it, and at the end its
loss curve in characters.

Text made of plain values, in ASCII but for the samples, so that it reads as well in a log file or a
Colab cell. Knows no run and no files.
"""

import textwrap


def evaluation(
    step: int,
    total: int,
    epoch: float,
    loss: float | None,
    val_loss: float,
    bits_per_byte: float,
    best: float,
    speed: float | None,
    cost: float | None,
    left_s: float | None,
) -> str:
    """An evaluation in a line. loss: of the last logged steps; losses in nats a token; speed:
    tokens/s; None leaves a part out.
    """
    parts = [
        f"step {step:,} of {total:,}, epoch {epoch:.2f}: "
        + (f"training loss {loss:.4f}" if loss is not None else ""),
        f"validation loss {val_loss:.4f}, {bits_per_byte:.3f} bits per byte, best {best:.4f}",
        f"{speed:,.0f} tokens/s" if speed else "",
        f"cost {cost:.2f}" if cost is not None else "",
        f"{duration(left_s)} left" if left_s else "",
    ]
    return ", ".join(part for part in parts if part).replace(": ,", ":")


def samples(answers: list[dict], width: int = 120) -> str:
    """Prompts and what the model made of them, indented under the evaluation's line. answers:
    [{"prompt", "text"}].

    Characters that would move the cursor or change the terminal's colours are shown as "?": an
    untrained model writes those too.
    """
    lines = []
    for answer in answers:
        text = (answer["prompt"] + answer["text"]).rstrip().expandtabs(4)
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
        lines += [
            part
            for line in text.split("\n")
            for part in textwrap.wrap(line, width, drop_whitespace=False) or [""]
        ] + [""]
    return "\n".join(f"  | {line}".rstrip() for line in lines[:-1])


def curve(training: list[tuple], validation: list[tuple], width: int = 64, height: int = 12) -> str:
    """Losses over steps, drawn in characters: "." for training (the mean of what falls into a
    column), "o" for validation.

    training, validation: (step, loss) in order. The first twentieth of the steps may lie above the
    picture. "" where there is nothing to draw.
    """
    points = [(step, loss) for step, loss in [*training, *validation] if loss is not None]
    if len({step for step, _ in points}) < 2:
        return ""
    end = max(step for step, _ in points)
    columns = [[] for _ in range(width)]
    for step, loss in training:
        if loss is not None:
            columns[min(width - 1, step * width // end)].append(loss)
    dots = [(x, sum(c) / len(c), ".") for x, c in enumerate(columns) if c]
    dots += [
        (min(width - 1, step * width // end), loss, "o")
        for step, loss in validation
        if loss is not None
    ]
    low = min(y for _, y, _ in dots)
    high = max([y for x, y, _ in dots if x >= width // 20] or [y for _, y, _ in dots])
    rows = [[" "] * width for _ in range(height)]
    for x, y, mark in dots:
        rows[min(height - 1, max(0, round((high - y) / (high - low or 1) * (height - 1))))][x] = (
            mark
        )
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(n, ''):>7} |{''.join(row)}".rstrip() for n, row in enumerate(rows)]
    return "\n".join(
        [
            f"{'loss':>7}   . training   o validation",
            *lines,
            f"{'':7} +{'-' * width}",
            f"{'':8} 0{f'step {end:,}':>{width - 1}}",
        ]
    )


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 5 s, 2 h 10 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    return f"{s // 60} min {s % 60} s" if s < 3600 else f"{s // 3600:,} h {s % 3600 // 60} min"
