#!/usr/bin/env python3
"""Reinforcement learning against its control, over seeds: fine-tunes on an environment's scripted expert, trains each arm from
there, measures all of them on the same unseen tasks, and prints one table a study.

    scripts/rl_study.py calculator [grid ...] [--seeds 1,2,3] [--minutes 5] [--jobs 1] [--out runs/studies]

A job has --threads cores (taskset); --jobs of them run side by side. Models of this size gain nothing from a second thread. What is there already is not computed again, so an
interrupted study goes on. Results: OUT/<study>/results.json and table.md. Python's standard library only.

--base DIR: fine-tuning starts from the model there, in a quarter of its steps, and not from nothing. Where there is none it is made: on the calculator,
then on a mix of all environments. A seed then stands for demonstrations, their order, tasks and draws, and not for initial weights too.
"""
import argparse
import collections
import concurrent.futures
import heapq
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

GODWIT = os.environ.get("GODWIT", "build/godwit")

# demos: what the scripted expert plays (environment, episodes, options), imperfect on purpose. sft: changes of the recipe of fine-tuning. arms:
# of configs/recipes/rl-<study>.toml (recipe: of another), rl: changes for all of them. steps: of a run, in the place of minutes: the same on every
# machine. eval: what of the environment is measured. context: tokens of an episode there. minutes, tasks: at most.
CALCULATOR = {"give_up": 0.5, "failure": 0.3, "twice": 0.25}
LONGER = "sft, as long"  # the control that gets the same time: fine-tuning goes on
# --base: (environment, episodes, options) and steps, one fine-tuning after the other; the tokenizer is the first one's.
BASE = [
    ([("calculator", 4000, CALCULATOR)], 300),
    ([("calculator", 2600, CALCULATOR), ("calculator", 1200, {"steps": 1, "failure": 0, "twice": 0.6}),
      ("grid", 700, {"width": 4, "height": 2, "turns": 10, "wander": 0.3}), ("notes", 500, {"facts": 2, "gap": 2}),
      ("notes", 350, {"facts": 2, "gap": 7}), ("notes", 40, {"facts": 2, "gap": 47}), ("log_search", 700, {"lines": 200, "failures": 4})], 934),
]
STUDIES = {
    "calculator": {
        "demos": [("calculator", 4000, CALCULATOR)],
        "arms": {"rl": [], LONGER: None},
        "eval": {"": {"failure": 0.3}},
    },
    # Quantisation-aware training against rounding afterwards, from the calculator's models.
    "mxfp4": {
        "folder": "calculator",
        "recipe": "calculator",
        "demos": [("calculator", 4000, CALCULATOR)],
        "arms": {"rl": [], "rl, MXFP4-aware": ["train.mxfp4_experts=true"]},
        "weights": [None, "mxfp4"],
        "eval": {"": {"failure": 0.3}},
    },
    # The expert makes most calls twice and has turns enough for it, so that only the efficiency reward speaks against it.
    "efficiency": {
        "recipe": "calculator",
        "demos": [("calculator", 3000, {"steps": 1, "failure": 0, "twice": 0.6})],
        "vocab": 320,
        "sft": ["stage.0.steps=200"],
        "rl": ["environment.0.options={steps = 1, failure = 0}"],
        "minutes": 2,
        "arms": {"rl": [], "rl, efficiency 1": ["reward.efficiency=1"]},
        "eval": {"": {"steps": 1, "failure": 0}},
    },
    # A larger grid than the demonstrations': the goal is rarely reached, but every move can be judged.
    "process": {
        "recipe": "grid",
        "demos": [("grid", 3000, {"width": 4, "height": 2, "turns": 10, "wander": 0.3})],
        "rl": ["environment.0.options={width = 5, height = 3, turns = 12}"],
        "minutes": 3,
        "arms": {"rl": [], "rl, process 1": ["reward.process=1"]},
        "eval": {"": {"width": 5, "height": 3, "turns": 12}},
    },
    "grid": {
        "demos": [("grid", 3000, {"width": 4, "height": 2, "turns": 10, "wander": 0.3})],
        "minutes": 2,
        "arms": {"rl": []},
        "eval": {"": {"width": 4, "height": 2, "turns": 10}},
    },
    # Learned where they are asked for at turn 10; measured at turn 50 too.
    "notes": {
        "demos": [("notes", 1200, {"facts": 2, "gap": 2}), ("notes", 800, {"facts": 2, "gap": 7}), ("notes", 250, {"facts": 2, "gap": 47})],
        "sft": ["stage.0.context=2048"],
        "rl": ["rollout.groups=6"],
        "minutes": 4,
        "tasks": 64,
        "arms": {"rl": []},
        "eval": {"asked at turn 10": {"facts": 2, "gap": 7}, "asked at turn 50": {"facts": 2, "gap": 47}},
        "context": 6144,
    },
    "files": {
        "demos": [("files", 600, {"guess": 0.5, "submissions": 1})],
        "vocab": 384,
        "holdout": 0.2,
        "minutes": 1.6,
        "sft": ["stage.0.steps=120"],
        "arms": {"rl": []},
        "eval": {"": {"submissions": 1}},
    },
    "sql": {
        "demos": [("sql", 4000, {"give_up": 0.5, "failure": 0.3})],
        "vocab": 384,
        "minutes": 3,
        "arms": {"rl": []},
        "eval": {"": {"failure": 0.3}},
    },
    "log-find": {
        "demos": [("log_search", 3000, {"lines": 200, "failures": 4})],
        "vocab": 320,
        "minutes": 3,
        "arms": {"rl": []},
        "eval": {"": {"lines": 200, "failures": 4}},
    },
    # Without the tool: the whole log is the observation.
    "log-read": {
        "recipe": "log-find",
        "demos": [("log_search", 2000, {"lines": lines, "search": False, "failures": 2}) for lines in (6, 12, 24)],
        "vocab": 320,
        "minutes": 3,
        "rl": ["environment.0.options={lines = 12, failures = 2, search = false}"],
        "arms": {"rl": []},
        "eval": {f"{lines} lines": {"lines": lines, "search": False, "failures": 2} for lines in (6, 12, 24)},
    },
    "reading": {
        "demos": [("reading", 6000, {"slip": 0.3})],
        "vocab": 256,
        "sft": ["model.override.vision_config={patch_size = 14, init_pos_emb_height = 4, init_pos_emb_width = 4, vt_num_hidden_layers = 2, "
                "vt_hidden_size = 96, vt_intermediate_size = 256, vt_num_attention_heads = 4, qkv_hidden_size = 128}",
                "stage.0.context=256", "stage.0.batch_tokens=2048", "stage.0.steps=700", "optimizer.muon_lr=0.02", "optimizer.adamw_lr=0.01"],
        "arms": {"rl": []},
        "eval": {"": {}},
    },
    # A form of three minutes, to see that everything learns; and one of seconds, to see that everything runs.
    "short": {
        "recipe": "files",
        "demos": [("files", 400, {"guess": 0.5, "submissions": 1})],
        "vocab": 320,
        "holdout": 0.2,
        "sft": ["stage.0.steps=150", "stage.0.batch_tokens=4096"],
        "rl": ["rollout.groups=6"],
        "steps": 8,
        "arms": {"rl": []},
        "eval": {"": {"submissions": 1}},
    },
    "seconds": {
        "recipe": "calculator",
        "demos": [("calculator", 40, CALCULATOR)],
        "vocab": 300,
        "holdout": 0.3,
        "sft": ["stage.0.steps=2", "stage.0.batch_tokens=2048"],
        "rl": ["rollout.groups=2", "rollout.samples=2", "rollout.turn_tokens=24", "reward.overlong_limit=20", "reward.overlong_buffer=20"],
        "minutes": 0.02,
        "steps": 2,
        "arms": {"rl": [], "rl, MXFP4-aware": ["train.mxfp4_experts=true"], LONGER: None},
        "weights": [None, "mxfp4"],
        "eval": {"": {"failure": 0.3}},
    },
}
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t, by degrees of freedom


