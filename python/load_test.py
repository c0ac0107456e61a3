"""Many streaming clients at once: all finish, and each gets the answer that it would get alone, bit for bit.

    python3 python/load_test.py                                  nano with random weights, 256 clients, 64 tokens each
    python3 python/load_test.py --model runs/quickstart/model --clients 64 --tokens 128 -- --max-sequences 64

Arguments behind `--` go to `godwit serve`. Prints the latencies that clients see as a row of a table; exits 1 at the first wrong answer.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time

from serve_client import Server, metrics, random_model, stream

WORDS = "the of and to that in he shall unto for I his a they be is not them with it all thou thy was which my me said but ye their have will".split()


def requests(count, tokens):
    """Prompts of 4 to 200 words, a third of them with a common beginning."""
    rng = random.Random(1)
    common = " ".join(rng.choice(WORDS) for _ in range(80))
    out = []
    for i in range(count):
        own = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(4, 120)))
        out.append({"prompt": (common + " " if i % 3 == 0 else "") + own, "max_tokens": tokens, "seed": i, "temperature": 1.0 if i % 2 else 0.0})
    return out


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


async def run(server, clients, tokens):
    all_requests = requests(clients, tokens)
    alone = [(await stream(server.port, r))[0] for r in all_requests]
    before = await metrics(server.port)
    start = time.perf_counter()
    together = await asyncio.gather(*(stream(server.port, r) for r in all_requests), return_exceptions=True)
    seconds = time.perf_counter() - start
    after = await metrics(server.port)
    failed = [r for r in together if isinstance(r, BaseException)]
    if failed:
        sys.exit(f"{len(failed)} of {clients} did not finish: {failed[0]}")
    wrong = [i for i, (a, r) in enumerate(zip(alone, together)) if a != r[0]]
    if wrong:
        sys.exit(f"{len(wrong)} answers differ from those alone, the first: {alone[wrong[0]]!r} and {together[wrong[0]][0]!r}")
    drawn = after["godwit_drawn_tokens_total"] - before["godwit_drawn_tokens_total"]
    first = [r[1] for r in together]
    between = [gap for r in together for gap in r[2]]
    print(f"{clients} clients, {drawn:.0f} tokens in {seconds:.1f} s: all finished, all answers equal to those alone")
    print("| clients | tokens/s | first token, s: p50 | p99 | between tokens, ms: p50 | p90 | p99 | most |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| {clients} | {drawn / seconds:.0f} | {percentile(first, .5):.2f} | {percentile(first, .99):.2f} | " +
          " | ".join(f"{percentile(between, p) * 1e3:.1f}" for p in (.5, .9, .99, 1)) + " |")


def main():
    args, rest = sys.argv[1:], []
    if "--" in args:
        args, rest = args[: args.index("--")], args[args.index("--") + 1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory; without: a preset with random weights")
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or random_model(options.preset, scratch + "/model")
        with Server(model, "--max-waiting", max(256, options.clients), *rest) as server:
            asyncio.run(run(server, options.clients, options.tokens))


if __name__ == "__main__":
    main()
