"""A checkpoint as a folder in Hugging Face's GPT-2 format: weights, tokenizer, and a model card filled in from the run.

    python -m tools.export CHECKPOINT --out FOLDER

What the format is, pretrained.py knows. Needs the package safetensors; transformers is needed only by those who load the folder.
"""
import argparse
import dataclasses
import os
import shutil
import sys
from pathlib import Path

import torch

import checkpoint
import pretrained
from checkpoint import CheckpointError
from model import GPTConfig
from tokenizer_bpe import EOT, Tokenizer, TokenizerError
from training.terminal import duration

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---
# {name}

A GPT-2 of {parameters:,} parameters, trained from {origin}. Exported from `{folder}` by `python -m tools.export`.

```python
from transformers import pipeline
print(pipeline("text-generation", {target!r})({prompt!r})[0]["generated_text"])
```

| | |
|---|---|
{rows}

## What to know

{notes}
"""


def to_hf(config: GPTConfig, tensors: dict[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """A model's tensors under Hugging Face's names and in its layout. Ids from vocab_size on, padding, are left out; biases that the model
    does not have are zeros, which compute the same."""
    out = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tie_weights:
            continue
        if name in ("wte.weight", "lm_head.weight"):
            tensor = tensor[:vocab_size]
        out[name if name == "lm_head.weight" else f"transformer.{name}"] = (tensor.t() if pretrained.is_transposed(name) else tensor).float().contiguous()
    if not config.bias:
        for name in [n for n in out if n.endswith(".weight") and (".ln_" in n or ".h." in n)]:
            width = out[name].size(-1)  # of a LayerNorm, or of the outputs of a Conv1D
            out[name.removesuffix("weight") + "bias"] = torch.zeros(width)
    return out


def hf_config(config: GPTConfig, tokenizer: Tokenizer) -> dict:
    """The content of config.json. Raises CheckpointError naming the settings that GPT-2 does not have."""
    known = {*pretrained.NAMES, *pretrained.FREE, "bias"}
    other = [f"{f.name} = {getattr(config, f.name)}" for f in dataclasses.fields(config) if f.name not in known and getattr(config, f.name) != f.default]
    if other:
        raise CheckpointError(f"Hugging Face's GPT-2 has no counterpart to {', '.join(other)}; a model with these settings runs only here, with generate.py")
    shape = {theirs: getattr(config, ours) for ours, theirs in pretrained.NAMES.items()} | {"vocab_size": tokenizer.vocab_size}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    fixed = {name: values[0] for name, values in pretrained.FIXED.items()}
    ids = {"bos_token_id": tokenizer.eot_id, "eos_token_id": tokenizer.eot_id}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "dtype": "float32"} | shape | fixed | drop | ids


def card(folder: Path, state: dict, log: list[dict], config: GPTConfig, parameters: int, tokenizer: Tokenizer, target: str) -> str:
    """The model card."""
    settings, data, step, versions = (state[k] for k in ("settings", "data", "step", "versions"))
    tokens, size = data["tokens"], data["text_bytes"]
    losses = {r["step"]: r["loss"] for r in log if r.get("loss") is not None and r["step"] <= step}
    evaluations = {r["step"]: r for r in log if r.get("val_loss") is not None}
    rows = {
        "shape": f"{config.n_layer} layers x {config.n_embd}, {config.n_head} heads, context {config.block_size} tokens",
        "head, biases": f"{'tied to the embedding' if config.tie_weights else 'not tied'}, {'with' if config.bias else 'without'} biases",
        "tokenizer": f"{ {'char': 'characters', 'bpe': 'byte-level BPE'}[tokenizer.kind]}, {tokenizer.vocab_size:,} ids",
        "data": f"`{settings['data_dir']}`: {tokens['train']:,} tokens ({size['train']:,} bytes of text) for training, {tokens['val']:,} for validation",
        "training": f"{step:,} steps, {state['tokens']:,} tokens, {state['epoch']:.2f} epochs, {duration(state['progress']['elapsed_s'])}",
        "machine": f"{versions['device']}, {versions['dtype']}, torch {versions['torch']}",
        "settings": ", ".join(f"`{k} = {settings[k]}`" for k in ("batch_size", "learning_rate", "weight_decay", "dropout", "seed")),
        "training loss": f"{losses[max(losses)]:.4f} nats a token, around step {max(losses):,}" if losses else "not in the log",
        "validation loss": "{val_loss:.4f} nats a token, {bits_per_byte:.4f} bits a byte".format(**evaluations[step]) if step in evaluations else "not measured at this step",
    }
    notes = [
        f"The context is {config.block_size} tokens; prompt and answer together must not be longer.",
        f"`{EOT}` (id {tokenizer.eot_id}) separates documents and ends a text. In a prompt, `transformers` reads it as that token; `generate.py` as text like any other.",
    ]
    if tokenizer.kind == "char":
        notes.append(f"The model knows {tokenizer.vocab_size - 1} characters. `transformers` drops others from a prompt without a word; `generate.py` refuses them.")
    if config.vocab_size > tokenizer.vocab_size:
        notes.append(f"The checkpoint's {config.vocab_size - tokenizer.vocab_size} ids of padding, {tokenizer.vocab_size} to {config.vocab_size - 1}, are left out here: they stand for no text.")
    if not config.bias:
        notes.append("The model was trained without biases. The format always has them; here they are zeros, which compute the same until someone trains them.")
    origin = f"the weights of `{settings['init_from']}`" if settings.get("init_from") else "nothing"
    return CARD.format(
        name=folder.parent.name, parameters=parameters, origin=origin, folder=folder, target=target, prompt=(settings["sample_prompts"] or ["The"])[0],
        rows="\n".join(f"| {k} | {v} |" for k, v in rows.items()), notes="\n".join(f"- {note}" for note in notes),
    )  # fmt: skip


def export(folder: Path, out: Path) -> int:
    """Write the folder `out` for a step folder, whole or not at all; returns the model's parameters. Raises CheckpointError for what cannot be exported."""
    from safetensors.torch import save_file

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there already; remove it, or choose another --out")
    source = pretrained.load(folder)
    state, config, tokenizer = checkpoint.read_state(folder, ()), source.config, source.tokenizer
    described = hf_config(config, tokenizer)
    tensors = to_hf(config, source.tensors, tokenizer.vocab_size)
    parameters = sum(t.numel() for t in tensors.values())
    ids = {name: described[name] for name in ("bos_token_id", "eos_token_id")}
    files = {
        "config.json": described,
        "generation_config.json": ids | {"pad_token_id": tokenizer.eot_id, "do_sample": True, "temperature": 0.8, "top_k": 200, "max_new_tokens": config.block_size // 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.block_size, "clean_up_tokenization_spaces": False,
            "bos_token": EOT, "eos_token": EOT, "pad_token": EOT,
        },
    }  # fmt: skip
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, values in files.items():
            checkpoint.write_json(partial / name, values)
        tokenizer.save(partial / "tokenizer.json")
        text = card(folder, state, checkpoint.read_log(folder.parent), config, parameters, tokenizer, out.name)
        (partial / "README.md").write_text(text, encoding="utf-8", newline="\n")
        checkpoint.check_room(partial, checkpoint.tensor_bytes(tensors))
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod((partial / "config.json").stat().st_mode)  # safetensors lets no one else read it
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return parameters


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(prog="python -m tools.export", description="A checkpoint as a folder that Hugging Face's transformers loads.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a run (its best step by validation loss, else its newest) or one step of it")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to; it must not be there yet")
    args = parser.parse_args(argv)
    folder = checkpoint.find(args.checkpoint)
    parameters = export(folder, args.out)
    print(f"{folder} -> {args.out}: {parameters:,} parameters\n  from transformers import pipeline; print(pipeline('text-generation', {str(args.out)!r})('The'))")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (CheckpointError, TokenizerError) as error:
        print(f"tools.export: {error}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        print(f"tools.export: {error.name} is missing; pip install -r requirements-dev.txt -c constraints.txt", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"tools.export: {error}", file=sys.stderr)
        sys.exit(1)
