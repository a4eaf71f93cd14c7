"""A LangGraph team answers questions: a planner, a search agent, a maths agent and a writer.

    python team.py --number 40 --attempts 2 --output logs.jsonl --questions questions.jsonl

All agents use the first model that the server at ``--url`` offers. The agents have short prompts
without function calling, because the model is small: the graph calls the search with the question,
and runs the program that the maths agent writes. Each attempt becomes a line of the output: the
question, the accepted answers, and the messages of the graph in LangChain's form. Attempts that the
file already has are not repeated.
"""

import argparse
import asyncio
import dataclasses
import json
import pathlib

import openai
from langchain_core.messages import AIMessage, HumanMessage, message_to_dict
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from coa_jax import ToolContext, ToolsConfig, call_tool, load_tasks, make_tools

SOURCES = (
    "factbook_people:topics=single,wording=known",
    "arithmetic:chain_sum,basic_arithmetic,products",
)
# Each agent has a rule and example turns. The countries do not exist, so they give nothing away.
FACT, SUM = "Look up the fact.", "Compute the sum."
PLANNER = (
    f"Say what to do with the question: {FACT} or {SUM}",
    ("Calculate 8 * 3.", SUM),
    ("What is the capital of Freedonia?", FACT),
    ("State the value of 12 + 7 - 4 =", SUM),
    ("who lives in sylvania", FACT),
    ("Solve (3 + 4) * 2.", SUM),
    ("Which river is the longest in Freedonia?", FACT),
    ("Calculate -5 - 7.", SUM),
    ("The longest land border of Sylvania is with which country?", FACT),
)
READER = ("You answer with a short fact from the documents.",)
CODER = (
    "Write Python that prints the value.",
    ("Calculate 8 * 3.", "print(8 * 3)"),
    ("State the value of the following: 12 + 7 - 4 - 31 =", "print(12 + 7 - 4 - 31)"),
    (
        "Solve the following: ( -53 + 4 ) * -2. Give only the result.",
        "print(( -53 + 4 ) * -2)",
    ),
)
WRITER = (
    "Give only the name or the number that answers the question.",
    (
        "What is the capital of Freedonia?\nThe capital of Freedonia is Fredville.",
        "Fredville",
    ),
    (
        "Which country is Mount Zenda in?\nMount Zenda is the highest point of Ruritania.",
        "Ruritania",
    ),
    (
        "Who is Sylvania's longest border with?\nThe longest border of Sylvania is with Elbonia.",
        "Elbonia",
    ),
    ("what number of ports does freedonia have\nThe number of ports in Freedonia is 7.", "7"),
)


