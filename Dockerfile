# syntax=docker/dockerfile:1
# Three images. `serve`, the default, is the endpoint alone, without torch: ONNX Runtime computes. It is what to put on the internet:
#
#   docker build -t attention-zoo .
#   docker run -p 8000:8000 -e MLFLOW_TRACKING_URI=http://tracking:5000 -e SERVE_MODEL_URI=models:/digits@champion attention-zoo
#   docker run -p 8000:8000 -v "$PWD/my_bundle:/bundle:ro" -e SERVE_MODEL_URI=/bundle attention-zoo
#   docker run -p 8000:8000 --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges ... attention-zoo
#
# With a model baked in, for places without a network. The build proves that it answers its golden example as it did when saved.
# The bundle is copied into bundles/ first: .dockerignore lets nothing else into a build.
#
#   docker build --build-arg MODEL=bundles/mine -t attention-zoo-mine .
#
# `serve-torch` has the engines eager and compile too, for GPUs and for bundles without a model.onnx (or make it one:
# `python -m serve.equip`). torch.compile wants a compiler, and to load what that made: APT_PACKAGES=g++, --tmpfs /tmp:exec.
#
#   docker build --target serve-torch -t attention-zoo-torch .
#   docker run --gpus all -p 8000:8000 -e MLFLOW_TRACKING_URI=http://tracking:5000 attention-zoo-torch
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
# A registry of Databricks, or a database as MLFLOW_TRACKING_URI: --build-arg LEAVE_OUT="pip setuptools" (or serve-torch).

FROM python:3.11-slim-bookworm AS base
# 10001: the one user of all images. HOME: the one place that all may write.
RUN groupadd --gid 10001 zoo \
    && useradd --uid 10001 --gid zoo --no-create-home --shell /usr/sbin/nologin zoo
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

FROM base AS environment
RUN python -m venv /opt/venv
WORKDIR /opt/attention-zoo
COPY pyproject.toml constraints.txt ./

# What serve-torch and train need, in one layer that they share and that a change of code leaves alone: several GB.
FROM environment AS dependencies
ARG PIP_ARGS=""
ARG EXTRA_PACKAGES=""
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['serve'], sep='\n')" > requirements.txt \
    && pip install $PIP_ARGS -c constraints.txt -r requirements.txt $EXTRA_PACKAGES

# The packages themselves, installed aside.
FROM environment AS packages
ARG PIP_ARGS=""
COPY README.md ./
COPY zoo zoo
COPY serve serve
RUN pip install $PIP_ARGS --no-deps --no-compile --prefix /packages/serve .
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

# The bundle to bake in, or an empty folder. (COPY must have something to copy; the build of a plain image has no bundle.)
FROM base AS bundle
ARG MODEL=""
WORKDIR /baked
COPY pyproject.toml ${MODEL:-pyproject.toml} ./
RUN rm pyproject.toml \
    && if [ -n "$MODEL" ] && ! [ -f card.json ]; then \
         echo "error: MODEL=$MODEL is no bundle: no card.json in it" >&2; exit 2; \
       fi \
    && chmod -R a+rX .

FROM dependencies AS serve-torch
ARG APT_PACKAGES=""
RUN if [ -n "$APT_PACKAGES" ]; then \
      apt-get update && apt-get install -y --no-install-recommends $APT_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi
ARG MODEL=""
COPY --from=packages /packages/serve /opt/venv
COPY --from=bundle /baked /bundle
ENV USER=zoo \
    SERVE_HOST=0.0.0.0 \
    SERVE_PORT=8000 \
    SERVE_MODEL_URI=${MODEL:+/bundle}
ENV SERVE_MODEL_URI=${SERVE_MODEL_URI:-models:/digits@champion}
WORKDIR /tmp
USER 10001:10001
RUN --mount=type=bind,source=deploy/serve/prove.py,target=/tmp/prove.py [ -z "$MODEL" ] || python /tmp/prove.py "$MODEL"
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['SERVE_PORT'] + '/ready', timeout=4)"]
ENTRYPOINT ["python", "-m", "serve"]

# The environment of `serve`: what pyproject.toml lists but for torch and what is built on it. Then made small: see deploy/serve/slim.py.
# LEAVE_OUT: what MLflow installs for Databricks, for git and for being itself the owner of a database.
FROM environment AS slim
ARG PIP_ARGS=""
ARG EXTRA_PACKAGES=""
RUN apt-get update && apt-get install -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
RUN python -c "import re, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*(r for r in p['dependencies'] + p['optional-dependencies']['serve'] \
if re.match(r'[\w-]+', r)[0] not in ('torch', 'torchvision', 'timm', 'einops')), sep='\n')" > requirements.txt \
    && pip install $PIP_ARGS --no-compile -c constraints.txt -r requirements.txt $EXTRA_PACKAGES
ARG LEAVE_OUT="pip setuptools sqlalchemy alembic Mako databricks-sdk google-auth pyasn1-modules pyasn1 cryptography cffi pycparser GitPython gitdb smmap"
COPY deploy/serve/slim.py ./
COPY --from=packages /packages/serve /opt/venv
# strip: wheels whose libraries have still their symbols (uvloop: 12 of 13 MB); not those that auditwheel has rewritten.
RUN find /opt/venv -name '*.so' ! -path '*/numpy/*' ! -path '*/PIL/*' ! -path '*.libs/*' -exec strip --strip-unneeded {} + \
    && python slim.py /opt/bytecode $LEAVE_OUT

FROM base AS serve
ARG MODEL=""
COPY --from=slim /opt/venv /opt/venv
COPY --from=slim /opt/bytecode /opt/bytecode
COPY --from=bundle /baked /bundle
ENV PYTHONPYCACHEPREFIX=/opt/bytecode \
    SERVE_HOST=0.0.0.0 \
    SERVE_PORT=8000 \
    SERVE_MODEL_URI=${MODEL:+/bundle}
ENV SERVE_MODEL_URI=${SERVE_MODEL_URI:-models:/digits@champion}
WORKDIR /tmp
USER 10001:10001
RUN --mount=type=bind,source=deploy/serve/prove.py,target=/tmp/prove.py [ -z "$MODEL" ] || python /tmp/prove.py "$MODEL"
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['SERVE_PORT'] + '/ready', timeout=4)"]
ARG VERSION=""
ARG REVISION=""
LABEL org.opencontainers.image.title="attention-zoo" \
      org.opencontainers.image.description="An endpoint for Vision Transformers with attention of your own, on ONNX Runtime" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
ENTRYPOINT ["python", "-m", "serve"]
