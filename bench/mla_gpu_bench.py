#!/usr/bin/env python3
"""MLA's attention on a GPU: the op beside scaled_dot_product_attention with each of its kernels, in one process on the same inputs (CUDA events, median).

    python3 bench/mla_gpu_bench.py build/libgodwit_ops.so [--out FILE.md]

Prefill in expanded form: heads of 192 for queries and keys and 128 for values, causal. The FLOPs are those of the pairs that are seen: (192 + 128) 2 each.
Decode in absorbed form over a paged cache, through the op: the limit is the larger of the bytes of the cache at the copy's rate and the FLOPs at the rate
of a product of 8,192 cubed, both measured in the same run.
"""
import argparse
import os

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_timing import median_ms, medians_ms


def kernels_of(f):
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        f()
        torch.cuda.synchronize()
    events = sorted(trace.events(), key=lambda e: -e.device_time_total)
    return events[0].name[:60]


def prefill_rows(T, H):
    new = lambda width: torch.randn(T, H, width, device="cuda", dtype=torch.bfloat16)
    q, k, v, cu = new(192), new(192), new(128), torch.tensor([0, T])
    scale = 192 ** -0.5
    flops = T * (T + 1) / 2 * H * (192 + 128) * 2
    heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
    ways = {"op `attention`": lambda: torch.ops.godwit.attention(q, k, v, cu, cu, scale, 0),
            "`scaled_dot_product_attention`": lambda: F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)}
    for name, backend in (("the same, cuDNN", SDPBackend.CUDNN_ATTENTION), ("the same, flash", SDPBackend.FLASH_ATTENTION),
                          ("the same, memory-efficient", SDPBackend.EFFICIENT_ATTENTION)):
        def forced(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)
        ways[name] = forced
    names = list(ways)
    with torch.no_grad():
        paired = dict(zip(names, medians_ms(*[ways[n] for n in names[:2]], repeat=31)))  # these two take turns
    for name, f in ways.items():
        try:
            with torch.no_grad():
                ms = paired[name] if name in paired else median_ms(f)
                yield f"| T {T:,}, H {H} | {name} | {ms:.3f} | {flops / ms / 1e9:.0f} | {kernels_of(f)} |"
        except RuntimeError as error:
            yield f"| T {T:,}, H {H} | {name} | - | - | {str(error).splitlines()[0][:60]} |"
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    d = torch.randn(T, H, 128, device="cuda", dtype=torch.bfloat16)

    def both(run):
        out = run()
        torch.autograd.grad([out], leaves, [d.view(out.shape) if out.dim() == 3 else d.transpose(0, 1).unsqueeze(0)])
    ours = lambda: both(lambda: torch.ops.godwit.attention(*leaves, cu, cu, scale, 0))
    sdpa = lambda: both(lambda: F.scaled_dot_product_attention(*[t.transpose(0, 1).unsqueeze(0) for t in leaves], is_causal=True, scale=scale))
    for name, ms in zip(("op, forward and backward", "`scaled_dot_product_attention`, forward and backward"), medians_ms(ours, sdpa)):
        yield f"| T {T:,}, H {H} | {name} | {ms:.3f} | {3.5 * flops / ms / 1e9:.0f} | |"


def decode_rows(H, batch, length, copy, gemm):
    pages_each, copies = length // 64, 4 if batch == 1 else 1  # at batch 1 sequences take turns, so that none stays in the cache
    pages = torch.randn(copies * batch * pages_each, 64, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch, H, 576, device="cuda", dtype=torch.bfloat16)
    tables = [(torch.arange(batch * pages_each).view(batch, pages_each) + i * batch * pages_each).int() for i in range(copies)]
    lengths = torch.full((batch,), length)
    turn = [0]

    def run():
        turn[0] += 1
        return torch.ops.godwit.mla_decode(q, pages, tables[turn[0] % copies], lengths, 512, 192 ** -0.5, 0)
    ms = median_ms(run)
    floor = max(batch * length * 1152 / copy, batch * length * H * 2176 / gemm) * 1e3
    return f"| H {H}, batch {batch}, {length:,} cached | {ms:.4f} | {floor:.4f} | {100 * floor / ms:.0f} % | {kernels_of(run)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.ops.load_library(os.path.abspath(args.library))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm = 2 * 8192 ** 3 / median_ms(lambda: a @ b) * 1e3
    x = torch.empty(2 ** 32, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.numel() / median_ms(lambda: y.copy_(x)) * 1e3
    del x, y
    lines = []

    def emit(line):
        lines.append(line)
        print(line, flush=True)
    emit(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a bf16 product of 8,192 cubed {gemm / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s\n")
    emit("| prefill, causal, 192/128 | by | ms | TFLOP/s | kernel |\n|---|---|---|---|---|")
    for H in (12, 96):
        for line in prefill_rows(8192, H):
            emit(line)
    emit("\n| decode through the op | ms | limit | share | kernel |\n|---|---|---|---|---|")
    for H in (12, 96):
        for batch in (1, 32):
            emit(decode_rows(H, batch, 131072, copy, gemm))
    if args.out:
        with open(args.out, "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
