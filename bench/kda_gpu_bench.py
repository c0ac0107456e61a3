"""Times the KDA ops on a GPU and, if it is installed, flash-linear-attention on the same inputs in one process (CUDA events, median).

    python3 bench/kda_gpu_bench.py build/libgodwit_ops.so [--parts fwd,bwd,step,conv] [--profile] [--out FILE.md] [--warm-fla 12]

`floor` is the least bytes that must move, over the copy bandwidth measured in the same run. Errors: kda_gpu_errors.py. fla
tunes its Triton kernels on first use, over dozens of candidates a kernel that take minutes to compile: --candidates keeps that many
of each (0: all), and --warm-fla compiles each in a process of its own beforehand.
"""
import argparse
import os
import subprocess
import sys

import torch

from gpu_timing import median_ms

BOUND = -5.0
NAMES = ("q", "k", "v", "z", "A_log", "dt_bias", "b", "state")


def inputs(lengths, H, seed=0, logits=-2.0):
    torch.manual_seed(seed)
    T = sum(lengths)
    new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x = dict(q=new(T, H, 128), k=new(T, H, 128), v=new(T, H, 128), z=new(T, H, 128) * 1.5 + logits, b=new(T, H), d_o=new(T, H, 128))
    x["A_log"] = torch.randn(H, device="cuda") * 0.3
    x["dt_bias"] = torch.randn(H, 128, device="cuda") * 0.5
    x["state"] = torch.randn(len(lengths), H, 128, 128, device="cuda") * 0.1
    x["cu"] = torch.tensor([0] + list(torch.tensor(lengths).cumsum(0)), dtype=torch.int64)
    return x


def ours(x, grad=False, bound=BOUND):
    """A function that runs the op, and its leaves in the order of NAMES."""
    leaves = [x[n].detach().requires_grad_(grad) for n in NAMES]
    q, k, v, z, A, dt, b, state = leaves
    return lambda: torch.ops.godwit.kda_chunk(q, k, v, z, A, dt, b, bound, state, x["cu"]), leaves


def fla(x, grad=False, bound=BOUND):
    from fla.ops.kda import chunk_kda
    leaves = [x[n].unsqueeze(0).detach().requires_grad_(grad) for n in ("q", "k", "v", "z")]
    leaves += [x["A_log"].detach().requires_grad_(grad), x["dt_bias"].reshape(-1).detach().requires_grad_(grad),
               x["b"].unsqueeze(0).detach().requires_grad_(grad), x["state"].detach().requires_grad_(grad)]
    q, k, v, z, A, dt, b, state = leaves
    cu = x["cu"].cuda() if len(x["cu"]) > 2 else None

    def run():
        return chunk_kda(q, k, v, z, b, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                         use_beta_sigmoid_in_kernel=True, safe_gate=bound < 0, lower_bound=bound if bound < 0 else None, A_log=A, dt_bias=dt, cu_seqlens=cu)
    return run, leaves


def with_backward(run, leaves, d_o):
    def both():
        for leaf in leaves:
            leaf.grad = None
        run()[0].backward(d_o)
    return both


