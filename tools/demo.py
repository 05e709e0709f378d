"""A page to try checkpoints on, in the browser of this machine.

    python -m tools.demo [--port 7860]

Shows text as it is generated, from one model or two to compare; lists the runs under checkpoints/.
Listens on loopback only and loads nothing from the internet. A model that was trained on
conversations replies to the prompt; any other continues it.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import functools
import os
import re
import socket
import tempfile
import time
from pathlib import Path

import torch

import hardware
from command_line import Parser, UserError, number, plural
from formats import files, run_folder
from generating.load import LoadedModel, open_checkpoint
from generating.terminal import add_device
from generating.text import Conversation, complete
from tools import command

CONTROLS = {  # {setting: (smallest, largest, default, step, meaning)}
    "max_new_tokens": (1, 1000, 200, 1, "new tokens, at most"),
    "temperature": (0, 2, 0.8, 0.05, "temperature (0: greedy)"),
    "top_k": (0, 1000, 200, 1, "top-k (0: all)"),
    "top_p": (0.05, 1, 1, 0.05, "top-p"),
    "repetition_penalty": (1, 2, 1, 0.05, "repetition penalty"),
    "seed": (0, 1000, 1, 1, "seed: same seed, same text"),
}
DRAW_S = 0.1  # seconds between updates of a growing text
QUEUE_S = 0.1  # seconds between checks for a request


@functools.lru_cache(maxsize=4)  # models to keep in memory
def opened(folder: Path, device: torch.device, sha256: str) -> LoadedModel:
    """Load a step, with a cache. sha256: of state.json, as a run may begin again in its folder."""
    return open_checkpoint(folder, device)


def choices() -> list[str]:
    """Each run, which stands for its best step, followed by its steps; the newest first."""
    runs = run_folder.runs_with_steps()
    return [path.as_posix() for run in runs for path in (run, *reversed(run_folder.steps(run)))]


def generate(device: torch.device, prompt: str, paths: list[str], *values):
    """Yield [text, status, text, status] of both models, as first one and then the other generates.

    values: of CONTROLS, in order.
    """
    settings = dict(zip(CONTROLS, values, strict=True))
    shown = ["", "loading ..." if paths else "choose a model", "", ""]
    yield shown
    for n, path in enumerate(paths):
        try:
            for text_and_status in write(device, path, prompt, settings):
                shown[2 * n : 2 * n + 2] = text_and_status
                yield shown
        except UserError as error:
            shown[2 * n + 1] = as_markdown(str(error))
            yield shown


def write(device: torch.device, path: str, prompt: str, settings: dict):
    """Yield (text, status) as the model at `path` continues the prompt, or replies to it."""
    folder = run_folder.find(path)
    checkpoint = opened(folder, device, files.sha256(folder / "state.json"))
    model, tokenizer, chats = checkpoint.model, checkpoint.tokenizer, checkpoint.source.chats
    asked = Conversation(model, tokenizer).prompt(prompt) if chats else prompt
    drawn_at = 0.0
    completions = complete(model, tokenizer, [asked], chat=chats, **settings)
    for (row,) in completions:
        if row.ended or time.monotonic() > drawn_at + DRAW_S:
            drawn_at = time.monotonic()
            speed = f"{plural(len(row.ids), 'token')}, {len(row.ids) / row.seconds:,.0f} tokens/s"
            text = row.text.lstrip() if chats else prompt + row.text
            ended = {"length": "stopped at the limit"}.get(row.ended, row.ended) or "..."
            yield text, f"{speed}, {ended}\n\n{as_markdown(checkpoint.summary)}"


def as_markdown(text: str) -> str:
    """Escape a text so that Markdown shows it unchanged."""
    return re.sub(r"([!-/:-@[-`{-~])", r"\\\1", text)


def build(device: torch.device):
    """The page, as gradio Blocks. Raises CheckpointError if there is no checkpoint."""
    run_folder.find(None)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported
    import gradio as gr

    found, outputs = choices(), []
    with gr.Blocks(title="Try the checkpoints") as page:
        gr.Markdown("# Try the checkpoints")
        with gr.Row():
            hint = "empty: the model begins a document"
            prompt = gr.Textbox(label="prompt", lines=5, placeholder=hint)
            with gr.Column():
                label = "models: one, or two to compare"
                models = gr.Dropdown(
                    found, value=found[:1], multiselect=True, max_choices=2, label=label
                )
                with gr.Row():
                    start = gr.Button("Generate", variant="primary")
                    stop = gr.Button("Stop")
        with gr.Row():
            for n in (1, 2):
                with gr.Column():
                    outputs += [gr.Textbox(label=f"model {n}", lines=12), gr.Markdown()]
        with gr.Accordion("settings", open=False):
            controls = [
                gr.Slider(low, high, default, step=step, label=label)
                for low, high, default, step, label in CONTROLS.values()
            ]
        run = start.click(
            functools.partial(generate, device),
            [prompt, models, *controls],
            outputs,
            show_progress="hidden",
            api_name="generate",
        )
        stop.click(None, cancels=run)
        # Reloading the page lists new runs and steps.
        page.load(lambda: gr.Dropdown(choices()), None, models)
    # Gradio's defaults, 1 ms and 10 ms, take 5 to 10% of a core, which a training job may need.
    page._queue.sleep_when_free = page._queue.progress_update_sleep_when_free = QUEUE_S
    return page


def main(argv: list[str]) -> None:
    text = "Serve a page on which you can try checkpoints; only this machine can reach it."
    parser = Parser(prog="python -m tools.demo", description=text)
    parser.add_argument(
        "--port", type=number(int, 1, 65535), default=7860, metavar="N", help="default %(default)s"
    )
    add_device(parser)
    args = parser.parse_args(argv)
    try:  # before gradio is imported, which takes seconds
        socket.create_server(("127.0.0.1", args.port)).close()
    except OSError:
        parser.error(f"port {args.port} is in use; choose another with --port")
    own = tempfile.TemporaryDirectory()  # until main ends: /tmp/gradio may be another user's
    os.environ.setdefault("GRADIO_TEMP_DIR", own.name)  # before gradio is imported
    os.environ["no_proxy"] = "*"  # gradio asks this page whether it is up, which no proxy can reach
    page = build(hardware.find_device(args.device))

    from starlette.middleware import Middleware  # comes with gradio
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # Prevents DNS rebinding: a website whose name resolves to this address could read the page.
    own_host = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    page.launch(
        server_name="127.0.0.1",
        server_port=args.port,
        quiet=True,
        css="textarea { font-family: monospace; unicode-bidi: plaintext }",
        max_file_size=0,  # the page uploads no files, but gradio has a route for uploads
        app_kwargs={"middleware": [own_host]},
        footer_links=[],
        show_error=True,
        prevent_thread_lock=True,
    )
    print(f"http://127.0.0.1:{args.port}  (Ctrl-C ends it)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    command.run("tools.demo", main)
