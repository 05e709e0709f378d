"""A page to try checkpoints on, in the browser of this machine.

    python -m tools.demo [--port 7860]

A prompt, settings, text as it is generated, two models compared. Lists the runs under checkpoints/.
Listens on loopback alone and loads nothing from the internet. A model that was trained on
conversations replies to the prompt, any other continues it.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import functools
import os
import sys
import time
from pathlib import Path

import torch

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported

import hardware
from formats import run_folder, run_log
from formats.conversation import STOP
from formats.run_folder import CheckpointError, saw_conversations
from generating.arguments import add_device
from generating.chat import Conversation
from generating.load import LoadedModel, open_checkpoint
from generating.text import complete
from tokenizer_bpe import TokenizerError
from tools import command

try:
    import gradio as gr
except ImportError:
    sys.exit("tools.demo: gradio is missing; pip install gradio -c constraints.txt")

NONE = "none"
SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
DRAW_S = 0.1  # seconds between updates of a growing text
QUEUE_S = 0.1  # seconds between checks for a request
# Options of events that are not part of the API.
HIDDEN = {"api_visibility": "private", "show_progress": "hidden"}
ENDINGS = {"": " ...", "end of text": ", the end of the text"}  # by Completion.ended


def choices() -> list[tuple[str, str]]:
    """(label, path) of each run, meaning its best step, and of its steps; the newest first."""
    found = []
    runs = run_folder.runs_with_steps()
    for run in sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True):
        best = run_folder.step_of(run_folder.find(run))
        found.append((f"{run.name}: step {best:,} (best or newest)", run.as_posix()))
        for step in reversed(run_folder.steps(run)):
            found.append((f"{run.name}: step {run_folder.step_of(step):,}", step.as_posix()))
    return found


def summary(path: str) -> str:
    """A checkpoint in one line; empty for none."""
    if path == NONE:
        return ""
    folder = run_folder.find(path)
    state = run_folder.read_state(folder, ())
    shape = "{n_layer} layers x {n_embd}, context {block_size} tokens".format(**state["model"])
    words = f"{shape}, {state['tokens']:,} tokens seen"
    evaluation = run_log.evaluation(folder.parent, state["step"])
    if evaluation:
        words += ", validation loss {val_loss:.3f} ({bits_per_byte:.2f} bits per byte)".format(
            **evaluation
        )
    return words


def examples(path: str) -> list[list[str]]:
    """The run's sample_prompts, a list of one each."""
    state = run_folder.read_state(run_folder.find(path), ())
    return [[prompt] for prompt in state["settings"].get("sample_prompts") or ["The "]]


@functools.lru_cache(maxsize=4)
def opened(folder: Path, device: torch.device, fingerprint: str) -> LoadedModel:
    """The model of a step folder. fingerprint: another one if its run was trained again."""
    return open_checkpoint(folder, device)


def generate(device: torch.device, first: str, second: str, prompt: str, *values):
    """Yield text and status of the first model, then of the second, as they grow.

    values: those of SETTINGS.
    """
    settings = dict(zip(SETTINGS, values, strict=True))
    shown = ["", "loading ...", "", ""]
    yield shown
    try:
        for n, path in enumerate([first] if second == NONE else [first, second]):
            for text_and_status in write(device, path, prompt, settings):
                shown[2 * n : 2 * n + 2] = text_and_status
                yield shown
    except (CheckpointError, TokenizerError) as error:
        raise gr.Error(str(error), print_exception=False) from None


def write(device: torch.device, path: str, prompt: str, settings: dict):
    """Yield (text, status) as the model at `path` continues the prompt, or replies to it."""
    folder = run_folder.find(path)
    checkpoint = opened(folder, device, run_folder.read_state(folder, ())["sha256"])
    chat = saw_conversations(checkpoint.state)
    asked = Conversation(checkpoint).prompt(prompt) if chat else prompt
    stop = [STOP] if chat else []
    drawn_at = 0.0
    completions = complete(checkpoint.model, checkpoint.tokenizer, [asked], stop=stop, **settings)
    for (row,) in completions:
        if row.ended or time.monotonic() > drawn_at + DRAW_S:
            drawn_at = time.monotonic()
            speed = f"{len(row.ids):,} tokens, {len(row.ids) / row.seconds:,.0f} tokens/s"
            text = row.text.lstrip() if chat else prompt + row.text
            yield text, speed + ENDINGS.get(row.ended, "")


