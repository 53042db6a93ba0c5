"""A resources server written with nemo_gym, as its package's authors would write one.

python nemo_gym_server.py NUMBER     NUMBER is that of a listening socket
"""

import socket
import sys

import fastapi  # pyright: ignore[reportMissingImports]
from nemo_gym import base_resources_server as base  # pyright: ignore[reportMissingImports]
from nemo_gym import config_types, server_utils  # pyright: ignore[reportMissingImports]
import omegaconf  # pyright: ignore[reportMissingImports]
import pydantic
import uvicorn


class Count(pydantic.BaseModel):
  count: int


class Seed(base.BaseSeedSessionRequest):
  initial_count: int


class Verify(base.BaseVerifyRequest):
  expected_count: int


class Verdict(base.BaseVerifyResponse):
  calls: int
  said: str


class Counter(base.SimpleResourcesServer):
  """Counts in each session; the reward is 1 if the last count is the expected one."""

  config: base.BaseResourcesServerConfig
  counts: dict[str, int] = {}

  def setup_webserver(self) -> fastapi.FastAPI:
    app = super().setup_webserver()
    app.post('/increment')(self.increment)
    app.post('/fail')(self.fail)
    return app

  async def seed_session(
    self, request: fastapi.Request, body: Seed
  ) -> base.BaseSeedSessionResponse:
    self.counts[request.session[server_utils.SESSION_ID_KEY]] = body.initial_count
    return base.BaseSeedSessionResponse()

  async def increment(self, request: fastapi.Request, body: Count) -> Count:
    session = request.session[server_utils.SESSION_ID_KEY]
    self.counts[session] += body.count
    return Count(count=self.counts[session])

  async def fail(self):
    raise fastapi.HTTPException(422, 'this never works')

  async def verify(self, request: fastapi.Request, body: Verify) -> Verdict:
    output = body.response.output
    texts = [item.content[0].text for item in output if item.type == 'message']
    return Verdict(
      **body.model_dump(),
      reward=self.counts[request.session[server_utils.SESSION_ID_KEY]]
      == body.expected_count,
      calls=sum(item.type == 'function_call' for item in output),
      said=' | '.join(texts),
    )


if __name__ == '__main__':
  served = Counter(
    config=base.BaseResourcesServerConfig(
      name='counter', host='127.0.0.1', port=1, entrypoint='app.py'
    ),
    server_client=server_utils.ServerClient(
      head_server_config=config_types.BaseServerConfig(host='127.0.0.1', port=11000),
      global_config_dict=omegaconf.OmegaConf.create({}),
    ),
  )
  listener = socket.socket(fileno=int(sys.argv[1]))
  uvicorn.Server(uvicorn.Config(served.setup_webserver(), log_level='warning')).run(
    sockets=[listener]
  )
