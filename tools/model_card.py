"""The page beside exported weights: what the model is, how well it does, how to run it, its limits.

Filled in from the run that it comes from: its checkpoint's state, its log, and its curve as PNG
where matplotlib is installed. The words are templates/model_card.md.j2's.
"""

import contextlib
from pathlib import Path

from formats import run_folder, run_log
from formats.pretrained import Pretrained
from model import GPTConfig
from tokenizer_bpe import EOT
from tools import history, rendering, wording

FORMS = {"gpt2": "GPT-2", "qwen3": "Qwen3"}
NAMED_SETTINGS = ("optimizer", "batch_size", "learning_rate", "weight_decay", "dropout", "seed")


def write(out: Path, source: Pretrained, parameters: int, target: str, chat: bool) -> None:
    """Write README.md, and curve.png where it can be drawn, into `out`.

    source: a step of a run. parameters: of the exported model. target: the name under which readers
    will find the folder. chat: the model was trained on conversations.
    """
    drawn = draw_curve(source.path.parent, out / "curve.png")
    text = card(source, parameters, target, chat, drawn)
    (out / "README.md").write_text(text, encoding="utf-8", newline="\n")


def draw_curve(run: Path, path: Path) -> bool:
    """The run's losses as PNG; False where there is nothing to draw, or nothing to draw with."""
    with contextlib.suppress(ImportError, history.HistoryError):
        from tools import charts

        runs = [history.read(run)]
        charts.write_png(path, runs, runs[0].name, nats=True)
        return True
    return False


def card(source: Pretrained, parameters: int, target: str, chat: bool, drawn: bool) -> str:
    """The text of the card."""
    folder, config, tokenizer = source.path, source.config, source.tokenizer
    state = run_folder.read_state(folder, ())
    log = run_log.read(folder.parent)
    settings = state["settings"]
    prompts = settings["sample_prompts"] or ["The"]
    origin = "scratch"
    if settings.get("init_from"):
        origin = f"the weights of `{settings['init_from']}`"
    return rendering.render(
        "model_card.md.j2",
        config=config,
        tokenizer=tokenizer,
        state=state,
        origin=origin,
        form=FORMS[config.arch],
        parameters=parameters,
        tokens_a_parameter=state["tokens"] / parameters,
        evaluation=evaluation(state, log),
        on_replies=settings.get("loss_on") == "assistant",
        rows=table(source, state, log),
        name=folder.parent.name,
        run=folder.parent.as_posix(),
        folder=folder.as_posix(),
        target=target,
        target_literal=repr(target),  # as Python and a shell write it
        prompt=repr(prompts[0]),
        chat=chat,
        drawn=drawn,
        end_of_text=EOT,
        padding=config.vocab_size - tokenizer.vocab_size,
        perplexity=wording.perplexity,
    )


def evaluation(state: dict, log: list[dict]) -> dict | None:
    """The evaluation of this step in the log."""
    found = [r for r in log if r.get("val_loss") is not None and r["step"] == state["step"]]
    return found[-1] if found else None


def table(source: Pretrained, state: dict, log: list[dict]) -> dict[str, str]:
    """Sizes, data and training, by name."""
    config, tokenizer = source.config, source.tokenizer
    settings, versions = state["settings"], state["versions"]
    tokens, size = state["data"]["tokens"], state["data"]["text_bytes"]
    kind = "characters" if tokenizer.kind == "char" else "byte-level BPE"
    spent = wording.duration(state["progress"]["elapsed_s"])
    return {
        "shape": (
            f"{config.n_layer} layers x {config.n_embd}, {config.n_head} heads, context"
            f" {config.block_size} tokens"
        ),
        "form": form(config),
        "tokenizer": f"{kind}, {tokenizer.vocab_size:,} ids",
        "data": (
            f"`{settings['data_dir']}`: {tokens['train']:,} tokens ({size['train']:,} bytes of"
            f" text) for training, {tokens['val']:,} for validation"
        ),
        "training": (
            f"{state['step']:,} steps, {state['tokens']:,} tokens, {state['epoch']:.2f} epochs,"
            f" {spent}"
        ),
        "machine": f"{versions['device']}, {versions['dtype']}, torch {versions['torch']}",
        "settings": ", ".join(f"`{k} = {settings[k]}`" for k in NAMED_SETTINGS if k in settings),
        "training loss": training_loss(state["step"], log),
    }


def form(config: GPTConfig) -> str:
    """What the layers are made of, and how the head is."""
    head = "tied" if config.tie_weights else "not tied"
    if config.arch == "qwen3":
        layers = "RMSNorm, QK norm, rotary positions, SwiGLU; no biases"
    elif config.bias:
        layers = "with biases"
    else:
        layers = "without biases"
    return f"{layers}; head {head} to the embedding"


def training_loss(step: int, log: list[dict]) -> str:
    """The last training loss that was logged up to a step, in a sentence."""
    logged = [r for r in log if r.get("loss") is not None and r["step"] <= step]
    if not logged:
        return "not in the log"
    newest = max(reversed(logged), key=lambda r: r["step"])
    return f"{newest['loss']:.4f} nats a token, around step {newest['step']:,}"
