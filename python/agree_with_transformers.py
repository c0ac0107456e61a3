"""Does transformers load a Kimi-Linear directory that Godwit wrote, and agree with `godwit logits`? Prints the differences.

    python3 python/agree_with_transformers.py MODEL_DIR [--tokens 80]          (pip install transformers==5.24.0)

Whole, in chunks and step by step, relative to the largest logit; both in fp32.
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

from reference.weights import read_file  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--limit", type=float, default=1e-5)
    a = parser.parse_args()
    model, info = KimiLinearForCausalLM.from_pretrained(a.model, dtype=torch.float32, output_loading_info=True)
    if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        sys.exit(f"transformers: {info}")
    ids = torch.randint(model.config.vocab_size, (1, a.tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model.eval()(ids).logits[0].float()
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "ids.json").write_text(json.dumps(ids[0].tolist()))
        for name, pieces in (("whole", []), ("chunks of 32", [min(32, a.tokens - i) for i in range(0, a.tokens, 32)]), ("step by step", [1] * a.tokens)):
            split = ["--split", ",".join(map(str, pieces))] if pieces else []
            subprocess.run([ROOT / "build/godwit", "logits", "--model", a.model, "--tokens", scratch / "ids.json", "--out", scratch / "out", *split],
                           check=True, stderr=subprocess.DEVNULL)
            difference = ((read_file(scratch / "out")["logits"] - theirs).abs().max() / theirs.abs().max()).item()
            print(f"{name}: {difference:.1e}")
            worst = max(worst, difference)
    sys.exit(worst > a.limit)


if __name__ == "__main__":
    main()
