"""Multi-hop question answering: prompts, scores and rewards.

A task's `answer` is the list of golden answers (aliases); `info['question']` is the
question itself. Scores depend on the last assistant message only.
"""

import collections
from collections.abc import Collection, Sequence
import re
import string
from typing import Any

from agent_r1_jax.agent import call_formats, calls
from agent_r1_jax.agent import messages as messages_lib
from agent_r1_jax.retrieval import documents
from agent_r1_jax.retrieval.documents import Hit
from agent_r1_jax.types import ControlText, Message, Task

# A tag in these prompts is encoded as one token if the tokenizer has it, since the policy
# writes it so.
AGENT = ControlText(
  'Answer the question. Use the search tool to find the facts you need: search for one '
  'fact at a time, as often as necessary, and read the passages before you go on. When '
  'you know the answer, give it inside <answer> and </answer>, as short as possible and '
  'without explanation, for example <answer>Beijing</answer>.\n\nQuestion: {question}'
)
DIRECT = ControlText(
  'Answer the question from what you know. Give the answer inside <answer> and '
  '</answer>, as short as possible and without explanation, for example '
  '<answer>Beijing</answer>.\n\nQuestion: {question}'
)
RAG = ControlText(
  'Answer the question with the help of the passages. Give the answer inside <answer> '
  'and </answer>, as short as possible and without explanation, for example '
  '<answer>Beijing</answer>.\n\n{passages}\n\nQuestion: {question}'
)

Scores = dict[str, float]

# Matches the innermost pair of nested tags.
_ANSWER = re.compile(r'<answer>((?:(?!</?answer>).)*)</answer>', re.DOTALL)
_PUNCTUATION = str.maketrans('', '', string.punctuation)
# HotpotQA gives these no credit for shared words.
_CLOSED = ('yes', 'no', 'noanswer')


def agent_task(task: Task) -> Task:
  """Asks the question of an agent with a search tool."""
  return _ask(task, AGENT)


def direct_task(task: Task) -> Task:
  """Asks the question of a model without tools."""
  return _ask(task, DIRECT)


def rag_task(task: Task, hits: Sequence[Hit]) -> Task:
  """Asks the question after its retrieved passages, in the form of the search tool."""
  return _ask(task, RAG, passages=documents.render(hits))


def _ask(task, prompt, **fields):
  return task.ask(prompt.format(question=task.info['question'], **fields))


def normalize_answer(text: str) -> str:
  """Lowers case and removes punctuation, articles and superfluous space (SQuAD)."""
  text = text.lower().translate(_PUNCTUATION)
  return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', text).split())


def exact_match(prediction: str, golden: str | Sequence[str]) -> float:
  """Strict EM: 1.0 if the normalised prediction equals any normalised golden answer."""
  prediction = normalize_answer(prediction)
  return float(any(prediction == normalize_answer(g) for g in _list_aliases(golden)))


def cover_exact_match(prediction: str, golden: str | Sequence[str]) -> float:
  """Cover-EM: 1.0 if any normalised golden answer is a substring of the prediction.

  Search-R1's `subem`. It is lenient ('unknown' covers 'no') and does not replace EM. A
  golden answer of only articles and punctuation must be equal to be covered.
  """
  prediction = normalize_answer(prediction)
  covers = (normalize_answer(g) for g in _list_aliases(golden))
  return float(any(g == prediction or (g and g in prediction) for g in covers))


def f1(prediction: str, golden: str | Sequence[str]) -> float:
  """Computes HotpotQA's F1 of words, the maximum over the golden answers.

  Where either side is yes, no or noanswer, only equality scores.
  """
  prediction = normalize_answer(prediction)
  scores = (_f1(prediction, normalize_answer(g)) for g in _list_aliases(golden))
  return max(scores, default=0.0)


def _f1(prediction, golden):
  if prediction != golden and (prediction in _CLOSED or golden in _CLOSED):
    return 0.0
  predicted, true = prediction.split(), golden.split()
  shared = (collections.Counter(predicted) & collections.Counter(true)).total()
  return 2 * shared / (len(predicted) + len(true)) if shared else 0.0


def _list_aliases(golden):
  """Lists golden answers as texts: a single one, which may be a number, or several."""
  alone = isinstance(golden, str | int | float)
  aliases = [golden] if alone else golden or ()
  # Normalising removes the point, which would turn 42.0 into 420.
  whole = lambda alias: isinstance(alias, float) and alias.is_integer()
  return [str(int(alias) if whole(alias) else alias) for alias in aliases]


