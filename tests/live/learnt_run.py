"""Teaches a tiny policy two episodes, and trains one step with it."""

import json
import math
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from rlsys.observe.kept import TrajectoryRecord, read_trajectories
from tests.support import tiny
from tests.support.runs import NO_INFERENCE, Finished


def one_step(folder: Path, question: str, *settings: str) -> Finished:
    """Train one step on `question`, whose answer is 42, with the policy in `folder` and a search of one passage."""
    row = {"prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": {"target": ["42"]}}}
    rows = folder / "rows.jsonl"
    rows.write_text(4 * f"{json.dumps(row)}\n")
    usual = [f"model.path={folder / 'policy'}", f"task.train_path={rows}", f"task.eval_path={rows}", "trainer.steps=1"]
    usual += ["trainer.prompts_per_step=4", *NO_INFERENCE]
    with tiny.search_server() as search:
        return Finished(folder, *usual, f"search.url={search.url}", *settings)


def kept_episodes(run: Finished) -> list[TrajectoryRecord]:
    problems: list[str] = []
    kept = list(read_trajectories(run.folder, problems.append))
    assert (problems, len(kept)) == ([], 32)
    return kept


def learnt(texts: list[str], words: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Train a model that writes each of two `texts`, which share their prompt, in about 4 of 10 cases.

    The model also learns the observations, so that it would continue by itself if the engine did not stop it.
    """
    model = tiny.train(tiny.FIRST, words, seed=0, steps=0).train()
    rows = [torch.tensor(words(text)["input_ids"]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    predicted = sum(len(row) - 1 for row in rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(1000):
        loss = model(input_ids=ids, labels=labels).loss
        if loss * predicted / len(rows) < -math.log(0.4):
            return model.eval()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"the model has not learnt its episodes: the loss is still {loss:.4f}")
