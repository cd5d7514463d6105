# eagle-serve on a CPU, with the embedded target and head:
#
#   docker build -t eagle-serve .
#   docker run --rm -p 8000:8000 --stop-timeout 45 eagle-serve
#
# More: docs/serving.md

FROM debian:bookworm-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/eagle-mlx
WORKDIR /src

COPY . .
# pip keeps what it downloads, so that a change of the code downloads nothing again.
RUN --mount=type=cache,target=/root/.cache/pip /opt/eagle-mlx/bin/pip install '.[serve]'


FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends libopenblas0-pthread python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --create-home eagle \
 && install -d -o eagle -g eagle /models
COPY --from=build /opt/eagle-mlx /opt/eagle-mlx
COPY checkpoints /srv/eagle-mlx/checkpoints

# Models from the hub are kept in /models; mount a volume there.
ENV PATH=/opt/eagle-mlx/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
WORKDIR /srv/eagle-mlx
USER 10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=5m \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["eagle-serve", "--host", "0.0.0.0"]
