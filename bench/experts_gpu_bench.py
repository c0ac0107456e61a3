"""Times the routed experts' ops on a GPU, and PyTorch's grouped GEMM on the same inputs in one process (CUDA events, median).

    python3 bench/experts_gpu_bench.py build/libgodwit_ops.so [--out FILE.md]

K3 widths: 3584 -> 2 x 3072 -> 3584, 112 experts, 16 a token. "products" are the two grouped products with SiTU-GLU between them, from the
profiler; the peer's are two calls of torch._grouped_mm alone, on rows sorted beforehand, without the GLU. "whole" is everything from z to u.
"""
import argparse

import torch

from gpu_timing import median_ms

L, I, E, K = 3584, 3072, 112, 16
PEAK = 989


def kernel_ms(f, names, repeat=10):
    """Time on the GPU, a call, of the kernels whose name holds one of `names`."""
    f()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        for _ in range(repeat):
            f()
        torch.cuda.synchronize()
    return sum(e.device_time_total for e in p.key_averages() if any(n in e.key for n in names)) / repeat / 1e3


def ceilings():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm = 2 * 8192 ** 3 / median_ms(lambda: a @ b.t()) / 1e9
    x = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return gemm, 2 * x.numel() / median_ms(lambda: y.copy_(x)) / 1e9


def inputs(tokens):
    torch.manual_seed(tokens)
    new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    experts = torch.rand(tokens, E, device="cuda").topk(K, 1)[1].to(torch.int32)
    return new(tokens, L), experts, torch.rand(tokens, K, device="cuda"), new(tokens, L)


def situ(g, u):
    g, u = g.float(), u.float()
    return (4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)).to(torch.bfloat16)


