# syntax=docker/dockerfile:1
# Two images on the same dependencies. `serve`, the endpoint alone (the packages zoo and serve, no trainer), is the default:
#
#   docker build -t attention-zoo .
#   docker run -p 8000:8000 -e MLFLOW_TRACKING_URI=http://tracking:5000 attention-zoo
#   docker run -p 8000:8000 -v "$PWD/my_bundle:/bundle:ro" -e SERVE_MODEL_URI=/bundle attention-zoo
#
# `train` is the trainer; it starts one process for each GPU that it is given, one on a machine without any, and takes the
# same words as `python -m train`. It runs as user 10001 in /training, where it leaves runs/ and mlflow.db; a folder of yours
# that is mounted there must be writable for that user, or say --user "$(id -u):$(id -g)":
#
#   docker build --target train -t attention-zoo-train .
#   docker run --rm attention-zoo-train digits --dry-run
#   docker run --gpus all --shm-size 8g -v "$PWD/work:/training" -v /my/images:/data:ro attention-zoo-train --name mine --data.root /data
#
# --shm-size (or --ipc=host): loader processes and NCCL share memory, of which a container has 64 MB by itself. On several
# machines the ranks must reach one another at any port: --network host, and for each machine its number and machine 0's
# address; more in deploy/launch, the entry point. Another command instead: --entrypoint python, or a pod's `command`.
#
#   docker run --gpus all --ipc=host --network host -e PET_NNODES=2 -e PET_NODE_RANK=0 -e PET_MASTER_ADDR=10.0.0.1 \
#     -v /shared/work:/training attention-zoo-train digits --tracking.uri http://tracking:5000 --resume auto
#
# Small: torch's default wheels bring CUDA, several GB. For CPUs alone, name torch's CPU wheel index:
#   docker build --build-arg PIP_ARGS="--extra-index-url URL" ...        (it stays in the image's history: no password in it)
# Artifacts in S3: --build-arg EXTRA_PACKAGES=boto3; every SERVE_* variable is explained by `python -m serve --help`.

FROM python:3.11-slim-bookworm AS dependencies
ARG PIP_ARGS=""
ARG EXTRA_PACKAGES=""
# 10001: the one user of both images. HOME: the one place that both may write.
RUN groupadd --gid 10001 zoo \
    && useradd --uid 10001 --gid zoo --no-create-home --shell /usr/sbin/nologin zoo \
    && python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /opt/attention-zoo
COPY pyproject.toml constraints.txt ./
# What both need, in one layer that they share and that a change of code leaves alone: several GB.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['serve'], sep='\n')" > requirements.txt \
    && pip install $PIP_ARGS -c constraints.txt -r requirements.txt $EXTRA_PACKAGES

# The packages themselves, installed aside.
FROM dependencies AS packages
ARG PIP_ARGS=""
COPY README.md ./
COPY zoo zoo
COPY serve serve
RUN pip install $PIP_ARGS --no-deps --prefix /packages/serve .
COPY train train
RUN pip install $PIP_ARGS --no-deps --prefix /packages/train .

FROM dependencies AS train
ARG PIP_ARGS=""
RUN python -c "import tomllib; e = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
print(*(r for r in e['train'] + e['postgres'] if not r.startswith('attention-zoo')), sep='\n')" > requirements.txt \
    && pip install $PIP_ARGS -c constraints.txt -r requirements.txt \
    && install -d -o 10001 -g 10001 /training
COPY accelerate_config.yaml deploy/launch ./
COPY --from=packages /packages/train /opt/venv
# USER: MLflow and torch ask for a name, which a user given by --user has not. There is no git, nor need of one.
ENV USER=zoo \
    GIT_PYTHON_REFRESH=quiet
WORKDIR /training
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/attention-zoo/launch"]

FROM dependencies AS serve
COPY --from=packages /packages/serve /opt/venv
ENV SERVE_MODEL_URI=models:/digits@champion \
    SERVE_HOST=0.0.0.0 \
    SERVE_PORT=8000
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['SERVE_PORT'] + '/ready', timeout=4)"]
ENTRYPOINT ["python", "-m", "serve"]
