"""Writes tests/fixtures/kimi_linear*: small Kimi-Linear models as transformers (5.24, pip install transformers) saves them, and their logits.

The weights are random and far from their initial values, so that every tensor counts: norms, router biases and decays included. logits.safetensors has
`logits` in fp32 and what the same model gives in bf16, twice: `bf16_whole` on the whole sequence, `bf16_steps` token by token on a cache. How far those
two are apart is what bf16 is worth on this model.
"""

import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "tests/fixtures"
TOKENS = 70  # more than one chunk of 64
BASE = dict(vocab_size=48, hidden_size=24, intermediate_size=40, moe_intermediate_size=8, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
            num_local_experts=6, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=1024,
            pad_token_id=None, bos_token_id=None, eos_token_id=None,
            linear_attn_config={"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4})
SHAPES = {
    "kimi_linear": {},
    # Other head counts and widths, grouped routing, two shared experts, two dense layers; its config.json has layer_types only.
    "kimi_linear_groups": dict(
        hidden_size=32, num_hidden_layers=5, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=16, qk_nope_head_dim=12, v_head_dim=8,
        num_local_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.5, linear_num_heads=3,
        linear_head_dim=8, linear_conv_kernel_dim=4,
        mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"], first_k_dense_replace=2, linear_attn_config=None,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]),
}


def make(name, changes):
    torch.manual_seed(0)
    options = {key: value for key, value in (BASE | changes).items() if value is not None or key.endswith("token_id")}
    config = KimiLinearConfig(**options)
    model = KimiLinearForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "A_log" not in parameter_name and "dt_bias" not in parameter_name:
                parameter.normal_(0, 0.25)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
        ids = torch.randint(0, config.vocab_size, (1, TOKENS))
        logits = model(ids).logits[0].float()
        out = FIXTURES / name
        shutil.rmtree(out, ignore_errors=True)
        model.save_pretrained(out)
        half = KimiLinearForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
        whole = half(ids).logits[0].float()
        cache, steps = None, []
        for t in range(TOKENS):
            step = half(ids[:, t:t + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits[0].float())
    (out / "generation_config.json").unlink(missing_ok=True)
    save_file({"logits": logits, "bf16_whole": whole, "bf16_steps": torch.cat(steps)}, out / "logits.safetensors")
    (out / "ids.json").write_text(json.dumps(ids[0].tolist()) + "\n")
    gap = lambda a, b: ((a - b).norm() / b.norm()).item()
    print(f"{name}: bf16 whole {gap(whole, logits):.1e}, steps {gap(torch.cat(steps), logits):.1e} from fp32, {gap(whole, torch.cat(steps)):.1e} apart")


if __name__ == "__main__":
    for shape_name, shape_changes in SHAPES.items():
        make(shape_name, shape_changes)
