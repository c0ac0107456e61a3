"""Godwit against the independent PyTorch reference (python/reference): logits, loss and the gradient of every parameter, for every form of the model.

Godwit computes in fp32 on a packed batch, the reference in fp64, each document alone, with the recurrence. Routing is compared free (each side
chooses) and pinned (the reference takes Godwit's choices): top-k is discrete, so a rounding where two experts tie may flip a choice.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch

from small_models import FORMS, make_model
from reference import Kimi
from reference.weights import read_file

BUILD = pathlib.Path(os.environ["GODWIT_BUILD"])
LENGTHS = [65, 1, 17, 130]  # around a chunk of 64, and a document without a target

DOCUMENTS = 4  # their seed: documents without a token that amplifies every rounding (docs/fidelity.md, "Ill-conditioned tokens")
AMPLIFYING = 7  # the seed of documents with one, in this form
AMPLIFYING_FORM = "k3, every sub-layer a source"

# Relative to the largest entry of a tensor. Godwit computes in fp32; so run, the reference itself is up to 6e-6 (logits) and 1.7e-5 (gradients) away
# from fp64, and Godwit's gradients up to 2.1e-5.
LOGITS_LIMIT = 1e-5
GRADIENT_LIMIT = 5e-5
FLIP_MARGIN = 1e-5  # two scores closer than this may swap


def relative(actual, expected):
    return ((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def documents(vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator) for n in LENGTHS]


def reference_run(config, weights, docs, routes=None):
    """Logits [T, V], routes, margins, loss and gradients over the documents; `routes` pins."""
    leaves = {name: value.clone().requires_grad_(not name.endswith("e_score_correction_bias")) for name, value in weights.items()}
    model, logits, chosen, margins, nats, begin = Kimi(config, leaves), [], {}, {}, [], 0
    for doc in docs:
        pinned = None if routes is None else {layer: r[begin:begin + len(doc)] for layer, r in routes.items()}
        out = model.forward(doc[None], pinned)
        logits.append(out.logits[0])
        nats.append(torch.nn.functional.cross_entropy(out.logits[0, :-1], doc[1:], reduction="sum"))
        for layer in out.routes:
            chosen.setdefault(layer, []).append(out.routes[layer])
            margins.setdefault(layer, []).append(out.margins[layer])
        begin += len(doc)
    loss = sum(nats) / sum(len(doc) - 1 for doc in docs)
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    grads = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
    grads = {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(names, grads)}
    join = lambda parts: {layer: torch.cat(x) for layer, x in parts.items()}
    return torch.cat(logits).detach(), join(chosen), join(margins), loss.item(), grads


def godwit_run(directory, docs):
    ids, out = directory / "documents.json", directory / "gradients.out"
    ids.write_text(json.dumps([doc.tolist() for doc in docs]))
    subprocess.run([BUILD / "godwit_gradients", directory, ids, out], check=True)
    result = read_file(out)
    routes = {int(name.split(".")[1]): r.long().sort(-1).values for name, r in result.items() if name.startswith("routes.")}
    grads = {name.removeprefix("grad."): g for name, g in result.items() if name.startswith("grad.")}
    return result["logits"], routes, result["loss"].item(), grads


class Reference(unittest.TestCase):
    def compare(self, form):
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch)
            config, weights = make_model(form, directory)
            docs = documents(config.vocab_size, seed=DOCUMENTS)
            logits, routes, loss, grads = godwit_run(directory, docs)
            free = reference_run(config, weights, docs)
            pinned = reference_run(config, weights, docs, routes)

        flipped = torch.cat([(routes[layer] != free[1][layer]).any(-1) for layer in routes])
        margin = torch.cat([free[2][layer] for layer in routes])
        self.assertTrue(bool((margin[flipped] < FLIP_MARGIN).all()), f"{form}: a choice with a clear margin flipped")
        errors = {name.removesuffix(".weight"): relative(grads.pop(name if name in grads else name + ".weight").reshape(expected.shape), expected)
                  for name, expected in pinned[4].items()}
        worst = max(errors, key=errors.get)
        print(f"{form}: logits {relative(logits, pinned[0]):.1e}, loss {abs(loss - pinned[3]):.1e}, {len(errors)} gradients, worst "
              f"{errors[worst]:.1e} ({worst}); {int(flipped.sum())} of {len(flipped)} choices flipped; free routing: logits {relative(logits, free[0]):.1e}")
        self.assertFalse(grads, "gradients of parameters that the reference does not know")
        self.assertLess(relative(logits, pinned[0]), LOGITS_LIMIT)
        self.assertLess(abs(loss - pinned[3]), 1e-6 * abs(pinned[3]) + 1e-6)
        self.assertLess(errors[worst], GRADIENT_LIMIT, worst)
        if not flipped.any():
            self.assertLess(relative(logits, free[0]), LOGITS_LIMIT)

    def test_a_document_that_amplifies_roundings(self):
        """There Godwit is as near to fp64 as the reference in fp32; twice its error, because which roundings meet is chance."""
        with tempfile.TemporaryDirectory() as scratch:
            directory = pathlib.Path(scratch)
            config, weights = make_model(AMPLIFYING_FORM, directory)
            docs = documents(config.vocab_size, seed=AMPLIFYING)
            logits, routes, _, grads = godwit_run(directory, docs)
            exact = reference_run(config, weights, docs, routes)
            single = reference_run(config, {name: value.float() for name, value in weights.items()}, docs, routes)
        ours = max(relative(grads[name if name in grads else name + ".weight"].reshape(g.shape), g) for name, g in exact[4].items())
        theirs = max(relative(single[4][name], g) for name, g in exact[4].items())
        print(f"amplifying document: gradients of Godwit {ours:.1e}, of the reference in fp32 {theirs:.1e}")
        self.assertGreater(theirs, GRADIENT_LIMIT, "the document amplifies nothing")
        self.assertLess(ours, 2 * theirs)
        self.assertLess(relative(logits, exact[0]), LOGITS_LIMIT)

    def test_every_form(self):
        for form in FORMS:
            with self.subTest(form):
                self.compare(form)

    def test_godwit_logits(self):
        """The command line: whole, and in pieces on a carried state."""
        for form in FORMS:
            with self.subTest(form), tempfile.TemporaryDirectory() as scratch:
                directory = pathlib.Path(scratch)
                config, weights = make_model(form, directory, seed=1)
                ids = torch.randint(config.vocab_size, (80,), generator=torch.Generator().manual_seed(3))
                expected = Kimi(config, weights).forward(ids[None]).logits[0]
                (directory / "ids.json").write_text(json.dumps(ids.tolist()))
                for split in ([], ["--split", "64,16"], ["--split", "17,1,1,1,30,29,1"]):
                    out = directory / "logits.out"
                    subprocess.run([BUILD / "godwit", "logits", "--model", directory, "--tokens", directory / "ids.json", "--out", out, *split],
                                   check=True, stderr=subprocess.DEVNULL)
                    self.assertLess(relative(read_file(out)["logits"], expected), LOGITS_LIMIT, split)

    def test_fast_mode(self):
        """The reference's own fast form (chunks, batched experts) is the same model: it serves as the peer of the training step."""
        for form in FORMS:
            with self.subTest(form), tempfile.TemporaryDirectory() as scratch:
                config, weights = make_model(form, scratch, seed=2)
                ids = torch.randint(config.vocab_size, (2, 130), generator=torch.Generator().manual_seed(4))
                grads = []
                for mode in ("exact", "fast"):
                    leaves = {k: v.clone().requires_grad_() for k, v in weights.items()}
                    out = Kimi(config, leaves, mode).forward(ids)
                    grads.append((out.logits, *torch.autograd.grad(out.logits.square().mean(), list(leaves.values()), allow_unused=True)))
                for exact, fast in zip(*grads):
                    if exact is not None:
                        self.assertLess(relative(fast.detach(), exact.detach()), 1e-9)


if __name__ == "__main__":
    unittest.main()
