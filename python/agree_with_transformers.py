"""Does transformers load a Kimi-Linear directory that Godwit wrote, and agree with `godwit logits`? Prints the differences.

    python3 python/agree_with_transformers.py MODEL_DIR [--tokens 80]          (pip install transformers==5.24.0)

Whole, in chunks and step by step, relative to the largest logit; both in fp32, for several sequences. Where the two differ by more than the limit the
fp64 reference says which of them is off: Godwit fails when it is further from the reference than both transformers and the limit.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from reference import Config, Kimi, load_directory  # noqa: E402
from reference.weights import read_file  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1e-5)
    a = parser.parse_args()
    model, info = KimiLinearForCausalLM.from_pretrained(a.model, dtype=torch.float32, output_loading_info=True)
    if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        sys.exit(f"transformers: {info}")
    reference = Kimi(Config.read(a.model), load_directory(a.model))
    failed = False
    for seed in range(a.seeds):
        ids = torch.randint(model.config.vocab_size, (1, a.tokens), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            theirs = model.eval()(ids).logits[0].double()
            exact = reference.forward(ids).logits[0]
        scale = theirs.abs().max()
        for name, ours in godwit_logits(a.model, ids[0].tolist()):
            difference = ((ours - theirs).abs().max() / scale).item()
            off = [((x - exact).abs().max() / scale).item() for x in (theirs, ours)]
            print(f"sequence {seed}, {name}: {difference:.1e}; from the fp64 reference: transformers {off[0]:.1e}, Godwit {off[1]:.1e}")
            failed = failed or (difference > a.limit and off[1] > max(off[0], a.limit))
    sys.exit(failed)


def godwit_logits(model, ids):
    """(how it was fed, logits [T, V] fp64) for the whole sequence, chunks and steps."""
    tokens = len(ids)
    ways = (("whole", []), ("chunks of 32", [min(32, tokens - i) for i in range(0, tokens, 32)]), ("step by step", [1] * tokens))
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "ids.json").write_text(json.dumps(ids))
        for name, pieces in ways:
            split = ["--split", ",".join(map(str, pieces))] if pieces else []
            subprocess.run([ROOT / "build/godwit", "logits", "--model", model, "--tokens", scratch / "ids.json", "--out", scratch / "out", *split],
                           check=True, stderr=subprocess.DEVNULL)
            yield name, read_file(scratch / "out")["logits"].double()


if __name__ == "__main__":
    main()
