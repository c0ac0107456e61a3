"""Pictures with questions and answers, to train and measure a model that sees: one JSON line each, for `godwit data pack` and `godwit eval vision`.

    pip install pillow numpy scikit-learn
    python python/make_vision_data.py runs/vision-data --tasks digits --count 12000          # scikit-learn's handwritten digits
    python python/make_vision_data.py runs/vision-data --count 20000 --more read=200000 --jobs 8                          # all of them

Writes OUT/train.jsonl, OUT/test.jsonl (`--test` lines a task) and OUT/text.txt (the words, for a tokenizer). A line is
{"task", "content": [{"type": "image", "image": "data:image/png;base64,..."}, {"type": "text", "text": "digit:"}], "answer": "7"}.

    digits   scikit-learn's 1,797 scanned digits, 8 x 8; every fifth writer's sheet is held out. In training turned, leaned, shifted and scaled a little.
    read     1 to 12 characters in several fonts, of sizes that are not in the training (where some are stretched a little)
    font     (only asked) the same in a font that is not in the training either
    count    1 to 9 shapes of one kind and colour
    locate   which of nine places a shape is in, among others of other kinds or colours
    chart    the largest of 3 to 6 bars
    order    a video of 8 to 32 frames: in which order three shapes appear

The same arguments give the same lines, whatever the number of processes.
"""

import argparse
import base64
import io
import json
import math
import multiprocessing
import pathlib
import random

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180), "orange": (255, 127, 14), "purple": (148, 103, 189), "black": (20, 20, 20)}
SHAPES = ["circle", "square", "triangle", "cross"]
PLACES = ["top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right"]
# Without those that some fonts draw alike (0 O o, I l), and without the small letters that are the capital in small: of a c alone nobody
# could say which one it is.
LETTERS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabdefghijkmnqrty"
TRAIN_SIZES, TEST_SIZES = (18, 20, 22, 24, 26), (19, 21, 23, 25)
STRETCHED = 0.6  # share of the training


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
    def __init__(self, options):
        if options.digits:
            data = np.load(options.digits)
            images, target = data["images"], data["target"]
        else:
            from sklearn.datasets import load_digits
            images, target = load_digits().images, load_digits().target
        ink = (images * (255 / 16)).astype(np.uint8)
        # The set comes sheet by sheet of one writer, about 130 digits each. Whole sheets are held out: other hands, not other digits of the same hand.
        sheet = np.arange(len(ink)) // 130
        held = np.isin(sheet % 5, [4])
        self.parts = {"train": (ink[~held], target[~held]), "test": (ink[held], target[held])}

    def make(self, split, index, rng):
        ink, target = self.parts[split]
        i = index % len(ink)
        changed = split == "train" and index >= len(ink)
        cells = ink[i]
        if changed:
            cells = np.clip(cells * rng.uniform(0.8, 1.2) + np.random.default_rng(rng.getrandbits(32)).normal(0, 10, cells.shape) * (cells > 0), 0, 255).astype(np.uint8)
        image = Image.fromarray(cells).resize((20, 20), Image.Resampling.BICUBIC)
        canvas = Image.new("L", (28, 28))
        canvas.paste(image, (4, 4))
        if changed:
            turn = math.radians(rng.uniform(-14, 14))
            wide, high, lean = rng.uniform(0.85, 1.18), rng.uniform(0.85, 1.18), rng.uniform(-0.2, 0.2)
            dx, dy = rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)
            c, s = math.cos(turn), math.sin(turn)
            # Output to input, about the centre.
            a, b, d, e = c / wide, s / wide + lean, -s / high, c / high
            canvas = canvas.transform((28, 28), Image.Transform.AFFINE, (a, b, 14 - a * (14 + dx) - b * (14 + dy), d, e, 14 - d * (14 + dx) - e * (14 + dy)),
                                      Image.Resampling.BICUBIC)
        return sample("digits", [picture(canvas)], "digit:", str(int(target[i])))

    def count(self, split, wanted):
        return min(wanted, len(self.parts["test"][0])) if split == "test" else wanted


# Rendered text ---------------------------------------------------------------------------------------------------------------


