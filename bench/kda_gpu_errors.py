#!/usr/bin/env python3
"""Relative errors of KDA's outputs and gradients on a GPU against the fp64 recurrence, fla's beside ours on the same inputs in one process:

    python3 bench/kda_gpu_errors.py build/libgodwit_ops.so --seeds 6 --out errors.md [--long 65536,1048576]

Every input is drawn anew for each seed. A number is |x - exact| / |exact| over all elements of a tensor, the mean over the seeds. Where ours is the larger
mean, a second table has the difference seed by seed: its mean, its spread (standard deviation over the seeds) and how many seeds it is positive in.
fla compiles for each number of heads and each kind of call: --compile N does the N-th of them and ends, so that they can run side by side beforehand.
"""
import argparse
import itertools
import json
import os
import statistics
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import kda_gpu_bench as bench  # noqa: E402

QUANTITIES = ["o", "final state"] + ["d" + n for n in bench.NAMES]
PACKED = [1, 15, 16, 17, 63, 64, 65, 257]


def random(x):
    pass


def keep_all(x):
    x["z"] -= 10


def forget_all(x):
    x["z"] += 14


def both_limits(x):
    x["z"][..., ::2], x["z"][..., 1::2] = -15, 15


def equal_keys(x):
    x["k"] = (x["k"][:1] + 0.02 * x["k"]).contiguous()
    x["b"] += 8


def norm_30(x):
    x["q"] *= 30 / 128 ** 0.5
    x["k"] *= 30 / 128 ** 0.5


def norm_0(x):
    x["q"][::3], x["k"][1::3] = 0, 0


def beta_0(x):
    x["b"] -= 10


def beta_1(x):
    x["b"] += 10


# name, change of the inputs, lengths, gate bound
CASES = [("random", random, [300], -5.0), ("gates keep all", keep_all, [300], -5.0), ("gates forget all", forget_all, [300], -5.0),
         ("gates at both limits", both_limits, [300], -5.0), ("equal keys, beta near 1", equal_keys, [300], -5.0), ("norms of 30", norm_30, [300], -5.0),
         ("norms of 0", norm_0, [300], -5.0), ("beta near 0", beta_0, [300], -5.0), ("beta near 1", beta_1, [300], -5.0),
         ("packed, 1 to 257 tokens", random, PACKED, -5.0), ("softplus gate", random, [300], 0.0), ("softplus gate, keeps all", keep_all, [300], 0.0)]


def operands(q, k, v, g, beta):
    """Of chunks [n, H, C, .]: what a chunk needs of the state, U = U0 - W S, O = Qd S + M U, S' = decay S + Kr^T U."""
    G = g.cumsum(-2)
    Kd, Qd, Ki, Kr = k * G.exp(), q * G.exp(), k * (-G).exp(), k * (G[..., -1:, :] - G).exp()
    L = torch.tril(beta[..., None] * (Kd @ Ki.mT), -1) + torch.eye(G.shape[-2], dtype=G.dtype, device=G.device)
    U0, W = (torch.linalg.solve_triangular(L, beta[..., None] * t, upper=False, unitriangular=True) for t in (v, Kd))
    return Qd, torch.tril(Qd @ Ki.mT), Kr, U0, W, G[..., -1, :].exp()[..., None]


