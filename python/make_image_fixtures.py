"""Pictures of every kind and what Kimi K3's preprocessor makes of them, by Pillow and NumPy.

    pip install pillow numpy        # made with Pillow 13.0, NumPy 2.4
    python python/make_image_fixtures.py tests/fixtures/images

Writes the pictures, cases.json (file, processor settings, expected sizes) and expected.safetensors (of each case the
8-bit picture before the padding, of one the patches in fp32). The limits are small so that the files are: the rule is the
same. Deviations from what Pillow alone would do: 16-bit grey keeps its upper byte (Pillow clips at 255).
"""

import json
import math
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

K3 = {
    "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 65536, "patch_limit_on_one_side": 512,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "fixed_output_tokens": None,
    "transparent_bg_fill_stage": "after_resize",
    "transparent_bg_config": {"pattern": "chessboard", "chessboard_square_size": 8,
                              "chessboard_square_on_top_left": True, "chessboard_white_value": 255,
                              "chessboard_gray_value": 180},
}
SMALL = {**K3, "in_patch_limit": 9, "patch_limit_on_one_side": 4}


def has_alpha(im):
    return "A" in im.getbands() or "transparency" in im.info


def compose(im, config):
    rgba = np.asarray(im.convert("RGBA")).astype(np.float32)
    board_config = config["transparent_bg_config"]
    h, w = rgba.shape[:2]
    if board_config["pattern"] == "chessboard":
        size = board_config["chessboard_square_size"]
        odd = (np.arange(h)[:, None] // size + np.arange(w)[None, :] // size) % 2 == 1
        if not board_config["chessboard_square_on_top_left"]:
            odd = ~odd
        board = np.where(odd, board_config["chessboard_gray_value"], board_config["chessboard_white_value"])
        board = board.astype(np.float32)[..., None]
    else:
        board = np.float32(255 if board_config["pattern"] == "white" else 0)
    alpha = rgba[..., 3:] / np.float32(255)
    return (alpha * rgba[..., :3] + (np.float32(1) - alpha) * board).astype(np.uint8)


def flatten(im, config):
    return compose(im, config) if has_alpha(im) else np.asarray(im.convert("RGB"))


def preprocess(im, config):
    """The canvas [H, W, 3] in 8 bits, and the patches."""
    p, merge = config["patch_size"], config["merge_kernel_size"]
    w, h = im.size
    side = config["patch_limit_on_one_side"] * p
    scale = min(1.0, math.sqrt(config["in_patch_limit"] / (max(1, w // p) * max(1, h // p))), side / w, side / h)
    size = (min(max(1, int(w * scale)), side), min(max(1, int(h * scale)), side))
    if config["transparent_bg_fill_stage"] == "before_resize" and has_alpha(im):
        im = Image.fromarray(compose(im, config))
    rgb = flatten(im.resize(size, Image.Resampling.BICUBIC), config)
    unit = p * merge
    canvas = np.zeros((-(-size[1] // unit) * unit, -(-size[0] // unit) * unit, 3), np.uint8)
    canvas[: size[1], : size[0]] = rgb
    values = (canvas / 255.0).astype(np.float32)
    values = (values - np.float32(config["image_mean"][0])) / np.float32(config["image_std"][0])
    gh, gw = canvas.shape[0] // p, canvas.shape[1] // p
    patches = values.reshape(gh, p, gw, p, 3).transpose(0, 2, 4, 1, 3).reshape(gh * gw, 3, p, p)
    return size, canvas, np.ascontiguousarray(patches)


def picture(w, h, channels, seed=0):
    """Waves, edges and a little noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:h, 0:w]
    planes = []
    for c in range(channels):
        wave = 127 + 100 * np.sin(x / (3 + c) + c) * np.cos(y / (5 - c) + seed)
        wave = np.where((x // 9 + y // 7 + c) % 5 == 0, 255 * (c % 2), wave)
        planes.append(wave + 8 * rng.standard_normal((h, w)).round())
    out = np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)
    return out[..., 0] if channels == 1 else out


def alpha_ramp(w, h):
    y, x = np.mgrid[0:h, 0:w]
    ramp = (x * 255 / max(1, w - 1)).astype(np.uint8)
    ramp[(y // 6) % 3 == 1] = 0
    ramp[(y // 6) % 3 == 2] = 255
    return ramp


def write_png(path, array, colour):
    """PNG by hand, for what Pillow does not write: array [h, w, c] uint16, colour type as in the format."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    h, w = array.shape[:2]
    rows = b"".join(b"\0" + array[y].astype(">u2").tobytes() for y in range(h))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 16, colour, 0, 0, 0)) +
                     chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b""))


def write_pictures(out):
    def save(name, array, mode=None, **options):
        im = array if isinstance(array, Image.Image) else Image.fromarray(array, mode)
        im.save(out / name, **options)

    rgb = picture(61, 47, 3)
    save("rgb.png", rgb, optimize=True)
    save("gray.png", picture(47, 61, 1, 1), optimize=True)
    save("bits.png", Image.fromarray(picture(61, 47, 1, 2)).convert("1"), optimize=True)
    save("gray_alpha.png", Image.fromarray(np.dstack([picture(61, 47, 1, 3), alpha_ramp(61, 47)]), "LA"))
    save("rgba.png", np.dstack([rgb, alpha_ramp(61, 47)]), optimize=True)
    palette = Image.fromarray(picture(61, 47, 3, 4)).quantize(16)
    save("palette.png", palette, optimize=True)
    save("palette_alpha.png", palette, transparency=bytes(range(0, 256, 17)))
    save("palette_key.png", palette, transparency=3)
    flat = (picture(61, 47, 3, 5) // 64) * 64
    key = tuple(int(v) for v in flat[20, 30])
    save("rgb_key.png", flat, transparency=key, optimize=True)
    flat_gray = (picture(61, 47, 1, 6) // 32) * 32
    save("gray_key.png", flat_gray, transparency=int(flat_gray[10, 10]), optimize=True)
    rng = np.random.default_rng(7)
    deep = picture(40, 33, 4, 7).astype(np.uint16) * 256 + rng.integers(0, 4, (33, 40, 4), dtype=np.uint16) * 64
    write_png(out / "rgb16.png", deep[..., :3], 2)
    write_png(out / "gray16.png", deep[..., 0], 0)
    write_png(out / "rgba16.png", deep, 6)
    save("rgb_420.jpg", rgb, quality=85, subsampling="4:2:0")
    save("rgb_444_progressive.jpg", rgb, quality=85, subsampling="4:4:4", progressive=True)
    save("gray.jpg", picture(47, 61, 1, 1), quality=85)
    save("cmyk.jpg", Image.fromarray(picture(61, 47, 4, 8), "CMYK"), quality=85)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: to be turned by 90 degrees
    save("turned.jpg", picture(61, 47, 3, 9), quality=85, exif=exif)
    save("lossy.webp", rgb, quality=80)
    save("lossless_alpha.webp", np.dstack([rgb, alpha_ramp(61, 47)]), lossless=True, exact=True)
    save("tiny.png", picture(5, 3, 3, 10))
    save("dot.png", picture(1, 1, 3, 11))
    save("strip.png", picture(300, 3, 3, 12), optimize=True)
    save("exact.png", picture(56, 28, 3, 13), optimize=True)


def read_picture(path):
    im = Image.open(path)
    im.load()
    if im.mode.startswith("I"):
        im = Image.fromarray((np.asarray(im).astype(np.uint16) >> 8).astype(np.uint8))
    return im


def save_safetensors(path, tensors):
    header, offset = {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": {"uint8": "U8", "float32": "F32"}[str(array.dtype)], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))


def write_animations(out):
    """Moving squares with half-transparent places: every way a frame of APNG can leave and lie over the canvas; and the same frames as WebP."""
    out.mkdir(exist_ok=True)
    frames = []
    for i in range(6):
        frame = np.zeros((20, 24, 4), np.uint8)
        frame[:] = (40 * i, 90, 200, 255 if i % 2 == 0 else 0)
        frame[3 + i:9 + i, 2 + 2 * i:10 + 2 * i] = (250, 30 * i, 20, 255)
        if i in (0, 3):  # these replace; laid over something, half-transparent pixels are where Pillow leaves the APNG specification
            frame[12:16, 4:20] = (10, 200, 10 * i, 128)
        frames.append(Image.fromarray(frame))
    first, rest = frames[0], frames[1:]
    first.save(out / "moving.png", save_all=True, append_images=rest, duration=100, disposal=[0, 1, 2, 0, 1, 0], blend=[0, 1, 1, 0, 1, 1])
    first.save(out / "moving.webp", save_all=True, append_images=rest, duration=100, lossless=True, exact=True)
    tensors = {}
    for name in ("png", "webp"):
        im = Image.open(out / f"moving.{name}")
        seen = []
        for i in range(im.n_frames):
            im.seek(i)
            seen.append(np.asarray(im.convert("RGBA")))
        tensors[name] = np.stack(seen)
    save_safetensors(out / "expected.safetensors", tensors)


def main():
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write_pictures(out)
    write_animations(out / "animated")
    before = {**SMALL, "transparent_bg_fill_stage": "before_resize"}
    white = {**SMALL, "transparent_bg_config": {"pattern": "white"}}
    gray_first = {**SMALL, "transparent_bg_config": {**K3["transparent_bg_config"], "chessboard_square_size": 5,
                                                     "chessboard_square_on_top_left": False}}
    cases = [(file.name, SMALL) for file in sorted(out.iterdir()) if file.suffix in (".png", ".jpg", ".webp")]
    cases += [("rgba.png", K3), ("rgb_420.jpg", K3), ("rgba.png", before), ("palette_alpha.png", before),
              ("rgba.png", white), ("gray_alpha.png", gray_first)]
    rows, tensors = [], {}
    for number, (name, config) in enumerate(cases):
        im = read_picture(out / name)
        size, canvas, patches = preprocess(im, config)
        tensors[f"resized.{number}"] = np.ascontiguousarray(canvas[: size[1], : size[0]])
        if name == "tiny.png":
            tensors = {f"patches.{number}": patches, **tensors}
        rows.append({"file": name, "size": im.size, "resized": size, "media_proc_cfg": config})
    save_safetensors(out / "expected.safetensors", tensors)
    (out / "cases.json").write_text("[" + ",\n ".join(json.dumps(row) for row in rows) + "]\n")


main()
