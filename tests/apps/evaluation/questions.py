"""Questions for evaluations of the tiny policy."""

from rlsys.data.question import Question

TEXTS = ["Singa has which time zone?", "Which continent is Juja on?", "What is the capital of Mali?"]
QUESTIONS = [Question(f"q:{n}", f"Question: {text}\n", ("Africa",), "tiny", text=text) for n, text in enumerate(TEXTS)]