class Cores:
    """Sets of cores, given to those who wait by priority, the lowest number first."""

    def __init__(self, sets):
        self.free, self.waiting, self.count = list(sets), [], 0
        self.changed = threading.Condition()

    def take(self, priority):
        with self.changed:
            self.count += 1
            me = (priority, self.count)
            heapq.heappush(self.waiting, me)
            while self.waiting[0] != me or not self.free:
                self.changed.wait()
            heapq.heappop(self.waiting)
            self.changed.notify_all()
            return self.free.pop()

    def give(self, cores):
        with self.changed:
            self.free.append(cores)
            self.changed.notify_all()


class Runner:
    def __init__(self, args):
        self.args = args
        allowed = sorted(os.sched_getaffinity(0))
        self.cores = Cores(tuple(allowed[(args.first_core + args.threads * i + k) % len(allowed)] for k in range(args.threads)) for i in range(args.jobs))
        self.locks = collections.defaultdict(threading.Lock)  # of what two studies share, by its place
        self.running = set()
        self.failed = False
        self.late = False  # no more commands: tables are made of what is there
        self.end = time.time() + args.limit if args.limit else math.inf

    def run(self, name, log, command):
        """One command of a study on a job's cores; its output goes behind `log`. `command` may be a function that makes it when its turn has come."""
        cores = self.cores.take(list(self.args.studies).index(name))
        try:
            words = [str(w) for w in (command() if callable(command) else command)]
            if self.args.jobs > 1 or self.args.first_core:
                words = ["taskset", "-c", ",".join(map(str, cores))] + words
            environment = dict(os.environ, OMP_NUM_THREADS=str(len(cores)), OMP_WAIT_POLICY="passive")
            with open(log, "ab") as out:
                out.write((" ".join(words) + "\n").encode())
                out.flush()
                process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=out, env=environment)
            self.running.add(process)
            text = process.communicate()[0]
            self.running.discard(process)
            if process.returncode != 0:
                raise RuntimeError(f"{' '.join(words[:6])} ...: exit status {process.returncode}, see {log}")
            return text.decode()
        finally:
            self.cores.give(cores)

    def sets(self, values):
        return [word for value in values for word in ("--set", value)]

    def out(self, name, seed):
        return self.args.out / STUDIES[name].get("folder", name) / f"seed-{seed}"

    def demonstrations(self, name, out, demos, seed, tokenizer):
        """Packed data of what the expert plays in out/data; `tokenizer` is made where it is not there."""
        out.mkdir(parents=True, exist_ok=True)
        study, log, files = STUDIES[name], out / "sft.log", []
        for i, (environment, count, options) in enumerate(demos):
            files.append(out / f"demos-{i}.jsonl")
            self.run(name, log, [GODWIT, "data", "demos", environment, "--count", count, "--options", json.dumps(self.weaker(options)),
                           "--seed", seed * 1000000, "--out", files[-1]])
        if not tokenizer.is_dir():
            self.run(name, log, [GODWIT, "tokenizer", "train", *files, "--vocab-size", study.get("vocab", 448), "--out", tokenizer])
        self.run(name, log, [GODWIT, "data", "pack", *files, "--tokenizer", tokenizer, "--holdout", study.get("holdout", 0.03), "--out", out / "data"])

    def fine_tune(self, name, out, tokenizer, seed, more, init=None):
        shutil.rmtree(out / "sft", ignore_errors=True)
        start = [f"init={init}", "model.name=", "model.override={}"] if init else []
        self.run(name, out / "sft.log", [GODWIT, "train", "configs/recipes/sft-calculator.toml", *self.sets(
            start + [f"out={out}/sft", f"tokenizer={tokenizer}", f"data.0.path={out}/data", f"seed={seed}", "checkpoint.every=0"] + more)])

    def base(self):
        """The model that --base names, made where it is not there."""
        if self.args.base.is_dir():
            return
        name, before, tokenizer = list(self.args.studies)[0], None, self.args.base.parent / "base-tokenizer"
        for i, (demos, steps) in enumerate(BASE):
            out = self.args.base.parent / f"base-{i}"
            self.demonstrations(name, out, demos, 1 + 6 * i, tokenizer)
            rate = ["optimizer.muon_lr=0.006", "optimizer.adamw_lr=0.004"] if i else []
            self.fine_tune(name, out, tokenizer, 1 + 4 * i, [f"stage.0.steps={steps}", "stage.0.context=2048", *rate], before)
            before = out / "sft/model"
        shutil.copytree(before, self.args.base)

    def tokenizer(self, out):
        return self.args.base or out / "tokenizer"

    def sft(self, name, seed):
        study, out = STUDIES[name], self.out(name, seed)
        with self.locks[out / "sft"]:
            if not (out / "sft/model").is_dir():
                self.make_sft(name, seed, study, out)

    def make_sft(self, name, seed, study, out):
        self.demonstrations(name, out, study["demos"], seed, self.tokenizer(out))
        more = study.get("sft", [])
        if self.args.base:
            more = more + ["stage.0.steps=80", "stage.0.batch_tokens=4096", "optimizer.muon_lr=0.003", "optimizer.adamw_lr=0.002"]
        self.fine_tune(name, out, self.tokenizer(out), seed, more, self.args.base)

    def weaker(self, options):
        return dict(options, weaker=True) if self.args.weaker and "submissions" in options else options

    def rl(self, name, seed, arm):
        study, out = STUDIES[name], self.out(name, seed)
        run = out / self.folder(arm)
        with self.locks[run]:
            if not (run / "model").is_dir():
                self.make_rl(name, seed, arm, study, out, run)

    def make_rl(self, name, seed, arm, study, out, run):
        shutil.rmtree(run, ignore_errors=True)
        more = ["environment.0.options.weaker=true"] if self.args.weaker and study["demos"][0][0] == "files" else []

        def minutes():
            return min(self.args.minutes, study.get("minutes", math.inf), (self.end - time.time() - self.args.reserve) / 60)

        def fine_tuning():
            return [GODWIT, "train", "configs/recipes/sft-calculator.toml", *self.sets(
                [f"init={out}/sft/model", "model.name=", "model.override={}", f"tokenizer={self.tokenizer(out)}", f"out={run}", f"data.0.path={out}/data", f"seed={seed + 100}",
                 "checkpoint.every=0"] + study.get("sft", []) + ["stage.0.steps=100000", f"train.minutes={minutes():.3f}"])]

        def learning():
            return [GODWIT, "rl", f"configs/recipes/rl-{study.get('recipe', name)}.toml", *self.sets(
                [f"init={out}/sft/model", f"out={run}", f"seed={seed}", "eval.tasks=0", "checkpoint.every=0",
                 *([f"steps={study['steps']}"] if "steps" in study else ["steps=100000", f"train.minutes={minutes():.3f}"]),
                 "train.tensorboard=false"] + study.get("rl", []) + more + study["arms"][arm])]

        if minutes() < 0.01:
            raise RuntimeError(f"{run}: no time left")
        self.run(name, out / f"{self.folder(arm)}.log", fine_tuning if arm == LONGER else learning)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)

    def tasks(self, name):
        return min(self.args.tasks, STUDIES[name].get("tasks", self.args.tasks))

    def arms(self, name):
        return [a for a in STUDIES[name]["arms"] if not self.args.arm or a in self.args.arm]

    def weights(self, name):
        return STUDIES[name].get("weights", [None]) if not self.args.plain else [None]

    @staticmethod
    def folder(arm):
        return "".join(c if c.isalnum() or c == "." else "-" for c in arm)

    def evaluate(self, name, seed, arm, which, weights=None):
        study, out = STUDIES[name], self.out(name, seed)
        kept = out / f"eval-{self.folder(arm)}-{self.folder(which)}{weights or ''}.json"
        if not kept.exists() and self.late:
            raise RuntimeError("not measured")
        with self.locks[kept]:
            if not kept.exists():
                self.make_evaluation(name, seed, arm, which, weights, study, out, kept)
        return json.loads(kept.read_text())

    def make_evaluation(self, name, seed, arm, which, weights, study, out, kept):
        text = self.run(name, out / "eval.log", [
                GODWIT, "eval", "tools", "--json", "--model", out / self.folder(arm) / "model", "--environment", study["demos"][0][0],
                "--options", json.dumps(self.weaker(study["eval"][which])), "--samples", self.tasks(name), "--seed", 1000 + seed,
                "--context", study.get("context", 1024)] + (["--weights", weights] if weights else []))
        kept.write_text(text)

    def chain(self, name, seed, pool):
        """SFT, then every arm; evaluations behind each."""
        self.sft(name, seed)
        arms = self.arms(name)
        points = [(which, weights) for which in STUDIES[name]["eval"] for weights in self.weights(name)]
        waiting = [pool.submit(lambda a=arm: (self.rl(name, seed, a), [self.evaluate(name, seed, a, *point) for point in points])) for arm in arms]
        time.sleep(0.1)  # the arms are first in the queue
        waiting += [pool.submit(self.evaluate, name, seed, "sft", *point) for point in points]
        for w in waiting:
            w.result()


