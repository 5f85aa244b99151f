# syntax=docker/dockerfile:1
# One image for every role: `docker run … magnetar standalone|metadata|bookie|broker`.
# Everything that is installed is named, with its hash, in requirements.lock, and what compiles the hot paths (setup.py) in
# requirements-build.lock (`make lock` renews both). Both have the hashes of all architectures, so
# `docker buildx build --platform linux/amd64,linux/arm64 .` makes an image for two of them. The first stage is the larger image because that has a C compiler.
FROM python:3.13 AS build
WORKDIR /src
COPY requirements.lock requirements-build.lock ./
RUN pip wheel --no-cache-dir --require-hashes --no-deps --wheel-dir /wheels -r requirements.lock \
    && pip install --no-cache-dir --require-hashes --no-deps -r requirements-build.lock
COPY . .
RUN MAGNETAR_COMPILE=1 pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
LABEL org.opencontainers.image.title="Magnetar" org.opencontainers.image.licenses="Apache-2.0"
# The wheels are mounted: a layer with them would stay in the image.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-deps /wheels/*.whl \
    && useradd --system --create-home --uid 10001 magnetar \
    && install -d -o magnetar -g magnetar /data \
    && install -d -m 700 -o magnetar -g magnetar /security /authority
USER magnetar
WORKDIR /data
VOLUME /data
EXPOSE 7650 6650 8080
# Every role answers probes there; `magnetar health` asks them.
ENV MAGNETAR_HEALTH=127.0.0.1:7670
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["magnetar", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["magnetar"]
# It serves its own container alone. For other machines: --host 0.0.0.0 and --security FILE (docs/security.md).
CMD ["standalone", "--data", "/data"]
