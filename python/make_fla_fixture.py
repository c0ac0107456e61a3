"""Writes tests/fixtures/fla_kda.safetensors: flash-linear-attention's naive KDA (0.6.0, pip install --no-deps flash-linear-attention fla-core einops).

    python3 python/make_fla_fixture.py [FOLDER OF fla/ops/kda]

naive_recurrent_kda, and the two gates naive_kda_gate and naive_kda_lowerbound_gate, run from the package's source files (importing the package itself
needs Triton and a GPU). Inputs are those of torch.ops.godwit.kda_chunk: q, k before the L2 norm, the gate before its bias, beta before its sigmoid.
"""

import ast
import importlib.util
import pathlib
import sys

import torch
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from reference.weights import write_file  # noqa: E402

if len(sys.argv) > 1:
    FLA = pathlib.Path(sys.argv[1])
else:
    FLA = pathlib.Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops/kda"
T, H, K, V = 70, 2, 16, 16  # more than one chunk of 64


def functions(path, *names):
    """The named functions of a source file, compiled without the rest of it."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope = {"torch": torch, "F": F}
    exec(compile(tree, str(path), "exec"), scope)
    return [scope[name] for name in names]


recurrence, = functions(FLA / "naive.py", "naive_recurrent_kda")
softplus_gate, bounded_gate = functions(FLA / "gate.py", "naive_kda_gate", "naive_kda_lowerbound_gate")
torch.manual_seed(0)
tensors = {}
for name, gate in (("bounded", bounded_gate), ("softplus", softplus_gate)):
    x = {"q": torch.randn(T, H, K), "k": torch.randn(T, H, K), "v": torch.randn(T, H, V), "z": torch.randn(T, H, K),
         "A_log": 0.4 * torch.randn(H), "dt_bias": torch.randn(H, K) - 2, "b": torch.randn(T, H), "initial_state": 0.3 * torch.randn(1, H, K, V)}
    unit = lambda y: y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
    o, state = recurrence(unit(x["q"])[None], unit(x["k"])[None], x["v"][None], gate(x["z"], x["A_log"], x["dt_bias"].flatten())[None],
                          torch.sigmoid(x["b"])[None], initial_state=x["initial_state"], output_final_state=True)
    tensors |= {f"{name}.{key}": value for key, value in (x | {"o": o[0], "final_state": state}).items()}
write_file(ROOT / "tests/fixtures/fla_kda.safetensors", tensors)
