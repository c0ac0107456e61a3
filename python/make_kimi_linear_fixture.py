"""Writes tests/fixtures/kimi_linear*: small Kimi-Linear models as transformers (5.24, pip install transformers) saves them, and their logits.

The weights are random and far from their initial values, so that every tensor counts: norms, router biases and decays included. logits.safetensors has
`logits` in fp32.

tests/fixtures/kimi_linear_bf16 has SEEDS models of each shape with weights that are bf16 numbers, and expected.safetensors: `ids`, `logits` in fp32, and
how far transformers' own bf16 runs of the model are from them, a relative 2-norm a token: `error.ATTENTION.WAY`, for eager attention and SDPA, whole, in
chunks of 32 and token by token on a cache. The spread of those runs is what bf16 is worth on these models.
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
BF16_TOKENS, SEEDS = 96, 4
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


def build(changes, seed):
    torch.manual_seed(seed)
    options = {key: value for key, value in (BASE | changes).items() if value is not None or key.endswith("token_id")}
    config = KimiLinearConfig(**options)
    model = KimiLinearForCausalLM(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif "A_log" not in parameter_name and "dt_bias" not in parameter_name:
            parameter.normal_(0, 0.25)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn_like(buffer))
    return model


def save(model, out):
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)


def make(name, changes):
    model = build(changes, 0)
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS))
    logits = model(ids).logits[0].float()
    save(model, FIXTURES / name)
    save_file({"logits": logits}, FIXTURES / name / "logits.safetensors")
    (FIXTURES / name / "ids.json").write_text(json.dumps(ids[0].tolist()) + "\n")


def in_pieces(model, ids, size):
    cache, out = None, []
    for part in ids.split(size, 1):
        step = model(part, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        out.append(step.logits[0].float())
    return torch.cat(out)


def make_bf16(name, changes, seed):
    """Returns the errors of transformers' runs."""
    out = FIXTURES / "kimi_linear_bf16" / f"{name}.{seed}"
    save(build(changes, seed).bfloat16(), out)
    wide = KimiLinearForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.randint(0, wide.config.vocab_size, (1, BF16_TOKENS))
    logits = wide(ids).logits[0]
    errors = {}
    for attention in ("eager", "sdpa"):
        half = KimiLinearForCausalLM.from_pretrained(out, dtype=torch.bfloat16, attn_implementation=attention).eval()
        for way, size in (("whole", BF16_TOKENS), ("chunks", 32), ("steps", 1)):
            errors[f"error.{attention}.{way}"] = (in_pieces(half, ids, size) - logits).norm(2, 1) / logits.norm(2, 1)
    save_file({"ids": ids[0], "logits": logits, **errors}, out / "expected.safetensors")
    return errors


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    for shape_name, shape_changes in SHAPES.items():
        make(shape_name, shape_changes)
        runs = [make_bf16(shape_name, shape_changes, seed) for seed in range(SEEDS)]
        for run in runs[0]:
            all_tokens = torch.cat([r[run] for r in runs])
            print(shape_name, run, "mean %.4f, quantiles 0.5 %.4f, 0.9 %.4f, 0.99 %.4f" % (all_tokens.mean(), *all_tokens.quantile(torch.tensor([0.5, 0.9, 0.99]))))