def extract_answer(text: str) -> str | None:
  """Returns the content of the last <answer>...</answer> outside thoughts, or None."""
  answers = _ANSWER.findall(calls.remove_thoughts(text))
  return answers[-1].strip() if answers else None


def canonical_answer(reply: str) -> str | None:
  """Returns a reply's answer as `exact_match` compares it; None if there is none."""
  answer = extract_answer(reply)
  return normalize_answer(answer) if answer else None


def em_reward(task: Task, messages: Sequence[Message]) -> float:
  """Scores the final answer by strict EM; 0.0 if there is none."""
  return metrics(task, messages)['em']


def paper_reward(task: Task, messages: Sequence[Message]) -> float:
  """r_f = EM if r_format = 1, else r_format - 1 (arXiv 2511.14460, eq. 6).

  r_format is the mean of two binaries: the last assistant message has exactly one
  <answer>...</answer> outside its thoughts; no assistant message has a malformed call.

  Returns:
    1.0 or 0.0 if the format is right; -0.5 and -1.0 for one and two faults.
  """
  last = calls.remove_thoughts(messages_lib.last_reply(messages))
  # Exactly one: with two, a policy could bet on two answers.
  presented = last.count('<answer>') == last.count('</answer>') == 1
  presented = presented and extract_answer(last) is not None
  parse = call_formats.chat_format.get().parse
  replies = [m['content'] for m in messages if m['role'] == 'assistant']
  parsed = [call for reply in replies for call in parse(reply)]
  called = not any(isinstance(call, calls.CallError) for call in parsed)
  r_format = (presented + called) / 2
  return em_reward(task, messages) if r_format == 1 else r_format - 1


def found_share(task: Task, messages: Sequence[Message]) -> float:
  """Computes the share of info['supporting_titles'] that the tools have shown.

  Use it as a dense part of a hybrid reward. 0.0 if the task names no passages.
  """
  gold = task.info.get('supporting_titles') or ()
  passages = '\n'.join(m['content'] for m in messages if m['role'] == 'tool')
  return sum(f'(Title: {title})' in passages for title in gold) / max(len(gold), 1)


def supporting_facts(predicted: Collection[Any], golden: Collection[Any]) -> Scores:
  """Computes em, precision, recall and f1 of supporting facts, as HotpotQA does.

  A fact is (title, sentence) in HotpotQA and 2Wiki, and a paragraph in MuSiQue, whose
  script computes the same f1.
  """
  predicted, golden = {*predicted}, {*golden}
  right = len(predicted & golden)
  return {
    'em': float(predicted == golden),
    'precision': right / len(predicted) if predicted else 0.0,
    'recall': right / len(golden) if golden else 0.0,
    'f1': 2 * right / (len(predicted) + len(golden)) if right else 0.0,
  }


def _find_shown_passages(task: Task, messages: Sequence[Message]) -> set[str]:
  """Returns the passages that the tools have shown: gold titles, and other lines."""
  passages = '\n'.join(m['content'] for m in messages if m['role'] == 'tool')
  lines = {line for line in passages.splitlines() if '(Title: ' in line}
  marks = {f'(Title: {title})': title for title in task.info['supporting_titles']}
  # A gold title counts once, however often it is shown; any other line is a passage.
  gold = {title for mark, title in marks.items() if mark in passages}
  return gold | {line for line in lines if not any(mark in line for mark in marks)}


def metrics(task: Task, messages: Sequence[Message]) -> dict[str, float]:
  """Computes em, cover_em, f1 of the final answer, and whether there is one (answered).

  A blank answer counts as none. If the task names its supporting passages, support_em,
  support_precision, support_recall and support_f1 compare them with the passages that the
  tools have shown, since an agent names none itself.
  """
  answer = extract_answer(messages_lib.last_reply(messages))
  support = {}
  if task.info.get('supporting_titles'):
    titles = _find_shown_passages(task, messages)
    scores = supporting_facts(titles, task.info['supporting_titles'])
    support = {f'support_{name}': value for name, value in scores.items()}
  if not answer:
    return dict.fromkeys(('em', 'cover_em', 'f1', 'answered'), 0.0) | support
  return support | {
    'em': exact_match(answer, task.answer),
    'cover_em': cover_exact_match(answer, task.answer),
    'f1': f1(answer, task.answer),
    'answered': 1.0,
  }