def build(device: torch.device) -> gr.Blocks:
    """The page. Raises CheckpointError where there is no checkpoint."""
    run_folder.find(None)
    found = choices()
    newest = found[0][1]
    with gr.Blocks(title="Checkpoints", analytics_enabled=False) as page:
        gr.Markdown("# Try the checkpoints")
        with gr.Row():
            first = gr.Dropdown(found, value=newest, label="model", elem_id="first")
            listed = [(NONE, NONE), *found]
            second = gr.Dropdown(listed, value=NONE, label="compare with", elem_id="second")
        with gr.Row():
            about = gr.Markdown(summary(newest)), gr.Markdown()
        hint = "empty: the model begins a document"
        prompt = gr.Textbox(label="prompt", lines=3, placeholder=hint, elem_id="prompt")
        prompts = gr.Dataset(components=[prompt], samples=examples(newest), label="examples")
        with gr.Row():
            controls = [
                gr.Slider(1, 1000, 200, precision=0, step=1, label="new tokens, at most"),
                gr.Slider(0, 2, 0.8, step=0.05, label="temperature (0: greedy)"),
                gr.Slider(0, 1000, 200, precision=0, step=1, label="top-k (0: all)"),
                gr.Slider(0.05, 1, 1, step=0.05, label="top-p"),
                gr.Slider(1, 2, 1, step=0.05, label="repetition penalty"),
                gr.Number(1, precision=0, minimum=0, label="seed: same seed, same text"),
            ]
        with gr.Row():
            go = gr.Button("Generate", variant="primary", elem_id="go")
            stop = gr.Button("Stop")
        outputs = []
        with gr.Row():
            for name in ("first", "second"):
                with gr.Column(visible=name == "first") as column:
                    box = gr.Textbox(label="text", lines=12, max_lines=30, elem_id=f"text_{name}")
                    outputs += [box, gr.Markdown(elem_id=f"speed_{name}")]

        def reload():
            """Both lists, with the runs and steps that have come since the start."""
            now = choices()
            return gr.Dropdown(choices=now), gr.Dropdown(choices=[(NONE, NONE), *now])

        page.load(reload, None, [first, second], **HIDDEN)
        first.change(summary, first, about[0], **HIDDEN)
        first.change(lambda path: gr.Dataset(samples=examples(path)), first, prompts, **HIDDEN)
        second.change(summary, second, about[1], **HIDDEN)
        second.change(lambda path: gr.Column(visible=path != NONE), second, column, **HIDDEN)
        prompts.click(lambda sample: sample[0], prompts, prompt, **HIDDEN)
        running = go.click(
            functools.partial(generate, device),
            [first, second, prompt, *controls],
            outputs,
            show_progress="hidden",
            concurrency_limit=1,  # the speeds shown are those of one model alone
            api_name="generate",
        )
        stop.click(None, cancels=[running], **HIDDEN)
    page.queue(max_size=16)
    # Gradio's own 1 ms and 10 ms take a twentieth to a tenth of a core from a training job.
    page._queue.sleep_when_free = page._queue.progress_update_sleep_when_free = QUEUE_S
    return page


def main(argv: list[str]) -> None:
    from starlette.middleware import Middleware  # with gradio
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    parser = argparse.ArgumentParser(
        prog="python -m tools.demo", description="Serve a page to try checkpoints on, on loopback."
    )
    parser.add_argument("--port", type=int, default=7860, metavar="N", help="default %(default)s")
    add_device(parser)
    args = parser.parse_args(argv)
    page = build(hardware.find_device(args.device))
    # Another website may name this address its own, and would then read the page (DNS rebinding).
    own_host = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    try:
        page.launch(
            server_name="127.0.0.1",
            server_port=args.port,
            theme=gr.themes.Default(**fonts),  # its own fonts come from the internet
            quiet=True,
            max_file_size=0,  # nothing on the page takes files, but the route for them is there
            app_kwargs={"middleware": [own_host]},
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