def sort_rows(z, experts):
    order = experts.reshape(-1).sort(stable=True)[1]
    ends = torch.bincount(experts.reshape(-1), minlength=E).cumsum(0).to(torch.int32)
    return z[order // K], order, ends


def peer(z, experts, weights, w13, w2):
    x, order, ends = sort_rows(z, experts)
    g, u = torch._grouped_mm(x, w13.transpose(1, 2), ends).chunk(2, -1)
    y = torch._grouped_mm(situ(g, u), w2.transpose(1, 2), ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cuda"))
    return (y[back].view(-1, K, L).float() * weights.unsqueeze(-1)).sum(1).to(z.dtype)


def ours(z, experts, weights, w1, w3, w2):
    return torch.ops.godwit.moe_experts(z, experts, weights, w1, w3, w2, 4.0, 25.0)


def with_backward(f, leaves, d_out):
    def both():
        for x in leaves:
            x.grad = None
        f().backward(d_out)
    return both


def main():
    args = argparse.ArgumentParser()
    args.add_argument("library")
    args.add_argument("--out")
    args = args.parse_args()
    torch.ops.load_library(args.library)
    lines = []

    def say(text):
        print(text, flush=True)
        lines.append(text)

    gemm, copy = ceilings()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: bf16 GEMM 8192^3 {gemm:.0f} TFLOP/s, copy {copy:.2f} TB/s\n")
    scale = L ** -0.5
    w13 = torch.empty(E, 2 * I, L, device="cuda", dtype=torch.bfloat16).normal_(0, scale)
    w1, w3 = w13[:, :I].contiguous(), w13[:, I:].contiguous()
    w2 = torch.empty(E, L, I, device="cuda", dtype=torch.bfloat16).normal_(0, scale)
    bytes_all = 3 * E * I * L * 2

    say("| rows | products ms | TFLOP/s | of 989 | of GEMM | weights TB/s | of copy | `_grouped_mm` ms | ratio | whole ms | PyTorch whole ms | ratio |")
    say("|---|---|---|---|---|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for tokens in (1, 4, 16, 64, 256, 1024, 2048, 4096):
            z, experts, weights, _ = inputs(tokens)
            rows, used = tokens * K, experts.unique().numel()
            both = kernel_ms(lambda: ours(z, experts, weights, w1, w3, w2), ["product_kernel"])
            x, _, ends = sort_rows(z, experts)
            h = torch.randn(rows, I, device="cuda", dtype=torch.bfloat16)
            theirs = median_ms(lambda: torch._grouped_mm(x, w13.transpose(1, 2), ends)) + median_ms(
                lambda: torch._grouped_mm(h, w2.transpose(1, 2), ends))
            whole, peer_whole = median_ms(lambda: ours(z, experts, weights, w1, w3, w2)), median_ms(lambda: peer(z, experts, weights, w13, w2))
            tf, bw = 6 * rows * I * L / both / 1e9, bytes_all * used / E / both / 1e9
            say(f"| {rows} | {both:.3f} | {tf:.0f} | {tf / PEAK:.2f} | {tf / gemm:.2f} | {bw:.2f} | {bw / copy:.2f} | {theirs:.3f} | {theirs / both:.2f} | "
                f"{whole:.3f} | {peer_whole:.3f} | {peer_whole / whole:.2f} |")
    del h, x

    say("\n| rows | MXFP4 products ms | weights TB/s | of copy | TFLOP/s | whole ms | bf16 `_grouped_mm` ms | ratio |")
    say("|---|---|---|---|---|---|---|---|")
    with torch.no_grad():
        codes = lambda *s: torch.randint(0, 256, s, device="cuda", dtype=torch.uint8)
        scales = lambda *s: torch.randint(118, 121, s, device="cuda", dtype=torch.uint8)
        packed = (codes(E, I, L // 2), scales(E, I, L // 32), codes(E, I, L // 2), scales(E, I, L // 32), codes(E, L, I // 2), scales(E, L, I // 32))
        for tokens in (1, 4, 16, 64, 256, 2048):
            z, experts, weights, _ = inputs(tokens)
            rows, used = tokens * K, experts.unique().numel()
            f = lambda: torch.ops.godwit.moe_experts_quantized(z, experts, weights, *packed, 4.0, 25.0)
            both, whole = kernel_ms(f, ["packed_kernel"]), median_ms(f)
            x, _, ends = sort_rows(z, experts)
            h = torch.randn(rows, I, device="cuda", dtype=torch.bfloat16)
            theirs = median_ms(lambda: torch._grouped_mm(x, w13.transpose(1, 2), ends)) + median_ms(
                lambda: torch._grouped_mm(h, w2.transpose(1, 2), ends))
            bw = 3 * used * I * L * 0.53125 / both / 1e9
            say(f"| {rows} | {both:.3f} | {bw:.2f} | {bw / copy:.2f} | {6 * rows * I * L / both / 1e9:.0f} | {whole:.3f} | {theirs:.3f} | {theirs / both:.2f} |")
    del packed, h, x

    say("\n| rows | forward + backward ms | TFLOP/s (18 rows L I) | of 989 | of GEMM | PyTorch ms | ratio |")
    say("|---|---|---|---|---|---|---|")
    for tokens in (1024, 2048, 4096):
        z, experts, weights, d_out = inputs(tokens)
        leaves = [t.detach().requires_grad_(True) for t in (z, weights, w1, w3, w2)]
        a, p, b1, b3, b2 = leaves
        both = median_ms(with_backward(lambda: ours(a, experts, p, b1, b3, b2), leaves, d_out), 7)
        for t in leaves:
            t.grad = None
        leaves = [t.detach().requires_grad_(True) for t in (z, weights, w13, w2)]
        a, p, b13, c2 = leaves
        theirs = median_ms(with_backward(lambda: peer(a, experts, p, b13, c2), leaves, d_out), 7)
        del leaves, a, p, b13, c2, b1, b3, b2
        tf = 18 * tokens * K * I * L / both / 1e9
        say(f"| {tokens * K} | {both:.2f} | {tf:.0f} | {tf / PEAK:.2f} | {tf / gemm:.2f} | {theirs:.2f} | {theirs / both:.2f} |")
    if args.out:
        with open(args.out, "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
