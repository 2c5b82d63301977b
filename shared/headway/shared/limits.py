"""How long the model's context is, as far as that is known before an engine runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.shared.settings import Settings

#: Ways of stretching rotary embeddings for which the config names the length before the stretch.
_STRETCHED = ("dynamic", "linear", "yarn")


def model_length(settings: Settings) -> int | None:
    """Tokens of the model's context: as set, else what its config says; None when neither is known."""
    if settings.max_model_len is not None:
        return settings.max_model_len
    if settings.engine == "simulated":
        return settings.simulated_kv_tokens
    # In front of an upstream a model's name is only a name: there need not be a config here, nor anywhere.
    named = settings.model if settings.engine == "vllm" else ""
    return config_length(_load_config(named)) if named else None


def config_length(config: Mapping[str, Any]) -> int | None:
    """The context in tokens that a `config.json` promises."""
    text = config.get("text_config") or config
    length = text.get("max_position_embeddings")
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if length is None or (rope.get("rope_type") or rope.get("type")) not in _STRETCHED:
        return length
    return int(rope.get("original_max_position_embeddings", length) * rope.get("factor", 1))


def _load_config(name: str) -> Mapping[str, Any]:
    try:
        if (path := Path(name, "config.json")).exists():
            config: Mapping[str, Any] = json.loads(path.read_bytes())
            return config
        # Seconds to import, and no part of a light client.
        from transformers import PretrainedConfig

        config = PretrainedConfig.get_config_dict(name)[0]
    except (ImportError, OSError, ValueError):
        # Some model formats have no such file; the engine then is the only one that knows.
        return {}
    return config
