"""One training step of a model by Godwit and by plain PyTorch: time, loss and every gradient. Prints a Markdown table.

    .venv/bin/python3 bench/train_peer.py [--model nano] [--context 256] [--sequences 16] [--threads 2] [--rounds 3]

Needs the programs `godwit` and `godwit_gradients` in build/. Both sides start from the same weights and take the same tokens, in fp32. The peer is
python/reference in its fast mode (chunked KDA, all experts of a layer in three batched products, PyTorch's fused attention, eager), with the same
optimiser: Muon per head and per expert in batches of equal shapes, fused AdamW for the rest. Godwit's step is that of `godwit train`, by the times in
its metrics (whatever a step does is in it: data, router balance, QK-Clip, metrics); the peer's is forward, backward, clipping and optimiser only.
The two are run in turns, and the best step of each counts. CPU seconds (of all threads) say the same where other programs fill the machine: of the peer's
best step, and for Godwit of a run of many steps less a run of one, by the steps between them.
"""

import argparse
import json
import math
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402

from reference import Config, Kimi, load_directory, save_directory  # noqa: E402
from reference.shapes import parameter_shapes  # noqa: E402
from reference.weights import read_file  # noqa: E402

NS = (3.4445, -4.7750, 2.0315)


def initial_weights(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("norm.weight"):
            out[name] = torch.ones(shape)
        elif name.endswith(("A_log", "res_proj.weight", "e_score_correction_bias")):
            out[name] = torch.zeros(shape)
        elif name.endswith("dt_bias"):  # softplus(dt_bias) log-uniform in [1e-3, 1e-1]
            dt = torch.exp(torch.rand(shape, generator=generator) * math.log(100) + math.log(1e-3))
            out[name] = dt + torch.log(-torch.expm1(-dt))
        else:
            out[name] = 0.02 * torch.randn(shape, generator=generator)
    return out


class Optimizer:
    """Muon (Newton-Schulz on every matrix, of attention's q, k, v on every head) and AdamW. Matrices of one shape go through together."""

    def __init__(self, config, leaves, muon_lr=2e-3, adamw_lr=2e-3, decay=0.1):
        self.lr, self.decay, self.groups = muon_lr, decay, {}
        heads = {"linear": config.linear_attn_config["num_heads"], "full": config.num_attention_heads}
        rest = []
        for name, leaf in leaves.items():
            if not leaf.requires_grad:
                continue
            if leaf.dim() < 2 or any(part in name for part in ("conv1d", "embed_tokens", "lm_head", "res_proj")):
                rest.append(leaf)
                continue
            split = 1
            if name.endswith((".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".q_b_proj.weight", ".kv_b_proj.weight")):
                split = heads["full" if "_b_" in name else "linear"]
            view = leaf if leaf.dim() == 3 else leaf.unflatten(0, (split, -1))
            self.groups.setdefault(view.shape[1:], []).append((leaf, split, torch.zeros_like(view)))
        self.adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=decay, fused=True)
        self.leaves = [leaf for leaf in leaves.values() if leaf.requires_grad]

    @torch.no_grad()
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.leaves, 1.0, foreach=True)
        self.adamw.step()
        for shape, members in self.groups.items():
            updates = []
            for leaf, split, momentum in members:
                grad = leaf.grad.view_as(momentum)
                momentum.mul_(0.95).add_(grad)
                updates.append(grad.add(momentum, alpha=0.95))
            x = torch.cat(updates)
            wide = shape[0] <= shape[1]
            x = x if wide else x.mT
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=NS[1], alpha=NS[2]), x, beta=NS[0])
            x = x if wide else x.mT
            scale = self.lr * 0.2 * max(shape) ** 0.5
            for (leaf, split, momentum), update in zip(members, x.split([m.shape[0] for _, _, m in members])):
                leaf.mul_(1 - self.lr * self.decay).add_(update.reshape(leaf.shape), alpha=-scale)


def documents(config, count, length):
    """`count` documents of length - 1 bytes of text; packing closes each with an end-of-document id."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    text = bytes(b if b < 128 else 63 for b in text)
    if len(text) < count * (length - 1):
        text *= -(-count * (length - 1) // len(text))
    return [text[i * (length - 1):(i + 1) * (length - 1)].decode() for i in range(count)]


def godwit(*args, threads):
    result = subprocess.run([ROOT / "build" / args[0], *map(str, args[1:])], capture_output=True, text=True,
                            env={"OMP_NUM_THREADS": str(threads), "PATH": "/usr/bin:/bin", "OMP_WAIT_POLICY": "passive"})
    if result.returncode:
        sys.exit(result.stderr)
    return result.stdout


def prepare(scratch, a):
    """Model directory, packed data and recipe; returns config, weights and the ids [sequences, context]."""
    source = ROOT / "configs/models" / (a.model + ".json")
    config = Config.read(source)
    weights = initial_weights(config)
    save_directory(scratch / "model", json.loads(source.read_text()), weights)
    docs = documents(config, a.sequences, a.context)
    (scratch / "text.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in docs))
    godwit("godwit", "data", "pack", scratch / "text.jsonl", "--out", scratch / "data", threads=a.threads)
    end = json.loads((scratch / "data/manifest.json").read_text())["eos_id"]
    ids = torch.tensor([[*d.encode(), end] for d in docs])
    (scratch / "ids.json").write_text(json.dumps(ids.tolist()))
    (scratch / "recipe.toml").write_text(f"""out = "{scratch}/run"
