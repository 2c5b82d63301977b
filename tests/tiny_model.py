"""A random Qwen2 of 1.5 MB: real vLLM runs it at thousands of tokens a second, also tensor parallel.

Its tokenizer has a token for each byte, so a text has as many tokens as it has bytes. Two KV heads allow tensor
parallel size 2, and its head size of 32 is the smallest that vLLM's CPU attention supports. The weights are saved,
since vLLM's `--load-format dummy` gives each part of a tensor parallel engine others, and they are float32, in
which greedy text is reproducible.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MAX_MODEL_LEN = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, VOCABULARY = 128, 256, 2, 4, 2, 512

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": CHAT_TEMPLATE,
    "model_max_length": MAX_MODEL_LEN,
}


def make(out: Path) -> Path:
    """Writes the model's folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG))
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    byte_tokenizer().save(str(out / "tokenizer.json"))
    save_file(random_weights(), out / "model.safetensors", metadata={"format": "pt"})
    return out


def random_weights() -> dict[str, np.ndarray]:
    """The same on every machine, and wide enough that the most likely token leads clearly."""
    random = np.random.default_rng(seed=0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        own = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            "self_attn.q_proj.bias": (HIDDEN,),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            "mlp.gate_proj.weight": (MLP, HIDDEN),
            "mlp.up_proj.weight": (MLP, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, MLP),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return {
        f"model.{name}": random.normal(1.0 if "norm" in name else 0.0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def byte_tokenizer() -> Tokenizer:
    """A BPE tokenizer without merges: one token a byte."""
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL_TOKENS])
    return tokenizer
