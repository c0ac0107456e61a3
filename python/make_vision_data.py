"""Pictures with questions and answers, to train and measure a model that sees: one JSON line each, for `godwit data pack` and `godwit eval vision`.

    pip install pillow numpy scikit-learn
    python python/make_vision_data.py runs/vision-data --tasks digits --count 12000          # scikit-learn's handwritten digits
    python python/make_vision_data.py runs/vision-data --tasks digits read count locate chart order --count 20000

Writes OUT/train.jsonl, OUT/test.jsonl (`--test` lines a task) and OUT/text.txt (the words, for a tokenizer). A line is
{"task", "content": [{"type": "image", "image": "data:image/png;base64,..."}, {"type": "text", "text": "digit:"}], "answer": "7"}.

    digits   scikit-learn's 1,797 scanned digits, 8 x 8; every fifth writer's sheet is held out. In training turned, shifted and scaled a little.
    read     1 to 12 characters in several fonts; the test's sizes and one font are not in the training
    count    1 to 9 shapes of one kind and colour
    locate   which of nine places a shape is in, among others of other kinds or colours
    chart    the largest of 3 to 6 bars
    order    a video of 8 to 32 frames: in which order three shapes appear

The same arguments give the same lines.
"""

import argparse
import base64
import io
import json
import math
import pathlib
import random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180), "orange": (255, 127, 14), "purple": (148, 103, 189), "black": (20, 20, 20)}
SHAPES = ["circle", "square", "triangle", "cross"]
PLACES = ["top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
TRAIN_SIZES, TEST_SIZES = (14, 16, 18, 20, 22), (15, 17, 19, 21)


def encoded(image):
    data = io.BytesIO()
    image.save(data, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def picture(image):
    return {"type": "image", "image": encoded(image)}


def sample(task, parts, question, answer):
    return {"task": task, "content": [*parts, {"type": "text", "text": question}], "answer": answer}


# Handwritten digits ----------------------------------------------------------------------------------------------------------


class Digits:
    def __init__(self, _):
        from sklearn.datasets import load_digits
        data = load_digits()
        ink = (data.images * (255 / 16)).astype(np.uint8)
        # The set comes sheet by sheet of one writer, about 130 digits each. Whole sheets are held out: other hands, not other digits of the same hand.
        sheet = np.arange(len(ink)) // 130
        held = np.isin(sheet % 5, [4])
        self.parts = {"train": (ink[~held], data.target[~held]), "test": (ink[held], data.target[held])}

    def make(self, split, index, rng):
        ink, target = self.parts[split]
        i = index % len(ink)
        image = Image.fromarray(ink[i]).resize((20, 20), Image.Resampling.BICUBIC)
        canvas = Image.new("L", (28, 28))
        canvas.paste(image, (4, 4))
        if split == "train" and index >= len(ink):
            turn, grow, lean = rng.uniform(-12, 12), rng.uniform(0.88, 1.12), rng.uniform(-0.15, 0.15)
            dx, dy = rng.uniform(-2, 2), rng.uniform(-2, 2)
            c, s = math.cos(math.radians(turn)) / grow, math.sin(math.radians(turn)) / grow
            # Output to input, about the centre.
            a, b, d, e = c, s + lean, -s, c
            canvas = canvas.transform((28, 28), Image.Transform.AFFINE, (a, b, 14 - a * (14 + dx) - b * (14 + dy), d, e, 14 - d * (14 + dx) - e * (14 + dy)),
                                      Image.Resampling.BICUBIC)
        return sample("digits", [picture(canvas)], "digit:", str(int(target[i])))

    def count(self, split, wanted):
        return min(wanted, len(self.parts["test"][0])) if split == "test" else wanted


# Rendered text ---------------------------------------------------------------------------------------------------------------


class Read:
    def __init__(self, fonts):
        self.fonts = {"train": fonts[:-1] or fonts, "test": fonts}
        self.cache = {}

    def font(self, path, size):
        if (path, size) not in self.cache:
            self.cache[path, size] = ImageFont.truetype(path, size)
        return self.cache[path, size]

    def make(self, split, index, rng):
        text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 12)))
        font = self.font(rng.choice(self.fonts[split]), rng.choice(TRAIN_SIZES if split == "train" else TEST_SIZES))
        left, top, right, bottom = font.getbbox(text)
        width = math.ceil((right - left + 6) / 28) * 28
        image = Image.new("L", (width, 28), 255)
        x = 2 + rng.random() * max(0, width - (right - left) - 4)
        y = 1 + rng.random() * max(0, 26 - (bottom - top))
        ImageDraw.Draw(image).text((x - left, y - top), text, fill=rng.randint(0, 60), font=font)
        return sample("read", [picture(image)], "text:", text)

    def count(self, _, wanted):
        return wanted


# Shapes ----------------------------------------------------------------------------------------------------------------------