def exact(x, lengths, bound, heads=slice(None), C=None):
    """o [T, H, V], final states and the leaves in fp64, in chunk form (fp64 holds e^(5 C)); differentiable. C = 1 is the recurrence."""
    C = C or (64 if bound < 0 else 16)
    part = dict(A_log=(heads,), dt_bias=(heads,))
    d = {n: x[n][part.get(n, (slice(None), heads))].detach().double().requires_grad_(True) for n in bench.NAMES}
    unit = lambda t: t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k, v, beta = unit(d["q"]) * 128 ** -0.5, unit(d["k"]), d["v"], d["b"].sigmoid()
    rate, logit = d["A_log"].exp()[:, None], d["z"] + d["dt_bias"]
    g = bound * (rate * logit).sigmoid() if bound < 0 else -rate * torch.nn.functional.softplus(logit)
    outs, finals, at = [], [], 0
    for n, length in enumerate(lengths):
        S = d["state"][n]
        for begin, count, size in ((at, length // C, C), (at + length // C * C, 1, length % C)):
            if count * size == 0:
                continue
            cut = lambda t: t[begin:begin + count * size].unflatten(0, (count, size)).transpose(1, 2)
            for Qd, M, Kr, U0, W, decay in zip(*operands(cut(q), cut(k), cut(v), cut(g), cut(beta))):
                U = U0 - W @ S
                outs.append((Qd @ S + M @ U).transpose(0, 1))
                S = decay * S + Kr.mT @ U
        at += length
        finals.append(S)
    return torch.cat(outs), torch.stack(finals), [d[n] for n in bench.NAMES]


def errors(make, x, bound, want, heads):
    run, leaves = make(x, grad=True, bound=bound)
    out, state = run()
    out.backward(x["d_o"].reshape(out.shape))
    T, H = x["q"].shape[:2]
    shapes = dict(zip(QUANTITIES, [(T, H, -1), (-1, H, 128 * 128), (T, H, -1), (T, H, -1), (T, H, -1), (T, H, -1), (1, H, 1), (1, H, 128), (T, H, 1),
                                   (-1, H, 128 * 128)]))
    got = [out.detach(), state.detach()] + [leaf.grad for leaf in leaves]
    return [bench.rel(a.reshape(shapes[name])[:, heads], w.reshape(a.reshape(shapes[name])[:, heads].shape)) for name, a, w in zip(QUANTITIES, got, want)]


def measure(change, lengths, bound, H, seed, peers, heads=slice(None)):
    """Rows of errors: ours, then fla's."""
    x = bench.inputs(lengths, H, seed)
    change(x)
    o, final, leaves = exact(x, lengths, bound, heads)
    o.backward(x["d_o"][:, heads].double())
    want = [o.detach(), final.detach()] + [t.grad for t in leaves]
    del o, final, leaves
    return [errors(make, x, bound, want, heads) for make in [bench.ours] + ([bench.fla] if peers else [])]


def compile_peer(number):
    bench.quick_tuning(1)
    lengths, H, bound = [([300], 96, -5.0), (PACKED, 96, -5.0), ([300], 2, -5.0), ([300], 96, 0.0)][number]
    run, leaves = bench.fla(bench.inputs(lengths, H), grad=True, bound=bound)
    out = run()[0]
    out.backward(torch.ones_like(out))
    torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--heads", type=int, default=96)
    parser.add_argument("--cases", default="", help="indices into CASES")
    parser.add_argument("--long", default="", help="lengths of further cases with two heads, head by head")
    parser.add_argument("--long-seeds", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile is not None:
        return compile_peer(args.compile)
    torch.ops.load_library(os.path.abspath(args.library))
    peers = bench.fla_version() is not None
    if peers:
        bench.quick_tuning(1)
    x = bench.inputs([100, 33], 4, 1)
    a, b = exact(x, [100, 33], -5.0), exact(x, [100, 33], -5.0, C=1)
    for t in (a, b):
        t[0].backward(x["d_o"].double())
    worst = max(bench.rel(s, t) for s, t in zip([a[0], a[1]] + [leaf.grad for leaf in a[2]], [b[0], b[1]] + [leaf.grad for leaf in b[2]]))
    lines = [f"The fp64 chunk form agrees with the fp64 recurrence within {worst:.1e}.", "",
             "| input | " + " | ".join(QUANTITIES) + " |", "|---|" + "---|" * len(QUANTITIES)]
    print("\n".join(lines), flush=True)
    larger, record = [], {}

    def row(name, samples):
        """samples[seed][ours, fla][quantity]"""
        record[name] = samples
        cells = []
        for i, what in enumerate(QUANTITIES):
            mine = [1e3 * s[0][i] for s in samples]
            if len(samples[0]) == 1:
                cells.append(f"{statistics.mean(mine):.2f}")
                continue
            theirs = [1e3 * s[1][i] for s in samples]
            over = statistics.mean(mine) > statistics.mean(theirs)
            mark = "**" if over else ""
            cells.append(f"{mark}{statistics.mean(mine):.2f}{mark} / {statistics.mean(theirs):.2f}")
            if over:
                gaps = [m - t for m, t in zip(mine, theirs)]
                spread = statistics.stdev(gaps) if len(gaps) > 1 else float("nan")
                larger.append(f"| {name}: {what} | {statistics.mean(mine):.3f} | {statistics.mean(theirs):.3f} | {statistics.mean(gaps):+.3f} | {spread:.3f} | "
                              f"{sum(g > 0 for g in gaps)} of {len(gaps)} |")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)

    chosen = [CASES[int(i)] for i in args.cases.split(",") if i != "none"] if args.cases else CASES
    for name, change, lengths, bound in chosen:
        row(name, [measure(change, lengths, bound, args.heads, seed, peers) for seed in range(args.seeds)])
        torch.cuda.empty_cache()
    for length in [int(n) for n in args.long.split(",") if n]:
        for name, change in (("random", random), ("gates keep all", keep_all)):
            samples = []
            for seed, head in itertools.product(range(args.long_seeds), range(2)):  # one at a time: fp64 takes much memory
                samples.append(measure(change, [length], -5.0, 2, seed, peers, slice(head, head + 1)))
                torch.cuda.empty_cache()
            row(f"{length:,} tokens, {name}", samples)
    if larger:
        lines += ["", "Where ours is the larger:", "", "| input: tensor | ours | fla | difference | its spread | seeds |", "|---|---|---|---|---|---|"] + larger
        print("\n".join(lines[-len(larger) - 5:]))
    if args.out:
        with open(args.out, "w") as f:
            f.write("\n".join(lines) + "\n")
        with open(os.path.splitext(args.out)[0] + ".json", "w") as f:
            json.dump(record, f)


if __name__ == "__main__":
    main()
