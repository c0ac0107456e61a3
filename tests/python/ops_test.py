"""`libgodwit_ops.so` in PyTorch: torch.library.opcheck on every op, gradients against finite differences, KDA against fla's naive recurrence, and the
example of docs/ops.md.

gradcheck runs in fp64, where an op takes its plain ATen composition or its kernels' fp64 form: finite differences of fp32 could not tell a wrong
gradient from rounding. The fp32 kernels are then held to the fp64 gradients on the same inputs.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import unittest

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["GODWIT_BUILD"])
torch.ops.load_library(BUILD / "libgodwit_ops.so")
ops = torch.ops.godwit
sys.path.insert(0, str(ROOT / "python"))

from reference.weights import read_file  # noqa: E402

# fp32 kernels against the fp64 form, relative to the largest entry: sums of up to a thousand products, and a recurrence over 70 tokens.
FP32_LIMIT = 2e-5
FP32_ONLY = {"linear_int8", "moe_experts_quantized"}  # their scales are


def cu(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def cases():
    """name -> (op, arguments in fp32; those that are floating tensors and listed in `grad` are differentiated)."""
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=generator)
    signed = lambda *shape: torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    T, H, K, V, lengths = 21, 2, 16, 16, (17, 0, 3, 1)
    kda = [rand(T, H, K), rand(T, H, K), rand(T, H, V), rand(T, H, K), 0.3 * rand(H), rand(H, K) - 2, rand(T, H)]
    state = 0.5 * rand(len(lengths), H, K, V)
    step = [x[:4] if x.shape[0] == T else x for x in kda]
    experts = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(T)]).int()
    targets = torch.randint(11, (T,), generator=generator)
    targets[3] = -100
    return {
        "short_conv": (ops.short_conv, [rand(T, 8), rand(8, 4), rand(4, 8, 3), cu(*lengths)], (0, 1, 2)),
        "short_conv, no state": (ops.short_conv, [rand(T, 8), rand(8, 4), None, cu(*lengths)], (0, 1)),
        "kda_chunk, bounded decay": (ops.kda_chunk, [*kda, -5.0, state, cu(*lengths)], (0, 1, 2, 3, 4, 5, 6, 8)),
        "kda_chunk, softplus decay": (ops.kda_chunk, [*kda, 0.0, None, cu(*lengths)], (0, 1, 2, 3, 4, 5, 6)),
        "kda_step": (ops.kda_step, [*step, -5.0, state.clone()], ()),
        "kda_step, slots": (ops.kda_step, [*step, -5.0, 0.5 * rand(7, H, K, V), torch.tensor([6, 0, 3, 2])], ()),
        "kda_decode": (ops.kda_decode, [*(rand(4, H * K) for _ in range(5)), rand(4, H), *(0.5 * rand(H * K, 4) for _ in range(3)), 0.3 * rand(H),
                                        rand(H, K) - 2, rand(K), -5.0, 1e-5, *(rand(4, H * K, 3) for _ in range(3)), state.clone()], ()),
        "kda_decode, drafts on slots": (ops.kda_decode, [*(rand(6, H * K) for _ in range(5)), rand(6, H), *(0.5 * rand(H * K, 4) for _ in range(3)),
                                                         0.3 * rand(H), rand(H, K) - 2, rand(K), -5.0, 1e-5, *(rand(5, H * K, 3) for _ in range(3)),
                                                         rand(5, H, K, V), torch.tensor([4, -1, 2]).int(), torch.tensor([2, 1, 0]).int(), 2], ()),
        "kda_chunk_states": (ops.kda_chunk_states, [*kda, -5.0, state, cu(*lengths), torch.tensor([1, 16, 17, 20])], ()),
        "mla_decode": (ops.mla_decode, [rand(3, H, 12), rand(5, 4, 12), torch.tensor([[0, 4], [2, 1], [3, 0]]).int(),
                                        torch.tensor([7, 1, 4]), 8, 0.3, 0], ()),
        "rms_norm": (ops.rms_norm, [rand(T, 12), rand(12), 1e-5], (0, 1)),
        "rms_norm_gated": (ops.rms_norm_gated, [rand(T, 3, 12), rand(T, 3, 12), rand(12), 1e-5], (0, 1, 2)),
        "linear": (ops.linear, [rand(T, 12), rand(7, 12)], (0, 1)),
        "linear_heads": (ops.linear_heads, [rand(T, H, 12), rand(H, 7, 12)], (0, 1)),
        "sigmoid_gate": (ops.sigmoid_gate, [rand(T, 9), rand(T, 9)], (0, 1)),
        "rotate_qkv": (ops.rotate_qkv, [rand(T, 3, H, 8), rand(T, 4, 2)], (0,)),
        "glu, SiTU": (ops.glu, [3 * rand(T, 9), 3 * rand(T, 9), 4.0, 25.0], (0, 1)),
        "glu, SwiGLU": (ops.glu, [rand(T, 9), rand(T, 9), 0.0, 0.0], (0, 1)),
        "attn_res_mix": (ops.attn_res_mix, [[rand(T, 12) for _ in range(3)], rand(12), rand(12), 1e-5], (0, 1, 2)),
        "moe_router": (ops.moe_router, [rand(T, 8), 0.1 * rand(8), 3, True, 1.0, 1, 1], (0,)),
        "moe_router, no scores": (ops.moe_router, [rand(T, 8), 0.1 * rand(8), 3, True, 1.0, 1, 1, False], (0,)),
        "moe_router, groups": (ops.moe_router, [rand(T, 8), 0.1 * rand(8), 2, False, 2.0, 4, 2], (0,)),
        "moe_experts": (ops.moe_experts, [rand(T, 8), experts, rand(T, 2).abs(), rand(6, 5, 8), rand(6, 5, 8), rand(6, 8, 5), 4.0, 25.0], (0, 2, 3, 4, 5)),
        "qb_histogram": (ops.qb_histogram, [torch.rand(T, 8, generator=generator), torch.rand(T, generator=generator), -1.0, 1.0,
                                            torch.zeros(8, 10, dtype=torch.long)], ()),
        "attention": (ops.attention, [rand(T, H, 12), rand(T, H, 12), rand(T, H, 8), cu(*lengths), cu(*lengths), 12**-0.5, 0], (0, 1, 2)),
        "attention, widths of 16": (ops.attention, [rand(T, H, 16), rand(T, H, 16), rand(T, H, 16), cu(*lengths), cu(*lengths), 0.25, 0], (0, 1, 2)),
        "attention, window": (ops.attention, [rand(T, H, 12), rand(T + 5, H, 12), rand(T + 5, H, 8), cu(*lengths), cu(20, 0, 3, 3), 0.3, 6], (0, 1, 2)),
        "linear_cross_entropy": (ops.linear_cross_entropy, [rand(T, 12), rand(11, 12), targets, torch.rand(T, generator=generator)], (0, 1)),
        "quantize_int8": (ops.quantize_int8, [rand(5, 12)], ()),
        "linear_int8": (ops.linear_int8, [rand(T, 12), signed(7, 12), torch.rand(7, generator=generator)], ()),
        "moe_experts_quantized": (ops.moe_experts_quantized, [rand(T, 8), experts, rand(T, 2).abs(), signed(6, 5, 8), rand(6, 5), signed(6, 5, 8),
                                                              rand(6, 5), signed(6, 8, 5), rand(6, 8), 4.0, 25.0], ()),
        "newton_schulz_": (ops.newton_schulz_, [rand(3, 4, 6), 5], ()),
        "muon_momentum_": (ops.muon_momentum_, [rand(3, 4, 6), rand(3, 4, 6), rand(3, 4, 6), 0.5, 0.95, True], ()),
        "mirror_lower_": (ops.mirror_lower_, [rand(2, 8, 8), 4], ()),
        "muon_weight_": (ops.muon_weight_, [rand(3, 4, 6), rand(3, 4, 6), rand(3, 4, 6), 0.9, 0.01], ()),
    }


def cast(x, dtype):
    if isinstance(x, list):
        return [cast(y, dtype) for y in x]
    return x.to(dtype).clone() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def with_grad(args, grad):
    """The arguments with leaves at the places `grad`, and the leaves."""
    out, leaves = list(args), []
    for i in grad:
        mark = lambda x: x.detach().clone().requires_grad_()
        out[i] = [mark(x) for x in out[i]] if isinstance(out[i], list) else mark(out[i])
        leaves += out[i] if isinstance(out[i], list) else [out[i]]
    return out, leaves


def differentiable(result):
    """The outputs that have a gradient, as a tuple."""
    return tuple(x for x in (result if isinstance(result, tuple) else (result,)) if x.requires_grad)


class Ops(unittest.TestCase):
    def test_every_op_has_a_case(self):
        names = {name.removeprefix("godwit::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("godwit::")}
        public = {name for name in names if not name.endswith(("_fwd", "_bwd"))}
        self.assertEqual(public, {name.split(",")[0] for name in cases()})
        page = (ROOT / "docs/ops.md").read_text()
        self.assertEqual([name for name in public if f"`{name}`" not in page], [], "ops that docs/ops.md does not name")

    def test_opcheck(self):
        """Schema (aliasing and mutation as declared), autograd registration, fake tensors, and tracing with symbolic shapes."""
        for name, (op, args, grad) in cases().items():
            for dtype in (torch.float32,) if name in FP32_ONLY else (torch.float32, torch.float64):
                with self.subTest(name, dtype=dtype):
                    torch.library.opcheck(op, tuple(with_grad(cast(args, dtype), grad)[0]))

    def test_fake_tensors(self):
        """Shapes, dtypes and strides without data."""
        from torch._subclasses import FakeTensorMode
        for name, (op, args, _) in cases().items():
            with self.subTest(name):
                real, plain = op(*cast(args, torch.float32)), cast(args, torch.float32)
                with FakeTensorMode() as mode:
                    convert = lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                    fake = op(*([convert(y) for y in x] if isinstance(x, list) else convert(x) for x in plain))
                for r, f in zip(real if isinstance(real, tuple) else (real,), fake if isinstance(fake, tuple) else (fake,)):
                    if r is not None:
                        self.assertEqual((r.shape, r.dtype, r.stride()), (f.shape, f.dtype, f.stride()))

    def test_gradcheck(self):
        for name, (op, args, grad) in cases().items():
            if not grad:
                continue
            with self.subTest(name):
                full, leaves = with_grad(cast(args, torch.float64), grad)

                def run(*values):
                    queue, call = list(values), list(full)
                    for i in grad:
                        call[i] = [queue.pop(0) for _ in call[i]] if isinstance(call[i], list) else queue.pop(0)
                    return differentiable(op(*call))
                self.assertTrue(torch.autograd.gradcheck(run, tuple(leaves), fast_mode=True))

    def test_fp32_gradients(self):
        for name, (op, args, grad) in cases().items():
            if not grad:
                continue
            with self.subTest(name):
                results = []
                for dtype in (torch.float64, torch.float32):
                    full, leaves = with_grad(cast(args, dtype), grad)
                    out = differentiable(op(*full))
                    torch.manual_seed(1)
                    loss = sum((y * torch.randn(y.shape, dtype=torch.float64).to(dtype)).sum() for y in out)
                    results.append([y.detach() for y in out] + list(torch.autograd.grad(loss, leaves)))
                for exact, fast in zip(*results):
                    error = (fast.double() - exact).abs().max() / exact.abs().max()
                    self.assertLess(error.item(), FP32_LIMIT)

    def test_kda_of_fla(self):
        """tests/fixtures/fla_kda.safetensors: naive_recurrent_kda of flash-linear-attention (python/make_fla_fixture.py)."""
        data = read_file(ROOT / "tests/fixtures/fla_kda.safetensors")
        for gate, bound in (("bounded", -5.0), ("softplus", 0.0)):
            with self.subTest(gate):
                get = lambda key: data[f"{gate}.{key}"]
                o, state = ops.kda_chunk(*(get(x) for x in ("q", "k", "v", "z", "A_log", "dt_bias", "b")), bound, get("initial_state"), cu(len(get("q"))))
                for ours, theirs in ((o, get("o")), (state, get("final_state"))):
                    self.assertLess(((ours - theirs).abs().max() / theirs.abs().max()).item(), FP32_LIMIT)

    def test_example(self):
        """The example of docs/ops.md runs as it stands, and what it trains learns."""
        code = re.search(r"```python\n(.*?)```", (ROOT / "docs/ops.md").read_text(), re.S)[1]
        self.assertLessEqual(len(code.splitlines()), 25)
        out = subprocess.run([sys.executable, "-c", code.replace("build/", f"{BUILD}/")], capture_output=True, text=True, check=True).stdout
        first, last = (float(x) for x in re.findall(r"loss (\S+)", out)[:1] + re.findall(r"loss (\S+)", out)[-1:])
        self.assertLess(last, 0.5 * first, out)


if __name__ == "__main__":
    unittest.main()
