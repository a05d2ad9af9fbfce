# syntax=docker/dockerfile:1
# Two images from one wheel:
#   docker build --target proxy    -t countersign/proxy .
#   docker build --target verifier -t countersign/verifier .
# A digest pins a base to the bytes that you looked at:
#   --build-arg PYTHON_DIGEST=sha256:… --build-arg VLLM_DIGEST=sha256:…

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG PYTHON_DIGEST=
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0
ARG VLLM_DIGEST=

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY countersign countersign
COPY policies policies
COPY proxy proxy
COPY verifier_pool verifier_pool
COPY benchmarks benchmarks
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS dependencies
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/countersign \
 && wheel="$(echo /wheels/countersign-*.whl)" \
 && /opt/countersign/bin/pip install --no-cache-dir "${wheel}[embedded]"

# Serves the API, or is any worker that needs no engine: `worker --only verify`, `--only webhooks`, or a reference of
# kind vllm_http. Those want a health check of their own, as in compose.yaml. No torch, no compiler, no source.
FROM ${PYTHON_IMAGE}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS proxy
LABEL org.opencontainers.image.title="countersign proxy" \
      org.opencontainers.image.description="An OpenAI-compatible proxy that proves which model answered" \
      org.opencontainers.image.licenses="Apache-2.0"
# Without client keys in the settings the proxy refuses an address that other machines reach.
ENV PATH=/opt/countersign/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    COUNTERSIGN_HOST=0.0.0.0 \
    COUNTERSIGN_CONFIG=/etc/countersign/countersign.yaml
RUN groupadd --gid 10001 countersign \
 && useradd --uid 10001 --gid 10001 --create-home countersign
COPY --from=dependencies /opt/countersign /opt/countersign
USER 10001:10001
WORKDIR /home/countersign
EXPOSE 8700
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen(f\"http://127.0.0.1:{os.environ.get('COUNTERSIGN_PORT', 8700)}/healthz\", timeout=4)"]
ENTRYPOINT ["countersign"]
CMD ["serve"]

# Replays, on a GPU; `worker` alone also judges. vLLM, torch and CUDA come from the base, at the versions it was built with.
FROM ${VLLM_IMAGE}${VLLM_DIGEST:+@${VLLM_DIGEST}} AS verifier
LABEL org.opencontainers.image.title="countersign verifier" \
      org.opencontainers.image.description="The trusted engine that replays answers" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PIP_BREAK_SYSTEM_PACKAGES=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    VLLM_NO_USAGE_STATS=1 \
    COUNTERSIGN_CONFIG=/etc/countersign/countersign.yaml
COPY --from=wheel /wheels /wheels
# The extra makes pip keep to what the installed vLLM asks for; it never installs another one.
# hadolint ignore=DL3013
RUN wheel="$(echo /wheels/countersign-*.whl)" \
 && before="$(python3 -c 'import importlib.metadata as m; print(m.version("vllm"), m.version("torch"))')" \
 && python3 -m pip install --no-cache-dir "${wheel}[vllm]" \
 && after="$(python3 -c 'import importlib.metadata as m; print(m.version("vllm"), m.version("torch"))')" \
 && test "${before}" = "${after}"
# Engines look their user up by name, so it needs an entry. A volume over its cache becomes the user's own.
RUN groupadd --gid 10001 countersign \
 && useradd --uid 10001 --gid 10001 --create-home countersign \
 && install --directory --owner=10001 --group=10001 /home/countersign/.cache
USER 10001:10001
WORKDIR /home/countersign
# Loading and compiling may take half an hour. A worker with other arguments wants them here, too.
HEALTHCHECK --interval=30s --timeout=20s --start-period=30m \
    CMD ["python3", "-m", "verifier_pool.ready", "--alive"]
ENTRYPOINT ["countersign"]
CMD ["worker"]
