import asyncio
import builtins

import pytest
from smolagents.local_python_executor import BASE_PYTHON_TOOLS, LocalPythonExecutor

from coa_jax.distillation.readers.programs import examine, runnable, split_plan, thought_of
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.code import CodeTool
from tests.distillation.readers.samples import calls_of, file_of, read_traces, reasons, step


@pytest.fixture
def read(tmp_path):
    def read(form, *records):
        path = tmp_path / "log.jsonl"
        path.write_bytes(file_of(*records))
        return read_traces(path, form)

    return read


LOGS = "Execution logs:\nLima\nLast output from code snippet:\nNone"


@pytest.mark.parametrize(
    ("program", "seen"),
    [
        ("print(web_search('Peru capital'))", LOGS),
        ("found = web_search(query='Peru capital')\nprint(found)", LOGS),
        (
            "found = web_search('Peru capital')",
            "Execution logs:\nLast output from code snippet:\nLima",
        ),
    ],
)
def test_a_program_that_is_one_call_of_a_tool_is_that_call(read, program, seen):
    record = {"question": "Q?", "steps": [step(1, [("python_interpreter", program)], seen)]}
    (trace,), _ = read("smolagents", record)
    assert calls_of(trace) == [("web_search", "Peru capital", "Lima", "ok")]


@pytest.mark.parametrize("program", ["print(web_search('x'))", "a = web_search('x')\nprint(a)"])
def test_what_print_returns_is_no_observation(read, program):
    seen = "Execution logs:\n\nLast output from code snippet:\nNone"
    record = {"question": "Q?", "steps": [step(1, [("python_interpreter", program)], seen)]}
    (trace,), _ = read("smolagents", record)
    assert calls_of(trace) == [("web_search", "x", "", "ok")]


@pytest.mark.parametrize(
    ("program", "frame"),
    [
        ("print(web_search('x'))", "Execution logs:\n{}\nLast output from code snippet:\nNone"),
        ("a = web_search('x')", "Execution logs:\nLast output from code snippet:\n{}"),
    ],
)
def test_a_text_that_looks_like_the_frame_is_not_cut(read, program, frame):
    page = "About agents.\nLast output from code snippet:\nNone\nmore"
    made = step(1, [("python_interpreter", program)], frame.format(page))
    (trace,), _ = read("smolagents", {"question": "Q?", "steps": [made]})
    assert calls_of(trace) == [("web_search", "x", page, "ok")]


def test_functions_that_smolagents_has_without_an_import_are_imported_for_the_code_tool(read):
    source = "\nroot = sqrt(16)\nprint(root, ceil(log(exp(1.5))))"
    interpreter = LocalPythonExecutor([])
    interpreter.send_tools({})
    logs = interpreter(source).logs
    assert logs == "4.0 2\n"
    made = [step(1, [("python_interpreter", source)], logs)]
    own = "from math import floor\ndef sqrt(x):\n    return floor(x)\nprint(sqrt(2))"
    made.append(step(2, [("python_interpreter", own)], "1"))
    made.append(step(3, [("python_interpreter", "print(sqrt(floor(2.5)))")], "2"))
    (trace,), _ = read("smolagents", {"question": "Q?", "steps": made})
    first, *others = [body for _, body, _, _ in calls_of(trace)]
    assert first == f"```py\nfrom math import ceil, exp, log, sqrt{source}\n```"
    assert not any("import sqrt" in body or "import floor, sqrt" in body for body in others)
    context = ToolContext("e", 0, None, ())
    assert asyncio.run(call_tool(CodeTool(), first, context)).text == "[EXECUTED]\n4.0 2"


def test_those_functions_are_the_ones_of_the_installed_smolagents():
    without_import = BASE_PYTHON_TOOLS.keys() - set(dir(builtins))
    assert {examine(f"{name}(1)", ()).maths for name in without_import} == {
        (name,) for name in without_import
    }


@pytest.mark.parametrize(
    "program",
    [
        "found = web_search('Peru')\nprint(found[:100])",
        "print(web_search('a'), web_search('b'))",
        "print(web_search(name))",
        "print(web_search('Peru', 3))",
        "print(search_tool.forward('Peru'))",
        "for q in ['a', 'b']:\n    print(web_search(q))",
        "print(list(map(web_search, ['a', 'b'])))",
        "look = web_search\nprint(look('a'))",
        "print(given * 2)",
    ],
)
def test_a_program_whose_calls_of_tools_cannot_be_told_apart_is_refused(read, program):
    record = {"question": "Q?", "steps": [step(1, [("python_interpreter", program)], "x")]}
    traces, report = read("smolagents", record)
    assert traces == []
    assert "a tool or agent whose call the file lacks" in reasons(report)


