"""Turn a GGUF file of a Llama model into a plain Hugging Face checkpoint in fp32.

The weights are dequantized with the ``gguf`` package and written as safetensors; neither torch nor transformers
is needed. transformers can read a GGUF file too, but then refuses to save it while its config says "quantized".

The same GGUF gives the same bytes on any machine: the arithmetic is one fp32 multiplication and one addition an
element, and the files are written in a fixed order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.errors import PairError

# The two kinds of GGUF token that are special tokens of a Hugging Face tokenizer (llama.cpp's llama_token_type).
_CONTROL, _USER_DEFINED = 3, 4

_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` and the tokenizer into ``folder``.

    Raises:
        PairError: the file isn't a GGUF, isn't a Llama model, or its tokenizer isn't byte-level BPE.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
    except (OSError, ValueError, IndexError) as error:
        raise PairError(f"{gguf_file} can't be read as a GGUF file ({error}).") from error
    meta = {name: field.contents() for name, field in reader.fields.items()}
    architecture, tokenizer = meta.get("general.architecture"), meta.get("tokenizer.ggml.model")
    if architecture != "llama" or tokenizer != "gpt2":
        raise PairError(
            f"{gguf_file} holds a {architecture!r} model with a {tokenizer!r} tokenizer; "
            "only 'llama' with 'gpt2' (byte-level BPE) can be converted."
        )
    config = _config(meta, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(meta, folder)
    _write_weights(reader, config, folder / "model.safetensors")


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        # GGUF keeps it in fp32 (9.999999747378752e-06); seven digits are what it holds.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # llama.cpp's pre-tokenizer "smollm": every digit stands alone, then GPT-2's split.
    digits = [pre_tokenizers.Digits(individual_digits=True)] if meta.get("tokenizer.ggml.pre") == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        role: tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    config = {
        "add_prefix_space": False,
        **{f"{role}_token": token for role, token in named.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", config)


def _write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            array = _rotary_halves(array, config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"])
        weights[_tensor_name(tensor.name)] = np.ascontiguousarray(array)
    save_file(dict(sorted(weights.items())), str(path), metadata={"format": "pt"})


def _rotary_halves(array: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of query and key projections.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3) …; Hugging Face rotates row i of the first half of a head with
    row i of the second. So ``[heads, pairs, 2, …]`` becomes ``[heads, 2, pairs, …]``.
    """
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tensor_name(name: str) -> str:
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["output", "weight"]:
            return "lm_head.weight"
        case ["blk", layer, kind, "weight"] if kind in _TENSORS:
            return f"model.layers.{layer}.{_TENSORS[kind]}.weight"
    raise PairError(f"The GGUF file has a tensor that a Llama model doesn't have: {name!r}.")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
