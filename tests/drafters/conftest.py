from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama checkpoint of six small layers with random weights, and a word-level tokenizer of its own."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny-target")
    vocab, h, inner, layers, heads, kv, dim = 320, 48, 96, 6, 6, 2, 8
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, cols: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, cols, generator=generator) * scale * cols**-0.5

    tensors = {
        "model.embed_tokens.weight": matrix(vocab, h, 3.0),
        "model.norm.weight": torch.rand(h, generator=generator) + 0.5,
    }
    for index in range(layers):
        p = f"model.layers.{index}."
        tensors |= {
            p + "self_attn.q_proj.weight": matrix(heads * dim, h, 2.0),
            p + "self_attn.k_proj.weight": matrix(kv * dim, h, 2.0),
            p + "self_attn.v_proj.weight": matrix(kv * dim, h),
            p + "self_attn.o_proj.weight": matrix(h, heads * dim),
            p + "mlp.gate_proj.weight": matrix(inner, h),
            p + "mlp.up_proj.weight": matrix(inner, h),
            p + "mlp.down_proj.weight": matrix(h, inner),
            p + "input_layernorm.weight": torch.rand(h, generator=generator) + 0.5,
            p + "post_attention_layernorm.weight": torch.rand(h, generator=generator) + 0.5,
        }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": h,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": dim, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "max_position_embeddings": 512, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "attention_bias": False, "mlp_bias": False,
        "dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = {f"w{i}": i for i in range(vocab)}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"},
                 "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    return folder
