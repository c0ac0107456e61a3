"""The models on which llama.cpp is a witness (python/witness_llamacpp.py): head widths and sizes that its kernels take."""

import torch

import small_models
from small_models import KDA, K3, KIMI_LINEAR, make_model

EPS = 1e-5  # rms_norm_eps, which llama.cpp takes in MLA's inner norms too
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


def make_witness_model(form, directory):
    """Writes the model; returns config, weights and 70 token ids."""
    small_models.FORMS["witness"] = FORMS[form]
    config, weights = make_model("witness", directory, seed=3)
    return config, weights, torch.randint(config.vocab_size, (70,), generator=torch.Generator().manual_seed(5))
