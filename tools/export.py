"""A checkpoint for other programs: a folder that Hugging Face's transformers loads, a GGUF file for
llama.cpp and Ollama.

    python -m tools.export CHECKPOINT --out FOLDER [--gguf FILE]

The folder holds weights, tokenizer, settings, a model card filled in from the run, and its curve;
beside the GGUF file lies a Modelfile for Ollama. What the formats are, formats/ knows. Needs the
packages safetensors and gguf.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from formats import files, huggingface, pretrained, run_folder
from formats.conversation import CHAT_TEMPLATE, OLLAMA_TEMPLATE, STOP, is_chat
from formats.data_folder import DataError, read_meta
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from tokenizer_bpe import EOT, Tokenizer, TokenizerError
from tools import model_card


def saw_conversations(state: dict, tokenizer: Tokenizer) -> bool:
    """Whether the data of a run, where it is still there, begins with a conversation. Only its
    `messages` read so.
    """
    folder = Path(state["settings"]["data_dir"])
    try:
        meta = read_meta(folder)
        first = meta.splits["train"].files()[0]
        ids = np.fromfile(folder / first.file, meta.dtype, 10_000).tolist()
        text = tokenizer.decode(ids)
    except (DataError, TokenizerError, OSError):  # gone, or prepared anew
        return False
    return is_chat(text.removeprefix(EOT))


def write_folder(source: Pretrained, out: Path, chat: bool) -> int:
    """Write the folder `out`, whole or not at all; returns the model's parameters. chat: with a
    chat template.

    Raises CheckpointError where `out` is there already, OSError where the disk does not take it.
    """
    from safetensors.torch import save_file

    config, tokenizer = source.config, source.tokenizer
    check_folder(out)
    described = huggingface.config_values(config, tokenizer)
    tensors = huggingface.to_hf(config, source.tensors, tokenizer.vocab_size)
    parameters = sum(t.numel() for t in tensors.values())
    ids = {name: described[name] for name in ("bos_token_id", "eos_token_id")}
    sampling = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 200,
        "max_new_tokens": config.block_size // 2,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "clean_up_tokenization_spaces": False,
        "bos_token": EOT,
        "eos_token": EOT,
        "pad_token": EOT,
        "unk_token": EOT,  # as GPT-2's own has it: CTranslate2 asks for one
    }
    if chat:
        tokenizer_config["chat_template"] = CHAT_TEMPLATE
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        files.write_json(partial / "config.json", described)
        files.write_json(
            partial / "generation_config.json", ids | {"pad_token_id": tokenizer.eot_id} | sampling
        )
        files.write_json(partial / "tokenizer_config.json", tokenizer_config)
        tokenizer.save(partial / "tokenizer.json")
        model_card.write(partial, source, parameters, out.name, chat)
        files.check_room(partial, run_folder.tensor_bytes(tensors))
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        # safetensors lets no one else read it
        (partial / "model.safetensors").chmod((partial / "config.json").stat().st_mode)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return parameters


def check_folder(out: Path) -> None:
    """Raises CheckpointError unless `out` is free."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there already; remove it, or choose another --out")


def modelfile(gguf_file: Path, block_size: int, chat: bool) -> str:
    """What `ollama create NAME -f FILE` reads
    (https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx).
    """
    template = OLLAMA_TEMPLATE if chat else "{{ .Prompt }}"
    stops = [EOT, STOP] if chat else [EOT]
    return "\n".join(
        [
            f"FROM ./{gguf_file.name}",
            f'TEMPLATE """{template}"""',
            f"PARAMETER num_ctx {block_size}",
            "PARAMETER temperature 0.8",
            *(f'PARAMETER stop "{stop}"'.replace("\n", "\\n") for stop in stops),
            "",
        ]
    )


def parse_args(argv):
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.export",
        description="A checkpoint as a folder for transformers, or as a GGUF file.",
    )
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run (its best step by validation loss, else its newest) or one step of it",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="a folder for transformers and what reads its format",
    )
    add(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="a file for llama.cpp, Ollama and LM Studio; must end in .gguf",
    )
    add(
        "--gguf_type",
        choices=["f32", "f16", "q8_0"],
        default="f16",
        help="how its matrices are stored: 4, 2 or about 1 byte a number; default %(default)s",
    )
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="with a chat template; default: where the run's data is there and holds conversations",
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
    folder = run_folder.find(args.checkpoint)
    source = pretrained.load(folder)
    chat = args.chat
    if chat is None:
        chat = saw_conversations(run_folder.read_state(folder, ()), source.tokenizer)
    if args.out:
        check_folder(args.out)
    if args.gguf:  # what it cannot hold is said before the folder is written
        from formats import gguf

        gguf.check(args.gguf, source.config, source.tokenizer, args.gguf_type)
    if args.out:
        parameters = write_folder(source, args.out, chat)
        print(f"{folder} -> {args.out}: {parameters:,} parameters")
        print(
            "  from transformers import pipeline; print(pipeline('text-generation',"
            f" {str(args.out)!r})('The'))"
        )
    if args.gguf:
        name = args.gguf.stem
        gguf.write(
            args.gguf, source.config, source.tensors, source.tokenizer, args.gguf_type, name, chat
        )
        beside = args.gguf.with_suffix(".Modelfile")
        beside.write_text(
            modelfile(args.gguf, source.config.block_size, chat), encoding="utf-8", newline="\n"
        )
        print(
            f"{folder} -> {args.gguf}: {args.gguf.stat().st_size / 1e6:,.1f} MB, {args.gguf_type}"
        )
        print(f"  llama-cli -m {args.gguf} -p 'The' -n 100 -no-cnv")
        print(f"  ollama create {name} -f {beside} && ollama run {name}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (CheckpointError, TokenizerError) as error:
        print(f"tools.export: {error}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        print(
            f"tools.export: {error.name} is missing; pip install -r requirements-dev.txt -c"
            " constraints.txt",
            file=sys.stderr,
        )
        sys.exit(1)
    except OSError as error:
        print(f"tools.export: {error}", file=sys.stderr)
        sys.exit(1)
