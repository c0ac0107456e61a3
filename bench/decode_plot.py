"""Latency of a step by cached tokens as an SVG, from what `godwit bench decode --json` printed.

    build/godwit bench decode --model mini --device cuda --dtype bf16 --synthetic --prefill 0 --batch 1 --cached 1024,32768,262144,1048576 --json > bf16.json
    python3 bench/decode_plot.py bf16.json [fp8.json ...] > bench/results/decode_h200.svg

Each file is a line, named as the file is.
"""

import json
import math
import pathlib
import sys

COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea")
LEFT, RIGHT, TOP, BOTTOM = 60, 500, 40, 240


def number(tokens):
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K" if tokens >= 1024 else str(tokens)


def main(paths):
    lines = {}
    for path in map(pathlib.Path, paths):
        rows = json.loads(path.read_text())["decode"]
        lines[path.stem] = [(row["cached"], row["step_ms"]) for row in rows if row["batch"] == 1]
    cached = sorted({x for points in lines.values() for x, _ in points})
    most = max(y for points in lines.values() for _, y in points)
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100) if most / s <= 6)
    top = math.ceil(most / step) * step
    low, high = math.log2(cached[0]), math.log2(cached[-1])
    x = lambda tokens: LEFT + 20 + (RIGHT - LEFT - 40) * (math.log2(tokens) - low) / max(1e-9, high - low)
    y = lambda ms: BOTTOM - (BOTTOM - TOP) * ms / top
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 520 280" font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>']
    for i in range(round(top / step) + 1):
        at = y(i * step)
        out.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/><text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{i * step:g}</text>')
    out += [f'<text x="{x(tokens):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{number(tokens)}</text>' for tokens in cached]
    for n, (name, points) in enumerate(lines.items()):
        colour = COLOURS[n % len(COLOURS)]
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)}"/>')
        out.append(f'<text x="{LEFT + 10}" y="{16 + 14 * n}" fill="{colour}">{name}</text>')
        for a, b in points:
            out.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" fill="{colour}"/><text x="{x(a):.1f}" y="{y(b) + (-9 if n == 0 else 18):.1f}" text-anchor="middle" fill="{colour}">{b:.2f}</text>')
    out.append('<text x="280" y="274" text-anchor="middle">cached tokens</text><text x="16" y="140" text-anchor="middle" transform="rotate(-90 16 140)">ms a token</text></svg>')
    print("\n".join(out))


if __name__ == "__main__":
    main(sys.argv[1:])