def quick_tuning(count, only=None):
    """Makes Triton's autotuner choose among at most `count` candidates a kernel (of 2 or 4 warps and 2 or 3 stages where there are such; 0:
    all of them), measured for a few milliseconds each. `only` leaves the one of that number."""
    import triton
    from triton.runtime.autotuner import Autotuner
    plain = Autotuner.run

    def run(self, *args, **kwargs):
        if not hasattr(self, "quick"):
            self.quick = True
            self.__dict__["do_bench"] = lambda call, quantiles=None, **_: triton.testing.do_bench(call, warmup=3, rep=12, quantiles=quantiles)
            if count:
                usual = [c for c in self.configs if c.num_warps in (2, 4) and c.num_stages in (2, 3)] or self.configs
                self.configs = usual[::max(1, len(usual) // count)][:count]
            if only is not None:
                self.configs = [self.configs[only % len(self.configs)]]
        return plain(self, *args, **kwargs)
    Autotuner.run = run


def compile_candidate(only, count):
    """Runs every kernel of fla that the rows need, on short inputs, with one candidate each."""
    quick_tuning(count, only)
    x = inputs([2048], 96)
    run, leaves = fla(x, grad=True)
    with_backward(run, leaves, x["d_o"].unsqueeze(0))()
    step_peer(8, 96), step_peer(8, 12)
    torch.cuda.synchronize()


def warm_fla(count):
    workers = [subprocess.Popen([sys.executable, __file__, "-", "--candidates", str(count), "--compile", str(i)], stderr=subprocess.PIPE, text=True)
               for i in range(count)]
    for p in workers:
        err = p.communicate()[1]
        if p.returncode:
            print(err[-600:], file=sys.stderr)


def rel(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


SHAPES = [([8192], 96), ([8192], 64), ([1300, 547, 2048, 963, 271, 3063], 96), ([1024] * 8, 96), ([8192], 12), ([65536], 12), ([262144], 12),
          ([1048576], 12)]


def label(lengths, H):
    return f"T {sum(lengths)}, H {H}, " + ("one sequence" if len(lengths) == 1 else f"{len(lengths)} sequences")


def print_kernels(what, f):
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CUDA]) as t:
        f()
        torch.cuda.synchronize()
    for e in sorted(t.events(), key=lambda e: e.time_range.start):
        if "kernel" in e.name:
            print(f"    {what}: {e.name[:90]} {e.device_time_total / 1e3:.3f} ms")


def chunk_rows(peers, backward, copy, shapes, profile):
    for lengths, H in shapes:
        T = sum(lengths)
        x = inputs(lengths, H)
        big = T > 100000
        floor = T * H * (1282 if not backward else 1282 + 1540 + 1026) / copy * 1e3
        row = [label(lengths, H), None, floor, None]
        for i, make in enumerate([ours] + ([fla] if (lengths, H) in peers and not (backward and big) else [])):
            run, leaves = make(x, grad=backward)
            f = with_backward(run, leaves, x["d_o"] if i == 0 else x["d_o"].unsqueeze(0)) if backward else run
            with torch.set_grad_enabled(backward):
                row[1 + 2 * i] = median_ms(f, 5 if big else 20)
                if profile and i == 0:
                    print_kernels(row[0], f)
            del run, leaves, f
        yield row
        del x
        torch.cuda.empty_cache()


def graphed_ms(f, rounds, warm=2):
    """Milliseconds of one call, from a CUDA graph of `rounds` calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(warm):
            f(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(rounds):
            f(i)
    return median_ms(graph.replay, 10) / rounds


def step_peer(B, H, a=None):
    from fla.ops.kda import fused_recurrent_kda
    new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    a = a or dict(q=new(B, H * 128), k=new(B, H * 128), v=new(B, H * 128), z=new(B, H * 128), b=new(B, H), A=torch.zeros(H, device="cuda"),
                  dt=torch.zeros(H, 128, device="cuda"), states=[torch.randn(B, H, 128, 128, device="cuda")])
    q, k, v, z = (a[n].view(B, 1, H, 128) for n in ("q", "k", "v", "z"))
    states = a["states"]

    def run(i):
        return fused_recurrent_kda(q, k, v, z, a["b"].unsqueeze(1), A_log=a["A"], dt_bias=a["dt"].reshape(-1), initial_state=states[i % len(states)],
                                   output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                                   lower_bound=BOUND)
    with torch.no_grad():
        run(0)
    return run


def step_rows(peers, copy, layer):
    for B, H in ((1, 96), (32, 96), (256, 96), (32, 12), (256, 12)):
        new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
        sets = max(2, min(8, int(2e9 / (B * H * 65536))))  # rotating states, so that small batches do not live in the cache
        a = dict(q=new(B, H * 128), k=new(B, H * 128), v=new(B, H * 128), z=new(B, H * 128), gate=new(B, H * 128), b=new(B, H),
                 A=torch.zeros(H, device="cuda"), dt=torch.zeros(H, 128, device="cuda"), norm=torch.ones(128, device="cuda"),
                 w=[torch.randn(H * 128, 4, device="cuda") for _ in range(3)],
                 conv=[[new(B, H * 128, 3) for _ in range(3)] for _ in range(sets)],
                 states=[torch.randn(B, H, 128, 128, device="cuda") for _ in range(sets)])
        heads = [a[n].view(B, H, 128) for n in ("q", "k", "v", "z")]

        def run(i):
            if layer:
                return torch.ops.godwit.kda_decode(a["q"], a["k"], a["v"], a["z"], a["gate"], a["b"], *a["w"], a["A"], a["dt"], a["norm"], BOUND, 1e-5,
                                                   *a["conv"][i % sets], a["states"][i % sets])
            return torch.ops.godwit.kda_step(*heads, a["A"], a["dt"], a["b"], BOUND, a["states"][i % sets])
        with torch.no_grad():
            row = [f"B {B}, H {H}", graphed_ms(run, 4 * sets), B * H * 131072 / copy * 1e3, None]
            if peers and not layer:
                row[3] = graphed_ms(step_peer(B, H, a), 4 * sets)
        yield row
        del a, heads
        torch.cuda.empty_cache()


def conv_rows(copy):
    T, C = 8192, 3 * 96 * 128
    new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x, dy, w, cu = new(T, C), new(T, C), torch.randn(C, 4, device="cuda"), torch.tensor([0, T])
    yield [f"forward, T {T}, C {C}", median_ms(lambda: torch.ops.godwit.short_conv_fwd(x, w, None, cu), 20), 2 * T * C * 2 / copy * 1e3, None]
    yield [f"backward, T {T}, C {C}", median_ms(lambda: torch.ops.godwit.short_conv_bwd(dy, None, x, w, None, cu), 20), 3 * T * C * 2 / copy * 1e3, None]


def copy_bandwidth():
    a = torch.empty(2 ** 32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / median_ms(lambda: b.copy_(a), 10) * 1e3


def fla_version():
    try:
        import fla
        return fla.__version__
    except ImportError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--parts", default="fwd,bwd,step,conv")
    parser.add_argument("--profile", action="store_true", help="also print the time of every kernel of ours")
    parser.add_argument("--shapes", default="", help="indices into SHAPES")
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--peer-shapes", default="0", help="the shapes at which fla's chunk kernels are timed; each new number of heads compiles anew")
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--warm-fla", action="store_true")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile is not None:
        compile_candidate(args.compile, args.candidates)
        return
    torch.ops.load_library(os.path.abspath(args.library))
    parts, version = args.parts.split(","), fla_version()
    peers = [SHAPES[int(i)] for i in args.peer_shapes.split(",")] if version and args.peer_shapes else []
    if version:
        if args.warm_fla:
            warm_fla(args.candidates)
        quick_tuning(args.candidates)
    shapes = [SHAPES[int(i)] for i in args.shapes.split(",")] if args.shapes else SHAPES
    copy = copy_bandwidth()
    lines = []

    def emit(line):
        lines.append(line)
        print(line, flush=True)

    def table(title, rows):
        for line in (f"## {title}", "", "| shape | ms | floor ms | share of floor | fla ms | ratio |", "|---|---|---|---|---|---|"):
            emit(line)
        for name, mine, floor, peer in rows:
            emit(f"| {name} | {mine:.4f} | {floor:.4f} | {floor / mine:.2f} | " + (f"{peer:.3f} | {peer / mine:.2f} |" if peer else "- | - |"))
        emit("")

    for line in [f"# KDA on {torch.cuda.get_device_name()}", "", f"Commit {args.commit}, copy {copy / 1e12:.2f} TB/s (read + write), "
                 f"torch {torch.__version__}" + (f", fla {version} (tuned over {args.candidates or 'all'} candidates a kernel)" if version else ""), ""]:
        emit(line)
    if "fwd" in parts:
        table("Forward", chunk_rows(peers, False, copy, shapes, args.profile))
    if "bwd" in parts:
        table("Forward and backward", chunk_rows(peers, True, copy, [s for s in shapes if sum(s[0]) <= 65536], args.profile))
    if "step" in parts:
        table("Decode step, recurrence only, fp32 state", step_rows(peers, copy, layer=False))
        table("Decode step of a layer (convolutions, recurrence, norm, gate), fp32 state", step_rows(peers, copy, layer=True))
    if "conv" in parts:
        table("Short convolution and SiLU", conv_rows(copy))
    if args.out:
        with open(args.out, "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
