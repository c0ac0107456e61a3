"""Writes tests/fixtures/kimi_linear: a small Kimi-Linear model as transformers (5.24, pip install transformers) saves it, and its logits.

The weights are random and far from their initial values, so that every tensor counts: norms, router biases and decays included.
"""

import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures/kimi_linear"
TOKENS = 70  # more than one chunk of 64

torch.manual_seed(0)
config = KimiLinearConfig(
    vocab_size=48, hidden_size=24, intermediate_size=40, moe_intermediate_size=8, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    num_local_experts=6, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=1024,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
    linear_attn_config={"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4})
model = KimiLinearForCausalLM(config).float().eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif "A_log" not in name and "dt_bias" not in name:
            parameter.normal_(0, 0.25)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn_like(buffer))
    ids = torch.randint(0, config.vocab_size, (1, TOKENS))
    logits = model(ids).logits[0].float()
model.save_pretrained(OUT)
save_file({"logits": logits}, OUT / "logits.safetensors")
(OUT / "ids.json").write_text(json.dumps(ids[0].tolist()) + "\n")
