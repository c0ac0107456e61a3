"""What python/load_test.py and python/soak_test.py share: a server as a child process, and a client that sends bytes as they are."""

import asyncio
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("GODWIT_BUILD", ROOT / "build"))


def random_model(name, directory):
    """A model directory with random weights: `name` is a preset, or "tiny"."""
    subprocess.run([BUILD / "godwit_random_model", name, ROOT / "tests/fixtures/tokenizer", directory], check=True)
    return directory


class Server:
    """`godwit serve` on a free port; ends with the block."""

    def __init__(self, model, *args):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([BUILD / "godwit", "serve", "--model", str(model), "--port", "0", *map(str, args)],
                                        stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        found = re.search(r"http://[^:]+:(\d+)/", line)
        if not found:
            self.process.kill()
            raise SystemExit(f"the server did not start: {line}{self.errors()}")
        self.port = int(found.group(1))

    def errors(self):
        self.log.seek(0)
        return self.log.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit("the server does not end")
        if code != 0:
            raise SystemExit(f"the server ended with {code}: {self.errors()[-3000:]}")

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_mb(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024


def head(method, path, length, extra=""):
    return f"{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{extra}\r\n".encode()


def post(path, body, extra="connection: close\r\n"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, len(data), extra) + data


async def answer(port, data, timeout=600):
    """Sends the bytes and reads until the server closes: (status, body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        writer.write(data)
        raw = await asyncio.wait_for(reader.read(), timeout)
    finally:
        writer.close()
    top, _, body = raw.partition(b"\r\n\r\n")
    status = int(top.split()[1]) if top.startswith(b"HTTP/1.1 ") else 0
    if b"transfer-encoding: chunked" in top.lower():
        out = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            if int(size, 16) == 0:
                break
            out, body = out + body[: int(size, 16)], body[int(size, 16) + 2:]
        body = out
    return status, body


async def complete(port, request):
    """A whole answer as JSON; raises unless it is a 200."""
    status, body = await answer(port, post("/v1/completions", request))
    if status != 200:
        raise RuntimeError(f"{status}: {body[:500]}")
    return json.loads(body)


async def metrics(port):
    _, body = await answer(port, b"GET /metrics HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n")
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", body.decode(), re.M)}


async def stream(port, request):
    """A streamed completion: (text, seconds to the first piece, seconds between pieces)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    start = time.perf_counter()
    writer.write(post("/v1/completions", {**request, "stream": True}))
    text, times, ended = "", [start], False
    try:
        first = await reader.readline()
        if b" 200 " not in first:
            raise RuntimeError((first + await reader.read(2000)).decode(errors="replace"))
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                ended = True
                break
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            times.append(time.perf_counter())
            for choice in event["choices"]:
                text += choice["text"]
    finally:
        writer.close()
    if not ended:
        raise RuntimeError("the stream was cut")
    return text, times[1] - start, [b - a for a, b in zip(times[1:], times[2:])]
