"""What a text and some minutes give: bits per byte of held-out text, from scratch and from weights.

    python -m benchmarks.texts [NAME=]TEXT ... [--minutes 2,15] [--base FOLDER] [--out data/texts]

TEXT is what prepare_data.py takes. From scratch it is prepared with a tokenizer of its own, and
trained with the preset that tools.size writes for the minutes; with --base, a folder in Hugging
Face's format, it is prepared with the base's tokenizer, scored with the base as it is, and trained
with config/finetune.py for as many steps as take the minutes, or as many epochs as the preset has.
All are scored on the same held-back text, as tools.evaluate does.

Steps count, compilation and evaluations come on top. One run at a time; each is written to the
result as it ends. After a stop the same command goes on where it was. It prints a table and the
first lines of a sample of each, and with matplotlib draws a picture.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import config as settings
import hardware
from benchmarks import (
    argument_parser,
    result_path,
    run_apart,
    run_main,
    run_script,
    train_in,
    write,
)
from benchmarks.throughput import TIMED, our_speed
from command_line import local_path, place, positive
from formats.data_folder import read_meta
from formats.files import read_json
from generating.load import load_model, open_checkpoint
from generating.text import complete
from tools import command
from tools.evaluate import validation_loss
from training.dataset import Dataset

FINETUNE = "config/finetune.py"
CONTEXT = 512  # tokens with which all are scored, the context of config/laptop.py
SHORT = 12  # steps of the run that is timed
SHOWN = 3  # lines of a sample that are printed
SAMPLE = {"max_new_tokens": 60, "temperature": 0.8, "top_p": 0.95, "seed": 1}
HEAD = ["text", "minutes", "start", "size", "epochs", "bits per byte"]


def prepare(text: str, data: Path, *options: str) -> None:
    """Prepare a text into a folder, unless it is there."""
    if not (data / "meta.json").exists():
        run_script("prepare_data.py", text, f"--out={data}", *options)


def numbers(text: str) -> list[float]:
    """A type for argparse: numbers above 0 with commas between them."""
    return [positive(part) for part in text.split(",")]


def from_scratch(text: str, work: Path, minutes: float) -> dict:
    """The row of the preset that tools.size chooses for a text and so many minutes."""
    data, preset = work / "own", work / f"{minutes:g}_min.py"
    prepare(text, data)
    if not preset.exists():
        run_script("-m", "tools.size", str(data), f"--hours={minutes / 60}", f"--out={preset}")
    return trained(work / f"{minutes:g}_min", data, [str(preset)])


def untouched(base: str, text: str, work: Path) -> dict:
    """The row of a base as it is."""
    prepare(text, work / "base", f"--tokenizer={base}")
    return run_apart(score, base, work / "base")


def from_base(base: str, text: str, work: Path, minutes: float) -> dict:
    """The row of config/finetune.py from a base, in as many steps as take the minutes."""
    data = work / "base"
    prepare(text, data, f"--tokenizer={base}")
    words = [FINETUNE, f"--init_from={base}", f"--data_dir={data}"]
    c = settings.load(words)
    steps = 60 * minutes * our_speed([*words, *TIMED], SHORT) / c.tokens_per_step
    words += [f"--max_steps={max(1, round(steps))}", f"--epochs={c.epochs}"]
    return trained(work / f"{minutes:g}_min_base", data, words)


def trained(folder: Path, data: Path, words: list[str]) -> dict:
    """Train a run, or continue it, and score its best step."""
    last = [record for record in train_in(folder, *words) if "loss" in record][-1]
    minutes = last["elapsed_s"] / 60
    row = {"settings": words, "epochs": last["epoch"], "minutes of training": minutes}
    return row | run_apart(score, str(folder), data)  # with its own memory


def score(weights: str, data: Path) -> dict:
    """Size, bits per byte of the held-back text, and a sample."""
    device, meta = hardware.find_device("auto"), read_meta(data)
    model, *_ = load_model(Path(weights), device)
    context = min(model.config.block_size, CONTEXT)
    val = Dataset(data, meta, "val", context, device)
    with hardware.autocast(device, hardware.find_dtype(device, "auto")):
        loss, _ = validation_loss(model, val)
    c, parameters = model.config, model.num_parameters()
    del model
    loaded = open_checkpoint(weights, device)
    *_, (sample,) = complete(loaded.model, loaded.tokenizer, [""], **SAMPLE)
    return {
        "size": f"{c.n_layer} x {c.n_embd}, {parameters / 1e6:.1f}M",
        "bits per byte": meta.bits_per_byte(loss, "all"),
        "sample": sample.text,
    }


def main(argv: list[str]) -> None:
    parser = argument_parser("texts", __doc__)
    add = parser.add_argument
    add("texts", nargs="+", metavar="[NAME=]TEXT", help="file or folder, as prepare_data.py takes")
    add("--minutes", type=numbers, default="2,15", help="of each run; default %(default)s")
    add("--base", type=place, help="folder in Hugging Face's format to start from, too")
    add("--out", type=local_path, default=Path("data/texts"), help="for data and runs")
    args = parser.parse_args(argv)
    device = hardware.find_device("auto")
    path = result_path("texts", device)
    rows = read_json(path).get("rows", {})
    for key, run in runs(args).items():
        if key not in rows:
            rows[key] = run()
            path = write("texts", {"rows": rows}, device)
        print(key, f"{rows[key]['bits per byte']:.3f}", sep=": ", flush=True)
    print(command.table(HEAD, [cells(key, row) for key, row in rows.items()]))
    for key, row in rows.items():
        print(f"\n{key}:", *row["sample"].strip("\n").splitlines()[:SHOWN], sep="\n")
    print(f"\nwritten to {path}")
    if importlib.util.find_spec("matplotlib"):
        draw(path)


def runs(args) -> dict[str, Callable]:
    """What is measured, by "text, minutes, start": functions that return rows."""
    found = {}
    for text in args.texts:
        name, _, source = text.rpartition("=")
        name = (name or Path(source).stem).replace(",", "")  # which ends it in a key
        work = args.out / name
        if args.base:
            found[f"{name}, 0, base"] = partial(untouched, args.base, source, work)
        for minutes in args.minutes:
            key = f"{name}, {minutes:g}"
            found[f"{key}, scratch"] = partial(from_scratch, source, work, minutes)
            if args.base:
                found[f"{key}, base"] = partial(from_base, args.base, source, work, minutes)
    return found


def cells(key: str, row: dict) -> list[str]:
    """A line of the table."""
    epochs, bits = f"{row.get('epochs', 0):.1f}", f"{row['bits per byte']:.3f}"
    return [*key.split(", "), row["size"], epochs, bits]


STYLES = {"scratch": ("-", "o", "from scratch"), "base": ("--", "s", "from weights")}


def draw(path: Path) -> None:
    """Draw the result at `path` as PNG next to it: bits per byte over minutes, a color a text."""
    from matplotlib.figure import Figure

    result, lines = read_json(path), {}
    for key, row in result["rows"].items():
        text, minutes, start = key.split(", ")
        lines.setdefault((text, start), []).append((float(minutes), row["bits per byte"]))
    steps = sorted({minutes for line in lines.values() for minutes, _ in line})
    texts = list(dict.fromkeys(text for text, _ in lines))
    figure = Figure((7, 3.8), layout="constrained")
    axes = figure.subplots()
    for (text, start), line in lines.items():
        style, marker, name = STYLES[start]
        x, y = zip(*sorted(line), strict=True)
        color = f"C{texts.index(text)}"
        axes.plot(
            list(map(steps.index, x)), y, style, marker=marker, color=color, label=f"{text}, {name}"
        )
    axes.set_xticks(range(len(steps)), [f"{m:g}" if m else "weights\nas they are" for m in steps])
    axes.set(ylabel="bits per byte of held-back text")
    figure.supxlabel(f"minutes of training, not to scale; {result['device']}", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=9)
    figure.savefig(path.with_suffix(".png"), dpi=170)


if __name__ == "__main__":
    run_main("texts", main)
