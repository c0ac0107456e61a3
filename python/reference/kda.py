"""Kimi Delta Attention: the recurrence (the definition) and its chunkwise form (the same numbers, in matrix products).

Shapes: q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], state [B, H, K, V]. q and k are L2-normalised, q is not yet scaled by K^-1/2;
g is the log-decay of each channel, <= 0. K3 report eq. 1-4.
"""

import torch


def recurrence(q, k, v, g, beta, state=None):
    """S' = Diag(exp g_t) S;  S = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = S^T q_t. Returns (o [B, T, H, V], S)."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if state is None else state
    q = q * K**-0.5
    outputs = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None]
        miss = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", beta[:, t, :, None] * k[:, t], miss)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return (torch.stack(outputs, 1) if outputs else torch.zeros_like(v)), S


def pair_scores(a, k, G, bounded, tile):
    """M_ij = sum_c a_ic k_jc exp(G_ic - G_jc) for j <= i (elsewhere anything finite). a, k, G [..., C, K] -> [..., C, C].

    Every exponent is split at the entry of row i's tile, R: exp(G_i - R) exp(R - G_j). Left of the diagonal tile both are <= 1; within it the
    second is at most exp(5 * 16) where the decay is bounded by -5 a token. An unbounded decay takes the differences one by one there.
    """
    C, K = k.shape[-2:]
    n = C // tile
    R = torch.cat([torch.zeros_like(G[..., :1, :]), G[..., tile - 1:-1:tile, :]], -2)  # [..., n, K]
    rows = a.unflatten(-2, (n, tile)) * (G.unflatten(-2, (n, tile)) - R[..., None, :]).exp()
    limit = 80.0 if bounded else 0.0
    columns = k[..., None, :, :] * (R[..., None, :] - G[..., None, :, :]).clamp(max=limit).exp()  # [..., n, C, K]
    scores = (rows @ columns.transpose(-1, -2)).flatten(-3, -2)
    if bounded:
        return scores
    Gt, at, kt = (x.unflatten(-2, (n, tile)) for x in (G, a, k))
    difference = (Gt[..., :, None, :] - Gt[..., None, :, :]).clamp(max=0.0).exp()
    inside = torch.einsum("...ic,...jc,...ijc->...ij", at, kt, difference)  # [..., n, tile, tile]
    index = torch.arange(C, device=G.device) // tile
    whole = torch.zeros_like(scores).unflatten(-1, (n, tile)).unflatten(-3, (n, tile))
    whole = torch.diagonal_scatter(whole, inside.movedim(-3, -1), dim1=-4, dim2=-2)
    return torch.where(index[:, None] == index[None, :], whole.flatten(-4, -3).flatten(-2, -1), scores)


def chunked(q, k, v, g, beta, state=None, chunk=64, bounded=True, tile=16):
    """WY form: L = StrictTril(Diag(beta) (K.Gamma)(K/Gamma)^T), T = (I + L)^-1 Diag(beta), W = T (K.Gamma), U = T V; then chunk by chunk
    V~ = U - W S, O = (Q.Gamma) S + A V~, S <- Diag(Gamma_C) S + (K.exp(G_C - G))^T V~."""
    B, T, H, K = q.shape
    V = v.shape[-1]
    pad = -T % chunk
    # A padded token has beta = 0 and g = 0: it leaves the state alone.
    q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q * K**-0.5, k, v, g))
    beta = torch.nn.functional.pad(beta, (0, 0, 0, pad))
    q, k, v, g = (x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4) for x in (q, k, v, g))  # [B, H, N, C, .]
    beta = beta.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2)[..., None]                      # [B, H, N, C, 1]
    G = g.cumsum(-2)
    Gamma = G.exp()
    eye = torch.eye(chunk, dtype=q.dtype, device=q.device)
    L = (beta * pair_scores(k, k, G, bounded, tile)).tril(-1)
    W, U = torch.linalg.solve_triangular(L + eye, beta * torch.cat([k * Gamma, v], -1), upper=False, unitriangular=True).split([K, V], -1)
    A = pair_scores(q, k, G, bounded, tile).tril()
    q_in = q * Gamma
    last = G[..., -1:, :]
    k_out = (k * (last - G).exp()).transpose(-1, -2)
    keep = last.exp().transpose(-1, -2)
    S = q.new_zeros(B, H, K, V) if state is None else state
    entering, fresh = [], []
    for n in range(q.shape[2]):
        entering.append(S)
        fresh.append(U[:, :, n] - W[:, :, n] @ S)
        S = keep[:, :, n] * S + k_out[:, :, n] @ fresh[-1]
    if not fresh:
        return v.new_zeros(B, 0, H, V), S
    o = q_in @ torch.stack(entering, 2) + A @ torch.stack(fresh, 2)
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], S
