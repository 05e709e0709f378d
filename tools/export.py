"""Exports a checkpoint as a folder for transformers, or a GGUF file for llama.cpp and Ollama.

    python -m tools.export CHECKPOINT [--out FOLDER] [--gguf FILE]

The folder holds weights, tokenizer, settings and a model card; the GGUF file gets a Modelfile for
Ollama next to it. formats/ knows the formats themselves. Needs the packages safetensors and gguf.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import os
import re
import unicodedata
from dataclasses import asdict, replace
from pathlib import Path

from command_line import Parser, duration, local_path, place, plural, quote
from config import Config
from formats import files, huggingface, pretrained, run_folder
from formats.conversation import END, Form, form_of
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from tools import command

OLLAMA_CONTEXT = 8192  # at most; the cache of Qwen3-0.6B's 40,960 tokens would take 4.7 GB


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    source = pretrained.load_with_tokenizer(args.checkpoint)
    own = huggingface.read_chat_template(source.path)  # of a model from elsewhere
    if args.out and not source.state:
        raise CheckpointError(
            f"{source.path} is in Hugging Face's format already, which transformers reads; for a"
            " GGUF file of it, leave out --out"
        )
    if own and not source.chats:
        raise CheckpointError(
            f"{source.path} has a chat template of a form that is not known here; make its GGUF"
            " file with convert_hf_to_gguf.py of llama.cpp"
        )
    form = form_of(source.tokenizer) if source.chats else None
    if own:
        form = replace(form, chat_template=own)
    if args.gguf:
        from formats import gguf

        gguf.check(source.tokenizer)
    prompt = (source.state.get("settings", {}).get("sample_prompts") or ["The"])[0]
    lines = []  # printed last, since the reader of a pipe may exit early, as `| head` does
    if args.out:
        parameters = write_folder(source, args.out, form)
        lines.append(f"{source.path} -> {args.out}: {parameters:,} parameters")
        load = f"pipeline('text-generation', {str(args.out)!r})"
        given = [{"role": "user", "content": "Hello"}] if form else prompt
        lines.append(f"  from transformers import pipeline; print({load}({given!r}))")
    if args.gguf:
        args.gguf.parent.mkdir(parents=True, exist_ok=True)
        gguf.write(args.gguf, source, form)
        write_modelfile(args.gguf, source, form)
        megabytes = args.gguf.stat().st_size / 1e6
        lines.append(f"{source.path} -> {args.gguf}: {megabytes:,.1f} MB")
        file, name = quote(args.gguf.as_posix()), ollama_name(args.gguf.stem)
        complete = f"llama-completion -m {file} -p {quote(prompt)} -n 100 -no-cnv"
        lines.append(f"  llama-cli -m {file}" if form else f"  {complete}")
        modelfile = quote(args.modelfile.as_posix())
        lines.append(f"  ollama create {name} -f {modelfile} && ollama run {name}")
    print("\n".join(lines))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tools.export",
        description="Export a checkpoint as a folder for transformers, a GGUF file, or both.",
    )
    add = parser.add_argument
    text = (
        "a run (its best step by validation loss, else its newest), a step, or a run's address; for"
        " --gguf also a folder in Hugging Face's format"
    )
    add("checkpoint", type=place, metavar="CHECKPOINT", help=text)
    text = "folder for transformers and programs that read its format"
    add("--out", type=local_path, metavar="FOLDER", help=text)
    text = "file for llama.cpp, Ollama and LM Studio; must end in .gguf"
    add("--gguf", type=local_path, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if not args.out and not args.gguf:
        parser.error("pass --out FOLDER, --gguf FILE, or both")
    if args.gguf and args.gguf.suffix != ".gguf":
        parser.error(f"--gguf {args.gguf}: the name must end in .gguf")
    args.modelfile = args.gguf and args.gguf.with_suffix(".Modelfile")
    for option, path in (("--out", args.out), ("--gguf", args.gguf), ("--gguf", args.modelfile)):
        if path and os.path.lexists(path):  # including broken links
            parser.error(f"{path} already exists; choose another {option}")
    return args


def write_folder(source: Pretrained, out: Path, form: Form | None) -> int:
    """Write the folder `out`, whole or not at all; returns the number of parameters.

    form: of the conversations that the model was trained on; None if it saw none. Raises OSError if
    writing fails.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = huggingface.to_hf(source.config, source.tensors, source.tokenizer.vocab_size)
    parameters = sum(t.numel() for t in tensors.values())
    with files.atomic_folder(out) as partial:
        weights = partial / "model.safetensors"
        with files.writing(weights, "choose an --out on another disk", SafetensorError):
            save_file(tensors, weights, metadata={"format": "pt"})
        source.tokenizer.save(partial / "tokenizer.json")
        weights.chmod((partial / "tokenizer.json").stat().st_mode)  # safetensors writes mode 600
        write_settings(partial, source, form)
        write_card(partial, source, parameters, out.name, chat=form is not None)
    return parameters


