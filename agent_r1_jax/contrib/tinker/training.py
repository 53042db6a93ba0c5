"""A server's training runs: clients' operations on them, and their order.

Each operation returns an id at once; the result is in `results` later. The operations of
a run are numbered and executed in that order; one that arrives again, after a lost
connection, is not repeated.
"""

from collections.abc import Awaitable, Callable, Mapping
import dataclasses
import datetime
import secrets
import time
from typing import Any

from agent_r1_jax.contrib.tinker import data as data_lib
from agent_r1_jax.contrib.tinker import learning, messages, states, wire, work
from agent_r1_jax.contrib.tinker import losses as losses_lib
from agent_r1_jax.models import lora
from agent_r1_jax.web import fairness, http

UNEMBED = 'this server has no adapter of the unembedding: train_unembed does nothing'

# Names of adapters; the last three are of layers with a recurrent state.
ATTENTION = {'q', 'k', 'v', 'o', 'z', 'a', 'b'}
# How long a session must be silent before another run may replace its run.
_IDLE_SECONDS = 1800.0
_MOST_BYTES = 1 << 28  # Of all waiting requests.


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat()


@dataclasses.dataclass
class Training:
  """A training run as clients see it.

  Attributes:
    session: The session that began it.
    metadata: The client's description, which its saved states record.
    run: Its state; None until it has been made.
    order: The order of its operations.
    last_time: When the latest operation arrived, in ISO format.
  """

  session: str
  metadata: dict[str, Any]
  run: learning.TrainingRun | None = None
  order: work.Order = dataclasses.field(default_factory=work.Order)
  last_time: str = dataclasses.field(default_factory=_now)


