"""Three smolagents agents answer questions: a manager, a search agent and a maths agent.

    python team.py --number 60 --attempts 2 --output logs.jsonl --questions questions.jsonl

The model of all agents is the one that the server at ``--url`` offers first. Each attempt becomes a
line of the output: the question, the accepted answers, the steps of the manager and those of the
agents that it asked. Attempts that the file already has are not repeated.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import threading

import openai
import smolagents

from coa_jax import ToolsConfig, as_smolagents_tool, load_tasks, make_tools

SOURCES = (
    "factbook_people:topics=single,wording=known",
    "arithmetic:chain_sum,basic_arithmetic,products",
)
# The prompts of smolagents have thousands of tokens, too many for a small model. In their place,
# each agent has a rule and example turns. The country does not exist, so it gives no answer away.
CAPITAL = "What is the capital of Freedonia?"
MANAGER = (
    "Ask an agent in Python: search_agent for facts, maths_agent for sums. Pass its answer on.",
    (CAPITAL, f"The search agent looks it up.\n<code>\nprint(search_agent({CAPITAL!r}))\n</code>"),
    ("Observation:\nFredville", "It is Fredville.\n<code>\nfinal_answer('Fredville')\n</code>"),
    (
        "Calculate 8 * 3.",
        "An agent computes it.\n<code>\nprint(maths_agent('8 * 3'))\n</code>",
    ),
    ("Observation:\n24", "It is 24.\n<code>\nfinal_answer('24')\n</code>"),
)
SEARCHER = (
    "Search in Python with a few words. Then copy the answer from the result.",
    (CAPITAL, "I search for it.\n<code>\nprint(wiki_search('Freedonia capital'))\n</code>"),
    (
        "Observation:\nThe capital of Freedonia is Fredville.",
        "It is Fredville.\n<code>\nfinal_answer('Fredville')\n</code>",
    ),
)
COMPUTER = (
    "Compute in Python with print. Then copy the value.",
    ("17 * 3 - 5", "I compute it.\n<code>\nprint(17 * 3 - 5)\n</code>"),
    ("Observation:\n46", "It is 46.\n<code>\nfinal_answer('46')\n</code>"),
)


class Shown(smolagents.OpenAIModel):
    """A model that reads the example turns ``shown`` after the system message."""

    shown = ()

    def generate(self, messages, *arguments, **options):
        """Asks the server for a reply."""
        turns = [
            smolagents.ChatMessage(role, [{"type": "text", "text": text}])
            for said, reply in self.shown
            for role, text in (("user", said), ("assistant", reply))
        ]
        return super().generate([messages[0], *turns, *messages[1:]], *arguments, **options)


def plain(steps: list) -> list:
    """Returns the steps as JSON values."""
    return json.loads(json.dumps(steps, default=str))


class Agent(smolagents.CodeAgent):
    """A managed agent, which adds each of its runs to the list ``runs`` of its manager."""

    def __call__(self, task: str, **settings):
        """Answers a request of the manager."""
        answer = None
        try:
            answer = super().__call__(task, **settings)
            return answer
        finally:
            steps = plain(self.memory.get_succinct_steps())
            run = {"agent": self.name, "task": task, "caller_step": self.manager.step_number}
            self.manager.runs.append({**run, "steps": steps, "answer": answer})


def agent(kind: type, server: dict, prompt: tuple, **settings):
    """Creates an agent with a short prompt and at most three steps."""
    rule, *shown = prompt
    model = Shown(**server)
    model.shown = shown
    made = kind(model=model, max_steps=3, verbosity_level=smolagents.LogLevel.OFF, **settings)
    managed = {"task": "{{task}}", "report": "{{final_answer}}"}
    changed = {"system_prompt": rule, "managed_agent": managed}
    made.prompt_templates = {**made.prompt_templates, **changed}
    return made


def solve(task, server: dict, search) -> dict:
    """Runs the team on a task, and returns the log of the run.

    ``server`` has the arguments of the model of smolagents.
    """
    tools = [as_smolagents_tool(search, task.id)]
    managed = [
        agent(Agent, server, SEARCHER, tools=tools, name="search_agent", description="looks up"),
        agent(Agent, server, COMPUTER, tools=[], name="maths_agent", description="computes"),
    ]
    manager = agent(smolagents.CodeAgent, server, MANAGER, tools=[], managed_agents=managed)
    manager.runs = []
    for each in managed:
        each.manager = manager
    answer = manager.run(task.question)
    return {
        "task_id": task.id,
        "question": task.question,
        "gold": list(task.gold),
        "answer": None if answer is None else str(answer),
        "steps": plain(manager.memory.get_succinct_steps()),
        "managed_runs": manager.runs,
    }


def main() -> None:
    """Solves the tasks of a split, eight at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--split", default="train")
    parser.add_argument("--number", type=int, default=60, help="of the tasks of each source")
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--questions", type=pathlib.Path, help="also write the questions here")
    given = parser.parse_args()
    name = openai.OpenAI(base_url=given.url, api_key="none").models.list().data[0].id
    config = ToolsConfig(names=("wiki_search",))
    config = dataclasses.replace(
        config, wiki_search=dataclasses.replace(config.wiki_search, top_k=2)
    )
    (search,) = make_tools(config)
    lines = given.output.read_text().splitlines() if given.output.exists() else []
    done = {json.loads(line)["run_id"] for line in lines}
    lock = threading.Lock()

    def work(task, attempt: int) -> None:
        run_id = f"{task.id}-{attempt}"
        if run_id in done:
            return
        server = {"model_id": name, "api_base": given.url, "api_key": "none", "max_tokens": 96}
        log = solve(task, {**server, "temperature": 0.5, "seed": attempt}, search)
        log = json.dumps({"run_id": run_id, **log})
        with lock, given.output.open("a") as file:
            file.write(log + "\n")

    tasks = [
        task for source in SOURCES for task in load_tasks(source, given.split, given.number, 0)
    ]
    if given.questions:
        rows = [{"id": t.id, "question": t.question, "answer": list(t.gold)} for t in tasks]
        given.questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(work, t, n) for n in range(given.attempts) for t in tasks]
        for job in concurrent.futures.as_completed(jobs):
            job.result()


if __name__ == "__main__":
    main()
