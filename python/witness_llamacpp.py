"""llama.cpp as an outside witness: writes tests/fixtures/llamacpp, its logits of a small model of each form, and prints how far the reference is.

    python3 python/witness_llamacpp.py LLAMA_CPP_DIR          (pip install llama-cpp-python==0.3.36)

LLAMA_CPP_DIR is llama.cpp's source, for its converter: vendor/llama.cpp of the unpacked source package (pip download --no-deps --no-binary :all:
llama-cpp-python==0.3.36). The converter runs unmodified but for the vocabulary step, which a model without a tokenizer cannot take. The KV cache is
fp32. The models come out of a seeded generator (tests/python/llamacpp_models.py); tests/python/llamacpp_test.py makes the same ones for Godwit.
"""

import argparse
import ctypes
import pathlib
import runpy
import sys
import tempfile

import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]
FIXTURE = ROOT / "tests/fixtures/llamacpp/logits.safetensors"

from llamacpp_models import FORMS, fingerprint, make_witness_model  # noqa: E402
from reference import Kimi  # noqa: E402
from reference.weights import write_file  # noqa: E402


def convert(source, directory, out):
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import kimi_k3, kimi_linear
    for each in (kimi_k3.KimiK3Model, kimi_linear.KimiLinearModel):
        each.set_vocab = lambda self: self._set_vocab_none()
    arguments, sys.argv = sys.argv, ["convert_hf_to_gguf.py", str(directory), "--outfile", str(out), "--outtype", "f32"]
    try:
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    finally:
        sys.argv = arguments


def llamacpp_logits(path, ids, batch):
    """[T, V], the sequence fed in batches of `batch` tokens."""
    import llama_cpp.llama_cpp as L
    L.llama_backend_init()
    model_parameters = L.llama_model_default_params()
    model_parameters.n_gpu_layers = 0
    model = L.llama_model_load_from_file(str(path).encode(), model_parameters)
    size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.n_threads, p.n_threads_batch = len(ids) + 64, len(ids), len(ids), 1, 2, 2
    p.type_k = p.type_v = 0  # fp32
    p.flash_attn_type = 0
    context = L.llama_init_from_model(model, p)
    rows = []
    for begin in range(0, len(ids), batch):
        part = ids[begin:begin + batch]
        b = L.llama_batch_init(len(part), 0, 1)
        b.n_tokens = len(part)
        for i, token in enumerate(part):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = int(token), begin + i, 1, 1
            b.seq_id[i][0] = 0
        if L.llama_decode(context, b):
            raise RuntimeError("llama_decode failed")
        rows += [np.ctypeslib.as_array(L.llama_get_logits_ith(context, i), (size,)).copy() for i in range(len(part))]
        L.llama_batch_free(b)
    L.llama_free(context)
    L.llama_model_free(model)
    return torch.from_numpy(np.stack(rows))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path)
    a = parser.parse_args()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    import llama_cpp.llama_cpp as L
    L.llama_log_set(quiet, ctypes.c_void_p(0))
    fixture, lines = {}, []
    for form in FORMS:
        with tempfile.TemporaryDirectory() as scratch:
            scratch = pathlib.Path(scratch)
            config, weights, ids = make_witness_model(form, scratch / "model")
            convert(a.source, scratch / "model", scratch / "model.gguf")
            whole = llamacpp_logits(scratch / "model.gguf", ids.tolist(), len(ids))
            steps = llamacpp_logits(scratch / "model.gguf", ids.tolist(), 1)
        expected = Kimi(config, weights).forward(ids[None])
        gap = lambda x, y: ((x.double() - y).abs().max() / y.abs().max()).item()
        margin = min(m.min().item() for m in expected.margins.values())
        lines.append(f"{form}: llama.cpp whole {gap(whole, expected.logits[0]):.1e}, step by step {gap(steps, expected.logits[0]):.1e} from the fp64 "
                     f"reference; the closest choice of experts has a margin of {margin:.1e}")
        fixture |= {f"{form}.whole": whole, f"{form}.steps": steps, f"{form}.fingerprint": fingerprint(weights)}
    FIXTURE.parent.mkdir(exist_ok=True)
    write_file(FIXTURE, fixture)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