def mean_interval(values):
    """Mean and half the width of its 95 % interval over seeds (Student's t)."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, T_975.get(n - 1, 1.96) * deviation / math.sqrt(n)


def rl_facts(path):
    rows = [json.loads(line) for line in open(path)]
    return {"steps": len(rows), "max_dlogp": max(r["max_dlogp"] for r in rows), "mean_drift": sum(r["mean_drift"] for r in rows) / len(rows),
            "tokens": rows[-1]["total_tokens"], "seconds": sum(r["rollout_s"] + r["train_s"] for r in rows)}


def table(runner, name, seeds):
    study, lines, results = STUDIES[name], [], []
    columns = [("success", lambda r: r["success"]["share"]), ("recovery", lambda r: r["recovery"]["share"]),
               ("calls", lambda r: r["solved_calls"]), ("redundant", lambda r: r["redundant"]), ("turn reward", lambda r: r["turn_reward"])]
    for which, weights in [(which, weights) for which in study["eval"] for weights in runner.weights(name)]:
        lines.append(f"\n{name} {which} {'with ' + weights + ' weights ' if weights else ''}({runner.tasks(name)} unseen tasks a seed; calls: of a solved task; +/- 95 % over seeds)\n")
        lines.append("| arm | seed | success [95 %] | recovery [95 %] | calls | redundant | turn reward | steps | max abs dlogp |")
        lines.append("|---|---|---|---|---|---|---|---|---|")
        by_arm = {}
        for arm in ["sft"] + runner.arms(name):
            for seed in seeds:
                try:
                    r = runner.evaluate(name, seed, arm, which, weights)
                except (RuntimeError, OSError, ValueError) as fault:
                    lines.append(f"| {arm} | {seed} | {fault} |")
                    continue
                facts = {}
                metrics = runner.out(name, seed) / runner.folder(arm) / "metrics.jsonl"
                if study["arms"].get(arm) is not None:
                    facts = rl_facts(metrics)
                by_arm.setdefault(arm, {})[seed] = r
                results.append(dict(r, arm=arm, seed=seed, which=which, weights=weights, **facts))
                share = lambda s: f"{s['share']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" if s["of"] else "–"
                lines.append(f"| {arm} | {seed} | {share(r['success'])} | {share(r['recovery'])} | {r['solved_calls']:.2f} | {r['redundant']:.2f} | "
                             f"{r['turn_reward']:.3f} | {facts.get('steps', '')} | {facts.get('max_dlogp', '')} |")
        for arm, rows in by_arm.items():
            cells = []
            for _, read in columns:
                mean, half = mean_interval([read(r) for r in rows.values()])
                cells.append(f"{mean:.3f} ± {half:.3f}")
            lines.append(f"| **{arm}** | {len(rows)} seeds | {' | '.join(cells)} | | |")
        arms = runner.arms(name)
        for arm, other in [(arm, "sft") for arm in arms] + [(arm, arms[0]) for arm in arms[1:]]:
            both = [s for s in by_arm.get(arm, {}) if s in by_arm.get(other, {})]
            if both:
                cells = []
                for _, read in columns:
                    mean, half = mean_interval([read(by_arm[arm][s]) - read(by_arm[other][s]) for s in both])
                    cells.append(f"{mean:+.3f} ± {half:.3f}")
                lines.append(f"| {arm} − {other} | {len(both)} pairs | {' | '.join(cells)} | | |")
    (runner.args.out / name).mkdir(parents=True, exist_ok=True)
    (runner.args.out / name / "results.json").write_text(json.dumps(results, indent=1))
    for arm in runner.arms(name) if runner.args.check else []:
        for seed in seeds:
            rl, sft = (next((r for r in results if (r["arm"], r["seed"]) == (a, seed)), None) for a in (arm, "sft"))
            if not rl or not sft or rl["success"]["low"] <= sft["success"]["high"] or rl.get("max_dlogp", 0) != 0:
                runner.failed = True
                lines.append(f"\n{arm}, seed {seed}: not above SFT by more than the intervals, or rollout and trainer differ")
    text = "\n".join(lines) + "\n"
    (runner.args.out / name / "table.md").write_text(text)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", metavar="STUDY[:SEEDS]", help=", ".join(sorted(STUDIES)) + "; the first are done first")
    parser.add_argument("--seeds", default="1,2,3", help="where a study names none")
    parser.add_argument("--minutes", type=float, default=12, help="of each RL run")
    parser.add_argument("--tasks", type=int, default=512, help="of each evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="side by side")
    parser.add_argument("--threads", type=int, default=1, help="of a job")
    parser.add_argument("--first-core", type=int, default=0, help="of those that this process may use")
    parser.add_argument("--limit", type=float, default=0, help="seconds for everything: RL runs get shorter")
    parser.add_argument("--reserve", type=float, default=60, help="seconds of the limit that are kept for evaluations")
    parser.add_argument("--arm", action="append", help="only these arms (and sft)")
    parser.add_argument("--check", action="store_true", help="exit status 1 where an arm is not above SFT by more than the intervals")
    parser.add_argument("--plain", action="store_true", help="no evaluation with packed weights")
    parser.add_argument("--weaker", action="store_true", help="files: the sandbox without namespaces")
    parser.add_argument("--base", type=pathlib.Path, help="a model that every fine-tuning starts from")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/studies"))
    args = parser.parse_args()
    args.studies = {name: [int(s) for s in (seeds or args.seeds).split(",")] for name, _, seeds in (word.partition(":") for word in args.studies)}
    unknown = [name for name in args.studies if name not in STUDIES]
    if unknown:
        parser.error(f"no study {unknown[0]}; there are {', '.join(sorted(STUDIES))}")
    runner = Runner(args)
    if args.base:
        runner.base()
    chains, pool = concurrent.futures.ThreadPoolExecutor(64), concurrent.futures.ThreadPoolExecutor(64)
    waiting = {chains.submit(runner.chain, name, seed, pool): (name, seed) for name, seeds in args.studies.items() for seed in seeds}
    try:
        for done in concurrent.futures.as_completed(waiting, timeout=args.limit or None):
            if done.exception():
                print(f"{waiting[done]}: {done.exception()}", file=sys.stderr)
                runner.failed = True
    except concurrent.futures.TimeoutError:
        print(f"the limit of {args.limit:.0f} s has come; what is not done is missing", file=sys.stderr)
    runner.late = True
    for process in list(runner.running):
        process.terminate()
    for name, seeds in args.studies.items():
        print(table(runner, name, seeds), flush=True)
    os._exit(1 if runner.failed else 0)  # without waiting for those that wait for cores


if __name__ == "__main__":
    main()
