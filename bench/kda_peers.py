"""Kimi Delta Attention on the CPU by Godwit and by others, in one process on the same inputs, in turn. Prints a Markdown table.

    python3 bench/kda_peers.py [--tokens 4096] [--heads 8] [--threads 2] [--rounds 5] [--slow]

Needs build/libgodwit_ops.so and, for the peers, `pip install llama-cpp-python==0.3.36 transformers==5.24.0` beside the PyTorch that Godwit was built
with; one that is absent is left out. Peers: ggml's CPU kernel `gated_delta_net` (llama.cpp's, a per-token recurrence split over heads), a per-token
recurrence in PyTorch, transformers' `recurrent_kimi_delta_attention` and `chunk_kimi_delta_attention`. --slow times transformers' chunk form forward and
backward too (half a minute, 9 GiB). Godwit computes gate, beta and the norms of q and k from their logits; the others get them ready made, which is in
their favour. B 1, K = V = 128, fp32, K3's bounded gate. Wall clock and CPU time (of all threads): the best of the rounds for each.
"""

import argparse
import ctypes
import glob
import importlib.util
import os
import pathlib
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH, BOUND = 128, -5.0


class Ggml:
    """The op alone, as a graph of one node over tensors of its own."""

    def __init__(self, q, k, v, g, beta, threads):
        import llama_cpp.llama_cpp as L
        library = os.environ.get("LLAMA_CPP_LIB_PATH") or os.path.join(os.path.dirname(L.__file__), "lib")
        base, self.cpu = (ctypes.CDLL(sorted(glob.glob(os.path.join(library, pattern)))[0]) for pattern in ("libggml-base.so*", "libggml-cpu*.so*"))

        class Init(ctypes.Structure):
            _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

        P, I = ctypes.c_void_p, ctypes.c_int64
        for name, result, arguments in (("ggml_init", P, [Init]), ("ggml_new_tensor_4d", P, [P, ctypes.c_int, I, I, I, I]), ("ggml_get_data", P, [P]),
                                        ("ggml_new_graph", P, [P]), ("ggml_build_forward_expand", None, [P, P]), ("ggml_gated_delta_net", P, [P] * 7 + [I])):
            function = getattr(base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_graph_compute_with_ctx.restype, self.cpu.ggml_graph_compute_with_ctx.argtypes = ctypes.c_int, [P, P, ctypes.c_int]
        T, H, D = q.shape
        self.shape, self.threads = (T, H, D), threads
        self.context = base.ggml_init(Init((T * H * D * 6 + H * D * D * 4) * 4 + (256 << 20), None, False))

        def tensor(x, *sizes):  # sizes innermost first
            out = base.ggml_new_tensor_4d(self.context, 0, *sizes)
            ctypes.memmove(base.ggml_get_data(out), x.contiguous().data_ptr(), x.numel() * 4)
            return out

        inputs = [tensor(x, D, H, T, 1) for x in (q, k, v, g)] + [tensor(beta, 1, H, T, 1), tensor(torch.zeros(H, D, D), D, D, H, 1)]
        out = base.ggml_gated_delta_net(self.context, *inputs, 1)
        self.graph = base.ggml_new_graph(self.context)
        base.ggml_build_forward_expand(self.graph, out)
        self.data = base.ggml_get_data(out)

    def __call__(self):
        self.cpu.ggml_graph_compute_with_ctx(self.context, self.graph, self.threads)

    def output(self):
        T, H, D = self.shape
        return torch.frombuffer((ctypes.c_float * (T * H * D)).from_address(self.data), dtype=torch.float32).view(T, H, D)


def recurrence(q, k, v, g, beta):
    """One token after the other, state [H, K, V]."""
    T, H, D = q.shape
    state, out, q, alpha = torch.zeros(H, D, D), torch.empty(T, H, D), q * D**-0.5, g.exp()
    for t in range(T):
        state.mul_(alpha[t][..., None])
        error = (v[t] - torch.bmm(k[t][:, None], state)[:, 0]) * beta[t][:, None]
        state.baddbmm_(k[t][..., None], error[:, None])
        out[t] = torch.bmm(q[t][:, None], state)[:, 0]
    return out


def timed(function):
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    torch.ops.load_library(ROOT / "build/libgodwit_ops.so")
    generator = torch.Generator().manual_seed(0)
    T, H, D = a.tokens, a.heads, WIDTH
    q, k, v, z = (torch.randn(T, H, D, generator=generator) for _ in range(4))
    z, b = z - 2, torch.randn(T, H, generator=generator)
    norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    ready = (norm(q), norm(k), v, BOUND * torch.sigmoid(z), torch.sigmoid(b))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, z, torch.zeros(H), torch.zeros(H, D), b)]
    offsets, grad = torch.tensor([0, T]), torch.randn(T, H, D, generator=generator)
    chunk = lambda x: torch.ops.godwit.kda_chunk(*x, BOUND, None, offsets)[0]

    def forward_backward():
        for leaf in leaves:
            leaf.grad = None
        chunk(leaves).backward(grad)

    results = {}

    def forward():
        with torch.no_grad():
            results["godwit"] = chunk(leaves)

    arms = {"godwit": forward, "godwit, forward and backward": forward_backward}
    if importlib.util.find_spec("llama_cpp"):
        ggml = Ggml(*ready, a.threads)
        arms["ggml gated_delta_net"] = ggml
    arms["per-token recurrence, PyTorch"] = lambda: results.__setitem__("per-token recurrence, PyTorch", recurrence(*ready))
    once = set()
    if importlib.util.find_spec("transformers"):
        from transformers.models.kimi_linear import modeling_kimi_linear as peer
        heads = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        batch = [x[None] for x in (q, k, v)]
        name = "transformers recurrent_kimi_delta_attention"
        arms[name] = lambda: results.__setitem__(name, peer.recurrent_kimi_delta_attention(*batch, g=ready[3][None], beta=ready[4][None], **heads)[0][0])
        slow = "transformers chunk_kimi_delta_attention"
        arms[slow] = lambda: results.__setitem__(slow, peer.chunk_kimi_delta_attention(*batch, g=ready[3][None], beta=ready[4][None], **heads)[0][0])
        once.add(slow)
        if a.slow:
            wide = [x.clone().requires_grad_() for x in (*batch, ready[3][None], ready[4][None])]
            arms[slow + ", forward and backward"] = lambda: peer.chunk_kimi_delta_attention(
                wide[0], wide[1], wide[2], g=wide[3], beta=wide[4], **heads)[0].backward(grad[None])
            once.add(slow + ", forward and backward")
    best = {}
    for turn in range(a.rounds + 1):
        for name, run in arms.items():
            if name in once and turn > 1:
                continue
            with torch.set_grad_enabled("backward" in name):
                took = timed(run)
            if turn > 0 or name in once:  # the first turn warms up
                best[name] = tuple(map(min, best.get(name, took), took))
    if "ggml gated_delta_net" in arms:
        results["ggml gated_delta_net"] = ggml.output()
    ours = best["godwit"]
    print(f"| KDA, fp32, T {T}, H {H}, K = V = {D}, {a.threads} threads | wall, ms | CPU, ms | times Godwit's forward (wall; CPU) | largest difference |\n|---|---|---|---|---|")
    for name, (wall, cpu) in best.items():
        gap = f"{((results[name] - results['godwit']).abs().max() / results['godwit'].abs().max()).item():.1e}" if name in results and name != "godwit" else ""
        print(f"| {name} | {wall * 1e3:.1f} | {cpu * 1e3:.1f} | {wall / ours[0]:.1f}; {cpu / ours[1]:.1f} | {gap} |")


if __name__ == "__main__":
    main()