init = "{scratch}/model"
[[data]]
path = "{scratch}/data"
[train]
tensorboard = false
[[stage]]
context = {a.context}
batch_tokens = {a.context * a.sequences}
steps = {a.steps}
""")
    return config, weights, ids


def godwit_run(scratch, steps, a):
    """Trains `steps` steps; returns the CPU seconds of the process."""
    shutil.rmtree(scratch / "run", ignore_errors=True)
    used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    before = used()
    godwit("godwit", "train", scratch / "recipe.toml", "--threads", a.threads, "--set", f"stage.0.steps={steps}", threads=a.threads)
    return used() - before


def godwit_steps(scratch, a):
    """The first loss, seconds of each step, CPU seconds of a step."""
    one = godwit_run(scratch, 1, a)
    cpu = (godwit_run(scratch, a.steps, a) - one) / (a.steps - 1)
    rows = [json.loads(line) for line in (scratch / "run/metrics.jsonl").read_text().splitlines()]
    return rows[0]["loss"], [a.context * a.sequences / row["tokens_per_s"] for row in rows], cpu


def peer_steps(config, weights, ids, a):
    leaves = {name: value.clone().requires_grad_(not name.endswith("e_score_correction_bias")) for name, value in weights.items()}
    optimizer, model, times = Optimizer(config, leaves), Kimi(config, leaves, "fast"), []
    for _ in range(a.steps):
        begin, cpu = time.perf_counter(), time.process_time()
        for leaf in leaves.values():
            leaf.grad = None
        logits = model.forward(ids).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - begin, middle - begin, time.process_time() - cpu))
    return times


def compare_gradients(config, weights, ids, scratch, a):
    """Godwit's against the peer's with its choices of experts; and the share of choices that differ when each chooses."""
    godwit("godwit_gradients", scratch / "model", scratch / "ids.json", scratch / "out.safetensors", threads=a.threads)
    ours = read_file(scratch / "out.safetensors")
    routes = {int(k.split(".")[1]): v.long().sort(-1).values for k, v in ours.items() if k.startswith("routes.")}
    leaves = {name: value.clone().requires_grad_(not name.endswith("e_score_correction_bias")) for name, value in weights.items()}
    model = Kimi(config, leaves, "fast")
    with torch.no_grad():
        free = model.forward(ids).routes
    flips = torch.cat([(free[layer] != routes[layer]).any(-1) for layer in routes])
    logits = model.forward(ids, routes).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    errors = {}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            mine = ours["grad." + name if "grad." + name in ours else f"grad.{name}.weight"].reshape(leaf.shape)
            # A parameter whose gradient is nothing but rounding (a query whose sources are equal) counts as agreeing.
            errors[name] = ((mine - leaf.grad).norm() / leaf.grad.norm().clamp(min=1e-9)).item()
    return ours["loss"].item(), loss.item(), errors, flips


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="a round")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        config, weights, ids = prepare(scratch, a)
        our_loss, peer_loss, errors, flips = compare_gradients(config, weights, ids, scratch, a)
        worst = sorted(errors, key=errors.get)[::-1]
        print(f"loss {our_loss:.6f} and {peer_loss:.6f}; {len(errors)} gradients, relative difference (2-norm): median "
              f"{errors[worst[len(worst) // 2]]:.1e}, worst {errors[worst[0]]:.1e} ({worst[0]}); choices of experts that differ: "
              f"{int(flips.sum())} of {len(flips)}\n")
        ours, our_cpu, peers = [], [], []
        for _ in range(a.rounds):
            first_loss, times, cpu = godwit_steps(scratch, a)
            ours += times
            our_cpu.append(cpu)
            peers += peer_steps(config, weights, ids, a)
        if abs(first_loss - our_loss) > 1e-4:
            sys.exit(f"godwit train saw another batch: its first loss is {first_loss}, not {our_loss}")
    total, passes, peer_cpu = (min(column) for column in zip(*peers))
    mine, cpu = min(ours), min(our_cpu)
    tokens = a.context * a.sequences
    print(f"| one step of `{a.model}`, {a.sequences} x {a.context} tokens, {a.threads} threads | s | tokens/s | CPU s |\n|---|---|---|---|")
    print(f"| PyTorch {torch.__version__}: forward and backward | {passes:.2f} | {tokens / passes:.0f} | |")
    print(f"| PyTorch: the whole step | {total:.2f} | {tokens / total:.0f} | {peer_cpu:.2f} |")
    print(f"| godwit train: the whole step | {mine:.2f} | {tokens / mine:.0f} | {cpu:.2f} |")
    print(f"\nGodwit is {total / mine:.2f} times as fast by the clock, and takes 1/{peer_cpu / cpu:.2f} of the CPU time.")


if __name__ == "__main__":
    main()
