"""Prefill and decode of one checkpoint on the CPU by Godwit and by llama.cpp (and transformers): a Markdown table.

    python3 bench/infer_peer.py --llama-source DIR [--form k3,kimi-linear] [--weights f32,int8] [--threads 2] [--rounds 3] [--transformers]

Needs build/godwit, `pip install llama-cpp-python==0.3.36 gguf`, and for its converter llama.cpp's source: vendor/llama.cpp of the unpacked source
package (pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36). The model has the sizes of the preset `nano`, with random weights: in the
K3 form (latent experts, attention residuals), and in the Kimi-Linear form (the same without them). 8 bits are q8_0 there and int8 here; both keep
the router in fp32. Every side reads a prompt of 2,048 tokens (pieces of 512) and draws the likeliest token 64 times for 1 and for 16 sequences after
64 tokens each. The sides take turns, and the best of all rounds counts.
"""

import argparse
import ctypes
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python")]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from reference import Config, save_directory  # noqa: E402
from reference.shapes import random_weights  # noqa: E402

PROMPT, PIECE, CACHED, STEPS = 2048, 512, 64, 64
K3_ONLY = ("activation_situ_beta", "activation_situ_linear_beta", "q_lora_rank", "mla_use_output_gate", "routed_expert_hidden_size",
           "latent_moe_use_norm", "attn_res_block_size")


def configuration(form):
    k3 = json.loads((ROOT / "configs/models/nano.json").read_text())
    if form == "k3":
        return k3
    text = {k: v for k, v in k3["text_config"].items() if k not in K3_ONLY}
    linear = {k: v for k, v in text["linear_attn_config"].items() if k not in ("use_full_rank_gate", "gate_lower_bound")}
    return text | {"hidden_act": "silu", "dtype": "float32", "pad_token_id": 0, "linear_attn_config": linear}


def make_model(form, directory):
    directory.mkdir()
    source = configuration(form)
    save_directory(directory, source, {})
    config = Config.read(directory)
    stored = random_weights(config, 0)
    for name, value in stored.items():
        if name.endswith("A_log"):  # the released files' padding; Kimi-Linear's own shape
            stored[name] = torch.nn.functional.pad(value, (0, 128 - len(value))) if config.prefix else value.reshape(1, 1, -1, 1)
    save_directory(directory, source, {k: v.float() for k, v in stored.items()})


def convert(source, directory, out, kind):
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import kimi_k3, kimi_linear
    for each in (kimi_k3.KimiK3Model, kimi_linear.KimiLinearModel):
        each.set_vocab = lambda self: self._set_vocab_none()
    arguments, sys.argv = sys.argv, ["convert_hf_to_gguf.py", str(directory), "--outfile", str(out), "--outtype", kind]
    try:
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    finally:
        sys.argv = arguments


class LlamaCpp:
    def __init__(self, path, threads):
        import llama_cpp.llama_cpp as L
        self.L, self.threads = L, threads
        L.llama_backend_init()
        p = L.llama_model_default_params()
        p.n_gpu_layers = 0
        self.model = L.llama_model_load_from_file(str(path).encode(), p)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        self.size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(self.model))

    def context(self, tokens, sequences):
        p = self.L.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = tokens * sequences, max(PROMPT, sequences), PIECE, sequences
        p.n_threads = p.n_threads_batch = self.threads
        p.no_perf = True
        context = self.L.llama_init_from_model(self.model, p)
        if not context:
            raise RuntimeError("llama_init_from_model failed")
        return context

    def decode(self, context, rows, last):
        """rows: (token, position, sequence); the likeliest next token of the rows named in `last`."""
        b = self.L.llama_batch_init(len(rows), 0, 1)
        b.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = int(token), position, 1, i in last
            b.seq_id[i][0] = sequence
        rc = self.L.llama_decode(context, b)
        self.L.llama_batch_free(b)
        if rc:
            raise RuntimeError(f"llama_decode: {rc}")
        self.L.llama_synchronize(context)
        return [int(np.ctypeslib.as_array(self.L.llama_get_logits_ith(context, i), (self.size,)).argmax()) for i in sorted(last)]

    def times(self):
        """tokens/s: prefill, decode of 1 and of 16 sequences."""
        ids = np.random.default_rng(0).integers(3, self.size, PROMPT)
        out = []
        context = self.context(PROMPT + 64, 1)
        for warm in (True, False):
            self.L.llama_memory_clear(self.L.llama_get_memory(context), True)
            rows = [(t, i, 0) for i, t in enumerate(ids[:64 if warm else PROMPT])]
            start = time.perf_counter()
            self.decode(context, rows, {len(rows) - 1})
        out.append(PROMPT / (time.perf_counter() - start))
        self.L.llama_free(context)
        for sequences in (1, 16):
            context = self.context(CACHED + STEPS + 16, sequences)
            tokens = []
            for s in range(sequences):
                tokens += self.decode(context, [(t, i, s) for i, t in enumerate(ids[s:s + CACHED])], {CACHED - 1})
            start = time.perf_counter()
            for step in range(STEPS):
                tokens = self.decode(context, [(t, CACHED + step, s) for s, t in enumerate(tokens)], set(range(sequences)))
            out.append(STEPS * sequences / (time.perf_counter() - start))
            self.L.llama_free(context)
        return out


