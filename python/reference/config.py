"""The text configuration, read from a Hugging Face config.json (K3's nested form or Kimi-Linear's flat one)."""

import dataclasses
import json
import pathlib


@dataclasses.dataclass
class Config:
    """Keys as in the released files. The defaults are what the released loader takes for an absent or null key."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: dict
    prefix: str = ""  # "language_model." where the text model is nested
    q_lora_rank: int | None = None
    mla_use_output_gate: bool = False
    hidden_act: str = "silu"
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_experts: int | None = None
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    attn_res_block_size: int | None = None
    attn_res: str = ""  # "block", "full" or "none"; by attn_res_block_size where not given

    @classmethod
    def read(cls, path):
        """`path`: a config.json or the directory that holds one."""
        path = pathlib.Path(path)
        top = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        nested = "text_config" in top
        text = {**top.get("text_config", top), **top.get("godwit", {})}
        if text.get("hidden_act", "silu") not in ("silu", "situ"):
            raise ValueError(f"hidden_act {text['hidden_act']!r} is unknown")
        if text.get("moe_router_activation_func", "sigmoid") != "sigmoid":
            raise ValueError("only the sigmoid router is known")
        if text.get("mla_use_nope") is False:
            raise ValueError("rotated MLA is unknown")
        if "linear_attn_config" not in text and "layer_types" in text:  # as transformers' save_pretrained may write it
            kinds = text["layer_types"]
            text["linear_attn_config"] = {
                "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
                "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
                "num_heads": text["linear_num_heads"], "head_dim": text["linear_head_dim"],
                "short_conv_kernel_size": text["linear_conv_kernel_dim"]}
        names = {field.name for field in dataclasses.fields(cls)}
        config = cls(prefix="language_model." if nested else "",
                     **{k: v for k, v in text.items() if k in names and v is not None})
        config.activation_situ_beta = config.activation_situ_beta or 1.0
        config.attn_res = config.attn_res or ("block" if config.attn_res_block_size else "none")
        return config

    def is_kda(self, layer):
        """`layer` counts from 0, the lists of the file from 1."""
        return layer + 1 in self.linear_attn_config["kda_layers"]

    def is_moe(self, layer):
        return bool(self.num_experts) and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
