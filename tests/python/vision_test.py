"""The vision tower and the whole multimodal model against the independent PyTorch one: vectors, logits, loss and the gradient of every parameter.

Godwit computes in fp32 with all pictures packed, the reference in fp64, one picture after another.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch

from small_models import K3
from reference import Config, Kimi, Tower, VisionConfig, save_directory
from reference.shapes import random_weights
from reference.vision import vision_shapes
from reference.weights import read_file, write_file

BUILD = pathlib.Path(os.environ["GODWIT_BUILD"])
VISION = {"patch_size": 3, "init_pos_emb_height": 6, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "vt_num_hidden_layers": 2, "vt_hidden_size": 20,
          "vt_intermediate_size": 28, "vt_num_attention_heads": 3, "qkv_hidden_size": 24, "merge_kernel_size": [2, 2], "text_hidden_size": K3["hidden_size"]}
MEDIA = 55  # the last id of the vocabulary
# Neighbours of one size and of other sizes, the grid's own size, one token, frames in between.
GRIDS = [(1, 2, 2), (1, 4, 6), (1, 4, 6), (3, 2, 4), (1, 6, 8), (1, 2, 12), (4, 2, 2), (2, 10, 6)]
# Relative to the largest entry, as in reference_test.py: fp32 beside fp64.
VECTOR_LIMIT, LOGITS_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-5, 1e-4


def relative(actual, expected):
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def make(directory, **options):
    vision = VISION | {k: v for k, v in options.items() if k.startswith("pos_emb")}
    root = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "float32", "tie_word_embeddings": False,
            "media_placeholder_token_id": MEDIA, "text_config": K3, "vision_config": vision,
            "godwit": {k: v for k, v in options.items() if k == "vision_time"}}
    save_directory(directory, root, {})
    config, vision = Config.read(directory), VisionConfig.read(directory)
    weights = random_weights(config, seed=5)
    generator = torch.Generator().manual_seed(6)
    for name, shape in vision_shapes(vision).items():
        x = torch.randn(shape, generator=generator)
        fan = x[0].numel() if x.dim() > 1 else 1
        weights[name] = (1 + 0.2 * x if "norm" in name else x if "pos_emb" in name else x / fan**0.5).double()
    stored = {k: torch.nn.functional.pad(v, (0, 128 - len(v))) if k.endswith("A_log") else v for k, v in weights.items()}
    save_directory(directory, root, stored)
    return config, vision, weights


def documents(generator):
    """Pictures anywhere: at the beginning, two side by side, at the end; and a document of text alone."""
    text = lambda n: torch.randint(MEDIA, (n,), generator=generator).tolist()
    pads = [(rows * columns // 4) * [MEDIA] for _, rows, columns in GRIDS]
    return [pads[0] + text(7) + pads[1] + pads[2] + text(3), text(20), text(1) + pads[3] + text(2) + pads[4] + text(30) + pads[5],
            pads[6] + text(1) + pads[7] + text(1)]


class Vision(unittest.TestCase):
    def compare(self, **options):
        generator = torch.Generator().manual_seed(8)
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch)
            config, vision, weights = make(directory, **options)
            docs = documents(generator)
            pixels = torch.rand(sum(t * r * c for t, r, c in GRIDS), 3, 3, 3, generator=generator) * 2 - 1
            (directory / "ids.json").write_text(json.dumps(docs))
            write_file(directory / "pictures", {"patches": pixels.flatten(1), "grids": torch.tensor(GRIDS)})
            subprocess.run([BUILD / "godwit_gradients", directory, directory / "ids.json", directory / "out", directory / "pictures"], check=True)
            got = read_file(directory / "out")

        leaves = {name: value.clone().requires_grad_(not name.endswith("e_score_correction_bias")) for name, value in weights.items()}
        vectors = Tower(vision, leaves).forward(pixels.double(), GRIDS)
        self.assertLess(relative(got["media"], vectors), VECTOR_LIMIT)
        model, logits, nats, token, vector = Kimi(config, leaves), [], [], 0, 0
        for doc in docs:
            ids = torch.tensor(doc)
            used = int((ids == MEDIA).sum())
            routes = {int(n.split(".")[1]): r[token:token + len(doc)].long().sort(-1).values for n, r in got.items() if n.startswith("routes.")}
            media = (MEDIA, vectors[vector:vector + used]) if used else None
            out = model.forward(ids[None], routes, media).logits[0]
            logits.append(out)
            nats.append(torch.nn.functional.cross_entropy(out[:-1], ids[1:], reduction="sum"))
            token, vector = token + len(doc), vector + used
        loss = sum(nats) / sum(len(doc) - 1 for doc in docs)
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        grads = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)  # a query over one source decides nothing
        grads = {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(names, grads)}
        self.assertLess(relative(got["logits"], torch.cat(logits)), LOGITS_LIMIT)
        self.assertLess(abs(got["loss"].item() - loss.item()), 1e-6 * loss.item() + 1e-6)
        worst, errors = "", {}
        for name, expected in grads.items():
            actual = got[f"grad.{name}" if f"grad.{name}" in got else f"grad.{name}.weight"]
            errors[name] = relative(actual.reshape(expected.shape), expected)
            worst = max(errors, key=errors.get)
        print(f"{options or 'as released'}: vectors {relative(got['media'], vectors):.1e}, logits {relative(got['logits'], torch.cat(logits)):.1e}, "
              f"{len(errors)} gradients, worst {errors[worst]:.1e} ({worst})")
        self.assertLess(errors[worst], GRADIENT_LIMIT, worst)

    def test_as_released(self):
        self.compare()

    def test_frames_apart(self):
        self.compare(vision_time="factorised")

    def test_bicubic(self):
        self.compare(pos_emb_interpolation_mode="bicubic")


if __name__ == "__main__":
    unittest.main()
