"""Requests to sampling servers, and their answers: vLLM's and SGLang's HTTP APIs."""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

from agent_r1_jax import config as config_lib

# A path on the server, and the JSON to post to it.
Call = tuple[str, dict[str, Any]]


class BadAnswerError(ValueError):
  """An answer that makes no sense."""


class Ask(NamedTuple):
  """A request for a reply.

  Attributes:
    tokens: The sequence so far.
    max_tokens: The maximum number of tokens in the reply.
    sampling: The sampling settings.
    seed: A number of 63 bits.
    stop_ids: Tokens that end the reply, as its last token.
    model: The server's name for the policy; '' lets the server choose.
  """

  tokens: list[int]
  max_tokens: int
  sampling: config_lib.Sampling
  seed: int
  stop_ids: list[int]
  model: str


class Dialect(NamedTuple):
  """The API of a kind of server.

  Attributes:
    write: Writes a request for a reply.
    read: Reads the reply: the tokens and their log-probs. Raises BadAnswerError.
    update: Writes the calls, one after the other, that make a server load the weights in
      a directory.
    check_update: Raises BadAnswerError if the answer to such a call reports a failure,
      whatever its status.
  """

  write: Callable[[Ask], Call]
  read: Callable[[Any], tuple[list[int], list[float]]]
  update: Callable[[str], list[Call]]
  check_update: Callable[[Any], None] = lambda answer: None


def _check(tokens: list[Any], logprobs: list[Any]) -> tuple[list[int], list[float]]:
  numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in logprobs)
  if not tokens or len(tokens) != len(logprobs) or not numbers:
    raise BadAnswerError(
      f'{len(tokens)} tokens with {len(logprobs)} log-probs, {logprobs!r:.80}'
    )
  if not all(type(token) is int for token in tokens):
    raise BadAnswerError(f'tokens that are no ids: {tokens!r:.80}')
  return tokens, [float(x) for x in logprobs]


def _write_vllm(ask: Ask) -> Call:
  sampling = ask.sampling
  return '/v1/completions', {
    **({'model': ask.model} if ask.model else {}),
    'prompt': ask.tokens,
    'max_tokens': ask.max_tokens,
    'temperature': sampling.temperature,
    'top_k': sampling.top_k,
    'top_p': sampling.top_p,
    'min_p': sampling.min_p,
    'seed': ask.seed,
    'stop_token_ids': ask.stop_ids,
    # The server's own end token ends a reply only if the policy's chat includes it.
    'ignore_eos': True,
    'skip_special_tokens': False,
    'logprobs': 0,
    'return_tokens_as_token_ids': True,
  }


def _read_vllm(answer: Any) -> tuple[list[int], list[float]]:
  match answer:
    case {'choices': [{'logprobs': {'tokens': list(names), 'token_logprobs': list(x)}}]}:
      ids = [str(name).removeprefix('token_id:') for name in names]
      if not all(i.isdecimal() and n != i for i, n in zip(ids, names, strict=True)):
        raise BadAnswerError(
          f'tokens are named {names!r:.80} and not by their ids: the server does not '
          'know return_tokens_as_token_ids'
        )
      return _check([int(i) for i in ids], x)
  raise BadAnswerError(f'no log-probs in {answer!r:.120}')


def _write_sglang(ask: Ask) -> Call:
  sampling = ask.sampling
  options = {
    'max_new_tokens': ask.max_tokens,
    'temperature': sampling.temperature,
    'top_k': sampling.top_k or -1,
    'top_p': sampling.top_p,
    'min_p': sampling.min_p,
    # Used only with --enable-deterministic-inference; 31 bits.
    'sampling_seed': ask.seed % 2**31,
    'stop_token_ids': ask.stop_ids,
    'skip_special_tokens': False,
    'no_stop_trim': True,
  }
  fields = {'input_ids': ask.tokens, 'sampling_params': options, 'return_logprob': True}
  return '/generate', fields


def _read_sglang(answer: Any) -> tuple[list[int], list[float]]:
  match answer:
    case {'meta_info': {'output_token_logprobs': list(pairs)}}:
      columns = [pair[:2] for pair in pairs if isinstance(pair, list) and len(pair) > 1]
      return _check([token for _, token in columns], [x for x, _ in columns])
  raise BadAnswerError(f'no output_token_logprobs in {answer!r:.120}')


def _check_sglang(answer: Any) -> None:
  if isinstance(answer, Mapping) and answer.get('success') is False:
    raise BadAnswerError(f'{answer.get("message")!r:.200}')


# From docs.vllm.ai, 0.10 to 0.32. The update calls need VLLM_SERVER_DEV_MODE=1; they load
# again what `vllm serve DIRECTORY` has loaded.
VLLM = Dialect(
  _write_vllm,
  _read_vllm,
  lambda directory: [
    ('/collective_rpc', {'method': 'reload_weights'}),
    ('/reset_prefix_cache', {}),
  ],
)
# From docs.sglang.io ("SGLang for RL systems").
SGLANG = Dialect(
  _write_sglang,
  _read_sglang,
  lambda directory: [
    ('/update_weights_from_disk', {'model_path': directory, 'flush_cache': True})
  ],
  _check_sglang,
)
