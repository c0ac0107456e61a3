"""Times the KDA kernels and, if it is installed, flash-linear-attention on the same inputs in one process (CUDA events, median).

    python3 bench/kda_gpu_bench.py LIBRARY [--parts error,fwd,bwd,step,conv] [--profile] [--out bench/results/kda_h200.md]

LIBRARY is a shared library of the launchers (docs/kda_cuda.md says how to build it). `floor` is the least bytes that must move, over
the measured copy bandwidth of the same run. `error` compares both with the recurrence in fp64.
"""
import argparse
import ctypes
import statistics
import subprocess

import torch

P, F, I, L = ctypes.c_void_p, ctypes.c_float, ctypes.c_int, ctypes.c_int64


class Inputs(ctypes.Structure):
    _fields_ = [("q", P), ("k", P), ("v", P), ("z", P), ("b", P), ("A_log", P), ("dt_bias", P), ("initial_state", P),
                ("cu_seqlens", P), ("T", L), ("N", I), ("H", I), ("max_length", L), ("gate_bound", F)]


class Fwd(ctypes.Structure):
    _fields_ = [("inputs", Inputs), ("o", P), ("final_state", P), ("checkpoint_slot", P), ("checkpoints", P), ("workspace", P), ("stream", P)]


class Bwd(ctypes.Structure):
    _fields_ = [("inputs", Inputs), ("d_o", P), ("d_final_state", P), ("dq", P), ("dk", P), ("dv", P), ("dz", P), ("db", P), ("dA_log", P),
                ("d_dt_bias", P), ("d_initial_state", P), ("workspace", P), ("stream", P)]


class Step(ctypes.Structure):
    _fields_ = [("qkv", P), ("z", P), ("b", P), ("gate", P), ("conv_weight", P), ("A_log", P), ("dt_bias", P), ("norm_weight", P), ("slot", P),
                ("conv_state", P), ("state", P), ("y", P), ("B", I), ("H", I), ("gate_bound", F), ("norm_eps", F), ("stream", P)]


class Conv(ctypes.Structure):
    _fields_ = [("x", P), ("weight", P), ("initial_state", P), ("cu_seqlens", P), ("T", L), ("C", L), ("N", I), ("y", P), ("final_state", P), ("dy", P),
                ("d_final_state", P), ("dx", P), ("dweight", P), ("d_initial_state", P), ("workspace", P), ("stream", P)]


def symbol(lib, path, name):
    """A C++ function of the library by its unmangled name."""
    table = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True).stdout.split()
    mangled = [s for s in table if f"7kernels{len(name)}{name}E" in s]
    return getattr(lib, mangled[0])


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        for name, restype in (("kda_chunk_fwd", I), ("kda_chunk_fwd_workspace_bytes", ctypes.c_size_t), ("kda_chunk_bwd", I),
                              ("kda_chunk_bwd_workspace_bytes", ctypes.c_size_t), ("kda_step", I), ("short_conv_fwd", I),
                              ("short_conv_bwd", I), ("short_conv_bwd_workspace_bytes", ctypes.c_size_t)):
            try:
                f = symbol(self.lib, path, name)
            except IndexError:
                continue
            f.restype = restype
            setattr(self, name, f)


def median_ms(f, repeat=20, warm=3):
    for _ in range(warm):
        f()
    times = []
    for _ in range(repeat):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def inputs(lengths, H, seed=0, logits=-2.0):
    torch.manual_seed(seed)
    T = sum(lengths)
    new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x = dict(q=new(T, H, 128), k=new(T, H, 128), v=new(T, H, 128), z=new(T, H, 128) * 1.5 + logits, b=new(T, H), d_o=new(T, H, 128))
    x["A_log"] = torch.randn(H, device="cuda") * 0.3
    x["dt_bias"] = torch.randn(H, 128, device="cuda") * 0.5
    x["state"] = torch.randn(len(lengths), H, 128, 128, device="cuda") * 0.1
    x["cu"] = torch.tensor([0] + list(torch.tensor(lengths).cumsum(0)), device="cuda", dtype=torch.int64)
    return x


