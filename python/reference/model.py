"""The decoder: embedding, layers of (token mixer, channel mixer) joined by attention residuals, head.

`weights` maps the names of the released files to tensors (the experts of a layer stacked, see weights.py); their dtype is the arithmetic's. Shapes:
B documents of T tokens each, D model width, E experts, k experts a token, N = B T.
"""

import dataclasses

import torch
import torch.nn.functional as F

from . import kda

MLA_NORM_EPS = 1e-6  # the two inner norms of MLA take the released class's default, not rms_norm_eps
L2_EPS = 1e-6        # added to the sum of squares
ROUTER_EPS = 1e-20


@dataclasses.dataclass
class Output:
    logits: torch.Tensor                 # [B, T, vocabulary]
    routes: dict[int, torch.Tensor]      # MoE layer (from 0) -> [N, k] chosen experts, ascending
    margins: dict[int, torch.Tensor]     # MoE layer -> [N]: the k-th biased score less the next one


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def l2_norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def short_conv(x, weight):
    """y_t = sum_j w[j] x_{t-3+j}, then SiLU. x [B, T, channels], weight [channels, 1, width]."""
    padded = F.pad(x, (0, 0, weight.shape[-1] - 1, 0)).transpose(1, 2)
    return F.silu(F.conv1d(padded, weight, groups=weight.shape[0])).transpose(1, 2)


