# The service. CPU: docker build -t gpq .   GPU: the same image, run with --gpus all and --device cuda.
# Without torch, for --model encoder.onnx: docker build --build-arg EXTRAS=search,serve -t gpq .
FROM python:3.12-slim AS build
RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY gpq_faiss gpq_faiss
COPY cli cli
ARG EXTRAS=train,serve
# The versions of the lock, without what only development needs.
RUN uv venv /opt/gpq && \
    VIRTUAL_ENV=/opt/gpq uv pip install --no-cache --constraint requirements.lock ".[$EXTRAS]"

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 gpq
COPY --from=build /opt/gpq /opt/gpq
ENV PATH=/opt/gpq/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /data
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
# GPQ_SERVE_TOKEN must be set: the address can be reached from outside.
ENTRYPOINT ["gpq", "serve", "--host", "0.0.0.0"]
CMD ["index.faiss", "--model", "model"]