def params(x, lengths, bound=-5.0):
    T, H, _ = x["q"].shape
    return Inputs(*[x[n].data_ptr() for n in ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state", "cu")], T, len(lengths), H, max(lengths), bound)


def ours_fwd(lib, x, lengths):
    p = Fwd(params(x, lengths))
    x["o"], x["final"] = torch.full_like(x["q"], float("nan")), torch.full_like(x["state"], float("nan"))
    bytes_ = lib.kda_chunk_fwd_workspace_bytes(ctypes.byref(p.inputs))
    x["workspace"] = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
    p.o, p.final_state, p.workspace = x["o"].data_ptr(), x["final"].data_ptr(), x["workspace"].data_ptr()
    p.stream = torch.cuda.current_stream().cuda_stream

    def run():
        rc = lib.kda_chunk_fwd(ctypes.byref(p))
        assert rc == 0, rc
        return x["o"], x["final"]
    return run


def ours_bwd(lib, x, lengths):
    p = Bwd(params(x, lengths))
    for n in ("q", "k", "v", "z"):
        x["d" + n] = torch.full_like(x[n], float("nan"))
        setattr(p, "d" + n, x["d" + n].data_ptr())
    for n, like in (("db", "b"), ("dA_log", "A_log"), ("d_dt_bias", "dt_bias"), ("d_initial_state", "state")):
        x[n] = torch.full_like(x[like], float("nan"), dtype=torch.float32)
        setattr(p, n, x[n].data_ptr())
    p.d_o = x["d_o"].data_ptr()
    x["workspace_bwd"] = torch.empty(lib.kda_chunk_bwd_workspace_bytes(ctypes.byref(p.inputs)), dtype=torch.uint8, device="cuda")
    p.workspace, p.stream = x["workspace_bwd"].data_ptr(), torch.cuda.current_stream().cuda_stream

    def run():
        rc = lib.kda_chunk_bwd(ctypes.byref(p))
        assert rc == 0, rc
    return run


def fla_fwd(x, lengths, grad=False):
    from fla.ops.kda import chunk_kda
    lead = lambda n: x[n].unsqueeze(0).detach().requires_grad_(grad)
    a = {n: lead(n) for n in ("q", "k", "v", "z", "b")}
    A, dt = x["A_log"].detach().requires_grad_(grad), x["dt_bias"].reshape(-1).detach().requires_grad_(grad)
    state = x["state"].detach().requires_grad_(grad)
    leaves = [*a.values(), A, dt, state]

    def run():
        return chunk_kda(a["q"], a["k"], a["v"], a["z"], a["b"], initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
                         use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0, A_log=A, dt_bias=dt,
                         cu_seqlens=x["cu"] if len(lengths) > 1 else None)
    return run, leaves


def recurrence(x, lengths):
    """o, final state in fp64; differentiable."""
    d = {n: x[n].double() for n in ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state")}
    for t in d.values():
        t.requires_grad_(True)
    norm = lambda t: t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k, beta = norm(d["q"]) * 128 ** -0.5, norm(d["k"]), d["b"].sigmoid()
    alpha = (-5.0 * (d["A_log"].exp()[:, None] * (d["z"] + d["dt_bias"])).sigmoid()).exp()
    outs, finals, t = [], [], 0
    for n, length in enumerate(lengths):
        S = d["state"][n]
        for t in range(t, t + length):
            S = alpha[t][..., None] * S
            e = d["v"][t] - torch.einsum("hkv,hk->hv", S, k[t])
            S = S + beta[t][:, None, None] * k[t][..., None] * e[:, None, :]
            outs.append(torch.einsum("hkv,hk->hv", S, q[t]))
        t += 1
        finals.append(S)
    return torch.stack(outs), torch.stack(finals), d


def rel(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def error_rows(lib, has_fla, backward):
    rows = []
    for name, lengths, logits in (("random", [300, 212], -2.0), ("strong decay", [300, 212], 8.0), ("no decay", [300, 212], -9.0),
                                  ("equal keys", [150], -2.0)):
        x = inputs(lengths, 4, logits=logits)
        if name == "equal keys":
            x["k"] = (x["k"][:1] + 0.02 * x["k"]).contiguous()
            x["b"] += 8
        o, final, d = recurrence(x, lengths)
        mo, mf = ours_fwd(lib, x, lengths)()
        rows.append([f"o, {name}", rel(mo, o.detach())])
        rows.append([f"final state, {name}", rel(mf, final.detach())])
        names = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state")
        if backward:
            (o * x["d_o"].double()).sum().backward()
            ours_bwd(lib, x, lengths)()
            for n in names:
                key = {"A_log": "dA_log", "dt_bias": "d_dt_bias", "state": "d_initial_state"}.get(n, "d" + n)
                rows.append([f"d{n}, {name}", rel(x[key], d[n].grad)])
        if has_fla:
            run, leaves = fla_fwd(x, lengths, grad=backward)
            fo, ff = run()
            got = [rel(fo[0], o.detach()), rel(ff, final.detach())]
            if backward:
                fo.backward(x["d_o"].unsqueeze(0))
                got += [rel(leaf.grad.reshape(d[n].shape), d[n].grad) for n, leaf in zip(names, leaves)]
            for row, value in zip(rows[-len(got):], got):
                row.append(value)
    return rows


SHAPES = [([8192], 96), ([8192], 64), ([1300, 547, 2048, 963, 271, 3063], 96), ([1024] * 8, 96), ([8192], 12), ([65536], 12), ([262144], 12),
          ([1048576], 12)]


def label(lengths, H):
    return f"T {sum(lengths)}, H {H}, " + ("one sequence" if len(lengths) == 1 else f"{len(lengths)} sequences")


def chunk_rows(lib, has_fla, backward, copy, shapes, profile):
    for lengths, H in shapes:
        T = sum(lengths)
        x = inputs(lengths, H)
        f = ours_fwd(lib, x, lengths)
        big = T > 100000
        g = ours_bwd(lib, x, lengths) if backward else None
        both = (lambda: (f(), g())) if backward else f
        mine = median_ms(both, 5 if big else 20)
        floor = T * H * (1282 if not backward else 1282 + 1540 + 1026) / copy * 1e3
        row = [label(lengths, H), mine, floor, None]
        if profile:
            from torch.profiler import profile as prof, ProfilerActivity
            with prof(activities=[ProfilerActivity.CUDA]) as t:
                both()
                torch.cuda.synchronize()
            for e in sorted(t.events(), key=lambda e: e.time_range.start):
                if "kernel" in e.name:
                    print(f"    {label(lengths, H)}: {e.name[:90]} {e.device_time_total / 1e3:.3f} ms")
        if has_fla and not (backward and big):
            run, leaves = fla_fwd(x, lengths, grad=backward)
            if backward:
                def peer():
                    for leaf in leaves:
                        leaf.grad = None
                    run()[0].backward(x["d_o"].unsqueeze(0))
            else:
                peer = run
            with torch.set_grad_enabled(backward):
                row[3] = median_ms(peer, 5 if big else 20)
            del run, leaves, peer
        yield row
        del x, f, g, both
        torch.cuda.empty_cache()


def step_rows(lib, has_fla, copy):
    for B, H in ((1, 96), (32, 96), (256, 96), (32, 12), (256, 12)):
        new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
        sets = max(1, min(8, int(2e9 / (B * H * 65536))))  # rotate states so that small batches do not live in the cache
        a = dict(qkv=new(B, 3, H, 128), z=new(B, H, 128), b=new(B, H), gate=new(B, H, 128), w=torch.randn(3, H, 128, 4, device="cuda"),
                 A=torch.zeros(H, device="cuda"), dt=torch.zeros(H, 128, device="cuda"), norm=torch.ones(128, device="cuda"),
                 conv=new(sets * B, 3, H, 128, 3), state=torch.randn(sets * B, H, 128, 128, device="cuda"), y=new(B, H, 128))
        slots = [torch.arange(i * B, (i + 1) * B, device="cuda", dtype=torch.int32) for i in range(sets)]
        ps = [Step(a["qkv"].data_ptr(), a["z"].data_ptr(), a["b"].data_ptr(), a["gate"].data_ptr(), a["w"].data_ptr(), a["A"].data_ptr(),
                   a["dt"].data_ptr(), a["norm"].data_ptr(), s.data_ptr(), a["conv"].data_ptr(), a["state"].data_ptr(), a["y"].data_ptr(), B, H, -5.0,
                   1e-5, torch.cuda.current_stream().cuda_stream) for s in slots]
        graph = torch.cuda.CUDAGraph()
        lib.kda_step(ctypes.byref(ps[0]))
        torch.cuda.synchronize()
        rounds = 4
        with torch.cuda.graph(graph):
            for p in ps:
                p.stream = torch.cuda.current_stream().cuda_stream
            for _ in range(rounds):
                for p in ps:
                    assert lib.kda_step(ctypes.byref(p)) == 0
        mine = median_ms(graph.replay, 10) / (rounds * sets)
        floor = B * H * 131072 / copy * 1e3
        row = [f"B {B}, H {H}", mine, floor, None]
        if has_fla:
            from fla.ops.kda import fused_recurrent_kda
            q, k, v = (t.contiguous().unsqueeze(1) for t in a["qkv"].unbind(1))
            h0 = a["state"][:B]
            run = lambda: fused_recurrent_kda(q, k, v, a["z"].unsqueeze(1), a["b"].unsqueeze(1), A_log=a["A"], dt_bias=a["dt"].reshape(-1), initial_state=h0,
                                              output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                                              use_beta_sigmoid_in_kernel=True, lower_bound=-5.0)
            with torch.no_grad():
                row[3] = median_ms(run, 10)
        yield row
        del a, ps, graph
        torch.cuda.empty_cache()


def conv_rows(lib, copy):
    T, C = 8192, 3 * 96 * 128
    new = lambda *s: torch.randn(*s, device="cuda", dtype=torch.bfloat16)
    x, dy, y, dx = new(T, C), new(T, C), new(T, C), new(T, C)
    w, dw, cu = torch.randn(C, 4, device="cuda"), torch.empty(C, 4, device="cuda"), torch.tensor([0, T], device="cuda")
    p = Conv(x=x.data_ptr(), weight=w.data_ptr(), cu_seqlens=cu.data_ptr(), T=T, C=C, N=1, y=y.data_ptr(), dy=dy.data_ptr(), dx=dx.data_ptr(),
             dweight=dw.data_ptr(), stream=torch.cuda.current_stream().cuda_stream)
    workspace = torch.empty(lib.short_conv_bwd_workspace_bytes(ctypes.byref(p)), dtype=torch.uint8, device="cuda")
    p.workspace = workspace.data_ptr()
    for name, f, tensors in (("forward", lib.short_conv_fwd, 2), ("backward", lib.short_conv_bwd, 3)):
        yield [f"{name}, T {T}, C {C}", median_ms(lambda: f(ctypes.byref(p))), tensors * T * C * 2 / copy * 1e3, None]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("--parts", default="error,fwd,bwd,step,conv")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--shapes", default="", help="indices into SHAPES")
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    lib, parts = Library(args.library), args.parts.split(",")
    has_fla = not args.no_fla
    if has_fla:
        try:
            import fla  # noqa: F401
        except ImportError:
            has_fla = False
    shapes = [SHAPES[int(i)] for i in args.shapes.split(",")] if args.shapes else SHAPES
    a = torch.empty(2 ** 32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = 2 * a.numel() / median_ms(lambda: b.copy_(a), 10) * 1e3
    del a, b
    lines = []

    def emit(line):
        lines.append(line)
        print(line, flush=True)

    for line in [f"# KDA on {torch.cuda.get_device_name()}", "", f"Commit {args.commit}, copy {copy / 1e12:.2f} TB/s (read + write), "
             f"torch {torch.__version__}" + (", fla " + __import__("fla").__version__ if has_fla else ""), ""]:
        emit(line)

    def table(title, rows):
        for line in (f"## {title}", "", "| shape | ms | floor ms | share of floor | fla ms | ratio |", "|---|---|---|---|---|---|"):
            emit(line)
        for name, mine, floor, peer in rows:
            emit(f"| {name} | {mine:.4f} | {floor:.4f} | {floor / mine:.2f} | " + (f"{peer:.3f} | {peer / mine:.2f} |" if peer else "- | - |"))
        emit("")
    if "error" in parts:
        for line in ("## Relative error against the fp64 recurrence", "", "| what | ours | fla |", "|---|---|---|"):
            emit(line)
        for row in error_rows(lib, has_fla, "bwd" in parts):
            emit("| " + " | ".join([row[0]] + [f"{v:.2e}" for v in row[1:]]) + " |")
        emit("")
    if "fwd" in parts:
        with torch.no_grad():
            table("Forward", chunk_rows(lib, has_fla, False, copy, shapes, args.profile))
    if "bwd" in parts:
        table("Forward and backward", chunk_rows(lib, has_fla, True, copy, [s for s in shapes if sum(s[0]) <= 16384], args.profile))
    if "step" in parts:
        table("Decode step, fp32 state", step_rows(lib, has_fla, copy))
    if "conv" in parts:
        table("Short convolution and SiLU", conv_rows(lib, copy))
    if args.out:
        with open(args.out, "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
