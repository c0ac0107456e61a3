"""Every parameter of a configuration by its released name, with its shape; and random values for them."""

import torch


def _mlp(p, inner, width):
    return {f"{p}.gate_proj.weight": (inner, width), f"{p}.up_proj.weight": (inner, width), f"{p}.down_proj.weight": (width, inner)}


def _kda(c, p):
    k = c.linear_attn_config
    width = k["num_heads"] * k["head_dim"]
    out = {}
    for n in "qkv":
        out |= {f"{p}.{n}_proj.weight": (width, c.hidden_size), f"{p}.{n}_conv1d.weight": (width, 1, k.get("short_conv_kernel_size", 4))}
    out |= {f"{p}.f_a_proj.weight": (k["head_dim"], c.hidden_size), f"{p}.f_b_proj.weight": (width, k["head_dim"]),
            f"{p}.b_proj.weight": (k["num_heads"], c.hidden_size), f"{p}.A_log": (k["num_heads"],), f"{p}.dt_bias": (width,),
            f"{p}.o_norm.weight": (k["head_dim"],), f"{p}.o_proj.weight": (c.hidden_size, width)}
    if k.get("use_full_rank_gate"):
        return out | {f"{p}.g_proj.weight": (width, c.hidden_size)}
    return out | {f"{p}.g_a_proj.weight": (k["head_dim"], c.hidden_size), f"{p}.g_b_proj.weight": (width, k["head_dim"])}


def _mla(c, p):
    heads = c.num_attention_heads
    q, v = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), heads * c.v_head_dim
    if c.q_lora_rank:
        out = {f"{p}.q_a_proj.weight": (c.q_lora_rank, c.hidden_size), f"{p}.q_a_layernorm.weight": (c.q_lora_rank,),
               f"{p}.q_b_proj.weight": (q, c.q_lora_rank)}
    else:
        out = {f"{p}.q_proj.weight": (q, c.hidden_size)}
    out |= {f"{p}.kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
            f"{p}.kv_a_layernorm.weight": (c.kv_lora_rank,),
            f"{p}.kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            f"{p}.o_proj.weight": (c.hidden_size, v)}
    return out | ({f"{p}.g_proj.weight": (v, c.hidden_size)} if c.mla_use_output_gate else {})


def _moe(c, p):
    latent, inner = c.routed_expert_hidden_size or c.hidden_size, c.moe_intermediate_size
    out = {f"{p}.gate.weight": (c.num_experts, c.hidden_size), f"{p}.gate.e_score_correction_bias": (c.num_experts,),
           f"{p}.experts.w1": (c.num_experts, inner, latent), f"{p}.experts.w3": (c.num_experts, inner, latent),
           f"{p}.experts.w2": (c.num_experts, latent, inner)}
    if c.routed_expert_hidden_size:
        out |= {f"{p}.routed_expert_down_proj.weight": (latent, c.hidden_size), f"{p}.routed_expert_up_proj.weight": (c.hidden_size, latent)}
        if c.latent_moe_use_norm:
            out[f"{p}.routed_expert_norm.weight"] = (latent,)
    if c.num_shared_experts:
        out |= _mlp(f"{p}.shared_experts", c.num_shared_experts * inner, c.hidden_size)
    return out


def parameter_shapes(c):
    model, width = c.prefix + "model", c.hidden_size
    out = {f"{model}.embed_tokens.weight": (c.vocab_size, width)}
    for layer in range(c.num_hidden_layers):
        p = f"{model}.layers.{layer}"
        out |= {f"{p}.input_layernorm.weight": (width,), f"{p}.post_attention_layernorm.weight": (width,)}
        if c.attn_res != "none":
            out |= {f"{p}.{n}_res_norm.weight": (width,) for n in ("self_attention", "mlp")}
            out |= {f"{p}.{n}_res_proj.weight": (1, width) for n in ("self_attention", "mlp")}
        out |= (_kda if c.is_kda(layer) else _mla)(c, f"{p}.self_attn")
        out |= _moe(c, f"{p}.block_sparse_moe") if c.is_moe(layer) else _mlp(f"{p}.mlp", c.intermediate_size, width)
    out[f"{model}.norm.weight"] = (width,)
    if c.attn_res != "none":
        out |= {f"{model}.output_attn_res_norm.weight": (width,), f"{model}.output_attn_res_proj.weight": (1, width)}
    return out if c.tie_word_embeddings else out | {f"{c.prefix}lm_head.weight": (c.vocab_size, width)}


def random_weights(config, seed, dtype=torch.float64):
    """Values far from an initialisation, so that every tensor counts; exact in fp32. Keys resemble queries: a head whose q.k crosses zero has an
    output whose direction, all that its norm leaves, is rounding, and comparing such models compares noise."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in parameter_shapes(config).items():
        x = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            x = 1 + 0.2 * x
        elif name.endswith("dt_bias"):
            x = 1.5 * x - 3.5
        elif name.endswith("A_log"):
            x = 0.4 * x
        elif name.endswith("res_proj.weight"):
            x = 0.15 * x  # sharper mixes amplify every rounding before them
        elif name.endswith("e_score_correction_bias"):
            x = 0.1 * x
        elif name.endswith("_conv1d.weight"):
            x = 0.5 * x + torch.tensor([0.2, 0.3, 0.5, 1.0])
        elif name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
            x = 0.003 * x  # so that the epsilon of the norm behind it counts
        elif name.endswith("experts.w2"):
            x = 2 * x / shape[-1] ** 0.5
        elif not name.endswith("embed_tokens.weight"):
            x = x * 0.7 / shape[-1] ** 0.5
        if name.endswith("k_proj.weight"):
            x = 0.5 * x + out[name.replace("k_proj", "q_proj")].float()
        out[name] = x.to(dtype)
    return out
