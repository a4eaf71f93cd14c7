"""Draws the figures of the documentation as SVG.

    python docs/figures/draw.py

Each figure has its own background and switches with the colour scheme of the reader, so it is
readable on light and on dark pages.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import terminal

ROOT = Path(__file__).parents[2]

STYLE = """
.paper { fill: #fcfcfa } .group { fill: #eef4f4; stroke: #9fc0c2 }
.box { fill: #ffffff; stroke: #5d7f86 } .tool { fill: #fdf3e4; stroke: #b98a3c }
.learn { fill: #eaf1fb; stroke: #5b7fb5 }
.name { fill: #14313a; font-weight: 600 } .note { fill: #48616a; font-size: 12px }
.line { stroke: #48616a; fill: none; stroke-width: 1.5 } .head { fill: #48616a }
.grid { stroke: #dfe7e6 } .dot { fill: #8aa9dc }
.curve { stroke: #2f5fa8; fill: none; stroke-width: 2.5 }
.bar { fill: #a9c0c2 } .chosen { fill: #5b86c9 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14201f } .group { fill: #1b2d2f; stroke: #3d6468 }
  .box { fill: #223739; stroke: #7fa9ad } .tool { fill: #3a3020; stroke: #c79b52 }
  .learn { fill: #22304a; stroke: #7d9fd4 }
  .name { fill: #eef6f6 } .note { fill: #b9cccf }
  .line { stroke: #b9cccf } .head { fill: #b9cccf } .grid { stroke: #2c3f40 }
  .dot { fill: #8fb4e8 } .curve { stroke: #7fa8ea } .bar { fill: #5b7a7e } .chosen { fill: #5a86cc }
}
"""

Point = tuple[float, float]


def box(kind: str, x: float, y: float, width: float, name: str, *notes: str) -> str:
    """A box with a name and lines of notes below it, 64 units high."""
    lines = [
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="64" rx="7"/>',
        f'<text class="name" x="{x + 12}" y="{y + 21}">{escape(name)}</text>',
    ]
    for row, note in enumerate(notes):
        place = f'x="{x + 12}" y="{y + 38 + 15 * row}"'
        lines.append(f'<text class="note" {place}>{escape(note)}</text>')
    return "\n".join(lines)


def arrow(*points: Point, note: str = "", at: Point | None = None, anchor: str = "middle") -> str:
    """A line through points with a head at its end, and a note beside it."""
    path = " ".join(f"{x},{y}" for x, y in points)
    text = f'<polyline class="line" points="{path}" marker-end="url(#head)"/>'
    if note and at:
        place = f'x="{at[0]}" y="{at[1]}" text-anchor="{anchor}"'
        text += f'\n<text class="note" {place}>{escape(note)}</text>'
    return text


def figure(width: int, height: int, title: str, *parts: str) -> str:
    """An SVG document."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path class="head" d="M0,0.5 L8,4 L0,7.5 z"/></marker>'
    )
    body = "\n".join(parts)
    size = f' width="{width}"' if width < 600 else ""  # a narrow figure is not stretched
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg"{size} viewBox="0 0 {width} {height}" role="img" \
aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="14">
<style>{STYLE}</style>
<defs>{head}</defs>
<rect class="paper" width="{width}" height="{height}" rx="10"/>
{body}
</svg>
"""


def data_flow() -> str:
    """From the traces of a multi-agent system to a trained policy."""
    team = ("team of agents with tools,", "or logs of another system")
    top = [
        box("box", 20, 20, 176, "Traces", *team),
        box("box", 232, 20, 164, "Distil", "convert to one context", "and filter"),
        box("box", 432, 20, 148, "Records", "text, and who wrote", "each part"),
        box("learn", 620, 20, 152, "Fine-tune (SFT)", "loss on the tokens", "of the policy only"),
        box("box", 812, 20, 128, "Policy", "a Hugging Face", "directory"),
        *(arrow((x, 52), (to, 52)) for x, to in ((196, 232), (396, 432), (580, 620), (772, 812))),
    ]
    slots = ("slots with a KV cache; compiled", "extend, decode and fork")
    inside = [
        '<rect class="group" x="20" y="150" width="920" height="314" rx="10"/>',
        '<text class="name" x="36" y="176">Reinforce (RL)</text>',
        box("box", 40, 196, 150, "Tasks", "questions with", "checkable answers"),
        box("box", 250, 196, 190, "Rollouts", "a host loop: one episode", "for each sample"),
        box("learn", 660, 196, 260, "Engine", *slots),
        box("tool", 660, 288, 260, "Tools", "search, code in a sandbox, web pages,", "MCP servers"),
        box("box", 250, 380, 190, "Trajectories", "tokens, authors,", "log-probabilities"),
        box("box", 40, 380, 150, "Graders", "a reward, or no", "verdict (masked)"),
        box("learn", 660, 380, 260, "Update", "advantages, masks, one compiled", "training step"),
        arrow((190, 228), (250, 228)),
        arrow((440, 216), (660, 216), note="token ids", at=(550, 210)),
        arrow((660, 244), (440, 244), note="tokens, log-probabilities", at=(550, 260)),
        arrow((400, 260), (400, 310), (660, 310), note="call", at=(530, 304)),
        arrow((660, 334), (360, 334), (360, 260), note="observation", at=(530, 350)),
        arrow((300, 260), (300, 380), note="finished", at=(292, 336), anchor="end"),
        arrow((250, 400), (190, 400)),
        arrow((190, 426), (250, 426)),
        arrow((440, 412), (660, 412), note="groups of samples", at=(550, 406)),
        arrow((920, 412), (932, 412), (932, 228), (920, 228)),
        '<text class="note" x="908" y="278" text-anchor="end">new weights</text>',
    ]
    ends = [
        arrow((840, 84), (840, 196), note="start", at=(832, 124), anchor="end"),
        arrow((900, 150), (900, 84), note="result", at=(908, 124), anchor="start"),
    ]
    title = "Data flow: traces, distillation, fine-tuning, and the loop of reinforcement learning"
    return figure(960, 484, title, *top, *inside, *ends)


def ask() -> str:
    """The chain of agents of the quickstart's policy after SFT, as `coa-jax ask` showed it."""
    question = "What is the railway length of the longest-border neighbour of Sudan?"
    return terminal.draw(Path(__file__).with_name("ask.cast"), f'coa-jax ask "{question}"')


def label(x: float, y: float, words: str, anchor: str = "start", kind: str = "note") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def masks() -> str:
    """From the text of a trajectory to its tokens, its loss mask and a packed row."""
    blocks = (
        ("group", "prompt", "Question: What is the capital of Lesotho?"),
        ("learn", "policy", "<think>...</think> <wiki_search>Lesotho</wiki_search>"),
        ("tool", "environment", "<observation> ... Maseru ... </observation>"),
        ("learn", "policy", "<think>...</think> <answer>Maseru</answer>"),
    )
    parts = [label(16, 26, "1. The text, cut where the author changes", kind="name")]
    for row, (kind, author, text) in enumerate(blocks):
        y = 40 + 50 * row
        loss = "has a loss" if kind == "learn" else "no loss"
        parts += [
            f'<rect class="{kind}" x="16" y="{y}" width="388" height="44" rx="6"/>',
            label(26, y + 18, author, kind="name"),
            label(394, y + 18, loss, "end"),
            label(26, y + 36, text),
        ]
    parts.append(
        arrow(
            (210, 240),
            (210, 264),
            note="each part is tokenized alone",
            at=(222, 256),
            anchor="start",
        )
    )
    parts.append(label(16, 288, "2. A row of a batch: two trajectories and padding", kind="name"))
    # kinds of the tokens: prompt, policy, environment, padding
    first, second = "ggllllttll", "glltl"
    kinds = {"g": "group", "l": "learn", "t": "tool", "-": "line"}
    tokens = first + second + "-"
    values = {
        "mask": ["1" if kind == "l" else "0" for kind in tokens],
        "segment": ["1"] * len(first) + ["2"] * len(second) + ["0"],
        "position": [*map(str, range(len(first))), *map(str, range(len(second))), "0"],
    }
    width = 20
    for row, name in enumerate(("token", *values)):
        y = 302 + 24 * row
        parts.append(label(16, y + 15, name))
        for column, kind in enumerate(tokens):
            x = 76 + (width + 0.6) * column
            if row == 0:
                parts.append(
                    f'<rect class="{kinds[kind]}" x="{x:.1f}" y="{y}" '
                    f'width="{width}" height="19" rx="3"/>'
                )
            else:
                parts.append(label(round(x + width / 2, 1), y + 15, values[name][column], "middle"))
    title = (
        "A trajectory is cut into parts by author; each part is tokenized; only tokens of the "
        "policy have mask 1; a row holds several trajectories and padding"
    )
    return figure(420, 408, title, *parts)


def tool_call() -> str:
    """The way of a tool call from a sampled tag to an observation in the KV cache."""
    steps = (
        (
            "learn",
            "Engine: decode",
            "up to engine.chunk tokens for every slot",
            "tokens, log-probabilities",
        ),
        (
            "box",
            "Scheduler: find the call",
            "a token closes a tag; tokens after it are discarded",
            "tag, arguments; the other slots decode on",
        ),
        (
            "tool",
            "Tool: answer or fail",
            "budget, store, deadline; a failure is an outcome",
            "text, outcome",
        ),
        (
            "box",
            "Scheduler: add the observation",
            "as tokens of the environment, with mask 0",
            "token ids",
        ),
        ("learn", "Engine: extend", "computes the new tokens into the same KV cache", ""),
    )
    parts = []
    for row, (kind, name, note, passed) in enumerate(steps):
        y = 16 + 98 * row
        parts.append(
            f'<rect class="{kind}" x="16" y="{y}" width="344" height="56" rx="7"/>'
            + label(28, y + 23, name, kind="name")
            + label(28, y + 43, note)
        )
        if passed:
            parts.append(
                arrow((120, y + 56), (120, y + 98), note=passed, at=(132, y + 81), anchor="start")
            )
    parts += [
        arrow((360, 436), (396, 436), (396, 44), (360, 44)),
        '<text class="note" transform="translate(374,340) rotate(90)" text-anchor="middle">'
        "the sample decodes on</text>",
    ]
    title = (
        "Decode, find the call, run the tool, add the observation, extend the cache, decode on; "
        "meanwhile the other slots decode"
    )
    return figure(420, 482, title, *parts)


def step_time() -> str:
    """How trainer and engine spend a step of RL, from the metrics of a released run."""
    run = Path(__file__).parents[2] / "released" / "recall" / "1" / "metrics.jsonl"
    rows = [json.loads(line) for line in run.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "time/rollout_wait" in row]
    mean = {name: sum(row[f"time/{name}"] for row in steps) / len(steps) for name in TIMES}
    short = mean["traces"] + mean["publish"] + mean["checkpoint"] + mean["unaccounted"]
    rest = mean["rollout"] - mean["decode"] - mean["extend"]
    lanes = (
        (
            "Trainer: a step",
            (
                ("group", "time/rollout_wait", "waits for samples", mean["rollout_wait"]),
                ("learn", "time/update", "update of the parameters", mean["update"]),
                ("box", "the rest", "traces, weights, checkpoint", short),
            ),
        ),
        (
            "Engine: the samples of this step",
            (
                ("learn", "time/decode", "decoding", mean["decode"]),
                ("box", "time/extend", "prefill of prompts and tool results", mean["extend"]),
                ("tool", "the rest", "tools, grading and scheduling", rest),
            ),
        ),
    )
    parts, y = [], 0
    for title, pieces in lanes:
        total = sum(seconds for *_, seconds in pieces)
        parts.append(label(16, y + 28, f"{title}, {total:.1f} s", kind="name"))
        x = 16.0
        for kind, *_, seconds in pieces:
            width = 388 * seconds / mean["step"]
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y + 40}" width="{width:.1f}" height="30"/>'
            )
            x += width
        for row, (kind, name, note, seconds) in enumerate(pieces):
            line = y + 92 + 22 * row
            parts += [
                f'<rect class="{kind}" x="16" y="{line - 11}" width="14" height="14" rx="3"/>',
                label(38, line, f"{name}: {note}"),
                label(404, line, f"{seconds:.1f} s", "end"),
            ]
        y += 158
    title = (
        f"Of a step of {mean['step']:.1f} s, the trainer waits {mean['rollout_wait']:.1f} s for "
        f"samples and updates for {mean['update']:.1f} s; the engine decodes for "
        f"{mean['decode']:.1f} s"
    )
    return figure(420, 318, title, *parts)


TIMES = (
    *("step", "rollout_wait", "update", "traces", "publish", "checkpoint", "unaccounted"),
    *("rollout", "decode", "extend"),
)
"""Names of the metrics ``time/NAME`` that `step_time` shows."""


def meshes() -> str:
    """Three ways to arrange eight devices, with the rows and weights of each device."""
    ways = (
        (
            "fsdp=8: choose this first",
            "each device has its own rows and 1/8 of the weights",
            [(f"rows {n}", f"W{n}") for n in range(8)],
        ),
        (
            "fsdp=4, tensor=2: for very long rows",
            "two devices share rows; each layer is split in two",
            [(f"rows {n // 2}", f"W{n // 2}{'ab'[n % 2]}") for n in range(8)],
        ),
        (
            "data=2, fsdp=4: for slow networks",
            "two nodes, each with its own rows and all weights",
            [(f"rows {n}", f"W{n % 4}") for n in range(8)],
        ),
    )
    parts = []
    for number, (name, note, devices) in enumerate(ways):
        y = 130 * number
        parts += [label(16, y + 26, name, kind="name"), label(16, y + 44, note)]
        for device, (rows, weights) in enumerate(devices):
            x = 16 + 48 * device + (6 if number == 2 and device > 3 else 0)
            shade = ("learn", "tool", "box", "group")[int(weights[1]) % 4]
            parts += [
                f'<rect class="{shade}" x="{x}" y="{y + 56}" width="44" height="48" rx="5"/>',
                label(x + 22, y + 76, rows, "middle"),
                label(x + 22, y + 95, weights, "middle", "name"),
            ]
    title = (
        "Eight devices as fsdp=8, as fsdp=4 with tensor=2, and as data=2 with fsdp=4: which rows "
        "and which part of the weights (W) each device holds"
    )
    return figure(420, 384, title, *parts)


def curve() -> str:
    """The mean reward of three seeds by step of RL, and the greedy pass@1 of RL and its control.

    The values are those of the team that remembers (docs/experiments.md). The line shows the mean
    reward of five steps.
    """
    seeds = sorted((ROOT / "released" / "recall").glob("[0-9]*"))
    rewards = np.mean([_rewards(seed) for seed in seeds], axis=0).tolist()
    labels = {"sft_greedy": "SFT", "sft_more_greedy": "SFT longer", "rl_greedy": "RL"}
    values = {stage: [_values(seed, stage) for seed in seeds] for stage in labels}
    left, right = "Mean reward by step of RL (three seeds)", "Greedy pass@1 on 500 test questions"
    top = 0.8

    def y(value: float) -> float:
        return 240 - 190 * value / top

    def x(step: int) -> float:
        return 60 + 330 * step / (len(rewards) - 1)

    def text(at: Point, words: str, anchor: str = "middle", kind: str = "note") -> str:
        place = f'x="{at[0]:.0f}" y="{at[1]:.0f}" text-anchor="{anchor}"'
        return f'<text class="{kind}" {place}>{words}</text>'

    parts = [
        text((60, 28), escape(left), "start", "name"),
        text((470, 28), escape(right), "start", "name"),
    ]
    for tick in range(round(top * 10) + 1):
        height = y(tick / 10)
        parts.append(text((50, height + 4), f"{tick / 10:.1f}", "end"))
        parts.append(f'<path class="grid" d="M60,{height:.1f} H390 M470,{height:.1f} H930"/>')
    means = [
        sum(part) / len(part)
        for part in (rewards[max(0, i - 2) : i + 3] for i in range(len(rewards)))
    ]
    parts += [
        f'<circle class="dot" cx="{x(i):.1f}" cy="{y(r):.1f}" r="2.5"/>'
        for i, r in enumerate(rewards)
    ]
    points = " ".join(f"{x(i):.1f},{y(mean):.1f}" for i, mean in enumerate(means))
    parts.append(f'<polyline class="curve" points="{points}"/>')
    parts += [text((x(i), 262), str(i + 1)) for i in (0, len(rewards) // 2 - 1, len(rewards) - 1)]
    for index, (stage, label) in enumerate(labels.items()):
        mean, low, high = _mean_and_interval(values[stage])
        edge, height = 492 + 440 / len(labels) * index, y(mean)
        kind = "chosen" if index == len(labels) - 1 else "bar"
        parts += [
            f'<rect class="{kind}" x="{edge:.0f}" y="{height:.1f}" width="56" '
            f'height="{240 - height:.1f}" rx="3"/>',
            f'<path class="line" d="M{edge + 28:.0f},{y(low):.1f} V{y(high):.1f}"/>',
            text((edge + 66, height + 4), f"{mean:.3f}", "start"),
            text((edge + 28, 262), escape(label)),
        ]
    return figure(960, 280, f"{left}; {right}", *parts)


def _rewards(seed: Path) -> list[float]:
    """Returns the mean reward of each step of RL of a seed."""
    rows = map(json.loads, (seed / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


def _values(seed: Path, stage: str) -> np.ndarray:
    """Returns the values of the greedy answers of a stage, one for each task."""
    with gzip.open(seed / "evaluate" / stage / "results.json.gz") as file:
        results = json.load(file)
    return np.array([task["samples"][0]["value"] for task in results["tasks"]])


def _mean_and_interval(seeds: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Returns a mean over seeds, and the ends of its 95 % interval: a bootstrap in each seed."""
    rng = np.random.default_rng(0)
    drawn = [rng.choice(values, (10_000, len(values))).mean(axis=1) for values in seeds]
    low, high = np.percentile(np.mean(drawn, axis=0), (2.5, 97.5))
    return float(np.mean(seeds)), float(low), float(high)


FIGURES = {
    "data_flow.svg": data_flow,
    "masks.svg": masks,
    "tool_call.svg": tool_call,
    "ask.svg": ask,
    "curve.svg": curve,
    "step_time.svg": step_time,
    "meshes.svg": meshes,
}
"""Name of each file -> the function that draws it."""


def main() -> None:
    """Writes every figure beside this file."""
    for name, draw in FIGURES.items():
        Path(__file__).with_name(name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