def godwit_times(directory, weights, threads):
    run = subprocess.run([ROOT / "build/godwit", "bench", "decode", "--model", directory, "--prefill", str(PROMPT), "--cached", str(CACHED), "--batch", "1,16",
                          "--steps", str(STEPS), "--repeats", "2", "--threads", str(threads), "--json", *(["--weights", "int8"] if weights == "int8" else [])],
                         capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    out = json.loads(run.stdout)
    return [out["prefill"]["tokens_per_s"], *(row["tokens_per_s"] for row in out["decode"])]


def transformers_times(directory, threads):
    from transformers import KimiLinearForCausalLM
    torch.set_num_threads(threads)
    model = KimiLinearForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    out = []
    with torch.inference_mode():
        ids = torch.randint(3, model.config.vocab_size, (1, PROMPT))
        start = time.perf_counter()
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
        out.append(PROMPT / (time.perf_counter() - start))
        for sequences, steps in ((1, 16), (16, 8)):
            first = model(input_ids=ids[:, :CACHED].expand(sequences, -1), use_cache=True, logits_to_keep=1)
            cache, token = getattr(first, "past_key_values", None) or first.cache, first.logits[:, -1:].argmax(-1)
            key = "past_key_values" if getattr(first, "past_key_values", None) is not None else "cache"
            start = time.perf_counter()
            for _ in range(steps):
                step = model(input_ids=token, use_cache=True, **{key: cache})
                token = step.logits[:, -1:].argmax(-1)
            out.append(steps * sequences / (time.perf_counter() - start))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-source", type=pathlib.Path, required=True)
    parser.add_argument("--form", default="k3,kimi-linear")
    parser.add_argument("--weights", default="f32,int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transformers", action="store_true", help="the Kimi-Linear form in f32 there too")
    a = parser.parse_args()
    import llama_cpp.llama_cpp as L
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    L.llama_log_set(quiet, ctypes.c_void_p(0))
    print("| form, weights | | prefill 2,048 | decode 1 | decode 16 |\n|---|---|---|---|---|")
    for form in a.form.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch) / "model"
            make_model(form, directory)
            for weights in a.weights.split(","):
                out = pathlib.Path(scratch) / f"{weights}.gguf"
                convert(a.llama_source, directory, out, "q8_0" if weights == "int8" else "f32")
                peer, best = LlamaCpp(out, a.threads), {}
                sides = {"llama.cpp": peer.times, "Godwit": lambda: godwit_times(directory, weights, a.threads)}
                if a.transformers and form == "kimi-linear" and weights == "f32":
                    sides["transformers"] = lambda: transformers_times(directory, a.threads)
                for _ in range(a.rounds):
                    for name, run in sides.items():
                        best[name] = np.maximum(best.get(name, 0), run())
                for name, rates in best.items():
                    ratio = best["Godwit"] / rates
                    print(f"| {form}, {weights} | {name} | " + " | ".join(
                        f"{r:,.0f} tokens/s" + ("" if name == "Godwit" else f" ({x:.2f})") for r, x in zip(rates, ratio)) + " |", flush=True)
    print("\nIn brackets: Godwit's rate over this one's.")


if __name__ == "__main__":
    main()
