"""A checkpoint for other programs: a folder for transformers, a GGUF file for llama.cpp and Ollama.

    python -m tools.export CHECKPOINT --out FOLDER [--gguf FILE]

The folder holds weights, tokenizer, settings, a model card filled in from the run, and its curve;
beside the GGUF file lies a Modelfile for Ollama. What the formats are, formats/ knows. Needs the
packages safetensors and gguf.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import os
import shutil
from pathlib import Path

from formats import files, huggingface, mirror, pretrained, run_folder
from formats.conversation import CHAT_TEMPLATE, OLLAMA_TEMPLATE, STOP
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from generating.chat import saw_conversations
from tokenizer_bpe import EOT, TokenizerError
from tools import command, model_card


def write_folder(source: Pretrained, out: Path, chat: bool) -> int:
    """Write the folder `out`, whole or not at all; returns the model's parameters.

    chat: with a chat template. Raises CheckpointError where `out` is there already, OSError where
    the disk does not take it.
    """
    from safetensors.torch import save_file

    config, tokenizer = source.config, source.tokenizer
    check_folder(out)
    tensors = huggingface.to_hf(config, source.tensors, tokenizer.vocab_size)
    parameters = sum(t.numel() for t in tensors.values())
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_settings(partial, source, chat)
        tokenizer.save(partial / "tokenizer.json")
        model_card.write(partial, source, parameters, out.name, chat)
        size = run_folder.tensor_bytes(tensors)
        files.check_room(partial, size, "choose an --out on another disk")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        # safetensors lets no one else read it
        (partial / "model.safetensors").chmod((partial / "config.json").stat().st_mode)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return parameters


def write_settings(folder: Path, source: Pretrained, chat: bool) -> None:
    """Write how transformers is to build the model, to read text, and to generate."""
    config, tokenizer = source.config, source.tokenizer
    described = huggingface.config_values(config, tokenizer)
    generation = {
        "bos_token_id": described["bos_token_id"],
        "eos_token_id": described["eos_token_id"],
        "pad_token_id": tokenizer.eot_id,
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 200,
        "max_new_tokens": config.block_size // 2,
    }
    reading = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "clean_up_tokenization_spaces": False,
        "bos_token": EOT,
        "eos_token": EOT,
        "pad_token": EOT,
        "unk_token": EOT,  # as GPT-2's own has it: CTranslate2 asks for one
    }
    if chat:
        reading["chat_template"] = CHAT_TEMPLATE
    files.write_json(folder / "config.json", described)
    files.write_json(folder / "generation_config.json", generation)
    files.write_json(folder / "tokenizer_config.json", reading)


def check_folder(out: Path) -> None:
    """Raises CheckpointError unless `out` is free."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there already; remove it, or choose another --out")


def modelfile(gguf_file: Path, block_size: int, chat: bool) -> str:
    """What `ollama create NAME -f FILE` reads.

    As https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx describes it.
    """
    template = OLLAMA_TEMPLATE if chat else "{{ .Prompt }}"
    lines = [
        f"FROM ./{gguf_file.name}",
        f'TEMPLATE """{template}"""',
        f"PARAMETER num_ctx {block_size}",
        "PARAMETER temperature 0.8",
    ]
    for stop in [EOT, STOP] if chat else [EOT]:
        lines.append(f'PARAMETER stop "{stop}"')  # over several lines: it reads no \n
    return "\n".join(lines) + "\n"


def parse_args(argv):
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.export",
        usage="python -m tools.export CHECKPOINT --out FOLDER [--gguf FILE] ... (--help lists all)",
        description="A checkpoint as a folder for transformers, or as a GGUF file.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run (its best step by validation loss, else its newest), a step, or an address",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="a folder for transformers and what reads its format",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="a file for llama.cpp, Ollama and LM Studio; must end in .gguf",
    )
    parser.add_argument(
        "--gguf_type",
        choices=["f32", "f16", "q8_0"],
        default="f16",
        help="how its matrices are stored: 4, 2 or about 1 byte a number; default %(default)s",
    )
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="with a chat template; default: where the run was trained on conversations",
    )
    args = parser.parse_args(argv)
    if not args.out and not args.gguf:
        parser.error("say where to: --out FOLDER, --gguf FILE, or both")
    if args.gguf and args.gguf.suffix != ".gguf":
        parser.error(f"--gguf {args.gguf}: the name must end in .gguf")
    return args


def main(argv):
    """The command line's work."""
    args = parse_args(argv)
    folder = mirror.find(args.checkpoint)
    source = pretrained.load(folder)
    chat = args.chat
    if chat is None:
        chat = saw_conversations(run_folder.read_state(folder, ()))
    if args.out:
        check_folder(args.out)
    if args.gguf:  # what it cannot hold is said before the folder is written
        check_gguf(args.gguf, source, args.gguf_type)
    if args.out:
        parameters = write_folder(source, args.out, chat)
        print(f"{folder} -> {args.out}: {parameters:,} parameters")
        load = f"pipeline('text-generation', {str(args.out)!r})"
        print(f"  from transformers import pipeline; print({load}('The'))")
    if args.gguf:
        write_gguf(args.gguf, source, args.gguf_type, chat)
        megabytes = args.gguf.stat().st_size / 1e6
        print(f"{folder} -> {args.gguf}: {megabytes:,.1f} MB, {args.gguf_type}")
        beside, name = args.gguf.with_suffix(".Modelfile"), args.gguf.stem
        print(f"  llama-completion -m {args.gguf} -p 'The' -n 100 -no-cnv")
        print(f"  ollama create {name} -f {beside} && ollama run {name}")


def check_gguf(path: Path, source: Pretrained, kind: str) -> None:
    """Raises CheckpointError for what GGUF cannot hold, and where a file would be replaced."""
    from formats import gguf

    gguf.check(path, source.config, source.tokenizer, kind)
    beside = path.with_suffix(".Modelfile")
    if beside.exists():
        raise CheckpointError(f"{beside} is there already; remove it, or choose another --gguf")


def write_gguf(path: Path, source: Pretrained, kind: str, chat: bool) -> None:
    """Write a GGUF file, and a Modelfile for Ollama beside it. kind: f32, f16 or q8_0."""
    from formats import gguf

    beside, text = path.with_suffix(".Modelfile"), modelfile(path, source.config.block_size, chat)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(beside, text)
    try:
        gguf.write(path, source.config, source.tensors, source.tokenizer, kind, path.stem, chat)
    except BaseException:
        beside.unlink()  # else the next try would be refused for it
        raise


if __name__ == "__main__":
    command.run("tools.export", main, mistakes=(CheckpointError, TokenizerError))
