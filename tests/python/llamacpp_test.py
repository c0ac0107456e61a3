"""Godwit against llama.cpp's logits of converted models (tests/fixtures/llamacpp, written by python/witness_llamacpp.py), whole, in chunks and step by
step. The models come out of the same seeded generator here and there.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch

from llamacpp_models import FORMS, TOKENS, fingerprint, make_witness_model
from reference.weights import read_file

BUILD = pathlib.Path(os.environ["GODWIT_BUILD"])
FIXTURE = pathlib.Path(__file__).resolve().parents[1] / "fixtures/llamacpp/logits.safetensors"
# Relative to the largest logit. llama.cpp is itself 2.1e-6 from the fp64 reference (its sums are fp32 in another order).
LIMIT = 1e-5
SPLITS = {"whole": [], "chunks": [64, 1, 63, 72], "steps": [1] * TOKENS}


class LlamaCpp(unittest.TestCase):
    def test_logits(self):
        fixture = read_file(FIXTURE)
        for form in FORMS:
            with tempfile.TemporaryDirectory() as scratch:
                scratch = pathlib.Path(scratch)
                _, weights, ids = make_witness_model(form, scratch / "model")
                torch.testing.assert_close(fingerprint(weights), fixture[f"{form}.fingerprint"], rtol=1e-12, atol=0,
                                           msg=f"{form}: the generator makes another model here than where the fixture was written")
                (scratch / "ids.json").write_text(json.dumps(ids.tolist()))
                for way, pieces in SPLITS.items():
                    with self.subTest(form=form, way=way):
                        split = ["--split", ",".join(map(str, pieces))] if pieces else []
                        subprocess.run([BUILD / "godwit", "logits", "--model", scratch / "model", "--tokens", scratch / "ids.json", "--out", scratch / "out", *split],
                                       check=True, stderr=subprocess.DEVNULL)
                        ours = read_file(scratch / "out")["logits"]
                        theirs = fixture[f"{form}.steps" if way == "steps" else f"{form}.whole"]
                        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
                        print(f"llama.cpp, {form}, {way}: {difference:.1e}")
                        self.assertLess(difference, LIMIT)


if __name__ == "__main__":
    unittest.main()
