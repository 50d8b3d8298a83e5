"""Ask an endpoint about images: `Client` for programs, `python -m serve.client` for the command line.

Needs no torch, MLflow or FastAPI: `pip install 'attention-zoo[client]'` brings httpx and tqdm.
"""

from serve.client.backoff import Backoff as Backoff
from serve.client.connection import Client as Client
from serve.client.errors import ClientError as ClientError