def draw_shape(draw, shape, x, y, r, colour):
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    else:
        w = max(1, r / 3)
        draw.rectangle((x - r, y - w, x + r, y + w), fill=colour)
        draw.rectangle((x - w, y - r, x + w, y + r), fill=colour)


class Shapes:
    def __init__(self, _):
        pass

    def count(self, _, wanted):
        return wanted


class Count(Shapes):
    """On cells of a 4 x 4 board, moved a little, so that none hides another."""

    def make(self, split, index, rng):
        number, shape, colour = rng.randint(1, 9), rng.choice(SHAPES), rng.choice(list(COLOURS))
        image = Image.new("RGB", (112, 112), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        for cell in rng.sample(range(16), number):
            r = rng.uniform(6, 10)
            draw_shape(draw, shape, cell % 4 * 28 + 14 + rng.uniform(r - 13, 13 - r), cell // 4 * 28 + 14 + rng.uniform(r - 13, 13 - r), r, COLOURS[colour])
        return sample("count", [picture(image)], "count:", str(number))


class Locate(Shapes):
    def make(self, split, index, rng):
        image = Image.new("RGB", (84, 84), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        kinds = rng.sample([(s, c) for s in SHAPES for c in COLOURS], rng.randint(1, 5))
        cells = rng.sample(range(9), len(kinds))
        for (shape, colour), cell in zip(kinds, cells):
            draw_shape(draw, shape, cell % 3 * 28 + 14 + rng.uniform(-4, 4), cell // 3 * 28 + 14 + rng.uniform(-4, 4), rng.uniform(7, 9), COLOURS[colour])
        shape, colour = kinds[0]
        return sample("locate", [picture(image)], f"{colour} {shape}:", PLACES[cells[0]])


class Chart(Shapes):
    def make(self, split, index, rng):
        bars = rng.randint(3, 6)
        names = rng.sample(list(COLOURS), bars)
        while True:
            heights = [rng.randint(10, 76) for _ in names]
            first, second = sorted(heights)[-1], sorted(heights)[-2]
            if first - second >= 8:
                break
        image = Image.new("RGB", (112, 84), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        for i, (name, height) in enumerate(zip(names, heights)):
            x = 4 + i * (104 / bars)
            draw.rectangle((x, 82 - height, x + 104 / bars - 4, 82), fill=COLOURS[name])
        return sample("chart", [picture(image)], "largest:", names[heights.index(max(heights))])


class Order(Shapes):
    """Three shapes of different colours appear one after another and stay."""

    def make(self, split, index, rng):
        frames = rng.choice([8, 12, 16, 24, 32])
        names = rng.sample(list(COLOURS), 3)
        shapes = [rng.choice(SHAPES) for _ in names]
        cells = rng.sample(range(4), 3)
        # No two in the same group of four frames, which become vectors together.
        times = sorted(t * 4 + rng.randint(0, 3) for t in rng.sample(range(frames // 4), min(3, frames // 4)))
        names, shapes, cells = names[:len(times)], shapes[:len(times)], cells[:len(times)]
        video = []
        for t in range(frames):
            image = Image.new("RGB", (56, 56), (255, 255, 255))
            draw = ImageDraw.Draw(image)
            for name, shape, cell, time in zip(names, shapes, cells, times):
                if t >= time:
                    draw_shape(draw, shape, cell % 2 * 28 + 14, cell // 2 * 28 + 14, 9, COLOURS[name])
            video.append(encoded(image))
        return sample("order", [{"type": "video", "video": video, "fps": 8}], "order:", " ".join(names))


TASKS = {"digits": Digits, "read": Read, "count": Count, "locate": Locate, "chart": Chart, "order": Order}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--count", type=int, default=12000, help="training lines a task")
    parser.add_argument("--test", type=int, default=400, help="held-out lines a task")
    parser.add_argument("--fonts", default="/usr/share/fonts/truetype/dejavu/DejaVu*.ttf", help="pattern of the files; the last is held out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pattern = pathlib.Path(args.fonts)
    fonts = sorted(str(p) for p in pattern.parent.glob(pattern.name) if "Math" not in p.name)
    if "read" in args.tasks and not fonts:
        parser.error(f"no fonts at {args.fonts} (Debian: fonts-dejavu)")
    args.out.mkdir(parents=True, exist_ok=True)
    makers = {task: TASKS[task](fonts) for task in args.tasks}
    for split, wanted in (("train", args.count), ("test", args.test)):
        with open(args.out / f"{split}.jsonl", "w") as file:
            for task, maker in makers.items():
                for i in range(maker.count(split, wanted)):
                    rng = random.Random(f"{args.seed} {task} {split} {i}")
                    file.write(json.dumps(maker.make(split, i, rng)) + "\n")
    words = ["image 28x28 56x56 84x84 112x112 video digit: text: count: largest: order: 00:00:00.000", *PLACES,
             *(f"{c} {s}:" for c in COLOURS for s in SHAPES)]
    (args.out / "text.txt").write_text("\n".join(words * 20) + "\n")


if __name__ == "__main__":
    main()
