"""Checkpoints in Kimi K3's released layout, written from the released table of tensors, with random weights.

    python python/make_k3_checkpoint.py tests/fixtures/k3 --logits tests/fixtures/k3_logits.safetensors   # the fixture
    python python/make_k3_checkpoint.py DIR --size layer --experts 896          # K3's widths, one MoE layer
    python python/make_k3_checkpoint.py DIR --size full                         # all 497,220 tensors; files of holes

NumPy alone; nothing of Godwit is used, so that names, shapes and types are said twice. `--logits` also writes what
python/reference makes of it in fp64 (which needs torch). `full` writes headers and no
data: 1.56 TB in name, a few MB on disk.
"""

import argparse
import json
import struct
from pathlib import Path

import numpy as np

SIZES = {
    "small": dict(vocab_size=96, hidden=32, layers=4, mla=[4], dense=48, heads=2, head_dim=16, q_lora=24, kv_lora=16,
                  nope=8, rope=4, v_dim=16, experts=4, top_k=2, shared=2, inner=32, latent=64, block=2, first_dense=1,
                  vit=dict(layers=1, hidden=16, inner=24, heads=2, qkv=32, patch=4, grid=6), special=[90, 91, 92, 93]),
    "layer": dict(vocab_size=256, hidden=7168, layers=1, mla=[], dense=33792, heads=96, head_dim=128, q_lora=1536,
                  kv_lora=512, nope=128, rope=64, v_dim=128, experts=896, top_k=16, shared=2, inner=3072, latent=3584,
                  block=12, first_dense=0, vit=None, special=[250, 251, 252, 253]),
    "full": dict(vocab_size=163840, hidden=7168, layers=93, mla=[*range(4, 93, 4), 93], dense=33792, heads=96,
                 head_dim=128, q_lora=1536, kv_lora=512, nope=128, rope=64, v_dim=128, experts=896, top_k=16, shared=2,
                 inner=3072, latent=3584, block=12, first_dense=1,
                 vit=dict(layers=27, hidden=1024, inner=4096, heads=12, qkv=1536, patch=14, grid=64),
                 special=[163584, 163586, 163839, 163605]),
}


