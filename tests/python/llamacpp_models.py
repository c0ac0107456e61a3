"""The models on which llama.cpp is a witness (python/witness_llamacpp.py): head widths and sizes that its kernels take."""

import torch

import small_models
from small_models import KDA, K3, KIMI_LINEAR, make_model

WIDE = {"hidden_size": 64, "vocab_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "routed_expert_hidden_size": 32, "moe_intermediate_size": 32, "intermediate_size": 64, "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5, "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1}
LINEAR = {"num_heads": 2, "head_dim": 64}
FORMS = {
    "k3": {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "float32", "tie_word_embeddings": False,
           "text_config": K3 | WIDE | {"linear_attn_config": KDA | LINEAR}},
    "kimi-linear": {k: v for k, v in (KIMI_LINEAR | WIDE).items() if k not in ("q_lora_rank", "routed_expert_hidden_size")}
                   | {"linear_attn_config": KIMI_LINEAR["linear_attn_config"] | LINEAR},
}
TOKENS = 200  # three chunks of 64 and a rest
SCALE = 64.0


def _adjust(name, value):
    """Values exact in bf16: the last bit of a random number's logarithm may differ between processors. And latents so long that no epsilon counts:
    llama.cpp adds rms_norm_eps, 1e-5, in MLA's inner norms, where the released code adds 1e-6; the norms undo the scale."""
    value = value.bfloat16().to(value.dtype)
    if name.endswith("q_a_proj.weight"):
        return value * SCALE
    if name.endswith("kv_a_proj_with_mqa.weight"):
        rank = WIDE["kv_lora_rank"]
        return torch.cat([value[:rank] * SCALE, value[rank:]])
    return value


def make_witness_model(form, directory):
    """Writes the model; returns config, weights and the token ids."""
    small_models.FORMS["witness"] = FORMS[form]
    config, weights = make_model("witness", directory, seed=3, adjust=_adjust)
    return config, weights, torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(5))


def fingerprint(weights):
    """[2] fp64: tells another model from this one."""
    total = sum(value.double().abs().sum() for value in weights.values())
    signed = sum((i + 1) * value.double().sum() for i, value in enumerate(weights.values()))
    return torch.stack([total, signed])
