"""Small models of every form, as model directories, for the tests that run Godwit beside the reference."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402

from reference import Config, save_directory  # noqa: E402
from reference.shapes import random_weights  # noqa: E402

KDA = {"kda_layers": [1, 2, 3, 5], "full_attn_layers": [4, 6], "num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 4,
       "use_full_rank_gate": True, "gate_lower_bound": -5.0}
K3 = {"model_type": "kimi_linear", "vocab_size": 56, "hidden_size": 48, "num_hidden_layers": 6, "intermediate_size": 40,
      "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "situ", "activation_situ_beta": 4.0,
      "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
      "qk_rope_head_dim": 6, "v_head_dim": 10, "mla_use_nope": True, "mla_use_output_gate": True, "num_experts": 24,
      "num_experts_per_token": 4, "num_shared_experts": 2, "moe_intermediate_size": 12, "routed_expert_hidden_size": 16,
      "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid", "first_k_dense_replace": 1, "attn_res_block_size": 2,
      "tie_word_embeddings": False, "max_position_embeddings": 4096, "linear_attn_config": KDA}
KIMI_LINEAR = {k: v for k, v in K3.items() if k not in (
    "activation_situ_beta", "activation_situ_linear_beta", "q_lora_rank", "mla_use_output_gate", "routed_expert_hidden_size",
    "latent_moe_use_norm", "attn_res_block_size")} | {
        "architectures": ["KimiLinearForCausalLM"], "dtype": "float32", "hidden_act": "silu", "routed_scaling_factor": 2.446,
        "num_shared_experts": 1, "linear_attn_config": {k: v for k, v in KDA.items() if k not in ("use_full_rank_gate", "gate_lower_bound")}}


def _k3(text=None, **top):
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "float32", "tie_word_embeddings": False,
            "text_config": K3 | (text or {}), **top}


FORMS = {
    "k3": _k3(),
    "k3, every sub-layer a source": _k3(godwit={"attn_res": "full"}),
    # What the released configuration leaves at its default or at one value
    "k3, other options": _k3({"num_expert_group": 6, "topk_group": 3, "moe_renormalize": False, "routed_scaling_factor": 1.7,
                              "moe_layer_freq": 2, "first_k_dense_replace": 2, "num_shared_experts": 0, "latent_moe_use_norm": False,
                              "activation_situ_linear_beta": None, "activation_situ_beta": None, "mla_use_output_gate": False,
                              "attn_res_block_size": 4, "linear_attn_config": KDA | {"gate_lower_bound": -1.5, "use_full_rank_gate": False}}),
    "kimi-linear": KIMI_LINEAR,
}


def make_model(form, directory, seed=0, adjust=lambda name, value: value):
    """Writes the form with random weights, each as `adjust(name, value)` makes it; returns its config and weights."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_directory(directory, FORMS[form], {})
    config = Config.read(directory)
    weights = {name: adjust(name, value) for name, value in random_weights(config, seed).items()}
    stored = dict(weights)
    for name, value in weights.items():
        if name.endswith("A_log"):  # the released files' padding; Kimi-Linear's own shape
            stored[name] = torch.nn.functional.pad(value, (0, 128 - len(value))) if config.prefix else value.reshape(1, 1, -1, 1)
    save_directory(directory, FORMS[form], stored)
    return config, weights