class Read:
    task = "read"

    def __init__(self, options):
        self.fonts = options.font_files[:-1] or options.font_files
        self.cache = {}

    def font(self, path, size):
        if (path, size) not in self.cache:
            self.cache[path, size] = ImageFont.truetype(path, size)
        return self.cache[path, size]

    def make(self, split, index, rng):
        text = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 12)))
        font = self.font(rng.choice(self.fonts), rng.choice(TRAIN_SIZES if split == "train" else TEST_SIZES))
        left, top, right, bottom = font.getbbox(text)
        if split == "train" and rng.random() < STRETCHED:
            return sample(self.task, [picture(self.stretched(text, font, rng))], "text:", text)
        width = math.ceil((right - left + 6) / 28) * 28
        image = Image.new("L", (width, 28), 255)
        x = 2 + rng.random() * max(0, width - (right - left) - 4)
        y = 1 + rng.random() * max(0, 26 - (bottom - top))
        ImageDraw.Draw(image).text((x - left, y - top), text, fill=rng.randint(0, 60), font=font)
        return sample(self.task, [picture(image)], "text:", text)

    def stretched(self, text, font, rng):
        left, top, right, bottom = font.getbbox(text)
        ink = Image.new("L", (right - left + 2, bottom - top + 2), 255)
        ImageDraw.Draw(ink).text((1 - left, 1 - top), text, fill=rng.randint(0, 60), font=font)
        ink = ink.resize((round(ink.width * rng.uniform(0.9, 1.12)), min(28, round(ink.height * rng.uniform(0.9, 1.12)))), Image.Resampling.BICUBIC)
        image = Image.new("L", (math.ceil((ink.width + 4) / 28) * 28, 28), 255)
        image.paste(ink, (rng.randint(0, image.width - ink.width), rng.randint(0, 28 - ink.height)))
        return image

    def count(self, _, wanted):
        return wanted


class Font(Read):
    task = "font"

    def __init__(self, options):
        super().__init__(options)
        self.fonts = options.font_files[-1:]

    def count(self, split, wanted):
        return wanted if split == "test" else 0


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


TASKS = {"digits": Digits, "read": Read, "font": Font, "count": Count, "locate": Locate, "chart": Chart, "order": Order}


CHUNK = 500  # lines a worker makes at once


class Maker:
    """Lines begin .. end of a task, in a process of its own."""

    def __init__(self, options):
        self.options = options
        self.makers = {}

    def __call__(self, job):
        task, split, begin, end = job
        if task not in self.makers:
            self.makers[task] = TASKS[task](self.options)
        lines = []
        for i in range(begin, end):
            rng = random.Random(f"{self.options.seed} {task} {split} {i}")
            lines.append(json.dumps(self.makers[task].make(split, i, rng)) + "\n")
        return "".join(lines)


def start_worker(options):
    global make_lines
    make_lines = Maker(options)


def work(job):
    return make_lines(job)


def number_of_lines(text):
    task, _, number = text.partition("=")
    if task not in TASKS or not number.isdigit():
        raise argparse.ArgumentTypeError(f"expected TASK=LINES, got {text}")
    return task, int(number)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--count", type=int, default=12000, help="training lines a task")
    parser.add_argument("--more", nargs="+", type=number_of_lines, default=[], metavar="TASK=LINES", help="training lines of one task")
    parser.add_argument("--test", type=int, default=400, help="held-out lines a task")
    parser.add_argument("--fonts", default="/usr/share/fonts/truetype/dejavu/DejaVu*.ttf", help="pattern of the files; the last is held out")
    parser.add_argument("--digits", help="the digits as .npz (images, target), where there is no scikit-learn")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pattern = pathlib.Path(options.fonts)
    options.font_files = sorted(str(p) for p in pattern.parent.glob(pattern.name) if "Math" not in p.name)
    if {"read", "font"} & set(options.tasks) and not options.font_files:
        parser.error(f"no fonts at {options.fonts} (Debian: fonts-dejavu)")
    return options


def main():
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(options.tasks, options.count) | {t: n for t, n in options.more if t in options.tasks}
    with multiprocessing.Pool(options.jobs, start_worker, (options,)) as pool:
        for split in ("train", "test"):
            jobs = []
            for task in options.tasks:
                lines = TASKS[task](options).count(split, counts[task] if split == "train" else options.test)
                jobs += [(task, split, begin, min(begin + CHUNK, lines)) for begin in range(0, lines, CHUNK)]
            with open(options.out / f"{split}.jsonl", "w") as file:
                file.writelines(pool.imap(work, jobs))
    words = ["image 28x28 56x56 84x84 112x112 video digit: text: count: largest: order: 00:00:00.000", *PLACES,
             *(f"{c} {s}:" for c in COLOURS for s in SHAPES)]
    (options.out / "text.txt").write_text("\n".join(words * 20) + "\n")


if __name__ == "__main__":
    main()