def write_settings(folder: Path, source: Pretrained, form: Form | None) -> None:
    """Write the settings from which transformers builds the model, encodes text and generates.

    form: as in write_folder.
    """
    config, tokenizer = source.config, source.tokenizer
    described = huggingface.config_values(config, tokenizer.vocab_size, tokenizer.eot_id)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot_id)
    generation = ids | {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 200,
        # Of prompt and text. With max_new_tokens, a long prompt exceeds it, and vLLM caps requests.
        "max_length": config.block_size,
    }
    reading = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # Below version 5, transformers adds token_type_ids by default. GPT-2 adds their embeddings
        # to those of the text, and Llama and Qwen3 stop with a TypeError.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": config.block_size,
        "clean_up_tokenization_spaces": False,
    }
    # CTranslate2 needs an unknown token; GPT-2's own tokenizer has one too.
    reading |= dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), tokenizer.eot)
    if form:
        reading["chat_template"] = form.chat_template
    if form and form.markers:
        reading["eos_token"] = END
        generation["eos_token_id"] = [form.markers[END], tokenizer.eot_id]
    files.write_json(folder / "config.json", described)
    files.write_json(folder / "generation_config.json", generation)
    files.write_json(folder / "tokenizer_config.json", reading)


def write_card(out: Path, source: Pretrained, parameters: int, target: str, chat: bool) -> None:
    """Write the model card into `out`.

    source: a step of a run. parameters: of the exported model. target: the final name of the
    folder. chat: whether the model was trained on conversations.
    """
    run, state = source.path.parent, source.state
    settings = asdict(Config()) | state["settings"]  # defaults for settings newer than the run
    evaluation = run_folder.evaluation_at(run, state["step"])
    text = command.render(
        "model_card.md.j2",
        source=source,
        settings=settings,
        evaluation=evaluation,
        # The Hub lists a model under the one that its card names, with that one's license.
        base=re.match("hf://([^/@]+/[^/@]+)", settings["init_from"] or ""),
        perplexity=command.perplexity,
        number=command.number,
        parameters=parameters,
        spent=duration(state["progress"]["elapsed_s"]),
        target=target,
        python=repr,
        shell=quote,
        ollama=ollama_name,
        plural=plural,
        chat=chat,
    )
    files.write_text(out / "README.md", text)


def ollama_name(text: str) -> str:
    """A name that Ollama accepts: lower-case letters, digits, "-", "_" and "."."""
    plain = unicodedata.normalize("NFKD", text.casefold()).encode("ascii", "ignore").decode()
    return re.sub("[^a-z0-9._-]+", "-", plain).strip("-._")[:80] or "model"


def write_modelfile(gguf: Path, source: Pretrained, form: Form | None) -> None:
    """Write the Modelfile for `ollama create` next to a GGUF file. form: as in write_folder."""
    end_of_text = source.tokenizer.eot
    text = command.render(
        "Modelfile.j2",
        file=gguf.name,
        chat_template=form.ollama_template if form else "{{ .Prompt }}",
        context=min(source.config.block_size, OLLAMA_CONTEXT),
        system=source.system,
        stop=[end_of_text, *form.stop, *form.markers] if form else [end_of_text],
    )
    files.write_text(gguf.with_suffix(".Modelfile"), text)


if __name__ == "__main__":
    command.run("tools.export", main)
