import pytest

from coa_jax.distillation.readers.base import Malformed
from coa_jax.distillation.readers.tool_calls import body_of


@pytest.mark.parametrize(
    ("tag", "arguments", "key"),
    [
        ("crawl_page", {"url": "https://a.b", "start_index": 5000}, "start_index"),
        ("crawl_page", {"url": "https://a.b", "page": 2}, "page"),
        ("web_search", {"query": "x", "filter_year": 2019}, "filter_year"),
        ("wiki_search", {"query": "x", "question": "y"}, "question"),
        ("code", {"code": "1", "language": "javascript"}, "language"),
        ("code", {"code": "1", "stdin": 5}, "stdin"),
    ],
)
def test_an_argument_that_changes_the_result_is_refused(tag, arguments, key):
    with pytest.raises(Malformed, match=f"a call of {tag} with '{key}', which changes its result"):
        body_of(tag, arguments)


def test_an_argument_that_changes_nothing_is_left_out():
    page = {"url": "https://a.b", "start_index": 0, "max_length": 9000, "page": 1, "raw": False}
    assert body_of("crawl_page", page) == "https://a.b"
    search = {"query": "x", "max_results": 5, "filter_year": None, "reason": "to know"}
    assert body_of("web_search", search) == "x"
    assert body_of("code", {"code": "1", "language": "python"}) == "```py\n1\n```"


def test_the_standard_input_of_a_program_is_kept():
    body = "```py\nprint(input())\n```\n```sh\n5\n```"
    assert body_of("code", {"code": "print(input())", "stdin": "5"}) == body
    assert body_of("code", {"code": "```python\nprint(input())\n```", "input": "5\n"}) == body
    with pytest.raises(Malformed, match="a standard input that cannot be written"):
        body_of("code", {"code": "print(input())", "stdin": "a\n```\nb"})
    with pytest.raises(Malformed, match="a standard input that cannot be written"):
        body_of("code", {"code": body, "stdin": "6"})
