# An image of outsize with CPU or CUDA PyTorch, for the pods and tasks that `outsize emit` starts.
#
#     docker build -t outsize .
#     docker build -t outsize --build-arg BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime .
#
# The script and its checkpoints are mounted, at /work.
ARG BASE=python:3.11-slim

FROM ${BASE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
COPY --from=wheel /wheels /wheels
RUN python -m pip install --no-cache-dir /wheels/*.whl && rm -r /wheels && useradd --create-home --uid 1000 runner
USER 1000
WORKDIR /work
ENTRYPOINT []
CMD ["outsize", "doctor"]
