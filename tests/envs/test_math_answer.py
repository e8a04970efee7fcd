"""The table of expected scores: right answers are never graded 0, and no answer is not a wrong one."""

from __future__ import annotations

import pytest

from fathom.envs.math_answer import grade_math, marked_answer, plain_number, reference_answer

RIGHT = [
    ("42", "#### 42" + "x" * 400),
    ("42", "#### 42\n" + "x" * 400),
    ("42", "#### 42" + " " * 400),
    ("42", "#### 42" + " and so on" * 40),
    ("42", "#### 42. " + "Then 3 more words. " * 22),
    ("42", "So 40 + 2.\n#### 42"),
    ("2,125", "#### 2,125"),
    ("2125", "#### 2,125"),
    ("2,125", "#### 2125"),
    ("2125", r"\boxed{2{,}125}"),
    ("2125", r"\boxed{2\,125}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{0.5}"),
    (r"\frac{1}{2}", "The answer is 1/2"),
    ("0.5", r"\boxed{\dfrac12}"),
    ("3", r"first \boxed{2}, no: \boxed{3}"),
    (r"\frac{\sqrt{2}}{3}", r"\boxed{\frac{\sqrt{2}}{3}}"),
    (r"3\sqrt{13}", r"\boxed{\sqrt{117}}"),
    (r"5\pi", r"\boxed{5\pi}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    ("{1,2}", r"\boxed{\{2,1\}}"),
    ("2x+1", r"\boxed{1+2x}"),
    ("B", r"\boxed{\text{B}}"),
    ("18", "$18"),
    ("18", "18.00"),
    ("18", "18."),
    ("18", "x = 18"),
    ("18", r"\boxed{x=18}"),
    ("18", r"\boxed{18\text{ dollars}}"),
    ("18", r"\boxed{\$18}"),
    ("18", "It costs $10 and then she has $18."),
    ("18", "The answer is $18 per day."),
    ("18", "The answer is as follows:\n18"),
    ("18", r"\boxed{18} The answer is given in dollars."),
    ("34", "**Answer:** 34"),
    ("34", "**Answer: 34**"),
    ("34", r"Answer: \boxed{$34$}"),
    ("-5", "-5"),
    ("-5", "$-5$"),
    ("-5", "−5"),
    ("0.5", ".5"),
    ("50", "50%"),
    ("1000000", "1,000,000"),
    ("42", "42 is the answer"),
    ("She has 9 + 9 = <<9+9=18>>18 left.\n#### 18", "18"),
    ("18", "#### 17, no, that is wrong. #### 18"),
    ("100", r"\boxed{10^2}"),
    ("12", r"\boxed{3*4}"),
    ("3xy", r"\boxed{3yx}"),
    ("18", r"\boxed{18cm}"),
    ("0.5", r"\boxed{50\%}"),
]

WRONG = [
    ("2", r"\boxed{2} no \boxed{3}"),
    ("5", "-5"),
    ("-5", "5"),
    ("18", "#### 18 #### 19"),
    ("2", r"\boxed{\sqrt{2}}"),
    ("5", r"\boxed{5\pi}"),
    ("3", "#### 3x"),
    ("10", r"\boxed{10^2}"),
    ("2125", "2.125"),
    ("34", r"\boxed{3*4}"),
    ("3", r"\boxed{3xy}"),
    ("3xy", r"\boxed{3ab}"),
    ("3xy", r"\boxed{3}"),
    ("A", r"\boxed{B}"),
    ("18", "#### banana"),
    ("18", "She had 18 and gave 3 away."),
]

NO_ANSWER = ["", "   \n", "I do not know.", "####", r"\boxed{}", r"\boxed{", "The answer is"]


@pytest.mark.parametrize(("reference", "text"), RIGHT)
def test_right(reference, text):
    graded = grade_math(reference, text)
    assert graded.total == 1.0
    assert graded.answer_found


@pytest.mark.parametrize(("reference", "text"), WRONG)
def test_wrong(reference, text):
    graded = grade_math(reference, text)
    assert graded.total == 0.0
    assert graded.answer_found


@pytest.mark.parametrize("text", NO_ANSWER)
def test_no_answer_is_counted_apart(text):
    graded = grade_math("18", text)
    assert graded.total == 0.0
    assert not graded.answer_found


def test_the_later_mark_wins():
    assert marked_answer(r"#### 1 then \boxed{2}") == "2"
    assert marked_answer(r"\boxed{2}" + "\n#### 1") == "1"
    assert marked_answer("nothing") is None


def test_a_number_with_mathematics_after_it_is_not_that_number():
    for text in ("18 dollars", "$18", "18.00", "18cm", "18.", "**18**", r"\$18\text{ each}"):
        assert plain_number(text, words=True) == 18, text
    for text in ("18/2", "18x+1", "18xy", "18 pi", "18 + 2", "3 and 4", "1:2", "3*4", "3**4", "2^3", "", "x"):
        assert plain_number(text, words=True) is None, text
    assert plain_number("18 xy", words=False) is None


def test_the_reference_of_a_worked_solution():
    assert reference_answer("3 + 15\n#### 18") == "18"
    assert reference_answer(" 18 ") == "18"
    assert reference_answer("  ") == ""
