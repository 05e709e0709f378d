"""A page to try checkpoints on, in the browser of this machine.

    python -m tools.demo [--port 7860]

A prompt, settings, text as it comes, two models side by side. Looks for runs under checkpoints/.
Listens on loopback alone and loads nothing from the internet.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import contextlib
import functools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported

import hardware
from formats import run_folder, run_log
from formats.data_folder import DataError, read_meta
from formats.run_folder import CheckpointError
from generating import terminal
from generating.arguments import add_device
from generating.load import Checkpoint, open_checkpoint
from generating.text import Completion, complete
from tokenizer_bpe import Tokenizer, TokenizerError
from tools import command
from training.dataset import read_tokens

try:
    import gradio as gr
except ImportError as error:
    sys.exit(f"tools.demo: {error.name} is missing; pip install gradio -c constraints.txt")

NONE = "none"
PROMPT_CHARS = 10_000
DRAW_S = 0.1  # between two looks at a growing text: a browser draws no more often
QUEUE_S = 0.1  # between two looks for a request
HIDDEN = {"api_visibility": "private", "show_progress": "hidden"}  # of events: no part of the API
# What is said of a text, by Completion.ended.
ENDINGS = {"": " ...", "end of text": ", the end of the text", "stop": "", "length": ""}


@dataclass
class Setting:
    """A setting of generating.text.complete, as the page offers it."""

    low: float
    high: float
    value: float  # as the page opens
    step: float
    label: str

    @property
    def whole(self) -> bool:
        """Whether it is a whole number."""
        return self.step == 1


SETTINGS = {
    "max_new_tokens": Setting(1, 1000, 200, 1, "new tokens, at most"),
    "temperature": Setting(0, 2, 0.8, 0.05, "temperature (0: greedy)"),
    "top_k": Setting(0, 1000, 200, 1, "top-k (0: all)"),
    "top_p": Setting(0.05, 1, 1, 0.05, "top-p"),
    "repetition_penalty": Setting(1, 2, 1, 0.05, "repetition penalty"),
    "seed": Setting(0, 2**31, 1, 1, "seed: same seed, same text"),
}


@dataclass
class Box:
    """What one model wrote, and how that goes."""

    text: str = ""
    status: str = ""


def choices() -> list[tuple[str, str]]:
    """What can be chosen, as (label, path): each run, standing for its best step, then its steps.

    The newest come first.
    """
    runs = run_folder.runs_with_steps()
    runs.sort(key=lambda run: run.stat().st_mtime, reverse=True)
    found = []
    for run in runs:
        best = run_folder.step_of(run_folder.find(run))
        found.append((f"{run.name}: step {best:,}, its best or newest", run.as_posix()))
        for step in reversed(run_folder.steps(run)):
            found.append((f"{run.name}: step {run_folder.step_of(step):,}", step.as_posix()))
    return found


@functools.lru_cache(maxsize=4)
def opened(folder: Path, device, fingerprint: str) -> Checkpoint:
    """The model of a step folder; the last few are kept.

    fingerprint: of its state.json, another where it was trained anew.
    """
    checkpoint = open_checkpoint(folder, device)
    terminal.note(checkpoint.summary)
    return checkpoint


def describe(path: str) -> str:
    """A checkpoint in one line of Markdown; empty for none."""
    if path == NONE:
        return ""
    try:
        folder = run_folder.find(path)
        state = run_folder.read_state(folder, ())
    except CheckpointError as error:
        return str(error)
    shape = state["model"]
    words = (
        f"{shape['n_layer']} layers x {shape['n_embd']}, context {shape['block_size']} tokens,"
        f" {state['tokens']:,} tokens seen"
    )
    for record in reversed(run_log.read(folder.parent)):
        if record.get("val_loss") is not None and record["step"] == state["step"]:
            loss, bits = record["val_loss"], record["bits_per_byte"]
            return f"{words}, validation loss {loss:.3f} ({bits:.2f} bits per byte)"
    return words


def examples(path: str, count: int = 4) -> list[list[str]]:
    """Prompts that suit a checkpoint, a list of one each.

    They are its run's sample_prompts, then beginnings of lines of its validation text where that is
    at hand.
    """
    prompts = []
    with contextlib.suppress(CheckpointError, DataError, TokenizerError):
        folder = run_folder.find(path)
        settings = run_folder.read_state(folder, ())["settings"]
        prompts += settings["sample_prompts"]
        beginnings = validation_beginnings(Path(settings["data_dir"]), Tokenizer.load(folder))
        prompts += beginnings[:: max(1, len(beginnings) // count)]
    if not prompts:
        prompts = ["The "]
    different = list(dict.fromkeys(prompts))
    return [[prompt] for prompt in different[:count]]


def validation_beginnings(data_dir: Path, tokenizer: Tokenizer) -> list[str]:
    """The first words of lines of a validation text; none if it was made with another tokenizer.

    Raises DataError or TokenizerError for a folder that cannot be read.
    """
    meta = read_meta(data_dir)
    if not tokenizer.same_as(Tokenizer.load(data_dir / meta.tokenizer["file"])):
        return []
    text = tokenizer.decode(read_tokens(data_dir, meta, "val")[:4000])
    lines = [line for line in text.splitlines() if len(line) > 20 and line[0].isalpha()]
    return [line[:40].rsplit(" ", 1)[0] for line in lines]


def refusal(words: str) -> gr.Error:
    """What the page shows instead of a text; the console shows no traceback for it."""
    return gr.Error(words, print_exception=False)


@contextlib.contextmanager
def refusals():
    """Errors that a user can cause, as sentences on the page."""
    try:
        yield
    except (CheckpointError, TokenizerError) as error:
        raise refusal(str(error)) from None
    except (RuntimeError, MemoryError) as error:
        if not hardware.out_of_memory(error):
            raise
        raise refusal(
            "Out of memory: choose a smaller model, or start the page with --device cpu"
        ) from None


def check(paths: list[str], prompt: str, values: dict) -> None:
    """Raises gr.Error, which the page shows, for what no control of the page sends.

    Requests come from anywhere on this machine.
    """
    known = {path for _, path in choices()} | {NONE}
    for path in paths:
        if path not in known:
            raise refusal(f"{path} is not a checkpoint here any more; load the page again")
    if len(prompt) > PROMPT_CHARS:
        raise refusal(
            f"The prompt has {len(prompt):,} characters; this page takes {PROMPT_CHARS:,}"
        )
    for name, value in values.items():
        setting = SETTINGS[name]
        fits = isinstance(value, int | float) and setting.low <= value <= setting.high
        if not fits or (setting.whole and value != int(value)):
            kind = "a whole number " if setting.whole else ""
            raise refusal(
                f"{name} = {value}: it must be {kind}from {setting.low} to {setting.high}"
            )


def generate(device, first: str, second: str, prompt: str, *values):
    """Yield text and status of both boxes as the text grows.

    The first model writes, then the second, each at its own speed. values: in SETTINGS' order.
    """
    settings = dict(zip(SETTINGS, values, strict=True))
    check([first, second], prompt, settings)
    for name, setting in SETTINGS.items():
        if setting.whole:
            settings[name] = int(settings[name])
    boxes = [Box(), Box()]
    chosen = [path for path in (first, second) if path != NONE]
    for box, path in zip(boxes, chosen, strict=False):
        box.status = "loading ..."
        yield shown(boxes)
        with refusals():
            folder = run_folder.find(path)
            fingerprint = run_folder.read_state(folder, ())["sha256"]
            checkpoint = opened(folder, device, fingerprint)
            for box.text, box.status in write(checkpoint, prompt, settings):
                yield shown(boxes)


def shown(boxes: list[Box]) -> list[str]:
    """Text and status of each box, as the page takes them."""
    return [part for box in boxes for part in (box.text, box.status)]


def write(checkpoint: Checkpoint, prompt: str, settings: dict):
    """Yield (text, status) as a model continues the prompt."""
    length = len(checkpoint.tokenizer.encode(prompt))
    context = checkpoint.model.config.block_size
    cut = ""
    if length > context:
        cut = f"; of the prompt's {length:,} tokens it sees the last {context}"
    drawn_at = 0.0
    for (row,) in complete(checkpoint.model, checkpoint.tokenizer, [prompt], **settings):
        now = time.monotonic()
        if row.ended or now > drawn_at + DRAW_S:
            drawn_at = now
            yield prompt + row.text, speed(row) + ENDINGS[row.ended] + cut


def speed(row: Completion) -> str:
    """How much was written, and how fast."""
    return f"{len(row.ids):,} tokens, {len(row.ids) / row.seconds:,.0f} tokens/s"


def build(device) -> gr.Blocks:
    """The page. Raises CheckpointError where there is no checkpoint."""
    run_folder.find(None)
    found = choices()
    newest = found[0][1]
    with gr.Blocks(title="Checkpoints", analytics_enabled=False) as page:
        gr.Markdown("# What the checkpoints write")
        with gr.Row():
            first, about_first = model_chooser(found, newest, "model", "first")
            second, about_second = model_chooser(
                [(NONE, NONE), *found], NONE, "beside it", "second"
            )
        prompt = prompt_box()
        examples_list = gr.Dataset(
            components=[prompt], samples=examples(newest), label="examples", elem_id="examples"
        )
        with gr.Row():
            controls = [control(name, setting) for name, setting in SETTINGS.items()]
        with gr.Row():
            generate_button = gr.Button("Generate", variant="primary", elem_id="go")
            stop_button = gr.Button("Stop", elem_id="stop")
        with gr.Row():
            with gr.Column():
                outputs = text_box("text", "first")
            with gr.Column(visible=False) as beside:
                outputs += text_box("text beside it", "second")

        page.load(reload_choices, None, [first, second], **HIDDEN)
        page.load(about_with_examples, first, [about_first, examples_list], **HIDDEN)
        first.change(about_with_examples, first, [about_first, examples_list], **HIDDEN)
        second.change(about_and_visibility, second, [about_second, beside], **HIDDEN)
        examples_list.click(only_value, examples_list, prompt, **HIDDEN)
        # One text at a time: models share the processor, and the speeds shown are theirs alone.
        running = generate_button.click(
            functools.partial(generate, device),
            [first, second, prompt, *controls],
            outputs,
            show_progress="hidden",
            concurrency_limit=1,
            api_name="generate",
        )
        stop_button.click(None, cancels=[running], **HIDDEN)
    page.queue(max_size=16)
    # Gradio's own 1 ms and 10 ms take a twentieth to a tenth of a core from a training job.
    page._queue.sleep_when_free = page._queue.progress_update_sleep_when_free = QUEUE_S
    return page


def model_chooser(found, value: str, label: str, name: str):
    """A column with a list of checkpoints, and words about the one that is chosen: both."""
    with gr.Column():
        chooser = gr.Dropdown(found, value=value, label=label, elem_id=name)
        about = gr.Markdown(describe(value))
    return chooser, about


def prompt_box() -> gr.Textbox:
    """Where the prompt is written."""
    return gr.Textbox(
        label="prompt",
        lines=3,
        max_lines=12,
        max_length=PROMPT_CHARS,
        placeholder="empty: the model begins a document",
        elem_id="prompt",
    )


def control(name: str, setting: Setting):
    """What a setting is set with: a slider, but for the seed a number."""
    options = {
        "minimum": setting.low,
        "maximum": setting.high,
        "label": setting.label,
        "min_width": 280,
    }
    if name == "seed":
        return gr.Number(setting.value, precision=0, **options)
    return gr.Slider(value=setting.value, step=setting.step, **options)


def text_box(label: str, name: str) -> list:
    """A box for a text, and words about it under the box: both."""
    text = gr.Textbox(
        label=label, lines=12, max_lines=30, interactive=False, elem_id=f"text_{name}"
    )
    return [text, gr.Markdown(elem_id=f"speed_{name}")]


def reload_choices():
    """Both lists of checkpoints, with runs that have come since the start."""
    now = choices()
    return gr.Dropdown(choices=now), gr.Dropdown(choices=[(NONE, NONE), *now])


def about_with_examples(path: str):
    """Of the first model: words about it, and prompts that suit it."""
    return describe(path), gr.Dataset(samples=examples(path))


def about_and_visibility(path: str):
    """Of the second model: words about it, and its box, hidden where there is none."""
    return describe(path), gr.Column(visible=path != NONE)


def only_value(sample: list[str]) -> str:
    """The prompt of an example."""
    return sample[0]


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo", description="A page to try checkpoints on, on loopback."
    )
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="default %(default)s")
    add_device(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.port < 65536:
        parser.error(f"--port {args.port}: it must be from 1 to 65535")
    page = build(hardware.find_device(args.device))
    own_fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    try:
        page.launch(
            server_name="127.0.0.1",
            server_port=args.port,
            theme=gr.themes.Default(**own_fonts),
            quiet=True,
            share=False,
            ssr_mode=False,
            footer_links=[],
            show_error=True,
            prevent_thread_lock=True,
        )
    except OSError:
        parser.error(f"port {args.port} is in use; choose another with --port")
    print(f"http://127.0.0.1:{args.port}  (Ctrl-C ends it)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    mistakes = (CheckpointError, TokenizerError, hardware.DeviceError)
    command.run("tools.demo", main, mistakes)
