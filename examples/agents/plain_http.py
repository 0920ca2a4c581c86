"""A search agent of fifty lines, with nothing but HTTP. It acts by Search-R1's tags, as the demo's policy does.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu task.agent=gateway task.agent.entry=examples.agents.plain_http.agent \\
    task.token_mode=append task.train_eos=false
"""

import json
import re
import urllib.request
from typing import Any

SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
MOST_SEARCHES = 3
MOST_CHARS = 700


def agent(question: str, base_url: str, api_key: str) -> None:
    """Search until the policy answers. The run reads the answer from the last message."""

    def post(path: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(base_url + path, json.dumps(body).encode(), headers)
        ) as reply:
            return json.load(reply)

    messages = [{"role": "user", "content": f"Question: {question}\n"}]
    for searches in range(MOST_SEARCHES + 1):
        reply = post("/chat/completions", {"messages": messages})
        said = reply["choices"][0]["message"]["content"]
        query = SEARCH.search(said)
        if query is None or not query[1].strip() or searches == MOST_SEARCHES:
            return
        found = post("/search", {"query": query[1].strip()})["result"][:MOST_CHARS].strip()
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"\n\n<information>{found}</information>\n\n"},
        ]


if __name__ == "__main__":  # As a command: task.agent.command=[python,-m,examples.agents.plain_http]
    import sys

    given = json.load(sys.stdin)
    agent(given["question"], given["base_url"], given["api_key"])
