"""Clients that go away, send rubbish or do not read, thousands of them; then: nothing has leaked and no answer is wrong.

    python3 python/soak_test.py                     10,000 clients, 64 at a time, nano-sized requests on a tiny model
    python3 python/soak_test.py --clients 500 --model DIR

Checked at the end: no sequence runs or waits, every page of the cache can be had by one request, the open descriptors are those of the
beginning, memory has not grown since the first half, and fixed requests give the answers that they gave before. Exits 1 otherwise.
"""

import argparse
import asyncio
import collections
import json
import random
import socket
import struct
import sys
import tempfile
import time

from serve_client import Server, answer, complete, head, metrics, post, random_model

CONTEXT = 2048  # of the server, and all that its cache holds
PATIENCE = 600  # seconds for anything to come from a busy server
KNOWN = [{"prompt": f"And it came to pass {i}", "max_tokens": 12, "seed": i} for i in range(8)]


async def connect(server):
    return await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 22)


def reset(writer):
    """Closes with a reset instead of an end."""
    writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def request_bytes(rng, stream=True):
    body = {"prompt": "word " * rng.randrange(1, 300) + str(rng.random()), "max_tokens": rng.randrange(1, 120), "seed": rng.randrange(1000), "stream": stream}
    if rng.random() < 0.3:
        body = {"messages": [{"role": "user", "content": body["prompt"]}], "max_tokens": body["max_tokens"], "stream": stream, "n": rng.randrange(1, 4)}
        if rng.random() < 0.5:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {
                "type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}, "b": {"$ref": "#"}}, "required": ["a"]}}}
        return post("/v1/chat/completions", body)
    return post("/v1/completions", body)


# Faults. Each gives a name of what happened.

async def leaves(server, rng):
    """In the middle of the head, of the body, at once, or in the middle of the answer."""
    data = request_bytes(rng, stream=rng.random() < 0.8)
    reader, writer = await connect(server)
    kind = rng.randrange(4)
    writer.write(data[: rng.randrange(len(data))] if kind == 0 else data)
    await writer.drain()
    if kind == 2:
        await asyncio.sleep(rng.random() * 0.05)
    if kind == 3:
        for _ in range(rng.randrange(1, 30)):
            if not await asyncio.wait_for(reader.readline(), PATIENCE):
                break
    if rng.random() < 0.5:
        reset(writer)
    else:
        writer.close()
    return "left"


async def rubbish(server, rng):
    """Bytes that are no request, or no good one: a 4xx or a closed connection."""
    kind = rng.randrange(9)
    json_body = lambda text: head("POST", "/v1/chat/completions", len(text), "connection: close\r\n") + text
    if kind == 0:
        data = rng.randbytes(rng.randrange(1, 2000)) + b"\r\n\r\n"
    elif kind == 1:
        good = bytearray(request_bytes(rng))
        for _ in range(rng.randrange(1, 20)):
            good[rng.randrange(len(good))] = rng.randrange(256)
        data = bytes(good)
    elif kind == 2:
        data = b"GET /v1/models HTTP/1.1\r\n" + b"x: " + b"y" * rng.randrange(15000, 40000) + b"\r\n\r\n"
    elif kind == 3:
        data = rng.choice([b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: 99999999999999\r\n\r\n",
                           b"GET / HTTP/4.0\r\n\r\n", b"\r\n\r\n\r\n", b"GET /\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"])
    elif kind == 4:
        data = json_body(rng.choice([b"[" * 5000, b'{"messages": ' * 300, b"{", b"null", b'{"messages": [{"role": "user", "content": "\xff"}]}', b"{}\0{}"]))
    elif kind == 5:
        data = post("/v1/completions", {"prompt": [rng.randrange(-5, 10**7) for _ in range(20)], "max_tokens": 3})
    elif kind == 6:
        data = post("/v1/completions", {"prompt": "x", rng.choice(["temperature", "n", "seed", "stop", "logit_bias", "max_tokens", "top_p"]): rng.choice(["x", [], {}, -7, 1e300, None, [[1]]])})
    elif kind == 7:
        schema = {"type": "object", "properties": {"a": rng.choice([{"type": "king"}, {"$ref": "#/nowhere"}, {"not": {}}, {"type": "string", "pattern": "(?=x)"}, 5])}}
        data = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    else:
        data = post("/v1/completions", {"prompt": "word " * 5000, "max_tokens": 3})
    reader, writer = await connect(server)
    writer.write(data)
    if writer.can_write_eof():
        writer.write_eof()
    try:
        raw = await asyncio.wait_for(reader.read(1 << 20), PATIENCE)
    except ConnectionError:
        raw = b""
    writer.close()
    # Damaged bytes may still be a good request; a 5xx is never right.
    if raw and not raw.startswith((b"HTTP/1.1 4", b"HTTP/1.1 2")):
        raise AssertionError(f"{data[:300]!r} was answered {raw[:300]!r}")
    return "refused" if raw.startswith(b"HTTP/1.1 4") else "closed" if not raw else "taken"


async def reads_slowly(server, rng):
    """A few bytes at a time from a small window, then away; or nothing at all."""
    reader, writer = await connect(server)
    writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    writer.write(request_bytes(rng))
    for _ in range(rng.randrange(0, 12)):
        if not await asyncio.wait_for(reader.read(rng.randrange(1, 40)), PATIENCE):
            break
        await asyncio.sleep(rng.random() * 0.05)
    reset(writer) if rng.random() < 0.5 else writer.close()
    return "slow"


async def behaves(server, rng, expected):
    i = rng.randrange(len(KNOWN))
    got = await complete(server.port, KNOWN[i])
    if got["choices"][0]["text"] != expected[i]:
        raise AssertionError(f"{KNOWN[i]} gave {got['choices'][0]['text']!r}, before {expected[i]!r}")
    return "answered"


async def quiet(server):
    for _ in range(600):
        now = await metrics(server.port)
        if now["godwit_sequences_running"] == 0 and now["godwit_sequences_waiting"] == 0 and now["godwit_requests_waiting"] == 0 and now["godwit_requests_running"] == 0:
            return now
        await asyncio.sleep(0.1)
    sys.exit(f"sequences still run a minute after the last client: {now}")


async def descriptors(server, expected):
    """Waits for connections to be closed; the number that stays."""
    for _ in range(100):
        if server.descriptors() <= expected:
            break
        await asyncio.sleep(0.1)
    return server.descriptors()


async def run(server, clients, at_once, seed):
    expected = [(await complete(server.port, r))["choices"][0]["text"] for r in KNOWN]
    at_start = server.descriptors()
    seen = collections.Counter()
    refused = asyncio.Semaphore(at_once)

    async def one(i):
        rng = random.Random(seed * 1_000_003 + i)
        async with refused:
            kind = rng.random()
            try:
                if kind < 0.45:
                    seen[await leaves(server, rng)] += 1
                elif kind < 0.75:
                    seen[await rubbish(server, rng)] += 1
                elif kind < 0.9:
                    seen[await reads_slowly(server, rng)] += 1
                else:
                    seen[await behaves(server, rng, expected)] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                seen["reset"] += 1

    start = time.perf_counter()
    memory = []
    for part in range(4):
        await asyncio.gather(*(one(i) for i in range(clients * part // 4, clients * (part + 1) // 4)))
        await quiet(server)
        memory.append(server.memory_mb())
    now = await quiet(server)
    open_now = await descriptors(server, at_start)
    if open_now > at_start:
        sys.exit(f"{open_now} descriptors are open, {at_start} at the beginning")
    if now["godwit_sequences_failed_total"] > 0:
        sys.exit(f"{now['godwit_sequences_failed_total']:.0f} sequences failed")
    # Every page and slot can be had: a prompt as long as the cache, and as many sequences as run together.
    status, body = await answer(server.port, post("/v1/completions", {"prompt": [5] * (CONTEXT - 10), "max_tokens": 4}))
    if status != 200:
        sys.exit(f"a prompt as long as the cache: {status} {body[:300]}")
    texts = [r["choices"][0]["text"] for r in await asyncio.gather(*(complete(server.port, r) for r in KNOWN))]
    if texts != expected:
        sys.exit("answers differ from those of the beginning")
    grown = memory[3] - memory[1]
    if grown > max(16, 0.03 * memory[1]):
        sys.exit(f"memory grows: {memory} MB after each quarter")
    print(f"{clients} clients in {time.perf_counter() - start:.0f} s ({', '.join(f'{v} {k}' for k, v in sorted(seen.items()))}): nothing leaked, answers as before; "
          f"{open_now} descriptors ({at_start} at the beginning), {' '.join(f'{m:.0f}' for m in memory)} MB after each quarter")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory; without: a preset with random weights")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--clients", type=int, default=10000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or random_model(options.preset, scratch + "/model")
        # Prefixes in host memory are no leak: their place is full within the first half.
        with Server(model, "--max-context", CONTEXT, "--cache-tokens", CONTEXT, "--max-sequences", 16, "--max-waiting", 1024,
                    "--host-cache", "16MB") as server:
            asyncio.run(run(server, options.clients, options.at_once, options.seed))


if __name__ == "__main__":
    main()
