"""A search agent as a graph of LangGraph, which asks the policy through LangChain. It acts by Search-R1's tags.

PYTHONPATH=$PWD rlsys train -c searchr1_tiny_cpu task.agent=gateway task.agent.entry=examples.agents.langgraph.agent \\
    task.token_mode=append task.train_eos=false
"""

import re
from typing import Any

import httpx
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

SEARCH = re.compile(r"<search>\s*(\S.*?)</search>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_SEARCHES = 3
MOST_CHARS = 700


async def agent(question: str, base_url: str, api_key: str) -> str:
    """Let the graph run until the policy answers; return the answer."""
    async with httpx.AsyncClient(timeout=None) as http:
        policy = ChatOpenAI(
            model="policy", base_url=base_url, api_key=SecretStr(api_key), max_retries=0, http_async_client=http
        )

        async def think(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await policy.ainvoke(state["messages"])]}

        async def search(state: MessagesState) -> dict[str, Any]:
            query = SEARCH.findall(said(state))[0].strip()
            key = {"Authorization": f"Bearer {api_key}"}
            found = (await http.post(f"{base_url}/search", json={"query": query}, headers=key)).json()["result"]
            return {"messages": [HumanMessage(f"\n\n<information>{found[:MOST_CHARS].strip()}</information>\n\n")]}

        graph = StateGraph(MessagesState)
        graph.add_node("think", think)
        graph.add_node("search", search)
        graph.add_edge(START, "think")
        graph.add_conditional_edges("think", following, ["search", END])
        graph.add_edge("search", "think")
        ended: Any = await graph.compile().ainvoke({"messages": [HumanMessage(f"Question: {question}\n")]})
    answer = ANSWER.search(said(ended))
    return answer[1] if answer else ""


def said(state: MessagesState) -> str:
    """Return the text of the last message."""
    return str(state["messages"][-1].content)


def following(state: MessagesState) -> str:
    """Return the node after the policy's: the search, until the policy asks for none or has searched enough."""
    searches = len(state["messages"]) // 2 - 1
    return "search" if SEARCH.search(said(state)) and searches < MOST_SEARCHES else END
