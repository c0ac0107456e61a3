"""A number of a run's metrics.jsonl over its steps, as an SVG. No packages.

    python python/plot_metric.py runs/mini-vision/metrics.jsonl vision_grad_norm --out vision_grad_norm.svg [--log] [--title TEXT]

A faint line for each step's value, a full one for the mean over about a sixtieth of the run. Files that end in .gz are read too.
"""

import argparse
import gzip
import json
import math
import pathlib

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 58, 14, 34, 36


def read(path, key):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])]
    if not points:
        raise SystemExit(f"{path}: no numbers under {key}")
    return points


def smoothed(points):
    width = max(1, len(points) // 60)
    out, window = [], []
    for step, value in points:
        window = (window + [value])[-width:]
        out.append((step, sum(window) / len(window)))
    return out


def ticks(low, high, log):
    if log:
        return [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    step = 10 ** math.floor(math.log10(high - low))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 7)
    return [step * i for i in range(math.floor(low / step), math.ceil(high / step) + 1)]


def draw(points, title, log):
    values = [y for _, y in points if y > 0 or not log]
    marks = ticks(min(values), max(values), True) if log else ticks(0, max(values) or 1, False)
    low, high = marks[0], marks[-1]
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    scale = math.log10 if log else float

    def at(step, value):
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        share = (scale(max(value, low)) - scale(low)) / (scale(high) - scale(low))
        return f"{x:.1f},{HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM):.1f}"

    def line(series, style):
        return f'<polyline fill="none" {style} points="{" ".join(at(*p) for p in series)}"/>'

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>', f'<text x="{LEFT}" y="20" font-size="14">{title}</text>']
    for mark in marks:
        y = at(first, mark).split(",")[1]
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/><text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for step in ticks(first, last, False):
        if first <= step <= last:
            x = at(step, low).split(",")[0]
            out.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step:g}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">step</text>')
    out.append(line(points[::max(1, len(points) // 1200)], 'stroke="#1f77b4" stroke-opacity="0.3"'))
    out.append(line(smoothed(points)[::max(1, len(points) // 400)], 'stroke="#1f77b4" stroke-width="1.8"'))
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=pathlib.Path)
    parser.add_argument("key")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--title")
    parser.add_argument("--log", action="store_true", help="logarithmic values")
    args = parser.parse_args()
    args.out.write_text(draw(read(args.metrics, args.key), args.title or args.key, args.log))


if __name__ == "__main__":
    main()
