"""Mathematical answers in the forms in which people write them."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.tasks import maths
from coa_jax.tasks.maths import MathsUnsureError, same_expression, verify
from coa_jax.tasks.maths_spelling import in_latex
from coa_jax.tools.worker import Workers
from tests.tools.fault_server import stopwatch

EQUAL = [
    ("204", "204"),
    ("204", r"\boxed{204}"),
    ("204", "$204$"),
    ("204", r"The answer is \(204\)."),
    ("33", "033"),
    ("27.0", "27"),
    ("1234", "1,234"),
    ("1500", "1.5e3"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", r"\dfrac{1}{2}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("90", r"90^\circ"),
    (r"90^\circ", "90 degrees"),
    ("(2,5]", r"\left(2, 5\right]"),
    (r"\{1,2,3\}", r"\{3, 2, 1\}"),
    ("5", r"5\text{ cm}"),
    ("5", r"5\,\mathrm{m/s}"),
    (r"\text{east}", "east"),
    ("Saturday", "saturday"),
    (r"50\%", "50"),
    (r"\$18.90", "18.90"),
    ("5", "x = 5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"3\frac12", "3.5"),
    (r"\pm 2", "2,-2"),
    ("6 - 5i", "6-5i"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ("A", r"\text{(A)}"),
    ("2^{10}", "1024"),
]
AS_TYPED = [  # math-verify alone reads these as words or as other values
    (r"\frac{3}{4}", "¾"),
    (r"\frac{7}{2}", "3½"),
    (r"\frac{9}{7}", "1 2/7"),
    (r"11\sqrt2", "11√2"),
    (r"\sqrt{x+1}", "√(x+1)"),
    (r"1 \pm \sqrt{19}", "1 ± √19"),
    (r"\frac{\pi}{6}", "π/6"),
    (r"\frac{\pi}{6}", "pi/6"),
    (r"8\pi r^2", "8πr²"),
    ("36", "36°"),
    ("-1", "\u22121"),
    ("2^{1009}", "2**1009"),
    (r"5 \times 10^{-7}", "5 \u00d7 10⁻⁷"),
    ("10080", r"10\,080"),
    (r"10,\!080", "10080"),
    ("32348", "32,348 dollars"),
    ("17", "17 people"),
    ("17", "**17**"),
    ("10", "10 km/h"),
    (r"\infty", "∞"),
    (r"\emptyset", r"\varnothing"),
    (r"(-\infty,2)\cup(3,\infty)", "(-∞, 2) \N{UNION} (3, ∞)"),
    (r"(-\infty,2)\cup(3,\infty)", "(-oo,2) U (3,oo)"),
    (r"(-\infty,2)\cup(3,\infty)", r"x < 2 \text{ or } x > 3"),
    ("[-2,7]", r"-2 \le x \le 7"),
    ("(-2,7]", "-2 < x ≤ 7"),
    (r"[\frac{1}{2},\sqrt{2}]", r"\frac{1}{2} \leq t \leqslant \sqrt{2}"),
    ("a<b<c", "a < b < c"),
    ("4343_6", "4343_{6}"),
    ("$2^{10}$", "1024"),
    ("5", "x = $5$"),
    ("12", "(C) $12$"),
    (r"$(1,2)$ and $(2,1)$", r"\boxed{(2,1), (1,2)}"),
    (r"$\frac{1}{2}$, $-\frac{1}{2}$", r"$-0.5$ and $0.5$"),
    (r"3 \times 10^8", "3e8"),
    ("300000000", "3 x 10^8"),
    (r"1.60 \times 10^{-19}", r"1.6 \cdot 10^{-19}"),
    ("(1,2)", r"(x, y) = (1, 2)"),
    ("(1,2,3)", r"(x_1,x_2,x_3)=(1,2,3)"),
    ("5", "5 cm²"),
    (r"5\text{ cm}^2", "5cm^2"),
    ("5", "€5"),
]
DIFFERENT = [
    ("$2^{10}$", r"\boxed{$2^{10}$ + 1}"),
    ("2", "$1$, $2$"),
    ("2", "3 - $2$"),
    (r"\frac{7}{2}", "3 + 2"),
    ("1 2/7", "3/7"),
    ("17", "17 theta"),
    ("17", "17 wrong"),
    ("17", "17 sqrt"),
    ("4343_6", "4343_7"),
    ("east", "seat"),
    ("(-2,7]", "-2 < x < 7"),
    (r"(-\infty,2)\cup(3,\infty)", r"x < 2 \text{ or } x \ge 3"),
    (r"(-\infty,2)\cup(3,\infty)", "x < 2 or y > 3"),
    ("204", "205"),
    ("204", ""),
    ("204", None),
    ("204", "204 or 205"),
    ("204", "204, 205"),
    ("7", "I think it is 204 but maybe 7"),
    ("204", "$203$ or $204$"),
    ("204", r"203} \boxed{204"),
    ("204", r"203}. The answer is \boxed{204"),
    ("(2,5]", "(2,5)"),
    ("(2,5]", "[2,5)"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    (r"\frac13", "0.333"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    (r"\text{east}", "west"),
    ("x^2+2x+1", "(x-1)^2"),
    ("5", "-5"),
    ("A", "B"),
    ("3", "4" * 5000),
    (r"1.6 \times 10^{-19}", r"9.1 \times 10^{-31}"),
    ("0.0000001", "0.0000002"),
    ("(1,2)", "(x,y) = (2,1)"),
    ("5", "5 cm^2 + 1"),
    ("2", "2 thirds"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL + AS_TYPED)
def test_forms_of_one_value_agree(gold, answer):
    assert same_expression(answer, gold)
    assert same_expression(gold, gold)


@given(st.text("0123456789xπ√²½°<>≤ ()[]{}\\\\/*,^or-", max_size=60) | st.text(max_size=60))
def test_any_text_can_be_read_and_closes_no_box_that_it_did_not_close(text):
    written = in_latex(text)
    assert maths._balanced(written) or not maths._balanced(text)


@pytest.mark.parametrize("gold", [gold for gold, _ in EQUAL if "_" not in gold])
def test_latex_is_left_as_it_is(gold):
    assert in_latex(gold) == gold


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_other_values_do_not(gold, answer):
    assert not same_expression(answer, gold)


def test_at_least_ten_forms_are_the_verdict_of_math_verify_itself():
    forms = [(g, a) for g, a in EQUAL if "boxed" not in a and "$" not in a and "\\(" not in a]
    agreed = [pair for pair in forms if verify(*pair)]
    assert len(agreed) >= 20
    assert {pair for pair in forms if pair not in agreed} <= {("1500", "1.5e3")}


def test_an_expression_without_an_end_is_wrong_in_time():
    same_expression("1+1", "2")  # the process is there
    seconds = stopwatch()
    assert not same_expression(r"\sum_{k=1}^{10^{9}} \sin(k!)^{k^{k}} + 9^{9^{9^{9}}}", "3", 1.5)
    assert seconds() < 20  # it would never end
    assert same_expression("1+1", "2")


def test_a_process_that_cannot_start_is_no_verdict(monkeypatch):
    monkeypatch.setattr(maths, "_workers", lambda: Workers("coa_jax.tasks.maths:no_such_function"))
    with pytest.raises(MathsUnsureError):
        same_expression("1+1", "2")


def test_a_missing_package_is_explained(monkeypatch):
    maths._workers.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="grading of maths needs math-verify; run: "):
        same_expression("1+1", "2")
