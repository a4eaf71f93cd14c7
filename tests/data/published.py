"""Trajectories in the file formats in which other projects publish them.

The files are written from the descriptions of the formats, without our exporter and readers.
"""

from __future__ import annotations

import dataclasses

from coa_jax.data.trajectory import DistilledRecord

WEB_INSTRUCTIONS = (
    "Solve the task with the functions think, plan, web_search, crawl_page, reflection, "
    "suggested_answer, double_check and answer.\n\n"
    "1. <plan>ordered sub-tasks</plan>\n2. <web_search>one query</web_search>\n"
    "3. <crawl_page>url1 | url2</crawl_page>"
)
"""Instructions as long as they need be; the words of the release are not copied here."""


@dataclasses.dataclass(frozen=True)
class Story:
    """A trajectory: the policy's turns, and what tools returned between them."""

    question: str
    protocol: str
    said: tuple[str, ...]
    seen: tuple[str, ...]
    answer: str

    def record(self, **changes) -> DistilledRecord:
        """The record of our own form."""
        parts = [("policy", self.said[0])]
        for seen, said in zip(self.seen, self.said[1:], strict=True):
            parts.append(("environment", f"\n<observation>\n{seen}\n</observation>\n\n"))
            parts.append(("policy", said))
        values = {"id": "r", "question": self.question, "protocol": self.protocol, "gold": ()}
        values |= {"parts": tuple(parts), "answer": self.answer}
        return DistilledRecord(**{**values, **changes})

    def text(self, before="\n", inside="\n", after="\n\n", quote=False) -> str:
        """The assistant's turn as one text, with white space around the observation tags."""
        text = self.said[0]
        for seen, said in zip(self.seen, self.said[1:], strict=True):
            text += f"{before}<observation>{inside}{seen}{inside}</observation>{after}{said}"
        return text


RIVER = Story(
    question="Which sea does the longest river of Corvale reach?",
    protocol="web",
    said=(
        "<think>Two facts are needed.</think>\n<plan>1. the river\n2. its mouth</plan>\n"
        "<think>I look for it.</think>\n<web_search>longest river of Corvale</web_search>",
        "<think>The page may have more.</think>\n"
        "<crawl_page>https://a.example/delling | https://b.example</crawl_page>",
        "<think>Both agree.</think>\n<reflection>information_conflict: Good\n"
        "tool_effectiveness: Fair\ntrajectory_monitoring: Good</reflection>\n"
        "<think>It is settled.</think>\n<suggested_answer>the Vell Sea</suggested_answer>\n"
        "<think>Nothing is wrong.</think>\n<double_check>The score is 4.</double_check>\n"
        "<answer>the Vell Sea</answer>",
    ),
    seen=(
        "[1] The Delling <b>is</b> the longest river.\n<code>see</code> page 川\n",
        'It ends in the Vell Sea. &lt;/observation&gt; "observation>"\n\nIts mouth is wide.',
    ),
    answer="the Vell Sea",
)
SUMS = Story(
    question="What is 6 times 7?",
    protocol="code",
    said=(
        "<plan>Multiply.</plan>\n<think>A program says it.</think>\n"
        '<code>\n```py\nprint("<observation>", 6 * 7)\n```\n</code>',
        "<reflection>It printed 42.</reflection>\n<think>Done.</think>\n"
        "<answer>\\boxed{42}</answer>",
    ),
    seen=("<observation> 42\n",),
    answer="\\boxed{42}",
)
HOPS = Story(
    question="Who founded the town?\n\nName one person.",
    protocol="mhqa",
    said=(
        "<think>One search.</think>\n<wiki_search>founder of the town</wiki_search>",
        "<think>Found.</think>\n<reflection>It fits.</reflection>\n<think>So:</think>\n"
        "<answer>Mara Delling</answer>",
    ),
    seen=("",),
    answer="Mara Delling",
)
STORIES = (RIVER, SUMS, HOPS)


def message(story: Story, instructions: str = WEB_INSTRUCTIONS) -> str:
    """The user's message of the release: instructions, an empty line, the question."""
    return f"{instructions}\n\nQuestion: {story.question}"


def alpaca(story: Story, **white_space) -> dict:
    """A row of the published SFT sets: the whole message, the tagged trajectory."""
    return {"instruction": message(story), "input": "", "output": story.text(**white_space)}


def sharegpt(story: Story, role="from", content="value", names=("human", "gpt", "observation")):
    """A row with turns; what tools returned stands in turns of its own, without tags."""
    human, gpt, tool = names
    turns = [(human, message(story)), (gpt, story.said[0])]
    for seen, said in zip(story.seen, story.said[1:], strict=True):
        turns += [(tool, seen), (gpt, said)]
    return [{role: who, content: text} for who, text in turns]
