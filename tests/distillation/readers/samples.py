"""Records of OAgents, by the list of fields in the paper's release, and steps of smolagents."""

from __future__ import annotations

import itertools
import json

from coa_jax.distillation.messages import Kind
from coa_jax.distillation.readers import TraceFile

PLAN_PREFACE = "Here is the plan of action that I will follow to solve the task:\n```\n"
FACTS_PREFACE = "Here are the facts that I know so far:\n```\n"


def task_step(question):
    return {"step_type": "task", "task": question, "task_images": None}


def planning_step(facts, plan):
    return {
        "step_type": "planning",
        "model_input_messages": None,
        "facts": f"{FACTS_PREFACE}{facts}\n```",
        "plan": f"{PLAN_PREFACE}{plan}\n<end_plan>\n```",
    }


def action_step(step, thought, code, observations=None, error=None, **judged):
    call = {
        "id": f"call_{step}",
        "type": "function",
        "function": {"name": "python_interpreter", "arguments": code},
    }
    return {
        "step_type": "action",
        "tool_calls": [call] if code else [],
        "start_time": 1754000000.0 + step,
        "end_time": 1754000001.0 + step,
        "step": step,
        "error": error and {"type": "AgentExecutionError", "message": error},
        "duration": 1.0,
        "model_output": f"Thought: {thought}\nCode:\n```py\n{code}\n```<end_code>",
        "observations": observations,
        "action_output": None,
        "score": judged.get("score"),
        "evaluate_thought": judged.get("evaluate_thought"),
    }


def search_call(name, args, observation):
    return {"name": name, "args": args, "observation": observation}


def result(question, steps, prediction, true_answer, actions):
    return {
        "agent_name": "gpt-4.1",
        "question": question,
        "augmented_question": f"It is paramount that you answer this: {question}",
        "prediction": prediction,
        "true_answer": true_answer,
        "intermediate_steps": [task_step(question), *steps],
        "parsing_error": False,
        "iteration_limit_exceeded": False,
        "agent_error": None,
        "start_time": "2025-08-01 10:00:00",
        "end_time": "2025-08-01 10:02:00",
        "task": 2,
        "task_id": "one",
        "search_agent_actions": actions,
    }


TOWER = "Who designed the tower in the capital of France, and in which year was he born?"
DESIGNER = "Who designed the Eiffel Tower?"
BORN = "When was Gustave Eiffel born?"


def tower(**changes):
    """Two runs of the search agent, one of them on a task that the program puts together."""
    steps = [
        planning_step("### 1.1. Given\nThe capital of France is Paris.", "1. Designer\n2. Birth"),
        action_step(
            1,
            "I need the designer first.",
            f'who = search_agent(task="{DESIGNER}")\nprint(who)',
            "Execution logs:\nGustave Eiffel's company\nLast output from code snippet:\nNone",
            score=8,
            evaluate_thought="The step makes progress.",
        ),
        action_step(
            2,
            "Now his birth.",
            'name = "Gustave Eiffel"\nborn = search_agent(f"When was {name} born?")\nprint(born)',
            "Execution logs:\n1832\nLast output from code snippet:\nNone",
            score=2,
            evaluate_thought="One source only.",
        ),
        planning_step("He was born in 1832.", "1. Check the year\n2. Answer"),
        action_step(3, "Both are known.", 'final_answer("Gustave Eiffel, 1832")'),
    ]
    actions = {
        DESIGNER: {
            "answer": "Gustave Eiffel's company designed it.",
            "tool_calls": [
                search_call("web_search", {"query": "Eiffel Tower designer"}, "Eiffel & Cie."),
                search_call("crawl_pages", {"url": "https://example.org/tower"}, None),
            ],
        },
        BORN: {
            "answer": "1832",
            "tool_calls": [
                search_call("wiki", '{"query": "Gustave Eiffel"}', "Born 15 December 1832."),
                search_call("final_answer", {"answer": "1832"}, "1832"),
            ],
        },
    }
    answer = "Gustave Eiffel, 1832"
    return {**result(TOWER, steps, answer, answer, actions), **changes}


def product(**changes):
    """No search: a program that fails, an output without one, a program that works."""
    steps = [
        planning_step("17 and 23 are given.", "1. Multiply"),
        action_step(
            1, "I multiply.", "print(17 * n)", None, "NameError: The variable `n` is not defined."
        ),
        action_step(2, "I forgot the code.", "", None, "Error in code parsing"),
        action_step(
            3,
            "The variable was missing. I write it out.",
            "print(17 * 23)",
            "Execution logs:\n391\nLast output from code snippet:\nNone",
        ),
        action_step(4, "It printed 391. That is the product.", "final_answer(391)"),
    ]
    question = "What is 17 times 23?"
    return {**result(question, steps, 391, "391", {}), "task_id": "two", **changes}


def read_traces(path, form, *options, **rest):
    file = TraceFile(path, form, *options, **rest)
    return list(file), file.report


def file_of(*records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def step(number, calls, observations="", output="", **rest):
    """An action step as ``ActionStep.dict`` writes it (smolagents 1.26)."""
    calls = [
        {
            "id": str(i),
            "type": "function",
            "function": dict(zip(("name", "arguments"), c, strict=True)),
        }
        for i, c in enumerate(calls)
    ]
    return {
        "step_number": number,
        "timing": {},
        "tool_calls": calls,
        "error": None,
        "model_output": output,
        "observations": observations,
        "action_output": None,
        "token_usage": {"input_tokens": 10, "output_tokens": 2},
        "is_final_answer": False,
        **rest,
    }


def calls_of(trace):
    messages = trace.log.messages
    return [
        (call.recipient, call.content, answer.content, answer.outcome)
        for call, answer in itertools.pairwise(messages)
        if call.kind is Kind.CALL
    ]


def reasons(report):
    return " ".join(problem["reason"] for problem in report["problems"])
