"""A search agent with a model and a tool of smolagents. It acts by Search-R1's tags, as the demo's policy does.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu task.agent=gateway task.agent.entry=examples.agents.smolagents.agent \\
    task.token_mode=append task.train_eos=false
"""

import re
from typing import Any

from openai import OpenAI
from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool

SEARCH = re.compile(r"<search>\s*(\S.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_SEARCHES = 3
MOST_CHARS = 700


class Search(Tool):
    """The run's search."""

    name = "search"
    description = "Searches for passages about a query."
    inputs = {"query": {"type": "string", "description": "What to look for."}}  # noqa: RUF012, as the library has it
    output_type = "string"

    def __init__(self, client: OpenAI) -> None:
        super().__init__()
        self.client = client

    def forward(self, query: str) -> str:
        """Return the passages."""
        found = self.client.post("/search", body={"query": query}, cast_to=dict[str, str])
        return found["result"][:MOST_CHARS].strip()


def agent(question: str, base_url: str, api_key: str) -> str:
    """Search until the policy answers; return the answer."""
    policy: Any = OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs={"max_retries": 0})
    search = Search(policy.client)
    messages, said = [written(MessageRole.USER, f"Question: {question}\n")], ""
    for searches in range(MOST_SEARCHES + 1):
        said = str(policy.generate(messages).content or "")
        query = SEARCH.search(said)
        if query is None or searches == MOST_SEARCHES:
            break
        found = f"\n\n<information>{search(query=query[1].strip())}</information>\n\n"
        messages += [written(MessageRole.ASSISTANT, said), written(MessageRole.USER, found)]
    answer = ANSWER.search(said)
    return answer[1] if answer else ""


def written(role: MessageRole, text: str) -> ChatMessage:
    """Return a message."""
    return ChatMessage(role=role, content=[{"type": "text", "text": text}])
