"""A search agent with OpenAI's SDK. It acts by Search-R1's tags, as the demo's policy does.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu task.agent=gateway task.agent.entry=examples.agents.openai_sdk.agent \\
    task.token_mode=append task.train_eos=false
"""

import re

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_SEARCHES = 3
MOST_CHARS = 700


async def agent(question: str, base_url: str, api_key: str) -> str:
    """Search until the policy answers; return the answer."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"Question: {question}\n"}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for searches in range(MOST_SEARCHES + 1):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message.content or ""
            query = SEARCH.search(said)
            if query is None or not query[1].strip() or searches == MOST_SEARCHES:
                break
            found = await client.post("/search", body={"query": query[1].strip()}, cast_to=dict[str, str])
            passages = found["result"][:MOST_CHARS].strip()
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"\n\n<information>{passages}</information>\n\n"},
            ]
    answer = ANSWER.search(said)
    return answer[1] if answer else ""