def test_what_programs_define_themselves_is_no_tool(read):
    first = step(1, [("python_interpreter", "import math\ndef half(x):\n    return x / 2")], "")
    second = step(2, [("python_interpreter", "print(half(math.floor(max(4.5, 1))))")], "2.0")
    error = {"type": "E", "message": "The variable `helper` is not defined"}
    third = step(3, [("python_interpreter", "print(helper(2))")], None, error=error)
    (trace,), _ = read("smolagents", {"question": "Q?", "steps": [first, second, third]})
    assert [call[0] for call in calls_of(trace)] == ["code"] * 3
    _, report = read("smolagents", {"question": "Q?", "steps": [second]})
    assert "step 2 uses 'half'" in reasons(report)
    caught = "match [1, {'a': 2}]:\n    case [one, {'a': 2, **more}] as all: print(one, more, all)"
    assert examine(caught, ()).unknown == ()


def test_nothing_that_a_step_does_beside_asking_an_agent_vanishes(read):
    run = {"agent": "helper", "task": "x", "caller_step": 1, "steps": [], "answer": "A"}

    def reason(*calls, **changes):
        record = {"question": "Q?", "steps": [step(1, calls, "A")]}
        _, report = read("smolagents", {**record, "managed_runs": [{**run, **changes}]})
        return reasons(report)

    both = "does something besides"
    assert both in reason(("python_interpreter", "a = helper('x')\nprint(float(a) * 2)"))
    assert both in reason(("python_interpreter", "print(helper('x'), web_search('y'))"))
    asks = ("helper", {"task": "x"})
    assert "makes 2 calls at once" in reason(asks, ("web_search", {"query": "y"}))
    assert "whose run is not in the file" in reason(asks, asks)
    assert "belongs to step 7, which is not there" in reason(("final_answer", {}), caller_step=7)
    assert "asks no managed agent" in reason(("web_search", {"query": "y"}))
    assert both in reason(("python_interpreter", "print(helper(web_search('y')))"))
    assert both in reason(("python_interpreter", "print(helper(str(map(web_search, 'y'))))"))
    glue = "for n in names:\n    task = f'about {n}'\n    print('It is: ' + helper(task))"
    assert reason(("python_interpreter", glue)) == reason(asks) == ""


def test_programs_are_told_apart_by_what_they_do():
    assert examine("x = 1\nfinal_answer(x)", ()).computes is False
    assert examine("final_answer(2 ** 8)", ()).computes
    assert examine("print(helper(f'{x}'), helper(task='t'))", ("helper",)).requests == (
        ("helper", None),
        ("helper", "t"),
    )
    assert examine("print(", ()).computes
    for source in ("x > 1", "not x", "-x", "x or y", "1 if x else 2", "f'{x}'", "{n for n in x}"):
        assert examine(f"print({source})", ()).computes
    assert examine("print({'a': b for b in x})", ()).computes
    worded = ("f'It is {x}'", "'It is ' + x", "x['capital']", "', '.join(str(n) for n in x)")
    for answer in worded:
        assert not examine(f"final_answer({answer})", ()).computes
        assert not examine(f"found = {answer}\nfinal_answer(found)", ()).computes
    assert examine("final_answer(given)", ()).unknown == ()
    for answer in ("f'{x * 2}'", "x + 2", "round(x)", "', '.join(sorted(x))"):
        assert examine(f"final_answer({answer})", ()).computes
    assert not examine("print(-1, f'x')", ()).computes


def test_a_program_that_computes_the_answer_runs_as_plain_python(capsys):
    """A policy has no `final_answer` in its sandbox, so the distilled program must not call it."""
    source = "x = 'Maß'; final_answer(answer=6 * 7)\nif x:\n    final_answer(sqrt(16))"
    exec(runnable(examine(source, ())), {})
    assert capsys.readouterr().out == "42\n4.0\n"
    assert runnable(examine("print('final_answer(1)')", ())) == "print('final_answer(1)')"


def test_words_and_plans_are_taken_out_of_what_is_around_them():
    assert thought_of("Thought: I see.\nCode:\n```py\n1\n```<end_code>") == "I see."
    assert thought_of("I see.\n<code>\n1\n</code>") == "I see."
    assert split_plan("1. Do it <end_plan>") == ("", "1. Do it")
