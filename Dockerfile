# syntax=docker/dockerfile:1
# The endpoint alone: the packages zoo and serve with their dependencies, no trainer.
#
#   docker build -t attention-zoo .
#   docker run -p 8000:8000 -e MLFLOW_TRACKING_URI=http://tracking:5000 attention-zoo
#   docker run -p 8000:8000 -v "$PWD/my_bundle:/bundle:ro" -e SERVE_MODEL_URI=/bundle attention-zoo
#
# Small: torch's default wheels bring CUDA, several GB. For CPUs alone, name torch's CPU wheel index:
#   docker build --build-arg PIP_ARGS="--extra-index-url URL" ...
# Artifacts in S3: --build-arg EXTRA_PACKAGES=boto3; every SERVE_* variable is explained by `python -m serve --help`.

FROM python:3.11-slim-bookworm AS build
ARG PIP_ARGS=""
ARG EXTRA_PACKAGES=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# The dependencies first, in a layer of their own that a change of code leaves alone.
RUN /opt/venv/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['serve'], sep='\n')" > requirements.txt \
    && /opt/venv/bin/pip install --no-cache-dir $PIP_ARGS -c constraints.txt -r requirements.txt $EXTRA_PACKAGES
COPY README.md ./
COPY zoo zoo
COPY serve serve
RUN /opt/venv/bin/pip install --no-cache-dir $PIP_ARGS --no-deps .

FROM python:3.11-slim-bookworm
RUN groupadd --gid 10001 serve \
    && useradd --uid 10001 --gid serve --no-create-home --shell /usr/sbin/nologin serve
COPY --from=build /opt/venv /opt/venv
# HOME: the one place that may be written; nothing of the image needs to be.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    SERVE_MODEL_URI=models:/digits@champion \
    SERVE_HOST=0.0.0.0 \
    SERVE_PORT=8000
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['SERVE_PORT'] + '/ready', timeout=4)"]
ENTRYPOINT ["python", "-m", "serve"]
