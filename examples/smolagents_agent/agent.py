"""Solves a task with a code agent of smolagents, whose model is the policy in training."""

import json
import os
import sys

import smolagents

SYSTEM = """\
Solve the task with Python between {{code_block_opening_tag}} and {{code_block_closing_tag}}.
Call final_answer(...) with the result."""


def main() -> None:
    """Reads a task from standard input, solves it, and prints the outcome as the last line."""
    task = json.load(sys.stdin)
    model = smolagents.OpenAIServerModel(
        os.environ["OPENAI_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=int(os.environ.get("MAX_TOKENS", "512")),
    )
    agent = smolagents.CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
    # The stock prompt has thousands of tokens, more than the context of a small policy.
    agent.prompt_templates = {**agent.prompt_templates, "system_prompt": SYSTEM}
    answer = agent.run(task["question"])
    print(json.dumps({"answer": str(answer)}))


if __name__ == "__main__":
    main()
