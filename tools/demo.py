"""A page to try checkpoints on, in the browser of this machine: a prompt, settings, text as it
comes, two models side by side.

    python -m tools.demo [--port 7860]

Looks for runs under checkpoints/ and generates through generate.py. Listens on loopback alone and
loads nothing from the internet.
"""

import argparse
import functools
import os
import sys
import time
from pathlib import Path

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported

import hardware
from formats import run_folder
from formats.run_folder import CheckpointError
from generate import open_checkpoint
from generating.text import complete
from hardware import DeviceError, out_of_memory
from tokenizer_bpe import Tokenizer, TokenizerError
from training.dataset import DataError, read_meta, read_tokens

try:
    import gradio as gr
except ImportError as error:
    sys.exit(
        f"tools.demo: {error.name} is missing; pip install -r requirements-dev.txt -c"
        " constraints.txt"
    )

NONE = "none"
PROMPT_CHARS = 10_000
# name: (smallest, largest, as the page opens, step, label)
SETTINGS = {
    "max_new_tokens": (1, 1000, 200, 1, "new tokens, at most"),
    "temperature": (0, 2, 0.8, 0.05, "temperature (0: greedy)"),
    "top_k": (0, 1000, 200, 1, "top-k (0: all)"),
    "top_p": (0.05, 1, 1, 0.05, "top-p"),
    "repetition_penalty": (1, 2, 1, 0.05, "repetition penalty"),
    "seed": (0, 2**31, 1, 1, "seed"),
}


def choices() -> list[tuple[str, str]]:
    """What can be chosen, as (label, path): each run, standing for its best step, newest first,
    then its steps.
    """
    found = []
    for run in sorted(
        (p for p in run_folder.ROOT.glob("*") if run_folder.steps(p)),
        key=lambda p: -p.stat().st_mtime,
    ):
        found.append(
            (
                (
                    f"{run.name}: step {run_folder.step_of(run_folder.find(run)):,}, its best or"
                    " newest"
                ),
                run.as_posix(),
            )
        )
        found += [
            (f"{run.name}: step {run_folder.step_of(step):,}", step.as_posix())
            for step in reversed(run_folder.steps(run))
        ]
    return found


@functools.lru_cache(maxsize=4)
def opened(folder: Path, device):
    """Model and tokenizer of a step folder, the last few kept."""
    return open_checkpoint(folder, device, hardware.find_dtype(device, "auto"))[1:]


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
    loss = next(
        (
            r
            for r in reversed(run_folder.read_log(folder.parent))
            if r.get("val_loss") is not None and r["step"] == state["step"]
        ),
        None,
    )
    words = (
        f"{shape['n_layer']} layers x {shape['n_embd']}, context {shape['block_size']} tokens,"
        f" {state['tokens']:,} tokens seen"
    )
    return words + (
        f", validation loss {loss['val_loss']:.3f} ({loss['bits_per_byte']:.2f} bits per byte)"
        if loss
        else ""
    )