def config_json(s):
    layers = range(1, s["layers"] + 1)
    group = {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "input_activations": None,
             "output_activations": None,
             "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True,
                         "dynamic": False, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8",
                         "zp_dtype": None, "actorder": None, "block_structure": None}}
    text = {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "vocab_size": s["vocab_size"],
        "hidden_size": s["hidden"], "num_hidden_layers": s["layers"], "intermediate_size": s["dense"],
        "num_attention_heads": s["heads"], "num_key_value_heads": s["heads"], "hidden_act": "situ",
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5,
        "initializer_range": 0.02, "max_position_embeddings": 1048576, "tie_word_embeddings": False,
        "q_lora_rank": s["q_lora"], "kv_lora_rank": s["kv_lora"], "qk_nope_head_dim": s["nope"],
        "qk_rope_head_dim": s["rope"], "v_head_dim": s["v_dim"], "mla_use_nope": True, "mla_use_output_gate": True,
        "num_experts": s["experts"], "num_experts_per_token": s["top_k"], "num_shared_experts": s["shared"],
        "moe_intermediate_size": s["inner"], "routed_expert_hidden_size": s["latent"], "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "first_k_dense_replace": s["first_dense"], "moe_layer_freq": 1, "attn_res_block_size": s["block"],
        "num_nextn_predict_layers": 0, "transformers_version": "4.56.2",
        "linear_attn_config": {"num_heads": s["heads"], "head_dim": s["head_dim"], "short_conv_kernel_size": 4,
                               "use_full_rank_gate": True, "gate_lower_bound": -5.0, "full_attn_layers": s["mla"],
                               "kda_layers": [i for i in layers if i not in s["mla"]]},
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None,
            "config_groups": {"group_0": group},
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                       "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"]}}
    bos, eos, pad, media = s["special"]
    root = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
            "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "media_placeholder_token_id": media,
            "ignore_index": -100, "image_placeholder": "<|kimi_image_placeholder|>", "tie_word_embeddings": False,
            "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config",
                         "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration"},
            "text_config": text}
    if v := s["vit"]:
        root["vision_config"] = {
            "patch_size": v["patch"], "init_pos_emb_height": v["grid"], "init_pos_emb_width": v["grid"],
            "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear",
            "vt_num_hidden_layers": v["layers"], "vt_hidden_size": v["hidden"], "vt_intermediate_size": v["inner"],
            "vt_num_attention_heads": v["heads"], "qkv_hidden_size": v["qkv"], "attn_bias": False,
            "linear_bias": False, "patch_embed_proj_bias": False, "norm_type": "rmsnorm", "mlp_type": "mlp2",
            "activation_func": "gelu_pytorch_tanh", "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmergerv2", "mm_hidden_size": v["hidden"], "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5, "text_hidden_size": s["hidden"]}
    return root


def layer_tensors(s, i):
    """(name, dtype, shape) of one layer, zero-based."""
    at = f"language_model.model.layers.{i}."
    D, inner = s["hidden"], s["heads"] * s["head_dim"]
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
        yield at + name + ".weight", "BF16", [D]
    for name in ("self_attention_res_proj", "mlp_res_proj"):
        yield at + name + ".weight", "BF16", [1, D]
    attn = at + "self_attn."
    if i + 1 in s["mla"]:
        gate = s["heads"] * s["v_dim"]
        for name, shape in {"q_a_proj": [s["q_lora"], D], "q_a_layernorm": [s["q_lora"]],
                            "q_b_proj": [s["heads"] * (s["nope"] + s["rope"]), s["q_lora"]],
                            "kv_a_proj_with_mqa": [s["kv_lora"] + s["rope"], D], "kv_a_layernorm": [s["kv_lora"]],
                            "kv_b_proj": [s["heads"] * (s["nope"] + s["v_dim"]), s["kv_lora"]],
                            "g_proj": [gate, D], "o_proj": [D, gate]}.items():
            yield attn + name + ".weight", "BF16", shape
    else:
        for x in "qkv":
            yield f"{attn}{x}_proj.weight", "BF16", [inner, D]
            yield f"{attn}{x}_conv1d.weight", "F32", [inner, 1, 4]
        for name, shape in {"f_a_proj": [s["head_dim"], D], "f_b_proj": [inner, s["head_dim"]],
                            "b_proj": [s["heads"], D], "g_proj": [inner, D], "o_proj": [D, inner]}.items():
            yield attn + name + ".weight", "BF16", shape
        yield attn + "A_log", "F32", [-(-s["heads"] // 128) * 128]
        yield attn + "dt_bias", "F32", [inner]
        yield attn + "o_norm.weight", "F32", [s["head_dim"]]
    if i < s["first_dense"]:
        for name, shape in {"gate_proj": [s["dense"], D], "up_proj": [s["dense"], D],
                            "down_proj": [D, s["dense"]]}.items():
            yield f"{at}mlp.{name}.weight", "BF16", shape
        return
    moe = at + "block_sparse_moe."
    L, I, shared = s["latent"], s["inner"], s["shared"] * s["inner"]
    yield moe + "gate.weight", "BF16", [s["experts"], D]
    yield moe + "gate.e_score_correction_bias", "F32", [s["experts"]]
    for name, shape in {"routed_expert_down_proj": [L, D], "routed_expert_norm": [L], "routed_expert_up_proj": [D, L],
                        "shared_experts.gate_proj": [shared, D], "shared_experts.up_proj": [shared, D],
                        "shared_experts.down_proj": [D, shared]}.items():
        yield f"{moe}{name}.weight", "BF16", shape
    for e in range(s["experts"]):
        for name, (rows, columns) in {"w1": (I, L), "w2": (L, I), "w3": (I, L)}.items():
            yield f"{moe}experts.{e}.{name}.weight_packed", "U8", [rows, columns // 2]
            yield f"{moe}experts.{e}.{name}.weight_scale", "U8", [rows, columns // 32]


def shards(s):
    """One list of tensors a file: the layers, then what stands outside, projector, vision tower."""
    for i in range(s["layers"]):
        yield list(layer_tensors(s, i))
    D, V = s["hidden"], s["vocab_size"]
    model = "language_model.model."
    yield [(model + "embed_tokens.weight", "BF16", [V, D]), (model + "norm.weight", "BF16", [D]),
           (model + "output_attn_res_norm.weight", "BF16", [D]),
           (model + "output_attn_res_proj.weight", "BF16", [1, D]), ("language_model.lm_head.weight", "BF16", [V, D])]
    if not (v := s["vit"]):
        return
    W, merged = v["hidden"], 4 * v["hidden"]
    yield [("mm_projector.proj.0.weight", "BF16", [merged, merged]),
           ("mm_projector.proj.2.weight", "BF16", [D, merged]), ("mm_projector.post_norm.weight", "BF16", [D])]
    tower = [("vision_tower.patch_embed.proj.weight", "BF16", [W, 3, v["patch"], v["patch"]]),
             ("vision_tower.patch_embed.pos_emb.weight", "BF16", [v["grid"], v["grid"], W])]
    for i in range(v["layers"]):
        at = f"vision_tower.encoder.blocks.{i}."
        for name, shape in {"norm0": [W], "norm1": [W], "wqkv": [3 * v["qkv"], W], "wo": [W, v["qkv"]],
                            "mlp.fc0": [v["inner"], W], "mlp.fc1": [W, v["inner"]]}.items():
            tower.append((at + name + ".weight", "BF16", shape))
    tower.append(("vision_tower.encoder.final_layernorm.weight", "BF16", [W]))
    yield tower


def values(name, dtype, shape, heads, rng):
    """Random bytes of one tensor, far from any initial value, so that every tensor counts. A large one repeats a
    million of them: what matters then is how many there are."""
    block = 1 << 20
    if int(np.prod(shape)) > 2 * block:
        return np.resize(values(name, dtype, [block // shape[-1], shape[-1]], heads, rng), shape)
    if name.endswith("weight_packed"):
        return rng.integers(0, 256, shape, dtype=np.uint8)
    if name.endswith("weight_scale"):
        return rng.integers(120, 125, shape, dtype=np.uint8)  # 2^-7 .. 2^-3
    x = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        x = 1 + 0.1 * x
    elif name.endswith("A_log"):
        x = 0.3 * x
        x[heads:] = 0
    elif name.endswith("dt_bias"):
        x = x - 3
    elif "e_score_correction_bias" in name or "conv1d" in name:
        x = 0.3 * x
    else:
        x *= 1 / np.sqrt(np.float32(shape[-1]))
    if dtype == "F32":
        return x
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


WIDTH = {"F32": 4, "BF16": 2, "U8": 1}


def write_shard(path, tensors, fill):
    tensors = sorted(tensors, key=lambda t: -WIDTH[t[1]])  # wider types first: every tensor is aligned
    header, offset = {}, 0
    for name, dtype, shape in tensors:
        size = WIDTH[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if fill is None:
            file.truncate(8 + len(text) + offset)
            return offset
        for name, dtype, shape in tensors:
            file.write(fill(name, dtype, shape).tobytes())
    return offset


def write_logits(directory, path):
    """fp32 [40, V] of two sequences, of 23 and 17 tokens."""
    import torch

    from reference import Config, Kimi, load_directory
    config = Config.read(directory)
    model = Kimi(config, load_directory(directory))
    vocabulary = json.loads((directory / "config.json").read_text())["text_config"]["vocab_size"]
    ids = torch.arange(40) * 7 % vocabulary
    logits = torch.cat([model.forward(part[None]).logits[0] for part in ids.split([23, 17])])
    write_shard(path, [("logits", "F32", list(logits.shape))], lambda *_: logits.detach().float().numpy())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--logits", type=Path)
    args = parser.parse_args()
    s = dict(SIZES[args.size])
    if args.experts:
        s["experts"] = args.experts
    args.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    fill = None if args.size == "full" else lambda n, d, shape: values(n, d, shape, s["heads"], rng)
    count = s["layers"] + (3 if s["vit"] else 1)
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards(s), 1):
        file = f"model-{number:05d}-of-{count:06d}.safetensors"
        total += write_shard(args.out / file, tensors, fill)
        weight_map |= {name: file for name, _, _ in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=None if args.size == "small" else 2))
    (args.out / "config.json").write_text(json.dumps(config_json(s), indent=1) + "\n")
    (args.out / "generation_config.json").write_text(
        json.dumps({"max_length": 1048576, "eos_token_id": s["special"][1]}) + "\n")
    if args.logits:
        write_logits(args.out, args.logits)
    print(f"{len(weight_map)} tensors, {total} bytes in {count} files")


main()