class Kimi:
    """`mode` "exact": recurrence, experts one by one. "fast": chunked KDA, all experts of a layer in batched products."""

    def __init__(self, config, weights, mode="exact"):
        self.config, self.w, self.mode = config, weights, mode

    def linear(self, x, name):
        return F.linear(x, self.w[name + ".weight"])

    def norm(self, x, name, eps=None):
        return rms_norm(x, self.w[name + ".weight"], self.config.rms_norm_eps if eps is None else eps)

    # Token mixers ------------------------------------------------------------------------------------------------------------

    def kda_inputs(self, x, p):
        """q, k, v, log-decay g and beta of a layer; q and k normalised."""
        c = self.config.linear_attn_config
        heads, width = c["num_heads"], c["head_dim"]
        q, k, v = (short_conv(self.linear(x, f"{p}.{n}_proj"), self.w[f"{p}.{n}_conv1d.weight"]).unflatten(-1, (heads, width)) for n in "qkv")
        z = (self.linear(self.linear(x, f"{p}.f_a_proj"), f"{p}.f_b_proj") + self.w[f"{p}.dt_bias"]).unflatten(-1, (heads, width))
        rate = self.w[f"{p}.A_log"].flatten()[:heads].exp()[:, None]  # the released files pad A_log to a multiple of 128
        bound = c.get("gate_lower_bound")
        g = -rate * F.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
        return l2_norm(q), l2_norm(k), v, g, torch.sigmoid(self.linear(x, f"{p}.b_proj"))

    def kda(self, x, p):
        c = self.config.linear_attn_config
        q, k, v, g, beta = self.kda_inputs(x, p)
        if self.mode == "exact":
            o, _ = kda.recurrence(q, k, v, g, beta)
        else:
            bound = c.get("gate_lower_bound")
            o, _ = kda.chunked(q, k, v, g, beta, bounded=bound is not None and bound >= -5)
        gate = self.linear(x, f"{p}.g_proj") if c.get("use_full_rank_gate") else self.linear(self.linear(x, f"{p}.g_a_proj"), f"{p}.g_b_proj")
        return self.linear(torch.sigmoid(gate) * self.norm(o, f"{p}.o_norm").flatten(-2), f"{p}.o_proj")

    def mla(self, x, p):
        c = self.config
        heads, nope, pe, vw = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        if c.q_lora_rank:
            q = self.linear(self.norm(self.linear(x, f"{p}.q_a_proj"), f"{p}.q_a_layernorm", MLA_NORM_EPS), f"{p}.q_b_proj")
        else:
            q = self.linear(x, f"{p}.q_proj")
        latent, k_pe = self.linear(x, f"{p}.kv_a_proj_with_mqa").split([c.kv_lora_rank, pe], -1)
        kv = self.linear(self.norm(latent, f"{p}.kv_a_layernorm", MLA_NORM_EPS), f"{p}.kv_b_proj")
        k, v = kv.unflatten(-1, (heads, nope + vw)).split([nope, vw], -1)
        k = torch.cat([k, k_pe[..., None, :].expand(*k_pe.shape[:-1], heads, pe)], -1)
        q, k, v = (y.transpose(1, 2) for y in (q.unflatten(-1, (heads, nope + pe)), k, v))
        if self.mode == "exact":
            T = x.shape[1]
            scores = q @ k.transpose(-1, -2) * (nope + pe) ** -0.5
            mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
            o = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        o = o.transpose(1, 2).flatten(-2)
        if c.mla_use_output_gate:
            o = torch.sigmoid(self.linear(x, f"{p}.g_proj")) * o
        return self.linear(o, f"{p}.o_proj")

    # Channel mixers ----------------------------------------------------------------------------------------------------------

    def glu(self, gate, up):
        """SiTU-GLU (K3 report eq. 12): [b1 tanh(g / b1) sigmoid(g)] [b2 tanh(u / b2)]; SwiGLU where hidden_act is "silu"."""
        c = self.config
        if c.hidden_act == "silu":
            return F.silu(gate) * up
        if c.activation_situ_linear_beta is not None:
            up = c.activation_situ_linear_beta * torch.tanh(up / c.activation_situ_linear_beta)
        return c.activation_situ_beta * torch.tanh(gate / c.activation_situ_beta) * torch.sigmoid(gate) * up

    def mlp(self, x, p):
        return self.linear(self.glu(self.linear(x, f"{p}.gate_proj"), self.linear(x, f"{p}.up_proj")), f"{p}.down_proj")

    def route(self, x, p, pinned):
        """x [N, D] -> chosen experts [N, k] ascending, their weights [N, k], the margin of the choice [N]."""
        c = self.config
        scores = torch.sigmoid(self.linear(x, f"{p}.gate"))
        biased = (scores + self.w[f"{p}.gate.e_score_correction_bias"]).detach()
        if c.num_expert_group > c.topk_group:
            groups = biased.unflatten(-1, (c.num_expert_group, -1))
            best = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
            keep = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=x.device).scatter(-1, best, True)
            biased = groups.masked_fill(~keep[..., None], -torch.inf).flatten(-2)
        count = c.num_experts_per_token
        top = biased.topk(min(count + 1, c.num_experts), -1)
        margin = top.values[:, count - 1] - top.values[:, count] if c.num_experts > count else torch.full_like(top.values[:, 0], torch.inf)
        chosen = top.indices[:, :count].sort(-1).values if pinned is None else pinned
        weight = scores.gather(-1, chosen)
        if count > 1 and c.moe_renormalize:
            weight = weight / (weight.sum(-1, keepdim=True) + ROUTER_EPS)
        return chosen, weight * c.routed_scaling_factor, margin

    def experts_one_by_one(self, z, chosen, weight, p):
        w1, w2, w3 = (self.w[f"{p}.experts.w{i}"] for i in (1, 2, 3))
        out = torch.zeros_like(z)
        for e in range(w1.shape[0]):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            if token.numel():
                y = F.linear(self.glu(F.linear(z[token], w1[e]), F.linear(z[token], w3[e])), w2[e])
                out = out.index_add(0, token, y * weight[token, slot, None])
        return out

    def experts_batched(self, z, chosen, weight, p, tile=64):
        """Token copies sorted by expert, each expert's rows padded to whole tiles: three batched products over the tiles of a layer."""
        w1, w2, w3 = (self.w[f"{p}.experts.w{i}"] for i in (1, 2, 3))
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        expert, token = flat[order], order // chosen.shape[1]
        counts = flat.bincount(minlength=w1.shape[0])
        tiles = (counts + tile - 1) // tile
        of_tile = torch.repeat_interleave(torch.arange(len(tiles), device=z.device), tiles)  # the expert of each tile
        rank = torch.arange(len(flat), device=z.device) - (counts.cumsum(0) - counts)[expert]
        place = (tiles.cumsum(0) - tiles)[expert] * tile + rank
        rows = z.new_zeros(len(of_tile) * tile, z.shape[1]).index_copy(0, place, z.index_select(0, token)).unflatten(0, (-1, tile))
        w1, w2, w3 = (w.index_select(0, of_tile) for w in (w1, w2, w3))
        y = self.glu(rows @ w1.mT, rows @ w3.mT) @ w2.mT
        return torch.zeros_like(z).index_add(0, token, y.flatten(0, 1).index_select(0, place) * weight.flatten()[order, None])

    def moe(self, x, p, pinned):
        c = self.config
        chosen, weight, margin = self.route(x, p, pinned)
        z = self.linear(x, f"{p}.routed_expert_down_proj") if c.routed_expert_hidden_size else x
        u = (self.experts_one_by_one if self.mode == "exact" else self.experts_batched)(z, chosen, weight, p)
        if c.routed_expert_hidden_size:
            u = self.norm(u, f"{p}.routed_expert_norm") if c.latent_moe_use_norm else u
            u = self.linear(u, f"{p}.routed_expert_up_proj")
        if c.num_shared_experts:
            u = u + self.mlp(x, f"{p}.shared_experts")
        return u, chosen, margin

    # The stream --------------------------------------------------------------------------------------------------------------

    def mix(self, sources, name):
        """softmax over sources of w . RMSNorm(source), then the sum of the raw sources (Attention Residuals eq. 2-3)."""
        v = torch.stack(sources)
        scores = self.norm(v, f"{name}_res_norm") @ self.w[f"{name}_res_proj.weight"].flatten()
        return (scores.softmax(0)[..., None] * v).sum(0)

    def forward(self, ids, routes=None, media=None):
        """ids [B, T]. `routes`: pins the choice of experts, MoE layer -> [N, k]. `media`: (placeholder id, vectors [M, D]) of the pictures."""
        c, model = self.config, self.config.prefix + "model"
        x = F.embedding(ids, self.w[f"{model}.embed_tokens.weight"])
        if media is not None:
            x = x.masked_scatter((ids == media[0])[..., None], media[1])
        stored, live, chosen, margins = [], x, {}, {}
        for layer in range(c.num_hidden_layers):
            p = f"{model}.layers.{layer}"
            h = live if c.attn_res == "none" or not stored else self.mix(stored + [live], f"{p}.self_attention")
            if c.attn_res == "full" or (c.attn_res == "block" and layer % c.attn_res_block_size == 0):
                stored, live = stored + [live], None
            mixer = self.kda if c.is_kda(layer) else self.mla
            a = mixer(self.norm(h, f"{p}.input_layernorm"), f"{p}.self_attn")
            live = a if live is None else live + a

            h = live if c.attn_res == "none" else self.mix(stored + [live], f"{p}.mlp")
            if c.attn_res == "full":
                stored, live = stored + [live], None
            h = self.norm(h, f"{p}.post_attention_layernorm")
            if c.is_moe(layer):
                m, chosen[layer], margins[layer] = self.moe(h.flatten(0, 1), f"{p}.block_sparse_moe", None if routes is None else routes[layer])
                m = m.unflatten(0, h.shape[:2])
            else:
                m = self.mlp(h, f"{p}.mlp")
            live = m if live is None else live + m
        h = live if c.attn_res == "none" else self.mix(stored + [live], f"{model}.output_attn")
        h = self.norm(h, f"{model}.norm")
        head = f"{model}.embed_tokens" if c.tie_word_embeddings else f"{c.prefix}lm_head"
        return Output(self.linear(h, head), chosen, margins)


def next_token_loss(logits, ids):
    """Mean cross-entropy of every token but a document's first."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
