"""A run that samples with agent programs; run as a program, it may be killed.

python -m tests.serve.agents.killed FOLDER RUN
"""

from __future__ import annotations

import shlex
from pathlib import Path

from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.run.command import run_main
from coa_jax.train.optimizer import OptimizerConfig
from tests.train.tiny_runs import rl_config, run_rl

STEPS = 3
SCRIPT = """\
echo $$ >> {numbers}
ask() {{ curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -d "$1" \\
  -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json"; }}
messages='[{{"role": "user", "content": "A?"}}]'
reply=$(ask "{{\\"model\\": \\"any\\", \\"max_tokens\\": 12, \\"messages\\": $messages}}")
sleep 0.2
echo "{{\\"reward\\": 0.${{#reply}}}}"
"""


def write_script(folder: Path) -> None:
    """The program, which writes its number into a file; its reward depends on what it was told."""
    (folder / "agent.sh").write_text(SCRIPT.format(numbers=shlex.quote(str(folder / "numbers"))))


def run(folder: Path, name: str) -> None:
    command = shlex.join(["bash", str(folder / "agent.sh")])
    config = rl_config(
        folder / "model", folder / "tasks.jsonl", groups=1, temperature=2.0,
        agent=AgentConfig(command=command, seconds=120.0),
        optimizer=OptimizerConfig(1e-3, total_steps=STEPS, final_ratio=1.0, weight_decay=0.0),
    )  # fmt: skip
    run_rl(folder / name, config)


def main(argv: list[str]) -> None:
    run(Path(argv[1]), argv[2])


if __name__ == "__main__":
    run_main(main, positional=True)