def examples(path: str, count: int = 4) -> list[list[str]]:
    """Prompts that suit a checkpoint: its run's sample_prompts, then beginnings of lines of its
    validation text where that is at hand.
    """
    try:
        folder = run_folder.find(path)
        settings = run_folder.read_state(folder, ())["settings"]
        prompts = list(settings["sample_prompts"])
        meta = read_meta(settings["data_dir"])
        tokenizer = Tokenizer.load(folder)
        if tokenizer.same_as(Tokenizer.load(Path(settings["data_dir"]) / meta.tokenizer["file"])):
            lines = tokenizer.decode(
                read_tokens(settings["data_dir"], meta, "val")[:4000]
            ).splitlines()
            lines = [
                line[:40].rsplit(" ", 1)[0]
                for line in lines
                if len(line) > 20 and line[0].isalpha()
            ]
            prompts += lines[:: max(1, len(lines) // count)]
    except (CheckpointError, DataError, TokenizerError):
        prompts = []
    return [[prompt] for prompt in list(dict.fromkeys(prompts or ["The "]))[:count]]


def refusal(words: str) -> gr.Error:
    """What the page shows instead of a text; the console shows no traceback for it."""
    return gr.Error(words, print_exception=False)


def check(paths: list[str], prompt: str, values: dict) -> None:
    """Raises gr.Error, which the page shows, for what no control of the page sends: requests come
    from anywhere on this machine.
    """
    known = {path for _, path in choices()} | {NONE}
    for path in paths:
        if path not in known:
            raise refusal(f"{path} is no checkpoint here (any more); load the page again")
    if len(prompt) > PROMPT_CHARS:
        raise refusal(
            f"The prompt has {len(prompt):,} characters; this page takes {PROMPT_CHARS:,}"
        )
    for name, value in values.items():
        low, high, _, step, _ = SETTINGS[name]
        if (
            not isinstance(value, int | float)
            or not low <= value <= high
            or (step == 1 and value != int(value))
        ):
            raise refusal(
                f"{name} = {value}: it must be {'a whole number ' if step == 1 else ''}from {low}"
                f" to {high}"
            )


def generate(device, first, second, prompt, *values):
    """Yield (text, words) for both boxes as the text grows: the first model writes, then the
    second, each at its own speed.
    """
    settings = dict(zip(SETTINGS, values, strict=True))
    check([first, second], prompt, settings)
    settings = {
        name: int(value) if SETTINGS[name][3] == 1 else value for name, value in settings.items()
    }
    shown = ["", "", "", ""]
    for box, path in enumerate(p for p in (first, second) if p != NONE):
        try:
            shown[2 * box + 1] = "loading ..."
            yield shown
            model, tokenizer = opened(run_folder.find(path), device)
            length, context, last = len(tokenizer.encode(prompt)), model.config.block_size, 0.0
            cut = (
                f"; of the prompt's {length:,} tokens it sees the last {context}"
                if length > context
                else ""
            )
            for (row,) in complete(model, tokenizer, [prompt], **settings):
                if row.ended or time.monotonic() > last + 0.1:  # a browser draws no more often
                    last = time.monotonic()
                    ended = {
                        "end of text": ", the end of the text",
                        "stop": "",
                        "length": "",
                        "": " ...",
                    }[row.ended]
                    shown[2 * box : 2 * box + 2] = (
                        prompt + row.text,
                        (
                            f"{len(row.ids):,} tokens, {len(row.ids) / row.seconds:,.0f}"
                            f" tokens/s{ended}{cut}"
                        ),
                    )
                    yield shown
        except (CheckpointError, TokenizerError) as error:
            raise refusal(str(error)) from None
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise refusal(
                "Out of memory: choose a smaller model, or start the page with --device cpu"
            ) from None


def build(device) -> gr.Blocks:
    """The page. Raises CheckpointError where there is no checkpoint."""
    run_folder.find(None)
    with gr.Blocks(title="Checkpoints", analytics_enabled=False) as page:
        found = choices()
        gr.Markdown("# What the checkpoints write")
        with gr.Row():
            with gr.Column():
                first = gr.Dropdown(found, value=found[0][1], label="model", elem_id="first")
                about_first = gr.Markdown(describe(found[0][1]))
            with gr.Column():
                second = gr.Dropdown(
                    [(NONE, NONE), *found], value=NONE, label="beside it", elem_id="second"
                )
                about_second = gr.Markdown()
        prompt = gr.Textbox(
            label="prompt",
            lines=3,
            max_lines=12,
            max_length=PROMPT_CHARS,
            placeholder="empty: the model begins a document",
            elem_id="prompt",
        )
        begin = gr.Dataset(
            components=[prompt], samples=examples(found[0][1]), label="examples", elem_id="examples"
        )
        with gr.Row():
            controls = [
                gr.Slider(low, high, value, step=step, label=label, min_width=280)
                for low, high, value, step, label in list(SETTINGS.values())[:-1]
            ]
            controls.append(
                gr.Number(
                    1,
                    label="seed: same seed, same text",
                    precision=0,
                    minimum=0,
                    maximum=2**31,
                    min_width=280,
                )
            )
        with gr.Row():
            go, stop = (
                gr.Button("Generate", variant="primary", elem_id="go"),
                gr.Button("Stop", elem_id="stop"),
            )
        with gr.Row():
            with gr.Column():
                text_first = gr.Textbox(
                    label="text", lines=12, max_lines=30, interactive=False, elem_id="text_first"
                )
                speed_first = gr.Markdown(elem_id="speed_first")
            with gr.Column(visible=False) as beside:
                text_second = gr.Textbox(
                    label="text beside it",
                    lines=12,
                    max_lines=30,
                    interactive=False,
                    elem_id="text_second",
                )
                speed_second = gr.Markdown(elem_id="speed_second")

        def look_again():
            now = choices()
            return gr.Dropdown(choices=now), gr.Dropdown(choices=[(NONE, NONE), *now])

        hidden = {"api_visibility": "private", "show_progress": "hidden"}
        page.load(
            look_again, None, [first, second], **hidden
        )  # runs that have come since the start
        first.change(
            lambda path: (describe(path), gr.Dataset(samples=examples(path))),
            first,
            [about_first, begin],
            **hidden,
        )
        second.change(
            lambda path: (describe(path), gr.Column(visible=path != NONE)),
            second,
            [about_second, beside],
            **hidden,
        )
        begin.click(lambda sample: sample[0], begin, prompt, **hidden)
        # One text at a time: models share the processor, and the speeds shown are theirs alone.
        run = functools.partial(generate, device)
        running = go.click(
            run,
            [first, second, prompt, *controls],
            [text_first, speed_first, text_second, speed_second],
            show_progress="hidden",
            concurrency_limit=1,
            api_name="generate",
        )
        stop.click(None, cancels=[running], **hidden)
    return page.queue(max_size=16)


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.demo", description="A page to try checkpoints on, on loopback."
    )
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:1, mps or cpu; default %(default)s"
    )
    args = parser.parse_args(argv)
    if not 1 <= args.port < 65536:
        parser.error(f"--port {args.port}: it must be from 1 to 65535")
    page = build(hardware.find_device(args.device))
    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )  # fonts of this machine
    try:
        page.launch(
            server_name="127.0.0.1",
            server_port=args.port,
            theme=theme,
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
    try:
        main(sys.argv[1:])
    except (CheckpointError, DeviceError) as error:
        print(f"tools.demo: {error}", file=sys.stderr)
        sys.exit(2)
