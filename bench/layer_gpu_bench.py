"""The router, AttnRes, GLU, norm, loss and Newton-Schulz ops on a GPU beside PyTorch's and fla's forms of them, in one process on the same inputs.

    python3 bench/layer_gpu_bench.py build/libgodwit_ops.so [--out FILE]

The peers are torch.topk (and the router in plain PyTorch), fla's fused_attnres (flash-linear-attention on PyPI, 9 sources; left out where it is not
installed), torch.nn.functional and plain PyTorch. Times are medians of 20 with CUDA events; `floor` is the least bytes over the rate of a device copy.
"""
import argparse
import importlib.util
import os

import torch
import torch.nn.functional as F

from gpu_timing import median_ms
from kda_gpu_bench import quick_tuning

ops = torch.ops.godwit


def new(*shape, size=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device="cuda") * size).to(dtype)


def backward_of(f, leaves, grad):
    """A function that runs the backward of f(*leaves) alone."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = f(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def router_rows():
    T, E, k, bins = 65536, 896, 16, 1000
    logits, bias = new(T, E, size=1.5, dtype=torch.float32), new(E, size=0.05, dtype=torch.float32)
    counts = torch.zeros(E, bins, dtype=torch.long, device="cuda")

    def plain():
        scores = logits.sigmoid()
        biased = scores + bias
        values, chosen = biased.topk(k + 1, dim=-1)
        weights = scores.gather(1, chosen[:, :k])
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen, scores, values[:, k]

    def ours(with_scores=False):
        return ops.moe_router_fwd(logits, bias, k, True, 1.0, 1, 1, with_scores)

    def with_histogram():  # as a training step calls them
        ops.qb_histogram(logits, ours()[3], -1.1, 1.1, counts, True)

    def plain_histogram():
        _, _, scores, cutoff = plain()
        cell = ((cutoff[:, None] - scores + 1.1) * (bins / 2.2)).floor().clamp(0, bins - 1).long() + torch.arange(E, device="cuda") * bins
        counts.add_(torch.bincount(cell.reshape(-1), minlength=E * bins).view(E, bins))

    biased = logits.sigmoid() + bias
    agree = (ours()[0] == plain()[1][:, :k]).float().mean().item()
    yield f"choices, weights, cutoff (the choices agree with topk's: {agree:.6f})", ours, 4 * T * E, plain, "plain PyTorch"
    yield "the same", ours, 4 * T * E, lambda: biased.topk(k + 1, dim=-1), "torch.topk alone"
    yield "and scores", lambda: ours(True), 2 * 4 * T * E, plain, "plain PyTorch"
    yield "without scores, with Quantile Balancing's histogram", with_histogram, 4 * T * E, plain_histogram, "plain PyTorch"
    d, chosen = new(T, k, dtype=torch.float32), ours()[0]
    yield "backward", lambda: ops.moe_router_bwd(d, logits, chosen, True, 1.0), 4 * T * E, None, ""


def mix_rows(only_fla=False):
    try:
        from fla.ops.attnres import fused_attnres
    except ImportError:
        fused_attnres = None
    N, D = 8192, 7168
    norm, query, grad = new(D, size=0.1) + 1, new(D, size=0.02), new(N, D)
    for S in (2, 5, 9):
        sources = [new(N, D) for _ in range(S)]
        ours = lambda *x: ops.attn_res_mix(list(x[:S]), x[S], x[S + 1], 1e-5)
        fla = lambda *x: fused_attnres(x[S + 1], list(x[:S]), x[S], rms_eps=1e-5)
        leaves, each = [*sources, norm, query], 2 * N * D
        if only_fla:
            if S == 9:
                backward_of(fla, leaves, grad)()
            continue
        peer = fused_attnres is not None and S == 9  # each number of sources compiles for half a minute
        yield f"{S} sources", lambda: ours(*leaves), (S + 1) * each, (lambda: fla(*leaves)) if peer else None, "fla fused_attnres"
        yield (f"{S} sources, backward", backward_of(ours, leaves, grad), (2 * S + 1) * each, backward_of(fla, leaves, grad) if peer else None,
               "fla fused_attnres")


def situ(g, u):
    return ((4 * torch.tanh(g.float() / 4) * g.float().sigmoid()) * (25 * torch.tanh(u.float() / 25))).to(g.dtype)


def gated(x, g, w):
    return (F.rms_norm(x.float(), (x.shape[-1],), w, 1e-5) * g.float().sigmoid()).to(x.dtype)


def pointwise_rows():
    g, u, d = new(8192, 33792), new(8192, 33792), new(8192, 33792)
    n = g.numel()
    ours = lambda g, u: ops.glu(g, u, 4.0, 25.0)
    yield "SiTU-GLU, 8,192 x 33,792", lambda: ours(g, u), 6 * n, lambda: situ(g, u), "plain PyTorch"
    yield "backward", backward_of(ours, [g, u], d), 10 * n, backward_of(situ, [g, u], d), "plain PyTorch"
    del g, u, d
    for rows, width in ((8192, 7168), (8192, 3584)):
        x, w, d = new(rows, width), new(width), new(rows, width)
        n = x.numel()
        ours, torchs = lambda x, w: ops.rms_norm(x, w, 1e-5), lambda x, w: F.rms_norm(x, (width,), w, 1e-5)
        yield f"RMS norm, {rows:,} x {width:,}", lambda: ours(x, w), 4 * n, lambda: torchs(x, w), "F.rms_norm"
        yield "backward", backward_of(ours, [x, w], d), 6 * n, backward_of(torchs, [x, w], d), "F.rms_norm"
    x, g, w, d = new(8192, 96, 128), new(8192, 96, 128), new(128, dtype=torch.float32), new(8192, 96, 128)
    n = x.numel()
    ours = lambda x, g, w: ops.rms_norm_gated(x, g, w, 1e-5)
    yield "gated RMS norm, 8,192 x 96 x 128", lambda: ours(x, g, w), 6 * n, lambda: gated(x, g, w), "plain PyTorch"
    yield "backward", backward_of(ours, [x, g, w], d), 10 * n, backward_of(gated, [x, g, w], d), "plain PyTorch"


def loss_rows():
    T, V = 1024, 163840
    logits, targets, weights = new(T, V, dtype=torch.float32), torch.randint(V, (T,), device="cuda"), torch.ones(T, device="cuda")
    n, gradient = logits.numel(), new(T, V)

    def peer():
        leaf = logits.detach().requires_grad_()
        F.cross_entropy(leaf, targets, reduction="sum").backward()
    yield ("cross-entropy and its gradient, 1,024 x 163,840 fp32 logits", lambda: ops.softmax_loss_fwd(logits, targets, weights, gradient), 6 * n,
           peer, "F.cross_entropy")


def muon_rows():
    """Newton-Schulz of 12 matrices 1,024 x 4,096, 5 steps: 2 r^2 (2 c + r) FLOPs a step and matrix."""
    batch = new(12, 1024, 4096, dtype=torch.float32)

    def fp32():
        x = batch / (batch.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(5):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
        return x
    yield "Newton-Schulz, 12 x 1,024 x 4,096, 5 steps", lambda: ops.newton_schulz_(batch.clone(), 5), 0, fp32, "the same in fp32"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile is not None:  # one candidate of each of fla's kernels, into its cache
        quick_tuning(4, args.compile)
        list(mix_rows(only_fla=True))
        return
    torch.ops.load_library(os.path.abspath(args.library))
    torch.manual_seed(0)
    if importlib.util.find_spec("fla"):
        quick_tuning(4)
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    copy = 2 * source.numel() / median_ms(lambda: source.clone(), 10)
    del source
    lines = [f"# A layer's small kernels on {torch.cuda.get_device_name()}", "",
             f"Commit {args.commit}, copy {copy / 1e9:.2f} TB/s (read + write), torch {torch.__version__}.", ""]
    for title, rows in (("Router, 65,536 rows of 896 experts, top 16, fp32", router_rows), ("AttnRes mix, 8,192 x 7,168 bf16", mix_rows),
                        ("GLU and norms, bf16", pointwise_rows), ("Loss", loss_rows), ("Muon", muon_rows)):
        lines += [f"## {title}", "", "| work | ms | floor | share of floor | peer | ms | ratio |", "|---|---|---|---|---|---|---|"]
        for name, ours, size, peer, peer_name in rows():
            mine, floor = median_ms(ours, 20), size / copy
            other = median_ms(peer, 20) if peer else None
            lines.append(f"| {name} | {mine:.4f} | " + (f"{floor:.4f} | {floor / mine:.2f} | " if size else "- | - | ") +
                         (f"{peer_name} | {other:.3f} | {other / mine:.2f} |" if peer else "- | - | - |"))
            print(lines[-1], flush=True)
        lines.append("")
        torch.cuda.empty_cache()
    if args.out:
        with open(args.out, "w") as f:
            f.write("\n".join(lines))


if __name__ == "__main__":
    main()
