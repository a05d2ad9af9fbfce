# syntax=docker/dockerfile:1
# Two images from one wheel:
#   docker build --target proxy    -t countersign/proxy .
#   docker build --target verifier -t countersign/verifier .

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE countersign.py ./
COPY policies policies
COPY proxy proxy
COPY verifier_pool verifier_pool
COPY benchmarks benchmarks
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS dependencies
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/countersign \
 && wheel="$(echo /wheels/countersign-*.whl)" \
 && /opt/countersign/bin/pip install --no-cache-dir "${wheel}[embedded]"

# Serves the API, or is any worker that needs no engine: `worker --only verify`, `--only webhooks`, or a reference of
# kind vllm_http (run those with --no-healthcheck). No torch, no compiler, no source.
FROM ${PYTHON_IMAGE} AS proxy
ENV PATH=/opt/countersign/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    COUNTERSIGN_CONFIG=/etc/countersign/countersign.yaml
RUN groupadd --gid 10001 countersign \
 && useradd --uid 10001 --gid 10001 --create-home countersign
COPY --from=dependencies /opt/countersign /opt/countersign
USER 10001:10001
WORKDIR /home/countersign
EXPOSE 8700
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8700/healthz', timeout=4)"]
ENTRYPOINT ["countersign"]
CMD ["serve"]

# Replays, on a GPU; `worker` alone also judges. vLLM, torch and CUDA come from the base, at the versions it was built with.
FROM ${VLLM_IMAGE} AS verifier
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
# Engines look their user up by name, so it needs an entry.
RUN groupadd --gid 10001 countersign \
 && useradd --uid 10001 --gid 10001 --create-home countersign
USER 10001:10001
WORKDIR /home/countersign
ENTRYPOINT ["countersign"]
CMD ["worker"]
