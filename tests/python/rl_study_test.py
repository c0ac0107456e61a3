"""The study of docs/results/rl.md in a form of seconds: every command of it runs, and its table says what there is."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GODWIT = pathlib.Path(os.environ.get("GODWIT_BUILD", ROOT / "build")) / "godwit"


class RlStudy(unittest.TestCase):
    def test_every_arm_is_trained_and_measured(self):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, ROOT / "scripts/rl_study.py", "seconds", "--seeds", "1,2", "--tasks", "4", "--jobs", "2", "--out", out]
            done = subprocess.run(command, cwd=ROOT, env=dict(os.environ, GODWIT=str(GODWIT)), capture_output=True, text=True, timeout=500)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr, "")
            rows = json.loads((pathlib.Path(out) / "seconds/results.json").read_text())
            # Four arms (the control among them) and two seeds, with fp32 and with packed weights.
            self.assertEqual(len(rows), 16)
            for row in rows:
                self.assertEqual(row["success"]["of"], 4)
                if row["arm"].startswith("rl"):
                    self.assertEqual(row["steps"], 2)
                    self.assertEqual(row["max_dlogp"], 0)
            # Packing changes nothing of a model whose experts are what MXFP4 can say.
            aware = [r for r in rows if r["arm"] == "rl, MXFP4-aware"]
            self.assertEqual({(r["seed"], r["tokens"]) for r in aware if r["weights"]}, {(r["seed"], r["tokens"]) for r in aware if not r["weights"]})
            self.assertIn("| **rl** | 2 seeds |", done.stdout)


if __name__ == "__main__":
    unittest.main()