class Trainings:
  """The training runs of all clients, by id.

  Attributes:
    learning: Computes.
    states: Saves, and has the clients' name for the base model.
    worker: The thread in which both run.
    results: The results of all requests.
    losses: The losses that clients use.
    sessions: When each session, by id, was last active, by time.monotonic().
    by_id: The runs.
  """

  def __init__(
    self,
    learner: learning.Learning,
    saved: states.States,
    *,
    most: int = 8,
    seconds: float = 600.0,
  ):
    """Makes no run.

    Args:
      learner: Computes.
      saved: Saves.
      most: The maximum number of runs.
      seconds: Time limit of a micro-batch, after which the device is considered lost.
    """
    self.learning, self.states = learner, saved
    self.worker, self.results = work.Worker(seconds), work.Results()
    self.sessions: dict[str, float] = {}
    self.by_id: dict[str, Training] = {}
    self.losses, self._bytes = losses_lib.Losses(), fairness.Shares()
    self._most = most

  def begin_session(self, request: wire.CreateSession) -> dict[str, Any]:
    """Begins a session; forgets sessions that were silent for long and have no run."""
    used = {training.session for training in self.by_id.values()}
    for session_id in self.sessions.keys() - used:
      if self._is_idle(session_id):
        del self.sessions[session_id]
    if len(self.sessions) >= 4096:
      raise http.RefusedError(429, 'there are 4096 sessions; close some')
    session_id = secrets.token_hex(8)
    self.sessions[session_id] = time.monotonic()
    kind = {'type': 'create_session', 'info_message': UNEMBED}
    return kind | {'session_id': session_id}

  def hear(self, session_id: str):
    """Marks a session as active; rejects an unknown session."""
    if session_id not in self.sessions:
      text = f'there is no session {session_id!r:.80}: it ended, or the server did'
      raise http.RefusedError(410, text)
    self.sessions[session_id] = time.monotonic()

  def finish_session(self, session_id: str):
    """Ends a session and its runs; operations that have begun are completed."""
    self.hear(session_id)
    del self.sessions[session_id]
    for run_id in [k for k, v in self.by_id.items() if v.session == session_id]:
      del self.by_id[run_id]

  def create(self, request: wire.CreateModel) -> dict[str, Any]:
    """Begins a run."""
    self.check_base(request.base_model)
    shape = self._make_shape(request.lora_config)
    self.learning.check_rank(shape.rank)
    return self._begin_run(request, lambda: self.learning.start(shape))

  def _begin_run(self, request: Any, make, **result: Any) -> dict[str, Any]:
    """Begins a run made by `make`; `result` is what the client then reads."""
    run_id = f'{request.session_id}:train:{request.model_seq_id}'
    self.hear(request.session_id)

    def start() -> Awaitable[dict]:
      self.worker.check()
      if oldest := self._find_place():
        del self.by_id[oldest]
      self.by_id[run_id] = Training(request.session_id, request.user_metadata or {})
      return begin(self.by_id[run_id])

    async def begin(training: Training) -> dict:
      try:
        training.run = await self.worker.run(run_id, make)
      except BaseException:
        self.by_id.pop(run_id, None)
        raise
      return result or {'model_id': run_id, 'type': 'create_model'}

    request_id = f'{run_id}:create'
    self.results.begin(request_id, request, start)
    return {'request_id': request_id, 'model_id': run_id}

  def find(self, run_id: str) -> Training:
    """Finds a run, and marks its session as active."""
    if (training := self.by_id.get(run_id)) is None:
      text = (
        f'there is no training run {run_id!r:.120}: it was ended, or the server was; '
        'create_training_client_from_state goes on from a saved state'
      )
      raise http.RefusedError(404, text)
    self.hear(training.session)
    return training

  def describe(self, request: wire.ModelId) -> dict[str, Any]:
    """Describes a run, for the client's get_info."""
    run_id = request.model_id
    training = self.find(run_id)
    if training.run is None:
      raise http.RefusedError(409, f'the training run {run_id} is still being made')
    return {
      'type': 'get_info',
      'model_data': {'arch': self.learning.config.family, 'model_name': self.states.base},
      'model_id': run_id,
      'is_lora': True,
      'lora_rank': training.run.shape.rank,
      'model_name': self.states.base,
    }

  def check_base(self, name: str | None):
    """Rejects another base model than this server's."""
    if name not in (None, self.states.base):
      text = f'the base model {name!r:.120} is not here; there is {self.states.base}'
      raise http.RefusedError(400, text)

  def check_state(self, path: str):
    """Rejects a saved state that does not exist, or does not fit this server."""
    saved = self.states.describe(path)
    self.check_base(saved['base_model'])
    self.learning.check_rank(saved['rank'])

  def read_forward_backward(self, fields: Mapping[str, Any]) -> messages.ForwardBackward:
    """Reads the result of messages.parse and checks its data; thread-safe."""
    request = messages.read_forward_backward(fields)
    shape, size = self.learning.shape, self.learning.config.vocab_size
    data_lib.check(request.data, size, shape.row_tokens)
    return request

  def forward_backward(self, request: messages.ForwardBackward) -> dict[str, Any]:
    """Computes log-probs and a loss, and adds its gradient unless it is forward only."""
    loss = self.losses.find(request.loss, request.options)
    for number, datum in enumerate(request.data):
      losses_lib.check_columns(loss, number, datum.columns)

    def compute(run: learning.TrainingRun):
      if request.forward_only:
        steps = self.learning.score(lora.take(run.state.params), request.data, loss)
      else:
        steps = self.learning.differentiate(run, request.data, loss)
      result = yield from steps
      columns = {'logprobs': result.logprobs, 'elementwise_loss': result.losses}
      count = float(sum(x.size for x in result.logprobs))
      metrics = {'loss:sum': result.loss, 'num_tokens:sum': count}
      return messages.write_forward_backward(columns, metrics)

    return self.begin(request, compute, request.body)

  def optim_step(self, request: wire.OptimStep) -> dict[str, Any]:
    """Makes a step of Adam."""
    adam = request.adam_params.model_dump(exclude={'type'})

    def compute(run: learning.TrainingRun) -> dict:
      metrics = self.learning.optim_step(run, adam)
      return {'metrics': {f'{name}:mean': x for name, x in metrics.items()}}

    return self.begin(request, compute)

  def save(self, request: wire.SaveWeights | wire.SaveForSampler) -> dict[str, Any]:
    """Saves a run's state, or only its weights for sampling, under a name."""
    name = states.check_name(request.path or '', 'path')
    metadata = self.find(request.model_id).metadata | (request.user_metadata or {})

    def compute(run: learning.TrainingRun) -> dict:
      moments, kind, answer = None, 'sampler_weights', 'save_weights_for_sampler'
      overwrite = False
      if isinstance(request, wire.SaveWeights):
        moments, overwrite = self.learning.get_moments(run), request.overwrite
        kind, answer = 'weights', 'save_weights'
      info: dict[str, Any] = {'user_metadata': metadata or None}
      if request.ttl_seconds:
        ends = datetime.timedelta(seconds=min(request.ttl_seconds, 10**9))
        info['expires_at'] = (datetime.datetime.now(datetime.UTC) + ends).isoformat()
      adapter = self.learning.trim(self.learning.get_adapter(run), run.shape)
      path = f'{states.SCHEME}{request.model_id}/{kind}/{name}'
      self.states.save(path, run.shape, adapter, moments, info, overwrite=overwrite)
      return {'path': path, 'type': answer}

    return self.begin(request, compute)

  def load(self, request: wire.LoadWeights) -> dict[str, Any]:
    """Loads a state into a run, or begins a run with it."""
    self.check_base(request.base_model)
    self.check_state(request.path)
    answer = {'path': request.path, 'type': 'load_weights'}

    def make() -> learning.TrainingRun:
      loaded = self.states.load(request.path, optimizer=request.optimizer)
      return self.learning.resume(*loaded)

    if request.session_id is not None:
      return self._begin_run(request, make, **answer)
    assert request.model_id is not None
    training = self.find(request.model_id)

    def compute(run: learning.TrainingRun) -> dict:
      new = make()
      if new.shape.rank != run.shape.rank or new.shape.targets != run.shape.targets:
        raise ValueError(
          f'the state has rank {new.shape.rank} of {", ".join(new.shape.targets)}, and '
          'this run another; create_training_client_from_state makes one of its own'
        )
      training.run = new
      return answer

    return self.begin(request, compute)

  def begin(
    self,
    request: Any,
    compute: Callable[[learning.TrainingRun], Any],
    body: bytes = b'',
  ) -> dict[str, Any]:
    """Begins an operation, which is computed in the run's turn."""
    run_id, seq_id = request.model_id, request.seq_id
    training = self.find(run_id)

    def call() -> Any:
      if training.run is None:
        raise ValueError(f'the training run {run_id} could not be made')
      return compute(training.run)

    def start() -> Awaitable[Any]:
      self.worker.check()
      training.order.check(seq_id)
      self._bytes.take(run_id, len(body), _MOST_BYTES, 'bytes wait already')
      training.last_time = _now()
      return training.order.run(seq_id, lambda: self.worker.run(run_id, call))

    request_id = f'{run_id}:{seq_id}'
    if task := self.results.begin(request_id, body or request, start):
      task.add_done_callback(lambda _: self._bytes.give(run_id, len(body)))
    return {'request_id': request_id, 'model_id': run_id}

  def skip(self, run_id: Any, seq_id: Any):
    """Tells a run's later operations not to wait for a refused one."""
    training = self.by_id.get(run_id) if isinstance(run_id, str) else None
    if training and type(seq_id) is int:
      training.order.skip(seq_id)

  def _make_shape(self, lora: wire.LoraConfig) -> learning.Shape:
    targets = tuple(
      name
      for name in self.learning.targets
      if (lora.train_attn if name in ATTENTION else lora.train_mlp)
    )
    if not targets:
      text = 'train_attn and train_mlp leave no projection of this model that is trained'
      raise http.RefusedError(400, f'{text}; {UNEMBED}')
    seed = secrets.randbits(31) if lora.seed is None else lora.seed
    return learning.Shape(lora.rank, seed, targets)

  def _find_place(self) -> str | None:
    """Finds a run to replace, if there are too many; raises if none is idle."""
    if len(self.by_id) < self._most:
      return None
    oldest = min(self.by_id, key=lambda k: self.sessions[self.by_id[k].session])
    if not self._is_idle(self.by_id[oldest].session):
      text = f'there are {len(self.by_id)} training runs, and --clients allows no more'
      raise http.RefusedError(429, text)
    return oldest

  def _is_idle(self, session_id: str) -> bool:
    return time.monotonic() - self.sessions[session_id] > _IDLE_SECONDS