class Team:
    """The agents as nodes of a graph, whose model a server offers.

    Args:
        client: asynchronous client of the server.
        settings: other arguments of each request, such as ``model`` and ``temperature``.
        tools: the tools ``wiki_search`` and ``code``, by name.
    """

    def __init__(self, client: openai.AsyncOpenAI, settings: dict, tools: dict):
        self.client, self.settings, self.tools = client, settings, tools

    async def reply(self, agent: str, prompt: tuple, text: str) -> AIMessage:
        """Lets the model reply to a text, in the role of an agent."""
        rule, *turns = prompt
        messages = [{"role": "system", "content": rule}]
        for asked, answer in turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})
        done = await self.client.chat.completions.create(messages=messages, **self.settings)
        usage = {
            "input_tokens": done.usage.prompt_tokens,
            "output_tokens": done.usage.completion_tokens,
            "total_tokens": done.usage.total_tokens,
        }
        words = done.choices[0].message.content.strip()
        return AIMessage(words, name=agent, usage_metadata=usage)

    async def planner(self, state: MessagesState) -> dict:
        """Decides which agent works on the question."""
        question = state["messages"][0].content
        return {"messages": [await self.reply("planner", PLANNER, question)]}

    async def search_agent(self, state: MessagesState) -> dict:
        """Searches with the words of the question, and then reads the documents."""
        question, last = state["messages"][0].content, state["messages"][-1]
        if last.type == "tool":
            text = f"{last.content}\n\nQuestion: {question}"
            return {"messages": [await self.reply("search_agent", READER, text)]}
        call = {"name": "wiki_search", "args": {"query": question}, "id": "call_1"}
        return {"messages": [AIMessage("", name="search_agent", tool_calls=[call])]}

    async def writer(self, state: MessagesState) -> dict:
        """Makes an answer of the sentence that the search agent wrote."""
        text = f"{state['messages'][0].content}\n{state['messages'][-1].content}"
        message = await self.reply("writer", WRITER, text)
        message.content = f"Final answer: {message.content}"
        return {"messages": [message]}

    async def maths_agent(self, state: MessagesState) -> dict:
        """Writes a program, and then answers with what it printed."""
        question, last = state["messages"][0].content, state["messages"][-1]
        if last.type == "tool":
            value = last.content.splitlines()[-1]
            return {"messages": [AIMessage(f"Final answer: {value}", name="maths_agent")]}
        message = await self.reply("maths_agent", CODER, question)
        call = {"name": "code", "args": {"code": message.content}, "id": "call_1"}
        message.content, message.tool_calls = "", [call]
        return {"messages": [message]}

    def graph(self, task_id: str):
        """Builds the graph of the agents and tools for a task."""

        async def wiki_search(query: str) -> str:
            """Searches an encyclopedia."""
            return (await call_tool(self.tools["wiki_search"], query, ToolContext(task_id))).text

        async def code(code: str) -> str:
            """Runs a Python program in the sandbox."""
            block = f"```py\n{code}\n```"
            return (await call_tool(self.tools["code"], block, ToolContext(task_id))).text

        def chosen(state: MessagesState) -> str:
            return "maths_agent" if "sum" in state["messages"][-1].content else "search_agent"

        def caller(state: MessagesState) -> str:
            return state["messages"][-2].name

        graph = StateGraph(MessagesState)
        for node in (self.planner, self.search_agent, self.writer, self.maths_agent):
            graph.add_node(node.__name__, node)
        graph.add_node("tools", ToolNode([wiki_search, code]))
        graph.add_edge(START, "planner")
        graph.add_conditional_edges("planner", chosen)
        read = {"tools": "tools", END: "writer"}
        graph.add_conditional_edges("search_agent", tools_condition, read)
        graph.add_conditional_edges("maths_agent", tools_condition)
        graph.add_conditional_edges("tools", caller)
        graph.add_edge("writer", END)
        return graph.compile()

    async def solve(self, task) -> dict:
        """Runs the team on a task, and returns the log of the run."""
        state = await self.graph(task.id).ainvoke({"messages": [HumanMessage(task.question)]})
        return {
            "task_id": task.id,
            "question": task.question,
            "gold": list(task.gold),
            "messages": [message_to_dict(message) for message in state["messages"]],
        }


async def run(given: argparse.Namespace) -> None:
    """Solves the tasks of a split, eight at a time."""
    client = openai.AsyncOpenAI(base_url=given.url, api_key="none")
    model = (await client.models.list()).data[0].id
    config = ToolsConfig(names=("wiki_search", "code"))
    config = dataclasses.replace(
        config, wiki_search=dataclasses.replace(config.wiki_search, top_k=2)
    )
    tools = {tool.name: tool for tool in make_tools(config)}
    tasks = [
        task for source in SOURCES for task in load_tasks(source, given.split, given.number, 0)
    ]
    if given.questions:
        rows = [{"id": t.id, "question": t.question, "answer": list(t.gold)} for t in tasks]
        given.questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = given.output.read_text().splitlines() if given.output.exists() else []
    done = {json.loads(line)["run_id"] for line in lines}
    limit = asyncio.Semaphore(8)

    async def attempt(task, number: int) -> None:
        run_id = f"{task.id}-{number}"
        if run_id in done:
            return
        settings = {"model": model, "max_tokens": 64, "temperature": 0.5, "seed": number}
        async with limit:
            log = await Team(client, settings, tools).solve(task)
        with given.output.open("a") as file:
            file.write(json.dumps({"run_id": run_id, **log}) + "\n")

    await asyncio.gather(*(attempt(task, n) for n in range(given.attempts) for task in tasks))


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--split", default="train")
    parser.add_argument("--number", type=int, default=40, help="of the tasks of each source")
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--questions", type=pathlib.Path, help="also write the questions here")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
