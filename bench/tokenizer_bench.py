#!/usr/bin/env python3
"""Times our tokenizer and tiktoken on one core, on the same text and ranks, one after the other, and compares their ids.

    python bench/tokenizer_bench.py build/tokenizer_bench TEXT [--ranks 32768] [--samples 7] [--write]

Trains the ranks on TEXT first. Seconds are processor time of the one thread that works, best of the samples, which
alternate between the two programs. --write puts the table into bench/results/tokenizer.md.
"""

import argparse
import base64
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy
import tiktoken

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
from make_tokenizer_fixtures import PATTERN  # noqa: E402


def run(*command):
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cpu_model():
    fields = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", "an unknown processor")
    return f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("text")
    parser.add_argument("--what", default="", help="what the text is, for the table")
    parser.add_argument("--ranks", type=int, default=32768)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    a = parser.parse_args()
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as model:
        trained = run(a.program, "train", a.text, str(a.ranks), model)
        lines = [line.split() for line in (pathlib.Path(model) / "tiktoken.model").read_text().splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        encoding = tiktoken.Encoding("bench", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        text = pathlib.Path(a.text).read_bytes().decode()
        for _ in range(a.samples):
            start = time.thread_time()
            their_ids = encoding.encode_to_numpy(text)  # its fastest call: no Python list
            theirs.append(time.thread_time() - start)
            ours.append(run(a.program, "encode", model, a.text, f"{model}/ids"))
        our_ids = numpy.fromfile(f"{model}/ids", dtype=numpy.int32)
    same = numpy.array_equal(our_ids, their_ids)
    megabytes = trained["bytes"] / 1e6
    encode = megabytes / min(x["encode_seconds"] for x in ours)
    decode = megabytes / min(x["decode_seconds"] for x in ours)
    peer = megabytes / min(theirs)
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    table = f"""# Tokenizer

`bench/tokenizer_bench.py`, commit {commit}, one core of {cpu_model()}.
Text: {a.what or "one file"}.
{megabytes:.1f} MB, {len(our_ids)} tokens of {a.ranks} ranks trained on it.
Processor time, best of {a.samples}. The ids are {"the same" if same else "DIFFERENT"}.

| | MB/s |
|---|---|
| encode, godwit | {encode:.1f} |
| encode, tiktoken {tiktoken.__version__} (`encode_to_numpy`) | {peer:.1f} |
| ratio | {encode / peer:.1f} |
| decode, godwit | {decode:.1f} |

Training: {trained["count_seconds"]:.1f} s to count pieces and {trained["merge_seconds"]:.1f} s to merge.
"""
    print(table)
    if a.write:
        (ROOT / "bench/results/tokenizer.md").write_text(table)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
