"""Makes episodes from written turns and observations, parsed by the real protocol."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlsys.config.schema import CompatConfig, RewardConfig, SearchR1Agent, TagsConfig, TaskConfig
from rlsys.data.question import Question
from rlsys.data.trajectory import Action, Finish, Trajectory, Turn
from rlsys.orchestrator.rewards.reward import EpisodeParser, ParsedEpisode
from rlsys.rollout.agent.search_r1 import TurnRules
from tests.support.trajectories import trajectory

TEMPLATE = "Answer the question, for example, <answer> Beijing </answer>. Question: {}\n"

Said = str | tuple[str, str] | tuple[str, str, str]
"""A turn: the policy's text; for a search also the retrieved text, and optionally the error of the search."""


def task_of(**settings: Any) -> TaskConfig:
    return TaskConfig(train_path="train.jsonl", eval_path="eval.jsonl", **settings)


TASK = task_of()


def question(*answers: str, prompt: str = TEMPLATE.format("What is the capital of Mali?")) -> Question:
    return Question("q:1", prompt, answers)


def episode(
    *said: Said,
    task: TaskConfig = TASK,
    prompt_tokens: int = 3,
    response_tokens: int = 5,
    tools: Mapping[str, str] = {},
) -> Trajectory:
    """Trajectory that the protocol makes of `said`; all its tokens are 0, and `tools` maps tools' names to tags."""
    rules = TurnRules(task, {tag: name for name, tag in tools.items()})
    turns, finish = [], Finish.TOKEN_LIMIT
    for one in said:
        text, found, error = (*((one,) if isinstance(one, str) else one), "", "")[:3]
        seen = rules.parse(text)
        ending = rules.finish(len(turns), seen.action)
        if ending is not None:
            observation, finish = "", ending
        elif seen.action is Action.INVALID:
            observation = SearchR1Agent().invalid_message
        else:
            word = task.tags.information
            observation = f"\n\n<{word}>{found}</{word}>\n\n"
        turns.append(Turn(seen.text, seen.action, seen.content, observation, 1, 1, 0, 0.0, 0.0, error, tool=seen.tool))
        if ending is not None:
            break
    length = prompt_tokens + response_tokens
    made = trajectory(
        [0] * length, [True] * length, sample=2, turns=turns, finish=finish, rollout_logprobs=[0.0] * length,
        turn_of_token=[-1] * length,
    )  # fmt: skip
    return replace(made, prompt_length=prompt_tokens, response="".join(turn.text + turn.observation for turn in turns))


def think(act: str, content: str, thought: str = "hm") -> str:
    """Well-formed turn with a thought and an action."""
    return f"<think>{thought}</think>\n<{act}>{content}</{act}>"


def read(
    trajectory: Trajectory, *answers: str, tags: TagsConfig = TASK.tags, over_prompt: bool = False
) -> ParsedEpisode:
    return EpisodeParser(tags, CompatConfig(answer_over_prompt=over_prompt), {}).read(question(*answers), trajectory)


def terms(**weights: float) -> RewardConfig:
    return RewardConfig(terms=weights)
