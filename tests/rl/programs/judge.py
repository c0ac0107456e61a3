# A judge that likes the letter e: the share of it among the letters that an episode wrote.
import json
import sys

for line in sys.stdin:
    request = json.loads(line)
    scores = []
    for episode in request["episodes"]:
        text = "".join(turn["written"] for turn in episode["turns"])
        scores.append(text.count("e") / max(1, len(text)))
    if len(sys.argv) > 1:  # to be wrong on purpose
        scores = json.loads(sys.argv[1])
    print(json.dumps({"scores": scores}), flush=True)
