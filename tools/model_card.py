"""The page beside exported weights: what the model is, how well it does, how to run it, what it is
not good for.

Filled in from the run that it comes from: its checkpoint's state, its log, and its curve as PNG
where matplotlib is installed.
"""

import contextlib
import math
from pathlib import Path

from formats import run_folder
from formats.pretrained import Pretrained
from tokenizer_bpe import EOT
from tools import history
from training.terminal import duration

NAMES = {"gpt2": "GPT-2", "qwen3": "Qwen3"}
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [{arch}]
---
# {name}

A language model of {parameters:,} parameters in {form}'s form, trained from {origin} on {tokens:,} tokens.
{result}
{picture}
| | |
|---|---|
{rows}

## Running it

With `transformers`:

```python
from transformers import pipeline

print(pipeline("text-generation", {target!r})({prompt!r})[0]["generated_text"])
```

With llama.cpp, LM Studio or Ollama, from a GGUF file of the same run:

```
python -m tools.export {run} --gguf {target}.gguf      # writes {target}.Modelfile too
llama-cli -m {target}.gguf -p {prompt!r} -n 100 -no-cnv
ollama create {target} -f {target}.Modelfile && ollama run {target}
```

## What it is not good for

{limits}

## Good to know

{notes}

Exported from `{folder}` by `python -m tools.export`.
"""


def write(out: Path, source: Pretrained, parameters: int, target: str, chat: bool) -> None:
    """Write README.md, and curve.png where it can be drawn, into `out`.

    source: a step of a run. parameters: of the exported model. target: the name under which readers
    will find the folder.
    """
    folder = source.path
    drawn = draw_curve(folder.parent, out / "curve.png")
    text = card(source, parameters, target, chat, drawn)
    (out / "README.md").write_text(text, encoding="utf-8", newline="\n")


def draw_curve(run: Path, path: Path) -> bool:
    """The run's losses as PNG; False where there is nothing to draw, or nothing to draw with."""
    with contextlib.suppress(ImportError, history.HistoryError):
        from tools import charts

        runs = [history.read(run)]
        charts.png(path, runs, runs[0].name, nats=True)
        return True
    return False


def card(source: Pretrained, parameters: int, target: str, chat: bool, drawn: bool) -> str:
    """The text of the card."""
    folder, config = source.path, source.config
    state, log = run_folder.read_state(folder, ()), run_folder.read_log(folder.parent)
    settings = state["settings"]
    origin = "nothing"
    if settings.get("init_from"):
        origin = f"the weights of `{settings['init_from']}`"
    rows = table(source, state, log)
    return CARD.format(
        arch=config.arch,
        name=folder.parent.name,
        parameters=parameters,
        form=NAMES[config.arch],
        origin=origin,
        tokens=state["tokens"],
        result=result(state, log),
        picture="\n![Loss over the run](curve.png)\n" if drawn else "",
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        target=target,
        prompt=(settings["sample_prompts"] or ["The"])[0],
        run=folder.parent.as_posix(),
        folder=folder.as_posix(),
        limits=bullets(limits(state, parameters, chat)),
        notes=bullets(notes(source)),
    )


def bullets(lines: list[str]) -> str:
    """A list in Markdown."""
    return "\n".join(f"- {line}" for line in lines)


def evaluation(state: dict, log: list[dict]) -> dict | None:
    """The evaluation of this step in the log."""
    found = [r for r in log if r.get("val_loss") is not None and r["step"] == state["step"]]
    return found[-1] if found else None


def result(state: dict, log: list[dict]) -> str:
    """How well it predicts text that it was not trained on, in a sentence."""
    found = evaluation(state, log)
    if not found:
        return "It was not evaluated at this step."
    return (
        f"On validation text it loses {found['val_loss']:.4f} nats a token (perplexity"
        f" {math.exp(min(found['val_loss'], 700)):,.2f}), {found['bits_per_byte']:.4f} bits per"
        " byte."
    )


def table(source: Pretrained, state: dict, log: list[dict]) -> dict[str, str]:
    """Sizes, data and training, by name."""
    config, tokenizer = source.config, source.tokenizer
    settings, data, versions = state["settings"], state["data"], state["versions"]
    tokens, size = data["tokens"], data["text_bytes"]
    form = "with biases" if config.bias else "without biases"
    if config.arch == "qwen3":
        form = "RMSNorm, QK norm, rotary positions, SwiGLU; no biases"
    losses = {
        r["step"]: r["loss"]
        for r in log
        if r.get("loss") is not None and r["step"] <= state["step"]
    }
    named = ("optimizer", "batch_size", "learning_rate", "weight_decay", "dropout", "seed")
    return {
        "shape": (
            f"{config.n_layer} layers x {config.n_embd}, {config.n_head} heads, context"
            f" {config.block_size} tokens"
        ),
        "form": f"{form}; head {'tied' if config.tie_weights else 'not tied'} to the embedding",
        "tokenizer": (
            f"{'characters' if tokenizer.kind == 'char' else 'byte-level BPE'},"
            f" {tokenizer.vocab_size:,} ids"
        ),
        "data": (
            f"`{settings['data_dir']}`: {tokens['train']:,} tokens ({size['train']:,} bytes of"
            f" text) for training, {tokens['val']:,} for validation"
        ),
        "training": (
            f"{state['step']:,} steps, {state['tokens']:,} tokens, {state['epoch']:.2f} epochs, "
            f"{duration(state['progress']['elapsed_s'])}"
        ),
        "machine": f"{versions['device']}, {versions['dtype']}, torch {versions['torch']}",
        "settings": ", ".join(f"`{k} = {settings[k]}`" for k in named if k in settings),
        "training loss": (
            f"{losses[max(losses)]:.4f} nats a token, around step {max(losses):,}"
            if losses
            else "not in the log"
        ),
    }


def limits(state: dict, parameters: int, chat: bool) -> list[str]:
    """What nobody should expect of it."""
    ratio = state["tokens"] / parameters
    lines = [
        (
            f"It saw {ratio:,.1f} tokens a parameter; about 20 make the best use of compute"
            " (Hoffmann et al., 2022), and useful small models saw hundreds."
        ),
        (
            "It continues text in the manner of its training text. It knows no facts reliably and"
            " checks nothing it writes."
        ),
        (
            "It was not filtered or aligned: what was in the training text can come out again, word"
            " for word too."
        ),
    ]
    if not chat:
        lines.append("It was not trained on conversations, and follows no instructions.")
    return lines


def notes(source: Pretrained) -> list[str]:
    """What differs from what a user of the format may expect."""
    config, tokenizer = source.config, source.tokenizer
    lines = [
        (
            f"The context is {config.block_size} tokens; prompt and answer together must not be"
            " longer."
        ),
        (
            f"`{EOT}` (id {tokenizer.eot_id}) separates documents and ends a text. In a prompt,"
            " `transformers` reads it as that token; `generate.py` as text like any other."
        ),
    ]
    if tokenizer.kind == "char":
        lines.append(
            f"The model knows {tokenizer.vocab_size - 1} characters. `transformers` drops others"
            " from a prompt without a word; `generate.py` refuses them."
        )
    padding = config.vocab_size - tokenizer.vocab_size
    if padding:
        last = config.vocab_size - 1
        lines.append(
            f"The checkpoint's {padding} ids of padding, {tokenizer.vocab_size} to {last}, are left"
            " out here: they stand for no text."
        )
    if config.arch == "gpt2" and not config.bias:
        lines.append(
            "The model was trained without biases. The format always has them; here they are zeros,"
            " which compute the same until someone trains them."
        )
    return lines
