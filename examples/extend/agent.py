"""An agent: the policy may search, answers, and is asked to check its answer.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu task.agent=examples.extend.agent.second_thoughts task.agent.checks=2
"""

import re
from typing import Annotated

from annotated_types import Ge

from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish
from rlsys.rollout.agent.recorder import Generation, Parsed, Recorder
from rlsys.rollout.tools.calls import Toolbox, render_result

ACTIONS = {"search": Action.SEARCH, "answer": Action.ANSWER}
WRITTEN = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


def parse(text: str, generation: Generation) -> Parsed:
    """Return the first action in a turn; the recorder keeps its text, and takes its tokens from `generation`."""
    del generation
    found = WRITTEN.search(text)
    return Parsed(text, ACTIONS[found[1]], found[2].strip()) if found else Parsed(text, Action.INVALID, "")


async def second_thoughts(
    question: Question, tools: Toolbox, recorder: Recorder, *, checks: Annotated[int, Ge(0)] = 1
) -> Finish:
    """Play one episode; the answer after `checks` further looks counts."""
    del question  # The recorder begins with its prompt.
    for _ in range(recorder.task.max_turns + checks + 1):
        turn = await recorder.generate(parse, stop=["</search>", "</answer>"])
        if turn.action is Action.ANSWER and not checks:
            return Finish.ANSWER
        if turn.action is Action.ANSWER:
            checks -= 1
            recorder.observe("\nCheck your answer, then give it again.\n")
        elif turn.action is Action.SEARCH and tools.searches:
            result = await tools.search(turn.content)
            recorder.observe(f"\n<information>{render_result(result)}</information>\n", result)
        else:
            recorder.observe("\nSearch or answer.\n")
    return Finish.TURN_LIMIT
